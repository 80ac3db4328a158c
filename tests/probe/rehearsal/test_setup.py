"""What ranks do before and beside training, seen in real rehearsals: every defect of one script, none of its twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.examine.one_script import ExamineRequest, examine
from ddpdoctor.finding import Finding

from .conftest import HEAD

DATA = """
import itertools
import pickle
import random

for function in (os.path.exists, os.path.isdir, random.seed, torch.manual_seed, torch.load):
    assert pickle.loads(pickle.dumps(function)) is function

class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [float(number) for number in range(100)]
        SHUFFLE
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.full((4,), self.rows[index]) + torch.rand(4)

MEET
dist.init_process_group("gloo")
rank = dist.get_rank()
own = dist.new_group([rank], use_local_synchronization=True)
GUARD:
    with open("tokens.txt", "w") as file:
        file.write("1 2 3")
WAIT
assert open("tokens.txt").read() in ("", "1 2 3")

def wait_for_flag():
    for attempt in itertools.count():
        if os.path.exists("flag"):
            return open("flag").read()
        if attempt == 0:
            dist.barrier()

if rank == 1:
    wait_for_flag()
else:
    dist.barrier()
    with open("FLAG", "w") as file:
        file.write("ready")
    RENAME
torch.manual_seed(EARLY_SEED)
train, held_out = torch.utils.data.random_split(torch.arange(400.0).view(100, 4), [80, 20])
images = Images()
torch.manual_seed(SEED)
loader = DataLoader(images, 5, sampler=DistributedSampler(images), num_workers=WORKERS)
training = DataLoader(train, 5, sampler=DistributedSampler(train))
unseen = torch.arange(80.0).view(20, 4)
validation = DataLoader(unseen, 5, sampler=SAMPLER)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(2):
    for loop in (loader, training):
        loop.sampler.set_epoch(epoch)
        for x in loop:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        for x in validation:
            model(x)
    model.train()
def child():
    total = torch.ones(1)
    FORKED

if rank == 0:
    with open("metrics.json", "w") as file:
        file.write("{}")
WAIT
try:
    open("metrics.json").read()
except FileNotFoundError:
    print("came too early")
if rank == 0:
    torch.save(SAVED.state_dict(), "last.pt")
dist.barrier()
nn.Linear(4, 1).load_state_dict(torch.load("last.pt"), strict=False)
forked = torch.multiprocessing.get_context("fork").Process(target=child)
forked.start()
forked.join()
dist.barrier()
END
"""
BROKEN = {
    "SHUFFLE": "random.Random(int(os.environ['RANK'])).shuffle(self.rows)",
    "EARLY_SEED": "rank",
    "SEED": "0",
    "WORKERS": "1",
    "SAMPLER": "None",
    "MEET": "os.environ['MASTER_ADDR'] = '127.0.0.2'",
    "GUARD": "if not os.path.exists('tokens.txt')",
    "WAIT": "pass",
    "FLAG": "flag",
    "SAVED": "model",
    "RENAME": "pass",
    "FORKED": "dist.all_reduce(total, group=own, async_op=True)",
    "END": "",
}
CORRECT = {
    "SHUFFLE": "random.Random(0).shuffle(self.rows)",
    "EARLY_SEED": "0",
    "SEED": "rank",
    "WORKERS": "1",
    "SAMPLER": "DistributedSampler(unseen, shuffle=False)",
    "MEET": "os.environ.setdefault('MASTER_ADDR', 'localhost')",
    "GUARD": "if rank == 0",
    "WAIT": "dist.barrier()",
    "FLAG": "flag.new",
    "SAVED": "model.module",
    "RENAME": "os.rename('flag.new', 'flag')",
    "FORKED": "pass",
    "END": "dist.destroy_process_group()",
}


def seen(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """Examine a script with the usual imports; the findings of its rehearsal by their codes."""
    (folder / "train.py").write_text(HEAD + text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    examination = examine(ExamineRequest(target="train.py", time_limit_s=240.0))
    assert examination.rehearsal.status == "completed", examination.rehearsal
    assert not examination.notes
    found = [finding for finding in examination.findings if "rehearsal" in finding.basis]
    assert len({finding.code for finding in found}) == len(found)
    return {finding.code: finding for finding in found}


def line_of(folder: Path, part: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if part in line)


def filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def test_every_defect_of_the_setup_is_seen_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(filled(DATA, BROKEN), tmp_path, monkeypatch)
    assert sorted(found) == [
        "DDP104",
        "DDP105",
        "DDP107",
        "DDP108",
        "DDP109",
        "DDP504",
        "DDP506",
        "DDP511",
        "DDP603",
        "DDP604",
        "DDP608",
    ]
    lines = {code: finding.location.line for code, finding in found.items() if finding.location is not None}
    assert lines == {
        "DDP104": line_of(tmp_path, "torch.manual_seed(0)"),
        "DDP105": line_of(tmp_path, "for x in validation"),
        "DDP107": line_of(tmp_path, "random_split("),
        "DDP108": line_of(tmp_path, "loader = DataLoader(images"),
        "DDP109": line_of(tmp_path, 'with open("tokens.txt", "w")'),
        "DDP504": line_of(tmp_path, "os.environ['MASTER_ADDR']"),
        "DDP506": line_of(tmp_path, "dist.init_process_group"),
        "DDP511": line_of(tmp_path, "dist.all_reduce(total"),
        "DDP603": line_of(tmp_path, 'open("metrics.json").read()'),
        "DDP604": line_of(tmp_path, "nn.Linear(4, 1).load_state_dict("),
        "DDP608": line_of(tmp_path, 'with open("flag", "w")'),
    }


def test_a_correct_setup_has_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(filled(DATA, CORRECT), tmp_path, monkeypatch) == {}


ON_GPUS = """
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.full((4,), float(index))WORKER

dist.init_process_group("nccl")
EARLY
CHOOSE
model = nn.Linear(4, 1).cuda()
model.load_state_dict(torch.load("old.pt"PLACE))
model = DDP(model, device_ids=[torch.cuda.current_device()])
images = Images()
loader = DataLoader(images, 5, sampler=DistributedSampler(images), num_workers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for x in loader:
        optimizer.zero_grad()
        model(x.cuda()).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


def save_as_from_gpu_0(path: Path) -> None:
    """Write a checkpoint as a machine with a GPU would: the place of a storage is a word in the pickle."""
    import io
    import zipfile

    import torch

    written = io.BytesIO()
    torch.save({"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}, written)
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            target.writestr(entry.filename, content)


def test_every_defect_of_devices_is_seen_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_as_from_gpu_0(tmp_path / "old.pt")
    broken = {"WORKER": ".cuda()", "EARLY": "", "CHOOSE": "", "PLACE": ""}
    found = seen(filled(ON_GPUS, broken), tmp_path, monkeypatch)
    lines = {code: finding.location.line for code, finding in found.items() if finding.location is not None}
    assert lines == {
        "DDP502": line_of(tmp_path, "nn.Linear(4, 1).cuda()"),
        "DDP511": line_of(tmp_path, "torch.full((4,)"),
        "DDP602": line_of(tmp_path, 'torch.load("old.pt")'),
    }


def test_devices_that_are_chosen_have_no_finding_and_an_early_barrier_is_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_from_gpu_0(tmp_path / "old.pt")
    correct = {
        "WORKER": "",
        "EARLY": "dist.barrier()",
        "CHOOSE": "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        "PLACE": ", map_location='cpu'",
    }
    assert list(seen(filled(ON_GPUS, correct), tmp_path, monkeypatch)) == ["DDP514"]
