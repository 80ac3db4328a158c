from __future__ import annotations

from pathlib import Path

from ddpdoctor.files.untrusted import _lines
from ddpdoctor.finding import Finding, Location, Severity, with_fingerprints
from tests.report.examples import finding

TEXT = """import torch


def main():
    loader = DataLoader(data)
    other = DataLoader(data)
"""


def test_a_fingerprint_survives_moved_lines_and_changed_white_space(tmp_path: Path) -> None:
    before = _fingerprint(tmp_path, TEXT, 5)
    assert _fingerprint(tmp_path, "# a comment\n" + TEXT, 6) == before
    assert _fingerprint(tmp_path, TEXT.replace("DataLoader(data)", "DataLoader( data )"), 5) == before


def test_a_fingerprint_changes_with_the_line_the_code_and_the_function(tmp_path: Path) -> None:
    fingerprints = {
        _fingerprint(tmp_path, TEXT, 5),
        _fingerprint(tmp_path, TEXT, 6),
        _fingerprint(tmp_path, TEXT, 5, code="DDP102"),
        _fingerprint(tmp_path, TEXT, 5, function="train"),
    }
    assert len(fingerprints) == 4


def test_a_method_has_the_same_fingerprint_by_its_qualified_name_and_by_its_own(tmp_path: Path) -> None:
    assert _fingerprint(tmp_path, TEXT, 5, function="Trainer.main") == _fingerprint(tmp_path, TEXT, 5)


def test_equal_lines_are_told_apart_by_their_order_from_the_top(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("save()\nsave()\n")
    upper, lower = (_at(path, line) for line in (1, 2))
    first, second = with_fingerprints([upper, lower], str(tmp_path))
    assert first.fingerprint != second.fingerprint
    again_second, again_first = with_fingerprints([lower, upper], str(tmp_path))
    assert (again_first, again_second) == (first, second)


def test_a_fingerprint_does_not_depend_on_where_the_project_lies(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert _fingerprint(one, TEXT, 5) == _fingerprint(other, TEXT, 5)


def test_a_finding_without_a_place_has_a_fingerprint() -> None:
    (marked,) = with_fingerprints([finding()], "/")
    assert len(marked.fingerprint) == 16


def _fingerprint(root: Path, text: str, line: int, code: str = "DDP101", function: str = "main") -> str:
    path = root / "train.py"
    path.write_text(text)
    _lines.cache_clear()
    (marked,) = with_fingerprints([_at(path, line, code, function)], str(root))
    return marked.fingerprint


def _at(path: Path, line: int, code: str = "DDP101", function: str = "main") -> Finding:
    place = Location(file=str(path), line=line, function=function)
    return finding(code, "some-name", Severity.WARNING, place)
