"""What DDP does with the gradients: how many bytes it reduces, and on some steps how long that took.

DDP's own logger measures; it is read in the forward after, when it has put together the iteration before.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Optional

from ...record.clock import from_system, offset_ns
from ..torch_compat import Capabilities
from .ddp_events import Searches
from .observer import Observer
from .timing.device_times import DeviceTimes

ALWAYS_MEASURED = 10
"""The first iterations of a module, which DDP's logger measures at any rate."""
_RATES = ((5_000_000, 20), (25_000_000, 10), (1 << 62, 1))
"""Of iterations shorter than so many nanoseconds the logger measures one of so many: a measured one costs 80 µs and
more with its reading. With fewer the screen's newest 120 steps would rest on a measurement or two."""
CUDA_RATE = 20
"""On CUDA a measured iteration waits for the events of the one before."""
READ_EVERY_NS = 10_000_000
LONGEST_NS = _RATES[-1][0]
LAYOUTS_NOTED = 4
"""Of each module: how its buckets lie is written so often, which is when they are made, rebuilt and changed since."""
MOST_BUCKETS = 4_096


class Reducer:
    """What is known of one DDP module."""

    __slots__ = (
        "began_ns", "buckets", "forwards", "kept_local", "layout", "layouts", "next_look", "next_read", "offset",
        "on_gpu", "opened_at", "place", "rate", "rated_at", "read_ns", "shortest_ns", "size_bytes", "unfollowed",
    )  # fmt: skip

    def __init__(self, size_bytes: int, buckets: int, *, on_gpu: bool) -> None:
        self.size_bytes = size_bytes
        self.on_gpu = on_gpu
        self.buckets = buckets
        self.layout: Optional[tuple[str, str]] = None
        """Sizes of the buckets and their parameters, in the logger's format; None before it has them."""
        self.layouts = 0
        self.forwards = 0
        """Forwards that record gradients."""
        self.next_look = 0
        """The next of them at which there is more to do than to note it."""
        self.kept_local = 0
        """Those of them that do not synchronise."""
        self.opened_at = -1
        """Backwards of the rank that were over when the newest training forward that synchronises began; -1 where that
        one raised."""
        self.place: tuple[Any, ...] = ()
        """Where that was called from."""
        self.unfollowed: Optional[Any] = None
        """Those before it that no backward has followed."""
        self.offset: Optional[int] = None
        """Iterations before the first that was seen; None until the logger has counted."""
        self.rate = 1
        self.rated_at = 0
        """Iteration in which the rate was set; of that one the logger may have measured a part only."""
        self.read_ns = 0
        """When the logger was last read."""
        self.next_read = 1
        """The next iteration that the logger measures the whole of, by the count of ``iterations``."""
        self.began_ns = 0
        """When the newest forward that synchronises began, of those that were taken in."""
        self.shortest_ns = LONGEST_NS
        """The shortest time between two of them since the rate was last looked at: a pause only lengthens it."""

    @property
    def iterations(self) -> int:
        """Forwards that synchronise: iterations by DDP's count, less ``offset``."""
        return self.forwards - self.kept_local

    def next_measured(self, iteration: int) -> int:
        """Return the first iteration after ``iteration`` of which DDP's logger measures the whole."""
        later = max(iteration, self.rated_at) + 1
        number = later + (self.offset or 0)
        return later if number <= ALWAYS_MEASURED else later + -number % self.rate


class Reductions:
    """The reducers of all DDP modules of a rank."""

    def __init__(
        self,
        observer: Observer,
        torch: Any,
        capabilities: Capabilities,
        wrap_number: Callable[[Any], Optional[int]],
        searches: Searches,
    ) -> None:
        self._observer = observer
        self._torch = torch
        self._read_logger = capabilities.read_logger
        self._searches = searches
        self._set_rate = capabilities.set_logger_rate
        self._wrap_number = wrap_number
        self._armed: list[Reducer] = []
        self._references: dict[int, weakref.ref[Any]] = {}
        self.known: dict[int, Reducer] = {}
        """What is known of the reducers, by the identity of the DDP module, for as long as that lives."""

    def read(self, ddp: Any, reducer: Reducer, now_ns: int) -> None:
        """Read DDP's logger, which has measured the whole iteration before, as a forward that synchronises is over."""
        before = reducer.iterations - 1
        if now_ns - reducer.read_ns >= READ_EVERY_NS:
            self._read(ddp, reducer, before)
            if reducer.rate == 1 and reducer.shortest_ns == LONGEST_NS:
                self._observer.moments.take_in()  # How short the steps are must be known soon.
            self._rate(ddp, reducer)
            reducer.read_ns = now_ns
        reducer.next_read = reducer.next_measured(before)

    def forward_began(self, reducer: Reducer, synchronises: bool, training: bool, now_ns: int) -> None:
        """Take in that a forward that records gradients has begun; where it synchronises its backward reduces them."""
        if synchronises != (reducer in self._armed):
            if synchronises:
                self._armed.append(reducer)
            else:
                self._armed.remove(reducer)
        if synchronises:
            took_ns, reducer.began_ns = now_ns - reducer.began_ns, now_ns
            if took_ns < reducer.shortest_ns:
                reducer.shortest_ns = took_ns
        self._observer.course.forward_began(True, training, now_ns)

    def backward_ended(self, now_ns: int) -> bool:
        """Take in that a backward is over: modules with a synchronising forward have reduced their gradients.

        Return whether any has.
        """
        modules, size_bytes, buckets = len(self._armed), 0, 0
        for reducer in self._armed:
            size_bytes += reducer.size_bytes
            buckets += reducer.buckets
        self._observer.course.backward_ended(modules, size_bytes, buckets, now_ns)
        self._armed.clear()
        return modules > 0

    def meet(self, ddp: Any) -> Reducer:
        """Follow a module that records gradients for the first time."""
        on_cuda = ddp.device_type == "cuda"
        if on_cuda and self._observer.steps.make_device_times is None:
            event = functools.partial(self._torch.cuda.Event, enable_timing=True)
            self._observer.steps.make_device_times = functools.partial(DeviceTimes, event)
            self._observer.on_device = True
            self.look_soon()
        size_bytes = sum(p.numel() * p.element_size() for p in ddp.module.parameters() if p.requires_grad)
        reducer, key = Reducer(size_bytes, 1, on_gpu=on_cuda), id(ddp)
        known, references = self.known, self._references

        def forget(gone: weakref.ref[Any]) -> None:
            if references.get(key) is gone:
                del references[key], known[key]

        references[key], known[key] = weakref.ref(ddp, forget), reducer
        if self._set_rate is not None:
            self._set_rate(ddp, 1)
        return reducer

    def look_soon(self) -> None:
        """Look at the next forward of each module, instead of only noting it."""
        for reducer in self.known.values():
            reducer.next_look = 0

    def _rate(self, ddp: Any, reducer: Reducer) -> None:
        """Choose how often the logger measures, by how long an iteration takes."""
        if self._set_rate is None or reducer.shortest_ns == LONGEST_NS:
            return
        rate = CUDA_RATE
        if ddp.device_type != "cuda":
            rate = next(rate for shorter_ns, rate in _RATES if reducer.shortest_ns < shorter_ns)
        reducer.shortest_ns = LONGEST_NS
        if rate != reducer.rate:
            self._set_rate(ddp, rate)
            reducer.rate, reducer.rated_at = rate, reducer.iterations

    def _read(self, ddp: Any, reducer: Reducer, before: int) -> None:
        """Take in what the logger has of the iteration ``before``."""
        if self._read_logger is None:
            return
        data = self._read_logger(ddp)
        number = int(data.get("iteration", -1))
        if reducer.offset is None and number > 0:
            reducer.offset = number - before
        if number != before + (reducer.offset or 0):
            return
        self._observer.journal.guarded(self._searches.looked, ddp, data, harms=("unused_searches",))
        buckets = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        reducer.buckets = buckets.count(",") + 1
        layout = buckets, str(data.get("rebuilt_per_bucket_param_indices") or "")
        if layout != reducer.layout and reducer.layouts < LAYOUTS_NOTED:
            reducer.layout, reducer.layouts = layout, reducer.layouts + 1
            self._observer.journal.guarded(self._note_layout, ddp, *layout, harms=("bucket_layouts",))
        window_ns = int(data.get("backward_comm_time", 0))
        overlap_ns = int(data.get("backward_compute_comm_overlap_time", 0))
        ready_ns = int(data.get("backward_compute_time_end", 0))
        reduced_ns = int(data.get("backward_comm_time_end", 0))
        if ready_ns > 0 and window_ns > 0:
            exposed_ns = max(0, window_ns - overlap_ns)
            moment = exposed_ns, window_ns, _since_epoch(ready_ns), _since_epoch(reduced_ns)
            self._observer.moments.keep((self._observer.steps.sampled, *moment))

    def _note_layout(self, ddp: Any, sizes: str, parameters: str) -> None:
        """Write how the gradients lie in buckets; which parameters are in which is known once DDP has rebuilt them."""
        wrap = self._wrap_number(ddp)
        if wrap is None or not sizes:
            return
        sizes_bytes = [int(size) for size in sizes.split(",")]
        members = [part.split() for part in parameters.split(",")]
        known = len(members) == len(sizes_bytes) and all(members)
        self._observer.journal.event(
            "bucket_layout",
            wrap=wrap,
            sizes_bytes=sizes_bytes[:MOST_BUCKETS],
            parameter_counts=[len(part) for part in members[:MOST_BUCKETS]] if known else [],
            first_parameters=[int(part[0]) for part in members[:MOST_BUCKETS]] if known else [],
        )


def _since_epoch(time_ns: int) -> int:
    """Convert a time of torch's own clock, which is the epoch's or, where torch was built so, the monotonic one."""
    return from_system(time_ns) if time_ns > offset_ns() else time_ns + offset_ns()
