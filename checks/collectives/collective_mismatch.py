"""Ranks call the same collective with tensors or options that do not fit.

What it finds
    One collective, called from the same line on every rank, whose kind, number of elements, dtype, reduce operation,
    root or group differs between ranks. Collectives whose sizes may differ (gather, scatter, all_to_all,
    point-to-point) are compared only in what must agree. Also different models that ranks build DDP from. In the
    source: a root (`src`, `dst`) that is another rank on each, a tensor as long as what each rank picks of its own
    data, and the directory of a distributed checkpoint, of which each rank writes its part.

Why it is bad
    NCCL hangs or corrupts memory, gloo aborts the process; SUM against MAX raises nothing at all and gives a wrong
    number on every rank.

Example
    dist.all_reduce(predictions[mask])      # every rank selects another number of elements

Remedy
    Make shapes and options the same on every rank: pad to a common size, or exchange the sizes first and use a
    collective that allows them to differ. A dict of losses needs the same keys on every rank, whatever is in the batch.

When it is wrong
    No case is known.

References
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, Value, is_varying, tags_of
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.ranks.rank_local_values import is_of_own_length
from ddpdoctor.source.torch_model.recorded_calls import differ_by_rank

if TYPE_CHECKING:
    from ddpdoctor.diagnosis.divergence.divergence import Divergence
    from ddpdoctor.record.streams.training import BufferState

CHECK = Check(
    code="DDP304",
    name="collective-mismatch",
    stands_for="mismatch",
    severity=dict.fromkeys(("source", "rehearsal", "run", "log"), Severity.ERROR),
    needs=frozenset({"ranks", "collectives"}),
    subjects=("collectives",),
    triggers=("src", "dst", "broadcast", "reduce", "gather", "scatter", "checkpoint"),
)
# The argument that names the root, and its position.
_ROOTS = {
    **dict.fromkeys(("broadcast", "broadcast_object_list"), ("src", 1)),
    **dict.fromkeys(("scatter", "scatter_object_list"), ("src", 2)),
    **dict.fromkeys(("gather", "gather_object"), ("dst", 2)),
    "reduce": ("dst", 1),
}

# The argument that has as many elements on every rank.
_EQUALLY_LONG = {
    **dict.fromkeys(("all_reduce", "reduce"), ("tensor", 0)),
    "all_gather": ("tensor", 1),
    "all_gather_into_tensor": ("input_tensor", 1),
}
_HOW = {
    "number of elements": ": pad the tensors to a common size, or exchange their sizes first",
    "group": "; a rank that uses several groups must use them in the same order as the others",
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report collectives of all ranks whose root, or the length of what they are given, is another on each."""
    projection = whole_projection(script)
    for event in projection.in_course("collective"):
        tensor = event.argument(*_EQUALLY_LONG.get(event.name, ("", -1)))
        if tensor is not None and is_of_own_length(projection.machine, tensor) and _is_of_all(event):
            yield CHECK.finding(
                f"each rank gives {event.name} as many elements as its own data has, which all ranks need alike",
                remedy="Make the number of elements the same on every rank" + _HOW["number of elements"] + ".",
                locations=event.location,
                because=("the rank's own data decides how long this tensor is", event),
                severity=Severity.WARNING,
            )
        name, position = _ROOTS.get(event.name, ("", -1))
        root = event.argument(name, position) if _is_of_all(event) else None
        if root is not None and differ_by_rank(root) and len(event.positional) <= position + 1:
            yield CHECK.finding(
                f"each rank names another rank as `{name}` of {event.name}, which has one for all of them",
                remedy=f"Give it the same `{name}` on every rank.",
                locations=event.location,
                because=("this number depends on the rank", event),
            )

    for event, given in _own_directories(projection):
        kinds = {kind for kind, _ in tags_of(given)}
        yield CHECK.finding(
            f"each rank gives {event.name} a directory of its own: a part of the checkpoint lies in each, and none "
            "holds it whole",
            remedy="Give it the same path on every rank: name it by what all ranks share (the epoch, the step, a "
            "reduced loss), or broadcast rank 0's.",
            locations=event.location,
            because=("this path depends on the rank", event),
            # Ranks mostly read the clock in the same second.
            severity=Severity.WARNING if "clock" in kinds else None,
        )


def _own_directories(projection: Projection) -> Iterator[tuple[Event, Value]]:
    """Yield saves and loads of all ranks in a checkpoint of parts, with a path that is another one on each."""
    for event in projection.in_course("collective"):
        if event.root or not event.name.startswith("checkpoint.") or {"process_group", "no_dist"} & event.named.keys():
            continue
        storage = event.argument("storage_writer") or event.argument("storage_reader")
        made = projection.machine.object(storage) if storage is not None else None
        path = event.argument("checkpoint_id") or (made.argument("path", 0) if made is not None else None)
        kinds = {kind for kind, _ in tags_of(path)} if path is not None else set()
        # What is found in a directory is mostly the same for all; a temporary one may be for a job that saves whole.
        unsure = "files" in kinds or ("unique" in kinds and event.undecided)
        if path is not None and event.ranks == ALL_RANKS and is_varying(path) and not unsure:
            yield event, path


def _is_of_all(event: Event) -> bool:
    return event.ranks == ALL_RANKS and "group" not in event.named


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report the divergence of the run when one line gives different collectives, and models that differ."""
    from ddpdoctor.checks.collectives.divergences_run import find_model_mismatch
    from ddpdoctor.diagnosis.divergence_kind import diverged

    yield from diverged(
        CHECK, record, lambda parted: _of_keys(parted) or _of_buffers(record, parted) or _remedy(parted)
    )
    models = find_model_mismatch(record)
    if models is not None:
        remedy = "Build the same model on every rank: layers, sizes and frozen parameters must not depend on the rank."
        yield from CHECK.judged(record.job.kind, (models,), remedy)


def _remedy(divergence: Divergence) -> str:
    return f"Make the {divergence.difference} the same on every rank{_HOW.get(divergence.difference, '')}."


def _of_keys(divergence: Divergence) -> str:
    """Return what to do where every rank reduces the values of one dictionary, of which each has another number."""
    from ddpdoctor.diagnosis.wording import rank_list

    signatures = {turn.rank: turn.signature for turn in divergence.turns}
    names = {"" if signature is None else signature.entries_of for signature in signatures.values()}
    if divergence.difference != "number of elements" or len(names) != 1 or "" in names:
        return ""
    by_count: dict[int, list[int]] = {}
    for rank, signature in signatures.items():
        by_count.setdefault(0 if signature is None else sum(signature.numels), []).append(rank)
    counts = " and ".join(f"{count:,} keys on {rank_list(ranks)}" for count, ranks in by_count.items())
    return (
        f"{names.pop()} has {counts}: give it the same keys on every rank whatever is in its batch, with 0 for "
        "missing ones, before its values are reduced."
    )


MOST_NAMED = 3


def _of_buffers(record: RunRecord, divergence: Divergence) -> str:
    """Return what to do where DDP hands on buffers that are not as large on every rank."""
    origins = {turn.signature.origin for turn in divergence.turns if turn.signature is not None}
    if divergence.difference != "number of elements" or origins != {"ddp-forward"}:
        return ""
    if len({(state.rank, state.wrap) for state in record.buffers}) > len({state.rank for state in record.buffers}):
        return ""  # Whose buffers these are is not known.
    newest: dict[int, BufferState] = {state.rank: state for state in record.buffers}
    states = [newest[turn.rank].digests for turn in divergence.turns if turn.rank in newest]
    apart = [
        name for name in dict.fromkeys(name for one in states for name in one) if len({*map(_of(name), states)}) > 1
    ]
    # Digests are of values, and those of the first forward are as large: the constructor of DDP compares their sizes.
    made = {name for state in record.buffers if state.forward == 0 for name in state.digests}
    names = [name for name in apart if name not in made]
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    whose = f"{', '.join(names[:MOST_NAMED])}{rest} {'is' if len(names) == 1 else 'are'}" if names else "one of them is"
    return (
        f"DDP hands the buffers of rank 0 on before each forward, and {whose} not the same on all ranks: give every "
        "buffer the same size on every rank, keep what grows with the batch as a plain attribute, or pass "
        "broadcast_buffers=False."
    )


def _of(name: str) -> Callable[[Mapping[str, str]], str]:
    return lambda digests: digests.get(name, "")


in_log = CHECK.reported_by("diagnosis.logs.findings", "from_dead_job", _remedy)
