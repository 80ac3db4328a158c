"""A state dict of the DDP wrapper meets a bare model, or the reverse.

What it finds
    A save and a load of one path, or of one key of the dict that is saved there, of which one goes through the DDP
    wrapper and the other through the bare module.

Why it is bad
    Names in the wrapper's state dict begin with "module.". Loaded into a bare model they are missing and unexpected
    keys and the load fails; with strict=False nothing is loaded at all, without a message.

Example
    torch.save(ddp_model.state_dict(), path)
    fresh.load_state_dict(torch.load(path))

Remedy
    Save ddp_model.module.state_dict() and always load into the bare module.

When it is wrong
    Where the names are changed between the two outside of what was read.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check
from ddpdoctor.checks.state.module_prefix.source import prefix_mismatches
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP604",
    name="module-prefix",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"ranks", "state_names"}),
    subjects=("wrap",),
    triggers=("load_state_dict",),
)

REMEDY = "Save and load through the bare module: ddp_model.module.state_dict()."


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads whose names do not fit what was saved."""
    for mismatch in prefix_mismatches(whole_projection(script)):
        load, save = mismatch.load, mismatch.save
        saved, loaded = "a bare model", "the DDP wrapper"
        if mismatch.wrapped_save:
            saved, loaded = loaded, saved
        yield CHECK.finding(
            "source",
            f'{loaded} loads what was saved from {saved}: the names differ by the prefix "module."',
            remedy=REMEDY,
            locations=(load.module.location(load.node),),
            evidence=(Fact(text="it was saved here", basis="source", location=save.module.location(save.node)),),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report names that differ from the module's by the prefix; refute loads whose names fitted."""
    from ddpdoctor.diagnosis.divergence_findings import load_findings
    from ddpdoctor.diagnosis.files.checkpoints import judge_prefixes

    yield from load_findings(CHECK, record, judge_prefixes(record), REMEDY)
