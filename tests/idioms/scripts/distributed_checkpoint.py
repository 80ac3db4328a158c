"""torch.distributed.checkpoint with a Stateful application state: saved by all ranks, asynchronously, and resumed."""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state, "step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )
        self.step = int(state_dict["step"])


class Waves(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        x = torch.linspace(0, 3, 12) + index
        return x.sin(), x.cos().mean().unsqueeze(0)


def rotate(folder, keep):
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("dcp"))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    app = AppState(model, optimizer)
    if args.resume is not None:
        dcp.load({"app": app}, checkpoint_id=args.resume)
    data = Waves()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=1)
    # The upload runs in a thread: its collectives must not mix with those of the training.
    checkpoint_group = dist.new_group(backend="gloo")
    pending = None
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.huber_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            app.step += 1
            if app.step % args.save_every == 0:
                if pending is not None:
                    pending.result()
                folder = args.folder / f"step-{app.step:05d}"
                pending = dcp.async_save({"app": app}, checkpoint_id=folder, process_group=checkpoint_group)
    if pending is not None:
        pending.result()
    dcp.save({"app": app}, checkpoint_id=args.folder / "final")
    if rank == 0:
        rotate(args.folder, keep=1)
        print(f"{app.step} steps, kept {sorted(path.name for path in args.folder.iterdir())}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
