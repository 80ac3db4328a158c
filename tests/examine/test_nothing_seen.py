"""What was not understood, and what is not there: never "passed", and never "clean" where nothing was recognised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.cli.main import main
from ddpdoctor.errors import ExitCode

START = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(64, 8))
model = DDP(nn.Linear(8, 8))
"""
LOOP = """
for (inputs,) in loader:
    LOSS.backward()
dist.destroy_process_group()
"""
SAMPLER = "loader = DataLoader(data, batch_size=4, sampler=SAMPLER, num_workers=2)\n"


def test_a_sampler_that_was_not_read_leaves_its_checks_not_evaluated(tmp_path: Path, capsys: Any) -> None:
    script = "from elsewhere import make_sampler\n" + START + SAMPLER.replace("SAMPLER", "make_sampler(data)")
    said = _examined(script + LOOP.replace("LOSS", "model(inputs).sum()"), tmp_path, capsys)
    assert said["exit_code"] == ExitCode.INCONCLUSIVE
    assert _states(said)["DDP101"] == "not-evaluated"
    assert "the sampler of the DataLoader" in _reasons(said)["DDP101"]


def test_a_sampler_of_torch_is_understood(tmp_path: Path, capsys: Any) -> None:
    script = START + SAMPLER.replace("SAMPLER", "DistributedSampler(data, shuffle=False)")
    said = _examined(script + LOOP.replace("LOSS", "model(inputs).sum()"), tmp_path, capsys)
    assert _states(said)["DDP101"] == "passed"


def test_a_loss_that_was_not_followed_is_said(tmp_path: Path, capsys: Any) -> None:
    script = "from elsewhere import step_of\n" + START + SAMPLER.replace("SAMPLER", "DistributedSampler(data)")
    said = _examined(script + LOOP.replace("LOSS", "step_of(model, inputs)"), tmp_path, capsys)
    assert any("comes from `step_of`" in reason for reason in _reasons(said).values())
    assert not said["complete"]


EPOCHS = (
    SAMPLER.replace("SAMPLER", "sampler")
    + """
for epoch in range(3):
    begin(GIVEN, epoch)
    for (inputs,) in loader:
        model(inputs).sum().backward()
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(
    ("given", "state"), [("sampler", "not-evaluated"), ("loader", "not-evaluated"), ("model", "findings")]
)
def test_a_sampler_in_hands_that_were_not_read_may_be_told(given: str, state: str, tmp_path: Path, capsys: Any) -> None:
    script = "from elsewhere import begin\n" + START + "sampler = DistributedSampler(data)\n"
    said = _examined(script + EPOCHS.replace("GIVEN", given), tmp_path, capsys)
    assert _states(said)["DDP102"] == state
    assert ("elsewhere.begin" in _reasons(said)["DDP102"]) is (state == "not-evaluated")


def test_a_check_whose_subject_is_not_there_has_nothing_to_look_at(tmp_path: Path, capsys: Any) -> None:
    said = _examined(START + "dist.destroy_process_group()\n", tmp_path, capsys)
    assert _states(said)["DDP102"] == "nothing-to-look-at"
    assert said["recognised"]


def test_a_framework_that_is_not_modelled_is_a_gap(tmp_path: Path, capsys: Any) -> None:
    script = "from ray.train.torch import TorchTrainer\n\n\ndef work():\n    pass\n\n\nTorchTrainer(work).fit()\n"
    said = _examined(script, tmp_path, capsys)
    assert said["exit_code"] == ExitCode.INCONCLUSIVE


@pytest.mark.parametrize(
    "text", ["", "# DistributedDataParallel, init_process_group\n", "print('torch.distributed')\n", "import torch\n"]
)
def test_a_script_without_distributed_training_is_not_clean(text: str, tmp_path: Path, capsys: Any) -> None:
    said = _examined(text, tmp_path, capsys)
    assert (said["exit_code"], said["verdict"], said["recognised"]) == (ExitCode.INCONCLUSIVE, "inconclusive", False)
    main(["check", "--static", "--output-format", "concise", str(tmp_path / "train.py")])
    assert "no distributed training was recognised in" in capsys.readouterr().out


def test_a_hook_that_only_wants_findings_passes_where_nothing_was_recognised(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "other.py").write_text("print(1)\n", encoding="utf-8")
    arguments = ["check", "--static", str(tmp_path / "other.py")]
    assert main(arguments) == ExitCode.INCONCLUSIVE
    assert main([*arguments, "--only-findings"]) == ExitCode.CLEAN
    (tmp_path / "other.py").write_text(START + "if dist.get_rank() == 0:\n    dist.barrier()\n", encoding="utf-8")
    assert main([*arguments, "--only-findings"]) == ExitCode.FINDINGS
    capsys.readouterr()


def _examined(text: str, directory: Path, capsys: Any) -> dict[str, Any]:
    (directory / "train.py").write_text(text, encoding="utf-8")
    main(["check", "--static", "--output-format", "json", str(directory / "train.py")])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def _states(said: dict[str, Any]) -> dict[str, str]:
    return {outcome["code"]: outcome["state"] for outcome in said["outcomes"]}


def _reasons(said: dict[str, Any]) -> dict[str, str]:
    return {outcome["code"]: outcome["reason"] for outcome in said["outcomes"]}
