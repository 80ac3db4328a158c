"""How passes, ranks and rehearsals end, and what is known of the ends."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest

from ddpdoctor.probe.rehearsal.data.loaders import awaits_end
from ddpdoctor.probe.rehearsal.schedule import Pace
from tests.faults.cases import FAULTS
from tests.faults.healthy import HEALTHY, QUICK, examine_healthy
from tests.faults.judge import run_fault

from .conftest import Rehearse

# Which code is prepared for the end of what it draws from.
PREPARED = (
    "try:\n    next(batches)\nexcept StopIteration:\n    pass",
    "try:\n    next(batches)\nexcept (KeyError, Exception):\n    pass",
    "try:\n    next(batches)\nexcept:\n    pass",
    "next(batches, None)",
    "from contextlib import suppress\nwith suppress(StopIteration):\n    next(batches)",
    "def draw():\n    return next(batches)\ntry:\n    draw()\nexcept StopIteration:\n    pass",
    "class Own:\n    __iter__ = lambda self: self\n    __next__ = lambda self: next(batches)\nfor _ in Own(): break",
    "def own():\n    yield next(batches)\nlist(own())",
)
COUNTING = (
    "next(batches)",
    "for step in range(1):\n    next(batches)",
    "try:\n    next(batches)\nexcept KeyboardInterrupt:\n    pass",
    "try:\n    next(batches)\nexcept Exception:\n    print('lost')\n    raise",
    "try:\n    raise StopIteration\nexcept StopIteration:\n    next(batches)",
    "def draw():\n    return next(batches)\ndraw()",
)


class Batches:
    """Remembers what was answered for the frame that drew."""

    def __init__(self, script: Path) -> None:
        self.answers: list[bool] = []
        self._script = str(script)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        frame: FrameType = sys._getframe(1)
        self.answers.append(awaits_end(frame, lambda name: name == self._script))
        return 0


@pytest.mark.parametrize("source", PREPARED + COUNTING)
def test_handlers_loops_and_defaults_await_an_end(source: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    batches = Batches(script)
    exec(compile(source, str(script), "exec"), {"batches": batches})
    assert batches.answers == [source in PREPARED]


# What comes after the rehearsed passes and reaches no hook of ours is ended after a while, and counts as rehearsed.
BODY = """
dist.init_process_group("gloo")
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch == 1 and dist.get_rank() == 0:
        until = time.monotonic() + 1000
        while time.monotonic() < until:
            sum(range(1000))
dist.barrier()
"""


def test_work_without_a_hook_after_what_was_rehearsed_is_ended(rehearse_script: Rehearse) -> None:
    began = time.monotonic()
    record = rehearse_script(BODY)
    assert record.job.stop_reason == "" and record.steps() >= 8, record.job.stop_text
    assert [rank.end for rank in record.ranks] == ["ended-by-rehearsal"] * 2
    assert time.monotonic() - began < 200


# What a rank did last is in the record, however it ended.


@pytest.mark.parametrize(
    "end", ["dist.all_reduce(torch.ones(3))", "os.kill(os.getpid(), 9)", "os._exit(1)", "os.abort()"]
)
def test_the_last_row_is_the_guilty_one(rehearse_script: Rehearse, end: str) -> None:
    record = rehearse_script(
        f"""
        dist.init_process_group("gloo")
        value = torch.ones(2)
        for step in range(40):
            dist.all_reduce(value)
        if dist.get_rank() == 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True)  # the last
            {end}
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        dist.all_reduce(value)
        """
    )
    track = record.track(1)
    assert track is not None
    rows = [record.signatures[number] for number in track.signature]
    wanted = 42 if "all_reduce" in end else 41
    assert len(rows) == wanted
    assert (rows[40].reduce_op, rows[-1].numels) == ("max", (3,) if wanted == 42 else (2,))
    site = record.site(track.site[40]).innermost
    assert site is not None and site.line == 14, "the line is known before the collective starts"


# One injected fault, one finding: on real ranks, with the right code, line and culprit.
#
# These are the quick ones of ``tests.faults``; ``python -m tests.benchmarks.faults`` runs all, several times.


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.quick])
def test_a_fault_is_found_once_and_named_rightly(name: str, tmp_path: Path) -> None:
    run = run_fault(FAULTS[name], tmp_path)
    assert run.wrong == ""
    assert run.examination.exit_code == 1
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize("name", QUICK)
def test_correct_code_is_left_alone(name: str, tmp_path: Path) -> None:
    assert examine_healthy(HEALTHY[name], tmp_path) == ""


# The estimate that ends a rehearsal in time.


class Watch:
    """A clock that is set, and an ending that remembers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ended: list[tuple[str, str]] = []

    def end(self, reason: str, text: str = "") -> None:
        self.ended.append((reason, text))


def _steps(taken_s: list[float], left: list[float], started_s: float = 0.0) -> Watch:
    watch = Watch()
    pace = Pace(watch, started_s, 120.0, lambda: watch.now_s)  # type: ignore[arg-type]
    pace.forward_begins()
    for seconds, batches in zip(taken_s, left, strict=True):
        watch.now_s += seconds
        pace.backward_ended()
        pace.stepped(batches)
        if watch.ended:
            break
        pace.forward_begins()
    return watch


def test_fast_steps_end_nothing() -> None:
    assert not _steps([9.0, 9.0, 9.0, 9.0], [3, 2, 1, 0]).ended


def test_a_step_that_leaves_no_time_for_the_rest_ends_it_at_once() -> None:
    watch = _steps([70.0, 70.0], [3, 2])
    assert watch.ended == [
        ("slow", "a batch takes 70.0 s, so 3 more do not fit into the time limit of 120 s"),
    ]
    assert watch.now_s == 70.0


def test_the_first_step_may_be_a_slow_start() -> None:
    assert not _steps([45.0, 5.0, 5.0, 5.0], [3, 2, 1, 0]).ended


def test_the_first_step_alone_does_not_say_what_the_others_take() -> None:
    assert not _steps([17.0, 0.1, 0.1, 0.1], [7, 6, 5, 0], started_s=-45.0).ended
    assert not _steps([20.0, 0.1, 0.1, 0.1], [20, 19, 18, 0]).ended


def test_the_second_step_says_it() -> None:
    watch = _steps([20.0, 20.0, 20.0], [20, 19, 18])
    assert watch.now_s == 40.0
    assert watch.ended == [("slow", "a batch takes 20.0 s, so 19 more do not fit into the time limit of 120 s")]


def test_later_steps_are_believed_in_full() -> None:
    assert _steps([30.0, 30.0], [3, 3]).now_s == 60.0
    assert _steps([30.0, 30.0], [3, 3]).ended


def test_nothing_is_left_to_wait_for_at_the_end_of_a_pass() -> None:
    assert not _steps([60.0, 60.0, 60.0], [1, 0, 0]).ended
