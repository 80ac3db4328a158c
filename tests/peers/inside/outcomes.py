"""A plugin of pytest that writes each test's outcome, with the worker of pytest-xdist that ran it."""

import json
import os


def pytest_runtest_logreport(report):
    """Write the outcome of a test's call, or of a set-up or tear-down that is not simply over."""
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = f": {crash.message.split(':')[0].split('(')[0]}" if crash is not None and report.failed else ""
    worker = getattr(getattr(report, "node", None), "gateway", None)
    with open(os.environ["PEERS_OUTCOMES"], "a") as file:
        where = worker.id if worker is not None else ""
        file.write(json.dumps([report.nodeid, where, f"{report.outcome}{why[:60]}"]) + "\n")
