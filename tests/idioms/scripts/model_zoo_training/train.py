"""Two-stage arguments, EMA, batch-norm statistics distributed per epoch, checkpoints that rotate, a CSV summary."""

import argparse
import csv
import json
import logging
import os
import time
from collections import OrderedDict
from datetime import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from zoo import CheckpointSaver, ModelEma, distribute_bn, reduce_tensor

_logger = logging.getLogger("train")

config_parser = parser = argparse.ArgumentParser(description="Training Config", add_help=False)
parser.add_argument("-c", "--config", default="", type=str, metavar="FILE", help="JSON file with defaults")
parser = argparse.ArgumentParser(description="Training")
parser.add_argument("--num-classes", type=int, default=None)
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--clip-grad", type=float, default=None)
parser.add_argument("--model-ema", action="store_true")
parser.add_argument("--dist-bn", type=str, default="reduce", help='("broadcast", "reduce", or "")')
parser.add_argument("--recovery-interval", type=int, default=2)
parser.add_argument("--log-interval", type=int, default=2)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--output", default="", type=str)
parser.add_argument("--experiment", default="", type=str)


def _parse_args():
    args_config, remaining = config_parser.parse_known_args()
    if args_config.config:
        with open(args_config.config) as f:
            parser.set_defaults(**json.load(f))
    return parser.parse_args(remaining)


def get_outdir(path, *paths):
    outdir = os.path.join(path, *paths)
    os.makedirs(outdir, exist_ok=True)
    return outdir


def update_summary(epoch, train_metrics, eval_metrics, filename, write_header=False):
    rowd = OrderedDict(epoch=epoch)
    rowd.update([("train_" + k, v) for k, v in train_metrics.items()])
    rowd.update([("eval_" + k, v) for k, v in eval_metrics.items()])
    with open(filename, mode="a") as cf:
        dw = csv.DictWriter(cf, fieldnames=rowd.keys())
        if write_header:
            dw.writeheader()
        dw.writerow(rowd)


def make_dataset(size, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 12, 12, generator=generator)
    return TensorDataset(x, torch.randint(classes, (size,), generator=generator))


def main():
    logging.basicConfig(level=logging.INFO)
    args = _parse_args()
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    args.world_size, args.rank = 1, 0
    if args.distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
        args.world_size, args.rank = dist.get_world_size(), dist.get_rank()
    _logger.info(f"Process {args.rank}, total {args.world_size}.")
    torch.manual_seed(42 + args.rank)

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, args.num_classes)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    model_ema = ModelEma(model, decay=0.9998) if args.model_ema else None
    if args.distributed:
        model = NativeDDP(model, broadcast_buffers=not args.dist_bn)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    dataset_train = make_dataset(160, args.num_classes, 0)
    dataset_eval = make_dataset(64, args.num_classes, 1)
    sampler = DistributedSampler(dataset_train) if args.distributed else None
    loader_train = DataLoader(
        dataset_train, args.batch_size, sampler=sampler, shuffle=sampler is None, num_workers=args.workers, drop_last=True
    )
    eval_sampler = DistributedSampler(dataset_eval, shuffle=False) if args.distributed else None
    loader_eval = DataLoader(dataset_eval, args.batch_size, sampler=eval_sampler)
    train_loss_fn, validate_loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()

    saver, output_dir = None, None
    if args.rank == 0:
        exp_name = args.experiment or "-".join([datetime.now().strftime("%Y%m%d-%H%M%S"), "convnet"])
        output_dir = get_outdir(args.output if args.output else "./output/train", exp_name)
        saver = CheckpointSaver(model, optimizer, model_ema, checkpoint_dir=output_dir, recovery_dir=output_dir)
        with open(os.path.join(output_dir, "args.json"), "w") as f:
            json.dump(vars(args), f)
    best_metric = best_epoch = None
    try:
        for epoch in range(args.epochs):
            if args.distributed and hasattr(loader_train.sampler, "set_epoch"):
                loader_train.sampler.set_epoch(epoch)
            train_metrics = train_one_epoch(epoch, model, loader_train, optimizer, train_loss_fn, args, saver, model_ema)
            if args.distributed and args.dist_bn in ("broadcast", "reduce"):
                distribute_bn(model, args.world_size, args.dist_bn == "reduce")
            eval_metrics = validate(model, loader_eval, validate_loss_fn, args)
            if model_ema is not None:
                if args.distributed and args.dist_bn in ("broadcast", "reduce"):
                    distribute_bn(model_ema, args.world_size, args.dist_bn == "reduce")
                eval_metrics = validate(model_ema.module, loader_eval, validate_loss_fn, args)
            lr_scheduler.step()
            if output_dir is not None:
                summary = os.path.join(output_dir, "summary.csv")
                update_summary(epoch, train_metrics, eval_metrics, summary, write_header=best_metric is None)
            if saver is not None:
                best_metric, best_epoch = saver.save_checkpoint(epoch, metric=eval_metrics["top1"])
    except KeyboardInterrupt:
        pass
    if best_metric is not None:
        _logger.info(f"*** Best metric: {best_metric} (epoch {best_epoch})")
    if args.distributed:
        dist.destroy_process_group()


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, saver=None, model_ema=None):
    start = time.time()
    total, seen = 0.0, 0
    last_idx = len(loader) - 1
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == last_idx
        output = model(input)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        if model_ema is not None:
            model_ema.update(model.module if args.distributed else model)
        if last_batch or batch_idx % args.log_interval == 0:
            reduced_loss = reduce_tensor(loss.data, args.world_size) if args.distributed else loss.data
            total, seen = total + reduced_loss.item() * input.size(0), seen + input.size(0)
            if args.rank == 0:
                _logger.info(f"Train: {epoch} [{batch_idx}/{last_idx}] Loss: {total / seen:.4f} {time.time() - start:.1f} s")
        if saver is not None and args.recovery_interval and (last_batch or (batch_idx + 1) % args.recovery_interval == 0):
            saver.save_recovery(epoch, batch_idx=batch_idx)
    return OrderedDict([("loss", total / seen)])


def validate(model, loader, loss_fn, args):
    loss_sum = torch.zeros(())
    correct = torch.zeros(())
    batches = 0
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            output = model(input)
            loss, acc1 = loss_fn(output, target), (output.argmax(1) == target).float().mean()
            if args.distributed:
                loss, acc1 = reduce_tensor(loss.data, args.world_size), reduce_tensor(acc1, args.world_size)
            loss_sum += loss
            correct += acc1
            batches += 1
    return OrderedDict([("loss", (loss_sum / batches).item()), ("top1", (correct / batches).item())])


if __name__ == "__main__":
    main()
