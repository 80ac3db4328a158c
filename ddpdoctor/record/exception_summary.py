"""The line of an exception's message that says what is wrong."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.record.model import RankException

_PASSED_ON = re.compile(r"\ACaught (?P<type>\w+) (?P<where>in [^\n]*?)\.?\nOriginal Traceback")
"""How torch raises again what a loader's worker, or a replica's thread, has raised."""
_FRAME = re.compile(r'^ +File "(?P<file>[^"\n<]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python")


def headline(raised: RankException) -> str:
    """Return the first line of its message; of one that a worker passed on, what the worker said and where it said
    it.
    """
    message = raised.message.strip()
    passed_on = _PASSED_ON.match(message)
    if passed_on is not None:
        said = _worker_message(message, passed_on["type"])
        if said:
            return f"{said} ({_origin(message)}{passed_on['where']})"
    return message.partition("\n")[0]


def _worker_message(message: str, kind: str) -> str:
    """Return what stands behind the name of the exception under the worker's traceback."""
    lines = re.findall(rf"^(?:[\w.]+\.)?{kind}: ([^\n]+)$", message, re.MULTILINE)
    return lines[-1].strip() if lines else ""


def _origin(message: str) -> str:
    """Return the innermost line outside of installed libraries, as ``data.py:21 ``."""
    frames = [frame for frame in _FRAME.finditer(message) if not any(part in frame["file"] for part in _LIBRARIES)]
    return f"{PurePath(frames[-1]['file']).name}:{frames[-1]['line']} " if frames else ""
