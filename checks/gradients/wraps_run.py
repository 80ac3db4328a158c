"""What is wrong with the use of DDP: by torch's exceptions, by the wraps, and by later changes of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddpdoctor.check import Verdict, Via
from ddpdoctor.checks.gradients.steps_run import gradient_bytes
from ddpdoctor.diagnosis.divergence.unused_parameters import folded, frozen_names
from ddpdoctor.diagnosis.failures import trouble_of
from ddpdoctor.diagnosis.logs.remedies import CHECKPOINTS
from ddpdoctor.diagnosis.training.replicas import replicated_wraps
from ddpdoctor.diagnosis.wording import bytes_text, count, location_of, rank_list, site_location
from ddpdoctor.files import regex
from ddpdoctor.finding import Location, Severity, Trouble
from ddpdoctor.record.model import RankException, RunRecord, ShardedModule, Wrap

# What the options of a wrap, the layers in it and the batches that it is fed say about it.

WORTH_REPORTING_BYTES = 100_000_000
"""Bytes of gradients from which the second copy is worth a line."""
BACKWARDS_NEEDED = 4
"""Synchronised backwards on every rank before the search for unused parameters is called needless."""
MEASURED_STEPS_NEEDED = 20
"""The same of a live run, which sees what DDP's logger measures."""


_SEARCHES_REMEDY = (
    "Omit find_unused_parameters if no input makes forward skip a layer: an unused parameter would raise an error."
)
_OF_FRAMEWORK = (
    "Disable it in the framework that wraps the model if no input makes forward skip a layer: "
    "ddp_find_unused_parameters=False for the Trainer, DDPStrategy or DistributedDataParallelKwargs elsewhere."
)


def searches(record: RunRecord) -> Iterator[Verdict]:
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
        if not on or (backwards := min(made.values())) < needed:
            continue
        wrap = wraps[min(wraps)]
        place, model = wrap_location(record, wraps), wrap.module_class or "the model"
        if (
            any(entry.wrap == number and entry.rank in wraps for entry in record.missing_gradients)
            or any(search.found_unused for rank, search in told.items() if rank in wraps)
            or any(change.wrap == number and change.frozen for change in record.wrap_changes)
        ):
            reason = f"some parameters of {model} got no gradient in a step"
            yield Verdict(wrong=False, sentence=reason, locations=place)
            continue
        parameters = sum(tensor.requires_grad for tensor in wrap.parameters)
        steps = "measured steps" if record.job.kind == "run" else "synchronised backwards"
        text = (
            f"on each rank {backwards} {steps} were seen, and each of the {parameters:,} parameters got its gradient "
            "in all of them"
        )
        yield Verdict(
            sentence=f"DDP searches for unused parameters in every step, and in {backwards} {steps} every parameter of "
            f"{model} got a gradient on every rank",
            what_if=("find_unused_parameters=false",),
            # A framework made the wrap where the user's own line did not.
            remedy=_SEARCHES_REMEDY if wrap.by_user else _OF_FRAMEWORK,
            severity=None if wrap.by_user else Severity.ADVICE,
            locations=place,
            because=(text, None, {"backwards": backwards, "parameters": parameters}),
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
                    because=("the first wrap", site_location(record.site(inner.site)), {"bytes_twice": size}),
                )
                break


def gradient_copies(record: RunRecord) -> Iterator[Verdict]:
    """Yield whether the buckets of each wrap hold a second copy of large gradients."""
    for wraps in replicated_wraps(record):
        wrap = wraps[min(wraps)]
        size = 0 if wrap.options.get("gradient_as_bucket_view") else gradient_bytes(wrap)
        place = wrap_location(record, wraps)
        if size < WORTH_REPORTING_BYTES:
            amount = f"{size:,} bytes" if size else "no gradient"
            yield Verdict(wrong=False, sentence=f"{amount} would be stored once instead of twice", locations=place)
            continue
        yield Verdict(
            sentence=f"gradients are stored twice: {size / 1e6:,.0f} MB more than with gradient_as_bucket_view",
            locations=place,
            because=(f"DDP's buckets hold a copy of {size:,} bytes of gradients", None, {"bytes": size}),
        )


def wrap_location(record: RunRecord, wraps: Mapping[int, Wrap]) -> Location | None:
    """Return where the lowest of the ranks that hold a wrap made it."""
    return site_location(record.site(wraps[min(wraps)].site))


_INDEX = regex(r"Parameter at index (\d+)")
_NAME = regex(r"with name ([\w.]+)")
_ATTRIBUTE = regex(r"has no attribute '(\w+)'")


def ready_twice(record: RunRecord) -> Iterator[Verdict]:
    """Yield the first exception about a parameter that was marked ready twice."""
    failed = _ranks_with(record, "ready-twice")
    if not failed:
        return
    ranks, (rank, raised) = tuple(number for number, _ in failed), failed[0]
    wraps = [wrap for wrap in record.wraps if wrap.rank == rank]
    name = _parameter(raised.message, wraps)
    wrap = max(wraps, key=lambda wrap: wrap.wrap, default=None)
    wrapped = None if wrap is None else location_of(record.site(wrap.site).innermost)
    place = location_of(raised.frames[0]) if raised.frames else None
    reentrant = "torch/utils/checkpoint.py" in raised.traceback.replace("\\", "/")
    why = ": reentrant checkpoints share it" if reentrant else ", and DDP reduces it once"
    yield Verdict(
        sentence=f"the gradient of {name or 'a parameter'} arrived twice in one backward{why}",
        remedy=CHECKPOINTS
        if reentrant
        else "Call backward once for the sum of the losses of a step, or pass static_graph=True to "
        "DistributedDataParallel if each step uses the same parameters.",
        locations=tuple(dict.fromkeys((place, wrapped))),
        ranks=ranks,
        because=(f"{rank_list(ranks)} raised it here", Via(place, raised.frames)),
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
        because=(f"{rank_list(ranks)} raised AttributeError here", Via(place, raised.frames)),
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


def frozen_after_wrap(record: RunRecord) -> Iterator[Verdict]:
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
            yield Verdict(
                sentence=f"DDP waits for the gradients of {count(len(names), 'parameter')} of "
                f"{first.module_class or 'the model'} that were frozen after the wrap: {', '.join(folded(names))}",
                locations=wrap_location(record, wraps),
                because=("frozen before this forward", _forward_place(record, first, "frozen")),
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
                    because=("they are present in this forward", place, {"layers": layers}),
                )
                break


def _forward_place(record: RunRecord, wrap: Wrap, field: str) -> Location | None:
    for change in record.wrap_changes:
        if (change.rank, change.wrap) == (wrap.rank, wrap.wrap) and getattr(change, field):
            return site_location(record.site(change.site))
    return None


# Parameters that are trained by name only: they have gradients, and no optimizer holds them.


_AFTER_CHANGE = (
    "Build the optimizer after the last change of the model. Or add the new parameters with add_param_group."
)
_AFTER_SHARDING = "Build the optimizer after the model is sharded, which replaces its parameters."


def unheld_parameters(record: RunRecord) -> Iterator[Verdict]:
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
        # A sharded model has new parameters since, and its place is that of its first forward.
        sharded, one = isinstance(wrap, ShardedModule), entry.count == 1
        kind, model = entry.optimizer_type, wrap.module_class or "the model"
        wrapped = site_location(record.site(wrap.site))
        strangers = f"{count(entry.strangers, 'parameter')} that no {'sharded' if sharded else 'wrapped'} module has"
        in_vain = f"the {kind} holds {strangers} and that never get a gradient"
        yield Verdict(
            sentence=f"{count(entry.count, 'parameter')} of {model} {'is' if one else 'are'} in no optimizer and never "
            f"trained: this {kind} was built before {'it was' if one else 'they were'} there: "
            f"{', '.join(folded(entry.parameters))}",
            remedy=_AFTER_SHARDING if sharded else _AFTER_CHANGE,
            locations=(place, wrapped),
            ranks=() if ranks == set(record.rank_numbers()) else tuple(sorted(ranks)),
            because=(
                (
                    f"{'it has a gradient' if one else 'they have gradients'} before each of {entry.steps} steps "
                    f"({entry.elements:,} elements), and no step changes them",
                    None,
                    {"parameters": entry.count, "steps": entry.steps},
                ),
                *(((in_vain, None, {"parameters": entry.strangers}),) if entry.strangers else ()),
                (f"the {kind} is built here", Via(place, record.site(entry.site).frames)),
                ("the sharded model runs here" if sharded else "the model is wrapped here", wrapped),
            ),
        )
