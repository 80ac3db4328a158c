"""Wraps whose DDP broadcasts buffers that nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.torch_model.buffers import constant_buffers

BROADCAST_POSITION = 4
"""Position of ``broadcast_buffers`` among DDP's arguments."""


class IdleBroadcast(msgspec.Struct, frozen=True, kw_only=True):
    """A wrap that broadcasts buffers which nothing changes."""

    location: Location
    names: tuple[str, ...]
    size_bytes: int
    exact: bool
    """The size of every buffer is known; otherwise ``size_bytes`` is the sum of those that are."""
    registered: tuple[Location, ...]
    """Where each buffer is registered."""


def idle_broadcasts(projection: Projection) -> Iterator[IdleBroadcast]:
    """Wraps with the default synchronisation of buffers, of modules that only their constructors give buffers."""
    for made in projection.of_kind("wrap"):
        options = ("broadcast_buffers", "forward_sync_buffers")
        if (
            not made.complete
            or len(made.positional) > BROADCAST_POSITION
            or any(name in made.named for name in options)
        ):
            continue
        module = made.argument("module", 0)
        buffers = constant_buffers(projection.machine, module) if module is not None else None
        if buffers is not None:
            yield IdleBroadcast(
                location=made.module.location(made.node),
                names=buffers.names,
                size_bytes=buffers.size_bytes,
                exact=buffers.exact,
                registered=buffers.locations,
            )
