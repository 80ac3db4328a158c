"""What no track of collectives shows of the calls of ranks: waits in the store, and collectives on the wrong thing."""

from __future__ import annotations

from typing import Literal

import msgspec


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A wait in the store that is not a collective: making a group, initialising the job."""

    rank: int
    kind: Literal["init_process_group", "new_group", "destroy_process_group"]
    ranks: tuple[int, ...] = ()
    site: int = -1
    started_ns: int = 0
    ended_ns: int = 0
    """0 while it still waits."""
    direct: bool = False
    """The user's own line called it, not a library."""
    backend: str = ""
    """As the call asked for it; empty when it did not."""
    meets_elsewhere: str = ""
    """A ``tcp://`` address in the call whose port is not the launcher's; otherwise empty."""
    led_from: str = ""
    """The address at which the script would have met, and where no one listens; empty when it met where it said."""
    ranks_asked: int = 0
    """For how many ranks the script makes its group, where fewer were started; 0 otherwise."""
    rank_taken: int = -1
    """The number under which the rank would have joined, as another one had before it; -1 for one of its own."""
    error: str = ""
    """Type and message of the exception that it raised; empty when it raised none."""
    named_device: bool = False
    """The call was given ``device_id``."""
    mentions_cuda: bool = False
    """After a failure: "cuda" occurs in the user's files that were imported by then."""


class ReducedLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that the user's collective changed in place and that a backward then started from or came through."""

    rank: int
    site: int = -1
    """Of the collective."""
    backward_site: int = -1


class CutGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A gather of a tensor that wants a gradient: its result has none."""

    rank: int
    site: int = -1
    kind: str = ""
    """The collective."""
    leaves: tuple[tuple[int, ...], ...] = ()
    """Shapes of the parameters that the tensor was computed from; empty where they are not known."""


class Handled(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a rank calls in the handler of an exception."""

    rank: int
    site: int = -1
    """Of the collective."""
    type: str = ""
    message: str = ""
    file: str = ""
    """With ``line`` and ``function`` the innermost line of the user's from which the exception came."""
    line: int = 0
    function: str = ""


class OutsiderCall(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a rank called on a group which it is no member of; torch does nothing then."""

    rank: int
    operation: str
    site: int = -1
