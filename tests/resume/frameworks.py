"""Scripts that a library resumes, or torch's sharded checkpoints; what must be said of faults in them."""

from __future__ import annotations

from collections.abc import Mapping

from tests.resume.job import RIGHT, Case, script_of

FRAMEWORKS = {
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
    "Trainer": """
import argparse, os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--resume_from_checkpoint", default=None)
args = parser.parse_args()

class Samples(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 8, generator=generator), torch.randn(64, 3, generator=generator)
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": self.x[index], "labels": self.y[index]}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    def forward(self, x, labels):
        out = self.last(F.dropout(self.norm(self.first(x)), 0.2, self.training))
        return {"loss": F.mse_loss(out, labels), "logits": out}

torch.manual_seed(3)
model = Net()
trainer = Trainer(
    model=model,
    train_dataset=Samples(),
    args=TrainingArguments(
        output_dir="out", use_cpu=True, num_train_epochs=6, per_device_train_batch_size=4, save_strategy="epoch",
        report_to=[], disable_tqdm=True, learning_rate=0.01, remove_unused_columns=False,
    ),
)
# RESTORE
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
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
    "torch.distributed.checkpoint": script_of(
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
    "safetensors": script_of(
        SAVE='save_file(net.state_dict(), "weights.new")\nos.replace("weights.new", "last.safetensors")'
        + RIGHT["SAVE"].replace('"model": net.state_dict(), ', ""),
        MODEL='net.load_state_dict(load_file("last.safetensors"))',
    ).replace("from torch import nn\n", "from torch import nn\nfrom safetensors.torch import load_file, save_file\n"),
}
FRAMEWORKS["Lightning: an option of any name"] = (
    FRAMEWORKS["Lightning"].replace("args.resume", "args.from_file").replace("--resume", "--from-file")
)
FRAMEWORKS["Trainer: options of a dataclass"] = (
    FRAMEWORKS["Trainer"]
    .replace("import Trainer,", "import HfArgumentParser, Trainer,")
    .replace('parser = argparse.ArgumentParser()\nparser.add_argument("--resume_from_checkpoint", default=None)\n', "")
    .replace(
        "args = parser.parse_args()\n", "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    )
    .replace("    args=TrainingArguments(\n", "    args=dataclasses.replace(\n        args,\n")
    .replace("import argparse, os", "import dataclasses")
)
SHARDED = FRAMEWORKS["torch.distributed.checkpoint"]
BY_ITSELF_SHARDED = SHARDED.replace('parser.add_argument("--resume", default="")', "pass")
FRAMEWORK_FAULTS: Mapping[str, Case] = {
    "Lightning: weights are loaded by hand": Case(
        script=FRAMEWORKS["Lightning"]
        .replace(", ckpt_path=args.resume", "")
        .replace(
            "# RESTORE",
            'if args.resume: job.load_state_dict(torch.load(args.resume, weights_only=False)["state_dict"])',
        ),
        words=("optimizer",),
    ),
    "Trainer: the weights are loaded by hand": Case(
        script=FRAMEWORKS["Trainer"]
        .replace("resume_from_checkpoint=args.resume_from_checkpoint)", ")")
        .replace(
            "# RESTORE",
            "if args.resume_from_checkpoint:\n"
            "    from safetensors.torch import load_file\n"
            '    model.load_state_dict(load_file(args.resume_from_checkpoint + "/model.safetensors"))\n',
        ),
        words=("optimizer",),
    ),
    "Trainer: the data begin from the start": Case(
        script=FRAMEWORKS["Trainer"]
        .replace('save_strategy="epoch"', 'save_strategy="steps", save_steps=5')
        .replace('output_dir="out"', 'output_dir="out", ignore_data_skip=True'),
        words=("from the beginning of the epoch",),
    ),
    "Trainer: the optimizer is not saved": Case(
        script=FRAMEWORKS["Trainer"].replace('output_dir="out"', 'output_dir="out", save_only_model=True'),
        words=("optimizer", "not saved"),
    ),
    "Accelerate: the epoch begins at 0": Case(
        script=FRAMEWORKS["Accelerate"].replace("+ 1\n", "* 0\n"), words=("order of epoch 0",)
    ),
    "Accelerate: its own sampler, whose generator is not saved": Case(
        script=FRAMEWORKS["Accelerate"]
        .replace("use_seedable_sampler=True", "")
        .replace("loader.set_epoch(epoch)", "pass"),
        words=("order of epoch 0",),
    ),
    "Accelerate: the scheduler is not prepared": Case(
        script=FRAMEWORKS["Accelerate"]
        .replace("model, optimizer, loader, scheduler = ", "model, optimizer, loader = ")
        .replace("loader, scheduler)", "loader)"),
        words=("learning rate",),
    ),
    "torch.distributed.checkpoint: the optimizer is not loaded": Case(
        script=SHARDED.replace('    optimizer.load_state_dict(state["optimizer"])\n', "    optimizer.state.clear()\n"),
        words=("optimizer",),
    ),
    "torn write: a sharded one, the newest": Case(
        script=BY_ITSELF_SHARDED.replace(
            "if args.resume:",
            'args.resume = max((d for d in os.listdir(".") if d[:2] == "at"), default="")\nif args.resume:',
        ),
        torn=True,
        words=("fails on the torn file", "is whole"),
    ),
    "torn write: a sharded one over the only one": Case(
        script=SHARDED.replace('f"at{epoch}"', '"at"'),
        torn=True,
        words=("fails on the torn file",),
    ),
    "safetensors: the weights are not loaded": Case(
        script=FRAMEWORKS["safetensors"].replace("net.load_state_dict(load_file", "dict(load_file"), words=("weights",)
    ),
}
