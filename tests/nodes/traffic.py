"""What an agent sends: ``python -m tests.nodes.traffic [SECONDS]`` watches a real job of two ranks, and forwards it.

Prints bytes a second and rank, and how narrow the bounds of the clocks became.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpdoctor.launch.environment import observed
from ddpdoctor.monitor.live_run import LiveRun
from ddpdoctor.monitor.nodes.agent import Agent
from ddpdoctor.monitor.nodes.head import Head
from ddpdoctor.record.reader import read_plan
from tests.jobs_of_tests import kill_marked, marked
from tests.nodes.jobs import SCRIPT

RANKS = 2
WINDOW_NS = 60_000_000_000


def main(seconds: float) -> None:
    """Watch, forward, and print the figures."""
    with tempfile.TemporaryDirectory(prefix="traffic-", ignore_cleanup_errors=True) as made:
        directory = Path(made)
        script, run = directory / "train.py", directory / "run"
        script.write_text(SCRIPT)
        launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
        environment = {**marked(os.environ, directory), **observed(run, os.environ), "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen((*launch, str(script), "comm-bound", "100000"), env=environment, cwd=directory)
        head = Head("127.0.0.1")
        agent = Agent(head.meeting)
        try:
            while not (run / "job.json").exists() or not list(run.glob("steps-*.ring")):
                time.sleep(0.2)
            live = LiveRun(run, read_plan(run))
            began_s = first_bytes = steps = 0.0
            until_s = time.monotonic() + 10_000
            while time.monotonic() < until_s:
                live.look(time.time_ns(), WINDOW_NS)
                agent.offer(live.own_record, is_quiet=live.is_quiet, ended=False, exit_code=None)
                time.sleep(1.0)
                made_steps = min((track.step[-1] for track in live.own_record.step_tracks if len(track)), default=0)
                if not began_s and agent.sent_updates > 3 and made_steps:
                    began_s, first_bytes, steps = time.monotonic(), agent.sent_bytes, made_steps
                    until_s = began_s + seconds
            took_s = time.monotonic() - began_s
            rate, pace = (agent.sent_bytes - first_bytes) / took_s / RANKS, (made_steps - steps) / took_s
            clock = agent.clock()
            print(f"{rate:,.0f} bytes a second and rank at {pace:.1f} steps/s, {rate / pace:,.0f} a step")
            print(f"the first updates had {first_bytes:,.0f} bytes in all")
            print(f"clocks within {(clock.error_ns or 0) / 1e3 if clock else -1:,.0f} us")
            live.close()
        finally:
            agent.close()
            head.close()
            kill_marked(directory)
            job.wait()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
