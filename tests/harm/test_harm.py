"""A job trains on, to the same weights, whatever befalls the probe; the whole table: ``python -m tests.harm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harm.harms import weights


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return weights("nothing", tmp_path_factory.mktemp("harm") / "unwatched", watched=False)


@pytest.mark.parametrize(
    "harm", ["nothing", "planted exceptions", pytest.param("many modules", marks=pytest.mark.long)]
)
def test_a_watched_job_comes_to_the_same_weights(harm: str, expected: list[str], tmp_path: Path) -> None:
    assert weights(harm, tmp_path / "job") == expected
