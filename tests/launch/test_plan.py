"""How a launch is rehearsed: for how long, where modules are looked for, and what is said about the differences."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddpdoctor.launch import rehearsal_plan
from ddpdoctor.launch.request import Launch, RehearsalRequest, on_cpu


def request(launch: Launch = Launch(), **fields: object) -> RehearsalRequest:  # noqa: B008 - it is frozen
    return RehearsalRequest(script=Path("/train.py"), launch=launch, **fields)  # type: ignore[arg-type]


def test_the_time_limit_grows_with_the_ranks_that_share_a_core_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [rehearsal_plan.time_limit_s(request(), ranks) for ranks in (1, 2, 3, 8)] == [110, 110, 165, 440]
    assert rehearsal_plan.time_limit_s(request(time_limit_s=30.0), 8) == 30


@pytest.mark.parametrize(
    ("launch", "device", "fields", "samples"),
    [
        (Launch(), "cpu", {}, None),
        (Launch(), "cpu", {"may_use_gpus": True}, 2),
        (Launch(), "cpu", {"may_use_gpus": True, "batch_size": 0}, None),
        (Launch(), "cpu", {"may_use_gpus": True, "batch_size": 2}, 2),
        (Launch(), "cuda", {"may_use_gpus": True}, None),
        (Launch(), "stand-in", {}, 2),
        (Launch(), "stand-in", {"stress": "short-batch"}, 4),
        (Launch(), "stand-in", {"full": True}, None),
        (Launch(), "stand-in", {"full": True, "batch_size": 2}, 2),
        (Launch(starter="accelerate"), "cpu", {}, 2),
        (
            Launch(starter="accelerate", environment={"ACCELERATE_USE_CPU": "true"}),
            "cpu",
            {"may_use_gpus": True},
            None,
        ),
        (Launch(starter="fabric", environment={"LT_ACCELERATOR": "cpu"}), "cpu", {"may_use_gpus": True}, None),
    ],
)
def test_batches_are_cut_where_a_cpu_does_what_gpus_are_meant_for(
    launch: Launch, device: str, fields: dict[str, object], samples: int | None
) -> None:
    assert rehearsal_plan.batch_size(request(launch, **fields), device) == samples


@pytest.mark.parametrize(
    ("launch", "device", "fields", "words"),
    [
        (Launch(), "cpu", {}, []),
        (Launch(starter="torchrun", ranks=8), "cpu", {}, []),
        (Launch(starter="python"), "cpu", {"spawns_ranks": True}, []),
        (Launch(starter="python"), "cpu", {"nproc": 3}, ["`python` alone", "on 3 ranks"]),
        (Launch(), "cpu", {"local_rank_option": "--local_rank"}, ["requires --local_rank", "each rank got its own"]),
        (Launch(), "cpu", {"local_rank_option": "--local_rank", "arguments": ("--local_rank", "0")}, []),
        (Launch(), "cpu", {"local_rank_option": "--local_rank", "spawns_ranks": True}, []),
        (
            Launch(),
            "cpu",
            {"rank_options": ("--rank", "-r"), "arguments": ("-r", "0", "--world-size", "2")},
            ["the arguments name one rank", "each rank got its own"],
        ),
        (Launch(starter="torchrun"), "cpu", {"rank_options": ("--rank",), "arguments": ("--rank=0",)}, []),
        (Launch(starter="torch.distributed.launch"), "cpu", {"local_rank_option": "--local-rank"}, []),
        (
            Launch(starter="torch.distributed.launch"),
            "cpu",
            {"local_rank_option": "--local_rank"},
            ["takes --local_rank", "each rank got its own"],
        ),
        (Launch(starter="torchrun", ranks=1), "cpu", {}, ["starts 1 rank", "rehearsed on 2"]),
        (Launch(starter="accelerate", environment={"ACCELERATE_MIXED_PRECISION": "fp16"}), "cpu", {}, ["fp16 needs"]),
        (Launch(starter="accelerate", environment={"ACCELERATE_MIXED_PRECISION": "bf16"}), "cpu", {}, []),
        (Launch(starter="accelerate", environment={"ACCELERATE_MIXED_PRECISION": "fp16"}), "cuda", {}, []),
    ],
)
def test_what_differs_from_the_command_is_said(
    launch: Launch, device: str, fields: dict[str, object], words: list[str]
) -> None:
    said = list(rehearsal_plan.notes_before(request(launch, **fields), device))
    assert len(said) == min(1, len(words))
    assert all(word in said[0] for word in words)


def test_a_script_that_starts_other_ranks_than_were_asked_for_is_said_to() -> None:
    assert list(rehearsal_plan.notes_after(request(spawns_ranks=True, nproc=4), 8)) == [
        "the script starts its 8 ranks itself, so `--nproc 4` was ignored"
    ]
    for spawns, nproc, world in ((True, 2, 8), (True, 4, 4), (True, 4, 0), (False, 4, 2)):
        assert not list(rehearsal_plan.notes_after(request(spawns_ranks=spawns, nproc=nproc), world))


def test_accelerate_is_told_that_there_is_no_gpu() -> None:
    assert on_cpu({}) == {"ACCELERATE_USE_CPU": "true"}
    assert on_cpu({"ACCELERATE_MIXED_PRECISION": "fp16"})["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "ACCELERATE_MIXED_PRECISION" not in on_cpu({"ACCELERATE_MIXED_PRECISION": "bf16"})


def test_a_module_is_looked_for_here_then_on_the_pythonpath_then_where_its_python_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shell", "command", "src"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "shell")
    here = Path.cwd()
    assert rehearsal_plan.module_places(Launch(), None, static=True) == (here, here / "shell", here / "src")
    launch = Launch(environment={"PYTHONPATH": f"command{os.pathsep}nowhere"})
    places = rehearsal_plan.module_places(launch, sys.executable, static=False)
    assert places[:2] == (here, here / "command")
    assert any(place.name in ("site-packages", "dist-packages") for place in places)
    assert here / "src" not in places
