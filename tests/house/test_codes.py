"""The core knows no code of a check: what is left of them may only become less."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.test_layout import PACKAGE, python_files

LEFT = 160
"""Lines of the core that name a code, at most. Divergences and incidents of logs still are known by the code of the
check that speaks for them; new code asks an attribute of ``Check``, or has a kind of its own."""


def test_no_more_lines_of_the_core_name_a_code() -> None:
    files = [path for path in python_files() if path.is_relative_to(PACKAGE)]
    found = [f"{path.relative_to(PACKAGE)}:{number}" for path in files for number in _lines(path)]
    assert len(found) <= LEFT, found


def _lines(path: Path) -> list[int]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if re.search(r'"DDP\d', line)]
