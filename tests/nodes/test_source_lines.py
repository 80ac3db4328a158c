"""A screen elsewhere shows the lines of the job's files, and never those of its own machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpdoctor.cli.live import screen, watching
from ddpdoctor.errors import ExitCode
from ddpdoctor.files import untrusted
from ddpdoctor.files.untrusted import line_of
from ddpdoctor.finding import Finding, Frame, Location, Severity
from ddpdoctor.monitor.nodes import screens
from ddpdoctor.monitor.nodes.attached import AttachedRun
from ddpdoctor.monitor.nodes.meeting import write_attach_file
from ddpdoctor.monitor.nodes.screens import lines_shown
from ddpdoctor.monitor.snapshot import FindingView, Snapshot, StallSide, StallView
from ddpdoctor.record import layout
from tests.nodes.test_attach import shown
from tests.nodes.test_head import listening


def found(file: Path, stack: tuple[Frame, ...] = ()) -> Snapshot:
    """A run with a finding in lines 2 to 3 of a file, and ranks that stand at a stack."""
    finding = Finding(
        code="DDP305",
        name="hang",
        severity=Severity.ERROR,
        title="it hangs",
        locations=(Location(file=str(file), line=2, end_line=3),),
        basis=frozenset({"run"}),
        remedy="mend it",
    )
    sides = (StallSide(ranks=(0,), text="wait", stack=stack),)
    return msgspec.structs.replace(
        shown(1_000),
        findings=(FindingView(finding=finding, since_ns=1),),
        stall=StallView(title="it stands", since_ns=1, sides=sides),
    )


class Reported:
    """Keeps which lines a report shows, of which there are 5 in the file."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self.lines: list[str] = []

    def write(self, snapshot: Snapshot) -> None:
        self.lines = [line_of(self.file, number) for number in range(1, 6)]


def test_another_file_of_that_name_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("one\n  two\nthree\nfour\nfive\n")
    wanted: Any = Reported(script)

    def show(source: AttachedRun) -> str:
        script.write_text("another\n" * 5)
        untrusted._lines.cache_clear()
        return "left"

    monkeypatch.setattr(screen, "show", show)
    with listening() as head:
        head.screens.offer(found(script, (Frame(str(script), 5, "train"),)))
        write_attach_file(tmp_path, head.keys.screens)
        code = watching.look_on(str(tmp_path / layout.ATTACH_FILE), None, wanted, on_screen=True)
    assert code == ExitCode.CLEAN
    assert wanted.lines == ["", "  two", "three", "", "five"]
    assert line_of(str(script), 2) == "another"


def test_what_is_sent_is_bounded_and_of_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("key\n" * 9)
    assert lines_shown(found(tmp_path / "secret")) == {}
    script = tmp_path / "long.py"
    script.write_text(f"{'x' * 9_000}\n" * 90)
    monkeypatch.setattr(screens, "MOST_LINES", 20)
    stack = tuple(Frame(str(script), line, "train") for line in range(1, 91))
    (lines,) = lines_shown(found(script, stack)).values()
    assert list(lines)[:3] == [2, 3, 1] and len(lines) == 20
    assert {len(text) for text in lines.values()} == {screens.LONGEST_LINE}
