"""GPUs that compute too little for reasons that no other finding of a run speaks of."""

from __future__ import annotations

from ddpdoctor.diagnosis.performance.gpus import GpuUse, gpu_uses
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.record.model import RunRecord

MINIMUM_SAMPLES = 20
"""Looks, one a second, before anything is said."""
UNEXPLAINED_SHARE = 0.6
"""Of the time in which a GPU may compute nothing: so much at least neither data nor exposed communication explain."""


def idle_gpus(record: RunRecord) -> tuple[GpuUse, ...]:
    """Return the GPUs that compute for less of the training than they should.

    Data wait (input-bound) and exposed communication have findings of their own and are no reason here.
    """
    lowest = threshold(record, "idle-gpu")
    return tuple(
        use
        for use in gpu_uses(record)
        if use.samples >= MINIMUM_SAMPLES
        and use.computing_percent < 100 * lowest
        and unexplained_share(use) >= UNEXPLAINED_SHARE * (1 - lowest)
    )


def unexplained_share(use: GpuUse) -> float:
    """Share of the training in which a GPU computes nothing although its data and its gradients are there."""
    return 1 - use.computing_percent / 100 - use.data_wait_share - use.exposed_share
