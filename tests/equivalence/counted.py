"""Losses over the tokens of all ranks, whose batches do not fit together into one."""

from __future__ import annotations

from tests.equivalence.cases import Case, Edits

_SUMMED_COUNT = "    total = kept.sum()\n    dist.all_reduce(total)\n"
_GATHERED_COUNTS = "    counts = [torch.zeros(()) for _ in range(world)]\n    dist.all_gather(counts, kept.sum())\n"
_ONE_PASS = "        objective(net, ragged(rng, 6, 20), world).backward()\n"
_TWO_PASSES = """        blocks = [ragged(rng, 6, 20) for _ in range(2)]
        total = sum((block[:, 1:] != PAD).sum() for block in blocks)
        dist.all_reduce(total)
        for block in blocks:
            objective(net, block, total).backward()
"""
_SUMS_BY_HAND: Edits = (
    (
        "DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))",
        "nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))",
    ),
    (_ONE_PASS, f"{_ONE_PASS}        for p in net.parameters():\n            dist.all_reduce(p.grad)\n"),
)
_BY_HAND: Edits = (
    *_SUMS_BY_HAND,
    ("dist.all_reduce(p.grad)\n", "dist.all_reduce(p.grad)\n            p.grad /= world\n"),
)
FAULTS = (
    Case(
        "ragged: all tokens counted, and averaged on top",
        "ragged",
        ((" * world / total", " / total"),),
        "scaled",
        0.5,
        says="divided by a count of all ranks",
        line="total",
        quick=True,
    ),
    Case(
        "ragged: the counts gathered",
        "ragged",
        ((_SUMMED_COUNT, _GATHERED_COUNTS), (" * world / total", " / sum(counts)")),
        "scaled",
        0.5,
        line="sum(counts)",
    ),
    Case(
        "ragged: a count beside a number for the log",
        "ragged",
        (
            (
                _SUMMED_COUNT,
                "    sums = torch.stack([(each * kept).sum().detach(), kept.sum()])\n    dist.all_reduce(sums)\n",
            ),
            (" * world / total", " * (1 / sums[1])"),
        ),
        "scaled",
        0.5,
        line="sums",
    ),
    Case(
        "ragged: the count of all passes of a step",
        "ragged",
        (
            (_SUMMED_COUNT, ""),
            (" * world / total", " / total"),
            ("def objective(net, block, world)", "def objective(net, block, total)"),
            (_ONE_PASS, _TWO_PASSES),
        ),
        "scaled",
        0.5,
        line="total",
    ),
    Case(
        "ragged: averaged by hand",
        "ragged",
        ((" * world / total", " / total"), *_BY_HAND),
        "scaled",
        0.5,
        line="total",
    ),
)
CORRECT = (
    Case("ragged", "ragged", may_be_unclear=True, says="at once", quick=True),
    Case(
        "ragged: the mean of the counts",
        "ragged",
        ((" * world / total", " / torch.clamp(total / world, min=1)"),),
        may_be_unclear=True,
    ),
    Case(
        "ragged: the rank's own count",
        "ragged",
        (("    dist.all_reduce(total)\n", ""), ("* world ", "")),
        may_be_unclear=True,
    ),
    Case("ragged: a fixed number", "ragged", ((" * world / total", " / 100"),), may_be_unclear=True),
    Case("ragged: summed by hand", "ragged", ((" * world / total", " / total"), *_SUMS_BY_HAND), may_be_unclear=True),
)
