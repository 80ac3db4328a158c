"""Numbers of processes inside and outside of a container: there each process has another one than out here."""

from __future__ import annotations


def numbers_of(pid: int) -> tuple[int, ...]:
    """Return the numbers of a process from ours to that of the innermost namespace; only its own where nobody tells."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            words = next(line for line in file if line.startswith("NSpid:")).split()[1:]
    except (OSError, StopIteration):
        return (pid,)
    return tuple(map(int, words)) or (pid,)


def number_inside(pid: int) -> int:
    """Return the number by which a process knows itself."""
    return numbers_of(pid)[-1]
