"""The scripts with hard-coded NCCL and CUDA that are rehearsed on the stand-in, and what each must show."""

from __future__ import annotations

from pathlib import Path

from tests.script_table.model import Edit, Script

SCRIPTS = Path(__file__).parent / "scripts"


class CudaScript(Script, frozen=True, kw_only=True):
    """One of them, in the structure that well-known public ones have."""

    folder: Path = SCRIPTS


class Broken(Edit, frozen=True, kw_only=True):
    """A script with one edit that breaks it."""

    script: str


CUDA_SCRIPTS: tuple[CudaScript, ...] = (
    CudaScript(name="bert_pretraining"),
    CudaScript(name="detection_engine"),
    CudaScript(name="diffusion"),
    CudaScript(name="image_translation"),
    CudaScript(name="imagenet_resnet", advice=("DDP203",)),
    CudaScript(name="masked_autoencoder"),
    CudaScript(name="momentum_queue"),
    CudaScript(name="proximal_policy"),
    CudaScript(name="segmentation_reference", advice=("DDP203",)),
    CudaScript(name="self_supervised_views"),
    CudaScript(name="sequence_translation"),
    CudaScript(name="slurm_regression"),
    CudaScript(name="stream_prefetcher"),
    CudaScript(name="timm_like"),
    CudaScript(name="trainer_object", advice=("DDP606",)),
    CudaScript(name="tutorial_spawn"),
)

BROKEN: tuple[Broken, ...] = (
    Broken(
        name="the global rank as the GPU's index",
        script="diffusion",
        file="diffusion.py",
        old='    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()\n',
        new="    device = rank\n",
        code="DDP501",
        options=("--layout", "2x1"),
    ),
    Broken(
        name="no set_device",
        script="momentum_queue",
        file="momentum_queue.py",
        old="    torch.cuda.set_device(gpu)\n",
        new="",
        code="DDP502",
        severity="warning",
    ),
    Broken(
        name="rank 0 alone tries the wrapped model",
        script="imagenet_resnet",
        file="imagenet_resnet.py",
        old="        top1 = validate(",
        new="        if rank == 0:\n"
        "            model.eval()\n"
        "            with torch.no_grad():\n"
        "                model(held_out[0][0][None].cuda(gpu))\n"
        "        top1 = validate(",
        code="DDP303",
        severity="warning",
    ),
    Broken(
        name="a rank whose loss is NaN skips its backward",
        script="stream_prefetcher",
        file="stream_prefetcher.py",
        old="        optimizer.zero_grad()\n        scaler.scale(loss)",
        new="        if torch.isnan(loss):\n"
        "            data, target = prefetcher.next()\n"
        "            continue\n"
        "        optimizer.zero_grad()\n        scaler.scale(loss)",
        code="DDP312",
        severity="warning",
        options=("--stress", "nan"),
    ),
    Broken(
        name="a layer that no output needs",
        script="self_supervised_views",
        file="self_supervised_views.py",
        old="        self.norm = nn.LayerNorm(dim)\n",
        new="        self.norm = nn.LayerNorm(dim)\n        self.classes = nn.Linear(dim, 10)\n",
        code="DDP201",
    ),
    Broken(
        name="no sampler",
        script="stream_prefetcher",
        file="stream_prefetcher.py",
        old="pin_memory=True, sampler=sampler,",
        new="pin_memory=True, shuffle=True,",
        code="DDP101",
    ),
    Broken(
        name="every rank saves",
        script="self_supervised_views",
        file="self_supervised_views.py",
        old='        if args.rank == 0:\n            torch.save({"student"',
        new='        torch.save({"student"',
        code="DDP601",
    ),
    Broken(
        name="a checkpoint of GPU 0 on every GPU",
        script="imagenet_resnet",
        file="imagenet_resnet.py",
        old='torch.load(args.resume, map_location=f"cuda:{gpu}")',
        new="torch.load(args.resume)",
        code="DDP602",
        severity="warning",
    ),
    Broken(
        name="the validation loss of rank 0 as the job's",
        script="sequence_translation",
        file="sequence_translation.py",
        old="        dist.all_reduce(sums)\n",
        new="",
        code="DDP606",
        severity="advice",
    ),
    Broken(
        name="the loss through model.module",
        script="masked_autoencoder",
        file="masked_autoencoder.py",
        old="                loss = model(samples,",
        new="                loss = model.module(samples,",
        code="DDP207",
    ),
)
