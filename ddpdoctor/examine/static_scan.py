"""Examines many scripts by their source and puts what they say into one diagnosis.

Scripts are given by name, found in directories, or read from stdin. Modules that several of them import are read once,
and what is found in such a module is said once.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os.path import normpath
from pathlib import Path
from typing import TypeVar

import msgspec

from ddpdoctor.catalogue.registry import Catalogue, read_catalogue
from ddpdoctor.catalogue.run_checks import run_checks
from ddpdoctor.catalogue.select import chosen_checks
from ddpdoctor.config import NO_SETTINGS, Settings, find_settings
from ddpdoctor.errors import DdpDoctorError, UnreadableScript, UsageError
from ddpdoctor.examination import Examination, not_rehearsed
from ddpdoctor.examine.one_script import ExamineRequest, conclude_all
from ddpdoctor.examine.reading import Choice, Reading, choice_of, for_findings, reading_of
from ddpdoctor.files.patterns import matches_below, python_files
from ddpdoctor.finding import Severity, shown_path
from ddpdoctor.fix import Fix
from ddpdoctor.source.script.entry_point import Library, acts, is_entry, may_be_entry
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
    """What happened to it."""

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


def survey(request: SurveyRequest) -> Survey:
    """Examine the source of every script that is meant.

    Raises UsageError when a path does not exist, UnreadableScript when the one script cannot be read,
    ConfigurationError for wrong settings. One of several that were named and cannot be read leaves the examination
    inconclusive; one that was found gives a note.
    """
    from ddpdoctor.files.untrusted import hold

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
    target = request.paths[0] if len(request.paths) == 1 else f"{len(request.paths)} paths"
    asked = ExamineRequest(
        target=request.stdin_name if target == STDIN else target,
        static=True,
        fail_on=request.fail_on or first.fail_on or Severity.WARNING,
        hint=request.hint and not request.fixes,
    )
    seconds = time.perf_counter() - started_s
    remarks = tuple(_remarks(request, targets, readings))
    examination = conclude_all(asked, readings, not_rehearsed(), catalogue, seconds, remarks)
    if not _is_one_script(request, targets):
        scripts = tuple(shown_path(str(reading.path), str(root)) for reading in readings if reading.files)
        examination = msgspec.structs.replace(examination, scripts=scripts)
    fixes = for_findings((fix for reading in readings for fix in reading.fixes), examination.findings)
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
        # Without `.` and `..`, links left as they are.
        path = Path(normpath(root / (request.stdin_name if word == STDIN else word)))
        if word == STDIN or path.is_file():
            yield from target(path, named=True)
        elif path.is_dir():
            for found in python_files(path):
                yield from target(found, named=False)
        elif not path.exists():
            raise UsageError(f"{word} does not exist")
        else:
            raise UsageError(f"{word} is neither a file nor a directory")


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

    return in_processes(jobs, targets, lambda part: list(_readings(part, request, catalogue, held)))


def _readings(
    targets: Sequence[Target], request: SurveyRequest, catalogue: Catalogue, held: Mapping[Path, bytes]
) -> Iterator[Reading]:
    import gc

    library = Library(held)
    choices = {
        id(settings): choice_of(catalogue, settings, request.select, request.ignore)
        for settings in {id(target.settings): target.settings for target in targets}.values()
    }
    script_of = partial(script_at, reader=library.read, surroundings=Surroundings())
    # Trees are large and hold few cycles: looking for cycles as often as usual took 17% of the time for 480 scripts.
    # Of 20 s for 71 scripts of packages the usual numbers of later generations took 1.2 s more; memory is the same.
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 20, 1_000)
    try:
        for target in targets:
            reading = _reading(target, request, choices[id(target.settings)], script_of, library)
            if reading is not None:
                library.release(target.path)
                yield reading
    finally:
        gc.set_threshold(*usual)


def _reading(
    target: Target,
    request: SurveyRequest,
    choice: Choice,
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
    results = run_checks(choice.entries, script, None, static=True)
    with_fixes = request.fixes or request.hint
    reading = reading_of(script, results, choice, entry=entry, static=True, with_fixes=with_fixes)
    script.__dict__.clear()  # What was computed refers back to the script: without this it stays until a collection.
    return reading


def _without_modules(readings: Sequence[Reading]) -> list[Reading]:
    """Leave out what is no entry script and was read as a module of one: there it was seen in its course."""
    imported = {file for reading in readings if reading.entry for file in reading.files[1:]}
    return [reading for reading in readings if reading.entry or str(reading.path) not in imported]


def _remarks(request: SurveyRequest, targets: Sequence[Target], readings: Sequence[Reading]) -> Iterator[str]:
    if readings:
        return
    if not targets:
        yield "nothing was examined: the given paths hold no Python file to examine"
    else:
        yield (
            f"nothing was examined: none of {len(targets)} Python files starts or joins a distributed job; pass a "
            "script explicitly to examine it anyway"
        )


Piece = TypeVar("Piece")
Result = TypeVar("Result")

SHARES = 4
"""Parts a process: the files of one directory import the same modules and stay together as far as that allows."""


def in_processes(jobs: int, pieces: Sequence[Piece], work: Callable[[Sequence[Piece]], list[Result]]) -> list[Result]:
    """Do ``work`` on runs of neighbouring ``pieces`` in ``jobs`` processes; results come in the order of the pieces.

    Raises DdpDoctorError when a process dies, and what ``work`` raises.
    """
    size = max(1, -(-len(pieces) // (jobs * SHARES)))
    parts = [pieces[start : start + size] for start in range(0, len(pieces), size)]
    # Forked processes have everything imported already and get the work without pickling; nothing here has threads.
    context = multiprocessing.get_context("fork")
    next_part = context.Value("i", 0)
    processes = []
    for _ in range(min(jobs, len(parts))):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(parts, work, next_part, sender), daemon=True)
        process.start()
        sender.close()
        processes.append((process, receiver))
    results: dict[int, list[Result]] = {}
    try:
        for process, receiver in processes:
            try:
                raw = receiver.recv_bytes()
            except EOFError:
                process.join()
                raise DdpDoctorError(
                    f"a process that examined scripts died (exit code {process.exitcode})",
                    "Examine with `-j 1` to see which script it was.",
                ) from None
            done = pickle.loads(raw)
            if isinstance(done, Exception):
                raise done
            results.update(done)
            process.join()
    finally:
        for process, receiver in processes:
            receiver.close()
            if process.is_alive():
                process.terminate()
                process.join()
    return [result for number in range(len(parts)) for result in results[number]]


def _serve(
    parts: Sequence[Sequence[Piece]],
    work: Callable[[Sequence[Piece]], list[Result]],
    next_part: object,
    sender: object,
) -> None:
    """Work on parts until none is left, and send everything at once."""
    results: dict[int, list[Result]] = {}
    try:
        while True:
            with next_part.get_lock():  # type: ignore[attr-defined]
                number = next_part.value  # type: ignore[attr-defined]
                next_part.value += 1  # type: ignore[attr-defined]
            if number >= len(parts):
                break
            results[number] = work(parts[number])
        raw = pickle.dumps(results)
    except KeyboardInterrupt:
        return
    except Exception as error:
        raw = pickle.dumps(_portable(error))
    sender.send_bytes(raw)  # type: ignore[attr-defined]


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its text, when it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DdpDoctorError(f"{type(error).__name__}: {error}")
    return error
