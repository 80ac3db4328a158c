"""What DDP does with the gradients: how many bytes it reduces, and on some steps how long that took.

DDP's reducer measures the iterations that its rate selects, and its logger takes them in as the next forward begins.
The user may have set that rate, and may read that logger. So the rate is ours from the end of a forward to the end of
its backward alone, which is when the reduction is measured, and a logger of our own takes in the result: the user's
logger sees the rate that the user has set, or torch's own, whenever it looks.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
import zlib
from types import FrameType
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

from ...record.writer import from_system, offset_ns
from ..journal import Journal
from ..torch_compat import RATE_SETTER, Capabilities, in_place, on_call
from .clocks import DeviceTimes, GraphCaptures
from .ddp_events import Searches
from .observer import Observer

ALWAYS_MEASURED = 10
"""The first iterations of a module, which DDP's reducer measures at any rate."""
TORCHS_OWN_RATE = 100
_RATES = ((5_000_000, 20), (25_000_000, 10), (1 << 62, 1))
"""Of iterations shorter than so many nanoseconds one of so many is measured. With fewer the screen's newest 120 steps
would rest on a measurement or two."""
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
        "began_ns", "buckets", "changes", "forwards", "has_rebuilt", "is_measured", "kept_local", "lacks_rate",
        "layout", "layouts", "newest", "next_look", "next_measured", "offset", "on_gpu", "opened_at", "place", "rate",
        "read_ns", "reduced_ns", "shortest_ns", "size_bytes", "unfollowed",
    )  # fmt: skip

    def __init__(self, size_bytes: int, buckets: int, *, on_gpu: bool) -> None:
        self.size_bytes = size_bytes
        self.on_gpu = on_gpu
        self.buckets = buckets
        self.layout: Optional[tuple[str, str]] = None
        """Sizes of the buckets and their parameters, in the logger's format; None before it has them."""
        self.layouts = 0
        self.has_rebuilt = -1
        """Whether DDP had rebuilt its buckets when their layout was looked at; -1 before that."""
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
        self.newest = 0
        """The newest iteration that our logger has taken in, by DDP's count."""
        self.reduced_ns = 0
        """When the reduction of that one was over, by torch's clock."""
        self.rate = 1
        """Of so many iterations one is measured."""
        self.lacks_rate = False
        """What rate the user has set is not known: each iteration is looked at until it is."""
        self.is_measured = False
        """The newest iteration is one of them, to be read as the next begins."""
        self.changes = 0
        """Rates that users had set when its measurement began: of one with a change in it a part may be missing."""
        self.next_measured = 1
        """The next of them, by the count of ``iterations``."""
        self.read_ns = 0
        """When the newest measurement was begun."""
        self.began_ns = 0
        """When the newest forward that synchronises began, of those that were taken in."""
        self.shortest_ns = LONGEST_NS
        """The shortest time between two of them since the rate was last looked at: a pause only lengthens it."""

    @property
    def iterations(self) -> int:
        """Forwards that synchronise: iterations by DDP's count, less ``offset``."""
        return self.forwards - self.kept_local

    def measured_after(self, iteration: int) -> int:
        """Return the first iteration after ``iteration`` that is measured, the same one on every rank."""
        later = iteration + 1
        number = later + (self.offset or 0)
        return later if number <= ALWAYS_MEASURED or self.lacks_rate else later + -number % self.rate


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
        self._searches = searches
        self._wrap_number = wrap_number
        self._make_logger = capabilities.make_logger
        self._set_rate = capabilities.set_logger_rate
        self._users_rates: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The rate that the user, or torch, has set, of the reducers of which it is known."""
        self._changes = 0
        """Rates that users have set."""
        self._loggers: dict[int, tuple[Any, Any]] = {}
        """A reducer of torch's and our logger of it, by the identity of the DDP module, for as long as that lives."""
        self.raised: set[int] = set()
        """Identities of the DDP modules whose reducers measure at our rate now."""
        self._armed: list[Reducer] = []
        self._references: dict[int, weakref.ref[Any]] = {}
        self.known: dict[int, Reducer] = {}
        """What is known of the reducers, likewise."""

    def install(self) -> None:
        """Follow the rates that the user sets."""
        owner = self._torch.distributed.Reducer if self._set_rate is not None else None
        if owner is not None:
            on_call(self._observer.journal, owner, RATE_SETTER, after=self._users_rate_is_set, harms=())

    def measure(self, ddp: Any, reducer: Reducer, now_ns: int) -> None:
        """Have the backward measured that follows a forward, which synchronises and is over."""
        known = self._loggers.get(id(ddp))
        is_due = reducer.lacks_rate or now_ns - reducer.read_ns >= READ_EVERY_NS
        if known is not None and known[0] is ddp.reducer and is_due:
            if not reducer.lacks_rate and self._set_rate is not None:
                self._set_rate(ddp.reducer, 1)
                self.raised.add(id(ddp))
            reducer.is_measured, reducer.changes, reducer.read_ns = True, self._changes, now_ns
        reducer.next_measured = reducer.measured_after(reducer.iterations)

    def backward_is_over(self) -> None:
        """Give the reducer its own rate back, unless there are several and another one's backward may be over."""
        if len(self._loggers) == 1:
            for ddp_reducer, _ in self._loggers.values():
                self._give_back(ddp_reducer)
            self.raised.clear()

    def leave_alone(self, ddp: Any) -> None:
        """Give the reducer of a module that is not followed in a forward its own rate back."""
        if id(ddp) in self.raised:
            self.raised.remove(id(ddp))
            self._give_back(ddp.reducer)

    def read(self, ddp: Any, reducer: Reducer) -> None:
        """Have our logger take in the iteration before, which is measured, as a forward that synchronises begins."""
        reducer.is_measured = False
        ddp_reducer, logger = self._loggers[id(ddp)]
        reducer.lacks_rate = ddp_reducer not in self._users_rates
        set_rate = None if reducer.lacks_rate else self._set_rate
        try:
            if set_rate is not None:
                set_rate(ddp_reducer, 1)
            logger.set_runtime_stats_and_log()
        finally:
            self.raised.discard(id(ddp))
            if set_rate is not None:
                self._give_back(ddp_reducer)
        if reducer.changes == self._changes:
            self._read(ddp, reducer, logger._get_ddp_logging_data())
        if reducer.rate == 1 and reducer.shortest_ns == LONGEST_NS:
            self._observer.moments.take_in()  # How short the steps are must be known soon.
        self._choose_rate(reducer)
        reducer.next_measured = reducer.measured_after(reducer.iterations - 1)

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
            captures = GraphCaptures()
            captures.listen(self._observer.journal, self._torch.cuda.CUDAGraph)
            self._observer.steps.make_device_times = functools.partial(DeviceTimes, event, captures)
            self._observer.on_device = True
            self.look_soon()
        size_bytes = sum(p.numel() * p.element_size() for p in ddp.module.parameters() if p.requires_grad)
        reducer, key = Reducer(size_bytes, 1, on_gpu=on_cuda), id(ddp)
        known, references, loggers, raised = self.known, self._references, self._loggers, self.raised

        def forget(gone: weakref.ref[Any]) -> None:
            if references.get(key) is gone:
                loggers.pop(key, None)
                raised.discard(key)
                del references[key], known[key]

        references[key], known[key] = weakref.ref(ddp, forget), reducer
        self._observer.journal.guarded(self._make_own_logger, ddp, reducer, harms=())
        return reducer

    def followed(self) -> list[tuple[Any, Reducer]]:
        """Return the DDP modules that live, with what is known of their reducers."""
        known = ((self._references[key](), reducer) for key, reducer in list(self.known.items()))
        return [(ddp, reducer) for ddp, reducer in known if ddp is not None]

    def look_soon(self) -> None:
        """Look at the next forward of each module, instead of only noting it."""
        for reducer in self.known.values():
            reducer.next_look = 0

    def _make_own_logger(self, ddp: Any, reducer: Reducer) -> None:
        """Make a logger beside DDP's own; not where torch prints what a logger takes in."""
        distributed = self._torch.distributed
        ddp_reducer = getattr(ddp, "reducer", None)
        if self._make_logger is None or ddp_reducer is None:
            return
        if distributed.get_debug_level() == distributed.DebugLevel.DETAIL:
            return
        self._loggers[id(ddp)] = ddp_reducer, self._make_logger(ddp_reducer)
        if self._wrap_number(ddp) is not None:  # It was made under our eyes.
            self._users_rates.setdefault(ddp_reducer, TORCHS_OWN_RATE)
        reducer.lacks_rate = ddp_reducer not in self._users_rates

    def _users_rate_is_set(self, _: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        ddp_reducer, rate = (*arguments, *options.values())
        self._changes += 1
        self._users_rates[ddp_reducer] = rate

    def _give_back(self, ddp_reducer: Any) -> None:
        rate = self._users_rates.get(ddp_reducer)
        if self._set_rate is not None and rate is not None:
            self._set_rate(ddp_reducer, rate)

    def _choose_rate(self, reducer: Reducer) -> None:
        """Choose how often is measured, by how long an iteration takes."""
        if reducer.shortest_ns == LONGEST_NS:
            return
        rate = CUDA_RATE
        if not reducer.on_gpu:
            rate = next(rate for shorter_ns, rate in _RATES if reducer.shortest_ns < shorter_ns)
        reducer.shortest_ns = LONGEST_NS
        reducer.rate = rate

    def _read(self, ddp: Any, reducer: Reducer, data: Any) -> None:
        """Take in what our logger has of the iteration before."""
        measured = data.ints_map
        number = int(measured.get("iteration", 0))
        if number == reducer.newest:
            return  # The rate, which is not ours, has left it out.
        if reducer.lacks_rate and reducer.newest > ALWAYS_MEASURED:
            self._users_rates[ddp.reducer] = number - reducer.newest
        reducer.newest, reducer.offset = number, number - (reducer.iterations - 1)
        journal = self._observer.journal
        journal.guarded(self._searches.looked, ddp, measured, harms=("unused_searches",))
        if measured.get("has_rebuilt_buckets", 0) != reducer.has_rebuilt:
            reducer.has_rebuilt = measured.get("has_rebuilt_buckets", 0)
            journal.guarded(self._look_at_layout, ddp, reducer, data.strs_map, harms=("bucket_layouts",))
        window_ns = int(measured.get("backward_comm_time", 0))
        overlap_ns = int(measured.get("backward_compute_comm_overlap_time", 0))
        ready_ns = int(measured.get("backward_compute_time_end", 0))
        reduced_ns = int(measured.get("backward_comm_time_end", 0))
        if ready_ns > 0 and window_ns > 0 and reduced_ns != reducer.reduced_ns:  # as it is where no backward came
            reducer.reduced_ns = reduced_ns
            exposed_ns = max(0, window_ns - overlap_ns)
            moment = exposed_ns, window_ns, _since_epoch(ready_ns), _since_epoch(reduced_ns)
            self._observer.moments.keep((self._observer.steps.sampled, *moment))

    def _look_at_layout(self, ddp: Any, reducer: Reducer, rebuilt: dict[str, str]) -> None:
        sizes = rebuilt.get("rebuilt_bucket_sizes", "")
        if not sizes:
            sizes = ddp.logger._get_ddp_logging_data().strs_map.get("bucket_sizes", "")
        reducer.buckets = sizes.count(",") + 1
        layout = sizes, rebuilt.get("rebuilt_per_bucket_param_indices", "")
        if layout != reducer.layout and reducer.layouts < LAYOUTS_NOTED:
            reducer.layout, reducer.layouts = layout, reducer.layouts + 1
            self._note_layout(ddp, *layout)

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


# Digests of the parameters of DDP modules now and then, so that replicas that drift apart are seen.

EVERY = 100
"""Steps at first; then a quarter of those made, alike on every rank: one look costs 0.5 ms of a small model …"""
MOST_BETWEEN = 500
"""… and at the most so many."""
PARAMETERS = 128
"""With more of them it is done less often, alike on every rank: on a GPU each costs a launch or two."""
READ_AFTER = 10
"""Steps after which a GPU has surely made what was asked of it."""
MOST_LOOKS = 2_000
ADDED_UP = 16_384
"""Of so many bytes the sum costs less than a CRC, of 2 MB a fifteenth; the operations that it takes cost 11 µs."""
_PLAIN = ("Tensor", "Parameter")


class ReplicaDigests:
    """The DDP modules of a rank."""

    def __init__(
        self,
        journal: Journal,
        torch: Any,
        wrap_number: Callable[[Any], Optional[int]],
        reducers: Callable[[], list[tuple[Any, Reducer]]],
    ) -> None:
        self._journal = journal
        self._torch = torch
        self._wrap_number = wrap_number
        self._reducers = reducers
        self.steps = 0
        """Of optimizers …"""
        self.next_look = EVERY - 1
        """… at so many of which there is something to do."""
        self._next = EVERY
        self._looks = 0
        self._seen: dict[int, tuple[int, int]] = {}
        """By wrap the forwards that had synchronised, and those that had not, at the newest step."""
        self._local: set[int] = set()
        """Wraps that were stepped without a reduction: they may differ for a while."""
        self._made: list[tuple[dict[str, Any], dict[str, int], list[str], Any]] = []
        self._read_at = 0

    def look(self) -> None:
        """Write what was digested, or digest, where it is time to."""
        if self._made and self.steps >= self._read_at:
            self.write()
        if self.steps >= self._next - 1:
            self._journal.guarded(self._look, harms=("replica_digests",))
        self.next_look = min(self._next - 1, self._read_at) if self._made else self._next - 1

    def write(self) -> None:
        """Write what was digested and is not written yet."""
        made, self._made = self._made, []
        for row, here, names, sums in made:
            numbers = {**here, **dict(zip(names, sums.tolist()))}
            digests = {name: f"{number & (1 << 64) - 1:x}" for name, number in numbers.items()}
            self._journal.event("replica_digest", **row, digests=digests)

    def _look(self) -> None:
        """Digest at the step that is due; the step before shows whether it is made without a reduction."""
        due, parameters = self.steps >= self._next, 0
        for ddp, reducer in self._reducers():
            wrap = self._wrap_number(ddp)
            if wrap is None:
                continue
            synchronised, kept_local = self._seen.get(wrap, (reducer.iterations, reducer.kept_local))
            if kept_local != reducer.kept_local and synchronised == reducer.iterations:
                self._local.add(wrap)
            self._seen[wrap] = reducer.iterations, reducer.kept_local
            if due and wrap not in self._local and not getattr(ddp, "_comm_hooks", ()):
                parameters += self._digest(ddp, wrap, reducer.iterations)
        if due:
            self._looks += 1
            between = min(MOST_BETWEEN, max(EVERY, self.steps // 4))
            self._next = self.steps + between * max(1, -(-parameters // PARAMETERS))
            if self._looks >= MOST_LOOKS:
                self._next = 1 << 62

    def _digest(self, ddp: Any, wrap: int, iterations: int) -> int:
        torch = self._torch
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        here: dict[str, int] = {}
        names, sums = [], []
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        for name, parameter in ddp.module.named_parameters():
            size = parameter.element_size()
            if name in ignored or not parameter.requires_grad or type(parameter).__name__ not in _PLAIN:
                continue
            if parameter.is_sparse:
                continue
            if parameter.is_cpu and parameter.is_contiguous():
                numbers = in_place(parameter, ctypes.c_char)
                is_whole = len(numbers) == parameter.numel() * size and parameter.storage_offset() * size % 8 == 0
                if len(numbers) >= ADDED_UP and len(numbers) % 8 == 0 and is_whole:
                    here[name] = int(parameter.detach().view(-1).view(torch.int64).sum())
                else:
                    here[name] = zlib.crc32(numbers)
            elif size in kinds and not parameter.is_complex():
                names.append(name)
                sums.append(parameter.detach().view(kinds[size]).sum())
        together = torch.stack(sums) if sums else torch.zeros(0)
        if together.is_cuda:
            together = together.to("cpu", non_blocking=True)
        if here or sums:
            row = {"wrap": wrap, "step": self.steps, "iterations": iterations}
            self._made.append((row, here, names, together))
            self._read_at = self.steps + (READ_AFTER if sums else 1)
        return len(here) + len(sums)
