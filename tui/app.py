"""The application: takes snapshots from a source, keeps what the user does, and has the canvas drawn."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import termios
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.screen import Screen

from ddpdoctor.finding import rank_list
from ddpdoctor.monitor.snapshot import Playback, PlaybackState, Snapshot, SnapshotSource
from ddpdoctor.tui.draw.cells import EMPTY, Cell, Line, Painting, cut, fitted, line, paragraph, shown, stacked
from ddpdoctor.tui.draw.glyphs import Glyphs, Tone, chosen_glyphs, palette_of
from ddpdoctor.tui.navigation import Navigation
from ddpdoctor.tui.screens.pages import TABS, paint_defect, paint_screen
from ddpdoctor.tui.screens.sections import lasting
from ddpdoctor.tui.timeline import Canvas, Timeline
from ddpdoctor.tui.view import View
from ddpdoctor.tui.watcher import Failed, Fresh, Watcher

# What is shown before the first snapshot.


def paint_starting(width: int, height: int, note: str) -> Painting:
    """Draw that the run is looked for, and what stands in the way."""
    lines: list[Line] = [line(Cell(" ddpdoctor ", "tab.on"), Cell(" looking at the run", "strong"))]
    if note:
        lines += [EMPTY, line(Cell(f"  {cut(shown(note), width - 4)}", "warning"))]
    return stacked(height, lines)


# A question in a box over a page.

WIDTH = 60


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the keys that answer it with what each does."""

    text: str
    answers: tuple[tuple[str, str], ...]


def overlaid(painting: Painting, question: Question, width: int, glyphs: Glyphs) -> Painting:
    """Draw the question over the middle of a painting; the mouse answers nothing meanwhile."""
    inner = min(WIDTH, width - 4)
    content: list[Line] = [EMPTY, *paragraph(question.text, inner - 4, "strong", Cell("  ")), EMPTY]
    content += [line(Cell(f"  {key:<5}", "key"), what) for key, what in question.answers]
    content.append(EMPTY)
    edge = Cell(glyphs.rule * inner, "edge.warning")
    side = Cell(glyphs.bar_between, "edge.warning")
    box: list[Line] = [(edge,), *((side, *fitted(cells, inner - 2), side) for cells in content), (edge,)]
    top = max(0, (len(painting.lines) - len(box)) // 2)
    left = max(0, (width - inner) // 2)
    lines = list(painting.lines)
    for number, cells in enumerate(box[: len(lines) - top]):
        under = fitted(lines[top + number], width)
        lines[top + number] = (*fitted(under, left, ""), *cells, *_behind(under, left + inner))
    return Painting(tuple(lines), (), painting.top, painting.rows)


def _behind(cells: Line, columns: int) -> Line:
    """Return what is left of a line behind its first ``columns`` columns."""
    head = fitted(cells, columns, "")
    kept = "".join(cell.text for cell in head)
    text = "".join(cell.text for cell in cells)
    rest = len(text) - len(kept)
    behind: list[Cell] = []
    for cell in reversed(cells):
        if rest <= 0:
            break
        piece = cell.text[-rest:]
        behind.insert(0, Cell(piece, cell.role))
        rest -= len(piece)
    return tuple(behind)


# What each key does.


SECONDS_NS = 1_000_000_000
FAR = 1_000_000


def _going_to(page: str) -> Callable[[DoctorApp], None]:
    return lambda app: app.where.go(page)


KEYS: Mapping[str, Callable[[DoctorApp], None]] = {
    **{tab.key: _going_to(tab.page) for tab in TABS},
    "?": lambda app: app.where.go("help"),
    "enter": lambda app: app.where.open_row(),
    "escape": lambda app: app.where.back(),
    "up": lambda app: app.where.move(-1),
    "down": lambda app: app.where.move(1),
    "pageup": lambda app: app.where.move(-10),
    "pagedown": lambda app: app.where.move(10),
    "home": lambda app: app.where.move(-FAR),
    "end": lambda app: app.where.move(FAR),
    "/": lambda app: app.filter_rows(),
    "s": lambda app: app.where.sort(),
    "r": lambda app: app.where.reverse(),
    " ": lambda app: app.hold(),
    ",": lambda app: app.step(-1),
    ".": lambda app: app.step(1),
    "left": lambda app: app.seek(-10 * SECONDS_NS),
    "right": lambda app: app.seek(10 * SECONDS_NS),
    "+": lambda app: app.speed(2.0),
    "-": lambda app: app.speed(0.5),
    "e": lambda app: app.export(),
    "t": lambda app: app.take_stack(),
    "d": lambda app: app.dump(),
    "c": lambda app: app.copy_stall(),
    "k": lambda app: app.kill(),
    "b": lambda app: app.turn_tone(),
    "q": lambda app: app.leave(),
    "ctrl+z": lambda app: app.action_suspend_process(),
}


# Writes what is on the screen to files.


Exports = Mapping[str, tuple[str, str, Callable[[Snapshot], bytes]]]
"""By the key that chooses it: what it is, how its file's name ends, and what makes its content."""


def as_data(snapshot: Snapshot) -> bytes:
    """Return a snapshot as JSON."""
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=2) + b"\n"


def stacks_text(snapshot: Snapshot) -> str:
    """Return the standstill and the stack of every rank that is known."""
    lines = [stall_text(snapshot), ""]
    for rank in snapshot.ranks:
        lines.append(f"rank {rank.rank}: {shown(rank.state)}")
        lines += [f"  {shown(frame.file)}:{frame.line} in {shown(frame.function)}" for frame in rank.stack]
    return "\n".join(lines) + "\n"


def stall_text(snapshot: Snapshot) -> str:
    """Return the standstill, or without one the verdict, as text."""
    stall = snapshot.stall
    if stall is None:
        return "\n".join(map(shown, (snapshot.verdict.text, *snapshot.verdict.why, snapshot.verdict.next)))
    lines = [", ".join(filter(None, (shown(stall.title), lasting(snapshot, stall.since_ns))))]
    for side in stall.sides:
        lines.append(f"{rank_list(side.ranks)}{' (the culprit)' if side.culprit else ''}: {shown(side.text)}")
        lines += [f"  {shown(frame.file)}:{frame.line} in {shown(frame.function)}" for frame in side.stack]
    return "\n".join([*lines, shown(stall.remedy)])


def _stem(snapshot: Snapshot) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(snapshot.name[-80:]).stem).strip("-") or "run"
    return f"{name}-step-{snapshot.steps or 0}"


def _written(directory: Path, stem: str, suffix: str, content: bytes) -> Path:
    number = 1
    while True:
        path = directory / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}"
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            number += 1
            continue
        return path


ScreenEnd = Literal["quit", "end_job", "leave", "lost", "terminated"]
"""How the user left: ``quit``; ``end_job``: the job that was launched shall end; ``leave``: it shall continue without
the screen; ``lost``: the terminal is gone; ``terminated``: this process was told to end."""
REFRESH_S = 0.5
"""Two refreshes a second; the bound is four."""
SILENT_AFTER_S = 3.0
NOTE_S = 6.0
STEP_NS = 1_000_000_000
SLOWEST, FASTEST = 0.25, 64.0
STDIN = 0
"""Where Textual reads the keys."""
SIGNALS: Mapping[signal.Signals, ScreenEnd] = {signal.SIGHUP: "lost", signal.SIGTERM: "terminated"}


class DoctorApp(App[ScreenEnd]):
    """The screen of one run."""

    CSS_PATH = "doctor.tcss"
    ENABLE_COMMAND_PALETTE: ClassVar[bool] = True
    TITLE = "ddpdoctor"

    def __init__(
        self,
        source: SnapshotSource,
        *,
        playback: Playback | None = None,
        explain: Callable[[str], str] = lambda code: "",
        exports: Exports | None = None,
        export_directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        given = os.environ if environment is None else environment
        self._tone = _chosen_tone(given)
        super().__init__(ansi_color=self._tone == "none")
        self.where: Navigation = Navigation()
        self._source = source
        self._player = playback
        self._explain = explain
        self._exports: Exports = {"j": ("data (JSON)", ".json", as_data), **(exports or {})}
        self._export_directory = export_directory
        self._root = os.getcwd()
        self._glyphs = chosen_glyphs(given)
        self._watcher = Watcher(source, playback, REFRESH_S, self.post_message)
        self._timeline = Timeline()
        self._playback_state: PlaybackState | None = None
        self._note, self._noted_s = "", 0.0
        self._question: tuple[Question, Mapping[str, Callable[[], None]]] | None = None
        self._fresh_s = time.monotonic()
        self._terminal_modes: list[Any] = []
        self._canvas = Canvas(palette_of(self._tone), plain=self._glyphs.plain)

    def compose(self) -> ComposeResult:
        """Yield one canvas."""
        yield self._canvas

    def on_mount(self) -> None:
        """Begin to ask the source, and to watch over the terminal."""
        self._wear(self._tone)
        self._canvas.focus()
        self.set_interval(1.0, self._notice_time)
        # Whoever had the terminal meanwhile has left nothing of what was on it.
        self.app_resume_signal.subscribe(self, lambda app: self._canvas.refresh())
        with suppress(ValueError, NotImplementedError, RuntimeError):
            for number, end in SIGNALS.items():
                asyncio.get_running_loop().add_signal_handler(number, self.exit, end)
            asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, self._continued)
        with suppress(OSError, ValueError, termios.error):
            self._terminal_modes = termios.tcgetattr(STDIN)
        self._watcher.start()

    def on_unmount(self) -> None:
        """Ask the source no more."""
        self._watcher.stop()
        with suppress(ValueError, NotImplementedError, RuntimeError):
            for number in (*SIGNALS, signal.SIGCONT):
                asyncio.get_running_loop().remove_signal_handler(number)

    def _continued(self) -> None:
        """Take the terminal back after a stop.

        A SIGSTOP, unlike Ctrl-Z, leaves Textual's threads at work. Its own handler starts them again beside those:
        two then read the keys, one that writes is never ended, and the command does not return.
        """
        driver = self._driver
        if driver is None or driver.is_headless:
            return
        if (reader := getattr(driver, "_key_thread", None)) is None or not reader.is_alive():
            driver.resume_application_mode()
        elif self._terminal_modes:
            with suppress(termios.error):
                termios.tcsetattr(STDIN, termios.TCSANOW, self._terminal_modes)
        self._canvas.refresh()

    def on_fresh(self, message: Fresh) -> None:
        """Show a snapshot, unless the display is held."""
        self._fresh_s = time.monotonic()
        self._timeline.add(message.snapshot)
        self._playback_state = message.playback
        stall = message.snapshot.stall
        disturbing = self._timeline.paused or self._question is not None
        if self.where.heed_stall(stall.since_ns if stall is not None else None, disturbing=disturbing):
            self.say("a hang is proved: press 6")
        self.repaint()
        self._watcher.taken()

    def on_failed(self, message: Failed) -> None:
        """Say what went wrong; what was shown stays and ages."""
        self.say(f"no updates: {message.reason}")
        self._watcher.taken()

    def _notice_time(self) -> None:
        """Draw what only time changes: the age of figures of a silent source, a note that is over."""
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
        view = self._view_of(snapshot)
        try:
            painting = paint_screen(view, width, height)
        except Exception as error:
            # A defect of ours on one page must not end the watching: the other pages continue.
            painting = paint_defect(view, width, height, error)
        self.where.painted(painting)
        if self._question is not None:
            painting = overlaid(painting, self._question[0], width, self._glyphs)
        self._canvas.show(painting)

    def _view_of(self, snapshot: Snapshot) -> View:
        where, silent_s = self.where, time.monotonic() - self._fresh_s
        return View(
            snapshot=snapshot,
            page=where.page,
            cursors=dict(where.cursors),
            filters=dict(where.filters),
            opened=where.opened,
            scroll=where.scroll,
            typing=where.typing,
            paused=self._timeline.paused,
            behind_ns=self._timeline.behind_ns,
            silent_ns=int(silent_s * 1e9) if silent_s > SILENT_AFTER_S else 0,
            playback=self._playback_state,
            note="" if self._note_is_over() else self._note,
            explanation=self._explain(where.opened.partition("/")[0]) if where.page == "finding" else "",
            root=self._root,
            glyphs=self._glyphs,
            coloured=self._tone != "none",
        )

    def on_canvas_resized(self, message: Canvas.Resized) -> None:
        """Draw for the new size."""
        self.repaint()

    def on_canvas_chosen(self, message: Canvas.Chosen) -> None:
        """Do what a click or the wheel asks for."""
        word, _, argument = message.action.partition(" ")
        if word == "page":
            self.where.go(argument)
        elif word == "sort":
            self.where.sort_by(argument)
        elif word == "move":
            self.where.move(int(argument))
        elif word == "select":
            self.where.select(argument)
        self.repaint()

    def on_key(self, event: events.Key) -> None:
        """Do what a key asks for."""
        if len(self.screen_stack) > 1:
            return
        printable = event.is_printable and event.character is not None
        key = event.character if printable and event.character else event.key
        if self._question is not None:
            self._answer(key)
        elif self.where.typing:
            self.where.type(key, printable)
        elif key in KEYS:
            self._note = ""
            KEYS[key](self)
        else:
            return
        event.stop()
        self.repaint()

    def say(self, note: str) -> None:
        """Show a sentence in the last line for some seconds."""
        self._note, self._noted_s = note, time.monotonic()
        self.repaint()

    def filter_rows(self) -> None:
        """Begin to type a filter."""
        if not self.where.filter_rows():
            self.say("there is nothing to filter on this page")

    def hold(self) -> None:
        """Hold the display, or follow again; in a recording, hold its time."""
        if self._player is not None:
            self._play(lambda speed: 0.0 if speed else 1.0)
        elif self._timeline.paused:
            self._timeline.resume()
        else:
            self._timeline.pause()

    def step(self, steps: int) -> None:
        """Go one second back or forward."""
        if self._player is not None:
            self._play(lambda speed: 0.0)
            self.seek(steps * STEP_NS)
        else:
            self._timeline.step(steps)

    def seek(self, by_ns: int) -> None:
        """Move the time of a recording."""
        player = self._player
        if player is None:
            self.say("only a recording can be moved; use , and . to step through the display")
        else:
            self._watcher.request(lambda: player.seek(max(0, player.playback().elapsed_ns + by_ns)))

    def speed(self, factor: float) -> None:
        """Let a recording go faster or slower."""
        if self._player is None:
            self.say("only a recording has a speed")
        else:
            self._play(lambda speed: min(FASTEST, max(SLOWEST, (speed or 1.0) * factor)))

    def _play(self, change: Callable[[float], float]) -> None:
        """Have the speed changed, from what it is by then."""
        player = self._player
        if player is not None:
            self._watcher.request(lambda: player.play(change(player.playback().speed)))

    def take_stack(self) -> None:
        """Have the stack of the opened rank taken."""
        if self.where.page != "rank":
            return
        snapshot = self._timeline.newest
        if snapshot is not None and snapshot.source == "attached":
            self.say("attached read-only: stacks can be taken only where the job is watched")
        elif snapshot is not None and (snapshot.source != "live" or snapshot.state == "ended"):
            self.say("stacks can be taken only of ranks that run")
        else:
            rank = int(self.where.opened)
            self._watcher.request(lambda: self._source.ask_for_stacks(rank))
            self.say(f"requested the stack of rank {rank}")

    def export(self) -> None:
        """Ask as what, and write what is shown to a file."""
        choices = [(key, what) for key, (what, _, _) in self._exports.items()]
        directory = self._export_directory or Path.cwd()
        question = Question(
            f"Write to {directory}:", (*choices, ("s", "picture of this screen (SVG)"), ("Esc", "nothing"))
        )
        self._question = (
            question,
            {**{key: partial(self._export_as, key) for key, _ in choices}, "s": self._draw_picture},
        )

    def _export_as(self, key: str) -> None:
        """Have it written by the thread that alone asks the source, of which a trace needs the record."""
        snapshot = self._timeline.shown
        if snapshot is None:
            return
        _, suffix, content_of = self._exports[key]

        def write() -> None:
            content = content_of(snapshot)
            self.call_from_thread(self._write, suffix, lambda: content)

        self._watcher.request(write)

    def _draw_picture(self) -> None:
        self.call_after_refresh(self._write, ".svg", lambda: self.export_screenshot().encode())

    def dump(self) -> None:
        """Write all stacks to a file."""
        snapshot = self._timeline.shown
        if self.where.page == "stall" and snapshot is not None:
            self._write(".txt", lambda: stacks_text(snapshot).encode(), "stacks-")

    def _write(self, suffix: str, content_of: Callable[[], bytes], kind: str = "") -> None:
        """Write a new file; nothing that is there is overwritten."""
        snapshot = self._timeline.shown
        if snapshot is None:
            return
        directory = self._export_directory or Path.cwd()
        try:
            path = _written(directory, f"ddpdoctor-{kind}{_stem(snapshot)}", suffix, content_of())
        except OSError as error:
            self.say(f"not written: {error.strerror or error}")
        else:
            self.say(f"wrote {path.name}")

    def copy_stall(self) -> None:
        """Put the standstill into the terminal's clipboard."""
        snapshot = self._timeline.shown
        if self.where.page == "stall" and snapshot is not None:
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
        if tone != "none":
            self.theme = "textual-light" if tone == "light" else "textual-dark"
            self._canvas.styles.background = palette.background
            self._canvas.styles.color = palette.text
        self._canvas.recolour(palette)

    def kill(self) -> None:
        """End the job, after a question, if it was launched here."""
        if self.where.page != "stall":
            return
        snapshot = self._timeline.newest
        if snapshot is not None and snapshot.state == "ended":
            self.say("the job has ended")
            return
        if not self._owns_job():
            self.say("the job was not started here: end it where it was started")
            return
        question = Question("End the job?", (("y", "yes, end all its ranks"), ("n", "no, keep it running")))
        self._question = question, {"y": self._end_job}

    def _end_job(self) -> None:
        self._watcher.request(self._source.end_job)
        self.say("the job was asked to end; once more kills it")

    def leave(self) -> None:
        """Quit; asks first where that would end a job."""
        if not self._owns_job():
            self.exit("quit")
            return
        answers = (("y", "end the job and quit"), ("l", "leave the screen, the job continues"), ("n", "stay"))
        question = Question("The job was started here and is running.", answers)
        self._question = question, {"y": lambda: self.exit("end_job"), "l": lambda: self.exit("leave")}

    def _owns_job(self) -> bool:
        snapshot = self._timeline.newest
        return snapshot is not None and snapshot.source == "live" and snapshot.launched and snapshot.state != "ended"

    def _answer(self, key: str) -> None:
        """Any other key than those asked for means no."""
        if self._question is not None:
            answer = self._question[1].get(key)
            self._question = None
            if answer is not None:
                answer()

    async def action_quit(self) -> None:
        """Quit as ``q`` does."""
        self.do(self.leave)

    def action_help_quit(self) -> None:
        """Take Ctrl-C as ``q``."""
        self.do(self.leave)

    def do(self, what: Callable[[], None]) -> None:
        """Do something that no key asked for, and draw what happened to it."""
        what()
        self.repaint()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield what the command palette offers."""
        for tab in TABS:
            yield SystemCommand(tab.title, f"Show the page (key {tab.key})", lambda page=tab.page: self._show(page))
        yield SystemCommand("Export", "Write what is shown to a file (key e)", lambda: self.do(self.export))
        yield SystemCommand(
            "Pause the display", "Pause the display or resume it (key space)", lambda: self.do(self.hold)
        )
        yield SystemCommand("Dark or light", "Change the colours (key b)", lambda: self.do(self.turn_tone))
        yield SystemCommand("Keys", "Show all keys (key ?)", lambda: self._show("help"))
        yield SystemCommand("Quit", "Quit; an attached job continues (key q)", lambda: self.do(self.leave))

    def _show(self, page: str) -> None:
        self.where.go(page)
        self.repaint()


def _chosen_tone(environment: Mapping[str, str]) -> Tone:
    """No colour with NO_COLOR; light where the terminal says that its background is."""
    if environment.get("NO_COLOR"):
        return "none"
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if background in {"7", "15"} else "dark"
