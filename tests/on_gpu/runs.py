"""Starts the jobs of the parts, plain or watched as a user watches them, and reads what came of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.monitor.history import recorded_moments, recorded_snapshot
from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.probe.environment import free_port
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.reader import read_plan

JOBS = Path(__file__).with_name("jobs")
_END = 1_500


@dataclass(frozen=True)
class Ran:
    """A job that is over."""

    code: int
    folder: Path
    seconds: float

    @property
    def output(self) -> str:
        """What it printed."""
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    @property
    def report(self) -> dict[str, Any]:
        """The report of a watched job."""
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return report

    def truth(self, rank: int = 0) -> dict[str, Any]:
        """What a rank has written; RuntimeError where it has not come so far."""
        path = self.folder / f"truth.{rank}"
        if not path.exists():
            raise RuntimeError(
                f"{self.folder.name} ended with code {self.code}: {' '.join(self.output[-_END:].split())}"
            )
        truth: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return truth

    def record(self) -> RunRecord:
        """The record of a watched job."""
        live = LiveRun(self.folder / "run", read_plan(self.folder / "run"), is_over=True)
        try:
            live.look(time.time_ns())
            return live.look(time.time_ns())
        finally:
            live.close()

    def snapshots(self) -> list[Snapshot]:
        """What was shown of a watched job, oldest first."""
        return [recorded_snapshot(self.folder / "run", moment) for moment in recorded_moments(self.folder / "run")]


class Job:
    """A job that runs; its ranks write what is true to ``truth.RANK`` in its folder, which the script is told first."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *arguments: object,
        nproc: int = 1,
        watched: bool = True,
        launches_itself: bool = False,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``prefix`` goes before the whole command; a script that ``launches_itself`` spawns its ranks."""
        folder.mkdir(parents=True)
        self.folder = folder
        path = script if os.path.isabs(script) else str(JOBS / f"{script}.py")
        words = [str(folder / "truth"), *map(str, arguments)] if not os.path.isabs(script) else [*map(str, arguments)]
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={nproc}", f"--master-port={free_port()}"]
        command = [sys.executable, *([] if launches_itself else launch), path, *words]
        if watched:
            watch = [sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--run-dir", str(folder / "run")]
            command = [*watch, "--output-format", "json", "-o", str(folder / "report.json"), "--", *command]
        environment = {
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            **os.environ,
            **(variables or {}),
        }
        self._began_s = time.monotonic()
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def ended(self, limit_s: float = 120.0) -> Ran:
        """Wait for its end; RuntimeError when it does not come, and then the part ends, and with it the job."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.folder.name} has not ended after {limit_s:.0f} s") from None
        return Ran(code, self.folder, time.monotonic() - self._began_s)


def autopsy(*paths: Path) -> dict[str, Any]:
    """Return the report of ``ddpdoctor autopsy``."""
    command = [sys.executable, "-m", "ddpdoctor", "autopsy", "--output-format", "json", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"autopsy ended with code {done.returncode}: {done.stderr[-_END:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def codes_of(report: Mapping[str, Any]) -> list[str]:
    """Return the codes of the findings of a report, worst first and each once."""
    return list(dict.fromkeys(finding["code"] for finding in report["findings"]))
