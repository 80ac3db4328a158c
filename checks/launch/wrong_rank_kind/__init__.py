"""A global rank is used where a local one belongs, or the reverse.

What it finds
    The global rank used as a GPU index; init_process_group given the local rank, the number of ranks of one node, or
    the number of cluster tasks that each spawn several ranks; and a test of the local rank that decides which rank
    saves for the whole job. The script is read as a job of two nodes, and `--layout 2x1` rehearses it as one.

Why it is bad
    On one node both numbers are the same, so everything works until the first job on two nodes. There a global rank
    requests GPUs that the node does not have, a local rank makes two processes claim the same rank in the group, and
    the first rank of every node writes the checkpoint at the same time.

Example
    torch.cuda.set_device(dist.get_rank())
    if local_rank == 0:
        torch.save(model.state_dict(), "checkpoint.pt")

Remedy
    Choose GPUs by LOCAL_RANK; decide what is done once per job by RANK, as returned by dist.get_rank().

When it is wrong
    For a save: if every node should keep its own copy on its own disk.

References
    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.launch.wrong_rank_kind.source import RankMixUp, rank_mix_ups
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.files import saves_by_guard
from ddpdoctor.source.queries.job_kind import is_single_node
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP501",
    name="wrong-rank-kind",
    stands_for="wrong-rank-kind",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ERROR),
    needs=frozenset({"ranks"}),
    nodes=2,
    subjects=("job",),
    triggers=("rank", "RANK", "SLURM_", "local_process_index", "is_local_main_process"),
)
MAXIMUM_PLACES = 5


def in_source(script: Script) -> Iterator[Finding]:
    """Report one finding for each kind of mix-up, with the places where it occurs; advice where no two nodes can be."""
    projection = whole_projection(script)
    milder = Severity.ADVICE if is_single_node(projection) else None
    kinds: dict[str, list[RankMixUp]] = {}
    for mix_up in rank_mix_ups(projection):
        kinds.setdefault(mix_up.use, []).append(mix_up)
    for mix_ups in kinds.values():
        first = mix_ups[0]
        yield CHECK.finding(
            "source",
            f"{first.given} is used as {first.use}: {first.holds}",
            remedy=f"Use {first.meant} here"
            + (' (int(os.environ["LOCAL_RANK"]) under torchrun).' if first.meant == "the local rank" else "."),
            locations=tuple({one.event.module.location(one.event.node): 0 for one in mix_ups})[:MAXIMUM_PLACES],
            evidence=(
                Fact(
                    text=first.numbers,
                    basis="source",
                    location=first.event.module.location(first.event.node),
                    stack=first.event.chain,
                ),
            ),
            severity=milder if first.is_certain else milder or Severity.WARNING,
        )
    for saves in saves_by_guard(projection):
        written = tuple(save.event.module.location(save.event.node) for save in saves)
        guard, more = saves[0].guard, f" and {len(saves) - 1} more" if len(saves) > 1 else ""
        yield CHECK.finding(
            "source",
            f"the local rank decides which rank saves {saves[0].path}{more}: on two nodes the first rank of each "
            "writes it",
            remedy="Decide by the global rank: `if dist.get_rank() == 0:`.",
            locations=(guard.module.location(guard.node), *written) if guard is not None else written,
            ranks=(0, 2),
            evidence=(Fact(text="this call writes the file", basis="source", location=written[0]),),
            severity=milder or Severity.WARNING,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report a rank that asked its node for the GPU of its global rank."""
    from ddpdoctor.diagnosis.failures.gpu_indices import wrong_index

    wrong = wrong_index(record)
    if wrong is None:
        return
    yield CHECK.finding(
        record.job.kind,
        "the global rank is used as a GPU index: right on one node, wrong on two",
        remedy='Use the local rank here (int(os.environ["LOCAL_RANK"]) under torchrun).',
        locations=() if wrong.location is None else (wrong.location,),
        ranks=(wrong.rank,),
        evidence=(
            Fact(
                text=f"rank {wrong.rank} requested GPU {wrong.rank} on node {wrong.node}; its local rank is"
                f" {wrong.local_rank}, and the node has {wrong.gpus} GPU{'' if wrong.gpus == 1 else 's'}",
                basis=record.job.kind,
                location=wrong.location,
                stack=wrong.frames,
            ),
        ),
    )
