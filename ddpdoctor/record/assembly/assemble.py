"""Makes a ``RunRecord`` of the events and rings of a run directory."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from ddpdoctor.record import events
from ddpdoctor.record.assembly.completeness import Completeness, PassRows, second_claims
from ddpdoctor.record.assembly.live import LiveRings
from ddpdoctor.record.assembly.ranks import EarlyEvents, RankBook, forget
from ddpdoctor.record.events import Ended, Event, Row, frames_of, tag_of, typed
from ddpdoctor.record.joining import SITES
from ddpdoctor.record.model import STREAMS, Job, RunRecord, Site, StopReason, StreamState, Wrap, shared_fields
from ddpdoctor.record.reader import RunFiles
from ddpdoctor.record.streams.collectives import CollectiveTrack, Group, Signature, Wait
from ddpdoctor.record.streams.measured import Gauge
from ddpdoctor.record.streams.setup import LinesExecuted, StackDump
from ddpdoctor.record.streams.training import FileEvent, MissingGradient, Pass, TrainingState

# Makes the stream of executed lines of what the ranks wrote about them.


class LineRows:
    """Takes in the events of one run; the same line may come more than once."""

    def __init__(self, rank_of: Callable[[int], int | None]) -> None:
        self._rank_of = rank_of
        self._lines: dict[tuple[int, str], set[int]] = {}
        self._unwatched: dict[tuple[int, str], set[int]] = {}
        self._by_chance: dict[tuple[int, str], set[int]] = {}
        self._begun: set[int] = set()
        self._late: set[int] = set()
        self._lost = ""

    def rows(self) -> tuple[LinesExecuted, ...]:
        """Return the lines by rank and file."""
        found: dict[tuple[int, str], LinesExecuted] = {}
        for (pid, file), lines in self._lines.items():
            rank = self._rank_of(pid)
            if rank is not None:
                # A script that spawns its ranks twice has two processes for each.
                other = found.get((rank, file), LinesExecuted(rank=rank, file=file))
                found[rank, file] = LinesExecuted(
                    rank=rank,
                    file=file,
                    lines=other.lines | lines,
                    unwatched=other.unwatched | self._unwatched.get((pid, file), set()),
                    by_chance=other.by_chance | self._by_chance.get((pid, file), set()),
                    late=other.late or pid in self._late,
                )
        return tuple(found[key] for key in sorted(found))

    def state(self) -> StreamState:
        """Return whether every line is known from where training began."""
        if self._lost:
            return StreamState("truncated", self._lost)
        return StreamState("complete") if self._begun else StreamState("absent", "no rank reached its training")

    def on_begun(self, pid: int, event: events.LinesBegun) -> None:
        """Take in that the lines of a process are noted from now on."""
        self._begun.add(pid)
        if event.late:
            self._late.add(pid)

    def on_lines(self, pid: int, event: events.Lines) -> None:
        """Take in executed lines."""
        key = (pid, event.file)
        new = set(event.lines) - self._lines.get(key, set())
        self._lines.setdefault(key, set()).update(new)
        if event.by_chance:
            self._by_chance.setdefault(key, set()).update(new)
        self._unwatched.setdefault(key, set()).update(event.unwatched)

    def on_lost(self, pid: int, event: events.LinesLost) -> None:
        """Take in that lines are noted no longer."""
        self._lost = self._lost or event.reason


# Makes the stream of waits in the store of what the ranks wrote when they began and ended.

MOST_WAITS = 2_000
"""From there on those that are over are dropped, oldest first: a job may make groups for weeks."""


class WaitRows:
    """Takes in the events of one run; a process that waits for its world may get its rank later."""

    def __init__(self, rank_of: Callable[[int], int | None], site_of: Callable[[int, object], int]) -> None:
        self._rank_of = rank_of
        self._site_of = site_of
        self.rows: dict[tuple[int, int], Wait] = {}
        """By process and number there."""

    def ranked(self) -> tuple[Wait, ...]:
        """Return the waits, with the ranks that their processes are by now."""
        return tuple(
            msgspec.structs.replace(wait, rank=_rank(self._rank_of(pid))) for (pid, _), wait in self.rows.items()
        )

    def on_begun(self, pid: int, event: events.WaitBegun) -> None:
        """Take in that a wait has begun."""
        place = {"rank": _rank(self._rank_of(pid)), "site": self._site_of(pid, event.site), "started_ns": event.time_ns}
        self.rows[pid, event.number] = Wait(**shared_fields(event, Wait) | place)

    def on_led(self, pid: int, event: events.Led) -> None:
        """Take in that the newest wait of a process was led elsewhere."""
        key = max(key for key in self.rows if key[0] == pid)  # led while it waits
        told = {"led_from": event.address, "ranks_asked": event.ranks, "rank_taken": event.rank}
        known = {name: value for name, value in told.items() if value is not None}
        self.rows[key] = msgspec.structs.replace(self.rows[key], **known)

    def on_ended(self, pid: int, event: events.WaitEnded) -> None:
        """Take in that a wait is over."""
        key = (pid, event.number)
        self.rows[key] = msgspec.structs.replace(
            self.rows[key], ended_ns=event.time_ns, error=event.error, mentions_cuda=event.mentions_cuda
        )
        if len(self.rows) > MOST_WAITS:
            over = [key for key, wait in self.rows.items() if wait.ended_ns and not wait.error]
            for key in over[: len(over) // 2]:
                del self.rows[key]


def _rank(rank: int | None) -> int:
    return -1 if rank is None else rank


# Says why a rank ended its rehearsal before it had shown enough.


def ending_of(event: Ended, rank: int) -> tuple[StopReason, str]:
    """Return the reason in an event of an ending of ours, and the sentence for the user; ``rank`` is -1 for none."""
    reason, text = event.reason, event.text
    if reason in ("slow", "memory", "rendezvous"):
        return reason, text  # type: ignore[return-value]
    said = text.strip().partition("\n")[0]
    tail = f": {said}" if said else ""
    place = f"{Path(event.frames[0][0]).name}:{event.frames[0][1]}" if event.frames else "the script"
    who = f"rank {rank}" if rank >= 0 else "the script"
    if reason == "cut":
        return "cut", f"{place} requests more batches from a loader than the shortened pass has"
    if reason == "perhaps-cut":
        may_be = "it came right after a pass that the rehearsal had shortened, which may be the cause"
        return "cut", f"{who} raised {event.type} at {place}{tail}; {may_be}"
    if reason == "stand-in":
        return "stand-in", f"the CUDA stand-in could not serve {place}: rank {rank} raised {event.type}{tail}"
    if reason == "overlay":
        text = f"{place} changes what an overlay of this user cannot cover"
        return "overlay", f"{text}: {who} raised {event.type}{tail}"
    return "", ""


# Puts together what the ranks' optimizers, schedulers and scalers held at the first step with what was loaded.


class StateRows:
    """Takes in the events; a load that comes after the state was taken down is a late one."""

    def __init__(self, converted: Callable[[int, Row, type[Any]], Any], site_of: Callable[[int, object], int]) -> None:
        self._converted = converted
        self._site_of = site_of
        self._states: dict[tuple[int, str, int], TrainingState] = {}
        self._early: dict[tuple[int, str, int], list[int]] = {}
        self._late: dict[tuple[int, str, int], list[int]] = {}

    def rows(self) -> tuple[TrainingState, ...]:
        """Return what was held at the first step, with the loads that came before and after it."""
        return tuple(
            msgspec.structs.replace(
                state, loads=tuple(self._early.get(key, ())), late_loads=tuple(self._late.get(key, ()))
            )
            for key, state in self._states.items()
        )

    def on_state(self, pid: int, event: Row) -> None:
        """Take in what something held at the first step."""
        state = self._converted(pid, event, TrainingState)
        self._states[pid, state.kind, state.number] = state

    def on_loaded(self, pid: int, event: events.StateLoaded) -> None:
        """Take in that something was loaded."""
        key = (pid, event.kind, event.number)
        loads = self._late if key in self._states else self._early
        loads.setdefault(key, []).append(self._site_of(pid, event.site))


_PUT_TOGETHER = (
    "ranks", "groups", "waits", "wraps", "passes", "collectives", "missing_gradients", "training_states", "files",
    "stacks", "lines", "step_tracks", "call_tracks", "gpus", "host_uses", "equivalence",
)  # fmt: skip
"""Streams of which a row is made of several events, or of none; in the others each event is a row."""
_OF_CHILDREN = (
    "seedings", "random_states", "parts", "holdings", "settings", "accesses", "device_uses", "device_choices",
    "checkpoint_loads", "state_names", "forked_uses", "endless_loops", "cpu_threads", "optimizer_sizes",
    "bucket_layouts", "gauges", "host_reads", "looks", "tensor_reads", "replica_digests", "resume_steps",
    "unused_searches", "unfollowed_forwards",
)  # fmt: skip
"""Those of what counts in a process that works for a rank, too: its row is the rank's."""
_NAMED_OTHERWISE = {
    "buffers": "buffers",
    "gradient_digests": "gradient_digests",
    "parameter_digests": "parameter_digests",
    "made_parameters": "parameters_made",
    "nonfinites": "nonfinite",
    "checkpoint_loads": "checkpoint_loaded",
    "looks": "looked",
}
"""Streams whose events are not called after the type of their rows."""


@cache
def _row_streams() -> Mapping[str, tuple[str, type[Any]]]:
    """Return stream and type of the rows that are an event each, by its name."""
    hints = get_type_hints(RunRecord)
    kinds = {stream: get_args(hints[stream])[0] for stream in STREAMS if stream not in _PUT_TOGETHER}
    return {_NAMED_OTHERWISE.get(stream) or tag_of(kind.__name__): (stream, kind) for stream, kind in kinds.items()}


@cache
def row_types() -> Mapping[str, type[Any]]:
    """Return the type of each row by the name of its event; that of a stream's rows is what ``RunRecord`` says."""
    listed = {name: kind for name, (_, kind) in _row_streams().items()}
    return {**listed, "signature": Signature, "wrap": Wrap, "pass_begun": Pass, "training_state": TrainingState}


MOST_FAULTS = 1_000
MOST_STACKS = 2_000
"""From there on only the newest of each thread are kept: a watched job may be asked for weeks."""


class Assembly:
    """Takes in events as they come; hands out a record of what is known so far."""

    def __init__(self, directory: Path, without: Set[int] = frozenset()) -> None:
        """Processes in ``without`` are left out."""
        self._directory = directory
        self.files = RunFiles(directory, without)
        self.book = RankBook()
        self.faults: list[str] = []
        """What the probe said of its own faults."""
        self.ending: tuple[StopReason, str] = ("", "")
        """Why a rank ended itself before it had shown enough, and the sentence for the user."""
        self.live = LiveRings(directory, self.book.rank_of, self._number)
        self._completeness = Completeness(self.files, self.book, self.live)
        self.asked: dict[str, tuple[str, int]] = {}
        """Addresses that the job asked for, with the line that did."""
        self.served: dict[str, tuple[str, int]] = {}
        """Those that it listens on itself."""
        self.pretended: dict[str, None] = {}
        self.refusal: str = ""
        """Sentence of the first thing that the no-touch rule refused."""
        self.stressed = False
        """The injected cause took effect."""
        self._sites: dict[Site, int] = {}
        self._signatures: dict[Signature, int] = {}
        self._groups: dict[Group, int] = {}
        self._local: dict[tuple[int, str, int], int] = {}
        """(process, kind, number there) -> number here."""
        self._group_counts: dict[tuple[int, tuple[int, ...]], int] = {}
        of_several = ("missing_gradients", "files", "stacks")
        self._rows: dict[str, list[Any]] = {name: [] for name in (*dict(_row_streams().values()), *of_several)}
        self._gauges: dict[tuple[int, str], Gauge] = {}
        """The newest of each rank and name."""
        self._wraps: dict[tuple[int, int], Wrap] = {}
        self._missing: dict[tuple[int, int], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._waits = WaitRows(self.book.rank_of, self._site)
        self._passes = PassRows(directory, self.book.rank_or_parent, self._converted)
        self._states = StateRows(self._converted, self._site)
        self._early = EarlyEvents(row_types().keys() - {"signature", "wrap"})
        self._lines = LineRows(self.book.rank_of)
        self._row_handlers: Mapping[str, Callable[[int, Row], None]] = {
            "signature": self._on_signature,
            "wrap": self._on_wrap,
            "pass_begun": self._passes.on_begun,
            "training_state": self._states.on_state,
            **dict.fromkeys(_row_streams(), self._on_row),
        }
        self._handlers: Mapping[type[Event], Callable[[int, Any], None]] = {
            events.Site: self._on_site,
            events.Group: self._on_group,
            events.WaitBegun: self._waits.on_begun,
            events.WaitEnded: self._waits.on_ended,
            events.Led: self._waits.on_led,
            events.DatasetSample: self._passes.on_sample,
            events.PassEnded: self._passes.on_ended,
            events.PassTrained: self._passes.on_trained,
            events.PassProgress: self._passes.on_progress,
            events.MissingGradients: self._on_missing,
            events.StateLoaded: self._states.on_loaded,
            events.LinesBegun: self._lines.on_begun,
            events.Lines: self._lines.on_lines,
            events.LinesLost: self._lines.on_lost,
            events.Stack: self._on_stack,
            events.Flight: self.live.flights.take,
        }

    @property
    def has_gaps(self) -> bool:
        """Part of what the ranks wrote is missing: of a live run no one may conclude what a rank has not called."""
        return self._completeness.has_gaps

    def poll(self) -> None:
        """Take in what was written since the last call."""
        self.live.poll(self.files.find_processes())
        for pid, fields in self.files.poll():
            try:
                self._take(pid, typed(fields))
            except (KeyError, TypeError, ValueError) as error:  # msgspec's ValidationError is a ValueError
                fault = f"event {fields['event']} of process {pid} could not be read: {error!r}"
                if not self.files.shortened:
                    # Of a truncated file two lines may be read as one, which is no fault of the observation.
                    self._note_fault(fault)
                self._completeness.unread(fault)

    def _take(self, pid: int, event: Event | Row) -> None:
        if self.book.is_reborn(pid, event):  # It numbers all things from the beginning again.
            self.live.flights.forget(pid)
            forget(
                pid, self._local, self._group_counts, self._wraps, self._passes.rows, self._waits.rows, self._missing
            )
        self.book.take(pid, event)
        for due in self._early.due(pid, event, is_rank=self.book.rank_or_parent(pid) is not None):
            if isinstance(due, Row):
                if handle_row := self._row_handlers.get(due.kind):
                    handle_row(pid, due)
            elif handle := self._handlers.get(type(due)):
                handle(pid, due)
            else:
                self._note(pid, due)

    def take_over(self, former: Assembly) -> None:
        """Take over what an assembly knew of the whole job, whose ranks this one leaves out."""
        self.faults = list(dict.fromkeys((*former.faults, *self.faults)))
        self.asked = former.asked | self.asked
        self.served |= former.served
        self.pretended |= former.pretended
        self.refusal = former.refusal or self.refusal
        self.stressed = former.stressed or self.stressed
        if former.ending[0]:
            self.ending = former.ending

    def record(self, job: Job) -> RunRecord:
        """Return the record of what is known so far."""
        paired = job.kind != "run" or not self.has_gaps
        rows: dict[str, Any] = {name: tuple(found) for name, found in self._rows.items()}
        rows |= {"loaders": self._passes.with_samples(self._rows["loaders"]), "gauges": tuple(self._gauges.values())}
        doubles = second_claims(self.book)
        return RunRecord(
            job=job,
            sites=tuple(self._sites),
            signatures=tuple(self._signatures),
            streams=self._completeness.states(self._lines.state(), job.kind),
            ranks=self.book.ranks(
                *self._heartbeats(), without=doubles, last_signs=self.live.last_signs() if job.kind == "run" else None
            ),
            groups=tuple(self._groups),
            waits=self._waits.ranked() if paired else (),
            wraps=tuple(self._wraps.values()),
            passes=tuple(self._passes.rows.values()),
            collectives=self._tracks(doubles) if paired else (),
            training_states=self._states.rows(),
            lines=self._lines.rows(),
            step_tracks=self.live.step_tracks(),
            call_tracks=self.live.call_tracks() if paired else (),
            heartbeats=self.live.heartbeats(),
            nodes=self.book.nodes(),
            **rows,
        )

    def _tracks(self, without: Container[int]) -> tuple[CollectiveTrack, ...]:
        tracks = []
        for pid, ring in self.files.rings.items():
            rank = self.book.rank_of(pid)
            if rank is None or pid in without:
                continue
            columns = {name: column[:] for name, column in ring.columns.items()}
            for name in ("group", "signature", "site", "forward_site"):
                columns[name] = self.live.translated(pid, name.removeprefix("forward_"), columns[name])
            tracks.append(CollectiveTrack(rank=rank, **columns))
        return tuple(sorted(tracks, key=lambda track: track.rank)) or self.live.collectives()

    def _heartbeats(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the row that each process waits in, and the end of the sleep that it is in."""
        waiting, sleeping = self.live.waiting_rows(), self.live.sleeping()
        for pid, ring in self.files.rings.items():
            beat = ring.heartbeat()
            waiting[pid] = ring.position(beat.waiting_row)  # It may be newer than the rows that were read.
            sleeping[pid] = beat.sleeps_until_ns
        return waiting, sleeping

    def _number(self, pid: int, kind: str, number: int) -> int:
        return self._local.get((pid, kind, number), -1)

    def _site(self, pid: int, number: object) -> int:
        return self._local.get((pid, "site", number), -1) if isinstance(number, int) else -1

    def _rank(self, pid: int) -> int:
        return _rank(self.book.rank_of(pid))

    def _on_site(self, pid: int, event: events.Site) -> None:
        site = Site(frames_of(event.frames))
        self._local[pid, "site", event.number] = self._sites.setdefault(site, len(self._sites))

    def _on_signature(self, pid: int, event: Row) -> None:
        fields = {name: event.fields[name] for name in Signature.__struct_fields__ if name in event.fields}
        number = self._signatures.setdefault(msgspec.convert(fields, Signature), len(self._signatures))
        self._local[pid, "signature", event.fields["number"]] = number

    def _on_group(self, pid: int, event: events.Group) -> None:
        ordinal = self._group_counts.get((pid, event.ranks), 0)
        self._group_counts[pid, event.ranks] = ordinal + 1
        group = Group(ordinal=ordinal, **shared_fields(event, Group))
        self._local[pid, "group", event.number] = self._groups.setdefault(group, len(self._groups))

    def _on_wrap(self, pid: int, event: Row) -> None:
        wrap = self._converted(pid, event, Wrap)
        self._wraps[pid, wrap.wrap] = wrap

    def _note(self, pid: int, event: Event) -> None:
        """Take in what is no row and numbers nothing: files, faults of the record, and what holds of the whole job."""
        match event:
            case events.File():
                self._file(pid, event, action=event.action, path=event.path, existed=event.existed, detail=event.detail)
            case events.Refused():
                at = self._site(pid, event.site)
                frame = next((site.innermost for site, number in self._sites.items() if number == at), None)
                place = f"{Path(frame.file).name}:{frame.line}" if frame else "the script"
                self.refusal = self.refusal or f"{place} {event.text}"
                self._file(pid, event, action="refused", path=event.path, detail=event.text)
            case events.CommunicationHook():
                key = (pid, event.wrap)
                self._wraps[key] = msgspec.structs.replace(self._wraps[key], communication_hook=True)
            case events.Stressed():
                self.stressed = True
            case events.Ended():
                self.ending = self.ending if self.ending[0] else ending_of(event, self._rank(pid))
            case events.ProbeFault():
                self._note_fault(f"process {pid}: {event.where}: {event.text}")
                self._completeness.part_failed(event.text, STREAMS if event.harms is None else event.harms)
            case events.Lost():
                self._completeness.lost(pid, event.events)
            case events.Network():
                (self.served if event.serves else self.asked).setdefault(event.address, (event.file, event.line))
            case events.Pretended():
                self.pretended.setdefault(event.what)
            case events.MissingCapability():
                self.live.lacks[event.name] = event.cost

    def _on_row(self, pid: int, event: Row) -> None:
        (stream, kind), rank = _row_streams()[event.kind], self.book.rank_or_parent(pid)
        if stream not in _OF_CHILDREN:
            self._rows[stream].append(self._converted(pid, event, kind))
        elif rank is not None:
            row = self._converted(pid, event, kind, rank)
            if isinstance(row, Gauge):
                self._gauges[rank, row.name] = row
            else:
                self._rows[stream].append(row)

    def _converted(self, pid: int, event: Row, kind: type[Any], rank: int | None = None) -> Any:
        """Return an event as a struct of the record, with the record's own numbers for rank and call chains."""
        names = kind.__struct_fields__
        fields = {name: event.fields[name] for name in names if name in event.fields}
        fields["rank"] = self._rank(pid) if rank is None else rank
        if "site" in names and rank is None:
            fields["site"] = event.fields["site"]  # An event without one is damaged.
        fields |= {name: self._site(pid, event.fields.get(name)) for name in SITES.intersection(names)}
        return msgspec.convert(fields, kind)

    def _on_missing(self, pid: int, event: events.MissingGradients) -> None:
        key = (pid, event.wrap)
        if event.parameters is not None:
            self._missing[key] = event.parameters, event.local or ()
        parameters, local = self._missing.get(key, ((), ()))
        at = {"rank": self._rank(pid), "site": self._site(pid, event.site), "wrap": event.wrap}
        self._rows["missing_gradients"].append(MissingGradient(**at, parameters=parameters, local=local))

    def _file(self, pid: int, event: events.File | events.Refused, **fields: Any) -> None:
        rank, site = _rank(self.book.rank_or_parent(pid)), self._site(pid, event.site)
        self._rows["files"].append(FileEvent(rank=rank, site=site, time_ns=event.time_ns, **fields))

    def _on_stack(self, pid: int, event: events.Stack) -> None:
        stacks = self._rows["stacks"]
        own = {"rank": self._rank(pid), "frames": frames_of(event.frames)}
        stacks.append(StackDump(**shared_fields(event, StackDump) | own))
        if len(stacks) > MOST_STACKS:
            self._rows["stacks"] = list({(dump.rank, dump.thread): dump for dump in stacks}.values())

    def _note_fault(self, fault: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(fault)
