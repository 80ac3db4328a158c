"""What the box of a rehearsal costs: its start, and reading in it beside reading the real files, in one run.

``python -m tests.benchmarks.box_cost`` prints a table. A data set of small files and one large file are made, read once
so that the page cache is the same for both, and then read in turn outside and inside; the small ones by CPU time, for
they cost nothing else, and the large one by the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpdoctor.launch.box.start import remove_layers, start_in_box

SMALL_FILES = 50_000
LARGE_BYTES = 5_000_000_000
ROUNDS = 3
START_AT_MOST_S = 0.2
READING_AT_MOST = 1.1
"""Ratio of reading a large file inside to outside: its blocks come from the real file's page cache."""
OPENING_AT_MOST_US = 15.0
"""CPU time that a small file may cost more, for one file system more; decoding an image takes 1,000 to 5,000."""
_READ = """
import json, os, sys, time
began = time.process_time()
for directory, _, names in os.walk(sys.argv[1] + "/small"):
    for name in names:
        with open(os.path.join(directory, name), "rb") as file:
            file.read()
small = time.process_time() - began
began = time.perf_counter()
with open(sys.argv[1] + "/large", "rb", buffering=0) as file:
    while file.read(1 << 22):
        pass
print(json.dumps([small, time.perf_counter() - began]))
"""


def main() -> int:
    """Print the table; 1 when a bound is not met."""
    folder = Path(tempfile.mkdtemp(prefix="ddpdoctor-box-cost-", dir="/var/tmp"))
    try:
        return _measure(folder)
    finally:
        shutil.rmtree(folder)


def _measure(folder: Path) -> int:
    _make(folder)
    _in_box(folder, ["true"])
    starts = [_in_box(folder, ["true"])[0] for _ in range(5)]
    read = [sys.executable, "-c", _READ, str(folder)]
    _outside(read)
    rounds = [(_outside(read), json.loads(_in_box(folder, read)[1])) for _ in range(ROUNDS)]
    small, large = (statistics.median(inside[part] / outside[part] for outside, inside in rounds) for part in (0, 1))
    sides = zip(*rounds, strict=True)
    outside_us, inside_us = (statistics.median(each[0] for each in side) / SMALL_FILES * 1e6 for side in sides)
    more_us = inside_us - outside_us
    print(f"start of the box            {min(starts):6.3f} s   ({START_AT_MOST_S:g} s allowed)")
    print(f"{SMALL_FILES} small files, inside  {small:6.2f} x outside: {outside_us:.1f} and {inside_us:.1f} us each")
    print(f"  a small file costs more   {more_us:6.1f} us  ({OPENING_AT_MOST_US:g} us allowed)")
    print(f"a file of {LARGE_BYTES / 1e9:g} GB, inside    {large:6.2f} x outside ({READING_AT_MOST:g} allowed)")
    return int(min(starts) > START_AT_MOST_S or more_us > OPENING_AT_MOST_US or large > READING_AT_MOST)


def _make(folder: Path) -> None:
    for number in range(SMALL_FILES):
        directory = folder / "small" / f"{number // 1000:03}"
        if number % 1000 == 0:
            directory.mkdir(parents=True)
        (directory / f"{number}.bin").write_bytes(b"x" * 2_000)
    block = os.urandom(1 << 22)
    with (folder / "large").open("wb") as file:
        for _ in range(LARGE_BYTES // len(block)):
            file.write(block)


def _outside(command: list[str]) -> list[float]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(seconds) for seconds in json.loads(done.stdout)]


def _in_box(folder: Path, command: list[str]) -> tuple[float, str]:
    """Seconds until the command was started, and what it printed."""
    run = Path(tempfile.mkdtemp(dir=folder))
    began = time.perf_counter()
    with (run / "output").open("wb") as sink:
        box = start_in_box(command, os.environ, folder, run, sink)
        seconds = time.perf_counter() - began
        box.process.wait()
        box.end()
    text = (run / "output").read_text()
    remove_layers(run)
    shutil.rmtree(run)
    return seconds, text


if __name__ == "__main__":
    sys.exit(main())
