"""What each key does, on the application itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.tui.app import DoctorApp, ScreenEnd
from ddpdoctor.tui.screens.pages import paint_screen
from ddpdoctor.tui.view import View
from tests.tui import runs
from tests.tui.screens import lines_of, opened, text_of, until

Deed = Callable[[DoctorApp, Pilot[ScreenEnd]], Awaitable[None]]


def with_app(
    deed: Deed, source: runs.Still | None = None, *, directory: Path | None = None, size: int = 120
) -> DoctorApp:
    """Do something with the application on a run of 8 ranks with a straggler."""
    shown = source or runs.Still(runs.straggler())
    playback = shown if isinstance(shown, runs.Recording) else None

    async def session() -> DoctorApp:
        async with opened(shown, playback=playback, export_directory=directory, size=(size, 36)) as (app, pilot):
            await deed(app, pilot)
            return app

    return asyncio.run(session())


def ranks_in_order(app: DoctorApp) -> list[str]:
    return [line.split()[1] if line.startswith("▌") else line.split()[0] for line in lines_of(app)[4:12]]


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("1", "Vital signs"),
        ("2", "Ranks (8)"),
        ("3", "Communication, per step"),
        ("4", "GPUs of this node"),
        ("5", "The selected finding"),
        ("6", "no stall: the ranks are running"),
        ("question_mark", "pause the display; the run continues"),
    ],
)
def test_a_digit_shows_a_page(key: str, title: str) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("5", "1", key)
        assert title in text_of(app)

    with_app(deed)


def test_the_culprit_stands_on_top_until_the_user_sorts() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("2")
        assert ranks_in_order(app) == ["5", "0", "1", "2", "3", "4", "6", "7"]
        await pilot.press(*"sssssssss")
        assert ranks_in_order(app) == ["0", "1", "2", "3", "4", "5", "6", "7"]
        await pilot.press("r")
        assert ranks_in_order(app) == ["7", "6", "5", "4", "3", "2", "1", "0"]

    with_app(deed)


def test_the_cursor_stays_on_its_rank_when_the_order_changes() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("2", "down", "down", "r", "s")
        assert app.where.cursor.selected == "1"
        await pilot.press("enter")
        assert "Rank 1" in text_of(app)
        await pilot.press("escape")
        assert app.where.page == "ranks"
        await pilot.press("end")
        assert app.where.cursor.selected != "1"
        await pilot.press("home", "up", "pagedown", "pageup")
        assert ranks_in_order(app)[0] == app.where.cursor.selected

    with_app(deed)


def test_a_filter_keeps_the_rows_that_have_all_its_words() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("2", "slash", *"rank 3")
        assert "Ranks (1)" in text_of(app) and "filter: rank 3_" in text_of(app)
        await pilot.press("backspace", "4", "enter", "home")
        assert "Ranks (1)" in text_of(app) and "1 of 8, filtered by rank 4" in text_of(app)
        await pilot.press("escape")
        assert "Ranks (8)" in text_of(app)
        await pilot.press("slash", *"nothing like it", "escape")
        assert "Ranks (8)" in text_of(app)
        await pilot.press("1", "slash")
        assert "nothing to filter" in text_of(app)

    with_app(deed)


def test_space_holds_the_display_and_says_how_far_behind_it_is() -> None:
    source = runs.Still(runs.straggler())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("space")
        later = msgspec.structs.replace(runs.snapshot(), now_ns=runs.NOW + 7 * runs.S)
        source.shown = later
        await until(pilot, lambda: "PAUSED, 7 s ago" in text_of(app))
        assert "SLOW" in text_of(app)
        await pilot.press("space")
        assert "PAUSED" not in text_of(app) and "HEALTHY" in text_of(app)

    with_app(deed, source)


def test_comma_and_full_stop_step_through_what_was_seen() -> None:
    source = runs.Still(runs.snapshot(steps=1))

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        for second in (1, 2, 3):
            source.shown = runs.snapshot(steps=second + 1, now_ns=runs.NOW + second * runs.S)
            await until(pilot, lambda: app._timeline.shown is source.shown)
        await pilot.press("comma", "comma")
        assert "step 2," in text_of(app) and "PAUSED, 2 s ago" in text_of(app)
        await pilot.press(*["comma"] * 5)
        assert "step 1," in text_of(app)
        await pilot.press("full_stop")
        assert "step 2," in text_of(app)
        await pilot.press("full_stop", "full_stop")
        assert "step 4," in text_of(app)
        await pilot.press("full_stop")
        assert "PAUSED" not in text_of(app)

    with_app(deed, source)


def test_a_recording_is_held_moved_and_sped_up() -> None:
    source = runs.Recording(runs.snapshot(source="replay"))

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        assert "REPLAY" in text_of(app) and "1:00 of 10:00 1x" in text_of(app)
        for key, asked in (
            ("plus", "play 2"),
            ("minus", "play 1"),
            ("plus plus", "play 4"),
            ("minus minus", "play 1"),
            ("right", "seek 70"),
            ("left", "seek 60"),
            ("space", "play 0"),
            ("full_stop", "seek 61"),
        ):
            before = len(source.asked)
            await pilot.press(*key.split())
            await until(pilot, lambda before=before, asked=asked: asked in source.asked[before:])  # type: ignore[misc]
            await until(pilot, lambda: app._playback_state == source.state)

    with_app(deed, source, size=160)


def test_only_a_recording_can_be_moved() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("right")
        assert "only a recording can be moved" in text_of(app)
        await pilot.press("plus")
        assert "only a recording has a speed" in text_of(app)

    with_app(deed)


def test_a_stack_is_asked_of_the_opened_rank() -> None:
    source = runs.Still(runs.straggler())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("2", "enter", "t")
        await until(pilot, lambda: source.asked == ["stacks of rank 5"])

    with_app(deed, source)


def test_of_a_recording_no_stack_is_asked_and_none_is_promised() -> None:
    source = runs.Still(msgspec.structs.replace(runs.straggler(), source="demo"))

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("2", "enter")
        assert "not taken in this run" in text_of(app) and "t takes it" not in text_of(app)
        await pilot.press("t")
        assert "stacks can be taken only of ranks that run" in text_of(app)

    with_app(deed, source)
    assert source.asked == []


def test_there_is_nothing_to_copy_without_a_standstill_and_what_was_done_is_said_whole() -> None:
    note = "wrote ddpdoctor-stacks-train-step-123456789-2.txt"
    for snapshot, offered in ((runs.straggler(), False), (runs.stalled(), True)):
        view = View(snapshot=snapshot, page="stall")
        keys, said = (
            "".join(cell.text for cell in paint_screen(each, 80, 24).lines[-1])
            for each in (view, replace(view, note=note))
        )
        assert ("c copy" in keys) == offered
        assert note in said and "copy" not in said


def test_keys_of_rows_are_offered_where_there_are_rows() -> None:
    some = runs.straggler()
    none = msgspec.structs.replace(some, ranks=(), findings=())
    for page, of_rows in (("findings", ("Enter explain", "/ filter")), ("ranks", ("Enter open", "/ filter", "s sort"))):
        for snapshot, offered in ((some, True), (none, False)):
            keys = "".join(cell.text for cell in paint_screen(View(snapshot=snapshot, page=page), 80, 24).lines[-1])
            assert [key in keys for key in of_rows] == [offered] * len(of_rows), keys


def test_what_is_shown_is_exported_without_overwriting(tmp_path: Path) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        for _ in range(2):
            await pilot.press("e")
            assert f"Write to {str(tmp_path)[:20]}" in text_of(app) and "picture of this screen (SVG)" in text_of(app)
            await pilot.press("j")
        await until(pilot, lambda: "wrote ddpdoctor-train-step-1234-2.json" in text_of(app))

    with_app(deed, directory=tmp_path)
    first = json.loads((tmp_path / "ddpdoctor-train-step-1234.json").read_text())
    assert first["verdict"]["code"] == "DDP403"


def test_the_screen_is_exported_as_a_picture_and_as_what_the_command_offers(tmp_path: Path) -> None:
    async def session() -> None:
        exports = {"h": ("report (HTML)", ".html", lambda snapshot: snapshot.name.encode())}
        app = DoctorApp(runs.Still(runs.straggler()), exports=exports, export_directory=tmp_path)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: app._timeline.shown is not None)
            await pilot.press("e", "escape")
            assert list(tmp_path.iterdir()) == []
            await pilot.press("e", "s")
            await until(pilot, lambda: "wrote ddpdoctor-train-step-1234.svg" in text_of(app))
            await pilot.press("e", "h")
            await until(pilot, lambda: "wrote ddpdoctor-train-step-1234.html" in text_of(app))

    asyncio.run(session())
    picture = (tmp_path / "ddpdoctor-train-step-1234.svg").read_text()
    assert "Vital" in picture and "Write" not in picture, "the question is not on it"
    assert (tmp_path / "ddpdoctor-train-step-1234.html").read_text() == "train.py"


@pytest.mark.parametrize(
    ("keys", "pages"),
    [
        ("3 question_mark escape", ["communication"]),
        ("2 enter question_mark escape escape escape", ["rank", "ranks", "overview"]),
        ("5 enter 2 escape escape", ["finding", "findings"]),
        ("escape", ["overview"]),
    ],
)
def test_escape_returns_to_where_one_was(keys: str, pages: list[str]) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        pressed = keys.split()
        await pilot.press(*pressed[: -len(pages)])
        for page in pages:
            await pilot.press("escape")
            assert app.where.page == page
            assert not (page == "rank" and "Rank 5" not in text_of(app))

    with_app(deed)


@pytest.mark.parametrize(
    ("source", "offered"),
    [("demo", False), ("replay", False), ("attached", False), ("live", True)],
)
def test_keys_that_can_do_nothing_are_not_offered(source: str, offered: bool) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("6")
        assert ("k kill the job" in text_of(app)) is offered
        await pilot.press("2", "enter")
        assert ("t take stack" in text_of(app)) is offered

    with_app(deed, runs.Still(runs.stalled(source=source, launched=source == "live")))


def test_an_export_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("e", "j")
        await until(pilot, lambda: "not written: No such file" in text_of(app))

    with_app(deed, directory=tmp_path / "missing")


def test_a_standstill_comes_up_by_itself_and_goes_when_it_is_over() -> None:
    source = runs.Still(runs.snapshot())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("3")
        source.shown = runs.stalled()
        await until(pilot, lambda: "STALLED" in text_of(app))
        assert "the culprit" in text_of(app) and "times out in 9 min 46 s" in text_of(app)
        source.shown = runs.snapshot()
        await until(pilot, lambda: "Communication, per step" in text_of(app))

    with_app(deed, source)


def test_a_standstill_does_not_disturb_who_types_or_looks_back_but_is_said() -> None:
    source = runs.Still(runs.snapshot())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("2", "space")
        source.shown = runs.stalled()
        await until(pilot, lambda: "a hang is proved: press 6" in text_of(app))
        assert app.where.page == "ranks"

    with_app(deed, source)


def test_a_user_who_leaves_the_page_of_a_standstill_is_not_taken_back() -> None:
    source = runs.Still(runs.stalled())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await until(pilot, lambda: app.where.page == "stall")
        await pilot.press("1")
        source.shown = runs.stalled(now_ns=runs.NOW + runs.S)
        await until(pilot, lambda: app._timeline.shown is source.shown)
        assert app.where.page == "overview"

    with_app(deed, source)


def test_stacks_are_dumped_and_a_standstill_is_copied(tmp_path: Path) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("6", "d", "c")
        assert "copied" in text_of(app)
        assert app.clipboard.startswith("7 ranks wait for rank 3")

    with_app(deed, runs.Still(runs.stalled()), directory=tmp_path)
    dumped = (tmp_path / "ddpdoctor-stacks-train-step-1234.txt").read_text()
    assert "rank 3 (the culprit): waits in all_reduce #412" in dumped and "/work/train.py:97 in evaluate" in dumped


def _launched(state: str = "stalled") -> Snapshot:
    return runs.stalled(launched=True, state=state)


def test_a_job_that_was_launched_here_is_killed_after_a_question() -> None:
    source = runs.Still(_launched())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await until(pilot, lambda: app.where.page == "stall")
        await pilot.press("k")
        assert "End the job?" in text_of(app)
        await pilot.press("n")
        assert "End the job?" not in text_of(app)
        await pilot.press("k", "y")
        assert "the job was asked to end" in text_of(app)
        await until(pilot, lambda: source.asked == ["end"])

    with_app(deed, source)


def test_an_attached_job_is_never_killed() -> None:
    source = runs.Still(runs.stalled())

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("6", "k")
        assert "the job was not started here" in text_of(app)

    with_app(deed, source)
    assert source.asked == []


def test_a_job_that_has_ended_is_not_to_be_killed_anywhere() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("6", "k")
        assert "the job has ended" in app._note

    with_app(deed, runs.Still(_launched("ended")))


@pytest.mark.parametrize(
    ("keys", "end"), [("q y", "end_job"), ("q l", "leave"), ("q n", None), ("ctrl+q y", "end_job")]
)
def test_quitting_asks_before_a_launched_job_ends(keys: str, end: str | None) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press(*keys.split())

    assert with_app(deed, runs.Still(_launched())).return_value == end


@pytest.mark.parametrize(
    "source", [runs.Still(runs.stalled()), runs.Still(_launched("ended"))], ids=["attached", "over"]
)
def test_quitting_asks_nothing_where_no_job_would_end(source: runs.Still) -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("q")

    assert with_app(deed, source).return_value == "quit"
    assert source.asked == []


def test_the_mouse_chooses_pages_rows_and_columns() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.click("Canvas", offset=(16, 1))
        assert app.where.page == "ranks"
        await pilot.click("Canvas", offset=(20, 6))
        assert app.where.cursor.selected == "1"
        await pilot.click("Canvas", offset=(20, 6))
        assert app.where.page == "rank"
        await pilot.press("escape")
        await pilot.click("Canvas", offset=(5, 3))
        assert ranks_in_order(app)[0] == "7"

    with_app(deed)


def test_the_command_palette_knows_the_pages() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("ctrl+p")
        await until(pilot, lambda: len(app.screen_stack) > 1)
        await pilot.press(*"Communication")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await until(pilot, lambda: "Communication, per step" in text_of(app))

    with_app(deed)


def test_colours_turn_from_dark_to_light() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        dark = app.export_screenshot()
        await pilot.press("b")
        assert "#fbfaf7" in app.export_screenshot() and "#fbfaf7" not in dark

    with_app(deed)


def test_a_source_that_fails_is_said_and_asked_again() -> None:
    source = runs.Still(None)

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        assert "no updates: OSError: the record cannot be read" in text_of(app)
        source.shown = runs.snapshot()
        await until(pilot, lambda: "HEALTHY" in text_of(app))

    with_app(deed, source)


def test_a_page_that_cannot_be_drawn_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpdoctor.tui.screens import pages

    def broken(view: object, width: int, height: int) -> object:
        raise ValueError("a bad figure")

    monkeypatch.setitem(pages.PAGES, "gpus", replace(pages.PAGES["gpus"], paint=broken))  # type: ignore[arg-type]

    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        await pilot.press("4")
        assert "because of a defect in ddpdoctor: ValueError: a bad figure" in text_of(app)
        await pilot.press("2")
        assert "Ranks (8)" in text_of(app)

    with_app(deed)


def test_a_resized_terminal_is_drawn_anew() -> None:
    async def deed(app: DoctorApp, pilot: Pilot[ScreenEnd]) -> None:
        for width, height in ((60, 10), (20, 3), (200, 60), (1, 1), (80, 24)):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            assert "cannot be drawn" not in text_of(app)
        assert "SLOW" in text_of(app)

    with_app(deed)
