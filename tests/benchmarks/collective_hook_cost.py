"""What the hook of collectives costs a collective: CPU time of the calling thread, with and without it.

``python -m tests.benchmarks.collective_hook_cost`` calls ``all_reduce`` on a gloo group of one rank, from a call chain
of five lines, in blocks, before and after the hook is installed. It prints the cheapest block of each, for whatever
else the machine does only makes a block dearer, and exits with 1 when the hook costs more than 35 µs of CPU a
collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.cheapest_block import cheapest_us, tell
from tests.scratch import scratch_directory

BLOCKS = 40
CALLS = 200
ALLOWED_US = 35.0
DEPTH = 5
"""Lines of the user's call chain, all of which the hook notes."""


def nested(call: Callable[[], None], depth: int) -> None:
    """Call from some lines further down."""
    if depth > 1:
        nested(call, depth - 1)
    else:
        call()


def measure() -> tuple[float, float]:
    """Cheapest blocks without and with the hook, in microseconds."""
    import torch
    import torch.distributed as dist

    from ddpdoctor.probe.groups import GroupBook
    from ddpdoctor.probe.journal import Journal
    from ddpdoctor.probe.rehearsal.collective_hook import CollectiveHook
    from ddpdoctor.probe.rehearsal.loop_subjects import Subjects
    from ddpdoctor.probe.rehearsal.training.reduction import ReducedLosses
    from ddpdoctor.record.writer import CollectiveRing

    with scratch_directory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        value = torch.ones(100)

        def reduce() -> None:
            nested(lambda: dist.all_reduce(value), DEPTH)

        without_us = cheapest_us(reduce, calls=CALLS, blocks=BLOCKS)
        journal = Journal(str(directory), {"project_root": str(Path(__file__).parents[2])})
        journal.rank, journal.ring = 0, CollectiveRing(str(directory))
        groups = GroupBook(journal, torch)
        CollectiveHook(
            journal, torch, ReducedLosses(journal), Subjects(journal, torch, lambda tensor: ""), groups
        ).install()
        groups.note_world()
        with_us = cheapest_us(reduce, calls=CALLS, blocks=BLOCKS)
        if journal.ring.count != (BLOCKS + 1) * CALLS:
            raise SystemExit(f"the hook logged {journal.ring.count} collectives of {(BLOCKS + 1) * CALLS}")
        dist.destroy_process_group()
    return without_us, with_us


def main() -> int:
    """Print what was measured; 1 when the bound is exceeded."""
    without_us, with_us = measure()
    print(f"all_reduce on one rank, CPU time of the calling thread, cheapest of {BLOCKS} blocks of {CALLS}")
    return tell("hook", without_us, with_us, ALLOWED_US)


if __name__ == "__main__":
    sys.exit(main())
