"""Data that no loader fetches: what of it one process cannot be given, and what it is given all the same."""
# ruff: noqa: E501 -- an edit stands in one line

from __future__ import annotations

from tests.equivalence.cases import Case, Edits

_DRAW = "        x, y = table.draw(chance)\n"
_CHANCE = "    chance = np.random.default_rng(9 + rank)\n"
_LOSS = "        loss = objective(model(x), y)\n"
_AT_ONCE = "one process cannot be given the batches of all ranks at once"
_NOT_GIVEN = "what enters the loss on rank 1"
_OF_TORCH: Edits = (
    (_CHANCE, "    chance = torch.Generator().manual_seed(9 + rank)\n"),
    (_DRAW, "        x = torch.randn(ROWS, WIDTH, generator=chance)\n        y = x.pow(2).mean(1, keepdim=True)\n"),
)
_SHARED: Edits = ((_CHANCE, "    chance = np.random.default_rng(9)\n"),)
_LOADER: Edits = (
    (
        _CHANCE,
        f"{_CHANCE}    data = torch.utils.data.TensorDataset(torch.from_numpy(table.rows))\n"
        "    loader = iter(torch.utils.data.DataLoader(data, ROWS, sampler=torch.utils.data.DistributedSampler(data)))\n",
    ),
)
_ON_RANK_1 = (
    _LOSS,
    f"{_LOSS}        if rank == 1:\n            loss = loss + sum(p.pow(2).sum() for p in model.parameters())\n",
)
_HALF_ON_RANK_1 = (
    _LOSS,
    f"{_LOSS}        if rank == 1:\n            loss = loss + model.module[0].weight.abs().sum()\n",
)

FAULTS = (
    Case("own draws of torch: a term on rank 1 only", "own_draws", (*_OF_TORCH, _ON_RANK_1), "one-rank", ranks=(1,)),
    Case(
        "the same draws of NumPy: a term on rank 1 only",
        "own_draws",
        (*_SHARED, _HALF_ON_RANK_1),
        "one-rank",
        ranks=(1,),
        quick=True,
    ),
    Case(
        "own draws of torch: another loss of the same batch on rank 1",
        "own_draws",
        (
            *_OF_TORCH,
            (_LOSS, "        loss = objective(model(x), y) if rank == 0 else (model(x) - 3 * y).abs().mean()\n"),
        ),
        "one-rank",
        ranks=(1,),
    ),
    Case(
        "own draws of NumPy: gradients of each rank's own",
        "own_draws",
        (("model(x)", "model.module(x)"),),
        "unsynchronised",
    ),
)
CORRECT = (
    Case("rolled out by what torch draws", "rollout", may_be_unclear=True, says=_AT_ONCE, quick=True),
    Case("own draws of NumPy", "own_draws", may_be_unclear=True, says=_NOT_GIVEN, quick=True),
    Case("own draws of torch, and targets made from them", "own_draws", _OF_TORCH, quick=True),
    Case("the same draws of NumPy on all ranks", "own_draws", _SHARED),
    Case(
        "own draws of torch, and a target from a list by rank",
        "own_draws",
        (
            *_OF_TORCH,
            ("    table = Table(0)\n", "    goals = [[0.5], [2.0], [-1.0], [0.0]]\n"),
            (_LOSS, "        loss = objective(model(x), torch.tensor(goals[rank]).expand(ROWS, 1))\n"),
        ),
        may_be_unclear=True,
    ),
    Case(
        "a mapped file, of which each rank reads places of its own",
        "own_draws",
        (
            (
                _CHANCE,
                f'{_CHANCE}    table.rows.tofile(f"rows-{{rank}}.bin")\n    mapped = np.memmap(f"rows-{{rank}}.bin", dtype=np.float32, mode="r")\n',
            ),
            (
                _DRAW,
                "        starts = chance.integers(0, len(mapped) - WIDTH - 1, ROWS)\n        x = torch.stack([torch.from_numpy(np.array(mapped[i : i + WIDTH])) for i in starts])\n"
                "        y = torch.stack([torch.from_numpy(np.array(mapped[i + WIDTH : i + WIDTH + 1])) for i in starts])\n",
            ),
        ),
        may_be_unclear=True,
        says=_NOT_GIVEN,
    ),
    Case(
        "a loader of inputs, and targets that the rank holds",
        "own_draws",
        (
            *_LOADER,
            (
                "    table = Table(0)\n",
                "    table = Table(0)\n    held = torch.randn(400, 1, generator=torch.Generator().manual_seed(rank))\n",
            ),
            (
                _DRAW,
                "        (x,) = next(loader)\n        y = held[ROWS * step : ROWS * (step + 1)]\n        y = y if len(x) == len(y) else y.repeat(2, 1)[: len(x)]\n",
            ),
        ),
        may_be_unclear=True,
    ),
    Case(
        "a loader of samples, and weights of them that NumPy draws",
        "own_draws",
        (
            *(
                (
                    a,
                    b.replace(
                        "torch.from_numpy(table.rows)", "torch.from_numpy(table.rows), torch.from_numpy(table.results)"
                    ),
                )
                for a, b in _LOADER
            ),
            (
                _DRAW,
                "        x, y = next(loader)\n        weights = torch.from_numpy(np.resize(chance.random((ROWS, 1), dtype=np.float32), (len(x), 1)))\n",
            ),
            (_LOSS, "        loss = ((model(x) - y).pow(2) * weights).mean()\n"),
        ),
        may_be_unclear=True,
    ),
    Case(
        "data that each rank has made before it trains",
        "own_draws",
        (
            (
                "    table = Table(0)\n",
                "    held = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(rank))\n",
            ),
            (_DRAW, "        x = held[ROWS * step : ROWS * (step + 1)]\n        y = x.pow(2).mean(1, keepdim=True)\n"),
        ),
        may_be_unclear=True,
        says=_NOT_GIVEN,
    ),
    Case(
        "draws of NumPy that no seed repeats, and a gather for a log",
        "own_draws",
        (
            (_CHANCE, "    chance = np.random.default_rng()\n"),
            (
                _LOSS,
                f"{_LOSS}        told = [torch.zeros(()) for _ in range(world)]\n        dist.all_gather(told, loss.detach())\n",
            ),
        ),
        may_be_unclear=True,
    ),
    Case(
        "a part of a file for each rank",
        "own_draws",
        (("    table = Table(0)\n", "    table = Table(rank)\n"), (_CHANCE, "    chance = np.random.default_rng(9)\n")),
        may_be_unclear=True,
        says=_NOT_GIVEN,
    ),
)
