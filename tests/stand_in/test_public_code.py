"""What public training scripts ask of CUDA: types in annotations, devices by number, GPUs that are counted first."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec
import pytest
import torch

from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.another_try import another_try, rehearse_until_shown
from ddpdoctor.launch.rehearsal_plan import time_limit_s
from ddpdoctor.launch.request import RehearsalRequest
from ddpdoctor.probe.stand_in.cuda_module import Devices
from ddpdoctor.record.model import Job, Rank, RankException, RunRecord, StopReason
from ddpdoctor.record.streams.training import Loader, Pass
from tests.check_command import check

DEVICES = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

changed = [name for name in os.environ["CLASSES"].split() if not isinstance(getattr(torch.cuda, name), type)]
assert not changed, changed

def graphed(graph: torch.cuda.CUDAGraph | None = None, pool: torch.cuda.MemPool | None = None) -> bool:
    return isinstance(graph, torch.cuda.CUDAGraph)

def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch._C._cuda_setDevice(rank)
    assert torch._C._cuda_getDevice() == torch.cuda.current_device() == rank
    dist.init_process_group("nccl")
    model = torch.nn.Linear(4, 4).to(device=rank).to(rank).to(device=f"cuda:{rank}", dtype=torch.float32)
    assert not graphed(model)
    model = DDP(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(torch.randn(3, 4, device=rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

main()
"""
COUNTS = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main():
    AT_FIRST
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    model = DDP(torch.nn.Linear(4, 1).to(kind))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(256, 4))
    for (batch,) in DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=False)):
        batch = batch.to(kind)
        IN_A_STEP
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
FEW_GPUS = "if torch.cuda.device_count() < 2: print('Unable to locate sufficient 2 gpus'); sys.exit()"


def counting(directory: Path, at_first: str, in_a_step: str) -> None:
    text = textwrap.dedent(COUNTS).replace("AT_FIRST", at_first).replace("IN_A_STEP", in_a_step)
    (directory / "train.py").write_text(text)


def test_classes_stay_classes_and_devices_may_be_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEVICES)
    classes = " ".join(name for name in dir(torch.cuda) if isinstance(getattr(torch.cuda, name), type))
    code, report = check("train.py", cwd=tmp_path, CLASSES=classes)
    assert (code, report["rehearsal"]["steps"]) == (0, 3), report["rehearsal"]


def test_a_script_that_counts_gpus_first_gets_them_pretended(tmp_path: Path) -> None:
    counting(tmp_path, FEW_GPUS, "pass")
    code, report = check("train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["device"], rehearsal["status"]) == (0, "stand-in", "completed"), rehearsal
    assert any("rehearsed again with the CPU standing in for a GPU" in note for note in rehearsal["notes"])


NAMES_GPUS = "assert torch.cuda.is_available() and torch.cuda.device_count() >= 4, 'invalid CUDA device requested'"


def test_a_script_that_names_the_gpus_of_its_job_gets_them_all(tmp_path: Path) -> None:
    counting(tmp_path, NAMES_GPUS, "pass")
    launch = ("--", "python", "-m", "torch.distributed.run", "--nproc-per-node=4", "train.py")
    code, report = check("--device", "stand-in", *launch, cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], rehearsal["ranks"]) == (0, "completed", 2), rehearsal
    assert any("with 2 GPUs" in note and "the 4 GPUs of the job's node" in note for note in rehearsal["notes"])


SPAWNS_FOR_ITS_GPUS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def main(rank, ranks):
    torch.cuda.set_device(f"cuda:{rank}")
    dist.init_process_group("nccl", "tcp://127.0.0.1:29517", rank=rank, world_size=ranks)
    model = DDP(torch.nn.Linear(4, 4).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(torch.randn(3, 4, device="cuda")).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = "5,6,7"
    mp.spawn(main, args=(3,), nprocs=3)
"""


def test_a_script_that_spawns_a_rank_for_each_gpu_that_it_names_gets_them_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS_FOR_ITS_GPUS)
    _, report = check("--device", "stand-in", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["ranks"], rehearsal["steps"]) == ("completed", 3, 3), rehearsal
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"], report["findings"]
    assert any("the 3 GPUs of the job's node" in note for note in rehearsal["notes"])


APEX = """
import os
import torch, torch.distributed as dist
IMPORT

def main():
    dist.init_process_group("gloo")
    model = apex.parallel.convert_syncbn_model(torch.nn.Sequential(FusedLayerNorm(4), torch.nn.Linear(4, 1)))
    model, optimizer = amp.initialize(model, FusedSGD(model.parameters(), lr=0.1, set_grad_none=True), opt_level="O1")
    model = DDP(model, delay_allreduce=True)
    for step in range(3):
        loss = model(torch.randn(8, 4)).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save({"amp": amp.state_dict()}, "model.pt")
    dist.destroy_process_group()

main()
"""
IMPORTS_APEX = """import apex
from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedSGD
from apex.parallel import DistributedDataParallel as DDP
"""
REFUSES_WITHOUT = "\n".join(
    [
        "try:",
        *(f"    {line}" for line in IMPORTS_APEX.splitlines()),
        "except ImportError:",
        "    raise ImportError('No')",
    ]
)


ASSERTS_IT = "\n".join(
    [
        *("try:", *(f"    {line}" for line in IMPORTS_APEX.splitlines()), "except ImportError:", "    amp = None"),
        'assert amp is not None, "amp not installed!"',
    ]
)


@pytest.mark.parametrize("imports", [IMPORTS_APEX, REFUSES_WITHOUT, ASSERTS_IT], ids=["plain", "refuses", "asserts"])
def test_a_script_that_needs_apex_gets_torchs_classes_in_its_place(tmp_path: Path, imports: str) -> None:
    (tmp_path / "train.py").write_text(APEX.replace("IMPORT", imports))
    code, report = check("train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], rehearsal["steps"]) == (0, "completed", 3), rehearsal
    assert "pretended: apex (without mixed precision and with torch's DistributedDataParallel)" in rehearsal["notes"]
    assert any(note.startswith("apex is not installed; rehearsed again") for note in rehearsal["notes"])


GOES_WITHOUT_APEX = """try:
        import apex
        way = "apex"
    except ImportError:
        way = "torch"
    assert way == "torch"
"""


def test_a_script_that_does_without_apex_is_rehearsed_without_it(tmp_path: Path) -> None:
    counting(tmp_path, GOES_WITHOUT_APEX, "pass")
    code, report = check("train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (0, "completed"), report["rehearsal"]


def test_no_package_is_pretended_where_nothing_may_be(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(APEX.replace("IMPORT", IMPORTS_APEX))
    code, report = check("--no-pretend", "train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (3, "failed"), report["rehearsal"]
    assert "apex" in report["rehearsal"]["reason"]


def test_a_step_that_splits_its_batch_is_rehearsed_with_whole_batches(tmp_path: Path) -> None:
    counting(tmp_path, "pass", "batch = batch.view(8, -1, 4).flatten(0, 1)")
    code, report = check("--device", "stand-in", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (code, rehearsal["status"], rehearsal["batch_size"]) == (0, "completed", None), rehearsal
    (note,) = (note for note in rehearsal["notes"] if note.startswith("with batches cut to 2 samples"))
    assert "invalid for input of size 8" in note


def test_a_step_that_fails_on_whole_batches_too_is_the_scripts_fault(tmp_path: Path) -> None:
    counting(tmp_path, "pass", "batch = batch.view(7, -1, 4)")
    code, report = check("--device", "stand-in", "train.py", cwd=tmp_path)
    assert (code, report["rehearsal"]["status"]) == (3, "failed"), report["rehearsal"]
    assert "size 128" in report["rehearsal"]["reason"]


@pytest.mark.parametrize(
    ("kind", "message", "again"),
    [
        ("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'", True),
        ("AssertionError", "Torch not compiled with CUDA enabled", True),
        ("ModuleNotFoundError", "No module named 'cuda_extension'", False),
        ("KeyError", "'image'", False),
    ],
)
def test_only_what_speaks_of_gpus_asks_for_pretended_ones(kind: str, message: str, again: bool) -> None:
    traceback = f'File "/gpu/train.py", line 3, in main\n    start()\n{kind}: {message}\n'
    raised = RankException(time_ns=1, type=kind, message=message, traceback=traceback)
    record = RunRecord(
        job=Job(kind="rehearsal", device="cpu"), ranks=(Rank(rank=0, end="raised", exceptions=(raised,)),)
    )
    request = RehearsalRequest(script=Path("/gpu/train.py"), may_use_gpus=True)
    found = another_try(request, record, RehearsalSection(status="failed", reason="it failed"))
    assert (found is not None and found.request.device == "stand-in") == again


def test_a_rank_that_others_wait_for_fails_like_one_that_nobody_does() -> None:
    raised = RankException(time_ns=1, type="AssertionError", message="Torch not compiled with CUDA enabled")
    ranks = (Rank(rank=0, end="raised", exceptions=(raised,)), Rank(rank=1, end="running"))
    stopped = RehearsalSection(status="stopped", reason="the ranks can no longer continue together")
    request = RehearsalRequest(script=Path("t.py"), may_use_gpus=True)
    reasons: dict[StopReason, bool] = {"proof": True, "time-limit": False}
    for reason, again in reasons.items():
        record = RunRecord(job=Job(kind="rehearsal", device="cpu", stop_reason=reason), ranks=ranks)
        assert (another_try(request, record, stopped) is not None) == again
    hang = RunRecord(job=Job(kind="rehearsal", device="cpu", stop_reason="proof"), ranks=ranks[1:])
    assert another_try(request, hang, stopped) is None


def sized(message: str, reason: StopReason = "") -> tuple[RunRecord, RehearsalSection]:
    """A rehearsal with batches cut to two samples that failed, or one that was stopped, after ``reason``."""
    raised = RankException(time_ns=1, type="RuntimeError", message=message)
    record = RunRecord(
        job=Job(kind="rehearsal", device="stand-in", batch_size="4", stop_reason=reason),
        ranks=(Rank(rank=0, end="raised", exceptions=(raised,)),),
        loaders=(Loader(rank=0, loader=0, batch_size=32),),
        passes=(Pass(rank=0, loader=0, ordinal=0),),
    )
    return record, RehearsalSection(status="stopped" if reason else "failed", reason=reason or message)


def test_whole_batches_that_a_cpu_cannot_train_leave_what_cut_ones_showed() -> None:
    runs = iter([sized("shape '[8, -1]' is invalid for input of size 4"), sized("", "time-limit")])
    section = rehearse_until_shown(RehearsalRequest(script=Path("t.py")), lambda request: next(runs)).section
    assert section.reason.startswith("shape '[8, -1]'")
    assert section.notes[0].endswith("rehearsed again with whole batches, and this machine is too small for it")


@pytest.mark.parametrize(("first_s", "steps", "left_s"), [(10.0, 1, 90.0), (80.0, 1, 50.0), (80.0, 0, 100.0)])
def test_a_second_rehearsal_gets_what_the_first_left_of_the_time_by_training(
    first_s: float, steps: int, left_s: float
) -> None:
    record, section = sized("shape '[8, -1]' is invalid for input of size 4")
    requests: list[RehearsalRequest] = []

    def once(request: RehearsalRequest) -> tuple[RunRecord, RehearsalSection]:
        requests.append(request)
        return (
            (record, msgspec.structs.replace(section, seconds=first_s, steps=steps))
            if len(requests) == 1
            else sized("", "slow")
        )

    rehearse_until_shown(RehearsalRequest(script=Path("t.py"), time_limit_s=100.0), once)
    assert [time_limit_s(request, 2) for request in requests] == [100.0, left_s]


def test_variables_of_slurm_are_told_to_who_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "assert 'SLURM_JOB_ID' not in os.environ\n"
        "rank, size = int(os.environ['SLURM_PROCID']), int(os.environ['SLURM_NTASKS'])\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', rank=rank, world_size=size)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.randn(8, 4)).mean().backward()\n"
        "optimizer.step()\n"
        "dist.destroy_process_group()\n"
    )
    _, report = check("--time-limit", "240", "train.py", cwd=tmp_path)
    rehearsal = report["rehearsal"]
    assert (rehearsal["status"], rehearsal["steps"], rehearsal["ranks"]) == ("completed", 1, 2), rehearsal
    assert any("rehearsed again with the variables that Slurm sets" in note for note in rehearsal["notes"])


def test_a_tensor_that_is_not_contiguous_is_so_with_whole_batches_too() -> None:
    runs = iter([sized("view size is not compatible with input tensor's size and stride. Use .reshape(...)")])
    section = rehearse_until_shown(RehearsalRequest(script=Path("t.py")), lambda request: next(runs)).section
    assert not section.notes


@pytest.mark.parametrize(("known", "seen"), [(False, 2), (True, 0)])
def test_gpus_that_a_job_names_are_there_unless_the_layout_says_how_many(
    known: bool, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert Devices(torch, 2, lambda index, how: None, known=known).count() == seen
