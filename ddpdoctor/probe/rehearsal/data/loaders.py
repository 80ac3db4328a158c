"""Short passes over every DataLoader."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Optional

from ...call_listeners import on_call
from ...facts.joins import Joins
from ...facts.loaders import length_of, loader_facts, sharding_sampler
from ...journal import Journal
from ...user_code import GENERATOR, loops
from ..schedule import STEPS_PER_PASS, Schedule, Trail
from ..stop import Ending
from .awaited_ends import awaits_end
from .data_division import described
from .indices import Indices
from .lengths import Lengths
from .less_data import may_come_of_less_data
from .short_pass import ShortPass, is_cut
from .workers import few_workers


class Loaders:
    """Replacements of the iteration and the length of ``DataLoader``."""

    def __init__(self, journal: Journal, schedule: Schedule, ending: Ending, torch: Any) -> None:
        self._journal = journal
        self._schedule = schedule
        self._ending = ending
        self._torch = torch
        self._indices = Indices(journal, torch)
        self._lengths = Lengths()
        self._ordinals: dict[int, int] = {}
        self._sites: dict[int, int] = {}
        """Where each loader was made."""
        self._made = 0
        self._with_workers: set[int] = set()
        """Where loaders were made that had workers in a pass."""
        self._just_cut = False
        """A pass was cut and nothing was drawn or trained since."""
        self._joins = Joins(journal)
        self.training_begins: Callable[[], object] = lambda: None
        """Called when a loader is drawn from."""
        self.hand_out: Callable[[Trail, Any, Any], Any] = lambda trail, batch, inner: batch
        """See ``short_pass.Owner``."""
        self.in_workers_place: Callable[[Any], object] = lambda dataset: None
        """Called with the data set where the rank fetches what a worker would."""
        self._newest: Optional[Trail] = None
        """Pass that was drawn from last."""

    def install(self) -> None:
        """Patch the class; subclasses that override nothing of it follow."""
        loader_class = self._torch.utils.data.DataLoader
        loaders, journal = self, self._journal
        length = self._true_length = loader_class.__len__

        @functools.wraps(length)
        def __len__(loader: Any) -> int:
            true = int(length(loader))
            asker = sys._getframe(1)
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
            with few_workers(loader, loaders._torch, seen=loaders._had_workers(loader)) as workers:
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

    def _had_workers(self, loader: Any) -> bool:
        return self._sites.get(loader._ddpdoctor_number) in self._with_workers

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
        trail = self._schedule.begin(number, (self._sites.get(number), _stack(frame)), main, true)
        self._just_cut = False
        trail.ordinal = ordinal
        sampler = sharding_sampler(loader)
        self._journal.event(
            "pass_begun",
            number=trail.number,
            loader=number,
            ordinal=ordinal,
            site=site,
            set_epoch=getattr(sampler, "epoch", None) if sampler is not None else None,
            true_length=true,
            joined=self._joins.open > 0,
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


def _stack(frame: Optional[FrameType]) -> tuple[tuple[CodeType, Optional[int]], ...]:
    """Return the lines that lead to a call, a framework's too: it trains and evaluates under one line of the user's."""
    lines = []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)
