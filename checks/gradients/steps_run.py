"""How many backwards an optimizer step sums up, how many of them synchronised, and what the end of a pass leaves over.

All of it is judged on the first rank that holds a wrap: what ranks do differently is a divergence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

import msgspec

from ddpdoctor.check import NotStated, Verdict
from ddpdoctor.diagnosis.performance.stragglers import FEWEST_STEPS
from ddpdoctor.diagnosis.performance.summary import threshold
from ddpdoctor.diagnosis.training.pass_lengths import training_loader
from ddpdoctor.diagnosis.training.replicas import replicated_wraps
from ddpdoctor.diagnosis.wording import bytes_text, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.model import Forward, RunRecord, Wrap
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
    """Yield the same of a job that was measured: of its only wrap, where the samples of a step tell how many batches it
    took.

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
    elif (
        2 * len(several) > steps
        and len(several) > 1
        and not any(late.wrap == wrap.wrap for _, _, late in late_no_syncs(record))
    ):
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
        rank = min(wraps)
        wrap = wraps[rank]
        by_line: dict[Location | None, int] = {}
        for backward in record.backwards:
            if backward.rank == rank and wrap.wrap in backward.inside_no_sync and wrap.wrap in backward.synchronised:
                place = site_location(record.site(backward.site))
                by_line[place] = by_line.get(place, 0) + 1
        for place, number in by_line.items():
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
    return sum(
        tensor.size_bytes for tensor in wrap.parameters if tensor.requires_grad and tensor.name not in wrap.ignored
    )


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
        if not record.optimizer_sizes or not gpu.memory_total_bytes:
            continue
        sizes = [size for size in record.optimizer_sizes if size.rank in gpu.ranks]
        wraps = [wrap for wrap in record.wraps if wrap.rank in gpu.ranks]
        if sizes:
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
    return ModelState(
        memory_bytes=memory_bytes,
        stated=stated,
        ranks=ranks,
        parts={
            "weights": max(sum(size.parameter_bytes for size in sizes), held),
            "buffers": buffers,
            "gradients": sum(size.gradient_bytes for size in sizes),
            "DDP's buckets": sum(map(_bucket_bytes, wraps)),
            f"the state of {' and '.join(optimizers)}": kept_bytes,
        },
        shared=any(size.shares_state for size in sizes),
    )


def _trained(record: RunRecord, rank: int) -> list[Wrap]:
    """Return the wraps of a rank whose parameters some optimizer steps: a module that was wrapped again counts once."""
    stepped = {wrap for step in record.optimizer_steps if step.rank == rank for wrap in step.wraps}
    return [wrap for wrap in record.wraps if wrap.rank == rank and wrap.wrap in stepped]


def _share_of_job(record: RunRecord, sizes: Sequence[OptimizerSize]) -> int:
    """Return what the optimizers of a rank of the job keep: where the ranks divide it, less than those of a rehearsal
    do.

    Nothing where it is divided and no one says by how many.
    """
    kept = sum(size.state_bytes for size in sizes)
    if not any(size.shares_state for size in sizes):
        return kept
    ranks = record.job.ranks_of_job or record.job.machine.ranks_per_node
    return kept * min(record.job.world_size, ranks) // ranks if ranks else 0


def _bucket_bytes(wrap: Wrap) -> int:
    if wrap.options.get("gradient_as_bucket_view") is not False:
        return 0
    return sum(parameter.size_bytes for parameter in wrap.parameters if parameter.requires_grad)
