"""What lies in one directory and is not one story: jobs of other scripts, and attempts of one job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.examination import Examination
from tests.autopsy.false_deaths import Quiet, errors_in, quiet_logs

RAISED = """[rank{rank}]: step 1 loss 0.3
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/jobs/{script}", line {line}, in <module>
[rank{rank}]:     main()
[rank{rank}]: {error}
"""


def write(path: Path, moment: int, **fields: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RAISED.format(**fields))
    os.utime(path, (moment, moment))


def autopsy_of(*paths: Path) -> Examination:
    return autopsy(AutopsyRequest(paths=tuple(map(str, paths))))


def test_of_two_scripts_with_the_same_ranks_the_newest_is_read_and_the_other_is_named(tmp_path: Path) -> None:
    write(tmp_path / "resnet.log", 1_000, rank=0, script="resnet.py", line=3, error="NameError: x")
    write(tmp_path / "llama.log", 2_000, rank=0, script="sft.py", line=7, error="KeyError: 'y'")
    examination = autopsy_of(tmp_path)
    assert [finding.locations[0].line for finding in examination.findings] == [7]
    assert "resnet.log" in examination.notes[0]


def test_files_that_are_named_are_read_together(tmp_path: Path) -> None:
    write(tmp_path / "resnet.log", 1_000, rank=0, script="resnet.py", line=3, error="NameError: x")
    write(tmp_path / "llama.log", 2_000, rank=0, script="sft.py", line=7, error="KeyError: 'y'")
    assert len(autopsy_of(tmp_path / "resnet.log", tmp_path / "llama.log").findings) == 2


@pytest.mark.parametrize(
    ("names", "scripts", "ranks"),
    [
        (("node0.log", "node1.log"), ("train.py", "train.py"), (0, 1)),
        (("trainer.log", "server.log"), ("train.py", "serve.py"), (0, 1)),
        (("job.out", "job.err"), ("train.py", "train.py"), (0, 0)),
    ],
)
def test_parts_of_one_job_stay_together(
    tmp_path: Path, names: tuple[str, str], scripts: tuple[str, str], ranks: tuple[int, int]
) -> None:
    for number in (0, 1):
        write(tmp_path / names[number], number, rank=ranks[number], script=scripts[number], line=number, error="E: x")
    examination = autopsy_of(tmp_path)
    assert not any("name their files" in note for note in examination.notes)


def test_each_attempt_has_its_own_first_cause(tmp_path: Path) -> None:
    for attempt, error in enumerate(("NameError: x", "KeyError: 'y'")):
        place = tmp_path / f"none_x/attempt_{attempt}/{1 - attempt}/stderr.log"
        write(place, 0, rank=1 - attempt, script="train.py", line=3 + attempt, error=error)
    first, later = autopsy_of(tmp_path).findings
    assert (first.role, first.ranks, first.locations[0].line) == ("cause", (1,), 3)
    assert later.title.startswith("in attempt 2 of the launcher, rank 0 raised KeyError")


def test_an_end_that_only_the_launcher_tells_belongs_to_its_attempt() -> None:
    log = Path(__file__).parent / "posted" / "73.log"
    _, later = autopsy(AutopsyRequest(paths=(str(log),))).findings
    assert later.title == "in attempt 2 of the launcher, rank 0 was killed by SIGKILL"


STAMPED = """2025-03-{day:02} 10:{began:02}:00,001 INFO fit: step 1 loss 0.3
{mark}Traceback (most recent call last):
{mark}  File "/jobs/fit.py", line {line}, in <module>
{mark}    main()
{mark}KeyError: 'y'
2025-03-{day:02} 10:{ended:02}:00,001 ERROR fit: gave up
"""


def stamped(path: Path, *, day: int, line: int, began: int = 0, ended: int = 30, rank: int | None = 0) -> None:
    mark = "" if rank is None else f"[rank{rank}]: "
    path.write_text(STAMPED.format(day=day, line=line, began=began, ended=ended, mark=mark))


@pytest.mark.parametrize("rank", [0, None])
def test_of_two_runs_of_one_script_the_later_is_read(tmp_path: Path, rank: int | None) -> None:
    stamped(tmp_path / "fit_1.log", day=2, line=3, rank=rank)
    stamped(tmp_path / "fit_2.log", day=1, line=7, rank=rank)
    examination = autopsy_of(tmp_path)
    assert [finding.locations[0].line for finding in examination.findings] == [3]
    assert "fit_2.log" in examination.notes[0]
    assert len(autopsy_of(tmp_path / "fit_1.log", tmp_path / "fit_2.log").findings) == 2


@pytest.mark.parametrize(
    ("second", "ended"),
    [({"began": 20, "rank": 0}, 30), ({"began": 40, "rank": 1}, 30), ({"began": 5, "rank": None}, 6)],
)
def test_logs_of_one_run_are_read_together(tmp_path: Path, second: dict[str, int], ended: int) -> None:
    """They were written at one time, or other ranks wrote them."""
    stamped(tmp_path / "a.log", day=1, line=3, ended=ended)
    stamped(tmp_path / "b.log", day=1, line=7, ended=50, **second)
    assert not any("name their files" in note for note in autopsy_of(tmp_path).notes)


@pytest.mark.parametrize("log", tuple(quiet_logs()), ids=lambda log: log.name)
def test_no_one_died_in_a_quiet_log(log: Quiet, tmp_path: Path) -> None:
    assert errors_in(log, tmp_path) == []


def test_there_are_enough_of_them() -> None:
    names = [log.name.partition(":")[0] for log in quiet_logs()]
    assert names.count("recorded") + names.count("healthy") >= 55
    assert names.count("unrelated") >= 40


@pytest.mark.parametrize(
    ("said", "codes"),
    [("Socket recv failed while polling for opId=0x200ad80fbbd0", ["DDP702"]), ("Cuda failure 'invalid'", ["DDP701"])],
)
def test_what_nccl_said_last_decides_whether_its_error_follows_from_that_of_another_rank(
    said: str, codes: list[str], tmp_path: Path
) -> None:
    of_nccl = (
        "torch.distributed.DistBackendError: NCCL error in: c10d/ProcessGroupNCCL.cpp:1275, internal error\n"
        f"ncclInternalError: Internal check failed.\nLast error:\n{said}"
    )
    out_of_memory = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.90 GiB"
    failures = ((of_nccl, 1), (of_nccl, 1), (out_of_memory, 2))
    text = "".join(RAISED.format(rank=0, script="train.py", line=line, error=error) for error, line in failures)
    (tmp_path / "job.log").write_text(text.replace("[rank0]: ", ""))
    found = [finding for finding in autopsy_of(tmp_path / "job.log").findings if finding.severity == "error"]
    assert [finding.code for finding in found] == codes
