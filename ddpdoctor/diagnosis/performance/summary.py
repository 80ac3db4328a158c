"""What measured steps amount to: the figures that every face and every check of a live run stands on.

None means that it is not known; it is never shown as 0. Means are per step, in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

# From where on a measured figure is a finding; a project may set its own under `[tool.ddpdoctor.thresholds]`.

DEFAULTS: Mapping[str, float] = {
    "exposed-communication": 0.10,
    "straggler": 0.05,
    "input-bound": 0.10,
    "barrier-in-hot-loop": 0.01,
    "many-small-collectives": 0.05,
    "slow-link": 0.15,
    "low-scaling-efficiency": 0.90,
    "long-wait": 0.50,
    "idle-gpu": 0.50,
    "gpu-throttled": 0.85,
    "model-state-too-large": 0.60,
}
"""By the name of the check.

Exposed communication, waiting for a straggler, data wait, barriers and small collectives: share of the step above which
they are too much.
Slow link: share of the link's speed below which the bandwidth is too low. Efficiency: the lowest that is good. Long
wait: share of the group's timeout. Idle GPU: share of the training below which a GPU computes too little. Throttled
GPU: share of the clock of the other ranks' GPUs below which its own is too low. Model state: share of the GPU's memory
above which it takes too much.
"""


def threshold(record: RunRecord, name: str) -> float:
    """Return the threshold of the check called ``name`` for this run."""
    return record.job.thresholds.get(name, DEFAULTS[name])


VerdictState = Literal["healthy", "slow", "broken", "unknown"]


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that anyone reads: what is wrong, why, and what to do next."""

    state: VerdictState
    code: str = ""
    """Code of the finding that decides; empty when none does."""
    text: str
    """One sentence without a full stop."""
    why: tuple[str, ...] = ()
    """Sentences with the numbers behind it."""
    next: str = ""
    """What to do; empty when there is nothing to do."""
    since_ns: int | None = None


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Means per step; they add up to the step. None: not measured, and then part of the phase that it lies in."""

    step_ns: float
    data_wait_ns: float = 0.0
    forward_ns: float = 0.0
    backward_compute_ns: float = 0.0
    """The whole backward where the exposed communication is not measured."""
    exposed_waiting_ns: float | None = None
    """Exposed communication until the last rank was there; None where the arrival of the others is not known, and then
    part of the transfer."""
    exposed_transfer_ns: float | None = None
    explicit_ns: float = 0.0
    optimizer_ns: float = 0.0
    other_ns: float = 0.0

    def parts_ns(self) -> dict[str, float | None]:
        """Return the phases by their names, without the unit, in the order of these fields."""
        return {name.removesuffix("_ns"): ns for name, ns in msgspec.structs.asdict(self).items() if name != "step_ns"}


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of a window of recent steps."""

    p50_ns: float
    p95_ns: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Communication of one kind in one process group, over the recent window."""

    group: str
    """``all 8 ranks``, ``ranks 0 and 4``."""
    backend: str = ""
    kind: str
    """``gradients``, ``buffers``, or a collective as users spell it."""
    calls_per_step: float
    bytes_per_step: float
    ns_per_step: float | None = None
    """Blocked time; for gradients the communication window."""
    waiting_ns_per_step: float | None = None
    """What of the blocked time was waiting for the last rank; None for gradients."""
    bus_bandwidth_bytes_per_s: float | None = None
    limit_bytes_per_s: float | None = None
    """What the link should give, where that is known."""
    overlap_ratio: float | None = None
    """Hidden share of the communication window."""


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one rank's measured steps, by those who work it out and by those who show it."""

    waiting_ns: float | None = None
    """Mean per step that it waits for other ranks: in exposed communication and in explicit collectives."""
    late_ns: float | None = None
    """Mean per step that the others wait for it alone."""
    late_phase: str = ""
    """The phase that makes it late: ``data_wait``, ``forward``, ``backward``, ``optimizer``, ``explicit`` or ``other``;
    empty where it is not late."""
    overlap_ratio: float | None = None
    """Hidden share of its communication window; None where no window was measured."""
    samples_per_s: float | None = None


class RankSummary(RankFigures, frozen=True, kw_only=True):
    """The measured steps of one rank in a window of time."""

    rank: int
    steps: int
    """Steps in the window."""
    step_times: StepTimes
    phases: Phases
    times_late: int = 0
    """How often it came last where ranks met."""
    bytes_per_step: float = 0.0
    collectives_per_step: float = 0.0
    measured_at_ns: int = 0
    """End of the newest step."""


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of all ranks' measured steps, by those who work it out and by those who show it."""

    steps_per_s: float | None = None
    samples_per_s: float | None = None
    """Of the whole job."""
    step_times: StepTimes | None = None
    phases: Phases | None = None
    """Means over the ranks."""
    overlap_ratio: float | None = None
    exposed_share: float | None = None
    """Exposed communication's share of the step: the mean over the ranks."""
    efficiency: float | None = None
    """Estimated: 1 - (exposed + explicit) / step."""
    traffic: tuple[Traffic, ...] = ()
    measured_at_ns: int | None = None
    """End of the newest step behind these figures."""


class RunSummary(JobFigures, frozen=True, kw_only=True):
    """The measured steps of all ranks in a window of time."""

    ranks: tuple[RankSummary, ...] = ()
    steps: int = 0
    """Steps that every rank made in the window."""
    seconds: float = 0.0
    """Wall time of the window's steps, pauses included."""
    unseen: int = 0
    """Ranks of the job that the record does not see. Where there are such, what is called transfer may be waiting for
    them."""
