"""Which wrap a parameter belongs to, when models come and go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.rehearsal.training.ddp_modules import Modules
from ddpdoctor.probe.rehearsal.training.reduction import Reduction


def modules(directory: Path) -> Modules:
    nothing: Any = SimpleNamespace()
    return Modules(Journal(str(directory), {}), nothing, torch, lambda: (-1, -1, -1, False), nothing)


def watch(known: Modules, number: int, module: nn.Module) -> None:
    known._hook(Reduction(number, {}), module)


def test_a_new_model_is_never_taken_for_one_that_is_gone(tmp_path: Path) -> None:
    known = modules(tmp_path)
    for fold in range(50):
        model = nn.Linear(3, 2)
        assert known.name_of(model.weight) is None
        watch(known, fold, model)
        assert known.name_of(model.weight) == (fold, "weight")
        del model


def test_a_parameter_keeps_its_first_wrap(tmp_path: Path) -> None:
    known, model = modules(tmp_path), nn.Linear(3, 2)
    watch(known, 0, model)
    watch(known, 1, nn.Sequential(model))
    assert known.name_of(model.weight) == (0, "weight")
