"""Examines many scripts by their source and puts what they say into one diagnosis.

Scripts are given by name, found in directories, or read from stdin. Modules that several of them import are read once,
and what is found in such a module is said once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ddpdoctor.catalogue.registry import Catalogue, CatalogueEntry, read_catalogue
from ddpdoctor.catalogue.run_checks import CheckResult, bounds_of, run_checks
from ddpdoctor.catalogue.select import (
    UNUSED_SUPPRESSION,
    chosen_checks,
    comments_of,
    heard,
    judged_codes,
    judging,
    pre_launch,
    wants_unused_suppressions,
)
from ddpdoctor.config.settings import NO_SETTINGS, Settings, find_settings
from ddpdoctor.config.suppressions import Suppression
from ddpdoctor.errors import DdpDoctorError, UnreadableScript, UsageError
from ddpdoctor.examination import Examination, SourceSection, not_rehearsed
from ddpdoctor.examine.fix_offers import for_findings, offers, with_hint
from ddpdoctor.examine.one_script import ExamineRequest, conclude
from ddpdoctor.files.directories import python_files
from ddpdoctor.files.patterns import matches_below
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.findings.locations import shown_path
from ddpdoctor.fix.edits import Fix
from ddpdoctor.source.script.entry_point import acts, is_entry, may_be_entry
from ddpdoctor.source.script.library import Library
from ddpdoctor.source.script.project import Surroundings
from ddpdoctor.source.script.script import Script, script_at

STDIN = "-"


class SurveyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to examine, and what counts as bad."""

    paths: tuple[str, ...]
    """Scripts, directories, and ``-`` for stdin, as the user gives them."""
    stdin: bytes | None = None
    """What stdin held, if a path is ``-``."""
    stdin_name: str = "stdin.py"
    """The file that stdin stands for: its settings, and the modules that it imports, are looked for beside it."""
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity | None = None
    """None for what the settings nearest to the first path say, or ``warning``."""
    exclude: tuple[str, ...] = ()
    """Patterns as in ``.gitignore``, relative to the working directory, besides those of the settings."""
    force_exclude: bool = False
    """Do not examine excluded scripts that were named either."""
    jobs: int = 1
    """Processes that examine."""
    fixes: bool = False
    """Ask the checks for fixes, too."""
    hint: bool = False
    """Note which findings there is a patch for."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    examination: Examination
    fixes: tuple[Fix, ...] = ()
    """For findings of the examination, in the order of files and lines."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One file that may be examined."""

    path: Path
    """Absolute."""
    settings: Settings
    named: bool
    """The user named it; otherwise it was found in a directory and counts only if it is an entry script."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the source of one script says."""

    path: Path
    files: tuple[str, ...] = ()
    """Absolute paths of what was read."""
    entry: bool = False
    notes: tuple[str, ...] = ()
    failed: bool = False
    """It could not be read; the note says why."""
    results: tuple[CheckResult, ...] = ()
    comments: Mapping[str, tuple[Suppression, ...]] = {}
    judged: frozenset[str] = frozenset()
    """Codes of the checks that looked at all there is."""
    fixes: tuple[Fix, ...] = ()


def survey(request: SurveyRequest) -> Survey:
    """Examine the source of every script that is meant.

    Raises UsageError when a path does not exist, UnreadableScript when the one script cannot be read,
    ConfigurationError for wrong settings. One of several that were named and cannot be read leaves the examination
    inconclusive; one that was found gives a note.
    """
    from ddpdoctor.files.source_text import hold

    started_s = time.perf_counter()
    root = Path.cwd()
    catalogue = read_catalogue()
    held: dict[Path, bytes] = {}
    if STDIN in request.paths:
        held[root / request.stdin_name] = request.stdin or b""
        hold(str(root / request.stdin_name), request.stdin or b"")
    found_settings: dict[Path, Settings] = {}
    targets = list(_targets(request, root, found_settings))
    for settings in {id(target.settings): target.settings for target in targets}.values():
        chosen_checks(catalogue, request.select, request.ignore, settings)
    readings = _without_modules(_read_all(targets, request, catalogue, held))
    if _is_one_script(request, targets) and readings and readings[0].failed:
        raise UnreadableScript(*readings[0].notes)
    first = next((target.settings for target in targets), NO_SETTINGS)
    fail_on = request.fail_on or first.fail_on or Severity.WARNING
    source = SourceSection(
        status="failed" if any(reading.failed for reading in readings) else "read",
        files=len({file for reading in readings for file in reading.files}),
        seconds=round(time.perf_counter() - started_s, 3),
        notes=tuple(dict.fromkeys(note for reading in readings for note in reading.notes)),
    )
    target = request.paths[0] if len(request.paths) == 1 else f"{len(request.paths)} paths"
    examination = conclude(
        ExamineRequest(target=request.stdin_name if target == STDIN else target, static=True, fail_on=fail_on),
        str(root),
        source,
        not_rehearsed(),
        _together(readings, str(root)),
        (*catalogue.notes, *_remarks(request, targets, readings)),
        judging(*_comments(readings, catalogue)),
    )
    if not _is_one_script(request, targets):
        scripts = tuple(shown_path(str(reading.path), str(root)) for reading in readings if reading.files)
        examination = msgspec.structs.replace(examination, scripts=scripts)
    fixes = for_findings((fix for reading in readings for fix in reading.fixes), examination.findings)
    if request.hint and not request.fixes:
        examination = with_hint(examination, fixes)
    return Survey(examination=examination, fixes=tuple(sorted(fixes, key=lambda fix: (fix.edits, fix.code))))


def _is_one_script(request: SurveyRequest, targets: Sequence[Target]) -> bool:
    return len(request.paths) == 1 and len(targets) == 1 and targets[0].named


def _targets(request: SurveyRequest, root: Path, known: dict[Path, Settings]) -> Iterator[Target]:
    from ddpdoctor.files.patterns import parse_patterns

    extra = Settings(directory=root, exclude=parse_patterns(request.exclude))
    seen: set[Path] = set()

    def target(path: Path, *, named: bool) -> Iterator[Target]:
        settings = _settings_of(path.parent, known)
        excluded = (not named or request.force_exclude) and (settings.excludes(path) or extra.excludes(path))
        if path not in seen and not excluded:
            seen.add(path)
            yield Target(path=path, settings=settings, named=named)

    for word in request.paths:
        path = _normal(root / (request.stdin_name if word == STDIN else word))
        if word == STDIN or path.is_file():
            yield from target(path, named=True)
        elif path.is_dir():
            for found in python_files(path):
                yield from target(found, named=False)
        elif not path.exists():
            raise UsageError(f"{word} does not exist")
        else:
            raise UsageError(f"{word} is neither a file nor a directory")


def _normal(path: Path) -> Path:
    """Without ``.`` and ``..``, links left as they are."""
    from os.path import normpath

    return Path(normpath(path))


def _settings_of(directory: Path, known: dict[Path, Settings]) -> Settings:
    if directory not in known:
        known[directory] = find_settings(directory)
    return known[directory]


def _read_all(
    targets: Sequence[Target], request: SurveyRequest, catalogue: Catalogue, held: Mapping[Path, bytes]
) -> list[Reading]:
    jobs = min(request.jobs, max(1, len(targets) // 4))
    if jobs <= 1:
        return list(_readings(targets, request, catalogue, held))
    from ddpdoctor.examine.worker_processes import in_processes

    return in_processes(jobs, targets, lambda part: list(_readings(part, request, catalogue, held)))


def _readings(
    targets: Sequence[Target], request: SurveyRequest, catalogue: Catalogue, held: Mapping[Path, bytes]
) -> Iterator[Reading]:
    import gc

    library = Library(held)
    checks_of = {
        id(settings): pre_launch(chosen_checks(catalogue, request.select, request.ignore, settings))
        for settings in {id(target.settings): target.settings for target in targets}.values()
    }
    script_of = partial(script_at, reader=library.read, surroundings=Surroundings())
    # Trees are large and hold few cycles: looking for cycles as often as usual took 17 % of the time for 480 scripts.
    # Of 20 s for 71 scripts of packages the usual numbers of later generations took 1.2 s more; memory is the same.
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 1_000)
    try:
        for target in targets:
            reading = _reading(target, request, catalogue, checks_of[id(target.settings)], script_of, library)
            if reading is not None:
                library.release(target.path)
                yield reading
    finally:
        gc.set_threshold(*usual)


def _reading(
    target: Target,
    request: SurveyRequest,
    catalogue: Catalogue,
    entries: Sequence[CatalogueEntry],
    script_of: Callable[..., Script],
    library: Library,
) -> Reading | None:
    path = target.path
    relative = target.settings.relative(path) if target.settings.entry_points else None
    listed = relative is not None and matches_below(target.settings.entry_points, relative)
    if not target.named and target.settings.entry_points and not listed:
        return None
    try:
        if not may_be_entry(library.content(path)):
            return Reading(path=path, files=(str(path),)) if target.named else None
        if not (target.named or listed) and not acts(script_of(path, follow_imports=False).entry):
            return None
        script = script_of(path)
    except OSError as error:
        return Reading(path=path, failed=target.named, notes=(f"{path} cannot be read: {error.strerror or error}",))
    except DdpDoctorError as error:
        return Reading(path=path, failed=target.named, notes=(error.message,))
    entry = listed or is_entry(script)
    if not (entry or target.named):
        return None
    results = run_checks(entries, script, None, static=True)
    comments = comments_of(script)
    judged: frozenset[str] = frozenset()
    if comments and entry and wants_unused_suppressions(request.select, request.ignore, target.settings):
        judged = judged_codes(entries, results, static=True, cut_short=False) | {UNUSED_SUPPRESSION}
    reading = Reading(
        path=path,
        files=tuple(str(module.path) for module in script.modules),
        entry=entry,
        notes=(*script.notes, *bounds_of(results)),
        results=heard(results, target.settings, catalogue),
        comments=comments,
        judged=judged,
        fixes=tuple(offers(entries, results, script)) if request.fixes or request.hint else (),
    )
    script.__dict__.clear()  # What was computed refers back to the script: without this it stays until a collection.
    return reading


def _without_modules(readings: Sequence[Reading]) -> list[Reading]:
    """Leave out what is no entry script and was read as a module of one: there it was seen in its course."""
    imported = {file for reading in readings if reading.entry for file in reading.files[1:]}
    return [reading for reading in readings if reading.entry or str(reading.path) not in imported]


def _together(readings: Sequence[Reading], root: str) -> tuple[CheckResult, ...]:
    """One result a check: what several scripts find at one place is kept once, the worst of it."""
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
    """What a check said of some of ``scripts`` scripts."""
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


def _comments(
    readings: Sequence[Reading], catalogue: Catalogue
) -> tuple[dict[str, tuple[Suppression, ...]], Catalogue, dict[str, frozenset[str]]]:
    """Comments by file; of a module that several scripts read, what all of them judged."""
    by_file: dict[str, tuple[Suppression, ...]] = {}
    judged: dict[str, frozenset[str]] = {}
    for reading in readings:
        by_file.update(reading.comments)
        for file in reading.comments if reading.judged else ():
            judged[file] = judged.get(file, reading.judged) & reading.judged
    return by_file, catalogue, judged


def _remarks(request: SurveyRequest, targets: Sequence[Target], readings: Sequence[Reading]) -> Iterator[str]:
    if readings:
        return
    if not targets:
        yield "nothing was examined: no Python file is left of what was named"
    else:
        yield (
            f"nothing was examined: none of {len(targets)} Python files starts or joins a distributed job when it is"
            " run; name a script to have it examined all the same"
        )
