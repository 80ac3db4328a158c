"""Records the logs of the failing jobs with any Python that has torch: ``python -m tests.autopsy.jobs.record PYTHON``.

Each log lands gzipped in ``tests/autopsy/logs`` under the version of torch and the name of the job. Paths of the
machine are replaced by neutral ones of the same form; nothing else is changed.
"""

from __future__ import annotations

import gzip
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.autopsy.cases import JOBS, Recorded

HERE = Path(__file__).parent
LOGS = HERE.parent / "logs"


def main(python: str, names: list[str]) -> None:
    """Run the jobs (all, or those that are named) and keep what they print."""
    version = subprocess.check_output((python, "-c", "import torch; print(torch.__version__.split('+')[0])"), text=True)
    LOGS.mkdir(exist_ok=True)
    for job in JOBS:
        if names and job.name not in names:
            continue
        text = neutral(recorded(python, job), python)
        path = LOGS / f"torch{version.strip()}_{job.name}.log.gz"
        path.write_bytes(gzip.compress(text, mtime=0))
        print(path.name, len(text), "bytes", flush=True)


def recorded(python: str, job: Recorded) -> bytes:
    """What one job prints, to both streams."""
    with tempfile.TemporaryDirectory() as directory, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] if job.taken_port else free_port()
        words = [word.format(port=port, logs=directory) for word in job.launcher]
        launcher = [python, "-m", *words] if words else [python]
        command = [*launcher, str(HERE / job.script), job.job, *job.arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": directory, "OMP_NUM_THREADS": "1", **job.environment}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=directory
        ) as process:
            begun = b""
            if job.signal:
                assert process.stdout is not None
                while b"joined" not in begun:
                    begun += process.stdout.readline()
                process.send_signal(job.signal)
            try:
                text, _ = process.communicate(timeout=120)
                text = begun + text
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                text, _ = process.communicate()
        for path in sorted(Path(directory).rglob("*.log")):
            text += f"==> {path.relative_to(directory)} <==\n".encode() + path.read_bytes()
    return text.replace(directory.encode(), b"/home/user/run")


def neutral(text: bytes, python: str) -> bytes:
    """The same with paths that say nothing of this machine."""
    prefix = str(Path(python).parent.parent)
    base = subprocess.check_output((python, "-c", "import sys; print(sys.base_prefix)"), text=True).strip()
    replaced = {prefix: "/opt/conda", base: "/usr", str(HERE): "/home/user/job", socket.gethostname(): "localhost"}
    for own, other in replaced.items():
        text = text.replace(own.encode(), other.encode())
    return text


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
