"""The screen shows an autopsy as it shows a run that stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ddpdoctor.autopsy import AutopsyRequest, autopsy
from ddpdoctor.monitor.autopsy_view import AutopsySource, snapshot_of
from tests.autopsy.test_logs import LOST, RAISED
from tests.tui.screens import opened, text_of


async def _shown(source: AutopsySource) -> str:
    async with opened(source) as (app, _):
        return text_of(app)


def test_the_first_cause_and_its_echo_are_on_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(LOST.format(mark="[rank0]: ") + RAISED.format(mark="[rank1]: "))
    examination = autopsy(AutopsyRequest(paths=(str(path),)))
    snapshot = snapshot_of(examination, 1)
    assert snapshot.stall is not None
    assert [(side.ranks, side.culprit) for side in snapshot.stall.sides] == [((1,), True), ((0,), False)]
    shown = asyncio.run(_shown(AutopsySource(examination)))
    assert "KeyError" in shown
    assert "data.py:12" in shown


def test_an_autopsy_without_a_cause_says_so() -> None:
    examination = autopsy(AutopsyRequest(paths=("-",)))
    snapshot = snapshot_of(examination, 1)
    assert (snapshot.stall, snapshot.verdict.state) == (None, "unknown")
