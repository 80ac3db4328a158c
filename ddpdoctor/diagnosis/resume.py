"""Whether a second start of a job goes on where its checkpoint was written, from what ranks of both starts held."""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from ddpdoctor.diagnosis.failures import lack_behind
from ddpdoctor.diagnosis.wording import count, location_of, rank_list, site_location
from ddpdoctor.finding import Location
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, Restart, RunRecord
from ddpdoctor.record.streams.setup import CheckpointLoad
from ddpdoctor.record.streams.training import ResumeSave, ResumeStep

What = Literal[
    "weights", "optimizer", "learning-rate", "scale", "gradient", "random", "data", "place", "again", "late", "counter",
    "kept", "fails", "refused", "torn", "ranks", "signal",
]  # fmt: skip
_SHOWN = 3
_COUNTERS = ("epoch", "step", "iter")
ALIKE = 1e-3
"""Of the whole norm: DDP's buckets, and so the order in which ranks are added, are made anew after a first backward."""
_REFUSED = re.compile(r"Unsupported global: GLOBAL ([\w.]+)")
"""As torch.load says it since 2.4, of anything but tensors and plain values; by default since 2.6."""
Rows = Mapping[int, Sequence[ResumeStep]]
"""Steps by rank, in their order."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is otherwise after the restart."""

    what: What
    title: str
    ranks: tuple[int, ...] = ()
    facts: tuple[str, ...]
    saved: bool = True
    """The checkpoint holds it, as far as its keys tell."""
    place: Location | None = None
    """The line that fails."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Both starts, step by step."""

    differences: tuple[Difference, ...] = ()
    gap: str = ""
    """Why nothing, or not everything, could be."""
    save: ResumeSave | None = None
    """The checkpoint that the second start went on from."""


def checkpoint_of(first: RunRecord, step: int) -> ResumeSave | None:
    """Return the checkpoint that the first start wrote after so many steps; of several that with the optimizer.

    One with weights alone is one where the job has written no other.
    """
    anywhere = any(save.whole for save in first.resume_saves)
    found = [save for save in first.resume_saves if (save.whole if anywhere else save.weights) and save.step == step]
    return max(found, key=lambda save: (save.optimizer, -save.rank), default=None)


def compare(restart: Restart) -> Comparison:
    """Compare the steps after a checkpoint of the first start with those of the second one."""
    first, second, step = restart.first, restart.second, restart.step
    save = checkpoint_of(first, step)
    if not loads_of(second, restart.files):
        how = "`--resume-with 'OPTION'` gives the script's own option, with {checkpoint} for the file"
        return Comparison(gap=f"it loaded nothing of what it had written; {how}", save=save)
    if not goes_on(second, restart.files):
        early = "it trained before it loaded what the first start had written, as a program does that holds both starts"
        how = "`--resume-with 'OPTION'` gives the script's own option to begin with the load"
        return Comparison(gap=f"{early}; {how}", save=save)
    if failure := _failure(second, restart.files):
        return Comparison(differences=(failure,), save=save)
    before, after = _by_rank(first, step), _by_rank(second, 0)
    ranks = [rank for rank in sorted(before) if before[rank] and after.get(rank)]
    if save is None or not ranks:
        which = "the first start ended before a step after its checkpoint" if not any(before.values()) else ""
        return Comparison(gap=which or "the second start made no step", save=save)
    differences = list(_at_once(before, after, ranks, save))
    if len(after) != len(before):
        differences += _with_other_ranks(first, before, after, differences, step)
        return Comparison(differences=tuple(differences), save=save)
    data = list(_data(first, second, before, after, ranks, step))
    steps = min(min(len(before[rank]), len(after[rank])) for rank in ranks)
    if not data:
        differences += _later_rates(before, after, ranks, steps, save, differences)
    differences += data
    if not differences:
        differences += _first_step(before, after, ranks, save, first)
    differences += _kept(first, second, step, differences)
    return Comparison(differences=tuple(differences), save=save)


def loads_of(record: RunRecord, files: Iterable[str]) -> list[CheckpointLoad]:
    """Return where a start has loaded some of these files, or the directory of one."""
    known = {os.path.realpath(path) for path in files}
    known |= {os.path.dirname(path) for path in known}  # One that is a directory, with a file for each rank.
    return [one for one in record.checkpoint_loads if os.path.realpath(one.path) in known]


def goes_on(record: RunRecord, files: Iterable[str]) -> bool:
    """Return whether a start has loaded some of these files before any rank made a step."""
    first_ns = min((row.time_ns for row in record.resume_steps), default=math.inf)
    return any(load.time_ns <= first_ns for load in loads_of(record, files))


def places_of(
    save: ResumeSave | None, first: RunRecord, loads: Iterable[CheckpointLoad], second: RunRecord
) -> tuple[Location | None, Location | None]:
    """Return the line where the first start saves a checkpoint, and the one where a later start loads it."""
    by_rank = sorted(loads, key=lambda one: one.rank)
    loaded = next((place for one in by_rank if (place := site_location(second.site(one.site)))), None)
    return None if save is None else site_location(first.site(save.site)), loaded


def _failure(record: RunRecord, files: Sequence[str]) -> Difference | None:
    """Return how the second start ended before its first step, by an exception that the script has to answer for."""
    if record.resume_steps:
        return None
    raised = [(one, rank.rank) for rank in record.ranks for one in rank.exceptions if not one.communication]
    if not raised:
        return None
    first, rank = min(raised, key=lambda pair: pair[0].time_ns)
    folders = {os.path.dirname(os.path.realpath(path)) for path in files}
    asked = [one for one in record.checkpoint_loads if one.failed and one.rank == rank]
    own = any(os.path.dirname(os.path.realpath(one.path)) in folders for one in asked)
    # Of a directory it is not known whether its load has failed.
    own = own or any(one.rank == rank and os.path.realpath(one.path) in folders for one in record.checkpoint_loads)
    if not own and lack_behind(first, record) is not None:
        return None
    refused = _REFUSED.search(first.message)
    said = f"torch.load refuses {refused[1]}, which is in the file" if refused else f"{first.type}: {_said(first)}"
    ranks = sorted({rank for one, rank in raised if one.type == first.type})
    return Difference(
        what="refused" if refused else "fails",
        title=f"the restart fails on {_who(ranks, record.rank_numbers())}: {said}",
        ranks=tuple(ranks),
        facts=("the first start trained with the same arguments, and wrote what this one loads",),
        place=location_of(first.frames[0]) if first.frames else None,
    )


def _said(raised: RankException) -> str:
    """Return the first sentence of a message, and the next line where it only announces that."""
    first, *more = [line.strip() for line in raised.message.splitlines() if line.strip()] or [""]
    return f"{first} {more[0]}" if more and first.endswith(":") else headline(raised).partition(". ")[0]


def torn_restart(restart: Restart) -> Difference | None:
    """Return what is wrong with a start that found a torn save; None where it goes on from the one before it."""
    torn, first = restart.torn, restart.first
    if torn is None or (loads_of(restart.second, restart.files) and not goes_on(restart.second, restart.files)):
        return None
    start = "a job that ends while it saves cannot be resumed"
    whole = f"{os.path.relpath(restart.whole_files[0])} is whole" if restart.whole_files else "no other was left"
    broken = ", ".join(map(os.path.relpath, restart.torn_files[:_SHOWN]))
    about = f"of {broken} a half was there; {whole}"
    if (failure := _failure(torn, restart.torn_files)) is not None:
        if not loads_of(torn, restart.torn_files):
            return None
        title = f"{start}: the restart fails on the torn file"
        return Difference(what="torn", title=title, facts=(about, failure.title))
    rows = {row.rank: row for row in torn.resume_steps if row.ordinal == 1}
    removed = {one.path for one in torn.accesses if one.action == "remove" and one.found}
    if restart.whole_files and removed.issuperset(restart.whole_files):
        title = "after a torn save the restart deletes the last whole checkpoint"
        return Difference(what="torn", title=title, facts=(about,))
    states = {rank: _by_rank(first, 0).get(rank, []) for rank in rows}
    usual = {row.rank: row for row in restart.second.resume_steps if row.ordinal == 1}
    for rank, row in sorted(rows.items()):
        if rank in usual and (usual[rank].weights, usual[rank].optimizer) == (row.weights, row.optimizer):
            continue
        weights = {one.ordinal - 1 for one in states[rank] if not _names(one.weights, row.weights)}
        optimizer = {one.ordinal - 1 for one in states[rank] if one.optimizer == row.optimizer}
        if weights & optimizer - {0} or not states[rank]:
            continue
        if all(one.failed for one in torn.checkpoint_loads):
            title = f"{start}: the restart begins again from the first step"
        elif weights - {0} and optimizer - {0}:
            parts = f"the weights are those after step {max(weights)}, and the optimizer's state is that after step"
            title = f"a torn checkpoint is taken for whole: {parts} {max(optimizer)}"
        else:
            title = "a torn checkpoint is taken for whole: what goes on is the state of no step"
        return Difference(what="torn", title=title, ranks=(rank,), facts=(about,))
    return None


def signalled_restart(restart: Restart) -> Comparison | None:
    """Compare what a start goes on with after a scheduler has ended the one before, with what the script's handler of
    the signal has saved; None where it has saved nothing, and nothing has kept it from that.
    """
    ended, first, resumed = restart.ended, restart.first, restart.resumed
    save = None if ended is None else saved_at_signal(ended)
    if ended is None or save is None or resumed is None:
        broken = None if ended is None or save is not None else _broken_off(ended)
        return None if broken is None else Comparison(differences=(broken,))
    if failure := _failure(resumed, restart.left):
        return Comparison(differences=(failure,), save=save)
    at = restart.step + save.step
    before, after = _by_rank(first, at), _by_rank(resumed, 0)
    held = {row.rank: row for row in ended.resume_steps if row.ordinal == save.step + 1 and not row.batches}
    ranks = [rank for rank in sorted(held) if after.get(rank)]
    if not ranks:
        return Comparison(gap="the start after the signal made no step", save=save)
    older = _by_rank(first, restart.step)
    saved = {rank: [held[rank]] for rank in ranks}
    states = list(_at_once(saved, after, ranks, save))
    if states and not any(_at_once(older, after, [rank for rank in ranks if older.get(rank)], save)):
        title = "what the script saves when it is told to end is not what the restart loads"
        told = f"the restart goes on from step {restart.step}, and step {at} was saved"
        return Comparison(differences=(Difference(what="signal", title=title, facts=(told,)),), save=save)
    trained = [rank for rank in sorted(after) if after[rank] and before.get(rank)]
    if trained:
        # Where the pass was at its end, the schedule may have stepped since the save: as without a restart.
        apart = {one.what for one in _at_once(before, after, trained, save)}
        states = [one for one in states if one.what in apart]
    same = [one for one in trained if _own(ended, one, 0, save.step) == _own(first, one, restart.step, at)]
    data = list(_data(first, resumed, before, after, same, at))
    again = {rank: _passes(first, rank, at) for rank in same}
    if any(_shift([], _pass(after[rank]), passes[max(passes)]) == -1 for rank, passes in again.items() if passes):
        # The signal came right after a step, and was handled before the script had counted it.
        data = [msgspec.structs.replace(one, what="late") for one in data]
    return Comparison(differences=(*states, *data), save=save)


def saved_at_signal(ended: RunRecord) -> ResumeSave | None:
    """Return the newest checkpoint that was written after a scheduler's signal."""
    saves = [one for one in ended.resume_saves if one.signal and (one.whole or one.weights)]
    return max(saves, key=lambda save: (save.step, save.optimizer, -save.rank), default=None)


def _broken_off(ended: RunRecord) -> Difference | None:
    """Return how a job ends that a scheduler's signal has come to, where its ranks did not leave together."""
    raised = [(one, rank.rank) for rank in ended.ranks for one in rank.exceptions if one.communication]
    if not raised and ended.job.stop_reason != "proof":
        return None
    ranks = sorted({rank for _, rank in raised})
    told = "the ranks wait for each other" if not raised else f"{raised[0][0].type}: {_said(raised[0][0])}"
    return Difference(
        what="signal",
        title="told to end, the job breaks off before it has saved",
        ranks=tuple(ranks),
        facts=(told,),
        place=next((location_of(one.frames[0]) for one, _ in raised if one.frames), None),
    )


def _own(record: RunRecord, rank: int, after: int, until: int) -> list[tuple[int, ...]]:
    rows = [row for row in _by_rank(record, after).get(rank, []) if row.ordinal <= until]
    return [batch[3] for row in rows for batch in row.batches]


def _by_rank(record: RunRecord, step: int) -> dict[int, list[ResumeStep]]:
    found: dict[int, list[ResumeStep]] = {rank: [] for rank in record.rank_numbers()}
    for row in sorted(record.resume_steps, key=lambda row: row.ordinal):
        if row.ordinal > step:
            found.setdefault(row.rank, []).append(row)
    return found


def _at_once(before: Rows, after: Rows, ranks: Sequence[int], save: ResumeSave) -> Iterator[Difference]:
    """Yield what is otherwise when the first forward begins."""
    # In training each rank counts buffers of its own, and those of the rank that saves are loaded by all.
    for kind, own in (("weights", ranks), ("buffers", [rank for rank in ranks if rank == save.rank])):
        states = {rank: (getattr(before[rank][0], kind), getattr(after[rank][0], kind)) for rank in own}
        if apart := [rank for rank, (was, now) in states.items() if _names(was, now)]:
            was, now = states[apart[0]]
            names = _names(was, now)
            yield Difference(
                what="weights",
                title=f"the {kind} after the restart are not those of the checkpoint on {_who(apart, ranks)}",
                ranks=tuple(apart),
                facts=(f"{len(names)} of {count(len(was), kind[:-1], kind)} differ: {_listed(names)}",),
            )
            break
    if apart := [rank for rank in ranks if before[rank][0].optimizer != after[rank][0].optimizer]:
        yield Difference(
            what="optimizer",
            title=f"the optimizer's state after the restart is not that of the checkpoint on {_who(apart, ranks)}",
            ranks=tuple(apart),
            facts=("momenta and step counts of the optimizer were compared before the first step",),
            saved=save.optimizer,
        )
    if apart := [rank for rank in ranks if before[rank][0].learning_rates != after[rank][0].learning_rates]:
        yield _rates(before[apart[0]][0], after[apart[0]][0], apart, ranks, 1, save)
    if apart := [rank for rank in ranks if before[rank][0].scales != after[rank][0].scales]:
        was, now = before[apart[0]][0].scales, after[apart[0]][0].scales
        yield Difference(
            what="scale",
            title=f"the gradient scaler starts anew after the restart on {_who(apart, ranks)}",
            ranks=tuple(apart),
            facts=(f"its scale is {', '.join(now)} and was {', '.join(was)}",),
            saved=_has(save, "scal"),
        )


def _first_step(
    before: Rows, after: Rows, ranks: Sequence[int], save: ResumeSave, first: RunRecord
) -> Iterator[Difference]:
    """Yield what the gradient shows of the first step, where all that is compared one by one is the same.

    Random numbers may be others, unless the checkpoint holds what they come from.
    """
    pairs = {rank: (before[rank][0], after[rank][0]) for rank in ranks}
    fed = [rank for rank, (was, now) in pairs.items() if was.inputs != now.inputs]
    drawn = [rank for rank in ranks if _draws_others(before[rank], after[rank])]
    apart = [rank for rank, (was, now) in pairs.items() if _far(was.gradients, now.gradients)]
    unknown = [rank for rank in fed if not any(batch[3] for batch in after[rank][0].batches)]
    earlier = {(row.rank, row.inputs): row.ordinal for row in first.resume_steps if row.ordinal <= save.step}
    if again := [rank for rank in unknown if (rank, after[rank][0].inputs) in earlier]:
        at = earlier[again[0], after[again[0]][0].inputs]
        yield Difference(
            what="again",
            title=f"after the restart {_who(again, ranks)} trains on the batch of step {at} again",
            ranks=tuple(again),
            facts=("the tensors of both are the same, and other ones without a restart",),
        )
        return
    if not apart:
        return
    was, now = (math.hypot(*one.gradients) for one in pairs[apart[0]])
    effect = f"the norm of its gradient is {now:.6g}, and without a restart {was:.6g}"
    if not fed and not drawn:
        yield Difference(
            what="gradient",
            title=f"the first gradient after the restart is another one on {_who(apart, ranks)}",
            ranks=tuple(apart),
            facts=(effect, "weights, buffers and what the model is given are the same, and so are random numbers"),
        )
    elif any(one.random for one in first.resume_saves if one.step == save.step):
        ranks_apart = fed or drawn
        yield Difference(
            what="random",
            title=f"the random numbers after the restart are not those of the checkpoint on {_who(ranks_apart, ranks)}",
            ranks=tuple(ranks_apart),
            facts=(effect, "the same samples are given to the model as other values")[: 2 if fed else 1],
        )


def _draws_others(before: Sequence[ResumeStep], after: Sequence[ResumeStep]) -> bool:
    """Return whether a generator has another state, of those that the next step finds otherwise than the first one."""
    later = before[1].random if len(before) > 1 else ()
    return any(was not in (now, *later) for was, now in zip(before[0].random, after[0].random, strict=True))


def _far(was: Sequence[float], now: Sequence[float]) -> bool:
    """Return whether norms differ by more than another order of summation explains."""
    least = ALIKE * math.hypot(*was, *now)
    return len(was) == len(now) and any(abs(one - other) > least for one, other in zip(was, now, strict=True))


def _with_other_ranks(
    first: RunRecord, before: Rows, after: Rows, known: Sequence[Difference], step: int
) -> Iterator[Difference]:
    """Yield what means something else with another number of ranks: the global batch, a schedule that counts steps, and
    the samples that are left of an epoch.
    """
    was, now = _drawn(before, 1), _drawn(after, 1)
    changed = f"{count(len(after), 'rank', 'ranks')} in the place of {len(before)}"
    rates = [row.learning_rates for row in before[0]]
    if was and now and len(was) != len(now) and not any(one.what == "learning-rate" for one in known):
        yield Difference(
            what="ranks",
            title=f"a step takes {len(now)} samples in the place of {len(was)}, at the same learning rate",
            facts=(changed,),
        )
        inside = len(_pass(before[0]))
        if len(set(rates[:inside])) > 1:
            yield Difference(
                what="ranks",
                title="the schedule counts steps, of which an epoch has another number now",
                facts=(changed, "the learning rate changes within an epoch"),
            )
    done = _done(first, before[0][0], 0) if before[0] else 0
    if not done:
        return
    of = before[0][0].batches[0][:2]
    batches = (batch for row in first.resume_steps if row.ordinal <= step for batch in row.batches)
    seen = {index for batch in batches if batch[:2] == of for index in batch[3]}
    drawn = _drawn(after, min(map(len, after.values())))
    again = len(seen.intersection(drawn))
    never = 0 if again else len(set(was).difference(drawn))
    if drawn and (again or never):
        samples = count(again or never, "sample", "samples")
        written = f"the checkpoint was written after {count(done, 'batch', 'batches')} of a pass of each rank"
        yield Difference(
            what="ranks",
            title=f"{samples} of this epoch are {'seen again' if again else 'never seen'} after the restart",
            facts=(changed, written),
        )


def _drawn(rows: Rows, steps: int) -> list[int]:
    """Return the samples of the first pass that all ranks draw in some steps."""
    return [index for own in rows.values() for batch in _pass(own[:steps]) for index in batch]


def _later_rates(
    before: Rows, after: Rows, ranks: Sequence[int], steps: int, save: ResumeSave, known: Sequence[Difference]
) -> Iterator[Difference]:
    """Yield the first learning rate that is otherwise in a later step, where the first one was right."""
    if any(one.what == "learning-rate" for one in known):
        return
    for at in range(1, steps):
        pairs = {rank: (before[rank][at], after[rank][at]) for rank in ranks}
        if apart := [rank for rank, (was, now) in pairs.items() if was.learning_rates != now.learning_rates]:
            yield _rates(*pairs[apart[0]], apart, ranks, at + 1, save)
            return


def _rates(
    was: ResumeStep, now: ResumeStep, apart: Sequence[int], ranks: Sequence[int], at: int, save: ResumeSave
) -> Difference:
    return Difference(
        what="learning-rate",
        title=f"the learning rate is another one after the restart on {_who(apart, ranks)}, from step {at} on",
        ranks=tuple(apart),
        facts=(f"step {at} has {_first(now.learning_rates)}, and without a restart {_first(was.learning_rates)}",),
        saved=_has(save, "sched") or _has(save, "lr"),
    )


def _data(
    first: RunRecord, second: RunRecord, before: Rows, after: Rows, ranks: Sequence[int], step: int
) -> Iterator[Difference]:
    """Yield where the first pass after the restart draws other samples than it should, as long as both passes last."""
    found: dict[int, tuple[What, str, str]] = {}
    for rank in ranks:
        wanted, drawn = _pass(before[rank]), _pass(after[rank])
        length = min(len(wanted), len(drawn))
        if not length or not all(wanted[:length]) or wanted[:length] == drawn[:length]:
            continue
        earlier = _passes(first, rank, step)
        found[rank] = _kind(first, second, before[rank][0], after[rank][0], earlier, (wanted, drawn), rank)
    if not found:
        return
    what, kind, effect = found[min(found)]
    draws = "draws" if len(found) in (1, len(ranks)) else "draw"
    yield Difference(
        what=what,
        title=f"after the restart {_who(list(found), ranks)} {draws} {kind}",
        ranks=tuple(found),
        facts=(effect,),
    )


def _kind(
    first: RunRecord,
    second: RunRecord,
    was: ResumeStep,
    now: ResumeStep,
    earlier: Mapping[int, list[tuple[int, ...]]],
    passes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
    rank: int,
) -> tuple[What, str, str]:
    """Return what samples a rank draws in place of the right ones, and what follows; ``passes`` are of both."""
    right, drawn = passes
    epoch, wanted = _epoch(second, now, rank), _epoch(first, was, rank)
    samples, done = sum(map(len, drawn)), _done(first, was, rank)
    begins = not _done(first, now, rank)
    said = f"the epoch of its sampler is {epoch}, and without a restart {wanted}" if epoch != wanted else ""
    again = [number for number, batches in earlier.items() if batches[: len(drawn)] == drawn[: len(batches)]]
    newest = max(earlier, default=0)
    batches = count(done, "batch", "batches")
    if done and begins and newest in again:
        effect = f"the checkpoint was written after {batches} of it, which are seen twice"
        return "place", "the samples from the beginning of the epoch again", effect
    if again and again[0] == 0 and newest > 0:
        effect = said or f"its first {samples} samples are those of the first pass"
        return "data", "the order of epoch 0 again", effect
    if again and again[-1] == newest:
        effect = said or f"the {samples} samples that were compared are those of the pass before the checkpoint"
        return "data", "the samples of the epoch that the checkpoint had finished: it is run again", effect
    if epoch is not None and wanted is not None and epoch > wanted:
        if done and epoch == wanted + 1:
            effect = f"the checkpoint was written after {batches} of it; {said}"
            return "place", "the samples of the next epoch: what was left of this one is never seen", effect
        return "data", f"the samples of epoch {epoch}: {count(epoch - wanted, 'epoch is', 'epochs are')} left out", said
    if shift := _shift(right, drawn, earlier.get(newest, [])):
        several = count(abs(shift), "batch", "batches")
        verb = "are" if abs(shift) > 1 else "is"
        if shift < 0:
            return "place", f"{several} that {verb} trained on already", f"{several} of this epoch {verb} seen twice"
        return "place", f"the samples after {several} of this epoch", f"{several} of this epoch {verb} never seen"
    if done and begins:
        effect = f"the checkpoint was written after {batches} of it; {said or 'another order begins'}"
        return "place", "an epoch from its beginning in the place of what was left of this one", effect
    return "data", "its samples in another order", said or f"of the first {samples} samples not the same ones come"


def _shift(right: list[tuple[int, ...]], drawn: list[tuple[int, ...]], behind: list[tuple[int, ...]]) -> int:
    """Return how many batches too late a pass begins, less than 0 for too early; 0 where it is another one.

    ``behind`` are the batches of the newest pass before the checkpoint.
    """
    for number in range(1, min(len(right), len(drawn))):
        if all(map(tuple.__eq__, right[number:], drawn)):
            return number
    for number in range(1, min(len(behind), len(drawn) + 1)):
        if behind[-number:] == drawn[:number]:
            return -number
    return 0


def _done(first: RunRecord, row: ResumeStep, rank: int) -> int:
    """Return how many batches of a pass are behind a step; some loaders are ahead by one, as they are in the first."""
    rows = [*_by_rank(first, 0)[rank][:1], row]
    places = [one.batches[0][2] if one.batches else 0 for one in rows]
    return max(0, places[-1] - places[0])


def _epoch(record: RunRecord, row: ResumeStep, rank: int) -> int | None:
    loader, ordinal = row.batches[0][:2]
    passes = (one for one in record.passes if (one.rank, one.loader, one.ordinal) == (rank, loader, ordinal))
    found = next(passes, None)
    return None if found is None else found.set_epoch


def _pass(rows: Sequence[ResumeStep]) -> list[tuple[int, ...]]:
    """Return the batches of the pass that the first of some steps belongs to."""
    of = rows[0].batches[0][:2] if rows and rows[0].batches else None
    return [batch[3] for row in rows for batch in row.batches if batch[:2] == of]


def _passes(record: RunRecord, rank: int, step: int) -> dict[int, list[tuple[int, ...]]]:
    """Return the batches of each pass up to a step, by the pass's number among those that were trained on."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for row in sorted(record.resume_steps, key=lambda row: row.ordinal):
        if row.rank == rank and row.ordinal <= step:
            for batch in row.batches:
                found.setdefault(batch[:2], []).append(batch[3])
    return dict(enumerate(found.values()))


def _kept(first: RunRecord, second: RunRecord, step: int, known: Sequence[Difference]) -> Iterator[Difference]:
    """Yield what the next checkpoint holds otherwise, after as many steps from the same state."""
    later = [save for save in first.resume_saves if save.whole and save.step > step]
    now = next((save for save in second.resume_saves if save.whole and save.step), None)
    if now is None or not later:
        return
    was = next((save for save in later if save.path == now.path or save.keys.keys() == now.keys.keys()), None)
    if was is None or was.step - step != now.step:
        yield from _counted_again(first, now, step)
        return
    common = [key for key in was.keys if key in now.keys]
    wrong = [key for key in common if _counts(was, key) and _counts(now, key) and was.keys[key] != now.keys[key]]
    if any(one.what == "data" for one in known):
        wrong = [key for key in wrong if "epoch" not in key.lower()]
    for key in wrong:
        held, right = int(now.keys[key][4:]), int(was.keys[key][4:])
        less = count(abs(right - held), "epoch", "epochs")
        effect = f": {less} {'run again' if held < right else 'left out'}" if "epoch" in key.lower() else ""
        yield Difference(
            what="counter",
            title=f"`{key}` counts from another number after the restart",
            facts=(f"the next checkpoint holds {held}, and without a restart {right}{effect}",),
        )
    alike = [key for key in common if was.keys[key].startswith("tensors ") and was.keys[key] == now.keys[key]]
    if known or not alike:
        return  # What was trained is another thing, as far as that is known.
    for key in common:
        if was.keys[key].startswith("tensors ") and was.keys[key] != now.keys[key]:
            yield Difference(
                what="kept",
                title=f"`{key}` of the next checkpoint is not what it is without a restart",
                facts=(f"{_listed([f'`{name}`' for name in alike])} of the same checkpoint are the same, bit for bit",),
            )


def _counted_again(first: RunRecord, now: ResumeSave, step: int) -> Iterator[Difference]:
    """Yield a count that the next checkpoint holds as the loaded one does, where no two of the first start agree."""
    for key in now.keys:
        held = {one.step: one.keys[key] for one in first.resume_saves if one.whole and key in one.keys}
        if _counts(now, key) and held.get(step) == now.keys[key] and len(held) == len(set(held.values())) > 2:
            told = f"the next checkpoint, {count(now.step, 'step', 'steps')} later, holds {now.keys[key][4:]} too"
            title = f"`{key}` counts the same again after the restart"
            yield Difference(what="counter", title=title, facts=(told,))


def _names(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name.partition(":")[2] for name, digest in was.items() if digest and now.get(name, digest) != digest]


def _counts(save: ResumeSave, key: str) -> bool:
    return save.keys[key].startswith("int ") and any(word in key.lower() for word in _COUNTERS)


def _has(save: ResumeSave, word: str) -> bool:
    return any(word in key.lower() for key in save.keys)


def _who(apart: Sequence[int], ranks: Sequence[int]) -> str:
    return "every rank" if len(apart) == len(ranks) else rank_list(tuple(apart))


def _first(values: Sequence[str]) -> str:
    return f"{float(values[0]):.6g}" if values else "none"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
