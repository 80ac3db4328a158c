"""Jobs that initialise all that they use of a model, each in another way."""

from __future__ import annotations

from tests.sharded.emptied import Job

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
        name="rank 0's values in the older wrapper",
        body="""
        model = Net() if rank == 0 else model.to_empty(device="cpu")
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
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
        model.head.register_forward_hook(lambda part, given, result: result * (1 if part.highest.isnan().any() else 2))
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
    Job(
        name="a checkpoint that this machine lacks",
        body="""
        model.to_empty(device="cpu")
        model.load_state_dict(torch.load("pretrained/base.pt", map_location="cpu"))
        model = DistributedDataParallel(model)
        """,
    ),
)
