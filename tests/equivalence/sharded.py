"""Models sharded by ``fully_shard``: faults, and scripts that are correct."""
# ruff: noqa: E501, RUF001 -- an edit stands in one line, and the factor of a gradient is written with its sign

from __future__ import annotations

from tests.equivalence.cases import ALL_REDUCED, BACKWARD, Case

_TIMES_WORLD = ((BACKWARD, "(loss * world).backward()"),)
_MESH = 'init_device_mesh("cpu", (world,))'
_ROOT = "    fully_shard(model, mesh=mesh)\n"
_NOT_DIVIDED = (
    _ROOT,
    f"{_ROOT}    for module in (model, *model.blocks):\n        module.set_gradient_divide_factor(1.0)\n        module.set_force_sum_reduction_for_comms(True)\n",
)
_BLOCK = "        fully_shard(block, mesh=mesh)\n"
_POLICY = "mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
_BFLOAT16 = ((_BLOCK, f"        fully_shard(block, {_POLICY})\n"), (_ROOT, f"    fully_shard(model, {_POLICY})\n"))
_SYNC = "model.set_requires_gradient_sync(last)"

_CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n"
_SHARDS = "        own = [p.grad.to_local() for p in model.parameters()]\n"
_SQUARES = "sum(g.square().sum() for g in own)"
_MULTIPLIED = "        for g in own:\n            g.mul_(0.05 / norm)\n"
_OF_A_RANK = "by a factor of its own"

FAULTS = (
    Case("sharded: the loss times the world size", "sharded", _TIMES_WORLD, "scaled", 2.0, says="2.00 ×", quick=True),
    Case(
        "sharded: a divisor that sums",
        "sharded",
        (_NOT_DIVIDED,),
        "scaled",
        2.0,
    ),
    Case(
        "sharded: the divisor of one layer",
        "sharded",
        ((_ROOT, f"{_ROOT}    model.blocks[1].set_gradient_divide_factor(1.0)\n    model.blocks[1].set_force_sum_reduction_for_comms(True)\n"),),
        "part",
        2.0,
        ("blocks",),
    ),
    Case("sharded: a mean over a rank's own tokens", "sharded", ((ALL_REDUCED, ""), ("* world / tokens", "/ tokens")), "weighted"),
    Case(
        "sharded: smoothed labels on rank 0 only",
        "sharded",
        (("reduction=\"sum\"", "reduction=\"sum\", label_smoothing=0.2 * (rank == 0)"),),
        "one-rank",
        ranks=(1,),
    ),
    Case(
        "sharded: a head that is neither sharded nor reduced",
        "sharded",
        ((_ROOT, "    fully_shard(model, mesh=mesh, ignored_params=set(model.head.parameters()))\n"), (" " * 8 + "nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n", "")),
        "unsynchronised",
        None,
        ("head",),
    ),
    Case(
        "sharded: groups of one rank",
        "sharded",
        (
            (_MESH, 'init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))["shard"]'),
            (" " * 8 + "nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n", ""),
        ),
        "unsynchronised",
    ),
    Case(
        "sharded: clipped by the norm of a rank's own shards",
        "sharded",
        ((_CLIP, f"{_SHARDS}        norm = {_SQUARES}.sqrt()\n{_MULTIPLIED}"),),
        "own-factors",
        says=_OF_A_RANK,
        line="g.mul_",
        quick=True,
    ),
    Case(
        "sharded: divided in one call by the norm of a rank's own shards",
        "sharded",
        ((_CLIP, f"{_SHARDS}        norm = nn.utils.get_total_norm(own)\n        torch._foreach_div_(own, norm)\n"),),
        "own-factors",
        line="_foreach_div_",
    ),
    Case(
        "sharded: cut by torch to the norm of a rank's own shards",
        "sharded",
        ((_CLIP, f"{_SHARDS}        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, nn.utils.get_total_norm(own))\n"),),
        "own-factors",
        line="clip_grads_with_norm_",
    ),
    Case(
        "sharded: made anew by the largest element of a rank's own shards",
        "sharded",
        ((_CLIP, f"{_SHARDS}        most = max(g.abs().max() for g in own if g.numel())\n        for p in model.parameters():\n            p.grad = p.grad / most.item()\n"),),
        "own-factors",
        line="p.grad / most",
    ),
    Case(
        "sharded: copied with the factor of a rank's own tokens",
        "sharded",
        ((_CLIP, f"{_SHARDS}        for g in own:\n            g.copy_(g * float((ids != 0).sum()) / 40)\n"),),
        "own-factors",
        says=_OF_A_RANK,
    ),
    Case(
        "sharded: clipped on rank 1 alone",
        "sharded",
        ((_CLIP, f"{_SHARDS}        norm = {_SQUARES}.sqrt()\n        dist.all_reduce(norm)\n        if rank == 1:\n    {_MULTIPLIED.replace('            g', '                g')}"),),
        "own-factors",
        line="g.mul_",
    ),
    Case("sharded accumulation: not divided, and reduced by a sum", "sharded_accumulation", ((" / STEPS", " * world / STEPS"),), "scaled", 2.0),
    Case(
        "sharded bfloat16: the loss times the world size",
        "sharded",
        (*_BFLOAT16, *_TIMES_WORLD),
        "scaled",
        2.0,
    ),
)  # fmt: skip

CORRECT = (
    Case("sharded", "sharded", quick=True),
    Case("sharded: in pieces and copies", "sharded", ((_MESH, 'init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))'),)),
    Case("sharded: kept whole between forward and backward", "sharded", ((_ROOT, "    fully_shard(model, mesh=mesh, reshard_after_forward=False)\n"),)),
    Case("sharded: an embedding that is frozen", "sharded", ((_ROOT, f"    model.embedding.requires_grad_(False)\n{_ROOT}"),)),
    Case("sharded: made by each rank from a seed of its own", "sharded", (("    model = Model()\n", "    torch.manual_seed(rank)\n    model = Model()\n"),)),
    Case(
        "sharded: filled after it was sharded",
        "sharded",
        (
            ("    model = Model()\n", '    with torch.device("meta"):\n        model = Model()\n'),
            (
                _ROOT,
                f'{_ROOT}    model.to_empty(device="cpu")\n    for p in model.parameters():\n        nn.init.normal_(p, std=0.2)\n',
            ),
        ),
    ),
    Case(
        "sharded: clipped by a norm that is reduced",
        "sharded",
        ((_CLIP, f"{_SHARDS}        norm = {_SQUARES}\n        dist.all_reduce(norm)\n        norm = norm.sqrt()\n{_MULTIPLIED}"),),
    ),
    Case(
        "sharded: the norm of a rank's own shards is only shown",
        "sharded",
        ((_CLIP, f"{_SHARDS}        norm = {_SQUARES}.sqrt()\n        print(norm.item())\n{_CLIP}"),),
    ),
    Case(
        "sharded: cut by torch to the norm of all shards",
        "sharded",
        ((_CLIP, "        whole = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()\n        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, whole)\n"),),
    ),
    Case(
        "sharded: each shard cut to a value",
        "sharded",
        ((_CLIP, f"{_SHARDS}        for g in own:\n            g.clamp_(-0.002, 0.002)\n"),),
    ),
    Case("sharded: a sum of each rank, with the divisor of it", "sharded", (
        ("* world / tokens", "/ tokens"),
        _NOT_DIVIDED,
    )),
    Case("sharded: a head beside it that is averaged by hand", "sharded", (
        (_ROOT, "    fully_shard(model, mesh=mesh, ignored_params=set(model.head.parameters()))\n"),
        (" " * 8 + "nn.utils.clip_grad_norm_(model.parameters(), 50.0)\n", "        for p in model.head.parameters():\n            dist.all_reduce(p.grad)\n            p.grad /= world\n"),
    )),
    Case("sharded bfloat16", "sharded", _BFLOAT16),
    Case("sharded accumulation", "sharded_accumulation"),
    Case("sharded accumulation, each pass reduced", "sharded_accumulation", ((f"        {_SYNC}\n", ""),)),
)  # fmt: skip
