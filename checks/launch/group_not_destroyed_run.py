"""Whether ranks destroyed the process groups that they made."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord


class GroupEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a process group that the script itself made."""

    location: Location
    """The call that made it."""
    ranks: tuple[int, ...]
    """Ranks that ran to their end without destroying it; empty when every rank destroyed it."""


def judge_ends(record: RunRecord) -> Iterator[GroupEnd]:
    """Yield a verdict for each line that initialises the job, where every rank ran to the end of the script by itself.

    A group that a library makes is the library's to destroy.
    """
    if not record.ranks or not all(rank.end == "finished" and rank.main_finished for rank in record.ranks):
        return
    made = [wait for wait in record.waits if wait.kind == "init_process_group" and wait.direct and not wait.error]
    destroyed = {wait.rank for wait in record.waits if wait.kind == "destroy_process_group"}
    for site in sorted({wait.site for wait in made}):
        ranks = {wait.rank for wait in made if wait.site == site}
        location = site_location(record.site(site))
        left = ranks - destroyed
        if location is not None and (not left or left == ranks):
            yield GroupEnd(location=location, ranks=tuple(sorted(left)))
