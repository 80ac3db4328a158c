"""The number of a call chain: one for the same lines, however often they run, another for any other line."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.probe.journal import Journal
from ddpdoctor.record import layout


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(str(tmp_path), {"project_root": str(Path(__file__).parents[2])})


def sites(journal: Journal) -> list[list[Any]]:
    lines = Path(journal.run_directory, layout.EVENTS_FILE.format(os.getpid())).read_text().splitlines()
    return [event["frames"] for event in map(json.loads, lines) if event["event"] == "site"]


def here(journal: Journal) -> int:
    return journal.site(sys._getframe(1))


def test_a_line_that_runs_again_has_the_same_number(journal: Journal) -> None:
    numbers = {here(journal) for _ in range(3)}
    assert len(numbers) == 1
    assert len(sites(journal)) == 1


def test_two_calls_on_one_line_are_one_site_and_two_lines_are_two(journal: Journal) -> None:
    one, other = here(journal), here(journal)
    third = here(journal)
    assert one == other != third


def test_callers_tell_chains_apart(journal: Journal) -> None:
    def inner() -> int:
        return here(journal)

    first = inner()
    second = inner()
    assert first != second
    (inside, caller), (inside_again, next_caller) = (frames[:2] for frames in sites(journal))
    assert inside == inside_again
    assert caller[1] + 1 == next_caller[1]


def test_code_that_is_gone_never_lends_its_number_to_other_code(journal: Journal) -> None:
    numbers = []
    for line in range(1, 30):
        source = "\n" * line + "number = journal.site(sys._getframe(0))"
        space: dict[str, Any] = {"journal": journal, "sys": sys}
        exec(compile(source, str(Path(__file__).with_name("made_up.py")), "exec"), space)
        numbers.append(space["number"])
        del space
        gc.collect()
    assert len(set(numbers)) == 29
    assert [frames[0][1] for frames in sites(journal)] == list(range(2, 31))
