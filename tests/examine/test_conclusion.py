from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.examine.rehearsal_result import could_not_rehearse, judge
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import Rank, RankException, StreamState
from ddpdoctor.record.streams.training import Loader, OptimizerStep
from tests.diagnosis.jobs import JobBuilder
from tests.report.examples import SAMPLE, TRAIN, record

ROOT = str(SAMPLE)


def test_a_rehearsal_whose_ranks_wrapped_stepped_and_ended_is_completed() -> None:
    section = judge(record(), ROOT)
    assert (section.status, section.reason) == ("completed", "")
    assert (section.ranks, section.steps, section.seconds, section.device) == (2, 2, 2.5, "cpu")


@pytest.mark.parametrize(("line", "status"), [(60, "completed"), (None, "failed")])
def test_ranks_that_wrapped_nothing_have_to_average_by_hand(line: int | None, status: str) -> None:
    job = JobBuilder(2)
    steps = []
    for ordinal in range(2):
        steps += [
            OptimizerStep(rank=rank, optimizer=0, ordinal=ordinal, elements=100, time_ns=job.tick()) for rank in (0, 1)
        ]
        if line is not None:
            job.call(job.ranks, "all_reduce", line, 100, reduce_op="sum")
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    section = judge(job.record(optimizer_steps=tuple(steps)), ROOT)
    assert section.status == status
    assert section.notes == (
        ("no model was wrapped in DistributedDataParallel: the script averages with its own collectives",)
        if line is not None
        else ()
    )


def test_ranks_that_only_send_each_other_tensors_are_stages() -> None:
    job, steps = JobBuilder(2), []
    for ordinal in range(2):
        job.call([0], "send", 60, 100)
        job.call([1], "recv", 61, 100)
        steps += [
            OptimizerStep(rank=rank, optimizer=0, ordinal=ordinal, elements=100, time_ns=job.tick()) for rank in (0, 1)
        ]
    for rank in job.ranks:
        job.leave(rank, "finished", main_finished=True)
    (note,) = judge(job.record(optimizer_steps=tuple(steps)), ROOT).notes
    assert note.endswith("its ranks send each other what they compute, as the stages of a pipeline do")


def test_ranks_that_the_rehearsal_ended_are_completed() -> None:
    ranks = [Rank(rank=number, end="ended-by-rehearsal", exit_code=0) for number in (0, 1)]
    run = record(*ranks)
    assert (judge(run, ROOT).status, judge(run, ROOT).notes) == ("completed", ())
    lost = {**run.streams, "lines": StreamState("truncated", "another tool traces the script")}
    (note,) = judge(msgspec.structs.replace(run, streams=lost), ROOT).notes
    assert note.endswith("the lines that it did not reach are unknown: another tool traces the script")


def test_a_rank_that_still_works_when_its_peer_was_ended_by_us_goes_with_it() -> None:
    ended, works = Rank(rank=0, end="ended-by-rehearsal", exit_code=0), Rank(rank=1, end="running")
    assert judge(record(ended, works), ROOT).status == "completed"
    left = Rank(rank=0, end="finished", main_finished=True)
    assert judge(record(left, works), ROOT).reason == "how rank 1 ended is unknown"


def test_an_abort_after_the_script_had_finished_is_no_failure() -> None:
    ranks = [Rank(rank=number, end="signalled", signal=6, main_finished=True) for number in (0, 1)]
    assert judge(record(*ranks), ROOT).status == "completed"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ranks_reported": (0,)}, "1 of 2 ranks reported"),
        ({"ranks_reported": ()}, "0 of 2 ranks reported"),
        ({"ranks_reported": (), "expected": 0}, "the script started no rank"),
        ({"wraps": False, "world_size": 0}, "without creating a process group"),
        ({"world_size": 1, "expected": 1}, "the process group has 1 rank"),
        ({"wraps": False}, "without wrapping a model in DistributedDataParallel"),
        ({"steps": 0}, "before every rank made an optimizer step"),
        ({"stop_reason": "no-ranks", "stop_text": "no rank reported within 30 s"}, "no rank reported within 30 s"),
        ({"stop_reason": "launch-failed"}, "the ranks could not be started"),
        ({"stop_reason": "rank-failed"}, "a rank failed"),
    ],
)
def test_a_rehearsal_that_shows_too_little_has_failed_and_says_why(fields: dict[str, Any], reason: str) -> None:
    section = judge(record(**fields), ROOT)
    assert section.status == "failed"
    assert reason in section.reason
    assert section.hint


@pytest.mark.parametrize(
    ("stop_reason", "hint"),
    [
        ("proof", ""),
        ("time-limit", "--time-limit"),
        ("no-touch", "--allow-writes"),
        ("interrupted", ""),
        ("cut", "--full"),
        ("slow", "--batch-size 2"),
        ("memory", "smaller configuration"),
    ],
)
def test_a_rehearsal_that_was_stopped_says_what_helps(stop_reason: str, hint: str) -> None:
    stopped = record(stop_reason=stop_reason, stop_text="stopped because")
    section = judge(msgspec.structs.replace(stopped, loaders=(Loader(rank=0, loader=0),)), ROOT)
    assert (section.status, section.reason) == ("stopped", "stopped because")
    assert hint in section.hint
    assert bool(hint) == bool(section.hint)
    # Where no loader gives batches, there is none to cut.
    assert ("without a DataLoader" in judge(stopped, ROOT).hint) == (stop_reason in ("time-limit", "slow"))


def test_the_exception_of_the_guilty_rank_comes_before_the_echo_of_its_peers() -> None:
    echo = _raised("RuntimeError", "Connection closed by peer", 20, time_ns=5, communication=True)
    own = _raised("ValueError", "bad batch", 9, time_ns=7)
    section = judge(
        record(
            Rank(rank=0, end="raised", exceptions=(echo,), output_tail="echo"),
            Rank(rank=1, end="raised", exceptions=(own,), output_tail="one\ntwo"),
        ),
        ROOT,
    )
    assert section.status == "failed"
    assert section.reason == "rank 1 raised ValueError at train.py:9: bad batch"
    assert section.output == "one\ntwo"


def test_an_exception_of_all_ranks_is_said_once() -> None:
    ranks = [
        Rank(rank=number, end="raised", exceptions=(_raised("FileNotFoundError", "no data\nmore", 15, time_ns=number),))
        for number in (0, 1)
    ]
    section = judge(record(*ranks), ROOT)
    assert section.reason == "ranks 0 and 1 raised FileNotFoundError at train.py:15: no data"
    assert "lacks the data" in section.hint


def test_a_failure_names_the_checks_that_tell_it() -> None:
    def told_by(*raising: RankException) -> frozenset[str]:
        ranks = [Rank(rank=number, end="raised", exceptions=(raised,)) for number, raised in enumerate(raising)]
        return judge(record(*ranks), ROOT).told_by

    unfinished = _raised("RuntimeError", "Expected to have finished reduction in the prior iteration", 15, 1)
    missing, other = _raised("FileNotFoundError", "no data", 15, 1), _raised("ValueError", "bad", 9, 2)
    assert told_by(unfinished, unfinished) == {"unused-parameters"}
    assert "exception" not in told_by(missing, missing)
    assert "exception" in told_by(missing, other)
    assert judge(record(wraps=False), ROOT).told_by == {"no-wrap"}
    assert "hang" in judge(record(stop_reason="proof"), ROOT).told_by


@pytest.mark.parametrize(
    ("loaders", "said"),
    [
        ((), None),
        ((Loader(rank=0, loader=0),), 4),
        ((Loader(rank=0, loader=0, batch_size=2), Loader(rank=0, loader=1, batch_size=4)), None),
        ((Loader(rank=0, loader=0, batch_size=2), Loader(rank=0, loader=1, batch_size=5)), 4),
    ],
)
def test_batches_are_said_to_be_cut_only_where_some_are(loaders: tuple[Loader, ...], said: int | None) -> None:
    assert judge(msgspec.structs.replace(record(batch_size="4"), loaders=loaders), ROOT).batch_size == said


def test_an_exit_code_for_missing_arguments_is_shown_with_the_last_words() -> None:
    usage = "\n".join(f"line {number}" for number in range(40))
    ranks = [Rank(rank=number, end="left-by-exit", exit_code=2, output_tail=usage) for number in (0, 1)]
    section = judge(record(*ranks, steps=0, wraps=False), ROOT)
    assert section.reason == "ranks 0 and 1 left with exit code 2: line 39"
    assert section.output.splitlines()[0] == "line 28"
    assert "the script's own arguments" in section.hint


def test_a_signal_is_named() -> None:
    ranks = [Rank(rank=0, end="signalled", signal=11, ended_ns=1), Rank(rank=1, end="raised", ended_ns=2)]
    assert judge(record(*ranks), ROOT).reason == "rank 0 was killed by SIGSEGV"


def test_a_rank_whose_end_is_not_known_is_not_taken_for_finished() -> None:
    ranks = [Rank(rank=0, end="finished"), Rank(rank=1)]
    assert judge(record(*ranks), ROOT).reason == "how rank 1 ended is unknown"


def test_ranks_that_never_reported_come_before_the_signal_of_the_launcher() -> None:
    ranks = [Rank(rank=0, end="signalled"), Rank(rank=1, end="signalled", signal=15)]
    section = judge(record(*ranks, ranks_reported=()), ROOT)
    assert section.reason == "0 of 2 ranks reported; rank 1 was killed by SIGTERM"


def test_a_rank_that_vanished_without_a_signal_is_not_taken_for_finished() -> None:
    ranks = [Rank(rank=0, end="finished"), Rank(rank=1, end="signalled")]
    assert judge(record(*ranks), ROOT).reason == "how rank 1 ended is unknown"


def test_an_error_before_the_start_keeps_its_sentence_and_hint() -> None:
    section = could_not_rehearse(DdpDoctorError("no interpreter has torch", "Install torch."))
    assert (section.status, section.reason, section.hint) == ("failed", "no interpreter has torch", "Install torch.")


def test_what_was_raised_before_there_was_a_rank_is_the_reason_and_a_taken_port_has_its_own_hint() -> None:
    taken = _raised("DistNetworkError", "cannot listen, name: EADDRINUSE", 15, time_ns=1)
    section = judge(record(expected=0, ranks_reported=(), early_exceptions=(taken,)), ROOT)
    expected = "DistNetworkError was raised before a rank started at train.py:15: cannot listen, name: EADDRINUSE"
    assert section.reason == expected
    assert "listens on the script's port" in section.hint
    assert judge(record(expected=0, ranks_reported=()), ROOT).reason == "the script started no rank"


@pytest.mark.parametrize(
    ("type_name", "message", "traceback", "hint"),
    [
        (
            "ImportError",
            "Please install apex",
            "No module named 'apex'",
            "Build and install apex for the Python of the ranks",
        ),
        ("ImportError", "cannot import name 'x'", "", "The script fails so however"),
        (
            "URLError",
            "<urlopen error [Errno -2] Name or service not known>",
            "",
            "The script fetches this from the network",
        ),
        ("KeyError", "'WANDB_API_KEY'", 'os.environ["WANDB_API_KEY"]', "Set WANDB_API_KEY for this command"),
        ("KeyError", "'WEIGHT'", 'state["WEIGHT"]', "Pass the script's own arguments"),
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: 'nvidia-smi'",
            "line 1026, in _execute_child",
            "The script starts nvidia-smi, which this machine lacks",
        ),
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: 'imagenet'",
            "",
            "This machine lacks the data: put them",
        ),
        ("ModuleNotFoundError", "No module named 'timm'", "", "`pip install timm` for the Python of the ranks"),
        ("EOFError", "EOF when reading a line", "", "Ranks cannot read from a terminal"),
        ("EOFError", "Ran out of input", "", "Pass the script's own arguments"),
        (
            "AcceleratorError",
            "CUDA error: invalid device ordinal\n(device 5 was asked for; the node of this rehearsal has 2)",
            "",
            "A node of this rehearsal has 2 GPUs",
        ),
    ],
)
def test_the_hint_fits_the_exception(type_name: str, message: str, traceback: str, hint: str) -> None:
    raised = msgspec.structs.replace(_raised(type_name, message, 3, time_ns=1), traceback=traceback)
    ranks = (Rank(rank=0, end="raised", exceptions=(raised,)), Rank(rank=1))
    assert judge(record(*ranks), ROOT).hint.startswith(hint)


def test_a_script_that_the_rehearsal_ended_is_not_said_to_have_ended() -> None:
    ranks = [Rank(rank=number, end="ended-by-rehearsal", exit_code=0) for number in (0, 1)]
    section = judge(record(*ranks, wraps=False), ROOT)
    assert (section.status, section.reason[:31]) == ("failed", "until the rehearsal ended it, t")
    assert "arguments" not in section.hint


def _raised(type_name: str, message: str, line: int, time_ns: int, communication: bool = False) -> RankException:
    frames = (Frame(file=TRAIN, line=line, function="main"),)
    return RankException(time_ns=time_ns, type=type_name, message=message, frames=frames, communication=communication)


@pytest.mark.parametrize(("number", "words"), [(9, "whether memory ran out"), (11, "PYTHONFAULTHANDLER=1")])
def test_a_rank_that_a_signal_killed_is_not_short_of_arguments(number: int, words: str) -> None:
    job = JobBuilder(2)
    job.leave(0, "signalled", signal=number)
    job.leave(1, "finished", main_finished=True)
    section = judge(job.record(), ROOT)
    assert section.status == "failed"
    assert section.reason.startswith("rank 0 was killed by SIG")
    assert words in section.hint
