"""Proves on a GPU what ddpdoctor says of one: ``python -m tests.on_gpu [--only NAME]... [--out DIR] [--pretend]``.

Each part runs in a process of its own; at the end a table says of each claim what was expected and measured, and
``results.json`` in the directory of ``--out`` has the same. With ``--pretend`` it runs without a GPU: gloo stands for
NCCL, the stand-in for CUDA, and an invented management library for the driver's. ``wheels.txt`` says how a machine
without a package index gets what is missing there. It exits with 1 when a claim is wrong or was not measured, and with
2 when there is nothing to measure on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.on_gpu.device import look

MOST_S = 25 * 60.0
NEEDED = (
    "click", "jinja2", "msgspec", "prometheus_client", "psutil", "pynvml", "rich", "textual", "torch", "yaml", "zmq",
)  # fmt: skip
WHEELS = Path(__file__).with_name("wheels.txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"This Python lacks {', '.join(missing)}; {WHEELS} says how to bring them.", file=sys.stderr)
        return 2
    from tests.on_gpu.claims import Row, table_of
    from tests.on_gpu.suite import PARTS, run_suite, write_json

    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description="What ddpdoctor says of a GPU, proved.")
    parser.add_argument("--only", action="append", choices=PARTS, metavar="NAME", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="where results.json and the parts' files are kept")
    parser.add_argument("--pretend", action="store_true", help="run what can be run without a GPU")
    chosen = parser.parse_args(arguments)
    machine, trouble = look()
    if trouble and not chosen.pretend:
        print(f"There is no GPU to measure on: {trouble}. `--pretend` runs what needs none.", file=sys.stderr)
        return 2
    out = chosen.out or Path(tempfile.mkdtemp(prefix="on-gpu-"))
    if out.is_dir() and any(out.iterdir()):
        print(f"{out} is not empty; name a new directory.", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    began_s = time.monotonic()
    names = [name for name in PARTS if chosen.only is None or name in chosen.only]
    machine["pretended"] = chosen.pretend
    parts = run_suite(names, out, pretends=chosen.pretend, trouble_with_device=lambda: look()[1], most_s=MOST_S)
    for name, found in zip(names, parts, strict=True):
        seconds[name] = round(time.monotonic() - began_s - sum(seconds.values()), 1)
        rows += found
        print(f"{name}: {seconds[name]:.0f} s", file=sys.stderr, flush=True)
        # After each part: the machine may be gone before the next has ended.
        write_json(out / "results.json", machine, rows, seconds)
    print(table_of(rows))
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("right", "WRONG", "not measured")}
    here = "pretended" if chosen.pretend else ", ".join(machine["names"])
    print(f"{here}: {len(rows)} claims, {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}, "
          f"{len(rows) - sum(counts.values())} not here; {out / 'results.json'}")  # fmt: skip
    return int(counts["WRONG"] + counts["not measured"] > 0)


if __name__ == "__main__":
    sys.exit(main())
