"""A small transformer-like model trained with fully_shard (FSDP2), with nothing wrong; it runs on any machine.

    torchrun --nproc-per-node 2 examples/fsdp2/train.py
    torchrun --nproc-per-node 4 examples/fsdp2/train.py --replicas 2

Each rank holds a part of every layer and trains on its share of the data. With replicas the parts are kept more than
once (HSDP). All ranks evaluate together, and all save: each writes its own part of the checkpoint.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=64, depth=4, classes=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def points(size, seed):
    """Return noisy points around four centres."""
    centres = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (size,), generator=draw)
    return TensorDataset(centres[labels] + 4 * torch.randn(size, 64, generator=draw), labels)


@torch.no_grad()
def evaluate(model, loader):
    """Return the share of right answers over all ranks."""
    model.eval()
    counts = torch.zeros(2)
    for inputs, labels in loader:
        counts += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, help="an existing directory (default: a new temporary one)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = (args.replicas, dist.get_world_size() // args.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_set, test_set = points(8192, seed=1), points(512, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=128, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    directory = [str(args.output_dir or tempfile.mkdtemp(prefix="sharded-"))]
    dist.broadcast_object_list(directory)
    parts, state = get_state_dict(model, optimizer)
    dcp.save({"model": parts, "optimizer": state}, checkpoint_id=directory[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
