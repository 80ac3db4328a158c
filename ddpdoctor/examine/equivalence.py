"""Compares the first steps of the ranks with those of one process on the same samples.

The script is run as its ranks, which keep their samples and gradients, and as one process, which is given the samples
of all of them. Where the gradients are not the same it is run as the ranks again; and where rounding does not explain
it, as one process on the samples of each rank, which show whether the loss or the reduction makes the difference.

One process begins beside the ranks where nothing that it does can reach them, and waits for what they leave: on two
cores that takes as long as the rehearsal itself (1.02 times in ``tests.benchmarks.rehearsal_cost``).
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ddpdoctor.diagnosis.training.equivalence import APART, compare, needs_controls, unclear
from ddpdoctor.diagnosis.training.first_steps import Runs, Step, read_step
from ddpdoctor.diagnosis.wording import site_location
from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.files.untrusted import read_untrusted
from ddpdoctor.finding import Severity, signal_name
from ddpdoctor.launch.rehearsal_plan import time_limit_s
from ddpdoctor.launch.request import Progress, RehearsalRequest
from ddpdoctor.probe.rehearsal.equivalence.feeding import LENGTHS_FILE, OWN
from ddpdoctor.probe.rehearsal.equivalence.named_ranks import PARSED, VALUES_FILE, as_one
from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RunRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.catalogue.run_checks import CheckResult
    from ddpdoctor.examination import RehearsalSection
    from ddpdoctor.monitor.rehearsal import BegunRehearsal

LEAST_S = 5.0
"""Python and torch take so long to start."""
MOST_BYTES = 1 << 26
MESSAGE_CHARACTERS = 160
MOST_VALUES = 4
"""That are tried for the number of ranks, in a few seconds each."""
MEMORY_SHARE = 0.5
"""Of the memory that is free, which ranks and one process may take together: they grow while others run, too."""
_TOKEN = "token"
_LEFT_BY_RANKS = "ranks"
"""In the run directory of one process that began beside them."""
Rehearse = Callable[[RehearsalRequest], RunRecord]
Begin = Callable[[RehearsalRequest], contextlib.AbstractContextManager["BegunRehearsal"]]


class _TimeIsOver(DdpDoctorError):
    """There is not enough left for one more run."""


class Against(msgspec.Struct, frozen=True):
    """Another launch, whose ranks the ranks of a rehearsal are compared with in place of one process."""

    command: str
    request: RehearsalRequest


STEPS_COMPARED = 2
SHARE_OF_LIMIT = 0.2
"""Of the time limit: a rehearsal that took more leaves no time to run the first steps of the script twice, and up to
three more times where they differ."""


def is_compared(
    rehearsed: RehearsalRequest,
    rehearsal: RehearsalSection,
    *,
    wanted: bool | None,
    thorough: bool,
    raised: bool = False,
) -> bool:
    """Return whether a rehearsal is to be compared; ``wanted`` is None for one that is short enough.

    What ends a script behind its first steps, the time limit or what a rank ``raised``, does not keep them from being
    compared; ranks that part do.
    """
    if wanted is not None:
        ended = rehearsal.status == "failed" or not rehearsal.told_by or raised
        return wanted and (rehearsal.status == "completed" or (rehearsal.steps >= STEPS_COMPARED and ended))
    return thorough or rehearsal.seconds <= SHARE_OF_LIMIT * time_limit_s(rehearsed, rehearsed.nproc)


def after_rehearsal(
    rehearsed: RehearsalRequest,
    rehearsal: RehearsalSection,
    record: RunRecord,
    results: Sequence[CheckResult],
    on_progress: Callable[[Progress], None],
    against: Against | None,
    *,
    wanted: bool | None,
    thorough: bool,
) -> EquivalenceSection | None:
    """Compare after a rehearsal and say, where that is ``wanted`` for certain, why it cannot be done; else None."""
    command = against.command if against is not None else ""
    raised = any(rank.exceptions for rank in record.ranks)
    if not is_compared(rehearsed, rehearsal, wanted=wanted, thorough=thorough, raised=raised):
        made = f"the ranks made {rehearsal.steps} of the {STEPS_COMPARED} optimizer steps that are compared"
        why = made if rehearsal.steps < STEPS_COMPARED else "the ranks part in the rehearsal"
        return unclear(why, against=command) if wanted else None
    if why := of_replicas(results):
        return unclear(why, against=command)
    # A port of the host, which jobs with the network share, may be a constant of the script.
    apart = record.job.overlay and not record.job.network and record.job.device != "cuda"
    return compared(rehearsed, on_progress, 0.0 if wanted else rehearsal.seconds, against, apart=apart)


def of_replicas(results: Sequence[CheckResult]) -> str:
    """Return why nothing is compared after a run in which parameters differ between ranks; empty where they are alike.

    The ranks that are compared draw alike, which makes replicas equal that each rank draws for itself. Buffers that
    differ, which is advice or a warning, are compared.
    """
    found = (one for result in results for one in result.from_run if one.name == "diverged-replicas")
    told = next((one for one in found if one.severity is Severity.ERROR), None)
    return f"the ranks train with different parameters, of which {told.code} speaks" if told is not None else ""


def equivalence(
    request: RehearsalRequest,
    rehearse: Rehearse,
    spent_s: float = 0.0,
    against: Against | None = None,
    begin: Begin | None = None,
) -> EquivalenceSection:
    """Compare the ranks of a rehearsal that was completed with one process, in the time that is left of its limit.

    With ``begin`` one process begins beside the ranks.
    """
    started_s = time.monotonic()
    ends_s = started_s + time_limit_s(request, request.nproc) - spent_s
    request = msgspec.structs.replace(request, keep=False, spent_s=0.0)
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-equivalence-") as name:
        try:
            comparison = _Comparison(request, rehearse, begin, Path(name), ends_s)
            section = comparison.made() if against is None else comparison.made_against(against)
        except DdpDoctorError as error:
            section = unclear(error.message)
    if section.kind == "unexplained":
        section = msgspec.structs.replace(section, kind="")
    return msgspec.structs.replace(section, seconds=round(time.monotonic() - started_s, 2))


def compared(
    request: RehearsalRequest,
    on_progress: Callable[[Progress], None],
    spent_s: float,
    against: Against | None = None,
    *,
    apart: bool = False,
) -> EquivalenceSection:
    """Compare on the ranks of real rehearsals, of which the first took so much of the time.

    ``apart``: nothing that jobs do reaches others that run beside them, neither in files nor on a GPU.
    """
    from ddpdoctor.monitor.rehearsal import begun, rehearse

    what = "one process" if against is None else "the other launch"

    def shown(progress: Progress) -> None:
        on_progress(msgspec.structs.replace(progress, phase=f"comparing with {what}: {progress.phase}"))

    beside = apart and not request.spawns_ranks and _fits_beside(request.nproc)
    begin: Begin | None = (lambda one: begun(one, shown)) if beside else None
    return equivalence(request, lambda one: rehearse(one, shown), spent_s, against, begin)


def _fits_beside(ranks: int) -> bool:
    """Return whether one more process fits into memory beside the ranks, by the largest that has ended."""
    import psutil

    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return largest * (ranks + 1) <= MEMORY_SHARE * psutil.virtual_memory().available


class _Comparison:
    def __init__(
        self, request: RehearsalRequest, rehearse: Rehearse, begin: Begin | None, directory: Path, ends_s: float
    ) -> None:
        self._request = request
        self._rehearse = rehearse
        self._begin = begin
        self._directory = directory
        self._ends_s = ends_s
        self._stopped = ""
        """Why the newest run of one process was ended."""
        self._named: Mapping[str, object] | None = None
        """Which value of the script names the number of its ranks; None before the first run of one process."""
        self._gpus = 0
        """That one process is told of where they are pretended; 0 for one, as on a machine for it alone."""

    def made(self) -> EquivalenceSection:
        if self._begin is None:
            return self._made_beside(None)
        expected = list(range(self._request.nproc))
        request = self._in_time(self._request_of_one("one", expected, "joined", {}, begins=True))
        # Without a box, which alone can keep the network away, nothing is started beside the ranks.
        with self._begin(msgspec.structs.replace(request, network=False)) as begun:
            return self._made_beside(begun)

    def _made_beside(self, begun: BegunRehearsal | None) -> EquivalenceSection:
        record, ranks = self._run_ranks("ranks")
        world = len(ranks)
        if world < 2 or not all(ranks):
            return unclear(f"the ranks made no optimizer step when they were run again{_death_in(record)}")
        if len({steps[0].state for steps in ranks}) > 1:
            return unclear(APART)
        lengths = {str(one.loader): one.length for one in record.loaders if one.rank == 0 and one.length}
        (self._directory / "ranks" / LENGTHS_FILE).write_text(json.dumps(lengths), encoding="utf-8")
        one = self._run_one("one", list(range(world)), "joined", begun if world == self._request.nproc else None)
        loaders = any((self._directory / "ranks").glob("samples-*.pickle"))
        # Without a loader the draws of the ranks are put together: what a script makes of each may then not fit.
        unlike = not loaders and (not one or any(step.unmatched_draws for step in one))
        in_turn = self._stopped == "exhausted" or unlike
        if in_turn:
            one = self._run_one("in-turn", list(range(world)), "in-turn")
        if not one:
            return unclear(self._stopped or "started as one process the script makes no optimizer step")
        runs = Runs(ranks=tuple(ranks), one=one, cuts=tuple(_cuts(record)), has_loaders=loaders, in_turn=in_turn)
        section = compare(runs)
        if needs_controls(section) and not in_turn:
            runs = msgspec.structs.replace(runs, again=tuple(self._run_ranks("again")[1]))
            section = compare(runs)
        if needs_controls(section):
            alone = tuple(self._run_one(f"alone-{rank}", [rank], "joined") for rank in range(world))
            if not all(alone):
                return unclear(f"{section.reason}, and one process does not train on the samples of one rank")
            section = compare(msgspec.structs.replace(runs, alone=alone))
        return msgspec.structs.replace(section, in_turn=in_turn)

    def made_against(self, against: Against) -> EquivalenceSection:
        """Compare with the ranks of another launch; each gets the samples of the rank with its number, or those of all
        where all its ranks read the same.
        """
        record, ranks = self._run_ranks("ranks")
        world, others = len(ranks), against.request.nproc
        if not all(ranks):
            return unclear("the ranks made no optimizer step when they were run again", against=against.command)
        if others not in (1, world):
            reason = f"the launches have {world} and {others} ranks, and a batch cannot be divided"
            return unclear(reason, against=against.command)
        everybody = list(range(world))
        other = self._run_other("other", against, OWN if others > 1 else everybody)
        divides, shares = (len({steps[0].drawn for steps in side if steps}) for side in (ranks, other))
        if others > 1 and divides > shares == 1:
            other = self._run_other("other-whole", against, everybody)
        if not all(other):
            reason = self._stopped or "the other launch makes no optimizer step"
            return unclear(reason.replace("as one process", "by the other command"), against=against.command)
        runs = Runs(
            ranks=tuple(ranks),
            one=other[0],
            others=tuple(other[1:]),
            cuts=tuple(_cuts(record)),
            has_loaders=any((self._directory / "ranks").glob("samples-*.pickle")),
            against=against.command,
        )
        section = compare(runs)
        if needs_controls(section):
            section = compare(msgspec.structs.replace(runs, again=tuple(self._run_ranks("again")[1])))
        return section

    def _run_other(self, name: str, against: Against, ranks: list[int] | str) -> list[tuple[Step, ...]]:
        kept = self._directory / name
        kept.mkdir()
        plan = {"as": name, "ranks": ranks, "feed": "joined", "from": str(self._directory / "ranks")}
        record = self._timed(msgspec.structs.replace(against.request, equivalence=plan, first_steps=kept))
        self._stopped = _stopped(kept) or _refusal(record)
        return [_steps(kept, rank) for rank in range(max(1, record.job.world_size))]

    def _run_ranks(self, name: str) -> tuple[RunRecord, list[tuple[Step, ...]]]:
        kept = self._directory / name
        kept.mkdir()
        record = self._timed(msgspec.structs.replace(self._request, equivalence={"as": name}, first_steps=kept))
        return record, [_steps(kept, rank) for rank in range(record.job.world_size)]

    def _timed(self, request: RehearsalRequest) -> RunRecord:
        return self._rehearse(self._in_time(request))

    def _in_time(self, request: RehearsalRequest) -> RehearsalRequest:
        left_s = self._ends_s - time.monotonic()
        if left_s < LEAST_S:
            raise _TimeIsOver("the time limit leaves no time for one more run")
        return msgspec.structs.replace(request, time_limit_s=left_s)

    def _run_one(self, name: str, ranks: list[int], feed: str, begun: BegunRehearsal | None = None) -> tuple[Step, ...]:
        """Run one process on the samples of these ranks, or let one that has begun go on; if need be, once for each
        value that may name their number.
        """
        steps, kept, record = self._started_once(name, ranks, feed, self._named or {}, begun)
        first = self._named is None
        self._named = self._named or {}
        asked = max((record.job.world_size, *(wait.ranks_asked for wait in record.waits)))
        if steps or not first:
            return steps
        stopped = self._stopped
        if asked < 2:
            self._gpus = self._request.gpus_per_node or self._request.nproc // self._request.nodes
            if record.job.device == "stand-in" and self._gpus > 1 and not _stopped(kept):
                # A script that is made for several GPUs may refuse to start where it sees one.
                steps, _, _ = self._started_once(f"{name}-of-several-gpus", ranks, feed, {})
            if not steps:
                self._gpus, self._stopped = 0, stopped
            return steps
        for number, value in enumerate(_values(kept, self._request, asked)):
            named = {"value": value, "ranks": asked}
            steps, _, _ = self._started_once(f"{name}-{number}", ranks, feed, named)
            if steps:
                self._named = named
                return steps
        self._stopped = stopped
        return ()

    def _started_once(
        self,
        name: str,
        ranks: list[int],
        feed: str,
        named: Mapping[str, object],
        begun: BegunRehearsal | None = None,
    ) -> tuple[tuple[Step, ...], Path, RunRecord]:
        kept = self._directory / name
        if begun is None:
            record = self._timed(self._request_of_one(name, ranks, feed, named))
        else:
            made = begun.directory / f"{_LEFT_BY_RANKS}.part"
            shutil.copytree(self._directory / "ranks", made)
            made.rename(begun.directory / _LEFT_BY_RANKS)
            record = begun.finish()
        self._stopped = _stopped(kept) or _refusal(record)
        return (() if record.job.world_size > 1 else _steps(kept, 0)), kept, record

    def _request_of_one(
        self, name: str, ranks: list[int], feed: str, named: Mapping[str, object], *, begins: bool = False
    ) -> RehearsalRequest:
        """``begins``: before the ranks have left anything, so that it waits for that in its own run directory."""
        kept = self._directory / name
        kept.mkdir(exist_ok=True)
        plan = {
            "as": name,
            "ranks": ranks,
            "feed": feed,
            "from": _LEFT_BY_RANKS if begins else str(self._directory / "ranks"),
            "named": named,
        }
        request = msgspec.structs.replace(
            self._request,
            nproc=1,
            nodes=1,
            gpus_per_node=self._gpus,
            spawned_ranks=0,
            equivalence=plan,
            first_steps=kept,
        )
        source, _, position = str(named.get("value", "")).partition(" ")
        if source == _TOKEN:
            arguments = list(request.arguments)
            arguments[int(position)] = as_one(arguments[int(position)], int(str(named["ranks"])))
            request = msgspec.structs.replace(request, arguments=tuple(arguments))
        return request


def _values(directory: Path, request: RehearsalRequest, ranks: int) -> list[str]:
    """Return the values of a script that may be its number of ranks: what it parsed its arguments to, and spawns with;
    the arguments as they are written where nothing parsed them.
    """
    try:
        lines = read_untrusted(directory / VALUES_FILE, MOST_BYTES, directory).splitlines()
        rows = [row for row in map(json.loads, lines) if isinstance(row, list) and len(row) == 3]
    except (OSError, ValueError):
        rows = []
    found = {f"{source} {name}": None for source, name, value in rows if as_one(value, ranks) is not None}
    if not any(source == PARSED for source, _, _ in rows):
        tokens = (n for n, text in enumerate(request.arguments) if as_one(text, ranks) is not None)
        found.update({f"{_TOKEN} {number}": None for number in tokens})
    return list(found)[:MOST_VALUES]


def _stopped(directory: Path) -> str:
    """Return why the probe ended one process; empty where it did not."""
    try:
        return read_untrusted(directory / "stopped.txt", MESSAGE_CHARACTERS, directory).decode("utf-8", "replace")
    except OSError:
        return ""


def _refusal(record: RunRecord) -> str:
    """Return why a script makes no step as one process; empty where nothing says so."""
    ranks = max((record.job.world_size, *(wait.ranks_asked for wait in record.waits)))
    if ranks > max(1, record.job.ranks_expected):
        return f"started as one process the script creates a group of {ranks} ranks"
    exceptions = (*record.job.early_exceptions, *(raised for rank in record.ranks for raised in rank.exceptions))
    raised = next(iter(exceptions), None)
    if raised is not None:
        return f"started as one process the script fails: {raised.type}: {headline(raised)[:MESSAGE_CHARACTERS]}"
    return record.job.stop_text


def _death_in(record: RunRecord) -> str:
    """Return which rank was killed, and what its abort printed, or what one raised; empty where none was or did."""
    killed = next((rank for rank in record.ranks if rank.signal), None)
    if killed is None or killed.signal is None:
        for number, raised in ((rank.rank, one) for rank in record.ranks for one in rank.exceptions):
            return f": rank {number} raised {raised.type}: {headline(raised)[:MESSAGE_CHARACTERS]}"
        return ""
    said = re.search(r"what\(\):\s*(.+)", record.job.output_tail)
    why = f" ({said[1].strip()[:MESSAGE_CHARACTERS]})" if said is not None else ""
    return f": rank {killed.rank} was killed by {signal_name(killed.signal)}{why}"


def _steps(directory: Path, rank: int) -> tuple[Step, ...]:
    """Return the steps that a process has kept, up to the first that is missing or damaged."""
    found: list[Step] = []
    while True:
        name = directory / f"step-{rank}-{len(found)}"
        try:
            head = json.loads(read_untrusted(name.with_suffix(".json"), MOST_BYTES, directory))
            numbers = array("f", read_untrusted(name.with_suffix(".numbers"), MOST_BYTES, directory))
            step = read_step(head, numbers)
            with contextlib.suppress(OSError):  # The last step of a run is not made to its end.
                beside = json.loads(read_untrusted(name.with_suffix(".beside"), MOST_BYTES, directory))
                held = {str(what): [float(value) for value in values] for what, values in beside.items()}
                step = msgspec.structs.replace(step, beside=held)
            found.append(step)
        except (OSError, ValueError, KeyError, TypeError):
            return tuple(found)


def _cuts(record: RunRecord) -> Iterator[tuple[str, str, int]]:
    """Yield the gathers that end a graph on rank 0."""
    places: dict[tuple[str, str, int], None] = {}
    for cut in record.cut_graphs:
        place = site_location(record.site(cut.site))
        if cut.rank == 0 and place is not None:
            places[cut.kind, place.file, place.line] = None
    yield from places
