"""What DDP does with the gradients: how many bytes it reduces, and on some steps how long that took.

DDP's own logger measures; it is read in the forward after, when it has put together the iteration before.
"""

from __future__ import annotations

import functools
import time
from typing import Any
from weakref import WeakKeyDictionary

from ..capabilities import Capabilities
from .device_times import DeviceTimes
from .observer import Observer
from .stopwatch import BUCKETS, EPOCH_NS, REDUCED_BYTES, SYNCHRONISED

CPU_RATE = 1
CUDA_RATE = 20
"""DDP's logger measures one iteration of so many: on CUDA a measured one waits for the events of the one before."""
READ_EVERY_NS = 10_000_000
"""Reading costs about 20 µs."""


class Reducer:
    """What is known of one DDP module."""

    __slots__ = ("armed", "buckets", "forwards", "iteration", "read_ns", "size_bytes")

    def __init__(self, size_bytes: int, buckets: int) -> None:
        self.size_bytes = size_bytes
        self.buckets = buckets
        self.armed = False
        """Its next backward reduces."""
        self.forwards = 0
        """Forwards that record gradients."""
        self.iteration = -1
        """The newest one that was read."""
        self.read_ns = 0


class Reductions:
    """Follows the reducers of all DDP modules of a rank."""

    def __init__(self, observer: Observer, torch: Any, capabilities: Capabilities) -> None:
        self._observer = observer
        self._torch = torch
        self._read_logger = capabilities.read_logger
        self._set_rate = capabilities.set_logger_rate
        self._armed: list[Reducer] = []
        self._reducers: WeakKeyDictionary[Any, Reducer] = WeakKeyDictionary()

    def forward_begins(self, ddp: Any) -> Reducer:
        """A forward that records gradients begins."""
        reducer = self._reducers.get(ddp) or self._meet(ddp)
        reducer.forwards += 1
        if bool(ddp.require_backward_grad_sync) != reducer.armed:
            reducer.armed = not reducer.armed
            if reducer.armed:
                self._armed.append(reducer)
            else:
                self._armed.remove(reducer)
        return reducer

    def forward_ended(self, ddp: Any, reducer: Reducer) -> None:
        """A forward is over: if it synchronises, DDP's logger has the iteration before."""
        if not reducer.armed:
            return
        now_ns = time.monotonic_ns()
        if now_ns - reducer.read_ns >= READ_EVERY_NS:
            reducer.read_ns = now_ns
            self._read(ddp, reducer)

    def backward_ended(self, tally: list[int]) -> None:
        """A backward is over: modules whose forward synchronised have reduced their gradients."""
        for reducer in self._armed:
            reducer.armed = False
            tally[SYNCHRONISED] += 1
            tally[REDUCED_BYTES] += reducer.size_bytes
            tally[BUCKETS] += reducer.buckets
        self._armed.clear()

    def _meet(self, ddp: Any) -> Reducer:
        on_cuda = ddp.device_type == "cuda"
        if on_cuda and self._observer.steps.make_device_times is None:
            event = functools.partial(self._torch.cuda.Event, enable_timing=True)
            self._observer.steps.make_device_times = functools.partial(DeviceTimes, event)
        size_bytes = sum(p.numel() * p.element_size() for p in ddp.module.parameters() if p.requires_grad)
        reducer = self._reducers[ddp] = Reducer(size_bytes, 1)
        if self._set_rate is not None:
            self._set_rate(ddp, CUDA_RATE if on_cuda else CPU_RATE)
        return reducer

    def _read(self, ddp: Any, reducer: Reducer) -> None:
        if self._read_logger is None:
            return
        data = self._read_logger(ddp)
        iteration = int(data.get("iteration", -1))
        if iteration == reducer.iteration:
            return
        reducer.iteration = iteration
        buckets = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        reducer.buckets = buckets.count(",") + 1
        window_ns = int(data.get("backward_comm_time", 0))
        overlap_ns = int(data.get("backward_compute_comm_overlap_time", 0))
        ready_ns = int(data.get("backward_compute_time_end", 0))
        reduced_ns = int(data.get("backward_comm_time_end", 0))
        if ready_ns > 0 and window_ns > 0:
            exposed_ns = max(0, window_ns - overlap_ns)
            self._observer.steps.sampled(exposed_ns, window_ns, _since_epoch(ready_ns), _since_epoch(reduced_ns))


def _since_epoch(time_ns: int) -> int:
    """A time of torch's own clock, which is the epoch's or, where torch was built so, the monotonic one."""
    return time_ns if time_ns > EPOCH_NS else time_ns + EPOCH_NS
