"""What to do about causes that were read in logs, where it depends on the cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ddpdoctor.diagnosis.failures import number_of, xid
from ddpdoctor.diagnosis.logs.causes import LogCause, first_cause
from ddpdoctor.diagnosis.logs.ranks import SIGABRT, SIGKILL, SIGTERM
from ddpdoctor.diagnosis.logs.wording import TEARDOWN
from ddpdoctor.diagnosis.wording import rank_list
from ddpdoctor.examination import Advice
from ddpdoctor.finding import Trouble
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import ERROR_LINE, IN_THE_KERNEL

# What a launcher may do about a first cause: start the job again, exclude a node, or leave it to a person.

# Which evidence of a death is missing, and how to have it the next time.

DUMPS = (
    "flight-recorder dumps, which show who did not reach which collective: TORCH_FR_BUFFER_SIZE=2000 "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/dump_rank_ (before torch 2.8: "
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/dump_rank_)"
)
EVERY_DUMP = "copy them from every node before its disk is cleared; a rank that had ended by then wrote none"
OUTPUT = "`torchrun --log-dir DIR --tee 3` writes one file per rank and labels each line"
PROFILE = "`ddpdoctor profile -- COMMAND` records all of this while the job runs"


def missing_evidence(record: RunRecord, *, dumps: int, explained: bool) -> tuple[str, ...]:
    """Return what would have shown more, the best first; nothing where the first cause is plain.

    ``explained``: the dumps show where the ranks diverge.
    """
    cause = first_cause(record)
    found: list[str] = []
    if explained:
        silent = [rank.rank for rank in record.ranks if record.track(rank.rank) is None]
        return (f"the dumps of {rank_list(silent)}: {EVERY_DUMP}",) if silent else ()
    if cause is None:
        found.append("a sign of how the job ended: the output of its launcher, or of the scheduler, to its last line")
    waits = cause is not None and cause.first.kind in ("timed-out", "stuck", "lost-peer")
    if (cause is None or waits) and not dumps:
        found.append(DUMPS)
    if cause is not None and cause.absent and not _spoke(record, cause.absent):
        found.append(f"the output of {rank_list(cause.absent)}: {OUTPUT}")
    elif cause is not None and not cause.ranks and cause.first.frames:
        found.append(f"which rank wrote what: {OUTPUT}")
    if cause is not None and cause.first.kind == "signalled" and not cause.first.frames:
        found.append("the stack of the rank that was killed: PYTHONFAULTHANDLER=1 prints it, except for SIGKILL")
    if cause is not None and cause.first.kind == "nccl" and cause.first.type != "NCCL WARN":
        found.append("NCCL's own messages: NCCL_DEBUG=WARN")
    if cause is not None and any(name.startswith("#") for name in cause.first.unused):
        found.append("the names of these parameters: TORCH_DISTRIBUTED_DEBUG=INFO")
    return (*found, PROFILE) if found else ()


def _spoke(record: RunRecord, ranks: tuple[int, ...]) -> bool:
    """Return whether something that one of the ranks wrote was seen."""
    return bool(set(ranks) & set(record.logs.ranks)) or any(one.rank in ranks for one in record.logs.incidents)


_OF_THE_SCRIPT: frozenset[Trouble] = frozenset(
    {
        "exception", "mismatch", "rank-branch", "unused-parameters", "ready-twice", "no-backend", "local-rank-argument",
        "out-of-memory", "shared-memory",
    }
)  # fmt: skip
_PASSES = frozenset({"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError"})
"""Exceptions about a service, which may be there again the next time."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_BY_SCHEDULER: dict[str, Advice] = {
    "node failure": "replace-the-node",
    "preemption": "retry",
    "time limit": "retry",
}


def advice_of(cause: LogCause) -> Advice:
    """Return what a launcher may do; ``unknown`` where the logs do not show why a rank ended or did not come."""
    first = cause.first
    if first.kind == "killed-by-scheduler":
        return _BY_SCHEDULER.get(first.type, "unknown")
    if first.kind == "killed-by-kernel":
        return "fix-the-script"
    if first.kind == "gpu":
        number = number_of(first.type)
        return "replace-the-node" if not number or xid(number).blame == "machine" else "fix-the-script"
    if first.type == IN_THE_KERNEL:
        return "replace-the-node"
    if first.kind == "lost-peer":
        return "unknown" if cause.absent else "retry"
    if cause.trouble == "no-rendezvous":
        return "retry" if any(_PORT_TAKEN.search(one.message) for one in cause.incidents) else "unknown"
    if first.type == ERROR_LINE:
        return "unknown"
    if first.kind == "raised" and first.type in _PASSES:
        return "retry"
    return of_trouble(cause.trouble)


def of_trouble(trouble: Trouble | None) -> Advice:
    """Return what a launcher may do where only the kind of the trouble is known, as by dumps."""
    return "fix-the-script" if trouble in _OF_THE_SCRIPT else "unknown"


def hosts_of(cause: LogCause) -> tuple[str, ...]:
    """Return the hosts on which it happened; of a lost connection that of the peer, if the logs name it."""
    if cause.first.kind == "lost-peer" and not cause.absent:
        return tuple(dict.fromkeys(one.peer for one in cause.incidents if one.peer))[:1]
    # RAS names the host of the rank that is gone; whoever else tells of an absent one names its own.
    if cause.absent and cause.first.type != "NCCL RAS":
        return ()
    return tuple(sorted({one.host for one in (*cause.incidents, *cause.behind) if one.host}))


_CRASHES = frozenset({4, 6, 7, 8, 11})
_SIGHUP = 1


def of_echo(cause: LogCause) -> str:
    """Return what to do about what is not the first cause."""
    if cause.survived:
        return "Nothing shows that a process ended because of it: the log goes on as before."
    if cause.leads:
        return (
            f"It ended attempt {cause.attempts[0] + 1} of the launcher, after the first cause had ended an earlier one."
        )
    return "It followed from the first cause: fix that one first."


def of_exception(cause: LogCause) -> str:
    """Return what to do about an exception, or about an error of a kernel that is reported as one."""
    if cause.first.kind == "cuda":
        return (
            "CUDA reports it asynchronously, so the line that raised it may be another one: run with "
            "CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel; usually an index is "
            "out of range."
        )
    if cause.first.type == "std::system_error":
        return (
            "A thread or a process could not be started: raise the limits of processes (`ulimit -u`, the container's "
            "pids limit), or start fewer workers and threads (OMP_NUM_THREADS)."
        )
    if cause.first.type == ERROR_LINE:
        return "Read the lines in front of it; the log shows neither a traceback nor how the job ended."
    if cause.first.type in _PASSES:
        return "A server did not answer: start the job again, or fetch what it needs once, before the ranks start."
    return "Fix this exception; the errors of the other ranks follow from it."


def of_gpu(cause: LogCause) -> str:
    """Return what to do about a GPU that failed."""
    number = number_of(cause.first.type)
    if number:
        return xid(number).remedy
    return "Take the machine out of service and restart from the last checkpoint elsewhere; reset or replace the GPU."


def of_nccl(cause: LogCause) -> str:
    """Return what to do about an error of NCCL that its own words do not explain."""
    usual = (
        "system error: NCCL_SOCKET_IFNAME or /dev/shm; CUDA error: a kernel before it; internal error: versions "
        "differ; invalid usage: two ranks on one GPU."
    )
    if any(one.type == "NCCL WARN" for one in (*cause.incidents, *cause.behind)):
        return f"Read NCCL's warning in the log. Its usual reasons: {usual}"
    return f"Set NCCL_DEBUG=WARN, which makes NCCL say what failed. The usual reasons: {usual}"


def of_lost_peer(cause: LogCause) -> str:
    """Return what to do about a peer that is gone."""
    peer = next((one.peer for one in cause.incidents if one.peer), "")
    if not cause.absent and peer:
        return (
            f"Look at the log of the processes on {peer}, and at the network between the two hosts "
            "(`ibstat`, `ip -s link`, dmesg)."
        )
    return (
        "Look at what that rank did last: it may leave by sys.exit, return early, or have fewer batches than the "
        "others. Let all ranks leave together."
    )


def of_killing(cause: LogCause) -> str:
    """Return what to do about a process that was killed."""
    first = cause.first
    if first.kind == "killed-by-kernel" or any(one.kind == "killed-by-kernel" for one in cause.behind):
        return "Give the job more memory (container limit, --mem), or reduce its memory use: loader workers, caches."
    if first.kind == "worker-lost":
        return (
            "Usually the kernel killed it because memory ran out: `dmesg -T | grep -i 'killed process'`; use fewer "
            "workers "
            "or smaller samples, and look at the memory limit of the container."
        )
    if first.kind == "killed-by-scheduler":
        return (
            "Ask the scheduler why (`sacct -j JOB`), give the job more time, and save checkpoints so that it can "
            "resume."
        )
    if first.kind in ("ended-from-outside", "interrupted"):
        return (
            "Find out who sent the signal: a user, the scheduler's time limit, a lost terminal (SIGHUP: nohup, tmux). "
            "The ranks themselves had not failed."
        )
    if TEARDOWN in first.message or any(TEARDOWN in one.message for one in cause.incidents):
        return (
            "gloo's threads were still running when the interpreter ended: call dist.destroy_process_group() at "
            "the end of the script; the work had finished by then."
        )
    if first.signal == SIGABRT:
        return "Read the last lines that this rank printed: an abort prints its reason (`what():`, an assertion)."
    if first.signal in _CRASHES:
        return (
            "Find the native call in its core dump, or run with PYTHONFAULTHANDLER=1, which prints the stack. With "
            "torch 2.8 to 2.13 and gloo, TORCH_DISTRIBUTED_DEBUG=DETAIL alone makes DDP's construction crash: unset it."
        )
    if first.signal == SIGKILL:
        return (
            "Check whether the kernel killed it because memory ran out (`dmesg -T | grep -i 'killed process'`), "
            "and the memory limit of the container or the Slurm job."
        )
    if first.signal in (SIGTERM, _SIGHUP):
        return "Find out who sent the signal to this process alone: the scheduler, a health check, a manual kill."
    if not first.signal:
        return (
            "Read the last lines of that process's own log, where a crash prints its stack, and check whether the "
            "kernel killed it because memory ran out (`dmesg -T | grep -i 'killed process'`)."
        )
    return "Find out who sent the signal: the log of the scheduler or of the container, or a manual kill."


def of_timeout(cause: LogCause) -> str:
    """Return what to do about a collective that timed out."""
    if cause.first.kind == "stuck":
        return (
            "The watchdog's thread hung in a call of CUDA or NCCL, or waited for the GIL: look at the stacks of this "
            "rank (py-spy --native), and at its GPU and network. Only if it was slow and not stuck, raise "
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC."
        )
    if cause.absent:
        return (
            f"Look at what {rank_list(cause.absent)} did meanwhile (py-spy, or `ddpdoctor autopsy --live` next "
            "time): divide that work, let all ranks reach this call, or give the group a timeout that covers it."
        )
    return (
        "Compare the ranks' last lines; flight-recorder dumps show who did not arrive: next time set "
        "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000."
    )


CHECKPOINTS = "Pass use_reentrant=False to torch.utils.checkpoint, or static_graph=True to DistributedDataParallel."
OF_LOGS: Mapping[Trouble, str | Callable[[LogCause], str]] = {
    "early-exit": of_lost_peer,
    "exception": of_exception,
    "gpu-fault": of_gpu,
    "killed": of_killing,
    "local-rank-argument": (
        "Launch with torchrun and read LOCAL_RANK from the environment; or let the script accept --local-rank."
    ),
    "mismatch": (
        "Call the same collective with the same shape and dtype on every rank, and build the same model there; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare them before each call."
    ),
    "nccl-error": of_nccl,
    "no-backend": (
        "Use gloo where there is no GPU, and nccl for CUDA tensors only; check that the job gets its GPUs "
        "(CUDA_VISIBLE_DEVICES, the container's runtime)."
    ),
    "no-rendezvous": (
        "Give all nodes the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE and each its own node rank, on a free port; "
        "check that the rank that holds the store is alive and reachable."
    ),
    "out-of-memory": (
        "Use smaller batches with accumulation, activation checkpointing, or mixed precision; where one rank alone ran "
        "out, look at what it alone holds: its longest sample, other processes on its GPU."
    ),
    "rank-branch": "Make every rank call the same collectives in the same order: move them out of rank tests.",
    "ready-twice": CHECKPOINTS,
    "shared-memory": "Start the container with --ipc=host or a larger --shm-size, or use fewer loader workers.",
    "timeout": of_timeout,
    "unused-parameters": (
        "If they are not needed, remove or freeze them before the wrap; if their use depends on the input, pass "
        "find_unused_parameters=True."
    ),
}
"""What to do about a first cause of each kind; the check that stands for it reports it from the logs."""
