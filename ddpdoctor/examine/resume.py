"""Proves that a job goes on where it stopped: rehearses it past a checkpoint, and starts it again from there."""

from __future__ import annotations

import ast
import json
import math
import os
import shlex
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ddpdoctor.catalogue.registry import load, read_catalogue
from ddpdoctor.catalogue.run_checks import CheckResult, run_restart_checks
from ddpdoctor.diagnosis.resume import checkpoint_of, goes_on, loads_of, places_of, saved_at_signal
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.rehearsal_result import judge
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.finding import Location, Severity
from ddpdoctor.launch.request import SIGNALLED, TORN, Progress, RehearsalRequest
from ddpdoctor.record.model import Restart

if TYPE_CHECKING:
    from ddpdoctor.catalogue.registry import CatalogueEntry
    from ddpdoctor.record.model import RunRecord
    from ddpdoctor.source.script.script import Script

RehearseOnce = Callable[[RehearsalRequest], "tuple[RunRecord, RehearsalSection]"]
Start = Callable[["_Left", Sequence[str], "Path | None"], "tuple[RunRecord, RehearsalSection]"]
_OPTION = regex(
    r"--?(auto[-_]?)?resume([-_](from|path|ckpt|checkpoint|file|model|training|from[-_](checkpoint|path|ckpt)))*"
)
"""As public training scripts call it: torch's ImageNet example has ``--resume``, timm and the Trainer's scripts
``--resume_from_checkpoint``, detectron2 and nanoGPT's followers ``--resume`` as a flag."""
_KEYWORDS = ("ckpt_path", "resume_from_checkpoint")
"""By which ``Trainer.fit`` of Lightning and ``Trainer.train`` of transformers are told."""
_OF_DATACLASSES = "HfArgumentParser"
"""It makes options of the fields of transformers' ``TrainingArguments``."""
_STORES_TRUE = "store_true"
MOST_BYTES = 1 << 20
FILE = "{checkpoint}"
"""In ``--resume-with`` the place of the file that the first start wrote."""


class Resumed(NamedTuple):
    """What came of it."""

    result: CheckResult
    note: str
    """How it was done, or why it could not be, as a sentence of the rehearsal's section."""


def with_restart(
    request: RehearsalRequest,
    script: Script,
    given: str | None,
    on_progress: Callable[[Progress], None],
    results: Sequence[CheckResult],
    rehearsal: RehearsalSection,
    *,
    torn: bool,
    ranks: int,
) -> tuple[tuple[CheckResult, ...], RehearsalSection]:
    """Return the results with what a restart shows, and the section of the rehearsal with what was done for it."""
    from ddpdoctor.monitor.rehearsal import rehearse

    def once(one: RehearsalRequest) -> tuple[RunRecord, RehearsalSection]:
        record = rehearse(one, on_progress)
        return record, judge(record, str(Path.cwd()))

    judge_of_restarts = next(entry for entry in read_catalogue().entries if load(entry).in_restart is not None)
    try:
        proved, note = prove_resume(request, script, given, once, judge_of_restarts, torn=torn, ranks=ranks)
    except DdpDoctorError as error:
        proved, note = _gap(judge_of_restarts, error.message)
    others = tuple(result for result in results if result.code != proved.code)
    own = next((result for result in results if result.code == proved.code), proved)
    # What the source suspects may be one of the differences, which are found at other lines.
    clear = not proved.from_run
    merged = msgspec.structs.replace(own, from_run=proved.from_run, gap=proved.gap or own.gap, looked_at_run=clear)
    return (*others, merged), msgspec.structs.replace(rehearsal, notes=(*rehearsal.notes, note))


def prove_resume(
    request: RehearsalRequest,
    script: Script,
    given: str | None,
    rehearse_once: RehearseOnce,
    check: CatalogueEntry,
    *,
    torn: bool = False,
    ranks: int = 0,
) -> Resumed:
    """Rehearse both starts, and have a check compare them; with ``torn`` one more after a save that was broken off.

    ``given`` is what the user says of the script's own option. The second start has so many ``ranks``; 0 for as many as
    the first one.
    """
    request = msgspec.structs.replace(request, spent_s=0.0)
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-resume-") as folder:
        first, section = rehearse_once(msgspec.structs.replace(request, snapshot_into=Path(folder)))
        newest = max((row.ordinal for row in first.resume_steps), default=0)
        left = _left(Path(folder), "second-*", newest)
        save = None if left is None else checkpoint_of(first, left.step)
        if left is None or save is None:
            return _gap(check, _why_none(first, section))
        others = {one.path for one in first.resume_saves if one.path != save.path}
        file = _file_of(save.path, [path for path in left.files if path not in others], left)
        options = _options(script, given, file)
        base = msgspec.structs.replace(request, nproc=ranks or request.nproc)

        def start(left: _Left, words: Sequence[str], into: Path | None = None) -> tuple[RunRecord, RehearsalSection]:
            told = msgspec.structs.replace(base, arguments=(*base.arguments, *words), restore_from=left.folder)
            return rehearse_once(msgspec.structs.replace(told, snapshot_into=into))

        second, again = start(left, options)
        if file in options and again.status == "failed" and not loads_of(second, left.files):
            # Libraries that write several files are given their folder.
            options = [os.path.dirname(file) or "." if word == file else word for word in options]
            second, again = start(left, options)
        broken = _left(Path(folder), TORN) if torn else None
        third = None if broken is None else start(broken, options)[0]
        whole = broken.whole() if broken is not None else ()
        shown = shlex.join(options)
        many = f" on {ranks} ranks" if ranks else ""
        how = f"started again{many}{f' with `{shown}`' if shown else ''} from the checkpoint after step {left.step}"
        restart = Restart(
            first=first,
            second=second,
            torn=third,
            torn_files=tuple(broken.torn) if broken is not None else (),
            whole_files=whole,
            step=left.step,
            files=tuple(left.files),
            how=how,
            own_code=_own_code(script, places_of(save, first, loads_of(second, left.files), second)),
        )
        (result,) = run_restart_checks((check,), restart)
        signalled = ""
        handles = not ranks and goes_on(second, left.files) and any(row.handled for row in second.resume_steps)
        wrong = any(one.severity == Severity.ERROR for one in result.from_run)
        if handles and not wrong:
            restart, signalled = _with_signal(restart, left, options, file, Path(folder), start)
            (result,) = run_restart_checks((check,), restart)
    if again.status == "failed" and not second.resume_steps and not wrong:
        gap, note = _gap(check, f"{how}, the script failed: {again.reason}")
        return Resumed(msgspec.structs.replace(gap, from_run=result.from_run), note)
    looked = "" if not torn else "; " + ("and once more from a torn save" if third else "no save could be torn")
    compared = "the steps after it were compared" if second.resume_steps else "it ended before its first step"
    return Resumed(result, f"{how}: {result.gap or compared}{looked}{signalled}")


def _own_code(script: Script, places: tuple[Location | None, Location | None]) -> Mapping[str, tuple[str, str]]:
    from ddpdoctor.source.queries.checkpoint_code import own_code

    save, load = places
    return own_code(script, save, load) if save is not None and load is not None else {}


def _with_signal(
    restart: Restart, before: _Left, options: Sequence[str], file: str, snapshot: Path, start: Start
) -> tuple[Restart, str]:
    """Add the start that a scheduler's signal ends, and the one that finds what was saved then; and say what was done.

    ``before`` is what the second start found, and ``options`` are the script's to resume from a ``file`` of it.
    """
    ended, _ = start(before, options, snapshot)
    name = signal.Signals(next(row.handled for row in restart.second.resume_steps if row.handled)).name
    sent = f"{name} was sent to every rank right after a step, in the middle of an epoch"
    save, left = saved_at_signal(ended), _left(snapshot, SIGNALLED)
    if save is None or left is None:
        return msgspec.structs.replace(restart, ended=ended, how_resumed=sent), f"; {sent}, which then saved nothing"
    newest = _file_of(save.path, list(left.files), left)
    if os.path.dirname(file) in options:
        file, newest = os.path.dirname(file), os.path.dirname(newest) or "."
    options = [newest.join(word.rsplit(file, 1)) if word.endswith(file) else word for word in options]
    resumed, _ = start(left, options, None)
    shown = f" with `{shlex.join(options)}`" if options else ""
    how = f"{sent}; started again{shown} from what was saved then, after step {restart.step + save.step}"
    restart = msgspec.structs.replace(restart, ended=ended, resumed=resumed, left=tuple(left.files), how_resumed=how)
    return restart, f"; {sent}, and it was started once more from what was saved then"


def _gap(check: CatalogueEntry, reason: str) -> Resumed:
    result = CheckResult(code=check.code, name=check.name, looked_at_run=True, gap=reason)
    return Resumed(result, f"the restart could not be judged: {reason}")


class _Left(NamedTuple):
    """What an earlier start has left."""

    folder: Path
    step: int
    """Of the newest checkpoint that is whole."""
    files: Mapping[str, str]
    """Their names in the folder, by where they belong."""
    torn: Sequence[str]
    """Where those belong of which a half is there."""

    def size(self, path: str) -> int:
        return (self.folder / self.files[path]).lstat().st_size

    def whole(self) -> tuple[str, ...]:
        """Return the files of at least half the size that the torn one would have."""
        least = min(map(self.size, self.torn), default=0)
        return tuple(path for path in self.files if path not in self.torn and self.size(path) >= least)


def _left(snapshot: Path, pattern: str, newest: float = math.inf) -> _Left | None:
    """Return the newest of the folders whose names fit, of those that steps come after up to the ``newest``; None where
    there is none that is complete.
    """
    for folder in sorted(snapshot.glob(pattern), reverse=True):
        try:
            held = json.loads(read_untrusted(folder / "places.json", MOST_BYTES))
        except (OSError, ValueError):
            continue
        if int(held["step"]) < newest:
            return _Left(folder, int(held["step"]), held["places"], held["torn"])
    return None


def _why_none(first: RunRecord, section: RehearsalSection) -> str:
    if section.status in ("failed", "stopped") and not first.resume_steps:
        return section.reason or "the script did not train"
    return (
        f"no checkpoint was written with torch.save, and followed by a step, in {section.steps} steps; an option of "
        "the script that saves more often, after `--`, or more time with `--time-limit` may make one"
    )


def _file_of(saved: str, files: Sequence[str], left: _Left) -> str:
    """Return the file of a checkpoint as the script would be given it: what was saved may have been renamed since."""
    if saved in files or any(path.startswith(f"{saved}{os.sep}") for path in files):
        return os.path.relpath(saved)
    beside = [path for path in files if os.path.dirname(path) == os.path.dirname(saved)]
    same = [path for path in beside if os.path.splitext(path)[1] in (".pt", ".pth", ".ckpt", ".tar", ".bin", ".pkl")]
    newest = max(same or beside, key=lambda path: (left.folder / left.files[path]).lstat().st_mtime_ns, default=saved)
    return os.path.relpath(newest)


def _options(script: Script, given: str | None, file: str) -> Sequence[str]:
    """Return the script's own option to resume: as the user says, or as its parser declares it; none for neither."""
    if given:
        return [word.replace(FILE, file) for word in shlex.split(given)]
    from ddpdoctor.source.script.launch_facts import declared_options

    flags: dict[str, bool] = {}
    told: list[str] = []
    for module in script.modules:
        for call in declared_options(module):
            action = next((one.value for one in call.keywords if one.arg == "action"), None)
            is_flag = isinstance(action, ast.Constant) and action.value == _STORES_TRUE
            flags.update({str(one.value): is_flag for one in call.args if isinstance(one, ast.Constant)})
        keywords = [
            one for name in ("fit", "train") for call in module.calls_by_name.get(name, ()) for one in call.keywords
        ]
        read = [one.value.attr for one in keywords if one.arg in _KEYWORDS and isinstance(one.value, ast.Attribute)]
        told += [f"--{name}" for word in read for name in (word, word.replace("_", "-"))]
        if _OF_DATACLASSES in module.calls_by_name:
            told.append("--resume_from_checkpoint")
            flags.setdefault(told[-1], False)
    found = next((name for name in flags if _OPTION.fullmatch(name)), None)
    name = found or next((name for name in told if name in flags), "")
    return [name, file][: 1 if flags.get(name) else 2] if name else []
