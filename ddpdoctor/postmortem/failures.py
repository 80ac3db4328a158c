"""What the message of an exception, or of torch's C++ side, says went wrong: the kind of incident and its details."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.finding import Frame, Trouble
from ddpdoctor.record.streams.incidents import IncidentKind

_FLAGS = re.IGNORECASE
TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:send|recv)"
    r"|failed to pass monitoredBarrier|timed out in monitoredBarrier|Timeout at (?:NCCL work|collective)"
    r"|ran for \d+ milliseconds before timing out",
    _FLAGS,
)
LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Read error \[|Broken pipe|Failed to recv, got 0 bytes"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted|Software caused connection abort"
    r"|but received errors while waiting|Some NCCL operations have failed or timed out"
    r"|Connection was likely closed|Socket closed|sendBytes failed|recvValue(?:WithTimeout)? failed"
    r"|No ranks successfully processed in monitoredBarrier|gloo/transport\S* (?!Timed)",
    _FLAGS,
)
_NO_RENDEZVOUS = re.compile(
    r"EADDRINUSE|address already in use|server socket has failed to (?:listen|bind)"
    r"|client socket has (?:failed|timed out)"
    r"|clients joined|connection to the C10d store|RendezvousTimeoutError|RendezvousConnectionError"
    r"|RendezvousClosedError"
    r"|^(?:RuntimeError|DistStoreError): Socket Timeout|wait timeout after \d+ms"
    r"|connectFullMesh failed|timed out connecting"
    r"|Name or service not known|gai error"
    r"|Temporary failure in name resolution|No route to host|Timed out initializing process group"
    r"|Timed out after \d+ seconds waiting for clients"
    r"|environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)",
    _FLAGS,
)
_LOST_STORE = re.compile(
    r"Failed to recv, got 0 bytes|Connection was likely closed|^RuntimeError: (?:Broken pipe|Connection reset by peer)$"
)
"""Messages of the store; those of gloo name their source before the same words."""
_AT_THE_START = re.compile(r"/(?:rendezvous|static_tcp_rendezvous|c10d_rendezvous_backend|dynamic_rendezvous)\.py$")
_WORKER_SIGNAL = re.compile(
    r"DataLoader worker \(pid\(?s?\)? (?P<pid>\d+).{0,40}?killed by signal: (?P<signal>[\w ]+)", _FLAGS
)
_WORKER_LOST = re.compile(r"DataLoader worker \(pid\(s\) (?P<pid>\d+).*exited unexpectedly", _FLAGS)
_LOST_PIPE = frozenset(
    {"EOFError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "FileNotFoundError"}
)
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure 'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
    r"|can't allocate memory|not enough memory: you tried|Unable to allocate|Cannot allocate memory"
    r"|cannot allocate memory|HIP out of memory|bad_alloc",
)
_NCCL = re.compile(
    r"nccl(?:UnhandledCuda|System|Internal)Error|ncclInvalid(?:Argument|Usage)|NCCL error in|Duplicate GPU detected",
    _FLAGS,
)
_GPU = re.compile(r"uncorrectable (?:NVLink|ECC)|ECC error|fallen off the bus|GPU is lost|GPU_IS_LOST", _FLAGS)
_SHARED_MEMORY = re.compile(
    r"insufficient shared memory|killed by signal: Bus error|unable to (?:write to|open shared memory) file|/dev/shm",
    _FLAGS,
)
_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes", _FLAGS)
_MISMATCH = re.compile(r"Detected mismatch between collectives on ranks", _FLAGS)
_MODELS = re.compile(
    r"expects same model across all ranks.*?rank (\d+) has (\d+) params.*?rank (\d+) has inconsistent (\d+)",
    _FLAGS | re.DOTALL,
)
_SIZES = re.compile(r"\[(\d+)\]: params\[\d+\] in this process with sizes .* appears not to match", _FLAGS)
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_TWICE = "Expected to mark a variable ready only once"
_NO_BACKEND = re.compile(
    r"doesn't have NCCL built in|only supported with GPUs, no GPUs found|No backend type associated with device", _FLAGS
)
_ARGUMENTS = re.compile(r"unrecognized arguments:.*--local[-_]rank", _FLAGS)
MOST_PARAMETERS = 1_000_000
"""Counts beyond are what a rank read of another collective, no number of parameters."""

_OPERATION = re.compile(r"OpType=(\w+)")
_SEQUENCE = re.compile(r"SeqNum=(\d+)|Sequence ?Number=(\d+)|(?:at NCCL work|at collective): #?(\d+)")
_LIMIT = re.compile(
    r"Timeout\(ms\)=(\d+)|Timed out waiting (\d+)ms|monitoredBarrier (?:in|after) (\d+) ?ms"
    r"|timed out after (\d+)ms|timeout after (\d+)ms"
)
_ENQUEUED = re.compile(r"last enqueued NCCL work: (-?\d+)", _FLAGS)
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", _FLAGS)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\]]+?))? Rank (?P<rank>\d+)\]")
_OWN_RANK = re.compile(
    r"\[Rank (\d+)\]|Rank (\d+) is running (?:inconsistent )?collective|Rank (\d+) has \d+ params"
    r"|for rank (\d+):|^\[(\d+)\]: params\[",
    re.MULTILINE,
)
_DIDNT_JOIN = re.compile(r"\[([\d, ]+)\] finished collective #(\d+), but didn't join collective #(\d+)")
_LAGGING = re.compile(r"ranks \[([\d, ]+)\] are the lagging")
_PARAMETERS = re.compile(r"Parameters which did not receive grad for rank \d+: ([^\n]+)")
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ((?:\d+ ?)+)")
_SIGNALS = {
    "killed": 9,
    "bus error": 7,
    "segmentation fault": 11,
    "terminated": 15,
    "aborted": 6,
    "floating point exception": 8,
}

KINDS = {
    "ALLREDUCE": "all_reduce", "BROADCAST": "broadcast", "BARRIER": "barrier", "REDUCE": "reduce", "GATHER": "gather",
    "SCATTER": "scatter", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather", "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all_single", "SEND": "send", "RECV": "recv",
    "RECVANYSOURCE": "recv", "ALLREDUCE_COALESCED": "all_reduce", "COALESCED": "a coalesced operation",
}  # fmt: skip
"""torch's names of operations, as users spell them."""
_FUNCTIONS = frozenset(
    {
        "all_reduce", "broadcast", "barrier", "monitored_barrier", "reduce", "gather", "scatter", "all_gather",
        "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send",
        "recv", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    }
)  # fmt: skip


def details_of(kind: str, message: str, frames: Sequence[Frame]) -> tuple[IncidentKind, Trouble, dict[str, Any]]:
    """Return the kind of an incident, what went wrong, and what else its message says.

    ``kind`` is the class of the exception; ``frames`` are innermost first.
    """
    text = f"{kind}: {message}"
    found = _named(kind, text, frames)
    more = dict(found[2])
    more.setdefault("collective", collective_of(text, frames))
    if sequence := _SEQUENCE.search(text):
        more["sequence"] = int(next(filter(None, sequence.groups())))
    if limit := _LIMIT.search(text):
        more["timeout_ns"] = int(next(filter(None, limit.groups()))) * 1_000_000
    if enqueued := _ENQUEUED.search(text):
        more["last_enqueued"] = int(enqueued[1])
    if group := _GROUP.search(text):
        more["group"] = group["guid"] or group["id"]
    return found[0], found[1], more


def _named(kind: str, text: str, frames: Sequence[Frame]) -> tuple[IncidentKind, Trouble, Mapping[str, Any]]:
    if lost := _lost_worker(kind, text, frames):
        return lost
    if kind == "KeyboardInterrupt":
        return "interrupted", "killed", {}
    if _UNFINISHED in text:
        return "raised", "unused-parameters", {"unused": _unused(text)}
    if _TWICE in text:
        return "raised", "ready-twice", {}
    if _MISMATCH.search(text) or _GLOO_SIZES.search(text):
        return "mismatch", "mismatch", {"others": _running(text)}
    if models := _MODELS.search(text):
        return _other_models(models)
    if _SIZES.search(text):
        return "mismatch", "mismatch", {}
    if barrier := _BARRIER.search(text):
        return "timed-out", "timeout", {"absent": _numbers(barrier[1])}
    if joined := (_DIDNT_JOIN.search(text) or _LAGGING.search(text)):
        return "timed-out", "timeout", {"absent": _numbers(joined[1])}
    if TIMED_OUT.search(text):
        return "timed-out", "timeout", {}
    if _OUT_OF_MEMORY.search(text) or kind in ("OutOfMemoryError", "MemoryError"):
        return "raised", "out-of-memory", {}
    if _GPU.search(text):
        return "gpu", "gpu-fault", {}
    if _SHARED_MEMORY.search(text) and kind != "FileNotFoundError":
        return "raised", "shared-memory", {}
    if _NCCL.search(text):
        return "nccl", "nccl-error", {}
    if _NO_BACKEND.search(text):
        return "raised", "no-backend", {}
    if _ARGUMENTS.search(text):
        return "raised", "local-rank-argument", {}
    at_the_start = any(_AT_THE_START.search(frame.file) or frame.function == "init_process_group" for frame in frames)
    if _NO_RENDEZVOUS.search(text) or (at_the_start and _is_of_sockets(kind, text)):
        return "no-rendezvous", "no-rendezvous", {}
    if _LOST_STORE.search(text):
        return "lost-peer", "no-rendezvous", {}
    if LOST_PEER.search(text):
        return "lost-peer", "early-exit", {}
    return "raised", "exception", {}


def collective_of(text: str, frames: Sequence[Frame]) -> str:
    """Return the collective in which an exception was raised; empty where neither message nor frames tell."""
    if operation := _OPERATION.search(text):
        return KINDS.get(operation[1].upper(), operation[1].lower())
    for frame in frames:
        if frame.file.endswith("distributed_c10d.py") and frame.function in _FUNCTIONS:
            return frame.function
        if frame.file.endswith("nn/parallel/distributed.py"):
            return "the construction of DDP" if frame.function == "__init__" else "the forward of the DDP model"
        if frame.function == "_engine_run_backward" or frame.file.endswith(
            ("torch/_tensor.py", "autograd/__init__.py")
        ):
            return "backward"
    return ""


def own_rank(text: str) -> int | None:
    """Return the rank that a message of torch says it comes from."""
    if group := _GROUP.search(text):
        return int(group["rank"])
    match = _OWN_RANK.search(text)
    return int(next(filter(None, match.groups()))) if match else None


def _lost_worker(
    kind: str, text: str, frames: Sequence[Frame]
) -> tuple[IncidentKind, Trouble, Mapping[str, Any]] | None:
    if match := _WORKER_SIGNAL.search(text):
        number = _SIGNALS.get(match["signal"].strip().lower())
        if number == 7:
            return "raised", "shared-memory", {}
        return "worker-lost", "killed", {"signal": number, "pid": int(match["pid"])}
    if match := _WORKER_LOST.search(text):
        return "worker-lost", "killed", {"pid": int(match["pid"])}
    fetches = any(frame.function == "_try_get_data" for frame in frames)
    # The pipe to a worker that was killed ends: the loader has not noticed the worker's end yet.
    if fetches and kind in _LOST_PIPE:
        return "worker-lost", "killed", {}
    return None


def _other_models(match: re.Match[str]) -> tuple[IncidentKind, Trouble, Mapping[str, Any]]:
    """0 parameters on the other side: the first collective failed; millions: the ranks were in different ones."""
    own, other = int(match[2]), int(match[4])
    if not own or not other:
        return "lost-peer", "early-exit", {}
    if max(own, other) > MOST_PARAMETERS:
        return "mismatch", "rank-branch", {"others": (int(match[3]),)}
    return "mismatch", "mismatch", {"others": (int(match[3]),)}


def _is_of_sockets(kind: str, text: str) -> bool:
    return kind in ("DistNetworkError", "DistStoreError", "TimeoutError", "ConnectionRefusedError", "gaierror") or (
        re.search(r"socket timeout|timed? ?out|Connection re(?:fused|set)|Broken pipe", text, _FLAGS) is not None
    )


def _running(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in re.findall(r"Rank (\d+) is running", text)}))


def _unused(text: str) -> tuple[str, ...]:
    if names := _PARAMETERS.search(text):
        return tuple(name.strip() for name in names[1].split(",") if name.strip())
    if indices := _INDICES.search(text):
        return tuple(f"#{number}" for number in indices[1].split())
    return ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
