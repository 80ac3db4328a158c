"""Names that libraries beside torch have for its ranks, collectives and objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType


def _named(places: tuple[str, ...], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for place in places:
        for theirs, ours in names.items():
            yield f"{place}.{theirs}", f"torch.distributed.{ours}"


_OF_RANKS = {"get_rank": "get_rank", "get_local_rank": "get_node_local_rank", "get_world_size": "get_world_size"}
_WARMUPS = ("constant", "cosine", "cosine_with_hard_restarts", "linear", "polynomial_decay")
SAME: Mapping[str, str] = MappingProxyType(
    dict(
        (
            *(
                (f"transformers.{part}get_{shape}_schedule_with_warmup", "torch.optim.lr_scheduler.LambdaLR")
                for part in ("", "optimization.")
                for shape in _WARMUPS
            ),
            *_named(
                ("mmengine.dist", "mmengine.dist.utils", "mmengine.dist.dist"),
                {**_OF_RANKS, "barrier": "barrier", "all_reduce": "all_reduce", "broadcast": "broadcast"},
            ),
            *_named(("detectron2.utils.comm", "fvcore.common.comm"), {**_OF_RANKS, "synchronize": "barrier"}),
            *_named(
                ("composer.utils.dist",),
                {
                    **_OF_RANKS,
                    "get_global_rank": "get_rank",
                    "barrier": "barrier",
                    "broadcast": "broadcast",
                    "all_reduce": "all_reduce",
                    "broadcast_object_list": "broadcast_object_list",
                },
            ),
        )
    )
)
"""Functions that do or make the same as one of torch from the same first arguments, by their full names."""

RETURNING = frozenset(
    {
        *(
            f"mmengine.dist.{name}"
            for name in ("all_gather", "all_gather_object", "all_reduce_dict", "all_reduce_params")
        ),
        *(f"mmengine.dist.{name}" for name in ("broadcast_object_list", "collect_results", "gather", "gather_object")),
        "mmengine.dist.sync_random_seed",
        # It asks every rank for its length before it pads.
        *(f"monai.utils.{part}evenly_divisible_all_gather" for part in ("", "dist.")),
        # Its documentation: all workers must call it the same number of times, "otherwise, your training will hang".
        *("ray.train.report", "ray.train.collective.barrier", "ray.train.collective.broadcast_from_rank_zero"),
        # Its stall inspector names the ranks that a call lacks for as long as they do not come.
        *(
            f"horovod.torch.{name}"
            for name in (
                *("allgather", "allgather_object", "allreduce_", "alltoall", "barrier", "broadcast", "broadcast_"),
                *("broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"),
            )
        ),
        # A barrier follows what the main rank does in it.
        *(f"speechbrain.utils.distributed.{name}" for name in ("ddp_barrier", "run_on_main")),
        *(f"detectron2.utils.comm.{name}" for name in ("all_gather", "gather", "reduce_dict", "shared_random_seed")),
        *(f"composer.utils.dist.{name}" for name in ("all_gather", "all_gather_object")),
        *(f"timm.utils.{part}{name}" for part in ("", "distributed.") for name in ("reduce_tensor", "distribute_bn")),
        *(
            f"accelerate.utils.{part}{name}"
            for part in ("", "operations.", "other.")
            for name in (
                *("gather", "gather_object", "broadcast", "broadcast_object_list", "reduce", "pad_across_processes"),
                "wait_for_everyone",
            )
        ),
    }
)
"""Functions that every rank must call and that leave their arguments as they are."""

RANK_AND_SIZE = frozenset(
    f"{place}.get_dist_info" for place in ("mmengine.dist", "mmcv.runner", "mmcv.runner.dist_utils")
)
"""Functions that return the rank and the world size."""

HUGGING_FACE_TRAINERS = frozenset(
    {"transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer", "trl.DPOTrainer"}
)
FABRICS = frozenset({"lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"})
SEEDS_EVERYTHING = frozenset(
    {"accelerate.utils.set_seed", "transformers.set_seed", "transformers.trainer_utils.set_seed"}
    | {f"{place}.seed_everything" for place in ("lightning", "lightning.fabric", "lightning_fabric")}
    | {f"{place}.seed_everything" for place in ("lightning.pytorch", "pytorch_lightning")}
)
"""Functions that give torch, numpy and random one seed, the same on every rank."""
ACCELERATE_STATES = frozenset({"accelerate.PartialState", "accelerate.state.PartialState"})
METHODS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(HUGGING_FACE_TRAINERS, frozenset({"train", "evaluate", "predict"})),
        **dict.fromkeys(FABRICS, frozenset({"barrier", "all_reduce", "all_gather", "broadcast", "save"})),
        **dict.fromkeys(ACCELERATE_STATES, frozenset({"wait_for_everyone"})),
    }
)
"""Methods that every rank must call, by the class of their object."""
