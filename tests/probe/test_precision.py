"""What one forward of a model multiplies, and in which precision, as far as that shows without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.live.hooks import Precision

WEIGHTS = 8 * 16 + 16 * 4


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        self.spare = torch.nn.Linear(100, 100)

    def forward(self, inputs: Any) -> Any:
        return self.layers(inputs)


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


def _counted(directory: Path, model: Any, forward: Callable[[], Any]) -> tuple[int, int]:
    """Weights that the forward multiplied, and those in full precision."""
    directory.mkdir(exist_ok=True)
    journal = Journal(str(directory), {"kind": "run"})
    precision = Precision(journal, torch, torch.compiler.is_compiling)
    precision.begins(model, "cpu")
    precision.begins(torch.nn.Linear(2, 2), "cpu")  # a DDP module inside is not counted by itself
    try:
        forward()
    finally:
        precision.ended(torch.nn.Linear(2, 2), 1)
        precision.ended(model, 0)
    (line,) = [
        line for path in directory.glob("events-*") for line in path.read_text().splitlines() if "matmul" in line
    ]
    event = json.loads(line)
    assert event["wrap"] == 0
    return event["weights"], event["full_weights"]


def test_layers_that_are_called_are_counted_once_and_left_as_they_were(tmp_path: Path) -> None:
    model, inputs = Net(), torch.randn(3, 8)
    expected = model(inputs)
    assert _counted(tmp_path, model, lambda: (model(inputs), model(inputs))) == (WEIGHTS, WEIGHTS)
    assert torch.equal(model(inputs), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_forward_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(RuntimeError):
        _counted(tmp_path, model, lambda: model(torch.randn(3, 9)))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_autocast_half_precision_and_tf32_are_seen_where_they_take_effect(tmp_path: Path) -> None:
    model, inputs = Net(), torch.randn(3, 8)

    def under_autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.layers[0](inputs)
        model.layers[2](torch.randn(3, 16))

    assert _counted(tmp_path / "autocast", model, under_autocast) == (WEIGHTS, 16 * 4)
    half = Net().bfloat16()
    assert _counted(tmp_path / "half", half, lambda: half(inputs.bfloat16())) == (WEIGHTS, 0)
    torch.set_float32_matmul_precision("high")
    assert _counted(tmp_path / "tf32", model, lambda: model(inputs)) == (WEIGHTS, 0)


def test_convolutions_have_a_setting_of_their_own(tmp_path: Path) -> None:
    model, inputs = torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    torch.backends.cudnn.allow_tf32 = True
    assert _counted(tmp_path / "default", model, lambda: model(inputs)) == (108, 0)
    torch.backends.cudnn.allow_tf32 = False
    assert _counted(tmp_path / "full", model, lambda: model(inputs)) == (108, 108)


def test_a_model_on_the_cpu_is_of_no_interest(tmp_path: Path) -> None:
    precision = Precision(Journal(str(tmp_path), {"kind": "run"}), torch, torch.compiler.is_compiling)
    ddp = type("Ddp", (), {"device_type": "cpu"})()
    assert not precision.is_of_interest(ddp)
