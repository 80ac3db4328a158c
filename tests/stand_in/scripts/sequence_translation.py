"""Encoder and decoder with label smoothing and a warm-up rate, a validation loss reduced, a timed job that resumes."""

import os
import pickle
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, START, VOCABULARY, WIDTH = 0, 1, 40, 32


class Reversal(Dataset):
    """A sequence and its mirror image."""

    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        size = 4 + index % 5
        tokens = torch.randint(2, VOCABULARY, (size,), generator=generator)
        return tokens, torch.cat([torch.tensor([START]), tokens.flip(0)])


def collate(pairs):
    source, target = zip(*pairs)
    pad = nn.utils.rnn.pad_sequence
    return pad(source, batch_first=True, padding_value=PAD), pad(target, batch_first=True, padding_value=PAD)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.place = nn.Embedding(16, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, tokens):
        return self.embed(tokens) * WIDTH**0.5 + self.place(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(self.embedded(source), self.embedded(target), tgt_mask=causal, tgt_is_causal=True)
        return self.generator(hidden)


def rate(step, warmup=40):
    step = max(step, 1)
    return WIDTH**-0.5 * min(step**-0.5, step * warmup**-1.5)


class State:
    """What a job needs to go on where it was stopped."""

    def __init__(self, model, optimizer, scheduler, path="state.pt"):
        self.parts, self.path, self.epoch = {"model": model, "optimizer": optimizer, "scheduler": scheduler}, path, 0

    def save(self):
        payload = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({**payload, "epoch": self.epoch, "cuda_rng": torch.cuda.get_rng_state_all()}, self.path + ".tmp")
        os.rename(self.path + ".tmp", self.path)

    def load(self, device):
        if not os.path.exists(self.path):
            return
        payload = torch.load(self.path, map_location=device)
        for name, part in self.parts.items():
            part.load_state_dict(payload[name])
        self.epoch = payload["epoch"]


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=30))
    rank = dist.get_rank()
    torch.manual_seed(7)
    torch.cuda.manual_seed(7)
    with torch.device("cuda"):
        translator = Translator()
    model = DDP(translator, device_ids=[local_rank], gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    state = State(model.module, optimizer, scheduler)
    state.load(device)
    dist.barrier()
    train_set, held_out = Reversal(320, 0), Reversal(64, 5000)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, 16, sampler=sampler, collate_fn=collate, num_workers=1, pin_memory=True)
    check = DataLoader(held_out, 16, sampler=DistributedSampler(held_out, shuffle=False), collate_fn=collate,
                       num_workers=1, pin_memory=True)
    plan = [pickle.dumps({"epochs": 3, "clip": 1.0})] if rank == 0 else [None]
    dist.broadcast_object_list(plan, src=0, device=device)
    plan = pickle.loads(plan[0])
    for epoch in range(state.epoch, plan["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        started = time.perf_counter()
        for source, target in loader:
            source, target = source.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(source, target[:, :-1])
                loss = criterion(logits.flatten(0, 1), target[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), plan["clip"], foreach=True)
            optimizer.step()
            scheduler.step()
        model.eval()
        sums = torch.zeros(2, device=device)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for source, target in check:
                source, target = source.to(device), target.to(device)
                logits = model(source, target[:, :-1]).float()
                count = (target[:, 1:] != PAD).sum()
                sums += torch.stack([criterion(logits.flatten(0, 1), target[:, 1:].flatten()) * count, count])
        dist.all_reduce(sums)
        state.epoch = epoch + 1
        if rank == 0:
            print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.3f} in {time.perf_counter() - started:.1f} s")
            state.save()
        dist.barrier(device_ids=[local_rank])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
