from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import ddpdoctor
from ddpdoctor.cli.check import check as command
from ddpdoctor.cli.main import main

HANGS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(64, 8))
sampler = DistributedSampler(data)
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for (batch,) in DataLoader(data, 4, sampler=sampler):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            dist.barrier()  # alone
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(HANGS)
    return path


def test_a_static_check_is_what_the_command_says(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ddpdoctor.check(script, static=True)
    assert isinstance(report, ddpdoctor.Examination)
    assert main(["check", "--static", "--output-format", "json", str(script)]) == report.exit_code == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["fingerprint"] for finding in told["findings"]] == [one.fingerprint for one in report.findings]


def test_the_settings_of_the_project_count_and_options_come_before_them(script: Path) -> None:
    (script.parent / "pyproject.toml").write_text('[tool.ddpdoctor]\nselect = ["DDP102"]\nfail-on = "error"\n')
    report = ddpdoctor.check("train.py", static=True)
    assert {finding.code for finding in report.findings} == {"DDP102"}
    assert report.verdict == "clean"
    assert ddpdoctor.check("train.py", static=True, fail_on="warning").verdict == "findings"
    assert "DDP301" in {finding.code for finding in ddpdoctor.check("train.py", static=True, select=["DDP3"]).findings}


def test_a_launch_command_takes_the_place_of_the_script(script: Path) -> None:
    report = ddpdoctor.check(command=["torchrun", "--nproc-per-node", "2", "train.py"], static=True)
    assert (report.target, report.verdict) == ("train.py", "findings")


def test_a_rehearsal_shows_what_happens_and_no_suspicion(script: Path) -> None:
    report = ddpdoctor.rehearse("train.py")
    assert (report.verdict, report.rehearsal.status) == ("findings", "stopped")
    assert [finding.code for finding in report.findings if finding.severity is ddpdoctor.Severity.ERROR] == ["DDP301"]
    assert {basis for finding in report.findings for basis in finding.basis} == {"rehearsal"}
    place = report.findings[0].location
    assert place is not None
    assert "# alone" in HANGS.splitlines()[place.line - 1]


def test_what_cannot_be_examined_is_a_usage_error(script: Path) -> None:
    with pytest.raises(ddpdoctor.UsageError, match="either a script or a launch command"):
        ddpdoctor.check()
    with pytest.raises(ddpdoctor.UsageError, match="either a script or a launch command"):
        ddpdoctor.check("train.py", command=["torchrun", "train.py"])
    with pytest.raises(ddpdoctor.UsageError, match="part of the launch command"):
        ddpdoctor.check(command=["torchrun", "train.py"], args=["--lr", "1"])
    with pytest.raises(ddpdoctor.UsageError, match="not both"):
        ddpdoctor.check("train.py", static=True, rehearsal_only=True)
    with pytest.raises(ddpdoctor.UsageError):
        ddpdoctor.check("missing.py", static=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nproc": 0}, "nproc must be a number of ranks from"),
        ({"batches": 0}, "batches must be the number"),
        ({"batch_size": -1}, "batch_size must be a number of samples"),
        ({"batch_size": "big"}, "batch_size is one of auto, keep, not 'big'"),
        ({"time_limit_s": float("nan")}, "time_limit_s must be a number of seconds above 0, not nan"),
        ({"stall_after_s": 0.1}, "stall_after_s must be a number of seconds, at least 1"),
        ({"device": "tpu"}, "device is one of auto, cpu, cuda, stand-in, not 'tpu'"),
        ({"stress": ["heat"]}, "stress is one of .*, not 'heat'"),
        ({"fail_on": "typo"}, "fail_on is one of error, warning, advice, not 'typo'"),
        ({"layout": "2 by 1"}, "2 by 1"),
    ],
)
def test_an_option_that_makes_no_sense_is_a_usage_error(script: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ddpdoctor.UsageError, match=said):
        ddpdoctor.check(script, static=True, **options)


def test_every_option_of_the_command_that_bears_on_one_script_is_one_of_the_function() -> None:
    beside_the_point = {
        "paths", "fix", "diff", "exclude", "force_exclude", "stdin_filename", "jobs", "output_format", "output",
        "reports", "force", "no_color", "help", "only_findings",
    }  # fmt: skip
    of_command = {str(parameter.name) for parameter in command.params} - beside_the_point
    of_function = {name.removesuffix("_s") for name in inspect.signature(ddpdoctor.check).parameters}
    assert {"time_limit" if name == "time_limit_s" else name for name in of_command} <= of_function
