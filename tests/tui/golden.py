"""Compares a picture of the screen with a golden file beside the tests.

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
    path = directory / f"{name}.svg"
    drawn = normalised(svg)
    if os.environ.get("DDPDOCTOR_UPDATE_GOLDEN") == "1":
        path.write_text(drawn, encoding="utf-8")
    if path.exists() and drawn == path.read_text(encoding="utf-8"):
        path.with_suffix(".new.svg").unlink(missing_ok=True)
        return
    path.with_suffix(".new.svg").write_text(drawn, encoding="utf-8")
    raise AssertionError(f"{path.name} is not what is drawn now; look at {path.stem}.new.svg beside it")
