"""Facts about a job that hangs now: how long its process groups still wait, and where its ranks stand in C++."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.diagnosis.wording import duration_text, group_name, rank_list, verb
from ddpdoctor.finding import Fact
from ddpdoctor.record.model import RunRecord

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
