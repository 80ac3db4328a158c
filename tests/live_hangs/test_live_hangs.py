"""Jobs that hang are named while they are watched and at their end; jobs that go on are not.

``python -m tests.live_hangs`` prints the whole table, ``--times 5`` and ``--load`` make it the one of the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live_hangs.healthy import NEAR_HANGS, QUICK
from tests.live_hangs.run import ENDINGS, run_hang, run_healthy
from tests.live_hangs.table import HANGS

LATE = "told only after"
"""How soon a row is told is a matter of the table, on a machine that does nothing else."""
ROWS = tuple(HANGS)


def _wrong(name: str, folder: Path) -> list[str]:
    outcome = run_hang(name, HANGS[name], folder, ENDINGS[ROWS.index(name) % len(ENDINGS)])
    return [wrong for wrong in outcome.wrong if not wrong.startswith(LATE)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in ROWS if HANGS[name].quick])
def test_a_hang_is_named_and_stays_the_verdict(name: str, tmp_path: Path) -> None:
    assert _wrong(name, tmp_path) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", QUICK)
def test_a_job_that_goes_on_is_not_called_stalled(name: str, tmp_path: Path) -> None:
    assert run_healthy(name, NEAR_HANGS[name], tmp_path).wrong == ()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in ROWS if not HANGS[name].quick])
def test_every_other_hang(name: str, tmp_path: Path) -> None:
    assert _wrong(name, tmp_path) == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in NEAR_HANGS if name not in QUICK])
def test_every_other_job_that_goes_on(name: str, tmp_path: Path) -> None:
    assert run_healthy(name, NEAR_HANGS[name], tmp_path).wrong == ()
