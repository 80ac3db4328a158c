"""Several ranks write the same file.

What it finds
    A checkpoint or another file that more than one rank writes under one path from one line; in the source by
    torch.save, save_pretrained, numpy (its memory maps, too), joblib, safetensors or pandas; as advice a file to which
    every rank adds its lines. Logs, lock files, caches and files that the ranks write in turn are excluded.

Why it is bad
    The ranks overwrite each other at the same time: the file can end up corrupt, unnoticed until it is loaded.
    On a shared file system it also costs as many writes as there are ranks.

Example
    torch.save(model.state_dict(), "checkpoint.pt")

Remedy
    Guard the call with `if dist.get_rank() == 0:`, or include the rank in the path if every rank has its own state.

When it is wrong
    Where the path only looks the same, for instance on node-local disks with one rank a node.

References
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Script, Via
from ddpdoctor.finding import Finding, Severity, grouped
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.queries.files import SharedSave, appended_files, shared_saves

CHECK = Check(
    code="DDP601",
    name="save-on-all-ranks",
    stands_for="many-writers",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR, "run": Severity.ERROR},
    needs=frozenset({"files"}),
    subjects=("job",),
    triggers=("save", "write_text", "write_bytes", "to_csv", "to_parquet", "dump", "open", "memmap"),
)
MAXIMUM_PLACES = 5


def in_source(script: Script) -> Iterator[Finding]:
    """Report writes that every rank reaches with one path; those that one test would guard as one finding."""
    saves = (save for save in shared_saves(whole_projection(script)) if save.by == "all")
    for save, *others in grouped(saves, lambda one: one.event.module.block_around(one.event.node)).values():
        more = f" and {len(others)} more {'file' if len(others) == 1 else 'files'}" if others else ""
        yield CHECK.finding(
            f"every rank writes {save.path}{more}, and the path does not depend on the rank",
            remedy="Save on one rank only (`if dist.get_rank() == 0:`), with a barrier after it where others read the "
            "file; or include the rank in the path.",
            locations=tuple(one.event.location for one in (save, *others[: MAXIMUM_PLACES - 1])),
            because=(_why(save), save.event),
        )

    for use in appended_files(whole_projection(script)):
        location = use.event.location
        yield CHECK.finding(
            f"every rank adds its lines to {use.shown}: each result stands there as often as there are ranks",
            remedy="Write on one rank only (`if dist.get_rank() == 0:`); or include the rank in the path or the lines.",
            locations=location,
            because=("there is no rank test around this call or its callers", Via(location, use.event.chain)),
            severity=Severity.ADVICE,
        )


def _why(save: SharedSave) -> str:
    if save.guard is None:
        return "there is no rank test around this call or its callers"
    condition = save.event.module.excerpt(save.guard.node, 60)
    return f"the other ranks write the same file in the other arm of `{condition}`"


in_run = CHECK.judged_by(
    "diagnosis.files",
    "judge_writers",
    "Write on one rank only (`if dist.get_rank() == 0:`), with a barrier after it where others read the file; "
    "or include the rank in the path.",
)
