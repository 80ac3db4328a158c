"""Parameters of a wrap that got no gradient, and the divergences that follow from them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ddpdoctor.check import Verdict, Via
from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.wording import bytes_text, location_of, place, rank_list, site_location
from ddpdoctor.finding import Frame, Location, Severity, grouped
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import MissingGradient

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""How DDP's error begins when parameters got no gradient."""

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ((?:\d+ ?)+)")

NAMES_SHOWN = 6
STEPS_NEEDED = 4
"""Synchronised backwards on every rank before a parameter is said never to get a gradient."""
MOST_LEFT_OUT = 0.5
"""Share of a model's parameters that a part which a training has no use for makes up at most."""


def unused_parameters(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps with parameters that got no gradient and that no option of DDP serves.

    Those that were frozen after the wrap are another defect's.
    """
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        wraps = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        missing = {
            rank: left
            for rank, names in _missing_by_rank(record, number, wraps).items()
            if (left := names - frozen_names(record, rank, number))
        }
        if missing:
            yield _describe(record, number, wraps, missing)


def never_used(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps that an option of DDP serves, with parameters that got no gradient on any rank in any step.

    Only where enough synchronised backwards were seen on every rank; what was frozen after the wrap is left out.
    """
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        wraps = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        if len(wraps) != len(record.rank_numbers()) or not all(map(_is_served, wraps.values())):
            continue
        never: list[frozenset[str]] = []
        for rank in wraps:
            seen = [entry for entry in record.missing_gradients if (entry.rank, entry.wrap) == (rank, number)]
            made = sum(entry.rank == rank and number in entry.synchronised for entry in record.backwards)
            whole = STEPS_NEEDED <= made <= len(seen)
            without = (frozenset(entry.parameters).difference(entry.local) for entry in seen)
            names = frozenset.intersection(*without) if whole else frozenset()
            never.append(names - frozen_names(record, rank, number))
        names = frozenset.intersection(*never)
        if names:
            seen_on = [entry.rank for entry in record.missing_gradients if entry.wrap == number]
            steps = min(map(seen_on.count, wraps))
            yield _describe(record, number, wraps, dict.fromkeys(wraps, names), steps)


def _is_served(wrap: Wrap) -> bool:
    return bool(wrap.options.get("find_unused_parameters") or wrap.options.get("static_graph"))


def _cuts(record: RunRecord, wrap: Wrap, names: frozenset[str]) -> tuple[tuple[str, Location], ...]:
    """Return the gathers, by kind and place, below which all of these parameters are, so that their graph ends there.

    Parameters are known by their shapes. Those that have gradients go first: whoever puts the rank's own tensor back
    into the result has them for all that it was computed from, and DDP's search joins all outputs in one node.
    """
    lacking = Counter(tensor.shape for tensor in wrap.parameters if tensor.name in names)
    others = Counter(tensor.shape for tensor in wrap.parameters if tensor.name not in names)
    cuts = [cut for cut in record.cut_graphs if cut.rank == wrap.rank]
    ending = [cut for cut in cuts if lacking and lacking <= Counter(cut.leaves) - others]
    if not ending and lacking and lacking <= sum((Counter(cut.leaves) for cut in cuts), Counter()) - others:
        ending = cuts  # Each tower of a model has a gather of its own.
    found = ((cut.kind, site_location(record.site(cut.site))) for cut in ending)
    return tuple(dict.fromkeys((kind, place) for kind, place in found if place is not None))


def waits_in_vain(record: RunRecord, number: int) -> bool:
    """Return whether DDP could not finish a reduction of a wrap: what it had reduced by then is not averaged either."""
    return bool(_missing_by_rank(record, number, {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}))


def explains(record: RunRecord, turns: Iterable[NextCall]) -> bool:
    """Return whether missing gradients are the cause of what the ranks did: the other ranks then wait in backward.

    True for DDP's own error on a rank with missing gradients, and where one rank reduces gradients while another, which
    lacks other gradients than the first, continued without.
    """
    by_rank: dict[int, set[str]] = {}
    for number in {wrap.wrap for wrap in record.wraps}:
        wraps = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        for rank, names in _missing_by_rank(record, number, wraps).items():
            by_rank.setdefault(rank, set()).update(f"{number}.{name}" for name in names)
    if not by_rank:
        return False
    entries = list(turns)
    if any(turn.exception and UNFINISHED in turn.exception.message and turn.rank in by_rank for turn in entries):
        return True
    reducing = {turn.rank for turn in entries if turn.signature and turn.signature.origin == "ddp-backward"}
    others = {turn.rank for turn in entries} - reducing
    return any(by_rank.get(one, set()) < by_rank.get(other, set()) for one in reducing for other in others)


def missing_gradients(record: RunRecord) -> tuple[MissingGradient, ...]:
    """Return what was recorded of missing gradients; of a job that no one asked about them, what DDP's error says."""
    return record.missing_gradients or tuple(_reported(record))


def _reported(record: RunRecord) -> Iterator[MissingGradient]:
    """Yield the parameters behind the indices in DDP's error, where a rank has one wrap, which it must be about."""
    for rank in record.ranks:
        said = next(filter(None, (_INDICES.search(raised.message) for raised in rank.exceptions)), None)
        if said is None:
            continue
        wraps = [wrap for wrap in record.wraps if wrap.rank == rank.rank]
        if len(wraps) != 1:
            continue
        reduced = wraps[0].reduced
        indices = [int(index) for index in said[1].split()]
        if max(indices) < len(reduced):
            names = tuple(reduced[index].name for index in indices)
            yield MissingGradient(rank=rank.rank, wrap=wraps[0].wrap, parameters=names)


def folded(names: Iterable[str]) -> tuple[str, ...]:
    """Fold names that share a module: ``encoder.layers.3.* (12 parameters)``; at most six parts, then a count."""
    rest = sorted(names)
    groups: dict[str, list[str]] = {name: [name] for name in rest}
    while len(groups) > NAMES_SHOWN:
        deepest = max((key.count("."), key) for key in groups)[0]
        if deepest == 0:
            break
        merged: dict[str, list[str]] = {}
        for key, members in groups.items():
            shorter = key.rpartition(".")[0] if key.count(".") == deepest else key
            merged.setdefault(shorter, []).extend(members)
        groups = merged
    parts = [
        members[0] if len(members) == 1 else f"{key}.* ({len(members):,} parameters)" for key, members in groups.items()
    ]
    if len(parts) > NAMES_SHOWN:
        parts = [*parts[: NAMES_SHOWN - 1], f"{len(parts) - NAMES_SHOWN + 1:,} more"]
    return tuple(parts)


def frozen_names(record: RunRecord, rank: int, wrap: int) -> frozenset[str]:
    """Parameters of a wrap that a rank froze after it."""
    own = (change for change in record.wrap_changes if (change.rank, change.wrap) == (rank, wrap))
    return frozenset(name for change in own for name in change.frozen)


def _missing_by_rank(record: RunRecord, number: int, wraps: dict[int, Wrap]) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
    for entry in missing_gradients(record):
        wrap = wraps.get(entry.rank)
        if entry.wrap == number and wrap is not None and not _is_served(wrap) and entry.parameters:
            found.setdefault(entry.rank, set()).update(entry.parameters)
    return {rank: frozenset(names) for rank, names in found.items()}


def _describe(
    record: RunRecord, number: int, wraps: dict[int, Wrap], missing: dict[int, frozenset[str]], steps: int = 0
) -> Verdict:
    """Return what is wrong with parameters of a wrap; ``steps`` were made where an option of DDP hides it."""
    by_names = grouped(sorted(missing), missing.__getitem__)
    everywhere = frozenset.intersection(*by_names)
    contrasted = len(by_names) > 1 and set(missing) == set(wraps)
    reasons = tuple(
        _reason(record, number, wraps[ranks[0]], names, ranks, names - everywhere if contrasted else frozenset())
        for names, ranks in by_names.items()
    )
    differs = len(by_names) > 1 or set(missing) != set(wraps)
    (names, ranks), (_, backward, numbers, _) = next(iter(by_names.items())), reasons[0]
    wrap = wraps[min(missing)]
    total, lacking = len(wrap.parameters), len(names)
    amount = f"{lacking:,} of {total:,}" if total else f"{lacking:,}"
    size = f"{numbers['elements']:,} elements, {bytes_text(numbers['bytes'])}"
    sentence = (
        f"{amount} parameters of {wrap.module_class or 'the model'} got no gradient ({size}): "
        f"{', '.join(folded(names))}"
    )
    if differs:
        without = sorted(set(wraps) - set(missing))
        contrast = f"all have one on {rank_list(without)}" if without else "other ranks lack others"
        if contrasted and names != everywhere:
            contrast = _elsewhere(names - everywhere)
        sentence = f"on {rank_list(ranks)} {sentence}; {contrast}, so the job hangs or fails in the next step"
    wrapped = site_location(record.site(wrap.site))
    cuts = () if differs else _cuts(record, wrap, everywhere)
    remedy = _remedy(wrapped, differs, _is_served(wrap))
    if cuts:
        gather = f"{cuts[0][0]} at {_named(cuts[0][1])}"
        sentence += f"; {gather} ends the graph: its results carry no gradient"
        remedy = f"Use torch.distributed.nn.functional.all_gather, which carries gradients, instead of {gather}; or "
        remedy += "put the rank's own tensor back into the result: gathered[rank] = features."
    severity = None
    if steps:
        sentence += f"; in none of {steps} steps, on no rank, and find_unused_parameters=True hides it"
        # An unused head is no accident in a job that does not fail.
        severity = Severity.WARNING if total and lacking > MOST_LEFT_OUT * total else Severity.ADVICE
        severity = Severity.ERROR if cuts else severity
    return Verdict(
        sentence=sentence,
        remedy=remedy,
        ranks=tuple(sorted(missing)),
        locations=tuple(dict.fromkeys((*(place for _, place in cuts), wrapped, backward.location))),
        because=reasons,
        severity=severity,
    )


def _reason(
    record: RunRecord, number: int, wrap: Wrap, names: frozenset[str], ranks: list[int], elsewhere: frozenset[str]
) -> tuple[str, Via, dict[str, int], int]:
    """Return what some ranks have no gradient for, and the line whose forward or backward ended without."""
    tensors = [tensor for tensor in wrap.parameters if tensor.name in names]
    elements, size_bytes = sum(math.prod(one.shape) for one in tensors), sum(one.size_bytes for one in tensors)
    event = next(entry for entry in missing_gradients(record) if entry.rank == ranks[0] and entry.wrap == number)
    raised = (error for rank in record.ranks if rank.rank == ranks[0] for error in rank.exceptions)
    reports = (error.frames for error in raised if UNFINISHED in error.message)
    frames = record.site(event.site).frames or next(reports, ())
    text = (
        f"{rank_list(ranks)}: no gradient for {', '.join(folded(names))}: {len(names):,} parameters, {elements:,} "
        f"elements, {size_bytes:,} bytes"
    )
    numbers = {"parameters": len(names), "elements": elements, "bytes": size_bytes}
    place = Via(location_of(frames[0] if frames else None), frames)
    return f"{text}; {_elsewhere(elsewhere)}" if elsewhere else text, place, numbers, ranks[0]


def _elsewhere(names: frozenset[str]) -> str:
    return f"of these, other ranks have one for {', '.join(folded(names))}"


def _named(location: Location) -> str:
    return place(Frame(location.file, location.line))


def _remedy(wrapped: Location | None, differs: bool, served: bool = False) -> str:
    where = "" if wrapped is None else f" at {_named(wrapped)}"
    if differs:
        return (
            f"If their use depends on the input, pass find_unused_parameters=True to DistributedDataParallel{where}, "
            "or use them on every rank (add 0 times their sum to the loss)."
        )
    wanted = (
        "If they are not needed, remove them or freeze them with requires_grad_(False) before the wrap; if they are to "
        "learn, look for what ends the graph between them and the loss: detach, .data, argmax, no_grad, a collective "
        "that carries no gradient"
    )
    if served:
        return f"{wanted}."
    return f"{wanted}; if their use depends on the input, pass find_unused_parameters=True{where}."
