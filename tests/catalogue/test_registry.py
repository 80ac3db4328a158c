from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpdoctor import checks
from ddpdoctor.catalogue import registry
from ddpdoctor.catalogue.registry import (
    Catalogue,
    CatalogueEntry,
    choose,
    described,
    find,
    gone_notes,
    load,
    read_catalogue,
)
from ddpdoctor.errors import ConfigurationError, UsageError

GOOD = '''"""Ranks are counted from one.

What it finds
    Nothing.
"""
from ddpdoctor.check import Check
from ddpdoctor.finding import Severity

CHECK = Check(code="{code}", name="{name}", severity={{"source": Severity.WARNING}})


def in_source(script):
    return iter(())
'''


def test_the_built_in_checks_are_listed_without_importing_them() -> None:
    before = {name for name in sys.modules if name.startswith("ddpdoctor.checks.")}
    catalogue = read_catalogue()
    assert {entry.code for entry in catalogue.entries} >= set(checks.INDEX)
    assert {name for name in sys.modules if name.startswith("ddpdoctor.checks.")} == before


def test_no_built_in_check_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "INDEX", {})
    with pytest.raises(ConfigurationError, match="no built-in check was found"):
        read_catalogue()


def test_a_missing_package_of_checks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ddpdoctor.checks", None)
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        read_catalogue()


def test_a_built_in_check_that_cannot_be_imported_is_an_error() -> None:
    entry = CatalogueEntry(code="DDP999", name="x", module="ddpdoctor.checks.nowhere", in_source=True)
    with pytest.raises(ConfigurationError, match="DDP999 cannot be loaded: ModuleNotFoundError"):
        load(entry)


def test_a_built_in_check_that_is_not_what_the_index_says_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ddpdoctor.checks.other")
    exec(GOOD.format(code="DDP998", name="other"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = CatalogueEntry(code="DDP999", name="x", module=module.__name__, in_source=True)
    with pytest.raises(ConfigurationError, match="the index lists DDP999 x"):
        load(entry)


@pytest.mark.parametrize(
    ("select", "ignore", "codes"),
    [
        ((), (), ["DDP101", "DDP102", "DDP301"]),
        (("DDP1",), (), ["DDP101", "DDP102"]),
        (("ddp301", "missing-set-epoch"), (), ["DDP102", "DDP301"]),
        ((), ("DDP1",), ["DDP301"]),
        (("DDP1",), ("DDP102",), ["DDP101"]),
    ],
)
def test_checks_are_chosen_by_code_prefix_and_name(
    select: tuple[str, ...], ignore: tuple[str, ...], codes: list[str]
) -> None:
    assert [entry.code for entry in choose(_catalogue(), select, ignore)] == codes


@pytest.mark.parametrize(
    ("word", "meant"),
    [("missing-setepoch", "missing-set-epoch"), ("DDP103", "DDP10"), ("rank_divergent_collective", "DDP301")],
)
def test_an_unknown_word_gets_the_nearest_check(word: str, meant: str) -> None:
    with pytest.raises(UsageError, match="there is no check called") as caught:
        choose(_catalogue(), (word,), ())
    assert meant in caught.value.hint


def test_a_word_like_none_gets_the_list() -> None:
    with pytest.raises(UsageError) as caught:
        choose(_catalogue(), (), ("qqqqqq",))
    assert caught.value.hint == "Run `ddpdoctor explain` for a list of checks."


def test_leaving_no_check_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="leave no check"):
        choose(_catalogue(), ("DDP1",), ("DDP1",))


def test_one_check_is_found_by_code_or_name_in_any_case() -> None:
    assert find(_catalogue(), "ddp301").code == find(_catalogue(), "Rank-Divergent-Collective").code == "DDP301"
    with pytest.raises(UsageError):
        find(_catalogue(), "DDP3")


def test_a_check_that_went_is_found_as_the_one_that_reports_it_now() -> None:
    catalogue = read_catalogue()
    assert find(catalogue, "DDP310").code == find(catalogue, "Timeout-Unfit").code == "DDP307"
    assert [entry.code for entry in choose(catalogue, ("ddp310",), ())] == ["DDP307"]
    left = {entry.code for entry in choose(catalogue, (), ("DDP402", "full-precision-matmul"))}
    assert {entry.code for entry in catalogue.entries} - left == {"DDP401"}
    (note,) = gone_notes(catalogue, ("DDP402", "DDP401"))
    assert note == "DDP402 (poor-overlap) is part of DDP401 since 0.1.0, which is taken instead"
    with pytest.raises(UsageError, match="there is no check called 'DDP407' any more") as caught:
        find(catalogue, "DDP407")
    assert caught.value.hint == "DDP407 (full-precision-matmul) is no longer there since 0.1.0"


def test_a_code_that_went_is_given_to_no_other_check_and_its_successor_is_there() -> None:
    assert not checks.GONE.keys() & checks.INDEX.keys()
    assert {went.into for went in checks.GONE.values()} - {""} <= checks.INDEX.keys()
    names = {entry.name for entry in read_catalogue().entries}
    assert not names & {went.name for went in checks.GONE.values()}


def test_a_check_of_another_package_is_found_and_loaded(site: Path) -> None:
    _offer(site, "good_check", GOOD.format(code="XYZ001", name="ranks-from-one"))
    catalogue = read_catalogue()
    assert catalogue.notes == ()
    entry = find(catalogue, "XYZ001")
    assert entry.in_source
    assert load(entry).documentation.startswith("Ranks are counted from one.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import there_is_no_such_module", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("CHECK = 1", "TypeError: broken_check has no CHECK"),
        (GOOD.format(code="DDP101", name="mine"), "taken"),
        (GOOD.format(code="XYZ002", name="missing-set-epoch"), "taken"),
        ("def", "SyntaxError"),
    ],
)
def test_a_broken_check_of_another_package_is_noted_and_skipped(site: Path, text: str, reason: str) -> None:
    _offer(site, "broken_check", text)
    catalogue = read_catalogue()
    (note,) = catalogue.notes
    assert note.startswith("the check 'broken_check' of another-package was skipped: ")
    assert reason in note
    assert {entry.code for entry in catalogue.entries} == set(checks.INDEX)


def test_metadata_is_only_read_when_a_package_names_the_group(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not registry.may_offer(str(site))
    _offer(site, "good_check", "")
    assert registry.may_offer(str(site))
    assert not registry.may_offer(str(site / "nowhere"))
    monkeypatch.chdir(site)
    assert registry.may_offer("")


def test_a_zip_file_on_the_path_may_offer_anything(tmp_path: Path) -> None:
    archive = tmp_path / "library.zip"
    archive.write_bytes(b"")
    assert registry.may_offer(str(archive))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("good_check", "broken_check"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def _offer(site: Path, name: str, text: str) -> None:
    (site / f"{name}.py").write_text(text)
    metadata = site / "another_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[ddpdoctor.checks]\n{name} = {name}\n")


def _catalogue() -> Catalogue:
    names = {
        "DDP101": "missing-distributed-sampler",
        "DDP102": "missing-set-epoch",
        "DDP301": "rank-divergent-collective",
    }
    entries = (CatalogueEntry(code=code, name=name, module="x", in_source=True) for code, name in names.items())
    return Catalogue(entries=tuple(entries))


def test_what_a_check_says_of_itself_is_read_from_its_file_as_its_module_has_it() -> None:
    for entry in read_catalogue().entries:
        read, loaded = described(entry), load(entry)
        assert (read.check, read.documentation) == (loaded.check, loaded.documentation)
        for name in ("in_source", "in_run"):
            assert (getattr(read, name) is None) is (getattr(loaded, name) is None), (entry.code, name)
