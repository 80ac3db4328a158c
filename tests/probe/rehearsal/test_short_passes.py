"""How a rehearsal shortens a script, and what it still knows of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.checks.data import missing_set_epoch
from ddpdoctor.record.model import RunRecord

from .conftest import Rehearse

LOOP = """
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 4), torch.arange(400) % 3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=WORKERS)
evaluation = DataLoader(data, batch_size=10)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for index, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if (index + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for x, y in evaluation:
            model.module(x)
print("done", len(loader))
dist.destroy_process_group()
"""


def _of_rank(record: RunRecord, rank: int) -> list[tuple[int, int, int, str]]:
    passes = [entry for entry in record.passes if entry.rank == rank]
    return [(entry.loader, entry.ordinal, entry.yielded, entry.end) for entry in passes]


def test_passes_are_cut_but_known_in_whole_and_the_script_runs_to_its_end(rehearse_script: Rehearse) -> None:
    record = rehearse_script(LOOP.replace("ACCUMULATE", "1").replace("WORKERS", "2"))
    assert record.job.ranks_reported == (0, 1)
    assert [rank.end for rank in record.ranks] == ["finished", "finished"]
    for rank in (0, 1):
        assert _of_rank(record, rank) == [
            (0, 0, 4, "cut"),
            (1, 0, 4, "cut"),
            (0, 1, 4, "cut"),
            (1, 1, 1, "cut"),
            (0, 2, 1, "cut"),
            (1, 2, 1, "cut"),
        ]
    assert record.steps() == 9
    assert record.stream("lines").state == "complete"
    source = Path(record.job.script).read_text().splitlines()
    for row in record.lines:
        run = {source[number - 1].strip() for number in row.lines}
        assert {"optimizer.step()", "model.module(x)", 'print("done", len(loader))'} <= run
    first = [entry for entry in record.passes if (entry.loader, entry.ordinal) == (0, 0)]
    assert [(entry.true_length, entry.index_count) for entry in first] == [(100, 200), (100, 200)]
    assert sorted(first[0].indices + first[1].indices) == list(range(400))
    probes = [loader.samples for loader in record.loaders if loader.loader == 0]
    assert probes[0] and {probe.index for probe in probes[0]} == {0, 1, 200, 399}
    assert sorted(probes[0], key=lambda p: p.index) == sorted(probes[1], key=lambda p: p.index)


def test_a_pass_goes_on_until_two_optimizer_steps_were_made(rehearse_on_forks: Rehearse) -> None:
    record = rehearse_on_forks(LOOP.replace("ACCUMULATE", "7").replace("WORKERS", "0"))
    assert (0, 0, 14, "cut") in _of_rank(record, 0)


def test_a_loop_without_a_loader_ends_after_eight_steps(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            while True:
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
        finally:
            print("cleaned up")
        """
    )
    assert [rank.end for rank in record.ranks] == ["ended-by-rehearsal"] * 2
    assert record.steps() == 8
    assert "cleaned up" in record.ranks[0].output_tail


COUNTED = """
dist.init_process_group("gloo")
loader = DataLoader(TensorDataset(torch.randn(SAMPLES, 4)), batch_size=2)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    batches = iter(loader)
    for _ in range(10):
        DRAW
        optimizer.zero_grad()
        model(batch[0]).sum().backward()
        optimizer.step()
"""


def test_a_script_that_counts_its_batches_gets_a_small_pass_whole(rehearse_script: Rehearse) -> None:
    record = rehearse_script(COUNTED.replace("SAMPLES", "22").replace("DRAW", "batch = next(batches)"))
    assert [rank.end for rank in record.ranks] == ["finished"] * 2
    assert {entry.yielded for entry in record.passes if entry.end == "abandoned"} == {10}
    assert record.steps() == 20


def test_a_script_that_counts_the_batches_of_a_long_pass_was_rehearsed_at_the_cut(rehearse_script: Rehearse) -> None:
    record = rehearse_script(COUNTED.replace("SAMPLES", "400").replace("DRAW", "batch = next(batches)"))
    assert [rank.end for rank in record.ranks] == ["ended-by-rehearsal"] * 2
    assert record.job.stop_reason == ""
    assert [(entry.yielded, entry.end) for entry in record.passes] == [(4, "counted")] * 2
    assert record.steps() == 4


def test_a_next_that_meets_our_cut_under_a_handler_is_no_fault_of_the_script(rehearse_script: Rehearse) -> None:
    handler = "except StopIteration as end:\n            if batches: raise ValueError('short') from end"
    draw = f"try: batch = next(batches)\n        {handler}"
    record = rehearse_script(COUNTED.replace("SAMPLES", "400").replace("DRAW", draw))
    assert [rank.end for rank in record.ranks] == ["ended-by-rehearsal"] * 2
    assert not any(rank.exceptions for rank in record.ranks)
    assert record.job.stop_reason == "cut"
    assert record.job.stop_text.startswith("train.py:")


def test_a_swallowed_ending_is_raised_again(rehearse_script: Rehearse) -> None:
    record = rehearse_script(
        """
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            try:
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            except BaseException:
                pass
        """
    )
    assert [rank.end for rank in record.ranks] == ["ended-by-rehearsal"] * 2


EPOCHS_BY_STEPS = (
    LOOP.replace("ACCUMULATE", "1")
    .replace("WORKERS", "0")
    .replace("for epoch in range(3):\n    sampler.set_epoch(epoch)", "step = 0\nfor turn in range(3):\n    EPOCH")
    .replace("        loss.backward()", "        loss.backward()\n        step += 1")
)


@pytest.mark.parametrize(
    ("call", "forgotten"),
    [
        ("sampler.set_epoch(step // len(loader))", False),
        ("loader.sampler.set_epoch(epoch=step * 2 // 400)", False),
        ("pass", True),
    ],
)
def test_an_epoch_that_is_counted_in_batches_is_no_forgotten_one(
    call: str, forgotten: bool, rehearse_on_forks: Rehearse
) -> None:
    record = rehearse_on_forks(EPOCHS_BY_STEPS.replace("EPOCH", call))
    assert {entry.set_epoch for entry in record.passes if entry.backwards} == {0}
    assert bool(list(missing_set_epoch.in_run(record))) is forgotten
