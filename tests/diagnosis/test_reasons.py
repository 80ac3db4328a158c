"""What a run shows of why its ranks part: an exception that one handles, a loop with more turns, where one stands."""

from __future__ import annotations

from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.finding import Frame
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import Handled
from ddpdoctor.record.streams.setup import StackDump
from tests.diagnosis.jobs import SCRIPT, healthy_job
from tests.diagnosis.test_divergence import diagnose


def _waiting_in_a_handler(*ranks: int) -> RunRecord:
    """Rank 1 (or several) waits in a barrier at line 70, in a handler of what line 12 raised; others train on."""
    job = healthy_job(3)
    for rank in job.ranks:
        if rank in ranks:
            job.call(rank, "barrier", 70)
        else:
            job.reduce_gradients(rank)
        job.wait_in_last(rank)
    handled = tuple(
        Handled(rank=rank, site=job.site(70), type="KeyError", message="'boxes'", file=SCRIPT, line=12, function="load")
        for rank in ranks
    )
    return job.record(handled=handled)


def test_the_exception_that_a_rank_handles_while_it_waits_is_the_cause() -> None:
    divergence, trouble = diagnose(_waiting_in_a_handler(1))
    assert (trouble, divergence.culprit) == ("caught-exception", 1)
    assert describe.title(divergence) == (
        "rank 1 raised KeyError: 'boxes' at train.py:12, and waits in barrier at train.py:70 in its handler, "
        "while ranks 0 and 2 wait in all_reduce (DDP backward) at train.py:50"
    )
    assert [place.line for place in describe.locations(divergence)][:2] == [12, 70]


def test_the_exception_that_ended_another_rank_is_the_cause_and_not_the_one_that_a_handler_knows() -> None:
    job = healthy_job()
    job.fail(0, "ImportError", 23)
    job.call(1, "all_reduce", 70)
    job.wait_in_last(1)
    looked_up = Handled(rank=1, site=job.site(70), type="AttributeError", message="no _data", file=SCRIPT, line=12)
    divergence, trouble = diagnose(job.record(handled=(looked_up,)))
    assert (trouble, divergence.culprit) == ("exception", 0)


def test_where_several_ranks_handle_an_exception_none_is_blamed_for_it() -> None:
    divergence, trouble = diagnose(_waiting_in_a_handler(0, 1))
    assert trouble != "caught-exception"
    assert divergence.culprit != 0


def test_ranks_that_all_meet_in_their_handlers_do_not_diverge() -> None:
    assert find_divergence(_waiting_in_a_handler(0, 1, 2)) is None


def test_of_a_loop_that_makes_another_number_of_turns_the_turns_are_told() -> None:
    job = healthy_job()
    for _ in range(4):
        job.call(job.ranks, "barrier", 80)
    job.call(0, "barrier", 80)
    job.call(1, "all_reduce", 90)
    job.wait_in_last(0, 1)
    divergence, _ = diagnose(job.record())
    assert "train.py:80 was run 5 times on rank 0, 4 times on rank 1" in [
        fact.text for fact in describe.facts(divergence, "rehearsal")
    ]


def test_of_what_a_stack_shows_of_python_itself_the_function_that_was_called_is_enough() -> None:
    job = healthy_job()
    job.call(0, "barrier", 80)
    job.wait_in_last(0)
    job.now_ns += 5_000_000_000
    own = Frame(SCRIPT, 80, "train")
    python = [Frame(f"/usr/lib/python3.12/{file}.py", 1, file) for file in ("selectors", "connection", "queues")]
    job.of_rank[1]["stuck"] = True
    dumps = (
        StackDump(rank=0, thread="Main", main=True, frames=(own,)),
        StackDump(rank=1, thread="Main", main=True, frames=(*python, own)),
    )
    divergence, _ = diagnose(job.record(stacks=dumps))
    stacks = [fact.stack for fact in describe.facts(divergence, "rehearsal") if fact.rank == 1 and fact.stack]
    assert stacks == [(python[-1], own)]
