"""Divides work on the source among processes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from ddpdoctor.errors import DdpDoctorError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

SHARES = 4
"""Parts a process: the files of one directory import the same modules and stay together as far as that allows."""


def in_processes(jobs: int, pieces: Sequence[Piece], work: Callable[[Sequence[Piece]], list[Result]]) -> list[Result]:
    """Do ``work`` on runs of neighbouring ``pieces`` in ``jobs`` processes; results come in the order of the pieces.

    Raises DdpDoctorError when a process dies, and what ``work`` raises.
    """
    size = max(1, -(-len(pieces) // (jobs * SHARES)))
    parts = [pieces[start : start + size] for start in range(0, len(pieces), size)]
    # Forked processes have everything imported already and get the work without pickling; nothing here has threads.
    context = multiprocessing.get_context("fork")
    next_part = context.Value("i", 0)
    processes = []
    for _ in range(min(jobs, len(parts))):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(parts, work, next_part, sender), daemon=True)
        process.start()
        sender.close()
        processes.append((process, receiver))
    results: dict[int, list[Result]] = {}
    try:
        for process, receiver in processes:
            try:
                raw = receiver.recv_bytes()
            except EOFError:
                process.join()
                raise DdpDoctorError(
                    f"a process that examined scripts died (exit code {process.exitcode})",
                    "Examine with `-j 1` to see which script it was.",
                ) from None
            done = pickle.loads(raw)
            if isinstance(done, Exception):
                raise done
            results.update(done)
            process.join()
    finally:
        for process, receiver in processes:
            receiver.close()
            if process.is_alive():
                process.terminate()
                process.join()
    return [result for number in range(len(parts)) for result in results[number]]


def _serve(
    parts: Sequence[Sequence[Piece]],
    work: Callable[[Sequence[Piece]], list[Result]],
    next_part: object,
    sender: object,
) -> None:
    """Work on parts until none is left, and send everything at once."""
    results: dict[int, list[Result]] = {}
    try:
        while True:
            with next_part.get_lock():  # type: ignore[attr-defined]
                number = next_part.value  # type: ignore[attr-defined]
                next_part.value += 1  # type: ignore[attr-defined]
            if number >= len(parts):
                break
            results[number] = work(parts[number])
        raw = pickle.dumps(results)
    except KeyboardInterrupt:
        return
    except Exception as error:
        raw = pickle.dumps(_portable(error))
    sender.send_bytes(raw)  # type: ignore[attr-defined]


def _portable(error: Exception) -> Exception:
    """Return the error, or one with its text, when it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DdpDoctorError(f"{type(error).__name__}: {error}")
    return error
