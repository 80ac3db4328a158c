"""How long a prediction takes from a run of 1,000 steps on 8 ranks: fitting the model and one change, and the table.

CPU time of this process, the median of five; ``python -m tests.benchmarks.what_if_cost`` exits with 1 when one change
takes longer than a second. The whole table, with combinations and curves, stands beside it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from ddpdoctor.what_if.answer import what_if
from ddpdoctor.what_if.settings import parse
from tests.what_if.records import EVEN, MEGABYTE, bucketed, record_of

RANKS, STEPS, BUCKETS, RUNS = 8, 1_000, 20, 5
BOUND_S = 1.0


def main() -> int:
    """Print the figures; 1 when the bound is exceeded."""
    slower = {3: {"forward": 12.0}}
    job = bucketed(RANKS, STEPS, slower=slower, durations={**EVEN, "data_wait": 8.0})
    layout, parameters = (2 * MEGABYTE,) * BUCKETS, (MEGABYTE // 4,) * 8 * BUCKETS

    def median_s(predict: Callable[[], object]) -> float:
        took = []
        for _ in range(RUNS):
            began = time.process_time()
            predict()
            took.append(time.process_time() - began)
        return statistics.median(took)

    # A record of its own each time: what is worked out of one is remembered.
    records = iter([record_of(job, layout=layout, parameters=parameters) for _ in range(2 * RUNS)])
    one_s = median_s(lambda: what_if(next(records), parse(["bucket_cap_mb=10"])))
    table_s = median_s(lambda: what_if(next(records)))
    print(f"predictions from {STEPS:,} steps of {RANKS} ranks with {BUCKETS} buckets, CPU time, median of {RUNS}")
    print(f"  one change        {one_s:6.2f} s  (at most {BOUND_S:.0f} s)")
    print(f"  the whole table   {table_s:6.2f} s")
    return int(one_s > BOUND_S)


if __name__ == "__main__":
    sys.exit(main())
