"""Files that a mode for one process writes, where another mode starts the ranks: no rank writes them twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source.marked import check_marks

RUN = """
import argparse
import json
from pathlib import Path

def write(path):
    with open(path, "w") as file:{mark}
        json.dump({{}}, file)

def alone(args):
    nn.Linear(4, 4)(torch.randn(8, 4)).sum().backward()
    write(args.path)

def on_ranks(args):
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(4, 4))
    for x in torch.randn(8, 4):
        model(x).sum().backward()
    if dist.get_rank() == 0:
        write(args.path)

def main():
    args = argparse.ArgumentParser().parse_args()
{ways}

main()
"""
ALONE = {
    "a mode that returns": "    if args.baseline:\n        alone(args)\n        return\n    on_ranks(args)",
    "a mode that returns what it made": "    if args.baseline:\n        return alone(args)\n    on_ranks(args)",
    "one of two": "    if args.baseline:\n        alone(args)\n    else:\n        on_ranks(args)",
    "one of three": '    if args.mode == "one":\n        alone(args)\n'
    '    elif "RANK" in os.environ:\n        on_ranks(args)\n    else:\n        sys.exit(2)',
    "the other of two": "    if args.distributed:\n        on_ranks(args)\n    else:\n        alone(args)",
}
ON_RANKS = {
    "before it": "    if args.keeps:\n        write(args.path)\n    on_ranks(args)",
    "after it": "    on_ranks(args)\n    if args.keeps:\n        write(args.path)",
    "in the same mode": "    if args.baseline:\n        alone(args)\n"
    "    else:\n        on_ranks(args)\n        write(args.path)",
}


@pytest.mark.parametrize("way", ALONE)
def test_a_file_of_a_mode_for_one_process_is_in_order(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, RUN.format(mark="", ways=ALONE[way]), "DDP601", "DDP608")


@pytest.mark.parametrize("way", ON_RANKS)
def test_a_file_that_the_ranks_write_is_found(way: str, tmp_path: Path) -> None:
    check_marks(tmp_path, RUN.format(mark="  # DDP608", ways=ON_RANKS[way]), "DDP601", "DDP608")
