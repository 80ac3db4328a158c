"""What is wrong with the use of DDP: by torch's exceptions, by the wraps, and by later changes of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ddpdoctor.check import Verdict, Via
from ddpdoctor.checks.gradients.steps_run import gradient_bytes
from ddpdoctor.diagnosis.divergence.unused_parameters import folded, frozen_names
from ddpdoctor.diagnosis.failures import trouble_of
from ddpdoctor.diagnosis.training.replicas import replicated_wraps
from ddpdoctor.diagnosis.wording import bytes_text, count, location_of, rank_list, site_location
from ddpdoctor.files import regex
from ddpdoctor.finding import Frame, Location, Trouble
from ddpdoctor.record.model import RankException, RunRecord, ShardedModule, Wrap

# What the options of a wrap, the layers in it and the batches that it is fed say about it.

BACKWARDS_NEEDED = 4
"""Synchronised backwards on every rank before the search for unused parameters is called needless."""
MEASURED_STEPS_NEEDED = 20
"""The same of a live run, which sees what DDP's logger measures."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A wrap that searches for unused parameters."""

    model: str
    location: Location | None
    by_user: bool
    """The user's own line made the wrap, and not a framework."""
    backwards: int
    """Synchronised backwards that every rank made, or was seen to make where that was not recorded."""
    parameters: int
    unused: bool
    """Some parameter got no gradient in one of them, on one rank at least."""


def searches(record: RunRecord) -> Iterator[Search]:
    """Yield the wraps that search for unused parameters and were trained long enough to tell whether they need to.

    Of a live run there is what DDP's logger told. A backward that adds to gradients that are there already does not
    show what it contributed itself.
    """
    for wraps in replicated_wraps(record):
        number = wraps[min(wraps)].wrap
        on = all(w.options.get("find_unused_parameters") and not w.options.get("static_graph") for w in wraps.values())
        told = {search.rank: search for search in record.unused_searches if search.wrap == number}
        made = dict.fromkeys(wraps, 0) | {rank: search.looks for rank, search in told.items() if rank in wraps}
        for backward in record.backwards:
            if backward.rank in made and number in backward.synchronised and number not in backward.accumulated:
                made[backward.rank] += 1
        needed = MEASURED_STEPS_NEEDED if record.job.kind == "run" else BACKWARDS_NEEDED
        if on and min(made.values()) >= needed:
            yield Search(
                model=wraps[min(wraps)].module_class or "the model",
                location=wrap_location(record, wraps),
                by_user=wraps[min(wraps)].by_user,
                backwards=min(made.values()),
                parameters=sum(tensor.requires_grad for tensor in wraps[min(wraps)].parameters),
                unused=any(entry.wrap == number and entry.rank in wraps for entry in record.missing_gradients)
                or any(search.found_unused for rank, search in told.items() if rank in wraps)
                or any(change.wrap == number and change.frozen for change in record.wrap_changes),
            )


def fed_batch_norms(record: RunRecord) -> Iterator[tuple[Location | None, Location | None, int, int]]:
    """Yield where each wrap is whose first training forward was fed by a loader of known batch size, on every rank, and
    where that loader.

    With how many BatchNorm layers are in training mode, and how many samples the loader gives each rank at a time.
    """
    loaders = {(loader.rank, loader.loader): loader for loader in record.loaders}
    for wraps in replicated_wraps(record):
        number = wraps[min(wraps)].wrap
        firsts = {
            entry.rank: entry
            for entry in record.forwards
            if entry.wrap == number and entry.rank in wraps and entry.batch_norms is not None
        }
        feeding = [loaders.get((rank, first.pass_loader)) for rank, first in sorted(firsts.items())]
        sizes = [loader.batch_size for loader in feeding if loader is not None and loader.batch_size is not None]
        if len(sizes) == len(wraps) and feeding[0] is not None:
            layers = min(first.batch_norms or 0 for first in firsts.values())
            yield wrap_location(record, wraps), site_location(record.site(feeding[0].site)), layers, max(sizes)


def double_wraps(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps with another wrap of the same process group inside."""
    for wraps in replicated_wraps(record):
        outer = wraps[min(wraps)]
        for inner in record.wraps:
            same = inner.rank == outer.rank and inner.wrap in outer.contains and inner.ranks == outer.ranks
            if same and (size := gradient_bytes(inner)):
                yield Verdict(
                    sentence=f"this model holds a DDP object already: {bytes_text(size)} of gradients are all-reduced "
                    "twice in every step",
                    locations=site_location(record.site(outer.site)),
                    because=(("the first wrap", site_location(record.site(inner.site)), {"bytes_twice": size}),),
                )
                break


def gradient_copies(record: RunRecord) -> Iterator[tuple[Location | None, int]]:
    """Yield where each wrap is, and the bytes that its buckets take besides the gradients."""
    for wraps in replicated_wraps(record):
        wrap = wraps[min(wraps)]
        views = bool(wrap.options.get("gradient_as_bucket_view"))
        yield wrap_location(record, wraps), 0 if views else gradient_bytes(wrap)


def wrap_location(record: RunRecord, wraps: Mapping[int, Wrap]) -> Location | None:
    """Return where the lowest of the ranks that hold a wrap made it."""
    return site_location(record.site(wraps[min(wraps)].site))


_INDEX = regex(r"Parameter at index (\d+)")
_NAME = regex(r"with name ([\w.]+)")
_ATTRIBUTE = regex(r"has no attribute '(\w+)'")


class ReadyTwice(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose gradient came twice in one reduction."""

    ranks: tuple[int, ...]
    parameter: str
    """Its name; empty when it cannot be known."""
    reentrant: bool
    """Reentrant checkpointing was at work."""
    wrap_location: Location | None
    location: Location | None
    frames: tuple[Frame, ...]


def ready_twice(record: RunRecord) -> ReadyTwice | None:
    """Return the first exception about a parameter that was marked ready twice."""
    failed = _ranks_with(record, "ready-twice")
    if not failed:
        return None
    rank, raised = failed[0]
    wrap = max((wrap for wrap in record.wraps if wrap.rank == rank), key=lambda wrap: wrap.wrap, default=None)
    return ReadyTwice(
        ranks=tuple(number for number, _ in failed),
        parameter=_parameter(raised.message, [wrap for wrap in record.wraps if wrap.rank == rank]),
        reentrant="torch/utils/checkpoint.py" in raised.traceback.replace("\\", "/"),
        wrap_location=None if wrap is None else location_of(record.site(wrap.site).innermost),
        location=location_of(raised.frames[0]) if raised.frames else None,
        frames=raised.frames,
    )


def wrapper_attributes(record: RunRecord) -> Iterator[Verdict]:
    """Yield the first exception about an attribute that the wrapped model has and its wrapper has not."""
    failed = _ranks_with(record, "wrapper-attribute")
    if not failed:
        return
    raised = failed[0][1]
    found = _ATTRIBUTE.search(raised.message)
    name = found[1] if found else ""
    ranks = tuple(number for number, _ in failed)
    place = location_of(raised.frames[0]) if raised.frames else None
    yield Verdict(
        sentence=f"the DDP object has no attribute {name}: it is {raised.attribute_owner}'s, which is .module",
        remedy=f"Write .module.{name}.",
        locations=place,
        ranks=ranks,
        because=((f"{rank_list(ranks)} raised AttributeError here", Via(place, raised.frames)),),
    )


def _ranks_with(record: RunRecord, trouble: Trouble) -> list[tuple[int, RankException]]:
    found = []
    for rank in sorted(record.ranks, key=lambda entry: entry.rank):
        first = min(rank.exceptions, key=lambda entry: entry.time_ns, default=None) if rank.end == "raised" else None
        if first is not None and trouble_of(first) == trouble:
            found.append((rank.rank, first))
    return found


def _parameter(message: str, wraps: list[Wrap]) -> str:
    named = _NAME.search(message)
    if named:
        return named[1]
    index = _INDEX.search(message)
    if index is None or len(wraps) != 1:
        return ""
    listed = [t.name for t in wraps[0].parameters if t.requires_grad and t.name not in wraps[0].ignored]
    return listed[int(index[1])] if int(index[1]) < len(listed) else ""


# Wrapped modules that are no longer what DDP took note of.


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that were frozen after the wrap and that DDP waited for."""

    model: str
    names: tuple[str, ...]
    """Folded."""
    parameters: int
    wrap_location: Location | None
    forward_location: Location | None


def frozen_after_wrap(record: RunRecord) -> Iterator[Frozen]:
    """Yield the wraps that waited for nothing for gradients of parameters that were frozen after the wrap."""
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        frozen = frozen_names(record, first.rank, first.wrap)
        missing: set[str] = set()
        for entry in record.missing_gradients:
            if (entry.rank, entry.wrap) == (first.rank, first.wrap):
                missing.update(entry.parameters)
        served = first.options.get("find_unused_parameters") or first.options.get("static_graph")
        if not served and (names := sorted(frozen & missing)):
            yield Frozen(
                model=first.module_class or "the model",
                names=folded(names),
                parameters=len(names),
                wrap_location=wrap_location(record, wraps),
                forward_location=_forward_place(record, first, "frozen"),
            )


def late_batch_norms(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps whose SyncBatchNorm layers are newer than they."""
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        for change in record.wrap_changes:
            if (change.rank, change.wrap) == (first.rank, first.wrap) and change.late_batch_norms:
                layers, model = change.late_batch_norms, first.module_class or "the model"
                place = _forward_place(record, first, "late_batch_norms")
                yield Verdict(
                    sentence=f"{count(layers, 'SyncBatchNorm layer')} came into {model} after DDP had wrapped it",
                    locations=wrap_location(record, wraps),
                    because=(("they are present in this forward", place, {"layers": layers}),),
                )
                break


def _forward_place(record: RunRecord, wrap: Wrap, field: str) -> Location | None:
    for change in record.wrap_changes:
        if (change.rank, change.wrap) == (wrap.rank, wrap.wrap) and getattr(change, field):
            return site_location(record.site(change.site))
    return None


# Parameters that are trained by name only: they have gradients, and no optimizer holds them.


class Unheld(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer leaves out of a model that it was built for."""

    model: str
    """Class of the wrapped module."""
    optimizer_type: str
    names: tuple[str, ...]
    """Folded."""
    count: int
    elements: int
    strangers: int
    """Parameters of the optimizer that are in no wrapped module and have no gradient."""
    steps: int
    ranks: tuple[int, ...]
    """The ranks on which it is so, where it is not so on all."""
    optimizer_location: Location | None
    chain: tuple[Frame, ...]
    """The call chain that built the optimizer, innermost first."""
    wrap_location: Location | None
    sharded: bool = False
    """The model is sharded, which makes new parameters; the location is that of its first forward."""


def unheld_parameters(record: RunRecord) -> Iterator[Unheld]:
    """Yield each wrap and optimizer once, in the words of the first rank."""
    seen: set[tuple[int, Location | None]] = set()
    for entry in sorted(record.unheld_parameters, key=lambda entry: entry.rank):
        place = site_location(record.site(entry.site))
        wrap: Wrap | ShardedModule | None = next(
            (wrap for wrap in record.wraps if (wrap.rank, wrap.wrap) == (entry.rank, entry.wrap)), None
        ) or next((one for one in record.sharded_modules if (one.rank, one.module) == (entry.rank, entry.wrap)), None)
        if wrap is None or (entry.wrap, place) in seen:
            continue
        seen.add((entry.wrap, place))
        ranks = {other.rank for other in record.unheld_parameters if other.wrap == entry.wrap}
        yield Unheld(
            model=wrap.module_class or "the model",
            optimizer_type=entry.optimizer_type,
            names=folded(entry.parameters),
            count=entry.count,
            elements=entry.elements,
            strangers=entry.strangers,
            steps=entry.steps,
            ranks=() if ranks == set(record.rank_numbers()) else tuple(sorted(ranks)),
            optimizer_location=place,
            chain=record.site(entry.site).frames,
            wrap_location=site_location(record.site(wrap.site)),
            sharded=isinstance(wrap, ShardedModule),
        )
