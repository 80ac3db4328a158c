"""Attributes of values, and names that identify a rank where nothing else does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

import msgspec

from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    MAXIMUM_OPTIONS,
    RANKS,
    TASK_COUNT,
    UNIFORM,
    BoundMethod,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    OneOf,
    PerRank,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Unknown,
    Value,
    derived,
    is_varying,
    join,
    on_rank,
    per_rank,
    tags_of,
)
from ddpdoctor.source.libraries import rank_attributes
from ddpdoctor.source.ranks.ranks import FIRST, GLOBAL_RANK, LOCAL_RANK, WORLD_SIZE, guessed_per_rank
from ddpdoctor.source.script.module import descend, last_name
from ddpdoctor.source.vocabulary import (
    DATA_LOADER,
    DDP,
    DISTRIBUTION_ATTRIBUTES,
    DISTRIBUTION_NAMES,
    LOCAL_RANK_NAMES,
    RANK_NAMES,
    canonical,
    is_first_rank_name,
)

MAXIMUM_BASES = 20
_KEPT_ARGUMENTS = {
    (DDP, "module"): 0,
    (DATA_LOADER, "sampler"): 3,
    (DATA_LOADER, "batch_sampler"): 4,
    (DATA_LOADER, "dataset"): 0,
    ("torch.utils.data.BatchSampler", "sampler"): 0,
}
"""Positions of the arguments that objects of torch keep in an attribute of the same name, by their class and name."""
# The number of a cluster's tasks, called the number of ranks.
_TASKS_FOR_RANKS = Unknown(tags=frozenset({("world-size", 0), TASK_COUNT}))
_COUNTS = frozenset({"device-count", "world-size", "local-world-size", "task-count", "remainder", "quotient", "share"})


def attribute_of(machine: Machine, value: Value, name: str) -> Value:
    """Return the value of ``value.name``."""
    kind = value.__class__
    if name == "__name__" and isinstance(value, (ProjectClass, Function)):
        return Const(getattr(value.node, "name", "<lambda>"))
    if kind is External:
        return _member(value.name, name)  # type: ignore[union-attr]
    if (
        isinstance(value, BoundMethod)
        and isinstance(value.receiver, BoundMethod)
        and isinstance(value.receiver.receiver, BoundMethod)
    ):
        # Longer chains are not followed link by link: each link would make the next look-up slower.
        return BoundMethod(Unknown(is_varying(value), True, tags_of(value)), name)
    if kind is Unknown and name == "n" and value.tags:  # type: ignore[union-attr]
        return rank_attributes.count_of(machine, value) or BoundMethod(value, name)  # type: ignore[arg-type]
    if kind is Unknown or kind is BoundMethod or kind is Const:
        return BoundMethod(value, name)
    if kind is Instance:
        return _of_instance(machine, value, name)  # type: ignore[arg-type]
    if isinstance(value, ExternalObject):
        stored = machine.store.get(value.number, name)
        if stored is not None:
            return stored
        machine.missed.add(f".{name}")
        derived_class = machine.loader_classes.get(value.number)
        found = class_attribute(machine, derived_class, name) if derived_class is not None else None
        if isinstance(found, Function):
            return bound_to(found, value)
        return rank_attributes.attribute(value, name) or _of_built(machine, value, name)
    if isinstance(value, PerRank):
        return per_rank([attribute_of(machine, on_rank(value, rank), name) for rank in RANKS], value.guessed)
    if isinstance(value, OneOf):
        result: Value | None = None
        for option in value.options:
            if option != Const(None) and not _is_without(machine, option, name):
                result = join(result, attribute_of(machine, option, name), value.varying)
        if result.__class__ is Unknown and len(value.options) > MAXIMUM_OPTIONS:
            return BoundMethod(value, name)  # More methods than are kept apart: one of whichever object it is.
        return result or UNIFORM
    if isinstance(value, ProjectModule):
        return _of_module(machine, value, name)
    if isinstance(value, ProjectClass):
        found = class_attribute(machine, value, name)
        if isinstance(found, Function) and "classmethod" in _decorators(found):
            return bound_to(found, value)
        return found if found is not None else derived(())
    if isinstance(value, DictValue):
        return next((entry for key, entry in value.entries if key == name), BoundMethod(value, name))
    return BoundMethod(value, name)


def text_of(machine: Machine, value: Value) -> Value:
    """Return what a text holds that is made of a value: of an object of the project, what is in its attributes."""
    if isinstance(value, Instance):
        for name in ("__str__", "__repr__"):
            method = class_attribute(machine, value.cls, name) if name in machine.mentions.synchronising else None
            if isinstance(method, Function):
                return machine.call_function(method.node, bound_to(method, value))
        return derived(machine.store.held(value.number))
    if isinstance(value, OneOf) and any(isinstance(option, Instance) for option in value.options):
        return derived([text_of(machine, option) for option in value.options])
    return value


@lru_cache(maxsize=16_384)
def _member(owner: str, name: str) -> External:
    return External(canonical(f"{owner}.{name}"))


def guess_from_name(machine: Machine, name: str, value: Value, *, of_object: bool = False) -> Value:
    """Read a rank from a name of unknown origin.

    ``of_object`` is true for an attribute: loops over ranks have variables of such names, objects have not.
    """
    kind = value.__class__
    if isinstance(value, OneOf):  # What it is on every path that made its object is still a guess.
        guesses = [guess_from_name(machine, name, option, of_object=of_object) for option in value.options]
        unread = all(option.__class__ is BoundMethod for option in value.options)
        return guesses[0] if unread and all(guess == guesses[0] for guess in guesses) else value
    if kind is BoundMethod:
        receiver = value.receiver  # type: ignore[union-attr]
        known = receiver.__class__ is ExternalObject and (receiver.name.startswith("torch.") or "Mesh" in receiver.name)
        return value if known else _promised(name, machine.spawns, of_object) or _of_mode(machine, name) or value
    if not isinstance(value, Unknown):
        return value
    if TASK_COUNT in value.tags and value.tags <= _TASKS_FOR_RANKS.tags:
        return _TASKS_FOR_RANKS if name == "world_size" else value
    if value.varying and all(kind in _COUNTS for kind, _ in value.tags):
        return _rank_by_name(name, machine.spawns) or value  # Something like ``node * gpus + gpu``.
    if value.opaque or (of_object and name != "rank"):
        return _promised(name, machine.spawns, of_object) or _of_mode(machine, name) or value
    if not value.varying and not value.tags:
        return _distribution(name, of_object) or value
    return value


def _of_mode(machine: Machine, name: str) -> Value | None:
    """Return that a flag is set under which the script makes its group: a job with ranks is looked at."""
    return Const(True) if name in machine.mode_flags else None


@lru_cache(maxsize=16_384)
def _promised(name: str, spawns: bool, of_object: bool) -> Value | None:
    return _rank_by_name(name, spawns) or _distribution(name, of_object)


def _distribution(name: str, of_object: bool) -> Value | None:
    """Return the value of a switch or a number by its name, as in a job that has ranks."""
    if name == "world_size":
        return WORLD_SIZE
    return Const(True) if name in DISTRIBUTION_NAMES or (of_object and name in DISTRIBUTION_ATTRIBUTES) else None


@lru_cache(maxsize=16_384)
def _rank_by_name(name: str, spawns: bool) -> Value | None:
    """Return the rank that a name stands for; None when it stands for none."""
    if name in LOCAL_RANK_NAMES:
        return guessed_per_rank(GLOBAL_RANK if spawns else LOCAL_RANK)
    if name in RANK_NAMES:
        return guessed_per_rank(GLOBAL_RANK)
    if is_first_rank_name(name):
        return guessed_per_rank(FIRST)
    return None


def promised_by_name(machine: Machine, function: str) -> Value | None:
    """Return the result that the bare name of an unreadable function suggests."""
    asked = {"get_rank": "rank", "get_global_rank": "rank", "get_local_rank": "local_rank"}.get(function, function)
    return _promised(asked, machine.spawns, False)


def bases_of(machine: Machine, cls: ProjectClass) -> Iterator[Value]:
    """Yield the base classes of a project class, nearest first; those of the project are followed."""
    waiting, seen = [cls], 0
    while waiting and seen < MAXIMUM_BASES:
        current = waiting.pop(0)
        seen += 1
        for base in current.node.bases:
            value = _base_value(machine, current, base)
            yield value
            if isinstance(value, ProjectClass):
                waiting.append(value)


def family(machine: Machine, cls: ProjectClass) -> list[ProjectClass]:
    """Return a project class and its bases in the project, nearest first."""
    return [cls, *(base for base in bases_of(machine, cls) if isinstance(base, ProjectClass))]


def base_names(machine: Machine, cls: ProjectClass) -> tuple[str, ...]:
    """Return the full names of the external classes that a project class derives from."""
    return tuple(base.name for base in bases_of(machine, cls) if isinstance(base, External))


def makes_model(machine: Machine, value: Value) -> bool:
    """Return whether a class of the project is a module of torch, or a function only returns what it makes of such."""
    if isinstance(value, ProjectClass):
        return "torch.nn.Module" in base_names(machine, value)
    if not isinstance(value, Function):
        return False
    node, scope = value.node, machine.scope_modules.get(value.module, -1)
    returns = [one.value for one in descend(node) if isinstance(one, ast.Return)]
    results = [node.body] if isinstance(node, ast.Lambda) else returns
    makers = [last_name(one.func) if isinstance(one, ast.Call) else "" for one in results]
    classes = [machine.store.get(scope, name) for name in makers]
    return bool(classes) and all(isinstance(one, ProjectClass) and makes_model(machine, one) for one in classes)


def _base_value(machine: Machine, cls: ProjectClass, base: ast.expr) -> Value:
    module = machine.script.module(cls.module)
    scope = machine.scope_modules.get(cls.module, -1)
    if isinstance(base, ast.Name):
        value = machine.store.get(scope, base.id)
        if value is not None:
            return value
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        owner = machine.store.get(scope, base.value.id)
        if isinstance(owner, ProjectModule):
            return attribute_of(machine, owner, base.attr)
    full = module.resolve(base) if module is not None else ""
    return External(full) if full else UNIFORM


def class_attribute(machine: Machine, cls: ProjectClass, name: str) -> Value | None:
    """Return what a class or its project bases define under a name."""
    for owner in chain((cls,), bases_of(machine, cls)):
        found = machine.store.get(owner.scope, name) if isinstance(owner, ProjectClass) else None
        if isinstance(found, Function) and found.owner is None and isinstance(owner, ProjectClass):
            return msgspec.structs.replace(found, receiver=None, owner=owner)
        if found is not None:
            return found
    return None


def items_of(machine: Machine, node: ast.AST, value: Value) -> Value:
    """Return what is gone over where a value is: of an object of the project, what its ``__iter__`` gives."""
    method = class_attribute(machine, value.cls, "__iter__") if isinstance(value, Instance) else None
    if not isinstance(method, Function):
        return value
    items = machine.call_function(node, bound_to(method, value))
    following = class_attribute(machine, items.cls, "__next__") if isinstance(items, Instance) else None
    if isinstance(following, Function):
        return SequenceValue((machine.call_function(node, bound_to(following, items)),), open=True)
    return items if isinstance(items, (SequenceValue, ExternalObject)) or tags_of(items) else value


def bound_to(function: Function, receiver: Value) -> Function:
    """Return a function as the method of an object."""
    if function.receiver is not None or "staticmethod" in _decorators(function):
        return function
    return msgspec.structs.replace(function, receiver=receiver)


def _is_without(machine: Machine, option: Value, name: str) -> bool:
    """Return whether something is a module of the project that has no such name: the other ones are meant."""
    names = machine.store.names(machine.scope_modules.get(option.name, -1)) if isinstance(option, ProjectModule) else ()
    return bool(names) and name not in names


def _of_module(machine: Machine, value: ProjectModule, name: str) -> Value:
    if name == "__dict__":
        return value  # As globals() is: its items are the names in the module.
    found = machine.store.get(machine.scope_modules.get(value.name, -1), name)
    if found is not None:
        return found
    inner = f"{value.name}.{name}"
    known = machine.script.module(inner) is not None or machine.script.is_package(inner)
    return ProjectModule(inner) if known else Unknown(opaque=True)


def _decorators(function: Function) -> set[str]:
    return {last_name(entry) for entry in getattr(function.node, "decorator_list", ())}


def _of_instance(machine: Machine, value: Instance, name: str) -> Value:
    stored = machine.store.get(value.number, name)
    if stored is not None:
        return stored
    machine.missed.add(f".{name}")
    found = class_attribute(machine, value.cls, name)
    if found is None:
        return BoundMethod(value, name)
    if isinstance(found, Function):
        decorators = _decorators(found)
        if decorators & {"property", "cached_property"}:
            return machine.call_function(found.node, bound_to(found, value))
        return bound_to(found, value.cls if "classmethod" in decorators else value)
    is_field = any("dataclass" in ast.unparse(entry) for entry in value.cls.node.decorator_list)
    return Unknown(opaque=True) if is_field else found


def lacks(machine: Machine, value: Value, name: str) -> bool:
    """Return whether an object certainly has no attribute of a name: its class is read, and nothing ever sets it."""
    if not isinstance(value, Instance) or machine.store.get(value.number, name) is not None:
        return False
    if not owns_attributes(machine, value.cls, name):
        return False
    if not all(isinstance(base, ProjectClass) for base in bases_of(machine, value.cls)):
        return False
    return not any(
        node.attr == name and isinstance(node.ctx, ast.Store)
        for module in machine.script.modules
        if name in module.words
        for node in module.index.of(ast.Attribute)
    ) and not any(
        isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name
        for node in value.cls.node.body  # ``name: int``
    )


# Bases whose objects have no settings beside those that the project gives them.
_PLAIN_BASES = frozenset({"builtins.object", "abc.ABC", "torch.nn.Module", "torch.utils.data.Dataset"})


def owns_attributes(machine: Machine, cls: ProjectClass, name: str) -> bool:
    """Return whether an attribute of this name is there only once something sets it: not by the class or its bases."""
    if class_attribute(machine, cls, name) is not None or class_attribute(machine, cls, "__getattr__") is not None:
        return False
    return all(
        isinstance(base, ProjectClass) or (isinstance(base, External) and base.name in _PLAIN_BASES)
        for base in bases_of(machine, cls)
    )


def makers_of(machine: Machine, value: Value, name: str) -> int | None:
    """Return the mask of the ranks that gave an object an attribute which it has from nowhere else; None of all."""
    if not isinstance(value, Instance) or not owns_attributes(machine, value.cls, name):
        return None
    return machine.store.makers(value.number, name)


def _of_built(machine: Machine, value: ExternalObject, name: str) -> Value:
    if value.name == DDP and name == "forward":
        return value  # Calling it is calling the object, but for the hooks.
    if name == "param_groups" and value.name.startswith("torch.optim."):
        return Unknown(tags=frozenset({("param-groups", value.number)}))
    made = machine.object(value)
    if made is not None and isinstance(kept := made.named.get(name), PerRank):
        return kept  # `SimpleNamespace(first=rank == 0).first`: classes keep an argument under its name.
    position = _KEPT_ARGUMENTS.get((value.name, name))
    kept = made.argument(name, position) if made is not None and position is not None else None
    return kept or (
        UNIFORM if made is not None and value.name == DDP and name == "module" else BoundMethod(value, name)
    )
