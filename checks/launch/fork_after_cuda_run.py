"""Forked processes that use what does not survive a fork."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.diagnosis.failures import named_failures
from ddpdoctor.diagnosis.wording import rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import RunRecord


class BrokenFork(msgspec.Struct, frozen=True, kw_only=True):
    """A line at which processes that ranks forked use CUDA or the process group of their parents."""

    uses_cuda: bool
    """False: it calls a collective."""
    sentence: str
    location: Location | None
    ranks: tuple[int, ...]
    fact: str


def broken_forks(record: RunRecord) -> Iterator[BrokenFork]:
    """Yield what forked processes did, or died of, once for each line."""
    for failure in named_failures(record, "cuda-after-fork"):
        yield BrokenFork(
            uses_cuda=True,
            sentence=f"a forked process of {rank_list(failure.ranks)} uses CUDA, which its parent has initialised",
            location=failure.location,
            ranks=failure.ranks,
            fact=failure.message,
        )
    forked = [use for use in record.device_uses if use.forked]
    for site in sorted({use.site for use in forked}):
        ranks = tuple(sorted({use.rank for use in forked if use.site == site}))
        yield BrokenFork(
            uses_cuda=True,
            sentence=f"a forked process of {rank_list(ranks)} uses CUDA, which its parent has initialised",
            location=site_location(record.site(site)),
            ranks=ranks,
            fact="the forked process put a tensor on a GPU here, as had its parent before the fork",
        )
    for site in sorted({use.site for use in record.forked_uses}):
        uses = [use for use in record.forked_uses if use.site == site]
        ranks = tuple(sorted({use.rank for use in uses}))
        yield BrokenFork(
            uses_cuda=False,
            sentence=f"a forked process of {rank_list(ranks)} calls {uses[0].kind}, and the process group does not "
            "survive a fork",
            location=site_location(record.site(site)),
            ranks=ranks,
            fact="the forked process reached this call",
        )
