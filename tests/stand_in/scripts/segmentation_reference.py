"""Semantic segmentation with an auxiliary head and a confusion matrix that all ranks share."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes, self.mat = num_classes, None

    def update(self, a, b):
        n = self.num_classes
        if self.mat is None:
            self.mat = torch.zeros((n, n), dtype=torch.int64, device=a.device)
        with torch.inference_mode():
            k = (a >= 0) & (a < n)
            inds = n * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=n**2).reshape(n, n)

    def reduce_from_all_processes(self):
        self.mat = reduce_across_processes(self.mat).to(torch.int64)

    def compute(self):
        h = self.mat.float()
        return torch.diag(h).sum() / h.sum(), torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h)).clamp(min=1)


def reduce_across_processes(val):
    t = val.clone().to("cuda")
    dist.barrier()
    dist.all_reduce(t)
    return t


class Shapes(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        mask = torch.zeros(20, 20, dtype=torch.int64)
        x, y = torch.randint(2, 12, (2,), generator=generator).tolist()
        mask[y : y + 6, x : x + 6] = 1 + index % 3
        mask[:1] = 255
        return torch.randn(3, 20, 20, generator=generator) + mask.clamp(max=3), mask


class Segmenter(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.classifier = nn.Sequential(nn.Conv2d(12, 12, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(12, classes, 1))
        self.aux_classifier = nn.Conv2d(12, classes, 1)

    def forward(self, x):
        features = self.backbone(x)
        return {"out": self.classifier(features), "aux": self.aux_classifier(features)}


def criterion(inputs, target):
    losses = {k: nn.functional.cross_entropy(v, target, ignore_index=255) for k, v in inputs.items()}
    return losses["out"] + 0.5 * losses["aux"]


def evaluate(model, data_loader, device, num_classes):
    model.eval()
    confmat, num_processed = ConfusionMatrix(num_classes), 0
    with torch.inference_mode():
        for image, target in data_loader:
            image, target = image.to(device), target.to(device)
            confmat.update(target.flatten(), model(image)["out"].argmax(1).flatten())
            num_processed += image.shape[0]
        confmat.reduce_from_all_processes()
    reduce_across_processes(torch.tensor(num_processed, device=device))
    return confmat


def train_one_epoch(model, optimizer, loader, lr_scheduler, device, scaler):
    model.train()
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        lr_scheduler.step()


def save_on_master(*args, **kwargs):
    if dist.get_rank() == 0:
        torch.save(*args, **kwargs)


def main(args):
    args.gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(args.gpu)
    dist.init_process_group("nccl", init_method=args.dist_url)
    dist.barrier()
    if dist.get_rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    dataset, dataset_test = Shapes(240), Shapes(60)
    train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    test_sampler = torch.utils.data.distributed.DistributedSampler(dataset_test, shuffle=False, drop_last=True)
    data_loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=train_sampler, num_workers=1, drop_last=True)
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=4, sampler=test_sampler, num_workers=1)
    model = Segmenter(4)
    model.to(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], gradient_as_bucket_view=True)
    model_without_ddp = model.module
    params_to_optimize = [
        {"params": [p for p in model_without_ddp.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model_without_ddp.classifier.parameters() if p.requires_grad]},
        {"params": [p for p in model_without_ddp.aux_classifier.parameters()], "lr": args.lr * 10},
    ]
    optimizer = torch.optim.SGD(params_to_optimize, lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    iters = len(data_loader)
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=iters * args.epochs, power=0.9)
    start_time = time.time()
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, data_loader, lr_scheduler, device, scaler)
        accuracy, iu = evaluate(model, data_loader_test, device, 4).compute()
        checkpoint = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        save_on_master(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))
        save_on_master(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
        if dist.get_rank() == 0:
            print(f"{epoch}: accuracy {accuracy:.3f} IoU {iu.mean():.3f} {time.time() - start_time:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lr", default=0.01, type=float)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--output-dir", default="seg_out")
    main(parser.parse_args())
