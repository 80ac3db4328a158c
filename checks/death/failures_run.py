"""What NCCL, the driver and the first exception say when a job dies, and what mostly is behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ddpdoctor.check import Verdict
from ddpdoctor.diagnosis import failures
from ddpdoctor.diagnosis.divergence.divergence import find_divergence, root_exception, was_interrupted
from ddpdoctor.diagnosis.divergence.unused_parameters import UNFINISHED, unused_parameters
from ddpdoctor.diagnosis.failures import failed_rendezvous, trouble_of
from ddpdoctor.diagnosis.wording import location_of, rank_list
from ddpdoctor.files import regex
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import Rank, RankException, RunRecord
from ddpdoctor.record.streams.measured import Gpu, GpuSample

_ERROR = regex(
    r"nccl(UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage|RemoteError)"
    r"|NCCL error[^\n]*?(unhandled cuda error|unhandled system error|internal error|invalid usage|remote process)",
    re.IGNORECASE,
)
# NCCL reports it as an invalid usage; the message says more than the class.
_SAME_GPU = regex(r"Duplicate GPU detected", re.IGNORECASE)
_NO_SPACE = regex(r"No space left on device|/dev/shm", re.IGNORECASE)
_CLASSES = {
    "unhandledcudaerror": "unhandled CUDA error",
    "systemerror": "system error",
    "unhandledsystemerror": "system error",
    "internalerror": "internal error",
    "invalidargument": "invalid argument",
    "invalidusage": "invalid usage",
    "remoteerror": "remote error",
    "remoteprocess": "remote error",
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
    "invalid argument": ("NCCL was given an invalid argument", "Set NCCL_DEBUG=WARN, which prints the argument."),
    "invalid usage": (
        "the ranks use NCCL in an invalid way",
        "Set NCCL_DEBUG=WARN, which prints the reason; give every rank its own GPU.",
    ),
    "remote error": (
        "another process, or the network to it, failed",
        "Look at the node of the rank that stopped reporting first.",
    ),
}


def nccl_errors(record: RunRecord) -> Iterator[Verdict]:
    """Yield the class of error that came first; an error for a lost peer only where nothing else went wrong."""
    raised_by = [(rank, raised) for rank in record.ranks for raised in rank.exceptions]
    found = [(rank, raised, kind) for rank, raised in raised_by if (kind := _kind(raised))]
    own = [entry for entry in found if entry[2] != "remote error"]
    entries = own or ([] if any(map(_explains, record.ranks)) else found)
    if not entries:
        return
    first, raised, kind = min(entries, key=lambda entry: (entry[1].time_ns, entry[0].rank))
    cause, remedy = _BEHIND[kind]
    if _SAME_GPU.search(raised.message):
        cause = "two ranks use the same GPU"
        remedy = "Call torch.cuda.set_device(local_rank) before the first collective."
    elif _NO_SPACE.search(raised.message):
        cause = "shared memory (/dev/shm) is full"
        remedy = "Start the container with --ipc=host or a larger --shm-size."
    ranks = tuple(sorted({rank.rank for rank, _, other in entries if other == kind}))
    others = f"; then {rank_list(set(ranks) - {first.rank})}" if len(ranks) > 1 else ""
    place = location_of(raised.frames[0]) if raised.frames else None
    yield Verdict(
        sentence=f"NCCL failed on rank {first.rank} first with {'an' if kind[0] in 'aeiou' else 'a'} {kind}: {cause}",
        locations=place,
        ranks=ranks,
        because=(f"rank {first.rank}: {headline(raised)[:240]}{others}", place, {}, first.rank),
        remedy=remedy,
    )


def _kind(raised: RankException) -> str:
    match = None if "out of memory" in raised.message else _ERROR.search(raised.message)
    return "" if match is None else _CLASSES[(match[1] or match[2]).lower().replace(" ", "")]


def _explains(rank: Rank) -> bool:
    """Return whether a rank ended by something that leaves its peers with a lost connection."""
    if rank.end == "signalled":
        return not rank.main_finished
    return any(not raised.communication and not _ERROR.search(raised.message) for raised in rank.exceptions)


# The exception that ended a job alike on all of its ranks.

MESSAGE_CHARACTERS = 200


def common_exception(record: RunRecord) -> tuple[tuple[int, ...], RankException, str] | None:
    """Return the ranks, the first exception and its message, where all ranks that failed raised the same at one line.

    None in a rehearsal, whose own section tells it unless a last batch that was cut brought it about, where the ranks
    part, and for messages that a check of their own speaks for.
    """
    raised = [(rank.rank, root_exception(rank)) for rank in record.ranks]
    known = [(rank, error) for rank, error in raised if error is not None and not error.communication]
    told_elsewhere = record.job.kind == "rehearsal" and not (record.job.stress == "short-batch" and record.job.stressed)
    if told_elsewhere or not known or was_interrupted(record) or find_divergence(record) is not None:
        return None
    first = min((error for _, error in known), key=lambda error: error.time_ns)
    alike = [rank for rank, error in known if (error.type, error.frames[:1]) == (first.type, first.frames[:1])]
    has_check = trouble_of(first) or (UNFINISHED in first.message and any(unused_parameters(record)))
    if len(alike) < len(known) or has_check or any(failed_rendezvous(record)):
        return None
    message = headline(first)
    shortened = message if len(message) <= MESSAGE_CHARACTERS else f"{message[: MESSAGE_CHARACTERS - 1]}…"
    return tuple(sorted(alike)), first, shortened


# Faults of GPUs that their driver reported while a job ran: lost GPUs, critical events (Xid), uncorrected memory.

_HARMLESS = frozenset({45, 63, 92})
"""The clearing away after another fault, a row that was replaced, and many corrected errors."""


def gpu_faults(record: RunRecord) -> Iterator[Verdict]:
    """Yield the faults of the GPUs that ranks use, one for each GPU."""
    for gpu in record.gpus:
        if gpu.ranks and gpu.samples and (fault := _fault(gpu, gpu.samples[0], gpu.samples[-1])) is not None:
            yield fault


def _fault(gpu: Gpu, first: GpuSample, last: GpuSample) -> Verdict | None:
    xid = last.xid if last.xid not in _HARMLESS else None
    meaning = "" if xid is None else failures.xid(xid).meaning
    facts = [] if xid is None else [f"the driver reported Xid {xid}" + (f": {meaning}" if meaning else "")]
    new_errors = (last.ecc_errors or 0) - (first.ecc_errors or 0) if first.ecc_errors is not None else 0
    if new_errors > 0:
        facts.append(f"{new_errors:,} uncorrected memory {'errors' if new_errors > 1 else 'error'} during the run")
    if last.lost:
        what, hardware = "is lost: the driver can no longer reach it", True
    elif xid is not None:
        what, hardware = f"failed with Xid {xid}", failures.xid(xid).blame == "machine"
    elif new_errors > 0:
        what, hardware = "has uncorrected memory errors", True
    else:
        return None
    name = f" ({gpu.name})" if gpu.name else ""
    return Verdict(
        sentence=f"the GPU of {rank_list(gpu.ranks)} {what}",
        remedy="Take the machine out of service, and restart from the last checkpoint elsewhere."
        if hardware
        else "Run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel.",
        ranks=gpu.ranks,
        because=tuple((f"GPU {gpu.index}{name}: {fact}", None) for fact in facts),
    )
