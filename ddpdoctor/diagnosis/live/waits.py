"""What a rank waits for outside of collectives, by the library code that its stack is in, and what helps there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from ddpdoctor.diagnosis.wording import place
from ddpdoctor.finding import Fact, Frame
from ddpdoctor.findings.locations import in_user_code
from ddpdoctor.record.model import RunRecord

WORKER = "loader worker "
"""What the name of a thread begins with that is the main one of a loader's worker; its process id follows."""
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"


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
    loop = next((at for at, frame in enumerate(stack) if frame.file.endswith(_WORKER_LOOP)), None)
    return loop is not None and any("/multiprocessing/" not in frame.file for frame in stack[:loop])


def worker_stacks(record: RunRecord) -> Iterator[Fact]:
    """Yield where the workers are that ranks wait for."""
    for dump in record.stacks:
        if dump.main or not dump.thread.startswith(WORKER):
            continue
        own = [frame for frame in dump.frames if in_user_code(frame.file)] or list(dump.frames)
        who = f"process {dump.thread.removeprefix(WORKER)}, a worker of rank {dump.rank}'s DataLoader,"
        where = f"is at {place(own[0])} in {own[0].function}" if is_at_work(dump.frames) else "has no sample to load"
        wait = wait_of(dump.frames) if is_at_work(dump.frames) else None
        text = f"{who} {where}{f' and waits for {wait.what}' if wait is not None else ''}"
        yield Fact(text=text, basis="run", rank=dump.rank, stack=tuple(own))
