"""A trainer class with hooks and storage, started by a launch function: losses as a dict, proposals, a frozen stem."""

import argparse
import logging
import time
import weakref

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

_LOCAL_GROUP = None


def get_rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def synchronize():
    if dist.get_world_size() == 1:
        return
    if dist.get_backend() == dist.Backend.NCCL:
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def reduce_dict(losses):
    with torch.no_grad():
        names = sorted(losses)
        values = torch.stack([losses[name] for name in names])
        dist.reduce(values, dst=0)
        if dist.get_rank() == 0:
            values /= dist.get_world_size()
        return dict(zip(names, values))


class TrainingSampler(Sampler):
    """An endless shuffled stream of which each rank takes every n-th index."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        place = 0
        while True:
            for index in torch.randperm(self.size, generator=generator).tolist():
                if place % dist.get_world_size() == dist.get_rank():
                    yield index
                place += 1


class Scenes(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"image": torch.randn(3, 16, 16, generator=generator), "classes": torch.tensor(index % 3),
                "box": torch.rand(4, generator=generator)}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.cls_score, self.bbox_pred = nn.Linear(16, 3), nn.Linear(16, 4)
        self.register_buffer("pixel_mean", torch.zeros(3, 1, 1), persistent=False)
        for p in self.stem.parameters():
            p.requires_grad_(False)

    @property
    def device(self):
        return self.pixel_mean.device

    def forward(self, batched):
        images = torch.stack([x["image"].to(self.device) - self.pixel_mean for x in batched])
        features = self.body(self.stem(images))
        classes = torch.stack([x["classes"] for x in batched]).to(self.device)
        boxes = torch.stack([x["box"] for x in batched]).to(self.device)
        return {
            "loss_cls": nn.functional.cross_entropy(self.cls_score(features), classes),
            "loss_box_reg": nn.functional.smooth_l1_loss(self.bbox_pred(features), boxes),
        }


class HookBase:
    trainer = None

    def before_train(self): ...
    def after_step(self): ...
    def after_train(self): ...


class IterationTimer(HookBase):
    def before_train(self):
        self.start = time.perf_counter()

    def after_train(self):
        if get_rank() == 0:
            took = time.perf_counter() - self.start
            logging.info("%d iterations in %.1f s", self.trainer.iter + 1, took)


class Checkpointer(HookBase):
    def __init__(self, period):
        self.period = period

    def after_step(self):
        if (self.trainer.iter + 1) % self.period == 0:
            if get_rank() == 0:
                torch.save({"model": self.trainer.model.module.state_dict()}, f"model_{self.trainer.iter:07d}.pth")
            synchronize()


class Trainer:
    def __init__(self, model, loader, optimizer, hooks):
        self.model, self.optimizer, self._data = model, optimizer, iter(loader)
        self._hooks = hooks
        for hook in hooks:
            hook.trainer = weakref.proxy(self)
        self.grad_scaler = torch.cuda.amp.GradScaler()

    def train(self, max_iter):
        self.model.train()
        for hook in self._hooks:
            hook.before_train()
        for self.iter in range(max_iter):
            self.run_step()
            for hook in self._hooks:
                hook.after_step()
        for hook in self._hooks:
            hook.after_train()

    def run_step(self):
        assert torch.cuda.is_available(), "the trainer needs CUDA"
        data = next(self._data)
        with torch.amp.autocast("cuda", dtype=torch.float16):
            losses = self.model(data)
            total = sum(losses.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(total).backward()
        if self.iter % 20 == 0:
            torch.cuda.synchronize()
            reduce_dict({name: loss.detach().float() for name, loss in losses.items()})
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()


def main(args):
    torch.manual_seed(args.seed)
    model = Detector().to(torch.device("cuda"))
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], broadcast_buffers=False,
                                    gradient_as_bucket_view=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.02, momentum=0.9)
    data = Scenes()
    loader = DataLoader(data, batch_size=8, sampler=TrainingSampler(len(data), args.seed), num_workers=1,
                        collate_fn=list)
    Trainer(model, loader, optimizer, [IterationTimer(), Checkpointer(10)]).train(args.max_iter)


def _distributed_worker(local_rank, main_func, world_size, per_machine, machine_rank, dist_url, args):
    global _LOCAL_GROUP
    assert torch.cuda.is_available(), "cuda is not available. Please check your installation."
    rank = machine_rank * per_machine + local_rank
    dist.init_process_group("NCCL", init_method=dist_url, world_size=world_size, rank=rank)
    for machine in range(world_size // per_machine):
        group = dist.new_group(list(range(machine * per_machine, (machine + 1) * per_machine)))
        if machine == machine_rank:
            _LOCAL_GROUP = group
    assert per_machine <= torch.cuda.device_count()
    torch.cuda.set_device(local_rank)
    synchronize()
    main_func(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--max-iter", type=int, default=30)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    url = "tcp://127.0.0.1:49172"
    mp.start_processes(_distributed_worker, nprocs=args.num_gpus, start_method="spawn",
                       args=(main, args.num_gpus, args.num_gpus, 0, url, args))
