"""From where on a measured figure is a finding; a project may set its own under ``[tool.ddpdoctor.thresholds]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

DEFAULTS: Mapping[str, float] = {
    "exposed-communication": 0.10,
    "straggler": 0.05,
    "input-bound": 0.10,
    "barrier-in-hot-loop": 0.01,
    "slow-link": 0.15,
    "low-scaling-efficiency": 0.90,
    "long-wait": 0.50,
    "idle-gpu": 0.50,
    "gpu-throttled": 0.85,
    "model-state-too-large": 0.60,
}
"""By the name of the check.

Exposed communication, waiting for a straggler, data wait and barriers: share of the step above which they are too much.
Slow link: share of the link's speed below which the bandwidth is too low. Efficiency: the lowest that is good. Long
wait: share of the group's timeout. Idle GPU: share of the training below which a GPU computes too little. Throttled
GPU: share of the clock of the other ranks' GPUs below which its own is too low. Model state: share of the GPU's memory
above which it takes too much.
"""


def threshold(record: RunRecord, name: str) -> float:
    """Return the threshold of the check called ``name`` for this run."""
    return record.job.thresholds.get(name, DEFAULTS[name])
