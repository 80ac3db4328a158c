"""What ranks do before and beside training: random numbers, the environment, forked processes; places in the source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ddpdoctor.finding import Frame, Trouble
from ddpdoctor.record.streams import RowAtLine, RowAtTime, RowOfRank

# Where in the code ranks were: the stacks of their threads, and the lines of the user's files that they ran.


class StackDump(RowOfRank, frozen=True, kw_only=True):
    """The stack of one thread of a rank, innermost frame first, torch's frames included."""

    thread: str
    main: bool
    daemon: bool = True
    """The process does not wait for this thread at its end."""
    frames: tuple[Frame, ...] = ()
    native: tuple[str, ...] = ()
    """C++ functions that it is in beyond these frames, innermost first, where they were read."""
    time_ns: int = 0
    native_end: bool = False
    """A signal ended the process then, from a thread that runs no Python, as those are in which gloo and NCCL work."""
    of_the_end: bool = False
    """A signal ended the process at this place."""


class LinesExecuted(RowOfRank, frozen=True, kw_only=True):
    """Lines of a user's file that a rank ran."""

    file: str
    lines: frozenset[int] = frozenset()
    unwatched: frozenset[int] = frozenset()
    """First lines of functions that ran so much that only part of what they did is known."""
    by_chance: frozenset[int] = frozenset()
    """Those of ``lines`` that were run first when only the clock decided how far the script would come."""
    late: bool = False
    """Only lines that ran after a model was wrapped or a loader drawn from are known."""


Library = Literal["torch", "numpy", "random"]


class Seeding(RowAtTime, frozen=True, kw_only=True):
    """A rank fixed the random numbers of a library."""

    library: Library
    value: int | None = None
    """What it was seeded with; None where that is no whole number."""


class RandomState(RowOfRank, frozen=True, kw_only=True):
    """A library's generator just before the first batch of a data set was fetched, in the process that fetched it."""

    library: Library
    dataset_type: str
    dataset_length: int
    worker: int = -1
    """Number of the loader's worker process; -1 in the rank's own process."""
    digest: str = ""
    """Equal digests are equal states, and draw equal numbers."""
    drawn_from: bool = False
    """Fetching the batch moved the state, and did not seed it."""
    file: str = ""
    """Where the data set's ``__getitem__`` is written; empty outside of the user's code."""
    line: int = 0
    end_line: int = 0


class Part(RowAtLine, frozen=True, kw_only=True):
    """A ``Subset`` of a data set; one that is made of another is described by indices into the innermost data set."""

    part: int
    """Ordinal in its process."""
    base_type: str = ""
    base_length: int = 0
    count: int = 0
    index_sum: int = 0
    digest: str = ""
    """Of the sorted indices: equal digests are equal parts."""


class Holding(RowOfRank, frozen=True, kw_only=True):
    """A list, array or tensor that a data set holds, with one row for each sample."""

    dataset_type: str
    dataset_length: int
    attribute: str
    ordered_digest: str = ""
    """Equal digests are equal rows in an equal order."""
    unordered_digest: str = ""
    """Equal digests are equal rows in any order."""


class Setting(RowOfRank, frozen=True, kw_only=True):
    """A variable of the environment that bears on the job was set, or removed, after the job had been started."""

    name: str
    value: str
    """Empty where it was removed."""
    removed: bool = False
    previous: str | None = None
    """What it was before; None when it was not set."""
    launched: bool = False
    """A launcher started the process and had said what it needs to know."""
    imported: bool = False
    """torch had been imported before."""
    joined: bool = False
    """The process group had been made before."""
    site: int = -1
    """-1 where no line of the user's in the process of the rank did it."""
    time_ns: int = 0


class ForkedUse(RowAtLine, frozen=True, kw_only=True):
    """A process that a rank forked called a collective of the rank's process group."""

    kind: str


class CpuThreads(RowOfRank, frozen=True, kw_only=True):
    """The threads for torch's computation in a rank, at its first optimizer step."""

    threads: int
    chosen: bool = False
    """The script or the command asked for so many; otherwise the rehearsal did."""


# What the logs of a dead job tell: failures and ends of its ranks, each once, in the order in which they were written.

IncidentKind = Literal[
    "raised", "timed-out", "mismatch", "lost-peer", "signalled", "left", "no-rendezvous", "nccl", "gpu", "cuda",
    "stuck", "killed-by-kernel", "killed-by-scheduler", "worker-lost", "ended-from-outside", "interrupted", "said",
]  # fmt: skip
"""``cuda`` is an error of a kernel that a later call reports; ``stuck``, a watchdog that makes no progress; ``said``, a
line that looks like an exception, without a traceback: it counts where its rank failed, or where nothing else is known.
"""


ERROR_LINE, NO_START, WATCHDOG = "error line", "start", "watchdog"
IN_THE_KERNEL = "uninterruptible sleep"
"""Types of incidents: a line that only says that there is an error, a job that did not come to its script, a watchdog
that does not say what it detected, and a process that no signal can end.
"""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong, as the log has it."""

    kind: IncidentKind
    trouble: Trouble
    rank: int | None = None
    position: int = 0
    """Where among the incidents of all logs it stands in the order of reading."""
    attempt: int = 0
    """How often the launcher had started the ranks anew before."""
    time_ns: int = 0
    file: str = ""
    """The log, as the user named it."""
    line: int = 0
    """Of the log, counted from 1; 0 where it was not counted."""
    host: str = ""
    pid: int = 0
    type: str = ""
    """Class of an exception, or what the log calls the event."""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    """Of a traceback, innermost first, libraries included."""
    mixed: bool = False
    """Lines of several ranks stand mixed without a mark, so that frames may be another rank's."""
    collective: str = ""
    """The one that it happened in, as users spell it; empty where that is not known."""
    sequence: int | None = None
    """Number of that collective in its group, as torch counts."""
    group: str = ""
    """The process group, as torch names it."""
    last_enqueued: int | None = None
    timeout_ns: int = 0
    absent: tuple[int, ...] = ()
    """Ranks that did not come, where the message names them."""
    others: tuple[int, ...] = ()
    """Further ranks that the message speaks of."""
    signal: int | None = None
    exit_code: int | None = None
    unused: tuple[str, ...] = ()
    """Names, or indices, of the parameters that it is about."""
    peer: str = ""
    """The host, or the address, of the other end of a connection."""
    process: str = ""
    """Name of the process that it is about, where the system tells it."""
    went_on: int = 0
    """How many lines that look like the job's progress its process wrote afterwards."""
    implies: str = ""
    """What to do about it, where its message says more than its kind."""
    passed_on: bool = False
    """Another part of NCCL had the error first."""
    loose: bool = False
    """It stands in the line of a logger, or without its traceback."""


NO_CODE = 256
"""Of a process of which a launcher says that it failed, and not with which exit code: none has that one."""


class RankEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How a launcher says that a rank's process ended."""

    rank: int | None = None
    local_rank: int | None = None
    pid: int = 0
    host: str = ""
    attempt: int = 0
    time_ns: int = 0
    exit_code: int = 0
    """Negative for a signal; 0 where nothing says that it failed."""
    was_ended: bool = False
    """The launcher had told it to end."""
    by_agent: bool = False
    """torchrun's agent reports it, which starts the ranks of its node and ends those that are left."""
    file: str = ""
    line: int = 0
    position: int = 0


class LogEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read in logs."""

    incidents: tuple[Incident, ...] = ()
    endings: tuple[RankEnding, ...] = ()
    ranks: tuple[int, ...] = ()
    """Ranks that wrote at least one line that was looked at."""
    world_size: int = 0
    """0 where it is not known."""
    attempts: int = 1
    finished: bool = False
    """The logs say that the job came to its end, or it went on after everything that they report."""
    endpoint: str = ""
    """Where the ranks meet, as the launcher prints it: ``host:port``."""
    of_training: bool = True
    """Something in them speaks of a training: where nothing does, they may be those of any program."""
    dumps_doubt: str = ""
    """Why what the dumps show is not certain, where no flight recorder wrote them."""
    ordered: bool = False
    """All incidents stand in one log, so that their positions are their order in time."""


# What is known of the machines that a job runs on, or is to run on, which need not be the one that looks.


class JobMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the job, and what the ranks are on it; 0 where nothing says."""

    device_memory_bytes: int = 0
    """Memory of one of its GPUs."""
    cores: int = 0
    """Cores that all its ranks together may use."""
    ranks_per_node: int = 0
    may_use_gpus: bool = False
    """The ranks train on GPUs, or speak of them and may where there are some."""
    spreads_threads: bool = False
    """Where no one chooses, torch computes on a thread for each core in every rank: no launcher changes that."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a live job, as the ranks on it say."""

    host: str
    ranks: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    """Names of its network interfaces; empty when they are not known."""
    environment: Mapping[str, str] = {}
    """Variables that bear on the job, of the lowest of its ranks, when the process group was made."""
    cores: int = 0
    """Cores that these ranks together may use; 0 when not known."""
    clock_error_ns: int | None = None
    """By no more its times are wrong beside those of the first node; None where clocks were not compared."""


class DeviceUse(RowAtLine, frozen=True, kw_only=True):
    """The first time that a process put something on a GPU in one of two ways."""

    index: int
    how: Literal["explicit", "current"]
    """The user's line named the index, or left it to the current device."""
    was_set: bool = False
    """The process had chosen its current device before."""
    forked: bool = False
    """A process that the rank had forked, after the rank itself had used a GPU."""


class DeviceChoice(RowAtLine, frozen=True, kw_only=True):
    """A call of ``set_device``, or a barrier that a process came to before its first one."""

    chosen: bool
    """False: the barrier, which named no device."""


class CheckpointLoad(RowAtTime, frozen=True, kw_only=True):
    """A call of ``torch.load`` with a path, whether it succeeded or not."""

    path: str
    mapped: bool = False
    """It was given ``map_location``."""
    failed: bool = False
    saved_on: tuple[str, ...] = ()
    """Devices that the storages were saved from; empty when it is not known."""


class StateNames(RowAtTime, frozen=True, kw_only=True):
    """How the names of a state dict fit the module that it was loaded into."""

    module_class: str = ""
    names: int = 0
    """0 when they fitted."""
    too_long: int = 0
    """Names that fit once the prefix ``module.`` is taken away: they were saved from the wrapper."""
    too_short: int = 0
    """Names that fit once the prefix is put before them."""
    raised: bool = False
