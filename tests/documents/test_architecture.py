"""What ARCHITECTURE.md and docs/internals.md name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddpdoctor"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
INTERNALS = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
_ROOMS = "|".join(path.name for path in PACKAGE.iterdir())
_PATH = re.compile(rf"`([\w/]+(?:\.py|/))`|`((?:{_ROOMS})(?:/\w+)+)`")
_NAMED_IN = re.compile(r"`([\w/]+\.py)`\s+`(\w+)`")


def test_every_path_that_the_architecture_names_is_there() -> None:
    text = " ".join((ARCHITECTURE + INTERNALS).split())
    named = {one or other for one, other in _PATH.findall(text)}
    assert len(named) > 40
    assert sorted(name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()) == []


def test_every_function_is_in_the_file_that_the_architecture_names() -> None:
    found = _NAMED_IN.findall(" ".join((ARCHITECTURE + INTERNALS).split()))
    assert len(found) > 20
    lacking = [f"{name} in {file}" for file, name in found if not _defines(file, name)]
    assert lacking == []


def test_every_room_is_in_the_table() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")}
    table = re.findall(r"^\| (`[^|]+) \|", ARCHITECTURE, re.MULTILINE)
    named = {word.strip("`/, ") for row in table for word in row.split()}
    assert sorted(rooms - named) == []


def test_the_architecture_fits_on_two_screens() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 120


def _defines(file: str, name: str) -> bool:
    path = PACKAGE / file if (PACKAGE / file).exists() else ROOT / file
    return re.search(rf"^\s*(?:def|class) {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE) is not None
