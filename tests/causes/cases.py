"""The cases: what the first finding has to say, by the source alone and by the whole check."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

_SCRIPTS = Path(__file__).with_name("scripts")
_TWINS = Path(__file__).with_name("twins.toml")


def lay_out(directory: Path) -> Path:
    """Copy the scripts to a new directory, and write there those that are edits of another."""
    shutil.copytree(_SCRIPTS, directory)
    twins = msgspec.toml.decode(_TWINS.read_bytes(), type=dict[str, Twin])
    for name, twin in twins.items():
        text = (_SCRIPTS / twin.of).read_text(encoding="utf-8")
        for old, new in twin.edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


class Twin(msgspec.Struct, frozen=True):
    """A script that another one is with a few edits."""

    of: str
    edits: tuple[tuple[str, str], ...]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a finding above advice has to say."""

    code: str
    line: int
    ranks: tuple[int, ...] = ()
    """Where the run can name them."""
    words: tuple[str, ...] = ()
    """In the title, the evidence or the remedy."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A script, and all that is said of it above advice, the worst first."""

    script: str
    """Below ``scripts``, or ``-m`` and a module."""
    source: tuple[Said, ...] = ()
    """Of ``check --static``."""
    checked: tuple[Said, ...] = ()
    """Of ``check``."""
    arguments: tuple[str, ...] = ()
    quick: bool = False
    """Rehearsed by the default tests as well."""

    @property
    def name(self) -> str:
        """The script without its ending."""
        return self.script.removesuffix(".py").replace("-m ", "")


_GATHER = ("all_gather", "torch.distributed.nn.functional.all_gather", "gathered[rank]")
_SKIP = ("NoAnchors", "len(anchors) == 0", "all-reduce whether every rank succeeded")
_RANK0_SAVE = Said(code="DDP301", line=28, words=("is_global_zero", "save_checkpoint", "move it out of the branch"))
_RANK0_REDUCE = Said(code="DDP301", line=42, words=("dist.get_rank() == 0", "move it out of the branch"))
_VIZ = Said(code="DDP301", line=24, words=("rank 0 can leave at line 22", "`return`", "trainer.is_global_zero"))
_UNFREEZE = Said(code="DDP213", line=44, words=("learning rate of 0",))
_BATCHES = Said(code="DDP101", line=83, words=("batches[rank :",))
_FORWARD = Said(code="DDP303", line=33, words=("model.module",))
_REDUCE = Said(code="DDP301", line=34, words=("self.rank == 0", "move it out of the branch"))
_EPOCH = Said(code="DDP102", line=23)

_NESTED = Said(code="DDP301", line=15, words=("dist.get_rank() == 0", "barrier"))
_HOOK = Said(code="DDP213", line=19, words=("never lists them", "learning rate of 0"))

# Of the scripts that re-enact a report, with what has to be said of each.
_OWN_ORDER = ("parts overlap", "same order on every rank")
_FILES = Said(code="DDP107", line=17, words=_OWN_ORDER)
_EPISODES = Said(code="DDP107", line=21, words=_OWN_ORDER)
_UNEVEN = Said(code="DDP103", line=42)
_ROWS = Said(code="DDP108", line=34, words=("Seed every rank with the same number",))
_PACKED = Said(code="DDP302", line=25, words=("`names` is in the order of a set", "sorted"))
_OUTPUTS = Said(code="DDP302", line=25, words=("`outputs.items()` is in the order of a set", "sorted"))
_MOMENTS = Said(code="DDP110", line=29, words=("self.mean", "self.variance", "All-reduce"))
_OWN_NAME = Said(code="DDP608", line=25, words=("a name that each of them makes for itself", "broadcast_object_list"))
_PATIENCE = Said(code="DDP302", line=57, words=("All-reduce or broadcast",))
_CUT = Said(code="DDP105", line=18, words=("not in the order of the samples", "torch.stack(parts, 1)"))
_SCHEDULE = Said(code="DDP224", line=14, words=("accelerator.num_processes",))
_OWN_STATE = ("stages.0.embed", "is changed here", "DDP broadcasts none", "all_reduce")
_CODEBOOK = Said(code="DDP208", line=64, ranks=(0, 1), words=_OWN_STATE)
_FOLDER = Said(code="DDP603", line=20, words=("which rank 0 makes just before", "exist_ok=True"))
_LAST_TURN = Said(code="DDP217", line=21, words=("the micro-step after which the optimizer steps",))

CASES = (
    # The barrier that rank 1 waits in is where it stands, not why.
    Case(
        script="barrier_in_handler.py",
        checked=(
            Said(
                code="DDP311",
                line=9,
                ranks=(1,),
                words=(
                    "ValueError: sample 17 is broken",
                    "barrier_in_handler.py:28 in its handler",
                    "Fix the exception",
                ),
            ),
        ),
        quick=True,
    ),
    Case(script="c03_gather_nograd.py", checked=(Said(code="DDP201", line=35, words=_GATHER),), quick=True),
    Case(script="c03b_gather_nograd_strict.py", checked=(Said(code="DDP201", line=35, words=_GATHER),)),
    Case(
        script="c05_skip_batch.py",
        source=(Said(code="DDP311", line=65, words=_SKIP),),
        checked=(Said(code="DDP311", line=65, words=_SKIP),),
    ),
    Case(
        script="c05b_skip_batch_hangs.py",
        source=(Said(code="DDP311", line=65, words=_SKIP),),
        checked=(Said(code="DDP311", line=65, ranks=(1,), words=_SKIP),),
    ),
    Case(script="c05_mended.py"),
    Case(script="c07_backbone_finetuning.py", source=(_UNFREEZE,), checked=(_UNFREEZE,)),
    # The option that others advise does not mend it: after the run the replicas' backbones differ.
    Case(
        script="c07_searching.py",
        source=(Said(code="DDP213", line=45),),
        checked=(Said(code="DDP213", line=45, words=("not averaged",)),),
    ),
    Case(script="c10_dynamic_batches.py", source=(_BATCHES,), checked=(_BATCHES,)),
    Case(script="c10_mended.py"),
    Case(
        script="c13_sampler_seed.py",
        source=(Said(code="DDP517", line=45, words=("clock", "same seed")),),
        checked=(
            Said(
                code="DDP517",
                line=45,
                words=(
                    "of 240 samples are drawn by more than one rank",
                    "seed of DistributedSampler differs",
                    "same seed",
                ),
            ),
        ),
        quick=True,
    ),
    Case(
        script="c15_viz_callback.py",
        source=(_VIZ,),
        checked=(msgspec.structs.replace(_VIZ, ranks=(0,)),),
    ),
    Case(script="c15_mended.py"),
    Case(
        script="g05_nested_resume.py",
        source=(_NESTED,),
        checked=(msgspec.structs.replace(_NESTED, ranks=(0,)),),
    ),
    Case(script="g18_unfreeze_later.py", source=(_HOOK,), checked=(_HOOK,)),
    # No line of the source shows that ranks are in different states: the run sees it.
    Case(
        script="g21_local_update.py",
        checked=(
            Said(
                code="DDP208",
                line=43,
                ranks=(0, 1),
                words=("0.lateral is changed here", "want no gradient", "all_reduce"),
            ),
        ),
    ),
    Case(
        script="lit_rank0_save.py",
        source=(_RANK0_SAVE, Said(code="DDP201", line=13)),
        checked=(msgspec.structs.replace(_RANK0_SAVE, ranks=(0,)), Said(code="DDP201", line=13)),
    ),
    Case(
        script="lit_unused_aux.py",
        source=(Said(code="DDP201", line=13, words=("self.aux",)),),
        checked=(Said(code="DDP201", line=13, words=("aux.weight",)),),
    ),
    Case(
        script="rank0_allreduce_last.py",
        source=(_RANK0_REDUCE,),
        checked=(msgspec.structs.replace(_RANK0_REDUCE, ranks=(0,)),),
        arguments=("--epochs", "1"),
        quick=True,
    ),
    Case(
        script="-m classify.train",
        arguments=("--config", "configs/base.json"),
        source=(_REDUCE, _EPOCH, _FORWARD),
        checked=(msgspec.structs.replace(_FORWARD, ranks=(0,)), _REDUCE, _EPOCH),
    ),
    Case(script="reports/files_by_rank_seed.py", source=(_FILES, _UNEVEN), checked=(_FILES, _UNEVEN)),
    Case(script="reports/episodes_global_rng.py", source=(_EPISODES,), checked=(_EPISODES,)),
    # No line of the source shows what the ranks' batches make of the codebook: the run sees it.
    Case(script="reports/codebook_not_broadcast.py", checked=(_CODEBOOK,)),
    Case(script="reports/codebook_reduced.py"),
    Case(script="reports/shard_into_missing_folder.py", source=(_FOLDER,), checked=(_FOLDER,)),
    Case(script="reports/accumulation_off_by_one.py", source=(_LAST_TURN,), checked=(_LAST_TURN,)),
    Case(script="reports/conversations_shuffled.py", source=(_ROWS,), checked=(_ROWS,)),
    Case(script="reports/losses_in_set_order.py", source=(_PACKED,), checked=(_PACKED,)),
    Case(script="reports/outputs_in_set_order.py", source=(_OUTPUTS,), checked=(_OUTPUTS,)),
    Case(script="reports/observations_normalised.py", source=(_MOMENTS,), checked=(_MOMENTS,)),
    Case(
        script="reports/codebook_own_optimizer.py",
        checked=(Said(code="DDP208", line=22, ranks=(0, 1), words=("in its forward", "before this step")),),
    ),
    Case(
        script="reports/random_cache_name.py",
        source=(_OWN_NAME,),
        checked=(_OWN_NAME, Said(code="DDP305", line=26, ranks=(1,))),
    ),
    Case(script="reports/patience_by_rank.py", source=(_PATIENCE,), checked=(_PATIENCE,)),
    Case(script="reports/gathered_then_cut.py", source=(_CUT,), checked=(_CUT,)),
    Case(script="reports/prepared_schedule.py", source=(_SCHEDULE,), checked=(_SCHEDULE,)),
)
