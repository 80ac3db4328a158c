"""What is said of the files that a rehearsal wrote, in an overlay or without one, and what is kept of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpdoctor.launch.box.start import Box
from ddpdoctor.launch.runs.created_files import Left
from ddpdoctor.launch.runs.run_directory import state_directory

_READ_ONLY = os.strerror(errno.EROFS)


def overlay_notes(box: Box | None, refusal: str, outputs: Iterable[str]) -> Iterator[str]:
    """Sentences on an overlay that could not be made, or in which the script could not write everywhere.

    ``refusal`` is the kernel's reason, empty where there is none; ``outputs`` is what the script printed.
    """
    if refusal:
        yield (
            f"no overlay could be made here ({refusal}): existing files were protected by rules against the script, "
            "but not against other programs that it starts"
        )
    if box is not None and box.read_only and any(_READ_ONLY in text for text in outputs):
        yield (
            f"in the overlay {listed(box.read_only)} cannot be written to, because something else is mounted below; "
            "`--no-overlay` rehearses without one"
        )


def keep_overlay(box: Box, name: str) -> str:
    """Keep what was written to the overlay now that nothing runs in it, and say where it lies."""
    here = str(Path.cwd())
    inside = here.rstrip("/") + "/"
    paths = sorted((path for path, _ in box.written()), key=lambda path: (not path.startswith(inside), path))
    try:
        target = state_directory() / "kept" / name
        kept = box.keep(target)
    except (OSError, RuntimeError) as error:
        return f"what the script wrote could not be kept: {error}"
    if not paths:
        return "the script wrote no file"
    lower = max((lower for lower in kept if (here + "/").startswith(lower.rstrip("/") + "/")), key=len, default="")
    place = kept[lower] / os.path.relpath(here, lower) if lower else target
    return f"what the script wrote is kept below {place}: {listed(path.removeprefix(inside) for path in paths)}"


def left_notes(left: Iterable[Left]) -> Iterator[str]:
    """Say what was made in a rehearsal without an overlay and is not removed, by reason."""
    by_reason: dict[str, list[str]] = {}
    for each in left:
        by_reason.setdefault(each.reason, []).append(each.path)
    for reason, paths in by_reason.items():
        yield f"left in place because {reason}: {listed(paths)}"


def listed(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    all_names = list(names)
    shown = [name if len(name) <= 60 else f"{name[:59]}…" for name in all_names[:3]]
    return "; ".join(shown) + (f"; {len(all_names) - 3} more" if len(all_names) > 3 else "")


def programs(commands: list[str]) -> str:
    """Return the first few commands, and the other programs by name: each may have changed files."""
    shown = [f"`{listed((command,))}`" for command in commands[:3]]
    names = sorted({os.path.basename(command.split(maxsplit=1)[0]) for command in commands[3:] if command.strip()})
    return "; ".join(shown) + (f"; and {len(commands) - 3} more commands of {', '.join(names)}" if names else "")
