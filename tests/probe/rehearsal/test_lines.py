"""The lines that a process runs, watched by whatever this Python offers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
