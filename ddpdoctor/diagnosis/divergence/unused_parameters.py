"""Parameters of a wrap that got no gradient, and the divergences that follow from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from ddpdoctor.diagnosis.divergence.next_calls import NextCall
from ddpdoctor.diagnosis.wording import bytes_text, location_of, place, rank_list, site_location
from ddpdoctor.finding import Frame, Location
from ddpdoctor.record.model import RunRecord, Wrap
from ddpdoctor.record.streams.training import MissingGradient

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""How DDP's error begins when parameters got no gradient."""

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ((?:\d+ ?)+)")

NAMES_SHOWN = 6
STEPS_NEEDED = 4
"""Synchronised backwards on every rank before a parameter is said never to get a gradient."""


class UnusedOnRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters without gradient that some ranks have in common."""

    ranks: str
    """The ranks in words."""
    first_rank: int
    names: tuple[str, ...]
    """Folded names, as in ``encoder.layers.3.* (12 parameters)``."""
    elsewhere: str
    """Those of them that have a gradient on another rank, where every rank lacks some: in words, as a predicate."""
    tensors: int
    elements: int
    size_bytes: int
    location: Location | None
    """The line whose forward or backward ended without them."""
    stack: tuple[Frame, ...]


class UnusedParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one wrap that got no gradient in a synchronised backward."""

    sentence: str
    remedy: str
    ranks: tuple[int, ...]
    """Ranks on which some are missing."""
    locations: tuple[Location, ...]
    """The wrap, then the line whose forward or backward ended without them."""
    groups: tuple[UnusedOnRanks, ...]
    cut: bool = False
    """The place where the graph ends is known."""
    share: float = 0.0
    """Share of the parameters of the wrap; 0 where that is not known."""


def unused_parameters(record: RunRecord) -> Iterator[UnusedParameters]:
    """Yield the wraps with parameters that got no gradient and that no option of DDP serves.

    Those that were frozen after the wrap are another defect's.
    """
    for number in sorted({wrap.wrap for wrap in record.wraps}):
        wraps = {wrap.rank: wrap for wrap in record.wraps if wrap.wrap == number}
        missing = {
            rank: names - frozen_names(record, rank, number)
            for rank, names in _missing_by_rank(record, number, wraps).items()
        }
        missing = {rank: names for rank, names in missing.items() if names}
        if missing:
            yield _describe(record, number, wraps, missing)


def never_used(record: RunRecord) -> Iterator[UnusedParameters]:
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
            names = frozenset.intersection(*(frozenset(entry.parameters) for entry in seen)) if whole else frozenset()
            never.append(names - frozen_names(record, rank, number))
        names = frozenset.intersection(*never)
        if names:
            found = _describe(record, number, wraps, dict.fromkeys(wraps, names))
            steps = min(
                sum(entry.rank == rank and entry.wrap == number for entry in record.missing_gradients) for rank in wraps
            )
            hidden = f"{found.sentence}; in none of {steps} steps, on no rank, and find_unused_parameters=True hides it"
            yield msgspec.structs.replace(found, sentence=hidden)


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
    """Yield the parameters behind the indices in DDP's error; only where a rank has one wrap, which it must be
    about.
    """
    for rank in record.ranks:
        said = next(filter(None, (_INDICES.search(raised.message) for raised in rank.exceptions)), None)
        if said is None:
            continue
        wraps = [wrap for wrap in record.wraps if wrap.rank == rank.rank]
        if len(wraps) != 1:
            continue
        reduced = [
            tensor.name
            for tensor in wraps[0].parameters
            if tensor.requires_grad and tensor.name not in wraps[0].ignored
        ]
        indices = [int(index) for index in said[1].split()]
        if max(indices) < len(reduced):
            names = tuple(reduced[index] for index in indices)
            yield MissingGradient(rank=rank.rank, wrap=wraps[0].wrap, backward=0, parameters=names)


def _frames_of_report(record: RunRecord, number: int) -> tuple[Frame, ...]:
    rank = record.of_rank(number)
    raised = () if rank is None else (error for error in rank.exceptions if UNFINISHED in error.message)
    return next((error.frames for error in raised), ())


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
    found: set[str] = set()
    for change in record.wrap_changes:
        if (change.rank, change.wrap) == (rank, wrap):
            found.update(change.frozen)
    return frozenset(found)


def _missing_by_rank(record: RunRecord, number: int, wraps: dict[int, Wrap]) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
    for entry in missing_gradients(record):
        wrap = wraps.get(entry.rank)
        if entry.wrap == number and wrap is not None and not _is_served(wrap) and entry.parameters:
            found.setdefault(entry.rank, set()).update(entry.parameters)
    return {rank: frozenset(names) for rank, names in found.items()}


def _describe(
    record: RunRecord, number: int, wraps: dict[int, Wrap], missing: dict[int, frozenset[str]]
) -> UnusedParameters:
    by_names: dict[frozenset[str], list[int]] = {}
    for rank, names in sorted(missing.items()):
        by_names.setdefault(names, []).append(rank)
    everywhere = frozenset.intersection(*by_names)
    contrasted = len(by_names) > 1 and set(missing) == set(wraps)
    groups = tuple(
        _group(record, number, wraps[ranks[0]], names, ranks, names - everywhere if contrasted else frozenset())
        for names, ranks in by_names.items()
    )
    differs = len(by_names) > 1 or set(missing) != set(wraps)
    first = groups[0]
    name = wraps[min(missing)].module_class or "the model"
    total = len(wraps[min(missing)].parameters)
    amount = f"{first.tensors:,} of {total:,}" if total else f"{first.tensors:,}"
    sentence = (
        f"{amount} parameters of {name} got no gradient ({first.elements:,} elements, {bytes_text(first.size_bytes)}): "
        f"{', '.join(first.names)}"
    )
    if differs:
        without = sorted(set(wraps) - set(missing))
        contrast = f"all have one on {rank_list(without)}" if without else first.elsewhere or "other ranks lack others"
        sentence = f"on {first.ranks} {sentence}; {contrast}, so the job hangs or fails in the next step"
    wrapped = site_location(record.site(wraps[min(missing)].site))
    backward = first.location
    cuts = () if differs else _cuts(record, wraps[min(missing)], everywhere)
    if cuts:
        sentence += f"; {cuts[0][0]} at {_named(cuts[0][1])} ends the graph: its results carry no gradient"
    places = (*(place for _, place in cuts), wrapped, backward)
    return UnusedParameters(
        sentence=sentence,
        remedy=_of_cut(*cuts[0]) if cuts else _remedy(wrapped, differs, _is_served(wraps[min(missing)])),
        ranks=tuple(sorted(missing)),
        locations=tuple(dict.fromkeys(location for location in places if location is not None)),
        groups=groups,
        cut=bool(cuts),
        share=first.tensors / total if total else 0.0,
    )


def _of_cut(kind: str, place: Location) -> str:
    return (
        f"Use torch.distributed.nn.functional.all_gather, which carries gradients, instead of {kind} at "
        f"{_named(place)}; or put the rank's own tensor back into the result: gathered[rank] = features."
    )


def _group(
    record: RunRecord, number: int, wrap: Wrap, names: frozenset[str], ranks: list[int], elsewhere: frozenset[str]
) -> UnusedOnRanks:
    known = {tensor.name: tensor for tensor in wrap.parameters}
    tensors = [known[name] for name in names if name in known]
    elements = 0
    for tensor in tensors:
        product = 1
        for size in tensor.shape:
            product *= size
        elements += product
    event = next(entry for entry in missing_gradients(record) if entry.rank == ranks[0] and entry.wrap == number)
    frames = record.site(event.site).frames or _frames_of_report(record, ranks[0])
    return UnusedOnRanks(
        ranks=rank_list(ranks),
        first_rank=ranks[0],
        names=folded(names),
        elsewhere=f"of these, other ranks have one for {', '.join(folded(elsewhere))}" if elsewhere else "",
        tensors=len(names),
        elements=elements,
        size_bytes=sum(tensor.size_bytes for tensor in tensors),
        location=location_of(frames[0] if frames else None),
        stack=frames,
    )


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
