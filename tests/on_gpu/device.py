"""Whether there is a GPU, asked by a process of its own, for a driver in trouble answers no one. Only the standard
library is needed here.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from contextlib import suppress
from typing import Any

ANSWERS_WITHIN_S = 90.0
"""The first import of torch from a cold disk and the first context take a good part of a minute."""
_ASK = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print("DEVICE " + json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "count": count,
    "names": [torch.cuda.get_device_name(number) for number in range(count)],
    "capability": torch.cuda.get_device_capability(0) if count else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
}))
if count:
    torch.ones(1, device="cuda").item()
    print("ANSWERS")
"""
_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def look(within_s: float = ANSWERS_WITHIN_S) -> tuple[dict[str, Any], str]:
    """Return what this machine is, and why no GPU can be used on it; nothing where one can."""
    machine: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "count": 0}
    printed, trouble = _printed((sys.executable, "-c", _ASK), within_s)
    machine |= next((json.loads(line[7:]) for line in printed.splitlines() if line.startswith("DEVICE ")), {})
    driver, _ = _printed(_SMI, within_s)
    machine["driver"] = driver.strip().splitlines()[0] if driver.strip() else None
    if "torch" not in machine:
        return machine, f"torch cannot be asked: {trouble or 'it printed nothing'}"
    if not machine["count"]:
        driver_says = f"driver {machine['driver']}" if machine["driver"] else "no NVIDIA driver answers"
        return machine, f"torch {machine['torch']} sees no GPU ({driver_says})"
    return machine, "" if "ANSWERS" in printed else f"the GPU computes nothing: {trouble or 'no result came'}"


def _printed(command: tuple[str, ...], within_s: float) -> tuple[str, str]:
    """Return what a command prints, and the end of what went wrong; waits for a command that cannot be killed no longer
    than for any other.
    """
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return "", str(error)
    try:
        printed, trouble = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        return "", f"{command[0]} has not answered for {within_s:.0f} s"
    return printed, (trouble.strip().splitlines() or [""])[-1] if process.returncode else ""
