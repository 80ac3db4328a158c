from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpdoctor.catalogue.registry import CatalogueEntry
from ddpdoctor.catalogue.run_checks import CheckResult, outcome_of, run_checks
from ddpdoctor.check import BoundHit, Check, LoadedCheck, OutcomeState
from ddpdoctor.errors import ConfigurationError
from ddpdoctor.finding import Basis, Finding, Refuted, Severity
from ddpdoctor.record.model import RunRecord, StreamState
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.script import Script
from tests.report.examples import at, finding, record

SCRIPT = Script(path=Path("train.py"), root=Path("."), modules=())
BEFORE_LAUNCH: dict[Basis, Severity] = {"source": Severity.WARNING, "rehearsal": Severity.WARNING}
COMPLETE = {"passes": StreamState("complete")}


def test_findings_and_refutations_are_told_apart() -> None:
    refuted = Refuted(location=at(15), reason="no")

    def in_run(run: RunRecord) -> Iterator[Finding | Refuted]:
        yield finding(basis="rehearsal")
        yield refuted

    said = _run(in_run=in_run)
    assert (len(said.from_run), said.refuted, said.gap, said.looked_at_run) == (1, (refuted,), "", True)


def test_a_check_that_raises_keeps_what_it_yielded_and_says_what_happened() -> None:
    def in_source(script: Script) -> Iterator[Finding]:
        yield finding()
        raise KeyError("oops")

    said = _run(in_source=in_source)
    assert len(said.from_source) == 1
    assert said.crashed
    assert said.gap == "the check failed: KeyError: 'oops'"


def test_a_check_that_raises_before_its_first_yield_or_yields_nonsense_has_failed() -> None:
    def none(script: Script) -> Any:
        return None

    def nonsense(script: Script) -> Any:
        yield "a string"

    assert _run(in_source=none).crashed
    assert _run(in_source=nonsense).crashed


def test_a_bound_is_not_a_defect() -> None:
    def in_source(script: Script) -> Iterator[Finding]:
        raise BoundHit("too many branches in train")
        yield

    said = _run(in_source=in_source)
    assert (said.bound_hit, said.crashed, said.gap) == (True, False, "too many branches in train")


@pytest.mark.parametrize("state", ["absent", "truncated"])
def test_missing_evidence_is_named(state: Any) -> None:
    streams = {"passes": StreamState(state, "the disk was full")}
    said = _run(in_run=_silent, needs=frozenset({"passes"}), run=_record(streams))
    recorded = "no passes were recorded" if state == "absent" else "only some passes were recorded"
    assert said.gap == f"{recorded} (the disk was full)"
    assert said.looked_at_run is (state == "truncated")


def test_complete_evidence_leaves_no_gap() -> None:
    assert _run(in_run=_silent, needs=frozenset({"passes"}), run=_record(COMPLETE)).gap == ""


def test_without_a_run_a_check_of_runs_has_a_gap_and_a_check_of_sources_has_none() -> None:
    assert _run(in_run=_silent, run=None).gap == "there was no rehearsal"
    assert _run(in_source=_silent, run=None).gap == ""


def test_static_asks_only_the_source() -> None:
    assert _run(in_run=_silent, run=None, static=True).gap == "needs a rehearsal"
    assert _run(in_source=_silent, in_run=_silent, run=None, static=True).gap == ""


def test_static_does_not_import_checks_of_runs() -> None:
    entry = CatalogueEntry(code="DDP998", name="x", module="there.is.no.such.module", in_source=False)
    (said,) = run_checks([entry], SCRIPT, None, static=True)
    assert said.gap == "needs a rehearsal"


def test_a_check_whose_trigger_words_do_not_occur_is_not_imported_and_had_nothing_to_look_at() -> None:
    entry = CatalogueEntry(code="DDP998", name="x", module="there.is.no.such.module", in_source=True, triggers=("ab",))
    (said,) = run_checks([entry], _script("import a, b\n"), None, static=True)
    assert said == CheckResult(code="DDP998", name="x", nothing=True)
    assert outcome_of(said, stands=False, cut_short="").state is OutcomeState.NOTHING_TO_LOOK_AT
    with pytest.raises(ConfigurationError):
        run_checks([entry], _script("cab = 1\n"), None, static=True)


def test_without_its_trigger_words_a_check_still_looks_at_the_run() -> None:
    def in_source(script: Script) -> Iterator[Finding]:
        yield finding()

    check = Check(code="DDP999", name="some-check", severity=BEFORE_LAUNCH)
    loaded = LoadedCheck(check=check, documentation="Some check.", in_source=in_source, in_run=_silent)
    entry = CatalogueEntry(
        code="DDP999", name="some-check", module="x", in_source=True, loaded=loaded, triggers=("ab",)
    )
    (said,) = run_checks([entry], _script("import a\n"), _DEFAULT, static=False)
    assert (said.from_source, said.looked_at_run) == ((), True)


def test_a_check_is_not_asked_about_a_kind_of_run_that_it_has_no_severity_for() -> None:
    live = msgspec.structs.replace(_DEFAULT, job=msgspec.structs.replace(_DEFAULT.job, kind="run"))

    def in_run(run: RunRecord) -> Iterator[Finding]:
        yield finding(basis="rehearsal")

    said = _run(in_run=in_run, needs=frozenset({"gpus"}), run=live)
    assert (said.from_run, said.looked_at_run, said.gap) == ((), False, "")
    assert len(_run(in_run=in_run).from_run) == 1


def _script(text: str) -> Script:
    module = Module(Path("train.py"), "__main__", "", text, ast.parse(text))
    return Script(path=Path("train.py"), root=Path("."), modules=(module,))


def _silent(evidence: Any) -> Iterator[Any]:
    return iter(())


def _record(streams: dict[str, StreamState]) -> RunRecord:
    return RunRecord(job=record().job, streams=streams)


_DEFAULT = record()


def _run(
    in_source: Any = None,
    in_run: Any = None,
    needs: frozenset[str] = frozenset(),
    run: RunRecord | None = _DEFAULT,
    static: bool = False,
) -> CheckResult:
    check = Check(code="DDP999", name="some-check", severity=BEFORE_LAUNCH, needs=needs)
    loaded = LoadedCheck(check=check, documentation="Some check.", in_source=in_source, in_run=in_run)
    entry = CatalogueEntry(code="DDP999", name="some-check", module="x", in_source=in_source is not None, loaded=loaded)
    (said,) = run_checks([entry], SCRIPT, run, static=static)
    return said
