"""What a walk of a script remembers: the variables of four ranks, the objects they made, and what they did so far."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from ddpdoctor.finding import Frame
from ddpdoctor.source.events import (
    Condition,
    ContextAround,
    Event,
    EventKind,
    Exit,
    Guard,
    Item,
    LoopAround,
    OwnTest,
    Part,
    Placed,
    Sinks,
    Statistic,
    shape_of,
    wider,
)
from ddpdoctor.source.interpreter.scopes import NO_ORIGINS, CallFrame, Cell, LoopFrame, Origins, Store
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    BUILTINS,
    NO_ARGUMENTS,
    NONE,
    OPAQUE,
    RANKS,
    UNSEEDED,
    Arguments,
    Const,
    DictValue,
    External,
    ExternalObject,
    Function,
    Instance,
    ProjectClass,
    Sharded,
    Value,
    is_agreed,
    tags_of,
)
from ddpdoctor.source.script.call_graph import Mentions, mentions_of
from ddpdoctor.source.script.module import Module, descend, last_name, once
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.vocabulary import DDP, LOCAL_RANK_NAMES, RANK_NAMES

# Names of flags that are true in a job with ranks: the group is made, or the model wrapped, where they hold.

_JOINS = frozenset({"torch.distributed.init_process_group", DDP})


@once
def mode_flags(script: Script) -> frozenset[str]:
    """Return the names and attributes that alone stand in the tests around what joins or wraps, in all modules."""
    return frozenset(name for module in script.modules for name in _flags(module)) - RANK_NAMES - LOCAL_RANK_NAMES


def _flags(module: Module) -> Iterator[str]:
    for call, full in module.calls():
        if full not in _JOINS:
            continue
        inner: ast.AST = call
        for around in module.in_function(call):
            plain = isinstance(around, ast.If) and isinstance(around.test, (ast.Name, ast.Attribute))
            if plain and inner in around.body and not _sets(around.body, around.test):  # type: ignore[attr-defined]
                yield last_name(around.test)  # type: ignore[attr-defined]
            inner = around


def _sets(body: Sequence[ast.stmt], test: ast.expr) -> bool:
    """Return whether the arm itself sets what was tested, as a count of tries."""
    text = ast.unparse(test)
    assigned = (node for part in body for node in descend(part) if isinstance(node, ast.Assign))
    return any(ast.unparse(target) == text for node in assigned for target in node.targets)


class Memory:
    """Variables, objects and events, as the ranks that run the present statement find and leave them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.keeps_workers = any("persistent_workers" in module.text for module in script.modules)
        """Loaders may keep their workers, and these what they have of a data set: what is set on it is noted."""
        self.spawns = script.spawns_ranks is not None
        self.root = ""
        """The function that the walk started from though nothing read calls it; empty in the script's own course."""
        self.phases: list[int] = []
        """Of the loops around the present code that are walked a turn after the other: the number of the turn."""
        self.in_parent = self.spawns
        """The present code runs in the process that spawns the ranks."""
        self.store = Store()
        for generator in range(3):
            self.store.write((-1, f"state {generator}"), UNSEEDED)
        self.mask = ALL_RANKS
        self.gone = 0
        """Mask of the ranks that left the program."""
        self.raised = 0
        """Mask of the ranks that left it by an exception."""
        self.sinks: Sinks = [[] for _ in RANKS]
        self.frames: list[CallFrame] = []
        self.loops: list[LoopFrame] = []
        self.calls: list[Frame] = []
        """Call sites of the frames, outermost first."""
        self.guards: list[Guard] = []
        self.filled_under: dict[Cell, Guard] = {}
        """Rank tests under which a container was filled, by the variable or attribute that holds it."""
        self.conditions: list[Condition] = []
        self.undecided = 0
        """How many undecided conditions are around the present statement."""
        self.trying = 0
        """How many ``try`` statements with handlers are around it."""
        self.tentative = False
        """The first walk of a loop is around it: it is taken back when the next turn finds something changed."""
        self.quiet = False
        """That walk is going to be taken back: it only finds out what the loop changes."""
        self.contexts: list[ContextAround] = []
        self.wrapped: dict[int, int] = {}
        """The number of the DDP object that holds a module, by the number of the module."""
        self.sharded: dict[int, Sharded] = {}
        """How modules are sharded, by their numbers."""
        self.meshes_are_flat = True
        """Every mesh of devices that was made has one dimension."""
        self.meshes_divide = True
        """No dimension of a mesh that was made is known to have one rank only."""
        self.loader_classes: dict[int, ProjectClass] = {}
        """The classes of loaders that the project derives from DataLoader, by the numbers of those."""
        self.helpers: dict[int, str] = {}
        """What objects of the project are by a base, an Accelerator or another helper; by their numbers."""
        self.cycles: dict[int, LoopAround] = {}
        """Loops that begin a loader again, with ``iter`` or in a generator that never ends, by its number."""
        self.items_aside: dict[int, Value] = {}
        """What data sets of the project give, as it was followed when the walk was over, by their numbers."""
        self.group_is_made_here = self.asked_early = False
        """The script itself makes the process group; it has asked for one where none was made on the way there."""
        self.groups: dict[ast.AST, tuple[bool, list[LoopFrame]]] = {}
        """Of calls that make process groups, whether the rank's number decides who comes there, and the loops."""
        self.prepared: set[int] = set()
        """Numbers of the loaders that an Accelerator divides between the ranks, and of what else it prepares."""
        self.computed: set[int] = set()
        """Numbers of the metrics that all ranks have computed."""
        self.handing_on: set[int] = set()
        """Numbers of the DDP objects that have the attributes of their modules, too."""
        self.inside_ddp = 0
        """Forwards through DDP objects around the present statement."""
        self.commands: dict[str, list[Function]] = {}
        """Functions that subcommands of the command line choose, by the attribute of the options that holds them."""
        self.settings: dict[ast.AST, Value] = {}
        """What functions are given by whatever starts them, which reads files of settings."""
        self.parts: dict[int, Part] = {}
        """Where ranks took parts of the data for themselves, by the number in the tags of those parts."""
        self.statistics: dict[int, Statistic] = {}
        """Where ranks made numbers of their own data, by the number in the tags of those numbers."""
        self.gradients = True
        self.synchronising = True
        """False inside of ``no_sync``."""
        self.draws: dict[tuple[ast.AST, tuple[Frame, ...]], Value] = {}
        """In which states recorded draws of random numbers found their generators, by node and chain."""
        self.draws_aside: dict[int, tuple[Placed, Value]] = {}
        """The same of what data sets give, by the numbers of the orders that they make."""
        self.aside = False
        """True in what a data set gives for any index."""
        self.events: dict[int, Event] = {}
        self.exits: list[Exit] = []
        self.counting: set[ast.AST] = set()
        """Conditions that depend on the remainder of a division, wherever that was computed."""
        self.rank_tests = 0
        """How many undecided conditions around the present statement the number of the rank decides."""
        self.deciding: list[Value] = []
        """What the conditions around the present statement are that could not be decided."""
        self.agreed_items: set[int] = set()
        """Loaders of whose batches some container held values before it got what the ranks agreed on."""
        self.own_tests: list[OwnTest] = []
        """Conditions around the present statement that every rank decides by something of its own."""
        self.own_raises: list[tuple[OwnTest, ast.AST]] = []
        """Where a rank may end by an exception or an exit code because of such a condition."""
        self.scope_modules: dict[str, int] = {}
        """Scope of each project module that was run."""
        self.outer_scopes: dict[int, tuple[int, ...]] = {}
        """The scopes that a function defined in a scope can see, innermost first."""
        self.unread: dict[ast.AST, Module] = {}
        """Calls of what was not read, of the project or of a library of which nothing is known, with their modules."""
        self.handed: dict[ast.AST, tuple[Value, ...]] = {}
        """What these calls are given, when they are last come to."""
        self.missed: set[str] = set()
        """Names that were not found where an assignment would put them; those of attributes begin with a dot."""
        self.changing: dict[tuple[ast.AST, Origins], dict[tuple[bool, int, str], Value]] = {}
        """Loops whose turns find what earlier turns changed, and what they found when they were walked last.

        A function that is given what comes from elsewhere finds other values in its loops. Cells have a flag before
        them for variables of the function around the loop, whatever the call."""
        self.visited: set[ast.AST] = set()
        """Functions that were walked."""
        self.agreeing: dict[ast.AST, set[str]] = {}
        """Of functions that were walked, the variables into which a collective wrote the same on every rank."""
        self.objects: dict[tuple[object, ...], int] = {}
        self.started: dict[ast.AST, set[tuple[object, ...]]] = {}
        """The keys of the objects that ranks made, by the call that started them."""
        self.steps = 0
        """Statements and expressions walked so far."""
        self.effort = Effort()
        self.uncertain = False
        """A call that only some ranks make was not followed though it may run collectives: do not compare the ranks."""
        self._numbers = 0
        self._mentions: Mentions | None = None
        self._barren_walks: dict[tuple[ast.AST, bool], int] = {}
        self.emitted = 0
        """How often anything was recorded, in quiet walks too."""

    @property
    def frame(self) -> CallFrame:
        """The call that is being walked."""
        return self.frames[-1]

    def number(self) -> int:
        """Return a new number for a scope, an object or an event."""
        self._numbers += 1
        return self._numbers

    def object_number(self, node: object) -> int:
        """Return the number of the object that a construction makes: one a call chain, whatever the turn of a loop."""
        key = (node, *self.phases, *((frame.file, frame.line) for frame in self.calls))
        if key not in self.objects:
            self.objects[key] = self.number()
        return self.objects[key]

    def numbers_of(self, node: ast.AST) -> set[int]:
        """Return the numbers of what a call makes, one a call chain."""
        return {number for key, number in self.objects.items() if key[0] is node}

    def maker_of(self, number: int) -> object:
        """Return the node that made an object of the project; None for what is none."""
        return next((key[0] for key, known in self.objects.items() if known == number), None)

    def assign(self, owner: int, name: str, value: Value) -> None:
        """Give a name a value on the ranks that run the present statement."""
        if self.mask == ALL_RANKS & ~self.gone or (self.mask == ALL_RANKS & ~1 & ~self.gone and is_agreed(value)):
            # What the others take from a broadcast is what rank 0 put into it: `if rank != 0: stop = box[0]`.
            if name in self.store.partly:
                self.store.note_makers(owner, name, ALL_RANKS)
            self.store.write((owner, name), value)
        else:
            if self.mask != self.frames[-1].entry or owner != self.frames[-1].scope:
                self.store.note_makers(owner, name, self.mask)
            self.store.set(owner, name, value, self.mask)

    def held(self, node: ast.AST, frame: CallFrame | None = None) -> Value:
        """Return what a variable or an attribute holds at the moment, without a note that it was looked up."""
        if isinstance(node, ast.Attribute):
            owner = self.held(node.value, frame)
            if isinstance(owner, DictValue):
                return dict(owner.entries).get(node.attr, NONE)
            return (self.store.get(owner.number, node.attr) if isinstance(owner, Instance) else None) or NONE
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.held(node.value, frame)
            return dict(owner.entries).get(node.slice.value, NONE) if isinstance(owner, DictValue) else NONE
        name = getattr(node, "id", "")
        return self.store.get(self.scope_that_holds(name, frame), name) or NONE

    def scope_that_holds(self, name: str, frame: CallFrame | None = None) -> int:
        """Return the scope of the variable that a name stands for in a call, by default in the present one."""
        frame = frame or self.frames[-1]
        scopes = (*frame.scopes, self.scope_modules.get(frame.module.name, -1))
        return next((scope for scope in scopes if self.store.get(scope, name) is not None), frame.scope)

    def is_parallel(self, value: Value) -> bool:
        """Return whether a value is a model whose ranks each work on data of their own."""
        if isinstance(value, ExternalObject) and value.name == DDP:
            return True
        how = self.sharded.get(value.number) if isinstance(value, (Instance, ExternalObject)) else None
        return how is not None and how.with_data

    def lookup(self, name: str) -> Value:
        """Return the value of a name in the scopes of the present function."""
        frame = self.frames[-1]
        owners = self.store.owners
        names = owners.get(frame.scope)
        if names is not None and (value := names.get(name)) is not None and name not in frame.globals:
            return value
        self.missed.add(name)
        if name not in frame.globals:
            for scope in frame.scopes[1:]:
                names = owners.get(scope)
                if names is not None and (value := names.get(name)) is not None:
                    return value
        names = owners.get(self.scope_modules.get(frame.module.name, -1))
        if names is not None and (value := names.get(name)) is not None:
            return value
        if name == "__name__":
            return Const(frame.module.name)
        if name == "__file__":
            return Const(str(frame.module.path))
        if name in BUILTINS:
            return BUILTINS[name]
        full = frame.module.aliases.get(name)
        return External(full) if full else OPAQUE

    @property
    def mode_flags(self) -> frozenset[str]:
        """The flags of the script that are true in a job with ranks."""
        return mode_flags(self.script)

    @property
    def mentions(self) -> Mentions:
        """What the functions of the script may lead to."""
        if self._mentions is None:
            self._mentions = mentions_of(self.script.modules)
        return self._mentions

    def can_skip(self, node: ast.AST, of_batch: bool) -> bool:
        """Return whether to pass over a function: its walks recorded and changed nothing and separated no ranks.

        One that is given something of a batch may tell of it, and has walks of its own for that where lines are noted.
        """
        return self._barren_walks.get((node, of_batch and not self.quiet), 0) >= MAXIMUM_BARREN_WALKS

    def note_walk(self, node: ast.AST, *, barren: bool, of_batch: bool) -> None:
        """Count the walks of a function that recorded nothing, changed nothing and separated no ranks.

        Functions that may run collectives are walked every time: what one rank skips has to be known.
        """
        never = not barren or getattr(node, "name", "") in self.mentions.synchronising
        for key in {(node, False), (node, of_batch and not self.quiet)}:
            self._barren_walks[key] = -(1 << 60) if never else self._barren_walks.get(key, 0) + 1

    def emit(
        self,
        kind: EventKind,
        name: str,
        node: ast.AST,
        given: Arguments = NO_ARGUMENTS,
        *,
        number: int = 0,
        receiver: Value | None = None,
        in_tree: bool = False,
    ) -> None:
        """Record what the present ranks do; with ``in_tree`` it is a collective that peers have to match."""
        self.emitted += 1
        ordinal = number or self.number()
        if self.quiet and not in_tree:
            return
        frame = self.frames[-1]
        around = frame.around
        if around is None or around[0] is not self.calls:
            around = frame.around = self.calls, tuple(reversed(self.calls)), tuple([one.scope for one in self.frames])
        here = Frame(frame.file, getattr(node, "lineno", 1), frame.function or "<module>")
        event = Event(
            ordinal=ordinal,
            kind=kind,
            name=name,
            node=node,
            module=frame.module,
            function=frame.function,
            chain=(here, *around[1]),
            ranks=self.mask,
            guards=tuple(self.guards) if self.guards else (),
            undecided=tuple(self.conditions) if self.conditions else (),
            loops=tuple([loop.around for loop in self.loops]) if self.loops else (),
            positional=tuple(given.positional),
            named=given.named,
            complete=given.complete or kind == "collective",  # Checks ask of these for what is given by name.
            receiver=receiver,
            gradients=self.gradients,
            in_parent=self.in_parent,
            rank_tested=self.rank_tests > 0,
            deciding=tuple(self.deciding) if self.deciding else (),
            root=self.root,
            scopes=around[2],
            contexts=tuple(self.contexts) if self.contexts else (),
            skips=(*[s for one in self.frames for s in one.skips], *[s for one in self.loops for s in one.skips]),
        )
        if not self.quiet:
            previous = self.events.get(ordinal)
            self.events[ordinal] = event if previous is None else wider(previous, event)
        if in_tree:
            for rank in RANKS:
                if self.mask >> rank & 1:
                    self.sinks[rank].append(event)

    def note_unread(self, node: ast.AST, given: Iterable[Value]) -> None:
        """Note that something is called of which nothing is known but its name, and what it is given."""
        self.unread.setdefault(node, self.frames[-1].module)
        self.handed[node] = tuple(given)

    def note(
        self, kind: EventKind, name: str, node: ast.AST, given: Arguments = NO_ARGUMENTS, receiver: Value | None = None
    ) -> None:
        """Record something that does not make the function around it worth more walks."""
        if not self.quiet:
            self.emit(kind, name, node, given, receiver=receiver)
            self.emitted -= 1

    def object(self, value: Value) -> Event | None:
        """Return the construction of an external object."""
        return self.events.get(value.number) if isinstance(value, ExternalObject) else None


# How much work a rank projection does: which functions are walked again, and what stands for those that are not.
#
# A function is walked at every call of it, because what it does depends on its arguments. Calls within calls and loops
# would make that exponential, so that walks are counted: past the bounds a call gives what earlier walks of the same
# function gave. Every function is walked at least once, which keeps the work in proportion to the length of the code.

MAXIMUM_STEPS = 50_000
"""Statements and expressions, repeated walks included, after which nothing is walked a second time: half a second."""
MOST_WALKS = 250
"""Walks of one function that are always made."""
MOST_STEPS = 2_500
"""Statements and expressions in one function, those of the functions that it calls included, that are always walked."""
ALIKE_WALKS = 4
"""Walks of one function, all with one result and the same collectives, after which these are its summary."""
WALKS_GIVEN = 2
"""Walks, given something of a batch, of a function that returns nothing, before its summary stands for such a call."""
ALIKE_STEPS = 120
"""Statements and expressions in those walks: smaller functions cost less than it takes to remember them."""
MAXIMUM_DEPTH = 40
"""Calls within calls."""
MAXIMUM_BARREN_WALKS = 4
"""Walks after which a function that never did anything of interest is passed over."""
LONGEST_KEPT = 50
"""Collectives and branches of a walk that are kept to stand for later calls."""


Flags: TypeAlias = "tuple[tuple[int | str, bool], ...]"
"""Arguments of a call that are True or False, by position or name."""
MOST_FLAGS = 8
"""Of one function that are walked for themselves."""


class Walks:
    """The results of the walks of one function."""

    __slots__ = ("alike", "count", "ended", "given", "items", "kept", "result", "results", "silent", "stands", "steps")

    def __init__(self) -> None:
        self.count = 0
        self.ended = 0
        """Walks that ended: a recursive function is in the middle of others."""
        self.steps = 0
        self.kept = False
        """The last walk is certain to be kept: it is in no turn of a loop that may be taken back."""
        self.stands = True
        """The last walk was not taken back, or there is none yet."""
        self.silent = True
        """No walk ran a collective."""
        self.alike = True
        """Every walk returned the same and ran the same collectives."""
        self.given: dict[bool, int] = {}
        """Walks by whether they were given what comes from a batch."""
        self.result: Value = OPAQUE
        self.results: dict[Origins, Value] = {}
        """What the walks returned, by what the arguments came from."""
        self.items: Sequence[Sequence[Item]] = ()
        """What each rank did in the last walk that all ranks made together; empty when there was none so short."""


class Effort:
    """The count of a projection's work by function."""

    def __init__(self) -> None:
        self.walks: dict[ast.AST, Walks] = {}
        self.cut: dict[ast.AST, str] = {}
        """Functions of which some call was not followed, with their names and files."""
        self.trials = 0
        """How many turns of loops around the present statement may be taken back."""
        self._flags: dict[ast.AST, set[Flags]] = {}
        self._tried: list[tuple[ast.AST, Flags]] = []
        """Flags of walks that may be taken back."""

    def is_called_anew(self, node: ast.AST, flags: Flags) -> bool:
        """Return whether a function is called with flags that no walk had: it may do something else by them."""
        known = self._flags.get(node, set())
        return bool(flags) and flags not in known and len(known) < MOST_FLAGS

    def note_flags(self, node: ast.AST, flags: Flags) -> None:
        """Keep the flags of a walk."""
        if flags:
            self._flags.setdefault(node, set()).add(flags)
            if self.trials:
                self._tried.append((node, flags))

    def passes_over(self, node: ast.AST, steps: int, of_batch: bool, origins: Origins) -> Walks | None:
        """Return the walks that replace one more walk of a function; None where it is walked. ``steps`` are done.

        What it returned for arguments that came from elsewhere may come from there, and is no summary of this call.
        A function that returns nothing is there for what it prints or writes: one that has printed settings so far is
        walked once more for a loss.
        """
        walks = self.walks.get(node)
        if walks is None:
            return None
        summarised = walks.alike and walks.ended >= ALIKE_WALKS and walks.steps >= ALIKE_STEPS
        summarised = summarised and (origins in walks.results or not any(map(tags_of, walks.results.values())))
        summarised = summarised and not (of_batch and walks.result == NONE and walks.given.get(True, 0) < WALKS_GIVEN)
        worn_out = walks.count >= MOST_WALKS and walks.steps >= MOST_STEPS
        # Walks that were taken back stand for none that is kept: what follows would be lost with them.
        tired = steps > MAXIMUM_STEPS and walks.stands
        return walks if summarised or worn_out or tired else None

    def note(
        self,
        node: ast.AST,
        steps: int,
        result: Value,
        items: Sequence[Sequence[Item]] | None,
        *,
        began: bool = False,
        ran_nothing: bool = True,
        of_batch: bool = False,
        origins: Origins = NO_ORIGINS,
    ) -> None:
        """Count a walk as soon as it begins, and keep its result; ``items`` when all ranks made it together."""
        walks = self.walks.get(node)
        if walks is None:
            walks = self.walks[node] = Walks()
        if began:
            walks.count += 1
            return
        walks.steps += steps
        walks.ended += 1
        walks.kept, walks.stands = not self.trials, True
        walks.given[of_batch] = walks.given.get(of_batch, 0) + (1 if self.trials else WALKS_GIVEN)
        walks.silent = walks.silent and ran_nothing
        if items is not None and sum(map(len, items)) <= LONGEST_KEPT:
            if walks.alike and walks.ended > 1:
                walks.alike = walks.result == result and _shapes(walks.items) == _shapes(items)
            walks.items, walks.result, walks.results[origins] = items, result, result
        else:
            walks.alike = False

    def take_back(self) -> None:
        """Leave one more walk to each function of which the last was taken back with its loop."""
        while self._tried:
            node, flags = self._tried.pop()
            self._flags[node].discard(flags)
        for walks in self.walks.values():
            if not walks.kept:
                walks.stands = False
                walks.ended = min(walks.ended, ALIKE_WALKS - 1)
            if 0 < walks.given.get(True, 0) < WALKS_GIVEN:
                walks.given[True] = 0

    def cut_functions(self) -> str:
        """Return the names of the functions that were not followed at every call; empty when all were."""
        names = list(dict.fromkeys(self.cut.values()))
        more = f" and {len(names) - 3} more functions" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more


def _shapes(items: Sequence[Sequence[Item]]) -> tuple[int, ...]:
    return tuple(shape_of(tuple(entries)) for entries in items)
