"""Rehearses small scripts on real ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.monitor.rehearsal import rehearse
from ddpdoctor.record.model import RunRecord
from tests import forks

Rehearse = Callable[..., RunRecord]

HEAD = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""


@pytest.fixture
def rehearse_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Write a script with the usual imports to an empty directory and rehearse it there."""

    def run(body: str, **options: object) -> RunRecord:
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        script = folder / "train.py"
        script.write_text(HEAD + textwrap.dedent(body))
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        request = RehearsalRequest(script=script, **{"time_limit_s": 240.0, **options})  # type: ignore[arg-type]
        record = rehearse(request, lambda progress: None)
        assert not list((tmp_path / "state" / "ddpdoctor" / "runs").iterdir()), "the run directory was left behind"
        return record

    return run


@pytest.fixture
def rehearse_on_forks(tmp_path: Path) -> Rehearse:
    """The same on forks of this process, for what the launcher and the end of a rank have no part in."""

    def run(body: str) -> RunRecord:
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body))
        return forks.rehearse(RehearsalRequest(script=tmp_path / "train.py"))

    return run
