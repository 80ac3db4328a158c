"""Losses over the features of all ranks: how these are gathered decides whose gradient there is."""
# ruff: noqa: E501 -- an edit stands in one line

from __future__ import annotations

from tests.equivalence.cases import Case, Edits

_GATHERED = "    return torch.cat(Gather.apply(x))\n"
_NO_GRADIENT = """    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
"""
_LOCAL_TARGETS: Edits = (
    ("image, text, scale = model(a, b)", "image, text, scale = model(a, b)\n        first = rank * len(a)"),
    ("logits = scale * images @ texts.T", "mine, other = scale * image @ texts.T, scale * text @ images.T"),
    ("target = torch.arange(len(logits))", "target = torch.arange(first, first + len(a))"),
    ("F.cross_entropy(logits, target)", "F.cross_entropy(mine, target)"),
    ("F.cross_entropy(logits.T, target)", "F.cross_entropy(other, target)"),
)

FAULTS = (
    Case(
        "contrastive: gathered without gradient, the own part put back",
        "contrastive",
        ((_GATHERED, f"{_NO_GRADIENT}    parts[dist.get_rank()] = x\n    return torch.cat(parts)\n"),),
        "cut",
        0.5,
        ("image", "text"),
        says="all_gather",
    ),
    Case(
        "contrastive: the negatives of other ranks carry no gradient",
        "contrastive",
        ((_GATHERED, f"{_NO_GRADIENT}    parts[dist.get_rank()] = x\n    return torch.cat(parts)\n"), *_LOCAL_TARGETS),
        "cut",
        modules=("image", "text"),
        says="all_gather",
    ),
    Case(
        "contrastive: gathered without gradient, nothing put back",
        "contrastive",
        ((_GATHERED, f"{_NO_GRADIENT}    return torch.cat(parts)\n"), *_LOCAL_TARGETS),
        "cut",
        modules=("image", "text"),
        says="all_gather",
    ),
    Case(
        "contrastive: a gather whose backward adds nothing up",
        "contrastive",
        (("        dist.all_reduce(whole)\n", ""),),
        "part",
        0.5,
        ("image", "text"),
    ),
    Case(
        "contrastive: negatives of the own rank, and times the ranks",
        "contrastive",
        ((_GATHERED, "    return x\n"), ("target)) / 2", "target)) / 2 * world")),
        "scaled",
        2.0,
        line="* world",
        quick=True,
    ),
    Case(
        "contrastive: negatives of the own rank, and divided by the ranks",
        "contrastive",
        ((_GATHERED, "    return x\n"), ("target)) / 2", "target)) / 2 / world")),
        "scaled",
        0.5,
    ),
)

CORRECT = (
    Case("contrastive", "contrastive"),
    Case(
        "contrastive: torch's own gather",
        "contrastive",
        (
            (
                _GATHERED,
                "    import torch.distributed.nn.functional as gathers\n\n    return torch.cat(gathers.all_gather(x))\n",
            ),
        ),
    ),
    Case(
        "contrastive: negatives of the own rank", "contrastive", ((_GATHERED, "    return x\n"),), may_be_unclear=True
    ),
    Case(
        "contrastive: negatives that are meant to be constants",
        "contrastive",
        ((_GATHERED, f"{_NO_GRADIENT}    return torch.cat(parts).detach()\n"), *_LOCAL_TARGETS),
    ),
    Case(
        "contrastive: negatives gathered where no gradient is recorded",
        "contrastive",
        (
            (
                _GATHERED,
                "    with torch.no_grad():\n        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]\n        dist.all_gather(parts, x.contiguous())\n        return torch.cat(parts)\n",
            ),
            *_LOCAL_TARGETS,
        ),
    ),
    Case(
        "contrastive: features gathered into kept buffers for a log",
        "contrastive",
        (
            (
                "        optimizer.zero_grad()\n",
                "        dist.all_gather(kept, image.contiguous())\n        shown = torch.cat(kept).std().item()\n        optimizer.zero_grad()\n",
            ),
            (
                "    for a, b in loader:\n",
                "    kept = None\n    for a, b in loader:\n        kept = kept or [torch.zeros(len(a), 8) for _ in range(world)]\n",
            ),
        ),
    ),
)
