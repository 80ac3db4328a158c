"""Targets of assignments, and containers that grow."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

from ddpdoctor.source.events import Guard
from ddpdoctor.source.interpreter.attributes import TEXT_METHODS, makes_model, member_of
from ddpdoctor.source.interpreter.scopes import Cell
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    BAR,
    MEMBERS,
    NONE,
    OPAQUE,
    OPEN,
    OWN_ROWS,
    UNIFORM,
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
    PerRank,
    ProjectClass,
    ProjectModule,
    SequenceValue,
    Tag,
    TensorSize,
    Unknown,
    Value,
    appended,
    by_rank,
    constant,
    derived,
    is_object,
    is_open,
    is_varying,
    join,
    never_none,
    options_of,
    per_rank,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.data_partitions import parts_held
from ddpdoctor.source.script.module import descend, last_name
from ddpdoctor.source.torch_model.recorded_calls import PRINT_REPLACED, note_attribute_set, note_item
from ddpdoctor.source.vocabulary import DATA_LOADER


def scope_of(machine: Machine, name: str) -> int:
    """Return the scope that an assignment to a name writes."""
    frame = machine.frames[-1]
    if name in frame.globals:
        return machine.scope_modules[frame.module.name]
    if name in frame.nonlocals:
        for scope in frame.scopes[1:]:
            if machine.store.get(scope, name) is not None:
                return scope
    return frame.scope


def assign_to(machine: Machine, target: ast.expr, value: Value) -> None:
    """Assign a value to a name, an attribute, an item, or several of them."""
    if target.__class__ is ast.Name:
        machine.assign(scope_of(machine, target.id), target.id, value)
    elif isinstance(target, ast.Attribute):
        _assign_attribute(machine, target, value)
    elif isinstance(target, ast.Subscript):
        _assign_item(machine, target, value)
    elif isinstance(target, ast.Starred):
        assign_to(machine, target.value, derived((value,)))
    elif isinstance(target, (ast.Tuple, ast.List)):
        exact = not any(isinstance(element, ast.Starred) for element in target.elts)
        value = by_rank(lambda one: _of_length(one, len(target.elts)), value) if exact else value
        whole = exact and _is_collated(machine, value)
        for index, part in enumerate(target.elts):
            item = item_at(value, index) if exact else derived((value,))
            assign_to(machine, part, never_none(item) if whole else item)


def _is_collated(machine: Machine, value: Value) -> bool:
    """Return whether a value is a batch as torch's own function puts it together: it refuses samples that hold None."""
    if not isinstance(value, Unknown) or not value.not_none:
        return False
    loaders = [machine.events.get(number) for kind, number in value.tags if kind == "batch"]
    return bool(loaders) and all(
        made is not None and made.complete and constant(made.argument("collate_fn", 6) or NONE) is None
        for made in loaders
    )


def _of_length(value: Value, length: int) -> Value:
    """Return those of several values that can be taken apart into so many: a function returns fewer in another mode."""
    if not isinstance(value, OneOf):
        return value
    rows = [
        option
        for option in value.options
        if isinstance(option, SequenceValue) and not option.open and len(option.values) == length
    ]
    # Beside such a row a loader, a function or a class is not meant: it could not be taken apart.
    whole = (SequenceValue, External, ExternalObject, Function, ProjectClass) if rows else (SequenceValue,)
    fitting = [
        option
        for option in value.options
        if not isinstance(option, whole) or option in rows or (isinstance(option, SequenceValue) and option.open)
    ]
    if not fitting or len(fitting) == len(value.options):
        return value
    return fitting[0] if len(fitting) == 1 else OneOf(tuple(fitting), value.varying)


def item_at(value: Value, key: object) -> Value:
    """Return the value of ``value[key]`` for a constant key."""

    def of_one(container: Value) -> Value:
        if isinstance(container, SequenceValue) and isinstance(key, int):
            if container.open and container.values:
                return container.values[0]
            if not container.open and -len(container.values) <= key < len(container.values):
                return container.values[key]
        if isinstance(container, DictValue):
            for name, entry in container.entries:
                if name == key or (name is OPEN and is_object(entry)):
                    return entry
        if isinstance(container, OneOf):
            options = [of_one(option) for option in container.options if option != NONE]
            found = reduce(partial(join, varying=container.varying), options) if options else UNIFORM
            # Which of the containers it is comes from what they hold, of which one text or number says nothing.
            return join(found, derived((container,))) if isinstance(found, Unknown) and len(options) > 1 else found
        text = container.value if isinstance(container, Const) else None
        if isinstance(text, str) and isinstance(key, int) and -len(text) <= key < len(text):
            return Const(text[key])
        return derived((container,))

    if isinstance(value, PerRank) and isinstance(key, int):
        rows = [lane for lane in value.values if isinstance(lane, SequenceValue) and not lane.open]
        if len(rows) == len(value.values) and len({len(row.values) for row in rows}) == 1:
            # Rows differ if one part does: of `rank, size = get_rank(), get_world_size()` the size is the same.
            return per_rank([of_one(row) for row in rows], value.guessed)
    return by_rank(of_one, value)


def _assign_attribute(machine: Machine, target: ast.Attribute, value: Value) -> None:
    owner = machine.evaluate(target.value)
    if isinstance(owner, DictValue) and is_open(owner):
        _fill(machine, target.value, DictValue(tuple({**dict(owner.entries), target.attr: value}.items())))
        return
    scope = machine.scope_modules.get(owner.name) if isinstance(owner, ProjectModule) else None
    if isinstance(owner, ProjectClass):
        scope = owner.scope
    if scope is not None:
        machine.assign(scope, target.attr, value)
    owners = [option for option in options_of(owner) if isinstance(option, (Instance, ExternalObject))]
    by_rank = isinstance(value, PerRank) or machine.mask != machine.frame.entry
    if by_rank and owner in (OPAQUE, UNIFORM) and isinstance(target.value, ast.Name):
        # Settings of which nothing is known but what ranks set of them, each in its own way.
        owners = [made := ExternalObject(machine.object_number(target), "")]
        machine.store.outside.add(made.number)
        machine.store.write((machine.scope_that_holds(target.value.id), target.value.id), made)
    if target.attr == "print":
        machine.note("call", PRINT_REPLACED, target, Arguments((value,)))
    if target.attr == "requires_grad" and not owners:
        note_attribute_set(machine, target, owner, value)  # Of a parameter out of ``model.parameters()``.
    for owner in owners:
        note_attribute_set(machine, target, owner, value)
        if len(owners) > 1:
            value = join(machine.store.get(owner.number, target.attr), value)
        machine.assign(owner.number, target.attr, value)


def _assign_item(machine: Machine, target: ast.Subscript, value: Value) -> None:
    container = machine.evaluate(target.value)
    index = machine.evaluate(target.slice)
    note_item(machine, target, container, index, value)
    if ("agreed", 0) in tags_of(value):
        # Containers have no identity: another name of this one still shows what it held before.
        machine.agreed_items.update(number for kind, number in tags_of(container) if kind == "batch")
    key = constant(index)
    if has_own_keys(machine, target, container, index) or _gives_key_by_own_test(machine, container, index):
        _fill(machine, target.value, Unknown(True, False, derived((value, index)).tags | {MEMBERS}))
    elif isinstance(container, DictValue) and key is not ...:
        entries = dict(container.entries)
        known = entries.get(key)
        if known == value and type(constant(value)) is type(constant(known or NONE)):
            return  # 1,000 times the same in a dict of 5,000 keys took 1.6 s of copies.
        entries[key] = value
        changed = DictValue(tuple(entries.items()))
        _fill(machine, target.value, changed)
    elif isinstance(container, OneOf) and key is not ... and {type(one) for one in container.options} == {DictValue}:
        held_by = [{**dict(one.entries), key: value} for one in container.options if isinstance(one, DictValue)]
        either: list[Value] = [DictValue(tuple(one.items())) for one in held_by]
        _fill(machine, target.value, reduce(partial(join, varying=container.varying), either))
    elif isinstance(container, DictValue) and isinstance(value, Instance) and not parts_held(machine, value):
        entries = dict(container.entries)
        entries[OPEN] = join(entries.get(OPEN), value)  # Meters by the names of losses, say.
        _fill(machine, target.value, DictValue(tuple(entries.items())))
    elif isinstance(container, (DictValue, SequenceValue, TensorSize)):
        mixture = derived((container, value), held := parts_held(machine, value))
        tags = mixture.tags - {MEMBERS}  # How many rows a value has is not how many values there are.
        _fill(machine, target.value, Unknown(bool(held) or mixture.varying, False, tags))
    elif container.__class__ is Unknown and (_is_part(target.slice) or is_mask(machine, target.slice)):
        # No dict takes a mask for a key.
        written = derived((value,) if _is_whole(target.slice) else (container, value, index))
        if follows_buffers(machine) and any(kind == "batch" for kind, _ in (*written.tags, *tags_of(container))):
            _fill(machine, target.value, Unknown(written.varying, False, written.tags - {MEMBERS}))


def follows_buffers(machine: Machine) -> bool:
    """Return whether what becomes of one buffer is followed: not in a module that goes over all buffers of a module, or
    reduces by collectives that give back what they make.
    """
    module = machine.frame.module
    loops = not module.calls_by_name.keys().isdisjoint(("buffers", "named_buffers"))
    return not loops and "_functional_collectives" not in module.text


def _is_part(index: ast.expr) -> bool:
    return isinstance(index, ast.Slice) or (isinstance(index, ast.Constant) and index.value is ...)


def _is_whole(index: ast.expr) -> bool:
    if not isinstance(index, ast.Slice):
        return isinstance(index, ast.Constant) and index.value is ...
    return index.lower is None and index.upper is None and index.step is None


def is_mask(machine: Machine, node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether an expression compares the items of tensors, or is a variable that holds such a comparison."""
    if isinstance(node, ast.Name):
        if node.id in seen:
            return True  # ``bad = bad | (x < 0)``: what else it is made of decides.
        module, seen = machine.frame.module, seen | {node.id}
        assigned = module.assigned(module.body_around(node), node)
        return bool(assigned) and all(not isinstance(one, ast.Name) and is_mask(machine, one, seen) for one in assigned)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        return is_mask(machine, node.left, seen) and is_mask(machine, node.right, seen)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return is_mask(machine, node.operand, seen)
    return isinstance(node, ast.Compare) and not isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn))


# What a rank's own keys come from: its data, or its draws.
_OWN_KEYS = frozenset({"batch", "ddp", "random"})
GROWING: Tag = ("growing", 0)
"""Of a dict that has each key only once something asks for it."""


def has_own_keys(machine: Machine, node: ast.AST, container: Value, key: Value) -> bool:
    """Return whether the keys of a dict, which is empty until then, are what a rank's own data hold.

    Not where they are those of another dict that has the same ones on every rank, as the losses of a model do.
    """
    if not is_varying(key) or not any(kind in _OWN_KEYS for kind, _ in tags_of(key)):
        return False
    if container != DictValue(()) and not (isinstance(container, Unknown) and GROWING in container.tags):
        return False
    return MEMBERS in tags_of(key) or not any(_gives_keys(loop.around.node, node) for loop in machine.loops)


def _gives_keys(loop: ast.AST, node: ast.AST) -> bool:
    """Return whether a subscript names what a loop over the keys of a dict gives."""
    if not isinstance(loop, ast.For) or last_name(getattr(loop.iter, "func", loop.iter)) not in ("items", "keys"):
        return False
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    return any(isinstance(one, ast.Name) and one.id == getattr(target, "id", "") for one in descend(node))


def _gives_key_by_own_test(machine: Machine, container: Value, key: Value) -> bool:
    """Return whether a dict gets one of several keys only where a rank's own batch has something for it."""
    if not isinstance(container, DictValue) or len(container.entries) > 1 or isinstance(key, Const):
        return False
    by_batch = any(test.kind == "batch" for test in machine.own_tests)
    return bool(machine.loops) and (by_batch or any(loop.own for loop in machine.loops))


_VIEWING = frozenset({"view", "flatten", "reshape", "detach", "view_as"})
"""Methods of a tensor whose result shares its memory, mostly."""


def overwrite(machine: Machine, node: ast.expr, value: Value) -> None:
    """Give a variable a value because a called function wrote into it."""
    while True:
        if isinstance(node, (ast.Subscript, ast.Starred)) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWING:
            node = node.func.value
        else:
            break
    if isinstance(node, (ast.Name, ast.Attribute)):
        _fill(machine, node, value)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            overwrite(machine, element, value)


def _fill(machine: Machine, held: ast.expr, value: Value) -> None:
    """Give what a variable, an attribute or an item holds another content: the variable stays whose it is."""
    if isinstance(held, ast.Name):
        machine.assign(machine.scope_that_holds(held.id), held.id, value)
    else:
        assign_to(machine, held, value)


_MUTATORS = frozenset(
    {"append", "appendleft", "extend", "insert", "update", "pop", "remove", "clear", "add", "setdefault"}
    | {"fill_", "copy_"}
)
_VIEWS: Mapping[str, Callable[[Value, Value], Value]] = {
    "keys": lambda key, value: key,
    "values": lambda key, value: value,
    "items": lambda key, value: SequenceValue((key, value)),
}
"""Methods that show what a dict holds, and what each of its entries is there."""


def _view(name: str, mapped: DictValue) -> SequenceValue:
    if is_open(mapped):
        return SequenceValue((_VIEWS[name](UNIFORM, reduce(join, (value for _, value in mapped.entries))),), open=True)
    return SequenceValue(tuple(_VIEWS[name](Const(key), value) for key, value in mapped.entries))


def container_method(machine: Machine, node: ast.AST, function: BoundMethod, arguments: list[Value]) -> Value | None:
    """Return the result of a method of a list, a dict or a text; None when it is not known."""
    receiver, name = function.receiver, function.name
    if isinstance(receiver, DictValue) and name in _VIEWS and not arguments:
        return _view(name, receiver)
    if isinstance(receiver, OneOf) and name in _VIEWS and not arguments:
        entries = [entry for one in receiver.options if isinstance(one, DictValue) for _, entry in one.entries]
        if entries and all(map(is_object, entries)):
            return _view(name, DictValue(((OPEN, reduce(join, entries)),)))
    if isinstance(receiver, DictValue) and name == "get" and arguments:
        key = constant(arguments[0])
        classes = one_of_callables(machine, node, arguments[0], receiver) if key is ... else None
        if classes is not None:
            return classes
        if key is ...:
            return derived(arguments[1:])
        held = dict(receiver.entries)
        return held.get(key, held.get(OPEN, (*arguments[1:], NONE)[0]))
    if isinstance(receiver, (SequenceValue, DictValue)) and name in _MUTATORS and isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            mutated = _mutated(machine, receiver, name, _given(node, arguments))
            if name == "setdefault" and arguments and has_own_keys(machine, node, receiver, arguments[0]):
                mutated = Unknown(True, False, derived(arguments).tags | {MEMBERS})
            if _grows_apart(machine, node) or (name == "extend" and any(OWN_ROWS in tags_of(one) for one in arguments)):
                mutated = tagged(mutated, frozenset({OWN_ROWS}))
            by_rank = any(loop.skipped for loop in machine.loops)
            overwrite(machine, node.func.value, join(receiver, mutated, True) if by_rank else mutated)
            if machine.guards:
                machine.filled_under[_cell_of(machine, node.func.value)] = machine.guards[-1]
        return UNIFORM
    text = constant(receiver)
    if isinstance(text, str) and not arguments and name in TEXT_METHODS:
        return Const(getattr(text, name)())
    return None


def _cell_of(machine: Machine, node: ast.expr) -> Cell:
    owner = machine.held(node.value) if isinstance(node, ast.Attribute) else NONE
    number = owner.number if isinstance(owner, Instance) else machine.scope_that_holds(last_name(node))
    return number, last_name(node)


def filled_under(machine: Machine, node: ast.expr) -> Guard | None:
    """Return the rank test under which a container was filled, where one was."""
    return machine.filled_under.get(_cell_of(machine, node))


def _grows_apart(machine: Machine, node: ast.Call) -> bool:
    """Return whether a list grows in a turn or not by a condition of the rank's own, here alone in the loop."""
    if not machine.loops or not (machine.own_tests or any(loop.own for loop in machine.loops)):
        return False
    written = ast.unparse(node.func)
    inside = (one for one in descend(machine.loops[-1].around.node) if isinstance(one, ast.Call))
    return [one for one in inside if ast.unparse(one.func) == written] == [node]


def adopts_variables(machine: Machine, node: ast.AST, owner: Value) -> bool:
    """Give an object the variables around a call of ``self.__dict__.update(locals())``; return whether it is one."""
    of_object = owner.receiver if isinstance(owner, BoundMethod) and owner.name == "__dict__" else None
    if not isinstance(of_object, Instance) or not isinstance(node, ast.Call):
        return False
    if [ast.unparse(argument) for argument in node.args] != ["locals()"]:
        return False
    for name, value in list(machine.store.owners.get(machine.frame.scope, {}).items()):
        if value is not None and value != of_object:
            machine.assign(of_object.number, name, value)
    return True


def settings_of(value: Value) -> dict[str, Value] | None:
    """Return what ``**value`` gives by name; None where that is not known. What only some paths give may be None."""
    options = list(options_of(value)) if isinstance(value, OneOf) else [value]
    given: dict[str, list[Value]] = {}
    for option in options:
        if not isinstance(option, DictValue):
            return None
        for key, entry in option.entries:
            if isinstance(key, str):
                given.setdefault(key, []).append(entry)
    missing = {name: [NONE] * (len(entries) < len(options)) for name, entries in given.items()}
    return {name: reduce(join, [*entries, *missing[name]]) for name, entries in given.items()}


def one_of_callables(machine: Machine, node: ast.AST, key: Value, registry: DictValue) -> Value | None:
    """Return what a dict gives for a key: of classes, or functions that make models or optimizers or communicate.

    Of more than are followed, or of anything else, what the key is by default; None where that is not known.
    ``node`` is the look-up.
    """
    if is_varying(key):
        return None
    values = [value for _, value in registry.entries]
    functions = [value for value in values if isinstance(value, Function)]
    named = (getattr(value.node, "name", "") for value in functions)
    followed = not machine.mentions.synchronising.isdisjoint(named) or all(map(_makes_optimizers, functions))
    followed = followed or all(makes_model(machine, value) for value in functions)
    known = (isinstance(value, (External, ProjectClass, Function)) for value in values)
    either = reduce(join, values) if values and followed and all(known) else None
    if either is not None and not isinstance(either, Unknown):
        return either
    return member_of(machine, node, key, registry) or either


def _makes_optimizers(function: Function) -> bool:
    """Return whether a function returns what it makes of ``torch.optim``, or of classes of its own by such a name."""
    results = [node.value for node in descend(function.node) if isinstance(node, ast.Return) and node.value is not None]
    return bool(results) and all("optim." in ast.unparse(result) for result in results)


def _given(node: ast.Call, arguments: list[Value]) -> list[Value]:
    """Return what a method of a container takes: what stands by name is one dict, as ``update`` reads it."""
    count = len(node.keywords)
    if not count:
        return arguments
    names = [keyword.arg for keyword in node.keywords]
    if len(arguments) != count or None in names:
        return [derived(arguments)]
    return [DictValue(tuple(zip(names, arguments, strict=True)))]


def _mutated(machine: Machine, receiver: Value, name: str, arguments: list[Value]) -> Value:
    """Return the container after a call of a method; a list that grows in a loop holds any number of such items."""
    if name == "update" and isinstance(receiver, DictValue) and [one.__class__ for one in arguments] == [DictValue]:
        more = arguments[0].entries if isinstance(arguments[0], DictValue) else ()
        return DictValue(tuple({**dict(receiver.entries), **dict(more)}.items()))
    if (
        name not in ("append", "add", "appendleft")
        or not isinstance(receiver, SequenceValue)
        or len(arguments) != 1
        or isinstance(arguments[0], PerRank)
    ):
        return derived([receiver, *arguments])
    if not machine.loops and not receiver.open:
        return appended(receiver, arguments[0])
    item: Value = arguments[0]
    for other in receiver.values:
        item = join(other, item)
    return SequenceValue((item,), open=True)


MAXIMUM_ITEMS = 20
"""Of a list whose items are looked at one by one."""
OF_PROJECT = (Function, Instance, Partial, ProjectClass)


def columns_of(items: Sequence[Value]) -> list[tuple[Value, ...]]:
    """Return the columns of a table that is written out: rows of one length; nothing of other items."""
    rows = [item.values for item in items if isinstance(item, SequenceValue) and not item.open]
    alike = len(rows) == len(items) and len({len(row) for row in rows}) == 1
    return list(zip(*rows, strict=True)) if alike else []


def known_items(value: Value) -> tuple[Value, ...]:
    """Return the items of a list that is written out and not long; nothing of another value."""
    known = isinstance(value, SequenceValue) and not value.open and len(value.values) <= MAXIMUM_ITEMS
    return value.values if known else ()  # type: ignore[union-attr]


def one_of(items: Sequence[Value]) -> Value:
    """Return what stands for any of some items: one of objects and functions of the project, or of rows of such."""
    if any(isinstance(item, OF_PROJECT) for item in items):
        return (
            reduce(join, items) if all(isinstance(item, (*OF_PROJECT, External)) for item in items) else derived(items)
        )
    if items and all(isinstance(item, ExternalObject) and item.name == DATA_LOADER for item in items):
        return reduce(join, items)
    columns = columns_of(items)
    return SequenceValue(tuple(map(one_of, columns))) if columns else derived(items)


def item_of(entry: Value) -> Value:
    """Return one item that stands for every item of a rank's iterable."""
    if isinstance(entry, SequenceValue):
        if len(entry.values) == 1:
            return entry.values[0]
        return one_of(entry.values)
    if isinstance(entry, ExternalObject) and entry.name == DATA_LOADER:
        return Unknown(varying=True, tags=frozenset({("batch", entry.number)}), not_none=True)
    if isinstance(entry, OneOf):
        item: Value | None = None
        for option in entry.options:
            if not isinstance(option, SequenceValue) or option.values:
                item = join(item, item_of(option))
        return item or UNIFORM
    if isinstance(entry, Unknown):
        batches = frozenset(("batch", tag[1]) if tag[0] == "loader" else tag for tag in entry.tags if tag[0] != BAR)
        varying = entry.varying or any(tag[0] == "batch" for tag in batches)
        return Unknown(varying, False, batches, batches != entry.tags)
    return derived((entry,))
