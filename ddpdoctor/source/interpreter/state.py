"""The state of a rank projection: four ranks that run the script side by side.

One walk serves all ranks. A mask holds the ranks that run the present statement: a condition that ranks decide
differently splits the mask; one that cannot be decided runs both arms on the same ranks and joins what they leave
behind.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpdoctor.finding import Frame
from ddpdoctor.source.events import (
    Condition,
    ContextAround,
    Event,
    EventKind,
    Exit,
    Guard,
    Item,
    Jump,
    Loop,
    LoopAround,
    OwnTest,
    Part,
    Sinks,
    all_raise,
    branch_of,
    settle,
    wider,
)
from ddpdoctor.source.interpreter.budget import MAXIMUM_BARREN_WALKS, Effort
from ddpdoctor.source.interpreter.scopes import CallFrame, Cell, LoopFrame, Signature, Store
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    BUILTINS,
    OPAQUE,
    RANKS,
    Const,
    External,
    ExternalObject,
    PerRank,
    ProjectClass,
    Value,
    is_agreed,
    is_guessed,
    is_varying,
    tags_of,
    truth,
)
from ddpdoctor.source.script.call_graph import Mentions, mentions_of
from ddpdoctor.source.script.script import Script

Evaluate = Callable[["Machine", ast.expr], Value]
Execute = Callable[["Machine", Sequence[ast.stmt]], None]
Apply = Callable[..., Value]
OwnTestOf = Callable[["Machine", ast.AST, Value], OwnTest | None]
MarkDecided = Callable[[Store, Iterable[Cell]], None]
"""What walks expressions, statements and calls, and judges conditions; injected, for all of it uses the state."""


class Machine:
    """Four ranks, their variables, and what they did so far."""

    def __init__(
        self,
        script: Script,
        spawns: bool,
        evaluate: Evaluate,
        execute: Execute,
        apply: Apply,
        call_function: Apply,
        own_test: OwnTestOf,
        mark_decided: MarkDecided,
    ) -> None:
        self.script = script
        self.evaluate, self.execute = evaluate, execute
        self.apply, self.call_function = apply, call_function
        self.own_test, self.mark_decided = own_test, mark_decided
        self.spawns = spawns
        self.root = ""
        """The function that the walk started from though nothing read calls it; empty in the script's own course."""
        self.in_parent = spawns
        """The present code runs in the process that spawns the ranks."""
        self.store = Store()
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
        self.loader_classes: dict[int, ProjectClass] = {}
        """The classes of loaders that the project derives from DataLoader, by the numbers of those."""
        self.cycles: dict[int, LoopAround] = {}
        """Loops that begin a loader again, with ``iter`` or in a generator that never ends, by its number."""
        self.prepared: set[int] = set()
        """Numbers of the loaders that an Accelerator divides between the ranks."""
        self.handing_on: set[int] = set()
        """Numbers of the DDP objects that have the attributes of their modules, too."""
        self.inside_ddp = 0
        """Forwards through DDP objects around the present statement."""
        self.parts: dict[int, Part] = {}
        """Where ranks took parts of the data for themselves, by the number in the tags of those parts."""
        self.gradients = True
        self.synchronising = True
        """False inside of ``no_sync``."""
        self.draws_apart = False
        """The ranks have seeded torch's random numbers differently."""
        self.events: dict[int, Event] = {}
        self.exits: list[Exit] = []
        self.counting: set[ast.AST] = set()
        """Conditions that depend on the remainder of a division, wherever that was computed."""
        self.own_tests: list[OwnTest] = []
        """Conditions around the present statement that every rank decides by something of its own."""
        self.own_raises: list[tuple[OwnTest, ast.AST]] = []
        """Where a rank may end by an exception or an exit code because of such a condition."""
        self.scope_modules: dict[str, int] = {}
        """Scope of each project module that was run."""
        self.outer_scopes: dict[int, tuple[int, ...]] = {}
        """The scopes that a function defined in a scope can see, innermost first."""
        self.signatures: dict[ast.AST, Signature] = {}
        self.missed: set[str] = set()
        """Names that were not found where an assignment would put them; those of attributes begin with a dot."""
        self.changing: dict[ast.AST, dict[tuple[bool, int, str], Value]] = {}
        """Loops whose turns find what earlier turns changed, and what they found when they were walked last.

        Cells have a flag before them that tells variables of the function around the loop, whatever the call."""
        self.visited: set[ast.AST] = set()
        """Functions that were walked."""
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
        self._barren_walks: dict[ast.AST, int] = {}
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
        key = (node, *((frame.file, frame.line) for frame in self.calls))
        if key not in self.objects:
            self.objects[key] = self.number()
        return self.objects[key]

    def assign(self, owner: int, name: str, value: Value) -> None:
        """Give a name a value on the ranks that run the present statement."""
        if self.mask == ALL_RANKS & ~self.gone or (self.mask == ALL_RANKS & ~1 & ~self.gone and is_agreed(value)):
            # What the others take from a broadcast is what rank 0 put into it: `if rank != 0: stop = box[0]`.
            self.store.write((owner, name), value)
        else:
            self.store.set(owner, name, value, self.mask)

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
    def mentions(self) -> Mentions:
        """What the functions of the script may lead to."""
        if self._mentions is None:
            self._mentions = mentions_of(self.script.modules)
        return self._mentions

    def can_skip(self, node: ast.AST) -> bool:
        """Return whether to pass over a function: its walks recorded and changed nothing and separated no ranks."""
        return self._barren_walks.get(node, 0) >= MAXIMUM_BARREN_WALKS

    def note_walk(self, node: ast.AST, *, barren: bool) -> None:
        """Count the walks of a function that recorded nothing, changed nothing and separated no ranks.

        Functions that may run collectives are walked every time: what one rank skips has to be known.
        """
        if not barren or getattr(node, "name", "") in self.mentions.synchronising:
            self._barren_walks[node] = -(1 << 60)
        else:
            self._barren_walks[node] = self._barren_walks.get(node, 0) + 1

    def emit(
        self,
        kind: EventKind,
        name: str,
        node: ast.AST,
        positional: Sequence[Value] = (),
        named: Mapping[str, Value] | None = None,
        *,
        number: int = 0,
        complete: bool = True,
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
            positional=tuple(positional),
            named=named or {},
            complete=complete,
            receiver=receiver,
            gradients=self.gradients,
            in_parent=self.in_parent,
            root=self.root,
            scopes=around[2],
            contexts=tuple(self.contexts) if self.contexts else (),
        )
        if not self.quiet:
            previous = self.events.get(ordinal)
            self.events[ordinal] = event if previous is None else wider(previous, event)
        if in_tree:
            for rank in RANKS:
                if self.mask >> rank & 1:
                    self.sinks[rank].append(event)

    def note(
        self,
        kind: EventKind,
        name: str,
        node: ast.AST,
        positional: Sequence[Value] = (),
        named: Mapping[str, Value] | None = None,
        complete: bool = True,
        receiver: Value | None = None,
    ) -> None:
        """Record something that does not make the function around it worth more walks."""
        if not self.quiet:
            self.emit(kind, name, node, positional, named, complete=complete, receiver=receiver)
            self.emitted -= 1

    def object(self, value: Value) -> Event | None:
        """Return the construction of an external object."""
        return self.events.get(value.number) if isinstance(value, ExternalObject) else None

    def decide(self, value: Value) -> tuple[int, int, int]:
        """Return the masks of the present ranks for which a condition is true, false, and not known."""
        if value.__class__ is not PerRank:
            outcome = truth(value)
            return (0, 0, self.mask) if outcome is None else (self.mask, 0, 0) if outcome else (0, self.mask, 0)
        masks = [0, 0, 0]
        for rank, entry in enumerate(value.values):
            if self.mask >> rank & 1:
                outcome = truth(entry)
                masks[2 if outcome is None else 0 if outcome else 1] |= 1 << rank
        return masks[0], masks[1], masks[2]

    def split(self, test: ast.AST, value: Value, when_true: Callable[[], None], when_false: Callable[[], None]) -> None:
        """Run the arms of a condition on the ranks that take them."""
        yes, no, unknown = self.decide(value)
        start = self.mask
        if unknown == start:
            if any(kind == "remainder" for kind, _ in tags_of(value)):
                self.counting.add(test)
            own = self.own_test(self, test, self._present(value))
            self.fork([when_true, when_false], test, varying=is_varying(value), own=own)
            return
        if yes == start:
            when_true()
            return
        if no == start:
            when_false()
            return
        after = 0
        for ranks, arm in ((yes, when_true), (no, when_false)):
            after |= self.on(ranks, test, value, arm)
        if unknown:
            varying = is_varying(value)
            after |= self.on(unknown, test, value, lambda: self.fork([when_true, when_false], varying=varying))
        self.mask = after

    def _present(self, value: Value) -> Value:
        """Return a value as the present ranks have it, without the entries of ranks that left."""
        if not isinstance(value, PerRank):
            return value
        entries = [entry for rank, entry in enumerate(value.values) if self.mask >> rank & 1]
        return entries[0] if all(entry == entries[0] for entry in entries) else value

    def on(self, ranks: int, test: ast.AST, value: Value, arm: Callable[[], None]) -> int:
        """Run one arm on some of the present ranks; return those that reach its end."""
        if not ranks:
            return 0
        before, self.mask = self.mask, ranks
        self.guards.append(Guard(test, self.frame.module, ranks, is_guessed(value), value, len(self.conditions)))
        try:
            arm()
        finally:
            self.guards.pop()
            after, self.mask = self.mask, before
        return after

    def fork(
        self,
        arms: Sequence[Callable[[], None]],
        test: ast.AST | None = None,
        *,
        varying: bool = False,
        own: OwnTest | None = None,
    ) -> None:
        """Run alternatives when it is not known which one is taken, and join what they leave behind."""
        start, outer = self.mask, self.sinks
        outcomes: list[tuple[dict[Cell, Value], int, Sinks]] = []
        self.undecided += 1
        if test is not None:
            self.conditions.append((self.frames[-1].module, test))
        if own is not None:
            self.own_tests.append(own)
        for arm in arms:
            self.mask, self.sinks = start, [[] for _ in RANKS]
            self.store.begin()
            try:
                arm()
            finally:
                written = self.store.undo()
            outcomes.append((written, self.mask, self.sinks))
        if own is not None:
            self.own_tests.pop()
        if test is not None:
            self.conditions.pop()
        self.undecided -= 1
        self.sinks = outer
        previous: list[list[Item]] = []
        for rank in RANKS if any(any(sinks) for _, _, sinks in outcomes) else ():
            done = [sinks[rank] for _, _, sinks in outcomes]
            if start >> rank & 1 and any(done):
                if done != previous:  # Ranks that do the same share a branch, which is then looked at once.
                    branch, previous = branch_of(done, own), done
                outer[rank].append(branch)
        living = [(written, reached) for written, reached, _ in outcomes if reached]
        for written, reached, sinks in outcomes:
            if not reached and living and not all_raise(sinks, start):
                self._leave_behind(written, sinks, start, varying)
        self.store.merge_arms(living or [(written, start) for written, _, _ in outcomes[:1]], varying)
        if own is not None and own.kind != "files":
            self.mark_decided(self.store, {cell for written, _, _ in outcomes for cell in written})
        self.mask = 0
        for _, reached, _ in outcomes:
            self.mask |= reached

    def _leave_behind(self, written: dict[Cell, Value], sinks: Sinks, ranks: int, varying: bool) -> None:
        in_turn = any(
            isinstance(sink[-1], Jump) and sink[-1].kind in ("break", "continue")
            for rank, sink in enumerate(sinks)
            if ranks >> rank & 1 and sink
        )
        if in_turn and self.loops:
            self.loops[-1].left_behind.append(written)
            self.loops[-1].skipped |= varying
        else:
            self.frame.left_behind.append(written)

    def jump(self, jump: Jump, node: ast.AST) -> None:
        """Let the present ranks leave the turn, the loop or the function."""
        for rank in RANKS:
            if self.mask >> rank & 1:
                self.sinks[rank].append(jump)
        self._note_exit(node, self.frame.scope)
        self.mask = 0

    def leave_program(self, node: ast.AST, *, raising: bool) -> None:
        """Let the present ranks end; where another path returned before that is no more than an early return."""
        if self.undecided or self.trying or self.frame.returning & self.mask:
            if raising and self.own_tests and not self.quiet:
                self.own_raises.append((self.own_tests[-1], node))
            self.jump(Jump("raise" if raising else "return"), node)
            return
        self._note_exit(node, 0)
        self.gone |= self.mask
        self.raised |= self.mask if raising else 0
        self.mask = 0

    def _note_exit(self, node: ast.AST, scope: int) -> None:
        # A handler that raises what came to it is no decision: the failure itself ended the rank.
        again = isinstance(node, ast.Raise) and self.frame.module.is_in_handler(node)
        if self.guards and not self.quiet and not again:
            number = self.number()
            self.exits.append(Exit(number, node, self.frame.module, self.guards[-1], self.mask, scope))

    def collect(self, body: Callable[[], None]) -> list[list[Item]]:
        """Run something and return what each rank did in it instead of adding it to the present trees."""
        outer, self.sinks = self.sinks, [[] for _ in RANKS]
        try:
            body()
        finally:
            inner, self.sinks = self.sinks, outer
        return inner

    def collect_safely(self, body: Callable[[], None], node: ast.AST, name: Callable[[], str]) -> list[list[Item]]:
        """Do as ``collect``; count code that is nested too deeply as not followed, and as doing nothing.

        ``node`` and ``name`` identify what was not followed.
        """
        lists: list[list[Any]] = [self.frames, self.loops, self.calls, self.guards]
        lists += [self.conditions, self.contexts, self.own_tests]
        lengths = [len(entries) for entries in lists]
        counts = (self.mask, self.undecided, self.trying, self.inside_ddp)
        flags, journals = (self.gradients, self.synchronising, self.tentative, self.quiet), self.store.depth
        try:
            return self.collect(body)
        except RecursionError:
            for entries, length in zip(lists, lengths, strict=True):
                del entries[length:]
            self.mask, self.undecided, self.trying, self.inside_ddp = counts
            self.gradients, self.synchronising, self.tentative, self.quiet = flags
            while self.store.depth > journals:
                self.store.undo()
            self.effort.cut[node] = name()
            return [[] for _ in RANKS]

    def add_call(self, inner: Sinks) -> None:
        """Add what a called function did, its returns worked in."""
        previous: list[Item] = []
        for rank, items in enumerate(inner):
            if items:
                self.steps += len(items) // 2
                if items != previous:
                    settled, previous = settle(items), items
                self.sinks[rank].extend(settled if settled is not None else (Jump("raise"),))

    def add_loop(self, inner: Sinks, turns: Sequence[int | None], node: ast.AST, own: OwnTest | None = None) -> None:
        """Add the body of a loop; ``turns`` holds its number of turns by rank, where ranks differ in it."""
        loop: Loop | None = None
        previous: list[Item] = []
        for rank, items in enumerate(inner):
            if items:
                if loop is None or items != previous or turns[rank] != loop.turns:
                    loop, previous = Loop(tuple(items), turns[rank], node, test=own), items
                self.sinks[rank].append(loop)
