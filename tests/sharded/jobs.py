"""Sharded jobs made from the bundled example: right ones of every kind, and what is wrong in the others.

What each must give was written down before it was first examined.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2" / "train.py"
SHARDED = """    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
"""
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
STEP = "            optimizer.step()\n"
FORWARD = "            nn.functional.cross_entropy(model(inputs), labels).backward()\n"
CLIPPED = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
EVALUATION = "        accuracy = evaluate(model, test_loader)\n"
SAVED = """    parts, state = get_state_dict(model, optimizer)
    dcp.save({"model": parts, "optimizer": state}, checkpoint_id=directory[0])
"""
SAMPLER = "    sampler = DistributedSampler(train_set)\n"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """An edit of the example, and what is found in it."""

    name: str
    edits: tuple[tuple[str, str], ...] = ()
    found: str = ""
    """The check that must speak in a rehearsal; empty where nothing may."""
    ranks: int = 2

    def text(self) -> str:
        """The script."""
        text = EXAMPLE.read_text(encoding="utf-8")
        for old, new in self.edits:
            assert text.count(old) == 1, (self.name, old)
            text = text.replace(old, new)
        return text


FULLY_SHARDED = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
WHOLE_STATE = """    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    parts = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(parts, f"{directory[0]}/model.pt")
"""
RIGHT = (
    Job(name="as it is"),
    Job(name="replicated shards", edits=(("default=1)", "default=2)"),), ranks=4),
    Job(
        name="the older wrapper",
        edits=(
            (SHARDED, "    model = FSDP(model, device_id=torch.device('cpu'))\n"),
            ("from torch.distributed.fsdp import fully_shard\n", FULLY_SHARDED),
            (CLIPPED, "            model.clip_grad_norm_(1.0)\n"),
        ),
    ),
    Job(name="the whole state on rank 0", edits=((SAVED, WHOLE_STATE),)),
    Job(
        name="accumulation",
        edits=((STEP, STEP), (FORWARD, "            model.set_requires_gradient_sync(len(labels) > 1)\n" + FORWARD)),
    ),
)
WRONG = (
    Job(
        name="rank 0 evaluates alone",
        edits=(
            (
                EVALUATION,
                "        if dist.get_rank() == 0:\n            model(torch.randn(8, 64))\n        accuracy = 0.0\n",
            ),
        ),
        found="rank-zero-forward",
    ),
    Job(
        name="rank 0 evaluates alone without gradients",
        edits=(
            (
                EVALUATION,
                "        accuracy = 0.0\n        if dist.get_rank() == 0:\n            with torch.no_grad():\n"
                "                for _ in range(25):\n                    model(torch.randn(8, 64))\n",
            ),
        ),
        found="rank-zero-forward",
    ),
    Job(
        name="a rank skips a backward",
        edits=(
            (
                FORWARD,
                "            loss = nn.functional.cross_entropy(model(inputs), labels)\n"
                "            if dist.get_rank() == 1 and loss.item() > 0:\n                continue\n"
                "            loss.backward()\n",
            ),
        ),
        found="rank-divergent-collective",
    ),
    Job(
        name="rank 0 reduces along a dimension alone",
        edits=(
            ("default=1)", "default=2)"),
            (
                EVALUATION,
                EVALUATION
                + "        if dist.get_rank() == 0:\n"
                + '            dist.all_reduce(torch.tensor(accuracy), group=mesh["dp_shard"].get_group())\n',
            ),
        ),
        found="rank-divergent-collective",
        ranks=4,
    ),
    Job(
        name="the optimizer is older than the shards",
        edits=((OPTIMIZER, ""), (SHARDED, OPTIMIZER + SHARDED)),
        found="optimizer-misplaced",
    ),
    Job(
        name="the head is in no unit",
        edits=(("    fully_shard(model, mesh=mesh)\n", ""), (CLIPPED, "")),
        found="missing-ddp-wrap",
    ),
    Job(
        name="all ranks draw the same",
        edits=((SAMPLER, ""), (", sampler=sampler)", ", shuffle=True)"), ("        sampler.set_epoch(epoch)\n", "")),
        found="missing-distributed-sampler",
    ),
)
