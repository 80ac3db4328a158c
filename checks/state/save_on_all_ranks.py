"""Several ranks write the same file.

What it finds
    A checkpoint or another file that more than one rank writes under one path from one line; in the source by
    torch.save, save_pretrained, numpy, joblib, safetensors or pandas; as advice a file to which every rank adds its
    lines. Logs, lock files, caches and files that the ranks write in turn are excluded.

Why it is bad
    The ranks overwrite each other at the same time: the file can end up corrupt, unnoticed until it is loaded.
    On a shared file system it also costs as many writes as there are ranks.

Example
    torch.save(model.state_dict(), "checkpoint.pt")

Remedy
    Guard the call with `if dist.get_rank() == 0:`, or include the rank in the path if every rank has its own state.

When it is wrong
    Where the path only looks the same, for instance on node-local disks with one rank a node.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, Verdict, Via
from ddpdoctor.diagnosis.files import is_incidental, races
from ddpdoctor.diagnosis.wording import count, location_of, place, rank_list
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.training import FileEvent
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.files import SharedSave, appended_files, shared_saves
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP601",
    name="save-on-all-ranks",
    stands_for="many-writers",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"files"}),
    subjects=("job",),
    triggers=("save", "write_text", "write_bytes", "to_csv", "to_parquet", "dump", "open"),
)
MAXIMUM_PLACES = 5


def in_source(script: Script) -> Iterator[Finding]:
    """Report writes that every rank reaches with one path; those that one test would guard as one finding."""
    blocks: dict[ast.AST, list[SharedSave]] = {}
    for save in shared_saves(whole_projection(script)):
        if save.by == "all":
            blocks.setdefault(save.event.module.block_around(save.event.node), []).append(save)
    for save, *others in blocks.values():
        more = f" and {len(others)} more {'file' if len(others) == 1 else 'files'}" if others else ""
        yield CHECK.finding(
            "source",
            f"every rank writes {save.path}{more}, and the path does not depend on the rank",
            remedy="Save on one rank only (`if dist.get_rank() == 0:`), with a barrier after it where others read the "
            "file; or include the rank in the path.",
            locations=tuple(one.event.location for one in (save, *others[: MAXIMUM_PLACES - 1])),
            because=(("there is no rank test around this call or its callers", save.event),),
        )

    for use in appended_files(whole_projection(script)):
        location = use.event.location
        yield CHECK.finding(
            "source",
            f"every rank adds its lines to {use.source}: each result stands there as often as there are ranks",
            remedy="Write on one rank only (`if dist.get_rank() == 0:`); or include the rank in the path or the lines.",
            locations=location,
            because=(("there is no rank test around this call or its callers", Via(location, use.event.chain)),),
            severity=Severity.ADVICE,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report lines at which several ranks wrote one path; refute those at which only one did."""

    remedy = (
        "Write on one rank only (`if dist.get_rank() == 0:`), with a barrier after it where others read the file; or "
        "include the rank in the path."
    )
    yield from CHECK.judged(record.job.kind, judge_writers(record), remedy)


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
