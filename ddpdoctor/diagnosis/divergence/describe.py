"""Tells a divergence in sentences, facts and places, for the checks that report it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ddpdoctor.diagnosis.divergence.aborted import is_in_backward
from ddpdoctor.diagnosis.divergence.divergence import Divergence
from ddpdoctor.diagnosis.divergence.matching import matched
from ddpdoctor.diagnosis.divergence.next_calls import NextCall, elsewhere
from ddpdoctor.diagnosis.divergence.waiting import blocked_ranks
from ddpdoctor.diagnosis.wording import (
    bytes_text,
    collective,
    details,
    duration_text,
    elements,
    frame_of,
    group_name,
    location_of,
    place,
    rank_list,
    verb,
)
from ddpdoctor.finding import NAMED_BECAUSE, Basis, Fact, Frame, Location, grouped, is_of_python, signal_name
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RunRecord

FACTS_SHOWN = 8
"""With more ranks than this, ranks that did the same share one fact."""


def title(divergence: Divergence) -> str:
    """Say in one sentence where the ranks diverge."""
    handling = [turn for turn in (*divergence.turns, *divergence.proof) if turn.handling is not None]
    if handling and divergence.culprit == handling[0].rank:
        return _handled_title(divergence, handling[0])
    if divergence.form == "crossed":
        first, second = divergence.turns[0], divergence.proof[0]
        return (
            f"{_call(first)} on {rank_list([first.rank])} is paired with {_call(second)} on "
            f"{rank_list([divergence.turns[1].rank])}, and the other way round"
        )
    if divergence.form in _TITLES:
        return _TITLES[divergence.form](divergence)
    groups = _alike(divergence.turns)
    if divergence.difference == "group":
        size = divergence.world_size
        parts = [f"{group_name(turns[0].group, size)} on {_ranks(turns)}" for turns in groups if turns[0].group]
        return f"{_call(groups[0][0])} differs in the group: {', '.join(parts)}"
    if divergence.form == "mismatch" and len({place(turns[0].line) for turns in groups}) == 1:
        return _same_line_title(divergence, groups)
    lone = _not_called(divergence, groups)
    if lone is not None:
        return lone
    do = "wait for each other" if divergence.form == "standstill" else "diverge"
    return f"the ranks {do}: {_waiting(list(divergence.turns))}"


def _handled_title(divergence: Divergence, turn: NextCall) -> str:
    """Say what a rank raised, in whose handler it waits for ranks that did not."""
    handled = turn.handling
    assert handled is not None
    said = handled.message.strip().partition("\n")[0]
    others = [other for other in divergence.turns if other.rank != turn.rank]
    return (
        f"rank {turn.rank} raised {handled.type}{said and f': {_shortened(said)}'} at {place(frame_of(handled))}, and "
        f"{_doing([turn])} in its handler, while {_waiting(others)}"
    )


def _stuck_title(divergence: Divergence) -> str:
    """Say where ranks stand that are in no collective, and what the others do."""
    standing = [turn for turn in divergence.turns if turn.action == "elsewhere" and not turn.waiting]
    others = [turn for turn in divergence.turns if turn not in standing]
    stuck = standing[0] if standing else divergence.turns[0]
    known = _is_known(stuck)
    if others and not known and all(turn.line is None for turn in standing):
        return f"{_ranks(standing)} did not arrive: {_waiting(others)}"
    if stuck.kept_by:
        over = [turn.rank for turn in standing if turn.kept_by == stuck.kept_by]
        return (
            f"the script of {rank_list(over)} is over, but its {stuck.kept_by} at {place(stuck.line)} "
            f"keeps the {verb(over, 'process', 'processes')}"
        )
    if any(turn.waiting for turn in others):
        comma = "," if stuck.seen_ago_ns and not known else ""
        waiting = [turn for turn in others if turn.waiting]
        first = _alike(tuple(standing))[0] if standing else [stuck]
        return f"{_ranks(first)} {_standing(first)}{comma} while {_waiting(waiting)}"
    alike = "; ".join(f"{_ranks(turns)} {_standing(turns)}" for turns in _alike(tuple(standing)))
    return alike + (f"; {_waiting(others)}" if others else "")


def _is_known(turn: NextCall) -> bool:
    """Return whether more is known of a rank that stands than where."""
    return bool(turn.stopped or turn.sleeps_ns or turn.polls_for or turn.loops)


def _standing(turns: list[NextCall]) -> str:
    """Return the predicate for ranks that stand at one place."""
    turn, numbers = turns[0], [turn.rank for turn in turns]
    if _is_known(turn):
        return _doing(turns)
    if turn.seen_ago_ns:
        seen = f"{verb(numbers, 'was', 'were')} last seen at {place(turn.line)}"
        return f"no longer {verb(numbers, 'answers', 'answer')}, and {seen}"
    return f"{verb(numbers, 'is', 'are')} stuck at {place(turn.line)}"


def lone_forward(divergence: Divergence, lone: tuple[NextCall, ...]) -> str:
    """Say which ranks run a forward of the model alone, and what the others do meanwhile."""
    numbers = [turn.rank for turn in lone]
    others = [turn for turn in divergence.turns if turn.rank not in numbers]
    model, does = "DDP model", "broadcasts its buffers"
    if lone[0].signature is not None and lone[0].signature.origin == "fsdp-eval":
        model, does = "sharded model", "gathers its parameters"
    return (
        f"only {rank_list(numbers)} {verb(numbers, 'runs', 'run')} the forward of the {model} at "
        f"{place(lone[0].line)}, which {does}; {_waiting(others)}"
    )


def whereabouts(record: RunRecord) -> str:
    """Say for each rank what it does at the end of the record; empty when nothing is known of any."""
    blocked = blocked_ranks(record, matched(record))
    turns = tuple(elsewhere(record, rank.rank, rank, blocked.get(rank.rank)) for rank in record.ranks)
    return _waiting([turn for turn in turns if turn.line is not None])


def disputed_call(divergence: Divergence) -> str:
    """Return the call that some ranks make and others do not: ``all_reduce at train.py:57``."""
    turns = [turn for turn in divergence.turns if turn.action in ("collective", "store")]
    if divergence.form == "aborted":
        turns = [turn for turn in turns if _is_call(turn)]
    own = [turn for turn in turns if turn.rank == divergence.culprit]
    return _call((own or turns or list(divergence.turns))[0])


def ranks(divergence: Divergence) -> tuple[int, ...]:
    """Return the culprit alone if it may be named, otherwise all ranks that diverge."""
    if divergence.culprit is not None:
        return (divergence.culprit,)
    return tuple(turn.rank for turn in divergence.turns)


def locations(divergence: Divergence) -> tuple[Location, ...]:
    """Return the lines at which the ranks diverge, the culprit's first, then what the others wait in."""
    turns = sorted(divergence.turns, key=lambda turn: (turn.rank != divergence.culprit, turn.rank))
    frames: list[Frame | None] = []
    for turn in (*turns, *divergence.proof):
        frames += [None if turn.handling is None else frame_of(turn.handling), turn.line]
    return tuple(dict.fromkeys(filter(None, map(location_of, frames))))


def facts(divergence: Divergence, basis: Basis) -> tuple[Fact, ...]:
    """Return the last common entry, what each rank did next with its line and stack, and why a rank is blamed."""
    told = []
    if divergence.last_common is not None:
        last = divergence.last_common
        told.append(
            Fact(
                text=f"the last collective common to the ranks is number "
                f"{(divergence.sequence or 1) - 1:,} of their group: {_call(last)}, step {last.step}",
                basis=basis,
                numbers={"sequence": (divergence.sequence or 1) - 1, "step": last.step},
                location=location_of(last.line),
            )
        )
    told += [_fact(turn, basis, "") for turn in _shown(divergence.turns)]
    later = "later, at the entry that proves the divergence, "
    told += [_fact(turn, basis, later) for turn in _shown(divergence.proof)]
    if divergence.difference and divergence.form == "mismatch":
        told.append(Fact(text=f"these are paired and differ in the {divergence.difference}", basis=basis))
    for line, times in divergence.times:
        by_count = grouped(sorted(times), times.__getitem__)
        often = ", ".join(f"{count:,} times on {rank_list(ranks)}" for count, ranks in by_count.items())
        told.append(Fact(text=f"{place(line)} was run {often}", basis=basis, location=location_of(line)))
    if divergence.culprit is not None:
        text = f"rank {divergence.culprit} {NAMED_BECAUSE} {divergence.culprit_reason}"
        told.append(Fact(text=text, basis=basis, rank=divergence.culprit))
    return tuple(told)


def _fact(turn: NextCall, basis: Basis, prefix: str) -> Fact:
    numbers: dict[str, int | float] = {"step": turn.step}
    extra = ""
    if turn.signature is not None:
        what, subject = details(turn.signature), _named(turn.signature.subject)
        extra = f"{subject and f' on {subject}'}{what and f' ({what})'}"
        numbers["bytes"] = turn.signature.size_bytes
    if turn.endless is not None:
        rounds, lasted = turn.endless.rounds, duration_text(turn.endless.lasted_ns)
        found = "it came to nothing" if turn.endless.empty else "nothing changed in it"
        extra = f": {found} in {rounds:,} rounds or more, within {lasted}"
    return Fact(
        text=f"{prefix}rank {turn.rank} {_doing([turn])}{extra}" + (f" in step {turn.step}" if turn.step else ""),
        basis=basis,
        numbers=numbers if turn.row is not None else {},
        rank=turn.rank,
        location=location_of(turn.line),
        stack=_chain(turn),
    )


def _chain(turn: NextCall) -> tuple[Frame, ...]:
    """Return the stack, torch's frames included, if it was taken where the rank did this; else the user's chain."""
    line = turn.line
    is_there = line is None or any((frame.file, frame.line) == (line.file, line.line) for frame in turn.stack)
    if not turn.stack or not is_there:
        return turn.frames
    # How Python waits below the function that is called (selectors.py, threading.py) says nothing.
    inner = next((at for at, frame in enumerate(turn.stack) if not is_of_python(frame.file)), len(turn.stack))
    return turn.stack[max(inner - 1, 0) :]


def _shown(turns: tuple[NextCall, ...]) -> list[NextCall]:
    return list(turns) if len(turns) <= FACTS_SHOWN else [alike[0] for alike in _alike(turns)]


def _alike(turns: tuple[NextCall, ...]) -> list[list[NextCall]]:
    """Group turns that are the same in everything but the rank."""

    def said(turn: NextCall) -> tuple[object, ...]:
        wait, raised = turn.wait and turn.wait.kind, turn.exception or turn.handling
        return turn.action, turn.waiting, turn.line, turn.signature, turn.group, wait, raised

    return list(grouped(turns, said).values())


def _call(turn: NextCall) -> str:
    name = "an unknown collective"
    if turn.signature is not None:
        name = collective(turn.signature)
    elif turn.wait is not None:
        name = turn.wait.kind
    return f"{name} at {place(turn.line)}"


def _ranks(turns: list[NextCall]) -> str:
    return rank_list(turn.rank for turn in turns)


def _doing(turns: list[NextCall]) -> str:
    """Return the predicate for ranks that did the same."""
    turn, numbers = turns[0], [turn.rank for turn in turns]
    match turn.action:
        case "collective" | "store" if turn.waiting:
            return f"{verb(numbers, 'waits', 'wait')} in {_call(turn)}"
        case "collective" | "store":
            return f"{verb(numbers, 'calls', 'call')} {_call(turn)}"
        case "raised":
            raised = turn.exception
            what = "an exception" if raised is None else f"{raised.type}: {_shortened(headline(raised))}"
            return f"raised {what} at {place(turn.line)}"
        case "signalled":
            by = "" if turn.signal is None else f" by {signal_name(turn.signal)}"
            return f"{verb(numbers, 'was', 'were')} killed{by}"
        case "left-by-exit":
            return f"left with exit code {turn.exit_code}"
        case "finished":
            return f"ran to {verb(numbers, 'its', 'their')} end and left"
    if turn.kept_by:
        return f"{verb(numbers, 'has', 'have')} finished except for the {turn.kept_by} at {place(turn.line)}"
    if turn.loops:
        within = f" in {turn.line.function}" if turn.line is not None and turn.line.function != "<module>" else ""
        seems = f"{verb(numbers, 'seems', 'seem')} to be in an endless loop{within} at {place(turn.line)}"
        empty = [] if turn.endless is None else [f"`{name}`" for name in turn.endless.empty]
        return seems + (f" ({' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty)" if empty else "")
    if turn.stopped:
        return f"{verb(numbers, 'is', 'are')} stopped by a signal"
    if turn.polls_for:
        polls = verb(numbers, "polls", "poll")
        return f"{polls} at {place(turn.line)} for {os.path.basename(turn.polls_for)}"
    if turn.sleeps_ns:
        how_long = duration_text(turn.sleeps_ns)
        return f"{verb(numbers, 'sleeps', 'sleep')} at {place(turn.line)} for another {how_long}"
    if turn.seen_ago_ns:
        return f"{verb(numbers, 'was', 'were')} at {place(turn.line)} {duration_text(turn.seen_ago_ns)} ago"
    return f"{verb(numbers, 'is', 'are')} at {place(turn.line)}"


def _waiting(turns: list[NextCall]) -> str:
    return "; ".join(f"{_ranks(alike)} {_doing(alike)}" for alike in _alike(tuple(turns)))


def _absentee_title(divergence: Divergence) -> str:
    every = (*divergence.turns, *divergence.proof)
    own = (turn for turn in every if turn.rank == divergence.culprit)
    left = next((turn for turn in own if turn.action not in ("collective", "store")), None)
    waiting = [turn for turn in every if turn.waiting and turn.rank != divergence.culprit]
    what = f"rank {divergence.culprit} left" if left is None else f"rank {left.rank} {_doing([left])}"
    if waiting:
        return f"{what} while {_waiting(waiting)}"
    went_on = [turn for turn in every if turn.row is not None and turn.rank != divergence.culprit]
    return f"{what}; {_waiting(went_on)}, which it never called" if went_on else what


def _swapped_title(divergence: Divergence) -> str:
    by_subject = grouped(divergence.turns, lambda turn: "" if turn.signature is None else turn.signature.subject)
    by_subject.pop("", None)
    unnamed = iter(("a parameter", *["another"] * len(by_subject)))
    parts = [f"{_named(subject) or next(unnamed)} of {_ranks(turns)}" for subject, turns in by_subject.items()]
    first = next(turn for turn in divergence.turns if turn.row is not None)
    return f"the ranks run a loop in different orders: {_call(first)} pairs {' with '.join(parts)}"


def _named(subject: str) -> str:
    """Return the subject of a loop's turn as the script calls it; empty for a digest of its content."""
    return "" if subject.startswith("#") else subject


def _aborted_title(divergence: Divergence) -> str:
    """Say which rank died in what, the caller of the disputed call first where it did not."""
    alike = list(grouped(divergence.turns, _inside).values())
    first = next(turns for turns in alike if any(turn.rank == divergence.died for turn in turns))
    here = [turn for turn in first if turn.rank == divergence.died]
    others = [turns for turns in (*([t for t in first if t not in here],), *alike) if turns and turns is not first]
    has_called = any(map(_is_call, here))
    parts = []
    for turns in others:
        numbers = [turn.rank for turn in turns]
        where = f"{rank_list(numbers)} {verb(numbers, 'was', 'were')} {_inside(turns[0])}"
        if has_called and not _is_call(turns[0]):
            where += f" and {verb(numbers, 'has', 'have')} not called it"
        elif not has_called:
            where += f", which rank {divergence.died} has not called"
        parts.append(where)
    return f"rank {divergence.died} died {_inside(here[0])}, while {'; '.join(parts)}"


def _is_call(turn: NextCall) -> bool:
    """Return whether a turn of an abort is the disputed call, of which there is a row of the calls alone."""
    return turn.action == "collective" and turn.row is None


def _inside(turn: NextCall) -> str:
    if turn.signature is not None and not is_in_backward(turn):
        size = f" ({bytes_text(turn.signature.size_bytes)})" if turn.signature.size_bytes else ""
        return f"inside {turn.signature.kind}{size} at {place(turn.line)}"
    if turn.line is None and not is_in_backward(turn):
        return "elsewhere"
    return f"{'in backward ' if is_in_backward(turn) else ''}at {place(turn.line)}"


def _desync_title(divergence: Divergence) -> str:
    made = [turn for turn in divergence.turns if turn.row is not None]
    parts = [f"step {step} of {_ranks(turns)}" for step, turns in grouped(made, lambda turn: turn.step).items()]
    first = made[0]
    title = f"gradients of different steps are averaged in {_call(first)}: {' with '.join(parts)}"
    if divergence.culprit is None or "backward" not in divergence.culprit_reason:
        return title
    done = "skipped" if "skipped" in divergence.culprit_reason else "repeated"
    return f"{title}, since rank {divergence.culprit} {done} a backward"


_TITLES: Mapping[str, Callable[[Divergence], str]] = {
    "desync": _desync_title,
    "swapped": _swapped_title,
    "absentee": _absentee_title,
    "stuck": _stuck_title,
    "aborted": _aborted_title,
}


def _same_line_title(divergence: Divergence, groups: list[list[NextCall]]) -> str:
    parts = []
    for turns in groups:
        signature = turns[0].signature
        assert signature is not None
        what = {
            "number of elements": elements(signature),
            "dtype": signature.dtype,
            "reduce operation": signature.reduce_op,
            "root": f"root {signature.root}",
        }.get(divergence.difference, collective(signature))
        parts.append(f"{what} on {_ranks(turns)}")
    first = groups[0][0]
    where = f"the ranks' collectives at {place(first.line)}"
    if divergence.difference != "kind of collective":
        where = _call(first)
    return f"{where} differ{'' if where.startswith('the') else 's'} in the {divergence.difference}: {', '.join(parts)}"


def _not_called(divergence: Divergence, groups: list[list[NextCall]]) -> str | None:
    """Say it as one rank's call that the others have not made, where they never ran that line."""
    if len(groups) != 2 or any(turns[0].action != "collective" for turns in groups):
        return None
    for caller, others in (groups, groups[::-1]):
        if caller[0].rank in divergence.callers_alone:
            return (
                f"{_ranks(caller)} {_doing(caller)}, which {_ranks(others)} "
                f"{verb([turn.rank for turn in others], 'has', 'have')} not called; {_ranks(others)} {_doing(others)}"
            )
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
