from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from ddpdoctor.source.events import Branch, Event, Loop
from ddpdoctor.source.interpreter.values import Const, Unknown, Value
from ddpdoctor.source.projection import Projection, project
from ddpdoctor.source.script.script import read_script
from ddpdoctor.source.torch_model.recorded_calls import UNASSIGNED

HEAD = "import torch\nimport torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"


def walked(directory: Path, body: str) -> Projection:
    path = directory / "train.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return project(read_script(path))


def changing_lines(projection: Projection) -> list[str]:
    """The first lines of the loops of which a turn finds what an earlier turn changed."""
    found = dict.fromkeys(loop for loop, _ in projection.machine.changing)
    loops = sorted(found, key=lambda node: getattr(node, "lineno", 0))
    return [ast.unparse(loop).splitlines()[0] for loop in loops]


def variable(projection: Projection, name: str) -> Value | None:
    machine = projection.machine
    return machine.store.get(machine.scope_modules["__main__"], name)


LOOP = "for turn in range(9):"


@pytest.mark.parametrize(
    "body",
    {
        "written before it is read": "x = turn + 1\n    print(x)",
        "the same value again": "done = False",
        "a variable of a called function": "work()",
        "an attribute of a library object that nothing reads": "model.require_backward_grad_sync = turn == 8",
    }.items(),
    ids=lambda item: item[0],
)
def test_loop_whose_turns_all_find_the_same_is_walked_once(tmp_path: Path, body: tuple[str, str]) -> None:
    start = "done = False\nmodel = DDP(torch.nn.Linear(2, 2))\ndef work():\n    inner = 1\n    return inner\n"
    projection = walked(tmp_path, f"{start}{LOOP}\n    {body[1]}\n")
    assert changing_lines(projection) == []


@pytest.mark.parametrize(
    "body",
    {
        "a counter": "count += 1",
        "read before it is written": "print(later)\n    later = turn",
        "an attribute of a library object that is read": "print(model.epoch)\n    model.epoch = turn",
        "a new attribute of an object of the project": "state.epoch = turn",
        "a list that grows": "losses.append(turn)",
    }.items(),
    ids=lambda item: item[0],
)
def test_loop_with_a_turn_that_finds_a_change_is_walked_with_it(tmp_path: Path, body: tuple[str, str]) -> None:
    start = "count = 0\nlosses = []\nmodel = DDP(torch.nn.Linear(2, 2))\nclass State:\n    pass\nstate = State()\n"
    projection = walked(tmp_path, f"{start}{LOOP}\n    {body[1]}\n")
    assert changing_lines(projection) == [LOOP]


def test_variable_holds_what_a_first_or_a_later_turn_finds(tmp_path: Path) -> None:
    projection = walked(tmp_path, f"count, limit = 0, 5\n{LOOP}\n    count += 1\n    limit = 5\n")
    assert variable(projection, "count") == Unknown(not_none=True)
    assert variable(projection, "limit") == Const(5)


def test_what_only_the_first_turn_runs_is_no_part_of_every_turn(tmp_path: Path) -> None:
    projection = walked(tmp_path, f"first = True\n{LOOP}\n    if first:\n        dist.barrier()\n    first = False\n")
    for tree in projection.walks[0].trees:
        (loop,) = tree
        assert isinstance(loop, Loop)
        assert [type(item) for item in loop.body] == [Branch]


def test_walk_that_is_taken_back_leaves_nothing_behind(tmp_path: Path) -> None:
    projection = walked(
        tmp_path,
        f"""
        count = 0
        {LOOP}
            dist.barrier()
            count += 1
            if dist.get_rank() == 0 and count < 7:
                break
        """,
    )
    assert [event.name for event in projection.of_kind("collective")] == ["barrier"]
    assert len(projection.exits) == 1
    for tree in projection.walks[0].trees:
        (loop,) = tree
        assert isinstance(loop, Loop)
        assert [item.name for item in loop.body if isinstance(item, Event)] == ["barrier"]


def test_variable_that_no_turn_reads_before_it_writes_it_changes_nothing(tmp_path: Path) -> None:
    projection = walked(
        tmp_path,
        f"""
        def train(loader):
            total, mean, _ = 0, 0, 0
            {LOOP}
                total = turn + 1
                for _ in range(3):
                    mean = total / 3
                print(total)
        def told(loader):
            total = 0
            tell = lambda: print(total)
            {LOOP}
                tell()
                total = turn + 1
        train([])
        told([])
        """,
    )
    assert changing_lines(projection) == [LOOP]


def test_loop_in_a_loop_finds_what_it_found_in_the_turn_before(tmp_path: Path) -> None:
    projection = walked(
        tmp_path,
        """
        saved, limit = None, 3
        for epoch in range(9):
            count, marker = 0, saved
            for step in range(limit):
                count += 1
                if count == 1 and marker is None:
                    dist.barrier()
            saved = torch.load("state.pt")
        """,
    )
    for tree in projection.walks[0].trees:
        (epochs,) = tree
        assert isinstance(epochs, Loop)
        (steps,) = epochs.body
        assert isinstance(steps, Loop)
        assert [type(item) for item in steps.body] == [Branch]
    assert [event.name for event in projection.of_kind("collective")] == ["barrier"]


# The function is entered by all, and the ranks but one run its loop first: that is no reason to lack a name later.
LATER = {
    "a sum": ("total = 0", "total += parameter.numel()"),
    "a list": ("total = []", "total.append(parameter)\n                total = total + [1]"),
    "the largest": ("total = torch.zeros(1)", "total = max(total, parameter.max())"),
    "two loops": ("total = 0", "for size in parameter.shape:\n                    total = total * 2 + size"),
}


@pytest.mark.parametrize("way", LATER)
def test_who_ran_a_loop_in_an_earlier_call_decides_nothing_of_a_later_one(way: str, tmp_path: Path) -> None:
    begin, turn = LATER[way]
    path = tmp_path / "train.py"
    path.write_text(
        HEAD
        + f"""
dist.init_process_group("gloo")

class Runner:
    def __init__(self):
        self.made = None
        self.model = torch.nn.Linear(4, 4)

    def optimizer(self):
        if self.made is None:
            {begin}
            for parameter in self.model.parameters():
                {turn}
            self.made = torch.optim.SGD(self.model.parameters(), 0.1)
        return self.made

first, second = Runner(), Runner()
if dist.get_rank() == 0:
    first.optimizer()
first.optimizer()
second.optimizer()
"""
    )
    assert [event for event in project(read_script(path)).events if event.name == UNASSIGNED] == []
