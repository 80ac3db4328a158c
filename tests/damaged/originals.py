"""Makes what the table damages: two real runs on two ranks, dumps of torch's flight recorder, a baseline of the gate,
and logs of jobs that died.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

from tests.check_command import ROOT

LOGS = ROOT / "tests" / "autopsy" / "logs"
NAMED_LOGS = ("bad_sample", "other_shape", "killed_worker", "out_of_memory")
DUMPING = ROOT / "tests" / "autopsy" / "jobs" / "dumping.py"
SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(2048, 32), torch.randn(2048, 1))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    if "fail" in sys.argv and step == 60 and dist.get_rank():
        raise ValueError("a bad sample: " + "x" * 300)
dist.destroy_process_group()
"""
ERROR_FILE = (
    b'{"message": {"message": "KeyError: \'cat\'", "extraInfo": {"py_callstack": "Traceback (most recent call last):\\n'
    b"  File \\\"/job/train.py\\\", line 9, in main\\n    sample['cat']\\nKeyError: 'cat'\\n\", "
    b'"timestamp": "1795722131"}}}'
)


def make(directory: Path) -> None:
    """Make ``run``, ``died``, ``dumps``, ``logs``, ``baseline.json`` and ``train.py`` in an empty directory."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    (directory / "dumps").mkdir()
    state = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory / "state"), "OMP_NUM_THREADS": "1"}
    ours = [sys.executable, "-m", "ddpdoctor"]
    watched = [*ours, "profile", "--no-tui", "--nproc", "2", "--run-dir"]
    dumping = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(DUMPING)]
    jobs: tuple[tuple[list[str], dict[str, str]], ...] = (
        ([*watched, "run", "train.py"], {}),
        ([*watched, "died", "train.py", "fail"], {}),
        (dumping, {"DUMPS": str(directory / "dumps"), "TORCH_FR_BUFFER_SIZE": "100"}),
        ([*ours, "gate", "--update", "--baseline", "baseline.json", "train.py"], {}),
    )
    started = [
        subprocess.Popen(
            words, cwd=directory, env={**state, **more}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for words, more in jobs
    ]
    for process in started:
        process.wait(timeout=240)
    _make_logs(directory / "logs")
    missing = [
        name
        for name in ("run/job.json", "died/job.json", "dumps/dump_0", "baseline.json")
        if not (directory / name).exists()
    ]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} was not made")


def _make_logs(logs: Path) -> None:
    logs.mkdir()
    for name in NAMED_LOGS:
        packed = next(LOGS.glob(f"torch2.4.1_{name}.log.gz")).read_bytes()
        (logs / f"{name}.log.gz").write_bytes(packed)
        (logs / f"{name}.log").write_bytes(gzip.decompress(packed))
    (logs / "attempt_0" / "1").mkdir(parents=True)
    (logs / "attempt_0" / "1" / "error.json").write_bytes(ERROR_FILE)
