from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_plugin.session import Session, line_of, processes_of, run_pytest, write_tests

BODIES = """
pytestmark = pytest.mark.ddp

class Sample:
    def __init__(self, value): self.value = value

@pytest.fixture
def sample(): return Sample(3)

@pytest.fixture
def here(ddp_rank): return {"rank": ddp_rank}

@pytest.fixture
def unpicklable(): return lambda: 1

def test_sums(ddp_rank, sample, tmp_path):
    tensor = torch.full((2,), float(ddp_rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1] and ddp_rank.world_size == 2 and sample.value == 3 and tmp_path.is_dir()

@pytest.mark.parametrize("size", [1, 5])
def test_parameters(size, here):
    gathered = [None, None]
    dist.all_gather_object(gathered, (size, int(here["rank"])))
    assert gathered == [(size, 0), (size, 1)]

class TestMethods:
    def setup_method(self): self.value = 4
    def test_method(self, ddp_rank): assert self.value == 4

@pytest.mark.ddp(nproc=3, timeout=120)
def test_three(ddp_rank):
    assert dist.get_world_size() == ddp_rank.world_size == 3

@pytest.mark.ddp(init=False)
def test_makes_its_own_group():
    dist.init_process_group("gloo")
    dist.barrier()

def test_one_fails(ddp_rank):
    print("said by", int(ddp_rank))
    assert ddp_rank < 1

def test_all_fail(ddp_rank):
    raise ValueError("the same")

def test_hangs(ddp_rank):
    dist.barrier()
    if ddp_rank == 0:
        dist.broadcast(torch.ones(1), 0)  # by rank 0 alone
    dist.all_reduce(torch.ones(2))

def test_returns_early(ddp_rank):
    if ddp_rank == 1:
        return
    dist.barrier()

@pytest.mark.ddp(timeout=3)
def test_spins(ddp_rank):
    if ddp_rank == 1:
        while True: pass  # for ever
    dist.barrier()

def test_is_silently_wrong(ddp_rank):
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if ddp_rank else dist.ReduceOp.SUM)

def test_is_killed(ddp_rank):
    if ddp_rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_skips(): pytest.skip("no data here")

def test_one_skips(ddp_rank):
    if ddp_rank == 1: pytest.skip("no data here")

@pytest.mark.xfail(strict=True)
def test_is_known_to_fail(): assert False

def test_does_not_pickle(unpicklable): pass

def test_leaves_a_process():
    subprocess.Popen(["sleep", "86399"], start_new_session=True)

def test_after_all_that(ddp_rank):
    dist.barrier()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bodies")
    write_tests(directory, BODIES)
    return directory


@pytest.fixture(scope="module")
def session(directory: Path) -> Session:
    return run_pytest(directory, environment={"MARKED_BY": str(directory)})


@pytest.mark.parametrize(
    "name",
    [
        "test_sums",
        "test_parameters[1]",
        "test_parameters[5]",
        "test_method",
        "test_three",
        "test_makes_its_own_group",
        "test_leaves_a_process",
        "test_after_all_that",
    ],
)
def test_a_healthy_body_passes(session: Session, name: str) -> None:
    assert session.outcomes[name] == "passed", session.output


def test_a_failure_is_told_of_its_rank_with_its_assertion_and_output(session: Session) -> None:
    text = session.messages["test_one_fails"]
    assert "rank 1 failed: assert 1 < 1" in text
    assert ">       assert ddp_rank < 1" in text
    assert "rank 0 of 2: passed" in text
    assert session.output.count("said by 1") == 1


def test_a_failure_of_all_ranks_is_told_so(session: Session) -> None:
    assert session.messages["test_all_fail"].startswith("every rank failed: ValueError: the same")


def test_a_hang_fails_with_the_line_of_the_rank_that_went_astray(session: Session, directory: Path) -> None:
    text = session.messages["test_hangs"]
    assert "(DDP301 rank-divergent-collective)" in text.splitlines()[0]
    assert line_of(directory, "by rank 0 alone") in text.splitlines()[0]
    assert "rank 1" in text
    assert session.seconds["test_hangs"] < 50


def test_a_rank_that_leaves_is_the_culprit(session: Session) -> None:
    assert "rank 1 ran to its end and left while rank 0 waits in barrier" in session.messages["test_returns_early"]
    assert "(DDP306 early-exit)" in session.messages["test_returns_early"]


def test_what_nothing_proves_ends_at_the_time_limit_with_its_stacks(session: Session, directory: Path) -> None:
    text = session.messages["test_spins"]
    assert "had not finished after 3 s" in text
    assert f"rank 1 is at {line_of(directory, 'for ever')}" in text


def test_ranks_that_pass_and_compute_something_else_fail(session: Session) -> None:
    assert "reduce operation: sum on rank 0, max on rank 1 (DDP304" in session.messages["test_is_silently_wrong"]


def test_a_killed_rank_comes_before_the_errors_of_its_peers(session: Session) -> None:
    first = session.messages["test_is_killed"].splitlines()[0]
    assert first.startswith(("rank 1 was killed by SIGKILL", "rank 1 was ended by SIGKILL"))


def test_a_test_is_skipped_when_all_ranks_skip_it(session: Session) -> None:
    assert session.outcomes["test_skips"] == "skipped"
    assert "no data here" in session.messages["test_skips"]
    assert "rank 0 passed, rank 1 skipped" in session.messages["test_one_skips"]
    assert session.outcomes["test_one_skips"] == "failed"


def test_a_known_failure_counts_as_one(session: Session) -> None:
    assert session.outcomes["test_is_known_to_fail"] == "skipped"


def test_a_fixture_that_cannot_be_sent_is_named(session: Session) -> None:
    assert "`unpicklable` cannot be sent to the ranks: function" in session.messages["test_does_not_pickle"]


def test_nothing_is_left_behind(session: Session, directory: Path) -> None:
    assert processes_of(f"MARKED_BY={directory}") == []
