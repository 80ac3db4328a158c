"""Which rank of a job that hangs now is not where the others are, by the stacks of the ranks alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.wording import duration_text, group_name, place, rank_list, verb
from ddpdoctor.finding import Fact, Frame, Trouble, in_user_code
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import Signature
from ddpdoctor.record.streams.setup import StackDump

# Facts about a job that hangs now: how long its process groups still wait, and where its ranks stand in C++.

NATIVE_SHOWN = 4
_PLUMBING = ("pybind11::", "0x", "_Py", "Py", "std::", "__", "pthread_", "futex", "syscall", "clone", "start_thread")
"""Functions between Python and what a rank does, or below it, which tell nothing."""


def limits(record: RunRecord) -> Iterator[Fact]:
    """Yield what each group waits in, for how long, and when it gives up, by the flight recorders."""
    waiting: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for rank in record.ranks:
        track = record.track(rank.rank)
        if track is None or rank.waiting_in is None:
            continue
        row = rank.waiting_in
        key = (track.group[row], track.sequence[row], record.signatures[track.signature[row]].kind)
        waiting.setdefault(key, []).append((rank.rank, track.started_ns[row]))
    for (number, sequence, kind), entered in sorted(waiting.items()):
        group, ranks = record.groups[number], [rank for rank, _ in entered]
        waited_ns = max(0, record.job.ended_ns - min(time_ns for _, time_ns in entered))
        where = "" if len(group.ranks) == record.job.world_size else f" of {group_name(group, record.job.world_size)}"
        text = f"{rank_list(ranks)} {verb(ranks, 'has', 'have')} waited {duration_text(waited_ns)} in {kind} "
        text += f"#{sequence + 1:,}{where}"
        numbers: dict[str, int | float] = {"sequence": sequence + 1, "waited_s": round(waited_ns / 1e9, 1)}
        if group.timeout_ns:
            left_ns = group.timeout_ns - waited_ns
            text += f"; the group's timeout is {duration_text(group.timeout_ns)}"
            text += "" if left_ns > 0 else ", which has passed"
            numbers |= {"timeout_s": group.timeout_ns / 1e9, "left_s": round(left_ns / 1e9, 1)}
        yield Fact(text=text, basis="run", numbers=numbers)


def native_stacks(record: RunRecord) -> Iterator[Fact]:
    """Yield the C++ functions of the ranks that were asked for them, those that tell something first."""
    for dump in record.stacks:
        names = [_short(name) for name in dump.native if not name.startswith(_PLUMBING)]
        names = names or [_short(name) for name in dump.native if not name.startswith("0x")]
        if names:
            text = f"rank {dump.rank} is in C++ in {' <- '.join(dict.fromkeys(names[:NATIVE_SHOWN]))}"
            yield Fact(text=text, basis="run", rank=dump.rank)


def _short(name: str) -> str:
    """Return a function without its parameters and the arguments of its templates."""
    return name.partition("(")[0].partition("<")[0][:80]


_COLLECTIVES = frozenset(
    {
        "all_reduce", "broadcast", "barrier", "monitored_barrier", "reduce", "gather", "scatter", "all_gather",
        "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send",
        "recv", "new_group", "init_process_group", "destroy_process_group", "all_reduce_coalesced", "batch_isend_irecv",
        "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    }
)  # fmt: skip
"""Functions of torch.distributed that return when others have come."""


def parted_stacks(record: RunRecord) -> tuple[Divergence, Trouble, str] | None:
    """Return the divergence, what it is and why it is doubtful (empty where it is not); None where no one waits."""
    main = {dump.rank: dump for dump in record.stacks if dump.main and dump.frames}
    stuck = {rank.rank for rank in record.ranks if rank.stuck}
    turns = tuple(_turn(main[rank], idle=rank in stuck) for rank in sorted(main))
    waiting = [turn for turn in turns if turn.waiting]
    others = [turn for turn in turns if not turn.waiting]
    if not waiting:
        return None
    if others:
        culprit = others[0].rank if len(others) == 1 else None
        reason = "" if culprit is None else _reason(main[culprit])
        found = Divergence(form="stuck", turns=turns, culprit=culprit, culprit_reason=reason)
        busy = [turn.rank for turn in others if turn.rank not in stuck]
        doubt = f"{rank_list(busy)} {verb(busy, 'is', 'are')} busy: the others may simply have to wait" if busy else ""
        return found, "hang", doubt
    calls = Counter(map(_call, turns))
    missing = record.job.world_size - len(turns)
    elsewhere = f"{missing} more ranks of the job run elsewhere and were not examined" if missing > 0 else ""
    if len(calls) == 1:
        alone = "all ranks wait in the same call: the network or a rank that has left may be the cause"
        return Divergence(form="standstill", turns=turns), "hang", elsewhere or alone
    culprit = _odd_one(turns, calls)
    reason = f"the other {len(turns) - 1} ranks agree" if culprit is not None else ""
    lines = {turn.line for turn in turns}
    found = Divergence(form="standstill", turns=turns, culprit=culprit, culprit_reason=reason)
    return found, "rank-branch" if len(lines) > 1 else "mismatch", elsewhere


def _reason(dump: StackDump) -> str:
    wait = wait_of(dump.frames)
    own = "it is in no collective" if wait is None else f"it waits for {wait.what}"
    return f"{own}, and the others {'are' if wait is None else 'wait in a collective'}"


def whereabouts(record: RunRecord) -> tuple[str, ...]:
    """Return where the ranks stand, those alike together, in sentences."""
    alike: dict[str, list[int]] = {}
    for dump in record.stacks:
        frames = _inside_loop(dump.frames) or dump.frames
        own = [frame for frame in frames if in_user_code(frame.file)] or list(frames)
        if dump.main and own:
            place = f"{own[0].file.rpartition('/')[2]}:{own[0].line} in {own[0].function}"
            alike.setdefault(place, []).append(dump.rank)
    told = (f"{rank_list(ranks)} {verb(ranks, 'is', 'are')} at {place}" for place, ranks in alike.items())
    return (*told, *(fact.text for fact in worker_stacks(record)))


def _turn(dump: StackDump, *, idle: bool) -> NextCall:
    own = tuple(frame for frame in dump.frames if in_user_code(frame.file))
    signature = _awaited(dump.frames, idle=idle)
    return NextCall(
        rank=dump.rank,
        action="elsewhere" if signature is None else "collective",
        waiting=signature is not None,
        signature=signature,
        frames=own or dump.frames,
        stack=dump.frames,
    )


def _awaited(frames: Sequence[Frame], *, idle: bool) -> Signature | None:
    """Return the collective that a main thread is in; None where it is in none."""
    for position, frame in enumerate(frames):
        if in_user_code(frame.file):
            return None
        file = frame.file.replace("\\", "/")
        if file.endswith("torch/distributed/distributed_c10d.py"):
            outer = [one.function for one in frames[position:] if one.file == frame.file]
            if named := [name for name in outer if name in _COLLECTIVES]:
                return Signature(kind=named[-1])
        elif file.endswith("torch/distributed/rendezvous.py"):
            return Signature(kind="init_process_group")
        elif file.endswith("torch/nn/parallel/distributed.py"):
            if frame.function == "__init__":
                return Signature(kind="broadcast", origin="ddp-construct")
            inner = [one.file for one in frames[:position]]
            if all("/torch/distributed/" in one or "nn/parallel/distributed.py" in one for one in inner):
                return Signature(kind="broadcast", origin="ddp-forward")
        elif frame.function == "_engine_run_backward" and position == 0 and idle:
            return Signature(kind="all_reduce", origin="ddp-backward")
    return None


def _call(turn: NextCall) -> tuple[object, ...]:
    line = turn.line
    place = None if line is None else (line.file, line.line)
    return place, turn.signature and (turn.signature.kind, turn.signature.origin)


def _odd_one(turns: Sequence[NextCall], calls: Counter[tuple[object, ...]]) -> int | None:
    """Return the one rank that three or more outvote."""
    if len(turns) < 3 or len(calls) != 2:
        return None
    (_, most), (call, fewest) = calls.most_common()
    return next(turn.rank for turn in turns if _call(turn) == call) if fewest == 1 and most > 1 else None


# What a rank waits for outside of collectives, by the library code that its stack is in, and what helps there.

WORKER = "loader worker "
"""What the name of a thread begins with that is the main one of a loader's worker; its process id follows."""
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"
_WAITS_FOR_NUMBERS = re.compile(r"/multiprocessing/|/selectors\.py$")
"""Files of Python in which a worker waits for the numbers of its next samples."""


class Wait(msgspec.Struct, frozen=True):
    """One thing that a process may wait for."""

    what: str
    remedy: str
    pattern: str
    """Of ``file:function``, of one of the frames between the user's line and the innermost."""


WAITS = (
    Wait(
        "a worker of its DataLoader",
        "Look at what that worker does: put a time limit on its reads (storage, network, locks), and give the loader a "
        "`timeout`, so that it raises an exception instead of waiting.",
        r"torch/utils/data/dataloader\.py:(?:_try_get_data|_get_data|_next_data|__next__)$",
    ),
    Wait(
        "a child process",
        "Look at what the child does, and pass `timeout=` to the call that waits for it; read its pipes while it runs, "
        "as a child waits whose pipe is full.",
        r"/subprocess\.py:|/multiprocessing/(?:process\.py:join|popen_\w+\.py:)|/multiprocessing/pool\.py:",
    ),
    Wait(
        "a queue",
        "Nothing comes into that queue: look at what should fill it, a thread or a process, and pass `timeout=` to "
        "`get`.",
        r"/queue\.py:(?:get|put|join)$|/multiprocessing/(?:queues|connection|managers)\.py:",
    ),
    Wait(
        "a future",
        "Pass `timeout=` to `result`, and look at the thread or process that should finish it.",
        r"/concurrent/futures/\w+\.py:(?:result|wait|shutdown|__exit__)$",
    ),
    Wait(
        "another thread to end",
        "Let that thread end, and pass `timeout=` to `join`; the stacks of all threads (`py-spy dump --pid`) show "
        "where it is.",
        r"/threading\.py:(?:join|_wait_for_tstate_lock)$",
    ),
    Wait(
        "a lock in a file",
        "Who held the lock may be gone: look which process has the file open (`fuser`), remove a stale lock, and pass "
        "a `timeout`.",
        r"/filelock/|/portalocker/|/fasteners/|torch/utils/(?:file_baton|_filelock)\.py:",
    ),
    Wait(
        "the network",
        "Set a time limit on the request (`timeout=`, `socket.setdefaulttimeout`), and look whether the server answers "
        "from this host.",
        r"/(?:socket|ssl)\.py:|/http/client\.py:|/urllib3?/|/requests/|/httpx/|/botocore/|/grpc/|/aiohttp/",
    ),
    Wait(
        "an event or a condition of another thread",
        "Look at the thread that should set it (`py-spy dump --pid` shows all threads), and pass `timeout=` to `wait`.",
        r"/threading\.py:wait(?:_for)?$",
    ),
    Wait(
        "its GPU",
        "A kernel does not end, which may be a collective of NCCL that another rank has not entered: look at the "
        "stacks with `--native`, and at `nvidia-smi`.",
        r"torch/cuda/(?:__init__|streams)\.py:(?:synchronize|wait\w*)$",
    ),
)
"""The more special ones first."""
_COMPILED = tuple((wait, re.compile(wait.pattern)) for wait in WAITS)


def wait_of(stack: Sequence[Frame]) -> Wait | None:
    """Return what a thread waits for, by its frames, innermost first; None where they do not tell."""
    inner: list[str] = []
    for frame in stack:
        if in_user_code(frame.file):
            break
        # Functions are told with their classes, or without.
        inner.append(f"{frame.file}:{frame.function.rpartition('.')[2]}")
    return next((wait for wait, pattern in _COMPILED if any(map(pattern.search, inner))), None)


def waits_for_a_worker(stack: Sequence[Frame]) -> bool:
    """Return whether a thread waits for a worker of a DataLoader."""
    return wait_of(stack) is WAITS[0]


def is_worker(stack: Sequence[Frame]) -> bool:
    """Return whether it is the stack of a worker of a DataLoader."""
    return any(frame.file.endswith(_WORKER_LOOP) for frame in stack)


def is_at_work(stack: Sequence[Frame]) -> bool:
    """Return whether a worker of a DataLoader is at a sample, and does not wait for the number of the next."""
    return any(_WAITS_FOR_NUMBERS.search(frame.file) is None for frame in _inside_loop(stack))


def _inside_loop(stack: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames of a worker's own; below its loop is what its rank did when it forked."""
    return stack[: next((at for at, frame in enumerate(stack) if frame.file.endswith(_WORKER_LOOP)), 0)]


def worker_stacks(record: RunRecord) -> Iterator[Fact]:
    """Yield where the workers are that ranks wait for."""
    for dump in record.stacks:
        if dump.main or not dump.thread.startswith(WORKER):
            continue
        frames = _inside_loop(dump.frames) or dump.frames
        own = [frame for frame in frames if in_user_code(frame.file)] or list(frames)
        who = f"rank {dump.rank} waits for its loader's worker, process {dump.thread.removeprefix(WORKER)}, which"
        where = f"is at {place(own[0])} in {own[0].function}" if is_at_work(dump.frames) else "has no sample to load"
        wait = wait_of(dump.frames) if is_at_work(dump.frames) else None
        text = f"{who} {where}{f' and waits for {wait.what}' if wait is not None else ''}"
        yield Fact(text=text, basis="run", rank=dump.rank, stack=tuple(own))


# Whether a rank that the others wait for works or stands still.

IDLE_CPU_SHARE = 0.01
"""Share of one core below which a process tree does nothing."""
POLLING_CPU_SHARE = 0.1
"""Share of one core below which a process tree does nothing but ask and sleep."""
LITTLE_BYTES_PER_S = 1_000_000
"""Less is read and written by what exports metrics or writes a log; files of data and checkpoints are more."""
WOKEN_EVERY_NS = 4_000_000_000
"""A thread that runs more often than this gets something; torch's loader asks every five seconds for its workers."""
WOKEN_AT_FIRST = 2


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one rank's process tree at one moment; the counters only grow."""

    time_ns: int
    cpu_ns: int
    """CPU time of the whole process tree since its start."""
    io_bytes: int
    """Bytes read and written by the whole tree since its start."""
    stack_hash: str
    """Digest of the main thread's stack; empty when it was not taken."""
    wakes: bool = False
    """Something in the tree runs, or will be woken by a clock that it set itself."""
    woken_at_ns: int = 0
    """When such a clock of another process of the tree ends; 0 without one."""
    main_cpu_ns: int = 0
    """CPU time of the training thread."""
    main_runs: int = -1
    """How often the training thread was given a core; -1 where that is not known."""
    is_held: bool = False
    """A call holds the interpreter: a thread that wants it asks for it 200 times a second, and gets nothing."""
    child_runs: Mapping[int, int] = {}
    """The same of the main threads of processes below, those left out that wake themselves every few seconds."""
    progress: int = 0
    """Forwards, backwards and steps of optimizers up to now."""
    main_wakes: bool = False
    """The training thread will be woken by a clock, or another one that it may wait for."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A training thread that has stood at one place since a sample, whatever the rest of its process does."""

    first: ProcessSample
    newest: ProcessSample
    restless: bool = False
    """The rest of the tree did something meanwhile."""
    stuck: bool = False
    """For some time it did not."""

    @property
    def lasted_ns(self) -> int:
        """How long it is known to stand."""
        return self.newest.time_ns - self.first.time_ns


def stands_on(before: Standing | None, sample: ProcessSample) -> Standing:
    """Return what a sample makes of a standing: the same one continues, or another one may begin.

    It continues while its stack is the same, the thread itself hardly runs and no clock of its own does, and the tree
    does little: what computes, or moves files, may do what the thread waits for.
    """
    if before is None or not _stands(before.first, sample):
        return Standing(first=sample, newest=sample)
    last = before.newest
    did = sample.io_bytes != last.io_bytes or sample.wakes or _worked(last, sample, IDLE_CPU_SHARE)
    return msgspec.structs.replace(before, newest=sample, restless=before.restless or did)


def _stands(first: ProcessSample, sample: ProcessSample) -> bool:
    place, at = (first.stack_hash, first.progress), (sample.stack_hash, sample.progress)
    if not sample.stack_hash or place != at or sample.main_wakes:
        return False
    lasted_ns = sample.time_ns - first.time_ns
    if min(first.main_runs, sample.main_runs) < 0 or _runs_often(first.main_runs, sample.main_runs, lasted_ns):
        return False
    if _worked(first, sample, POLLING_CPU_SHARE):
        return False
    little = abs(sample.io_bytes - first.io_bytes) <= LITTLE_BYTES_PER_S * lasted_ns / 1e9
    return little and sample.main_cpu_ns - first.main_cpu_ns <= IDLE_CPU_SHARE * lasted_ns


def _worked(first: ProcessSample, last: ProcessSample, cpu_share: float) -> bool:
    # Less than before: a process of the tree is gone, which had something to do.
    return abs(last.cpu_ns - first.cpu_ns) > cpu_share * (last.time_ns - first.time_ns)


def judge_liveness(samples: Sequence[ProcessSample], stall_after_s: float) -> Literal["busy", "stuck"]:
    """Judge the last ``stall_after_s`` seconds of samples, oldest first.

    Stuck needs all of it: samples that reach back that far, under 1% of a core, no input or output, nothing that would
    wake it, a training thread and children that no one wakes either, and one stack that was taken at least twice and
    never changed. Anything else is busy.
    """
    window = _last_seconds(samples, stall_after_s)
    if not _is_idle(window, IDLE_CPU_SHARE) or any(sample.wakes for sample in window) or _is_woken(window):
        return "busy"
    stacks = [sample.stack_hash for sample in window if sample.stack_hash]
    return "busy" if len(stacks) < 2 or len(set(stacks)) != 1 else "stuck"


def at_rest(samples: Sequence[ProcessSample], stall_after_s: float) -> bool:
    """Return whether a process tree has done nothing for ``stall_after_s`` seconds but ask for something and sleep."""
    return _is_idle(_last_seconds(samples, stall_after_s), POLLING_CPU_SHARE)


def _last_seconds(samples: Sequence[ProcessSample], seconds: float) -> Sequence[ProcessSample]:
    """Return the newest samples that span so many seconds; empty when there are none yet."""
    for start in range(len(samples) - 1, -1, -1):
        if samples[-1].time_ns - samples[start].time_ns >= seconds * 1e9:
            return samples[start:]
    return ()


def _is_idle(window: Sequence[ProcessSample], cpu_share: float) -> bool:
    if not window:
        return False
    first, last = window[0], window[-1]
    return not _worked(first, last, cpu_share) and last.io_bytes == first.io_bytes


def _is_woken(window: Sequence[ProcessSample]) -> bool:
    """Return whether someone wakes the training thread or a child again and again: a socket's data are no file's."""
    first, last = window[0], window[-1]
    lasted_ns = last.time_ns - first.time_ns
    is_main = not last.is_held and _runs_often(first.main_runs, last.main_runs, lasted_ns)
    return is_main or any(
        _runs_often(first.child_runs.get(child, -1), runs, lasted_ns) for child, runs in last.child_runs.items()
    )


def _runs_often(before: int, after: int, lasted_ns: int) -> bool:
    return min(before, after) >= 0 and after - before > WOKEN_AT_FIRST + lasted_ns // WOKEN_EVERY_NS
