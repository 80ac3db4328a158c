"""Models that ``to_empty`` gave memory to: what nothing initialised is named, and what anything did is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.checks.gradients import uninitialised_parameters
from ddpdoctor.record.streams.training import Uninitialised
from tests.checks.replicas import Replicas
from tests.forks import check
from tests.sharded.emptied import Job
from tests.sharded.emptied_right import RIGHT
from tests.sharded.emptied_wrong import WRONG

NAME = "uninitialised-parameters"
EMPTY_LINE, FORWARD_LINE = 12, 20


def examined(job: Job, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, and its findings of this check."""
    job.write(folder)
    report = check(folder / "train.py", select=[NAME])
    assert report["rehearsal"]["status"] == "completed", report["rehearsal"]
    assert report["exit_code"] == (1 if job.found else 0)
    return report, report["findings"]


def named(finding: dict[str, Any]) -> int:
    """How many tensors a finding is about."""
    return int(next(fact["numbers"]["read"] for fact in finding["evidence"] if "read" in fact["numbers"]))


def test_layers_that_an_own_reset_leaves_out_are_named(tmp_path: Path) -> None:
    _, (finding,) = examined(WRONG[0], tmp_path)
    assert finding["title"] == (
        "8 parameters of Net were never initialised, and the forward uses them with what to_empty() found in memory: "
        "layers.0.norm.* (2 parameters), layers.0.up.* (2 parameters), layers.1.norm.* (2 parameters), "
        "layers.1.up.* (2 parameters)"
    )
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert [lines[place["line"] - 1].strip() for place in finding["locations"]] == [
        'model.to_empty(device="cpu")',
        "loss = model(torch.randint(0, 32, (4, 6))).square().mean()",
    ]
    assert [fact["text"] for fact in finding["evidence"]] == [
        "to_empty() gives memory to 11 parameters and buffers, and no values",
        "from there to the forward 3 of them are written to",
    ]
    assert 'for part in model.modules(): if hasattr(part, "reset_parameters")' in finding["remedy"]


def mostly_full(jobs: Sequence[Job], often: int) -> list[Any]:
    """Some of these jobs for each run of the tests, spread over them, and the others for the full one."""
    chosen = range(len(jobs) - 1, -1, -(len(jobs) // often))
    marks = [() if number in chosen else (pytest.mark.full,) for number in range(len(jobs))]
    return [pytest.param(job, id=job.name, marks=marked) for job, marked in zip(jobs, marks, strict=True)]


@pytest.mark.parametrize("job", mostly_full(WRONG[1:], 4))
def test_what_nothing_wrote_is_found(job: Job, tmp_path: Path) -> None:
    _, (finding,) = examined(job, tmp_path)
    assert (named(finding), finding["ranks"]) == (len(job.found), [] if len(job.ranks) == 2 else list(job.ranks))
    assert all(name.partition(".")[0] in finding["title"] for name in job.found)


@pytest.mark.parametrize("job", mostly_full(RIGHT, 4))
def test_what_was_written_in_any_way_is_clean(job: Job, tmp_path: Path) -> None:
    report, findings = examined(job, tmp_path)
    assert findings == []
    assert [outcome["state"] for outcome in report["outcomes"] if outcome["name"] == NAME] == ["passed"]


def said(*ranks: int, **fields: Any) -> Any:
    """The finding of rows made by hand."""
    job = Replicas()
    values = {"name": "head.scale", "owner_class": "Head", "model_class": "Net", "emptied": 3, "unwritten": 1}
    places = {"site": job.site(EMPTY_LINE), "forward_site": job.site(FORWARD_LINE)}
    rows = tuple(Uninitialised(rank=rank, **{**values, **places, **fields}) for rank in ranks)
    (finding,) = uninitialised_parameters.in_run(job.seen(uninitialised=rows))
    return finding


def test_a_parameter_of_a_module_that_cannot_be_reset_is_to_be_initialised() -> None:
    finding = said(0, 1)
    assert finding.title.startswith("1 parameter of Net was never initialised, and the forward uses it with what")
    assert finding.remedy == (
        "Initialise the parameters of Head, which has no reset_parameters. Or load a checkpoint that has every name."
    )


def test_a_buffer_of_one_rank_is_to_be_computed() -> None:
    finding = said(1, buffer=True, name="angles", resets=True)
    assert (finding.ranks, finding.title.split(" of ")[0]) == ((1,), "1 buffer")
    assert finding.remedy.startswith("Compute angles after to_empty() as the constructor does.")
