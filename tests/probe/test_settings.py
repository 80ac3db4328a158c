"""What a process notes of variables that are set while its job runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.environment import Settings
from ddpdoctor.probe.journal import Journal

PUT, REMOVE = os.putenv, os.unsetenv


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = dict(os.environ)
    for name in ("NCCL_DEBUG", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME", "EDITOR"):
        os.environ.pop(name, None)
    yield
    os.putenv, os.unsetenv = PUT, REMOVE
    os.environ.clear()
    os.environ.update(before)


def _settings(directory: Path, environment: dict[str, str]) -> Settings:
    journal = Journal(str(directory), {"kind": "run", "job": {"environment": environment}})
    journal.rank = 0
    return Settings(journal, lambda: False)


def _noted(directory: Path) -> list[tuple[Any, ...]]:
    lines = [line for path in directory.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["event"] == "setting"]
    return [(event["name"], event["value"], event["removed"], event["site"] >= 0) for event in events]


def test_lines_of_the_script_that_set_or_remove_a_variable_are_noted(tmp_path: Path) -> None:
    settings = _settings(tmp_path, {"NCCL_DEBUG": "INFO"})
    settings.listen()
    os.environ["NCCL_P2P_DISABLE"] = "1"
    os.environ.setdefault("NCCL_P2P_DISABLE", "0")
    os.environ.update({"EDITOR": "ed", "NCCL_DEBUG": "WARN"})
    del os.environ["NCCL_P2P_DISABLE"]
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    settings.note_others()
    assert _noted(tmp_path) == [
        ("NCCL_P2P_DISABLE", "1", False, True),
        ("NCCL_DEBUG", "WARN", False, True),
        ("NCCL_P2P_DISABLE", "", True, True),
    ]


def test_what_others_have_set_or_removed_is_noted_without_a_line(tmp_path: Path) -> None:
    os.environ["NCCL_P2P_DISABLE"] = "1"
    settings = _settings(tmp_path, {"NCCL_DEBUG": "INFO"})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings.note_others()
    os.environ["EDITOR"] = "ed"
    settings.note_others()
    assert [noted for noted in _noted(tmp_path) if "TORCH" not in noted[0]] == [
        ("GLOO_SOCKET_IFNAME", "lo", False, False),
        ("NCCL_DEBUG", "", True, False),
        ("NCCL_P2P_DISABLE", "1", False, False),
    ]
