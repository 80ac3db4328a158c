"""Runs the training of a row, plain or watched, in a world of its own, and notes all that came of it."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from ddpdoctor.record import layout
from tests.jobs_of_tests import kill_marked, marked
from tests.tui.terminals import Terminal

JOB = Path(__file__).with_name("job.py")
ENDS_WITHIN_S = 120.0
SETTLES_S = 8.0
"""Orphans of a killed launcher and helpers of torch may take so long to leave on an idle machine."""
LEAVES_WITHIN_S = 5.0
"""The screen closes so soon after ``q``, or has not heard it."""
STARTS_S = 3.0
"""About how long a training takes to its first step on an idle machine."""
SHARE_OF_START = 0.2
"""The share of random moments that lie before the first step."""
_OF_A_RUN = re.compile(r"[0-9a-f-]{36}|_[a-z0-9_]{8}\b|\d+")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, and what it may come to."""

    name: str
    act: Callable[[Running], None] | None = None
    """What is done from outside while the job runs."""
    first: str = ""
    """Python that each rank executes before torch is imported …"""
    inside: str = ""
    """… at a random step …"""
    last: str = ""
    """… and after its last step."""
    before: str = ""
    """Lines of bash that are executed first …"""
    turns: str = "exec"
    """… the words with which the command takes the place of the shell …"""
    streams: str = ""
    """… and its redirections."""
    namespaces: tuple[str, ...] = ()
    """Options of ``unshare``."""
    variables: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    """Options of the interpreter that runs the doctor …"""
    rank_options: tuple[str, ...] = ()
    """… and of that which runs the ranks."""
    around: tuple[str, ...] = ()
    """Words before the launcher."""
    profile: tuple[str, ...] = ()
    """Options of ``profile``."""
    launcher: Literal["torchrun", "shell"] = "torchrun"
    screen: Literal["", "plain", "screen"] = ""
    """In a terminal: with plain lines, or with the screen."""
    place: str = "work"
    """Name of the directory where the job is started."""
    script: str = "job.py"
    ranks: int = 2
    steps: int = 100
    runs: int = 0
    """How often it is played where not otherwise said; 0 for the usual number."""
    bare: Literal["undisturbed", "likewise"] = "undisturbed"
    """What it is compared with: a plain run, or one that met the same."""
    trains: Literal["on", "may end"] = "on"
    """Whether the training must come to its end; where it does, its result is the same in any case."""
    says: str = ""
    """An expression for what the doctor has to say."""
    verdicts: tuple[str, ...] = ("HEALTHY", "SLOW", "UNKNOWN")
    """With which word it may judge; none where it cannot."""
    keeps: Literal["run", "any", "none"] = "run"
    """What the state directory holds afterwards: the run, whatever the fault left, or nothing."""
    answers_nobody: bool = False
    """No one can read exit code or talk: the doctor or its terminal is gone."""


def is_possible(row: Row) -> bool:
    """Return whether this machine and user can do to a job what the row does."""
    return not (row.namespaces and os.geteuid()) and not ("gcc" in row.before and shutil.which("gcc") is None)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    exit_code: int | None
    """None where nobody could see it."""
    digests: tuple[str, ...]
    """Of the ranks that came to their end."""
    printed: Counter[bytes]
    talk: str
    answered_s: float
    """From the end of the training, or from when it was asked to end, to the end of the command."""
    left_processes: tuple[str, ...]
    left_files: Counter[str]
    """Beside the job's own, outside of the state directory."""
    kept: tuple[str, ...]
    """Files in the state directory."""
    fault: str
    """What could not be done; empty when all was."""
    runs: tuple[Path, ...]


class Running:
    """One job that runs, plain or watched."""

    def __init__(self, row: Row, folder: Path, chance: random.Random, *, watched: bool) -> None:
        self.row, self.folder, self.chance, self.watched = row, folder, chance, watched
        self.out, self.state = folder / "out", folder / "state"
        self.asked_s = 0.0
        """When the job was asked to end."""
        self.terminal: Terminal | None = None
        self._left_s = 0.0
        self._known: dict[str, int] = {}
        self.is_gone = False
        """The terminal was closed."""
        for name in ("out", "state", "tmp", "home", "seen", row.place):
            (folder / name).mkdir(exist_ok=True)
            (folder / name).chmod(0o777)
        (folder / row.place / row.script).write_text(JOB.read_text())
        environment = self._environment()
        words = self._words()
        if row.screen:
            self.terminal = Terminal(
                ("--norc", "--noprofile", "-i"), environment, folder / row.place, program=("bash",)
            )
            self.process = self.terminal.process
            self.terminal.send(shlex.join(words) + "\n")
            return
        with open(folder / "seen/stdout", "wb") as out, open(folder / "seen/stderr", "wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=folder / row.place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        folder, row = self.folder, self.row
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "TERM", "LD_LIBRARY_PATH")}
        given = {"FAULT_FIRST": row.first, "FAULT": row.inside, "FAULT_LAST": row.last, **row.variables}
        names = {"FOLDER": f"{folder}", "OUT": f"{self.out}", "PYTHON": sys.executable}
        own = {
            "HOME": f"{folder / 'home'}",
            "TMPDIR": f"{folder / 'tmp'}",
            "XDG_STATE_HOME": f"{self.state}",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "HISTFILE": "",
        }
        filled = {name: value.replace("$FOLDER", f"{folder}") for name, value in given.items()}
        return marked({**kept, **own, **names, **filled}, folder)

    def _words(self) -> list[str]:
        row = self.row
        fault_step = self.chance.randrange(row.steps)
        job = [
            *row.around,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={row.ranks}",
        ]
        job += ["--no-python", "--", sys.executable, *row.rank_options] if row.rank_options else ["--"]
        job += [row.script, f"{self.out}", f"{row.steps}", f"{fault_step}"]
        if row.launcher == "shell":
            job = ["sh", "-c", '"$@"; code=$?; echo $code > "$OUT/exit"; exit $code', "sh", *job]
        if self.watched:
            plain = [] if row.screen == "screen" else ["--no-tui"]
            job = [sys.executable, *row.options, "-m", "ddpdoctor", "profile", *plain, *row.profile, "--", *job]
        if row.before or row.streams or row.turns != "exec":
            job = ["bash", "-c", f'{row.before}\n{row.turns} "$@" {row.streams}', "bash", *job]
        return ["unshare", *row.namespaces, *job] if row.namespaces else job

    def processes(self) -> Iterator[psutil.Process]:
        """Every process of this world."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TESTED_IN") == f"{self.folder}" and process.status() != "zombie":
                    yield process

    def pid_of(self, who: str) -> int:
        """Process id of the ``monitor`` (of a plain job its launcher), the ``launcher``, or ``rank N``."""
        if who.startswith("rank"):
            path = self.out / f"pid.{who.split()[1]}"
            self.wait(path.exists, f"{who} to start")
            return int(path.read_text())
        found: list[int] = []

        def looks() -> bool:
            found.clear()
            for process in self.processes():
                with suppress(psutil.Error):
                    words = process.cmdline()
                    is_monitor = "profile" in words
                    is_launcher = (
                        "torch.distributed.run" in words and not is_monitor and "RANK" not in process.environ()
                    )
                    if words[0] == sys.executable and (
                        is_monitor if who == "monitor" and self.watched else is_launcher
                    ):
                        found.append(process.pid)
            return bool(found)

        self.wait(looks, f"the {who} to start")
        return found[0]

    def signal(self, who: str, *numbers: int) -> None:
        """Send signals; to one that is gone nothing."""
        pid = self._known.get(who) or self.pid_of(who)
        self._known[who] = pid
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Wait for a condition; an AssertionError when it does not come, or the command has ended before."""
        until_s = time.monotonic() + seconds
        while not holds():
            over = self.process.poll() is not None and not holds()
            assert time.monotonic() < until_s and not over, f"waited in vain for {what}"
            time.sleep(0.01)

    def reach(self, share_of_start: float = SHARE_OF_START) -> None:
        """Come to a random moment of the job: before its first step, or in any of them."""
        moment = self.chance.random()
        if moment < share_of_start:
            time.sleep(moment / share_of_start * STARTS_S)
            return
        step = int((moment - share_of_start) / (1 - share_of_start) * self.row.steps * 0.9)
        self.wait(lambda: self.step() >= step, f"step {step}")
        time.sleep(self.chance.random() * 0.03)

    def step(self) -> int:
        """Number of the newest step of all ranks; -1 before the first."""
        try:
            return int((self.out / "step.0").read_text())
        except (OSError, ValueError):
            return -1

    def status(self, pid: int) -> str:
        """How a process is, in the words of psutil."""
        return str(psutil.Process(pid).status())

    def digests(self) -> tuple[str, ...]:
        """Return the digests of the ranks that have trained to the end."""
        return tuple(path.read_text() for path in sorted(self.out.glob("hash.?*")) if path.suffix != ".part")

    def run_directory(self) -> Path:
        """Return the directory of the run, once it is there."""
        self.wait(lambda: bool(self.runs()), "the run directory")
        return self.runs()[0]

    def runs(self) -> list[Path]:
        """Return every run directory in this world."""
        return [path.parent for path in self.folder.rglob(layout.JOB_FILE)]

    def hang_up(self) -> None:
        """Close the terminal."""
        assert self.terminal is not None
        self.is_gone = True
        self.terminal.hang_up()

    def end(self, fault: str) -> Outcome:
        """Wait until all is over, and note what came of it."""
        code: int | None = None
        try:
            code = self._await_end()
            answered_s = time.time()
            self._await_orphans()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            fault, answered_s = fault or str(error), time.time()
        running = {process.pid: " ".join(process.cmdline()) for process in self.processes()}
        kill_marked(self.folder)
        self.process.wait()
        ended_s = self.asked_s or max((path.stat().st_mtime for path in self.out.glob("hash.*")), default=answered_s)
        printed, talk = self._streams()
        # Ranks that wait for a killed launcher's store do so without the doctor, too; the user is told.
        told = {int(pid) for pids in re.findall(r"`kill ([\d ]+)` ends them", talk) for pid in pids.split()}
        left = tuple(sorted(words for pid, words in running.items() if pid not in told))
        return Outcome(
            exit_code=code,
            digests=self.digests(),
            printed=printed,
            talk=talk,
            answered_s=answered_s - ended_s,
            left_processes=left,
            left_files=Counter(self._left_files()),
            kept=tuple(sorted(f"{path.relative_to(self.state)}" for path in self.state.rglob("*") if path.is_file())),
            fault=fault,
            runs=tuple(self.runs()),
        )

    def _await_end(self) -> int | None:
        if self.terminal is None:
            code = self.process.wait(ENDS_WITHIN_S)
            return 128 - code if code < 0 else code
        if self.is_gone:
            self.process.wait(ENDS_WITHIN_S)
            return None
        if self.row.screen == "screen" and self.watched:
            # Not for the launcher, which may have ended while its monitor stood still.
            started = self.out / "pid.0"
            self.wait(lambda: started.exists() or bool(psutil.Process(self.process.pid).children()), "the job to start")
            self.terminal.until_true(self._leaves_screen, "the end of the screen")
        shell = psutil.Process(self.process.pid)
        self.wait(lambda: not shell.children(), "the command", ENDS_WITHIN_S)
        self.terminal.send('echo "code is $?."\n')
        self.terminal.until_true(lambda: "code is " in self.terminal_text(), "the exit code")
        match = re.search(r"code is (\d+)\.", self.terminal_text())
        self.terminal.send("exit\n")
        self.process.wait(ENDS_WITHIN_S)
        return int(match[1]) if match else None

    def _leaves_screen(self) -> bool:
        assert self.terminal is not None
        if not psutil.Process(self.process.pid).children():
            return True
        if "  exit code " in self.terminal.text() and time.monotonic() - self._left_s > LEAVES_WITHIN_S:
            self._left_s = time.monotonic()
            self.terminal.send("q")
        return False

    def terminal_text(self) -> str:
        """What stands on the terminal after the command was typed, without the lines that were typed."""
        assert self.terminal is not None
        return self.terminal.text().replace('echo "code is $?."', "")

    def _await_orphans(self) -> None:
        began_s = settles_s = time.monotonic()
        while (found := list(self.processes())) and time.monotonic() - settles_s < _settles_s():
            # Ranks whose doctor was killed train on, for long on a busy machine.
            if len(self.digests()) < self.row.ranks and time.monotonic() - began_s < ENDS_WITHIN_S:
                with suppress(psutil.Error):
                    if any("RANK" in process.environ() for process in found):
                        settles_s = time.monotonic()
            time.sleep(0.05)

    def _streams(self) -> tuple[Counter[bytes], str]:
        seen = self.folder / "seen"
        if self.terminal is not None:
            printed = self.terminal.written
            for path in self.state.rglob("*output*"):
                printed += path.read_bytes()
            return Counter(line.strip() for line in printed.split(b"\n") if b"rank " in line), self.terminal_text()
        printed = (seen / "stdout").read_bytes()
        return Counter(printed.split(b"\n")), (seen / "stderr").read_text(errors="backslashreplace")

    def _left_files(self) -> Iterator[str]:
        for name in ("home", "tmp", self.row.place):
            for path in (self.folder / name).rglob("*"):
                # A killed process of torch leaves its empty cache, which others remove.
                if not path.name.startswith("torchinductor_"):
                    yield _OF_A_RUN.sub("N", f"{path.relative_to(self.folder)}")


def _settles_s() -> float:
    # At a load of 18 on two cores torchrun was still there 8 s after its ranks in 16 of 20 runs.
    return SETTLES_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def play(row: Row, folder: Path, seed: str, *, watched: bool) -> Outcome:
    """Run the job of a row once in ``folder``, which is empty; ``seed`` chooses the moments."""
    folder.chmod(0o777)
    running = Running(row, folder, random.Random(seed), watched=watched)
    fault = ""
    try:
        if row.act is not None and (watched or row.bare == "likewise"):
            row.act(running)
    except (AssertionError, OSError) as error:
        fault = str(error) or type(error).__name__
    return running.end(fault)
