"""ZeroRedundancyOptimizer, activation checkpointing, bf16 autocast, clipping and OneCycle; state consolidated to save."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE, SAVE_EVERY = 4, 8, 2


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.inner(self.norm(x))


class DeepNet(nn.Module):
    def __init__(self, width=32, depth=4, classes=5):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def data_loader():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 16, generator=generator)
    dataset = TensorDataset(x, x[:, :5].argmax(dim=1))
    return DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset), drop_last=True)


class Saver:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def __call__(self, epoch):
        # A collective: every rank sends its shard to rank 0.
        self.optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save(
                {
                    "model": self.model.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(),
                    "epoch": epoch,
                },
                f"sharded_{epoch}.pt",
            )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    loader = data_loader()
    model = DistributedDataParallel(DeepNet(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, epochs=EPOCHS, steps_per_epoch=len(loader), cycle_momentum=False)
    save = Saver(model, optimizer, scheduler)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.reduce(running, dst=0)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {running[0] / running[1]:.4f}, lr {scheduler.get_last_lr()[0]:.2e}")
        if epoch % SAVE_EVERY == 0:
            save(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
