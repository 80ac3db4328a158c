"""A few rows of the table of ``python -m tests.no_harm``, and all of it with ``-m full``."""

from __future__ import annotations

import os

import pytest

from tests.no_harm.__main__ import every_escape, rows
from tests.no_harm.escapes.judge import Powers, escapes
from tests.no_harm.escapes.rows import ESCAPES
from tests.no_harm.rehearsal import Mode, judged, modes
from tests.no_harm.ways import WAYS

_SAMPLE = (
    "Python: rmtree",
    "Python: open append",
    "shell: rm -rf folder",
    "git: git commit -am more",
    "C: shared mapping",
)


@pytest.mark.timeout(300)
def test_a_sample_of_ways_leaves_everything_as_it_was() -> None:
    mode = modes()[0]
    ways = [way for way in WAYS if way.label in _SAMPLE and way.is_here and (mode == "overlay" or way.by == "Python")]
    found = list(judged(ways, mode, at_once=len(ways)))
    assert [row for row in found if row.verdict != "held"] == []
    assert len(found) == len(ways) > 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("powers", ["root", "user"])
def test_a_sample_of_ways_out_reaches_nothing(powers: Powers) -> None:
    if "overlay" not in modes() or (powers == "root" and os.geteuid() != 0):
        pytest.skip("no box of that kind can be made here")
    found = list(escapes("overlay", powers, only="socket"))
    assert [row for row in found if row.verdict != "held"] == []
    assert len(found) > 15


def test_there_are_more_than_120_ways() -> None:
    assert len({way.label for way in WAYS}) == len(WAYS) > 120


def test_there_are_more_than_60_ways_out() -> None:
    assert len({escape.name for escape in ESCAPES}) == len(ESCAPES) > 60


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["overlay", "no overlay"])
def test_no_way_out_is_left_unsaid(mode: Mode) -> None:
    if mode not in modes():
        pytest.skip("no overlay here")
    assert [row for row in every_escape(mode) if row.verdict == "lost"] == []


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["overlay", "no overlay"])
def test_nothing_of_the_user_is_lost(mode: Mode) -> None:
    if mode not in modes():
        pytest.skip("no overlay here")
    assert [row for row in rows(mode) if row.verdict == "lost"] == []
