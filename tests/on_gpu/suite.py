"""Runs parts, each in a process and a time of its own, and keeps what they wrote."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.jobs_of_tests import kill_marked, marked
from tests.on_gpu.claims import Row, rows_of, with_missing

ROOT = Path(__file__).parents[2]
PARTS = ("nvml", "screen", "phases", "cost", "features", "nccl", "stand_in")
"""By name the modules in ``parts``; what most depends on the machine comes first."""
LEAVES_WITHIN_S = 10.0
"""What was killed and is not gone then, is held by the driver: it is left behind."""


def module_of(name: str) -> str:
    """Return the module of a part."""
    return f"tests.on_gpu.parts.{name}"


def run_part(module: str, folder: Path, limit_s: float, *, pretends: bool, variables: dict[str, str]) -> list[Row]:
    """Run one part; whatever becomes of its process, there is a row for each of its claims, and nothing of it is left.

    ``variables`` are added to its environment.
    """
    folder.mkdir(parents=True)
    rows, claims = folder / "rows.jsonl", importlib.import_module(module).CLAIMS
    command = [sys.executable, "-m", "tests.on_gpu.one_part", module, str(folder), str(rows)]
    environment = {**marked(os.environ, folder), "PYTHONUNBUFFERED": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    # What it prints goes to a file: a pipe is open for as long as any process that it started.
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command + ["--pretend"] * pretends,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        why = _ended(process, limit_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_marked(folder)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVES_WITHIN_S)
    if process.returncode is None:
        why += "; its process cannot be killed"
    words = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if process.returncode and words:
        why += f": {words[-1].strip()}"
    name = module.rpartition(".")[2]
    return with_missing(rows_of(rows), name, claims, pretends=pretends, why=why)


def run_suite(
    names: Iterable[str],
    folder: Path,
    *,
    pretends: bool,
    trouble_with_device: Callable[[], str],
    most_s: float,
) -> Iterator[list[Row]]:
    """Yield the rows of each part; once the device is gone the rest is not tried."""
    gone, ends_s = "", time.monotonic() + most_s

    def rows_of_part(name: str) -> list[Row]:
        nonlocal gone
        part = importlib.import_module(module_of(name))
        limit_s = min(part.LIMIT_S, ends_s - time.monotonic())
        if gone or limit_s <= 0:
            return with_missing([], name, part.CLAIMS, pretends=pretends, why=gone or "no time was left")
        rows = run_part(module_of(name), folder / name, limit_s, pretends=pretends, variables={})
        if not pretends and any(row.outcome == "not measured" for row in rows) and (trouble := trouble_with_device()):
            gone = f"the device is gone: {trouble}"
        return rows

    # On a GPU one at a time, for a part measures what it alone does; without one most of them wait most of the time.
    with ThreadPoolExecutor(2 if pretends else 1) as pool:
        yield from pool.map(rows_of_part, names)


def write_json(path: Path, machine: dict[str, Any], rows: list[Row], seconds: dict[str, float]) -> None:
    """Write all that is known so far."""
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in {row.outcome for row in rows}}
    document = {"machine": machine, "outcomes": counts, "seconds": seconds, "rows": [asdict(row) for row in rows]}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a process; why a claim of it may be missing."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"its {limit_s:.0f} s are over"
    return "the part passed over it" if code == 0 else f"the part ended with code {code}"
