"""How the probe starts in a process, and what it notes of the process's settings."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddpdoctor.launch.environment import BOOT_DIRECTORY, rehearsal_environment
from ddpdoctor.probe import free_port as module
from ddpdoctor.probe.environment import Settings
from ddpdoctor.probe.free_port import free_port
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.torch_compat import Capabilities, after_import
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job, StreamState
from tests.monitor.watched import HEAD, MOST_S

# The boot directory: it wakes the probe, lets other start-up hooks run, and never stops the program.


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


# What waits for an import is called once it is made, however often somebody asks whether the module is there.


def test_a_question_for_the_module_is_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked_for_first.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    seen: list[ModuleType] = []
    twice: list[ModuleType] = []
    after_import("asked_for_first", seen.append)
    after_import("asked_for_first", twice.append)
    assert importlib.util.find_spec("asked_for_first") and importlib.util.find_spec("asked_for_first")
    assert seen == []
    module = importlib.import_module("asked_for_first")
    assert seen == twice == [module] and module.VALUE == 7
    assert sys.meta_path == before
    after_import("asked_for_first", seen.append)
    assert seen == [module, module]


# The port of a rendezvous is one that no connection of another program takes meanwhile.


def test_a_port_is_free_and_the_kernel_gives_it_to_nobody() -> None:
    kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    for _ in range(20):
        port = free_port()
        assert not kernel.exists() or port < int(kernel.read_text().split()[0])
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def test_one_that_is_taken_is_left_and_in_the_end_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "_FIRST", port)
        monkeypatch.setattr(module, "_first_of_kernel", lambda: port + 1)
        assert free_port() != port


# What a process notes of variables that are set while its job runs.
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


# A line of Python has the effect of the environment; a torch that lacks private names is measured without them.
SCRIPT = """
import ddpdoctor
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        dist.barrier()
train(3)
c10d, loaders = torch._C._distributed_c10d, torch.utils.data.dataloader
del c10d._dump_fr_trace
if rank == 1:
    for owner, name in (
        (loaders, "_BaseDataLoaderIter"),
        (c10d, "Logger"),
        (c10d.Reducer, "_set_ddp_runtime_logging_sample_rate"),
        (DDP, "_sync_buffers"),
        (c10d, "_dump_fr_trace_json"),
    ):
        delattr(owner, name)
with ddpdoctor.watching():
    train(5)
train(2)
assert ddpdoctor.watch(model) is model
train(6)
os._exit(0)
"""


def test_a_line_in_the_script_watches_it_with_what_this_torch_offers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_S)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "state" / "ddpdoctor" / "runs").iterdir()
    assert run.stat().st_mode & 0o777 == 0o700
    assembly = Assembly(run)
    assembly.poll()
    assembly.poll()
    record = assembly.record(Job(kind="run", world_size=2))
    whole, poor = record.step_tracks
    assert list(whole.step) == list(poor.step) == list(range(1, 12))
    assert all(length > 0 for length in (*whole.backward_ns, *poor.backward_ns))
    assert set(poor.exposed_ns) == {-1}
    assert [heartbeat.enqueued >= 0 for heartbeat in record.heartbeats] == [True, False]
    assert assembly.faults == []
    assert set(assembly.live.lacks) == {
        "_BaseDataLoaderIter",
        "_next_index",
        "Logger",
        "_set_ddp_runtime_logging_sample_rate",
        "_sync_buffers",
        "_dump_fr_trace",
        "_dump_fr_trace_json",
    }
    reason = "before torch 2.8 no flight recorder holds the collectives of gloo"
    assert record.stream("collectives") == StreamState("absent", reason)


def test_a_torch_without_work_and_compiler_is_said_to_lack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert Capabilities(torch).missing == {}
    monkeypatch.delattr(torch._C._distributed_c10d, "Work")
    monkeypatch.delattr(torch.compiler, "is_dynamo_compiling")
    lacking = Capabilities(torch)
    assert set(lacking.missing) == {"Work.wait", "is_dynamo_compiling"}
    assert lacking.work_class is None and not lacking.is_compiling()
