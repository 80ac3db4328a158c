from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.source.script import entry_point
from ddpdoctor.source.script.entry_point import Library


def test_a_file_is_parsed_once_and_has_the_name_that_each_script_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    read = Library().read
    first, second = read(file, "a", ""), read(file, "pkg.a", "pkg")
    assert read(file, "a", "") is first
    assert (second.name, second.package) == ("pkg.a", "pkg")
    assert second.tree is first.tree


def test_held_content_counts_instead_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    assert Library({file: b"y = 2\n"}).read(file, "a", "").text == "y = 2\n"
    with pytest.raises(FileNotFoundError):
        Library().read(file, "a", "")


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_point, "MAXIMUM_KEPT_BYTES", 10)
    read = Library().read
    files = [tmp_path / f"{number}.py" for number in range(4)]
    for file in files:
        file.write_text("x = 1234567\n")
    modules = [read(file, "a", "") for file in files]
    assert read(files[-1], "a", "") is modules[-1]
    assert read(files[0], "a", "") is not modules[0]


def test_a_file_that_was_looked_into_is_not_read_again_to_be_parsed(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    kept = Library()
    assert kept.content(file) == b"x = 1\n"
    file.unlink()
    assert kept.read(file, "a", "").text == "x = 1\n"
