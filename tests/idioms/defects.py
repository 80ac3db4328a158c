"""Variants of the idioms with one well-known defect each, made by one edit, and what must be found."""

from __future__ import annotations

from tests.script_table.model import Edit


class Defect(Edit, frozen=True, kw_only=True):
    """An idiom with one edit that breaks it."""

    idiom: str


DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="every rank stops early by its own loss",
        idiom="early_stopping",
        file="early_stopping.py",
        old="        dist.broadcast(stop, src=0)\n        if stop.item() == 1:",
        new="        if x.mean().item() > (0.0 if rank else 9.0):",
        code="DDP301",
        others=("DDP302",),
    ),
    Defect(
        name="no sampler",
        idiom="callbacks_and_json",
        file="project/trainer.py",
        old="            sampler=sampler,\n",
        new="            shuffle=True,\n",
        code="DDP101",
    ),
    Defect(
        name="every rank saves",
        idiom="self_distillation",
        file="metrics.py",
        old="    if is_main_process():\n        torch.save(*args, **kwargs)",
        new="    torch.save(*args, **kwargs)",
        code="DDP601",
    ),
    Defect(
        name="the loss through model.module",
        idiom="knowledge_distillation",
        file="knowledge_distillation.py",
        old="            logits = student(x)\n",
        new="            logits = student.module(x)\n",
        code="DDP207",
    ),
    Defect(
        name="accumulation without no_sync",
        idiom="token_stream",
        file="token_stream.py",
        old="            with model.no_sync():\n"
        "                loss = model(sample)\n"
        "                (loss / len(samples)).backward()\n",
        new="            loss = model(sample)\n            (loss / len(samples)).backward()\n",
        code="DDP204",
        severity="warning",
    ),
    Defect(
        name="rank 0 alone decides that its budget is used up",
        idiom="time_limited",
        file="time_limited.py",
        old="            if step % 10 == 0 and interrupt.agreed():\n",
        new="            if step == 11 and rank == 0:\n",
        code="DDP301",
    ),
    Defect(
        name="an unseeded split",
        idiom="early_stopping",
        file="early_stopping.py",
        old="random_split(data, [256, 64], generator=torch.Generator().manual_seed(42))",
        new="random_split(data, [256, 64])",
        code="DDP107",
    ),
)
