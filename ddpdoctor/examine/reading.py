"""What is known of each script that is examined, and how that of several becomes one diagnosis."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.catalogue.run_checks import CheckResult, bounds_of
from ddpdoctor.catalogue.select import (
    UNUSED_SUPPRESSION,
    Suppression,
    chosen_checks,
    comments_of,
    judged_codes,
    pre_launch,
    unignored,
    wants_unused_suppressions,
    words_gone,
)
from ddpdoctor.examination import SourceSection
from ddpdoctor.finding import Finding, Location, shown_path
from ddpdoctor.source.queries.subjects import is_recognised

if TYPE_CHECKING:
    from ddpdoctor.catalogue.registry import Catalogue, CatalogueEntry
    from ddpdoctor.catalogue.run_checks import CheckResult
    from ddpdoctor.config import Settings
    from ddpdoctor.examination import Examination
    from ddpdoctor.fix import Fix
    from ddpdoctor.source.script.script import Script


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which checks look at a script, and which of their findings the user wants to hear."""

    entries: tuple[CatalogueEntry, ...]
    catalogue: Catalogue
    settings: Settings
    select: tuple[str, ...]
    """Of the command line, as ``ignore``."""
    ignore: tuple[str, ...]

    @property
    def judges_comments(self) -> bool:
        """Comments that suppress nothing are findings."""
        return wants_unused_suppressions(self.select, self.ignore, self.settings)

    @property
    def words_gone(self) -> tuple[str, ...]:
        """What became of checks that were named and that there no longer are."""
        return tuple(words_gone(self.catalogue, self.select, self.ignore, self.settings))


def choice_of(catalogue: Catalogue, settings: Settings, select: tuple[str, ...], ignore: tuple[str, ...]) -> Choice:
    """Choose the checks of a script by the command line and the settings; raises what ``chosen_checks`` does."""
    entries = pre_launch(chosen_checks(catalogue, select, ignore, settings))
    return Choice(entries=entries, catalogue=catalogue, settings=settings, select=select, ignore=ignore)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to reading one script, and what the checks say of it: of its source, and of its rehearsal."""

    path: Path
    """Absolute."""
    files: tuple[str, ...] = ()
    """Absolute paths of what was read."""
    entry: bool = False
    recognised: bool = False
    """Something of a distributed training was found in it."""
    notes: tuple[str, ...] = ()
    failed: bool = False
    """It could not be read; the note says why."""
    results: tuple[CheckResult, ...] = ()
    comments: Mapping[str, tuple[Suppression, ...]] = {}
    judged: frozenset[str] = frozenset()
    """Codes of the checks that looked at all there is."""
    fixes: tuple[Fix, ...] = ()


def reading_of(
    script: Script,
    results: Sequence[CheckResult],
    choice: Choice,
    *,
    entry: bool,
    static: bool,
    cut_short: bool = False,
    judges_comments: bool = True,
    with_fixes: bool = False,
) -> Reading:
    """Put together what the checks said of a script; only comments of an entry script are judged."""
    fixes: tuple[Fix, ...] = ()
    if with_fixes:
        fixes = tuple(offers(choice.entries, results, script))
    comments = comments_of(script)
    judged: frozenset[str] = frozenset()
    if comments and entry and judges_comments and choice.judges_comments:
        judged = judged_codes(choice.entries, results, static=static, cut_short=cut_short) | {UNUSED_SUPPRESSION}
    return Reading(
        path=script.path,
        files=tuple(str(module.path) for module in script.modules),
        entry=entry,
        recognised=is_recognised(script),
        notes=(*script.notes, *choice.words_gone, *bounds_of(results)),
        results=unignored(results, choice.settings, choice.catalogue),
        comments=comments,
        judged=judged,
        fixes=fixes,
    )


def source_section(readings: Sequence[Reading], seconds: float) -> SourceSection:
    """Return what happened to all sources, which took so many seconds to read."""
    return SourceSection(
        status="failed" if any(reading.failed for reading in readings) else "read",
        files=len({file for reading in readings for file in reading.files}),
        seconds=round(seconds, 3),
        notes=tuple(dict.fromkeys(note for reading in readings for note in reading.notes)),
    )


def comments_in(readings: Sequence[Reading]) -> tuple[dict[str, tuple[Suppression, ...]], dict[str, frozenset[str]]]:
    """Comments by file, and by file the codes that are judged: of a shared module, those that all scripts judged."""
    by_file: dict[str, tuple[Suppression, ...]] = {}
    judged: dict[str, frozenset[str]] = {}
    for reading in readings:
        by_file.update(reading.comments)
        for file in reading.comments if reading.judged else ():
            judged[file] = judged.get(file, reading.judged) & reading.judged
    return by_file, judged


def together(readings: Sequence[Reading], root: str) -> tuple[CheckResult, ...]:
    """One result a check: what several scripts find at one place is kept once, the worst of it."""
    if len(readings) == 1:
        return readings[0].results
    silent: dict[str, CheckResult] = {}
    by_code: dict[str, list[tuple[Reading, CheckResult]]] = {}
    counts: Counter[str] = Counter()
    for reading in readings:
        counts.update([result.code for result in reading.results])
        for result in reading.results:
            if result.from_source or result.gap or result.crashed or result.bound_hit:
                by_code.setdefault(result.code, []).append((reading, result))
            else:
                silent[result.code] = result
    return tuple(
        _one_result(by_code[code], root, count) if code in by_code else silent[code]
        for code, count in sorted(counts.items())
    )


def _one_result(said: Sequence[tuple[Reading, CheckResult]], root: str, scripts: int) -> CheckResult:
    """Return what a check said of some of ``scripts`` scripts."""
    findings: dict[tuple[Location | None, int, str], Finding] = {}
    first_at: dict[Location, tuple[Location | None, int, str]] = {}
    for number, (_, result) in enumerate(said):
        for finding in result.from_source:
            place = finding.location
            key = (place, number, finding.title)
            first = key if place is None else first_at.setdefault(place, key)
            # One script may find two things at one place; what another script finds there is the same again.
            if first[1] == number:
                findings[key] = finding
            elif findings[first].severity is not finding.severity and finding.severity.at_least(
                findings[first].severity
            ):
                findings[first] = finding
    short = [(reading, result) for reading, result in said if result.gap]
    told = [f"{shown_path(str(reading.path), root)}: {result.gap}" for reading, result in short]
    needs_run = len(short) == scripts and len({result.gap for _, result in short}) == 1
    gap = short[0][1].gap if needs_run else "; ".join(told)
    return msgspec.structs.replace(
        said[0][1],
        from_source=tuple(findings.values()),
        gap=gap,
        bound_hit=any(result.bound_hit for _, result in said),
        crashed=any(result.crashed for _, result in said),
    )


def offered(modules: Iterable[tuple[str, Sequence[Finding]]], script: Script) -> Iterator[Fix]:
    """Yield the fixes that checks, named by their modules, offer for their findings; one that fails offers none."""
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
