"""Loaders, passes over them, and files that ranks read and wrote."""

from __future__ import annotations

from typing import Literal

import msgspec

# What the ranks did to files, and how they reached them.

FileAction = Literal[
    "create", "write", "save", "read", "load", "remove", "rename", "mkdir", "refused", "child-process", "held-child"
]
"""``held-child``: a Python that keeps the rules of the rehearsal; ``child-process``: any other program."""
AccessAction = Literal["read", "write", "check", "make", "remove", "move", "lock"]


class FileEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the ranks did to a file, or a child process that they started."""

    rank: int
    action: FileAction
    path: str
    site: int = -1
    time_ns: int = 0
    existed: bool = False
    """The file existed before the run."""
    detail: str = ""
    """What would have happened, when refused; the command of a child process."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """A rank reached a path: what it was about to do there, whatever became of it."""

    rank: int
    action: AccessAction
    """``check``: asked whether it exists. ``make``: of a directory. ``lock``: took a lock, or a file as one."""
    path: str
    site: int = -1
    time_ns: int = 0
    found: bool = False
    """There was something under the path."""
    through: str = ""
    """The library that fetches or extracts (``zipfile``, ``urllib``, …) and stands between the user and the call;
    ``flock`` of a lock on an open file."""


PassEnd = Literal["exhausted", "cut", "counted", "abandoned", "open"]


class SampleProbe(msgspec.Struct, frozen=True, kw_only=True):
    """One sample fetched by its index under a fixed seed, so that ranks can be compared."""

    index: int
    """Index into the base data set, beneath any ``Subset``."""
    leaves: tuple[str, ...]
    """The tensors, numbers and strings of the sample in a fixed order, as digests."""


class Loader(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader."""

    rank: int
    loader: int
    """Ordinal in its process."""
    site: int = -1
    dataset_type: str = ""
    dataset_length: int | None = None
    iterable: bool = False
    sampler_type: str = ""
    own_batches: bool = False
    """It was given a batch sampler, and takes no ``sampler`` beside it."""
    sampler_shards: bool = False
    """The sampler or batch sampler knows ranks (``num_replicas`` and ``rank``)."""
    sampler_rank: int | None = None
    """The rank that the sampler was given."""
    sampler_replicas: int | None = None
    """The number of ranks that the sampler was given."""
    sampler_seed: int | None = None
    """The seed by which the sampler shuffles."""
    sampler_site: int = -1
    """Where the sampler was made."""
    part: int = -1
    """The ``Part`` of its process that is its data set; -1 when the data set is no ``Subset``."""
    sampler_shuffles: bool = False
    batch_size: int | None = None
    workers: int = 0
    persistent: bool = False
    """Its workers are kept between passes."""
    drop_last: bool = False
    length: int | None = None
    """True number of batches per pass, before any cut; None when it has no length."""
    samples: tuple[SampleProbe, ...] = ()


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over a loader."""

    rank: int
    loader: int
    ordinal: int
    """n-th pass of this loader, from 0."""
    site: int = -1
    set_epoch: int | None = None
    true_length: int | None = None
    """Batches that the pass would have had without the cut; None when not known."""
    yielded: int = 0
    end: PassEnd = "open"
    """``counted``, as ``cut``, is an end of ours; its script counts what it draws, and awaits none."""
    by_length: bool = False
    """The script drew as many batches as this rank's own ``len(loader)`` says, to which no other rank agreed."""
    backwards: int = 0
    """Backward calls made while the pass was open."""
    averaged: int | None = None
    """Backwards in which DDP averaged gradients, made on this rank while the pass was open, whatever was drawn; None
    where they were not counted."""
    looped: bool = False
    """A ``for`` statement of the user's outside of a generator drew the batches; counted with ``averaged`` only."""
    ended_ns: int = 0
    """0 while it is open."""
    joined: bool = False
    """A ``join()`` context was open during the pass."""
    index_count: int | None = None
    """How many samples the whole pass draws; None for iterable data sets or when it could not be read to its end."""
    index_digest: str = ""
    """Equal digests are equal index lists, order included."""
    indices: tuple[int, ...] = ()
    """The whole list where it was kept: sorted, Subset indices resolved to the base data set."""
