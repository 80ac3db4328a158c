"""Dumps of 8 to 1,024 ranks x 2,000 entries with one planted fault each, beside torch's own analyser."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.autopsy.made_dumps import FAULTS, Fault, write_dumps

ENTRIES = 2_000
TIMES_FASTER = 10.0
AT_RANKS = 512
MEMORY_BYTES = 1_000_000_000
JOBS: tuple[tuple[int, tuple[Fault, ...]], ...] = (
    (8, FAULTS),
    (128, ("skipped", "size")),
    (512, ("kind",)),
    (1_024, ("stuck",)),
)
CULPRIT_SHARE = 5 / 8
_MEASURED = (
    "import resource, subprocess, sys; "
    "code = subprocess.run(sys.argv[1:], stdout=sys.stderr, stderr=subprocess.STDOUT).returncode; "
    "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, code)"
)


def measured(*command: str) -> tuple[float, int, str]:
    """Seconds of CPU, bytes of memory at the most, and the output of a command and its children."""
    done = subprocess.run((sys.executable, "-c", _MEASURED, *command), capture_output=True, text=True, check=True)
    seconds, peak, _ = done.stdout.split()
    return float(seconds), int(peak), done.stderr


def main() -> int:
    """Print one line a job."""
    analyser = shutil.which("torchfrtrace") or str(Path(sys.executable).with_name("torchfrtrace"))
    start_of_theirs, _, _ = measured(analyser, "--help")
    start_of_ours, _, _ = measured(sys.executable, "-m", "ddpdoctor", "--version")
    print(f"start alone, taken off below: ddpdoctor {start_of_ours:.2f} s, torchfrtrace {start_of_theirs:.2f} s")
    kept = True
    for world, faults in JOBS:
        for fault in faults:
            culprit = int(world * CULPRIT_SHARE)
            with tempfile.TemporaryDirectory() as directory:
                write_dumps(Path(directory), world, ENTRIES, fault, culprit)
                ours, peak, said = measured(
                    sys.executable, "-m", "ddpdoctor", "autopsy", directory, "--output-format", "concise"
                )
                right = f"rank {culprit}" in said.partition("\n")[0]
                theirs = 0.0
                if world <= AT_RANKS:
                    theirs, _, _ = measured(analyser, directory, "-p", "dump_rank_")
            ours, theirs = max(ours - start_of_ours, 1e-3), theirs - start_of_theirs
            kept &= right and peak < MEMORY_BYTES and (world != AT_RANKS or theirs >= TIMES_FASTER * ours)
            beside = f"torchfrtrace {theirs:.2f} s: {theirs / ours:.0f} times" if theirs > 0 else "torchfrtrace not run"
            print(
                f"{world:5,} ranks, {fault:8}: {ours:6.2f} s of CPU, {peak / 1e6:4.0f} MB, culprit "
                f"{'right' if right else 'WRONG: ' + said[:300]}; {beside}",
                flush=True,
            )
    print(f"bounds: {TIMES_FASTER:.0f} times at {AT_RANKS} ranks, {MEMORY_BYTES / 1e6:.0f} MB")
    return 0 if kept else 1
