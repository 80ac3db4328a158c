"""What a record knows of collectives: their groups, what must agree between ranks, and a track for each rank.

Columns are arrays of equal length, oldest first; times are nanoseconds since the epoch.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from ddpdoctor.record.streams import RowAtLine, RowAtTime, RowOfRank

# What no track of collectives shows of the calls of ranks: waits in the store, and collectives on the wrong thing.


class Wait(RowAtLine, frozen=True, kw_only=True):
    """A wait in the store that is not a collective: making a group, initialising the job."""

    kind: Literal["init_process_group", "new_group", "destroy_process_group"]
    ranks: tuple[int, ...] = ()
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


class ReducedCounts(RowAtTime, frozen=True, kw_only=True):
    """A rank gave a few numbers to a sum over the ranks, outside of any graph."""

    numbers: tuple[int, ...] = ()
    """Those of them that are whole and positive, as counts are."""


class SummedTotal(RowAtTime, frozen=True, kw_only=True):
    """What a rank gave to a sum over the ranks by a tensor of a few numbers, which then holds the sum."""

    tensor: int = 0
    """Its number, alike for every sum of the same memory of a rank."""
    own_group: int = -1
    """As its process numbers groups."""
    numbers: tuple[float, ...] = ()
    version: int = -1
    """How often it was changed otherwise until then, as torch counts it; -1 where torch does not."""


class MemoryOrder(RowAtTime, frozen=True, kw_only=True):
    """A rank gave a collective a tensor whose numbers do not lie in memory one after another, in their order."""

    kind: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    gaps: bool = False
    """There is something else between them, or several of them are one number in memory; else their order differs."""
    ranks: tuple[int, ...] = ()
    """Those of the group."""


class ReducedLoss(RowOfRank, frozen=True, kw_only=True):
    """A tensor that the user's collective changed in place and that a backward then started from or came through."""

    site: int = -1
    """Of the collective."""
    backward_site: int = -1


class CutGraph(RowAtLine, frozen=True, kw_only=True):
    """A gather of a tensor that wants a gradient: its result has none."""

    kind: str = ""
    """The collective."""
    leaves: tuple[tuple[int, ...], ...] = ()
    """Shapes of the parameters that the tensor was computed from; empty where they are not known."""


class Handled(RowOfRank, frozen=True, kw_only=True):
    """A collective that a rank calls in the handler of an exception."""

    site: int = -1
    """Of the collective."""
    type: str = ""
    message: str = ""
    file: str = ""
    """With ``line`` and ``function`` the innermost line of the user's from which the exception came."""
    line: int = 0
    function: str = ""


class EndlessLoop(RowOfRank, frozen=True, kw_only=True):
    """A loop of a rank, or of a process that works for it, in which nothing changes any more; or that it was left."""

    site: int = -1
    """The head of the loop."""
    rounds: int = 0
    """How often it was seen to begin anew, which is less than it did."""
    lasted_ns: int = 0
    empty: tuple[str, ...] = ()
    """Containers that hold nothing, as its code names them."""
    over: bool = False
    """It was left after all."""


class SharedGroup(RowAtLine, frozen=True, kw_only=True):
    """A group that a rank used from two threads at once, when it was first seen to be."""

    ranks: tuple[int, ...] = ()
    """Of the group."""
    name: str = ""
    """Of its dimension in a device mesh."""
    kind: str = ""
    """The collective that is called while the other thread is at work."""
    thread: str = ""
    """The other thread's name."""
    other_site: int = -1
    """Where that called its newest collective of the group."""


class OutsiderCall(RowAtLine, frozen=True, kw_only=True):
    """A collective that a rank called on a group which it is no member of; torch does nothing then."""

    operation: str


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group, known by its sorted ranks and its ordinal among groups of the same ranks."""

    ranks: tuple[int, ...]
    ordinal: int = 0
    backend: str = ""
    timeout_ns: int = 0
    """How long a collective of it may wait; 0 when not known."""
    name: str = ""
    """That of its dimension in a device mesh; empty for other groups."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What must agree between ranks for a collective to be the same collective, and what describes it."""

    kind: str
    """``all_reduce``, ``broadcast``, ``all_gather``, ``barrier``, … as users spell it."""
    numels: tuple[int, ...] = ()
    """Elements of each tensor."""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    reduce_op: str = ""
    root: int | None = None
    """Global rank of the root, or of the peer that a point-to-point call names."""
    size_bytes: int = 0
    origin: Literal[
        "user", "ddp-construct", "ddp-forward", "ddp-backward", "join", "fsdp-forward", "fsdp-backward", "fsdp-eval"
    ] = "user"
    """Who issued it; ``fsdp-eval`` is a forward of a sharded module without gradients."""
    module: str = ""
    """The sharded module whose parameters or gradients it moves; empty for others, and where it is not known."""
    uneven: bool | None = None
    """The tensors of its list, one for each rank, differ in size; None where it has no list or that was not seen."""
    subject: str = ""
    """What this turn of the loop around it is about, by its name in the script, or a digest behind a ``#``; empty
    where neither is known."""
    entries_of: str = ""
    """The dictionary with as many entries as there are elements, which the script puts together in a tensor."""


class CollectiveTrack(RowOfRank, frozen=True, kw_only=True):
    """The collectives of one rank in the order of their start, in columns of equal length."""

    group: array[int]
    """Index into ``RunRecord.groups``."""
    sequence: array[int]
    """Position among the collectives of that group on this rank, from 0."""
    signature: array[int]
    """Index into ``RunRecord.signatures``."""
    site: array[int]
    """Index into ``RunRecord.sites``."""
    step: array[int]
    """How often the training forward with the same call chain as the current one had run; see ``Forward.step``."""
    forward_site: array[int]
    """Call chain of the training forward that ``step`` counts; -1 before the first."""
    started_ns: array[int]
    completed_ns: array[int]
    """0 while incomplete."""

    def __len__(self) -> int:
        return len(self.group)
