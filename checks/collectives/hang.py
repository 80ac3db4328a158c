"""The job hangs although the ranks did not diverge.

What it finds
    A rank that others wait for and that is idle: a lock, a read that never returns, a call stuck in C, a process
    stopped by a signal; ranks that all receive from each other first. A `time.sleep` that ends within the rehearsal is
    left alone; one that ends later, but before the group's timeout, is a warning. So is a loop that polls for a file
    without change, once no rank has done anything else for the stall time. In a live run the rank is named after the
    stall time too, as a warning: it becomes an error once the rank has been at one place for a minute. A rank that
    sleeps or polls is not reported as long as its own timer wakes it before the timeout. A rank that works in one
    function for twenty of the job's longest pauses (a minute at least) while others wait is suspected of an endless
    loop; sooner, one that goes around a loop in which nothing changes, such as an endless generator over an empty share
    of the data. A process whose script has finished, but not one of its threads, is found, too.

Why it is bad
    The other ranks wait in a collective until its timeout, and the error then blames the ranks that waited.

Example
    with filelock.FileLock("cache.lock"):       # taken by a process that died
        tokens = tokenise(text)
    dist.barrier()

Remedy
    Look at the stack of the named rank: what it waits for is outside the collectives. Put time limits on locks, queues
    and network reads.

When it is wrong
    If the rank would have continued by itself after more than the stall time; in a live run, after more than a minute
    (a checkpoint on a stalling disk).

References
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddpdoctor.check import Check, RunRecord
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence_kind import divergence_finding, divergence_of
from ddpdoctor.diagnosis.live_verdict import POLLING_NS, may_go_on
from ddpdoctor.diagnosis.stacks import wait_of
from ddpdoctor.finding import Finding, Refuted, Severity

CHECK = Check(
    code="DDP305",
    name="hang",
    stands_for="hang",
    severity=dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
)


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the standstill of the run, with the rank that stands and its stack."""
    divergence = divergence_of(record, CHECK.stands_for)
    if divergence is not None:
        yield divergence_finding(
            CHECK,
            record,
            divergence,
            of_world(divergence, record) or _remedy(divergence),
            Severity.WARNING if may_go_on(record, divergence) else None,
        )


def of_world(divergence: Divergence, record: RunRecord) -> str:
    """Return what helps a rank that answers no more since it has destroyed its world; empty where it did not.

    Seen with torch 2.13 and gloo on a loaded machine: the DDP model is freed after ``destroy_process_group``, with it
    the group, by a thread that keeps the interpreter and waits for one of gloo's, which needs the interpreter to
    free what it keeps of the last backward.
    """
    turn = next((turn for turn in divergence.turns if turn.rank == divergence.culprit), None)
    waits = [wait for wait in record.waits if turn is not None and wait.rank == turn.rank]
    if turn is None or not turn.seen_ago_ns or not waits or waits[-1].kind != "destroy_process_group":
        return ""
    if not waits[-1].ended_ns:
        return ""
    return (
        "Torch can hang like this when the DDP model is freed after its process group: free it before "
        "(`del model` in front of `dist.destroy_process_group()`)."
    )


def _remedy(divergence: Divergence) -> str:
    if divergence.form == "standstill":
        return (
            "Let one of the two ranks send first and the other receive first, or post both with batch_isend_irecv, "
            "which does not wait."
        )
    turn = next((turn for turn in divergence.turns if turn.rank == divergence.culprit), None)
    if turn is not None and turn.kept_by.startswith("exit handler"):
        return f"Put a time limit on what the {turn.kept_by} waits for: the process ends only after it."
    if turn is not None and turn.kept_by:
        return (
            f"End the {turn.kept_by} before the script ends, or make it a daemon: Python waits for every other "
            "thread at exit."
        )
    if turn is not None and any(os.path.basename(frame.file) == "bdb.py" for frame in turn.stack):
        return (
            f"Rank {turn.rank} is at a debugger prompt: remove the breakpoint, or debug a run with one rank, which "
            "has its own terminal."
        )
    if turn is not None and turn.endless is not None and turn.endless.empty:
        return (
            f"Give rank {turn.rank} its share: at least one shard or file for every rank (and for every worker of its "
            "loader), or fewer ranks; and end the generator, or raise, where a share is empty."
        )
    if turn is not None and turn.endless is not None:
        return (
            f"Check what the loop goes around for: nothing changed in it on rank {turn.rank}, so that it will not end. "
            "Bound the number of its rounds, and raise where they are used up."
        )
    if turn is not None and turn.loops:
        return (
            "Check in both stacks what the loop waits for or counts: if it needs another rank, that rank is "
            "waiting for this one. If the work just takes long, divide it between the ranks."
        )
    if turn is not None and turn.stopped:
        return f"Continue rank {turn.rank} (`kill -CONT`), and find out who sent the signal: a debugger, a scheduler."
    if turn is not None and turn.polls_for:
        return (
            "Nothing in this job can progress: a rank that creates or removes the file must do so before it waits "
            f"in a collective that rank {turn.rank} reaches later. Let all ranks wait in the same collective instead "
            "of a loop. If another program should do it, it did not in the rehearsal."
        )
    if turn is not None and turn.sleeps_ns:
        if turn.sleeps_ns < POLLING_NS:
            return (
                "Check what the loop around this sleep waits for: if a rank provides it only after a collective, "
                "no rank can continue. Let all ranks wait in that collective instead."
            )
        return "Sleep less: the others wait all that time, and fail when the timeout of their group is reached."
    wait = wait_of(turn.stack) if turn is not None else None
    if wait is not None:
        return wait.remedy
    if divergence.culprit is None:
        return "Check in their stacks where the ranks are stuck; put a time limit on that lock, queue or read."
    return f"Check in its stack where rank {divergence.culprit} is stuck; put a time limit on that lock, queue or read."


def _remedy_by_dumps(divergence: Divergence) -> str:
    if all(turn.line is None for turn in divergence.turns if not turn.waiting):
        return (
            "Dumps do not show where a rank is outside a collective: read its log, or take its stack while it "
            "hangs (`ddpdoctor autopsy --live`)."
        )
    return _remedy(divergence)


in_log = CHECK.reported_by("diagnosis.logs.findings", "from_dead_job", _remedy_by_dumps)
