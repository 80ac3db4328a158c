"""The first cause among the incidents of a dead job, ahead of its echoes.

What happened to a rank by itself (a signal, an exception that speaks of no peer, a fault of the GPU) comes before what
ranks say of each other: time-outs, then lost connections, then the launcher's SIGTERM. Within a class the order in time
decides, where it is known.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from ddpdoctor.diagnosis.logs.ranks import SIGABRT, SIGKILL, SIGTERM, endings_of, unexplained, with_ranks
from ddpdoctor.diagnosis.steps import once_per_record
from ddpdoctor.diagnosis.wording import rank_list, verb
from ddpdoctor.finding import Frame, Trouble, grouped, in_user_code
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.setup import ERROR_LINE, NO_START, WATCHDOG, Incident, LogEvidence, RankEnding

# What can follow from what: the edges of the chain from a first cause to its last echo, as data.

ONE_MOMENT_NS = 1_000_000_000
"""Clocks of two nodes, and the time that is read off a line near a traceback, are trusted to a second."""
_OF_EXCEPTIONS = frozenset({SIGABRT, SIGTERM})
_SIGNALLED = {6: "aborted", 9: "killed", 15: "terminated"}
_BY_ITSELF = frozenset({"raised", "mismatch", "gpu", "cuda", "killed-by-kernel", "worker-lost", "crashed", "killed"})
_LOST = frozenset({"lost-peer", "lost-by-nccl"})
_ABORTING = _LOST | frozenset({"timed-out", "mismatch", "nccl", "gpu", "cuda", "stuck", "no-rendezvous", "raised"})
FOLLOWS: Mapping[str, frozenset[str]] = {
    # The watchdog, or C++ that no one catches, ends its own process.
    "aborted": _ABORTING,
    "nccl-passed-on": _BY_ITSELF | _LOST | {"nccl", "no-rendezvous"},
    "lost-peer": _BY_ITSELF | {"timed-out", "stuck", "left", "aborted", "nccl"},
    # A rank waits for one that never connected, or whose connection had been lost.
    "timed-out": frozenset({"no-rendezvous", "lost-by-nccl"}),
    # A traceback of which the exception is not there: what is known in words comes before it.
    "cut": _BY_ITSELF | _LOST | {"timed-out", "stuck", "nccl", "no-rendezvous", "killed-by-scheduler"},
    # Another agent has closed it, because its own ranks had ended.
    "closed": _BY_ITSELF | _LOST | {"timed-out", "stuck", "nccl", "killed-by-scheduler"},
    "stuck": _BY_ITSELF | {"timed-out", "lost-by-nccl", "nccl", "no-rendezvous"},
}
"""By the name of an event, from which others it can follow. What a process suffers by itself follows from nothing."""
ADDS_NOTHING = frozenset({"aborted", "nccl-passed-on"})
"""Events whose words say nothing that their causes do not say."""
_SAME_PROCESS = frozenset({"aborted"})
"""Those that follow only in the same process."""


def is_cut(one: Incident) -> bool:
    """Return whether it is a traceback of which the exception is not there."""
    return one.kind == "raised" and not one.type and bool(one.frames)


def name_of(one: Incident) -> str:
    """Return the name of an event in the chain."""
    if one.kind == "signalled":
        return _SIGNALLED.get(one.signal or 0, "crashed")
    if is_cut(one):
        return "cut"
    if one.kind == "no-rendezvous" and "RendezvousClosedError" in f"{one.type} {one.message}":
        return "closed"
    if one.kind == "nccl" and one.passed_on:
        return "nccl-passed-on"
    return "lost-by-nccl" if one.kind == "lost-peer" and one.type == "NCCL WARN" else one.kind


def may_follow(effect: Incident, cause: Incident, evidence: LogEvidence) -> bool:
    """Return whether one incident can be a consequence of another, by what they are and by when they were."""
    name = name_of(effect)
    causes = FOLLOWS.get("lost-peer" if name == "lost-by-nccl" else name, frozenset())
    if name_of(cause) not in causes:
        return False
    elsewhere = None not in (effect.rank, cause.rank) and effect.rank != cause.rank
    if name == "cut" and elsewhere and cause.kind != "no-rendezvous":
        return False
    if name in _SAME_PROCESS:
        # Its reason is printed before or with it, and launchers report it at last.
        return effect.rank is None or cause.rank is None or effect.rank == cause.rank
    # NCCL's threads write what one of them had first and what another passes on in any order.
    by_threads = name == "nccl-passed-on" and effect.type == cause.type == "NCCL WARN"
    return by_threads or not surely_before(effect, cause, evidence)


def surely_before(one: Incident, other: Incident, evidence: LogEvidence) -> bool:
    """Return whether an incident came before another, by its place in the one log or by the clock."""
    if evidence.ordered:
        return one.position < other.position
    return bool(one.time_ns and other.time_ns) and one.time_ns + ONE_MOMENT_NS < other.time_ns


Role = Literal["cause", "echo"]
OWN = frozenset(
    {
        "raised", "mismatch", "nccl", "gpu", "cuda", "killed-by-kernel", "killed-by-scheduler", "worker-lost",
        "signalled", "left", "ended-from-outside", "interrupted",
    }
)  # fmt: skip
"""What happens to a rank by itself."""
_OF_A_JOB = re.compile(r"python|^pt_|^ray\b|torch|train|accelerate|deepspeed|mpirun|srun", re.IGNORECASE)
"""Names of processes that a training has: those that torch gives to its threads and workers, and launchers."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?!torch/|_\w+/)\w+/")
"""A file of an installed package other than torch."""
_GONE_ON = 5
"""Lines of progress after an exception of an unknown rank, of which one may come from ranks that have not noticed."""
_REPEATING = ("deepspeed", "command", "systemd")
_WARNING = "a warning"
_ROUND_NS = 10_000_000_000
"""Launchers look after their ranks every 5 s or more often."""
_DISMISSIBLE = frozenset({"raised", "said", "lost-peer", "nccl", "no-rendezvous", "signalled", "left", "cuda"})
"""What a job may survive: a process that catches it, or that another one takes the place of."""
_OWN_RENDEZVOUS = re.compile(
    r"EADDRINUSE|address already in use|failed to (?:listen|bind)|environment variable|name resolution|Name or service",
    re.IGNORECASE,
)
_OF_ALL = re.compile(r"0?(?:\(default_pg\))?$|default_pg$")
"""How torch names the group of all ranks; nothing where it names none."""
_FIRST_NUMBERS = 32
_CUDA_ERROR = re.compile(r"CUDA error|cuda error|CUDNN_STATUS|CUBLAS_STATUS|ncclUnhandledCudaError")


class LogCause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause or echo: incidents that are the same thing."""

    trouble: Trouble
    role: Role
    incidents: tuple[Incident, ...]
    """First in time first."""
    ranks: tuple[int, ...] = ()
    """Ranks on which it happened, where known."""
    absent: tuple[int, ...] = ()
    """Ranks that did not reach a collective that timed out."""
    doubt: str = ""
    """Why it is not certain; empty where it is."""
    attempts: tuple[int, ...] = ()
    """Attempts of the launcher in which it happened."""
    behind: tuple[Incident, ...] = ()
    """What else bears on it: a kernel that ran out of memory, ends of the same rank."""
    survived: bool = False
    """The job went on after it: nothing shows that anyone died of it."""
    leads: bool = False
    """It is the first cause of its attempt."""
    endpoint: str = ""
    """Where the ranks meet, where that failed."""
    of_training: bool = True
    """Something in the logs speaks of a training."""

    @property
    def is_known(self) -> bool:
        """It is of a training, and more is known of it than that someone reported an error."""
        return self.of_training and self.first.type != ERROR_LINE

    @property
    def first(self) -> Incident:
        """The first of its incidents."""
        return self.incidents[0]


def user_frames(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the user's frames of a traceback, innermost first; of a script that is installed, those of its package."""
    own = tuple(frame for frame in frames if in_user_code(frame.file) and "/bin/" not in frame.file)
    return own or tuple(frame for frame in frames if _INSTALLED.search(frame.file))


def first_cause(record: RunRecord) -> LogCause | None:
    """Return the first cause; None where no log reports one."""
    causes = causes_of(record)
    return causes[0] if causes and causes[0].role == "cause" else None


@once_per_record()
def causes_of(record: RunRecord) -> tuple[LogCause, ...]:
    """Return the first cause, then what else went wrong, in order of time; nothing where no log reports it."""
    evidence = record.logs
    by_attempt: dict[int, tuple[LogCause, ...]] = {}
    survived: list[LogCause] = []
    for attempt in sorted({one.attempt for one in evidence.incidents} | {one.attempt for one in evidence.endings}):
        told = _of_attempt(evidence, attempt)
        survived += [one for one in told if one.survived]
        if died := tuple(one for one in told if not one.survived):
            by_attempt[attempt] = died
    if not by_attempt:
        return tuple(survived)
    attempts = list(by_attempt.values())
    found = list(attempts[0])
    seen = {_likeness(one.first): index for index, one in enumerate(found)}
    for later in (one for attempt in attempts[1:] for one in attempt):
        index = seen.get(_likeness(later.first))
        if index is None:
            seen[_likeness(later.first)] = len(found)
            found.append(replace(later, role="echo"))
        else:
            again = found[index]
            found[index] = replace(again, attempts=tuple(sorted({*again.attempts, *later.attempts})))
    return (*found, *survived)


def _of_attempt(evidence: LogEvidence, attempt: int) -> tuple[LogCause, ...]:
    endings = endings_of((one for one in evidence.endings if one.attempt == attempt), evidence.ranks)
    here = [one for one in evidence.incidents if one.attempt == attempt and _is_of_the_job(one, endings, evidence)]
    everything = with_ranks(here, endings)
    gone_on = _gone_on(everything, endings, evidence)
    passed_by = {one.position for one in gone_on}
    told = tuple(one for one in everything if one.position not in passed_by)
    raised = [_with_what_it_said(one, told) for one in told if one.kind != "said"]
    left = [] if evidence.finished else [_with_what_it_said(one, told) for one in unexplained(endings, raised)]
    incidents = _without_shadows((*raised, *left))
    if all(name_of(one) == "aborted" for one in incidents):
        # The watchdog detected something, without a word on what it was: a time-out, as a rule.
        detected = [one for one in told if one.kind == "said" and one.trouble == "timeout"]
        incidents = (*incidents, *(replace(one, kind="timed-out") for one in detected)) or _promoted(told)
    incidents = tuple(
        one
        for one in incidents
        if name_of(one) not in ADDS_NOTHING or not any(may_follow(one, other, evidence) for other in incidents)
    )
    groups = _grouped(incidents)
    # An error that nobody knows, and a command that could not be run, are nothing where the job went on.
    passed = [one for one in gone_on if one.type not in (ERROR_LINE, NO_START)]
    survivors = [replace(_cause(group, "echo"), survived=True) for group in _grouped(passed)]
    if not groups:
        return tuple(survivors)
    everyone = _everyone(evidence, incidents, endings)
    cause = _first_cause(groups, evidence)
    first = _judged(cause, groups, everyone, endings, evidence)
    found = [_with_what_bears_on_it(replace(first, leads=True), told, evidence)]
    if not evidence.of_training:
        found = [replace(found[0], of_training=False, doubt="nothing in the logs shows that they are of a training")]
    for group in groups:
        if group is cause or group[0] in (*found[0].incidents, *found[0].behind):
            continue
        same = {one.rank for one in group} <= set(found[0].ranks) or (_is_own(cause[0]) and not is_cut(cause[0]))
        if is_cut(group[0]) and same:
            # A traceback that is cut off shows where a rank was, and not what happened.
            found[0] = replace(found[0], behind=(*found[0].behind, *group))
        else:
            found.append(_cause(group, "echo"))
    return (*found, *survivors)


def _is_of_the_job(one: Incident, endings: Sequence[RankEnding], evidence: LogEvidence) -> bool:
    """Return whether the process that an incident is about can be one of the job, where the system names it."""
    if not one.process or _OF_A_JOB.search(one.process):
        return True
    known = {ending.pid for ending in endings} | {other.pid for other in evidence.incidents if not other.process}
    return one.pid in known


def _gone_on(told: Sequence[Incident], endings: Sequence[RankEnding], evidence: LogEvidence) -> tuple[Incident, ...]:
    """Return the incidents after which their process wrote what it writes while it trains."""
    if evidence.finished:
        return tuple(told)
    ended = {ending.rank for ending in endings if ending.exit_code}
    # An exception ends a process by an exit code, and one of torch's C++ side by SIGABRT.
    by_signal = {ending.rank for ending in endings if ending.exit_code < 0 and -ending.exit_code not in _OF_EXCEPTIONS}
    passed = [one for one in told if one.went_on and (one.kind in _DISMISSIBLE or one.type == "Horovod")]
    # With a death elsewhere an unknown rank's exception needs more to be dismissed: others may be some lines behind.
    lonely = not ended and len(passed) == len(told)
    dismissed = {
        one.position
        for one in passed
        if (one.rank is not None and one.rank not in (ended if one.kind == "signalled" else ended - by_signal))
        or (one.rank is None and one.went_on >= (1 if lonely else _GONE_ON))
    }
    dismissed |= _raised_again(told, {ending.rank for ending in endings if ending.exit_code > 0})
    return tuple(one for one in told if one.position in dismissed)


_Process = tuple[str, int, int]
"""Log, process and rank."""


def _raised_again(told: Sequence[Incident], failed: Collection[int | None]) -> set[int]:
    """Return the positions of exceptions that a rank caught, as it raised others at the same place later.

    The last of them is the one that ended it, unless the rank raised something else after that, as a process ends once,
    or a launcher names the ranks that failed, and it is none of them.
    """
    series: dict[tuple[_Process, str, Frame], list[Incident]] = {}
    newest: dict[_Process, int] = {}
    for one in told:
        if one.rank is not None and one.frames and not one.mixed:
            process = one.file, one.pid, one.rank
            newest[process] = max(newest.get(process, -1), one.position)
            if one.kind == "raised":
                place = (user_frames(one.frames) or one.frames)[0]
                series.setdefault((process, one.type, place), []).append(one)
    caught: set[int] = set()
    for (process, _, _), raised in series.items():
        # One death may be told twice, by a logger and by Python: then the words are the same.
        if len({one.message for one in raised}) > 1:
            last = max(one.position for one in raised)
            went_on = newest[process] != last or (failed and raised[0].rank not in failed)
            caught.update(one.position for one in raised if one.position != last or went_on)
    return caught


def _promoted(told: Sequence[Incident]) -> tuple[Incident, ...]:
    """Return the first exception without a traceback, or a warning, where nothing else is known: probably the one.

    An error that no row of the catalogue knows counts where there is no such exception.
    """
    said = sorted((one for one in told if one.kind == "said"), key=lambda one: one.type == ERROR_LINE)
    raised = [replace(one, kind="raised") for one in said if one.trouble == "exception"]
    last = [one for one in said if one.trouble == "no-rendezvous" and one.loose]
    return tuple((raised or [replace(one, kind="no-rendezvous", type=_WARNING) for one in last])[:1])


def _with_what_bears_on_it(cause: LogCause, told: Sequence[Incident], evidence: LogEvidence) -> LogCause:
    """Add what others say of the same: the port of a warning, the last words of a process that aborted."""
    said = [one for one in told if one.kind == "said" and one not in cause.incidents]
    if cause.trouble == "no-rendezvous":
        if cause.first.type == _WARNING:
            cause = replace(cause, doubt="only a warning says so")
        same = tuple(one for one in said if one.trouble == "no-rendezvous")
        return replace(cause, behind=(*cause.behind, *same), endpoint=evidence.endpoint)
    if cause.first.type == ERROR_LINE:
        return replace(cause, doubt="it is the last error in the log, and its words are not in the catalogue")
    if cause.first.kind in ("signalled", "left"):
        own = [one for one in said if one.rank == cause.first.rank or one.rank is None]
        return replace(cause, behind=(*cause.behind, *own[-1:]))
    first = cause.first
    if not first.type and first.kind == "raised" and not cause.doubt and not evidence.endings:
        return replace(cause, doubt="the log holds only a part of its traceback")
    if first.loose and first.trouble == "exception" and not cause.doubt:
        reported = [one for one in evidence.endings if one.exit_code and first.rank in (None, one.rank)]
        if not reported:
            return replace(cause, doubt="the log holds neither its traceback nor how its process ended")
        if first.rank is None and len(reported) > 1:
            return replace(cause, doubt="the line does not say which rank wrote it")
    return cause


def _with_what_it_said(ending: Incident, told: Sequence[Incident]) -> Incident:
    """Of a rank that left with an exit code the last line that looks like its exception, if there is one."""
    if ending.kind != "left":
        return ending
    before = (one for one in told if one.kind == "said" and one.position < ending.position)
    lines = (one for one in before if one.trouble == "exception" and one.type != ERROR_LINE)
    said = [one for one in lines if one.rank in (ending.rank, None)]
    if any(one.rank is None for one in said) and len({(one.type, one.message) for one in said}) > 1:
        said = []  # Whose words which are is not known.
    return replace(said[-1], kind="raised", exit_code=ending.exit_code) if said else ending


def _without_shadows(incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    """Leave out what says less of the same: lines beside a traceback, signals that the launcher reports as well."""
    told = {(one.rank, one.kind) for one in incidents if one.frames and one.type}
    launcher = {one.signal for one in incidents if one.type == "launcher" and one.kind == "signalled"}
    aborts = (one for one in incidents if one.type == "terminate")
    reasons = {one.signal: one.message.partition("; terminate called")[0] for one in aborts}
    kept: list[Incident] = []
    for one in sorted(incidents, key=lambda one: (one.time_ns == 0, one.time_ns if not one.file else 0, one.position)):
        bare = not one.frames and one.type == ""
        shadow = bare and any(kind == one.kind and one.rank in (rank, None) for rank, kind in told)
        repeated = one.kind == "signalled" and one.type in ("shell", "terminate") and one.signal in launcher
        # DeepSpeed's launcher, and whoever started a launcher, repeat that some rank has ended.
        announced = one.type in _REPEATING and any(
            other.kind in OWN and other.type not in (*_REPEATING, "launcher") for other in incidents
        )
        if not (shadow or repeated or announced or _says_less_than_another(one, incidents)):
            why = reasons.get(one.signal) if one.type == "launcher" and one.kind == "signalled" else None
            kept.append(replace(one, message=why) if why else one)
    if any(one.kind == "ended-from-outside" for one in kept):
        # The launcher passes its signal on: the ranks' KeyboardInterrupts and its own exception say the same again.
        kept = [one for one in kept if one.kind != "interrupted"]
    return tuple(kept)


def _says_less_than_another(one: Incident, incidents: Sequence[Incident]) -> bool:
    """Return whether a traceback that is cut off only went the way of another rank's, or has not come to the script."""
    if not is_cut(one):
        return False
    if not user_frames(one.frames) and any(other.kind not in ("raised", "lost-peer", "said") for other in incidents):
        return True
    way = one.frames[::-1]
    return any(other.type and other.frames[::-1][: len(way)] == way for other in incidents)


def _grouped(incidents: Sequence[Incident]) -> list[tuple[Incident, ...]]:
    alike = grouped(incidents, _likeness)
    return [tuple(sorted(group, key=lambda one: one.position)) for group in alike.values()]


def _likeness(one: Incident) -> object:
    """Equal for incidents that are the same thing on several ranks."""
    if one.kind == "lost-peer":
        return one.kind, one.trouble
    if one.kind in ("timed-out", "stuck", "mismatch", "ended-from-outside", "interrupted"):
        return one.kind
    if one.kind == "no-rendezvous":
        return one.kind, _is_own(one)
    if one.kind in ("signalled", "left"):
        return one.kind, one.signal, one.exit_code
    if one.kind in ("killed-by-kernel", "killed-by-scheduler", "gpu"):
        return one.kind, one.type
    own = user_frames(one.frames)
    if one.kind == "cuda" and not own and "ssert" in one.message:
        return one.kind, "assertion"
    if one.trouble not in ("out-of-memory", "exception"):
        return one.kind, one.trouble
    return one.trouble, one.type, one.message if one.mixed or not own else own[:1]


def _is_own(one: Incident) -> bool:
    return one.kind in OWN or (one.kind == "no-rendezvous" and _OWN_RENDEZVOUS.search(one.message) is not None)


def _ends_what_waited(one: Incident, groups: Sequence[tuple[Incident, ...]], evidence: LogEvidence) -> bool:
    """Return whether a signal came from outside to a job whose ranks had given up waiting for each other."""
    return one.kind == "ended-from-outside" and any(
        group[0].kind in ("timed-out", "stuck") and surely_before(group[0], one, evidence) for group in groups
    )


def _first_cause(groups: Sequence[tuple[Incident, ...]], evidence: LogEvidence) -> tuple[Incident, ...]:
    # Those whose first incident can follow from that of another group are echoes.
    follows = [any(one is not group and may_follow(group[0], one[0], evidence) for one in groups) for group in groups]
    groups = [group for group, is_echo in zip(groups, follows, strict=True) if not is_echo] or groups
    own = [group for group in groups if _is_own(group[0]) and not _ends_what_waited(group[0], groups, evidence)]
    hardware = [group for group in own if group[0].kind in ("gpu", "killed-by-kernel")]
    told = [group[0] for group in own]
    if evidence.ordered:
        told = [one for one in told if one.type != "launcher" and not _CUDA_ERROR.search(one.message)]
    if hardware and not any(surely_before(one, hardware[0][0], evidence) for one in told):
        return hardware[0]
    if own:
        return min(own, key=lambda group: _order(group[0], own, evidence))
    usual = ("timed-out", "stuck", "no-rendezvous", "lost-peer")
    found = (group for kind in usual for group in groups if group[0].kind == kind)
    return next(found, groups[0])


def _order(one: Incident, groups: Iterable[Sequence[Incident]], evidence: LogEvidence) -> tuple[object, ...]:
    by_time = not evidence.ordered and all(group[0].time_ns for group in groups)
    weak = one.kind in ("left", "interrupted", "killed-by-scheduler")
    weak = weak or (one.kind == "signalled" and one.signal in (SIGTERM, None))
    return (weak, one.time_ns if by_time else 0, one.position)


def _judged(
    failed: tuple[Incident, ...],
    groups: Sequence[tuple[Incident, ...]],
    everyone: frozenset[int],
    endings: Sequence[RankEnding],
    evidence: LogEvidence,
) -> LogCause:
    cause = _cause(failed, "cause")
    if cause.first.kind == "timed-out" and all(one.type == WATCHDOG for one in cause.incidents):
        return replace(cause, doubt="the watchdog does not say whether it timed out or failed")
    if cause.first.kind == "timed-out":
        return _with_unheard(_of_timeout(cause, groups, everyone, endings), evidence, endings)
    if cause.first.kind == "mismatch":
        return _of_mismatch(cause, groups)
    if cause.first.kind == "lost-peer":
        return _of_lost_peer(cause, everyone, endings)
    if cause.first.kind in ("killed-by-kernel", "signalled"):
        cause = _of_signal(cause, groups)
    if cause.first.kind == "left":
        cause = _of_the_first_to_leave(cause, endings)
    others = [group[0] for group in groups if group is not failed and _is_own(group[0])]
    rivals = [one for one in others if one.kind not in ("left", "interrupted", "ended-from-outside")]
    doubtful = [one for one in rivals if one not in cause.behind and not _is_later(one, cause.first, evidence)]
    if doubtful and cause.first.kind != "gpu":
        cause = replace(cause, doubt="the logs do not show which of several failures came first")
    return cause


def _is_later(one: Incident, first: Incident, evidence: LogEvidence) -> bool:
    """Return whether an incident surely came after the first one."""
    if one.kind == "signalled" and one.signal == SIGTERM:
        return True  # How launchers and schedulers end the ranks that are left.
    if one.kind == "signalled" and one.type == "launcher" and first.type != "launcher":
        return first.rank == one.rank
    return one.position > first.position if one.file == first.file else surely_before(first, one, evidence)


def _cause(group: Sequence[Incident], role: Role) -> LogCause:
    return LogCause(
        trouble=group[0].trouble,
        role=role,
        incidents=tuple(group),
        ranks=tuple(sorted({one.rank for one in group if one.rank is not None})),
        absent=tuple(sorted({rank for one in group for rank in one.absent})),
        attempts=tuple(sorted({one.attempt for one in group})),
    )


def _of_timeout(
    cause: LogCause, groups: Sequence[tuple[Incident, ...]], everyone: frozenset[int], endings: Sequence[RankEnding]
) -> LogCause:
    """Return who waited in what; where all ranks waited in different calls, they part."""
    cause = _with_lost_peers(cause, groups, everyone)
    waiting = [one for one in cause.incidents if not one.absent] or list(cause.incidents)
    calls = {(user_frames(one.frames)[:1], one.collective) for one in waiting if one.frames}
    operations = {one.collective for one in waiting if one.collective and not one.frames}
    if len({one.collective for one in _of_one_number(waiting)}) > 1:
        return replace(cause, trouble="mismatch", absent=cause.absent)
    absent = set(cause.absent) or set(everyone) - set(cause.ranks)
    if not cause.absent and any(not _OF_ALL.match(one.group) for one in waiting):
        absent = set()  # Nobody says who belongs to a group of some ranks.
    unnamed = sum(one.rank is None for one in waiting)
    if not cause.absent and unnamed >= len(absent):
        absent = set()  # As many report it without saying who they are.
    counts = ((one.rank, one.last_enqueued) for one in cause.incidents)
    enqueued = {rank: count for rank, count in counts if rank is not None and count is not None}
    if not cause.absent and not absent and len(set(enqueued.values())) > 1:
        least = min(enqueued.values())
        return replace(cause, absent=tuple(sorted(rank for rank, count in enqueued.items() if count == least)))
    nobody_missing = not absent and len(waiting) > 1 and len({one.group for one in waiting}) == 1
    if nobody_missing and len(calls) > 1:
        lines = {frames for frames, _ in calls}
        return replace(cause, trouble="rank-branch" if len(lines) > 1 else "mismatch")
    if nobody_missing and len(operations) > 1:
        return replace(cause, trouble="mismatch")
    agents = [ending for ending in endings if ending.by_agent]
    if len(everyone) == 1 and len(waiting) == 1 and agents and not any(ending.was_ended for ending in agents):
        # It waited for someone, and its launcher had no one left to end.
        return replace(cause, trouble="early-exit", doubt="the logs show neither which rank left nor why")
    unsure = not cause.absent and bool(absent) and len(absent) >= len(everyone)
    return replace(cause, absent=() if unsure else tuple(sorted(absent)))


def _of_one_number(waiting: Sequence[Incident]) -> list[Incident]:
    """Return those of different ranks that wait at the same number of one group, where there are such.

    Of groups that no one names the first calls have the same numbers.
    """
    at: dict[tuple[str, int], dict[int, Incident]] = {}
    for one in waiting:
        if one.collective and one.rank is not None and one.sequence and (one.group or one.sequence > _FIRST_NUMBERS):
            at.setdefault((one.group, one.sequence), {})[one.rank] = one
    apart = (ranks.values() for ranks in at.values() if len({one.collective for one in ranks.values()}) > 1)
    return list(next(apart, ()))


def _with_unheard(cause: LogCause, evidence: LogEvidence, endings: Sequence[RankEnding]) -> LogCause:
    """Doubt that ranks did not come which are known by the job's size only: what they wrote may be elsewhere."""
    named = {rank for one in cause.incidents for rank in one.absent}
    ended = {ending.rank for ending in endings if ending.was_ended}
    if silent := [rank for rank in cause.absent if rank in ended - named - set(evidence.ranks)]:
        # Its launcher may have ended it before its own time-out.
        them = verb(silent, "it", "them")
        return replace(cause, doubt=f"{rank_list(silent)} wrote nothing before the launcher ended {them}")
    heard = {*evidence.ranks, *cause.ranks, *(ending.rank for ending in endings)}
    highest = max((rank for rank in heard if rank is not None), default=-1)
    unheard = [rank for rank in cause.absent if rank not in named and rank > highest]
    if not unheard:
        return cause
    if len(unheard) > len(cause.ranks):
        return replace(cause, absent=tuple(rank for rank in cause.absent if rank not in unheard))
    return replace(cause, doubt=f"the logs hold no line of {rank_list(unheard)}")


def _with_lost_peers(cause: LogCause, groups: Sequence[tuple[Incident, ...]], everyone: frozenset[int]) -> LogCause:
    """Add the ranks that stood elsewhere when the others gave up: they lost the connection there.

    A rank that lost it in the same call came too late, and did not part from the others.
    """
    lost = tuple(one for group in groups for one in group if one.kind == "lost-peer" and one.frames)
    here = {user_frames(one.frames)[:1] for one in cause.incidents if one.frames}
    there = {user_frames(one.frames)[:1] for one in lost}
    ranks = {*cause.ranks, *(one.rank for one in lost if one.rank is not None)}
    if cause.absent or not lost or here & there or len(here) != 1 or everyone - ranks:
        return cause
    return replace(cause, incidents=(*cause.incidents, *lost), ranks=tuple(sorted(ranks)))


def _of_mismatch(cause: LogCause, groups: Sequence[tuple[Incident, ...]]) -> LogCause:
    """Ranks in different collectives: with lines of their own they part, at one line they call it differently."""
    lost = tuple(one for group in groups for one in group if one.kind == "lost-peer" and one.frames)
    lines = {user_frames(one.frames)[:1] for one in cause.incidents if user_frames(one.frames)}
    ranks = tuple(sorted({*cause.ranks, *(rank for one in cause.incidents for rank in one.others)}))
    trouble: Trouble = "rank-branch" if cause.trouble == "rank-branch" or len(lines) > 1 else "mismatch"
    return replace(cause, trouble=trouble, ranks=ranks, behind=lost)


def _of_lost_peer(cause: LogCause, everyone: frozenset[int], endings: Sequence[RankEnding]) -> LogCause:
    """Someone left, and no log says how: a rank of which nothing is known, that the launcher did not have to end."""
    if cause.trouble == "no-rendezvous":
        return replace(cause, doubt="the logs do not show why the process that holds the store ended")
    if cause.absent:
        return replace(cause, doubt="it is not known how that rank ended")
    ended = {ending.rank for ending in endings}
    gone = sorted(everyone - set(cause.ranks) - ended)
    if len(gone) == 1:
        return replace(cause, absent=tuple(gone), doubt="the logs do not show how that rank left")
    return replace(cause, doubt="the logs show neither which rank left nor why")


def _of_the_first_to_leave(cause: LogCause, endings: Sequence[RankEnding]) -> LogCause:
    """Launchers of several nodes note when each rank had failed: those that did so later follow the first."""
    noted = {ending.rank: ending.time_ns for ending in endings if ending.time_ns}
    if not all(one.rank in noted for one in cause.incidents):
        return cause
    limit_ns = min(noted[one.rank] for one in cause.incidents) + _ROUND_NS
    first = tuple(one for one in cause.incidents if noted[one.rank] <= limit_ns)
    later = tuple(one for one in cause.incidents if noted[one.rank] > limit_ns)
    ranks = tuple(sorted({one.rank for one in first if one.rank is not None}))
    return replace(cause, incidents=first, ranks=ranks, behind=(*cause.behind, *later))


def _of_signal(cause: LogCause, groups: Sequence[tuple[Incident, ...]]) -> LogCause:
    """A SIGKILL and the kernel's word that memory had run out are one."""
    others = [one for group in groups for one in group if one not in cause.incidents]
    if cause.first.kind != "killed-by-kernel":
        return replace(cause, behind=tuple(one for one in others if one.kind == "killed-by-kernel"))
    killed = [one for one in others if one.kind == "signalled" and one.signal == SIGKILL]
    ranks = tuple(sorted({*cause.ranks, *(one.rank for one in killed if one.rank is not None)}))
    return replace(cause, ranks=ranks, behind=tuple(killed))


def _everyone(evidence: LogEvidence, incidents: Sequence[Incident], endings: Sequence[RankEnding]) -> frozenset[int]:
    """All ranks of the job, as far as the logs know."""
    known = {one.rank for one in incidents} | {one.rank for one in endings}
    named = {rank for rank in known if rank is not None}
    named |= {rank for one in incidents for rank in (*one.absent, *one.others)}
    named |= set(evidence.ranks)
    most = max(named, default=-1) + 1
    if evidence.world_size:
        return frozenset(range(max(most, evidence.world_size)))
    # Of a job of which most ranks are known the others are there as well; a lone log may be one of thousands.
    return frozenset(range(most)) if 2 * len(named) > most else frozenset(named)
