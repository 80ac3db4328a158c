"""The whole check never places or mends a cause worse than the source alone, on every script of the other tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.catalogue.registry import read_catalogue
from tests.causes.judge import EXPLAINED, worse_than_static
from tests.check_command import check
from tests.checks.case_blocks import cases_of
from tests.checks.test_cases import FILES
from tests.faults.cases import FAULTS
from tests.grid.cases import ACTIONS, PLACES, SHAPES, TESTS, grid

QUICK_EVERY = 100
"""Of so many scripts CI runs one; ``-m full`` runs the others."""
TIME_LIMIT_S = "60"
"""Of a rehearsal that sees no divergence: a case of the catalogue may have no data, or no end."""


def _of_the_grid() -> Iterator[tuple[str, dict[str, str]]]:
    """Every broken script of the grid whose four properties, taken by two, are not all in one before it."""
    seen: set[tuple[str, str]] = set()
    for case in sorted((case for case in grid() if case.broken), key=_diagonal):
        ways = case.action, case.place, case.test, case.shape
        pairs = {(one, other) for index, one in enumerate(ways) for other in ways[index + 1 :]}
        if not pairs <= seen:
            seen |= pairs
            yield f"grid: {case.name}", case.files


def _diagonal(case: Any) -> int:
    """The order in which few cases hold all pairs: neighbours differ in every property."""
    action, place = [*ACTIONS].index(case.action), PLACES.index(case.place)
    test, shape = [*TESTS].index(case.test), [*SHAPES].index(case.shape)
    return (place - action - shape) % len(PLACES) + (test - 2 * action - shape) % len(TESTS)


def _of_the_catalogue() -> Iterator[tuple[str, dict[str, str]]]:
    """Every case of the pages whose mark is one that a run may tell by its effects."""
    names = {entry.name for entry in read_catalogue().entries if entry.code in EXPLAINED}
    for path in FILES:
        for case in cases_of(path):
            if any(severity != "advice" and name in names for _, _, severity, name in case.marks):
                yield f"{path.parent.name}/{path.stem}:{case.line}", case.files


SCRIPTS = (
    *_of_the_catalogue(),
    *((f"fault: {name}", {"train.py": fault.script}) for name, fault in FAULTS.items()),
    *_of_the_grid(),
)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(files, id=name, marks=() if number % QUICK_EVERY == 0 else pytest.mark.full)
        for number, (name, files) in enumerate(SCRIPTS)
    ],
)
def test_the_whole_check_is_no_worse_than_the_source(files: dict[str, str], tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    static = check("--static", "train.py", cwd=project)[1]
    limits = ("--time-limit", TIME_LIMIT_S)
    checked = check(*limits, "train.py", cwd=project, XDG_STATE_HOME=str(tmp_path))[1]
    assert worse_than_static(static, checked) == []
