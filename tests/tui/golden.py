"""Compares a picture of the screen, or the text on it, with a golden file beside the tests.

``DDPDOCTOR_UPDATE_GOLDEN=1 python -m pytest tests/tui`` draws the files anew; look at them before you keep them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden_files"


_FROM_ELSEWHERE = re.compile(r"\n +@font-face \{[^}]*\}")
_CLIPPED = re.compile(
    r'<clipPath id="terminal-line-\d+">\s*<rect [^>]*/>\s*</clipPath>\s*| clip-path="url\(#terminal-line-\d+\)"'
)


def normalised(svg: str) -> str:
    """Take from a picture what differs from one drawing to the next, the random prefix of its classes, and what shows
    nothing: the fonts that it would load from elsewhere, and a frame around each line, which its length keeps."""
    prefix = re.search(r"terminal-(\d+)-matrix", svg)
    assert prefix is not None, "this is no picture of a terminal"
    return _CLIPPED.sub("", _FROM_ELSEWHERE.sub("", svg.replace(f"terminal-{prefix[1]}", "terminal")))


def assert_picture(name: str, svg: str, directory: Path = GOLDEN) -> None:
    """Fail unless the picture is what the golden file holds; the new one lies beside it then."""
    _assert_same(directory / f"{name}.svg", normalised(svg))


def assert_text(name: str, lines: list[str]) -> None:
    """Fail unless the lines of the screen are those of the golden file; the new ones lie beside it then."""
    _assert_same(GOLDEN / f"{name}.txt", "".join(f"{line.rstrip()}\n" for line in lines))


def _assert_same(path: Path, drawn: str) -> None:
    new = path.with_suffix(f".new{path.suffix}")
    if os.environ.get("DDPDOCTOR_UPDATE_GOLDEN") == "1":
        path.write_text(drawn, encoding="utf-8")
    if path.exists() and drawn == path.read_text(encoding="utf-8"):
        new.unlink(missing_ok=True)
        return
    new.write_text(drawn, encoding="utf-8")
    raise AssertionError(f"{path.name} is not what is drawn now; look at {new.name} beside it")
