"""What is known before a rehearsal of the machines that its job is to run on."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from ddpdoctor.launch.devices import Device
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.record.streams.machine import JobMachine

_QUOTAS = ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD = "sys/fs/cgroup/cpu/cpu.cfs_period_us"


def job_machine(request: RehearsalRequest, device: Device) -> JobMachine:
    """Return what the command and the project say; a rehearsal on real GPUs runs where the job does."""
    launch, stated = request.launch, request.machine
    return msgspec.structs.replace(
        stated,
        cores=stated.cores or (usable_cores() if device == "cuda" else 0),
        ranks_per_node=(launch.ranks or 0) // launch.nodes or stated.ranks_per_node,
        may_use_gpus=request.may_use_gpus or device != "cpu" or stated.device_memory_bytes > 0,
        spreads_threads=request.spawns_ranks,
    )


def usable_cores(root: str = "/") -> int:
    """Cores that this process may use together with those around it: what it is bound to, and its container's share."""
    try:
        bound = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        bound = os.cpu_count() or 1
    quota = _quota(Path(root))
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Return how many cores' time the control group grants; None where it grants all, or does not tell."""
    for name in _QUOTAS:
        try:
            quota, _, period = (root / name).read_text(encoding="ascii").strip().partition(" ")
            return int(quota) / int(period or (root / _PERIOD).read_text(encoding="ascii")) if int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
            continue
    return None
