"""Student and momentum teacher on several crops, schedules as arrays, a centre kept by all_reduce."""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import metrics as utils
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def get_args_parser():
    parser = argparse.ArgumentParser("self-distillation", add_help=False)
    parser.add_argument("--out_dim", default=64, type=int)
    parser.add_argument("--local_crops_number", default=2, type=int)
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--warmup_epochs", default=1, type=int)
    parser.add_argument("--freeze_last_layer", default=1, type=int)
    parser.add_argument("--batch_size_per_gpu", default=8, type=int)
    parser.add_argument("--lr", default=0.0005, type=float)
    parser.add_argument("--momentum_teacher", default=0.996, type=float)
    parser.add_argument("--clip_grad", default=3.0, type=float)
    parser.add_argument("--output_dir", default="./checkpoints", type=str)
    parser.add_argument("--saveckp_freq", default=2, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--num_workers", default=1, type=int)
    return parser


class MultiCrop(Dataset):
    def __init__(self, size, local_crops_number):
        self.size, self.local_crops_number = size, local_crops_number

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        crops = [image + 0.1 * torch.randn(3, 32, 32) for _ in range(2)]
        crops += [image[:, :16, :16] + 0.1 * torch.randn(3, 16, 16) for _ in range(self.local_crops_number)]
        return crops, index


class MultiCropWrapper(nn.Module):
    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x):
        x = x if isinstance(x, list) else [x]
        sizes = torch.tensor([inp.shape[-1] for inp in x])
        idx_crops = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start_idx, output = 0, torch.empty(0)
        for end_idx in idx_crops:
            output = torch.cat((output, self.backbone(torch.cat(x[start_idx:end_idx]))))
            start_idx = end_idx
        return self.head(output)


class Head(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, 32), nn.GELU(), nn.Linear(32, 16))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, out_dim, bias=False))

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


def backbone():
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class DistillationLoss(nn.Module):
    def __init__(self, out_dim, ncrops, teacher_temp=0.04, student_temp=0.1, center_momentum=0.9):
        super().__init__()
        self.ncrops, self.student_temp, self.teacher_temp = ncrops, student_temp, teacher_temp
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        student_out = (student_output / self.student_temp).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / self.teacher_temp, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = 0.0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                total_loss += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                n_loss_terms += 1
        self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def cosine_scheduler(base_value, final_value, epochs, niter_per_ep, warmup_epochs=0):
    warmup = np.linspace(0, base_value, warmup_epochs * niter_per_ep)
    iters = np.arange(epochs * niter_per_ep - len(warmup))
    rest = final_value + 0.5 * (base_value - final_value) * (1 + np.cos(np.pi * iters / len(iters)))
    schedule = np.concatenate((warmup, rest))
    assert len(schedule) == epochs * niter_per_ep
    return schedule


def train_one_epoch(student, teacher, teacher_without_ddp, loss_fn, data_loader, optimizer, schedules, epoch, args):
    metric_logger = utils.MetricLogger(delimiter="  ")
    header = f"Epoch: [{epoch}/{args.epochs}]"
    for it, (images, _) in enumerate(metric_logger.log_every(data_loader, 10, header)):
        it = len(data_loader) * epoch + it
        for param_group in optimizer.param_groups:
            param_group["lr"] = schedules["lr"][it]
        teacher_output = teacher(images[:2])
        student_output = student(images)
        loss = loss_fn(student_output, teacher_output)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training", force=True)
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), args.clip_grad)
        if epoch < args.freeze_last_layer:
            for n, p in student.named_parameters():
                if "last_layer" in n:
                    p.grad = None
        optimizer.step()
        with torch.no_grad():
            m = schedules["momentum"][it]
            for param_q, param_k in zip(student.module.parameters(), teacher_without_ddp.parameters(), strict=True):
                param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    metric_logger.synchronize_between_processes()
    print("Averaged stats:", metric_logger)
    return {k: meter.global_avg for k, meter in metric_logger.meters.items()}


def main(args):
    dist.init_process_group("gloo", init_method="env://")
    dist.barrier()
    utils.setup_for_distributed(utils.is_main_process())
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    print("\n".join(f"{k}: {v}" for k, v in sorted(dict(vars(args)).items())))

    dataset = MultiCrop(96, args.local_crops_number)
    sampler = DistributedSampler(dataset, shuffle=True)
    data_loader = DataLoader(
        dataset, sampler=sampler, batch_size=args.batch_size_per_gpu, num_workers=args.num_workers, drop_last=True
    )
    student = MultiCropWrapper(backbone(), Head(8, args.out_dim))
    teacher = MultiCropWrapper(backbone(), Head(8, args.out_dim))
    teacher_without_ddp = teacher
    student = nn.parallel.DistributedDataParallel(student)
    teacher_without_ddp.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    loss_fn = DistillationLoss(args.out_dim, args.local_crops_number + 2)
    optimizer = torch.optim.AdamW(student.parameters())
    schedules = {
        "lr": cosine_scheduler(args.lr, 1e-6, args.epochs, len(data_loader), args.warmup_epochs),
        "momentum": cosine_scheduler(args.momentum_teacher, 1, args.epochs, len(data_loader)),
    }
    for epoch in range(args.epochs):
        data_loader.sampler.set_epoch(epoch)
        stats = train_one_epoch(
            student, teacher, teacher_without_ddp, loss_fn, data_loader, optimizer, schedules, epoch, args
        )
        save_dict = {"student": student.state_dict(), "teacher": teacher.state_dict(), "epoch": epoch + 1}
        utils.save_on_master(save_dict, os.path.join(args.output_dir, "checkpoint.pth"))
        if args.saveckp_freq and epoch % args.saveckp_freq == 0:
            utils.save_on_master(save_dict, os.path.join(args.output_dir, f"checkpoint{epoch:04}.pth"))
        if utils.is_main_process():
            with (Path(args.output_dir) / "log.txt").open("a") as f:
                f.write(json.dumps({"epoch": epoch, **stats}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser("self-distillation", parents=[get_args_parser()])
    args = parser.parse_args()
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    main(args)
