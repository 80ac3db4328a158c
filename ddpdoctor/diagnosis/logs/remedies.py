"""What to do about causes that were read in logs, where it depends on the cause."""

from __future__ import annotations

from ddpdoctor.diagnosis.logs.causes import LogCause
from ddpdoctor.diagnosis.logs.ranks import SIGABRT, SIGKILL, SIGTERM
from ddpdoctor.diagnosis.logs.wording import TEARDOWN
from ddpdoctor.diagnosis.wording import rank_list

_CRASHES = frozenset({4, 6, 7, 8, 11})
_SIGHUP = 1


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
    return "Find out who sent the signal: the log of the scheduler or of the container, or a manual kill."


def of_timeout(cause: LogCause) -> str:
    """Return what to do about a collective that timed out."""
    if cause.absent:
        return (
            f"Look at what {rank_list(cause.absent)} did meanwhile (py-spy, or `ddpdoctor autopsy --live` next "
            "time): divide that work, let all ranks reach this call, or give the group a timeout that covers it."
        )
    return (
        "Compare the ranks' last lines; flight-recorder dumps show who did not arrive: next time set "
        "TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000."
    )
