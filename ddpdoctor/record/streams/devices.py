"""Which devices the ranks chose and used, and onto which they loaded checkpoints."""

from __future__ import annotations

from typing import Literal

import msgspec


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The first time that a process put something on a GPU in one of two ways."""

    rank: int
    index: int
    how: Literal["explicit", "current"]
    """The user's line named the index, or left it to the current device."""
    was_set: bool = False
    """The process had chosen its current device before."""
    forked: bool = False
    """A process that the rank had forked, after the rank itself had used a GPU."""
    site: int = -1
    time_ns: int = 0


class DeviceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A call of ``set_device``, or a barrier that a process came to before its first one."""

    rank: int
    chosen: bool
    """False: the barrier, which named no device."""
    site: int = -1
    time_ns: int = 0


class CheckpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A call of ``torch.load`` with a path, whether it succeeded or not."""

    rank: int
    path: str
    mapped: bool = False
    """It was given ``map_location``."""
    saved_on: tuple[str, ...] = ()
    """Devices that the storages were saved from; empty when it is not known."""
    site: int = -1
    time_ns: int = 0


class StateNames(msgspec.Struct, frozen=True, kw_only=True):
    """How the names of a state dict fit the module that it was loaded into."""

    rank: int
    module_class: str = ""
    names: int = 0
    """0 when they fitted."""
    too_long: int = 0
    """Names that fit once the prefix ``module.`` is taken away: they were saved from the wrapper."""
    too_short: int = 0
    """Names that fit once the prefix is put before them."""
    raised: bool = False
    site: int = -1
    time_ns: int = 0
