"""What to do about causes that were read in logs, where it depends on the cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ddpdoctor.diagnosis.failures import number_of, xid
from ddpdoctor.diagnosis.logs.causes import LogCause, first_cause, user_frames
from ddpdoctor.diagnosis.logs.ranks import SIGABRT, SIGBUS, SIGKILL, SIGTERM
from ddpdoctor.diagnosis.wording import count, duration_text, location_of, place, rank_list, verb
from ddpdoctor.examination import Advice
from ddpdoctor.finding import Fact, Location, Trouble, grouped, signal_name
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord
from ddpdoctor.record.streams.setup import ERROR_LINE, IN_THE_KERNEL, NO_CODE, NO_START, Incident

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
    heard = {*record.logs.ranks, *(one.rank for one in record.logs.incidents)}
    if cause is not None and cause.absent and heard.isdisjoint(cause.absent):
        found.append(f"the output of {rank_list(cause.absent)}: {OUTPUT}")
    elif cause is not None and not cause.ranks and cause.first.frames:
        found.append(f"which rank wrote what: {OUTPUT}")
    if cause is not None and cause.first.kind == "signalled" and not cause.first.frames:
        found.append("the stack of the rank that was killed: PYTHONFAULTHANDLER=1 prints it, except for SIGKILL")
    if cause is not None and cause.first.kind == "nccl" and not _nccl_says_why(cause):
        found.append("NCCL's own messages: NCCL_DEBUG=WARN")
    if cause is not None and any(name.startswith("#") for name in cause.first.unused):
        found.append("the names of these parameters: TORCH_DISTRIBUTED_DEBUG=INFO")
    return (*found, PROFILE) if found else ()


_OF_THE_SCRIPT: frozenset[Trouble] = frozenset(
    {
        "exception", "mismatch", "rank-branch", "unused-parameters", "ready-twice", "no-backend", "local-rank-argument",
        "out-of-memory", "shared-memory",
    }
)  # fmt: skip
_PASSES = frozenset({"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError"})
"""Exceptions about a service, which may be there again the next time."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_BY_SCHEDULER: dict[str, Advice] = {"node failure": "replace-the-node", "preemption": "retry", "time limit": "retry"}


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
    return "retry" if first.kind == "raised" and first.type in _PASSES else of_trouble(cause.trouble)


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
        number = cause.attempts[0] + 1
        return f"It ended attempt {number} of the launcher, after the first cause had ended an earlier one."
    return "It followed from the first cause: fix that one first."


def of_exception(cause: LogCause) -> str:
    """Return what to do about an exception, or about an error of a kernel that is reported as one."""
    if cause.first.kind == "cuda":
        return (
            "CUDA reports it asynchronously, so the line that raised it may be another one: run with "
            "CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel; usually an index is out of range."
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
    if not cause.first.type:
        return f"Read the end of its traceback, which is not in this log, in the rank's own output: {OUTPUT}."
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
    if _nccl_says_why(cause):
        return f"Read NCCL's warning in the log. Its usual reasons: {usual}"
    return f"Set NCCL_DEBUG=WARN, which makes NCCL say what failed. The usual reasons: {usual}"


def _nccl_says_why(cause: LogCause) -> bool:
    own = (*cause.incidents, *cause.behind)
    return any(one.type == "NCCL WARN" or one.implies or "Last error:" in one.message for one in own)


def of_lost_peer(cause: LogCause) -> str:
    """Return what to do about a peer that is gone."""
    peer = next((one.peer for one in cause.incidents if one.peer), "")
    if not cause.absent and peer:
        return (
            f"Look at the log of the processes on {peer}, and at the network between the two hosts "
            "(`ibstat`, `ip -s link`, dmesg)."
        )
    if cause.first.kind == "left":
        return (
            f"Look for its traceback in its own output ({OUTPUT}; torch's @record puts it into the launcher's table); "
            "without one it left by sys.exit or os._exit."
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
    if first.kind == "worker-lost" and first.signal in _CRASHES:
        return (
            "The dataset's native code crashed: read a sample in the main process (num_workers=0) under "
            "PYTHONFAULTHANDLER=1, which prints the stack."
        )
    if first.kind == "worker-lost":
        return (
            "Usually the kernel killed it because memory ran out: `dmesg -T | grep -i 'killed process'`; use fewer "
            "workers or smaller samples, and look at the memory limit of the container."
        )
    if first.kind == "killed-by-scheduler":
        if first.type == "time limit":
            return "Give the job more time, and save checkpoints so that it can resume."
        return "Ask the scheduler why (`sacct -j JOB` of Slurm), and save checkpoints so that the job can resume."
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
    if first.signal == SIGBUS:
        return (
            "Usually shared memory is full (`df -h /dev/shm`): --ipc=host, a larger --shm-size, fewer loader workers."
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


def of_rendezvous(cause: LogCause) -> str:
    """Return what to do about ranks that do not find each other."""
    if any(_PORT_TAKEN.search(one.message) for one in cause.incidents):
        return (
            "Another process has the port, such as a run that has not ended (`ss -ltnp` names it): end that, or choose "
            "another port (torchrun --standalone, or --rdzv-endpoint with port 0, takes a free one)."
        )
    return (
        "Give all nodes the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE and each its own node rank, on a free port; "
        "check that the rank that holds the store is alive and reachable."
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
    "no-rendezvous": of_rendezvous,
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


MESSAGE_CHARACTERS, _BEGINNING = 280, 200
FACTS_OF_RANKS = 16
"""Of more ranks than this the facts are not listed one by one."""
UNUSED_SHOWN = 6
_ADDRESS = re.compile(r"\d:\d{2,5}\b|\]:\d{2,5}\b|, \d{2,5}\)|port: \d+")
_RUNS = re.compile(r"\bRank (\d+) is running (?:inconsistent )?collective")
_STORE = re.compile(r"\baddress (\S+:\d{2,5})\b")
TEARDOWN = "terminate called without an active exception"


def title(cause: LogCause) -> str:
    """Say in one sentence what happened, to whom, and where."""
    first, who, at = cause.first, _who(cause), _at(cause.first)
    match first.kind:
        case "timed-out":
            return _of_timeout(cause)
        case "mismatch":
            return _of_mismatch(cause)
        case "lost-peer":
            return _of_lost_peer(cause)
        case "signalled":
            if not first.signal:
                whose = f"the process of {who}" if cause.of_training else who
                return f"{whose} ended unexpectedly, and without an exception"
            why = first.message.partition("; terminate called")[0] if first.type in ("launcher", "terminate") else ""
            after = f" after it had printed “{why}”" if why and not why.startswith("terminate called") else ""
            return f"{who} {_was(cause)} killed by {signal_name(first.signal)}{after}"
        case "stuck":
            if first.type == IN_THE_KERNEL:
                return f"the process of {who} was stuck in the kernel, where no signal can end it"
            stuck = f" for {duration_text(first.timeout_ns)}" if first.timeout_ns else ""
            return f"the NCCL watchdog of {who} was stuck{stuck}, probably in a call of CUDA or NCCL"
        case "cuda":
            library = "HIP" if first.type == "HIP error" else "CUDA"
            text = " ".join(first.message.partition("\n")[0].split())
            return f"{who} failed with a {library} error{at}: {text.partition('CUDA error: ')[2] or text}"
        case "left":
            if first.exit_code == NO_CODE:
                return f"{who} failed; neither an exit code nor a traceback is in the log"
            return f"{who} left with exit code {first.exit_code} and without a traceback"
        case "killed-by-kernel":
            by = first.type if first.type != "out of memory" else "the kernel"
            where = next((f" on {one.host}" for one in cause.incidents if one.host), "")
            why = "its time was up" if "timer" in by else "memory had run out"
            whom = rank_list(cause.ranks) if cause.ranks else "a process of the job"
            return f"{by} killed {whom}{where} because {why}"
        case "killed-by-scheduler":
            return _of_scheduler(first)
        case "worker-lost":
            how = f" by {signal_name(first.signal)}" if first.signal else ""
            return f"a loader worker of {who} {'was killed' + how if how else 'disappeared'}{at}"
        case "ended-from-outside":
            return f"the job was ended externally: its launcher received {signal_name(first.signal)}"
        case "interrupted":
            return f"{who} {_was(cause)} interrupted (Ctrl-C, SIGINT){at}"
        case "gpu":
            meaning = xid(number_of(first.type)).meaning
            return f"a GPU of {who} failed{f' ({meaning})' if meaning else ''}: {incident_text(first)}"
        case "nccl":
            return f"NCCL failed on {who}{at}: {_of_nccl(cause)}"
        case "no-rendezvous":
            return f"the rendezvous failed: {_of_rendezvous(cause)}"
    names = next((one.unused for one in cause.incidents if one.unused), ())
    if first.trouble == "unused-parameters":
        return f"on {who} {_parameters(names)} got no gradient{at}"
    if first.trouble == "ready-twice":
        return f"on {who} {_parameters(names) if names else 'a parameter'} was marked as ready twice{at}"
    if first.trouble == "out-of-memory":
        gpu = "GPU " if any(name in first.message for name in ("CUDA", "Cuda", "cuda runtime", "HIP")) else ""
        return f"{who} ran out of {gpu}memory{at}"
    if first.trouble == "shared-memory":
        return f"{who} ran out of shared memory{at}: {incident_text(first)}"
    if first.type == "NCCL WARN":
        return f"NCCL failed on {who}: {incident_text(first)}"
    if first.type == NO_START:
        return f"the job did not start: {incident_text(first)}"
    if first.type == ERROR_LINE:
        return f"the log ends with an error of {who}: {incident_text(first)}"
    if first.type == "usage error":
        return f"{who} ended with a usage error: {incident_text(first)}"
    if not first.type:
        return f"{who} raised an exception{at} whose message is not in the log"
    said = incident_text(first)
    return f"{who} raised {first.type}{at}{said and f': {said}'}"


def incident_text(one: Incident) -> str:
    """Return what an exception's message says, in one line."""
    raised = RankException(time_ns=0, type=one.type, message=one.message or "")
    text = " ".join((headline(raised) or one.type).split())
    # Messages name files first, and say at their end what is wrong with them.
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    return f"{text[:_BEGINNING].rstrip()} … {text[_BEGINNING + 3 - MESSAGE_CHARACTERS :].lstrip()}"


def locations(cause: LogCause) -> tuple[Location, ...]:
    """Return the user's lines, the first incident's first."""
    found = [location_of(frame) for one in (*cause.incidents, *cause.behind) for frame in user_frames(one.frames)[:1]]
    return tuple(dict.fromkeys(place for place in found if place is not None))


def facts(cause: LogCause) -> Iterator[Fact]:
    """Yield where the logs hold it, on which ranks, and what else bears on it."""
    incidents = cause.incidents
    for one in incidents[:FACTS_OF_RANKS]:
        numbers: dict[str, int | float] = {}
        if one.sequence is not None:
            numbers["sequence"] = one.sequence
        if one.timeout_ns:
            numbers["timeout_s"] = one.timeout_ns / 1e9
        if one.pid:
            numbers["pid"] = one.pid
        own = user_frames(one.frames)
        yield Fact(
            text=_sentence(one),
            basis="log",
            numbers=numbers,
            rank=one.rank,
            location=location_of(own[0]) if own else None,
            stack=own,
        )
    if len(incidents) > FACTS_OF_RANKS:
        yield Fact(text=f"{count(len(incidents) - FACTS_OF_RANKS, 'more line')} say the same", basis="log")
    for one in cause.behind[:4]:
        yield Fact(text=_sentence(one), basis="log", rank=one.rank)
    if len(cause.attempts) > 1:
        text = f"the launcher started the ranks again, and the same happened in {count(len(cause.attempts), 'attempt')}"
        yield Fact(text=text, basis="log", numbers={"attempts": len(cause.attempts)})


def _sentence(one: Incident) -> str:
    who = "a rank" if one.rank is None else f"rank {one.rank}"
    where = f" on {one.host}" if one.host else ""
    log = f"{one.file}:{one.line}: " if one.line else f"{one.file}: " if one.file else ""
    if one.kind in ("signalled", "left") and one.type == "launcher":
        how = "failed" if one.exit_code == NO_CODE else f"left with exit code {one.exit_code}"
        how = f"was killed by {signal_name(one.signal)}" if one.signal else how
        return f"{log}the launcher reports that {who}{where} {how}"
    kind = f"{one.type}: " if one.type and one.type not in ("terminate", "launcher", "shell") else ""
    if one.process and one.rank is None:
        who = f"process {one.pid} ({one.process})" if one.pid else one.process
    return f"{log}{who}{where}: {kind}{incident_text(one)}"


def _of_timeout(cause: LogCause) -> str:
    first = cause.first
    limit = next((one.timeout_ns for one in cause.incidents if one.timeout_ns), 0)
    after = f" after {duration_text(limit)}" if limit else ""
    if cause.trouble in ("rank-branch", "mismatch"):
        return f"the ranks timed out{after} in different collectives: {_apart(cause.incidents)}"
    names = {one.collective for one in cause.incidents if one.collective}
    what = next(iter(names)) if len(names) == 1 else "a collective"
    number = next((one.sequence for one in cause.incidents if one.sequence is not None), None)
    what += f" #{number:,}" if number is not None else ""
    if first.type == "Horovod":
        waited = f"{_who(cause)} waited in {what}{after.replace('after', 'for more than')}"
    else:
        waited = f"{_who(cause)} timed out in {what}{_at(first)}{after}"
    if cause.trouble == "early-exit":
        return f"a rank left early: {waited}, and no other process remained"
    return f"{waited}: {rank_list(cause.absent)} did not arrive" if cause.absent else waited


def _of_mismatch(cause: LogCause) -> str:
    first = cause.first
    if "same model" in first.message or "appears not to match" in first.message:
        return f"the ranks build DDP from different models{_at(first)}: {incident_text(first)}"
    if cause.trouble == "rank-branch":
        return f"the ranks were in different collectives: {_apart(cause.incidents)}"
    # ProcessGroupWrapper lists what differs, as ``in: Op type: BROADCAST vs ALLREDUCE``.
    listed = first.message.partition("differ in the following aspects:")[2]
    told = " ".join(listed.replace("vs ", " vs ").replace("Tensor Tensor", "Tensor").split())
    differs = f": {told[:MESSAGE_CHARACTERS]}" if told else ""
    where = next((_at(one) for one in (*cause.incidents, *cause.behind) if user_frames(one.frames)), "")
    if "preamble" in first.message or "data size doesn't match" in first.message:
        return (
            f"the ranks' collectives{where} differ in size or dtype: gloo received a different number of bytes "
            "than expected"
        )
    # What differs is listed in the order in which the message names the two ranks.
    named = _RUNS.findall(first.message) if differs else []
    whose = f"the collectives of rank {named[0]} and rank {named[1]}" if len(named) == 2 else "the ranks' collectives"
    return f"{whose}{where} differ{differs}"


def _apart(incidents: Sequence[Incident]) -> str:
    named = {one.rank for one in incidents if one.collective}
    apart = (one for one in incidents if one.collective or one.rank not in named)
    parts = []
    for call, alike in grouped(apart, lambda one: f"{one.collective or 'a collective'}{_at(one)}").items():
        known = [one.rank for one in alike if one.rank is not None]
        parts.append(f"{rank_list(known) if known else 'one'} in {call}")
    return "; ".join(parts)


def _of_lost_peer(cause: LogCause) -> str:
    peer = next((one.peer for one in cause.incidents if one.peer), "a peer")
    lost = f"{_who(cause)} lost the connection to {peer}{_in(cause.first)}{_at(cause.first)}"
    if cause.role == "echo":
        return lost
    if cause.trouble == "no-rendezvous":
        where = f" at {cause.endpoint}" if cause.endpoint else ""
        return f"{_who(cause)} lost the store{where}{_at(cause.first)}: the process that holds it had ended"
    if cause.absent and not cause.ranks:
        return f"{rank_list(cause.absent)} left: {incident_text(cause.first)}"
    if cause.absent:
        return f"{rank_list(cause.absent)} left while {_who(cause)} {_was(cause)}{_in(cause.first)}{_at(cause.first)}"
    return f"{lost}: a process there ended, or the network failed"


def _of_scheduler(one: Incident) -> str:
    why = {
        "time limit": "its time limit was reached",
        "node failure": "a node failed",
        "preemption": "it was preempted",
        "eviction": "Kubernetes evicted a pod",
    }
    if one.type == "launch":
        return f"the scheduler could not start a task on {one.host}"
    where = f" ({one.host})" if one.host else ""
    return f"the scheduler ended the job: {why.get(one.type, 'it was cancelled')}{where}"


def _parameters(names: Sequence[str]) -> str:
    """Return the parameters by their names, or by their indices where these are known only."""
    if not names:
        return "some parameters"
    more = f" and {len(names) - UNUSED_SHOWN} more" if len(names) > UNUSED_SHOWN else ""
    shown = ", ".join(names[:UNUSED_SHOWN]) + more
    some, indices = ("parameters", "indices") if len(names) > 1 else ("parameter", "index")
    return f"{some} with the {indices} {shown.replace('#', '')}" if names[0].startswith("#") else f"{some} {shown}"


def _of_nccl(cause: LogCause) -> str:
    """Return what NCCL says itself, where someone told it: torch's words around it name the class only."""
    last = (one.message.partition("Last error:")[2].strip() for one in cause.incidents)
    texts = (incident_text(one) for one in cause.incidents if "NCCL error in" not in one.message)
    own = sorted(texts, key=lambda text: text.startswith("nccl"))
    return next(filter(None, (*last, *own)), "").partition("\n")[0][:MESSAGE_CHARACTERS] or incident_text(cause.first)


def _of_rendezvous(cause: LogCause) -> str:
    """Return the statement that names an address, where one does."""
    texts = [incident_text(one) for one in (*cause.incidents, *cause.behind)]
    told = next((text for text in texts if _ADDRESS.search(text)), texts[0])
    store = _STORE.search(cause.first.message)
    endpoint = cause.endpoint or (store[1] if store else "")
    return told if _ADDRESS.search(told) or not endpoint else f"{told} (the ranks meet at {endpoint})"


def _who(cause: LogCause) -> str:
    if cause.ranks:
        return rank_list(cause.ranks)
    who = "a rank" if cause.of_training else "a process"
    hosts = {one.host for one in cause.incidents if one.host}
    return f"{who} on {hosts.pop()}" if len(hosts) == 1 else who


def _was(cause: LogCause) -> str:
    return verb(cause.ranks or (0,), "was", "were")


def _in(one: Incident) -> str:
    return f" in {one.collective}" if one.collective else ""


def _at(one: Incident) -> str:
    own = user_frames(one.frames)
    return f" at {place(own[0])}" if own else ""
