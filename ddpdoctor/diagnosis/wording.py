"""How ranks, places, collectives and sizes are written in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from ddpdoctor.finding import Frame, Location
from ddpdoctor.finding import count as count
from ddpdoctor.finding import rank_list as rank_list

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord, Site
    from ddpdoctor.record.streams.collectives import Group, Handled, Signature

_ORIGINS = {
    "user": "",
    "ddp-construct": " (DDP construction)",
    "ddp-forward": " (DDP forward)",
    "ddp-backward": " (DDP backward)",
    "join": " (join)",
    "fsdp-forward": " (FSDP forward)",
    "fsdp-backward": " (FSDP backward)",
    "fsdp-eval": " (FSDP forward without gradients)",
}


_PEER_WORDS = {"send": "to", "recv": "from"}


def verb(ranks: Iterable[int], singular: str, plural: str) -> str:
    """Choose the verb that fits the number of ranks."""
    return singular if len(set(ranks)) == 1 else plural


def place(frame: Frame | None) -> str:
    """Write a line as ``train.py:57``; ``an unknown line`` without a frame."""
    return "an unknown line" if frame is None else f"{PurePath(frame.file).name}:{frame.line}"


def collective(signature: Signature) -> str:
    """Write a collective with what issued it, ``all_reduce (DDP backward)``, or with its peer, ``recv from rank 1``."""
    if signature.kind in _PEER_WORDS and signature.root is not None:
        return f"{signature.kind} {_PEER_WORDS[signature.kind]} rank {signature.root}"
    of_module = f" of {signature.module}" if signature.module else ""
    return f"{signature.kind}{of_module}{_ORIGINS[signature.origin]}"


def group_name(group: Group, world_size: int) -> str:
    """Write which group it is: ``the default group``, ``the 2nd group of ranks 0 and 1``."""
    if len(group.ranks) == world_size and group.ordinal == 0:
        return "the default group"
    if group.name:
        return f"the {group.name} group of {rank_list(group.ranks)}"
    # The default group counts among the groups of all ranks.
    number = group.ordinal + (len(group.ranks) != world_size)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"the {number:,}{ending} group made of {rank_list(group.ranks)}"


def duration_text(nanoseconds: int) -> str:
    """Write a duration in the unit that suits it: ``3.2 s``, ``25 min``, ``2.8 h``."""
    seconds = nanoseconds / 1e9
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:,.1f} h"


def milliseconds_text(nanoseconds: float) -> str:
    """Write a time of the order of a step: ``0.42 ms``, ``4.1 ms``, ``120 ms``, ``1.30 s``."""
    milliseconds = nanoseconds / 1e6
    if milliseconds >= 999.5:
        return f"{milliseconds / 1e3:.2f} s"
    return f"{milliseconds:.{0 if milliseconds >= 99.95 else 1 if milliseconds >= 0.95 else 2}f} ms"


def details(signature: Signature) -> str:
    """Write what must agree between ranks: ``1,024 elements, float32, sum``."""
    size = elements(signature) if signature.numels else ""
    has_root = signature.root is not None and signature.kind not in _PEER_WORDS
    parts = (size, signature.dtype, signature.reduce_op, f"root {signature.root}" if has_root else "")
    return ", ".join(filter(None, parts))


def elements(signature: Signature) -> str:
    """Write how many elements the tensors have: ``1,024 + 10 elements``, ``9,000 elements in 6 tensors``."""
    numels = signature.numels
    if len(numels) > 4:
        return f"{sum(numels):,} elements in {len(numels)} tensors"
    return f"{' + '.join(f'{numel:,}' for numel in numels)} {'element' if numels == (1,) else 'elements'}"


def bytes_text(size_bytes: int) -> str:
    """Write a size with the unit that gives few digits: ``4.2 MB``, ``390 MB`` (powers of ten)."""
    if size_bytes < 1_000:
        return f"{size_bytes} bytes"
    smaller = (of for of in (("kB", 1e3), ("MB", 1e6)) if size_bytes < of[1] * 999.5)
    unit, factor = next(smaller, ("GB", 1e9))
    value = size_bytes / factor
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"


def frame_of(handled: Handled) -> Frame:
    """Return the line from which an exception came that a handler has caught."""
    return Frame(file=handled.file, line=handled.line, function=handled.function)


def location_of(frame: Frame | None) -> Location | None:
    """Turn a frame into the location of a finding."""
    if frame is None:
        return None
    function = "" if frame.function == "<module>" else frame.function
    return Location(file=frame.file, line=frame.line, function=function)


def site_location(site: Site) -> Location | None:
    """Locate the innermost line of a call chain."""
    return location_of(site.innermost)


# Which machine a rank runs on, where a job has several; and what a node can say that sees a part of them only.

_FIRST = re.compile(r"ranks? \d+(?:(?:-|, | and )\d+)*(, …| others)?(?=[ ,]|$)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def placed(title: str, record: RunRecord) -> str:
    """Return a sentence, with the machine of the ranks that it names first behind them: ``rank 3 on node1 keeps …``.

    As it was where the job runs on one machine, or the ranks are on several or not all named.
    """
    hosts = {rank.rank: rank.host for rank in record.ranks}
    led = _FIRST.search(title)
    if led is None or led[1] or len(set(hosts.values())) < 2:
        return title
    spans = ((int(low), int(high or low)) for low, high in _NUMBERS.findall(led[0]))
    found = {hosts.get(rank, "") for low, high in spans for rank in range(low, high + 1)}
    host = found.pop()
    return title if found or not host else f"{title[: led.end()]} on {host}{title[led.end() :]}"


def only_lost_their_peers(record: RunRecord) -> tuple[int, ...]:
    """Return the ranks that ended because they lost a connection to one out of sight, where nothing else is known to be
    wrong.

    What ended the job is on a node that is not seen here then.
    """
    from ddpdoctor.diagnosis.sync_points import unseen_ranks

    if not unseen_ranks(record):
        return ()
    lost = [rank for rank in record.ranks if rank.exceptions]
    if not lost or any(not raised.communication for rank in lost for raised in rank.exceptions):
        return ()
    first_ns = min(raised.time_ns for rank in lost for raised in rank.exceptions)
    before = [rank for rank in record.ranks if rank.end in ("signalled", "left-by-exit") and rank.ended_ns < first_ns]
    return () if before else tuple(rank.rank for rank in lost)
