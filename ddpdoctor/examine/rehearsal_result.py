"""Judges a rehearsal: did it show what a rehearsal has to show, and if not, what stopped it and what helps."""

from __future__ import annotations

import ast
import signal
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.examination import RehearsalSection
from ddpdoctor.examine.another_try import USAGE
from ddpdoctor.examine.hints import ARGUMENTS_HINT, hint_for
from ddpdoctor.files import regex
from ddpdoctor.files.untrusted import tree_of
from ddpdoctor.finding import Fact, Finding, Location, Trouble, in_user_code, rank_list, shown_path, signal_name
from ddpdoctor.findings import DIVERGENCES, SUSPECTED
from ddpdoctor.record.joining import headline
from ddpdoctor.source.vocabulary import text_hints_at_ranks

if TYPE_CHECKING:
    from ddpdoctor.record.model import Rank, RankException, RunRecord
    from ddpdoctor.source.script.script import Script

_MEMORY_HINT = (
    "Ask the kernel whether memory ran out (`dmesg | grep -i oom`): then choose a smaller model or batch with the"
    " script's own arguments."
)
_CRASH_HINT = (
    "Start the script with its own launcher and PYTHONFAULTHANDLER=1: where it crashes there too, the line is shown;"
    " where it does not, the rehearsal is at fault. `--static` reads the source only."
)
OUTPUT_LINES = 12
"""How many of the script's last lines are kept."""

MESSAGE_CHARACTERS = 160
LONG_MESSAGE = 240
"""How much of an exception's first line is kept, and of one that is all there is: torch's continue for paragraphs."""

_ALONE = "without wrapping a model in DistributedDataParallel, and its ranks exchanged no gradients or other tensors"
_NO_WRAP_HINT = "The checks of a run examine models that ranks train together; `--static` reads the source only."
_NO_RANK_HINT = (
    "The script starts one rank per GPU, and there are none or too few here: let it start at least two, or give it"
    " more GPUs with `--nproc`. `--static` reads the source only."
)
_HINTS = {
    "time-limit": (
        "Give it more time with `--time-limit`, fewer batches with `--batches`, or smaller ones with `--batch-size`."
    ),
    "cut": "Let a pass yield more batches with `--batches`, or all with `--full`.",
    "slow": "Give it more time with `--time-limit`, or smaller batches with `--batch-size 2`.",
    "memory": "Rehearse a smaller configuration of the model, on a larger machine, or with `--static`.",
    "stand-in": "Rehearse on GPUs with `--device cuda`, or without this part; `--static` reads the source only.",
    "no-touch": "Rehearse in a copy of the directory, or allow it with `--allow-writes`.",
    "overlay": "Rehearse in a copy of the directory that you own, or without the overlay: `--no-overlay`.",
    "rendezvous": (
        "Start every rank of the job with one command on this machine, as by arguments that name one node and two GPUs;"
        " `--static` reads the source only."
    ),
    "no-ranks": "`python -E`, `-I`, `-S` and a reset PYTHONPATH drop the probe; `--static` does not need it.",
    "launch-failed": ARGUMENTS_HINT,
}
LONG_WAIT_NS = 10_000_000_000
"""After so long more time is not the first thing to think of: a watched job reports a wait then, too."""
_TOO_LONG = frozenset({"time-limit", "slow"})
_OWN_BATCHES_HINT = (
    "The script trains without a DataLoader, whose batches would be cut: choose a smaller model or "
    "batch with its own arguments, or give it more time with `--time-limit`."
)
SMALLEST_BATCH = 2
"""Of one sample a batch norm has no statistics."""
_SMALLEST_HINT = "Give it more time with `--time-limit`, or choose a smaller model with the script's own arguments."
_PARTINGS: frozenset[Trouble] = DIVERGENCES | SUSPECTED | {"hang"}
_ENDED_BY_US = frozenset(
    {"proof", "time-limit", "interrupted", "no-touch", "cut", "slow", "memory", "rendezvous", "stand-in", "overlay"}
)
_NO_WRAP: frozenset[Trouble] = frozenset({"no-wrap"})
_SENTENCES = {
    "proof": "stopped at a proven defect",
    "time-limit": "the time limit was reached",
    "interrupted": "interrupted",
    "no-touch": "the script would have changed an existing file",
    "no-ranks": "no rank reported",
    "launch-failed": "the ranks could not be started",
}


class _Judgement(msgspec.Struct, frozen=True):
    status: Literal["completed", "stopped", "failed"]
    reason: str = ""
    hint: str = ""
    output: str = ""
    told_by: frozenset[Trouble] = frozenset()


def judge(record: RunRecord, root: str, script: Script | None = None) -> RehearsalSection:
    """Sum up a rehearsal; anything but ``completed`` has shown less than was asked for.

    Completed means: every rank reported, trained a model with the others, by DDP or by other collectives, made at least
    one optimizer step, and got to its end.
    """
    from ddpdoctor.examine.unreached_code import unreached

    job = record.job
    judgement = _judgement(record, root, script)
    return RehearsalSection(
        **msgspec.structs.asdict(judgement),
        ranks=len(job.ranks_reported),
        ranks_of_job=job.ranks_of_job,
        steps=sum(one.steps() for one in (record, *record.other_starts)),
        unreached=unreached(record) if judgement.status == "completed" or job.stop_reason in ("cut", "slow") else (),
        seconds=round(max(0, job.ended_ns - job.started_ns) / 1e9, 2),
        device=job.device,
        batch_size=_cut_to(record),
        passes_cut=any(one.end == "cut" for one in record.passes),
        overlay=job.overlay,
        not_held_back=job.not_held_back,
        pretended=job.pretended,
        notes=(*job.notes, *_led(record), *_unknown_gaps(record)),
    )


def _cut_to(record: RunRecord) -> int | None:
    """Samples that batches were cut to; None where every loader is known to give no more anyway."""
    samples = int(record.job.batch_size or 0)
    cut = samples and any(loader.batch_size is None or loader.batch_size > samples for loader in record.loaders)
    return samples if cut else None


def _led(record: RunRecord) -> Iterator[str]:
    """Say where and for whom the ranks did not meet, as the script asked for it."""
    for address in sorted({wait.led_from for wait in record.waits if wait.led_from}):
        yield f"the rendezvous took place on this machine instead of {address}"
    for asked in sorted({wait.ranks_asked for wait in record.waits if wait.ranks_asked}):
        here = record.job.world_size or len(record.ranks)
        yield f"the script creates its group for {asked} ranks; here it was created for {here}"


def _unknown_gaps(record: RunRecord) -> Iterator[str]:
    """Say that no model was wrapped, and that the script was ended where what it did not reach cannot be named."""
    from ddpdoctor.diagnosis.training.replicas import trained_by_hand, trained_in_common

    instead = ", ".join({f"{one.module_class} is sharded by {one.by}": None for one in record.sharded_modules})
    own = {one.kind for one in record.signatures if one.origin == "user" and one.kind != "barrier"}
    if not instead and own and own <= {"send", "recv"} and trained_in_common(record):
        instead = "its ranks send each other what they compute, as the stages of a pipeline do"
    elif not instead and trained_by_hand(record):
        instead = "the script averages with its own collectives"
    elif not instead and trained_in_common(record):
        instead = "the ranks train together by other collectives"
    if instead and not record.wraps:
        yield f"no model was wrapped in DistributedDataParallel: {instead}"
    lines = record.stream("lines")
    if lines.state == "truncated" and _ended_by_us(record):
        yield f"the rehearsal ended the script, and the lines that it did not reach are unknown: {lines.reason}"


def could_not_rehearse(error: DdpDoctorError) -> RehearsalSection:
    """Return the section of an examination whose ranks could not be started at all."""
    return RehearsalSection(status="failed", reason=error.message, hint=error.hint)


def _judgement(record: RunRecord, root: str, script: Script | None) -> _Judgement:
    from ddpdoctor.diagnosis.divergence.describe import whereabouts
    from ddpdoctor.diagnosis.training.replicas import trained_by_hand, trained_in_common

    job = record.job
    if (lacking := _lacking(record, root, script)) is not None:
        return lacking
    if job.stop_reason in _ENDED_BY_US:
        reason = job.stop_text or _SENTENCES[job.stop_reason]
        if job.stop_reason == "time-limit" and (where := whereabouts(record)):
            reason = f"{reason}: {where}"
        told_by = _PARTINGS if job.stop_reason == "proof" else frozenset[Trouble]()
        hint = _HINTS.get(job.stop_reason, "")
        if job.stop_reason == "time-limit" and (waited := _waited_for_long(record)):
            hint = waited
        elif job.stop_reason in _TOO_LONG and record.wraps and not record.loaders:
            hint = _OWN_BATCHES_HINT
        elif job.stop_reason in _TOO_LONG and 0 < int(job.batch_size or 0) <= SMALLEST_BATCH:
            hint = _SMALLEST_HINT
        return _Judgement("stopped", reason, hint, told_by=told_by)
    failure = _failure(record, root, script)
    unseen = len(job.ranks_reported) < max(job.ranks_expected, 1)
    if failure is not None and not (unseen and _only_signals(record)):
        return failure
    if job.stop_reason:
        reason = job.stop_text or _SENTENCES.get(job.stop_reason, "a rank failed")
        return _Judgement("failed", reason, _HINTS.get(job.stop_reason, ARGUMENTS_HINT), _any_output(record))
    if unseen and not job.ranks_expected:
        return _no_rank(record, root, script)
    if unseen and not job.ranks_reported and _ended_without_torch(record):
        reason = "the script never imported torch"
        return _Judgement(
            "failed", reason, "Give the script that trains; `--static` reads the source only.", _any_output(record)
        )
    if unseen:
        reason = f"{len(job.ranks_reported)} of {job.ranks_expected} ranks reported"
        reason += f"; {failure.reason}" if failure is not None else ""
        return _Judgement("failed", reason, _HINTS["no-ranks"], _any_output(record))
    if not _ended_by_us(record) and (unknown := [rank.rank for rank in record.ranks if _end_is_unknown(rank)]):
        return _Judgement("failed", f"how {rank_list(unknown)} ended is unknown", "", _any_output(record))
    if not record.wraps and record.stream("wraps").state == "truncated":
        return _Judgement("failed", f"what the script wrapped is unknown: {record.stream('wraps').reason}")
    if not job.world_size:
        reason = "the script ended without creating a process group, so nothing was checked"
        return _Judgement("failed", reason, ARGUMENTS_HINT, _any_output(record))
    if job.world_size == 1:
        reason = "the process group has 1 rank, so there is nothing to compare"
        return _Judgement("failed", reason, _NO_RANK_HINT, _any_output(record))
    unfinished = bool(record.sharded_modules) and record.steps() == 0
    if not record.wraps and not unfinished and not trained_by_hand(record) and not trained_in_common(record):
        return _no_wrap(record)
    if record.steps() == 0:
        reason = "the script ended before every rank made an optimizer step"
        return _Judgement("failed", reason, ARGUMENTS_HINT, _any_output(record))
    return _Judgement("completed")


def _waited_for_long(record: RunRecord) -> str:
    """Return what helps where ranks waited long for one that was busy; empty where none did."""
    from ddpdoctor.diagnosis.divergence.matching import matched
    from ddpdoctor.diagnosis.divergence.waiting import blocked_ranks
    from ddpdoctor.diagnosis.live_verdict import lasting_wait

    wait = lasting_wait(record, blocked_ranks(record, matched(record)))
    lasted_ns = record.job.ended_ns - (record.job.ended_ns if wait is None else wait.since_ns)
    if wait is None or lasted_ns < LONG_WAIT_NS:
        return ""
    return (
        f"{rank_list(wait.waiting).capitalize()} waited {lasted_ns / 1e9:.0f} s for rank {wait.late}. See whether that "
        "is at work there, or in a loop that never ends; if it only takes long, give it more time with `--time-limit`."
    )


def _lacking(record: RunRecord, root: str, script: Script | None) -> _Judgement | None:
    """Return the rank that failed first if it lacks something of this machine: whatever followed shows nothing."""
    from ddpdoctor.diagnosis.failures import lack_behind

    failed = [rank for rank in record.ranks if _failed(rank)]
    raised = _root_exception(min(failed, key=_order_of_failure)) if failed else None
    lacks = raised is not None and lack_behind(raised, record) is not None
    return _failure(record, root, script) if lacks else None


def _no_wrap(record: RunRecord) -> _Judgement:
    if _ended_by_us(record):
        reason = f"until the rehearsal ended it, the script ran {_ALONE}"
        return _Judgement("failed", reason, _NO_WRAP_HINT, told_by=_NO_WRAP)
    reason = f"the script ended {_ALONE}"
    return _Judgement("failed", reason, ARGUMENTS_HINT, _any_output(record), _NO_WRAP)


def _shortened(text: str, characters: int) -> str:
    """Cut a text between two words, or within one that is longer than all that is kept."""
    shortened = textwrap.shorten(text, characters, placeholder=" ...")
    return f"{text[: characters - 4]} ..." if shortened == "..." else shortened


def _no_rank(record: RunRecord, root: str, script: Script | None) -> _Judgement:
    raised = next(iter(record.job.early_exceptions), None)
    if raised is None:
        return _Judgement("failed", "the script started no rank", _NO_RANK_HINT, _any_output(record))
    hint = hint_for(raised, root, script, record)
    message = _shortened(headline(raised), LONG_MESSAGE)
    reason = f"{raised.type} was raised before a rank started{_at(raised, root)}"
    return _Judgement("failed", f"{reason}: {message}" if message else reason, hint, _any_output(record))


def _failure(record: RunRecord, root: str, script: Script | None) -> _Judgement | None:
    """Return the first rank that failed for a reason of its own, before those that only lost their peer."""
    failed = [rank for rank in record.ranks if _failed(rank)]
    if not failed:
        return None
    first = min(failed, key=_order_of_failure)
    raised = _root_exception(first)
    told_by = _PARTINGS if raised is None or raised.communication else _speaks_for(raised)
    if raised is not None:
        same = sorted(rank.rank for rank in failed if _like(_root_exception(rank), raised))
        reason = f"{rank_list(same)} raised {raised.type}{_at(raised, root)}"
        message = _shortened(headline(raised), MESSAGE_CHARACTERS)
        reason += f": {message}" if message else ""
        told_by |= _PARTINGS if len(same) < len(record.ranks) else frozenset()
    elif first.signal:
        reason = f"rank {first.rank} was killed by {signal_name(first.signal)}"
    else:
        same = sorted(rank.rank for rank in failed if not rank.exceptions and rank.exit_code == first.exit_code)
        reason = f"{rank_list(same)} left with exit code {first.exit_code}"
        # Who parses arguments says in the last line what is wrong with them, below all that it would take.
        if first.exit_code == USAGE and (said := _last_lines(first.output_tail, 1).strip()):
            reason += f": {_shortened(said, MESSAGE_CHARACTERS)}"
    output = first.output_tail or (raised.traceback if raised else "")
    hint = hint_for(raised, root, script, record)
    if raised is None and first.signal:
        hint = _MEMORY_HINT if first.signal == signal.SIGKILL else _CRASH_HINT
    return _Judgement("failed", reason, hint, _last_lines(output), told_by)


def _speaks_for(raised: RankException) -> frozenset[Trouble]:
    """Return what an exception says went wrong, if it says it."""
    from ddpdoctor.diagnosis.divergence.unused_parameters import UNFINISHED
    from ddpdoctor.diagnosis.failures import trouble_of

    trouble: Trouble | None = "unused-parameters" if UNFINISHED in raised.message else trouble_of(raised)
    return frozenset() if trouble is None else frozenset({trouble})


def _failed(rank: Rank) -> bool:
    if rank.end == "raised":
        return True
    if rank.end == "signalled":
        # torch 2.13 sometimes aborts while a process that has done all its work is torn down.
        return bool(rank.signal) and not rank.main_finished
    return rank.end == "left-by-exit" and rank.exit_code not in (0, None)


def _ended_without_torch(record: RunRecord) -> bool:
    """Return whether every rank's script ran to its end under our eyes, so that torch cannot have been missed."""
    if not record.ranks or record.stream("ranks").state != "complete":
        return False
    return all(rank.end == "finished" for rank in record.ranks)


def _ended_by_us(record: RunRecord) -> bool:
    """Return whether the rehearsal ended a rank; its peers, whose step may outlast the wait for them, go with it."""
    return any(rank.end == "ended-by-rehearsal" for rank in record.ranks)


def _end_is_unknown(rank: Rank) -> bool:
    if rank.end == "signalled":
        return not rank.main_finished
    return rank.end in ("unknown", "running")


def _only_signals(record: RunRecord) -> bool:
    """Return whether only signals are known of the ranks that failed: the launcher ends the peers of a dead one."""
    return all(rank.end == "signalled" for rank in record.ranks if _failed(rank))


def _order_of_failure(rank: Rank) -> tuple[bool, int, int]:
    raised = _root_exception(rank)
    echo = raised is not None and raised.communication
    return (echo, raised.time_ns if raised else rank.ended_ns, rank.rank)


def _root_exception(rank: Rank) -> RankException | None:
    own = [raised for raised in rank.exceptions if not raised.communication]
    return min(own or rank.exceptions, key=lambda raised: raised.time_ns, default=None)


def _like(one: RankException | None, other: RankException) -> bool:
    return one is not None and one.type == other.type and one.frames[:1] == other.frames[:1]


def _at(raised: RankException, root: str) -> str:
    return f" at {shown_path(raised.frames[0].file, root)}:{raised.frames[0].line}" if raised.frames else ""


def _any_output(record: RunRecord) -> str:
    tails = (rank.output_tail for rank in record.ranks if rank.output_tail)
    return _last_lines(next(tails, record.job.output_tail))


def _last_lines(text: str, lines: int = OUTPUT_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


_EXITS = frozenset({"exit", "_exit", "quit"})


def with_leaving(
    findings: Iterable[Finding], alone: Mapping[str, Mapping[int, tuple[int, ...]]]
) -> tuple[Finding, ...]:
    """Return the findings; one of a rank that left early, of which the source shows no cause, begins with its way out,
    and one of ranks that parted otherwise ends with the tests that came out differently.

    ``alone``: by file the lines that not all ranks ran, with the ranks that did.
    """
    left = (_with_way_out(finding, alone) if _asks(finding) else finding for finding in findings)
    return tuple(_with_decisions(finding, alone) if finding.name in _PARTED else finding for finding in left)


_PARTED = frozenset({"rank-divergent-collective", "data-dependent-divergence", "hang", "early-exit"})
_TO_ONE = regex(r"\b(?:send|recv) (?:to|from) ")
MOST_DECISIONS = 2
"""Of more the lines do not show which it was."""
LONGEST_TEST = 60
_Stacks = Mapping[int, Sequence[tuple[str, int]]]


class _Test(NamedTuple):
    """An ``if`` of a script, not by the rank's number, and the function that it stands in."""

    node: ast.If
    file: str
    function: range
    """Its lines."""
    body: range
    branches: tuple[range, ...]
    """Lines of the function that are behind other tests or in loops."""
    looped: bool

    @property
    def key(self) -> tuple[str, int, int]:
        return self.file, self.node.lineno, self.node.col_offset

    @property
    def text(self) -> str:
        text = ast.unparse(self.node.test)
        return text if len(text) <= LONGEST_TEST else f"{text[:LONGEST_TEST]}…"


_Decisions = dict[tuple[str, int, int], tuple[_Test, tuple[int, ...]]]


def _with_decisions(finding: Finding, alone: Mapping[str, Mapping[int, tuple[int, ...]]]) -> Finding:
    if "source" in finding.basis or _asks(finding):
        return finding
    stacks = {
        fact.rank: [(frame.file, frame.line) for frame in fact.stack if in_user_code(frame.file)]
        for fact in finding.evidence
        if fact.rank is not None and fact.stack and _TO_ONE.search(fact.text) is None
    }
    asked: _Decisions = {}
    parting: _Decisions = {}
    for file in sorted({*alone, *(file for stack in stacks.values() for file, _ in stack)}) if stacks else ():
        tree, ran = tree_of(file), alone.get(file, {})
        loops = tree is None or _is_in_loop(tree, file, stacks)
        for test in _tests_of(file, tree) if tree is not None else ():
            if test.node.test.lineno not in ran and test.body.start in ran:
                asked[test.key] = test, ran[test.body.start]
            ranks = _left_there(test, ran, stacks) or (() if loops else _stand_there(test, stacks))
            if ranks:
                parting[test.key] = test, ranks
    # Of one that asks for what another has set, that one is the reason.
    decisions: _Decisions = {}
    for key, (last, ranks) in parting.items():
        reasons = {one: found for one, found in asked.items() if one != key and _sets_for(found[0], last)}
        decisions |= reasons or {key: (last, ranks)}
    if not 0 < len(decisions) <= MOST_DECISIONS:
        return finding
    facts = tuple(
        Fact(
            text=f"`{test.text}` came out differently: {rank_list(ranks)} alone ran what stands behind it",
            basis=min(finding.basis),
            location=Location(file=test.file, line=test.node.test.lineno),
        )
        for test, ranks in decisions.values()
    )
    named = " and ".join(f"`{test.text}` (line {test.node.test.lineno})" for test, _ in decisions.values())
    return msgspec.structs.replace(
        finding,
        remedy=f"Let all ranks decide {named} alike: broadcast or all-reduce its value (for a file, with a barrier "
        "before the test), or move these calls out of the `if`.",
        evidence=(*facts, *finding.evidence),
    )


def _left_there(test: _Test, ran: Mapping[int, tuple[int, ...]], stacks: _Stacks) -> tuple[int, ...]:
    """Return the ranks that alone left a function behind a test, where another waits in what always follows there."""
    ranks = ran.get(test.body.start, ())
    if not ranks or test.node.test.lineno in ran or not any(map(_leaves, test.node.body)):
        return ()
    further = {
        rank
        for rank, stack in stacks.items()
        for path, line in stack
        if path == test.file and test.body[-1] < line < test.function.stop
        if not any(line in branch for branch in test.branches)
    }
    return ranks if further - set(ranks) else ()


def _stand_there(test: _Test, stacks: _Stacks) -> tuple[int, ...]:
    """Return the ranks that stand behind a test, where others are further down in the function."""
    here = {rank: [line for path, line in stack if path == test.file] for rank, stack in stacks.items()}
    inside = {rank for rank, lines in here.items() if any(line in test.body for line in lines)}
    end = test.node.end_lineno or test.body[-1]
    further = {rank for rank, lines in here.items() if any(end < line < test.function.stop for line in lines)}
    return tuple(sorted(inside)) if inside and further - inside and not test.looped else ()


def _is_in_loop(tree: ast.Module, file: str, stacks: _Stacks) -> bool:
    """Return whether a rank is in a loop of a file, so that ranks may be in different turns of it."""
    loops = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
    ]
    lines = {line for stack in stacks.values() for path, line in stack if path == file}
    return any(line in loop for loop in loops for line in lines)


def _tests_of(file: str, tree: ast.Module) -> Iterator[_Test]:
    waiting: list[tuple[ast.AST, ast.AST | None, bool]] = [(tree, None, False)]
    branches: dict[int, list[range]] = {}
    found: list[tuple[ast.If, ast.AST, bool]] = []
    while waiting:
        node, function, looped = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, looped = node, False
        elif isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While)) and function is not None:
            if isinstance(node, ast.If):
                found.append((node, function, looped))
                branches.setdefault(id(function), []).append(range(node.lineno, (node.end_lineno or 0) + 1))
            looped = looped or not isinstance(node, ast.If)
        waiting += [(child, function, looped) for child in ast.iter_child_nodes(node)]
    for node, function, looped in found:
        if not text_hints_at_ranks(ast.unparse(node.test)):
            lines = range(getattr(function, "lineno", 0), (getattr(function, "end_lineno", 0) or 0) + 1)
            body = range(node.body[0].lineno, (node.body[-1].end_lineno or node.lineno) + 1)
            others = tuple(one for one in branches[id(function)] if node.lineno not in one)
            yield _Test(node, file, lines, body, others, looped)


def _sets_for(one: _Test, last: _Test) -> bool:
    """Return whether what stands behind a test sets what another asks for: an attribute, or a name of its function."""
    nodes = [node for statement in one.node.body for node in ast.walk(statement)]
    same = (one.file, one.function) == (last.file, last.function)
    kinds = (ast.Name, ast.Attribute) if same else (ast.Attribute,)
    stored = {ast.unparse(node) for node in nodes if isinstance(node, kinds) and isinstance(node.ctx, ast.Store)}
    asked = (node for node in ast.walk(last.node.test) if isinstance(node, kinds))
    return any(ast.unparse(node).rpartition(".")[2] in {text.rpartition(".")[2] for text in stored} for node in asked)


def _asks(finding: Finding) -> bool:
    return finding.trouble == "early-exit" and "source" not in finding.basis and len(finding.ranks) == 1


def _with_way_out(finding: Finding, alone: Mapping[str, Mapping[int, tuple[int, ...]]]) -> Finding:
    (rank,) = finding.ranks
    ways = [way for file, ran in sorted(alone.items()) for way in _ways_out(file, ran, rank)]
    if len(ways) != 1:
        return finding
    (node, test, file), basis = ways[0], next(iter(finding.basis))
    place = Location(file=file, line=node.lineno)
    asked = f"`{ast.unparse(test)}` decides, which every rank asked"
    return msgspec.structs.replace(
        finding,
        locations=tuple(dict.fromkeys((place, *finding.locations))),
        evidence=(
            Fact(text=f"rank {rank} alone ran `{ast.unparse(node)}`", basis=basis, location=place, rank=rank),
            Fact(text=asked, basis=basis, location=Location(file=file, line=test.lineno)),
            *finding.evidence,
        ),
    )


def _ways_out(file: str, ran: Mapping[int, tuple[int, ...]], rank: int) -> Iterator[tuple[ast.stmt, ast.expr, str]]:
    """Yield the statements by which this rank alone left a function, loop or program, after a test that all ran."""
    tree = tree_of(file) if any(those == (rank,) for those in ran.values()) else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.If) and node.test.lineno not in ran:
            for inner in (*node.body, *node.orelse):
                if ran.get(inner.lineno) == (rank,) and _leaves(inner):
                    yield inner, node.test, file


def _leaves(node: ast.stmt) -> bool:
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    last = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return isinstance(node, (ast.Return, ast.Break)) or last in _EXITS
