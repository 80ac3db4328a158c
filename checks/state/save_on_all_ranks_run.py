"""Which ranks wrote which file from which line."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import PurePath

from ddpdoctor.check import Verdict, Via
from ddpdoctor.diagnosis.files import is_incidental, races
from ddpdoctor.diagnosis.wording import count, location_of, place, rank_list
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import FileEvent

_WRITES = frozenset({"create", "write", "save"})
_EVIDENCE_SHOWN = 4


def judge_writers(record: RunRecord) -> Iterator[Verdict]:
    """Yield a verdict for each line at which files were written; nothing for a lone writer in a run that was cut short.

    In processes that never met as the ranks of one job the missing job is the fault, and their files are no news.
    Logs, lock files, caches and temporary files count only when they are saved with torch; other writes count only
    where the ranks made them between the same two collectives, for ranks that write in turn do no harm. Data that every
    rank prepares has a check of its own.
    """
    by_line: dict[tuple[str, int], list[FileEvent]] = {}
    if record.job.world_size < 2:
        return
    left_out = {race.path for race in races(record) if race.trouble == "download-race"}
    left_out |= {access.path for access in record.accesses if access.action == "lock" and access.through == "flock"}
    for event in record.files:
        line = record.site(event.site).innermost
        if event.action in _WRITES and line is not None and event.path not in left_out:
            by_line.setdefault((line.file, line.line), []).append(event)
    whole = record.job.stop_reason == "" and len(record.rank_numbers()) > 1
    # A rank that raised or was killed might have written what only the other ranks did.
    whole = whole and all(rank.end in ("finished", "ended-by-rehearsal") for rank in record.ranks)
    for events in by_line.values():
        by_path: dict[str, list[FileEvent]] = {}
        for event in events:
            by_path.setdefault(event.path, []).append(event)
        shared = {path: found for path, found in by_path.items() if _shared(record, path, found)}
        if shared:
            yield _describe(record, shared)
        elif whole and all(len({event.rank for event in found}) == 1 for found in by_path.values()):
            location = location_of(record.site(events[0].site).innermost)
            assert location is not None
            writers = rank_list(event.rank for event in events)
            reason = f"no path was written by more than one rank here; {writers} wrote {count(len(by_path), 'path')}"
            yield Verdict(wrong=False, sentence=reason, locations=location)


def _shared(record: RunRecord, path: str, events: list[FileEvent]) -> bool:
    ranks = {event.rank for event in events}
    if len(ranks) < 2:
        return False
    if len({event.rank for event in events if event.action == "save"}) > 1:
        return True
    if is_incidental(path):
        return False
    phases: dict[int, set[int]] = {}
    for event in events:
        phases.setdefault(_collectives_before(record, event), set()).add(event.rank)
    return any(len(together) > 1 for together in phases.values())


def _collectives_before(record: RunRecord, event: FileEvent) -> int:
    track = record.track(event.rank)
    return 0 if track is None else bisect_left(track.started_ns, event.time_ns)


def _describe(record: RunRecord, shared: dict[str, list[FileEvent]]) -> Verdict:
    first = next(iter(shared.values()))
    site = record.site(first[0].site)
    location = location_of(site.innermost)
    assert location is not None
    ranks = sorted({event.rank for events in shared.values() for event in events})
    path = PurePath(next(iter(shared)))
    more = f" and {len(shared) - 1:,} more files" if len(shared) > 1 else ""
    done = "save" if any(event.action == "save" for event in first) else "write"
    return Verdict(
        sentence=f"{rank_list(ranks)} {done} the same file {path.name}{more} at {place(site.innermost)}",
        locations=location,
        ranks=tuple(ranks),
        because=tuple(
            (_who_wrote(name, events), location if number else Via(location, site.frames))
            for number, (name, events) in enumerate(sorted(shared.items())[:_EVIDENCE_SHOWN])
        ),
    )


def _who_wrote(path: str, events: list[FileEvent]) -> str:
    """``ranks 0 and 1 wrote runs/last.pt 4 times each``, with the end of the path only."""
    action = events[0].action
    times = {
        rank: sum(event.rank == rank and event.action == action for event in events)
        for rank in sorted({event.rank for event in events})
    }
    most = max(times.values())
    how_often = "" if most <= 1 else f" up to {most} times" if len(set(times.values())) > 1 else f" {most} times each"
    return f"{rank_list(times)} wrote {PurePath(*PurePath(path).parts[-2:])}{how_often}"
