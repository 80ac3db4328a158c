"""What the message of an exception, or of torch's C++ side, says went wrong: the kind of incident and its details."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.finding import Frame, Trouble
from ddpdoctor.postmortem.catalogue.messages import statement_in, statement_of_nccl
from ddpdoctor.record.streams.setup import NO_START, IncidentKind

_FLAGS = re.IGNORECASE
_AT_THE_START = re.compile(r"/(?:rendezvous|static_tcp_rendezvous|c10d_rendezvous_backend|dynamic_rendezvous)\.py$")
_LOST_PIPE = frozenset(
    {"EOFError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "FileNotFoundError"}
)
_MODELS = re.compile(
    r"expects same model across all ranks.*?rank (\d+) has (\d+) params.*?rank (\d+) has inconsistent (\d+)",
    _FLAGS | re.DOTALL,
)
_OF_RANKS = re.compile(r"(?:^|/)(?:torch|multiprocessing|horovod)/")
"""Files whose sockets and pipes join the ranks of a job, or the processes of one rank; innermost, as their callers may
be torch's or a trainer's for any exception."""
_INNERMOST = 3
_OF_TORCH = re.compile(r"RuntimeError$|Horovod\w+$|Dist\w*Error$|Rendezvous\w*$|TimeoutError$|ValueError$|Exception$|$")
"""Classes of torch's own C++ side and launcher: the line that raised them is often all that is kept."""
_SERVICE = re.compile(r"HTTPS?ConnectionPool|Max retries exceeded|\bhttps?://|StatusCode\.")
"""Words of clients of HTTP and gRPC."""
_CLASS_OF_NCCL = re.compile(r"NCCL error|\bnccl[A-Z]")
MOST_PARAMETERS = 1_000_000
"""Counts beyond are what a rank read of another collective, no number of parameters."""

# A word or a number with which the log ends may be a part of one.
_OPERATION = re.compile(r"OpType=(\w+)(?=\W)")
_SEQUENCE = re.compile(
    r"SeqNum=(\d+)(?=\D)|Sequence ?Number=(\d+)|(?:at NCCL work|at collective|at work(?: sequence id)?): #?(\d+)"
)
_LIMIT = re.compile(
    r"Timeout\(ms\)=(\d+)(?=\D)|Timed out waiting (\d+)ms|monitoredBarrier (?:in|after) (\d+) ?ms"
    r"|timed out after (\d+)ms|timeout after (\d+)ms"
)
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)", _FLAGS)
_GROUP = re.compile(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\]]+?))? Rank (?P<rank>\d+)\]")
_OWN_RANK = re.compile(
    r"\[Rank (\d+)\]|Rank (\d+) is running (?:inconsistent )?collective|Rank (\d+) has \d+ params"
    r"|for rank (\d+):|^\[(\d+)\]: params\[|, RankID:(\d+)\)",
    re.MULTILINE,
)
_PARAMETERS = re.compile(r"Parameters which did not receive grad for rank \d+: ([^\n]+)")
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ((?:\d+ ?)+)")
_TWICE = re.compile(r"Parameter at index (?P<index>\d+)(?: with name (?P<name>\S+))? has been marked as ready twice")

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


def details_of(
    kind: str, message: str, frames: Sequence[Frame], *, anywhere: bool = False
) -> tuple[IncidentKind, Trouble, dict[str, Any]]:
    """Return the kind of an incident, what went wrong, and what else its message says.

    ``kind`` is the class of the exception; ``frames`` are innermost first; ``anywhere``: it is the line of any program.
    """
    text = f"{kind}: {message}"
    found = _named(kind, text, frames, anywhere=anywhere)
    more = dict(found[2])
    more.setdefault("collective", collective_of(text, frames))
    # Words cost a tenth of the patterns, and a dying job may report a hundred thousand failures.
    if ("eq" in text or "at " in text) and (sequence := _SEQUENCE.search(text)):
        more["sequence"] = int(next(filter(None, sequence.groups())))
    if "ms" in text and (limit := _LIMIT.search(text)):
        more["timeout_ns"] = int(next(filter(None, limit.groups()))) * 1_000_000
    if "enqueued" in text and (enqueued := _ENQUEUED.search(text)):
        more["last_enqueued"] = int(enqueued[1])
    if "[PG " in text and (group := _GROUP.search(text)):
        more["group"] = group["guid"] or group["id"]
    return found[0], found[1], more


def _named(
    kind: str, text: str, frames: Sequence[Frame], *, anywhere: bool
) -> tuple[IncidentKind, Trouble, Mapping[str, Any]]:
    if kind in _LOST_PIPE and any(frame.function == "_try_get_data" for frame in frames):
        # The pipe to a worker that was killed ends: the loader has not noticed the worker's end yet.
        return "worker-lost", "killed", {}
    if kind == "KeyboardInterrupt":
        return "interrupted", "killed", {}
    if "params" in text and (models := _MODELS.search(text)):
        return _other_models(models)
    if any(frame.function == "_exit_barrier" for frame in frames):
        # Launchers wait here for those of other nodes, when their ranks have ended.
        return "lost-peer", "early-exit", {}
    found = statement_in(text, anywhere=anywhere)
    own = found is not None and found.row.event not in ("no-rendezvous", "lost-peer", "raised")
    if found is not None and found.row.event in ("no-rendezvous", "lost-peer") and _is_of_a_service(kind, text, frames):
        return "raised", "exception", {}
    if is_of_rendezvous(frames) and not own and _is_of_sockets(kind, text):
        return "no-rendezvous", "no-rendezvous", {}
    if found is None or found.row.role == "noise":
        return "raised", "exception", {}
    more = dict(found.fields)
    if found.row.trouble in ("unused-parameters", "ready-twice"):
        more["unused"] = _unused(text)
    elif found.row.event == "mismatch":
        more["others"] = tuple(sorted({int(number) for number in re.findall(r"Rank (\d+) is running", text)}))
    elif found.row.event == "nccl" and ("Last error:" in text or not _CLASS_OF_NCCL.search(text)):
        # Torch's words say the class of the error only, and NCCL's own what it was.
        own_words = statement_of_nccl(text.rpartition("Last error:")[2].strip())
        more = {**(own_words.fields if own_words else {}), **more}
        if own_words is not None and own_words.row.event == "lost-peer":
            return "lost-peer", own_words.row.trouble, more
    if found.row.type and (not kind or found.row.event == "killed-by-kernel" or found.row.type == NO_START):
        more["type"] = found.row.type
    return found.row.event, found.row.trouble, more


def collective_of(text: str, frames: Sequence[Frame]) -> str:
    """Return the collective in which an exception was raised; empty where neither message nor frames tell."""
    if "OpType=" in text and (operation := _OPERATION.search(text)):
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


def is_of_rendezvous(frames: Sequence[Frame]) -> bool:
    """Return whether a traceback passes through the code in which ranks find each other."""
    return any(_AT_THE_START.search(frame.file) or frame.function == "init_process_group" for frame in frames)


def own_rank(text: str) -> int | None:
    """Return the rank that a message of torch says it comes from."""
    if "[PG " in text and (group := _GROUP.search(text)):
        return int(group["rank"])
    match = _OWN_RANK.search(text) if "ank" in text or text.startswith("[") else None
    return int(next(filter(None, match.groups()))) if match else None


def _other_models(match: re.Match[str]) -> tuple[IncidentKind, Trouble, Mapping[str, Any]]:
    """0 parameters on the other side: the first collective failed; millions: the ranks were in different ones."""
    own, other = int(match[2]), int(match[4])
    if not own or not other:
        return "lost-peer", "early-exit", {}
    return "mismatch", "rank-branch" if max(own, other) > MOST_PARAMETERS else "mismatch", {"others": (int(match[3]),)}


def _is_of_sockets(kind: str, text: str) -> bool:
    return kind in ("DistNetworkError", "DistStoreError", "TimeoutError", "ConnectionRefusedError", "gaierror") or (
        re.search(r"socket timeout|timed? ?out|Connection re(?:fused|set)|Broken pipe", text, _FLAGS) is not None
    )


def _is_of_a_service(kind: str, text: str, frames: Sequence[Frame]) -> bool:
    """Return whether a connection was one to a server (a hub, an object store, a tracker) and not to another rank."""
    if any(_OF_RANKS.search(frame.file) for frame in frames[:_INNERMOST]):
        return False
    return _SERVICE.search(text) is not None or (bool(frames) and _OF_TORCH.match(kind) is None)


def _unused(text: str) -> tuple[str, ...]:
    if twice := _TWICE.search(text):
        return (twice["name"] or f"#{twice['index']}",)
    if names := _PARAMETERS.search(text):
        return tuple(name.strip() for name in names[1].split(",") if name.strip())
    if indices := _INDICES.search(text):
        return tuple(f"#{number}" for number in indices[1].split())
    return ()
