"""Masked language model and next sentence: optimisation steps counted, fp16 with a scaler, phases that resume."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Sentences(Dataset):
    """Token rows with masked places, labels of -1 where nothing is asked."""

    def __init__(self, shard, length=24, vocabulary=80):
        generator = torch.Generator().manual_seed(shard)
        self.tokens = torch.randint(5, vocabulary, (256, length), generator=generator)
        self.masked = torch.rand(256, length, generator=generator) < 0.15
        self.masked[:, 1] = True

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens, masked = self.tokens[index], self.masked[index]
        labels = torch.where(masked, tokens, torch.full_like(tokens, -1))
        return [tokens.masked_fill(masked, 3), labels, torch.tensor(index % 2)]


class Bert(nn.Module):
    def __init__(self, vocabulary=80, dim=32, depth=2, checkpoint_activations=True):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.pooler, self.seq = nn.Linear(dim, dim), nn.Linear(dim, 2)
        self.decoder_bias = nn.Parameter(torch.zeros(vocabulary))
        self.checkpoint_activations = checkpoint_activations

    def forward(self, tokens):
        x = self.embeddings(tokens)
        for layer in self.encoder:
            if self.checkpoint_activations:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        scores = x @ self.embeddings.weight.t() + self.decoder_bias
        return scores, self.seq(torch.tanh(self.pooler(x[:, 0])))


class Criterion(nn.Module):
    def __init__(self, vocabulary=80):
        super().__init__()
        self.loss, self.vocabulary = nn.CrossEntropyLoss(ignore_index=-1), vocabulary

    def forward(self, scores, relation, labels, next_labels):
        return self.loss(scores.view(-1, self.vocabulary), labels.view(-1)) + self.loss(relation, next_labels)


def setup_training(args):
    assert torch.cuda.is_available()
    args.local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    args.n_gpu = 1
    if args.train_batch_size % args.accumulation != 0:
        raise ValueError("batch size and accumulation do not fit")
    args.train_batch_size //= args.accumulation
    return device


def main(args):
    device = setup_training(args)
    torch.manual_seed(args.seed + args.local_rank)
    torch.cuda.manual_seed(args.seed + args.local_rank)
    model = Bert().to(device)
    torch._C._jit_set_profiling_executor(True)
    found = sorted(glob.glob(os.path.join(args.output_dir, "ckpt_*.pt")))
    step, saved = 0, None
    if found:
        saved = torch.load(found[-1], map_location="cpu")
        step = saved["step"]
        model.load_state_dict(saved["model"])
    no_decay = {id(p) for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n}
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if id(p) not in no_decay], "weight_decay": 0.01},
         {"params": [p for p in model.parameters() if id(p) in no_decay], "weight_decay": 0.0}], lr=1e-3, fused=True)
    scaler = GradScaler(init_scale=args.init_loss_scale, growth_interval=50)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
    model = DDP(model, device_ids=[args.local_rank], output_device=args.local_rank, gradient_as_bucket_view=True)
    criterion = Criterion().to(device)
    for epoch in range(args.shards):
        data = Sentences(shard=epoch)
        sampler = DistributedSampler(data)
        sampler.set_epoch(epoch)
        loader = DataLoader(data, sampler=sampler, batch_size=args.train_batch_size, num_workers=1, pin_memory=True)
        model.train()
        for i, batch in enumerate(loader):
            tokens, labels, following = [t.to(device, non_blocking=True) for t in batch]
            if (i + 1) % args.accumulation:
                with model.no_sync():
                    loss = run(model, criterion, tokens, labels, following, args)
                    scaler.scale(loss).backward()
                continue
            loss = run(model, criterion, tokens, labels, following, args)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % args.log_freq == 0:
                average = loss.detach().clone() * args.accumulation
                dist.all_reduce(average)
                average.div_(dist.get_world_size())
                if dist.get_rank() == 0:
                    print(f"step {step} loss {average.item():.3f} scale {scaler.get_scale():.0f}")
        if dist.get_rank() == 0:
            os.makedirs(args.output_dir, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                        "scaler": scaler.state_dict()}, os.path.join(args.output_dir, f"ckpt_{step:06d}.pt"))
    dist.destroy_process_group()


def run(model, criterion, tokens, labels, following, args):
    with autocast():
        scores, relation = model(tokens)
        return criterion(scores, relation, labels, following) / args.accumulation


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--init_loss_scale", type=int, default=2**12)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--log_freq", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", default="results")
    main(parser.parse_args())
