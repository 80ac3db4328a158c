"""Whether a process group is there where a function asks for it: not if only a way made it that has been left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import read_script
from tests.source.marked import places, written

JOB = """
import argparse

options = argparse.ArgumentParser().parse_args()

def join(rank=None):
    rank = int(os.environ["RANK"]) if rank is None else rank
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=4)
    return dist.get_rank()

def work(given=None):
    rank = join(given)
    model = DDP(nn.Linear(4, 1))
    model(torch.randn(2, 4)).sum().backward()
    if rank == 0:
        print("one rank")
    if rank != 0:
        return
    print("one rank")

WAY
"""

LEFT = {
    "returned": """
def main():
    if options.torchrun:
        return work()
    mp.spawn(work, nprocs=4)

main()
""",
    "ended": """
if options.look:
    work()
    sys.exit(0)
mp.spawn(work, nprocs=4)
""",
    "the other arm": """
if options.torchrun:
    work()
else:
    mp.spawn(work, nprocs=4)
""",
    "raised": """
def main():
    if options.slurm:
        work()
        raise NotImplementedError
    mp.spawn(work, nprocs=4)

main()
""",
    "one of three": """
if options.mode == "look":
    dist.init_process_group("gloo")
elif options.mode == "spawn":
    mp.spawn(work, nprocs=4)
else:
    print("nothing")
""",
    "in a function": """
def look():
    dist.init_process_group("gloo")
    return dist.get_world_size()

def main():
    if options.look:
        print(look())
        return
    mp.spawn(work, nprocs=4)

main()
""",
}
STILL_THERE = {
    "before": 'dist.init_process_group("gloo")\nwork()',
    "in one arm": 'if options.distributed:\n    dist.init_process_group("gloo")\nwork()',
    "in a function": 'def start():\n    dist.init_process_group("gloo")\n\nstart()\nwork()',
}


def joins(path: Path) -> int:
    """How many lines of a script make the group where it is followed."""
    events = whole_projection(read_script(path)).events
    return len({event.chain for event in events if event.name == "init_process_group"})


@pytest.mark.parametrize("way", LEFT)
def test_a_way_that_was_left_made_no_group_for_the_others(way: str, tmp_path: Path) -> None:
    path = written(tmp_path, JOB.replace("WAY", LEFT[way]))
    assert joins(path) == 2
    assert places(path, "DDP605") == []


@pytest.mark.parametrize("way", STILL_THERE)
def test_a_group_that_was_made_on_the_way_is_there(way: str, tmp_path: Path) -> None:
    assert joins(written(tmp_path, JOB.replace("WAY", STILL_THERE[way]))) == 1
