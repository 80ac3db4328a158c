"""Every rank creates, deletes or renames the same file or directory, or polls for it.

What it finds
    os.makedirs and mkdir without exist_ok, shutil.rmtree, os.remove, unlink, os.rename and os.replace that all ranks
    reach at once with a path that does not depend on the rank; and a loop that sleeps until a file exists which another
    rank writes in place. Downloads and other data preparation have their own check, download-race. In a run: a
    rank that fails with what another did to the path, deletes what another has made, or waits for a file in this way.

Why it is bad
    The ranks get there at nearly the same time. `if not os.path.exists(path): os.makedirs(path)` lets two of them pass,
    and the slower one fails with FileExistsError; a delete fails on the second rank, or removes what the first has just
    written. It fails now and then, more often on a shared file system. A file that is waited for exists from its first
    byte: the others read half of it, or the one that an earlier run left, and do not wait at all.

Example
    if not os.path.exists(output):
        os.makedirs(output)

Remedy
    os.makedirs(path, exist_ok=True); or do it on rank 0 and call dist.barrier() before the others continue, also
    instead of polling.

When it is wrong
    If each process has its own disk.

References
    https://docs.python.org/3/library/os.html#os.makedirs
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, TooLittleEvidence
from ddpdoctor.checks.state.shared_path_race.source import polled_files, rewritten_files, shared_paths
from ddpdoctor.finding import Fact, Finding, Refuted, Severity
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.script import Script

if TYPE_CHECKING:
    from ddpdoctor.record.model import RunRecord

CHECK = Check(
    code="DDP608",
    name="shared-path-race",
    stands_for="path-race",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "accesses"}),
    subjects=("job",),
    triggers=(
        *("mkdir", "makedirs", "rmtree", "remove", "unlink", "rmdir", "rename", "replace", "sleep", "open"),
        *("symlink", "savefig"),
    ),
)

_REMEDY = "Do it on rank 0 only, with dist.barrier() before the other ranks continue; os.makedirs takes exist_ok=True."


def in_source(script: Script) -> Iterator[Finding]:
    """Report creations, deletions and renames that all ranks make under one path, and loops that wait for a file."""
    for shared in shared_paths(whole_projection(script)):
        event = shared.event
        remedy = "Do it on rank 0 only, with dist.barrier() before the other ranks continue."
        if shared.doing == "creates" and "symlink" not in event.name:
            remedy = "Give it exist_ok=True, or do it on rank 0 with a barrier after it."
        failing = ", and all but the fastest one fail" if shared.unguarded else ""
        yield CHECK.finding(
            "source",
            f"every rank {shared.doing} {shared.path}{failing}",
            remedy=remedy,
            locations=(event.module.location(event.node),),
            severity=Severity.ADVICE if shared.mild else None,
            evidence=(
                Fact(
                    text="there is no rank test around this call or its callers",
                    basis="source",
                    location=event.module.location(event.node),
                    stack=event.chain,
                ),
            ),
        )
    for use in rewritten_files(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"every rank writes {use.source}, overwriting what the others wrote",
            remedy="Write it on rank 0 only.",
            locations=(use.event.module.location(use.event.node),),
            severity=Severity.ADVICE,
        )
    for polled in polled_files(whole_projection(script)):
        yield CHECK.finding(
            "source",
            f"ranks wait until {polled.path} exists, which it does from its first byte or since an earlier run",
            remedy="Wait in dist.barrier() on all ranks instead; or write under another name, then os.replace() it.",
            locations=(polled.module.head_location(polled.loop),),
            evidence=(
                Fact(
                    text="another rank writes it here, in place",
                    basis="source",
                    location=polled.write.event.module.location(polled.write.event.node),
                ),
            ),
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report paths at which ranks come into each other's way; refute lines at which each path has one rank.

    Before there is a process group no collective orders the ranks, and what counts is that one of them dies.
    """
    from ddpdoctor.diagnosis.divergence_findings import path_findings

    collectives = record.stream("collectives")
    for found in path_findings(CHECK, record, _REMEDY):
        if collectives.state == "complete" or (isinstance(found, Finding) and found.severity is Severity.ERROR):
            yield found
    if collectives.state != "complete":
        raise TooLittleEvidence(f"the record's collectives are {collectives.state} ({collectives.reason})")
