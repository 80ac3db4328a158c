"""Rehearses the training with some rows of the table in it, and judges what became of the user's machine."""

from __future__ import annotations

import functools
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import psutil

from tests.no_harm.way import Way
from tests.no_harm.world import World, changes, furnish, helper, slug, world

Mode = Literal["overlay", "no overlay"]
Verdict = Literal["held", "said", "lost"]
AT_MOST_S = 400
IN_AN_OVERLAY = "In an overlay: the files it wrote were discarded"
_OPTIONS = ("--no-equivalence", "--stall-after", "100", "--time-limit", "300")
"""Rows take time, more than a step does, on a machine that does other things."""


_OF_A_REFUSAL = ("DataLoader worker", "BrokenProcessPool", "DatabaseError: not authorized", "refused in")
"""What a row meets where the rehearsal has ended another process for it."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one way in one mode."""

    label: str
    mode: Mode
    verdict: Verdict
    why: str = ""


class Told(msgspec.Struct, kw_only=True):
    """What the ranks told about one row."""

    said: str | None = None
    """The exception that it met; None when it did not come to its end."""
    effect: bool = False
    made: list[str] = []
    """Further paths that it said it makes."""


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True):
    """One rehearsal."""

    exit_code: int
    text: str
    told: dict[str, Told]
    held: bool
    """Whether a row has waited for the user to act."""


@functools.cache
def modes() -> tuple[Mode, ...]:
    """The modes that this tree and this machine have."""
    return ("overlay", "no overlay") if _has_overlay() else ("no overlay",)


@functools.cache
def _has_overlay() -> bool:
    """Whether a rehearsal runs in an overlay where nothing else is asked for."""
    if "--no-overlay" not in _help():
        return False
    with world() as here:
        return IN_AN_OVERLAY in rehearse(here, (), "overlay").text


@functools.cache
def _help() -> str:
    command = [sys.executable, "-m", "ddpdoctor", "check", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def has_command(name: str) -> bool:
    """Whether the doctor has a command of this name."""
    command = [sys.executable, "-m", "ddpdoctor", name, "--help"]
    return subprocess.run(command, capture_output=True).returncode == 0


def options_for(mode: Mode) -> tuple[str, ...]:
    """The options of ``check`` that choose a mode."""
    return ("--no-overlay",) if mode == "no overlay" and "--no-overlay" in _help() else ()


def write_job(
    here: World, ways: Sequence[Way], name: str = "world", outside: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Put the training into the tree, and the rows that it is to do; they are told on the socket ``name``.

    ``outside`` are the names of what rows may reach beyond the rehearsal.
    """
    shutil.copy(Path(__file__).with_name("job.py"), here.tree / "train.py")
    (here.tree / "model.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))\n"
    )
    rows = [
        {"slug": slug(way), "at": str(here.folder(way)), "body": way.body, "suffix": way.suffix, "ranks": way.ranks}
        for way in ways
    ]
    asked: dict[str, object] = {
        "socket": str(here.root / name),
        "token": here.token,
        "helper": helper(),
        "outside": dict(outside),
    }
    asked["ways"] = rows
    (here.tree / f"{name}.json").write_text(json.dumps(asked))


@contextmanager
def listening(line: Path, answer: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Hear what the ranks tell, one after the other; they wait for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(line))
        server.listen(16)

        def hear() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    connection.settimeout(AT_MOST_S)
                    text = connection.makefile().readline()
                    if text:
                        answer(json.loads(text))
                        connection.sendall(b"go\n")

        thread = threading.Thread(target=hear, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def command_for(mode: Mode, *more: str) -> list[str]:
    """The command that rehearses the training in a mode."""
    return [sys.executable, "-m", "ddpdoctor", "check", *options_for(mode), *_OPTIONS, *more, "train.py"]


def line_to(here: World) -> tuple[str, ...]:
    """The option that lets the ranks tell what they do."""
    return ("--allow-socket", str(here.line))


def rehearse(
    here: World, ways: Sequence[Way], mode: Mode, *more: str, on_hold: Callable[[], None] = lambda: None
) -> Rehearsed:
    """Run ``check`` on the training with these rows; ``on_hold`` is called while a row waits."""
    if not (here.tree / "train.py").exists():
        write_job(here, ways)
    return perform(here, [*command_for(mode, *line_to(here), *more), "--", "world.json"], on_hold)


def perform(here: World, command: Sequence[str], on_hold: Callable[[], None] = lambda: None) -> Rehearsed:
    """Run a command that lets the training do its rows, and hear what they tell."""
    told: dict[str, Told] = {}
    current = ""
    held = False

    def answer(message: dict[str, Any]) -> None:
        nonlocal current, held
        if message["kind"] == "begun":
            current = message["way"]
            told.setdefault(current, Told())
        elif message["kind"] == "hold":
            held = True
            on_hold()
        elif message["kind"] == "made":
            told[current].made.append(message["path"])
        elif message["kind"] == "ended":
            # Outside of the main thread, the rehearsal leaves a process without a word.
            if told[message["way"]].said is None:
                told[message["way"]].said = f"status {message['status']}" if message["status"] else "refused"
        else:
            told[message["way"]].said = message["said"]
            told[message["way"]].effect = message["effect"]

    with listening(here.line, answer):
        done = subprocess.run(
            command,
            cwd=here.tree,
            env=here.environment,
            capture_output=True,
            text=True,
            timeout=AT_MOST_S,
        )
    here.line.unlink()
    text = " ".join((done.stdout + done.stderr).split())
    return Rehearsed(exit_code=done.returncode, text=text, told=told, held=held)


def judged(ways: Sequence[Way], mode: Mode, at_once: int) -> Iterator[Row]:
    """Every row's verdict; ``at_once`` rows share a rehearsal, and those that it did not come to have the next one."""
    pending = list(ways)
    while pending:
        together = pending[:at_once]
        rows, beyond = _judged_together(together, mode)
        reached = [way for way in together if slug(way) in rows]
        yield from (rows[slug(way)] for way in reached)
        if not reached:
            reached = together[:1]
            yield Row(label=reached[0].label, mode=mode, verdict="lost", why=beyond)
        elif beyond:
            yield Row(label=f"beside {', '.join(way.label for way in reached)}", mode=mode, verdict="lost", why=beyond)
        pending = [way for way in pending if way not in reached]


def _judged_together(ways: Sequence[Way], mode: Mode) -> tuple[dict[str, Row], str]:
    """The rows that one rehearsal came to, by slug, and what is wrong beside them."""
    with world() as here:
        for way in ways:
            furnish(here.folder(way), way.suffix)
        write_job(here, ways)
        before = here.snapshot()
        done = rehearse(here, ways, mode)
        alive = {process.pid: _described(process) for process in here.settled(2.0)}
        changed = changes(before, here.snapshot(), directory_times=mode == "overlay")
        rows = {}
        for way in ways:
            told = done.told.get(slug(way))
            if told is None or told.said is None:
                continue
            folder = here.folder(way)
            mine = {path for path in changed if Path(path).is_relative_to(folder) or path in told.made}
            harm = [f"{changed[path]} {_short(path, here)}" for path in sorted(mine)]
            harm += [f"new {path}" for path in told.made if path not in {*before, *changed} and Path(path).exists()]
            harm += [f"left {text}" for pid, text in alive.items() if f"{folder}" in text]
            changed = {path: what for path, what in changed.items() if path not in mine}
            alive = {pid: text for pid, text in alive.items() if f"{folder}" not in text}
            rows[slug(way)] = _row(way, mode, told, done, harm)
        beside = [f"{what} {_short(path, here)}" for path, what in sorted(changed.items())]
        beside += [f"left {text}" for text in alive.values()]
        if (fault := fault_of_rehearsal(done, mode)) or not rows:
            beside.append(fault or f"no row was reached: {done.text}")
        return rows, "; ".join(beside)


def _described(process: psutil.Process) -> str:
    """A process with its command line and where it is."""
    with suppress(psutil.Error, OSError):
        return f"{process.pid} {' '.join(process.cmdline())} in {process.cwd()}"
    return str(process.pid)


def _short(path: str, here: World) -> str:
    return path.removeprefix(f"{here.root}/")


def _row(way: Way, mode: Mode, told: Told, done: Rehearsed, harm: list[str]) -> Row:
    why = "; ".join(harm)
    if harm and mode == "no overlay" and way.by != "Python" and way.says and way.says in done.text:
        return Row(label=way.label, mode=mode, verdict="said", why=why)
    if harm:
        unnamed = "" if way.by == "Python" or mode == "overlay" else f" and {way.says!r} is not said: {done.text}"
        return Row(label=way.label, mode=mode, verdict="lost", why=why + unnamed)
    refused = told.said == "refused" or any(error in (told.said or "") for error in _OF_A_REFUSAL)
    if told.said and (mode == "overlay" or not refused):
        return Row(label=way.label, mode=mode, verdict="lost", why=f"it met {told.said}, so nothing was tried")
    if mode == "overlay" and way.effect and not told.effect:
        return Row(label=way.label, mode=mode, verdict="lost", why="it did nothing, so nothing was tried")
    return Row(label=way.label, mode=mode, verdict="held", why=told.said or "")


def fault_of_rehearsal(done: Rehearsed, mode: Mode) -> str:
    """What is wrong with the rehearsal itself: in an overlay it goes on to its end, whatever the rows do."""
    refused = any(told.said == "refused" for told in done.told.values())
    if mode == "overlay":
        if IN_AN_OVERLAY not in done.text:
            return f"the first line does not say {IN_AN_OVERLAY!r}: {done.text}"
        return "" if done.exit_code in (0, 1) else f"the rehearsal did not come to its end: {done.text}"
    if "Traceback" in done.text and "ddpdoctor" in done.text:
        return done.text
    wanted = (3,) if refused else (0, 1, 3)
    return "" if done.exit_code in wanted else f"exit code {done.exit_code}: {done.text}"
