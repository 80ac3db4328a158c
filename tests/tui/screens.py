"""Drives the application in a terminal that is not there, and reads what is on it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from ddpdoctor.monitor.snapshot import Playback, SnapshotSource
from ddpdoctor.tui.app import DoctorApp, ScreenEnd

UTF8 = {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
LIMIT_S = 90.0


@asynccontextmanager
async def opened(
    source: SnapshotSource,
    *,
    size: tuple[int, int] = (120, 36),
    environment: Mapping[str, str] = UTF8,
    playback: Playback | None = None,
    explain: Callable[[str], str] = lambda code: "",
    export_directory: Path | None = None,
) -> AsyncIterator[tuple[DoctorApp, Pilot[ScreenEnd]]]:
    """The application with its first snapshot on display."""
    app = DoctorApp(
        source, playback=playback, explain=explain, environment=environment, export_directory=export_directory
    )
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app._timeline.shown is not None or "no updates" in text_of(app))
        yield app, pilot


async def until(pilot: Pilot[ScreenEnd], holds: Callable[[], bool]) -> None:
    """Wait for a condition; fail after a generous time."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < LIMIT_S, text_of(pilot.app)
        await pilot.pause(0.02)
    await pilot.pause()


def lines_of(app: object) -> list[str]:
    """The lines on the screen, as they were sent to the terminal."""
    assert isinstance(app, DoctorApp)
    return [strip.text for strip in app.screen._compositor.render_strips()]


def text_of(app: object) -> str:
    """All lines in one string."""
    return "\n".join(lines_of(app))
