"""Gives a bad input to the command in a process of its own, and says what is wrong with the answer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.report.formats import FOR_PEOPLE, FORMATS
from tests.bad_inputs.case import ERROR, Case
from tests.check_command import ROOT
from tests.jobs_of_tests import kill_marked, marked

AT_MOST_S = 20.0
"""For one answer on a machine that does nothing else."""
HUNG_S = 120.0
MOST_LINES = 14
"""On stderr: an error, how the command is used, and a hint."""
DOCUMENTS = frozenset(FORMATS) - frozenset(FOR_PEOPLE)
_USUAL_S = 0.35
"""What ``ddpdoctor --version`` takes where nothing else runs."""
_OURS = re.compile(rb"Traceback \(most recent|defect of ddpdoctor|Exception ignored|Warning: |^  File \"", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """What came of one case."""

    code: int | None
    """None when it did not end."""
    seconds: float
    stderr: bytes
    problems: tuple[str, ...]


def slowness() -> float:
    """How many times slower this machine is now than one that does nothing else; at least 1."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "ddpdoctor", "--version"], cwd=ROOT, capture_output=True, check=True)
    return max(1.0, (time.monotonic() - began_s) / _USUAL_S)


def answered(make: Callable[[Path], Case], scratch: Path) -> tuple[Case, Answer]:
    """Make a case in a new directory below ``scratch``, run it, and judge the answer."""
    work, home, temporary = (scratch / name for name in ("work", "home", "tmp"))
    for directory in (work, home, temporary):
        directory.mkdir()
    case = make(work)
    before = _tree(work)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "DDPDOCTOR_"))},
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "TMPDIR": str(temporary),
    }
    for name, value in case.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    code, seconds, stderr = _run(case, work, scratch, marked(environment, scratch))
    problems = list(_problems(case, code, stderr))
    if case.deletes_directory:
        return case, Answer(code, seconds, stderr, tuple(problems))
    after = _tree(work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    left = sorted(name for name in changed if not _may_write(case, name))
    if left:
        problems.append(f"made, changed or removed {left[:3]}")
    if any(temporary.iterdir()) and not case.rehearses:
        problems.append(f"left {os.listdir(temporary)[:3]} in the temporary directory")
    return case, Answer(code, seconds, stderr, tuple(problems))


def _may_write(case: Case, name: str) -> bool:
    # A relative XDG_STATE_HOME or HOME is not taken, and a relative TMPDIR is the user's wish.
    return name in case.may_write or (name == "relative" and case.environment.get("TMPDIR") == "relative")


def _run(case: Case, work: Path, scratch: Path, environment: dict[str, str]) -> tuple[int | None, float, bytes]:
    """Exit code, seconds, and what stderr holds."""
    shell = " ".join(
        [
            *(['/bin/rm -rf "$PWD" &&'] if case.deletes_directory else []),
            'exec "$@"',
            *(f"{descriptor}{'<' if descriptor == 0 else '>'}&-" for descriptor in sorted(case.closed)),
        ]
    )
    arguments = [
        argument.encode("utf-8", "surrogateescape") if isinstance(argument, str) else argument
        for argument in case.arguments
    ]
    source = case.stdin if isinstance(case.stdin, Path) else Path(os.devnull)
    said, began_s = scratch / "stderr", time.monotonic()
    with source.open("rb") as stdin, said.open("wb") as stderr:
        process = subprocess.Popen(
            [shutil.which("sh") or "/bin/sh", "-c", shell, "sh", sys.executable, "-m", "ddpdoctor", *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.PIPE if isinstance(case.stdin, bytes) else stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            process.communicate(case.stdin if isinstance(case.stdin, bytes) else None, timeout=HUNG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kill_marked(scratch)
            return None, time.monotonic() - began_s, said.read_bytes()
        except BrokenPipeError:
            process.wait()
    return process.returncode, time.monotonic() - began_s, said.read_bytes()


def _problems(case: Case, code: int | None, stderr: bytes) -> Iterator[str]:
    if code is None:
        yield f"did not end within {HUNG_S:.0f} s"
        return
    if code not in case.allowed:
        yield f"exit code {code}, not one of {sorted(case.allowed)}"
    found = _OURS.search(stderr)
    if found:
        yield f"stderr holds {found.group().decode(errors='replace')!r}"
    if stderr.count(b"\n") > MOST_LINES and code == ERROR and b"Usage:" not in stderr:
        yield f"stderr has {len(stderr.splitlines())} lines"
    readable = case.environment.get("PYTHONIOENCODING") not in ("utf-16", "cp037") and 2 not in case.closed
    # A document says by itself why the script is not examined.
    readable = readable and not DOCUMENTS.intersection(case.arguments)
    if code == ERROR and readable and b"error: " not in stderr and b"Usage:" not in stderr:
        yield "exit code 2 without an error on stderr"


def _tree(work: Path) -> dict[str, tuple[int, int, int]]:
    """What lies in the working directory: kind and mode, size, time of change."""
    found = {}
    for directory, directories, files in os.walk(work):
        for name in (*directories, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            stamp = (
                (status.st_mode, 0, 0) if name in directories else (status.st_mode, status.st_size, status.st_mtime_ns)
            )
            found[os.path.relpath(path, work)] = stamp
    return found
