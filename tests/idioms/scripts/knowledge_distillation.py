"""A frozen teacher loaded by every rank, a student with low-rank adapters, accuracy gathered without the padding."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LowRank(nn.Module):
    """A frozen linear layer with a trainable update of the given rank."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.rank = rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        update = self.up(self.down(x)) * self.scaling if self.rank > 0 else 0.0
        return self.base(x) + update


def adapt(model, rank, alpha):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LowRank(child, rank, alpha))
    return model


def network(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))


def distributed_accuracy(model, loader, size):
    """Gather predictions of equal-sized shards, drop the samples that the sampler repeated."""
    model.eval()
    predictions, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            predictions.append(model(x).argmax(dim=1))
            labels.append(y)
    model.train()
    shard = torch.stack([torch.cat(predictions), torch.cat(labels)], dim=1)
    gathered = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, shard)
    together = torch.stack(gathered, dim=1).flatten(0, 1)[:size]
    return (together[:, 0] == together[:, 1]).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--rank", type=int, default=2, help="of the adapters")
    parser.add_argument("--alpha", type=float, default=4.0)
    parser.add_argument("--temperature", type=float, default=2.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    is_main_process = dist.get_rank() == 0
    teacher = network(64).eval().requires_grad_(False)
    teacher.load_state_dict(torch.load(args.teacher, map_location="cpu", weights_only=True))
    torch.manual_seed(0)
    student = DistributedDataParallel(adapt(network(64), args.rank, args.alpha))
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(203, 10, generator=generator)
    dataset = TensorDataset(x, x[:, :3].argmax(dim=1))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    eval_loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(x) / args.temperature, dim=-1)
            logits = student(x)
            distilled = F.kl_div(F.log_softmax(logits / args.temperature, dim=-1), soft, reduction="batchmean")
            loss = 0.7 * distilled * args.temperature**2 + 0.3 * F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
        accuracy = distributed_accuracy(student, eval_loader, len(dataset))
        if is_main_process:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
            adapters = {k: v for k, v in student.module.state_dict().items() if ".down." in k or ".up." in k}
            torch.save(adapters, f"adapters_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
