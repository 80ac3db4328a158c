"""Runs the sweep of the links on so many ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.environment import script_command
from ddpdoctor.what_if.links import AllReduce, LinkSweep

LONGEST_S = 180.0
SCRIPT = Path(__file__).parents[1] / "probe" / "link_sweep.py"


def sweep(python: str, ranks: int, environment: Mapping[str, str] = os.environ) -> LinkSweep:
    """Measure a barrier and all-reduces by size; raises DdpDoctorError, with the reason, where that fails."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-links-") as directory:
        told = Path(directory) / "told.json"
        command = script_command(python, str(SCRIPT), (str(told),), ranks, module=False, spawns_ranks=False)
        process = subprocess.Popen(
            command.words,
            env={**environment, "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise DdpDoctorError(f"the links of {ranks} ranks were not measured within {LONGEST_S:.0f} s") from None
        finally:
            _end(process)
        if not told.exists():
            last = (said.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise DdpDoctorError(f"the links of {ranks} ranks could not be measured: {last}")
        return _read(msgspec.json.decode(told.read_bytes()))


def _read(told: dict[str, Any]) -> LinkSweep:
    ranks = int(told["ranks"])
    return LinkSweep(
        ranks=ranks,
        backend=str(told["backend"]),
        barrier_s=float(told["barrier_s"]),
        all_reduce=tuple(
            AllReduce(
                bytes=int(entry["bytes"]),
                seconds=float(entry["seconds"]),
                bus_bytes_per_s=2 * (ranks - 1) / ranks * int(entry["bytes"]) / float(entry["seconds"]),
            )
            for entry in told["all_reduce"]
        ),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and its ranks, if they still run; each rank has a session of its own."""
    import psutil

    if process.poll() is not None:
        return
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        started = []
    process.kill()
    for child in started:
        try:
            child.kill()
        except psutil.Error:
            continue
    process.wait()
