"""The correct scripts, which have the shapes of the faults."""
# ruff: noqa: E501 -- an edit stands in one line

from __future__ import annotations

from tests.equivalence.cases import (
    ALL_REDUCED,
    AUX,
    BACKWARD,
    BOX_LOSS,
    BOX_MEANS,
    BOXES_APART,
    BY_LIST,
    BY_POSITION,
    CONVERT,
    COUNT_ON_ALL,
    IN_A_CONFIGURATION,
    READ_BY_ALL,
    REDUCE,
    STEP,
    SUM,
    WRAP,
    Case,
)

_LOADER = "    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n"

CORRECT = (
    Case("vision", "vision", quick=True),
    Case(
        "vision: the sum over the batch by its length",
        "vision",
        (("F.cross_entropy(out, labels)", 'F.cross_entropy(out, labels, reduction="sum") / len(labels)'),),
    ),
    Case(
        "vision: gradients clamped by a hook that never has to",
        "vision",
        ((WRAP, f"{WRAP}    for p in model.parameters():\n        p.register_hook(lambda g: g.clamp(-1e3, 1e3))\n"),),
    ),
    Case(
        "vision: gradients as views of the buckets",
        "vision",
        ((WRAP, "    model = DDP(Net(), gradient_as_bucket_view=True, static_graph=True)\n"),),
    ),
    Case(
        "vision: a head that the loss leaves out",
        "vision",
        ((WRAP, "    model = DDP(Net(), find_unused_parameters=True)\n"), (AUX, "")),
    ),
    Case(
        "vision: evaluated before it is trained",
        "vision",
        (
            (
                "    for epoch in range(2):\n",
                "    with torch.no_grad():\n        for images, labels in loader:\n            model(images)\n    for epoch in range(2):\n",
            ),
        ),
    ),
    Case("vision: seeds by rank", "vision", ((WRAP, f"    torch.manual_seed(100 + rank)\n{WRAP}"),)),
    Case(
        "vision: mixed pictures",
        "vision",
        (
            (
                "            out, aux = model(images)\n",
                "            share, order = torch.rand(()).item(), torch.randperm(len(images))\n            images = share * images + (1 - share) * images[order]\n            out, aux = model(images)\n",
            ),
            (
                "F.cross_entropy(out, labels)",
                "share * F.cross_entropy(out, labels) + (1 - share) * F.cross_entropy(out, labels[order])",
            ),
        ),
        may_be_unclear=True,
    ),
    Case(
        "vision: pictures with noise of the loader",
        "vision",
        (
            (
                _LOADER,
                "    def collate(pairs):\n        x, y = torch.utils.data.default_collate(pairs)\n        return x + 0.1 * torch.randn_like(x), y\n\n    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), collate_fn=collate)\n",
            ),
        ),
    ),
    Case(
        "vision: noise on the pictures in the step",
        "vision",
        (("model(images)", "model(images + 0.1 * torch.randn_like(images))"),),
    ),
    Case(
        "vision: a scale that is taken back",
        "vision",
        (
            (
                BACKWARD,
                "(loss * 128).backward()\n            for p in model.parameters():\n                p.grad /= 128",
            ),
        ),
    ),
    Case(
        "vision: a loss that adds up its samples",
        "vision",
        (
            ("F.cross_entropy(out, labels)", 'F.cross_entropy(out, labels, reduction="sum")'),
            (AUX, AUX.replace("labels)", 'labels, reduction="sum")')),
        ),
        may_be_unclear=True,
    ),
    Case("vision: the last batch is short", "vision", ((_LOADER, _LOADER.replace("batch_size=4", "batch_size=7")),)),
    Case("vision: several ranks demanded", "vision", ((WRAP, f"    assert world > 1\n{WRAP}"),), may_be_unclear=True),
    Case(
        "vision: a factor from Python's random",
        "vision",
        ((BACKWARD, "(loss * __import__('random').random()).backward()"),),
        may_be_unclear=True,
    ),
    Case("norms", "norms"),
    Case(
        "norms: each rank with the statistics of its own batch",
        "norms",
        ((CONVERT, ""),),
        says="batch norm",
        quick=True,
    ),
    Case(
        "norms: frozen",
        "norms",
        (
            (
                "            loss = criterion",
                "            for part in model.modules():\n                if isinstance(part, nn.SyncBatchNorm):\n                    part.eval()\n            loss = criterion",
            ),
        ),
    ),
    Case("language", "language", quick=True),
    Case(
        "language: counts gathered",
        "language",
        (
            (
                ALL_REDUCED,
                "        counts = [torch.zeros(()) for _ in range(world)]\n        dist.all_gather(counts, tokens)\n        tokens = torch.stack(counts).sum()\n",
            ),
        ),
    ),
    Case("gan", "gan"),
    Case(
        "gan: noise by rank",
        "gan",
        (("    for (real,) in loader:\n", "    torch.manual_seed(rank)\n    for (real,) in loader:\n"),),
    ),
    Case("accumulation", "accumulation"),
    Case(
        "accumulation: reduced with every pass",
        "accumulation",
        (("contextlib.nullcontext() if last else model.no_sync()", "contextlib.nullcontext()"),),
    ),
    Case(
        "accumulation: by the flag",
        "accumulation",
        (
            (
                "        with contextlib.nullcontext() if last else model.no_sync():\n",
                "        model.require_backward_grad_sync = last\n        with contextlib.nullcontext():\n",
            ),
        ),
    ),
    Case("a global batch", "global_batch"),
    Case("bfloat16", "precision"),
    Case(
        "bfloat16: compressed gradients",
        "precision",
        (
            (
                "    optimizer =",
                "    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n    model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n    optimizer =",
            ),
        ),
    ),
    Case("a hook", "hooks"),
    Case(
        "a hook of torch's",
        "hooks",
        (
            (
                "(None, averaged)",
                "(None, __import__('torch.distributed.algorithms.ddp_comm_hooks.default_hooks', fromlist=['x']).allreduce_hook)",
            ),
        ),
    ),
    Case("two models", "two_models"),
    Case("by hand", "by_hand"),
    Case(
        "by hand: the loss by the world size, and summed",
        "by_hand",
        ((REDUCE, SUM), ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) / world")),
    ),
    Case("detection", "detection"),
    Case(
        "detection: the boxes divided by the number of them on all ranks",
        "detection",
        ((BOX_LOSS, '"boxes": apart.sum() / count}'), (BOX_MEANS, BOXES_APART + COUNT_ON_ALL)),
        may_be_unclear=True,
    ),
    Case("weights", "weights"),
    Case(
        "weights: of all parts together",
        "weights",
        (
            (
                "mine = labels\n",
                "share = 64 // world\n    counts = labels[rank * share : (rank + 1) * share].bincount(minlength=3)\n    dist.all_reduce(counts)\n    mine = torch.arange(3).repeat_interleave(counts)\n",
            ),
        ),
    ),
    Case("named: an argument's default, and another with the same value", "named"),
    Case("named: a list of devices", "named", BY_LIST, arguments=("--passes", "2", "--devices", "0,1")),
    Case("named: the second of two positions", "named", BY_POSITION, arguments=("2", "2")),
    Case(
        "named: in the call that makes the group",
        "named",
        (("world_size=ranks", "world_size=2"),),
        may_be_unclear=True,
        says="creates a group of 2 ranks",
    ),
    Case("spawned: a number in the script", "spawned", quick=True),
    Case("spawned: a number in a configuration", "spawned", IN_A_CONFIGURATION),
    Case(
        "spawned: a number that the ranks read for themselves",
        "spawned",
        (*READ_BY_ALL, ("        loss.backward()\n", "        (loss * WORLD).backward()\n")),
        may_be_unclear=True,
        says="read from a variable of the module",
    ),
    Case(
        "spawned: a number that is written twice",
        "spawned",
        (("world_size=world", "world_size=2"),),
        may_be_unclear=True,
        says="creates a group of 2 ranks",
    ),
    Case(
        "vision: a loss that nothing changes",
        "vision",
        (
            (
                "nn.Linear(8, 5)\n        self.aux = nn.Linear(8, 5)",
                "nn.Linear(8, 1)\n        self.aux = nn.Linear(8, 1)",
            ),
            ("randint(0, 5,", "randint(0, 1,"),
        ),
        says="a gradient of zero",
        quick=True,
    ),
    Case("centred", "centred"),
    Case(
        "centred: a mean of the own samples, which DDP spreads from rank 0",
        "centred",
        (("            dist.all_reduce(mean)\n            mean = mean / dist.get_world_size()\n", ""),),
        may_be_unclear=True,
        says="buffer center has other values",
    ),
    Case(
        "centred: a mean of the own samples that is only kept",
        "centred",
        (
            ("            dist.all_reduce(mean)\n            mean = mean / dist.get_world_size()\n", ""),
            ("(told - self.center)", "told"),
        ),
        says="buffer center has other values",
    ),
    Case(
        "vision: clipped, by keyword",
        "vision",
        ((STEP, f"            nn.utils.clip_grad_norm_(model.parameters(), max_norm=50.0)\n{STEP}"),),
        quick=True,
    ),
    Case(
        "vision: clipped to a small norm",
        "vision",
        ((STEP, f"            nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n{STEP}"),),
        says="compute the gradient that one process would",
    ),
    Case(
        "vision: values clipped, by keyword",
        "vision",
        ((STEP, f"            nn.utils.clip_grad_value_(list(model.parameters()), clip_value=50.0)\n{STEP}"),),
    ),
    Case(
        "vision: ends without a word where there are not two GPUs",
        "vision",
        ((WRAP, f"    if torch.cuda.device_count() < 2:\n        return\n{WRAP}"),),
        quick=True,
    ),
    Case(
        "vision: fails where there are not two GPUs",
        "vision",
        (
            (
                WRAP,
                f'    if not torch.cuda.device_count() >= 2:\n        raise RuntimeError("this needs two GPUs")\n{WRAP}',
            ),
        ),
    ),
)
