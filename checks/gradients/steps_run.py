"""What is wrong with the use of DDP in a run: accumulation and its end, memory, wraps, and later changes of the model.

Most of it is judged on the first rank that holds a wrap: what ranks do differently is a divergence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

import msgspec

from ddpdoctor.check import NotStated, Verdict, Via
from ddpdoctor.diagnosis.divergence.divergence import root_exception
from ddpdoctor.diagnosis.divergence.unused_parameters import folded, frozen_names
from ddpdoctor.diagnosis.failures import trouble_of
from ddpdoctor.diagnosis.logs.remedies import CHECKPOINTS
from ddpdoctor.diagnosis.performance.stragglers import FEWEST_STEPS
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.training.pass_lengths import training_loader
from ddpdoctor.diagnosis.training.replicas import replicated_wraps
from ddpdoctor.diagnosis.wording import bytes_text, count, location_of, rank_list, site_location
from ddpdoctor.files import regex
from ddpdoctor.finding import Location, Severity, Trouble
from ddpdoctor.record.model import Forward, RankException, RunRecord, ShardedModule, Wrap
from ddpdoctor.record.streams.measured import OptimizerSize
from ddpdoctor.record.streams.training import Backward, OptimizerStep, Pass

STEPS_NEEDED = 2
Event = Forward | Backward | OptimizerStep


def reductions(record: RunRecord) -> Iterator[Verdict]:
    """Yield whether each wrap that was trained for a few steps was reduced once before each of them.

    A `no_sync()` that comes too late to have an effect is reported by misplaced-no-sync alone.
    """
    if record.job.kind == "run":
        yield from _live_reductions(record)
        return
    for wraps in replicated_wraps(record):
        rank = min(wraps)
        wrap = wraps[rank]
        counts: list[int] = []
        sites: dict[int, None] = {}
        count, armed, last = 0, False, None
        for event in _events(record, rank, wrap.wrap):
            if isinstance(event, Forward):
                armed = armed or event.synchronised
            elif isinstance(event, Backward):
                count = count if wrap.wrap in event.accumulated else 0
                if wrap.wrap in event.synchronised and armed:
                    count, armed = count + 1, False
                    sites.setdefault(event.site)
            else:
                counts.append(count)
                count, last = 0, event
        several = [number for number in counts if number > 1]
        if len(counts) >= STEPS_NEEDED and last is not None:
            yield from _judged(record, wrap, several, len(counts), tuple(sites), site_location(record.site(last.site)))


def _live_reductions(record: RunRecord) -> Iterator[Verdict]:
    """Yield the same of a measured job's only wrap, where the samples of a step tell how many batches it took.

    Several backwards of one batch, as of a generator and its critic, are no accumulation.
    """
    wraps = list(replicated_wraps(record))
    loader = training_loader(record)
    track = min(record.step_tracks, key=lambda track: track.rank, default=None)
    if len(wraps) != 1 or loader is None or not loader.batch_size or track is None:
        return
    wrap = wraps[0][min(wraps[0])]
    rows = [row for row in range(len(track)) if track.samples[row] and track.synchronised[row]]
    several = [
        track.synchronised[row] for row in rows if 1 < track.synchronised[row] <= track.samples[row] / loader.batch_size
    ]
    if len(rows) >= FEWEST_STEPS:
        yield from _judged(record, wrap, several, len(rows), (wrap.site,), None)


def _judged(
    record: RunRecord, wrap: Wrap, several: Sequence[int], steps: int, sites: Sequence[int], step: Location | None
) -> Iterator[Verdict]:
    """Yield whether a wrap was reduced too often; ``several`` are the numbers of the steps with several reductions.

    ``sites`` are the call chains of the backwards that synchronised, the first one first; of a live run that of the
    wrap.
    """
    places = tuple(site_location(record.site(site)) for site in sites)
    if not several:
        yield Verdict(wrong=False, sentence=f"each of {steps} steps followed one reduction", locations=places)
    elif len(several) > max(1, steps / 2) and all(late.wrap != wrap.wrap for _, _, late in late_no_syncs(record)):
        per_step = median_low(several)
        wasted_bytes = (per_step - 1) * gradient_bytes(wrap)
        numbers = {"reductions_per_step": per_step, "wasted_bytes_per_step": wasted_bytes, "steps": steps}
        yield Verdict(
            sentence=f"{per_step} backward passes before each optimizer step synchronise all gradients of "
            f"{wrap.module_class or 'the model'}: {bytes_text(wasted_bytes)} a step are sent for nothing",
            locations=places,
            because=(f"{len(several)} of {steps} optimizer steps came after several reductions", step, numbers),
        )


def late_no_syncs(record: RunRecord) -> Iterator[tuple[Location | None, int, Wrap]]:
    """Yield each line with backwards under a ``no_sync`` that comes too late: how many, of which wrap."""
    for wraps in replicated_wraps(record):
        wrap = wraps[min(wraps)]
        own = (one for one in record.backwards if one.rank == wrap.rank)
        late = (one for one in own if wrap.wrap in one.inside_no_sync and wrap.wrap in one.synchronised)
        for place, number in Counter(site_location(record.site(one.site)) for one in late).items():
            yield place, number, wrap


def tails(record: RunRecord) -> Iterator[Verdict]:
    """Yield, for each wrap, the first pass over the whole of a loader that left backwards without a step.

    Passes that the rehearsal cut say nothing of their end, and neither does the last one of a rehearsal that was ended.
    """
    for wraps in replicated_wraps(record):
        rank = min(wraps)
        events = [event for event in _events(record, rank, wraps[rank].wrap) if not isinstance(event, Forward)]
        passes = [entry for entry in record.passes if entry.rank == rank and entry.end == "exhausted"]
        tail = next(filter(None, (_tail(record, wraps[rank], entry, events) for entry in passes)), None)
        if tail is not None:
            yield tail


def gradient_bytes(wrap: Wrap) -> int:
    """Bytes of the gradients that a wrap reduces."""
    return sum(tensor.size_bytes for tensor in wrap.reduced)


def _tail(record: RunRecord, wrap: Wrap, whole: Pass, events: Sequence[Event]) -> Verdict | None:
    if not whole.backwards or whole.true_length not in (None, whole.yielded):
        return None
    if record.job.batches and whole.yielded > record.job.batches:
        # The script was told a shorter length than this pass had, and may have looked for its end there.
        return None
    before = [event for event in events if event.time_ns < whole.ended_ns]
    after = next((event for event in events if event.time_ns >= whole.ended_ns), None)
    left = _since_last_step(before)
    last_step = next((event for event in reversed(before) if isinstance(event, OptimizerStep)), None)
    if not left or last_step is None or isinstance(after, OptimizerStep):
        return None
    per_step = len(_since_last_step(before[: before.index(last_step)]))
    finished = (rank := record.of_rank(whole.rank)) is not None and rank.end == "finished"
    if per_step < 2 or len(left) >= whole.yielded or (after is None and not finished):
        return None
    leaks = isinstance(after, Backward) and wrap.wrap in after.accumulated
    fate = "added to the first step of the next pass" if leaks else "discarded"
    last = f"last {len(left)} of {whole.yielded}" if len(left) > 1 else f"last of {whole.yielded}"
    numbers = {"left": len(left), "batches": whole.yielded, "backwards_per_step": per_step}
    text = f"a step sums up {per_step} backwards; {len(left)} came after the last step of the pass"
    return Verdict(
        sentence=f"no optimizer step follows the {last} batches of a pass: their gradients are {fate}",
        locations=site_location(record.site(last_step.site)),
        because=(text, site_location(record.site(left[-1].site)), numbers),
    )


def _since_last_step(events: Sequence[Event]) -> list[Backward]:
    found: list[Backward] = []
    for event in reversed(events):
        if not isinstance(event, Backward):
            break
        found.append(event)
    return found[::-1]


def _events(record: RunRecord, rank: int, wrap: int) -> list[Event]:
    """Forwards, backwards and steps of a wrap on a rank, in order of time."""
    found: list[Event] = [entry for entry in record.forwards if entry.rank == rank and entry.wrap == wrap]
    found += [entry for entry in record.backwards if entry.rank == rank and wrap in entry.wraps]
    found += [entry for entry in record.optimizer_steps if entry.rank == rank and wrap in entry.wraps]
    return sorted(found, key=lambda entry: entry.time_ns)


# How much of a GPU the state of the model takes: weights, gradients, DDP's buckets, and what the optimizer keeps.

SMALLEST_GPU_BYTES = 1 << 30
"""What leaves room on a GPU of this memory does so on every one that torch runs on."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of what is trained on one GPU, in bytes."""

    memory_bytes: int
    """Of the GPU; 0 where it is not known."""
    stated: bool
    """The project says so; no GPU was asked."""
    ranks: tuple[int, ...]
    """Those that use it."""
    parts: Mapping[str, int]
    """What takes how much of it; DDP keeps gradients a second time in its buckets."""
    shared: bool
    """What the optimizers keep is a share of it: the ranks divide it among them."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def large_states(record: RunRecord) -> Iterator[ModelState]:
    """Yield the state on each GPU of which it takes most: the rest has to hold the activations of a batch.

    Raises NotStated for a rehearsal elsewhere than on the job's GPUs, where no one has said how large these are and it
    matters.
    """
    states = list(_on_gpus(record) if record.job.kind == "run" else _of_ranks(record))
    limit = threshold(record, "model-state-too-large")
    for state in states:
        if state.total_bytes > limit * (state.memory_bytes or SMALLEST_GPU_BYTES):
            if not state.memory_bytes:
                raise NotStated(
                    "the memory of the job's GPUs is not known: state `device-memory-gib` in [tool.ddpdoctor.job]"
                )
            yield state


def _on_gpus(record: RunRecord) -> Iterator[ModelState]:
    for gpu in record.gpus:
        sizes = [size for size in record.optimizer_sizes if size.rank in gpu.ranks]
        if sizes and gpu.memory_total_bytes:
            wraps = [wrap for wrap in record.wraps if wrap.rank in gpu.ranks]
            kept = sum(size.state_bytes for size in sizes)
            yield _state(gpu.memory_total_bytes, gpu.ranks, sizes, wraps, kept)


def _of_ranks(record: RunRecord) -> Iterator[ModelState]:
    """Yield what each rank of the job holds, which has a GPU for itself; nothing for a job that uses none."""
    machine = record.job.machine
    if not machine.may_use_gpus:
        return
    for rank in record.rank_numbers():
        sizes = [size for size in record.optimizer_sizes if size.rank == rank]
        wraps = _trained(record, rank)
        if not sizes:
            continue
        memory_bytes = machine.device_memory_bytes or max(size.device_memory_bytes for size in sizes)
        kept, stated = _share_of_job(record, sizes), machine.device_memory_bytes > 0
        yield _state(memory_bytes, (rank,), sizes, wraps, kept, stated=stated, all_held=True)


def _state(
    memory_bytes: int,
    ranks: tuple[int, ...],
    sizes: Sequence[OptimizerSize],
    wraps: Sequence[Wrap],
    kept_bytes: int,
    *,
    stated: bool = False,
    all_held: bool = False,
) -> ModelState:
    """Return what is on a GPU; with ``all_held`` the wraps hold whatever their parameters and buffers show."""
    held = sum(tensor.size_bytes for wrap in wraps for tensor in wrap.parameters) if all_held else 0
    buffers = sum(tensor.size_bytes for wrap in wraps for tensor in wrap.buffers) if all_held else 0
    optimizers = dict.fromkeys(size.type for size in sizes if size.state_bytes)
    apart = (wrap for wrap in wraps if wrap.options.get("gradient_as_bucket_view") is False)
    copied = (tensor for wrap in apart for tensor in wrap.parameters)
    return ModelState(
        memory_bytes=memory_bytes,
        stated=stated,
        ranks=ranks,
        parts={
            "weights": max(sum(size.parameter_bytes for size in sizes), held),
            "buffers": buffers,
            "gradients": sum(size.gradient_bytes for size in sizes),
            "DDP's buckets": sum(tensor.size_bytes for tensor in copied if tensor.requires_grad),
            f"the state of {' and '.join(optimizers)}": kept_bytes,
        },
        shared=any(size.shares_state for size in sizes),
    )


def _trained(record: RunRecord, rank: int) -> list[Wrap]:
    """Return the wraps of a rank whose parameters some optimizer steps: a module that was wrapped again counts once."""
    stepped = {wrap for step in record.optimizer_steps if step.rank == rank for wrap in step.wraps}
    return [wrap for wrap in record.wraps if wrap.rank == rank and wrap.wrap in stepped]


def _share_of_job(record: RunRecord, sizes: Sequence[OptimizerSize]) -> int:
    """Return what the optimizers of a rank of the job keep: less than in a rehearsal, where the ranks divide it.

    Nothing where it is divided and no one says by how many.
    """
    kept = sum(size.state_bytes for size in sizes)
    if not any(size.shares_state for size in sizes):
        return kept
    ranks = record.job.ranks_of_job or record.job.machine.ranks_per_node
    return kept * min(record.job.world_size, ranks) // ranks if ranks else 0


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
        text = f"on each rank {backwards} {steps} were seen, and each of the {parameters:,} parameters got its gradient"
        yield Verdict(
            sentence=f"DDP searches for unused parameters in every step, and in {backwards} {steps} every parameter of "
            f"{model} got a gradient on every rank",
            what_if=("find_unused_parameters=false",),
            # A framework made the wrap where the user's own line did not.
            remedy=_SEARCHES_REMEDY if wrap.by_user else _OF_FRAMEWORK,
            severity=None if wrap.by_user else Severity.ADVICE,
            locations=place,
            because=(f"{text} in all of them", None, {"backwards": backwards, "parameters": parameters}),
        )


def fed_batch_norms(record: RunRecord) -> Iterator[tuple[Location | None, Location | None, int, int]]:
    """Yield where each wrap is whose first training forward was fed by a loader of known batch size, on every rank, and
    where that loader.

    With how many BatchNorm layers are in training mode, and how many samples the loader gives each rank at a time.
    """
    loaders = {(loader.rank, loader.loader): loader for loader in record.loaders}
    for wraps in replicated_wraps(record):
        number = wraps[min(wraps)].wrap
        own = (entry for entry in record.forwards if entry.wrap == number and entry.rank in wraps)
        firsts = {entry.rank: entry for entry in own if entry.batch_norms is not None}
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
    wrapped = None if wrap is None else site_location(record.site(wrap.site))
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
    raised = [(rank.rank, root_exception(rank)) for rank in sorted(record.ranks, key=lambda entry: entry.rank)]
    return [(rank, first) for rank, first in raised if first is not None and trouble_of(first) == trouble]


def _parameter(message: str, wraps: list[Wrap]) -> str:
    named = _NAME.search(message)
    if named:
        return named[1]
    index = _INDEX.search(message)
    if index is None or len(wraps) != 1:
        return ""
    listed = wraps[0].reduced
    return listed[int(index[1])].name if int(index[1]) < len(listed) else ""


# Wrapped modules that are no longer what DDP took note of.


def frozen_after_wrap(record: RunRecord) -> Iterator[Verdict]:
    """Yield the wraps that waited for nothing for gradients of parameters that were frozen after the wrap."""
    for wraps in replicated_wraps(record):
        first = wraps[min(wraps)]
        frozen = frozen_names(record, first.rank, first.wrap)
        entries = (one for one in record.missing_gradients if (one.rank, one.wrap) == (first.rank, first.wrap))
        missing = {name for entry in entries for name in entry.parameters}
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
    changes = (change for change in record.wrap_changes if (change.rank, change.wrap) == (wrap.rank, wrap.wrap))
    return next((site_location(record.site(change.site)) for change in changes if getattr(change, field)), None)


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
