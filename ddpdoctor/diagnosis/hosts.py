"""Which machine a rank runs on, where a job has several; and what a node can say that sees a part of them only."""

from __future__ import annotations

import re

from ddpdoctor.diagnosis.sync_points import unseen_ranks
from ddpdoctor.record.model import RunRecord

_FIRST = re.compile(r"ranks? \d+(?:(?:-|, | and )\d+)*(?=[ ,]|$)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def placed(title: str, record: RunRecord) -> str:
    """Return a sentence, with the machine of the ranks that it names first behind them: ``rank 3 on node1 keeps …``.

    As it was where the job runs on one machine, or the ranks are on several.
    """
    hosts = {rank.rank: rank.host for rank in record.ranks}
    led = _FIRST.search(title)
    if led is None or len(set(hosts.values())) < 2:
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
    if not unseen_ranks(record):
        return ()
    lost = [rank for rank in record.ranks if rank.exceptions]
    if not lost or any(not raised.communication for rank in lost for raised in rank.exceptions):
        return ()
    first_ns = min(raised.time_ns for rank in lost for raised in rank.exceptions)
    before = [rank for rank in record.ranks if rank.end in ("signalled", "left-by-exit") and rank.ended_ns < first_ns]
    return () if before else tuple(rank.rank for rank in lost)
