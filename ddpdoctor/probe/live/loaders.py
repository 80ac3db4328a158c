"""Passes over loaders, and the samples that they draw."""

from __future__ import annotations

import functools
from array import array
from types import FrameType
from typing import Any, Callable, Optional

from ..journal import Journal
from ..nonfinite import Batch
from ..observed import Joins, base_indices, digest_of, integers, leaves, length_of, loader_facts, sharding_sampler
from ..torch_compat import Capabilities, on_call
from ..user_code import GENERATOR, leave_no_frame, loops
from .observer import Observer


def places_of(length: int) -> frozenset[int]:
    """Return the indices of the samples that are reported."""
    return frozenset({0, 1, length // 2, length - 1})


def note_samples(journal: Journal, torch: Any, dataset: Any, indices: array[int], batch: Any) -> None:
    """Report the samples in a batch that every rank reports; none where its rows are not its samples."""
    length = len(dataset)
    wanted = places_of(length)
    if wanted.isdisjoint(indices):
        return
    columns = _columns(batch, len(indices), torch)
    if not columns:
        return
    for row, index in enumerate(indices):
        if index in wanted:
            journal.event(
                "sample",
                dataset_type=type(dataset).__qualname__,
                dataset_length=length,
                index=int(base_indices(dataset, array("q", [index]), torch)[0]),
                leaves=leaves([column[row] for column in columns], torch),
            )


def _columns(batch: Any, rows: int, torch: Any) -> Optional[list[Any]]:
    """Return the tensors of a batch; None when one of them does not have a row for each sample."""
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.dim() and batch.shape[0] == rows else None
    if isinstance(batch, dict):
        batch = [batch[key] for key in sorted(batch, key=str)]
    if not isinstance(batch, (list, tuple)):
        return None
    found: list[Any] = []
    for part in batch:
        columns = _columns(part, rows, torch)
        if columns is None:
            return None
        found.extend(columns)
    return found


PASSES_NOTED = 200
PASSES_WITH_INDICES = 2
"""Of each loader: whole lists of indices are kept of so many passes …"""
MOST_INDICES = 250_000
"""… that draw no more than so many."""
LOADERS_NOTED = 64


class Pass:
    """One pass over a loader."""

    __slots__ = (
        "averaged_before", "backwards", "batch_size", "drawn", "loader", "looks", "looped", "number", "ordinal",
        "wanted", "yielded",
    )  # fmt: skip

    def __init__(self, number: int, loader: int, ordinal: int, drawn: Optional[array[int]], averaged: int) -> None:
        self.number = number
        self.loader = loader
        self.ordinal = ordinal
        self.yielded = 0
        self.backwards = 0
        self.batch_size: Optional[int] = None
        """Samples that it draws for each batch; None where that may change from batch to batch."""
        self.drawn = drawn
        """The indices that its sampler drew; None where they are not kept."""
        self.averaged_before = averaged
        """Backwards of this rank that had averaged gradients when it began."""
        self.looped = False
        """A ``for`` statement of the user's draws its batches."""
        self.looks = {0}
        """Batches of which there is more to note than that they were drawn: the first, and where a sample is wanted."""
        self.wanted: frozenset[int] = frozenset()
        """Indices of the samples that are reported where they are drawn."""

    def wants(self, since: int) -> None:
        """Look at the batches that hold the wanted ones of the indices that were drawn after the first ``since``."""
        if self.batch_size and self.drawn is not None:
            for at in range(since, len(self.drawn)):
                if self.drawn[at] in self.wanted:
                    self.looks.add(at // self.batch_size)


class Passes:
    """The loaders of a rank; their events have the same shape as a rehearsal's."""

    def __init__(self, observer: Observer, torch: Any, capabilities: Capabilities) -> None:
        self._observer = observer
        self._journal = observer.journal
        self._torch = torch
        self._capabilities = capabilities
        self._joins = Joins(self._journal)
        self._averaged = 0
        """Backwards that averaged gradients."""
        self._loaders = 0
        self._ordinals: dict[int, int] = {}
        self._noted = 0
        self._open: dict[int, Pass] = {}
        """The newest pass of each loader, until it is over."""
        self.newest: Optional[Pass] = None
        """The pass that was drawn from last."""
        self._draw: Optional[Callable[[Any], Any]] = None
        """The loader's own way to draw indices; None where this torch has it not."""
        self._noting_draw: Optional[Callable[[Any], Any]] = None
        """What stands in its place while indices are kept."""
        self._keeping: set[int] = set()
        """Loaders whose newest pass keeps its indices."""
        self._length: Callable[[Any], Any] = torch.utils.data.DataLoader.__len__

    def install(self) -> None:
        """Make ready to patch the drawing of indices, and patch `join()`."""
        self._joins.install()
        if not self._capabilities.draws_indices:
            return
        draw, passes, observer = self._capabilities.loader_iterator._next_index, self, self._observer

        @functools.wraps(draw)
        def _next_index(iterator: Any) -> Any:
            try:
                index = draw(iterator)
            except BaseException as error:
                leave_no_frame(error)
                raise
            try:
                current = iterator.__dict__.get("_ddpdoctor_pass", passes)
                if current is passes:
                    passes._keep_early(iterator, index)
                elif current is not None and current.drawn is not None and observer.thread >= 0:
                    drawn, before = current.drawn, len(current.drawn)
                    try:  # It nearly always is a list of whole numbers: one in each step of the first passes.
                        drawn.fromlist(index)
                    except (TypeError, OverflowError):  # It has appended none.
                        drawn.extend(integers(index))
                    if len(drawn) > MOST_INDICES:
                        passes._keep_no_more(current)
                    elif current.wanted and not current.wanted.isdisjoint(drawn[before:]):
                        current.wants(before)
            except Exception as error:
                observer.fault("draw", error, harms=("passes",))
            return index

        self._draw, self._noting_draw = draw, _next_index

    def _follow_draws(self, *, on: bool) -> None:
        """Patch the drawing of indices or put it back: in most passes there is nothing to keep."""
        owner, draw, noting = self._capabilities.loader_iterator, self._draw, self._noting_draw
        if draw is not None and owner.__dict__.get("_next_index") is (draw if on else noting):
            owner._next_index = noting if on else draw

    def listen_to_constructor(self) -> None:
        """Note each loader that is made."""
        on_call(
            self._journal, self._torch.utils.data.DataLoader, "__init__", after=self._loader_made, harms=("loaders",)
        )

    def pass_is_requested(self, loader: Any) -> None:
        """Prepare for an iterator that is about to be made, or started anew where workers persist."""
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator.__dict__.pop("_ddpdoctor_pass", None)
        # Workers' first indices are drawn before the iterator is there.
        self._follow_draws(on=True)

    def pass_begins(self, loader: Any, iterator: Any, frame: FrameType) -> None:
        """Note that a pass over a loader begins."""
        self._journal.guarded(self._pass_begins, loader, iterator, frame, harms=("passes",))
        self._follow_draws(on=bool(self._keeping))

    def look(self, current: Pass, iterator: Any, batch: Any, frame: FrameType) -> None:
        """Look at a batch for the code that runs in ``frame``: a pass's first, or one with samples to note."""
        if current.wanted and current.drawn is not None:
            self._journal.guarded(self._note_samples, current, iterator, batch, harms=("loaders",))
        if not current.yielded:
            current.looped = self._is_looped(frame)
            if not current.ordinal:
                self._observer.meets_loader()
                self._journal.guarded(self.note_progress, harms=("passes",))

    def pass_ended(self, iterator: Any) -> None:
        """Note that a loader has no batch left."""
        current = iterator.__dict__.pop("_ddpdoctor_pass", None)
        if current is not None:
            self._open.pop(current.loader, None)
            self._journal.guarded(self._end_pass, current, iterator, harms=("passes",))
            self._keeping.discard(current.loader)
            self._follow_draws(on=bool(self._keeping))

    def note_progress(self) -> None:
        """Report how far the passes under way have come; any thread may call it."""
        for current in list(self._open.values()):
            self._journal.event("pass_progress", number=current.number, **self._come_so_far(current))

    def backward_ended(self, current: Optional[Pass], averages: bool) -> None:
        """Count a backward with a batch of a pass; ``averages`` is whether DDP averaged gradients in it."""
        self._averaged += averages
        if current is not None:
            current.backwards += 1

    def newest_batch(self) -> Batch:
        """Return where the newest batch came from, and the samples in it, where the pass keeps them."""
        current = self.newest
        if current is None:
            return Batch()
        size, place = current.batch_size or 0, current.yielded - 1
        drawn = current.drawn[place * size : (place + 1) * size] if current.drawn is not None else ()
        return Batch(current.loader, current.ordinal, place, tuple(drawn))

    def _loader_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._journal.forked_from is not None:
            return
        loader, number = arguments[0], self._loaders
        self._loaders += 1
        object.__setattr__(loader, "_ddpdoctor_loader", number)
        if number < LOADERS_NOTED:
            length = length_of(loader, self._length)
            facts = loader_facts(loader, self._torch)
            self._journal.event("loader", loader=number, site=self._journal.site(frame), length=length, **facts)

    def _pass_begins(self, loader: Any, iterator: Any, frame: FrameType) -> None:
        number = loader.__dict__.get("_ddpdoctor_loader", LOADERS_NOTED)
        ordinal = self._ordinals[number] = self._ordinals.get(number, -1) + 1
        self._keeping.discard(number)
        if number >= LOADERS_NOTED or self._noted >= PASSES_NOTED:
            iterator._ddpdoctor_pass = None
            return
        self._noted += 1
        self._observer.moments.take_in()
        # The workers' first indices were drawn when the iterator was made.
        early = iterator.__dict__.pop("_ddpdoctor_early", None)
        keeps = ordinal < PASSES_WITH_INDICES and getattr(iterator, "_dataset_kind", 1) == 0
        drawn = (early or array("q")) if keeps else None
        if keeps:
            self._keeping.add(number)
        iterator._ddpdoctor_pass = current = Pass(self._noted, number, ordinal, drawn, self._averaged)
        current.batch_size = getattr(loader, "batch_size", None)
        if keeps and not ordinal:
            current.wanted = self._journal.guarded(_wanted, iterator._dataset, harms=("loaders",)) or frozenset()
            current.wants(0)
        self._open[number] = current
        sampler = sharding_sampler(loader)
        self._journal.event(
            "pass_begun",
            number=current.number,
            loader=number,
            ordinal=ordinal,
            site=self._journal.site(frame),
            set_epoch=getattr(sampler, "epoch", None) if sampler is not None else None,
            true_length=length_of(loader, self._length),
            joined=self._joins.open > 0,
        )

    def _keep_early(self, iterator: Any, index: Any) -> None:
        """Keep what workers draw before their iterator is linked to its loader."""
        drawn = iterator.__dict__.setdefault("_ddpdoctor_early", array("q"))
        if len(drawn) < MOST_INDICES and self._observer.thread >= 0:
            drawn.extend(integers(index))

    def _keep_no_more(self, current: Pass) -> None:
        current.drawn = None
        self._keeping.discard(current.loader)
        self._follow_draws(on=bool(self._keeping))

    def _note_samples(self, current: Pass, iterator: Any, batch: Any) -> None:
        size = current.batch_size
        if size and current.drawn is not None and getattr(iterator, "_in_order", True):
            indices = current.drawn[current.yielded * size : (current.yielded + 1) * size]
            if not current.wanted.isdisjoint(indices):
                note_samples(self._journal, self._torch, iterator._dataset, indices, batch)

    def _end_pass(self, current: Pass, iterator: Any) -> None:
        fields: dict[str, Any] = {}
        if current.drawn is not None:
            base = base_indices(iterator._dataset, current.drawn, self._torch)
            name = self._journal.writer.write_indices(current.number, array("q", sorted(base)))
            fields = {"index_count": len(base), "index_digest": digest_of(base.tobytes()), "indices": name}
        self._journal.event(
            "pass_ended",
            number=current.number,
            end="exhausted",
            **self._come_so_far(current),
            **fields,
        )

    def _come_so_far(self, current: Pass) -> dict[str, Any]:
        self._observer.moments.take_in()
        return {
            "yielded": current.yielded,
            "backwards": current.backwards,
            "averaged": self._averaged - current.averaged_before,
            "looped": current.looped,
        }

    def _is_looped(self, frame: Optional[FrameType]) -> bool:
        """Return whether a ``for`` statement of the user's goes through a loader, progress bars seen through."""
        holds = self._journal.user_code.holds
        while frame is not None and loops(frame):
            if holds(frame.f_code.co_filename):
                return not frame.f_code.co_flags & GENERATOR
            frame = frame.f_back
        return False


def _wanted(dataset: Any) -> frozenset[int]:
    return places_of(len(dataset))
