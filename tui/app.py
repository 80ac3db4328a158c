"""The application: takes snapshots from a source, keeps what the user does, and has the canvas drawn."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.message import Message
from textual.screen import Screen

from ddpdoctor.monitor.snapshot import Playback, PlaybackState, Snapshot, SnapshotSource
from ddpdoctor.tui.export import dump_stacks, export_snapshot, stall_text
from ddpdoctor.tui.glyphs import chosen_glyphs
from ddpdoctor.tui.keys import KEYS
from ddpdoctor.tui.painting import Painting
from ddpdoctor.tui.palette import Tone, palette_of
from ddpdoctor.tui.screens.pages import PAGES, TABS, paint_defect, paint_screen
from ddpdoctor.tui.screens.question import Question, overlaid
from ddpdoctor.tui.screens.starting import paint_starting
from ddpdoctor.tui.table import Cursor
from ddpdoctor.tui.timeline import Timeline
from ddpdoctor.tui.view import View
from ddpdoctor.tui.widgets.canvas import Canvas

ScreenEnd = Literal["quit", "end_job", "leave", "lost"]
"""How the user left: ``quit``; ``end_job``: the job that was launched shall end; ``leave``: it shall go on without the
screen; ``lost``: the terminal is gone."""
REFRESH_S = 0.5
"""Two refreshes a second: at four, eight ranks would cost more than 5 % of a core."""
SILENT_AFTER_S = 3.0
NOTE_S = 6.0
SEEK_NS = 10_000_000_000
STEP_NS = 1_000_000_000


class Fresh(Message):
    """The source gave a snapshot."""

    def __init__(self, snapshot: Snapshot, playback: PlaybackState | None) -> None:
        self.snapshot = snapshot
        self.playback = playback
        super().__init__()


class Failed(Message):
    """The source could not give one."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__()


class DoctorApp(App[ScreenEnd]):
    """The screen of one run."""

    CSS_PATH = "doctor.tcss"
    ENABLE_COMMAND_PALETTE = True
    TITLE = "ddpdoctor"

    def __init__(
        self,
        source: SnapshotSource,
        *,
        playback: Playback | None = None,
        explain: Callable[[str], str] = lambda code: "",
        export_directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        given = os.environ if environment is None else environment
        self._tone = _chosen_tone(given)
        super().__init__(ansi_color=self._tone == "none")
        self._source = source
        self._player = playback
        self._explain = explain
        self._export_directory = export_directory
        self._glyphs = chosen_glyphs(given)
        self._refresh_s = max(0.25, refresh_s)
        self._timeline = Timeline()
        self._view: View | None = None
        self._cursors: dict[str, Cursor] = {}
        self._row_filters: dict[str, str] = {}
        self._page = "overview"
        self._page_before_stall = ""
        self._stall_seen_ns = 0
        self._opened = ""
        self._scroll = 0
        self._typing = False
        self._note = ""
        self._noted_s = 0.0
        self._question: tuple[Question, Mapping[str, Callable[[], None]]] | None = None
        self._state: PlaybackState | None = None
        self._fresh_s = time.monotonic()
        self._painting = Painting(())
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._taken = threading.Event()
        self._watch_ends = threading.Event()
        self._canvas = Canvas(palette_of(self._tone), plain=self._glyphs.plain)

    def compose(self) -> ComposeResult:
        """One canvas."""
        yield self._canvas

    def on_mount(self) -> None:
        """Begin to ask the source, and to watch over the terminal."""
        self._wear(self._tone)
        self._canvas.focus()
        self.set_interval(1.0, self._notice_silence)
        threading.Thread(target=self._watch, name="ddpdoctor-screen", daemon=True).start()
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.exit, "lost")
        except (ValueError, NotImplementedError, RuntimeError):
            return

    def on_unmount(self) -> None:
        """Ask the source no more."""
        self._watch_ends.set()
        self._taken.set()
        try:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        except (ValueError, NotImplementedError, RuntimeError):
            return

    def _watch(self) -> None:
        """In a thread of its own, the only one that touches the source: ask it, pass on what it says."""
        while not self._watch_ends.is_set():
            began_s = time.monotonic()
            try:
                state = self._player.playback() if self._player is not None else None
                message: Message = Fresh(self._source.snapshot(), state)
            except Exception as error:
                message = Failed(f"{type(error).__name__}: {error}")
            self._taken.clear()
            self.post_message(message)
            self._taken.wait()
            left_s = self._refresh_s - (time.monotonic() - began_s)
            try:
                self._requests.get(timeout=max(0.05, left_s))()
            except queue.Empty:
                continue
            except Exception as error:
                self.post_message(Failed(f"{type(error).__name__}: {error}"))

    def on_fresh(self, message: Fresh) -> None:
        """Show a snapshot, unless the display is held."""
        self._fresh_s = time.monotonic()
        self._timeline.add(message.snapshot)
        self._state = message.playback
        self._heed_stall(message.snapshot)
        self.repaint()
        self._taken.set()

    def on_failed(self, message: Failed) -> None:
        """Say what went wrong; what was shown stays and ages."""
        self.say(f"no news: {message.reason}")
        self._taken.set()

    def _heed_stall(self, snapshot: Snapshot) -> None:
        """Bring up a standstill by itself, once; leave its page when it was over after all."""
        stall = snapshot.stall
        if stall is None:
            if self._page == "stall" and self._page_before_stall:
                self.go(self._page_before_stall)
            self._page_before_stall = ""
            self._stall_seen_ns = 0
        elif stall.since_ns != self._stall_seen_ns:
            self._stall_seen_ns = stall.since_ns
            if self._timeline.paused or self._typing or self._question is not None:
                self.say("a standstill was proved: 6 shows it")
            elif self._page != "stall":
                before = self._page
                self.go("stall")
                self._page_before_stall = before

    def _notice_silence(self) -> None:
        if time.monotonic() - self._fresh_s > SILENT_AFTER_S or (self._note and self._note_is_over()):
            self.repaint()

    def _note_is_over(self) -> bool:
        return time.monotonic() - self._noted_s > NOTE_S

    def repaint(self) -> None:
        """Draw what is to be seen now."""
        width, height = self._canvas.size
        if width < 1 or height < 1:
            return
        snapshot = self._timeline.shown
        if snapshot is None:
            self._canvas.show(paint_starting(width, height, self._note))
            return
        silent_s = time.monotonic() - self._fresh_s
        view = View(
            snapshot=snapshot,
            page=self._page,
            cursors=dict(self._cursors),
            filters=dict(self._row_filters),
            opened=self._opened,
            scroll=self._scroll,
            typing=self._typing,
            paused=self._timeline.paused,
            behind_ns=self._timeline.behind_ns,
            silent_ns=int(silent_s * 1e9) if silent_s > SILENT_AFTER_S else 0,
            playback=self._state,
            note="" if self._note_is_over() else self._note,
            explanation=self._explanation(),
            glyphs=self._glyphs,
            coloured=self._tone != "none",
        )
        self._view = view
        try:
            painting = paint_screen(view, width, height)
        except Exception as error:
            # A defect of ours on one page must not end the watching: the other pages go on.
            painting = paint_defect(view, width, height, error)
        self._painting = painting
        if painting.rows:
            self._cursors[self._page] = replace(view.cursor, top=painting.top)
        elif PAGES[self._page].back:
            self._scroll = painting.top
        if self._question is not None:
            painting = overlaid(painting, self._question[0], width, self._glyphs)
        self._canvas.show(painting)

    def _explanation(self) -> str:
        if self._page != "finding":
            return ""
        return self._explain(self._opened.partition("/")[0])

    def on_canvas_resized(self, message: Canvas.Resized) -> None:
        """Draw for the new size."""
        self.repaint()

    def on_canvas_chosen(self, message: Canvas.Chosen) -> None:
        """Do what a click or the wheel asks for."""
        word, _, argument = message.action.partition(" ")
        if word == "page":
            self.go(argument)
        elif word == "sort":
            self._sort_by(argument)
        elif word == "move":
            self.move(int(argument))
        elif word == "select":
            if self.cursor.selected == argument:
                self.open_row()
            else:
                self._cursors[self._page] = replace(self.cursor, selected=argument)
        self.repaint()

    def on_key(self, event: events.Key) -> None:
        """Do what a key asks for."""
        if len(self.screen_stack) > 1:
            return
        key = event.character if event.is_printable and event.character else event.key
        if self._question is not None:
            self._answer(key)
        elif self._typing:
            self._type(key, event.is_printable)
        elif key in KEYS:
            self._note = ""
            KEYS[key](self)
        else:
            return
        event.stop()
        self.repaint()

    @property
    def cursor(self) -> Cursor:
        """Where the user is on the page."""
        return self._cursors.get(self._page, Cursor())

    @property
    def page(self) -> str:
        """Name of the page."""
        return self._page

    @property
    def shown_snapshot(self) -> Snapshot | None:
        """The snapshot on display."""
        return self._timeline.shown

    def say(self, note: str) -> None:
        """Show a sentence in the last line for some seconds."""
        self._note, self._noted_s = note, time.monotonic()
        self.repaint()

    def go(self, page: str) -> None:
        """Show another page."""
        self._page = page
        self._scroll = 0
        self._page_before_stall = ""

    def back(self) -> None:
        """Go back from a page that was opened; on a list, clear its filter."""
        if PAGES[self._page].back:
            self.go(PAGES[self._page].back)
        else:
            self._row_filters.pop(self._page, None)

    def move(self, rows: int) -> None:
        """Move the cursor, or scroll a page of text."""
        keys = self._painting.rows
        if not keys:
            self._scroll = max(0, self._scroll + rows)
            return
        position = keys.index(self.cursor.selected) if self.cursor.selected in keys else 0
        position = max(0, min(len(keys) - 1, position + rows))
        self._cursors[self._page] = replace(self.cursor, selected=keys[position])

    def open_row(self) -> None:
        """Open the selected row on a page of its own."""
        page = PAGES[self._page].opens
        keys = self._painting.rows
        if page and keys:
            self._opened = self.cursor.selected if self.cursor.selected in keys else keys[0]
            self.go(page)

    def sort(self) -> None:
        """Sort by the next column."""
        sorts = PAGES[self._page].sorts
        if sorts:
            now = sorts.index(self.cursor.sort) if self.cursor.sort in sorts else 0
            name = sorts[(now + 1) % len(sorts)]
            self._cursors[self._page] = replace(self.cursor, sort=name, descending=name != "rank", top=0)

    def reverse(self) -> None:
        """Turn the order around."""
        self._cursors[self._page] = replace(self.cursor, descending=not self.cursor.descending)

    def _sort_by(self, column: str) -> None:
        again = self.cursor.sort == column
        self._cursors[self._page] = replace(
            self.cursor, sort=column, descending=not self.cursor.descending if again else True, top=0
        )

    def filter_rows(self) -> None:
        """Begin to type what the rows have to contain."""
        if PAGES[self._page].opens:
            self._typing = True
        else:
            self.say("there is nothing to filter on this page")

    def _type(self, key: str, printable: bool) -> None:
        text = self._row_filters.get(self._page, "")
        if key == "escape":
            self._row_filters.pop(self._page, None)
            self._typing = False
        elif key == "enter":
            self._typing = False
        elif key == "backspace":
            self._row_filters[self._page] = text[:-1]
        elif printable:
            self._row_filters[self._page] = (text + key)[:60]

    def hold(self) -> None:
        """Hold the display, or follow again; in a recording, hold its time."""
        if self._player is not None and self._state is not None:
            self._ask(self._play, 0.0 if self._state.speed else 1.0)
        elif self._timeline.paused:
            self._timeline.resume()
        else:
            self._timeline.pause()

    def step(self, steps: int) -> None:
        """Go one second back or forward."""
        if self._player is not None:
            self._ask(self._play, 0.0)
            self.seek(steps * STEP_NS)
        else:
            self._timeline.step(steps)

    def seek(self, by_ns: int) -> None:
        """Move the time of a recording."""
        if self._player is None:
            self.say("only a recording can be moved; , and . step through what was seen")
        else:
            self._ask(self._seek_by, by_ns)

    def speed(self, factor: float) -> None:
        """Let a recording go faster or slower."""
        if self._player is None or self._state is None:
            self.say("only a recording has a speed")
        else:
            self._ask(self._play, min(64.0, max(0.25, (self._state.speed or 1.0) * factor)))

    def _ask(self, request: Callable[[float], None], argument: float) -> None:
        self._requests.put(lambda: request(argument))

    def _play(self, speed: float) -> None:
        if self._player is not None:
            self._player.play(speed)

    def _seek_by(self, by_ns: float) -> None:
        if self._player is not None:
            self._player.seek(max(0, self._player.playback().elapsed_ns + int(by_ns)))

    def take_stack(self) -> None:
        """Have the stack of the opened rank taken."""
        if self._page == "rank":
            rank = int(self._opened)
            self._requests.put(lambda: self._source.ask_for_stacks(rank))
            self.say(f"asked rank {rank} for its stack")

    def export(self) -> None:
        """Write what is shown to a file."""
        self._write(export_snapshot)

    def dump(self) -> None:
        """Write all stacks to a file."""
        if self._page == "stall":
            self._write(dump_stacks)

    def _write(self, write: Callable[[Snapshot, Path], Path]) -> None:
        snapshot = self._timeline.shown
        if snapshot is None:
            return
        try:
            path = write(snapshot, self._export_directory or Path.cwd())
        except OSError as error:
            self.say(f"not written: {error.strerror or error}")
        else:
            self.say(f"wrote {path.name}")

    def copy_stall(self) -> None:
        """Put the standstill into the terminal's clipboard."""
        snapshot = self._timeline.shown
        if self._page == "stall" and snapshot is not None:
            self.copy_to_clipboard(stall_text(snapshot))
            self.say("copied")

    def turn_tone(self) -> None:
        """Dark to light and back."""
        if self._tone == "none":
            self.say("NO_COLOR is set")
        else:
            self._wear("light" if self._tone == "dark" else "dark")

    def _wear(self, tone: Tone) -> None:
        self._tone = tone
        palette = palette_of(tone)
        self.theme = "textual-light" if tone == "light" else "textual-dark"
        if palette.background:
            self._canvas.styles.background = palette.background
            self._canvas.styles.color = palette.text
        self._canvas.recolour(palette)

    def kill(self) -> None:
        """End the job, after a question, if it was launched here."""
        if self._page != "stall":
            return
        if not self._owns_job():
            self.say("the job was not started here: end it where it was started")
            return
        self._put(
            Question("End the job?", (("y", "yes, end all its ranks"), ("n", "no, leave it"))),
            {"y": lambda: self._requests.put(self._source.end_job)},
        )

    def leave(self) -> None:
        """Quit; asks first where that would end a job."""
        if not self._owns_job():
            self.exit("quit")
            return
        self._put(
            Question(
                "The job was started here and is running.",
                (("y", "end the job and quit"), ("l", "leave the screen, the job goes on"), ("n", "stay")),
            ),
            {"y": lambda: self.exit("end_job"), "l": lambda: self.exit("leave")},
        )

    def _owns_job(self) -> bool:
        snapshot = self._timeline.newest
        return snapshot is not None and snapshot.source == "live" and snapshot.launched and snapshot.state != "ended"

    def _put(self, question: Question, answers: Mapping[str, Callable[[], None]]) -> None:
        self._question = (question, answers)

    def _answer(self, key: str) -> None:
        """Any other key than those asked for means no."""
        if self._question is not None:
            answer = self._question[1].get(key)
            self._question = None
            if answer is not None:
                answer()

    async def action_quit(self) -> None:
        """Quit as ``q`` does."""
        self.leave()
        self.repaint()

    def action_help_quit(self) -> None:
        """Take Ctrl-C as ``q``."""
        self.leave()
        self.repaint()

    def suspend_process(self) -> None:
        """Go to the background, as any program does on Ctrl-Z."""
        self.action_suspend_process()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette offers."""
        for tab in TABS:
            yield SystemCommand(
                tab.title, f"Show the page (key {tab.key})", lambda page=tab.page: self._command_go(page)
            )
        yield SystemCommand("Export", "Write what is shown to a JSON file (key e)", self.export)
        yield SystemCommand("Pause the display", "Hold it, or follow again (key space)", self._command(self.hold))
        yield SystemCommand("Dark or light", "Change the colours (key b)", self._command(self.turn_tone))
        yield SystemCommand("Keys", "Show all keys (key ?)", lambda: self._command_go("help"))
        yield SystemCommand("Quit", "Leave; an attached job is left alone (key q)", self._command(self.leave))

    def _command(self, do: Callable[[], None]) -> Callable[[], None]:
        def done() -> None:
            do()
            self.repaint()

        return done

    def _command_go(self, page: str) -> None:
        self.go(page)
        self.repaint()


def _chosen_tone(environment: Mapping[str, str]) -> Tone:
    """No colour with NO_COLOR; light where the terminal says that its background is."""
    if environment.get("NO_COLOR"):
        return "none"
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if background in {"7", "15"} else "dark"


def run_screen(
    source: SnapshotSource, *, playback: Playback | None = None, explain: Callable[[str], str] = lambda code: ""
) -> ScreenEnd:
    """Show a run until the user leaves; the caller ends the job where that is asked for, and closes the source."""
    return DoctorApp(source, playback=playback, explain=explain).run() or "quit"
