"""Exceptions that come of where a rehearsal runs and not of the script: no network, no data, a package that is missing.

On the machine of the job they do not happen, so that they accuse no one there or here: the rehearsal is inconclusive.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

import msgspec

from ddpdoctor.check import Reason, Verdict, Via
from ddpdoctor.diagnosis.divergence.aborted import CRASHES, call_it_died_in, find_aborted, was_terminated
from ddpdoctor.diagnosis.divergence.matching import matched
from ddpdoctor.diagnosis.divergence.waiting import is_echo
from ddpdoctor.diagnosis.wording import count, duration_text, location_of, place, rank_list, site_location, verb
from ddpdoctor.finding import Location, Trouble, signal_name
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import Rank, RankException, RunRecord
from ddpdoctor.record.streams.collectives import Wait

# What the driver's events on a GPU (Xid) mean, whose fault they are, and what to do about each.

Blame = Literal["program", "machine", "nobody"]
_KERNEL = "Run the program with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel."
_REBOOT = "Drain the node and reset the GPU or reboot; if it comes again, update driver and firmware."
_RESET = "Drain the node and reset the GPU (`nvidia-smi --gpu-reset`); replace it if the event comes again."


class Xid(msgspec.Struct, frozen=True):
    """One event."""

    meaning: str
    blame: Blame
    remedy: str


XIDS = {
    13: Xid("a kernel raised an exception", "program", _KERNEL),
    31: Xid("a kernel read or wrote memory that does not belong to it", "program", _KERNEL),
    43: Xid("the GPU stopped the program", "program", _KERNEL),
    45: Xid("the driver cleaned up after a process that had ended", "nobody", "Look for what ended the process."),
    48: Xid("an uncorrectable memory error", "machine", _RESET),
    62: Xid("its controller halted", "machine", _RESET),
    63: Xid(
        "a broken row of memory is replaced at the next reset",
        "machine",
        "Drain the node and reset the GPU (`nvidia-smi --gpu-reset`), which replaces the row.",
    ),
    64: Xid(
        "a broken row of memory could not be replaced", "machine", "Take the machine out of service: replace the GPU."
    ),
    74: Xid(
        "an error of an NVLink",
        "machine",
        "Take the machine out of service; look at `nvidia-smi nvlink -e` and the fabric manager, and reset the GPUs.",
    ),
    79: Xid(
        "it fell off the bus",
        "machine",
        "Take the machine out of service and power it off and on; look at its power, temperature and PCIe slot.",
    ),
    92: Xid("many corrected memory errors", "nobody", "Nothing failed yet; watch the GPU."),
    94: Xid("an uncorrectable memory error that hit one program", "machine", _RESET),
    95: Xid("an uncorrectable memory error that hit all programs", "machine", _RESET),
    119: Xid("its system processor does not answer", "machine", _REBOOT),
    120: Xid("its system processor failed", "machine", _REBOOT),
    140: Xid("an uncorrectable memory error", "machine", _RESET),
}
"""By number, as in NVIDIA's list of Xid errors."""
UNKNOWN = Xid(
    "", "machine", "Look the number up in NVIDIA's list of Xid errors, and start the job on another machine meanwhile."
)


def number_of(event: str) -> int:
    """Return the number in ``Xid 79``; 0 for any other text."""
    _, found, number = event.partition("Xid ")
    return int(number) if found and number.isdecimal() else 0


def xid(number: int) -> Xid:
    """Return what is known of an event."""
    return XIDS.get(number, UNKNOWN)


# Ranks that could not meet at the start of a job.

LONG_NS = 60_000_000_000
"""The ranks of a job start within seconds of each other; on a busy cluster within a minute."""
_NOT_MET = (
    (
        r"EADDRINUSE|address already in use|server socket has failed to (listen|bind)",
        "the rendezvous port is in use: the rendezvous failed",
        "Give each job a port of its own: torchrun --standalone or --rdzv-endpoint with port 0, and end leftover "
        "processes of an earlier job.",
    ),
    (
        r"connectFullMesh failed|timed out connecting",
        "a rank reached the rendezvous store, but cannot connect to one of the other ranks",
        "Check whether that rank was still alive; if so, check that its address is reachable from all nodes: "
        "GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names the network interface between them.",
    ),
    (
        r"waiting for clients|clients joined|RendezvousTimeoutError|Timed out initializing",
        "not all ranks reached the rendezvous in time{joined}",
        "Check that every node runs the same command with its own --node-rank, and that WORLD_SIZE is the number "
        "of ranks started.",
    ),
    (
        r"client socket has (failed|timed out)|failed to connect to|RendezvousConnectionError"
        r"|connection to the C10d store|No route to host|Name or service not known|gai error",
        "a rank cannot reach the rendezvous store",
        "Check that MASTER_ADDR and MASTER_PORT (or --rdzv-endpoint) give an address at which the other nodes "
        "reach the first, and that no firewall blocks it.",
    ),
)
"""What a message says, what that means, and what to do."""
_JOINED = re.compile(r"(\d+)/(\d+) clients joined")


def failed_rendezvous(record: RunRecord) -> Iterator[Verdict]:
    """Yield the first failure to meet: an address in use, a store out of reach, or ranks that never came."""
    for text, ranks, location in _failures(record):
        for pattern, sentence, remedy in _NOT_MET:
            if re.search(pattern, text, re.IGNORECASE):
                joined = _JOINED.search(text)
                some = f": {joined[1]} of {count(int(joined[2]), 'rank')} arrived" if joined else ""
                told, because = sentence.format(joined=some), (text[:240], location)
                yield Verdict(sentence=told, remedy=remedy, because=because, ranks=ranks, locations=location)
                return
    missing = _never_came(record)
    if missing is not None:
        yield missing


def _failures(record: RunRecord) -> Iterator[tuple[str, tuple[int, ...], Location | None]]:
    for wait, location in failed_initialisations(record):
        yield wait.error.partition("\n")[0], (wait.rank,) if wait.rank >= 0 else (), location
    trained = any(len(track) for track in record.step_tracks)
    raised = [(rank.rank, error) for rank in record.ranks for error in rank.exceptions if not trained]
    early = [(-1, error) for error in record.job.early_exceptions]
    for number, error in sorted((*early, *raised), key=lambda entry: entry[1].time_ns):
        place = location_of(error.frames[0]) if error.frames else None
        yield f"{error.type}: {headline(error)}", (number,) if number >= 0 else (), place


def _never_came(record: RunRecord) -> Verdict | None:
    """Ranks that wait at the start for others of which nothing has been seen."""
    waits = [wait for wait in record.waits if wait.kind == "init_process_group" and not wait.ended_ns]
    here = {wait.rank for wait in waits if wait.rank >= 0}
    expected = record.job.world_size or record.job.ranks_expected
    if not here or not expected or any(wait.error for wait in waits):
        return None
    waited_ns = record.job.ended_ns - min(wait.started_ns for wait in waits)
    missing = sorted(set(range(expected)) - here)
    alive = {rank.rank for rank in record.ranks if rank.end == "running"}
    if not missing or waited_ns < LONG_NS or not here <= alive:
        return None
    return Verdict(
        sentence=f"{rank_list(here)} {verb(here, 'has', 'have')} waited {duration_text(waited_ns)} in "
        f"init_process_group for {rank_list(missing)}",
        remedy="Check that these ranks were started at all, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE.",
        because=((f"{len(here)} of {count(expected, 'rank')} reached init_process_group", None),),
        ranks=tuple(missing),
    )


# Exceptions whose message names their cause: what it is, and on which ranks they came.

_PATTERNS: tuple[tuple[Trouble, re.Pattern[str]], ...] = (
    ("ready-twice", re.compile(r"Expected to mark a variable ready only once")),
    ("no-rank-environment", re.compile(r"environment variable \w+ expected, but not set")),
    ("port-in-use", re.compile(r"EADDRINUSE|server socket has failed to (listen|bind)", re.IGNORECASE)),
    ("shared-memory", re.compile(r"insufficient shared memory|killed by signal: Bus error", re.IGNORECASE)),
    ("cuda-after-fork", re.compile(r"Cannot re-initialize CUDA in forked subprocess")),
    ("missing-device", re.compile(r"deserialize object on (a )?CUDA device")),
    (
        "out-of-memory",
        re.compile(r"out of memory|can't allocate memory|not enough memory: you tried|Unable to allocate"),
    ),
    (
        "nccl-error",
        re.compile(r"nccl(UnhandledCuda|System|Internal)Error|ncclInvalid(Argument|Usage)|NCCL error", re.IGNORECASE),
    ),
    ("cpu-tensor", re.compile(r"No backend type associated with device type cpu|Tensors must be CUDA and dense")),
)
"""The messages of torch that say what is wrong, whatever the script was about to do."""


_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})


class NamedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One exception that several ranks raised at one line, or one of them alone."""

    type: str
    message: str
    """Its first line."""
    location: Location | None
    ranks: tuple[int, ...]


def trouble_of(raised: RankException) -> Trouble | None:
    """Return what an exception says went wrong; None when its message does not name its cause."""
    if raised.attribute_owner:
        return "wrapper-attribute"
    if raised.type in _OUT_OF_MEMORY:
        return "out-of-memory"
    return next((trouble for trouble, pattern in _PATTERNS if pattern.search(raised.message)), None)


def named_failures(record: RunRecord, trouble: Trouble | None) -> Iterator[NamedFailure]:
    """Yield the exceptions that ended ranks and say this of what went wrong, once a line."""
    found: dict[tuple[str, Location | None], list[tuple[int, RankException]]] = {}
    for number, raised in ((rank.rank, raised) for rank in record.ranks for raised in rank.exceptions):
        if trouble_of(raised) == trouble and not raised.communication:
            place = location_of(raised.frames[0]) if raised.frames else None
            found.setdefault((raised.type, place), []).append((number, raised))
    for (kind, place), entries in found.items():
        yield NamedFailure(
            type=kind,
            message=line if len(line := headline(entries[0][1])) <= 200 else f"{line[:200]}...",
            location=place,
            ranks=tuple(sorted({rank for rank, _ in entries})),
        )


def failed_initialisations(record: RunRecord) -> Iterator[tuple[Wait, Location | None]]:
    """Yield the calls of ``init_process_group`` that failed, one for each line, where no later call did better."""
    said: set[tuple[int, str]] = set()
    for position, wait in enumerate(record.waits):
        if wait.kind != "init_process_group" or not wait.error or (wait.site, wait.error) in said:
            continue
        later = (one for one in record.waits[position + 1 :] if one.kind == wait.kind and one.rank in (wait.rank, -1))
        if any(one.ended_ns > 0 and not one.error for one in later):
            continue
        said.add((wait.site, wait.error))
        yield wait, site_location(record.site(wait.site))


# The rank whose process was killed first, where none of them failed by itself.

BEATS_APART_NS = 1_000_000_000
"""A rank whose heart stopped so much earlier than the others' was gone before them; it beats five times a second."""
PEERS_END_WITHIN_NS = 2_000_000_000
"""So long after a crash its peers, who lose their connection or are ended for it, have written where they were."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_BY_HAND = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""How launchers, schedulers and users end a job."""


def killed_rank(record: RunRecord) -> Iterator[Verdict]:
    """Yield the first rank that was killed while others were at work, where that is known.

    Processes that all vanish at the same moment were ended together, by their launcher or the user, and those of a job
    that was told to end by that: nothing is said.
    Nor is it of a rank that a collective ended which the others were not in: that is a divergence.
    """
    dead = [rank for rank in record.ranks if rank.end == "signalled" and not rank.main_finished]
    own = [rank for rank in dead if rank.signal not in _BY_HAND and not was_terminated(record, rank)]
    if not own or record.job.stop_reason == "interrupted":
        return
    if any(rank.exceptions and not is_echo(rank) for rank in record.ranks):
        return
    beats = {heartbeat.rank: heartbeat.beat_at_ns for heartbeat in record.heartbeats}
    last_sign = {rank.rank: beats.get(rank.rank, rank.ended_ns) for rank in record.ranks}
    first = min(own, key=lambda rank: (rank.signal is None, last_sign[rank.rank], rank.rank))
    if find_aborted(record, matched(record)) is not None:
        return
    if first.signal is None and not _went_first(first, record, last_sign):
        return
    heartbeat = record.heartbeat(first.rank)
    because: list[Reason] = []
    within = call_it_died_in(record, first)
    if within is not None:
        did = f"rank {first.rank} was inside {within.signature.kind} at {place(within.site.innermost)}"
        because.append((f"{did}, step {within.step:,}", None, {"step": within.step}, first.rank))
    elif heartbeat is not None and heartbeat.phase:
        did = f"rank {first.rank} was last seen in {heartbeat.phase.replace('_', ' ')}, step {heartbeat.step:,}"
        because.append((did, None, {"step": heartbeat.step}, first.rank))
    echoes = tuple(rank.rank for rank in record.ranks if is_echo(rank))
    if echoes:
        lost = f"{rank_list(echoes)} {verb(echoes, 'reports', 'report')} a lost connection, which follows"
        because.append((lost, None))
    who = f"it was process {first.pid}" + (f" on {first.host}" if first.host else "")
    because.append((who, None, {"pid": first.pid}, first.rank))
    inside = "" if within is None else f" inside {within.signature.kind} at {place(within.site.innermost)}"
    death = f"the process of rank {first.rank} ended without an exception or an exit code"
    if first.signal is not None:
        death = f"rank {first.rank} was killed by {signal_name(first.signal)}"
    yield Verdict(
        sentence=death + inside,
        remedy=_remedy_of_death(first.signal, in_a_collective=within is not None),
        locations=None if within is None else location_of(within.site.innermost),
        ranks=(first.rank,),
        because=tuple(because),
    )


def _remedy_of_death(number: int | None, *, in_a_collective: bool) -> str:
    if in_a_collective and number == signal.SIGABRT:
        return (
            "Read the message that this rank printed last, and compare what the others called there: kind, shape and "
            "dtype of a collective must be the same on every rank."
        )
    if in_a_collective and number is None:
        return (
            "Find out what ended that process: the log of the scheduler or of the container, or a manual `kill`. It "
            "was waiting for the others in a collective."
        )
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return "Read the last lines that this rank printed, and look for the native call in its core dump."
    return (
        "Check whether the kernel killed it because memory ran out (`dmesg -T | grep -i 'killed process'`), and "
        "the memory limit of the container or the Slurm job."
    )


def may_yet_be_known(record: RunRecord, rank: Rank) -> bool:
    """Return whether a rank crashed just now, and why may be seen by what happens to those that still run."""
    others_run = any(other.end == "running" for other in record.ranks if other.rank != rank.rank)
    crashed = rank.end == "signalled" and rank.signal in CRASHES
    return crashed and others_run and record.job.ended_ns - rank.ended_ns < PEERS_END_WITHIN_NS


def _went_first(first: Rank, record: RunRecord, last_sign: dict[int, int]) -> bool:
    """Return whether the others outlived a rank: they failed or were ended for it, live, or their hearts beat on."""
    others = [rank for rank in record.ranks if rank.rank != first.rank]
    raised = (min(rank.exceptions, key=lambda error: error.time_ns) for rank in others if rank.exceptions)
    if any(one.time_ns < last_sign[first.rank] and _TIMED_OUT.search(one.message) for one in raised):
        return False  # A rank waited until a timeout struck, and this one lived on: the launcher ended it.
    lived_on = [rank for rank in others if rank.end == "running" or is_echo(rank) or was_terminated(record, rank)]
    beat_on = all(last_sign[rank.rank] - last_sign[first.rank] >= BEATS_APART_NS for rank in others)
    return bool(lived_on) or (bool(others) and beat_on)


# Ranks that took their global rank for the index of a GPU, as a layout of several nodes shows.

_NO_SUCH_GPU = re.compile(
    r"invalid device ordinal\s*\(device (\d+) was asked for; the node of this rehearsal has (\d+)\)"
)
"""What the stand-in says of a GPU that the node lacks; CUDA does not tell the index."""


def asks_for_global_rank(rank: Rank, raised: RankException) -> bool:
    """Return whether an exception came of the global rank as the index of a GPU."""
    match = _NO_SUCH_GPU.search(raised.message)
    return match is not None and int(match[1]) == rank.rank != rank.local_rank


def gpus_for_the_ranks(record: RunRecord) -> int:
    """Return how many GPUs ranks that were denied one need, at one each; 0 where none was denied one.

    An index beyond the ranks of the node is a mistake of the script. A spawned process that has not joined yet is no
    rank, and the index is all that is known of it.
    """
    denied = (_NO_SUCH_GPU.search(one.message) for one in record.job.early_exceptions)
    early = max((int(match[1]) + 1 for match in denied if match), default=0)
    if any(_NO_SUCH_GPU.search(one.message) for rank in record.ranks for one in rank.exceptions):
        return max(early, record.job.world_size, len(record.ranks))
    return early


def gpus_of_the_node(raised: RankException) -> int | None:
    """Return how many GPUs the pretended node has, where an exception came of asking for more."""
    match = _NO_SUCH_GPU.search(raised.message)
    return None if match is None else int(match[2])


def wrong_index(record: RunRecord) -> Iterator[Verdict]:
    """Yield the first rank that asked for a GPU by its global rank."""
    for rank in record.ranks:
        for raised in rank.exceptions:
            match = _NO_SUCH_GPU.search(raised.message)
            if match is not None and asks_for_global_rank(rank, raised):
                gpus, place = int(match[2]), location_of(raised.frames[0]) if raised.frames else None
                told = (
                    f"rank {rank.rank} requested GPU {rank.rank} on node {rank.node}; its local rank is "
                    f"{rank.local_rank}, and the node has {gpus} GPU{'' if gpus == 1 else 's'}"
                )
                yield Verdict(
                    sentence="the global rank is used as a GPU index: right on one node, wrong on two",
                    remedy='Use the local rank here (int(os.environ["LOCAL_RANK"]) under torchrun).',
                    locations=place,
                    ranks=(rank.rank,),
                    because=((told, Via(place, raised.frames)),),
                )
                return


_NETWORK_TYPES = frozenset({
    "URLError", "HTTPError", "gaierror", "ConnectTimeout", "ConnectError", "ReadTimeout", "MaxRetryError",
    "NameResolutionError", "NewConnectionError", "ProxyError", "SSLError", "LocalEntryNotFoundError",
    "OfflineModeIsEnabled", "RemoteDisconnected",
})  # fmt: skip
_NETWORK_WORDS = re.compile(
    r"name resolution|name or service not known|network is unreachable|max retries exceeded|getaddrinfo failed|"
    r"failed to resolve|couldn't connect to|cannot connect to host|https?://\S+ (is|was) not reach|offline mode|"
    r"urlopen error|if you were trying to load it from 'https?://",
    re.IGNORECASE,
)
_DATA_WORDS = re.compile(
    r"dataset not found|not found or corrupted|found no valid file|found 0 (files|images|samples)|couldn't find any "
    r"(class|data) folder|no such file or directory|num_samples should be a positive integer value, but got "
    r"num_samples=0|(data|dataset|folder|directory|file|path)\b.{0,400}\b(does not exist|doesn't exist|not found)|"
    r"couldn't find (a )?(dataset|any data file)",
    re.IGNORECASE,
)
_RAISED_FROM = "The above exception was the direct cause of the following exception:"
_SAID = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$", re.MULTILINE)
"""The line of a traceback that has the class of the exception and its message."""
_MODULE = re.compile(r"No module named '([\w.]+)'|No package metadata was found for ([\w.-]+)")
_OTHER_VERSION = re.compile(r"cannot import name '\w+' from '(\w+)[\w.]*' \(.*\b(?:site|dist)-packages\b")
_NOT_INSTALLED = re.compile(r"(\bnot|n't)\b.{0,40}\b(installed|found|available)\b|\b(pip|conda) install\b", re.DOTALL)
"""As libraries say it that look for an optional package before they import it: transformers, accelerate, torch."""
_OTHER_BUILD = re.compile(r"operator (torch\w+)::\w+ does not exist|Could not load this library: .*/(?:lib)?(torch\w+)")
"""Compiled for another torch, or for CUDA where there is none."""
_REMOVED = re.compile(r"\bremoved in (?:the )?([A-Za-z]\w*) v?\d")
"""As libraries say it of their names: NumPy of ``np.float_``."""
_NO_PART = re.compile(r"module '(\w+)[\w.]*' has no attribute '\w+'|^module (\w+)[\w.]* has no attribute \w+$")
"""Python's message, and that of transformers and others, whose modules are loaded when they are asked for."""
_WRITES = re.compile(
    r"""Parent directory (\S+) does not exist|^\s.*\bopen\(.*,\s*(?:mode=)?["'][wax]b?\+?["']""", re.MULTILINE
)
"""torch's message of a save, and a line of a traceback that opens a file to write it."""
_QUOTED = re.compile(r"'([^']+)'")
_DISTRIBUTIONS = {
    "cv2": "opencv-python-headless", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn",
    "skimage": "scikit-image", "mpi4py": "mpi4py", "bs4": "beautifulsoup4", "Levenshtein": "python-Levenshtein",
    "google": "protobuf", "attr": "attrs", "dotenv": "python-dotenv", "git": "GitPython",
    "clip": "git+https://github.com/openai/CLIP.git", "apex": "", "hydra": "hydra-core",
    "mpl_toolkits": "matplotlib",
}  # fmt: skip
"""What is installed for a module whose package is called otherwise; empty for what is built from its sources."""


class Lack(msgspec.Struct, frozen=True):
    """What a rank needed and this machine does not have."""

    kind: Literal["network", "data", "package", "version", "program"]
    """``version``: the package is there, and is not the one that the script was written for. ``program``: one that the
    script starts is not there, or fails, as one that downloads does without a network."""
    name: str = ""
    """Of the module, where it is a package that Python did not find; the message names any other."""


def lack_behind(raised: RankException, record: RunRecord | None = None) -> Lack | None:
    """Return what the environment lacked, where that raised an exception; None where the script has to answer for it.

    With a record, a file that the ranks themselves made, or whose directory they made, is the script's own affair. An
    exception that was raised from another one (``raise ... from error``) lacks what that one lacked.
    """
    if raised.communication:
        return None
    return next((lack for one in (raised, *_causes(raised)) if (lack := _lack_of(one, record)) is not None), None)


def _causes(raised: RankException) -> Iterator[RankException]:
    """Yield the exceptions that an exception was raised from, the latest first, each with what its traceback says."""
    parts = raised.traceback.split(_RAISED_FROM)
    for end in range(len(parts) - 1, 0, -1):
        said = _SAID.findall(parts[end - 1])
        if said:
            kind, message = said[-1]
            yield RankException(
                time_ns=raised.time_ns, type=kind.rpartition(".")[2], message=message, traceback=parts[end - 1]
            )


def _lack_of(raised: RankException, record: RunRecord | None) -> Lack | None:
    if raised.type in ("ModuleNotFoundError", "ImportError", "PackageNotFoundError"):
        found = _MODULE.search(f"{raised.message}\n{raised.traceback}")
        if found:
            name = found[1] or found[2]
            # What an older or newer torch has is no package of its own.
            return Lack("version", "torch") if name.startswith("torch.") else Lack("package", name)
        other = _OTHER_VERSION.search(raised.message)
        if other:
            return Lack("version", other[1])
        return Lack("package") if _NOT_INSTALLED.search(raised.message) else None
    foreign = _OTHER_BUILD.search(raised.message) or (raised.type == "AttributeError" and _of_another(raised))
    if foreign:
        return Lack("version", (foreign[1] or foreign[2]).lower())
    if raised.type == "CalledProcessError" or "_execute_child" in raised.traceback:
        return Lack("program")
    message = headline(raised)
    if directory_to_make(raised):
        return None
    if raised.type in _NETWORK_TYPES or _NETWORK_WORDS.search(raised.message):
        return Lack("network")
    is_file = raised.type in ("FileNotFoundError", "NotADirectoryError")
    if not (is_file or _DATA_WORDS.search(raised.message)):
        return None
    return None if record is not None and _was_made(message, record) else Lack("data")


def _of_another(raised: RankException) -> re.Match[str] | None:
    """Return the match whose group names a package that has no longer, or not yet, what is asked of it."""
    removed = _REMOVED.search(raised.message)
    missing = _NO_PART.search(headline(raised)) if removed is None else None
    # A module of the script's own lies where the script does, or its name is no one's.
    known = missing is None or f"/site-packages/{missing[1] or missing[2]}/" in raised.traceback
    return removed or (missing if known else None)


def directory_to_make(raised: RankException) -> str:
    """Return the directory that a script writes into and that is not there; empty where it is about something else."""
    writes = _WRITES.search(raised.message) or _WRITES.search(raised.traceback)
    if writes is None or raised.type not in ("RuntimeError", "FileNotFoundError"):
        return ""
    path = _QUOTED.search(raised.message)
    return writes[1] or (os.path.dirname(path[1]) if path is not None else "")


def distribution_of(module: str) -> str:
    """Return the package that a module is installed by; empty for one that is built from its sources."""
    top = module.partition(".")[0]
    return _DISTRIBUTIONS.get(top, top)


def is_written_by_ranks(message: str, record: RunRecord) -> bool:
    """Return whether a path in a message is that of a file that some rank of the run writes."""
    written = [PurePath(access.path) for access in record.accesses if access.action == "write"]
    return any(_same(PurePath(path), one) for path in _QUOTED.findall(message) for one in written)


def _was_made(message: str, record: RunRecord) -> bool:
    """Return whether a path in a message, or the directory that it is in, is of the ranks' own making."""
    paths = [PurePath(path) for path in _QUOTED.findall(message)]
    made = {PurePath(event.path) for event in record.files if not event.existed and event.action != "child-process"}
    made |= {PurePath(access.path) for access in record.accesses if access.action == "make"}
    found = (_same(path, one) or any(_same(parent, one) for parent in path.parents) for path in paths for one in made)
    return is_written_by_ranks(message, record) or any(found)


def _same(path: PurePath, made: PurePath) -> bool:
    """Compare a path as a message has it, perhaps relative, with an absolute one."""
    parts = path.parts
    return path == made or (not path.is_absolute() and bool(parts) and made.parts[-len(parts) :] == parts)
