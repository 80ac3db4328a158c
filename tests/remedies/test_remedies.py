"""Every remedy that the source prints is applied to a broken example of its check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks.case_blocks import Case, Mend, cases_of
from tests.remedies.judge import RUNS, judged, mended_cases, not_shown, printed_remedies, rehearsed


@pytest.mark.parametrize(
    ("name", "case", "mend"),
    [pytest.param(*row, id=f"{row[0]}:{row[1].line}") for row in mended_cases()],
)
def test_the_remedy_mends_the_example_and_breaks_nothing_else(
    name: str, case: Case, mend: Mend, tmp_path: Path
) -> None:
    assert judged(name, case, mend, tmp_path).wrong == ()


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "mend"),
    [
        pytest.param(case, mend, id=f"{case.line}:{number}")
        for case in cases_of(RUNS)
        for number, mend in enumerate(case.mends)
    ],
)
def test_the_remedy_mends_the_job(case: Case, mend: Mend, tmp_path: Path) -> None:
    assert rehearsed(case, mend, tmp_path).wrong == ()


def test_every_remedy_that_is_printed_for_an_example_is_applied_to_one(tmp_path: Path) -> None:
    missing = not_shown(printed_remedies(tmp_path))
    assert not missing, "\n".join(f"{row.check}:{row.line}: {row.remedy}" for row in missing)
