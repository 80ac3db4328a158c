"""Asks the checks for fixes of what they found."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ddpdoctor.finding import Finding
from ddpdoctor.fix.edits import Fix

if TYPE_CHECKING:
    from ddpdoctor.source.script import Script


def offered(modules: Iterable[tuple[str, Sequence[Finding]]], script: Script) -> Iterator[Fix]:
    """The fixes that checks, named by their modules, offer for their findings; a check that fails here offers none."""
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


def for_findings(fixes: Iterable[Fix], findings: Sequence[Finding]) -> tuple[Fix, ...]:
    """Keep, each once, the fixes of findings that stand."""
    standing = {(finding.code, finding.location) for finding in findings}
    return tuple(dict.fromkeys(fix for fix in fixes if (fix.code, fix.location) in standing))
