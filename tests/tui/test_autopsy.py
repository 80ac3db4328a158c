"""The screen shows an autopsy as it shows a run that stands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy, concluded
from ddpdoctor.autopsy.live_job import Seen, record_of
from ddpdoctor.launch.processes import RunningRank
from ddpdoctor.monitor.build_snapshot import AutopsySource, snapshot_of
from ddpdoctor.monitor.processes.stacks import Look
from ddpdoctor.postmortem.read import Postmortem
from tests.autopsy.test_live import BARRIER, at
from tests.autopsy.test_logs import LOST, RAISED
from tests.tui.screens import opened, text_of


async def _shown(source: AutopsySource, *keys: str) -> list[str]:
    """The page that comes up, and those behind the keys."""
    async with opened(source) as (app, pilot):
        pages = [text_of(app)]
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
            pages.append(text_of(app))
        return pages


def test_the_first_cause_and_its_echo_are_on_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(LOST.format(mark="[rank0]: ") + RAISED.format(mark="[rank1]: "))
    examination = autopsy(AutopsyRequest(paths=(str(path),)))
    snapshot = snapshot_of(examination, 1)
    assert snapshot.stall is not None
    assert [(side.ranks, side.culprit) for side in snapshot.stall.sides] == [((1,), True), ((0,), False)]
    (shown,) = asyncio.run(_shown(AutopsySource(examination)))
    assert "KeyError" in shown
    assert "data.py:12" in shown
    assert "ENDED" in shown
    assert "wait for" not in shown


def test_of_a_dead_job_no_page_tells_a_duration(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(LOST.format(mark="[rank0]: ") + RAISED.format(mark="[rank1]: "))
    source = AutopsySource(autopsy(AutopsyRequest(paths=(str(path),))))
    pages = asyncio.run(_shown(source, "1", "2", "5", "6"))
    assert not [page for page in pages if re.search(r"\bfor \d+ s|\b0 s\b|no figures yet", page)]
    assert all("AUTOPSY" in page for page in pages)
    assert re.search(r"KeyError at data.py:12.*first cause", pages[3])
    assert re.search(r"lost the connection.*followed", pages[3])


def test_a_job_that_hangs_now_is_shown_as_stalled_without_a_duration() -> None:
    seen = [
        Seen(RunningRank(rank=rank, pid=rank + 1), Look(frames=stack)) for rank, stack in enumerate((BARRIER, at(5)))
    ]
    record = record_of(seen)
    examination = concluded(AutopsyRequest(paths=()), Postmortem(record=record, processes=2), 0.1)
    (shown,) = asyncio.run(_shown(AutopsySource(examination)))
    assert "STALLED" in shown
    assert "rank 0 ──> waits for rank 1" in shown
    assert not re.search(r"\bfor \d+ s", shown)


def test_an_autopsy_without_a_cause_says_so() -> None:
    examination = autopsy(AutopsyRequest(paths=("-",)))
    snapshot = snapshot_of(examination, 1)
    assert (snapshot.stall, snapshot.verdict.state) == (None, "unknown")
