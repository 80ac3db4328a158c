"""What the probe measures of a live job: steps, explicit collectives, the newest heartbeat; and samples of GPUs.

Columns are arrays of integers of equal length, oldest first; times are nanoseconds since the epoch (``*_at_ns``) or
durations (``*_ns``). A duration that was not measured is -1, a time that was not measured is 0. The rings hold the
newest rows only, so a track may begin late.

**A step** is what lies between two optimizer steps of the training loop: it begins with the fetch of its first batch
(or, without a loader, its first training forward) and ends where the next one begins. Several micro-batches, several
optimizers that alternate in one iteration, and several DDP modules make one step. Evaluation, checkpoints and all else
between the last optimizer step of a step and the next training fetch belong to no step; they are pauses. The first
fetch from workers that have only just been started belongs to the pause, too.

What cannot be distinguished is counted where it is seen: a no-gradient forward between the fetch of a training batch
and its backward is forward; an evaluation that neither draws from a loader nor runs a DDP forward is part of the step
before it; a batch that another thread fetches is no data wait, and then a step begins with its forward. Of a DDP module
that ``torch.compile`` compiles as a whole the forward is *other* and its reduction is not measured (wrap the compiled
module instead). Point-to-point calls have no sequence number (-1), DDP's broadcasts of buffers are counted by
themselves. Sampled steps with several synchronised backwards are scaled up from those that were read.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from ddpdoctor.record.streams import RowAtLine, RowOfRank

Phase = Literal[
    "starting", "data_wait", "forward", "backward", "explicit", "optimizer", "evaluation", "saving", "other", "finished"
]
"""What a rank's main thread does: ``explicit`` is a collective that the user's code calls, a broadcast of buffers, or
SyncBatchNorm outside a backward; ``other`` is the user's own code between the phases."""


class StepTrack(RowOfRank, frozen=True, kw_only=True):
    """The measured steps of one rank.

    Data wait, forward, backward, explicit and optimizer never overlap: a collective inside a forward counts as explicit
    and not as forward. What is left of a step is *other*. Exposed communication is a part of backward.
    """

    step: array[int]
    """Ordinal of the step on this rank, from 1; gaps where rows were lost."""
    started_at_ns: array[int]
    ended_at_ns: array[int]
    data_wait_ns: array[int]
    forward_ns: array[int]
    """Forwards through DDP modules, without explicit collectives."""
    backward_ns: array[int]
    """From the call of ``backward`` to its return, all micro-batches, exposed communication included."""
    explicit_ns: array[int]
    optimizer_ns: array[int]
    exposed_ns: array[int]
    """Communication of gradients that no computation of backward hid; -1 on a step that was not sampled."""
    window_ns: array[int]
    """From the first gradient bucket launched to the last finished: a span, not a transfer time; -1 not sampled."""
    ready_at_ns: array[int]
    """When this rank's last gradient of the last synchronised backward was ready; 0 not sampled."""
    reduced_at_ns: array[int]
    """When the last bucket of that backward was reduced; 0 not sampled."""
    reduced_bytes: array[int]
    """Gradients reduced in the step."""
    buckets: array[int]
    explicit_calls: array[int]
    explicit_bytes: array[int]
    samples: array[int]
    """Samples that this rank trained on; 0 when the batch size is not known."""
    batches: array[int]
    """Batches that were drawn for it, those included that were passed over."""
    micro_batches: array[int]
    """Backwards in the step."""
    synchronised: array[int]
    """Backwards of the step that reduced gradients."""
    device_forward_ns: array[int]
    """The same phases by CUDA events, in the order of the stream; -1 without a GPU or not yet known."""
    device_backward_ns: array[int]
    device_optimizer_ns: array[int]

    def __len__(self) -> int:
        return len(self.step)


class CallTrack(RowOfRank, frozen=True, kw_only=True):
    """The explicit collectives of one rank."""

    kind: array[int]
    """Index into ``kinds``."""
    group: array[int]
    """Index into ``RunRecord.groups``."""
    sequence: array[int]
    """Position among the explicit collectives of that group on this rank, from 0; the same call on all its ranks has
    the same number as long as the ranks run the same collectives. Broadcasts of buffers are counted for themselves;
    point-to-point calls have -1."""
    peer: array[int] = msgspec.field(default_factory=lambda: array("q"))
    """Of a send or receive the rank at its other end, -1 where any may be it, and of other calls; may be empty."""
    step: array[int]
    """The step that was current; 0 before the first."""
    entered_at_ns: array[int]
    left_at_ns: array[int]
    """0 while inside. For an asynchronous collective the times are those of waiting for it."""
    size_bytes: array[int]
    site: array[int]
    """Index into ``RunRecord.sites``; -1 when it was not taken."""
    kinds: tuple[str, ...] = ()
    """``all_reduce``, ``barrier`` … as users spell them; ``buffers`` for DDP's broadcast of buffers."""

    def __len__(self) -> int:
        return len(self.kind)


class RankHeartbeat(RowOfRank, frozen=True, kw_only=True):
    """The newest heartbeat of a rank."""

    beat_at_ns: int
    """When it was written; a rank whose beat is old is stopped, dead, or in a C call that holds the interpreter."""
    phase: Phase = "starting"
    phase_since_ns: int = 0
    step: int = 0
    collective: str = ""
    """The explicit collective or bucket reduction that the main thread waits in; empty when in none."""
    sequence: int = -1
    """Its number among the explicit collectives of its group, by the probe's count; -1 when not known."""
    enqueued: int = -1
    """Collectives of the default group that this rank enqueued, by torch's flight recorder; -1 when not known."""
    completed: int = -1
    site: int = -1
    """Where the main thread is in the user's code; -1 when not known."""
    unchanged_ms: int = 0
    """For how long the main thread's stack has not changed."""
    forwards: int = 0
    """Training forwards through DDP modules that recorded gradients."""
    backwards: int = 0
    """Backwards that are over."""


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one GPU. None: the driver does not tell."""

    taken_at_ns: int
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    """In words, worst first; empty when it runs at full speed or the driver does not tell."""
    ecc_errors: int | None = None
    """Uncorrected, since the driver was loaded."""
    xid: int | None = None
    """The newest critical event of the driver."""
    processes: tuple[tuple[int, int], ...] = ()
    """Process id and bytes of memory of each process on it."""
    lost: bool = False
    """The driver cannot reach it any more: it fell off the bus, or needs a reset."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of this node with its samples, oldest first.

    Where a GPU is divided by MIG each of its instances stands for itself, with the index of the GPU that it is part of.
    """

    index: int
    """As the driver counts, which is by PCI bus."""
    uuid: str = ""
    name: str = ""
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    """What the power limit is when no one has set it."""
    maximum_sm_clock_mhz: int | None = None
    nvlink_bytes_per_s: float | None = None
    """What its active NVLinks carry together in one direction; None without NVLink or where the driver does not
    tell."""
    pcie_bytes_per_s: float | None = None
    """What its PCIe link carries in one direction at the highest speed that GPU and slot have in common."""
    ranks: tuple[int, ...] = ()
    """Ranks of this node that use it."""
    samples: tuple[GpuSample, ...] = ()


class HostUse(RowOfRank, frozen=True, kw_only=True):
    """What one rank gets of its machine's cores and shared memory, as the system says; sums since it is watched."""

    watched_ns: int = 0
    main_waited_ns: int = 0
    """Time in which its main thread could have run, and no core was free."""
    cores: int = 0
    """Cores that it may use; 0 when not known."""
    busy_threads: int = 0
    """Threads of it and of the processes that it started that ran for more than a tenth of the newest interval."""
    shared_memory_bytes: int = 0
    """Size of its /dev/shm; 0 when not known."""
    shared_memory_free_bytes: int = 0
    """The least that was ever free of it."""
    maps_shared_memory: bool = False
    """It, or a process that it started, holds something there."""


class OptimizerSize(RowOfRank, frozen=True, kw_only=True):
    """Memory of what one optimizer of a rank steers, after its first few steps.

    On the GPU alone, but in a rehearsal on the CPU, where that stands for one. What an optimizer inside of it steers
    counts there.
    """

    type: str = ""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    shares_state: bool = False
    """The ranks divide the state among them (ZeRO): the optimizer inside of it holds this rank's share."""
    device_memory_bytes: int = 0
    """All the memory of the GPU that it trains on; 0 without one."""


class HostRead(RowAtLine, frozen=True, kw_only=True):
    """A line of the user's that read a result back from the GPU, in the steps that were sampled for that."""

    method: str
    """Of ``torch.Tensor``: ``item``, ``__bool__`` …"""
    calls: int
    steps_with: int
    """Steps in which it read."""
    steps: int
    """Steps that were sampled."""
    wait_ns: int
    """Time inside of the calls, in all of the steps."""


class Look(RowAtLine, frozen=True, kw_only=True):
    """How often the training thread of a rank was met at a line of the user's, of late."""

    phase: str
    """What the rank did meanwhile, as in ``Phase``."""
    looks: int


class Gauge(RowOfRank, frozen=True, kw_only=True):
    """A figure that a hook of the probe adds up over the steps of one rank, by its name."""

    name: str
    """As people call it: ``garbage collection``."""
    unit: Literal["ns", "bytes", "count"]
    total: int
    """In ``steps`` together."""
    steps: int

    @property
    def per_step(self) -> float:
        """The mean of a step, in ``unit``."""
        return self.total / max(1, self.steps)


class BucketLayout(RowOfRank, frozen=True, kw_only=True):
    """How DDP has put the gradients of one module into buckets, first ready first."""

    wrap: int
    sizes_bytes: tuple[int, ...] = ()
    parameter_counts: tuple[int, ...] = ()
    """Of each bucket; empty before DDP has rebuilt them, which it does not do where it looks for unused parameters."""
    first_parameters: tuple[int, ...] = ()
    """Of each bucket the index of the parameter that is ready first, among those of the module that want gradients."""


POWER_BRAKE = "power brake by the power supply"
TOO_HOT = "too hot"
HARDWARE_SLOWDOWN = "slowed down by the hardware"
POWER_LIMIT = "at its power limit"
CLOCKS_SET = "clocks set by an administrator"
SYNC_BOOST = "held at the clock of a slower GPU"
BOARD_LIMIT = "at a limit of the board"

HARMFUL = frozenset({POWER_BRAKE, TOO_HOT, HARDWARE_SLOWDOWN})
"""No healthy GPU runs so for long; a power limit is reached by any GPU that multiplies large matrices."""

_BITS = (
    (0x80, POWER_BRAKE),
    (0x40 | 0x20, TOO_HOT),
    (0x08, HARDWARE_SLOWDOWN),
    (0x04, POWER_LIMIT),
    (0x200 | 0x400, BOARD_LIMIT),
    (0x10, SYNC_BOOST),
    (0x02 | 0x100, CLOCKS_SET),
)
"""Bits of ``nvmlClocksEventReasons``, worst first; bit 0 says that the GPU idles, which is no throttling."""


def reasons_in_words(bits: int) -> tuple[str, ...]:
    """Return the reasons that are set, worst first.

    The hardware's slowdown is also set when it is too hot or braked by the power supply, and then says nothing more.
    """
    found = [words for mask, words in _BITS if bits & mask]
    if found and found[0] in (POWER_BRAKE, TOO_HOT):
        found = [words for words in found if words != HARDWARE_SLOWDOWN]
    return tuple(found)
