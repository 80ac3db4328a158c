"""Prints the fault table and the healthy bodies as the plugin judges them; exits with 1 when anything is wrong.

Names of faults as arguments choose some of them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

from tests.pytest_plugin.tables import run_faults, run_healthy
from tests.scratch import scratch_directory


def main(names: tuple[str, ...]) -> int:
    """Run both tables."""
    with scratch_directory() as directory:
        faults = directory / "faults"
        faults.mkdir()
        judged, left = run_faults(faults, names)
        for case in judged:
            print(f"{'ok' if not case.wrong else 'WRONG':6}{case.seconds:6.1f} s  {case.name}: {case.first_line[:150]}")
            if case.wrong:
                print(f"       {case.wrong}")
        red = sum(not case.wrong for case in judged)
        load = os.getloadavg()[0]
        print(f"faults: {red} of {len(judged)} red for their own reason; {len(left)} processes left; load {load:.1f}")
        if names:
            return int(red < len(judged) or bool(left))
        healthy = directory / "healthy"
        healthy.mkdir()
        session, leftovers = run_healthy(healthy)
        counted = Counter(session.outcomes.values())
        for name, outcome in session.outcomes.items():
            if outcome != "passed":
                print(f"WRONG  {name}: {session.messages.get(name, outcome)[:1500]}")
        total = sum(counted.values())
        load = os.getloadavg()[0]
        print(f"healthy: {counted['passed']} of {total} green; {len(leftovers)} processes left; load {load:.1f}")
        return int(red < len(judged) or counted["passed"] < total or total == 0 or bool(left or leftovers))


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
