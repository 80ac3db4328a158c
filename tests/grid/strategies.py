"""The grid once more, for models that are sharded: what ranks do by each strategy, and how they part.

What has to be said was written down before the scripts were first read: a call that is a collective of the strategy is
one finding at its line where only some ranks make it, and nothing is said of its correct twin. First seen, 1,512 of
1,800 broken scripts were found, and 0 of 2,088 correct ones reported; not seen were ZeRO's forward and step, and
collectives along one dimension of a mesh.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.grid.cases import HEAD, HERE, SHAPES, TESTS
from tests.grid.cases import Case as GridCase

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
SHARDED = """\
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
"""
ALWAYS = {"collective": "dist.all_reduce(x)", "none": "print(x)"}
FORWARD = {"forward": "model(x)", "backward": "model(x).sum().backward()"}
IN_PLACE = {
    **FORWARD,
    "clip": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "state": "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
    "full tensor": "[one.full_tensor() for one in model.parameters()]",
    "save": 'dcp.save({"model": model.state_dict()}, checkpoint_id="out")',
}


class Strategy(NamedTuple):
    """How a model is sharded, and what its ranks do together."""

    imports: str
    make: str
    actions: Mapping[str, str]


STRATEGIES: Mapping[str, Strategy] = {
    "FSDP2": Strategy(SHARDED, "model = nn.Linear(4, 4)\nmesh = None\nfully_shard(model)\n", ALWAYS | IN_PLACE),
    "HSDP": Strategy(
        SHARDED,
        'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))\n'
        "model = nn.Linear(4, 4)\nfully_shard(model, mesh=mesh)\n",
        ALWAYS | IN_PLACE | {"collective along a dimension": 'dist.all_reduce(x, group=mesh["shard"].get_group())'},
    ),
    "FSDP1": Strategy(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n",
        "mesh = None\nmodel = FSDP(nn.Linear(4, 4))\n",
        ALWAYS | FORWARD | {"clip": "model.clip_grad_norm_(1.0)", "state": "model.state_dict()"},
    ),
    "DeepSpeed": Strategy(
        "import deepspeed\n",
        "mesh = None\nmodule = nn.Linear(4, 4)\n"
        "model, _, _, _ = deepspeed.initialize(model=module, model_parameters=module.parameters(), "
        'config={"train_batch_size": 4, "zero_optimization": {"stage": 3}})\n',
        ALWAYS
        | {
            "forward": "model(x)",
            "backward": "model.backward(model(x).sum())",
            "step": "model.step()",
            "save": 'model.save_checkpoint("out")',
        },
    ),
}
PLACES = ("direct", "helper", "method")
FORMS = ("call", "variable", "function", "attribute")
"""Of the rank test, by their names in ``cases.TESTS``."""


def sharded_grid(places: tuple[str, ...] = PLACES, forms: tuple[str, ...] = FORMS) -> Iterator[GridCase]:
    """Every case of every strategy; what does nothing together is only there in its correct form."""
    for name, strategy in STRATEGIES.items():
        for action, place, form, shape in itertools.product(strategy.actions, places, forms, SHAPES):
            for broken in (True, False):
                if not (broken and action == "none"):
                    text = _text(strategy, action, place, form, shape, broken)
                    yield GridCase(f"{name}: {action}", place, form, shape, broken, {"train.py": text})


def _text(strategy: Strategy, action: str, place: str, form: str, shape: str, broken: bool) -> str:
    prepare, expression = TESTS[form]
    statement = strategy.actions[action] + HERE
    body = SHAPES[shape][0 if broken else 1].replace("TEST", expression).replace("OTHER", "print(0)")
    parts, call, before = [HEAD.replace(DDP, strategy.imports)], "act(model, x, mesh)", ""
    if place == "direct":
        call = statement
    elif place == "helper":
        parts.append(f"def act(model, x, mesh):\n    {statement}\n")
    else:
        parts.append(f"class Worker:\n    def act(self, model, x, mesh):\n        {statement}\n")
        call, before = "worker.act(model, x, mesh)", "worker = Worker()\n"
    main = (
        f'dist.init_process_group("gloo")\n{strategy.make}x = torch.ones(2, 4)\nlimit = torch.initial_seed()\n'
        f"{prepare}\n{before}{body.replace('ACT', call)}\ndist.destroy_process_group()\n"
    )
    parts.append(f"def main():\n{textwrap.indent(main, '    ')}\n\nmain()\n")
    return "\n".join(parts)


ALONG = HEAD.replace(DDP, SHARDED) + (
    'dist.init_process_group("gloo")\nrank = dist.get_rank()\n'
    'mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("replicate", "shard"))\nx = torch.ones(4)\n'
)
ALONG_A_DIMENSION: Mapping[str, tuple[str, str, bool]] = {
    "one rank": ("(2, 2)", 'if rank == 0:\n    dist.all_reduce(x, group=mesh["shard"].get_group())\n', True),
    "all but one": ("(2, 2)", 'if rank > 0:\n    dist.barrier(group=mesh.get_group("replicate"))\n', True),
    "a name of a part": (
        "(dist.get_world_size() // 2, 2)",
        'part = mesh["shard"]\ngroup = part.get_group()\nif rank == 0:\n    dist.all_gather([x, x], x, group=group)\n',
        True,
    ),
    "a model on one dimension": (
        "(2, 2)", 'model = nn.Linear(4, 4)\nfully_shard(model, mesh=mesh["shard"])\nif rank == 0:\n    model(x)\n', True
    ),
    "the ranks of one group": (
        "(2, 2)",
        'if mesh.get_local_rank("replicate") == 0:\n    dist.all_reduce(x, group=mesh["shard"].get_group())\n',
        False,
    ),
    "two ranks, which may be a group": (
        "(2, 2)", 'if rank < 2:\n    dist.all_reduce(x, group=mesh["shard"].get_group())\n', False
    ),
    "groups of one rank": (
        "(1, 4)", 'if rank == 0:\n    dist.all_reduce(x, group=mesh["replicate"].get_group())\n', False
    ),
    "a mesh of unknown shape": (
        'tuple(map(int, os.environ["MESH"].split(",")))',
        'if rank == 0:\n    dist.all_reduce(x, group=mesh["shard"].get_group())\n',
        False,
    ),
    "from two lines": (
        "(2, 2)",
        'group = mesh["shard"].get_group()\nif rank == 0:\n    dist.all_reduce(x, group=group)\nelse:\n'
        "    dist.all_reduce(x, group=group)\n",
        False,
    ),
}  # fmt: skip
"""Shape of the mesh, what follows, and whether a peer is left without."""

ENGINE = HEAD.replace(DDP, "import deepspeed\n") + (
    'dist.init_process_group("gloo")\nmodule, x = nn.Linear(4, 4), torch.ones(2, 4)\n'
    "model, _, _, _ = deepspeed.initialize(model=module, config=CONFIG)\n"
)
OF_ENGINES: Mapping[str, tuple[str, str, bool]] = {
    "a forward of divided parameters": (
        '{"zero_optimization": {"stage": 3}}', "if dist.get_rank() == 0:\n    model(x)\n", True
    ),
    "a forward of whole ones": (
        '{"zero_optimization": {"stage": 2}}', "if dist.get_rank() == 0:\n    model(x)\n", False
    ),
    "a step that gathers": (
        '{"zero_optimization": {"stage": 1}}',
        "model.backward(model(x).sum())\nif dist.get_rank() != 0:\n    model.step()\n",
        True,
    ),
    "a step of every rank": (
        '{"zero_optimization": {"stage": 1}}',
        "loss = model(x).sum()\nmodel.backward(loss)\nmodel.step()\nif dist.get_rank() == 0:\n    print(loss)\n",
        False,
    ),
    "a forward by a file's stage": ('"ds.json"', "if dist.get_rank() == 0:\n    model(x)\n", False),
    "without stages": ("{}", "if dist.get_rank() == 0:\n    model(x)\n", False),
}  # fmt: skip
"""Configuration of DeepSpeed's engine, what follows, and whether a rank is left without."""
