"""Conditions that every rank decides by something of its own: its batches, its clock, its files, its random numbers.

The tags of a value are its origins; a value that was decided by such a condition carries ``own``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from ddpdoctor.files import regex
from ddpdoctor.finding import Frame
from ddpdoctor.source.events import Event, OwnKind, OwnTest, Statistic
from ddpdoctor.source.interpreter.assignment import follows_buffers, overwrite
from ddpdoctor.source.interpreter.scopes import Cell, Store
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    DRAWN,
    MEMBERS,
    NONE,
    OWN_LENGTH,
    OWN_ROWS,
    REDUCED,
    STATISTIC,
    UNIFORM,
    Arguments,
    BoundMethod,
    Const,
    DictValue,
    ExternalObject,
    Instance,
    OneOf,
    PerRank,
    ProjectClass,
    SequenceValue,
    Tag,
    Unknown,
    Value,
    constant,
    derived,
    is_agreed,
    is_varying,
    options_of,
    tagged,
    tags_of,
)
from ddpdoctor.source.ranks.data_partitions import ORDER, PART, PIECE, PIECES
from ddpdoctor.source.ranks.random_numbers import NUMPYS, PYTHONS, draws_own, generator_of, seeded
from ddpdoctor.source.script.module import descend, last_name, once_each
from ddpdoctor.source.vocabulary import DATA_LOADER, RANK_VARYING_CALLS, text_hints_at_ranks

DECIDED: Tag = ("own", 0)
"""Of a value that depends on what a rank decided by itself."""
COUNTED: Tag = ("counted", 0)
"""Of an iterable whose items begin with their number."""
UNREAD_ITEM: Tag = ("item", 0)
"""Of an item of something that was not followed: of what feeds a DDP model each rank has its own."""
TRAINED_ITEM: Tag = ("item", 1)
"""Of such an item in a loop that trains a model for ranks."""
DRAWN_FROM_STORE: Tag = ("store", 0)
"""Of a number that a rank drew from a counter in a store: no other rank gets the same."""
LISTED: Tag = ("files", 1)
"""Of the names that a directory holds."""
POLLED: Tag = ("files", 2)
"""Of the names that a directory holds at the moment: every turn of a loop looks for new ones."""
EXTENT = "extent"
"""Kind of the tags of a tensor's size: the same on every rank unless it can be zero."""
OWN_KINDS = frozenset({
    "batch", "ddp", "own", "clock", "unique", "files", "random", "drawn", "unseeded", "store", "counted", "item",
    "members", EXTENT, "statistic", "reduced", "result", ORDER, PIECE, PIECES,
})  # fmt: skip
"""Kinds of the tags that results of calls which cannot be read inherit from their arguments."""

OF_FILES: frozenset[OwnKind] = frozenset({"files", "polled"})
"""What ranks find on their disks, which is mostly the same: they share them."""
_CLOCK = regex(r"^(time|datetime)\.")
# Functions that give a process what no other one has.
_UNIQUE = regex(r"^(os\.(getpid|urandom)$|uuid\.|secrets\.|tempfile\.(?!gettempdir$))")
# Functions that look at the disk; the rest of `os.path` works on names.
_FILES = regex(r"^(os\.path\.(l?exists|is|get|samefile)|os\.(stat|access)$)")
LISTING = regex(r"^(os\.(listdir|scandir|walk)$|glob\.)")
"""Library functions that list what a directory holds, by their full names."""
_STORE = regex(r"^torch\.distributed\.(\w+\.)?\w*Store$")
FILE_QUERIES = frozenset({"exists", "is_file", "is_dir"})
"""Methods without arguments that query the file system of the rank's machine: ``Path.exists()``."""
FORM = frozenset({"dtype", "requires_grad", "is_leaf", "is_sparse", "layout"})
"""Attributes of a tensor that are alike on every rank, whatever data it holds."""
# Attributes and functions that give the form of data.
_SIZES = FORM | {"size", "shape", "numel", "nelement", "dim", "ndim", "ndimension", "len", "device", "grad_fn"}
_STRUCTURE_TESTS = frozenset({"isinstance", "hasattr", "callable", "is_tensor", "is_floating_point", "is_cuda", "type"})
_MEMBERS = frozenset({"set", "frozenset", "unique", "unique_consecutive", "nonzero", "masked_select"})
_AGREED = regex(r"(^|_)(all_?)?(reduced?|gather(ed)?|broadcast|sync(ed|hronized?)?|agree|consensus)(_|$)")


def origin_of(name: str) -> frozenset[Tag]:
    """Return the tag of a library function whose result differs between processes, by its full name."""
    if LISTING.match(name):
        return frozenset({LISTED})
    for kind, pattern in (("clock", _CLOCK), ("unique", _UNIQUE), ("files", _FILES)):
        if pattern.match(name):
            return frozenset({(kind, 0)})
    generator = generator_of(name)
    return frozenset({("random", generator)}) if generator in (PYTHONS, NUMPYS) else frozenset()


def of_own_data(value: Value) -> Value:
    """Return what a model that works on each rank's own data has made: of items that were not read, the rank's own."""
    if isinstance(value, Unknown) and UNREAD_ITEM in value.tags:
        return Unknown(True, value.opaque, value.tags - {UNREAD_ITEM}, value.not_none)
    return value


@lru_cache(maxsize=16_384)
def agrees_by_name(name: str) -> bool:
    """Return whether the name of a function that cannot be read promises the same result on every rank."""
    return _AGREED.search(name) is not None


def number_from_store(name: str, receiver: Value, arguments: Sequence[Value]) -> Unknown | None:
    """Return what ``store.add(key, amount)`` returns; an amount of 0 only reads how far all of them are."""
    if name != "add" or not isinstance(receiver, ExternalObject) or not _STORE.match(receiver.name):
        return None
    if len(arguments) < 2 or constant(arguments[1]) == 0:
        return None
    return Unknown(True, False, frozenset({DRAWN_FROM_STORE}))


def extent_of(value: Value) -> Value | None:
    """Return the size of something from a batch: a number that is known to be alike unless it can be zero.

    What a model made of a batch is as large on every rank, too, but what is picked by its values.
    """
    tags = tags_of(value)
    numbers = {number for kind, number in tags if kind == "batch"}
    if not numbers and MEMBERS not in tags and any(kind == "ddp" for kind, _ in tags):
        return Unknown()
    return Unknown(tags=frozenset((EXTENT, number) for number in numbers)) if numbers else None


def members_of(name: str, result: Unknown) -> Unknown:
    """Mark the result of ``set``, ``unique`` and the like: the number of its items depends on the data."""
    if result.varying and makes_members(name):
        length = OWN_ROWS if name.endswith("set") else OWN_LENGTH
        return Unknown(True, result.opaque, result.tags | {MEMBERS, length})
    return result


def is_of_own_length(machine: Machine, value: Value) -> bool:
    """Return whether a tensor is as long as the data of each rank makes it."""
    tags = tags_of(value)
    return is_varying(value) and OWN_LENGTH in tags and _kind(machine, tags) in ("batch", "state")


def makes_members(name: str) -> bool:
    """Return whether a function is ``set``, ``unique`` or the like, by its full name."""
    return name.rpartition(".")[2] in _MEMBERS


def own_test(machine: Machine, node: ast.AST, value: Value) -> OwnTest | None:
    """Return the condition as one that every rank decides by itself; None when it is not, or not certainly."""
    tags = tags_of(value)
    if machine.guards or not (is_varying(value) or any(kind == EXTENT for kind, _ in tags)):
        return None
    kind = _kind(machine, tags)
    if kind is None and machine.loops and isinstance(node, ast.expr) and is_varying(value) and _is_by_number(value):
        from ddpdoctor.source.ranks.counted_turns import holds_unequally

        return _described(machine, node, "turns") if holds_unequally(machine, node) else None
    if kind is None or text_hints_at_ranks(ast.unparse(node)) or not _varies(machine, node):
        return None
    return _described(machine, node, kind)


def _is_by_number(value: Value) -> bool:
    """Return whether nothing but numbers of ranks and what is the same on all of them may be in a value."""
    numbers = {"remainder", "quotient", "world-size", "rank-of-job", "rank-of-node"}
    return {kind for kind, _ in tags_of(value)} <= numbers


def own_iterable(machine: Machine, node: ast.expr, value: Value) -> OwnTest | None:
    """Return what a loop goes over, when the turns are a rank's own: keys in a batch, a range up to a count in it."""
    if machine.guards or not is_varying(value):
        return None
    tags = tags_of(value)
    is_range = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    if is_range and isinstance(node, ast.Call) and any(_is_set_on_some(machine, part) for part in node.args):
        return _described(machine, node, "guard")
    if is_range and isinstance(node, ast.Call):
        tags = frozenset(tag for part in node.args for tag in _tags_of_names(machine, part))
    kind = _kind(machine, tags)
    if kind is None or not (MEMBERS in tags or (is_range and kind == "batch" and _varies(machine, node))):
        return None
    return _described(machine, node, kind)


def _is_set_on_some(machine: Machine, node: ast.expr) -> bool:
    """Return whether a variable keeps a known number on some ranks, and on others got one that is not known.

    As where the first rank alone reads from a checkpoint in which epoch to begin.
    """
    value = machine.lookup(node.id) if isinstance(node, ast.Name) else UNIFORM
    if not isinstance(value, PerRank) or value.guessed:
        return False
    kinds = {type(entry) for entry in value.values}
    return kinds == {Const, Unknown}


def decided(machine: Machine, test: ast.expr, condition: Value, value: Value) -> Value:
    """Return what a conditional expression gives, marked where every rank decides by itself which of the two it is."""
    own = own_test(machine, test, condition) if isinstance(value, Unknown) and value.varying else None
    return value if own is None or own.kind in OF_FILES else tagged(value, frozenset({DECIDED}))


# Tags by which what a condition lets through is known to be of the same kind; of files ranks mostly find the same.
_TAGS_OF_KINDS: Mapping[OwnKind, Tag] = {
    "clock": ("clock", 0), "store": DRAWN_FROM_STORE, "random": DRAWN, "reduced": REDUCED, "batch": DECIDED,
    "state": DECIDED,
}  # fmt: skip


def chosen_by(tests: Sequence[OwnTest], value: Value) -> Value:
    """Return an item that a generator gives, marked where conditions of the rank's own decide how many it gives."""
    if not tests:
        return value
    tags = frozenset({MEMBERS, *(_TAGS_OF_KINDS[test.kind] for test in tests if test.kind in _TAGS_OF_KINDS)})
    alike = len(tags) > 1 and isinstance(value, (Unknown, Const)) and not is_varying(value)
    return Unknown(True, tags=tags_of(value) | tags) if alike else tagged(value, tags)


def mark_decided(store: Store, cells: Iterable[Cell]) -> None:
    """Mark what the arms of a rank's own condition wrote; dicts with other keys in each arm have open keys.

    Not for conditions on files: ranks mostly share them, and find the same checkpoint.
    """
    for cell in cells:
        value = store.get(*cell)
        if isinstance(value, Unknown) and value.varying and DECIDED not in value.tags:
            store.put({cell: tagged(value, frozenset({DECIDED}))})
        elif isinstance(value, OneOf) and _differ_in_keys(value):
            store.put({cell: Unknown(True, False, tags_of(value) | {DECIDED, MEMBERS})})


def _differ_in_keys(value: OneOf) -> bool:
    keys = [tuple(key for key, _ in option.entries) for option in value.options if isinstance(option, DictValue)]
    return len(keys) == len(value.options) and len(set(keys)) > 1


def _described(machine: Machine, node: ast.AST, kind: OwnKind) -> OwnTest:
    frame = machine.frame
    here = Frame(str(frame.module.path), getattr(node, "lineno", 1), frame.function or "<module>")
    return OwnTest(node, frame.module, kind, (here, *reversed(machine.calls)))


def _kind(machine: Machine, tags: frozenset[Tag]) -> OwnKind | None:
    """Return by what of its own a rank decides; a loader that gives every rank the same batches does not count."""
    kinds = {kind for kind, _ in tags}
    loaders = {number for kind, number in tags if kind in ("batch", EXTENT)}
    if REDUCED in tags:
        return "reduced"
    if loaders:
        return "batch" if any(is_own_loader(machine, number) for number in loaders) else None
    if "ddp" in kinds:
        return "batch"
    if "clock" in kinds:
        return "clock"
    if "sharded" in kinds or TRAINED_ITEM in tags:
        return "batch"
    if "files" in kinds:
        return "polled" if POLLED in tags else "files"
    if "store" in kinds:
        return "store"
    if "drawn" in kinds:
        return "random"
    if "random" in kinds:
        return None if {number for kind, number in tags if kind == "random"} <= seeded(machine.script) else "random"
    return "state" if "own" in kinds else None


def is_own_loader(machine: Machine, number: int) -> bool:
    """Return whether a loader may give every rank other batches: by a sampler, by shuffling, or by its data."""
    made = machine.events.get(number)
    if made is None:
        return not machine.quiet
    if not made.complete:
        return True
    samplers = (made.argument(name, position) for name, position in (("sampler", 3), ("batch_sampler", 4)))
    if any(constant(one or NONE) is not None for one in samplers):
        return True
    shuffles = constant(made.argument("shuffle", 2) or Const(False)) is not False
    return shuffles or is_varying(made.argument("dataset", 0) or NONE)


def _tags_of_names(machine: Machine, node: ast.AST) -> Iterable[Tag]:
    for inner in descend(node):
        if isinstance(inner, ast.Name):
            yield from tags_of(machine.lookup(inner.id))


def _varies(machine: Machine, node: ast.AST) -> bool:
    """Return whether what can differ between ranks in a condition is data, not only the form of data."""
    if isinstance(node, ast.Name):
        return is_varying(machine.lookup(node.id))
    if isinstance(node, ast.Attribute):
        return node.attr not in _SIZES and _attribute_varies(machine, node)
    if isinstance(node, ast.Call):
        return _call_varies(machine, node)
    if isinstance(node, ast.Compare):
        return _comparison_varies(machine, node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _is_size(node.operand):
        return _is_from_batch(machine, node.operand)
    return any(_varies(machine, child) for child in ast.iter_child_nodes(node))


def _attribute_varies(machine: Machine, node: ast.Attribute) -> bool:
    if isinstance(node.value, ast.Name):
        owner = machine.lookup(node.value.id)
        kept = [
            stored
            for option in options_of(owner)
            if isinstance(option, Instance) and (stored := machine.store.get(option.number, node.attr)) is not None
        ]
        if kept:
            return any(is_varying(value) for value in kept)
        if isinstance(owner, Instance):
            return True
    return _varies(machine, node.value)


def _call_varies(machine: Machine, node: ast.Call) -> bool:
    last = last_name(node.func)
    if last in _SIZES or last in _STRUCTURE_TESTS:
        return False
    full = machine.frame.module.resolve(node.func)
    if full and (RANK_VARYING_CALLS.match(full) or draws_own(machine, full)):
        return True
    if last in FILE_QUERIES and not node.args:
        return True
    inside = [*node.args, *(keyword.value for keyword in node.keywords)]
    if isinstance(node.func, ast.Attribute):
        inside.append(node.func.value)
    if any(_varies(machine, part) for part in inside):
        return True
    return not full.startswith(("torch.", "math.", "numpy.")) and _runs_project_code(machine, node.func)


def _runs_project_code(machine: Machine, function: ast.expr) -> bool:
    """Return whether a called name is a function of the project, whose result was read."""
    root = function
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    value = machine.lookup(root.id)
    return not isinstance(value, (Unknown, BoundMethod, Const)) and not tags_of(value)


def _comparison_varies(machine: Machine, node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
        return any(_is_item_of_loader(machine, side) for side in sides)
    if any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
        # Keys of a batch are alike, and so are those of a cache in which one is looked up.
        if isinstance(node.left, ast.Constant):
            return not isinstance(node.left.value, str) and any(_varies(machine, side) for side in sides)
        return _varies(machine, node.left)
    if any(isinstance(side, ast.Constant) and side.value == 0 for side in sides):
        return any(_varies(machine, side) or (_is_size(side) and _is_from_batch(machine, side)) for side in sides)
    return any(_varies(machine, side) for side in sides)


def _is_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        return last_name(node.func) in _SIZES
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _is_from_batch(machine: Machine, node: ast.AST) -> bool:
    return any(kind == "batch" for kind, _ in _tags_of_names(machine, node))


def _is_item_of_loader(machine: Machine, node: ast.AST) -> bool:
    """Return whether a name is what a loop over a loader gives it: None stands for a batch that could not be made."""
    if not isinstance(node, ast.Name):
        return False
    for loop in machine.loops:
        iterable, target = loop.around.iterable, getattr(loop.around.node, "target", None)
        written = isinstance(iterable, SequenceValue) and not iterable.open
        if written or (isinstance(iterable, Unknown) and not any(kind == "loader" for kind, _ in iterable.tags)):
            continue  # Parts of a batch, or what was made of it.
        names = {inner.id for inner in descend(target) if isinstance(inner, ast.Name)} if target is not None else set()
        if node.id in names and isinstance(target, (ast.Name, ast.Tuple)):
            return any(kind == "batch" for kind, _ in _tags_of_names(machine, node))
    return False


@once_each
def chooses_keys(machine: Machine, cls: ProjectClass) -> bool:
    """Return whether a method of a class gives a dict a key under a condition: losses may have other keys each time."""
    module = machine.script.module(cls.module)
    tests = module.index.within(cls.node, ast.If) if module is not None else ()
    targets = [to for test in tests for one in test.body if isinstance(one, ast.Assign) for to in one.targets]
    return any(isinstance(to, ast.Subscript) and isinstance(to.slice, ast.Constant) for to in targets)


# Functions and methods that make one number or a few of many samples.
_REDUCES = frozenset({
    "mean", "nanmean", "std", "var", "std_mean", "var_mean", "sum", "nansum", "median", "quantile", "percentile", "cov",
    "bincount", "histc", "norm", "max", "min", "amax", "amin", "unique", "set", "frozenset",
})  # fmt: skip
_DIMENSIONS = ("dim", "axis")
# Methods of a tensor that change it by arithmetic with another.
_CHANGES = frozenset({"add_", "sub_", "mul_", "div_", "lerp_", "addcmul_"})
# Methods that write another into a tensor, whole or in places.
_WRITES = frozenset(
    {"copy_", "masked_fill_", "masked_scatter_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_"}
    | {"zero_", "fill_"}
)
_SETS = frozenset({"copy_", "zero_", "fill_"})
"""Of these, the ones that leave nothing of what there was."""


def reduced(
    machine: Machine, node: ast.AST, name: str, receiver: Value | None, given: Arguments, result: Value
) -> Value:
    """Return the result of a call, marked where it makes one number of the samples of a rank."""
    last = name.rpartition(".")[2]
    if last in _CHANGES and receiver is not None:
        return _changed(machine, node, receiver, given, result)
    if last in _WRITES and receiver.__class__ is Unknown:
        anew = last in _SETS
        clears = anew and any(kind == "batch" for kind, _ in tags_of(receiver))
        _written(machine, node, derived([*([] if anew else [receiver]), *given.values]), clears)
    if last not in _REDUCES or not isinstance(result, Unknown):
        return result
    arguments = derived(given.positional if receiver is None else [receiver, *given.positional])
    if is_agreed(result) or not _is_of_own_data(machine, arguments, drawn=False):
        return result
    along = [given.named[word] for word in _DIMENSIONS if word in given.named] or list(
        given.positional[receiver is None :][:1]
    )
    beside = given.positional[receiver is None :][:1]  # The larger of each two elements is none of a whole.
    if any(_spares_samples(one) for one in along) or (
        last in ("max", "min") and any(type(constant(one)) is not int for one in beside)
    ):
        return result
    return _marked(machine, node, result)


def carried(machine: Machine, statement: ast.Assign | ast.AugAssign, value: Value) -> Value:
    """Return what is assigned, marked where a variable takes something of the rank's own data from turn to turn."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if not isinstance(value, Unknown) or len(targets) != 1 or not machine.loops or not _is_of_own_data(machine, value):
        return value
    if isinstance(statement, ast.Assign) and not _reads(statement.value, ast.unparse(targets[0])):
        return value
    over = _carrying(machine, statement, targets[0])
    return _marked(machine, statement, value, over) if over else value


def statistics_in(machine: Machine, value: Value, use: Event) -> list[Statistic]:
    """Return the statistics that a value is made of and that are older than the batch that they are used for."""
    found = (machine.statistics[number] for kind, number in tags_of(value) if kind == STATISTIC)
    return sorted((one for one in found if _outlasts(one, use)), key=lambda one: one.location)


def with_keys(value: Value, key: Value) -> Value:
    """Return the values of a dict whose keys are numbered by what the rank's own data holds: a vocabulary."""
    found = frozenset(tag for tag in tags_of(key) if tag[0] == STATISTIC)
    return tagged(value, found) if found else value


def _outlasts(statistic: Statistic, use: Event) -> bool:
    if any(loop.node in statistic.carried for loop in use.loops):
        return True
    if statistic.carried and not statistic.of_pass:
        return False
    around = [loop for loop in use.loops if loop.node not in statistic.loops]
    common = len(around) < len(use.loops)
    return (bool(around) or use.kind in ("object", "loader")) and (
        not common or any(_goes_over_batches(loop.iterable) for loop in around)
    )


def _goes_over_batches(iterable: Value) -> bool:
    return any(kind in ("batch", "loader") for kind, _ in tags_of(iterable)) or (
        isinstance(iterable, ExternalObject) and iterable.name == DATA_LOADER
    )


def _changed(machine: Machine, node: ast.AST, receiver: Value, given: Arguments, result: Value) -> Value:
    """Give a variable what a method such as ``mul_(0.9).add_(mean)`` makes of it, where that is of the rank's data."""
    value, root = derived([receiver, *given.positional, *given.named.values()]), node
    while isinstance(root, ast.Call) and last_name(root.func) in _CHANGES and isinstance(root.func, ast.Attribute):
        root = root.func.value
    if isinstance(root, ast.Attribute) and root.attr == "data":
        root = root.value
    if not isinstance(root, (ast.Name, ast.Attribute)) or not machine.loops or not _is_of_own_data(machine, value):
        return result
    over = _carrying(machine, node, root)
    if not over:
        return result
    marked = _marked(machine, node, value, over)
    overwrite(machine, root, marked)
    return marked


def _written(machine: Machine, node: ast.AST, value: Unknown, clears: bool) -> None:
    """Give a variable or a buffer what a method such as ``masked_fill_`` leaves in it, where that is the rank's own."""
    root = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    if isinstance(root, ast.Attribute) and root.attr == "data":
        root = root.value
    own = clears or _is_of_own_data(machine, value, drawn=False)
    if isinstance(root, (ast.Name, ast.Attribute)) and own and follows_buffers(machine):
        overwrite(machine, root, value)


def _is_of_own_data(machine: Machine, value: Unknown, *, drawn: bool = True) -> bool:
    """Return whether a value is made of samples that other ranks do not have, at a place that every rank comes to.

    With ``drawn`` also of random numbers: what they are added up to before the training may be no more than a start.
    """
    if not value.varying or is_agreed(value) or machine.guards:
        return False
    if machine.mask != ALL_RANKS & ~machine.gone:
        return False
    return any(
        kind == PART or (drawn and (kind, number) == DRAWN) or (kind == "batch" and is_own_loader(machine, number))
        for kind, number in value.tags
    )


def _spares_samples(along: Value) -> bool:
    """Return whether a reduction leaves the samples apart: it goes along another dimension than the first."""
    if isinstance(along, SequenceValue):
        return bool(along.values) and Const(0) not in along.values
    number = constant(along)
    return isinstance(number, int) and not isinstance(number, bool) and number != 0


def _carrying(machine: Machine, node: ast.AST, target: ast.expr) -> frozenset[ast.AST]:
    """Return the loops whose next turns find what a variable holds: in none of them it is set anew.

    Of an attribute of an object these are all loops around; a variable of a function lives in one call of it.
    """
    module, name = machine.frame.module, ast.unparse(target)
    if name.startswith("self."):
        setting = (one for one in module.index.of(ast.Assign) if any(ast.unparse(each) == name for each in one.targets))
        others = (one for one in setting if getattr(module.body_around(one), "name", "") != "__init__")
        kept = all(_reads(one.value, name) for one in others)
        return frozenset(loop.around.node for loop in machine.loops) if kept else frozenset()
    found: set[ast.AST] = set()
    for loop in module.ancestors(node) if isinstance(target, ast.Name) else ():
        if isinstance(loop, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            break
        if isinstance(loop, (ast.For, ast.While)):
            if any(_sets_anew(one, name) for one in descend(loop)):
                break
            found.add(loop)
    return frozenset(found)


def _sets_anew(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(_sets_in(target, name) for target in node.targets) and not _reads(node.value, name)
    return isinstance(node, (ast.For, ast.comprehension)) and _sets_in(node.target, name)


def _sets_in(target: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in descend(target))


def _reads(value: ast.expr, name: str) -> bool:
    inside = (one for one in descend(value) if isinstance(one, (ast.Name, ast.Attribute)))
    return isinstance(value, ast.BinOp) and any(ast.unparse(one) == name for one in inside)


def _marked(machine: Machine, node: ast.AST, value: Unknown, over: frozenset[ast.AST] = frozenset()) -> Unknown:
    items = tags_of(machine.loops[-1].around.iterable) if machine.loops and not over else ()
    if any(kind == "batch" for kind, _ in items):
        return value  # Made anew for each sample of a batch, as of the answers to one prompt: so one process does.
    number = machine.object_number(node)
    loops = frozenset(loop.around.node for loop in machine.loops)
    of_pass = any(loop.around.node in over and _goes_over_batches(loop.around.iterable) for loop in machine.loops)
    machine.statistics[number] = Statistic(node, machine.frame.module, loops, over, of_pass)
    return Unknown(True, value.opaque, value.tags | {(STATISTIC, number)}, value.not_none)
