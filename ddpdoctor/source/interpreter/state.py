"""The ways of four ranks that run a script side by side.

One walk serves all ranks. A mask holds the ranks that run the present statement: a condition that ranks decide
differently splits the mask; one that cannot be decided runs both arms on the same ranks and joins what they leave
behind.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ddpdoctor.source.events import (
    ContextAround,
    Exit,
    Guard,
    Item,
    Jump,
    Loop,
    OwnTest,
    Sinks,
    Skip,
    branch_of,
    ended_by,
    settle,
)
from ddpdoctor.source.interpreter.memory import Memory
from ddpdoctor.source.interpreter.scopes import CallFrame, Cell, LoopFrame, Store
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    RANKS,
    Function,
    PerRank,
    Value,
    is_guessed,
    is_varying,
    only_of_files,
    tags_of,
    truth,
)
from ddpdoctor.source.script.module import Module

# Kinds of conditions that make nothing a rank's own: ranks mostly share their files, and know each other's numbers.
_NO_ORIGIN = frozenset({"files", "polled", "turns"})


def _may_catch(context: ContextAround) -> bool:
    """Return whether a context manager is one that swallows exceptions, by its name."""
    node = context.node
    return isinstance(node, ast.Call) and context.module.resolve(node.func).endswith("suppress")


class Machine(Memory):
    """Four ranks and the ways that they take: where they part, join, leave, and what that makes of their variables."""

    # What walks expressions, statements and calls, and judges conditions: it is put in, for all of it uses the state.
    evaluate: Callable[[ast.expr], Value]
    execute: Callable[[Sequence[ast.stmt]], None]
    apply: Callable[..., Value]
    call_function: Callable[..., Value]
    own_test: Callable[[ast.AST, Value], OwnTest | None]
    mark_decided: Callable[[Store, Iterable[Cell]], None]

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
            # What the process asks that spawns the ranks, it asks for all of them.
            own = None if self.in_parent else self.own_test(test, self.present(value))
            # Ranks mostly share their files, so that what is set where one is there is alike on all of them.
            varying = is_varying(value) and not only_of_files(value)
            by_rank = varying and (own is None or own.kind == "turns") and not tags_of(value)
            self.fork([when_true, when_false], test, value, varying=varying, own=own, by_rank=by_rank)
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
            after |= self.on(
                unknown, test, value, lambda: self.fork([when_true, when_false], value=value, varying=varying)
            )
        self.mask = after

    def present(self, value: Value) -> Value:
        """Return a value as the present ranks have it, without the entries of ranks that left."""
        if not isinstance(value, PerRank):
            return value
        entries = [entry for rank, entry in enumerate(value.values) if self.mask >> rank & 1]
        return entries[0] if all(entry == entries[0] for entry in entries) else value

    def on(self, ranks: int, test: ast.AST, value: Value, arm: Callable[[], None], module: Module | None = None) -> int:
        """Run one arm on some of the present ranks; return those that reach its end."""
        if not ranks:
            return 0
        before, self.mask = self.mask, ranks
        module = module or self.frame.module
        self.guards.append(Guard(test, module, ranks, is_guessed(value), value, len(self.conditions)))
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
        value: Value | None = None,
        *,
        varying: bool = False,
        own: OwnTest | None = None,
        by_rank: bool = False,
    ) -> None:
        """Run alternatives when it is not known which one is taken, and join what they leave behind.

        With ``by_rank`` the number of the rank decides, in a way that is not known.
        """
        start, outer = self.mask, self.sinks
        outcomes: list[tuple[dict[Cell, Value], int, Sinks]] = []
        self.undecided += 1
        self.rank_tests += by_rank
        if test is not None:
            self.conditions.append((self.frames[-1].module, test))
        if value is not None:
            self.deciding.append(self.present(value))
        if own is not None:
            self.own_tests.append(own)
        holders: list[CallFrame | LoopFrame] = [self.frame, *self.loops[-1:]]
        before = [holder.skips for holder in holders]
        skipped = before[:]
        for arm in arms:
            self.mask, self.sinks = start, [[] for _ in RANKS]
            self.store.begin()
            try:
                arm()
            finally:
                written = self.store.undo()
            outcomes.append((written, self.mask, self.sinks))
            for index, holder in enumerate(holders):
                skipped[index] += holder.skips[len(before[index]) :]
                holder.skips = before[index]
        for holder, skips in zip(holders, skipped, strict=True):
            holder.skips = skips
        if own is not None:
            self.own_tests.pop()
        if value is not None:
            self.deciding.pop()
        if test is not None:
            self.conditions.pop()
        self.undecided -= 1
        self.rank_tests -= by_rank
        self.sinks = outer
        previous: list[list[Item]] = []
        for rank in RANKS if any(any(sinks) for _, _, sinks in outcomes) else ():
            done = [sinks[rank] for _, _, sinks in outcomes]
            if start >> rank & 1 and any(done):
                if done != previous:  # Ranks that do the same share a branch, which is then looked at once.
                    branch, previous = branch_of(done, own), done
                outer[rank].append(branch)
        living = [(written, reached) for written, reached, _ in outcomes if reached]
        for number, (written, reached, sinks) in enumerate(outcomes):
            if not reached and living and start & ~ended_by(sinks, "raise", "exit"):
                self._leave_behind(written, sinks, start, varying, own)
                if own is not None and test is not None and value is not None:
                    self._skip(Skip(self.frame.module, test, self.present(value), number == 0), start, sinks)
        self.store.merge_arms(living or [(written, start) for written, _, _ in outcomes[:1]], varying)
        if own is not None and own.kind not in _NO_ORIGIN:
            self.mark_decided(self.store, {cell for written, _, _ in outcomes for cell in written})
        self.mask = 0
        for _, reached, _ in outcomes:
            self.mask |= reached

    def _leave_behind(
        self, written: dict[Cell, Value], sinks: Sinks, ranks: int, varying: bool, own: OwnTest | None
    ) -> None:
        if self.loops and ranks & ended_by(sinks, "break", "continue"):
            self.loops[-1].left_behind.append(written)
            self.loops[-1].skipped |= varying
            self.loops[-1].broken |= varying and ranks & ended_by(sinks, "break") != 0
            self.loops[-1].own = own or self.loops[-1].own
        else:
            if own is not None and own.kind not in _NO_ORIGIN:
                self.frame.own = own
            self.frame.by_rank |= varying
            self.frame.left_behind.append(written)

    def _skip(self, skip: Skip, ranks: int, sinks: Sinks) -> None:
        """Note by which condition some ranks are not in what comes next, but are with the others again after it."""
        is_in_loop = len(self.loops) > self.frame.loops_outside
        if is_in_loop and ranks & ended_by(sinks, "continue"):
            self.loops[-1].skips += (skip,)
        elif not is_in_loop and ranks & ended_by(sinks, "return"):
            self.frame.skips += (skip,)

    def jump(self, jump: Jump, node: ast.AST) -> None:
        """Let the present ranks leave the turn, the loop or the function."""
        for rank in RANKS:
            if self.mask >> rank & 1:
                self.sinks[rank].append(jump)
        self._note_exit(node, 0 if jump.kind == "exit" else self.frame.scope)
        self.mask = 0

    def leave_program(self, node: ast.AST, *, raising: bool) -> None:
        """Let the present ranks end: on this path alone, where it is undecided or another path returned before."""
        trying = self.trying or any(map(_may_catch, self.contexts))
        if self.undecided or trying or self.frame.returning & self.mask:
            if raising and self.own_tests and not self.quiet:
                self.own_raises.append((self.own_tests[-1], node))
            # What a handler may catch is no more than an early return.
            self.jump(Jump("raise" if raising else "return" if trying else "exit"), node)
            return
        self._note_exit(node, 0)
        self.gone |= self.mask
        self.raised |= self.mask if raising else 0
        self.mask = 0

    def _note_exit(self, node: ast.AST, scope: int) -> None:
        # A handler that raises what came to it is no decision: the failure itself ended the rank.
        again = isinstance(node, ast.Raise) and self.frame.module.is_in_handler(node)
        if self.guards and not self.quiet and not again:
            self.exits.append(Exit(node, self.frame.module, self.number(), self.guards[-1], self.mask, scope))

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
        lists += [self.conditions, self.deciding, self.contexts, self.own_tests]
        lengths = [len(entries) for entries in lists]
        counts = (self.mask, self.undecided, self.rank_tests, self.trying, self.inside_ddp)
        flags, journals = (self.gradients, self.synchronising, self.tentative, self.quiet), self.store.depth
        try:
            return self.collect(body)
        except RecursionError:
            for entries, length in zip(lists, lengths, strict=True):
                del entries[length:]
            self.mask, self.undecided, self.rank_tests, self.trying, self.inside_ddp = counts
            self.gradients, self.synchronising, self.tentative, self.quiet = flags
            while self.store.depth > journals:
                self.store.undo()
            self.effort.cut[node] = name()
            return [[] for _ in RANKS]

    def note_closures(self, given: Sequence[Value]) -> None:
        """Note that some ranks alone hand a function that may communicate to what cannot be read, and may call it.

        LBFGS calls its closure as it likes, an agent of a sweep the training.
        """
        if self.mask != ALL_RANKS & ~self.gone:
            functions = [value for value in given if isinstance(value, Function)]
            if any(getattr(one.node, "name", "") in self.mentions.synchronising for one in functions):
                self.uncertain = True

    def add_call(self, inner: Sinks, in_loop: bool = False) -> None:
        """Add what a called function did, its returns worked in, or what one turn of a loop did."""
        previous: list[Item] = []
        for rank, items in enumerate(inner):
            if items:
                self.steps += len(items) // 2
                if items != previous:
                    settled, previous = settle(items, (), in_loop), items
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
