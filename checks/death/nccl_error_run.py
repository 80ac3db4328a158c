"""What NCCL says when it fails, and what mostly is behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.diagnosis.wording import location_of
from ddpdoctor.finding import Location
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import Rank, RankException, RunRecord

_ERROR = re.compile(
    r"nccl(UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage|RemoteError)"
    r"|NCCL error[^\n]*?(unhandled cuda error|unhandled system error|internal error|invalid usage|remote process)",
    re.IGNORECASE,
)
_SAME_GPU = re.compile(r"Duplicate GPU detected", re.IGNORECASE)
_NO_SPACE = re.compile(r"No space left on device|/dev/shm", re.IGNORECASE)
_CLASSES = {
    "unhandledcudaerror": "unhandled CUDA error",
    "unhandled cuda error": "unhandled CUDA error",
    "systemerror": "system error",
    "unhandled system error": "system error",
    "internalerror": "internal error",
    "internal error": "internal error",
    "invalidargument": "invalid argument",
    "invalidusage": "invalid usage",
    "invalid usage": "invalid usage",
    "remoteerror": "remote error",
    "remote process": "remote error",
}
_BEHIND: Mapping[str, tuple[str, str]] = {
    "unhandled CUDA error": (
        "a CUDA call inside of NCCL failed, usually after the fault of an earlier kernel on this rank",
        "Run with CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel fails; compare driver and NCCL versions.",
    ),
    "system error": (
        "a call of the operating system failed: a network interface, a socket, or shared memory",
        "Set NCCL_DEBUG=WARN to see which; then NCCL_SOCKET_IFNAME to an interface that the nodes share, or a larger "
        "/dev/shm.",
    ),
    "internal error": (
        "NCCL found itself in an impossible state, usually because the ranks run different versions of it",
        "Compare `torch.cuda.nccl.version()` and the drivers of all nodes; set NCCL_DEBUG=WARN.",
    ),
    "invalid argument": (
        "NCCL was given an invalid argument",
        "Set NCCL_DEBUG=WARN, which prints the argument.",
    ),
    "invalid usage": (
        "the ranks use NCCL in an invalid way",
        "Set NCCL_DEBUG=WARN, which prints the reason; give every rank its own GPU.",
    ),
    "remote error": (
        "another process, or the network to it, failed",
        "Look at the node of the rank that stopped reporting first.",
    ),
}


class NcclError(msgspec.Struct, frozen=True, kw_only=True):
    """One class of error and the rank that met it first."""

    kind: str
    rank: int
    ranks: tuple[int, ...]
    """All ranks with that class of error."""
    message: str
    location: Location | None
    cause: str
    remedy: str


def is_nccl_error(raised: RankException) -> bool:
    """Return whether an exception is NCCL's own, be it only that a peer was gone."""
    return _ERROR.search(raised.message) is not None


def nccl_errors(record: RunRecord) -> Iterator[NcclError]:
    """Yield the class of error that came first; an error for a lost peer only where nothing else went wrong."""
    found = [
        (raised.time_ns, rank, raised, kind)
        for rank in record.ranks
        for raised in rank.exceptions
        if (kind := _kind(raised))
    ]
    own = [entry for entry in found if entry[3] != "remote error"]
    explained = any(_explains(rank) for rank in record.ranks)
    if not own and explained:
        return
    entries = sorted(own or found, key=lambda entry: (entry[0], entry[1].rank))
    if not entries:
        return
    _, first, raised, kind = entries[0]
    cause, remedy = _BEHIND[kind]
    if _SAME_GPU.search(raised.message):
        cause = "two ranks use the same GPU"
        remedy = "Call torch.cuda.set_device(local_rank) before the first collective."
    elif _NO_SPACE.search(raised.message):
        cause = "shared memory (/dev/shm) is full"
        remedy = "Start the container with --ipc=host or a larger --shm-size."
    yield NcclError(
        kind=kind,
        rank=first.rank,
        ranks=tuple(sorted({rank.rank for _, rank, _, other in entries if other == kind})),
        message=headline(raised)[:240],
        location=location_of(raised.frames[0]) if raised.frames else None,
        cause=cause,
        remedy=remedy,
    )


def _kind(raised: RankException) -> str:
    match = None if "out of memory" in raised.message else _ERROR.search(raised.message)
    return "" if match is None else _CLASSES[(match[1] or match[2]).lower()]


def _explains(rank: Rank) -> bool:
    """Return whether a rank ended by something that leaves its peers with a lost connection."""
    if rank.end == "signalled":
        return not rank.main_finished
    return any(not raised.communication and not is_nccl_error(raised) for raised in rank.exceptions)
