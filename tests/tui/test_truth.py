"""Ages are told, what is not known is a dash, and hostile text does no harm in any field."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.tui.screens.pages import PAGES, paint_screen
from ddpdoctor.tui.timeline import Timeline
from ddpdoctor.tui.view import View
from tests.tui import runs
from tests.tui.screens import lines_of, opened, text_of, until

EVIL = (
    "\x1b[2J\x1b]0;owned\x07\x9b31m[bold red]x[/] {0} \u202egnp.exe \u05e9\u05dc \U0001f468\u200d\U0001f469 "
    + "n" * 10_000
)
SIZES = ((80, 24), (120, 36), (240, 60))


def painted(snapshot: Snapshot, page: str, width: int = 120, height: int = 36, **changed: Any) -> list[str]:
    painting = paint_screen(View(snapshot=snapshot, page=page, **changed), width, height)
    return ["".join(cell.text for cell in cells) for cells in painting.lines]


def roles(snapshot: Snapshot, page: str, word: str) -> set[str]:
    painting = paint_screen(View(snapshot=snapshot, page=page), 120, 36)
    return {cell.role.rstrip("!") for cells in painting.lines for cell in cells if word in cell.text}


def aged(seconds: float) -> Snapshot:
    """A run whose newest step is that old."""
    at_ns = runs.NOW - int(seconds * runs.S)
    ranks = tuple(msgspec.structs.replace(rank, measured_at_ns=at_ns) for rank in runs.snapshot().ranks)
    return runs.snapshot(measured_at_ns=at_ns, ranks=ranks)


@pytest.mark.parametrize("page", ["overview", "ranks"])
def test_figures_dim_after_3_s_and_say_their_age_after_10_s(page: str) -> None:
    figure = "216 ms"
    assert "dim" not in roles(aged(2.9), page, figure)
    assert roles(aged(3.1), page, figure) == {"dim"}
    assert not any("s old ─" in line for line in painted(aged(9.9), page))
    assert any("11 s old ─" in line for line in painted(aged(11.2), page))


def test_what_could_not_be_seen_is_said() -> None:
    noted = runs.snapshot(notes=("3 lines of the record are damaged",))
    assert any(
        "not seen" in line and "3 lines of the record are damaged" in line for line in painted(noted, "overview")
    )


def test_figures_of_a_job_that_has_ended_stay_and_are_called_final() -> None:
    over = msgspec.structs.replace(aged(60.0), state="ended", ended_at_ns=runs.NOW - 60 * runs.S, exit_code=3)
    lines = painted(over, "overview")
    assert "ended 11 min 34 s  exit code 3  final figures" in lines[0]
    assert "dim" not in roles(over, "overview", "216 ms")
    since_end = msgspec.structs.replace(over.verdict, since_ns=runs.NOW - 90 * runs.S)
    (verdict,) = (
        line
        for line in painted(msgspec.structs.replace(over, verdict=since_end), "overview")
        if "▌" in line and " for " in line
    )
    assert verdict.rstrip().endswith("for 30 s"), "its clock stands still"
    ended = runs.stalled(state="ended", exit_code=1)
    assert "ENDED" in painted(ended, "stall")[2] and "has ended with exit code 1" in painted(ended, "stall")[3]


def test_a_standstill_is_called_final_only_where_that_is_proved() -> None:
    proved = runs.stalled()
    assert any("and it will not recover" in line for line in painted(proved, "stall"))
    asleep = msgspec.structs.replace(proved, verdict=msgspec.structs.replace(proved.verdict, code="DDP305"))
    lines = painted(asleep, "stall")
    assert any("stands   for 14 s" in line for line in lines)
    assert not any("will not go on" in line for line in lines)
    assert proved.stall is not None
    saving = msgspec.structs.replace(proved, stall=msgspec.structs.replace(proved.stall, may_go_on=True))
    assert any("stands   for 14 s, and may recover" in line for line in painted(saving, "stall"))
    assert "stalled for 14 s of 12 min 34 s" in painted(saving, "stall")[0]


def test_a_late_rank_says_for_how_long_the_others_wait_and_why() -> None:
    late = tuple(
        msgspec.structs.replace(rank, late_ns=80.2e6, late_phase="data_wait") for rank in runs.straggler().ranks
    )
    lines = painted(msgspec.structs.replace(runs.straggler(), ranks=late), "rank", opened="5")
    assert any("others wait for it 80.2 ms by its data wait" in line for line in lines)


def test_every_page_carries_the_age_of_its_figures() -> None:
    for page in PAGES:
        assert "figures  2.5 s old" in painted(aged(2.5), page)[0]


def test_a_silent_source_is_told_apart_from_a_silent_job() -> None:
    lines = painted(runs.snapshot(), "overview", silent_ns=14 * runs.S)
    assert "no updates for 14 s" in lines[0]
    assert any("14 s old ─" in line for line in lines)


def test_a_rank_without_a_heartbeat_says_so() -> None:
    ranks = tuple(
        msgspec.structs.replace(rank, beat_at_ns=runs.NOW - 33 * runs.S) if rank.rank == 2 else rank
        for rank in runs.snapshot().ranks
    )
    lines = painted(runs.snapshot(ranks=ranks), "ranks", width=160)
    assert sum("no heartbeat for 33 s" in line for line in lines) == 1


def test_what_is_not_known_is_a_dash_and_never_0() -> None:
    bare = tuple(
        msgspec.structs.replace(
            rank,
            step=None,
            step_times=None,
            phases=None,
            waiting_ns=None,
            samples_per_s=None,
            lateness_ns=(),
            gpu_index=None,
        )
        for rank in runs.snapshot().ranks[:2]
    )
    empty = runs.snapshot(ranks=bare, gpus=(), phases=None, step_times=None, steps_per_s=None, samples_per_s=None)
    row = next(line for line in painted(empty, "ranks", width=160)[4:] if line.strip().startswith("1 "))
    assert row.count("—") >= 6
    assert " 0 " not in row.replace("node-00", "")
    assert "— steps/s" in "\n".join(painted(empty, "overview"))


def evil_everywhere(value: Any) -> Any:
    """The same structure with hostile text in every field that takes any text."""
    if isinstance(value, msgspec.Struct):
        kept = {"state", "source", "phase", "kind_of_verdict"}
        changes = {}
        for name in value.__struct_fields__:
            field = getattr(value, name)
            literal = name in {"source", "phase", "basis", "severity"} or (
                name == "state" and type(value).__name__ in {"Snapshot", "RunVerdict"}
            )
            if not literal or name not in kept | {"basis", "severity"}:
                changes[name] = evil_everywhere(field)
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(map(evil_everywhere, value))
    return EVIL if isinstance(value, str) and value else value


@pytest.mark.parametrize("build", [runs.exposed, runs.stalled, runs.straggler])
def test_hostile_text_keeps_every_line_harmless_and_in_its_width(build: Any) -> None:
    from rich.cells import cell_len

    snapshot = evil_everywhere(build())
    keys = {"rank": "3", "finding": ""}
    from ddpdoctor.tui.screens.findings import key_of

    keys["finding"] = key_of(snapshot.findings[0])
    for page in PAGES:
        for width, height in SIZES:
            view = View(snapshot=snapshot, page=page, opened=keys.get(page, ""), explanation=EVIL)
            painting = paint_screen(view, width, height)
            assert len(painting.lines) == height
            for cells in painting.lines:
                text = "".join(cell.text for cell in cells)
                assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in text)
                assert "\u202e" not in text and "\u05e9" not in text and "\u200d" not in text
                assert cell_len(text) == width


def test_hostile_text_reaches_no_terminal_as_a_command() -> None:
    async def session() -> None:
        async with opened(runs.Still(evil_everywhere(runs.stalled())), size=(100, 30)) as (app, pilot):
            for key in "1234562":
                await pilot.press(key)
                assert all("\x1b" not in line and "\x07" not in line and "\x9b" not in line for line in lines_of(app))
                assert {len(line) for line in lines_of(app)} <= set(range(90, 101))
            await until(pilot, lambda: "cannot be drawn" not in text_of(app))

    asyncio.run(session())


def test_memory_stays_flat_over_a_simulated_day() -> None:
    for ranks, most in ((8, 600), (512, 10)):
        timeline = Timeline()
        views = runs.many_ranks(ranks).ranks
        for second in range(24 * 3600 if ranks == 8 else 2_000):
            timeline.add(msgspec.structs.replace(BASE, now_ns=runs.NOW + second * runs.S, ranks=views))
        assert len(timeline._kept) <= most


BASE = runs.snapshot()


def test_a_replay_that_is_moved_back_forgets_what_has_not_happened_yet() -> None:
    timeline = Timeline()
    for second in (0, 1, 2, 10, 3):
        timeline.add(runs.snapshot(now_ns=runs.NOW + second * runs.S))
    timeline.step(-1)
    shown = timeline.shown
    assert shown is not None and shown.now_ns == runs.NOW + 3 * runs.S


@pytest.mark.parametrize("width", range(80, 140, 7))
def test_no_word_of_what_is_wrong_and_what_to_do_is_lost_at_any_width(width: int) -> None:
    title = "rank 0 waits in barrier at hang_first.py:13, which rank 1 has not called; rank 1 waits in all_reduce (DDP "
    title += "backward) at hang_first.py:14"
    remedy = "Make every rank call barrier at hang_first.py:13, or none: move it out of the branch that only some take."
    verdict = RunVerdict(state="broken", text=title, next=remedy, since_ns=runs.NOW - 5 * runs.S, why=("a reason",))
    shown = " ".join(painted(runs.snapshot(verdict=verdict), "overview", width, 24)).replace("▌", " ")
    words = " ".join(shown.split())
    assert "Rank 0 waits in barrier" in words
    for word in (*title.split()[2:], *remedy.split()):
        assert word in words


def test_nothing_is_called_clean_before_it_was_judged() -> None:
    early = RunVerdict(state="unknown", text="too early to tell")
    assert any("nothing found yet" in line for line in painted(runs.snapshot(verdict=early), "overview"))
    assert not any("nothing found yet" in line for line in painted(runs.snapshot(), "overview"))
    over = runs.snapshot(verdict=early, state="ended", ended_at_ns=runs.NOW)
    assert not any("nothing found yet" in line for line in painted(over, "overview"))
