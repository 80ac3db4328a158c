"""Whether this machine has the memory to train a model on the CPU, looked up before the kernel ends a rank for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

STATE_BYTES = 16
"""Of each parameter that is trained: weight, gradient and Adam's two moments in single precision."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Need(NamedTuple):
    """What the ranks of this machine need for one model."""

    parameters: int
    total_bytes: int
    missing_bytes: int
    """What is not allocated yet when DDP is built."""


def need_of(parameters: Iterable[Any], ranks: int) -> Need:
    """Return the need of ``ranks`` ranks for a module with these parameters; those on other devices do not count."""
    count = total = held = 0
    for parameter in parameters:
        if parameter.device.type != "cpu":
            continue
        own = parameter.numel() * parameter.element_size()
        count += parameter.numel()
        held += own
        total += max(own, parameter.numel() * STATE_BYTES) if parameter.requires_grad else own
    return Need(count, ranks * total, ranks * (total - held))


def free_bytes(root: str = "/") -> Optional[int]:
    """Return what this machine and the container around us still give; None where both are unknown."""
    limits = [_of_machine(root), *(_of_cgroup(root, *names) for names in _CGROUPS)]
    return min((limit for limit in limits if limit is not None), default=None)


def shortage(need: Need, free: Optional[int], ranks: int) -> str:
    """Return a sentence that the memory does not suffice; empty when it does, or when that is not known."""
    if free is None or need.missing_bytes <= free:
        return ""
    return (
        f"the model has {need.parameters:,} parameters: {ranks} ranks need {_gigabytes(need.total_bytes)} for weights,"
        f" gradients and optimizer state, {_gigabytes(need.missing_bytes)} of it still to come,"
        f" and {_gigabytes(free)} of memory are free"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _of_machine(root: str) -> Optional[int]:
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_cgroup(root: str, limit: str, used: str) -> Optional[int]:
    try:
        numbers = []
        for name in (limit, used):
            with open(os.path.join(root, name.lstrip("/")), encoding="ascii") as file:
                numbers.append(int(file.read()))
    except (OSError, ValueError):  # none, or "max"
        return None
    return max(0, numbers[0] - numbers[1])
