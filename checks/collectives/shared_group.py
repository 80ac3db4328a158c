"""Two threads of a rank call collectives of one group at the same time.

What it finds
    In a run: a collective that is called while another thread of the same rank, which has used the same process group,
    is at work: an asynchronous checkpoint, an average of the weights, a logger that gathers.

Why it is bad
    The ranks pair the collectives of a group by their order. Which of two threads comes first is chance, and falls out
    differently on different ranks: then a reduction of gradients is paired with the other thread's collective, and the
    job hangs, or continues with wrong numbers.

Example
    threading.Thread(target=average_weights).start()      # all_reduce in the default group
    for batch in loader:
        model(batch).mean().backward()                    # reduces in the default group as well

Remedy
    Give the thread a group of its own: group = dist.new_group() on all ranks, and group=group in its collectives; for
    an asynchronous checkpoint process_group=group.

When it is wrong
    If the threads exclude each other by something that orders them alike on all ranks. Groups with several backends, as
    cpu:gloo,cuda:nccl, are left out: one thread may use the one, and one the other.

References
    https://docs.pytorch.org/docs/stable/distributed.html#groups
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.check import Check, Via
from ddpdoctor.diagnosis.divergence import describe
from ddpdoctor.diagnosis.divergence_kind import divergence_of, parts_in, shared_groups
from ddpdoctor.diagnosis.wording import group_name, place, rank_list, site_location
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import Group

CHECK = Check(
    code="DDP318",
    name="shared-group",
    stands_for="shared-group",
    severity={"rehearsal": Severity.WARNING},
    needs=frozenset({"ranks", "collectives", "waits", "shared_groups"}),
)


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report each such group once, with the divergence that came of it, which makes it an error."""
    divergence = divergence_of(record, CHECK.stands_for)
    found = list(shared_groups(record))
    for ranks, name in sorted({(use.ranks, use.name) for use in found}):
        uses = [use for use in found if (use.ranks, use.name) == (ranks, name)]
        first = min(uses, key=lambda use: use.rank)
        theirs, own = record.site(first.other_site), record.site(first.site)
        group = group_name(Group(ranks=ranks, name=name), record.job.world_size)
        parted = divergence is not None and parts_in(divergence, ranks)
        seen = f"on {rank_list([use.rank for use in uses])} the thread {first.thread} was at work meanwhile"
        yield CHECK.finding(
            f"the thread {first.thread} calls collectives of {group} at {place(theirs.innermost)} while another "
            f"thread calls {first.kind} of it at {place(own.innermost)}: their order is chance"
            + (f"; {describe.title(divergence)}" if divergence is not None and parted else ""),
            basis="rehearsal",
            remedy="Give the thread a group of its own: group = dist.new_group() on all ranks, and group=group in its "
            "collectives; process_group=group for a checkpoint that is saved meanwhile.",
            locations=map(site_location, (theirs, own)),
            ranks=tuple(sorted({use.rank for use in uses})),
            because=(seen, Via(site_location(own), own.frames)),
            evidence=describe.facts(divergence, "rehearsal") if divergence is not None and parted else (),
            severity=Severity.ERROR if parted else None,
        )
