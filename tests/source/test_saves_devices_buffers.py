from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.finding import Severity
from ddpdoctor.source.script.script import read_script
from tests.source.marked import check_marks, findings_of, written

SAVES = {
    "under a condition that is the same everywhere": """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        if args.save:
            torch.save(model.state_dict(), args.out)  # DDP601
        """,
    "guarded by a function that cannot be read": """
        from somewhere import is_main_process
        if is_main_process():
            torch.save(model.state_dict(), "model.pt")
        """,
    "guarded by a method that cannot be read": """
        from somewhere import logger
        if logger.should_save and logger.is_primary(model):
            torch.save(model.state_dict(), "model.pt")
        """,
    "path with a rank of an object that cannot be read": """
        from somewhere import Base

        class Saver(Base):
            def save(self):
                torch.save(model.state_dict(), f"model_{self.process_index}.pt")

        Saver().save()
        """,
    "as older examples guard it": """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        ngpus = torch.cuda.device_count()
        if not args.spawned or (args.spawned and args.number % ngpus == 0 and args.rank == 0):
            torch.save(model.state_dict(), "model.pt")
        """,
    "path with the time": """
        import time
        torch.save(model.state_dict(), f"model_{time.time()}.pt")
        """,
    "into memory": """
        import io
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        """,
    "path that cannot be read": """
        from somewhere import checkpoint_path
        torch.save(model.state_dict(), checkpoint_path(3))
        """,
    "in a function that nothing calls": """
        class Saver:
            def on_epoch_end(self, model, path):
                torch.save(model.state_dict(), path + "model.pt")
        """,
    "first rank of every node": """
        if int(os.environ["LOCAL_RANK"]) == 0:  # DDP501
            torch.save(model.state_dict(), "model.pt")
        """,
    "first rank of every node, one file a node": """
        if int(os.environ["LOCAL_RANK"]) == 0:
            torch.save(model.state_dict(), f"model_{os.environ['GROUP_RANK']}.pt")
        """,
    "first rank of every node prepares data": """
        if int(os.environ["LOCAL_RANK"]) == 0:
            os.makedirs("data", exist_ok=True)
        """,
}


@pytest.mark.parametrize("text", SAVES.values(), ids=SAVES)
def test_saves(tmp_path: Path, text: str) -> None:
    head = """
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(4, 4))
        """
    check_marks(tmp_path, head + text, "DDP501", "DDP601")


def test_a_script_without_ranks_may_save(tmp_path: Path) -> None:
    check_marks(tmp_path, 'torch.save(nn.Linear(4, 4).state_dict(), "model.pt")\n', "DDP601")


def test_the_parent_of_spawned_ranks_may_save(tmp_path: Path) -> None:
    check_marks(
        tmp_path,
        """
        def worker(rank, size):
            dist.init_process_group("gloo", rank=rank, world_size=size)
            DDP(nn.Linear(4, 4))
            if rank == 0:
                torch.save({}, "model.pt")

        if __name__ == "__main__":
            torch.save({}, "start.pt")
            mp.spawn(worker, args=(2,), nprocs=2)
            torch.save({}, "end.pt")
        """,
        "DDP601",
        "DDP501",
    )


KINDS = {
    "global rank in a device's name": """
        device = torch.device(f"cuda:{dist.get_rank()}")
        x = torch.ones(1).to(device)  # DDP501
        """,
    "global rank as device of a model": """
        rank = int(os.environ["RANK"])
        model = nn.Linear(4, 4).to(rank)  # DDP501
        """,
    "global rank from Slurm": """
        torch.cuda.set_device(int(os.environ["SLURM_PROCID"]))  # DDP501
        """,
    "global rank in device_ids": """
        model = DDP(nn.Linear(4, 4), device_ids=[dist.get_rank()])  # DDP501
        """,
    "local rank in the group": """
        local_rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("nccl", rank=local_rank, world_size=8)  # DDP501
        """,
    "ranks of a node as world": """
        size = int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=size)  # DDP501
        """,
    "a name that holds the local rank": """
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        DDP(nn.Linear(4, 4).to(rank), device_ids=[rank])
        """,
    "first device where each process sees one": """
        device = torch.device("cuda:0")
        torch.ones(1).to(device)
        """,
}


@pytest.mark.parametrize("text", KINDS.values(), ids=KINDS)
def test_kinds_of_rank(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, text, "DDP501")


def test_spawned_ranks_are_local_ranks(tmp_path: Path) -> None:
    check_marks(
        tmp_path,
        """
        def worker(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
            torch.cuda.set_device(rank)
            model = DDP(nn.Linear(4, 4).to(rank), device_ids=[rank])
            if rank == 0:
                torch.save(model.state_dict(), "model.pt")

        if __name__ == "__main__":
            mp.spawn(worker, args=(4,), nprocs=4)
        """,
        "DDP501",
    )


def test_many_places_of_one_mix_up_are_one_finding(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        model = DDP(nn.Linear(4, 4).to(rank), device_ids=[rank])
        """,
    )
    (finding,) = findings_of(read_script(path), "DDP501")
    assert [place.line for place in finding.locations] == [13, 14, 14]
    assert finding.severity is Severity.ERROR


MASK = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", {tensor})

    def forward(self, x):
        return self.layer(x) * self.mask
{more}
dist.init_process_group("gloo")
"""
TRIL = "torch.tril(torch.ones(1024, 1024))"
IN_PLACE = """
    def grow(self):
        self.mask.mul_(2)
"""

BUFFERS = {
    "constant mask": (MASK.format(tensor=TRIL, more=""), "model = DDP(Net())  # DDP203"),
    "after to and compile": (
        MASK.format(tensor=TRIL, more=""),
        'model = DDP(torch.compile(Net().to("cpu")))  # DDP203',
    ),
    "broadcast switched off": (MASK.format(tensor=TRIL, more=""), "model = DDP(Net(), broadcast_buffers=False)"),
    "new option": (MASK.format(tensor=TRIL, more=""), "model = DDP(Net(), forward_sync_buffers=False)"),
    "options from elsewhere": (MASK.format(tensor=TRIL, more=""), "model = DDP(Net(), **dict(os.environ))"),
    "changed in place": (MASK.format(tensor=TRIL, more=IN_PLACE), "model = DDP(Net())"),
    "running statistics beside it": (
        MASK.format(tensor=TRIL, more="").replace("nn.Linear(4, 4)", "nn.BatchNorm1d(4)"),
        "model = DDP(Net())",
    ),
    "a part that cannot be read": (
        MASK.format(tensor=TRIL, more="").replace("nn.Linear(4, 4)", "somewhere.Block(4)"),
        "model = DDP(Net())",
    ),
    "no buffers": ("dist.init_process_group('gloo')\n", "model = DDP(nn.Linear(4, 4))"),
}


@pytest.mark.parametrize(("module", "wrap"), BUFFERS.values(), ids=BUFFERS)
def test_buffers(tmp_path: Path, module: str, wrap: str) -> None:
    check_marks(tmp_path, "import somewhere\n" + module + wrap, "DDP203")


@pytest.mark.parametrize(
    ("tensor", "severity"), [(TRIL, Severity.WARNING), ("torch.ones(8)", Severity.ADVICE), ("load()", Severity.ADVICE)]
)
def test_size_of_the_buffers_decides_the_severity(tmp_path: Path, tensor: str, severity: Severity) -> None:
    path = written(tmp_path, "from somewhere import load\n" + MASK.format(tensor=tensor, more="") + "DDP(Net())\n")
    (finding,) = findings_of(read_script(path), "DDP203")
    assert finding.severity is severity
    assert ("(4.19 MB)" in finding.title) is (tensor == TRIL)


PARALLEL = {
    "DataParallel": "model = nn.DataParallel(nn.Linear(4, 4))  # DDP209",
    "full name": "model = torch.nn.parallel.DataParallel(nn.Linear(4, 4))  # DDP209",
    "beside DDP": """
        model = nn.Linear(4, 4)
        model = DDP(model) if "RANK" in os.environ else nn.DataParallel(model)
        """,
    "only asked for": "isinstance(nn.Linear(4, 4), nn.DataParallel)",
    "dead": """
        if False:
            nn.DataParallel(nn.Linear(4, 4))
        """,
}


@pytest.mark.parametrize("text", PARALLEL.values(), ids=PARALLEL)
def test_data_parallel(tmp_path: Path, text: str) -> None:
    check_marks(tmp_path, text, "DDP209")
