"""What rehearsals that were killed left behind: in the user's tree, and of run directories of our own.

Nothing in the user's tree is removed unless the user asks for it; a run directory of ours goes once there is nothing
left to ask.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.launch.runs.created_files import (
    CHANGED,
    HOLDS_OTHERS,
    IN_USE,
    Cleaning,
    Left,
    created_paths,
    remove_created,
)
from ddpdoctor.launch.runs.kept_runs import live_processes
from ddpdoctor.launch.runs.run_directory import Owner, owner_of, rehearsal_directories, remove_run_directory, standing
from ddpdoctor.record import layout


class Leftover(msgspec.Struct, frozen=True):
    """A rehearsal that did not reach its end, or that cannot be judged from here."""

    run_directory: Path
    script: str
    """Absolute; empty where it is not known."""
    files: Cleaning
    owner: Owner | None
    foreign: bool
    """Only its own machine or container can tell whether it still runs: nothing of it is touched here."""

    @property
    def unclear(self) -> tuple[Left, ...]:
        """What may be its own and is not certain; what changed since is the user's, and no leftover."""
        return tuple(left for left in self.files.left if left.reason not in (CHANGED, HOLDS_OTHERS))


def leftovers() -> list[Leftover]:
    """Return what is left of rehearsals, oldest first; removes the run directories of those that left nothing."""
    found = []
    for directory in rehearsal_directories():
        owner = owner_of(directory)
        state = standing(owner)
        plan = _plan(directory)
        if plan is None:
            continue  # Whether what it made was to be kept is not known.
        # The numbers of processes in a box mean nothing out here, and they end with the supervisor.
        boxed = plan.get("mount_points") is not None
        if state == "alive" or (state == "dead" and not boxed and live_processes(directory)):
            continue
        kept = bool(plan.get("keep"))
        leftover = Leftover(
            run_directory=directory,
            script=str(job.get("script", "")) if isinstance(job := plan.get("job"), dict) else "",
            files=Cleaning() if kept else created_paths(directory),
            owner=owner,
            foreign=state != "dead",
        )
        if leftover.foreign or leftover.files.made or leftover.unclear:
            found.append(leftover)
        else:
            remove_run_directory(directory)
    return found


def clean_up(leftover: Leftover) -> Cleaning:
    """Remove what is certainly a rehearsal's and unchanged, and its run directory; say what was removed and what left.

    The run directory stays while something could not be removed, or is in use.
    """
    done = remove_created(leftover.run_directory)
    rest = created_paths(leftover.run_directory)
    if not rest.made and not any(left.reason == IN_USE for left in rest.left):
        remove_run_directory(leftover.run_directory)
    return done


def _plan(directory: Path) -> dict[str, object] | None:
    """Return what was asked for; None where that cannot be read."""
    if not os.path.lexists(directory / layout.JOB_FILE):
        return {}
    try:
        plan = json.loads(read_untrusted(directory / layout.JOB_FILE, 1 << 23, directory))
    except (OSError, ValueError, RecursionError):
        return None
    return plan if isinstance(plan, dict) else None


def leftovers_text(found: list[Leftover]) -> str:
    """Return one line that says what is left, and how to be rid of it; empty when there is nothing to be reported."""
    paths = [path for leftover in found if not leftover.foreign for path in leftover.files.made]
    paths += [left.path for leftover in found if not leftover.foreign for left in leftover.unclear]
    if not paths:
        return ""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"note: a rehearsal that was killed left {paths[0]}{more}; `ddpdoctor clean` shows and removes what it left"
