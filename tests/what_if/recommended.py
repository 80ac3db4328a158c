"""Prints what is recommended for jobs beside what each value was measured to do; exits with 1 if it misses its bounds.

``python -m tests.what_if.recommended`` takes about ten minutes, and has to have the machine to itself: two ranks on two
cores. With the names of some jobs it is shorter. A pair is a job with a present value of a setting: a recorded run with
that value, what is recommended from it, and the medians of all values, measured in turns after the recorded runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median

import msgspec

from ddpdoctor.what_if.answer import LEAST_GAIN, what_if
from ddpdoctor.what_if.observed import observe
from tests.scratch import scratch_directory
from tests.what_if.measure import Done, run_rounds

SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "comm": ("bucket_cap_mb", (1, 2, 5, 10)),
    "near": ("bucket_cap_mb", (1, 5, 10, 25)),
    "far": ("bucket_cap_mb", (1, 2, 5, 25)),
    "gloo": ("bucket_cap_mb", (1, 5, 10, 25)),
    "cores": ("bucket_cap_mb", (1, 5, 10, 25)),
    "logged": ("bucket_cap_mb", (1, 5, 10, 25)),
    "wide": ("bucket_cap_mb", (1, 5, 10, 25)),
    "narrow": ("bucket_cap_mb", (1, 2, 5, 10)),
    "busy": ("bucket_cap_mb", (1, 5, 25)),
    "accumulate": ("bucket_cap_mb", (1, 2, 5)),
    "small": ("bucket_cap_mb", (0.01, 1)),
    "input": ("workers", (0, 1)),
    "decode": ("workers", (0, 1)),
    "crowded": ("workers", (0, 1)),
    "disk": ("workers", (0, 1)),
    "quick": ("workers", (0, 1)),
}
"""Of each job a setting, and all values of it that can be told apart: a larger cap makes one bucket as well."""
RANKS, STEPS, ROUNDS = 2, 28, 3
WITHIN = 0.05


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """A job with the present value of a setting, what is recommended, and what was measured."""

    job: str
    setting: str
    present: float
    recommended: float | None
    """None: the run does not tell, and nothing is recommended."""
    measured_ms: dict[float, float]
    cores: int

    @property
    def behind(self) -> float:
        """By how much a step with the recommended value is longer than with the best of those that fit the cores."""
        fitting = [took for value, took in self.measured_ms.items() if self.setting != "workers" or value <= self.cores]
        return self.measured_ms[self.present if self.recommended is None else self.recommended] / min(fitting) - 1.0

    @property
    def right(self) -> bool:
        """Within 5% of the best, and no more workers than there are cores for."""
        if self.recommended is None:
            return True
        return self.behind <= WITHIN and (self.setting != "workers" or self.recommended <= max(1, self.cores))


def main() -> int:
    parser = argparse.ArgumentParser(description="What is recommended, beside what was measured.")
    parser.add_argument("jobs", nargs="*", choices=[[], *SWEEPS], metavar="JOB", help=", ".join(SWEEPS))
    jobs = parser.parse_args().jobs or list(SWEEPS)
    print(f"load of the machine at the beginning: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'job':<12}{'setting':<15}{'present':>8}{'recommended':>13}{'behind best':>13}  measured ms", flush=True)
    began_s, found = time.monotonic(), list[Advised]()
    for job in jobs:
        for pair in advised(job):
            measured = ", ".join(f"{value:g}: {took:.1f}" for value, took in pair.measured_ms.items())
            print(
                f"{pair.job:<12}{pair.setting:<15}{pair.present:>8g}"
                f"{'none' if pair.recommended is None else f'{pair.recommended:g}':>13}{pair.behind:>13.1%}  "
                f"{measured}{'' if pair.right else '  OFF'}",
                flush=True,
            )
            found.append(pair)
    told = [pair for pair in found if pair.recommended is not None]
    right = sum(pair.right for pair in told)
    print(
        f"{right} of {len(told)} recommendations within {WITHIN:.0%} of the best, none of {len(found) - len(told)} "
        f"runs that do not tell; {time.monotonic() - began_s:.0f} s"
    )
    return 0 if right == len(told) and (len(told) >= 30 or len(jobs) < len(SWEEPS)) else 1


def advised(job: str) -> list[Advised]:
    """Train a job with every value: once for the record, then in turns for what they take."""
    setting, values = SWEEPS[job]
    specs = [f"{job}:{setting}={value:g}" for value in values]
    with scratch_directory() as directory:
        done = run_rounds(directory, RANKS, STEPS, specs, 1 + ROUNDS)
    recorded, later = done[: len(values)], done[len(values) :]
    measured = {
        value: median(own.step_ms for own in later if own.spec == spec)
        for value, spec in zip(values, specs, strict=True)
    }
    return [
        Advised(
            job=job,
            setting=setting,
            present=value,
            recommended=_among(values, recommended(own, setting, value)),
            measured_ms=measured,
            cores=observe(own.record).cores_per_rank,
        )
        for value, own in zip(values, recorded, strict=True)
    ]


def recommended(done: Done, setting: str, present: float) -> float | None:
    """Return the value that ``ddpdoctor what-if`` recommends.

    The present one where no other brings anything, None where it says that the run does not tell.
    """
    changes = [change for change in what_if(done.record).changes if setting in change.settings]
    if not changes or changes[0].speedup.value <= LEAST_GAIN:
        observed = observe(done.record)
        tells = setting == "workers" or (observed.fit.splits and not observed.is_crowded)
        return present if tells else None
    return float(changes[0].settings[setting]) if changes[0].recommended else None


def _among(values: tuple[float, ...], value: float | None) -> float | None:
    """The measured value that is the same: caps above the largest make one bucket, as that does."""
    return value if value is None or value < values[-1] else values[-1]


if __name__ == "__main__":
    sys.exit(main())
