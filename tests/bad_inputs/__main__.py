"""Gives many random bad inputs to the command: ``python -m tests.bad_inputs [--seed N] [--count N] [--first N]``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial

from tests.bad_inputs.cases import case
from tests.bad_inputs.judge import AT_MOST_S, answered, slowness
from tests.scratch import scratch_directory


def main() -> int:
    """Print each wrong answer and a summary; 1 when there was one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    codes: Counter[int | None] = Counter()
    wrong, slowest = 0, 0.0
    with scratch_directory() as folder:
        for number in range(options.first, options.first + options.count):
            scratch = folder / str(number)
            scratch.mkdir()
            made, answer = answered(partial(case, number, options.seed), scratch)
            problems = list(answer.problems)
            seconds = answer.seconds
            if seconds > AT_MOST_S:
                seconds /= slowness()
                if seconds > AT_MOST_S:
                    problems.append(f"took {answer.seconds:.1f} s")
            if seconds > slowest:
                slowest = seconds
                print(f"{number}: the slowest so far, {seconds:.1f} s: {str(made.arguments)[:200]}", flush=True)
            codes[answer.code] += 1
            if problems:
                wrong += 1
                print(f"{number}: {'; '.join(problems)}")
                print(f"    {str(made)[:600]}")
                print(f"    {answer.stderr[-1500:].decode(errors='replace')}", flush=True)
    answers = ", ".join(f"{count} with exit code {code}" for code, count in sorted(codes.items(), key=str))
    print(f"{options.count} bad inputs, seed {options.seed}: {wrong} wrong answers, slowest {slowest:.1f} s; {answers}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
