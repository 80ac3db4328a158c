"""A rank that waits for a worker of its loader is shown with the line at which that worker stands."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec

from ddpdoctor.diagnosis.divergence.divergence import find_divergence
from ddpdoctor.diagnosis.stacks import is_at_work, worker_stacks
from ddpdoctor.finding import Frame
from ddpdoctor.monitor.snapshot import StallSide, StallView
from ddpdoctor.record.model import RunRecord
from ddpdoctor.report.run.run_lines import RunLines
from tests.demo.job import demo_snapshot
from tests.monitor.watched import HEAD, job, watch

STUCK = """
import threading
HeartbeatThread = next(m for name, m in sys.modules.items() if name.endswith("live.heartbeat")).HeartbeatThread

# As on a slow machine, where the beats alone are more than a process that stands may use of a core.
beat = HeartbeatThread._beat
def slow_beat(self, **how):
    until = time.thread_time() + 0.005
    while time.thread_time() < until:
        pass
    beat(self, **how)
HeartbeatThread._beat = slow_beat

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return decode(index)

def decode(index):
    if index == 601:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    return torch.zeros(8)

model = DDP(nn.Linear(8, 1))
sampler = DistributedSampler(Images(), shuffle=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in DataLoader(Images(), batch_size=4, sampler=sampler, num_workers=2):
    optimizer.zero_grad()
    model(rows).sum().backward()
    optimizer.step()
"""


def _is_in(record: RunRecord, function: str) -> bool:
    facts = list(worker_stacks(record))
    return len(facts) == 1 and facts[0].stack[0].function.endswith(function)


def test_the_line_of_the_worker_that_a_rank_waits_for_is_told_while_the_job_runs(tmp_path: Path) -> None:
    with job(tmp_path, STUCK) as (_, run):
        # While a slow machine starts the workers, a rank waits for them, too.
        _, record = watch(run, lambda live, record: _is_in(record, "decode"))
    (fact,) = worker_stacks(record)
    script = (HEAD + textwrap.dedent(STUCK)).splitlines()
    line = max(number for number, text in enumerate(script, 1) if "lock.acquire()" in text)
    assert fact.rank == 1 and fact.text.startswith("rank 1 waits for its loader's worker, process ")
    assert fact.text.endswith(f"which is at train.py:{line} in decode")
    assert [frame.function.rpartition(".")[2] for frame in fact.stack] == ["decode", "__getitem__"], (
        "what the rank did is no part of it"
    )
    assert find_divergence(record) is not None


def test_a_worker_that_waits_for_numbers_is_not_at_work() -> None:
    loop = Frame("/lib/site-packages/torch/utils/data/_utils/worker.py", 1, "_worker_loop")
    below = Frame("/job/train.py", 20, "main")
    waits = [Frame(f"/lib/python3.11/{file}", 1, "f") for file in ("selectors.py", "multiprocessing/queues.py")]
    assert not is_at_work((*waits, loop, below))
    assert is_at_work((Frame("/job/data.py", 3, "__getitem__"), loop, below))


def test_what_becomes_known_of_a_standstill_is_said_once_more() -> None:
    side = StallSide(ranks=(1,), text="is at train.py:26", culprit=True)
    worker = StallSide(ranks=(1,), text="waits for its loader's worker, process 7, which is at data.py:9 in load")
    stall = StallView(title="rank 1 is stuck", since_ns=0, sides=(side,))
    snapshot = msgspec.structs.replace(demo_snapshot(0, 1_700_000_000_000_000_000), state="stalled", stall=stall)
    lines = RunLines("/job")
    assert any("STALLED: rank 1 is stuck" in line for line in lines.news(snapshot))
    again = msgspec.structs.replace(snapshot, stall=msgspec.structs.replace(stall, sides=(side, worker)))
    assert [line for line in lines.news(again) if "loader's worker" in line] == [
        "ddpdoctor:   rank 1 waits for its loader's worker, process 7, which is at data.py:9 in load"
    ]
    assert not any("loader's worker" in line for line in lines.news(again))
