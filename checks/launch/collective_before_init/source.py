"""Collectives that come before the process group that they need."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.job_kind import joins_by_framework
from ddpdoctor.source.vocabulary import COLLECTIVES

_NEED_GROUP = frozenset(name.removeprefix("torch.distributed.") for name in COLLECTIVES) - {"init_process_group"}


class EarlyCall(msgspec.Struct, frozen=True, eq=False):
    """A collective, or the construction of DDP, in a process that has no group yet."""

    event: Event
    initialisation: Event
    """The later call that makes the group."""


def early_calls(projection: Projection) -> Iterator[EarlyCall]:
    """The first call that needs a group and certainly comes before it is made, in the script's own course."""
    joined = [event for event in projection.of_kind("collective") if event.name == "init_process_group"]
    if not joined or joins_by_framework(projection):
        return
    first = min(joined, key=lambda event: event.ordinal)
    if first.root or first.conditions or first.ranks != ALL_RANKS:
        return
    for event in projection.in_course("collective", "wrap"):
        if event.ordinal > first.ordinal:
            return
        needs = event.kind == "wrap" or event.name in _NEED_GROUP
        if needs and not event.root and not event.conditions and event.complete:
            yield EarlyCall(event, first)
            return
