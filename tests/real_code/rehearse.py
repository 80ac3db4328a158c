"""Measures the rehearsal on public training scripts: ``python -m tests.real_code.rehearse MIRROR --python PYTHON``.

MIRROR holds snapshots of the repositories, one ``OWNER+NAME/repo`` git directory each; PYTHON is of an environment that
has the packages which ``--packages`` lists. Versions that a README names and others do without are installed beside it,
below ``--pins``. Each script is started as its README says, in a copy that is thrown away, and nothing of it changes.
Prints a line for each start and the shares and medians; exits with 1 when one misses its bound. The scripts do run:
choose a machine on which that may be.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tests.check_command import with_our_tree
from tests.real_code.corpus import Missing, lay_out
from tests.scratch import scratch_directory

STARTS = Path(__file__).with_name("starts.json")
STEPS = 2
LEAST_SHARE, MOST_MEDIAN_S, MOST_S = 85.0, 30.0, 120.0
GIVEN_UP_AFTER_S = 600.0
"""Of one start; as much longer as each rehearsal may take, where a limit is given."""
CPU_LOOK_EVERY_S = 0.2


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A public training script and how its README starts it."""

    repo: str
    commit: str
    path: str
    """The script, from the root of the repository."""
    command: str
    """Everything behind ``ddpdoctor check``: the script with its arguments, or ``-- torchrun …``."""
    where: str = ""
    """Working directory, from the root of the repository."""
    packages: tuple[str, ...] = ()
    """What it needs beside torch."""
    pins: tuple[str, ...] = ()
    """Versions that its README or its requirements name, of packages that other starts need in another version."""
    cannot: str = ""
    """Why it trains on no machine as it is published; then the cause is all that a rehearsal can show."""

    @property
    def name(self) -> str:
        """Repository and path, as the table shows them."""
        return f"{self.repo}/{self.path}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one start."""

    start: Start
    steps: int = 0
    ranks: int = 0
    seconds: float = 0.0
    """Of the whole command."""
    cpu_seconds: float = 0.0
    """Of all its processes: on a machine that others use, the wall clock says little."""
    status: str = ""
    reason: str = ""
    exit_code: int = -1
    loud: tuple[str, ...] = ()
    """Errors and warnings that the run showed, in a line each."""
    notes: tuple[str, ...] = ()

    @property
    def trained(self) -> bool:
        """Every rank, two at least, reached two optimizer steps, or the one that the whole script makes."""
        return self.ranks >= 2 and self.steps >= (1 if self.status == "completed" else STEPS)


def read_starts() -> tuple[Start, ...]:
    """The table."""
    return msgspec.json.decode(STARTS.read_bytes(), type=tuple[Start, ...])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and what is behind it; return the exit code."""
    options = argparse.ArgumentParser(prog="python -m tests.real_code.rehearse")
    options.add_argument("mirror", type=Path, nargs="?")
    options.add_argument("--python", default=sys.executable, help="Interpreter of the ranks.")
    options.add_argument("--pins", type=Path, help="Install versions that single starts need here, and keep them.")
    options.add_argument("--only", default="", help="Only starts whose name contains one of these, by commas.")
    options.add_argument("--time-limit", help="Of each rehearsal, in seconds.")
    options.add_argument("--packages", action="store_true", help="Print what the starts need, and end.")
    options.add_argument("--json", type=Path, help="Write each outcome here, too.")
    chosen = options.parse_args(arguments)
    starts = [start for start in read_starts() if any(part in start.name for part in chosen.only.split(","))]
    python = os.path.abspath(chosen.python)
    options_of_check = ["--python", python, *(("--time-limit", chosen.time_limit) if chosen.time_limit else ())]
    if chosen.packages:
        print("\n".join(sorted({package for start in starts for package in start.packages})))
        return 0
    if chosen.mirror is None:
        options.error("MIRROR is missing")
    outcomes: list[Outcome] = []
    with scratch_directory() as scratch:
        for start in starts:
            pinned = install(start.pins, python, (chosen.pins or scratch / "pins").absolute())
            outcomes.append(run(start, chosen.mirror, scratch, options_of_check, pinned))
            print(line_of(outcomes[-1]), flush=True)
            if chosen.json:
                chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
    met = True
    for text, holds in figures(outcomes):
        print(text + ("" if holds else "  MISSED"))
        met = met and holds
    return 0 if met else 1


def install(pins: Sequence[str], python: str, directory: Path) -> Path | None:
    """The directory below ``directory`` with these versions, installed if need be; None where there are no pins.

    What the packages need themselves is not installed: the environment has it. Raises CalledProcessError.
    """
    if not pins:
        return None
    place = directory / hashlib.sha256("\n".join(sorted(pins)).encode()).hexdigest()[:12]
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
        subprocess.run([*pip, *pins], check=True, stdout=sys.stderr)
        unfinished.rename(place)
    return place


def run(start: Start, mirror: Path, scratch: Path, options: Sequence[str], pinned: Path | None = None) -> Outcome:
    """Lay the repository out, examine the script there, and take everything away again."""
    place = scratch / "repository"
    try:
        lay_out(mirror, start.repo, start.commit, place, texts_only=False)
    except Missing as missing:
        return Outcome(start=start, status="missing", reason=str(missing))
    # As in a clone: the root of a project is found by it.
    (place / ".git").mkdir(exist_ok=True)
    began, cpu_time = time.monotonic(), CpuTime()
    try:
        report, exit_code, said = _examined(start, place, scratch, options, pinned, cpu_time)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    seconds, cpu_seconds = time.monotonic() - began, cpu_time.seconds
    if report is None:
        return Outcome(
            start=start,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            status="no report",
            reason=said[-300:],
            exit_code=exit_code,
        )
    rehearsal = report["rehearsal"]
    return Outcome(
        start=start,
        steps=rehearsal["steps"],
        ranks=rehearsal["ranks"],
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        status=rehearsal["status"],
        reason=rehearsal["reason"],
        exit_code=exit_code,
        loud=tuple(_loud(report["findings"])),
        notes=tuple(rehearsal["notes"]),
    )


class CpuTime:
    """Adds up the processor time of a process and of all that it starts, which may be gone when it ends."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._over = threading.Event()

    @contextlib.contextmanager
    def watch(self, pid: int) -> Iterator[None]:
        """Look several times a second, until the context is left."""
        thread = threading.Thread(target=self._look, args=(pid,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    @property
    def seconds(self) -> float:
        """Of all processes together."""
        return sum(self._seconds.values())

    def _look(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            while not self._over.wait(CPU_LOOK_EVERY_S):
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        self._seconds[process.pid] = times.user + times.system


def _examined(
    start: Start, place: Path, scratch: Path, options: Sequence[str], pinned: Path | None, cpu_time: CpuTime
) -> tuple[dict[str, Any] | None, int, str]:
    home = scratch / "home"
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ddpdoctor", "check", "--no-equivalence", "--output-format", "json", *options]
    path = os.pathsep.join((str(Path(options[1]).parent), os.environ.get("PATH", "")))
    environment = with_our_tree(HOME=str(home), XDG_STATE_HOME=str(home / "state"), PATH=path)
    if pinned is not None:
        environment["PYTHONPATH"] = os.pathsep.join((str(pinned), environment["PYTHONPATH"]))
    given_up_after_s = GIVEN_UP_AFTER_S
    if "--time-limit" in options:
        given_up_after_s += float(options[options.index("--time-limit") + 1])
    process = subprocess.Popen(
        [*command, *shlex.split(start.command)],
        cwd=place / start.where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, cpu_time.watch(process.pid):
        try:
            output, errors = process.communicate(timeout=given_up_after_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            return None, -1, f"not over after {given_up_after_s:g} s"
    report = json.loads(output) if output.startswith("{") else None
    return report, process.returncode, errors or output


def _loud(findings: Sequence[dict[str, Any]]) -> Iterator[str]:
    for finding in findings:
        if finding["severity"] != "advice" and set(finding["basis"]) != {"source"}:
            place: dict[str, Any] = next(iter(finding["locations"]), {})
            yield f"{finding['severity']} {finding['code']} {place.get('file')}:{place.get('line')} {finding['title']}"


def line_of(outcome: Outcome) -> str:
    """One start, and below it what ended it early and what was found."""
    mark = "ok  " if outcome.trained else "FAIL"
    times = f"{outcome.seconds:6.1f} s ({outcome.cpu_seconds:5.1f} s CPU)"
    head = f"{mark} {times} {outcome.steps:3} steps {outcome.status:10} {outcome.start.name}"
    below = [f"exit {outcome.exit_code}: {outcome.reason}"] if outcome.reason else []
    below += [f"it cannot train: {outcome.start.cannot}"] if outcome.start.cannot else []
    return "\n".join([head, *(f"       {text}" for text in (*below, *outcome.notes, *outcome.loud))])


def figures(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, bool]]:
    """The measured figures in words, and whether they keep their bounds."""
    able = [one for one in outcomes if not one.start.cannot]
    trained = sum(one.trained for one in able)
    share = 100.0 * trained / max(1, len(able))
    yield (
        f"reached {STEPS} steps on every rank: {trained} of {len(able)}, {share:.0f} %, bound {LEAST_SHARE:g} %",
        share >= LEAST_SHARE,
    )
    yield f"train on no machine as they are published: {len(outcomes) - len(able)}", True
    seconds = [one.seconds for one in outcomes] or [0.0]
    median, worst = statistics.median(seconds), max(seconds)
    cpu_s = statistics.median([one.cpu_seconds for one in outcomes] or [0.0])
    yield f"median {median:.1f} s ({cpu_s:.1f} s CPU), bound {MOST_MEDIAN_S:g} s", median < MOST_MEDIAN_S
    yield f"worst {worst:.1f} s, bound {MOST_S:g} s", worst < MOST_S
    said = all(one.reason for one in outcomes if not one.trained)
    yield f"every failure is said with its cause: {'yes' if said else 'no'}", said


if __name__ == "__main__":
    sys.exit(main())
