"""Runs the examples of ``examples/clusters`` by their own launchers, each for real, with a slow rank in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clusters"
MOST_S = 420
"""Ray alone takes three minutes to start on two busy cores without a network."""


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """One folder of the examples."""

    name: str
    needs: tuple[str, ...]
    """Programs on the PATH."""
    environment: Mapping[str, str] = {}


LAUNCHERS = (
    Launcher(
        name="slurm",
        needs=("sbatch", "srun", "scontrol", "sinfo"),
        # Several slurmd on one machine have names that resolve to nothing.
        environment={"FIRST_HOST": "127.0.0.1"},
    ),
    Launcher(
        name="mpirun",
        needs=("mpirun",),
        environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    Launcher(name="ray", needs=("ray",), environment={"RAY_TRAIN_V2_ENABLED": "1"}),
    Launcher(name="torchx", needs=("torchx",)),
    Launcher(name="lightning", needs=()),
    Launcher(name="accelerate", needs=("accelerate",)),
)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    launcher: str
    skipped: str = ""
    """Why it was not run."""
    ended: str = ""
    """What the launcher's exit code was, and whether the training came to its end."""
    verdict: str = ""
    right: bool = False


def run(launcher: Launcher, directory: Path) -> Told:
    """Run one example in a copy, rank 1 slow; ``verdict`` is the line of the report that starts with one."""
    environment = {**os.environ, **launcher.environment, "SLOW": "1", "XDG_STATE_HOME": str(directory / "state")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    missing = [program for program in launcher.needs if shutil.which(program, path=environment["PATH"]) is None]
    if missing:
        return Told(launcher=launcher.name, skipped=f"{', '.join(missing)} is not on the PATH")
    for program in launcher.needs:  # A library that has its own environment brings the Python that has it.
        beside = Path(shutil.which(program, path=environment["PATH"]) or "").parent
        if (beside / "python").exists():
            environment["PATH"] = f"{beside}{os.pathsep}{environment['PATH']}"
    if launcher.name == "slurm" and subprocess.run(("sinfo",), capture_output=True).returncode:
        return Told(launcher=launcher.name, skipped="no slurmctld answers")
    copy = directory / "clusters"
    shutil.copytree(EXAMPLES, copy, dirs_exist_ok=True)
    folder = copy / launcher.name
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            ("sh", "start.sh"), cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code: int | None = process.wait(MOST_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = None
            process.wait(60)
    text = "".join(path.read_text(errors="replace") for path in (output, *folder.glob("train-*.out")))
    states = ("HEALTHY", "SLOW", "BROKEN", "UNKNOWN")
    lines = text.splitlines()
    verdict = next((line for line in lines if line.partition(":")[0] in states), "no report")
    trained = any("trained" in line for line in lines)
    return Told(
        launcher=launcher.name,
        ended=f"{'did not end' if code is None else f'exit code {code}'}{', trained' if trained else ''}",
        verdict=verdict,
        right=code == 0 and verdict.startswith("SLOW: rank 1 keeps rank 0 waiting"),
    )
