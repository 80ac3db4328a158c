"""The screen as a face of a watched run, a recorded one, or the demo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ddpdoctor.errors import UsageError
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from ddpdoctor.examination import Examination
    from ddpdoctor.monitor.snapshot import Playback, Snapshot, SnapshotSource
    from ddpdoctor.record.model import RunRecord

SCREEN = "ddpdoctor.tui.app"
"""The only place where the core names the screen."""


def show(source: SnapshotSource, playback: Playback | None = None) -> str:
    """Show a run until the user leaves; how they left, as in ``ddpdoctor.tui.app.ScreenEnd``."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The screen has the terminal.
        app = import_module(SCREEN).DoctorApp(
            source, playback=playback, explain=explanation_of, exports=_exports(source)
        )
        end: str = app.run() or "quit"
    return end


_Export = tuple[str, str, "Callable[[Snapshot], bytes]"]


def _exports(source: SnapshotSource) -> dict[str, _Export]:
    """Return what the screen may write beside its data, as its ``Exports``."""

    def page(snapshot: Snapshot) -> bytes:
        from ddpdoctor.cli.output import of_run
        from ddpdoctor.report.own_reports import encoded, sealed

        return encoded(sealed(of_run(snapshot, "html"), "html"))

    made: dict[str, _Export] = {"h": ("report (HTML)", ".html", page)}
    record: Callable[[], RunRecord] | None = getattr(source, "record", None)
    if record is not None:
        made["t"] = ("trace for Perfetto", ".trace.json.gz", partial(_trace, record))
    return made


def _trace(record: Callable[[], RunRecord], snapshot: Snapshot) -> bytes:
    from ddpdoctor.report.run.chrome_trace import encode

    return encode(record())


def show_demo() -> None:
    """Show a run that never was; raises UsageError without a terminal."""
    from ddpdoctor.monitor.replay import demo

    _demand_terminal("--demo")
    replay = demo()
    show(replay, replay)


def show_replay(run: str) -> None:
    """Show a run again that was watched: a run directory or the name of a kept run.

    Raises UsageError without a terminal, and RecordError when nothing was recorded.
    """
    from ddpdoctor.launch.kept_runs import named_run
    from ddpdoctor.monitor.replay import recorded_run

    _demand_terminal("--replay")
    replay = recorded_run(named_run(run))
    replay.seek(0)
    replay.play(1.0)
    show(replay, replay)


def show_autopsy(examination: Examination) -> None:
    """Show an autopsy as a run that stands is shown; raises UsageError without a terminal."""
    from ddpdoctor.monitor.build_snapshot import AutopsySource

    _demand_terminal("--tui")
    show(AutopsySource(examination))


def explanation_of(code: str) -> str:
    """Return the documentation of a check; empty for one that is not known."""
    from ddpdoctor.catalogue.registry import find, load, read_catalogue
    from ddpdoctor.report.explanation import as_text

    try:
        return as_text([load(find(read_catalogue(), code))])
    except UsageError:
        return ""


def _demand_terminal(option: str) -> None:
    if not streams.screen_possible():
        raise UsageError(f"{option} needs a terminal on stdin, stdout and stderr")
