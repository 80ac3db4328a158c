"""A comment that suppresses findings suppresses nothing.

What it finds
    A comment `# ddpdoctor: ignore[...]` or `# ddpdoctor: file-ignore[...]` where the checks that it names found
    nothing, or that names no check, or one that does not exist. A check that was not run, or that could not know,
    says nothing of its comments; neither does one that also looks at runs, as long as there was none.

Why it is bad
    It hides the next defect of that kind in the same place from everyone.

Example
    sampler.set_epoch(epoch)  # ddpdoctor: ignore[DDP102]

Remedy
    Remove the code from the comment, or the comment.

When it is wrong
    Where the defect shows only under another entry script than those that were examined.

References
    https://docs.astral.sh/ruff/rules/unused-noqa/
"""

from __future__ import annotations

from ddpdoctor.check import Check, LoadedCheck
from ddpdoctor.finding import Finding, Location, Severity

CHECK = Check(code="DDP001", name="unused-suppression", severity={"source": Severity.ADVICE})
LOADED = LoadedCheck(check=CHECK, documentation=__doc__ or "")
"""It looks at what the other checks said, so it is none of the catalogue: it only is explained, selected and ignored
like one."""


def unused(location: Location, what: str, why: str) -> Finding:
    """Return the finding for one comment, or one of the words in it."""
    return CHECK.finding(
        f"{what} suppresses nothing: {why}",
        remedy="Remove it, so that it does not hide the next defect of that kind.",
        locations=(location,),
        because=(("comments are compared with what the checks found", location),),
    )
