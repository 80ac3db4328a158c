"""The start of the probe in a process of the job: reads the plan, notes the process, waits for torch."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from ..record import layout
from ..record.writer import share_clock
from .environment import number_in, plan_of
from .journal import Journal
from .process import ProcessEnd, end_with_parent, owner_of_environment, rank_of_environment
from .torch_compat import after_import

_LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch"})


def start(run_directory: str) -> None:
    """Start the probe; called by the boot directory's ``sitecustomize`` before the user's program."""
    plan = plan_of(run_directory)
    if int(plan.get("version", 0)) > layout.VERSION:
        return
    share_clock(plan.get("clock"))
    parent = os.getppid()
    journal = Journal(run_directory, plan)
    journal.rank = rank_of_environment()
    if plan.get("kind") == "rehearsal" and (journal.rank is not None or parent == plan.get("supervisor_pid")):
        end_with_parent(parent)
    if journal.rank is None and plan.get("kind") == "run":
        journal.hold()
    if journal.rank is not None and (plan.get("nodes", 1) > 1 or plan.get("tells_slurm")):
        from .rehearsal.rendezvous import pretend

        pretend(os.environ, int(plan["ranks_per_node"]), bool(plan.get("slurm")))
    journal.event(
        "process",
        parent=parent,
        owner=owner_of_environment(),
        rank=journal.rank,
        local_rank=number_in("LOCAL_RANK"),
        node=number_in("GROUP_RANK"),
        world_size=number_in("WORLD_SIZE"),
        kind="start",
    )
    if _is_launcher():
        return
    process_end = ProcessEnd(journal)
    process_end.install()
    os.register_at_fork(after_in_child=journal.become_forked_child)
    if plan.get("kind") == "rehearsal":
        from .rehearsal.install import Rehearsal

        rehearsal = Rehearsal(journal, process_end)
        rehearsal.before_torch()
        after_import("torch", lambda torch: _guarded(journal, rehearsal.after_torch, torch))
    elif plan.get("kind") == "run":
        from .live.install import Live

        live = Live(journal, process_end)
        live.before_torch()
        after_import("torch", lambda torch: _guarded(journal, live.after_torch, torch))


def _guarded(journal: Journal, install: Any, torch: ModuleType) -> None:
    """Install the hooks; a fault of ours is noted and the user's program goes on without them."""
    try:
        install(torch)
        journal.event("torch", version=str(torch.__version__))
    except Exception as error:
        journal.event("probe_fault", where="hooks", text=repr(error))


def _is_launcher() -> bool:
    """Return whether this process is the launcher's agent, which is not observed."""
    arguments = getattr(sys, "orig_argv", [])
    return not _LAUNCHERS.isdisjoint(arguments[:6]) and "RANK" not in os.environ
