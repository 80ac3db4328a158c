"""Collectives that come before the process group that they need."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event, events_in
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
    """Yield the first call that needs a group and certainly comes before it is made, in the script's own course."""
    if not projection.walks or joins_by_framework(projection):
        return
    # In the tree, not by ordinals: an object in a loop keeps the number that its first walk gave it.
    done = [event for event in events_in(projection.walks[0].trees[0]) if not event.in_parent]
    joins = next((number for number, event in enumerate(done) if event.name == "init_process_group"), None)
    if joins is None or done[joins].conditions or done[joins].ranks != ALL_RANKS:
        return
    for event in done[:joins]:
        needs = event.kind == "wrap" or event.name in _NEED_GROUP
        if needs and not event.conditions and event.complete:
            yield EarlyCall(event, done[joins])
            return
