"""Reads all that a dead job left under some paths into one record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import count
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from ddpdoctor.files.untrusted import reason_of
from ddpdoctor.finding import grouped
from ddpdoctor.postmortem.dumps.dump_record import DumpBook
from ddpdoctor.postmortem.dumps.dumps import LARGEST_BYTES, DumpError, Dumps
from ddpdoctor.postmortem.dumps.nccl_reports import REPORT, NcclReports
from ddpdoctor.postmortem.failed_collectives import parted
from ddpdoctor.postmortem.failures import details_of, own_rank
from ddpdoctor.postmortem.inputs import LARGEST_ERROR_FILE, Found, find_inputs, opened
from ddpdoctor.postmortem.log_reader import MARKS, LogRead, LogReader
from ddpdoctor.postmortem.prefixes import first_time, habit_of
from ddpdoctor.postmortem.tracebacks import parse
from ddpdoctor.record.model import Job, Rank, RankEnd, RankException, RunRecord
from ddpdoctor.record.streams.setup import NO_CODE, Incident, LogEvidence, StackDump

# Reads the files of a job's flight-recorder dumps, one after the other.

_NUMBER = re.compile(r"(\d{1,7})(?!.*\d)")
_SUFFIXES = re.compile(r"(?:\.(?:json|pkl|pickle|gz|bin|dump|txt))+$", re.IGNORECASE)


class DumpsRead(msgspec.Struct, kw_only=True):
    """The content of a job's dumps."""

    book: DumpBook
    read: int = 0
    written_ns: int = 0
    """When the newest file was written."""
    notes: list[str] = []
    incidents: list[Incident] = []
    doubt: str = ""
    """Why what they show is not certain, where no flight recorder wrote them."""


def read_dumps(files: Sequence[Found]) -> DumpsRead:
    """Read all dumps; one that is damaged, or of a rank that no one knows, costs a sentence."""
    dumps, told, reports = Dumps(), DumpsRead(book=DumpBook()), NcclReports()
    damaged: list[str] = []
    for found in files:
        rank = rank_of(found.name)
        try:
            with opened(found) as stream:
                content = stream.read(LARGEST_BYTES + 1)
            if REPORT.match(content):
                reports.read(found.name, content)
                told.read += 1
                continue
            dump = dumps.read(content)
        except (DumpError, OSError, EOFError) as error:
            damaged.append(f"{found.name} is not a usable dump: {reason_of(error)}")
            if rank is not None:
                told.book.without.add(rank)
            continue
        rank = rank if dump.rank is None else dump.rank
        if rank is None:
            damaged.append(f"{found.name} has a name without a rank, such as dump_rank_3")
            continue
        told.book.add(rank, dump)
        told.read += 1
        if found.path is not None:
            told.written_ns = max(told.written_ns, found.path.stat().st_mtime_ns)
    for rank, dump in reports.dumps().items():
        told.book.add(rank, dump)
    told.incidents, told.doubt = reports.incidents(), reports.doubt
    left = len(damaged) - MOST_NOTES
    more = [f"{left:,} more dumps could not be used"] if left > 0 else []
    told.notes = [*damaged[:MOST_NOTES], *more, *_lost(told.book)]
    return told


MOST_NOTES = 8


def rank_of(name: str) -> int | None:
    """Return the last number in the name of a dump."""
    match = _NUMBER.search(_SUFFIXES.sub("", PurePath(name).name))
    return int(match[1]) if match else None


def _lost(book: DumpBook) -> list[str]:
    lost = {rank: count for rank, count in book.lost.items() if count}
    if not lost:
        return []
    most = max(lost.values())
    return [
        f"the flight recorders of {len(lost):,} ranks had overwritten up to {most:,} older entries: an earlier "
        "divergence cannot be seen (TORCH_FR_BUFFER_SIZE makes the ring larger)"
    ]


# Reads torchelastic's error files: the exception of one rank as JSON, with its time.


def read_error_file(found: Found, stream: BinaryIO, positions: count[int]) -> LogRead:
    """Return the incident of an error file; raises OSError with a sentence where it is none."""
    content = stream.read(LARGEST_ERROR_FILE + 1)
    try:
        loaded: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OSError(f"it is not a torchelastic error file ({type(error).__name__})") from error
    message = loaded.get("message") if isinstance(loaded, dict) else None
    extra: Any = {}
    if isinstance(message, dict):
        extra, message = message.get("extraInfo") or {}, message.get("message")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    stamp = str(extra.get("timestamp", "")) if isinstance(extra, dict) else ""
    raised = parse(callstack)
    kind, _, text = str(message or "").partition(": ")
    if raised is not None and raised.root.type:
        kind, text = raised.root.type, raised.root.text
    frames = () if raised is None else tuple(reversed(raised.root.frames))
    what, trouble, more = details_of(kind, text, frames)
    incident = Incident(
        kind=what,
        trouble=trouble,
        rank=found.rank if found.rank is not None else own_rank(text),
        position=next(positions),
        attempt=found.attempt,
        time_ns=int(stamp) * 1_000_000_000 if stamp.isdigit() else 0,
        file=found.name,
        host=found.host,
        message=text,
        frames=frames,
        **{"type": kind, **more},
    )
    return LogRead(incidents=[incident] if kind else [], lines=content.count(b"\n"), attempts=found.attempt + 1)


_SAMPLE_BYTES = 1 << 15
_JOB_NUMBER = re.compile(r"^(?:slurm|job)[-_.](\d{2,})|\.[oe](\d{2,})(?=\D|$)")
"""Of Slurm, and of PBS, LSF and Grid Engine (``name.o1234``)."""
_JOBS_SHOWN = 6
_OF_ANY_PROGRAM = frozenset({"exception", "killed", "early-exit", "out-of-memory", "no-rendezvous"})
"""What goes wrong in programs that train nothing as well."""
LINES_OF_A_LIVING_JOB = 2
"""So much progress after the last thing that went wrong; of ranks that are about to stop one line may come late."""


class Postmortem(msgspec.Struct, frozen=True, kw_only=True):
    """What was read, and from what."""

    record: RunRecord
    logs: int = 0
    lines: int = 0
    dumps: int = 0
    error_files: int = 0
    processes: int = 0
    """Living ranks that were looked at."""
    runs: tuple[str, ...] = ()
    """Run directories of ours that were found."""
    notes: tuple[str, ...] = ()
    """What was left out or lost, in sentences."""


RunReader = Callable[[Path, str, "count[int]"], LogRead]
"""Reads a run directory of ours, by its path and its name in messages."""


CoreReader = Callable[[Found, "count[int]"], LogRead]
"""Reads a core file; raises OSError with why it cannot."""


def read_postmortem(
    paths: Sequence[str],
    stdin: BinaryIO | None = None,
    read_run: RunReader | None = None,
    read_core: CoreReader | None = None,
) -> Postmortem:
    """Read logs, error files, dumps and recorded runs under the paths; ``-`` is ``stdin``."""
    inputs = find_inputs(tuple(paths))
    notes = list(inputs.notes)
    positions = count(1)
    told_by: list[tuple[Found, LogRead]] = []
    logs = [found for found in inputs.found if found.kind in ("log", "error-file")]
    logs, of_others = _of_the_newest_job(logs, frozenset(paths))
    notes += of_others
    _number_by_layout(logs)
    for found in _without_a_layout(logs):
        found.rank = None
    for found in logs:
        try:
            told = _read(found, positions, stdin)
        except (OSError, EOFError) as error:
            notes.append(f"{found.name} cannot be read: {reason_of(error)}")
            continue
        if told.problem and not (found.archive is not None and found.archive.is_damaged):
            notes.append(f"{found.name} cannot be read to its end: {told.problem}")
        for lines, what in ((told.sifted, "only what is new was examined"), (told.skipped, "nothing was examined")):
            if lines is not None:
                where = f"{lines[0]:,} to {lines[1]:,} of {found.name}"
                notes.append(f"of lines {where} {what}: so many of them report failures")
        if told.dropped:
            notes.append(f"{found.name} reports {told.dropped:,} more failures than were examined")
        told_by.append((found, told))
    told_by, of_others = _of_the_newest_script(told_by, frozenset(paths))
    notes += of_others
    told_by, of_others = _of_the_newest_run(told_by, frozenset(paths))
    notes += of_others
    read = [told for _, told in told_by]
    runs = [found for found in inputs.found if found.kind == "run"]
    if read_run is not None:
        read += [read_run(found.path, found.name, positions) for found in runs if found.path is not None]
    cores = 0
    for found in inputs.found:
        if found.kind == "core" and read_core is not None:
            try:
                read.append(read_core(found, positions))
                cores += 1
            except OSError as error:
                notes.append(f"{found.name} was not read: {reason_of(error)}")
    dumped = read_dumps([found for found in inputs.found if found.kind == "dump"])
    notes += dumped.notes
    if dumped.incidents:
        read.append(LogRead(incidents=[replace(one, position=next(positions)) for one in dumped.incidents]))
    stacks = parted([one.failed_in for one in read])
    record = _record(replace(_evidence(read), dumps_doubt=dumped.doubt), stacks)
    if dumped.book.ranks:
        record = dumped.book.into(record, dumped.written_ns)
    return Postmortem(
        record=record,
        dumps=dumped.read + cores,
        logs=sum(found.kind == "log" for found in logs),
        lines=sum(one.lines for one in read),
        error_files=sum(found.kind == "error-file" for found in logs),
        runs=tuple(found.name for found in runs),
        notes=tuple(notes),
    )


def _read(found: Found, positions: count[int], stdin: BinaryIO | None) -> LogRead:
    with opened(found, stdin) as stream:
        if found.kind == "error-file":
            return read_error_file(found, stream, positions)
        sample = found.sample or stream.peek(_SAMPLE_BYTES)
        reader = LogReader(
            found.name, habit_of(sample.decode("utf-8", "replace")), positions, rank=found.rank, host=found.host,
            attempt=found.attempt, year=_year_of(found),
        )  # fmt: skip
        reader.note_ranks(sample)
        reader.read_so_far.began_ns = first_time(sample.decode("utf-8", "replace"), _year_of(found))
        return reader.read(stream)


def _without_a_layout(logs: Sequence[Found]) -> list[Found]:
    """Logs in whose names a number is no rank: it stands in no other one's, or repeats for several nodes."""
    families: dict[str, set[int]] = {}
    nodes: dict[int, set[str]] = {}
    for found in logs:
        if found.rank is not None and found.path is not None:
            families.setdefault(_family(found), set()).add(found.rank)
            nodes.setdefault(found.rank, set()).add(found.host or _root_of(found.path))
    repeated = any(len(places) > 1 for places in nodes.values())
    return [
        found
        for found in logs
        if found.rank is not None and (repeated or (len(families[_family(found)]) < 2 and not found.by_launcher))
    ]


def _of_the_newest_job(logs: list[Found], named: frozenset[str]) -> tuple[list[Found], list[str]]:
    """Leave out the logs of other jobs in a directory, by the numbers that schedulers give to jobs."""
    jobs: dict[str, list[Found]] = {}
    for found in logs:
        number = None if found.name in named or found.path is None else _JOB_NUMBER.search(found.path.name)
        if number is not None:
            jobs.setdefault(number[1] or number[2], []).append(found)
    if len(jobs) < 2:
        return logs, []
    written = {job: max(_written_ns(found) for found in files) for job, files in jobs.items()}
    newest = max(jobs, key=lambda job: (written[job], len(job), job))
    left_out = {found.name for job, files in jobs.items() if job != newest for found in files}
    others = ", ".join(sorted(job for job in jobs if job != newest)[:_JOBS_SHOWN])
    note = f"of {len(jobs):,} jobs the one with the newest logs, {newest}, was read; to see {others}, name their files"
    return [found for found in logs if found.name not in left_out], [note]


def _of_the_newest_script(
    told_by: list[tuple[Found, LogRead]], named: frozenset[str]
) -> tuple[list[tuple[Found, LogRead]], list[str]]:
    """Leave out the logs of other jobs in a directory that run another script with the same ranks.

    A log from which that cannot be told is anyone's, unless its name is like those of one job.
    """
    scripts: dict[str, set[str]] = {}
    ranks: dict[str, set[int]] = {}
    for found, told in told_by:
        if found.name not in named:
            ranks.setdefault(_family(found), set()).update(one.rank for one in told.incidents if one.rank is not None)
            scripts.setdefault(_family(found), set()).update(
                one.frames[-1].file for one in told.incidents if one.frames and one.frames[-1].function == "<module>"
            )
    jobs = {family: min(files) for family, files in scripts.items() if len(files) == 1}
    if len(set(jobs.values())) < 2 or not set.intersection(*(ranks[family] for family in jobs)):
        return told_by, []
    newest = max((found for found, _ in told_by if _family(found) in jobs), key=_written_ns)
    script = jobs[_family(newest)]
    return _without(told_by, newest, [found for found, _ in told_by if jobs.get(_family(found), script) != script])


def _of_the_newest_run(
    told_by: list[tuple[Found, LogRead]], named: frozenset[str]
) -> tuple[list[tuple[Found, LogRead]], list[str]]:
    """Leave out the logs of earlier runs of the same script: the same rank had died before the newest log began."""
    died = {
        found.name: told.ended_ns if told.incidents or told.endings else 0
        for found, told in told_by
        if found.name not in named and not found.attempt and told.began_ns
    }
    last = max((one for one in told_by if died.get(one[0].name)), key=lambda one: one[1].began_ns, default=None)
    if last is None:
        return told_by, []
    began_ns = last[1].began_ns
    # Others of the newest run may have begun earlier.
    ended_ns = max((ended for ended in died.values() if ended < began_ns), default=0)
    earlier = [found for found, told in told_by if found.name in died and told.began_ns <= ended_ns]
    again = {who for found, told in told_by if found not in earlier for who in _failed(found, told)}
    if not any(not again.isdisjoint(_failed(found, told)) for found, told in told_by if found in earlier):
        return told_by, []
    return _without(told_by, last[0], earlier)


def _failed(found: Found, told: LogRead) -> set[object]:
    """Return the ranks to which something happened; where nobody says whose lines they are, those of such logs."""
    ranks = {one.rank for one in told.incidents} | {one.rank for one in told.endings}
    return {_family(found) if rank is None else rank for rank in ranks}


def _without(
    told_by: list[tuple[Found, LogRead]], newest: Found, others: Sequence[Found]
) -> tuple[list[tuple[Found, LogRead]], list[str]]:
    note = (
        f"of the jobs in these logs the one with the newest, {newest.name}, was read; to see others, name their files: "
        f"{', '.join(found.name for found in others[:_JOBS_SHOWN])}"
    )
    return [(found, told) for found, told in told_by if found not in others], [note]


def _written_ns(found: Found) -> int:
    try:
        return 0 if found.path is None else found.path.stat().st_mtime_ns
    except OSError:
        return 0


def _number_by_layout(logs: Sequence[Found]) -> None:
    """Give the logs ranks whose paths differ in one number that counts from 0, unless a line says otherwise.

    As ``slurm-123_0.out`` to ``slurm-123_3.out``, or ``0/stderr.log`` to ``3/stderr.log``.
    """
    for family in grouped((one for one in logs if one.path is not None and one.kind == "log"), _family).values():
        numbers = [re.findall(r"\d+", found.name) for found in family]
        places = [place for place, column in enumerate(zip(*numbers, strict=False)) if len(set(column)) > 1]
        if len(family) < 2 or len(places) != 1 or any(found.rank is not None or found.host for found in family):
            continue
        ranks = [int(one[places[0]]) for one in numbers]
        marked = [set(map(int, MARKS.findall(found.sample))) for found in family]
        if sorted(ranks) == list(range(len(ranks))) and all(
            marks <= {rank} for marks, rank in zip(marked, ranks, strict=True)
        ):
            for found, rank in zip(family, ranks, strict=True):
                found.rank = rank


def _family(found: Found) -> str:
    """Return the name of a log without its numbers."""
    return re.sub(r"\d+", "#", found.name)


def _root_of(path: Path) -> str:
    """Return the directory that torchrun made for one node."""
    parts = path.parts
    for index, part in enumerate(parts):
        if part.startswith("attempt_"):
            return "/".join(parts[:index])
    return str(path.parent)


def _year_of(found: Found) -> int:
    """Stamps of torch have no year: that in which the file was written last."""
    if found.path is None:
        return 0
    try:
        return datetime.fromtimestamp(found.path.stat().st_mtime, timezone.utc).year
    except (OSError, ValueError, OverflowError):
        return 0


def _evidence(read: Sequence[LogRead]) -> LogEvidence:
    telling = [one for one in read if one.incidents]
    return LogEvidence(
        incidents=tuple(incident for one in read for incident in one.incidents),
        endings=tuple(ending for one in read for ending in one.endings),
        ranks=tuple(sorted({rank for one in read for rank in one.ranks})),
        world_size=max((one.world_size for one in read), default=0),
        attempts=max((one.attempts for one in read), default=1),
        finished=_finished(read),
        endpoint=next((one.endpoint for one in read if one.endpoint), ""),
        ordered=len(telling) <= 1,
        of_training=any(one.of_training for one in read)
        or any(incident.trouble not in _OF_ANY_PROGRAM for one in read for incident in one.incidents),
    )


def _finished(read: Sequence[LogRead]) -> bool:
    """Return whether every log that reports something goes on after the last of it, and no process of a rank ended."""
    reporting = [one for one in read if one.incidents or any(ending.exit_code for ending in one.endings)]
    gone_on = [sum(later.counts for later in one.later if later.line > one.last_line) for one in reporting]
    return bool(reporting) and all(lines >= LINES_OF_A_LIVING_JOB for lines in gone_on)


def _record(evidence: LogEvidence, stacks: tuple[StackDump, ...] = ()) -> RunRecord:
    """Return the record with the ranks as far as the logs know them."""
    numbers = {one.rank for one in evidence.incidents} | {one.rank for one in evidence.endings}
    named = {one for one in numbers if one is not None} | set(evidence.ranks)
    ranks = tuple(_rank(evidence, number) for number in sorted(named))
    job = Job(kind="log", world_size=evidence.world_size, ranks_expected=evidence.world_size)
    return RunRecord(job=job, ranks=ranks, logs=evidence, stacks=stacks)


def _rank(evidence: LogEvidence, number: int) -> Rank:
    incidents = sorted((one for one in evidence.incidents if one.rank == number), key=lambda one: one.position)
    ending = next((one for one in evidence.endings if one.rank == number and one.exit_code), None)
    raised = tuple(
        RankException(
            time_ns=one.time_ns,
            type=one.type,
            message=one.message,
            frames=one.frames,
            communication=one.kind in ("lost-peer", "timed-out", "mismatch"),
        )
        for one in incidents
        if one.type and one.frames
    )
    end: RankEnd = "unknown"
    if raised:
        end = "raised"
    elif ending is not None:
        end = "signalled" if ending.exit_code < 0 else "left-by-exit"
    return Rank(
        rank=number,
        end=end,
        host=next((one.host for one in incidents if one.host), ending.host if ending else ""),
        pid=ending.pid if ending else 0,
        exit_code=ending.exit_code if ending and 0 < ending.exit_code < NO_CODE else None,
        signal=-ending.exit_code if ending and ending.exit_code < 0 else None,
        ended_ns=ending.time_ns if ending else 0,
        exceptions=raised,
    )
