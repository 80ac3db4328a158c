"""What differs after a restart, from steps and checkpoints that are built by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.diagnosis.resume import Comparison, compare, torn_restart
from ddpdoctor.record.model import RankException, Restart, RunRecord
from ddpdoctor.record.streams.setup import CheckpointLoad
from ddpdoctor.record.streams.training import Access, ResumeSave, ResumeStep
from tests.diagnosis.jobs import JobBuilder

STEP = 8
"""Of the checkpoint: four passes of four batches in the first start."""
KEYS = {"model": "tensors a", "ema": "tensors b", "epoch": "int 1", "loss": "float c"}


def step(rank: int, ordinal: int, of_first: int, **fields: Any) -> ResumeStep:
    """The ``ordinal``-th step of a start, as the ``of_first``-th of the first one should be."""
    number, place = divmod(of_first - 1, 4)
    values: dict[str, Any] = {
        "batches": ((0, number, place, (of_first * 10 + rank,)),),
        "weights": {"0:a": f"{of_first}", "0:b": f"{of_first}"},
        "optimizer": (f"{of_first}",),
        "learning_rates": (str(0.1**number),),
    }
    return ResumeStep(rank=rank, ordinal=ordinal, **{**values, **fields})


def save(rank: int, at: int, keys: Mapping[str, str] = KEYS, *, optimizer: bool = True) -> ResumeSave:
    return ResumeSave(rank=rank, path="/job/last.pt", step=at, whole=True, optimizer=optimizer, keys=keys)


def first(**streams: Any) -> RunRecord:
    steps = [step(rank, number, number) for rank in (0, 1) for number in range(1, 17)]
    later = {**KEYS, "epoch": "int 2", "model": "tensors d", "ema": "tensors e"}
    values = {"resume_steps": tuple(steps), "resume_saves": (save(0, 4), save(0, STEP), save(0, 12, later))}
    return JobBuilder(2).record(**{**values, **streams})


def second(changes: Mapping[str, Any], ranks: Sequence[int] = (0, 1), **streams: Any) -> RunRecord:
    steps = [
        step(rank, number, STEP + number, **(changes if rank in ranks and number == 1 else {}))
        for rank in (0, 1)
        for number in range(1, 9)
    ]
    keys = {**KEYS, "epoch": "int 2", "model": "tensors d", "ema": "tensors e"}
    values: dict[str, Any] = {
        "resume_steps": tuple(steps),
        "resume_saves": (save(0, 4, keys),),
        "checkpoint_loads": (CheckpointLoad(rank=0, path="/job/last.pt"),),
    }
    return JobBuilder(2).record(**{**values, **streams})


def compared(later: RunRecord, earlier: RunRecord | None = None) -> Comparison:
    return compare(Restart(first=earlier or first(), second=later, step=STEP, files=("/job/last.pt",)))


def whats(later: RunRecord) -> list[str]:
    return [one.what for one in compared(later).differences]


def test_a_start_that_goes_on_is_in_order() -> None:
    result = compared(second({}))
    assert (result.differences, result.gap) == ((), "")
    assert result.save is not None and result.save.step == STEP


def test_each_state_is_told_with_its_ranks() -> None:
    found = compared(second({"optimizer": ("new",)}, ranks=(1,))).differences
    assert [(one.what, one.ranks, one.saved) for one in found] == [("optimizer", (1,), True)]
    assert whats(second({"weights": {"0:a": "9", "0:b": "0"}})) == ["weights"]
    assert whats(second({"learning_rates": ("1.0",)})) == ["learning-rate"]


def test_what_is_not_in_the_checkpoint_is_said_not_to_be_saved() -> None:
    without = first(resume_saves=(save(0, STEP, optimizer=False),))
    (found,) = compared(second({"optimizer": ("new",)}), without).differences
    assert not found.saved


def test_the_pass_before_again_and_the_first_pass_again_are_told_apart() -> None:
    for number, words in ((1, "run again"), (0, "order of epoch 0")):
        steps = [
            step(rank, at, STEP + at, batches=((0, 0, at - 1, ((4 * number + at) * 10 + rank,)),))
            for rank in (0, 1)
            for at in range(1, 5)
        ]
        (found,) = compared(second({}, resume_steps=tuple(steps))).differences
        assert found.what == "data" and words in found.title


def test_samples_that_are_not_known_prove_nothing() -> None:
    steps = [step(rank, at, STEP + at, batches=((0, 0, at - 1, ()),)) for rank in (0, 1) for at in range(1, 5)]
    unknown = first(
        resume_steps=tuple(
            msgspec.structs.replace(one, batches=tuple((*batch[:3], ()) for batch in one.batches))
            for one in first().resume_steps
        )
    )
    assert compared(second({}, resume_steps=tuple(steps)), unknown).differences == ()


def test_the_next_checkpoint_shows_counters_and_averages_that_were_lost() -> None:
    right = {**KEYS, "epoch": "int 2", "model": "tensors d", "ema": "tensors e"}
    for changed, what in (({"epoch": "int 0"}, "counter"), ({"ema": "tensors z"}, "kept")):
        assert whats(second({}, resume_saves=(save(0, 4, {**right, **changed}),))) == [what]
    other_training = {**right, "model": "tensors y", "ema": "tensors z"}
    assert whats(second({}, resume_saves=(save(0, 4, other_training),))) == []
    assert whats(second({}, resume_saves=(save(0, 3, {**right, "epoch": "int 0"}),))) == []


def test_a_start_that_loads_nothing_cannot_be_judged() -> None:
    result = compared(second({"optimizer": ("new",)}, checkpoint_loads=()))
    assert result.differences == () and "loaded nothing" in result.gap


def test_a_program_that_trains_before_it_loads_is_not_taken_for_a_restart() -> None:
    steps = [msgspec.structs.replace(row, time_ns=10 + row.ordinal) for row in second({}).resume_steps]
    other = [msgspec.structs.replace(row, optimizer=("new",)) for row in steps]

    def loading(time_ns: int) -> RunRecord:
        load = CheckpointLoad(rank=0, path="/job/last.pt", time_ns=time_ns)
        return second({}, resume_steps=tuple(other), checkpoint_loads=(load,))

    late = compared(loading(13))
    assert late.differences == () and "trained before it loaded" in late.gap
    assert compared(loading(5)).differences != ()


def failing(rank: int, raised: RankException, **load: Any) -> RunRecord:
    job = JobBuilder(2)
    job.leave(rank, "raised", exceptions=(raised,), exit_code=1)
    loads = (CheckpointLoad(rank=0, path="/job/last.pt"), CheckpointLoad(rank=rank, failed=True, **load))
    return job.record(checkpoint_loads=loads)


def test_a_restart_that_fails_is_told_with_its_rank_and_its_reason() -> None:
    missing = RankException(time_ns=5, type="RuntimeError", message="Error in loading for Net:\n\tMissing key: a.\n")
    (found,) = compared(failing(1, missing, path="/job/last.pt")).differences
    assert (found.what, found.ranks) == ("fails", (1,)) and "Missing key: a." in found.title
    refused = RankException(
        time_ns=5, type="UnpicklingError", message="Weights only\n Unsupported global: GLOBAL argparse.Namespace was"
    )
    (found,) = compared(failing(0, refused, path="/job/last.pt")).differences
    assert found.what == "refused" and "argparse.Namespace" in found.title


def test_a_file_that_is_missing_accuses_the_restart_only_beside_the_checkpoint() -> None:
    gone = RankException(time_ns=5, type="FileNotFoundError", message="[Errno 2] No such file: '/data/x'")
    assert [one.what for one in compared(failing(1, gone, path="/job/last1.pt")).differences] == ["fails"]
    assert compared(failing(1, gone, path="/data/x")).differences == ()


def torn(later: RunRecord, whole: Sequence[str] = ("/job/1.pt",)) -> str:
    restart = Restart(
        first=first(),
        second=second({}),
        torn=later,
        torn_files=("/job/last.pt",),
        whole_files=tuple(whole),
        step=STEP,
        files=("/job/last.pt",),
    )
    found = torn_restart(restart)
    return "" if found is None else found.title


def test_what_a_restart_does_with_a_torn_file() -> None:
    tried = (CheckpointLoad(rank=0, path="/job/last.pt", failed=True),)
    fallen_back, later = (step(0, 1, STEP + 1),), (step(0, 1, 13),)
    begun = (step(0, 1, 1),)
    mixed = (step(0, 1, 13, optimizer=(str(STEP + 1),)),)
    assert torn(second({}, resume_steps=fallen_back, checkpoint_loads=tried)) == ""
    assert torn(second({}, resume_steps=later, checkpoint_loads=tried)) == ""
    assert "begins again" in torn(second({}, resume_steps=begun, checkpoint_loads=tried))
    read = (*tried, CheckpointLoad(rank=0, path="/job/weights.pt"))
    assert "after step 12, and the optimizer's state is that after step 8" in torn(
        second({}, resume_steps=mixed, checkpoint_loads=read)
    )
    removed = (Access(rank=0, action="remove", path="/job/1.pt", found=True),)
    assert "deletes" in torn(second({}, resume_steps=fallen_back, checkpoint_loads=tried, accesses=removed))


def test_other_ranks_change_the_samples_of_a_step() -> None:
    steps = tuple(step(rank, at, STEP + at) for rank in range(4) for at in range(1, 5))
    four = JobBuilder(4).record(resume_steps=steps, checkpoint_loads=(CheckpointLoad(rank=0, path="/job/last.pt"),))
    (found,) = compared(four).differences
    assert found.what == "ranks" and "4 samples in the place of 2" in found.title
