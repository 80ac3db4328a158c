"""What is known of the machines that a job runs on, or is to run on, which need not be the one that looks."""

from __future__ import annotations

from collections.abc import Mapping

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
    """Where no one chooses, torch computes on a thread for each core in every rank: no launcher changes that."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a live job, as the ranks on it say."""

    host: str
    ranks: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    """Names of its network interfaces; empty when they are not known."""
    environment: Mapping[str, str] = {}
    """Variables that bear on the job, of the lowest of its ranks, when the process group was made."""
    clock_error_ns: int | None = None
    """By no more its times are wrong beside those of the first node; None where clocks were not compared."""
