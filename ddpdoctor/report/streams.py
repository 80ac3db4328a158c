"""The only module that uses stdin, stdout and stderr: results go to stdout, talk goes to stderr.

A pipe that the reader closed (``ddpdoctor … | head``) ends the output, not the command: its exit code stays what it is.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO

from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import LONGEST_QUOTE, quoted

if TYPE_CHECKING:
    from ddpdoctor.launch.request import Progress

# File names, exception messages and source lines may hold commands. A terminal obeys control characters. The log of a
# CI obeys text: GitHub a line that begins with ``::error::`` after blanks, Azure, GitHub and TeamCity what looks like
# ``##vso[``, ``##[`` or ``##teamcity[`` anywhere in it.
_HARMFUL = regex(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # invisible or changing the direction of what follows
    "\ud800-\udfff"  # halves of characters that no stream can encode
    "\U000e0000-\U000e007f]"  # invisible tags
    r"|#(?=#[A-Za-z]*\[)"
)
_COMMAND = regex(r"^(\s*):(?=:[A-Za-z])", re.MULTILINE)
_LONGEST = 20_000
"""Characters of one text on one line; an exception's message may have millions."""


def visible(text: str) -> str:
    """Replace what a terminal or a CI obeys, or hides, by its escapes; line feeds stay, tabs become spaces.

    Where a line begins is decided later: see ``without_commands``.
    """
    return _HARMFUL.sub(_escape, text.expandtabs(4))


def one_line(text: str) -> str:
    """Like ``visible``, with all white space, line feeds included, folded into single spaces."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return visible(" ".join(text.split()))


def without_commands(lines: str) -> str:
    """Return lines as they are written, of which no log takes one for a command, wherever a text was folded."""
    return _COMMAND.sub(r"\1\\x3a", lines)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return "\\x23" if character == "#" else character.encode("unicode_escape").decode("ascii")


STDERR = 2
"""File descriptor of stderr, for a process that shall write there."""
PLAIN_WIDTH = 80
"""Columns of text that goes to a file or a pipe."""
_LONGEST_MESSAGE = 1000
"""Characters of an error; a path may have 4,096."""
_LONG_WORD = regex(rf"[^\s/]{{{LONGEST_QUOTE + 1},}}")
"""What a file may hold, and no path."""
MAXIMUM_WIDTH = 100
"""Columns of text on a wide terminal; longer lines are hard to read."""


def write_result(text: str) -> None:
    """Write a result to stdout."""
    _write(sys.stdout, text, is_result=True)


def demand_stdout() -> None:
    """Raise UsageError when a result could not be written to stdout."""
    if sys.stdout is None:
        raise UsageError(
            "cannot write to the standard output: it is closed", "`-o FILE` writes the report to a file instead."
        )


def occupy_closed() -> None:
    """Open the null device in the place of a standard stream that is closed.

    Otherwise the next file that is opened becomes it, and gets what some library or child writes to its stdout.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def read_stdin(at_most_bytes: int) -> bytes:
    """Return all that stdin holds; raises UsageError when it is closed, cannot be read, or holds more."""
    if sys.stdin is None:
        raise UsageError("there is nothing to examine: the standard input is closed")
    try:
        content = sys.stdin.buffer.read(at_most_bytes + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"the standard input cannot be read: {error}") from error
    if len(content) > at_most_bytes:
        raise UsageError(f"the standard input has more than {at_most_bytes:,} bytes, too many for a script")
    return content


def stdin_stream() -> BinaryIO | None:
    """Return the standard input as bytes; None when it is closed."""
    return sys.stdin.buffer if sys.stdin is not None else None


def say(text: str) -> None:
    """Write a line of talk to stderr."""
    _write(sys.stderr, without_commands(visible(text)).rstrip("\n") + "\n")


def say_lines(lines: Iterable[str]) -> None:
    """Write lines of talk to stderr in one piece, so that a job's own lines do not come between."""
    text = "\n".join(lines)
    if text:
        say(text)


def say_error(error: DdpDoctorError) -> None:
    """Write an error of ours and its hint to stderr."""
    say(f"error: {one_sentence(error.message)}" + (f"\nhint:  {one_sentence(error.hint)}" if error.hint else ""))


def one_sentence(message: str) -> str:
    """Return a message on one line and of a length that can be read, whatever names stand in it."""
    line = _LONG_WORD.sub(lambda word: quoted(word.group()), message.replace("\r", "\\r").replace("\n", "\\n"))
    if len(line) <= _LONGEST_MESSAGE:
        return line
    return f"{line[: _LONGEST_MESSAGE // 2]} … {line[-_LONGEST_MESSAGE // 2 :]}"


def colours_wanted(no_color: bool) -> bool:
    """Return whether stdout is a terminal whose user has not declined colours."""
    declined = no_color or os.environ.get("NO_COLOR", "") != "" or os.environ.get("TERM") == "dumb"
    return not declined and _is_terminal(sys.stdout)


def screen_possible() -> bool:
    """Return whether a user sits at a terminal that can show a screen."""
    able = os.environ.get("TERM", "") not in {"", "dumb"}
    return able and all(map(_is_terminal, (sys.stdin, sys.stdout, sys.stderr)))


def is_interactive() -> bool:
    """Return whether a user can be asked something, and answer."""
    return _is_terminal(sys.stdin) and _is_terminal(sys.stderr)


def result_width(*, on_stderr: bool = False) -> int:
    """Columns for a text on stdout, or on stderr."""
    stream = sys.stderr if on_stderr else sys.stdout
    if not _is_terminal(stream):
        return PLAIN_WIDTH
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return PLAIN_WIDTH
    return max(40, min(columns or PLAIN_WIDTH, MAXIMUM_WIDTH))


@contextmanager
def live_progress() -> Iterator[Callable[[Progress], None]]:
    """Show the latest progress in one live line on stderr while the context is open; silent when it is no terminal."""
    if not _is_terminal(sys.stderr):
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status(Text("reading the source")) as status:

        def show(progress: Progress) -> None:
            steps = f", step {progress.steps}" if progress.steps else ""
            status.update(Text(f"{one_line(progress.phase)}{steps} ({progress.seconds:.0f} s)"))

        yield show


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _write(stream: TextIO | None, text: str, *, is_result: bool = False) -> None:
    if stream is None:
        if is_result and text:
            demand_stdout()
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (BrokenPipeError, ConnectionResetError):
        _forget(stream)
    except OSError as error:
        _forget(stream)
        if stream is sys.stdout:
            raise UsageError(f"cannot write to the standard output: {error.strerror or error}") from error
    except ValueError:
        if not stream.closed:
            raise


def flush_all() -> None:
    """Write what is still held, before the interpreter does: of a terminal that is gone it would make exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            _forget(stream)


def _forget(stream: TextIO) -> None:
    """Let the interpreter flush the stream at exit without an error, now that no one reads it."""
    try:
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, stream.fileno())
        os.close(void)
    except (OSError, ValueError):
        return
