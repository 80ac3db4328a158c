"""What the worker processes of a DataLoader have of its data set: a copy each, made when they start."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import msgspec

from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, grouped
from ddpdoctor.fix import Fix, fix_of, instead, with_keyword, without_keyword
from ddpdoctor.source.events import Event, LoopAround
from ddpdoctor.source.interpreter.attributes import base_names, class_attribute, family
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    BoundMethod,
    Const,
    ExternalObject,
    Instance,
    ProjectClass,
    Value,
    constant,
    options_of,
    parts_of,
    tags_of,
)
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.training_loops import Feeding, divided_by_rank, feedings, loop_of_epochs, takes_own_part
from ddpdoctor.source.ranks.data_partitions import SHARE, gives_turns
from ddpdoctor.source.ranks.random_numbers import has_seed
from ddpdoctor.source.script.launch_facts import offered
from ddpdoctor.source.script.module import Module, descend, last_name, made_from

_STREAM = "torch.utils.data.IterableDataset"
# In a name: code may divide by worker, or each process has something of its own.
_OF_WORKERS = regex(r"worker|getpid|current_process")
# In a name: code may divide by rank.
_OF_RANKS = regex(r"rank|world|replica|num_proc|gpu", re.IGNORECASE)
# Functions that choose which item comes next: a worker may choose others than its neighbour.
_CHOOSING = frozenset(
    {"randint", "randrange", "choice", "choices", "integers", "sample", "multinomial", "initial_seed"}
)
# Functions that make numbers up, of which items may be made.
_MAKING_UP = frozenset({"rand", "randn", "random", "uniform", "normal", "standard_normal", "bernoulli"})
# Packages that divide nothing by worker, whatever is called in them, beside Python's own …
_READING = frozenset({"torch", "torchvision", "numpy", "pandas", "PIL", "pyarrow", "h5py", "tqdm", "transformers"})
# … of which these hand each item to one reader alone.
_HANDING_OUT = frozenset({"socket", "queue", "urllib", "http", "multiprocessing", "subprocess", "threading", "asyncio"})


def workers_of(projection: Projection, loader: Event) -> int:
    """Return how many workers a loader has: the default of an option where one decides; 0 where it is not known."""
    return max((value for value in _settings(projection, loader, "num_workers", 5) if type(value) is int), default=0)


def _settings(projection: Projection, loader: Event, name: str, position: int) -> Iterator[object]:
    """Yield what an argument of a loader is, or what an option of the command line offers for it."""
    for value in options_of(loader.argument(name, position) or NONE):
        holder = value.receiver if isinstance(value, BoundMethod) else None
        if (
            isinstance(value, BoundMethod)
            and isinstance(holder, ExternalObject)
            and holder.name == "argparse.Namespace"
        ):
            yield from offered(projection.machine.script.modules, value.name)
        else:
            yield constant(value)


class Reached(msgspec.Struct, frozen=True, eq=False):
    """The code that a data set of the project runs: its class and what that leads to, as far as it was read."""

    places: tuple[tuple[Module, ast.AST], ...]
    """Classes and functions."""
    made: tuple[tuple[Module, ast.AST], ...]
    """The parts of the call that makes the object."""

    def words(self) -> Iterator[str]:
        """Yield the names and texts in it."""
        for _, place in (*self.places, *self.made):
            for node in descend(place):
                if isinstance(node, (ast.Name, ast.Attribute)):
                    yield last_name(node)
                elif isinstance(node, (ast.arg, ast.keyword)):
                    yield node.arg or ""

    def globals(self) -> frozenset[str]:
        """Return the names that it reads and does not bind."""
        names = [node for _, place in self.places for node in descend(place) if isinstance(node, ast.Name)]
        bound = {node.arg for _, place in self.places for node in descend(place) if isinstance(node, ast.arg)}
        bound |= {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        return frozenset(name.id for name in names) - bound

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield the calls in it, with the full name of what they call where an import shows it."""
        for module, place in (*self.places, *self.made):
            yield from ((node, module.resolve(node.func)) for node in descend(place) if isinstance(node, ast.Call))


def reached_from(projection: Projection, dataset: Instance) -> Reached:
    """Return the code that a data set runs, by the classes of what it holds and by the names that are called in it."""
    machine = projection.machine
    modules = machine.script.modules
    defined: dict[str, list[tuple[Module, ast.AST]]] = {}
    for module in modules:
        named: tuple[ast.FunctionDef | ast.ClassDef, ...]
        named = (*module.index.of(ast.FunctionDef), *module.index.of(ast.ClassDef))
        for node in named:
            defined.setdefault(node.name, []).append((module, node))
    places: dict[ast.AST, Module] = {}
    classes = list(_classes_held(machine, dataset))
    pending: list[tuple[Module, ast.AST]] = [
        (module, cls.node) for module in modules for cls in classes if module.name == cls.module
    ]
    while pending:
        module, place = pending.pop()
        if place in places:
            continue
        places[place] = module
        called = {last_name(node.func) for node in descend(place) if isinstance(node, ast.Call)}
        pending += [found for name in called if not name.startswith("__") for found in defined.get(name, ())]
    maker = machine.maker_of(dataset.number)
    made = tuple(
        (module, part)
        for module in modules
        if isinstance(maker, ast.Call) and maker in module.parents
        for part in made_from(maker, module.body_around(maker))
        if isinstance(part, (ast.Name, ast.Attribute, ast.Call))
    )
    return Reached(tuple((module, place) for place, module in places.items()), made)


def _classes_held(machine: Machine, dataset: Value) -> Iterator[ProjectClass]:
    """Yield the classes of a data set and of the objects that it holds, with the bases that were read."""
    for value in _held(machine, dataset):
        yield from family(machine, value.cls)


def _held(machine: Machine, dataset: Value) -> Iterator[Instance]:
    """Yield the objects of the project in a data set, at any depth, itself included."""
    pending: list[Value] = [dataset]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if not isinstance(value, (Instance, ExternalObject)):
            pending += parts_of(value)
        elif value.number not in seen:
            seen.add(value.number)
            made = machine.object(value)
            if made is not None:
                pending += [*made.positional, *made.named.values()]
            if isinstance(value, Instance):
                yield value
                pending += machine.store.held(value.number)


# Streams that each worker goes over as a whole.


class Repeated(msgspec.Struct, frozen=True, eq=False):
    """A loader whose workers all give the items of their rank."""

    feeding: Feeding
    workers: int
    stream: ProjectClass
    module: Module
    """The module of that class."""


def repeated_streams(projection: Projection) -> Iterator[Repeated]:
    """Loaders over an IterableDataset that knows its rank, and of which each of several workers gives all items."""
    machine = projection.machine
    for feeding in feedings(projection):
        loader = feeding.loader
        dataset = loader.argument("dataset", 0)
        if not feeding.certain or len(feeding.alternatives) != 1 or not isinstance(dataset, Instance):
            continue
        workers = workers_of(projection, loader)
        told = constant(loader.argument("worker_init_fn", 9) or NONE)
        if workers < 2 or told is not None or not loader.complete or loader.ranks != ALL_RANKS:
            continue
        module = machine.script.module(dataset.cls.module)
        if loader.ordinal in machine.prepared or not is_stream(machine, dataset.cls) or module is None:
            continue
        if divides_by_rank(projection, dataset) and gives_all(projection, dataset):
            yield Repeated(feeding, workers, dataset.cls, module)


def is_stream(machine: Machine, cls: ProjectClass) -> bool:
    """Return whether a class is an IterableDataset of torch, and of nothing else, that was read."""
    return base_names(machine, cls) == (_STREAM,) and class_attribute(machine, cls, "__iter__") is not None


def divides_by_rank(projection: Projection, dataset: Instance) -> bool:
    """Return whether a stream gives each rank other items, by its own code or by what it was given."""
    if divided_by_rank(projection.machine, dataset):
        return True
    reached = reached_from(projection, dataset)
    tests = (node for _, place in reached.places for node in descend(place) if isinstance(node, ast.Compare))
    return any(gives_turns(projection.machine.store, test) for test in tests)


def gives_all(projection: Projection, dataset: Instance) -> bool:
    """Return whether every process that goes over a stream certainly gets the same items, in whatever order."""
    reached = reached_from(projection, dataset)
    if any(_OF_WORKERS.search(word) for word in reached.words()) or not _is_followed(projection, reached):
        return False
    machine = projection.machine
    holds_share = any(SHARE in tags_of(one) for one in machine.store.held(dataset.number))
    return not _makes_up(reached) or takes_own_part(machine, dataset) or holds_share


def divides_by_worker_alone(projection: Projection, dataset: Instance) -> bool:
    """Return whether a stream takes the part of a worker, by their number, and certainly the same one on every rank."""
    reached = reached_from(projection, dataset)
    words, store = set(reached.words()), projection.machine.store
    if not {"get_worker_info", "id", "num_workers"} <= words or reached.globals() & (
        store.rank_names | store.size_names
    ):
        return False
    if any(_OF_RANKS.search(word) or word in ("seed", "initial_seed") for word in words):
        return False
    return _is_followed(projection, reached) and not _makes_up(reached)


def _is_followed(projection: Projection, reached: Reached) -> bool:
    """Return whether code calls nothing that may hand out items in another way than it is written there."""
    own = {module.name.partition(".")[0] for module in projection.machine.script.modules}
    for _, name in reached.calls():
        root = name.partition(".")[0]
        known = root in sys.stdlib_module_names or root in _READING or root in own
        if (root and not known) or root in _HANDING_OUT:
            return False
    return not _draws(reached, _CHOOSING)


def _makes_up(reached: Reached) -> bool:
    """Return whether code draws numbers from what each process has of its own."""
    return _draws(reached, _MAKING_UP)


def _draws(reached: Reached, names: frozenset[str]) -> bool:
    """Return whether code draws by functions of some names from another generator than one that it gives a seed."""
    return any(
        isinstance(call, ast.Call) and last_name(call.func) in names and not has_seed(call, module.body_around(call))
        for module, place in (*reached.places, *reached.made)
        for call in descend(place)
    )


# What is set on a data set while workers keep their copies of it.


class Stale(msgspec.Struct, frozen=True, eq=False):
    """A loader that keeps its workers, and what is set in every epoch on the rank's own copy of its data set."""

    feeding: Feeding
    setting: Event
    """The assignment to an attribute that workers read."""
    epochs: LoopAround
    reader: str
    """The class whose attribute it is."""


def stale_copies(projection: Projection) -> Iterator[Stale]:
    """Loaders whose workers are kept from epoch to epoch, and read what each epoch sets in the rank's own process."""
    machine = projection.machine
    if any("_iterator" in module.words for module in machine.script.modules):
        return  # It may let the workers start anew by hand.
    for feeding in feedings(projection):
        loader, epochs = feeding.loader, loop_of_epochs(feeding)
        if epochs is None or any(around.node is epochs.node for around in loader.loops) or not feeding.certain:
            continue
        dataset = loader.argument("dataset", 0)
        if dataset is None or not workers_of(projection, loader) or not _are_kept(projection, loader):
            continue
        objects = {one.number: one.cls for one in _held(machine, dataset)}
        read = _read_by_workers(projection, dataset)
        for setting in projection.in_course("attribute"):
            owner = setting.receiver
            in_epoch = any(around.node is epochs.node for around in setting.loops)
            if not in_epoch or not isinstance(owner, Instance) or owner.number not in objects:
                continue
            if setting.name in read and _changes(machine, setting, owner):
                yield Stale(feeding, setting, epochs, owner.cls.node.name)
                break


def _are_kept(projection: Projection, loader: Event) -> bool:
    """Return whether a loader with workers keeps them: as it says, or wherever there are any, as it asks for."""
    if True in _settings(projection, loader, "persistent_workers", 13):
        return True
    words = {word.arg: word.value for word in loader.node.keywords} if isinstance(loader.node, ast.Call) else {}
    kept, workers = words.get("persistent_workers"), words.get("num_workers")
    if kept is None or workers is None or isinstance(kept, ast.Constant):
        return False
    return ast.unparse(workers) in (ast.unparse(part) for part in descend(kept))


def _changes(machine: Machine, setting: Event, owner: Instance) -> bool:
    """Return whether an assignment gives an attribute more than what it holds in the first epoch already."""
    (value,) = setting.positional
    return not isinstance(value, Const) or machine.store.get(owner.number, setting.name) != value


def _read_by_workers(projection: Projection, dataset: Value) -> frozenset[str]:
    """Return the attributes that items are made with: those that the methods of a data set read, and what they call."""
    machine = projection.machine
    bodies = (one for cls in _classes_held(machine, dataset) for one in cls.node.body)
    functions = grouped((one for one in bodies if isinstance(one, ast.FunctionDef)), lambda method: method.name)
    pending = {"__getitem__", "__getitems__", "__iter__", "__next__", "__call__"}
    read: set[str] = set()
    followed: set[str] = set()
    while pending:
        followed |= pending
        nodes = [node for name in pending for function in functions.get(name, ()) for node in descend(function)]
        found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        read |= found
        pending = (found & functions.keys()) - followed
    return frozenset(read)


def new_workers(stale: Stale, finding: Finding) -> Iterator[Fix]:
    """Let the workers start anew in every epoch: never safe, for that takes time."""
    loader = stale.feeding.loader
    if isinstance(loader.node, ast.Call):
        edit = without_keyword(loader.module, loader.node, "persistent_workers")
        yield from fix_of(finding, "let the workers start anew in every epoch (no persistent_workers)", edit)


def one_worker(repeated: Repeated, finding: Finding) -> Iterator[Fix]:
    """Let one worker read the items of a rank: never safe, for it may be too slow."""
    loader = repeated.feeding.loader
    module, call = loader.module, loader.node
    if not isinstance(call, ast.Call) or len(call.args) > 5:
        return
    written = next((word.value for word in call.keywords if word.arg == "num_workers"), None)
    edit = with_keyword(module, call, "num_workers", "1") if written is None else instead(module, written, "1")
    yield from fix_of(finding, "let one worker read the items of a rank (num_workers=1)", edit)
