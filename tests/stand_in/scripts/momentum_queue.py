"""Momentum contrast: a slow copy of the encoder, a queue of keys from all ranks, batches shuffled between ranks."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


def encoder(dim):
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(48, dim),
    )


class MomentumContrast(nn.Module):
    def __init__(self, dim=16, keys=192, m=0.99, temperature=0.1):
        super().__init__()
        self.keys, self.m, self.temperature = keys, m, temperature
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, keys), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys):
        keys = concat_all_gather(keys)
        ptr = int(self.queue_ptr)
        places = (torch.arange(keys.shape[0], device=keys.device) + ptr) % self.keys
        self.queue[:, places] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.keys

    @torch.no_grad()
    def _shuffle(self, x):
        mine = x.shape[0]
        everything = concat_all_gather(x)
        order = torch.randperm(everything.shape[0]).cuda()
        dist.broadcast(order, src=0)
        back = torch.argsort(order)
        return everything[order.view(-1, mine)[dist.get_rank()]], back

    @torch.no_grad()
    def _unshuffle(self, x, back):
        mine = x.shape[0]
        return concat_all_gather(x)[back.view(-1, mine)[dist.get_rank()]]

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            shuffled, back = self._shuffle(im_k)
            k = self._unshuffle(nn.functional.normalize(self.encoder_k(shuffled), dim=1), back)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        labels = torch.zeros(logits.shape[0], dtype=torch.long).cuda()
        self._enqueue(k)
        return logits, labels


class TwoViews(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        image = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(index))
        return [image + 0.2 * torch.randn(image.shape) for _ in range(2)], index


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=16, type=int, help="per GPU")
    parser.add_argument("--lr", default=0.03, type=float)
    args = parser.parse_args()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    if not torch.cuda.is_available():
        raise NotImplementedError("Only DistributedDataParallel on GPUs is supported.")
    torch.set_float32_matmul_precision("high")
    model = MomentumContrast().cuda(gpu)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu], gradient_as_bucket_view=True)
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, args.lr, momentum=0.9, weight_decay=1e-4)
    sampler = DistributedSampler(TwoViews())
    loader = DataLoader(TwoViews(), batch_size=args.batch_size, num_workers=1, pin_memory=True, sampler=sampler,
                        drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs))
        model.train()
        hits = torch.zeros(1, device="cuda")
        for images, _ in loader:
            images[0] = images[0].cuda(gpu, non_blocking=True)
            images[1] = images[1].cuda(gpu, non_blocking=True)
            output, target = model(im_q=images[0], im_k=images[1])
            loss = criterion(output, target)
            hits += (output.argmax(1) == target).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {hits.item() / len(loader) / dist.get_world_size():.3f}")
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, f"checkpoint_{epoch:04d}.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
