"""Which data sets give each rank a part of its own: their methods are followed on every rank, no words searched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check_command import check
from tests.source.marked import places, written

HEAD = """import glob
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset
from torch.utils.tensorboard import SummaryWriter
"""
TAIL = """
def evaluate(model, loader):
    total, seen = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model(x), y).item() * len(x)
            seen += len(x)
    return total / seen

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
train = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(train)
lines = list(range(40))
held_out = DataLoader({data}, batch_size=4)
writer = SummaryWriter() if rank == 0 else None
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    value = evaluate(model, held_out)
    if rank == 0:
        writer.add_scalar("held out", value, epoch)
    scheduler.step(value)
"""
READS = """
    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return torch.full((4,), float(self.lines[index])), torch.ones(1)
"""
OWN = {
    "a stride in the iterator": (
        "Lines(lines)",
        """class Lines(IterableDataset):
    def __init__(self, lines):
        self.lines = lines

    def __iter__(self):
        for number in self.lines[dist.get_rank() :: dist.get_world_size()]:
            yield torch.full((4,), float(number)), torch.ones(1)
""",
    ),
    "turns of the iterator": (
        "Lines(lines, dist.get_rank(), dist.get_world_size())",
        """class Lines(IterableDataset):
    def __init__(self, lines, place, count):
        self.lines, self.place, self.count = lines, place, count

    def __iter__(self):
        for number, line in enumerate(self.lines):
            if number % self.count == self.place:
                yield torch.full((4,), float(line)), torch.ones(1)
""",
    ),
    "turns that the iterator passes over": (
        "Lines(lines, dist.get_rank(), dist.get_world_size())",
        """class Lines(IterableDataset):
    def __init__(self, lines, place, count):
        self.lines, self.place, self.count = lines, place, count

    def __iter__(self):
        for number, line in enumerate(self.lines):
            if number % self.count != self.place:
                continue
            yield torch.full((4,), float(line)), torch.ones(1)
""",
    ),
    "a block that is cut when it is made": (
        "Block(lines)",
        f"""class Block(Dataset):
    def __init__(self, lines):
        share = len(lines) // dist.get_world_size()
        self.lines = lines[dist.get_rank() * share : (dist.get_rank() + 1) * share]
{READS}""",
    ),
    "a source in a source, with a sampler that is none of torch's": (
        "Lines(Source(lines))",
        """class Turns:
    def look(self):
        self.place, self.count = dist.get_rank(), dist.get_world_size()

    def of(self, data):
        return list(range(len(data)))[self.place :: self.count]

class Source(IterableDataset):
    def __init__(self, lines):
        self.lines, self.turns = lines, Turns()

    def __iter__(self):
        self.turns.look()
        for index in self.turns.of(self.lines):
            yield {"line": self.lines[index]}

class Lines(IterableDataset):
    def __init__(self, source):
        self.source = source

    def __iter__(self):
        for one in iter(self.source):
            yield torch.full((4,), float(one["line"])), torch.ones(1)
""",
    ),
    "a subset": ("Subset(train, range(rank, 64, world))", ""),
}
OF_ALL = {
    "a rank that only prints": (
        "Lines(lines)",
        f"""class Lines(Dataset):
    def __init__(self, lines):
        if dist.get_rank() == 0:
            print(len(lines))
        self.lines = lines
{READS}""",
    ),
    "a rank that only chooses the device": (
        "Lines(lines, rank)",
        f"""class Lines(Dataset):
    def __init__(self, lines, rank):
        self.lines, self.rank, self.device = lines, rank, f"cuda:{{rank}}"
{READS.replace("torch.ones(1)", "torch.ones(1).to(self.device)")}""",
    ),
    "files that every rank lists": (
        "Lines('.')",
        f"""class Lines(Dataset):
    def __init__(self, folder):
        self.lines = sorted(glob.glob(folder + "/*.txt"))
{READS}""",
    ),
    "a subset for all": ("Subset(train, range(0, 64, 2))", ""),
    "turns of the workers": (
        "Lines(lines)",
        """class Lines(IterableDataset):
    def __init__(self, lines):
        self.lines = lines

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for number in self.lines[worker.id :: worker.num_workers]:
            yield torch.full((4,), float(number)), torch.ones(1)
""",
    ),
    "a stride that this one does not take": (
        "Lines(lines, divided=False)",
        """class Lines(IterableDataset):
    def __init__(self, lines, divided):
        self.lines, self.divided = lines, divided

    def __iter__(self):
        lines = self.lines
        if self.divided:
            lines = lines[dist.get_rank() :: dist.get_world_size()]
        for number in lines:
            yield torch.full((4,), float(number)), torch.ones(1)
""",
    ),
}


@pytest.mark.parametrize(("data", "classes"), OWN.values(), ids=OWN)
def test_a_loss_of_a_part_is_the_rank_s_own(tmp_path: Path, data: str, classes: str) -> None:
    assert {"DDP208", "DDP606"} <= codes(tmp_path, data, classes)


@pytest.mark.parametrize(("data", "classes"), OF_ALL.values(), ids=OF_ALL)
def test_a_loss_of_the_whole_set_is_that_of_all_ranks(tmp_path: Path, data: str, classes: str) -> None:
    assert codes(tmp_path, data, classes).isdisjoint({"DDP208", "DDP606"})


@pytest.mark.parametrize(("forms", "parts"), [(OWN, True), (OF_ALL, False)], ids=["parts", "the whole set"])
def test_a_rehearsal_compares_what_the_ranks_give_the_scheduler(
    tmp_path: Path, forms: dict[str, tuple[str, str]], parts: bool
) -> None:
    data, classes = next(iter(forms.values()))
    (tmp_path / "train.py").write_text(HEAD + classes + TAIL.replace("{data}", data))
    _, report = check("train.py", cwd=tmp_path)
    told = [fact["text"] for one in report["findings"] if one["code"] == "DDP208" for fact in one["evidence"]]
    given = [text for text in told if "the scheduler was given" in text]
    assert bool(given) is parts, report
    assert all("on rank 0, " in text and text.endswith("in its step 1") for text in given)


def codes(tmp_path: Path, data: str, classes: str) -> set[str]:
    return {code for code, _ in places(written(tmp_path, HEAD + classes + TAIL.replace("{data}", data), head=""))}
