"""What DDP objects do in a live run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import FrameType
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

from ..journal import Journal
from ..observed import batch_norms, tensor_digest, wrap_facts
from ..torch_compat import named_arguments, on_call
from .loaders import Passes
from .observer import Observer

FIRST_NOTED_AFTER = 20
"""Looks that are reported first; after them each time that there are twice as many, and when something was unused."""


class Search:
    """The search for unused parameters in one DDP module."""

    __slots__ = ("looks", "reported_at", "unused")

    def __init__(self) -> None:
        self.looks = 0
        self.reported_at = FIRST_NOTED_AFTER
        self.unused = False


class Searches:
    """The searches of all DDP modules of a rank."""

    def __init__(self, journal: Journal, wrap_number: Callable[[Any], Optional[int]]) -> None:
        self._journal = journal
        self._wrap_number = wrap_number
        self._searches: WeakKeyDictionary[Any, Search] = WeakKeyDictionary()

    def looked(self, ddp: Any, measured: Mapping[str, Any]) -> None:
        """Count a further iteration of a module that DDP's logger has measured."""
        size_bytes = measured.get("unused_parameter_size")
        wrap = self._wrap_number(ddp)
        if wrap is None or size_bytes is None or not ddp.find_unused_parameters or ddp.static_graph:
            return
        search = self._searches.get(ddp)
        if search is None:
            search = self._searches[ddp] = Search()
        if search.unused:
            return  # There is nothing more to learn.
        search.looks += 1
        search.unused = size_bytes != 0
        if search.unused or search.looks == search.reported_at:
            search.reported_at = 2 * search.looks
            self._journal.event("unused_search", wrap=wrap, looks=search.looks, found_unused=search.unused)


FORWARDS_NOTED = 32
WRAPS_NOTED = 64
SAVES_NOTED = 200
BUFFERS_NOTED = 6
"""Forwards of a wrap before which its buffers are digested …"""
MOST_BUFFER_BYTES = 1 << 24
"""… if there are no more of them."""


class Evidence:
    """Events of the same shape as a rehearsal's, of the first few of everything."""

    def __init__(self, observer: Observer, torch: Any, passes: Passes) -> None:
        self._passes = passes
        self._observer = observer
        self._journal = observer.journal
        self._torch = torch
        self._ddp_class = torch.nn.parallel.DistributedDataParallel
        self._wraps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._wrapped = 0
        self._forwards: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._noted_buffers: dict[int, int] = {}
        self._saves = 0

    def install(self) -> None:
        """Listen to the constructors."""
        on_call(self._journal, self._ddp_class, "__init__", after=self._ddp_made, harms=("wraps",))
        self._passes.listen_to_constructor()

    def note_wrap(self, ddp: Any, given: dict[str, Any], site: int, by_user: bool) -> None:
        """Note a DDP module; once each."""
        if ddp in self._wraps:
            return
        inner = [self._wraps[part] for part in ddp.module.modules() if part in self._wraps]
        number, self._wrapped = self._wrapped, self._wrapped + 1
        self._wraps[ddp] = number
        if number < WRAPS_NOTED:
            facts = wrap_facts(ddp, given, self._torch)
            self._journal.event("wrap", wrap=number, site=site, by_user=by_user, contains=inner, **facts)

    def wrap_number(self, ddp: Any) -> Optional[int]:
        """Return the number of a DDP module in the record; None where it was not noted."""
        number = self._wraps.get(ddp)
        return number if number is not None and number < WRAPS_NOTED else None

    def forward_begins(self, ddp: Any, frame: FrameType) -> None:
        """Note a forward through a DDP module: the first few of each module, and the first of each loader."""
        number = self._wraps.get(ddp)
        if number is None:
            self._journal.guarded(self.note_wrap, ddp, {}, -1, False, harms=("wraps", "forwards", "buffers"))
            return
        if number >= WRAPS_NOTED:
            return
        count = self._forwards.get(number, 0)
        self._forwards[number] = count + 1
        introduces = self._observer.has_new_loader and self._torch.is_grad_enabled()
        if count < FORWARDS_NOTED or introduces:
            self._journal.guarded(
                self._note_forward,
                ddp,
                number,
                frame,
                harms=("wrap_changes", "forwards", "backwards", "missing_gradients", "buffers"),
            )
        if introduces:
            self._observer.has_new_loader = False
        if count < BUFFERS_NOTED:
            self._journal.guarded(self._note_buffers, ddp, number, harms=("buffers",))

    def saves(self, arguments: tuple[Any, ...], options: dict[str, Any], frame: FrameType) -> None:
        """Note a file that is about to be saved with torch."""
        self._saves += 1
        if self._saves <= SAVES_NOTED:
            target = options.get("f", arguments[1] if len(arguments) > 1 else None)
            self._journal.guarded(self._note_save, target, frame, harms=("files",))

    def _ddp_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        journal = self._journal
        if journal.forked_from is None:
            given = named_arguments(self._ddp_class.__init__, arguments, options)
            by_user = journal.user_code.holds(frame.f_code.co_filename)
            self.note_wrap(arguments[0], given, journal.site(frame), by_user)

    def _note_forward(self, ddp: Any, number: int, frame: FrameType) -> None:
        gradients = bool(self._torch.is_grad_enabled())
        training = gradients and bool(ddp.training)
        site = self._journal.site(frame)
        if training:
            self._steps[site] = self._steps.get(site, 0) + 1
        first = training and self._steps[site] == 1
        newest = self._passes.newest
        self._journal.event(
            "forward",
            wrap=number,
            site=site,
            step=self._steps[site] if training else 0,
            gradients=gradients,
            training=bool(ddp.training),
            synchronised=gradients and bool(ddp.require_backward_grad_sync),
            pass_loader=newest.loader if newest is not None else -1,
            pass_ordinal=newest.ordinal if newest is not None else -1,
            batch=newest.yielded - 1 if newest is not None else -1,
            batch_norms=sum(layer.training for layer in batch_norms(ddp.module, self._torch)[0]) if first else None,
        )

    def _note_buffers(self, ddp: Any, number: int) -> None:
        """Note what the buffers of a module hold just before DDP broadcasts them."""
        if not (self._torch.is_grad_enabled() and ddp.training and ddp.require_backward_grad_sync):
            return
        buffers = dict(ddp.module.named_buffers())
        if not buffers or sum(map(_size_bytes, buffers.values())) > MOST_BUFFER_BYTES:
            return
        ordinal = self._noted_buffers.get(number, 0)
        self._noted_buffers[number] = ordinal + 1
        digests = {name: tensor_digest(buffer) for name, buffer in buffers.items()}
        self._journal.event("buffers", wrap=number, forward=ordinal, digests=digests)

    def _note_save(self, target: Any, frame: FrameType) -> None:
        try:
            path = os.path.abspath(os.fspath(target))
        except TypeError:
            return  # a stream of the user's
        existed = os.path.exists(path)
        self._journal.event("file", action="save", path=path, existed=existed, site=self._journal.site(frame))


def _size_bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())
