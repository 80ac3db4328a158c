"""What is known of the machines that a job is to run on, which need not be the one that rehearses it."""

from __future__ import annotations

import msgspec


class JobMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job, and what the ranks are on it; 0 where nothing says."""

    device_memory_bytes: int = 0
    """Memory of one of its GPUs."""
    cores: int = 0
    """Cores that all its ranks together may use."""
    ranks_per_node: int = 0
    may_use_gpus: bool = False
    """The ranks train on GPUs, or speak of them and may where there are some."""
    spreads_threads: bool = False
    """Where nobody chooses, torch computes on a thread for each core in every rank: no launcher tells it otherwise."""
