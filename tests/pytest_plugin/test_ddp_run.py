"""``ddp_run``: functions on ranks from tests without the mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_plugin.session import Session, processes_of, run_pytest

HELPERS = """
import torch.distributed as dist

def world():
    return dist.get_world_size()

class Scale:
    def __init__(self, by): self.by = by
    def of(self, tensor): return self.by * tensor
"""
TESTS = """
import pytest
import torch
import torch.distributed as dist
import helpers

def mean(value, rank):
    tensor = torch.tensor(value + rank)
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()

def fails(): assert dist.get_rank() < 1, "rank 1 is wrong"
def hangs():
    if dist.get_rank() == 0:
        dist.barrier()
def skips(): pytest.skip("no data here")
def gives_a_lock():
    import threading
    return threading.Lock()
def leaves(): raise SystemExit(3)

def test_each_rank_returns_what_it_has(ddp_run, ddp_rank):
    assert [float(one) for one in ddp_run(mean, 1.0, ddp_rank)] == [1.5, 1.5]

def test_again_on_other_ranks(ddp_run):
    assert ddp_run(helpers.world, nproc=3) == [3, 3, 3]
    assert ddp_run(helpers.world, nproc=1) == [1]

class TestOfAClass:
    def test_a_method_of_an_object(self, ddp_run):
        assert ddp_run(helpers.Scale(3).of, torch.ones(1)) == [torch.tensor([3.0])] * 2

def test_the_parent_is_no_rank(ddp_run):
    ddp_run(helpers.world)
    assert not dist.is_initialized()

def test_no_group(ddp_run): assert ddp_run(dist.is_initialized, init=False) == [False, False]
def test_fails(ddp_run): ddp_run(fails)
def test_expects_a_failure(ddp_run):
    with pytest.raises(pytest.fail.Exception, match="rank 1 is wrong"):
        ddp_run(fails)
    assert ddp_run(helpers.world) == [2, 2]
def test_hangs(ddp_run): ddp_run(hangs, timeout=30)
def test_skips(ddp_run): ddp_run(skips)
def test_gives_a_lock(ddp_run): ddp_run(gives_a_lock)
def test_leaves(ddp_run): ddp_run(leaves)
def test_a_function_of_the_body(ddp_run):
    def inner(): pass
    ddp_run(inner)
def test_nonsense(ddp_run): ddp_run(mean, nproc=0)
def test_an_option_that_there_is_not(ddp_run): ddp_run(mean, ranks=2)
@pytest.mark.ddp
def test_on_a_rank(ddp_run): pass
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("functions")
    (directory / "helpers.py").write_text(HELPERS)
    (directory / "test_functions.py").write_text(TESTS)
    return directory


@pytest.fixture(scope="module")
def session(directory: Path) -> Session:
    return run_pytest(directory, environment={"MARKED_BY": str(directory)})


@pytest.mark.parametrize(
    "name",
    [
        "test_each_rank_returns_what_it_has",
        "test_again_on_other_ranks",
        "test_a_method_of_an_object",
        "test_the_parent_is_no_rank",
        "test_no_group",
        "test_expects_a_failure",
    ],
)
def test_a_function_runs_on_ranks(session: Session, name: str) -> None:
    assert session.outcomes[name] == "passed", session.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_fails", "rank 1 failed: AssertionError: rank 1 is wrong"),
        ("test_hangs", "rank 1 ran to its end and left while rank 0 waits in barrier at test_functions.py:15"),
        (
            "test_gives_a_lock",
            "every rank failed: Failed: what the function returns cannot be sent from the rank: lock",
        ),
        ("test_leaves", "every rank failed: the body called sys.exit(3)"),
        ("test_a_function_of_the_body", "the call cannot be sent to the ranks: "),
        ("test_nonsense", "needs 1 to 64 ranks, not 0"),
        ("test_an_option_that_there_is_not", "takes nproc, timeout, device and init"),
        ("test_on_a_rank", "`ddp_run` cannot be sent to the ranks"),
    ],
)
def test_what_is_wrong_is_said(session: Session, name: str, words: str) -> None:
    assert session.outcomes[name] == "failed", session.output
    assert words in session.messages[name]


def test_a_test_is_skipped_where_its_ranks_are(session: Session) -> None:
    assert session.outcomes["test_skips"] == "skipped", session.output


def test_the_call_that_failed_is_shown(session: Session) -> None:
    assert "def test_fails(ddp_run): ddp_run(fails)" in session.messages["test_fails"]
    assert "on_ranks.py" not in session.messages["test_fails"]


def test_nothing_is_left_behind(session: Session, directory: Path) -> None:
    assert session.outcomes
    assert processes_of(f"MARKED_BY={directory}") == []
