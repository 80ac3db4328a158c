"""Makes a ``RunRecord`` of the events and rings of a run directory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from ddpdoctor.finding import Frame
from ddpdoctor.record.assembly.completeness import Completeness
from ddpdoctor.record.assembly.lines import LineRows
from ddpdoctor.record.assembly.live import LiveRings
from ddpdoctor.record.assembly.pre_rank_events import EarlyEvents
from ddpdoctor.record.assembly.ranks import RankBook, exception_of, forget
from ddpdoctor.record.assembly.restarts import second_claims
from ddpdoctor.record.assembly.states import StateRows
from ddpdoctor.record.assembly.stop_reasons import ending_of
from ddpdoctor.record.model import (
    STREAMS,
    CollectiveTrack,
    Group,
    Job,
    RankException,
    RunRecord,
    Signature,
    Site,
    StopReason,
    Wrap,
)
from ddpdoctor.record.reader import RunFiles
from ddpdoctor.record.streams.data import Loader, Pass, SampleProbe
from ddpdoctor.record.streams.files import FileEvent
from ddpdoctor.record.streams.measured import Gauge
from ddpdoctor.record.streams.stacks import StackDump
from ddpdoctor.record.streams.training import (
    MissingGradient,
    WrapChange,
)
from ddpdoctor.record.streams.waits import Wait

_ROWS = {
    "wrap_change": "wrap_changes",
    "loader": "loaders",
    "forward": "forwards",
    "backward": "backwards",
    "optimizer_step": "optimizer_steps",
    "buffers": "buffers",
    "gradient_digests": "gradient_digests",
    "parameter_digests": "parameter_digests",
    "gradients_taken": "gradients_taken",
    "unheld_parameters": "unheld_parameters",
    "written_averages": "written_averages",
    "reduced_loss": "reduced_losses",
    "outsider_call": "outsider_calls",
}
"""Events that become a row of a stream as they are, and the stream."""
_OF_CHILDREN = {
    "seeding": "seedings",
    "random_state": "random_states",
    "part": "parts",
    "holding": "holdings",
    "setting": "settings",
    "access": "accesses",
    "device_use": "device_uses",
    "device_choice": "device_choices",
    "checkpoint_loaded": "checkpoint_loads",
    "state_names": "state_names",
    "forked_use": "forked_uses",
    "cpu_threads": "cpu_threads",
    "optimizer_size": "optimizer_sizes",
    "bucket_layout": "bucket_layouts",
    "gauge": "gauges",
    "matmul_precision": "matmul_precisions",
    "host_read": "host_reads",
    "tensor_read": "tensor_reads",
    "unused_search": "unused_searches",
}
"""The same of what counts in a process that works for a rank, too: its row is the rank's."""
_LISTED = frozenset({*_ROWS.values(), *_OF_CHILDREN.values(), "missing_gradients", "files", "stacks"})
"""Streams that are lists of rows."""
_SITES = frozenset({"site", "sampler_site", "backward_site"})
"""Fields that number a call chain."""


@cache
def _row_types() -> dict[str, type[Any]]:
    """Return what the rows of each stream are, as ``RunRecord`` says."""
    return {name: get_args(hint)[0] for name, hint in get_type_hints(RunRecord).items() if name in _LISTED}


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
        self.hosts: dict[str, None] = {}
        """Other machines that the script spoke to."""
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
        self._rows: dict[str, list[Any]] = {name: [] for name in _LISTED}
        self._gauges: dict[tuple[int, str], Gauge] = {}
        """The newest of each rank and name."""
        self._samples: list[tuple[int, str, int, SampleProbe]] = []
        self._wraps: dict[tuple[int, int], Wrap] = {}
        self._passes: dict[tuple[int, int], Pass] = {}
        self._waits: dict[tuple[int, int], Wait] = {}
        self._missing: dict[tuple[int, int], tuple[str, ...]] = {}
        self._states = StateRows(self._converted, self._site)
        self._early = EarlyEvents((*_ROWS, *_OF_CHILDREN))
        self._lines = LineRows(self.book.rank_of)
        self._handlers: Mapping[str, Callable[[int, dict[str, Any]], None]] = {
            "site": self._on_site,
            "signature": self._on_signature,
            "group": self._on_group,
            "wait_begun": self._on_wait_begun,
            "wait_ended": self._on_wait_ended,
            "led": self._on_led,
            "wrap": self._on_wrap,
            "communication_hook": self._on_communication_hook,
            "late_batch_norms": self._on_late_batch_norms,
            "sample": self._on_sample,
            "pass_begun": self._on_pass_begun,
            "pass_ended": self._on_pass_ended,
            "pass_trained": self._on_pass_trained,
            "pass_progress": self._on_pass_progress,
            "missing_gradients": self._on_missing,
            "file": self._on_file,
            "child": self._on_child,
            "refused": self._on_refused,
            "ended": self._on_ended,
            "stressed": self._on_stressed,
            "stack": self._on_stack,
            "probe_fault": self._on_fault,
            **self._states.handlers,
            **self._lines.handlers,
            **dict.fromkeys(_ROWS, self._on_row),
            **dict.fromkeys(_OF_CHILDREN, self._on_row_of_child),
            "lost": self._on_lost,
            "network": lambda pid, event: self.hosts.setdefault(str(event["host"])),
            "pretended": lambda pid, event: self.pretended.setdefault(str(event["what"])),
            **self.live.handlers,
        }

    @property
    def has_gaps(self) -> bool:
        """Part of what the ranks wrote is missing: of a live run nobody may conclude what a rank has not called."""
        return self._completeness.has_gaps

    def poll(self) -> None:
        """Take in what was written since the last call."""
        self.live.poll(self.files.find_processes())
        for pid, event in self.files.poll():
            try:
                if self.book.is_reborn(pid, event):  # It numbers all things from the beginning again.
                    self.live.forget(pid)
                    forget(pid, self._local, self._group_counts, self._wraps, self._passes, self._waits, self._missing)
                self.book.take(pid, event)
                for due in self._early.due(pid, event, is_rank=self.book.rank_or_parent(pid) is not None):
                    handler = self._handlers.get(due["event"])
                    if handler is not None:
                        handler(pid, due)
            except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
                fault = f"event {event.get('event')} of process {pid} could not be read: {error!r}"
                self.faults.append(fault)
                self._completeness.unread(fault)

    def record(self, job: Job) -> RunRecord:
        """The record of what is known so far."""
        paired = job.kind != "run" or not self.has_gaps
        rows: dict[str, Any] = {name: tuple(found) for name, found in self._rows.items()}
        rows |= {"loaders": self._loaders(), "gauges": tuple(self._gauges.values())}
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
            waits=tuple(msgspec.structs.replace(wait, rank=self._rank(pid)) for (pid, _), wait in self._waits.items())
            if paired
            else (),
            wraps=tuple(self._wraps.values()),
            passes=tuple(self._passes.values()),
            collectives=self._tracks(doubles) if paired else (),
            training_states=self._states.rows(),
            lines=self._lines.rows(),
            step_tracks=self.live.step_tracks(),
            call_tracks=self.live.call_tracks() if paired else (),
            pulses=self.live.pulses(),
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
            tracks.append(
                CollectiveTrack(
                    rank=rank,
                    **columns
                    | {
                        "group": self._translated(pid, "group", columns["group"]),
                        "signature": self._translated(pid, "signature", columns["signature"]),
                        "site": self._translated(pid, "site", columns["site"]),
                        "forward_site": self._translated(pid, "site", columns["forward_site"]),
                    },
                )
            )
        return tuple(sorted(tracks, key=lambda track: track.rank)) or self.live.collectives()

    def early_exceptions(self) -> tuple[RankException, ...]:
        """Exceptions of processes that never became a rank, first in time first."""
        return tuple(exception_of(event) for event in self.book.early_exceptions())

    def _heartbeats(self) -> tuple[dict[int, int], dict[int, int]]:
        """The row that each process waits in, and the end of the sleep that it is in."""
        waiting, sleeping = self.live.waiting_rows(), self.live.sleeping()
        for pid, ring in self.files.rings.items():
            beat = ring.heartbeat()
            waiting[pid] = ring.position(beat.waiting_row)  # It may be newer than the rows that were read.
            sleeping[pid] = beat.sleeps_until_ns
        return waiting, sleeping

    def _number(self, pid: int, kind: str, number: int) -> int:
        return self._local.get((pid, kind, number), -1)

    def _translated(self, pid: int, kind: str, column: array[int]) -> array[int]:
        known = {number: self._number(pid, kind, number) for number in set(column)}
        return array("q", [known[number] for number in column])

    def _site(self, pid: int, number: object) -> int:
        return self._local.get((pid, "site", number), -1) if isinstance(number, int) else -1

    def _rank(self, pid: int) -> int:
        rank = self.book.rank_of(pid)
        return -1 if rank is None else rank

    def _on_site(self, pid: int, event: dict[str, Any]) -> None:
        site = Site(tuple(Frame(str(file), int(line), str(name)) for file, line, name in event["frames"]))
        self._local[pid, "site", event["number"]] = self._sites.setdefault(site, len(self._sites))

    def _on_signature(self, pid: int, event: dict[str, Any]) -> None:
        fields = {name: event[name] for name in Signature.__struct_fields__ if name in event}
        signature = msgspec.convert(fields, Signature)
        self._local[pid, "signature", event["number"]] = self._signatures.setdefault(signature, len(self._signatures))

    def _on_group(self, pid: int, event: dict[str, Any]) -> None:
        ranks = tuple(int(rank) for rank in event["ranks"])
        ordinal = self._group_counts.get((pid, ranks), 0)
        self._group_counts[pid, ranks] = ordinal + 1
        group = Group(
            ranks=ranks,
            ordinal=ordinal,
            backend=str(event.get("backend", "")),
            timeout_ns=int(event.get("timeout_ns", 0)),
        )
        self._local[pid, "group", event["number"]] = self._groups.setdefault(group, len(self._groups))

    def _on_wait_begun(self, pid: int, event: dict[str, Any]) -> None:
        self._waits[pid, event["number"]] = Wait(
            rank=self._rank(pid),
            kind=event["kind"],
            ranks=tuple(event["ranks"]),
            site=self._site(pid, event["site"]),
            started_ns=event["time_ns"],
            direct=bool(event.get("direct", False)),
            backend=str(event.get("backend", "")),
            meets_elsewhere=str(event.get("meets_elsewhere", "")),
            named_device=bool(event.get("named_device", False)),
        )

    def _on_led(self, pid: int, event: dict[str, Any]) -> None:
        key = max(key for key in self._waits if key[0] == pid)  # led while it waits
        names = {"address": "led_from", "ranks": "ranks_asked", "rank": "rank_taken"}
        told = {names[name]: event[name] for name in names.keys() & event.keys()}
        self._waits[key] = msgspec.convert({**msgspec.structs.asdict(self._waits[key]), **told}, Wait)

    def _on_wait_ended(self, pid: int, event: dict[str, Any]) -> None:
        wait = self._waits[pid, event["number"]]
        self._waits[pid, event["number"]] = msgspec.structs.replace(
            wait,
            ended_ns=event["time_ns"],
            error=str(event.get("error", "")),
            mentions_cuda=bool(event.get("mentions_cuda", False)),
        )

    def _on_wrap(self, pid: int, event: dict[str, Any]) -> None:
        self._wraps[pid, event["wrap"]] = self._converted(pid, event, Wrap)

    def _on_communication_hook(self, pid: int, event: dict[str, Any]) -> None:
        key = (pid, event["wrap"])
        self._wraps[key] = msgspec.structs.replace(self._wraps[key], communication_hook=True)

    def _on_late_batch_norms(self, pid: int, event: dict[str, Any]) -> None:
        known = self._wraps[pid, event["wrap"]].synchronised_batch_norms
        if event["synchronised"] > known:
            self._rows["wrap_changes"].append(
                WrapChange(
                    rank=self._rank(pid),
                    wrap=event["wrap"],
                    site=self._site(pid, event["site"]),
                    late_batch_norms=event["synchronised"] - known,
                )
            )

    def _on_sample(self, pid: int, event: dict[str, Any]) -> None:
        probe = SampleProbe(
            index=event["index"],
            leaves=tuple(event["leaves"]),
        )
        rank = self.book.rank_or_parent(pid)
        if rank is not None:
            self._samples.append((rank, event["dataset_type"], event["dataset_length"], probe))

    def _loaders(self) -> tuple[Loader, ...]:
        """Loaders with the samples of their data set, which is known by type and length."""
        found = []
        for loader in self._rows["loaders"]:
            samples: dict[int, SampleProbe] = {}
            for rank, kind, length, probe in self._samples:
                if (rank, kind, length) == (loader.rank, loader.dataset_type, loader.dataset_length):
                    samples.setdefault(probe.index, probe)
            found.append(msgspec.structs.replace(loader, samples=tuple(samples.values())))
        return tuple(found)

    def _on_pass_begun(self, pid: int, event: dict[str, Any]) -> None:
        self._passes[pid, event["number"]] = self._converted(pid, event, Pass)

    def _on_pass_ended(self, pid: int, event: dict[str, Any]) -> None:
        indices = self._indices(str(event.get("indices", "")))
        self._passes[pid, event["number"]] = msgspec.structs.replace(
            self._passes[pid, event["number"]],
            ended_ns=event["time_ns"],
            yielded=event["yielded"],
            end=event["end"],
            by_length=bool(event.get("by_length", False)),
            backwards=event["backwards"],
            averaged=event.get("averaged"),
            looped=bool(event.get("looped", False)),
            index_count=event.get("index_count"),
            index_digest=event.get("index_digest", ""),
            indices=indices,
        )

    def _on_pass_trained(self, pid: int, event: dict[str, Any]) -> None:
        key = (pid, event["number"])
        self._passes[key] = msgspec.structs.replace(self._passes[key], backwards=event["backwards"])

    def _on_pass_progress(self, pid: int, event: dict[str, Any]) -> None:
        key = (pid, event["number"])
        if self._passes[key].end == "open":
            come = {name: event[name] for name in ("yielded", "backwards", "averaged", "looped")}
            self._passes[key] = msgspec.structs.replace(self._passes[key], **come)

    def _indices(self, name: str) -> tuple[int, ...]:
        if not name.startswith("indices-") or "/" in name:
            return ()
        column = array("q")
        try:
            column.frombytes((self._directory / name).read_bytes())
        except (OSError, ValueError):
            return ()
        return tuple(column)

    def _on_row(self, pid: int, event: dict[str, Any]) -> None:
        stream = _ROWS[event["event"]]
        self._rows[stream].append(self._converted(pid, event, _row_types()[stream]))

    def _on_row_of_child(self, pid: int, event: dict[str, Any]) -> None:
        rank = self.book.rank_or_parent(pid)
        if rank is None:
            return
        stream = _OF_CHILDREN[event["event"]]
        row = self._converted(pid, event, _row_types()[stream], rank)
        if isinstance(row, Gauge):
            self._gauges[rank, row.name] = row
        else:
            self._rows[stream].append(row)

    def _converted(self, pid: int, event: dict[str, Any], kind: type[Any], rank: int | None = None) -> Any:
        """Return an event as a struct of the record, with the record's own numbers for rank and call chains."""
        names = kind.__struct_fields__
        fields = {name: event[name] for name in names if name in event}
        fields["rank"] = self._rank(pid) if rank is None else rank
        if "site" in names and rank is None:
            fields["site"] = event["site"]  # An event without one is damaged.
        fields |= {name: self._site(pid, event.get(name)) for name in _SITES.intersection(names)}
        return msgspec.convert(fields, kind)

    def _on_missing(self, pid: int, event: dict[str, Any]) -> None:
        key = (pid, event["wrap"])
        if event["parameters"] is not None:
            self._missing[key] = tuple(event["parameters"])
        missing = MissingGradient(
            rank=self._rank(pid),
            wrap=event["wrap"],
            backward=event["backward"],
            site=self._site(pid, event["site"]),
            parameters=self._missing.get(key, ()),
        )
        self._rows["missing_gradients"].append(missing)

    def _file(self, pid: int, event: dict[str, Any], action: Any, path: str, detail: str = "") -> None:
        rank = self.book.rank_or_parent(pid)
        self._rows["files"].append(
            FileEvent(
                rank=-1 if rank is None else rank,
                action=action,
                path=path,
                site=self._site(pid, event["site"]),
                time_ns=event["time_ns"],
                existed=bool(event.get("existed", False)),
                detail=detail,
            )
        )

    def _on_file(self, pid: int, event: dict[str, Any]) -> None:
        self._file(pid, event, event["action"], str(event["path"]))

    def _on_child(self, pid: int, event: dict[str, Any]) -> None:
        action = "held-child" if event.get("held") else "child-process"
        self._file(pid, event, action, "", str(event["command"]))

    def _on_refused(self, pid: int, event: dict[str, Any]) -> None:
        chain = next((site for site, number in self._sites.items() if number == self._site(pid, event["site"])), Site())
        place = f"{Path(chain.frames[0].file).name}:{chain.frames[0].line}" if chain.frames else "the script"
        self.refusal = self.refusal or f"{place} {event['text']}"
        self._file(pid, event, "refused", str(event["path"]), str(event["text"]))

    def _on_stressed(self, pid: int, event: dict[str, Any]) -> None:
        self.stressed = True

    def _on_ended(self, pid: int, event: dict[str, Any]) -> None:
        if not self.ending[0]:
            self.ending = ending_of(event, self._rank(pid))

    def _on_stack(self, pid: int, event: dict[str, Any]) -> None:
        frames = tuple(Frame(str(file), int(line), str(name)) for file, line, name in event["frames"])
        stacks = self._rows["stacks"]
        stacks.append(
            StackDump(
                rank=self._rank(pid),
                thread=str(event["thread"]),
                main=bool(event["main"]),
                daemon=bool(event.get("daemon", True)),
                frames=frames,
                time_ns=event["time_ns"],
            )
        )
        if len(stacks) > MOST_STACKS:
            self._rows["stacks"] = list({(dump.rank, dump.thread): dump for dump in stacks}.values())

    def _on_fault(self, pid: int, event: dict[str, Any]) -> None:
        where, fault = str(event["where"]), str(event["text"])
        self.faults.append(f"process {pid}: {where}: {fault}")
        self._completeness.part_failed(fault, event.get("harms", STREAMS))

    def _on_lost(self, pid: int, event: dict[str, Any]) -> None:
        self._completeness.lost(pid, int(event["events"]))
