"""Prints the figures of the autopsy: ``python -m tests.autopsy [DIRECTORY | TABLE]``.

Without an argument the logs of our own jobs are judged, with a directory the logs in it that are named
``torch<version>_<scenario>.log``. Tables: ``false_deaths`` are logs in which no one died, ``speed`` reads 1 GB,
``dumps`` runs beside torchfrtrace, ``live`` looks at 21 jobs that hang, ``catalogue [TORCH | NCCL ...]`` lists messages
of torch and NCCL that no row classifies, and those of other versions that its lists lack. The exit code is 1 where a
bound is not kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.autopsy.given import expected_of
from tests.autopsy.judge import LOGS, Judged, expected_of_own, judge_all

RIGHT = 0.97
"""The share of logs whose first cause has to be right."""


def main(arguments: list[str]) -> int:
    """Run what is asked for."""
    if arguments[:1] == ["false_deaths"]:
        from tests.autopsy.false_deaths import main as false_deaths

        return false_deaths()
    if arguments[:1] == ["speed"]:
        from tests.autopsy.speed import main as speed

        return speed()
    if arguments[:1] == ["dumps"]:
        from tests.autopsy.dump_benchmark import main as dumps

        return dumps()
    if arguments[:1] == ["catalogue"]:
        from tests.autopsy.catalogue import main as catalogue

        return catalogue(arguments[1:])
    if arguments[:1] == ["live"]:
        from tests.autopsy.live_benchmark import main as live

        return live()
    if arguments:
        return _print(judge_all(Path(arguments[0]).glob("torch*.log*"), expected_of))
    return _print(judge_all(LOGS.glob("*.log.gz"), expected_of_own))


def _print(judged: list[Judged]) -> int:
    for one in judged:
        if not one.right:
            said = "nothing" if one.cause is None else f"{one.cause.code} {one.cause.ranks}: {one.cause.title}"
            print(f"wrong  {one.name}: {said}; right would be {one.expected.codes} {one.expected.ranks}")
    right, certain = sum(one.right for one in judged), sum(one.wrong_and_certain for one in judged)
    doubtful = sum(one.cause is not None and bool(one.cause.doubt) for one in judged)
    share = right / max(1, len(judged))
    print(
        f"{right} of {len(judged)} first causes right ({share:.1%}, bound {RIGHT:.0%}); "
        f"{certain} wrong and stated as certain (bound 0); {doubtful} stated with a doubt"
    )
    return 0 if judged and share >= RIGHT and not certain else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
