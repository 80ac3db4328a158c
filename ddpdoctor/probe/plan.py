"""The plan of a run, made here where the run was started without the doctor."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from ..record import layout
from ..record.clock import kept_clock

KEPT = ("TORCH", "NCCL", "GLOO", "CUDA", "OMP_", "MASTER_", "SLURM", "PYTHON")
"""Beginnings of the names of variables that bear on a job."""


_MOST_CHARACTERS = 1 << 24


def plan_of(run_directory: str) -> dict[str, Any]:
    """Return the content of ``job.json``; the first process of a job without a plan writes it.

    Raises ``OSError`` where the directory can be neither read nor made, ``ValueError`` when the file is damaged.
    """
    path = os.path.join(run_directory, layout.JOB_FILE)
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    os.makedirs(run_directory, mode=0o700, exist_ok=True)
    mine = f"{path}.{os.getpid()}"
    with open(mine, "w", encoding="utf-8") as file:
        json.dump(_unplanned(), file)
    try:
        os.link(mine, path)  # Unlike a rename it leaves alone what another process has made meanwhile.
    except FileExistsError:
        pass
    except OSError:
        os.rename(mine, path)
        return _read(path)
    os.unlink(mine)
    return _read(path)


def has_launcher(plan: dict[str, Any]) -> bool:
    """Return whether torch's launcher set the rendezvous of this process, as the user starts the job."""
    return "TORCHELASTIC_RUN_ID" in os.environ and bool(plan.get("has_launcher", True))


def _read(path: str) -> dict[str, Any]:
    # Should another program have put a pipe or a device in its place, no process of the job may wait for that.
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        plan = json.loads(file.read(_MOST_CHARACTERS))
    if not isinstance(plan, dict):
        raise ValueError(f"{path} holds no plan")
    return plan


def _unplanned() -> dict[str, Any]:
    """Return the plan of a run of which nothing is known but this process."""
    arguments = list(getattr(sys, "orig_argv", sys.argv))
    script = next((part for part in arguments[1:] if part.endswith(".py")), "")
    return {
        "version": layout.VERSION,
        "kind": "run",
        "clock": kept_clock(),
        "project_root": os.getcwd(),
        "job": {
            "kind": "run",
            "command": arguments,
            "script": os.path.abspath(script) if script else "",
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(KEPT)},
            "python": sys.executable,
            "ranks_expected": int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE", "").isdigit() else 0,
            "started_ns": time.time_ns(),
        },
    }
