"""What each page looks like in each state of a run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.monitor.snapshot import Snapshot
from tests.demo.job import demo_snapshot
from tests.tui import runs
from tests.tui.golden import GOLDEN, assert_picture, assert_text
from tests.tui.screens import UTF8, lines_of, opened, text_of

LIGHT = UTF8 | {"COLORFGBG": "0;15"}
PLAIN = {"TERM": "linux", "LANG": "C"}
ROOT = Path(__file__).parents[2]
PICTURES: dict[str, tuple[Callable[[], Snapshot], str, tuple[int, int], dict[str, str]]] = {
    "overview-healthy": (runs.snapshot, "1", (120, 36), UTF8),
    "overview-straggler": (runs.straggler, "1", (120, 36), UTF8),
    "overview-input-bound": (runs.input_bound, "1", (120, 36), UTF8),
    "overview-exposed": (runs.exposed, "1", (120, 36), UTF8),
    "overview-wide": (runs.straggler, "1", (240, 60), UTF8),
    "overview-light": (runs.straggler, "1", (120, 36), LIGHT),
    "overview-plain": (runs.straggler, "1", (80, 24), PLAIN),
    "overview-without-gpus": (runs.without_gpus, "1", (100, 30), UTF8),
    "overview-one-rank": (runs.one_rank, "1", (100, 30), UTF8),
    "overview-waiting": (runs.waiting, "1", (100, 30), UTF8),
    "ranks-straggler": (runs.straggler, "2", (120, 30), UTF8),
    "ranks-512": (runs.many_ranks, "2", (120, 30), UTF8),
    "ranks-small": (runs.straggler, "2", (80, 24), UTF8),
    "ranks-wide": (runs.straggler, "2", (200, 30), UTF8),
    "rank": (runs.straggler, "2 enter", (120, 30), UTF8),
    "communication": (runs.snapshot, "3", (120, 24), UTF8),
    "communication-slow-link": (runs.exposed, "3", (80, 24), UTF8),
    "gpus-cards": (runs.straggler, "4", (124, 30), UTF8),
    "gpus-lines": (runs.straggler, "4", (80, 24), UTF8),
    "gpus-none": (runs.without_gpus, "4", (80, 24), UTF8),
    "findings": (runs.exposed, "5", (120, 30), UTF8),
    "finding": (runs.exposed, "5 enter", (100, 30), UTF8),
    "stall": (runs.stalled, "", (120, 30), UTF8),
    "stall-small": (runs.stalled, "", (80, 24), UTF8),
    "stall-light": (runs.stalled, "", (120, 30), LIGHT),
    "stall-none": (runs.snapshot, "6", (80, 24), UTF8),
    "help": (runs.snapshot, "?", (120, 24), UTF8),
    "overview-140-light": (runs.straggler, "1", (140, 40), LIGHT),
    "overview-100-no-color": (runs.straggler, "1", (100, 30), UTF8 | {"NO_COLOR": "1"}),
    "overview-80-dark": (runs.straggler, "1", (80, 24), UTF8),
    "overview-60-ascii": (runs.straggler, "1", (60, 20), {"TERM": "xterm-256color", "LANG": "C"}),
    **{
        f"{page}-narrow": (build, keys, (60, 20), UTF8)
        for page, build, keys in (
            ("ranks", runs.straggler, "2"),
            ("communication", runs.exposed, "3"),
            ("findings", runs.exposed, "5"),
            ("stall", runs.stalled, ""),
        )
    },
}


IN_COLOUR = {
    "overview-light",
    "overview-100-no-color",
    "stall-light",
    *re.findall(r"screens/([\w-]+)\.svg", (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")),
}
"""What the site shows, and what is about colours, is kept as a picture; of the others the text."""


async def draw(
    snapshot: Snapshot, keys: str, size: tuple[int, int], environment: dict[str, str]
) -> tuple[str, list[str]]:
    """The picture and the lines after some keys."""
    source = runs.Still(snapshot)
    async with opened(source, size=size, environment=environment, explain=lambda code: EXPLANATION) as (app, pilot):
        for key in keys.split():
            await pilot.press({"?": "question_mark"}.get(key, key))
        await pilot.pause()
        assert "cannot be drawn" not in text_of(app)
        return app.export_screenshot(), lines_of(app)


EXPLANATION = "Communication is not hidden.\n\nWhat it finds\n    More than 10 % of the step.\n"


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_looks_as_it_did(name: str) -> None:
    build, keys, size, environment = PICTURES[name]
    picture, lines = asyncio.run(draw(build(), keys, size, environment))
    if name in IN_COLOUR:
        assert_picture(name, picture)
    else:
        assert_text(name, lines)


def test_the_picture_of_the_readme_is_what_the_demo_shows() -> None:
    snapshot = demo_snapshot(14_000_000_000, runs.NOW)
    assert_picture("overview", asyncio.run(draw(snapshot, "1", (112, 37), UTF8))[0], ROOT / "docs")


def test_no_golden_file_is_left_over() -> None:
    kept = {path.name for path in GOLDEN.iterdir() if ".new" not in path.name}
    assert kept == {f"{name}.svg" if name in IN_COLOUR else f"{name}.txt" for name in PICTURES}


def test_a_picture_names_no_machine_and_no_moment() -> None:
    for path in (*GOLDEN.glob("*.svg"), ROOT / "docs" / "overview.svg"):
        text = path.read_text()
        assert not re.search(r"terminal-\d", text)
        assert "/tmp" not in text and "https://cdn" not in text
