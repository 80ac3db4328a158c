"""Buffers of modules as the source shows them: which there are, what they weigh, and whether forward changes them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import partial

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.interpreter.attributes import base_names, bases_of, family
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    Partial,
    ProjectClass,
    SequenceValue,
    TensorSize,
    Unknown,
    Value,
    constant,
    options_of,
)
from ddpdoctor.source.script.module import Module, descend, once_each
from ddpdoctor.source.vocabulary import (
    BUFFERLESS_MODULE,
    CONTAINER_MODULES,
    MODEL_LIBRARY,
    MODELS_WITH_STATISTICS,
    STATEFUL_BUFFER_MODULES,
)

MAXIMUM_PARTS = 2_000
MAXIMUM_CHOICES = 3
"""One inside of the other: the alternatives of a part may hold what they are parts of."""
# Packages of which a name without a call is a function or a class, not a module of torch.
_KNOWN_FUNCTIONS = sys.stdlib_module_names | {"builtins", "torch", "torchvision", "numpy", "einops"}
Registration = tuple[str, ast.Call, Location]
"""Name of a buffer, and the call of ``register_buffer`` with its place."""


class Buffers(msgspec.Struct, frozen=True, kw_only=True):
    """The buffers of a module and everything in it."""

    names: tuple[str, ...]
    size_bytes: int
    """Sum of the sizes that are known."""
    exact: bool
    """All sizes are known."""
    locations: tuple[Location, ...]
    """Where they are registered."""


def has_buffers(machine: Machine, module: Value, depth: int = 0) -> bool:
    """Return whether a module certainly holds buffers: of one that a setting chooses, every alternative does."""
    holds = partial(has_buffers, machine, depth=depth + 1)
    return any(
        (isinstance(part, ExternalObject) and _holds_statistics(machine, part))
        or (isinstance(part, OneOf) and depth < MAXIMUM_CHOICES and all(holds(option) for option in part.options))
        or (
            isinstance(part, Instance)
            and any(_is_certain(machine, part, one) for one in _registrations(machine, part.cls))
        )
        for part in parts_of_module(machine, module)
    )


def _is_certain(machine: Machine, part: Instance, registration: Registration) -> bool:
    """Return whether no condition decides about a buffer: causal masks are for where there is no flash attention."""
    module = machine.script.module(part.cls.module)
    return module is None or not any(isinstance(around, ast.If) for around in module.in_function(registration[1]))


def _holds_statistics(machine: Machine, part: ExternalObject) -> bool:
    """Return whether an object has running statistics: by default those of BatchNorm, not of InstanceNorm."""
    if part.name.startswith(MODEL_LIBRARY):
        return MODELS_WITH_STATISTICS.match(part.name) is not None
    last = part.name.rpartition(".")[2]
    made = machine.object(part)
    tracks = made.argument("track_running_stats", 4) if made is not None else None
    if "InstanceNorm" in last:
        return tracks is not None and constant(tracks) is True
    return STATEFUL_BUFFER_MODULES.search(last) is not None and (tracks is None or constant(tracks) is not False)


def constant_buffers(machine: Machine, module: Value) -> Buffers | None:
    """Return the buffers of a module when all of it can be read and only ``__init__`` sets them; otherwise None."""
    names: list[str] = []
    places: list[Location] = []
    size_bytes, exact = 0, True
    for part in parts_of_module(machine, module, registered=True):
        if isinstance(part, SequenceValue):
            exact = False  # Any number of blocks, of which one was looked at.
            continue
        if not isinstance(part, Instance):
            if not _is_plain(part):
                return None
            continue
        if not _readable_bases(machine, part.cls):
            return None
        own = _registrations(machine, part.cls)
        if any(_changes(machine, part.cls, name) for name, _, _ in own):
            return None
        for name, call, where in own:
            names.append(name)
            places.append(where)
            size = machine.store.get(part.number, f"buffer {name}")
            size_bytes += size.size_bytes if isinstance(size, TensorSize) else 0
            exact = exact and isinstance(size, TensorSize)
            if not (call.args and isinstance(call.args[0], ast.Constant)):
                return None
    if not names:
        return None
    return Buffers(names=tuple(names), size_bytes=size_bytes, exact=exact, locations=tuple(places))


def note_buffer(machine: Machine, receiver: Value, given: Arguments) -> None:
    """Keep the value that ``register_buffer`` was given, under the object and the buffer's name."""
    name = constant(given.value("name", 0) or Const(None))
    value = given.value("tensor", 1)
    for option in options_of(receiver):
        if isinstance(option, Instance) and isinstance(name, str) and value is not None:
            machine.assign(option.number, f"buffer {name}", value)
            machine.assign(option.number, name, value)


def parts_of_module(machine: Machine, module: Value, *, registered: bool = False) -> Iterator[Value]:
    """Yield a module and everything reachable from its attributes, once each; ``registered`` leaves out what torch does
    not take for its parts: settings, with what they hold, and numbers.
    """
    waiting, seen, count = [module], set[int](), 0
    while waiting and count < MAXIMUM_PARTS:
        value = waiting.pop()
        count += 1
        if isinstance(value, SequenceValue):
            waiting.extend(value.values)
            if value.open:
                yield value
            continue
        if isinstance(value, DictValue):
            waiting.extend(entry for _, entry in value.entries)
            continue
        if isinstance(value, OneOf) or not isinstance(value, (Instance, ExternalObject)):
            yield value
            continue
        if value.number in seen:
            continue
        seen.add(value.number)
        if registered and isinstance(value, Instance) and not any(bases_of(machine, value.cls)):
            continue
        yield value
        if isinstance(value, Instance):
            names = machine.store.names(value.number)
            attributes = [
                name
                for name in names
                if not name.startswith(("buffer ", "__"))
                and f"buffer {name}" not in names
                and not (registered and _is_number(machine, value, name))
            ]
            waiting.extend(entry for name in attributes if (entry := machine.store.get(value.number, name)) is not None)
        elif value.name in CONTAINER_MODULES:
            made = machine.object(value)
            waiting.extend(made.positional if made is not None else ())


def _is_number(machine: Machine, owner: Instance, name: str) -> bool:
    """Return whether an attribute of unknown value is no module, by what the class does with it: it never runs it.

    It does not call it, go over it, take one out of it, or hand it on to a function that may.
    """
    value = machine.store.get(owner.number, name)
    if not isinstance(value, (Unknown, External, BoundMethod)):
        return False
    return not any(_may_run(machine, (cls, name)) for cls in family(machine, owner.cls))


@once_each
def _may_run(machine: Machine, attribute: tuple[ProjectClass, str]) -> bool:
    cls, name = attribute
    module = machine.script.module(cls.module)
    for node in descend(cls.node) if module is not None else ():
        if isinstance(node, (ast.Subscript, ast.Attribute)) and _is_attribute(node.value, name):
            return True
        if isinstance(node, (ast.For, ast.comprehension)) and any(
            _is_attribute(one, name) for one in descend(node.iter)
        ):
            return True
        if isinstance(node, ast.Call) and module is not None:
            given = [*node.args, *(entry.value for entry in node.keywords)]
            full = module.resolve(node.func)
            hands_on = isinstance(node.func, ast.Name) or full.startswith("torch.utils.checkpoint.")
            plain = full.startswith(("builtins.", "math.", "torch.nn.", "torch.")) and not full.startswith(
                "torch.utils."
            )
            if _is_attribute(node.func, name) or (
                hands_on and not plain and any(_is_attribute(one, name) for one in given)
            ):
                return True
    return False


def _is_plain(part: Value) -> bool:
    if isinstance(part, ExternalObject):
        return BUFFERLESS_MODULE.match(part.name) is not None or part.name in CONTAINER_MODULES
    if isinstance(part, OneOf):
        return all(_is_plain(option) for option in part.options)
    if isinstance(part, External):
        return part.name.partition(".")[0] in _KNOWN_FUNCTIONS
    return isinstance(part, (Const, TensorSize, Function, Partial, ProjectClass)) or (
        isinstance(part, BoundMethod)
        and isinstance(part.receiver, ExternalObject)
        and part.receiver.name == "argparse.Namespace"
    )


def _readable_bases(machine: Machine, cls: ProjectClass) -> bool:
    external = [base for base in bases_of(machine, cls) if not isinstance(base, ProjectClass)]
    names = base_names(machine, cls)
    return len(names) == len(external) and all(name in {"torch.nn.Module", "builtins.object"} for name in names)


@once_each
def _registrations(machine: Machine, cls: ProjectClass) -> tuple[Registration, ...]:
    return tuple(_registrations_in(machine, cls))


def _registrations_in(machine: Machine, cls: ProjectClass) -> Iterator[Registration]:
    for owner in family(machine, cls):
        module = machine.script.module(owner.module)
        if module is None or "register_buffer" not in module.text:
            continue
        for node in descend(owner.node):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "register_buffer"
            ):
                name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "?"
                yield str(name), node, module.location(node)


def _changes(machine: Machine, cls: ProjectClass, name: str) -> bool:
    """Return whether a method other than ``__init__`` assigns a buffer, calls an in-place method on it, or hands the
    module itself to what may do so.
    """
    for owner in family(machine, cls):
        module = machine.script.module(owner.module)
        for method in owner.node.body:
            is_method = isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name != "__init__"
            if is_method and any(_writes(node, name) or _hands_self_on(module, node) for node in descend(method)):
                return True
    return False


def _writes(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
        return True
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return _is_attribute(node.value, name)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        in_place = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
        return in_place and any(_is_attribute(inner, name) for inner in descend(node.func.value))
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"


def _hands_self_on(module: Module | None, node: ast.AST) -> bool:
    if module is None or not isinstance(node, ast.Call) or module.resolve(node.func).startswith("builtins."):
        return False
    return any(isinstance(one, ast.Name) and one.id == "self" for one in node.args)


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name
