"""The boot directory: it wakes the probe, lets other start-up hooks run, and never stops the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ddpdoctor.launch.environment import BOOT_DIRECTORY, rehearsal_environment
from ddpdoctor.record import layout


def _run(code: str, run_directory: Path, *, first: str = "", flags: tuple[str, ...] = ()) -> str:
    environment = rehearsal_environment(run_directory, os.environ)
    if first:
        environment["PYTHONPATH"] = os.pathsep.join([str(BOOT_DIRECTORY), first])
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _plan(run_directory: Path, **fields: object) -> None:
    plan = {"version": layout.VERSION, "kind": "rehearsal", "supervisor_pid": os.getpid(), **fields}
    (run_directory / layout.JOB_FILE).write_text(json.dumps(plan))


def _events(run_directory: Path) -> list[str]:
    lines = [line for path in run_directory.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line)["event"] for line in lines]


def test_every_process_of_the_job_says_that_it_lives(tmp_path: Path) -> None:
    _plan(tmp_path)
    _run("pass", tmp_path)
    assert _events(tmp_path) == ["process", "exit"]


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    run_directory, other = tmp_path / "run", tmp_path / "other"
    run_directory.mkdir()
    other.mkdir()
    _plan(run_directory)
    (other / "sitecustomize.py").write_text("import builtins\nbuiltins.other_was_here = True\n")
    assert _run("print(other_was_here)", run_directory, first=str(other)).strip() == "True"
    assert "process" in _events(run_directory)


def test_a_program_runs_when_the_plan_is_damaged(tmp_path: Path) -> None:
    (tmp_path / layout.JOB_FILE).write_text("{")
    assert _run("print('trained')", tmp_path).strip() == "trained"
    assert next(tmp_path.glob("probe-*.log")).read_text().startswith("the probe is off in this process")


def test_a_program_runs_when_the_run_directory_is_gone(tmp_path: Path) -> None:
    assert _run("print('trained')", tmp_path / "gone").strip() == "trained"


def test_an_interpreter_that_ignores_the_environment_reports_nothing(tmp_path: Path) -> None:
    _plan(tmp_path)
    _run("pass", tmp_path, flags=("-E",))
    assert _events(tmp_path) == []


def test_the_probe_imports_neither_torch_nor_anything_installed(tmp_path: Path) -> None:
    _plan(tmp_path)
    out = _run(
        "import sys; print(*sorted(m for m in sys.modules if m.split('.')[0] in NAMES))".replace(
            "NAMES", "('ddpdoctor', '_ddpdoctor', 'torch', 'msgspec')"
        ),
        tmp_path,
    )
    assert "_ddpdoctor.probe.start" in out
    assert " ddpdoctor" not in out and "torch" not in out.split() and "msgspec" not in out


def test_a_file_that_cannot_be_compiled_is_named_with_its_line(tmp_path: Path) -> None:
    run_directory, script = tmp_path / "run", tmp_path / "train.py"
    run_directory.mkdir()
    _plan(run_directory, project_root=str(tmp_path))
    script.write_text("epochs = 3\ndef main(:\n")
    environment = rehearsal_environment(run_directory, os.environ)
    subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, timeout=120)
    lines = [line for path in run_directory.glob("events-*.jsonl") for line in path.read_text().splitlines()]
    raised = next(event for event in map(json.loads, lines) if event["event"] == "raised")
    assert raised["frames"] == [[str(script), 2, "<module>"]]
