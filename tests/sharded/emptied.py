"""Jobs that build a model without memory for its values, empty it onto a device, and initialise all of it or not.

What each must give was written down before it was first examined.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import msgspec

HEAD = '''
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 32)

    def reset_parameters(self):
        self.words.reset_parameters()
        self.head.reset_parameters()

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Turned(Net):
    """A table that is computed from nothing but its shape."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", self.table())

    def table(self):
        return torch.polar(torch.ones(8), torch.arange(8.0))

    def forward(self, x):
        return super().forward(x) * self.angles.real.sum()


def reset(model):
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def shard(model):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
with torch.device("meta"):
    model = Net()
'''
TAIL = """
torch.manual_seed(rank)
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randint(0, 32, (4, 6))).square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss), "the rehearsal goes on with numbers"
dist.destroy_process_group()
"""
LAYERS = tuple(f"layers.{n}.{name}" for n in range(2) for name in ("norm.bias", "norm.weight", "up.bias", "up.weight"))
BUILT = '\nwith torch.device("meta"):\n    model = Net()\n'


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What comes between the model and its training, and what of it is used without having been initialised."""

    name: str
    body: str
    model: str = "Net()"
    found: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0, 1)

    def text(self) -> str:
        """The script."""
        built = BUILT.replace("Net()", self.model)
        return HEAD.replace(BUILT, built) + dedent(self.body) + TAIL

    def write(self, folder: Path) -> None:
        """Write the script to ``train.py`` of a directory."""
        (folder / "train.py").write_text(self.text(), encoding="utf-8")


WRONG = (
    Job(
        name="its own reset misses the layers",
        body="""
        model = shard(model)
        model.to_empty(device="cpu")
        model.reset_parameters()
        """,
        found=LAYERS,
    ),
    Job(
        name="nothing is initialised",
        body="""
        model = DistributedDataParallel(model.to_empty(device="cpu"))
        """,
        found=("head.bias", "head.weight", *LAYERS, "words.weight"),
    ),
    Job(
        name="linear layers only",
        body="""
        def init(part):
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight)
                nn.init.zeros_(part.bias)

        model.to_empty(device="cpu").apply(init)
        model = DistributedDataParallel(model)
        """,
        found=(*(name for name in LAYERS if "norm" in name), "words.weight"),
    ),
    Job(
        name="a table of angles",
        model="Turned()",
        body="""
        model.to_empty(device="cpu")
        reset(model)
        model = shard(model)
        """,
        found=("angles",),
    ),
    Job(
        name="a checkpoint without a head",
        body="""
        weights = {name: tensor for name, tensor in Net().state_dict().items() if "head" not in name}
        model = model.to_empty(device="cpu")
        model.load_state_dict(weights, strict=False)
        model = DistributedDataParallel(model)
        """,
        found=("head.bias", "head.weight"),
    ),
    Job(
        name="skip_init",
        body="""
        model = Net()
        model.head = torch.nn.utils.skip_init(nn.Linear, 8, 32)
        model = DistributedDataParallel(model)
        """,
        found=("head.bias", "head.weight"),
    ),
    Job(
        name="emptied after it was initialised",
        body="""
        model = shard(Net())
        reset(model)
        model.to_empty(device="cpu")
        """,
        found=("head.bias", "head.weight", *LAYERS, "words.weight"),
    ),
    Job(
        name="garbage made small",
        body="""
        model.to_empty(device="cpu")
        reset(model)
        fresh = nn.Linear(8, 32, device="meta").to_empty(device="cpu")
        fresh.weight.data.mul_(0.02)
        nn.init.zeros_(fresh.bias)
        model.head = fresh
        model = DistributedDataParallel(model)
        """,
        found=("head.weight",),
    ),
    Job(
        name="a frozen part",
        body="""
        model.to_empty(device="cpu")
        reset(model.layers)
        reset(model.head)
        model.words.requires_grad_(False)
        model = DistributedDataParallel(model)
        """,
        found=("words.weight",),
    ),
    Job(
        name="weights that a parent uses itself",
        body="""
        class Attending(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(32, 8)
                self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

            def forward(self, x):
                x = self.words(x)
                return self.attention(x, x, x)[0]

        with torch.device("meta"):
            model = Attending()
        model.to_empty(device="cpu")
        model.words.reset_parameters()
        model.attention._reset_parameters()
        model.attention.out_proj.to_empty(device="cpu")
        model = DistributedDataParallel(model)
        """,
        found=("attention.out_proj.bias", "attention.out_proj.weight"),
    ),
    Job(
        name="a recurrent layer",
        body="""
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(32, 8)
                self.recurrent = nn.GRU(8, 8, batch_first=True)

            def forward(self, x):
                return self.recurrent(self.words(x))[0]

        with torch.device("meta"):
            model = Recurrent()
        model.to_empty(device="cpu")
        model.words.reset_parameters()
        model = DistributedDataParallel(model)
        """,
        found=tuple(f"recurrent.{kind}_{way}_l0" for kind in ("bias", "weight") for way in ("hh", "ih")),
    ),
    Job(
        name="the older wrapper",
        body="""
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), param_init_fn=lambda part: part.to_empty(device="cpu", recurse=False)
        )
        """,
        found=("head.bias", "head.weight", *LAYERS, "words.weight"),
    ),
    Job(
        name="buffers that rank 0 does not send",
        model="Turned()",
        body="""
        if rank == 0:
            model = Turned()
        else:
            model.to_empty(device="cpu")
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        model = DistributedDataParallel(model, broadcast_buffers=False)
        """,
        found=("angles",),
        ranks=(1,),
    ),
    Job(
        name="compiled",
        body="""
        model.to_empty(device="cpu").reset_parameters()
        model = DistributedDataParallel(torch.compile(model, backend="eager"))
        """,
        found=LAYERS,
    ),
    Job(
        name="a forward that is called by its name",
        body="""
        class Scaled(Net):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(8))

            def forward(self, x):
                x = self.words(x) * self.scale
                return self.head(x)

            def __call__(self, x):
                return self.forward(x)

        with torch.device("meta"):
            model = Scaled()
        reset(model.to_empty(device="cpu"))
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        """,
        found=("scale",),
    ),
    Job(
        name="converted to 16 bits",
        body="""
        model.to_empty(device="cpu").reset_parameters()
        model = DistributedDataParallel(model.bfloat16())
        """,
        found=LAYERS,
    ),
    Job(
        name="one rank has the values",
        body="""
        model.to_empty(device="cpu")
        if rank == 0:
            reset(model)
        for parameter in model.head.parameters():
            dist.broadcast(parameter.data, 0)
        model = shard(model)
        """,
        found=(*LAYERS, "words.weight"),
        ranks=(1,),
    ),
    Job(
        name="emptied module by module",
        body="""
        for part in model.modules():
            part.to_empty(device="cpu", recurse=False)
        reset(model.layers)
        model = shard(model)
        """,
        found=("head.bias", "head.weight", "words.weight"),
    ),
    Job(
        name="the older wrapper with the parameters of the model",
        body="""
        model.to_empty(device="cpu")
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        """,
        found=("head.bias", "head.weight", *LAYERS, "words.weight"),
    ),
    Job(
        name="layers that are computed again in backward",
        body="""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer)
        model = shard(model)
        model.to_empty(device="cpu").reset_parameters()
        """,
        found=LAYERS,
    ),
    Job(
        name="compiled as a whole",
        body="""
        model.to_empty(device="cpu").reset_parameters()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        model.compile(backend="eager", fullgraph=True)
        """,
        found=LAYERS,
    ),
    Job(
        name="compiled layer by layer",
        body="""
        for layer in model.layers:
            layer.compile(backend="eager", fullgraph=True)
        model = shard(model)
        model.to_empty(device="cpu").reset_parameters()
        """,
        found=LAYERS,
    ),
    Job(
        name="gathered ahead of the forward",
        body="""
        model = shard(model)
        model.to_empty(device="cpu")
        reset(model.layers)
        model.unshard()
        """,
        found=("head.bias", "head.weight", "words.weight"),
    ),
    Job(
        name="evaluated first",
        body="""
        reset(model.to_empty(device="cpu").layers)
        model.head.reset_parameters()
        model = DistributedDataParallel(model)
        with torch.no_grad():
            model.eval()(torch.zeros(2, 2, dtype=torch.long))
        model.train()
        """,
        found=("words.weight",),
    ),
)
RIGHT = (
    Job(
        name="every part is reset",
        body="""
        model = shard(model)
        model.to_empty(device="cpu")
        reset(model)
        """,
    ),
    Job(
        name="normal values through data",
        body="""
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="applied to all kinds",
        body="""
        @torch.no_grad()
        def init(part):
            for parameter in part.parameters(recurse=False):
                nn.init.trunc_normal_(parameter) if parameter.dim() > 1 else parameter.fill_(1.0)

        model = DistributedDataParallel(model.to_empty(device="cpu").apply(init))
        """,
    ),
    Job(
        name="the table is computed again",
        model="Turned()",
        body="""
        model.to_empty(device="cpu")
        reset(model)
        model.angles.copy_(model.table())
        model = shard(model)
        """,
    ),
    Job(
        name="a whole checkpoint is assigned",
        body="""
        model.to_empty(device="cpu")
        model.load_state_dict(Net().state_dict(), assign=True)
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="rank 0 loads and broadcasts",
        body="""
        if rank == 0:
            model = Net()
        else:
            model.to_empty(device="cpu")
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="DDP broadcasts",
        body="""
        model.to_empty(device="cpu")
        if rank == 0:
            model.load_state_dict(Net().state_dict())
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="shards of a whole state",
        body="""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        whole = Net().state_dict() if rank == 0 else {}
        model = shard(model)
        model.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
        """,
    ),
    Job(
        name="shards distributed and assigned",
        body="""
        from torch.distributed.tensor import distribute_tensor

        model = shard(model)
        model.to_empty(device="cpu")
        whole, parts = Net().state_dict(), model.state_dict()
        shards = {
            name: nn.Parameter(distribute_tensor(whole[name], part.device_mesh, part.placements))
            for name, part in parts.items()
        }
        model.load_state_dict(shards, assign=True)
        """,
    ),
    Job(
        name="the older wrapper sends rank 0's",
        body="""
        if rank == 0:
            model = Net()
        model = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            sync_module_states=True,
            param_init_fn=lambda part: part.to_empty(device="cpu", recurse=False),
        )
        """,
    ),
    Job(
        name="a part that no forward uses",
        body="""
        model.to_empty(device="cpu")
        reset(model)
        model.spare = nn.Linear(8, 8, device="meta").to_empty(device="cpu")
        model.spare.requires_grad_(False)
        model.gain = nn.Parameter(torch.zeros(8), requires_grad=False)
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="skip_init and values of its own",
        body="""
        model = Net()
        model.head = torch.nn.utils.skip_init(nn.Linear, 8, 32)
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias[:] = 1
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="a buffer that is not a number yet",
        body="""
        model.to_empty(device="cpu")
        reset(model)
        model.head.register_buffer("highest", torch.empty(4, device="meta"))
        model.head.to_empty(device="cpu")
        model.head.reset_parameters()
        model.head.highest.fill_(float("nan"))
        model.head.register_forward_hook(lambda part, given, result: part.highest.copy_(result.detach().flatten()[:4]))
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="weights of two modules",
        body="""
        model.head.weight = model.words.weight
        model.to_empty(device="cpu")
        reset(model)
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="compiled and reset",
        body="""
        reset(model.to_empty(device="cpu"))
        model = DistributedDataParallel(torch.compile(model, backend="eager"))
        """,
    ),
    Job(
        name="looked at and copied, and in no forward",
        body="""
        import copy

        reset(model.to_empty(device="cpu"))
        model.spare = nn.Linear(8, 8, device="meta").to_empty(device="cpu")
        model.spare.requires_grad_(False)
        average = copy.deepcopy(model)
        model = DistributedDataParallel(model)
        model(torch.zeros(2, 2, dtype=torch.long))
        print(model.module.spare.weight.mean(), average.spare.bias)
        copy.deepcopy(model.module)
        torch.save(model.module, f"{rank}.pt")
        """,
    ),
    Job(
        name="a dry run of the parts comes after",
        body="""
        model = shard(model)
        model.to_empty(device="cpu")
        model.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
        for layer in model.layers:
            layer.unshard()
            layer.reshard()
        """,
    ),
    Job(
        name="a whole state in 16 bits",
        body="""
        model.to_empty(device="cpu").bfloat16()
        model.load_state_dict(Net().bfloat16().state_dict())
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="a state that is read in parts",
        body="""
        import torch.distributed.checkpoint as dcp

        dcp.save({"model": Net().state_dict()}, checkpoint_id="parts")
        model = shard(model)
        model.to_empty(device="cpu")
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id="parts")
        model.load_state_dict(state["model"])
        """,
    ),
    Job(
        name="the older wrapper and its parameters, reset",
        body="""
        reset(model.to_empty(device="cpu"))
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        """,
    ),
    Job(
        name="a part that is initialised when its turn comes",
        body="""
        class Later(Net):
            second = False

            def __init__(self):
                super().__init__()
                self.last = nn.Linear(32, 32)

            def forward(self, x):
                x = super().forward(x)
                return self.last(x) if self.second else x

        with torch.device("meta"):
            model = Later()
        reset(model.to_empty(device="cpu").layers)
        model.words.reset_parameters()
        model.head.reset_parameters()
        model(torch.zeros(2, 2, dtype=torch.long))
        model.last.reset_parameters()
        model.second = True
        model = DistributedDataParallel(model)
        """,
    ),
    Job(
        name="values that come just before each part runs",
        body="""
        whole = Net().state_dict()

        def fetch(part, inputs):
            part.load_state_dict({name.removeprefix(part.prefix): whole[name] for name in part.wanted}, assign=True)

        model.to_empty(device="cpu").requires_grad_(False)
        for name, part in model.named_modules():
            part.prefix = f"{name}."
            part.wanted = [f"{name}.{own}" for own, _ in part.named_parameters(recurse=False)]
            if part.wanted:
                part.register_forward_pre_hook(fetch)
        model.register_parameter("gain", nn.Parameter(torch.ones(())))
        model.register_forward_hook(lambda part, inputs, result: result * part.gain)
        model = DistributedDataParallel(model)
        """,
    ),
)
