"""What holds of every check; each test names all the checks that break its rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import getclosurevars, isfunction
from pathlib import Path

from ddpdoctor.catalogue.registry import CatalogueEntry, load, read_catalogue
from ddpdoctor.catalogue.write_index import check_files, checks_directory, index_text
from ddpdoctor.check import LoadedCheck
from ddpdoctor.finding import Severity
from ddpdoctor.record.model import STREAMS
from ddpdoctor.report.explanation import SECTIONS, sections, summary
from tests.index_of_checks import BUILT_IN

CHECKS = Path(__file__).parents[2] / "checks"
MAXIMUM_LINES = 600
_FILES = check_files(CHECKS)
ENTRIES = tuple(entry for entry in read_catalogue().entries if entry.code in BUILT_IN)


def test_the_index_says_what_the_checks_say() -> None:
    text = index_text(checks_directory())
    assert (CHECKS / "index.json").read_text(encoding="utf-8") == text, "run python -m ddpdoctor.catalogue.write_index"


def test_codes_and_names_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) == len(_FILES)
    assert [code for code in BUILT_IN if not re.fullmatch(r"DDP[1-7]\d\d", code)] == []


def test_a_check_is_documented_in_every_section() -> None:
    assert [entry.code for entry in ENTRIES if not _is_documented(load(entry).documentation)] == []


def test_a_check_has_a_severity_for_what_it_looks_at_and_streams_for_a_run() -> None:
    assert [problem for entry in ENTRIES for problem in _problems(load(entry))] == []


def test_a_check_of_the_source_has_words_that_no_import_splits() -> None:
    assert [entry.code for entry in ENTRIES if not _has_words(entry)] == []


def test_a_check_is_a_short_file_with_cases_if_it_reads_the_source() -> None:
    long = [path.name for path in _FILES if len(path.read_text().splitlines()) > MAXIMUM_LINES]
    assert long == []
    places = {path.stem.replace("_", "-"): path for path in _FILES}
    lacking = [
        f"{places[entry.name].stem}.md: one script that fires and one that does not"
        for entry in ENTRIES
        if entry.in_source and not places[entry.name].with_suffix(".md").exists()
    ]
    assert lacking == []


def test_the_functions_that_pass_the_verdicts_of_a_run_are_there() -> None:
    """``judged_by`` names them in text, which no type checker reads."""
    named = [getclosurevars(half).nonlocals for entry in ENTRIES if isfunction(half := load(entry).in_run)]
    targets = [(names["module"], names["name"]) for names in named if "module" in names]
    assert len(targets) > 15
    for module, name in targets:
        assert callable(getattr(import_module(f"ddpdoctor.{module}"), name)), (module, name)


def _is_documented(documentation: str) -> bool:
    found = sections(documentation)
    return 10 < len(summary(documentation)) < 200 and list(found) == list(SECTIONS) and all(found.values())


def _problems(loaded: LoadedCheck) -> Iterator[str]:
    check = loaded.check
    run = "rehearsal" if "rehearsal" in check.severity else "run"
    for basis, function in (("source", loaded.in_source), (run, loaded.in_run), ("log", loaded.in_log)):
        if function is not None and basis not in check.severity:
            yield f"{check.code} has no severity in the {basis}"
    if not all(isinstance(severity, Severity) for severity in check.severity.values()):
        yield f"{check.code} has a severity that is none"
    if unknown := (check.needs | check.needs_of("run")) - set(STREAMS):
        yield f"{check.code} needs streams that do not exist: {sorted(unknown)}"
    if (loaded.in_run is not None) != bool(check.needs):
        yield f"{check.code} looks at runs and needs no stream, or the other way round"


def _has_words(entry: CatalogueEntry) -> bool:
    words = load(entry).check.triggers
    return bool(words) == entry.in_source and all(word and "." not in word.strip(".") for word in words)
