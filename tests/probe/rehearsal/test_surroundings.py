"""What a rehearsal does to the process around the script: faults of ours, terminal, stacks, threads, lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpdoctor.examine.one_script import ExamineRequest, examine
from ddpdoctor.monitor.processes.stacks import parse_faulthandler
from ddpdoctor.probe.rehearsal.surroundings import CpuThreads

from .conftest import HEAD

# A fault of ours inside a rank costs evidence, never the training, and never passes for clean.
TRAINING = """
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
if sampler.rank == 0:
    print("trained to the end")
"""

FAULTS = {
    "collectives": ("_ddpdoctor.probe.rehearsal.collective_hook", "origin_of"),
    "wrap": ("_ddpdoctor.probe.observed", "_describe"),
    "forward": ("_ddpdoctor.probe.rehearsal.training.ddp_modules", "leaves"),
    "gradients": ("_ddpdoctor.probe.rehearsal.training.ddp_modules", "Modules._close"),
    "pass": ("_ddpdoctor.probe.rehearsal.data.loaders", "Loaders._length"),
    "indices": ("_ddpdoctor.probe.rehearsal.data.loaders", "base_indices"),
}
"""Module and name of what raises when it is called."""
PLANT = """
import importlib
*owners, name = "{name}".split(".")
owner = importlib.import_module("{module}")
for each in owners:
    owner = getattr(owner, each)
assert callable(getattr(owner, name)), "there is nothing of that name any more"
setattr(owner, name, None)
"""


@pytest.mark.parametrize("part", FAULTS)
def test_training_goes_on_and_the_verdict_is_inconclusive(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = FAULTS[part]
    (tmp_path / "train.py").write_text(HEAD + PLANT.format(module=module, name=name) + TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    examination = examine(ExamineRequest(target="train.py", time_limit_s=180.0))
    assert examination.rehearsal.steps >= 4
    assert not examination.findings
    assert (examination.exit_code, examination.complete) == (3, False), examination.rehearsal
    assert any("observation failed" in note for note in examination.rehearsal.notes)


# A rehearsed rank has no terminal, and scripts that ask for its size get one.
ASKS = """
import os, sys
if "hooked" in sys.argv:
    from ddpdoctor.probe.rehearsal.surroundings import hook_terminal
    hook_terminal()
_, columns = os.popen("stty size", "r").read().split()
print(columns, os.get_terminal_size().columns, os.popen("echo other").read().strip())
"""


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ASKS, *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ})


def test_the_size_of_a_terminal_that_is_not_there_is_answered() -> None:
    assert asked("hooked").stdout.split() == ["80", "80", "other"]


def test_without_the_hook_the_script_fails() -> None:
    assert asked().returncode == 1


# Stacks of a rank that cannot answer itself.
DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/venv/lib/threading.py", line 10 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/job/my train.py", line 57 in step
  File "/job/my train.py", line 80 in <module>
"""


def test_every_thread_is_read_and_the_last_one_is_the_main_thread() -> None:
    first, main = parse_faulthandler(DUMP, 3)
    assert not first.main and main.main and main.rank == 3
    assert [(frame.file, frame.line, frame.function) for frame in main.frames] == [
        ("/job/my train.py", 57, "step"),
        ("/job/my train.py", 80, "<module>"),
    ]


def test_garbage_gives_no_stack() -> None:
    assert parse_faulthandler("\x00\xff what", 0) == []


# Who chose the number of threads for torch's computation.


@pytest.mark.parametrize(
    ("plan", "sets", "chosen"),
    [({}, False, False), ({}, True, True), ({"threads_chosen": True}, False, True)],
    ids=["nobody", "the script", "the command"],
)
def test_who_asks_for_threads_has_chosen_them(plan: dict[str, Any], sets: bool, chosen: bool) -> None:
    told: list[dict[str, Any]] = []
    journal: Any = SimpleNamespace(
        plan=plan,
        event=lambda name, **fields: told.append({"event": name, **fields}),
        guarded=lambda note, *arguments, harms: note(*arguments),
    )
    own = SimpleNamespace(set_num_threads=torch.set_num_threads, get_num_threads=torch.get_num_threads)
    threads, before = CpuThreads(journal, own), torch.get_num_threads()
    threads.install()
    if sets:
        own.set_num_threads(before)
    threads.note_threads()
    assert told == [{"event": "cpu_threads", "threads": before, "chosen": chosen}]


# The lines that a process runs, watched by whatever this Python offers.
ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, sys, threading, time
from types import SimpleNamespace

sys.path.insert(0, ROOT)
from ddpdoctor.probe.user_code import UserCode
from ddpdoctor.probe.rehearsal import executed_lines as module
from ddpdoctor.probe.rehearsal.executed_lines import Lines

events = []
journal = SimpleNamespace(
    rank=0, user_code=UserCode(os.getcwd()), event=lambda kind, **fields: events.append([kind, fields])
)
lines = Lines(journal)


def begin():
    lines.start_before_torch()
    lines.training_begins()


def count(numbers):
    total = 0
    for number in numbers:
        if number < 0:
            total = -1  # never
        total += number
    return total


def fetch():
    return "by a thread"


def late():
    return "after the fork"

BODY
lines.close()
print(json.dumps([events, [first for first in (count.__code__.co_firstlineno,)]]))
"""


def _events(tmp_path: Path, body: str) -> tuple[list[tuple[str, dict[str, object]]], int, list[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("ROOT", repr(str(ROOT))).replace("BODY", body))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events, (first,) = json.loads(done.stdout.splitlines()[-1])
    return [(kind, fields) for kind, fields in events], first, script.read_text().splitlines()


def _run(events: list[tuple[str, dict[str, object]]], source: list[str]) -> set[str]:
    numbers = [line for kind, fields in events if kind == "lines" for line in fields["lines"]]  # type: ignore[attr-defined]
    return {source[number - 1].strip() for number in numbers}


def test_each_line_is_noted_once_in_threads_too_and_never_in_a_forked_child(tmp_path: Path) -> None:
    events, _, source = _events(
        tmp_path,
        """
begin()
count(range(10))
count(range(10))
thread = threading.Thread(target=fetch)
thread.start()
thread.join()
child = os.fork()
if not child:
    known = len(lines._new)
    late()
    os._exit(7 if sys.gettrace() is None and len(lines._new) == known else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""",
    )
    run = _run(events, source)
    assert {"total += number", 'return "by a thread"'} <= run
    assert not {"total = -1  # never", 'return "after the fork"'} & run
    assert [kind for kind, _ in events if kind != "lines"] == ["lines_begun"]


def test_of_a_function_that_runs_on_and_on_only_its_beginning_is_known(tmp_path: Path) -> None:
    events, first, source = _events(tmp_path, "module.PATIENCE = 50\nbegin()\ncount(range(1000))\n")
    assert "total += number" in _run(events, source)
    left = [line for kind, fields in events if kind == "lines" for line in fields["unwatched"]]  # type: ignore[attr-defined]
    assert left == ([] if hasattr(sys, "monitoring") else [first])


def test_another_tracer_keeps_its_place(tmp_path: Path) -> None:
    own = "own = lambda frame, event, argument: None\nsys.settrace(own)\nbegin()\nassert sys.gettrace() is own\n"
    lost = [fields["reason"] for kind, fields in _events(tmp_path, own)[0] if kind == "lines_lost"]
    later = "begin()\nsys.settrace(lambda frame, event, argument: None)\n"
    lost += [fields["reason"] for kind, fields in _events(tmp_path, later)[0] if kind == "lines_lost"]
    free = hasattr(sys, "monitoring")
    assert lost == ([] if free else ["another tool traces the script", "the script set a tracer of its own"])
