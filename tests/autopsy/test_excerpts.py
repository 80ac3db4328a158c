"""Every excerpt has the right answer, and every row of the catalogue is found in three surroundings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from ddpdoctor.examination import Examination
from ddpdoctor.postmortem.catalogue.messages import (
    Row,
    index_of,
    rows,
    rows_of_nccl,
    statement_in,
    statement_of_nccl,
)
from ddpdoctor.postmortem.read import read_postmortem
from ddpdoctor.postmortem.scan import NEEDLES
from tests.autopsy.catalogue import filled, printed, unclassified
from tests.autopsy.excerpts import Excerpt, excerpts, faults_of
from tests.autopsy.test_logs import LOST, RAISED

MISSED = frozenset(
    {
        # Ray says that one process ended, and NCCL of another one that its peer ended or the network failed.
        "eighth-completion-error-under-ray",
        # The line says that it is tried again; what ended the job is behind the end of the text.
        "thirteenth-exception-that-is-retried-and-cut",
        # One library alone prints a message in front of the head of its traceback, and that is cut off.
        "seventeenth-message-before-its-head",
        # Of the limit only the default is said, which a variable may have changed.
        "twentieth-notify-of-hccl",
        # torchrun's table has whole seconds: two ranks left in the same one, and it names the first of its list.
        "thirtyfifth-table-with-a-later-kill",
        # The rank, the class and the module are said; the number of the status is on the second line of the message.
        "thirtyfifth-graph-of-gaudi-does-not-compile",
        # The start is all that is there: that the training went on is known to those who saw the rest.
        "thirtyfifth-wrapper-of-verbs-that-only-warns",
        # What a job survived, or what followed, is told as advice in the words of the failure.
        "fortyfirst-remote-allocator-and-it-trains",
        "fortyfirst-closed-by-a-peer-then-its-memory",
        # NCCL says of it that the peer ended or the network failed, and so it is told; expected was an error of NCCL.
        "fortyfourth-completion-padded-to-a-width",
        "fortyninth-pod-whose-receives-complete-in-error",
        # The rank is said on a line that does not say what was exhausted.
        "fortyninth-bottom-of-memory-of-a-seventh-core",
    }
)
"""Wrong at first sight, and still, as the text does not say more than is told of it."""
STEPS = "".join(f"[rank1]: step {step} loss 1.{step}\n" for step in range(4))


@pytest.mark.parametrize("excerpt", tuple(excerpts()), ids=lambda one: one.name)
def test_the_answer_to_an_excerpt_is_right(excerpt: Excerpt, tmp_path: Path) -> None:
    assert bool(faults_of(excerpt, tmp_path)) is (excerpt.name in MISSED)


@pytest.mark.parametrize("row", dict.fromkeys((*rows(), *rows_of_nccl())), ids=lambda row: f"{row.program}-{row.event}")
@pytest.mark.parametrize("before", ["", "[rank3]: ", "3: "])
def test_a_row_of_the_catalogue_is_found_in_any_surroundings(row: Row, before: str, tmp_path: Path) -> None:
    _, warns, warning = row.example.partition(" NCCL WARN ")
    statement = statement_of_nccl(warning) if warns else statement_in(row.example)
    assert statement is not None and statement.row == row
    example = row.example.removeprefix(f"[rank{row.example[5:6]}]:") if row.example.startswith("[rank") else row.example
    plain = "".join(f"{before}step {step}\n" for step in range(3))
    (tmp_path / "job.log").write_text(f"{plain}{before}{example}\n")
    incidents = read_postmortem((str(tmp_path / "job.log"),)).record.logs.incidents
    if row.role == "noise":
        assert not incidents
        return
    # Without its traceback an exception like any other counts where nothing else is known.
    unknown = (row.event, row.trouble, row.type) == ("raised", "exception", "")
    assert [(one.kind, one.trouble) for one in incidents][:1] == [("said" if unknown else row.event, row.trouble)]
    assert incidents[0].implies == row.implies and incidents[0].passed_on is ((row.event, row.role) == ("nccl", "echo"))
    assert not before or incidents[0].rank in (3, *range(10))


def test_every_row_is_found_in_the_middle_of_a_log() -> None:
    """Only the end of a log is read line by line."""
    known = [row for row in (*rows(), *rows_of_nccl()) if row.role != "noise"]
    assert [row.example for row in known if not any(needle.decode() in row.example for needle in NEEDLES)] == []


def test_every_statement_of_torch_and_every_warning_of_nccl_has_a_row() -> None:
    assert unclassified() == []


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (
            "RuntimeError: ProcessGroupNCCL: Health check failure: Failed to initialize NCCL communicator on rank 2",
            "timed-out",
        ),
        ("[Rank 3] Caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)", "timed-out"),
        ("Aborting process on rank 3 due to timeout - timeout watchdog detected operation timeout", "timed-out"),
        ("Aborting process on rank 3 due to error - nccl hit async error: unhandled cuda error", "nccl"),
        ("RuntimeError: Failed to initialize NCCL communicator: invalid usage", "nccl"),
        ("CUDA error during end event query: an illegal memory access was encountered", "cuda"),
        ("RuntimeError: Libuv implementation missing", "no-rendezvous"),
        ("torch.distributed.DistNetworkError: failed to send, sent 0 bytes", "lost-peer"),
        ("ValueError: window size (7) must be smaller than the image", None),
    ],
)
def test_a_cause_of_an_older_or_newer_torch_is_its_event(text: str, event: str | None) -> None:
    found = statement_in(text)
    assert (found and found.row.event) == event


@pytest.mark.parametrize("where", ["any", "anywhere", "nccl"])
def test_no_row_that_fits_is_left_out_for_its_words(where: Literal["any", "anywhere", "nccl"]) -> None:
    chosen = index_of(where)
    texts = [row.example for row in (*rows(), *rows_of_nccl())]
    texts += [filled(text) for name in ("torch.txt", "python.txt", "nccl.txt") for text in printed(name)[0]]
    for text in texts:
        fits = [place for place, (_, pattern) in enumerate(chosen.rows) if pattern.search(text)]
        assert set(fits) <= set(chosen.likely(text)), text


def test_a_row_of_noise_hides_no_exception(tmp_path: Path) -> None:
    text = "RuntimeError: my check failed: Environment variable NCCL_X is deprecated; use NCCL_Y instead"
    assert statement_in(text) is not None
    cause = autopsy_of(tmp_path, STEPS + RAISED.format(mark="[rank1]: ").replace("KeyError: 'cat'", text)).findings[0]
    assert (cause.role, cause.code, cause.ranks) == ("cause", "DDP706", (1,))


def autopsy_of(tmp_path: Path, text: str) -> Examination:
    (tmp_path / "job.log").write_text(text)
    return autopsy(AutopsyRequest(paths=(str(tmp_path / "job.log"),)))


def test_an_exception_after_which_its_rank_trains_on_ended_nothing(tmp_path: Path) -> None:
    raised = RAISED.format(mark="[rank1]: ")
    examination = autopsy_of(tmp_path, STEPS + raised + STEPS)
    assert [(one.severity, one.role) for one in examination.findings] == [("advice", "echo")]
    assert examination.autopsy is not None and examination.autopsy.confidence == "none"
    assert autopsy_of(tmp_path, STEPS + raised).findings[0].role == "cause"


def test_one_that_was_caught_is_no_cause_of_a_later_death(tmp_path: Path) -> None:
    text = STEPS + RAISED.format(mark="[rank1]: ") + STEPS + LOST.format(mark="[rank1]: ").replace("closed", "reset")
    assert autopsy_of(tmp_path, text).findings[0].code == "DDP306"


def test_a_launcher_can_read_what_to_do(tmp_path: Path) -> None:
    section = autopsy_of(tmp_path, RAISED.format(mark="[rank1]: ") + LOST.format(mark="[rank0]: ")).autopsy
    assert section is not None and section.first_cause is not None
    assert (section.first_cause.code, section.culprit.ranks) == ("DDP706", (1,))
    assert (section.confidence, section.advice, len(section.echoes)) == ("certain", "fix-the-script", 1)
    xid = "Mar  2 13:00:01 node7 kernel: NVRM: Xid (PCI:0000:4a:00): 79, pid=34, GPU has fallen off the bus.\n"
    section = autopsy_of(tmp_path, xid).autopsy
    assert section is not None and (section.advice, section.culprit.hosts) == ("replace-the-node", ("node7",))


def test_of_files_that_differ_in_a_number_from_0_the_silent_one_is_a_rank(tmp_path: Path) -> None:
    line = (
        "[E ProcessGroupNCCL.cpp:754] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600200 milliseconds before timing out.\n"
    )
    for rank in range(4):
        (tmp_path / f"slurm-123_{rank}.out").write_text("step 8\n" if rank == 3 else line.format(rank))
    first = autopsy(AutopsyRequest(paths=(str(tmp_path),))).findings[0]
    assert (first.code, first.ranks) == ("DDP308", (3,))
