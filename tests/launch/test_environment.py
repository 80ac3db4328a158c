"""What the ranks are given, and how many GPUs they may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.launch import request
from ddpdoctor.launch.environment import BOOT_DIRECTORY, rehearsal_environment
from ddpdoctor.launch.request import Launch
from ddpdoctor.probe.environment import recorded_environment


def test_an_outer_launcher_leaves_no_trace() -> None:
    given = {"RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "HOME": "/h", "PYTHONPATH": "/mine"}
    made = rehearsal_environment(Path("/run"), given)
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(made)
    assert made["HOME"] == "/h"
    assert made["PYTHONPATH"] == f"{BOOT_DIRECTORY}{os.pathsep}/mine"


def test_what_the_launch_command_sets_and_takes_counts() -> None:
    launch = Launch(environment={"LR": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "head"}, without=("SECRET",))
    given = {"LR": "1", "SECRET": "s", "PET_RDZV_ENDPOINT": "head:1"}
    made = rehearsal_environment(Path("/run"), given, launch)
    assert made["LR"] == "3"
    assert not {"SECRET", "WORLD_SIZE", "MASTER_ADDR", "PET_RDZV_ENDPOINT"} & set(made)
    own = rehearsal_environment(Path("/run"), {"MASTER_PORT": "29500"}, launch, spawns_ranks=True)
    assert (own["WORLD_SIZE"], own["MASTER_ADDR"]) == ("2", "127.0.0.1")
    assert own["MASTER_PORT"] != "29500"


def test_trackers_are_off_whatever_the_user_set() -> None:
    assert rehearsal_environment(Path("/run"), {"WANDB_MODE": "online"})["WANDB_MODE"] == "disabled"


def test_secrets_of_the_environment_are_not_recorded() -> None:
    assert recorded_environment({"AWS_SECRET_ACCESS_KEY": "s", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("named", "expected"), [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("0,1,2,3,4,5", 4)]
)
def test_gpus_are_those_present_and_visible(monkeypatch: pytest.MonkeyPatch, named: str | None, expected: int) -> None:
    monkeypatch.setattr(request, "_present_gpus", lambda: 4)
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert request.visible_gpus(environment) == expected
