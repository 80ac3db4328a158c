"""The two streams, in a process of its own on a real pipe or a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpdoctor.report import streams
from ddpdoctor.report.streams import one_line, visible

ROOT = Path(__file__).parents[2]
REPORT = """
import sys
from ddpdoctor.report.formats import full; from ddpdoctor.report import streams
from tests.report.examples import examination, hang, result
colour = streams.colours_wanted("--no-color" in sys.argv)
streams.write_result(full.render(examination(result(hang())), streams.result_width(), colour=colour))
"""
PROGRESS = """
from ddpdoctor.launch.request import Progress
from ddpdoctor.report import streams
with streams.live_progress() as show:
    show(Progress(phase="train[/]ing\\x1b[2J", steps=3, seconds=2.2))
import sys
print("rich" in sys.modules)
"""


def test_colours_go_to_a_terminal() -> None:
    assert "\x1b[" in _on_a_terminal(REPORT)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--no-color",), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})],
    ids=["--no-color", "NO_COLOR", "TERM=dumb"],
)
def test_no_colours_for_those_who_decline(arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    shown = _on_a_terminal(REPORT, *arguments, environment=environment)
    assert "\x1b" not in shown
    assert "rank-divergent-collective" in shown


def test_an_empty_no_color_declines_nothing() -> None:
    assert "\x1b[" in _on_a_terminal(REPORT, environment={"NO_COLOR": ""})


def test_a_pipe_gets_no_colours() -> None:
    done = subprocess.run((sys.executable, "-c", REPORT), cwd=ROOT, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout


def test_progress_is_shown_on_a_terminal_and_its_text_is_harmless() -> None:
    shown = _on_a_terminal(PROGRESS)
    assert "train[/]ing\\x1b[2J, step 3 (2 s)" in shown
    assert "\x1b[2J" not in shown


def test_progress_is_silent_without_a_terminal_and_does_not_import_rich() -> None:
    done = subprocess.run((sys.executable, "-c", PROGRESS), cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("output_format", ["full", "concise", "json"])
def test_a_closed_pipe_ends_the_output_quietly_and_keeps_the_exit_code(output_format: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    command = (sys.executable, "-m", "ddpdoctor", "check", "--static", "train.py", "--output-format", output_format)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (3, b"")


def test_a_stream_that_cannot_encode_a_character_gets_its_escape() -> None:
    script = "from ddpdoctor.report import streams; streams.write_result('caf\\u00e9 \\u4e2d\\n')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run((sys.executable, "-c", script), cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout == b"caf\\xe9 \\u4e2d\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ntext", "plain\ntext"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x08\x9bc", "a\\rb\\x08\\x9bc"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("\udc80", "\\udc80"),
        ("tab\there", "tab here"),
        ("\U000e0041", "\\U000e0041"),
        ("café 中文 🙂", "café 中文 🙂"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_one_line_is_one_line() -> None:
    assert one_line(" a\n b\r\n\tc\x0b\u2028d ") == "a b c d"


def _on_a_terminal(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a script with stdout and stderr on a pseudo-terminal and return what it showed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    master, slave = pty.openpty()
    process = subprocess.Popen(
        (sys.executable, "-c", script, *arguments),
        cwd=ROOT,
        env=inherited | {"TERM": "xterm"} | dict(environment or {}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    try:
        while chunk := _read(master):
            shown += chunk
    finally:
        os.close(master)
    assert process.wait(timeout=30) == 0, shown
    return shown.decode()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # Linux says so when the last process on the terminal has ended
        return b""


def test_an_error_repeats_a_part_of_what_is_long() -> None:
    assert len(streams.one_sentence(f"'{'k' * 3_000}' is wrong")) < 250
    assert (
        streams.one_sentence(f"/{'d' * 200}/{'e' * 200} is a directory") == f"/{'d' * 200}/{'e' * 200} is a directory"
    )
    assert len(streams.one_sentence("a word " * 1_000)) < 1_010
