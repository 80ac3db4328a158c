"""Runs every benchmark; exits with 1 when one exceeds its bound."""

from __future__ import annotations

import sys

from tests.benchmarks import (
    box_cost,
    collective_hook_cost,
    many_ranks_cost,
    monitor_cost,
    plugin,
    probe_cost,
    rehearsal_cost,
    replica_cost,
    screen_cost,
    start_up,
    static_tree,
    step_cost,
    what_if_cost,
)

BENCHMARKS = (
    start_up,
    static_tree,
    collective_hook_cost,
    rehearsal_cost,
    box_cost,
    screen_cost,
    many_ranks_cost,
    monitor_cost,
    plugin,
    what_if_cost,
    replica_cost,
    step_cost,
    probe_cost,
)
"""The last one replaces functions of torch in this process."""

if __name__ == "__main__":
    sys.exit(max(benchmark.main() for benchmark in BENCHMARKS))
