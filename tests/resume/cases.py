"""Training scripts with a fault in how they resume, what must be said of each, and the correct twin of each fault.

A script is built of parts; a fault replaces one of them. Its right line is the one that ends in ``# here``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import msgspec

_JOB = """
import argparse, os, random, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
OPTION
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

class Samples(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 8, generator=generator), torch.randn(64, 3, generator=generator)
    def __len__(self): return 64
    def __getitem__(self, index): return self.x[index], self.y[index]

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
sampler = SAMPLER
loader = DataLoader(Samples(), 4, sampler=sampler)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)
ema = {name: value.detach().clone() for name, value in net.state_dict().items()}
start_epoch, global_step = 0, 0

def save(epoch):
    SAVE

def load(path):
    global start_epoch, global_step
    LOAD
    MODEL
    OPTIMIZER
    SCHEDULER
    EMA
    COUNT

RESUME
for epoch in range(start_epoch, args.epochs):
    EPOCH
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        global_step += 1
        for name, value in net.state_dict().items(): ema[name].lerp_(value, 0.1)
        STEP
    scheduler.step()
    if rank == 0: save(epoch)
    dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""
_RIGHT = {
    "OPTION": 'parser.add_argument("--resume", default="")',
    "SAMPLER": "DistributedSampler(Samples(), shuffle=True, seed=5)",
    "SAVE": """
torch.save({
    "model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
    "ema": ema, "epoch": epoch, "global_step": global_step,
}, "last.new")
os.replace("last.new", "last.pt")
""",
    "LOAD": 'state = torch.load(path, map_location="cpu", weights_only=False)  # load',
    "MODEL": 'net.load_state_dict(state["model"])',
    "OPTIMIZER": 'optimizer.load_state_dict(state["optimizer"])',
    "SCHEDULER": 'scheduler.load_state_dict(state["scheduler"])',
    "EMA": '[ema[name].copy_(value) for name, value in state["ema"].items()]',
    "COUNT": 'start_epoch = state["epoch"] + 1\nglobal_step = state["global_step"]',
    "RESUME": "if args.resume: load(args.resume)",
    "EPOCH": "sampler.set_epoch(epoch)",
    "STEP": "pass",
}
_IN_PLACE = (
    _RIGHT["SAVE"]
    .replace("torch.save({", "torch.save({  # here")
    .replace('"last.new")\nos.replace("last.new", "last.pt")', '"last.pt")')
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A script and what must be said of its second start."""

    script: str
    words: tuple[str, ...] = ()
    """What the findings say, each in one of them; empty for a script that resumes as it should."""
    line: int = 0
    """Where the first finding is; 0 for anywhere."""
    inconclusive: str = ""
    """Words of the reason, where nothing can be said."""
    resume_with: str | None = None
    torn: bool = False
    """Started once more after a save that was broken off."""
    ranks: int = 0
    """Ranks of the second start; 0 for as many as the first has."""


def _script(**parts: str) -> str:
    text = _JOB
    for name, right in _RIGHT.items():
        at = next(line for line in text.splitlines() if line.strip() == name or f"= {name}" in line)
        indent = at[: len(at) - len(at.lstrip())]
        lines = textwrap.indent(parts.get(name, right).strip("\n"), indent) if at.strip() == name else None
        text = text.replace(at, at.replace(name, parts.get(name, right)) if lines is None else lines)
    return text


def _case(*words: str, at: str = "# load", resume_with: str | None = None, torn: bool = False, **parts: str) -> Case:
    script = _script(**parts)
    line = next((number for number, line in enumerate(script.splitlines(), 1) if at in line), 0) if words else 0
    return Case(script=script, words=words, line=line, resume_with=resume_with, torn=torn)


_WITHOUT = {
    "optimizer": '"optimizer": optimizer.state_dict(), ',
    "scheduler": '"scheduler": scheduler.state_dict(),',
    "ema": '"ema": ema, ',
}


def _saves_without(name: str) -> str:
    return _RIGHT["SAVE"].replace(_WITHOUT[name], "").replace("torch.save({", "torch.save({  # here")


FAULTS: Mapping[str, Case] = {
    "the sampler starts from epoch 0": _case("order of epoch 0", EPOCH="sampler.set_epoch(epoch - start_epoch)"),
    "the finished epoch is run again": _case(
        "is run again", COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]'
    ),
    "an epoch is left out": _case(
        "left out", COUNT='start_epoch = state["epoch"] + 2\nglobal_step = state["global_step"]'
    ),
    "epochs from the start": _case("order of epoch 0", COUNT='global_step = state["global_step"]'),
    "the step counter starts at 0": _case("`global_step`", COUNT='start_epoch = state["epoch"] + 1'),
    "the step counter is off by one": _case(
        "`global_step`", COUNT='start_epoch = state["epoch"] + 1\nglobal_step = state["global_step"] + 1'
    ),
    "the schedule is not loaded": _case("learning rate", SCHEDULER="pass"),
    "the schedule is not saved": _case(
        "learning rate", "not saved", at="# here", SAVE=_saves_without("scheduler"), SCHEDULER="pass"
    ),
    "the schedule steps once more": _case(
        "learning rate", SCHEDULER='scheduler.load_state_dict(state["scheduler"])\nscheduler.step()'
    ),
    "the optimizer is not loaded": _case("optimizer", OPTIMIZER="pass"),
    "the optimizer is not saved": _case(
        "optimizer", "not saved", at="# here", SAVE=_saves_without("optimizer"), OPTIMIZER="pass"
    ),
    "the optimizer is loaded on rank 0 only": _case(
        "optimizer", "rank 1", OPTIMIZER='if rank == 0: optimizer.load_state_dict(state["optimizer"])'
    ),
    "the weights are not loaded": _case("weights", MODEL="pass"),
    "the weights are loaded under other names": _case(
        "weights", MODEL='net.load_state_dict({"module." + k: v for k, v in state["model"].items()}, strict=False)'
    ),
    "the weights are those of the average": _case("weights", MODEL='net.load_state_dict(state["ema"])'),
    "half of the weights are loaded": _case(
        "weights", MODEL='net.load_state_dict({k: v for k, v in state["model"].items() if k[0] == "0"}, strict=False)'
    ),
    "the average is not loaded": _case("`ema`", EMA="pass"),
    "the average starts from the weights": _case("`ema`", EMA='[ema[n].copy_(v) for n, v in state["model"].items()]'),
    "rank 0 alone knows the epoch": _case(
        "rank 1",
        COUNT='global_step = state["global_step"]\nif rank == 0: start_epoch = state["epoch"] + 1',
        RESUME="if args.resume: load(args.resume)\nargs.epochs += start_epoch",
    ),
    "shuffled by the clock": _case(
        "order", SAMPLER="DistributedSampler(Samples(), shuffle=True, seed=int(bool(args.resume)))"
    ),
    "no set_epoch after a restart": _case("order of epoch 0", EPOCH="if not args.resume: sampler.set_epoch(epoch)"),
    "the momenta are emptied": _case(
        "optimizer", OPTIMIZER='optimizer.load_state_dict(state["optimizer"])\noptimizer.state.clear()'
    ),
    "another learning rate": _case(
        "learning rate",
        SCHEDULER='scheduler.load_state_dict(state["scheduler"])\nfor g in optimizer.param_groups: g["lr"] = 0.01',
    ),
    "an older file is loaded": _case(
        "weights",
        SAVE=_RIGHT["SAVE"] + '\nif epoch == 0: __import__("shutil").copy("last.pt", "first.pt")',
        STEP="if args.resume == '' and global_step == 1 and rank == 0: "
        'torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), '
        '"scheduler": scheduler.state_dict(), "ema": ema, "epoch": -1, "global_step": 0}, "zero.pt")',
        RESUME='if args.resume: load("zero.pt")',
    ),
    "torn: saved over the only file": _case("over the only", at="# here", SAVE=_IN_PLACE),
    "torn: a hard link is no copy": _case(
        "over the only",
        at="# here",
        SAVE='if os.path.exists("last.pt") and not os.path.exists("old.pt"): os.link("last.pt", "old.pt")' + _IN_PLACE,
    ),
    "torn: into an open file": _case(
        "over the only",
        at="# here",
        SAVE='file = open("last.pt", "wb")' + _IN_PLACE.replace('"last.pt"', "file") + "file.close()",
    ),
}
_BY_ITSELF = {"OPTION": "pass"}
_EACH_EPOCH = (
    _RIGHT["SAVE"]
    .replace("torch.save({", "torch.save({  # here")
    .replace('"last.new")\nos.replace("last.new", "last.pt")', 'f"epoch-{epoch}.pt")')
)
_NEWEST = """
files = sorted(name for name in os.listdir(".") if name.startswith("epoch-"))
"""
_FALLS_BACK = """
for name in reversed(files):
    try:
        load(name)
        break
    except Exception as error:
        print("not whole:", name, error)
"""
_TWO_FILES = """
new = {"model": net.state_dict(), "epoch": epoch, "global_step": global_step, "ema": ema}
torch.save(new, "last.new")
os.replace("last.new", "last.pt")
"""
TORN_FAULTS: Mapping[str, Case] = {
    "torn write: the only file": _case("fails on the torn file", "no other", at="# here", torn=True, SAVE=_IN_PLACE),
    "torn write: the newest of several, without a fallback": _case(
        "fails on the torn file",
        "is whole",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE=_EACH_EPOCH,
        RESUME=_NEWEST + "if files: load(files[-1])",
    ),
    "torn write: it begins again": _case(
        "begins again from the first step",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE=_IN_PLACE,
        RESUME='try:\n    load("last.pt")\nexcept Exception as error:\n    print("no checkpoint", error)',
    ),
    "torn write: parts of two checkpoints": _case(
        "taken for whole",
        "the weights are those after step 12",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE='torch.save(net.state_dict(), "weights.pt")\n'
        + _RIGHT["SAVE"].replace("torch.save({", "torch.save({  # here"),
        MODEL='net.load_state_dict(torch.load("weights.pt"))',
        RESUME='if os.path.exists("last.pt"): load("last.pt")',
    ),
    "torn write: the good one is deleted": _case(
        "deletes the last whole checkpoint",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE=_EACH_EPOCH,
        RESUME=_NEWEST
        + "for name in files[:-1]:\n    if rank == 0: os.remove(name)\n"
        + "try:\n    if files: load(files[-1])\nexcept Exception as error:\n    print(error)",
    ),
    "torn write: the older one is deleted before the new one is there": _case(
        "fails on the torn file",
        at="# here",
        torn=True,
        **_BY_ITSELF,
        SAVE='for name in os.listdir("."):\n    if name.startswith("epoch-"): os.remove(name)' + _EACH_EPOCH,
        RESUME=_NEWEST + "if files: load(files[-1])",
    ),
}
_ALONE = {
    "SAVE": 'torch.save(net.state_dict(), "last.new")\nos.replace("last.new", "last.pt")',
    "MODEL": "net.load_state_dict(state)",
    **dict.fromkeys(("OPTIMIZER", "SCHEDULER", "EMA", "COUNT"), "pass"),
}
_BY_SGD = ("torch.optim.AdamW(model.parameters(), lr=0.01)", "torch.optim.SGD(model.parameters(), lr=0.01)")
_NO_SCHEDULE = ("scheduler.step()", "pass")
FAILING: Mapping[str, Case] = {
    "fails: an object is in the file": _case(
        "torch.load refuses argparse.Namespace",
        "weights_only=False",
        LOAD='state = torch.load(path, map_location="cpu")  # load',
        SAVE=_RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "args": args'),
    ),
    "fails: another shape": _case(
        "fails on every rank",
        "size mismatch",
        at="net.load",
        RESUME="if args.resume: net[2] = nn.Linear(8, 4)\nif args.resume: load(args.resume)",
    ),
    "fails: rank 1 loads nothing": _case(
        "fails on rank 1",
        "Missing key",
        at="net.load",
        MODEL='net.load_state_dict(state["model"] if rank == 0 else {})',
    ),
    "weights alone": _case(
        "optimizer",
        "not saved",
        "learning rate",
        at="# here",
        resume_with=None,
        torn=False,
        **{**_ALONE, "SAVE": _ALONE["SAVE"].replace("\n", "  # here\n", 1)},
    ),
    "weights alone: the epoch begins at 0": Case(
        script=_script(**_ALONE).replace(*_BY_SGD).replace(*_NO_SCHEDULE), words=("order of epoch 0",)
    ),
}
_FRAMEWORKS = {
    "Lightning": """
import argparse, os
import lightning as L, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default=None)
args = parser.parse_args()

class Job(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)
    def training_step(self, batch, number):
        return F.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

torch.manual_seed(3)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
trainer = L.Trainer(max_epochs=6, accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False)
job = Job()
# RESTORE
trainer.fit(job, DataLoader(data, 4, shuffle=True), ckpt_path=args.resume)
""",
    "Accelerate": """
import argparse, os
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint", default=None)
args = parser.parse_args()
torch.manual_seed(3)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
model = nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
loader = DataLoader(data, 4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
start = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    start = int(args.resume_from_checkpoint.split("epoch_")[1][:1]) + 1
for epoch in range(start, 6):
    loader.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
    scheduler.step()
    accelerator.save_state(f"epoch_{epoch}")
""",
    "torch.distributed.checkpoint": _script(
        SAVE='dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": '
        'scheduler.state_dict(), "epoch": epoch}, checkpoint_id=f"at{epoch}")',
        RESUME="""
if args.resume:
    state = {"model": net.state_dict(), "optimizer": None, "scheduler": scheduler.state_dict(), "epoch": 0}
    [p.grad.zero_() if p.grad is not None else setattr(p, "grad", torch.zeros_like(p)) for p in net.parameters()]
    lr = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups: group["lr"] = 0.0
    optimizer.step()
    state["optimizer"] = optimizer.state_dict()
    dcp.load(state, checkpoint_id=args.resume)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    start_epoch = state["epoch"] + 1
""",
    )
    .replace(
        "import torch, torch.distributed as dist",
        "import torch, torch.distributed as dist\nimport torch.distributed.checkpoint as dcp",
    )
    .replace("if rank == 0: save(epoch)", "save(epoch)"),
    "safetensors": _script(
        SAVE='save_file(net.state_dict(), "weights.new")\nos.replace("weights.new", "last.safetensors")'
        + _RIGHT["SAVE"].replace('"model": net.state_dict(), ', ""),
        MODEL='net.load_state_dict(load_file("last.safetensors"))',
    ).replace("from torch import nn\n", "from torch import nn\nfrom safetensors.torch import load_file, save_file\n"),
}
FRAMEWORK_FAULTS: Mapping[str, Case] = {
    "Lightning: weights are loaded by hand": Case(
        script=_FRAMEWORKS["Lightning"]
        .replace(", ckpt_path=args.resume", "")
        .replace(
            "# RESTORE",
            'if args.resume: job.load_state_dict(torch.load(args.resume, weights_only=False)["state_dict"])',
        ),
        words=("optimizer",),
    ),
    "Accelerate: the epoch begins at 0": Case(
        script=_FRAMEWORKS["Accelerate"].replace("+ 1\n", "* 0\n"), words=("order of epoch 0",)
    ),
    "Accelerate: its own sampler, whose generator is not saved": Case(
        script=_FRAMEWORKS["Accelerate"]
        .replace("use_seedable_sampler=True", "")
        .replace("loader.set_epoch(epoch)", "pass"),
        words=("order of epoch 0",),
    ),
    "Accelerate: the scheduler is not prepared": Case(
        script=_FRAMEWORKS["Accelerate"]
        .replace("model, optimizer, loader, scheduler = ", "model, optimizer, loader = ")
        .replace("loader, scheduler)", "loader)"),
        words=("learning rate",),
    ),
    "torch.distributed.checkpoint: the optimizer is not loaded": Case(
        script=_FRAMEWORKS["torch.distributed.checkpoint"].replace(
            '    optimizer.load_state_dict(state["optimizer"])\n', "    optimizer.state.clear()\n"
        ),
        words=("optimizer",),
    ),
    "safetensors: the weights are not loaded": Case(
        script=_FRAMEWORKS["safetensors"].replace("net.load_state_dict(load_file", "dict(load_file"), words=("weights",)
    ),
}
_IN_THE_EPOCH = _script(
    SAVE=_RIGHT["SAVE"].replace('"epoch": epoch', '"epoch": epoch, "batch": batch + 1'),
    COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]\nglobal skip\nskip = state["batch"]',
    STEP="if global_step % 3 == 0 and rank == 0: save(epoch)",
    RESUME="skip = 0\nif args.resume: load(args.resume)",
)
_IN_THE_EPOCH = _IN_THE_EPOCH.replace("    if rank == 0: save(epoch)\n", "", 1).replace(
    "for x, y in loader:",
    "for batch, (x, y) in enumerate(loader):\n        if epoch == start_epoch and batch < skip: continue",
)
_SHARED_OUT = _script().replace("Samples(), 4", "Samples(), 8 // dist.get_world_size()")
OTHER_RANKS: Mapping[str, Case] = {
    "other ranks: the batch of a rank is fixed": Case(
        script=_script(), ranks=4, words=("takes 16 samples in the place of 8",)
    ),
    "other ranks: fewer": Case(script=_script(), ranks=1, words=("takes 4 samples in the place of 8",)),
    "other ranks: the schedule counts steps": Case(
        script=_script(STEP="scheduler.step()").replace("    scheduler.step()\n    if rank", "    if rank"),
        ranks=4,
        words=("counts steps",),
    ),
    "other ranks: batches are skipped by their number": Case(
        script=_IN_THE_EPOCH.replace("Samples(), 4", "Samples(), 8 // dist.get_world_size()")
        .replace('"batch": batch + 1', '"batch": 2')
        .replace("batch < skip", "batch < skip - 1"),
        ranks=4,
        words=("seen again",),
    ),
    "other ranks: too many batches are skipped": Case(script=_IN_THE_EPOCH, ranks=4, words=("never seen",)),
    "other ranks: a file for each rank": Case(
        script=_script(SAVE=_RIGHT["SAVE"], RESUME='if args.resume: load(args.resume.replace("last", f"last{rank}"))')
        .replace("if rank == 0: save(epoch)", "save(epoch)")
        .replace('"last.new"', 'f"last{rank}.new"')
        .replace('"last.pt")\n', 'f"last{rank}.pt")\n'),
        ranks=3,
        resume_with="--resume last.pt",
        words=("fails", "last2.pt"),
    ),
}
OTHER_RANKS_TWINS: Mapping[str, Case] = {
    **{name: Case(script=script) for name, script in _FRAMEWORKS.items()},
    "an object is in the file, and it is allowed": _case(
        SAVE=_RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "args": args')
    ),
    "weights alone, where nothing else is needed": Case(
        script=_script(**{**_ALONE, "COUNT": "start_epoch = args.start"})
        .replace(*_BY_SGD)
        .replace(*_NO_SCHEDULE)
        .replace(
            '"--epochs", type=int, default=6)',
            '"--epochs", type=int, default=6)\nparser.add_argument("--start", type=int, default=0)',
        ),
        resume_with="--resume last.pt --start 2",
    ),
    "other ranks: the batch is shared out": Case(script=_SHARED_OUT, ranks=4),
    "other ranks: the batch is shared out, in the middle of an epoch": Case(
        script=_IN_THE_EPOCH.replace("Samples(), 4", "Samples(), 8 // dist.get_world_size()"), ranks=4
    ),
}
TWINS: Mapping[str, Case] = {
    **OTHER_RANKS_TWINS,
    "in the middle of an epoch": Case(script=_IN_THE_EPOCH),
    "torn write: another name, then os.replace": _case(torn=True),
    "torn write: it falls back to the one before": _case(
        torn=True, **_BY_ITSELF, SAVE=_EACH_EPOCH, RESUME=_NEWEST + _FALLS_BACK
    ),
    "torn write: an option, and the user names a whole one": _case(torn=True, SAVE=_EACH_EPOCH),
    "torn write: two in turn, the newest whole one": _case(
        torn=True,
        **_BY_ITSELF,
        SAVE=_EACH_EPOCH.replace('f"epoch-{epoch}.pt"', 'f"epoch-{epoch % 2}.pt"'),
        RESUME=_NEWEST.replace("sorted(", "sorted((").replace('"epoch-"))', '"epoch-")), key=os.path.getmtime)')
        + _FALLS_BACK,
    ),
    "as it should be": _case(),
    "by itself, where there is a file": _case(OPTION="pass", RESUME='if os.path.exists("last.pt"): load("last.pt")'),
    "a flag": _case(
        OPTION='parser.add_argument("--resume", action="store_true")', RESUME='if args.resume: load("last.pt")'
    ),
    "another option": _case(
        OPTION='parser.add_argument("--resume_from", default=None)',
        RESUME="if args.resume_from: load(args.resume_from)",
    ),
    "an option that is given": _case(
        OPTION='parser.add_argument("--snapshot", default="")',
        RESUME="if args.snapshot: load(args.snapshot)",
        resume_with="--snapshot last.pt",
    ),
    "no shuffling and no set_epoch": _case(SAMPLER="DistributedSampler(Samples(), shuffle=False)", EPOCH="pass"),
    "loaded into the wrapper": _case(
        SAVE=_RIGHT["SAVE"].replace("net.state_dict()", "model.state_dict()"),
        MODEL='model.load_state_dict(state["model"])',
    ),
    "dropout, whose numbers are not restored": _case(
        STEP="torch.dropout(x, 0.5, True)",
    ),
    "epochs counted from the next": _case(
        SAVE=_RIGHT["SAVE"].replace('"epoch": epoch', '"epoch": epoch + 1'),
        COUNT='start_epoch = state["epoch"]\nglobal_step = state["global_step"]',
    ),
    "a schedule that is made anew": _case(
        SAVE=_RIGHT["SAVE"].replace(_WITHOUT["scheduler"], ""),
        SCHEDULER="for g in optimizer.param_groups: g['lr'] = 0.01\nstart = state['epoch'] + 1\n"
        "global scheduler\nfor g in optimizer.param_groups: g['initial_lr'] = 0.01\n"
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)\n"
        "for _ in range(start): scheduler.step()",
    ),
    "two files": _case(
        SAVE=_RIGHT["SAVE"] + '\ntorch.save({"model": net.state_dict()}, "best.pt")',
    ),
    "a file for each epoch": _case(
        SAVE=_RIGHT["SAVE"].replace('os.replace("last.new", "last.pt")', 'os.replace("last.new", f"epoch-{epoch}.pt")'),
    ),
    "the time beside it": _case(SAVE=_RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "time": time.time()')),
    "losses beside it": _case(
        SAVE=_RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "loss": float(loss)'),
    ),
    "a checkpoint in each third step": _case(
        STEP='if global_step % 3 == 0 and rank == 0: torch.save({"model": net.state_dict()}, "weights.pt")',
    ),
    "no seed": Case(script=_script().replace("torch.manual_seed(3)", "torch.manual_seed(time.time_ns() % 2**31)")),
    "random numbers that are saved and loaded": _case(
        SAVE=_RIGHT["SAVE"].replace('"ema": ema', '"ema": ema, "rng": torch.get_rng_state()'),
        COUNT=_RIGHT["COUNT"] + '\ntorch.set_rng_state(state["rng"])',
    ),
    "torn: two files in turn": _case(SAVE=_IN_PLACE.replace('"last.pt"', 'f"{epoch % 2}.pt"')),
    "torn: a copy beside it": _case(
        SAVE='if os.path.exists("last.pt"): __import__("shutil").copy2("last.pt", "old.pt")' + _IN_PLACE
    ),
    "torn: a copy in a folder": _case(
        SAVE='os.makedirs("kept", exist_ok=True)\n'
        'if os.path.exists("last.pt"): __import__("shutil").copy("last.pt", "kept/old")' + _IN_PLACE
    ),
}
INCONCLUSIVE: Mapping[str, Case] = {
    "no checkpoint": Case(script=_script(SAVE="pass", RESUME="pass"), inconclusive="no checkpoint"),
    "weights before the first step, and no more": Case(
        script=_script(**{**_ALONE, "RESUME": _RIGHT["RESUME"] + "\nif rank == 0: save(0)"}).replace(
            "    if rank == 0: save(epoch)\n", ""
        ),
        inconclusive="no checkpoint",
    ),
    "nothing is loaded": Case(script=_script(RESUME="pass"), inconclusive="loaded nothing"),
}
CASES: Mapping[str, Case] = {
    **FAULTS,
    **FAILING,
    **FRAMEWORK_FAULTS,
    **TORN_FAULTS,
    **OTHER_RANKS,
    **TWINS,
    **INCONCLUSIVE,
}
