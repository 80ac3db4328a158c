"""Whose a run directory is: of a process of this machine, or of another that shares the home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddpdoctor.launch.kept_runs import OWNER_FILE, owner_of, sign, standing, this_process


def test_a_signed_directory_tells_its_process(tmp_path: Path) -> None:
    sign(tmp_path)
    assert owner_of(tmp_path) == this_process()
    assert standing(owner_of(tmp_path)) == "alive"


def test_a_process_that_ended_is_dead_and_one_that_has_its_number_now_is_another(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    me = this_process()
    assert standing(replace(me, pid=child.pid)) == "dead"
    assert standing(replace(me, started="1")) == "dead"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"host": "another"}, "elsewhere"),
        ({"pid_namespace": "pid:[1]"}, "elsewhere"),
        ({"boot": "another"}, "elsewhere"),
        ({"boot": "another", "machine": "of another installation"}, "elsewhere"),
    ],
)
def test_a_process_of_another_machine_or_container_is_never_taken_for_dead(
    changes: dict[str, str], expected: str
) -> None:
    assert standing(replace(this_process(), **({"machine": ""} | changes))) == expected


def test_before_a_new_start_of_the_same_machine_every_process_is_dead() -> None:
    me = this_process()
    if not me.machine:
        pytest.skip("this machine has no number")
    assert standing(replace(me, boot="another")) == "dead"


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"host": 1}'])
def test_a_damaged_signature_is_nobodys(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / OWNER_FILE).write_text(content)
    assert owner_of(tmp_path) is None
    assert standing(owner_of(tmp_path)) == "unknown"
