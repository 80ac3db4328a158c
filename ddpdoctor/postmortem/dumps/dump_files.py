"""Reads the files of a job's flight-recorder dumps, one after the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from ddpdoctor.files.untrusted import reason_of
from ddpdoctor.postmortem.dumps.dump_record import DumpBook
from ddpdoctor.postmortem.dumps.dumps import LARGEST_BYTES, DumpError, Dumps
from ddpdoctor.postmortem.dumps.nccl_reports import REPORT, NcclReports
from ddpdoctor.postmortem.inputs import Found, opened
from ddpdoctor.record.streams.devices import Incident

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
            dump, _ = dumps.read(content)
        except (DumpError, OSError, EOFError) as error:
            damaged.append(f"{found.name} is not a usable dump: {reason_of(error)}")
            if rank is not None:
                told.book.note_rank(rank)
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
    told.notes = [*damaged[:MOST_NOTES], *_more(damaged), *_lost(told.book)]
    return told


MOST_NOTES = 8


def rank_of(name: str) -> int | None:
    """Return the last number in the name of a dump."""
    match = _NUMBER.search(_SUFFIXES.sub("", PurePath(name).name))
    return int(match[1]) if match else None


def _more(damaged: Sequence[str]) -> list[str]:
    left = len(damaged) - MOST_NOTES
    return [f"{left:,} more dumps could not be used"] if left > 0 else []


def _lost(book: DumpBook) -> list[str]:
    lost = {rank: count for rank, count in book.lost.items() if count}
    if not lost:
        return []
    most = max(lost.values())
    return [
        f"the flight recorders of {len(lost):,} ranks had overwritten up to {most:,} older entries: an earlier "
        "divergence cannot be seen (TORCH_FR_BUFFER_SIZE makes the ring larger)"
    ]
