"""The faults, each an edit of a script, and what differs from one process; their twins are in ``correct``."""
# ruff: noqa: E501, RUF001 -- an edit stands in one line, and the factor of a gradient is written with its sign

from __future__ import annotations

from pathlib import Path

import msgspec

SCRIPTS = Path(__file__).with_name("scripts")
Edits = tuple[tuple[str, str], ...]


class Case(msgspec.Struct, frozen=True):
    """A script, what is changed in it, and what has to be said."""

    name: str
    script: str
    """Below ``scripts``."""
    edits: Edits = ()
    kind: str = ""
    """How the gradients differ; empty for a script that is correct."""
    factor: float | None = None
    modules: tuple[str, ...] = ()
    """Those that have to be named, and no others; empty for all."""
    ranks: tuple[int, ...] = ()
    may_be_unclear: bool = False
    """Of a correct script: nothing can be said of it by design, and nothing may be."""
    says: str = ""
    """Words of the sentence."""
    quick: bool = False
    """Part of the default tests."""
    arguments: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    """Arguments of another launch that is compared with, in place of one process."""
    against_ranks: int = 2
    line: str = ""
    """Words of the line that has to be named; a dash for none."""

    def text(self) -> str:
        """Return the script as it is run."""
        text = (SCRIPTS / f"{self.script}.py").read_text(encoding="utf-8")
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.name}: {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text


BACKWARD = "loss.backward()"
COUNT_ON_ALL = """        count = torch.tensor(float(count))
        dist.all_reduce(count)
        count = count / dist.get_world_size()
"""
BOX_LOSS = '"boxes": F.l1_loss(self.boxes(seen), boxes)}'
BOX_MEANS = '        boxes = torch.stack([target["boxes"].mean(0) for target in targets])\n'
BOXES_APART = """        count = sum(len(target["boxes"]) for target in targets)
        apart = torch.cat([(box - target["boxes"]).abs() for box, target in zip(self.boxes(seen), targets)])
"""
_STEP_OF_LOSS = "        loss.backward()\n"
BY_LIST: Edits = (
    ('"--processes", type=int, default=2', '"--devices"'),
    ("options.processes", 'len(options.devices.split(","))'),
)
BY_POSITION: Edits = (
    ("parser = argparse.ArgumentParser()\n", ""),
    ('parser.add_argument("--passes", type=int, default=2)\n', ""),
    ('parser.add_argument("--processes", type=int, default=2)\n', "import sys\n"),
    ("options = parser.parse_args()\n", ""),
    ("options.passes, options.processes", "int(sys.argv[1]), int(sys.argv[2])"),
)
IN_A_CONFIGURATION: Edits = (
    ("def main(rank, passes, world):\n", 'def main(rank, passes, options):\n    world = options["world"]\n'),
    ("(2, ranks)", '(2, {"epochs": 2, "world": ranks})'),
)
READ_BY_ALL: Edits = (("def main(", "WORLD = 2\n\n\ndef main("), ("    ranks = 2\n", "    ranks = WORLD\n"))
_TIMES_WORLD: Edits = ((BACKWARD, "(loss * world).backward()"),)
_BY_WORLD: Edits = ((BACKWARD, "(loss / world).backward()"),)
STEP = "            optimizer.step()\n"
AUX = "            loss = loss + 0.3 * F.cross_entropy(aux, labels)\n"
WRAP = "    model = DDP(Net())\n"
ALL_REDUCED = "        dist.all_reduce(tokens)\n"
_CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
REDUCE = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
"""
_STEP_OF_LANGUAGE = "        optimizer.step()\n"
_CLIP_LAST = "            nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"
_ACCUMULATED = "            loss = F.mse_loss(model(x), y) / STEPS\n            loss.backward()\n"
FOUR = ("STEPS = 2", "STEPS = 4")
_OF_CRITIC = "loss.backward()\n        of_critic.step()"
CONVERT = "    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)\n"
SUM = """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
"""

FAULTS = (
    Case("vision: the loss times the world size", "vision", _TIMES_WORLD, "scaled", 2.0, says="2.00 ×", quick=True),
    Case(
        "vision: an auxiliary loss on rank 0 only",
        "vision",
        (
            (
                AUX,
                f"            if rank == 0:\n    {AUX}            else:\n                loss = loss + 0 * aux.sum()\n",
            ),
        ),
        "one-rank",
        ranks=(1,),
    ),
    Case(
        "vision: gradients of the head multiplied by a hook",
        "vision",
        (
            (
                WRAP,
                f"{WRAP}    for p in model.module.head.parameters():\n        p.register_hook(lambda g: g * world)\n",
            ),
        ),
        "part",
        2.0,
        ("head",),
    ),
    Case(
        "vision: a head that DDP was told to ignore",
        "vision",
        (
            (
                WRAP,
                '    net = Net()\n    DDP._set_params_and_buffers_to_ignore_for_model(net, ["aux.weight", "aux.bias"])\n'
                "    model = DDP(net)\n",
            ),
        ),
        "unsynchronised",
        modules=("aux",),
    ),
    Case(
        "vision: no_sync around every pass",
        "vision",
        (
            (
                "            out, aux = model(images)\n",
                "            with model.no_sync():\n                out, aux = model(images)\n",
            ),
        ),
        "unsynchronised",
        quick=True,
    ),
    Case("norms: the loss by the world size, on pretended GPUs", "norms", _BY_WORLD, "scaled", 0.5),
    Case(
        "language: the mean over the tokens of each rank",
        "language",
        ((ALL_REDUCED, ""), (" * world / tokens", " / tokens")),
        "weighted",
        says="tokens",
        quick=True,
    ),
    Case(
        "language: the mean over the tokens of each rank, and clipped",
        "language",
        ((ALL_REDUCED, ""), (" * world / tokens", " / tokens"), (_STEP_OF_LANGUAGE, f"{_CLIP}{_STEP_OF_LANGUAGE}")),
        "weighted",
        says="before they are clipped",
        quick=True,
    ),
    Case(
        "vision: the loss times the world size, and clipped",
        "vision",
        (*_TIMES_WORLD, (STEP, f"    {_CLIP}{STEP}")),
        "scaled",
        2.0,
        says="before they are clipped",
    ),
    Case(
        "language: all tokens counted, and the mean of DDP forgotten",
        "language",
        ((" * world / tokens", " / tokens"),),
        "scaled",
        0.5,
        line="tokens",
    ),
    Case(
        "gan: the critic's loss times the world size",
        "gan",
        ((_OF_CRITIC, f"(world * loss).{_OF_CRITIC[5:]}"),),
        "part",
        2.0,
        ("model 1",),
    ),
    Case(
        "gan: the generator called around DDP",
        "gan",
        (("fake = generator(noise)", "fake = generator.module(noise)"),),
        "unsynchronised",
        modules=("model 0",),
    ),
    Case(
        "accumulation: no_sync around the last pass",
        "accumulation",
        (
            (
                "contextlib.nullcontext() if last else model.no_sync()",
                "model.no_sync() if last else contextlib.nullcontext()",
            ),
        ),
        "unsynchronised",
    ),
    Case(
        "accumulation: clipped after each pass",
        "accumulation",
        ((_ACCUMULATED, f"{_ACCUMULATED}{_CLIP_LAST}"), (f"        if last:\n{_CLIP_LAST}", "        if last:\n")),
        "clipped",
        says="clip_grad_norm_",
    ),
    Case(
        "a global batch: a divisor without the world size",
        "global_batch",
        (("/ steps\n", "/ (GLOBAL // BATCH)\n"),),
        "scaled",
        0.5,
    ),
    Case("a global batch: reduced with the first pass", "global_batch", (("== steps - 1", "== 0"),), "unsynchronised"),
    Case("bfloat16: the loss times the world size", "precision", _TIMES_WORLD, "scaled", 2.0),
    Case("a hook that sums", "hooks", ((".div_(dist.get_world_size())", ""),), "scaled", 2.0),
    Case(
        "a hook that reduces nothing",
        "hooks",
        (
            (
                "    future = dist.all_reduce(gradient, async_op=True).get_future()\n",
                "    future = torch.futures.Future()\n    future.set_result([gradient])\n",
            ),
        ),
        "unsynchronised",
    ),
    Case(
        "two models: the decoder's hook sums",
        "two_models",
        (
            (
                "    optimizer =",
                "    decoder.register_comm_hook(\n        None,\n        lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0]),\n"
                "    )\n    optimizer =",
            ),
        ),
        "part",
        2.0,
        ("model 1",),
    ),
    Case(
        "two models: the encoder called around DDP",
        "two_models",
        (("encoder(x).chunk", "encoder.module(x).chunk"),),
        "unsynchronised",
        modules=("model 0",),
    ),
    Case(
        "by hand: summed",
        "by_hand",
        (("            parameter.grad /= world\n", ""), ("0.1)\n        optimizer", "100.0)\n        optimizer")),
        "scaled",
        2.0,
    ),
    Case(
        "by hand: clipped before the reduction",
        "by_hand",
        ((f"{REDUCE}{_CLIP}", f"{_CLIP}{REDUCE}"),),
        "clipped",
        says="clip_grad_norm_",
    ),
    Case(
        "by hand: the gradient of rank 0 sent to all",
        "by_hand",
        (
            (REDUCE, "        for parameter in model.parameters():\n            dist.broadcast(parameter.grad, 0)\n"),
            ("0.1)\n        optimizer", "100.0)\n        optimizer"),
        ),
        "weighted",
    ),
    Case(
        "detection: the loss of the boxes on rank 0 only",
        "detection",
        (("sum(losses.values())", 'losses["kinds"] + losses["boxes"] * (rank == 0)'),),
        "one-rank",
        ranks=(1,),
    ),
    Case(
        "detection: the boxes divided by the rank's own number of them",
        "detection",
        ((BOX_LOSS, '"boxes": apart.sum() / count}'), (BOX_MEANS, BOXES_APART)),
        "weighted",
        says="a term of the loss is divided by a count of each rank's own",
        line="apart.sum() / count",
        quick=True,
    ),
    Case(
        "detection: the boxes divided by a tensor of their number",
        "detection",
        ((BOX_LOSS, '"boxes": 3 * (apart.sum() / torch.tensor(float(count)))}'), (BOX_MEANS, BOXES_APART)),
        "weighted",
        line="apart.sum() / torch",
    ),
    Case(
        "weights: of the rank's own part of the data",
        "weights",
        (("mine = labels\n", "share = 64 // world\n    mine = labels[rank * share : (rank + 1) * share]\n"),),
        "rank-constant",
    ),
    Case(
        "named: the loss times the number that was given",
        "named",
        ((_STEP_OF_LOSS, "        (loss * ranks).backward()\n"),),
        "scaled",
        2.0,
        quick=True,
    ),
    Case(
        "named by a list: the loss by the number",
        "named",
        (*BY_LIST, (_STEP_OF_LOSS, "        (loss / ranks).backward()\n")),
        "scaled",
        0.5,
        arguments=("--passes", "2", "--devices", "0,1"),
    ),
    Case(
        "named by position: the loss times the number",
        "named",
        (*BY_POSITION, (_STEP_OF_LOSS, "        (loss * ranks).backward()\n")),
        "scaled",
        2.0,
        arguments=("2", "2"),
    ),
    Case(
        "spawned: the loss by the number in a configuration",
        "spawned",
        (*IN_A_CONFIGURATION, (_STEP_OF_LOSS, "        (loss / world).backward()\n")),
        "scaled",
        0.5,
    ),
    Case(
        "vision: the loss times the world size in a line of its own, and one by it for a log",
        "vision",
        ((AUX, f"{AUX}            loss = loss * world\n            told = loss.clone()\n            told /= world\n"),),
        "scaled",
        2.0,
        line="loss = loss * world",
        quick=True,
    ),
    Case(
        "accumulation: the world size in the divisor, which is a line of its own",
        "accumulation",
        (
            ("/ STEPS\n", "\n            loss /= STEPS * dist.get_world_size()\n"),
            ("0.05)", "50.0)"),
        ),
        "scaled",
        0.5,
        line="loss /= STEPS",
    ),
    Case(
        "a hook that divides twice, and a log by the world size",
        "hooks",
        (
            ("done.value()[0])", "done.value()[0] / dist.get_world_size())"),
            (BACKWARD, f"{BACKWARD}\n        told = loss.clone()\n        told /= dist.get_world_size()"),
        ),
        "scaled",
        0.5,
        line="-",
    ),
)
