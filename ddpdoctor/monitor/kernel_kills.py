"""Processes that the kernel has ended because this machine, or a container on it, ran out of memory."""

from __future__ import annotations

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def kernel_kills(vmstat: Path = VMSTAT) -> int:
    """Return how many there were since this machine started; 0 where the kernel does not say (before Linux 4.13)."""
    try:
        lines = vmstat.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    counts = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(count[1]) for count in counts if len(count) == 2 and count[1].isdigit()), 0)
