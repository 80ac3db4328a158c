"""Asks the checks for fixes of what they found."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.finding import Finding
from ddpdoctor.fix import Fix

if TYPE_CHECKING:
    from ddpdoctor.catalogue.registry import CatalogueEntry
    from ddpdoctor.catalogue.run_checks import CheckResult
    from ddpdoctor.examination import Examination
    from ddpdoctor.source.script.script import Script


def offered(modules: Iterable[tuple[str, Sequence[Finding]]], script: Script) -> Iterator[Fix]:
    """Yield the fixes that checks, named by their modules, offer for their findings; a check that fails here offers
    none.
    """
    for name, findings in modules:
        if not findings:
            continue
        function = getattr(importlib.import_module(name), "fixes", None)
        if not callable(function):
            continue
        for finding in findings:
            try:
                yield from list(function(script, finding))
            except Exception:
                continue


def offers(entries: Sequence[CatalogueEntry], results: Sequence[CheckResult], script: Script) -> Iterator[Fix]:
    """Return the fixes for all that the checks found in a source."""
    modules = {entry.code: entry.module for entry in entries}
    return offered(((modules[result.code], result.from_source) for result in results), script)


def with_hint(examination: Examination, fixes: Iterable[Fix]) -> Examination:
    """Note which findings ``--diff`` shows a patch for, and which of them ``--fix`` mends."""
    standing = for_findings(fixes, examination.findings)
    codes, safe = _codes(standing), _codes(fix for fix in standing if fix.safe)
    if not codes:
        return examination
    made = "" if not safe else "; `--fix` applies it" if safe == codes else f"; `--fix` applies what is safe: {safe}"
    note = f"`--diff` shows a patch for {codes}{made}"
    return msgspec.structs.replace(examination, notes=(*examination.notes, note))


def _codes(fixes: Iterable[Fix]) -> str:
    return " and ".join(", ".join(sorted({fix.code for fix in fixes})).rsplit(", ", 1))


def for_findings(fixes: Iterable[Fix], findings: Sequence[Finding]) -> tuple[Fix, ...]:
    """Keep, each once, the fixes of findings that stand."""
    standing = {(finding.code, finding.location) for finding in findings}
    return tuple(dict.fromkeys(fix for fix in fixes if (fix.code, fix.location) in standing))
