from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpdoctor.catalogue.registry import CatalogueEntry, load, read_catalogue
from ddpdoctor.check import LoadedCheck
from ddpdoctor.checks import AFTER_LAUNCH, BUILT_IN, READ_IN_SOURCE
from ddpdoctor.finding import Severity
from ddpdoctor.record.streams.stream_names import STREAMS
from ddpdoctor.report.explanation import SECTIONS, sections, summary

CHECKS = Path(__file__).parents[2] / "checks"
MAXIMUM_LINES = 200
ENTRIES = {entry.code: entry for entry in read_catalogue().entries if entry.code in BUILT_IN}
every_check = pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.code)


def test_the_index_holds_every_file_and_no_other() -> None:
    places = [path for path in CHECKS.glob("*/*") if path.name not in {"__init__.py", "__pycache__", "shared"}]
    found = [".".join(("ddpdoctor.checks", *path.relative_to(CHECKS).with_suffix("").parts)) for path in places]
    assert sorted(found) == sorted(BUILT_IN.values())


def test_names_are_unique_and_codes_are_in_order() -> None:
    assert len({entry.name for entry in ENTRIES.values()}) == len(BUILT_IN)
    assert list(BUILT_IN) == sorted(BUILT_IN)
    assert all(re.fullmatch(r"DDP[1-7]\d\d", code) for code in BUILT_IN)


@every_check
def test_the_index_says_what_the_check_looks_at(entry: CatalogueEntry) -> None:
    assert (load(entry).in_source is not None) == (entry.code in READ_IN_SOURCE)


@every_check
def test_the_index_says_which_checks_need_the_job_itself(entry: CatalogueEntry) -> None:
    bases = set(load(entry).check.severity)
    assert (entry.code in AFTER_LAUNCH) == entry.after_launch == bases.isdisjoint({"source", "rehearsal"})


@every_check
def test_a_check_is_documented_in_every_section(entry: CatalogueEntry) -> None:
    documentation = load(entry).documentation
    assert 10 < len(summary(documentation)) < 200
    found = sections(documentation)
    assert list(found) == list(SECTIONS)
    assert all(found.values())


@every_check
def test_a_check_has_a_severity_for_what_it_looks_at(entry: CatalogueEntry) -> None:
    check = load(entry)
    bases = {basis for basis, function in _functions(check) if function is not None}
    assert bases <= set(check.check.severity)
    assert all(isinstance(severity, Severity) for severity in check.check.severity.values())


@every_check
def test_a_check_of_runs_names_streams_that_exist(entry: CatalogueEntry) -> None:
    check = load(entry)
    assert check.check.needs | check.check.needs_of("run") <= set(STREAMS)
    assert (check.in_run is not None) == bool(check.check.needs)


@every_check
def test_a_check_is_a_short_file(entry: CatalogueEntry) -> None:
    place = CHECKS.parent / Path(*entry.module.split(".")[1:])
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    assert len(path.read_text().splitlines()) <= MAXIMUM_LINES


def _functions(check: LoadedCheck) -> tuple[tuple[str, object], ...]:
    return (("source", check.in_source), (_run_basis(check), check.in_run))


def _run_basis(check: LoadedCheck) -> str:
    """Which kind of run a check looks at, where it looks at one."""
    return "rehearsal" if "rehearsal" in check.check.severity else "run"
