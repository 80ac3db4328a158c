"""GPUs that compute too little for reasons that no other finding of a run speaks of."""

from __future__ import annotations

from collections.abc import Iterable

from ddpdoctor.diagnosis.gpu_use import GpuUse

MINIMUM_SAMPLES = 20
"""Looks, one a second, before anything is said."""
COMPUTING_BELOW_PERCENT = 50.0
UNEXPLAINED_ABOVE = 0.3
"""Share of the time in which the GPU computes nothing, and neither data nor exposed communication says why."""


def idle_gpus(uses: Iterable[GpuUse]) -> tuple[GpuUse, ...]:
    """The GPUs that compute for less than half of the training.

    Data wait (input-bound) and exposed communication have findings of their own and are no reason here.
    """
    return tuple(
        use
        for use in uses
        if use.samples >= MINIMUM_SAMPLES
        and use.computing_percent < COMPUTING_BELOW_PERCENT
        and unexplained_share(use) >= UNEXPLAINED_ABOVE
    )


def unexplained_share(use: GpuUse) -> float:
    """Share of the training in which a GPU computes nothing although its data and its gradients are there."""
    return 1 - use.computing_percent / 100 - use.data_wait_share - use.exposed_share
