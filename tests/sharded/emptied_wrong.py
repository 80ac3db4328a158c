"""Jobs that use parts of a model which nothing has initialised."""

from __future__ import annotations

from tests.sharded.emptied import LAYERS, Job

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
            parameter.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
        """,
        found=("scale",),
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
)
