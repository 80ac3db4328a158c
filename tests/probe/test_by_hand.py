"""A line of Python has the effect of the environment; a torch that lacks private names is measured without them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddpdoctor.probe.torch_compat import Capabilities
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job, StreamState
from tests.monitor.watched import HEAD, MOST_S

SCRIPT = """
import ddpdoctor
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        dist.barrier()
train(3)
c10d, loaders = torch._C._distributed_c10d, torch.utils.data.dataloader
del c10d._dump_fr_trace
if rank == 1:
    for owner, name in (
        (loaders, "_BaseDataLoaderIter"),
        (c10d, "Logger"),
        (c10d.Reducer, "_set_ddp_runtime_logging_sample_rate"),
        (DDP, "_sync_buffers"),
        (c10d, "_dump_fr_trace_json"),
    ):
        delattr(owner, name)
with ddpdoctor.watching():
    train(5)
train(2)
assert ddpdoctor.watch(model) is model
train(6)
os._exit(0)
"""


def test_a_line_in_the_script_watches_it_with_what_this_torch_offers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_S)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "state" / "ddpdoctor" / "runs").iterdir()
    assert run.stat().st_mode & 0o777 == 0o700
    assembly = Assembly(run)
    assembly.poll()
    assembly.poll()
    record = assembly.record(Job(kind="run", world_size=2))
    whole, poor = record.step_tracks
    assert list(whole.step) == list(poor.step) == list(range(1, 12))
    assert all(length > 0 for length in (*whole.backward_ns, *poor.backward_ns))
    assert set(poor.exposed_ns) == {-1}
    assert [heartbeat.enqueued >= 0 for heartbeat in record.heartbeats] == [True, False]
    assert assembly.faults == []
    assert set(assembly.live.lacks) == {
        "_BaseDataLoaderIter",
        "_next_index",
        "Logger",
        "_set_ddp_runtime_logging_sample_rate",
        "_sync_buffers",
        "_dump_fr_trace",
        "_dump_fr_trace_json",
    }
    reason = "before torch 2.8 no flight recorder holds the collectives of gloo"
    assert record.stream("collectives") == StreamState("absent", reason)


def test_a_torch_without_work_and_compiler_is_said_to_lack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert Capabilities(torch).missing == {}
    monkeypatch.delattr(torch._C._distributed_c10d, "Work")
    monkeypatch.delattr(torch.compiler, "is_dynamo_compiling")
    lacking = Capabilities(torch)
    assert set(lacking.missing) == {"Work.wait", "is_dynamo_compiling"}
    assert lacking.work_class is None and not lacking.is_compiling()
