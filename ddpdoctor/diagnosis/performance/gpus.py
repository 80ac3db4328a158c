"""How busy the GPUs are with the training itself.

NVML's utilisation is the share of time in which some kernel ran. A GPU that waits in a kernel of NCCL for other ranks
reads as busy, so that a job which mostly waits shows 100%; here the exposed and explicit communication is taken off.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

import msgspec

from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.measured import Gpu, StepTrack

WINDOW_NS = 120_000_000_000
"""How far back the figures look."""
_SAMPLE_COVERS_NS = 1_000_000_000
"""The driver's utilisation is a mean over up to so long before it was read."""
_PAUSE_NS = 100_000_000
"""A gap between steps that is longer is an evaluation or a checkpoint, and no training."""


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU did during the training steps of the window; shares are of the time of the steps."""

    index: int
    ranks: tuple[int, ...]
    samples: int
    """Looks at the GPU that fell wholly into training."""
    utilisation_percent: float
    """Mean, as the driver says."""
    computing_percent: float
    """The same without the time in which only kernels of communication ran."""
    step_ns: float
    data_wait_share: float
    exposed_share: float
    explicit_share: float


def gpu_uses(record: RunRecord) -> tuple[GpuUse, ...]:
    """Return the use of every GPU that ranks train on and that was looked at while they did."""
    tracks = {track.rank: track for track in record.step_tracks if len(track)}
    newest_ns = max((track.ended_at_ns[-1] for track in tracks.values()), default=0)
    # Waiting for other ranks is a kernel on the GPU with NCCL; gloo waits on the CPU.
    spins = "nccl" in " ".join([record.job.backend, *(group.backend for group in record.groups)])
    found = (_use(gpu, tracks, newest_ns - WINDOW_NS, spins=spins) for gpu in record.gpus)
    return tuple(use for use in found if use is not None)


def mean_utilisation(record: RunRecord) -> tuple[float | None, float | None]:
    """Mean over the GPUs of the utilisation in percent and of the corrected one; None where nothing is known."""
    uses = gpu_uses(record)
    if not uses:
        return None, None
    return (
        sum(use.utilisation_percent for use in uses) / len(uses),
        sum(use.computing_percent for use in uses) / len(uses),
    )


def computing_percent(utilisation_percent: float, communication_share: float, *, spins: bool) -> float:
    """Utilisation without the share of time in which the GPU only spins in kernels of communication."""
    return max(0.0, utilisation_percent - 100 * communication_share) if spins else utilisation_percent


def _use(gpu: Gpu, tracks: dict[int, StepTrack], since_ns: int, *, spins: bool) -> GpuUse | None:
    own = [tracks[rank] for rank in gpu.ranks if rank in tracks]
    spans = [_spans(track, since_ns) for track in own]
    # Those that fall wholly into steps of all ranks, not into start-up, evaluation or a checkpoint.
    looks = [
        sample.utilisation_percent
        for sample in gpu.samples
        if sample.utilisation_percent is not None and all(_within(sample.taken_at_ns, one) for one in spans)
    ]
    if not own or not looks:
        return None
    utilisation = sum(looks) / len(looks)
    shares = [_shares(track, bisect_left(track.ended_at_ns, since_ns)) for track in own]
    step_ns, data_wait, exposed, explicit = (sum(column) / len(own) for column in zip(*shares, strict=True))
    return GpuUse(
        index=gpu.index,
        ranks=gpu.ranks,
        samples=len(looks),
        utilisation_percent=utilisation,
        computing_percent=computing_percent(utilisation, exposed + explicit, spins=spins),
        step_ns=step_ns,
        data_wait_share=data_wait,
        exposed_share=exposed,
        explicit_share=explicit,
    )


def _shares(track: StepTrack, first: int) -> tuple[float, float, float, float]:
    """Mean step in ns, and the shares of data wait, exposed and explicit communication from a row on."""
    steps_ns = sum(track.ended_at_ns[first:]) - sum(track.started_at_ns[first:])
    count = len(track) - first
    if steps_ns <= 0:
        return 0.0, 0.0, 0.0, 0.0
    exposed = [duration for duration in track.exposed_ns[first:] if duration >= 0]
    # Of the sampled steps alone: enough for a correction of a figure that NVML counts in whole percents.
    sampled_ns = sum(exposed) / len(exposed) if exposed else 0.0
    return (
        steps_ns / count,
        _total(track.data_wait_ns, first) / steps_ns,
        sampled_ns * count / steps_ns,
        _total(track.explicit_ns, first) / steps_ns,
    )


def _total(column: array[int], first: int) -> int:
    return sum(duration for duration in column[first:] if duration > 0)


def _spans(track: StepTrack, since_ns: int) -> tuple[list[int], list[int]]:
    """Starts and ends of the stretches of training without a pause."""
    first = bisect_left(track.ended_at_ns, since_ns)
    starts, ends = track.started_at_ns[first:], track.ended_at_ns[first:]
    if not starts:
        return [], []
    pauses = [row for row in range(1, len(starts)) if starts[row] - ends[row - 1] > _PAUSE_NS]
    return [starts[row] for row in (0, *pauses)], [ends[row - 1] for row in (*pauses, len(ends))]


def _within(taken_at_ns: int, spans: tuple[list[int], list[int]]) -> bool:
    starts, ends = spans
    position = bisect_right(starts, taken_at_ns - _SAMPLE_COVERS_NS) - 1
    return position >= 0 and taken_at_ns <= ends[position]
