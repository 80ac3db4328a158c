"""Tries every way out, without the doctor and in a rehearsal, and judges what was reached outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Literal

from tests.launch.box.conftest import WITHOUT_POWER
from tests.no_harm.escapes.outside import Outside, outside
from tests.no_harm.escapes.rows import ESCAPES, Escape
from tests.no_harm.rehearsal import Mode, Rehearsed, Row, command_for, line_to, perform, write_job
from tests.no_harm.world import slug, world

Powers = Literal["root", "user"]
TOGETHER = 30
SETTLES_WITHIN_S = 3.0
"""What was asked for at the very end, as keys that were sent to a terminal, may take so long."""
_SAID = "Not isolated: it "


def escapes(mode: Mode | Literal["bare"], powers: Powers, only: str = "") -> Iterator[Row]:
    """Every way that this machine has, in a mode; ``bare`` is without the doctor, where each must reach something."""
    pending = [escape for escape in ESCAPES if escape.is_here and only in escape.name]
    if powers == "user":
        pending = [escape for escape in pending if not escape.root]
    while pending:
        together = pending[:TOGETHER]
        rows = _tried(together, mode, powers)
        yield from (rows[escape.name] for escape in together if escape.name in rows)
        left = [escape for escape in together if escape.name not in rows]
        if len(left) == len(together):
            yield Row(label=_label(left[0], powers), mode="overlay", verdict="lost", why="it was not come to")
            left = left[1:]
        pending = left + pending[TOGETHER:]


def _label(escape: Escape, powers: Powers) -> str:
    return f"escape as {powers}: {escape.name}"


def _tried(together: Sequence[Escape], mode: Mode | Literal["bare"], powers: Powers) -> dict[str, Row]:
    with world() as here, outside(here, {program for escape in together for program in escape.needs}) as there:
        ways = [escape.way for escape in together]
        for way in ways:
            here.folder(way).mkdir()
        write_job(here, ways, outside=there.names)
        if mode == "bare":
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "1",
                "train.py",
            ]
        else:
            command = command_for(mode, *line_to(here))
        within = WITHOUT_POWER if powers == "user" else []
        done = perform(here, [*within, *command, *(() if mode == "bare" else ("--",)), "world.json"])
        return {
            escape.name: _row(escape, mode, powers, done, _is_reached(escape, there, done))
            for escape in together
            if (told := done.told.get(slug(escape.way))) is not None and told.said is not None
        }


def _is_reached(escape: Escape, there: Outside, done: Rehearsed) -> bool:
    deadline = time.monotonic() + SETTLES_WITHIN_S
    told = done.told[slug(escape.way)]
    if escape.by_end:
        return told.said == ""
    # One that met an error has asked for nothing that could still come.
    while not told.said and time.monotonic() < deadline:
        if _marked(escape, there):
            return True
        time.sleep(0.05)
    return _marked(escape, there)


def _marked(escape: Escape, there: Outside) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        return (there.marks / slug(escape.way)).exists() or there.reached.get(escape.name, bool)()
    return False


def _row(escape: Escape, mode: Mode | Literal["bare"], powers: Powers, done: Rehearsed, reached: bool) -> Row:
    said = done.told[slug(escape.way)].said or ""
    label = _label(escape, powers)
    if mode == "bare":
        return Row(label=label, mode="no overlay", verdict="said" if reached else "held", why=said)
    if reached:
        named = mode == "no overlay" and _SAID in done.text and "could reach" in done.text
        return Row(label=label, mode=mode, verdict="said" if named else "lost", why=f"it reached out: {done.text}")
    return Row(label=label, mode=mode, verdict="held", why=said)
