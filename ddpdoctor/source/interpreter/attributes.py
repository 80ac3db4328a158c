"""Attributes of values, and names that identify a rank where nothing else does."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import chain

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.scopes import signature_of
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    MAXIMUM_OPTIONS,
    NONE,
    RANKS,
    STATISTIC,
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
    Partial,
    PerRank,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Unknown,
    Value,
    constant,
    derived,
    is_varying,
    join,
    on_rank,
    options_of,
    per_rank,
    tags_of,
)
from ddpdoctor.source.libraries import rank_attributes
from ddpdoctor.source.ranks.ranks import FIRST, GLOBAL_RANK, LOCAL_RANK, WORLD_SIZE, guessed_per_rank
from ddpdoctor.source.script.module import Module, argument_of, descend, dotted, last_name
from ddpdoctor.source.script.written_paths import UNKNOWN_PART, defaults_of, may_be, spelled, template_of
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
def _member(owner: str, name: str) -> Value:
    if owner.startswith("torch.distributed") and owner.endswith(".Backend") and name.isupper():
        return Const(name.lower())  # torch's constants are the names themselves.
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


def run_by(machine: Machine, value: Instance, method: Function) -> Iterator[tuple[Module, ast.AST]]:
    """Yield the code of a method, of the methods of its object that it calls, and of functions of the same module."""
    waiting, seen = [method], set[ast.AST]()
    while waiting:
        function = waiting.pop(0)
        module = machine.script.module(function.module)
        if module is None or function.node in seen:
            continue
        seen.add(function.node)
        yield module, function.node
        for call in (node for node in descend(function.node) if isinstance(node, ast.Call)):
            own = isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "self"
            found = class_attribute(machine, value.cls, last_name(call.func)) if own else None
            if isinstance(call.func, ast.Name):
                found = machine.store.get(machine.scope_modules[module.name], call.func.id)
            waiting += [found] if isinstance(found, Function) else []


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
        return _as_sent(machine, value, name, stored)
    machine.missed.add(f".{name}")
    found = class_attribute(machine, value.cls, name)
    if found is None:
        if helper := machine.helpers.get(value.number):
            return attribute_of(machine, ExternalObject(value.number, helper), name)
        return BoundMethod(value, name)
    if isinstance(found, Function):
        decorators = _decorators(found)
        if decorators & {"property", "cached_property"}:
            return machine.call_function(found.node, bound_to(found, value))
        return bound_to(found, value.cls if "classmethod" in decorators else value)
    is_field = any("dataclass" in ast.unparse(entry) for entry in value.cls.node.decorator_list)
    return Unknown(opaque=True) if is_field else found


def _as_sent(machine: Machine, owner: Instance, name: str, stored: Value) -> Value:
    """Return what an attribute holds: of a buffer in a DDP model what rank 0 makes of it, which each forward sends."""
    wrap = machine.events.get(machine.wrapped.get(owner.number, 0)) if isinstance(stored, Unknown) else None
    if wrap is None or keeps_buffers_apart(wrap) or machine.store.get(owner.number, f"buffer {name}") is None:
        return stored
    return msgspec.structs.replace(stored, tags=frozenset(tag for tag in tags_of(stored) if tag[0] != STATISTIC))


def keeps_buffers_apart(wrap: Event) -> bool:
    """Return whether a construction of DDP certainly switches the synchronisation of buffers off."""
    options = (wrap.argument("broadcast_buffers", 4), wrap.named.get("forward_sync_buffers"))
    return any(option is not None and constant(option) is False for option in options)


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
    if kept is None and made is not None and (value.name, name) == (DATA_LOADER, "sampler"):
        batches = made.argument("batch_sampler", 4)  # Beside those of a sampler that makes batches torch has its own.
        kept = External("torch.utils.data.SequentialSampler") if batches not in (None, Const(None)) else None
    return kept or (
        UNIFORM if made is not None and value.name == DDP and name == "module" else BoundMethod(value, name)
    )


# Code that a setting names: a member of a table, of a module or of an object by a name that is put together.

_SHORTEST = 3
"""Characters that must be known of a name that is put together: `step_` names a family, `_` does not."""
_LONGEST_WAY = 8
"""Assignments and calls through which the parts of a text are looked for."""
TEXT_METHODS = frozenset({"lower", "upper", "strip", "capitalize", "title"})
"""Methods that make a text of one, and are given nothing."""


def named_member(machine: Machine, node: ast.AST, key: Value, owner: Value) -> Value | None:
    """Return what a look-up by a name that is not known gives: code among which ``getattr(owner, f"start_{how}")``
    chooses, one of few classes of a module, or what the name is by default; None where that is not known.
    """
    written = _written(node)
    template = template_of(machine.frame.module, written)
    if UNKNOWN_PART in template:
        known = len(template.replace(UNKNOWN_PART, "")) >= _SHORTEST
        like = [name for name in _members(machine, owner) if may_be(template, name)] if known else []
        held = [attribute_of(machine, owner, name) for name in like]
        if found := _one_of(held) if known else _ways_to_train(machine, node, owner):
            return found
    if is_varying(key):
        return None
    of_getattr = isinstance(node, ast.Call) and len(node.args) == 2
    if of_getattr and isinstance(owner, ProjectModule) and (of_few := one_class_of(machine, owner)):
        return of_few
    name = _name_by_default(machine, written, _members(machine, owner))
    by_default = attribute_of(machine, owner, name) if name else NONE
    return by_default if _is_code(by_default) else None


def one_class_of(machine: Machine, module: ProjectModule) -> Value | None:
    """Return the classes of which a module of the project offers one by a name that is not known; None of many."""
    held = machine.store.held(machine.scope_modules.get(module.name, -1))
    return _one_of(dict.fromkeys(one for one in held if isinstance(one, ProjectClass)))


def _written(node: ast.AST) -> ast.expr:
    """Return the name in a look-up: by a subscript, by ``getattr``, or by a method."""
    if isinstance(node, ast.Subscript):
        return node.slice
    of_getattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.args[of_getattr] if isinstance(node, ast.Call) and len(node.args) > of_getattr else ast.Constant("")


def _name_by_default(machine: Machine, written: ast.expr, names: Collection[object]) -> str:
    """Return the one of some names that a text is where each setting in it has its default; empty for none."""
    found = {text for text in texts_of(machine, written) if text in names}
    return found.pop() if len(found) == 1 else ""


def _members(machine: Machine, owner: Value) -> Collection[str]:
    """Return the names in a module, or in the classes of an object."""
    scopes: list[int] = []
    if isinstance(owner, ProjectModule):
        scopes = [machine.scope_modules.get(owner.name, -1)]
    elif isinstance(owner, Instance):
        scopes = [cls.scope for cls in family(machine, owner.cls)]
    return dict.fromkeys(name for scope in scopes for name in machine.store.names(scope))


def _one_of(held: Iterable[Value]) -> Value | None:
    """Return one of the functions and classes among some values; None without any, or of many."""
    found: list[Value] = [one for one in held if isinstance(one, (Function, ProjectClass))]
    return reduce(join, found) if 0 < len(found) <= MAXIMUM_OPTIONS else None


def _ways_to_train(machine: Machine, node: ast.AST, owner: Value) -> Value | None:
    """Return the methods that lead to a collective of an object whose method a setting chooses and that is called."""
    around = machine.frame.module.parents.get(node)
    if not isinstance(owner, Instance) or not isinstance(around, ast.Call) or around.func is not node:
        return None
    names = (name for name in machine.store.names(owner.cls.scope) if not name.startswith("_"))
    return _one_of(attribute_of(machine, owner, name) for name in names if name in machine.mentions.synchronising)


def member_of(machine: Machine, node: ast.AST, key: Value, table: DictValue) -> Value | None:
    """Return the code that a table has for a key: what the default of a setting names, or one that represents all.

    None where neither is known. This is for tables with more members than are followed side by side, and chooses code,
    no more: a condition on the setting stays open. ``node`` is the look-up.
    """
    if is_varying(key):
        return None
    members = dict(table.entries)
    found = members.get(_name_by_default(machine, _written(node), members), NONE)
    return found if _is_code(found) else _representative(machine, list(members.values()))


def _is_code(value: Value) -> bool:
    if isinstance(value, SequenceValue):
        return any(map(_is_code, value.values))
    if isinstance(value, DictValue):  # A table of its own for each choice: of training, of tests.
        return any(_is_code(one) for _, one in value.entries)
    return isinstance(value, (Function, ProjectClass, Partial, Instance, ProjectModule))


def _representative(machine: Machine, members: Sequence[Value]) -> Value | None:
    """Return the class that adds least to what all of several inherit from one of the project; None without such.

    What is found in the inherited code holds whichever class is chosen, for this one has replaced the least of it; what
    is found in the little that is its own holds in a job that chooses it.
    """
    classes = [one for one in members if isinstance(one, ProjectClass)]
    families = [set(family(machine, cls)) for cls in classes] if len(classes) == len(members) else []
    shared = families[0].intersection(*families) if families else ()
    return min(classes, key=lambda cls: len(machine.store.names(cls.scope))) if shared else None


def texts_of(machine: Machine, node: ast.expr, depth: int = -1, turns: int = 0) -> Collection[str]:
    """Return the texts that an expression in the code of a frame has where each setting in it has its default."""
    return spelled(node, lambda part: _of_part(machine, part, depth, turns + 1)) if turns < _LONGEST_WAY else ()


def _of_part(machine: Machine, part: ast.expr, depth: int, turns: int) -> Collection[str]:
    frame, modules = machine.frames[depth], machine.script.modules
    if isinstance(part, ast.Call):
        return _of_call(machine, part, depth, turns)
    value = machine.held(part, frame)
    if isinstance(value, Const) and isinstance(value.value, str):
        return (value.value,)
    settings = [one.value for one in options_of(value) if isinstance(one, Const)] if isinstance(value, OneOf) else []
    if texts := [text for text in settings if isinstance(text, str)]:
        return texts  # of a file of settings, which whoever starts the job may change
    if isinstance(value, BoundMethod):
        return defaults_of(modules, value.name)
    around = frame.owner.node if frame.owner is not None else frame.module.tree
    made = [one for one in frame.module.assigned(around, part) if frame.module.body_around(one) is around]
    made = [one for one in made if part not in descend(one)]
    if len(made) == 1:
        return texts_of(machine, made[0], depth, turns)
    name = last_name(part) or getattr(getattr(part, "slice", None), "value", None)
    if frame.owner is not None and isinstance(part, ast.Name):
        signature = signature_of(frame.owner.node)
        place = signature.names.index(name) - bool(frame.owner.receiver) if name in signature.names else -1
        given = argument_of(frame.call, part.id, place) if frame.call is not None else None
        if given is not None and name in signature.all_names:
            return texts_of(machine, given, depth - 1, turns)
        if isinstance(default := signature.defaults.get(part.id), ast.Constant):
            return (str(default.value),)
    return defaults_of(modules, name)


def _of_call(machine: Machine, call: ast.Call, depth: int, turns: int) -> Collection[str]:
    """Return the texts that a method makes of one, or that a setting has which is read by its name."""
    name = last_name(call.func)
    texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name in ("get", "getattr") and texts:
        return defaults_of(machine.script.modules, texts[0]) or texts[1:]
    if isinstance(call.func, ast.Attribute) and name in TEXT_METHODS and not call.args:
        return [getattr(text, name)() for text in texts_of(machine, call.func.value, depth, turns)]
    return texts_of(machine, call.args[0], depth, turns) if name == "str" and call.args else ()
