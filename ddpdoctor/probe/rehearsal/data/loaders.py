"""Short passes over every DataLoader."""

from __future__ import annotations

import ast
import contextlib
import functools
import multiprocessing
import os
import re
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, Optional
from weakref import ref

from ...journal import Journal
from ...nonfinite import Batch
from ...observed import Joins, base_indices, digest_of, integers, length_of, loader_facts, sharding_sampler
from ...torch_compat import on_call, replaces
from ...user_code import GENERATOR, loops, outwards, tree_around
from ..loop_subjects import covering, covers
from ..schedule import STEPS_PER_PASS, Ending, Schedule, Trail
from .lengths import Lengths, ShortPass, is_cut
from .samples import TOLD_EPOCH, described

# What was set on a data set after workers that are kept have copied it, and their copies are read for.

_METHODS = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
"""What makes items; other methods are followed from there."""
_PLAIN = (bool, int, float, str, type(None))
MOST_OBJECTS = 50


class Copies:
    """What the data set of each loader that keeps its workers held when these were started."""

    def __init__(self) -> None:
        self._held: dict[int, dict[tuple[int, str], object]] = {}
        """By the number of the loader: by object and attribute the value, or the identity, of what is there."""

    def changed(self, loader: Any, number: int) -> list[str]:
        """Return the attributes that items are made with and that the workers of a loader have otherwise."""
        if not loader.num_workers or not loader.persistent_workers:
            return []
        objects = list(_objects(loader.dataset))
        now = {(id(one), name): _kept(value) for one in objects for name, value in vars(one).items()}
        before = self._held.setdefault(number, now)
        if before is now:
            return []
        read = {name for one in objects for name in _read(type(one))}
        changed = {name for (one, name), value in now.items() if before.get((one, name), value) != value}
        return sorted(changed & read)


def _objects(dataset: Any) -> Iterator[Any]:
    """Yield a data set and what it holds, as far as that has attributes."""
    pending, seen = [dataset], set[int]()
    while pending and len(seen) < MOST_OBJECTS:
        one = pending.pop(0)
        if id(one) in seen or not hasattr(one, "__dict__") or isinstance(one, type):
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            pending.extend(value if isinstance(value, (list, tuple)) and len(value) <= MOST_OBJECTS else (value,))


def _kept(value: Any) -> object:
    return value if isinstance(value, _PLAIN) else ("object", id(value))


def _read(cls: type) -> set[str]:
    """Return the names that the methods which make items read, with those of what they call in their class."""
    found: set[str] = set()
    pending = [name for name in _METHODS if hasattr(cls, name)]
    followed: set[str] = set()
    while pending:
        name = pending.pop()
        followed.add(name)
        method = getattr(cls, name, None)
        code = getattr(getattr(method, "fget", method), "__code__", None)
        if code is not None:
            names = set(_names(code))
            found |= names
            pending.extend(one for one in names if one not in followed and hasattr(cls, one))
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# Fewer workers for the few batches of a rehearsal, where each takes long to start.

AT_MOST_SPAWNED = 1
"""Workers of a pass that yields a few batches. In a rank that ``mp.spawn`` started a worker is no fork, but a Python of
its own that imports the script and torch again: 2 ranks with 4 workers took 110 s on two cores before the first batch.
One worker still shows what cannot be pickled; started for each of the passes of torch's ImageNet example, it took 32 of
82 s of CPU."""
AT_MOST_FORKED = 4
"""The batches of a pass that is cut: further workers (a public script has 32 for each rank) would have none to make."""


@contextlib.contextmanager
def few_workers(loader: Any, torch: Any, *, seen: bool = False, none: bool = False) -> Iterator[int]:
    """Make the iterator that is made meanwhile start few workers, and fewer where they are spawned; yield how many.

    With ``seen`` a pass of such a loader had workers already: they are not spawned again, and the rank fetches, unless
    the script prepares them. A data set that divides itself among its workers keeps them all, unless it is to have
    ``none``. The script reads its own.
    """
    asked = loader.num_workers
    divides = isinstance(loader.dataset, torch.utils.data.IterableDataset) and not none
    at_most = 0 if none else AT_MOST_FORKED
    if _spawns(loader) and not none:
        at_most = 0 if seen and _does_without(loader) else AT_MOST_SPAWNED
    if asked <= at_most or divides:
        yield asked
        return
    loader.num_workers = at_most
    try:
        yield at_most
    finally:
        loader.num_workers = asked


def _does_without(loader: Any) -> bool:
    """Return whether a rank that fetches by itself fetches the same: no worker is prepared, kept or watched."""
    return loader.worker_init_fn is None and not loader.persistent_workers and not loader.timeout


def _spawns(loader: Any) -> bool:
    """Return whether the workers of a loader are started anew, and not forked."""
    context = loader.multiprocessing_context
    method = multiprocessing.get_start_method(allow_none=True) if context is None else context.get_start_method()
    return method in ("spawn", "forkserver")


# Which exceptions code may raise because a pass that it relied on was cut.

_OF_LESS_DATA = (ZeroDivisionError, IndexError, KeyError, AssertionError, ValueError, UnboundLocalError)
"""Exceptions of code that meets fewer batches than it counts on …"""
_SIZES = re.compile(r"must match|shape|size|dimension", re.IGNORECASE)
"""… and torch's messages then."""


def may_come_of_less_data(error: BaseException, is_users: Callable[[str], bool]) -> bool:
    """Return whether more batches might have spared the script this exception.

    They cannot where a missing key is named nowhere in the user's files but where it is looked up.
    """
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        return _stands_elsewhere(error.args[0], error, is_users)
    sizes = isinstance(error, RuntimeError) and _SIZES.search(str(error))
    return bool(sizes) or isinstance(error, _OF_LESS_DATA)


def _stands_elsewhere(key: str, error: BaseException, is_users: Callable[[str], bool]) -> bool:
    failing = {(os.path.realpath(one.f_code.co_filename), line) for one, line in walk_tb(error.__traceback__)}
    named = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    files = {os.path.realpath(name) for name in named if os.path.isfile(name)} | {name for name, _ in failing}
    word = re.compile(rf"(?<!\w){re.escape(key)}(?!\w)")
    for file in filter(is_users, files):
        try:
            with open(file, encoding="utf-8", errors="replace") as source:
                lines = source.readlines()
        except OSError:
            return True
        if any(word.search(line) and (file, number) not in failing for number, line in enumerate(lines, 1)):
            return True
    return not any(map(is_users, files))


# The whole index list of a pass that was cut: what its sampler would have drawn, read without the data.

MOST_INDICES = 8_000_000
MOST_DRAIN_S = 3.0
WIDEST = 4
"""A sampler that draws more than so many times the data set has no end."""
LISTS_KEPT = 3
"""Lists are read for so many passes of a loader; later epochs show nothing new."""


class Indices:
    """The indices that the iterators of loaders draw from their samplers."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._endless: set[int] = set()
        """Loaders whose sampler is not read to its end."""
        self._wide: set[int] = set()
        """Those of them whose sampler has none, as far as it was read."""

    def install(self) -> None:
        """Keep the indices that an iterator draws from its sampler, in the order in which it draws them."""
        iterator_class = self._torch.utils.data.dataloader._BaseDataLoaderIter

        @replaces("_next_index", iterator_class)
        def _next_index(draw: Any, iterator: Any) -> Any:
            index = draw(iterator)
            iterator._ddpdoctor_batches = iterator.__dict__.get("_ddpdoctor_batches", 0) + 1
            if iterator._dataset_kind == 0:
                self._journal.guarded(self._keep, iterator, index, harms=("passes",))
            return index

        @replaces("_reset", iterator_class)
        def _reset(restart: Any, iterator: Any, *arguments: Any, **options: Any) -> Any:
            # Persistent workers serve all passes with one iterator.
            iterator.__dict__.pop("_ddpdoctor_drawn", None)
            iterator.__dict__.pop("_ddpdoctor_batches", None)
            return restart(iterator, *arguments, **options)

    def whole(self, iterator: Any, loader: int, ordinal: int, number: int) -> dict[str, Any]:
        """Return count, digest and file of the whole index list; empty when it has no end or no indices."""
        if ordinal >= LISTS_KEPT or loader in self._endless or getattr(iterator, "_dataset_kind", 1) != 0:
            return {}
        if not self._drain(iterator):
            self._endless.add(loader)
            if len(iterator.__dict__["_ddpdoctor_drawn"]) >= self._most(iterator):
                self._wide.add(loader)
            return {}
        drawn: array[int] = iterator.__dict__.get("_ddpdoctor_drawn", array("q"))
        base = base_indices(iterator._dataset, drawn, self._torch)
        name = self._journal.writer.write_indices(number, array("q", sorted(base)))
        fields = {"index_count": len(base), "index_digest": digest_of(base.tobytes()), "indices": name}
        return {"batch_count": iterator.__dict__.get("_ddpdoctor_batches", 0), **fields}

    def have_no_end(self, loader: int) -> bool:
        """Return whether a loader's sampler drew so much more than its data set that its passes have no end."""
        return loader in self._wide

    def _keep(self, iterator: Any, index: Any) -> None:
        drawn = iterator.__dict__.setdefault("_ddpdoctor_drawn", array("q"))
        if len(drawn) < MOST_INDICES:
            drawn.extend(integers(index))

    def _drain(self, iterator: Any) -> bool:
        """Draw the rest of the sampler's indices; False when there are too many, or the ranks draw them together."""
        started, most = time.monotonic(), self._most(iterator)
        ring = self._journal.ring
        collectives = ring.count if ring is not None else 0
        for count, index in enumerate(iterator._sampler_iter):
            iterator._ddpdoctor_batches = iterator.__dict__.get("_ddpdoctor_batches", 0) + 1
            self._keep(iterator, index)
            if count % 1024 == 0 and time.monotonic() - started > MOST_DRAIN_S:
                return False
            if len(iterator.__dict__["_ddpdoctor_drawn"]) >= most:
                return False
            if ring is not None and ring.count != collectives:
                return False
        return True

    def _most(self, iterator: Any) -> int:
        try:
            return min(MOST_INDICES, WIDEST * len(iterator._dataset) + 1024)
        except TypeError:
            return MOST_INDICES


# Whether code that draws a batch is prepared for the end of the pass, or counts on there being one more.

_CATCHING = frozenset({"StopIteration", "Exception", "BaseException"})


def awaits_end(frame: FrameType, is_users: Callable[[str], bool]) -> bool:
    """Return whether anything on the stack from ``frame``, which draws, would take a ``StopIteration``; True in doubt.

    Loops do, and handlers that do not raise again. A library in between may.
    """
    frames = list(outwards(frame))
    while frames and not is_users(frames[-1].f_code.co_filename):
        frames.pop()
    if not frames:
        return True
    return any(
        not is_users(one.f_code.co_filename)
        or loops(one)
        or bool(one.f_code.co_flags & GENERATOR)
        or _is_prepared(one, draws=one is frame)
        for one in frames
    )


def _is_prepared(frame: FrameType, *, draws: bool) -> bool:
    """Return whether the line that a frame is at stands under a handler of the end, or draws with a default."""
    tree = tree_around(frame)
    around = [] if tree is None else covering(tree, frame.f_lineno)
    return not around or any(
        _suppresses(node)
        or (draws and _draws_with_default(node))
        or any(_catches(handler) for handler in getattr(node, "handlers", ()) if _is_tried(node, frame.f_lineno))
        for node in around
    )


def _is_tried(node: ast.AST, line: int) -> bool:
    return any(covers(statement, line) for statement in getattr(node, "body", ()))


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.body and isinstance(handler.body[-1], ast.Raise):
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [getattr(kind, "id", getattr(kind, "attr", None)) for kind in kinds]
    return any(name is None or name in _CATCHING for name in names)


def _suppresses(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any("suppress" in ast.dump(item.context_expr) for item in node.items)


def _draws_with_default(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next" and len(node.args) > 1


class Loaders:
    """Replacements of the iteration and the length of ``DataLoader``."""

    def __init__(self, journal: Journal, schedule: Schedule, ending: Ending, torch: Any) -> None:
        self._journal = journal
        self._schedule = schedule
        self._ending = ending
        self._torch = torch
        self._indices = Indices(journal, torch)
        self._lengths = Lengths()
        self._copies = Copies()
        self._ordinals: dict[int, int] = {}
        self._sites: dict[int, int] = {}
        """Where each loader was made."""
        self._made = 0
        self._with_workers: set[int] = set()
        """Where loaders were made that had workers in a pass."""
        self._just_cut = False
        """A pass was cut and nothing was drawn or trained since."""
        self._joins = Joins(journal)
        self.no_workers = False
        """The rank itself fetches, whatever the script asks for."""
        self.training_begins: Callable[[], object] = lambda: None
        """Called when a loader is drawn from."""
        self.hand_out: Callable[[Trail, Any, Any], Any] = lambda trail, batch, inner: batch
        """Returns the batch that the script gets, which is the one that was drawn unless the rehearsal is a stress."""
        self.in_workers_place: Callable[[Any], object] = lambda dataset: None
        """Called with the data set where the rank fetches what a worker would."""
        self._newest: Optional[Trail] = None
        """Pass that was drawn from last …"""
        self._newest_inner: Callable[[], Any] = lambda: None
        """… and its iterator, for as long as that lives."""

    def install(self) -> None:
        """Patch the class; subclasses that override nothing of it follow."""
        loader_class = self._torch.utils.data.DataLoader
        loaders, journal = self, self._journal
        length = self._true_length = loader_class.__len__

        @functools.wraps(length)
        def __len__(loader: Any) -> int:
            true = int(length(loader))
            asker = _asker(sys._getframe(1), journal.user_code.holds)
            planned = journal.guarded(loaders._length_for, loader, true, asker, harms=("passes",))
            return true if planned is None else planned

        loader_class.__len__ = __len__
        on_call(journal, loader_class, "__init__", after=self._loader_made, harms=("loaders", "passes"))
        self._shorten(loader_class)
        self._indices.install()
        self._joins.install()

    def _shorten(self, loader_class: Any) -> None:
        """Replace the iteration that a class defines; only the outermost one of a loader's class is cut."""
        iterate = loader_class.__iter__
        loaders, journal = self, self._journal

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Any:
            if type(loader).__iter__ is not __iter__ or not hasattr(loader, "_ddpdoctor_number"):
                return iterate(loader)
            loaders._ending.check()
            site = journal.here()
            seen = loaders._sites.get(loader._ddpdoctor_number) in loaders._with_workers
            with few_workers(loader, loaders._torch, seen=seen, none=loaders.no_workers) as workers:
                inner = iterate(loader)
            journal.guarded(loaders._fetches, loader, workers, harms=())
            trail = journal.guarded(loaders.begin, loader, site, sys._getframe(1), harms=("passes",))
            return inner if trail is None else ShortPass(loaders, trail, inner)

        __iter__._ddpdoctor_shortens = True  # type: ignore[attr-defined]
        loader_class.__iter__ = __iter__

    def _loader_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Write the facts of a loader at its construction, and shorten its passes."""
        if self._journal.rank is None and not self._journal.plan.get("spawns_ranks"):
            return
        loader, site = arguments[0], self._journal.site(frame)
        number, self._made = self._made, self._made + 1
        self._journal.event(
            "loader",
            loader=number,
            site=site,
            length=self._length(loader),
            **loader_facts(loader, self._torch),
            **described(sharding_sampler(loader), loader.dataset),
        )
        self._sites[number] = site
        object.__setattr__(loader, "_ddpdoctor_number", number)
        defining = next(one for one in type(loader).__mro__ if "__iter__" in vars(one))
        if not hasattr(vars(defining)["__iter__"], "_ddpdoctor_shortens"):
            self._shorten(defining)

    def _length_for(self, loader: Any, true: int, asker: Any) -> int:
        """Return the length for the code at ``asker``."""
        purpose = self._lengths.purpose(asker) if hasattr(loader, "_ddpdoctor_number") else ""
        if not purpose:
            return true
        return self._schedule.length(loader._ddpdoctor_number, true, turns=purpose == "turns")

    def _fetches(self, loader: Any, workers: int) -> None:
        """Note how many workers a pass has; without those of the script, the rank fetches in their place."""
        if workers:
            self._with_workers.add(self._sites[loader._ddpdoctor_number])
        elif loader.num_workers:
            self.in_workers_place(loader.dataset)

    def begin(self, loader: Any, site: int, frame: FrameType) -> Trail:
        """Begin a pass that the code at ``frame`` requests."""
        self.training_begins()
        number = loader._ddpdoctor_number
        ordinal = self._ordinals[number] = self._ordinals.get(number, -1) + 1
        main = threading.current_thread() is threading.main_thread()
        true = self._length(loader)
        trail = self._schedule.begin(
            number, (self._sites.get(number), _stack(frame, self._journal.user_code.holds)), main, true
        )
        self._just_cut = False
        trail.ordinal = ordinal
        sampler = sharding_sampler(loader)
        stale = None if self.no_workers else self._journal.guarded(self._copies.changed, loader, number, harms=())
        self._journal.event(
            "pass_begun",
            number=trail.number,
            loader=number,
            ordinal=ordinal,
            site=site,
            set_epoch=getattr(sampler, "epoch", None) if sampler is not None else None,
            true_length=true,
            joined=self._joins.open > 0,
            **({"told_epoch": True} if hasattr(sampler, TOLD_EPOCH) else {}),
            **({"stale": stale} if stale else {}),
        )
        return trail

    def is_over(self, trail: Trail) -> bool:
        """Return whether the pass has yielded what it may; called before each batch."""
        self._newest = trail
        self._ending.check()
        return self._schedule.is_over(trail)

    def drawn(self, trail: Trail) -> None:
        """Count a batch of the pass."""
        self._just_cut = False
        self._schedule.drawn(trail)

    def newest_batch(self) -> tuple[int, int, int, bool]:
        """Return loader, pass and position of the newest batch (-1 without any), and ``Forward.looped``."""
        trail = self._newest
        if trail is None:
            return -1, -1, -1, False
        return trail.loader, trail.ordinal, trail.yielded - 1, trail.looped

    def draws_from(self, iterator: Any) -> None:
        """Remember the iterator that the newest batch came from."""
        self._newest_inner = ref(iterator)

    def newest_samples(self) -> Batch:
        """Return where the newest batch came from, and the samples in it."""
        trail, inner = self._newest, self._newest_inner()
        if trail is None:
            return Batch()
        size, place = getattr(getattr(inner, "_index_sampler", None), "batch_size", None) or 0, trail.yielded - 1
        drawn = getattr(inner, "_ddpdoctor_drawn", ())[place * size : (place + 1) * size]
        return Batch(trail.loader, trail.ordinal, place, tuple(drawn))

    def is_looped(self, frame: FrameType) -> bool:
        """Return whether a ``for`` statement of the user's draws a batch, in the main thread and in no generator."""
        code = frame.f_code
        return (
            loops(frame)
            and not code.co_flags & GENERATOR
            and self._journal.user_code.holds(code.co_filename)
            and threading.current_thread() is threading.main_thread()
        )

    def is_counted(self, trail: Trail, frame: FrameType) -> bool:
        """Return whether code draws one batch more without being prepared for the end: it counts what it draws."""
        if trail.is_counted is None:
            counted = self._journal.guarded(awaits_end, frame, self._journal.user_code.holds, harms=()) is False
            trail.is_counted = trail.main and self._is_bare(frame) and counted
        return trail.is_counted

    def may_go_on(self, trail: Trail) -> bool:
        """Return whether a pass with batches that are counted may yield more than others."""
        return self._schedule.may_go_on(trail)

    def was_cut(self, trail: Trail, frame: FrameType, end: str) -> None:
        """End the rehearsal where batches or steps are counted: no handler awaits what has no end."""
        counted = end == "counted" or (trail.main and self._is_bare(frame) and self._indices.have_no_end(trail.loader))
        if counted and (trail.brief or trail.steps >= STEPS_PER_PASS):
            self._ending.end("steps")

    def _is_bare(self, frame: FrameType) -> bool:
        """Return whether the user's code draws by itself, and no ``for`` statement."""
        code = frame.f_code
        return not loops(frame) and self._journal.user_code.holds(code.co_filename)

    def finish(self, trail: Trail, inner: Any, end: str) -> None:
        """End a pass: read its sampler to the end, without its data, and note both."""
        if trail.ended:
            return
        self._schedule.end(trail)
        self._just_cut = self._just_cut or end in ("cut", "counted")
        fields: dict[str, Any] = {}
        if end != "abandoned":
            ordinal = self._ordinals.get(trail.loader, 0)
            whole = self._journal.guarded(
                self._indices.whole, inner, trail.loader, ordinal, trail.number, harms=("passes",)
            )
            fields = whole or {}
        self._journal.event(
            "pass_ended",
            number=trail.number,
            yielded=trail.yielded,
            end=end,
            by_length=trail.read_length.turns and trail.yielded == trail.read_length.length,
            backwards=trail.backwards,
            **fields,
        )

    def trained(self) -> None:
        """Count a backward."""
        self._just_cut = False
        late = self._schedule.backward_ended()
        if late is not None:
            # Its batches were fetched ahead, or are used again and again.
            self._journal.event("pass_trained", number=late.number, backwards=late.backwards)

    def caused(self, error: BaseException) -> str:
        """Return how an exception comes of a cut of ours: ``cut``, ``perhaps-cut``, or empty when it does not."""
        if is_cut(error):
            return "cut"
        if not self._just_cut or not isinstance(error, Exception):
            return ""
        if error.__context__ is not None and is_cut(error.__context__):
            return "cut"
        return "perhaps-cut" if may_come_of_less_data(error, self._journal.user_code.holds) else ""

    def _length(self, loader: Any) -> Optional[int]:
        return length_of(loader, self._true_length)


def _asker(frame: FrameType, is_users: Callable[[str], bool]) -> FrameType:
    """Return who asks for a length: not the progress bar that a library has around the loader."""
    while frame.f_code.co_name == "__len__" and not is_users(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _stack(frame: FrameType, is_users: Callable[[str], bool]) -> tuple[tuple[CodeType, Optional[int]], ...]:
    """Return the lines that lead to a call, a framework's too: it trains and evaluates under one line of the user's.

    A library's generator hands batches on. A progress bar that rank 0 wraps around the loader in each epoch anew, and
    around the bar before, makes no other place of it.
    """
    frames = (one for one in outwards(frame) if not one.f_code.co_flags & GENERATOR or is_users(one.f_code.co_filename))
    return tuple((one.f_code, one.f_lineno) for one in frames)
