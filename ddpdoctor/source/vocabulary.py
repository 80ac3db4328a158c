"""Torch and its neighbours by their full names, and what these mean for ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import msgspec

from ddpdoctor.files import regex


def _named(places: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return functions of torch.distributed by the full names that they have in each of some modules."""
    return {f"{place}.{name}": f"torch.distributed.{ours}" for place in places.split() for name, ours in names.items()}


def _each(places: str, names: str) -> list[str]:
    """Return the full names of some functions in each of some modules."""
    return [f"{place}.{name}" for place in places.split() for name in names.split()]


_OF_ACCELERATE = "accelerate.utils accelerate.utils.operations accelerate.utils.other"
_OF_RANKS = {"get_rank": "get_rank", "get_local_rank": "get_node_local_rank", "get_world_size": "get_world_size"}
_AS_TORCHS = {name: name for name in ("barrier", "all_reduce", "broadcast")}
_WARMUPS = ("constant", "cosine", "cosine_with_hard_restarts", "linear", "polynomial_decay")
SAME: Mapping[str, str] = MappingProxyType(
    {
        **{
            f"transformers.{part}get_{shape}_schedule_with_warmup": "torch.optim.lr_scheduler.LambdaLR"
            for part in ("", "optimization.")
            for shape in _WARMUPS
        },
        **_named("mmengine.dist mmengine.dist.utils mmengine.dist.dist", _OF_RANKS | _AS_TORCHS),
        **_named("detectron2.utils.comm fvcore.common.comm", _OF_RANKS | {"synchronize": "barrier"}),
        **_named("composer.utils.dist", _OF_RANKS | _AS_TORCHS | {"get_global_rank": "get_rank"}),
        "composer.utils.dist.broadcast_object_list": "torch.distributed.broadcast_object_list",
    }
)
"""Functions that do or make the same as one of torch from the same first arguments, by their full names."""

RETURNING = frozenset(
    {
        *_each("mmengine.dist", "all_gather all_gather_object all_reduce_dict all_reduce_params"),
        *_each("mmengine.dist", "collect_results gather gather_object sync_random_seed"),
        # It asks every rank for its length before it pads.
        *_each("monai.utils monai.utils.dist", "evenly_divisible_all_gather"),
        # Its documentation: all workers must call it the same number of times, "otherwise, your training will hang".
        *("ray.train.report", "ray.train.collective.barrier", "ray.train.collective.broadcast_from_rank_zero"),
        # Its stall inspector names the ranks that a call lacks for as long as they do not come.
        *_each("horovod.torch", "allgather allgather_object allreduce_ alltoall barrier broadcast broadcast_"),
        *_each("horovod.torch", "broadcast_object broadcast_optimizer_state broadcast_parameters"),
        # A barrier follows what the main rank does in it.
        *_each("speechbrain.utils.distributed", "ddp_barrier run_on_main"),
        *_each("detectron2.utils.comm", "all_gather gather reduce_dict shared_random_seed"),
        *_each("composer.utils.dist", "all_gather all_gather_object"),
        *_each("timm.utils timm.utils.distributed", "reduce_tensor distribute_bn"),
        *_each(_OF_ACCELERATE, "gather gather_object broadcast reduce pad_across_processes"),
        *_each(_OF_ACCELERATE, "wait_for_everyone"),
    }
)
"""Functions that every rank must call and that leave their arguments as they are."""
# Both hand the list to torch's function of this name; Accelerate's returns it, too.
_FILLING = ("mmengine.dist", "accelerate.utils", "accelerate.utils.operations")

RANK_AND_SIZE = frozenset(_each("mmengine.dist mmcv.runner mmcv.runner.dist_utils", "get_dist_info"))
"""Functions that return the rank and the world size."""

HUGGING_FACE_TRAINERS = frozenset(
    {"transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer", "trl.DPOTrainer"}
)
FABRICS = frozenset({"lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"})
SEEDS_EVERYTHING = frozenset(
    _each("accelerate.utils transformers transformers.trainer_utils", "set_seed")
    + _each("lightning lightning.fabric lightning_fabric lightning.pytorch pytorch_lightning", "seed_everything")
)
"""Functions that give torch, numpy and random one seed, the same on every rank."""
SEEDING = regex(r"seed|(?<!use_)determinis|reproduc|(set|fix|init|same)_(all_)?rand", re.IGNORECASE)
"""Names of functions that may fix random numbers."""
ACCELERATE_STATES = frozenset({"accelerate.PartialState", "accelerate.state.PartialState"})


_MOVED = (
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.distributed.c10d.", "torch.distributed."),
    ("torch.nn.parallel.distributed.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel"),
    ("torch.nn.parallel.DistributedDataParallelCPU", "torch.nn.parallel.DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel.DataParallel", "torch.nn.DataParallel"),
    ("torch.nn.parallel.DataParallel", "torch.nn.DataParallel"),
    ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler"),
    ("torch.utils.data.dataloader.DataLoader", "torch.utils.data.DataLoader"),
    ("torch_geometric.loader.DataLoader", "torch.utils.data.DataLoader"),
    ("torch_geometric.data.DataLoader", "torch.utils.data.DataLoader"),
    ("monai.data.DataLoader", "torch.utils.data.DataLoader"),
    ("monai.data.DistributedSampler", "torch.utils.data.DistributedSampler"),
    ("torch.utils.data.dataset.", "torch.utils.data."),
    ("torch.utils.data.sampler.", "torch.utils.data."),
    ("torch.multiprocessing.spawn.spawn", "torch.multiprocessing.spawn"),
    ("torch.distributed.checkpoint.state_dict_saver.", "torch.distributed.checkpoint."),
    ("torch.distributed.checkpoint.state_dict_loader.", "torch.distributed.checkpoint."),
    ("accelerate.accelerator.Accelerator", "accelerate.Accelerator"),
    ("torch.nn.modules.", "torch.nn."),
    *(
        (f"{package}.trainer.{part}", f"{package}.")
        for package in ("lightning.pytorch", "pytorch_lightning")
        for part in ("trainer.", "")
    ),
    ("lightning.fabric.fabric.", "lightning.fabric."),
    ("torch.nn.utils.clip_grad.", "torch.nn.utils."),
    ("torch.distributed._composable.fsdp.fully_shard.", "torch.distributed.fsdp."),
    ("torch.distributed._composable.fsdp.", "torch.distributed.fsdp."),
    ("torch.distributed._composable.replicate.", "torch.distributed._composable."),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.", "torch.distributed.fsdp."),
    ("torch.distributed._tensor.device_mesh.", "torch.distributed."),
    ("torch.distributed.device_mesh.", "torch.distributed."),
)

DDP = "torch.nn.parallel.DistributedDataParallel"
DATA_PARALLEL = "torch.nn.DataParallel"
ENGINE = "deepspeed.DeepSpeedEngine"
"""What ``deepspeed.initialize`` returns first: its ``backward`` averages the gradients of all ranks."""
SHARDED_WRAPPER = "torch.distributed.fsdp.FullyShardedDataParallel"
MESH = "torch.distributed.DeviceMesh"
DATA_LOADER = "torch.utils.data.DataLoader"
DISTRIBUTED_SAMPLER = "torch.utils.data.DistributedSampler"
SPAWNERS = frozenset({
    "torch.multiprocessing.spawn", "torch.multiprocessing.start_processes",
    "torch.multiprocessing.spawn.start_processes", "torch_xla.distributed.xla_multiprocessing.spawn",
})  # fmt: skip
PROCESSES = frozenset({"torch.multiprocessing.Process", "multiprocessing.Process"})

GLOBAL_RANK_VARIABLES = frozenset({"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
LOCAL_RANK_VARIABLES = frozenset({"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"})
NODE_RANK_VARIABLES = frozenset({"GROUP_RANK", "NODE_RANK", "SLURM_NODEID"})
WORLD_SIZE_VARIABLES = frozenset({"WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
TASK_COUNT_VARIABLES = frozenset(
    {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}
)
"""How many processes a cluster's launcher has started, or on how many nodes: of ranks only where those start none."""
LOCAL_WORLD_SIZE_VARIABLES = frozenset({"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"})
LAUNCHER_VARIABLES = (
    GLOBAL_RANK_VARIABLES
    | LOCAL_RANK_VARIABLES
    | NODE_RANK_VARIABLES
    | WORLD_SIZE_VARIABLES
    | LOCAL_WORLD_SIZE_VARIABLES
    | {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
)


class Collective(msgspec.Struct, frozen=True):
    """How one collective function is called and what it leaves behind."""

    group_position: int
    """Position of the ``group`` argument; -1 when it has none."""
    uniform: bool
    """Afterwards every rank holds the same value in the argument that it writes."""
    writes: tuple[int, ...] = (0,)
    """Positions of the arguments that it writes."""


_OF_TORCH: Mapping[str, Collective] = {
    "all_reduce all_reduce_coalesced broadcast broadcast_object_list": Collective(2, True),
    "all_gather all_gather_into_tensor all_gather_single _all_gather_base all_gather_object": Collective(2, True),
    "gather gather_object": Collective(3, False, (1,)),
    "reduce scatter scatter_object_list": Collective(3, False),
    "reduce_scatter reduce_scatter_tensor reduce_scatter_single": Collective(3, False),
    "all_to_all": Collective(2, False),
    "all_to_all_single": Collective(4, False),
    "barrier monitored_barrier": Collective(0, True, ()),
    "init_process_group": Collective(-1, True, ()),
}
COLLECTIVES: Mapping[str, Collective] = {
    **{name: how for names, how in _OF_TORCH.items() for name in _each("torch.distributed", names)},
    **{
        f"torch.distributed.checkpoint.{name}": Collective(2 if name.endswith("_dict") else -1, True, ())
        for name in ("save", "load", "async_save", "save_state_dict", "load_state_dict")
    },
    **{
        f"{SHARDED_WRAPPER}.{name}": Collective(-1, True, ())
        for name in ("summon_full_params", "optim_state_dict", "full_optim_state_dict", "scatter_full_optim_state_dict")
    },
    **dict.fromkeys(RETURNING, Collective(-1, True, ())),
    **dict.fromkeys((f"{place}.broadcast_object_list" for place in _FILLING), Collective(-1, True)),
}
COLLECTIVE_METHODS: Mapping[str, frozenset[str]] = {
    "accelerate.Accelerator": frozenset(
        {"wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes", "check_trigger"}
    ),
    # "This method will hang … if it's called just for the process with rank 0", its documentation says of saving.
    ENGINE: frozenset({"save_checkpoint", "load_checkpoint"}),
    "torch.distributed.fsdp.FullyShardedDataParallel": frozenset({"state_dict", "clip_grad_norm_"}),
    **dict.fromkeys(HUGGING_FACE_TRAINERS, frozenset({"train", "evaluate", "predict"})),
    **dict.fromkeys(FABRICS, frozenset({"barrier", "all_reduce", "all_gather", "broadcast", "save"})),
    **dict.fromkeys(ACCELERATE_STATES, frozenset({"wait_for_everyone"})),
}
"""Methods that every rank must call, by the class of their object."""
METRICS = "torchmetrics."
"""Begins the names of classes whose ``compute`` gathers what all ranks have counted."""


def collective_methods(name: str) -> frozenset[str]:
    """Return the methods of a class that every rank must call."""
    return frozenset({"compute"}) if name.startswith(METRICS) else COLLECTIVE_METHODS.get(name, frozenset())


NOT_FALSE = frozenset({
    "torch.distributed.is_available", "torch.distributed.is_initialized", "torch.distributed.is_torchelastic_launched",
    "torch.cuda.is_available",
})  # fmt: skip
"""Tested by scripts that also run without ranks or without a GPU: read as they are in a job with both."""

MODEL_PRESERVING = frozenset({
    "torch.compile", "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "apex.parallel.convert_syncbn_model",
    "torch.jit.script",
})  # fmt: skip
"""Functions that return the module that they were given."""
MODULE_SELF_METHODS = frozenset(
    {"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "double", "requires_grad_", "apply"}
)
"""Methods of a module that return the module."""

JOINS = frozenset({"join", "Join", "join_uneven_inputs"})
"""DDP's join, the class behind it, and Accelerate's: ranks that end first shadow the others' collectives."""
SAME_ITEMS = frozenset({"enumerate", "zip", "iter", "next", "list", "tuple", "reversed", "tqdm", "track", "trange"})
"""Last names of functions whose result yields the items of their arguments."""

STATEFUL_BUFFER_MODULES = regex(r"(Sync)?(Lazy)?(Batch|Instance)Norm(\dd)?$|SpectralNorm$|FakeQuantize")
"""Modules of torch.nn whose buffers change in forward."""
OPTIMIZER = "torch.optim.Optimizer"
"""Base class of the optimizers of torch, for one that is chosen by a name."""
MAKES_SCHEDULER = regex(r"^(transformers|diffusers)\.(\w+\.)*get_(\w+_)?schedule(r|_with_warmup)?$")
"""Functions of both libraries that give a learning-rate scheduler of torch, mostly a ``LambdaLR``."""
MODEL_LIBRARY = "torchvision.models."
PRETRAINED = regex(
    r"^(transformers|diffusers)\.(\w+\.)*"
    r"(?!\w*(Config|Extractor|Pipeline|Processor|Scheduler|Tokenizer(Fast)?|Adam\w*|Adafactor)$)[A-Z]\w*$"
)
"""Classes of models whose ``from_pretrained`` and ``from_config`` make their objects."""
MODULE = regex(rf"\.nn\.|^torchvision\.models\.|{PRETRAINED.pattern}")
"""What makes a ``torch.nn.Module``, by its full name."""
MODELS_WITH_STATISTICS = regex(
    r"torchvision\.models\.(\w+\.)*(\w*res(net|next)\w*|densenet\w*|mobilenet\w*|efficientnet\w*|mnasnet\w*|regnet\w*"
    r"|shufflenet\w*|googlenet|inception\w*|vgg\d+_bn|deeplab\w*|fcn_\w*)$"
)
"""Functions of torchvision whose models hold BatchNorm modules, for any arguments."""
BUFFERLESS_MODULE = regex(
    r"torch\.nn\.(Linear|Bilinear|Identity|Conv\dd|ConvTranspose\dd|Embedding|EmbeddingBag|LayerNorm|GroupNorm|RMSNorm"
    r"|ReLU|ReLU6|LeakyReLU|PReLU|GELU|SiLU|Mish|Tanh|Sigmoid|Softmax|LogSoftmax|ELU|Hardswish|Softplus|Dropout\dd|Dropout"
    r"|MaxPool\dd|AvgPool\dd|Adaptive\w+Pool\dd|Flatten|Unflatten|Upsample|PixelShuffle|ZeroPad2d|LSTM|GRU|RNN"
    r"|MultiheadAttention|Transformer\w*|\w+Loss|Parameter|ParameterList|ParameterDict)$"
)
CONTAINER_MODULES = frozenset({"torch.nn.Sequential", "torch.nn.ModuleList", "torch.nn.ModuleDict"})

MAP_STYLE_DATASETS = regex(
    r"(torchvision\.datasets\.\w+|torch\.utils\.data\.(TensorDataset|Subset|ConcatDataset|StackDataset)"
    r"|torchaudio\.datasets\.\w+|torch_geometric\.data\.InMemoryDataset|torch_geometric\.datasets\.\w+"
    r"|monai\.data\.(dataset\.)?(Cache|Persistent)?Dataset)$"
)
PREPARING_DATASETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Their constructors download and process what is not in their directory, as both libraries' guides say.
        "torch_geometric.data.InMemoryDataset": ("download", "process"),
        "torch_geometric.data.Dataset": ("download", "process"),
        "dgl.data.DGLDataset": ("download", "save"),
    }
)
"""Base classes of data sets that write files while an object is made, and the methods of the project that do it."""
RANK_VARYING_CALLS = regex(
    r"^(time\.|datetime\.(?!date\.today$)|os\.getpid$|os\.urandom$|socket\.|uuid\.|(\w+\.)+uuid[14]$|tempfile\.(?!gettempdir$)|random\.|numpy\.random\.|secrets\.|platform\.node"
    r"|os\.path\.(exists|isfile|isdir|getmtime|getsize)$|os\.(listdir|scandir|walk|stat|access)$|glob\.|psutil\.)"
)
"""Functions whose results differ between processes: clocks, process and host names, files, unseeded random numbers.

The day is not among them: but for a start at midnight it is the same on every rank.
"""

RANK_NAMES = frozenset({"rank", "global_rank", "world_rank", "process_index", "proc_id", "rank_id", "process_rank"})
LOCAL_RANK_NAMES = frozenset({"local_rank", "local_process_index", "local_rank_id", "localrank"})
FIRST_RANK_NAMES = regex(
    r"^_?(is_|am_i_|on_)?((global|world|main|master|rank|process|proc|local)_?)*"
    r"(main_process|master_process|main_proc|master_proc|main_rank|master_rank|global_zero|world_zero|world_process_zero"
    r"|rank_?0|rank_zero|main|master|primary|chief|global_master|local_master|local_main_process)$"
)
"""Names of variables, attributes and functions that are true on the first rank only."""
DISTRIBUTION_NAMES = frozenset({"distributed", "is_distributed", "use_distributed", "multiprocessing_distributed"})
"""Names of variables, attributes and functions that are true where a job has ranks."""
DISTRIBUTION_ATTRIBUTES = frozenset({"ddp", "use_ddp", "is_ddp", "distributed_training"})
"""Names with that meaning in a configuration."""
FIRST_RANK_DECORATORS = frozenset(
    {"rank_zero_only", "main_process_only", "master_only", "on_main_process", "rank0_only", "only_on_master"}
)
SYNCHRONISES = regex(r"sync|reduce|gather|broadcast|barrier", re.IGNORECASE)
"""In the name of a method: it promises to run a collective."""
COMMAND_LINES = frozenset({"fire.Fire", "typer.run", "tyro.cli"})
"""Functions that call the function that they are given with the options of the command line."""
RUNNERS = frozenset(
    {
        *COMMAND_LINES,
        *("absl.app.run", "torch.distributed.run.elastic_launch"),
        *("detectron2.engine.launch", "accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher"),
    }
)
"""Functions that call the function that they are given."""


@lru_cache(maxsize=65_536)
def canonical(name: str) -> str:
    """Return the public full name of something that has several; that of torch for what other libraries rename."""
    same = SAME.get(name)
    if same is not None:
        return same
    for old, new in _MOVED:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


@lru_cache(maxsize=65_536)
def is_first_rank_name(name: str) -> bool:
    """Return whether a name promises to be true on one rank only; bare ``main`` and ``master`` need an ``is_``."""
    if name in {"main", "master", "_main", "_master", "primary", "chief", "local", "global"}:
        return False
    return FIRST_RANK_NAMES.match(name) is not None


PART_GATHERS = frozenset({"all_gather", "all_gather_object", "gather", "gather_object"})
"""Collectives that fill a list with what each rank has."""


@lru_cache(maxsize=4_096)
def text_hints_at_ranks(text: str) -> bool:
    """Return whether the text of a condition hints at a rank test that could not be resolved."""
    return _RANK_WORDS.search(text) is not None


_RANK_WORDS = regex(
    r"rank|master|main_proc|is_main|primary|chief|leader|process_zero|is_zero|should_save|world_zero|node_?0|proc_?id"
    r"|process_index|is_root|is_head|coordinator|is_first|save_on_each_node|logger_?on|is_logger|standalone",
    re.IGNORECASE,
)
