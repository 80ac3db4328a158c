"""Correct training code that a hasty verdict would stop or blame."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.examine.one_script import ExamineRequest, examine
from tests.faults.cases import NORM, on_loader
from tests.faults.script import training_script, whole_script

_SMALL_HABITS = """
if rank != 0: dist.barrier()
if rank == 0: dist.barrier()
objects = [None, None]
dist.all_gather_object(objects, 'x' * (10 + 90 * rank))
groups = [dist.new_group([0]), dist.new_group([1])]
dist.all_reduce(value, group=groups[rank])
"""
_SMALL_HABITS_IN_A_STEP = """
if rank == 0:
    print(step)
    model.module(x)
    with torch.no_grad(): model(x)
for name in ["a", "b"] if rank else ["b", "c"]: dist.all_reduce({name: value.clone()}[name])
stats = {"loss": value.clone(), "hits": value + 1}
for statistic in stats.values(): dist.all_reduce(statistic)
if step == 2: continue
"""
_WIDE_EVALUATION = """
if step == 3:
    if rank == 0:
        end = time.monotonic() + 20
        while time.monotonic() < end: sum(range(10_000))
    dist.barrier()
"""
_ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
"""
_CHECKPOINT = """
import torch.distributed.checkpoint as dcp
dcp.save({"model": model.state_dict(), "own": {"of": torch.ones(3 + rank)}}, checkpoint_id="checkpoint")
"""
_GATHERED = """
gathered = [None, None] if rank == 0 else None
dist.gather_object({"loss": float(step), "of": "x" * 50 * (rank + 1)}, gathered)
"""
_BRANCHES = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)
    def forward(self, x, left):
        return self.left(x) if left else self.right(x)
branches = DDP(Branches(), find_unused_parameters=True)
"""
_ASYNC = """
works = [dist.all_reduce(torch.ones(100), async_op=True) for _ in range(4)]
time.sleep(0.6 * rank)
for work in works: work.wait()
"""
_GAN = """
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    generator, critic = DDP(nn.Linear(4, 8)), DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.Adam(critic.parameters())
    for step in range(5):
        fake = generator(torch.randn(6, 4))
        second.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.randn(6, 8)).mean()).backward()
        second.step()
        first.zero_grad()
        for parameter in critic.parameters(): parameter.requires_grad_(True)
        (-critic(fake).mean()).backward()
        first.step()
    dist.destroy_process_group()
main()
"""
_PAUSED = """
if rank == 1 and step == 3:
    import subprocess
    resume = f"sleep 3; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", resume])
    os.kill(os.getpid(), signal.SIGSTOP)
"""
_ASKS_FOR_LONG = """
def prepare():
    end = time.monotonic() + 9
    while time.monotonic() < end: sum(range(10_000))
    with open("ready.new", "w") as file: file.write("yes")
    os.replace("ready.new", "ready")
if step == 3:
    if rank == 0:
        threading.Thread(target=prepare).start()
    else:
        while not os.path.exists("ready"): time.sleep(0.05)
    dist.barrier()
"""

HEALTHY: dict[str, str] = {
    "small habits": training_script(after=_SMALL_HABITS, within=_SMALL_HABITS_IN_A_STEP),
    "rank 0 evaluates for 20 s": training_script(within=_WIDE_EVALUATION),
    "a save of 10 s": training_script(within="if step == 3:\n    if rank == 0: time.sleep(10)\n    dist.barrier()"),
    "a rank polls for what a thread of its peer makes for 9 s": training_script(within=_ASKS_FOR_LONG),
    "slow dataset workers on one rank": on_loader(
        workers="2", sample="time.sleep(0.4 if index % 2 else 0)", epoch="sampler.set_epoch(epoch)"
    ),
    "joined uneven loaders": whole_script(
        """
        def main():
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            model = DDP(nn.Linear(8, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(TensorDataset(torch.randn(16 - 8 * rank, 8) + rank), 4)
            with model.join():
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
            dist.destroy_process_group()
        main()
        """
    ),
    "ZeRO": training_script(after_wrap=_ZERO),
    "dcp.save": training_script(after=_CHECKPOINT),
    "gather_object": training_script(between=_GATHERED),
    "sub-groups": training_script(
        after_wrap="own = [dist.new_group([0]), dist.new_group([1])][rank]\npair = dist.new_group([0, 1])",
        within="dist.all_reduce(value, group=own)\nif rank == 1: dist.all_reduce(value, group=own)\n"
        "dist.all_reduce(value, group=pair) if step < 2 else None",
    ),
    "other branches, find_unused_parameters": training_script(
        after_wrap=_BRANCHES,
        between="loss = loss + branches(x, (step + rank) % 2 == 0).sum()",
    ),
    "async collectives": training_script(within=_ASYNC),
    "a GAN with two models": whole_script(_GAN),
    "SIGSTOP for 3 s, then continued": training_script(within=_PAUSED),
    "buffers, validation on all ranks": training_script(NORM, within="with torch.no_grad(): model(x)"),
}

QUICK = ("small habits", "joined uneven loaders", "a GAN with two models")
"""Also run by the tests."""


def examine_healthy(script: str, folder: Path, *, python: str | None = None, time_limit_s: float | None = None) -> str:
    """Examine a healthy script in an empty working directory; what was wrongly said of it, empty when nothing was."""
    (folder / "train.py").write_text(script)
    examination = examine(ExamineRequest(target="train.py", python=python, time_limit_s=time_limit_s))
    found = [finding for finding in examination.findings if finding.severity.value != "advice"]
    if found or examination.exit_code != 0:
        said = "; ".join(f"{finding.code} {finding.title}" for finding in found)
        return said or f"exit code {examination.exit_code:d}: {examination.rehearsal.reason}"
    return ""
