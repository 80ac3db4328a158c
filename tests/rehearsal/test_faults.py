"""One injected fault, one finding: on real ranks, with the right code, line and culprit."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import psutil
import pytest

from ddpdoctor.examination import Examination
from ddpdoctor.examine import ExamineRequest, examine

from .conftest import HEAD

FRAME = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x, both=True):
        return self.second(self.first(x)) if both else self.first(x)

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = torch.ones(2)
    BEFORE
    for step in range(6):
        both = True
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        WITHIN
        loss = model(x, both).sum()
        BETWEEN
        loss.backward()
        optimizer.step()
    AFTER
    dist.destroy_process_group()

main()
"""

FAULTS = {
    "extra collective on rank 0": ("within", "if rank == 0 and step == 4: dist.all_reduce(value)  # here", "DDP301", 0),
    "missing collective on rank 1": (
        "within",
        "if rank == 0 or step < 2: dist.all_reduce(value)  # here",
        "DDP301",
        None,
    ),
    "extra barrier at the end": ("after", "if rank == 0: dist.barrier()  # here", "DDP306", None),
    "another shape": ("within", "dist.all_reduce(torch.ones(2 + rank))  # here", "DDP304", None),
    "another dtype": ("within", "dist.all_reduce(value.double() if rank else value)  # here", "DDP304", None),
    "another operation": (
        "within",
        "dist.all_reduce(value, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)  # here",
        "DDP304",
        None,
    ),
    "another root": ("within", "dist.broadcast(value, src=rank)  # here", "DDP304", None),
    "skipped step on rank 1": ("between", "if rank == 1 and step == 2: continue", "DDP312", None),
    "early return": ("within", "if rank == 1 and step == 2: return", "DDP306", 1),
    "exit with a code": ("within", "if rank == 1 and step == 2: sys.exit(3)", "DDP306", 1),
    "os._exit": ("within", "if rank == 1 and step == 2: os._exit(0)", "DDP306", 1),
    "SIGKILL": ("within", "if rank == 1 and step == 2: os.kill(os.getpid(), 9)", "DDP306", 1),
    "exception": ("within", "if rank == 1 and step == 2: raise ValueError('batch 17')  # here", "DDP706", 1),
    "a rank sleeps": ("within", "if rank == 1 and step == 2: time.sleep(10_000)  # here", "DDP305", 1),
    "a C call holds the interpreter": (
        "within",
        "if rank == 1 and step == 2: __import__('ctypes').PyDLL(None).sleep(10_000)  # here",
        "DDP305",
        1,
    ),
    "a lock is never released": (
        "within",
        "if rank == 1 and step == 2: lock = __import__('threading').Lock(); lock.acquire(); lock.acquire()  # here",
        "DDP305",
        1,
    ),
    "unused on one rank": ("within", "both = not (rank == 1 and step == 2)", "DDP201", 1),
    "new_group on a subset": ("before", "if rank == 0: dist.new_group([0, 1])  # here", None, None),
}

HEALTHY = {
    "barriers in turn": ("before", "if rank != 0: dist.barrier()\n    if rank == 0: dist.barrier()"),
    "rank 0 prints": ("within", "if rank == 0: print(step)"),
    "both skip": ("between", "if step == 2: continue"),
    "rank 0 looks at the bare model": ("within", "if rank == 0: model.module(x)"),
    "rank 0 runs DDP without buffers": ("within", "if rank == 0:\n            with torch.no_grad(): model(x)"),
    "ragged gather": (
        "after",
        "objects = [None, None]\n    dist.all_gather_object(objects, 'x' * (10 + 90 * rank))",
    ),
    "sub-group of one": (
        "before",
        "groups = [dist.new_group([0]), dist.new_group([1])]\n    dist.all_reduce(value, group=groups[rank])",
    ),
}


def _examine(place: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Examination:
    text = textwrap.dedent(FRAME)
    for name in ("BEFORE", "WITHIN", "BETWEEN", "AFTER"):
        text = text.replace(name, line if name.lower() == place else "pass")
    (folder / "train.py").write_text(HEAD + text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    return examine(ExamineRequest(target="train.py", time_limit_s=180.0))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_once_and_named_rightly(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, line, code, culprit = FAULTS[fault]
    started = time.monotonic()
    examination = _examine(place, line, tmp_path, monkeypatch)
    assert time.monotonic() - started < 120
    errors = [finding for finding in examination.findings if finding.severity.value == "error"]
    assert len(errors) == 1, [finding.title for finding in errors]
    (finding,) = errors
    if code is not None:
        assert finding.code == code, finding.title
    if culprit is not None:
        assert finding.ranks == (culprit,), finding.title
    if "# here" in line:
        lines = (tmp_path / "train.py").read_text().splitlines()
        number = next(number for number, text in enumerate(lines, 1) if "# here" in text)
        places = {location.line for location in finding.locations}
        places |= {frame.line for fact in finding.evidence for frame in fact.stack}
        assert number in places, finding
    assert examination.exit_code == 1
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize("habit", HEALTHY)
def test_correct_code_is_left_alone(habit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, line = HEALTHY[habit]
    examination = _examine(place, line, tmp_path, monkeypatch)
    assert examination.findings == ()
    assert examination.exit_code == 0, (examination.rehearsal, examination.outcomes)
