"""Prints what was predicted of changed jobs beside what they did; exits with 1 when the figures miss their bounds.

``python -m tests.what_if`` takes some minutes; with ``--steps N`` or the names of some jobs it is shorter.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from ddpdoctor.what_if.observed import observe
from ddpdoctor.what_if.scenario import Model
from tests.scratch import scratch_directory
from tests.what_if.measure import Done, Pair, pairs_of, run_chapters

CHANGES = {
    "comm": ("bucket_cap_mb=1", "bucket_cap_mb=100", "accumulation=4", "hook=bf16_compress", "link_speed=4"),
    "input": ("workers=1", "workers=2", "accumulation=2", "link_speed=4"),
    "late": ("straggler=none", "accumulation=2", "hook=bf16_compress", "straggler=none,accumulation=2"),
    "small": ("bucket_cap_mb=25", "collectives=batched", "collectives=dropped", "broadcast_buffers=false"),
    "accumulate": ("accumulation=4", "accumulation=8", "bucket_cap_mb=25", "link_speed=3"),
}
WORLDS = (2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description="What was predicted of changed jobs, beside what they did.")
    parser.add_argument("--steps", type=int, default=40, help="steps of each job (default: 40)")
    parser.add_argument("jobs", nargs="*", choices=[[], *CHANGES], metavar="JOB", help=", ".join(CHANGES))
    chosen = parser.parse_args()
    steps, jobs = chosen.steps, chosen.jobs or list(CHANGES)
    with scratch_directory() as directory:
        done = {
            ranks: run_chapters(
                directory, ranks, steps, [s for job in jobs for s in (job, *(f"{job}:{c}" for c in CHANGES[job]))]
            )
            for ranks in WORLDS
        }
        pairs = [pair for ranks in WORLDS for job in jobs for pair in _pairs(done, ranks, job)]
        reproduced = [abs(Model(observe(done[ranks][job].record)).error) for ranks in WORLDS for job in jobs]
    print(f"{'job':<12}{'ranks':<6}{'change':<34}{'base':>8}{'predicted':>10}  {'interval':<18}{'true':>8}{'error':>8}")
    for pair in pairs:
        print(
            f"{pair.job:<12}{pair.ranks:<6}{pair.change:<34}{pair.base_ms:>8.1f}{pair.predicted_ms:>10.1f}  "
            f"{f'{pair.low_ms:.1f} to {pair.high_ms:.1f}':<18}{pair.true_ms:>8.1f}{pair.error:>8.1%}"
            f"{'' if pair.covered else '  outside'}"
        )
    return _judged(pairs, reproduced, WORLDS, jobs)


def _pairs(done: dict[int, dict[str, Done]], ranks: int, job: str) -> list[Pair]:
    """Each change of a job, and the job on the other number of ranks."""
    base = done[ranks][job]
    other = WORLDS[1 - WORLDS.index(ranks)]
    changed = [(change, done[ranks][f"{job}:{change}"]) for change in CHANGES[job]]
    return pairs_of(base, ranks, [*changed, (f"ranks={other}", done[other][job])])


def _judged(pairs: list[Pair], reproduced: list[float], worlds: tuple[int, ...], jobs: list[str]) -> int:
    errors = [abs(pair.error) for pair in pairs]
    ordered = []
    for ranks in worlds:
        for job in jobs:
            own = [p for p in pairs if (p.job, p.ranks) == (job, ranks) and not p.change.startswith("ranks")]
            best = sorted(own, key=lambda pair: -pair.predicted_speedup)[:2]
            ordered.append(best[0].true_speedup >= 0.98 * best[1].true_speedup)
    figures = (
        ("pairs", len(pairs), len(pairs) >= 40 or len(jobs) < 5),
        ("median error of the replay of the run itself", median(reproduced), median(reproduced) <= 0.05),
        ("median error of the prediction", median(errors), median(errors) <= 0.10),
        ("within 20 %", sum(error <= 0.2 for error in errors) / len(errors), _share(errors) >= 0.9),
        ("intervals that hold the truth", _mean(p.covered for p in pairs), _mean(p.covered for p in pairs) >= 0.9),
        ("best two in their true order", _mean(ordered), _mean(ordered) >= 0.9),
    )
    for name, value, holds in figures:
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.1%}"
        print(f"{'ok ' if holds else 'OFF'}  {name}: {shown}")
    return 0 if all(holds for _, _, holds in figures) else 1


def _share(errors: list[float]) -> float:
    return sum(error <= 0.2 for error in errors) / len(errors)


def _mean(values: object) -> float:
    found = [bool(value) for value in values]  # type: ignore[attr-defined]
    return sum(found) / len(found)


if __name__ == "__main__":
    sys.exit(main())
