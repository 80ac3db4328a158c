"""Writes what is on the screen to files."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.tui.draw.cells import shown
from ddpdoctor.tui.draw.figures import rank_list
from ddpdoctor.tui.screens.sections import lasting


def export_snapshot(snapshot: Snapshot, directory: Path) -> Path:
    """Write a snapshot as JSON into ``directory``; nothing that is there is overwritten. Raises OSError."""
    encoded = msgspec.json.format(msgspec.json.encode(snapshot), indent=2)
    return _written(directory, f"ddpdoctor-{_stem(snapshot)}", ".json", encoded + b"\n")


def dump_stacks(snapshot: Snapshot, directory: Path) -> Path:
    """Write the standstill and the stack of every rank that is known. Raises OSError."""
    lines = [stall_text(snapshot), ""]
    for rank in snapshot.ranks:
        lines.append(f"rank {rank.rank}: {shown(rank.state)}")
        lines += [f"  {shown(frame.file)}:{frame.line} in {shown(frame.function)}" for frame in rank.stack]
    return _written(directory, f"ddpdoctor-stacks-{_stem(snapshot)}", ".txt", "\n".join(lines).encode() + b"\n")


def stall_text(snapshot: Snapshot) -> str:
    """Return the standstill, or without one the verdict, as text."""
    stall = snapshot.stall
    if stall is None:
        return "\n".join(map(shown, (snapshot.verdict.text, *snapshot.verdict.why, snapshot.verdict.next)))
    lines = [", ".join(filter(None, (shown(stall.title), lasting(snapshot, stall.since_ns))))]
    for side in stall.sides:
        lines.append(f"{rank_list(side.ranks)}{' (the culprit)' if side.culprit else ''}: {shown(side.text)}")
        lines += [f"  {shown(frame.file)}:{frame.line} in {shown(frame.function)}" for frame in side.stack]
    return "\n".join([*lines, shown(stall.remedy)])


def _stem(snapshot: Snapshot) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(snapshot.name[-80:]).stem).strip("-") or "run"
    return f"{name}-step-{snapshot.steps or 0}"


def _written(directory: Path, stem: str, suffix: str, content: bytes) -> Path:
    number = 1
    while True:
        path = directory / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}"
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            number += 1
            continue
        return path
