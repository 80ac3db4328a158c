"""The core knows no code of a check, and each trouble that it knows has the one check that speaks for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from ddpdoctor.finding import Trouble
from tests.house.test_layout import PACKAGE, python_files
from tests.index_of_checks import STANDS_FOR

LEFT = 16
"""Lines of the core that name a code, at most: the core's own findings (unused suppressions, the gate's) where they are
defined, and examples in the documentation of the settings. New code asks ``Check.stands_for``."""


def test_no_more_lines_of_the_core_name_a_code() -> None:
    files = [path for path in python_files() if path.is_relative_to(PACKAGE)]
    found = [f"{path.relative_to(PACKAGE)}:{number}" for path in files for number in _lines(path)]
    assert len(found) <= LEFT, found


def test_each_trouble_has_one_check_that_speaks_for_it() -> None:
    """But what a rehearsal's own machine lacks, which is nobody's finding."""
    assert sorted((*STANDS_FOR.values(), "lacking-machine")) == sorted(get_args(Trouble))


def _lines(path: Path) -> list[int]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if re.search(r'"DDP\d', line)]
