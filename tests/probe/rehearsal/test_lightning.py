"""Trainers of Lightning are fitted to the ranks that were started, and only those that train with DDP."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.rehearsal.surroundings import LightningTrainers

TRAINER = """
class {name}:
    def __init__(self, *, accelerator="auto", strategy="auto", devices="auto", num_nodes=1, precision=None):
        self.made_with = dict(accelerator=accelerator, devices=devices, num_nodes=num_nodes, precision=precision)
"""
Made = Callable[..., dict[str, Any]]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["pytorch_lightning.trainer.trainer.Trainer", "lightning_fabric.fabric.Fabric"])
def trainer_made_with(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> Iterator[Made]:
    """Imports a package with the names of Lightning's after the hooks are installed, and makes a trainer of it."""
    place, _, name = str(request.param).rpartition(".")
    package = place.partition(".")[0]
    file = tmp_path.joinpath(*place.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    for folder in (tmp_path / package, file.parent):
        (folder / "__init__.py").touch()
    file.write_text(TRAINER.format(name=name))
    for loaded in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    (tmp_path / "run").mkdir()
    LightningTrainers(Journal(str(tmp_path / "run"), {"job": {"device": device}})).install()
    module = importlib.import_module(place)
    yield lambda **options: getattr(module, name)(**options).made_with
    for loaded in [one for one in sys.modules if one.partition(".")[0] == package]:
        del sys.modules[loaded]


def test_a_ddp_trainer_gets_the_ranks_of_the_rehearsal(trainer_made_with: Made, device: str) -> None:
    asked = {"accelerator": "gpu", "devices": 8, "num_nodes": 4, "precision": "16-mixed"}
    on_cpu = {"accelerator": "cpu", "devices": 2, "num_nodes": 1, "precision": "32-true"}
    expected = on_cpu if device == "cpu" else asked | {"devices": 2, "num_nodes": 1}
    assert trainer_made_with(strategy="ddp_find_unused_parameters_true", **asked) == expected
    assert trainer_made_with(strategy=type("DDPStrategy", (), {})(), **asked) == expected
    assert trainer_made_with()["devices"] == 2


def test_other_strategies_are_left_alone(trainer_made_with: Made) -> None:
    asked = {"accelerator": "gpu", "devices": 8, "num_nodes": 1, "precision": "16-mixed"}
    for strategy in ("fsdp", "deepspeed_stage_2", "ddp_spawn", "ddp_notebook", type("FSDPStrategy", (), {})()):
        assert trainer_made_with(strategy=strategy, **asked) == asked
