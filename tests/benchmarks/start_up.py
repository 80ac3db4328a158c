"""Start-up cost: ``--version`` and ``check --static`` against ``python -c pass``.

``python -m tests.benchmarks.start_up`` prints the medians of 20 cold processes each, interleaved, with bytecode warm,
and the ratios; it exits with 1 when a ratio is above 10. One script is an example of 60 lines, the other has 500 lines
and imports five modules of its project.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.scratch import scratch_directory

RUNS = 20
BOUND = 10.0
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "healthy.py"
SCRIPTS = ROOT / "tests" / "idioms" / "scripts"
PARTS = ("object_detection.py", "time_limited.py", "knowledge_distillation.py")
"""Scripts that make the long one when they are put one after the other: all of them run."""
MODULES = (
    "self_distillation/metrics.py",
    "callbacks_and_json/project/settings.py",
    "callbacks_and_json/project/trainer.py",
    "nested_project/src/vision/log.py",
    "nested_project/src/vision/model.py",
)


def make_project(directory: Path) -> Path:
    """Write a script of 500 lines and the five modules that it imports; returns the path of the script."""
    for module in MODULES:
        shutil.copy(SCRIPTS / module, directory)
    lines = [f"import {Path(module).stem}" for module in MODULES]
    for number, part in enumerate(PARTS):
        text = (SCRIPTS / part).read_text(encoding="utf-8")
        lines += re.sub(r"(?<![.\w])main\(", f"main_{number}(", text).splitlines()
    script = directory / "train.py"
    script.write_text("\n".join(lines), encoding="utf-8")
    return script


def commands(directory: Path) -> Mapping[str, tuple[str, ...]]:
    """Arguments of Python by what is measured; the first is what the others are compared with."""
    check = ("-m", "ddpdoctor", "check", "--static")
    return {
        "python -c pass": ("-c", "pass"),
        "ddpdoctor --version": ("-m", "ddpdoctor", "--version"),
        "ddpdoctor check --static": (*check, str(SCRIPT)),
        "same, --output-format json": (*check, "--output-format", "json", str(SCRIPT)),
        "500 lines, five modules": (*check, str(make_project(directory))),
    }


def measure(runs: int = RUNS, of: Callable[[Sequence[float]], float] = statistics.median) -> dict[str, float]:
    """Return the CPU time of each command in seconds, the median or what else is made of several."""
    with scratch_directory() as directory:
        (directory / "project").mkdir()
        bytecode = directory / "bytecode"
        measured = commands(directory / "project")
        for arguments in measured.values():
            run_once(arguments, bytecode)
        times: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(runs):
            for name, arguments in measured.items():
                times[name].append(run_once(arguments, bytecode))
    return {name: of(seconds) for name, seconds in times.items()}


def run_once(arguments: tuple[str, ...], bytecode: Path) -> float:
    """Run Python once, in a process of its own, and return the CPU seconds that it took: they bear a busy machine."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        (sys.executable, *arguments),
        cwd=ROOT,
        env=environment | {"PYTHONPYCACHEPREFIX": str(bytecode)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Print the table; 1 when a bound is exceeded."""
    medians = measure()
    base = medians["python -c pass"]
    print(f"start-up, median of {RUNS} cold processes, bound {BOUND:.0f} x")
    for name, seconds in medians.items():
        print(f"  {name:<26} {seconds * 1000:7.1f} ms  {seconds / base:5.1f} x")
    return int(any(seconds > BOUND * base for seconds in medians.values()))


if __name__ == "__main__":
    sys.exit(main())
