"""Write ``docs/ddpdoctor.1``, the manual page that is installed as ``share/man/man1``, from the commands' own help.

``python docs/hooks/manual.py``; a test fails when the page is out of date.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import click

from ddpdoctor.cli.main import ddpdoctor
from ddpdoctor.errors import ExitCode

PAGE = Path(__file__).parents[1] / "ddpdoctor.1"

_EXIT_CODES = {
    ExitCode.CLEAN: "Nothing was found.",
    ExitCode.FINDINGS: "Something was found of the severity that --fail-on names.",
    ExitCode.ERROR: "The command line or a file is wrong, and nothing was examined.",
    ExitCode.INCONCLUSIVE: "It could not be examined whole.",
    ExitCode.INTERRUPTED: "Interrupted.",
}


def manual() -> str:
    """Return the page, in the macros of man(7)."""
    group = click.Context(ddpdoctor, info_name="ddpdoctor")
    lines = [
        # No date and no version: they would make the page out of date each day.
        '.TH DDPDOCTOR 1 "" "ddpdoctor" "User Commands"',
        ".SH NAME",
        r"ddpdoctor \- " + _roff("a doctor for PyTorch DistributedDataParallel jobs"),
        ".SH SYNOPSIS",
        r".B ddpdoctor",
        r".I COMMAND",
        r"[\fIOPTIONS\fR] ...",
        ".SH COMMANDS",
    ]
    for name in ddpdoctor.list_commands(group):
        command = ddpdoctor.get_command(group, name)
        assert command is not None
        lines += _command(command, click.Context(command, info_name=name, parent=group))
    lines.append(".SH EXIT STATUS")
    for code, meaning in _EXIT_CODES.items():
        lines += [".TP", f".B {int(code)}", _roff(meaning)]
    lines += [
        ".SH SEE ALSO",
        r"\fBddpdoctor explain \fICHECK\fR says what a check means and what to do. "
        r"\fBtorchrun\fR(1) starts the jobs that are examined.",
    ]
    return "\n".join(lines) + "\n"


def _command(command: click.Command, context: click.Context) -> list[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f".SS {_roff(context.command_path)} {_roff(usage)}"]
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        lines += [".PP", _roff(re.sub(r"\s+", " ", paragraph.replace("\b", "")))]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:
            lines += [".TP", rf"\fB{_roff(record[0])}\fR", _roff(record[1])]
    return lines


def _roff(text: str) -> str:
    """Escape what troff reads as its own: backslashes, hyphens of options, a dot or quote at the start of a line."""
    escaped = re.sub(r"\s+", " ", text).strip().replace("\\", r"\e").replace("-", r"\-")
    escaped = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", escaped)
    escaped = re.sub(r"[^\x00-\x7f]", lambda found: rf"\[u{ord(found[0]):04X}]", escaped)
    return rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    PAGE.write_text(manual(), encoding="utf-8")
