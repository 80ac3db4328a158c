"""Rehearses a script: starts its ranks, compares what they do while they run, stops at the first proof."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from ddpdoctor import __version__
from ddpdoctor.errors import ConfigurationError
from ddpdoctor.finding import grouped, rank_list
from ddpdoctor.launch.box.start import Box, BoxRefused, mount_points, start_in_box
from ddpdoctor.launch.created_files import Left, remove_created
from ddpdoctor.launch.environment import (
    LOOPBACK_ONLY,
    chooses_threads,
    rehearsal_command,
    rehearsal_environment,
    without_launcher,
)
from ddpdoctor.launch.interpreter import Interpreter, find_interpreter
from ddpdoctor.launch.kept_runs import keep_for_cleaning, state_directory, temporary_run_directory
from ddpdoctor.launch.processes import JobProcesses, interruptible, start_plainly, started
from ddpdoctor.launch.rehearsal_plan import (
    batch_size,
    has_launcher,
    in_a_gpus_place,
    notes_after,
    notes_before,
    option_passed,
    ranks_per_core,
    time_limit_s,
)
from ddpdoctor.launch.request import (
    HIDE_GPUS,
    SIGNALLED,
    TORN,
    Device,
    Layout,
    Progress,
    RehearsalRequest,
    chosen_device,
    on_cpu,
    visible_gpus,
)
from ddpdoctor.monitor.processes import liveness
from ddpdoctor.monitor.processes.liveness import probe_logs
from ddpdoctor.monitor.rehearsed_ranks import RehearsedRanks
from ddpdoctor.probe.environment import recorded_environment
from ddpdoctor.probe.free_port import network_interfaces
from ddpdoctor.probe.rehearsal.files import snapshot
from ddpdoctor.record import layout
from ddpdoctor.record.assembly.assemble import Assembly
from ddpdoctor.record.model import Job, Rank, RunRecord, StopReason
from ddpdoctor.record.streams.setup import JobMachine
from ddpdoctor.record.writer import epoch_ns, kept_clock

# What is said of the files that a rehearsal wrote, in an overlay or without one, and what is kept of them.

_READ_ONLY = os.strerror(errno.EROFS)


def overlay_notes(box: Box | None, refusal: str, outputs: Iterable[str]) -> Iterator[str]:
    """Sentences on an overlay that could not be made, or in which the script could not write everywhere.

    ``refusal`` is the kernel's reason, empty where there is none; ``outputs`` is what the script printed.
    """
    if refusal:
        yield (
            f"no overlay could be made here ({refusal}): existing files were protected by rules against the script, "
            "but not against other programs that it starts"
        )
    if box is not None and box.read_only and any(_READ_ONLY in text for text in outputs):
        yield (
            f"in the overlay {listed(box.read_only)} cannot be written to, because something else is mounted below; "
            "`--no-overlay` rehearses without one"
        )


def keep_overlay(box: Box, name: str) -> str:
    """Keep what was written to the overlay now that nothing runs in it, and say where it lies."""
    here = str(Path.cwd())
    inside = here.rstrip("/") + "/"
    paths = sorted((path for path, _ in box.written()), key=lambda path: (not path.startswith(inside), path))
    try:
        target = state_directory() / "kept" / name
        kept = box.keep(target)
    except (OSError, RuntimeError) as error:
        return f"what the script wrote could not be kept: {error}"
    if not paths:
        return "the script wrote no file"
    lower = max((lower for lower in kept if (here + "/").startswith(lower.rstrip("/") + "/")), key=len, default="")
    place = kept[lower] / os.path.relpath(here, lower) if lower else target
    return f"what the script wrote is kept below {place}: {listed(path.removeprefix(inside) for path in paths)}"


def left_notes(left: Iterable[Left]) -> Iterator[str]:
    """Say what was made in a rehearsal without an overlay and is not removed, by reason."""
    for reason, found in grouped(left, lambda one: one.reason).items():
        yield f"left in place because {reason}: {listed(one.path for one in found)}"


def listed(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    all_names = list(names)
    shown = [name if len(name) <= 60 else f"{name[:59]}…" for name in all_names[:3]]
    return "; ".join(shown) + (f"; {len(all_names) - 3} more" if len(all_names) > 3 else "")


def programs(commands: list[str]) -> str:
    """Return the first few commands, and the other programs by name: each may have changed files."""
    shown = [f"`{listed((command,))}`" for command in commands[:3]]
    names = sorted({os.path.basename(command.split(maxsplit=1)[0]) for command in commands[3:] if command.strip()})
    return "; ".join(shown) + (f"; and {len(commands) - 3} more commands of {', '.join(names)}" if names else "")


# What is known before a rehearsal of the machines that its job is to run on.

_QUOTAS = ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD = "sys/fs/cgroup/cpu/cpu.cfs_period_us"


def job_machine(request: RehearsalRequest, device: Device) -> JobMachine:
    """Return what the command and the project say; a rehearsal on real GPUs runs where the job does."""
    launch, stated = request.launch, request.machine
    return msgspec.structs.replace(
        stated,
        cores=stated.cores or (usable_cores() if device == "cuda" else 0),
        ranks_per_node=(launch.ranks or 0) // launch.nodes or stated.ranks_per_node,
        may_use_gpus=request.may_use_gpus or device != "cpu" or stated.device_memory_bytes > 0,
        spreads_threads=request.spawns_ranks,
    )


def usable_cores(root: str = "/") -> int:
    """Cores that this process may use together with those around it: what it is bound to, and its container's share."""
    try:
        bound = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        bound = os.cpu_count() or 1
    quota = _quota(Path(root))
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def _quota(root: Path) -> float | None:
    """Return how many cores' time the control group grants; None where it grants all, or does not tell."""
    for name in _QUOTAS:
        try:
            quota, _, period = (root / name).read_text(encoding="ascii").strip().partition(" ")
            return int(quota) / int(period or (root / _PERIOD).read_text(encoding="ascii")) if int(quota) > 0 else None
        except (OSError, ValueError, ZeroDivisionError):  # none, or "max"
            continue
    return None


# Processes that the kernel has ended because this machine, or a container on it, ran out of memory.

VMSTAT = Path("/proc/vmstat")


def kernel_kills(vmstat: Path = VMSTAT) -> int:
    """Return how many there were since this machine started; 0 where the kernel does not say (before Linux 4.13)."""
    try:
        lines = vmstat.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    counts = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(count[1]) for count in counts if len(count) == 2 and count[1].isdigit()), 0)


SNAPSHOTS = str(snapshot.__file__)
LOOK_EVERY_S = 0.1
PROGRESS_EVERY_S = 0.25
SHOWN_OF_A_PATH = 36
"""Characters, so that the line that asked for it is shown beside it."""
_AS_ASKED = (
    *("spawns_ranks", "spawned_ranks", "batches", "full", "nodes", "tells_slurm", "stress", "keep", "pretend"),
    *("absent_weights", "absent_data", "absent_packages", "absent_directories", "unseen_packages", "few_labels"),
    *("shares_directories", "equivalence"),
)
"""What the probe reads of a request as it is."""
AFTER_OUR_ENDING_S = 3.0
"""Time for the other ranks to end once the rehearsal has ended one, where each has a core of its own."""
AFTER_A_FAILURE_S = 5.0
"""Time for the launcher to end the other ranks once one has failed, where each has a core of its own."""


def rehearse(request: RehearsalRequest, on_progress: Callable[[Progress], None]) -> RunRecord:
    """Run the script on a few ranks for a few batches, and record what they did.

    Leaves no process, no run directory and, unless asked to, no file of the ranks behind, also when interrupted.
    Raises ``TorchMissing`` or ``UsageError`` before anything was started, and ``KeyboardInterrupt``.
    """
    with begun(request, on_progress) as job:
        return job.finish()


@contextlib.contextmanager
def begun(request: RehearsalRequest, on_progress: Callable[[Progress], None]) -> Iterator[BegunRehearsal]:
    """Start the ranks of a rehearsal, which are watched from ``finish`` on; in all else as ``rehearse``."""
    interpreter = find_interpreter(request.python, request.launch)
    with interruptible(), temporary_run_directory() as directory:
        rehearsal = BegunRehearsal(request, interpreter, directory, on_progress)
        try:
            rehearsal.begin()
            yield rehearsal
        finally:
            if rehearsal.end():
                keep_for_cleaning(directory)


class BegunRehearsal:
    """One rehearsal while it runs."""

    def __init__(
        self,
        request: RehearsalRequest,
        interpreter: Interpreter,
        directory: Path,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._request = request
        self.directory = directory
        """Of the run."""
        self._running = contextlib.ExitStack()
        self._processes: JobProcesses
        self._is_over = False
        self._on_progress = on_progress
        self._ranks = RehearsedRanks(directory, request.stall_after_s, lambda: liveness.exit_statuses(directory))
        self._command = rehearsal_command(request, interpreter.path, liveness.rank_outputs(directory))
        if request.restore_from is not None:
            leave = str(directory / "snapshot" / SIGNALLED) if request.snapshot_into is not None else ""
            self._command = [interpreter.path, SNAPSHOTS, str(request.restore_from), leave, *self._command]
        self._environment = rehearsal_environment(
            directory, os.environ, request.launch, spawns_ranks=request.spawns_ranks
        )
        if request.needs_no_launcher:
            self._environment |= without_launcher(request.nproc)
        boxed = request.overlay and not request.allow_writes
        network = request.network is True or (request.network is None and not boxed)
        if not network:
            self._environment |= LOOPBACK_ONLY
        gpus = visible_gpus(self._environment)
        device = chosen_device(request.device, gpus, request.nproc, demands_cuda=request.demands_cuda)
        self._hides_gpus = device != "cuda" and gpus > 0
        if device == "stand-in":
            self._environment.pop("CUDA_VISIBLE_DEVICES", None)  # of this machine, not of the one that is pretended
        if device == "cpu":
            self._environment |= HIDE_GPUS | on_cpu(self._environment)
        self._kernel_kills = kernel_kills()
        self._refusal = ""
        """Why there is no overlay where one was wanted."""
        self._box: Box | None = None
        self._job = Job(
            kind="rehearsal",
            command=tuple(self._command),
            script=str(request.script),
            arguments=request.arguments,
            environment=recorded_environment(self._environment),
            python=interpreter.path,
            torch_version=interpreter.torch_version,
            tool_version=__version__,
            layout=str(Layout(request.nodes, request.nproc // request.nodes)),
            ranks_of_job=request.launch.ranks or 0,
            option_passed=option_passed(request),
            machine=job_machine(request, device),
            device=device,
            stress=request.stress,
            interfaces=network_interfaces(),
            batches=0 if request.full else request.batches,
            batch_size=str(batch_size(request, device) or ""),
            ranks_expected=0 if request.spawns_ranks else request.nproc,
            overlay=boxed,
            network=network,
            started_ns=epoch_ns(),
        )

    @property
    def _assembly(self) -> Assembly:
        return self._ranks.assembly

    def begin(self) -> None:
        """Start the ranks."""
        sink = self._running.enter_context(liveness.launcher_output(self.directory).open("wb"))
        self._processes = self._running.enter_context(started(lambda: self._start(sink), self.directory))
        self._ranks.outer_pid = self._processes.outer_pid

    def end(self) -> tuple[Left, ...]:
        """End all ranks; the files that they have made and that stay, unless that was asked for."""
        self._running.close()
        if self._request.keep or self._job.overlay or self._is_over:
            return ()
        self._is_over = True
        return remove_created(self.directory).left

    def finish(self) -> RunRecord:
        """Watch, end, and make the record."""
        reason, text = self._watch(self._processes)
        self._ranks.note_the_gone()
        self._assembly.poll()
        record = self._final_record(*self._or_out_of_memory(reason, text))
        if reason in ("proof", "time-limit"):
            # The record is taken first: a signal for stacks can wake a rank that was stuck.
            record = msgspec.structs.replace(record, stacks=self._ranks.collect_stacks(self._job))
        self._running.close()
        self._ranks.close()
        if self._processes.left:
            left = listed(map(str, self._processes.left))
            record = _with_notes(record, (f"processes blocked on a disk or a driver could not be killed: {left}",))
        for name, wanted in (("snapshot", self._request.snapshot_into), ("equivalence", self._request.first_steps)):
            if wanted is not None and (self.directory / name).is_dir():
                shutil.copytree(self.directory / name, wanted, dirs_exist_ok=True)
        if self._box is not None and self._request.keep:
            record = _with_notes(record, (keep_overlay(self._box, self.directory.name),))
        return _with_notes(record, left_notes(self.end()))

    def _start(self, sink: IO[bytes]) -> subprocess.Popen[bytes] | Box:
        """Start the ranks in a box, or where the kernel allows none under the rules for files that were there before.

        Raises ConfigurationError where only a box could keep them from the network.
        """
        self._write_plan()
        if self._job.overlay:
            try:
                self._box = start_in_box(
                    self._command,
                    self._environment,
                    Path.cwd(),
                    self.directory,
                    sink,
                    places=(self._request.script.parent,),
                    network=self._job.network,
                    sockets=self._request.sockets,
                    keep=self._request.keep,
                )
                return self._box
            except BoxRefused as refused:
                self._refusal = refused.message
        if self._request.snapshot_into or self._request.restore_from:
            raise ConfigurationError(f"a restart is rehearsed in an overlay only: {self._refusal or 'none is wanted'}")
        if self._request.network is False:
            reason = f": {self._refusal}" if self._refusal else ""
            hint = "Omit `--no-network`; the report then lists what the script contacted."
            raise ConfigurationError(f"the network cannot be blocked here{reason}", hint)
        self._job = msgspec.structs.replace(self._job, overlay=False, network=True)
        self._write_plan()
        return start_plainly(self._command, self._environment, Path.cwd(), sink)

    def _write_plan(self) -> None:
        root = Path.cwd() if self._request.script.is_relative_to(Path.cwd()) else self._request.script.parent
        plan = {
            "version": layout.VERSION,
            "kind": "rehearsal",
            "clock": kept_clock(),
            "project_root": str(root),
            "supervisor_pid": os.getpid(),
            **{name: getattr(self._request, name) for name in _AS_ASKED},
            "batch_size": batch_size(self._request, self._job.device),
            "time_limit_s": time_limit_s(self._request, self._request.nproc),
            "device": self._job.device,
            "in_a_gpus_place": in_a_gpus_place(self._request, self._job.device),
            "ranks_per_node": self._request.nproc // self._request.nodes,
            "gpus_per_node": self._request.gpus_per_node or self._request.nproc // self._request.nodes,
            "slurm": self._request.slurm or self._request.tells_slurm,
            "has_launcher": has_launcher(self._request),
            "threads_chosen": chooses_threads(os.environ, self._request.launch),
            "resume": _start_of(self._request),
            # In an overlay nothing needs to be refused.
            "allow_writes": self._request.allow_writes or self._job.overlay,
            "mount_points": mount_points() if self._job.overlay else None,
            "job": msgspec.to_builtins(self._job),
        }
        path = self.directory / layout.JOB_FILE
        path.write_text(json.dumps(plan), encoding="utf-8")

    def _watch(self, processes: JobProcesses) -> tuple[StopReason, str]:
        """Look at the ranks until they have ended or there is a reason to end them; the reason and its sentence."""
        began = time.monotonic()
        told = -PROGRESS_EVERY_S
        while True:
            over = processes.launcher_exit_code() is not None
            seconds = time.monotonic() - began
            self._ranks.look(self._ends_ns(seconds))
            processes.note(self._assembly.book.processes)
            record = self._record("", "")
            ranks = max(self._request.nproc, record.job.world_size)
            crowd = ranks_per_core(ranks)
            if self._assembly.refusal and (over or self._since_our_ending_s() > AFTER_OUR_ENDING_S * crowd):
                return "no-touch", self._assembly.refusal
            if over:
                return self._assembly.ending
            if self._ranks.shows_proof(record):
                return "proof", "the ranks can no longer continue together"
            if self._since_our_ending_s() > AFTER_OUR_ENDING_S * crowd:
                return self._assembly.ending
            if self._since_failure_s(record) > AFTER_A_FAILURE_S * crowd:
                return "rank-failed", "a rank failed and the others did not end"
            limit_s = time_limit_s(self._request, ranks)
            if seconds > limit_s:
                return "time-limit", f"the script had not finished after {limit_s:g} s"
            if seconds - told >= PROGRESS_EVERY_S:
                told = seconds
                self._on_progress(Progress(phase=self._phase(record), steps=record.steps(), seconds=seconds))
            time.sleep(LOOK_EVERY_S)

    def _ends_ns(self, seconds: float) -> int:
        """When the time limit of a rehearsal is over that has gone on for so many seconds."""
        ranks = max(self._request.nproc, *(size for size, _ in self._assembly.book.worlds.values()), 0)
        return epoch_ns() + int((time_limit_s(self._request, ranks) - seconds) * 1e9)

    def _phase(self, record: RunRecord) -> str:
        if self._assembly.book.first_ending_ns():
            return "ending"
        if record.forwards:
            return "training"
        if record.job.ranks_reported:
            return "setting up"
        return "starting the script" if self._request.spawns_ranks else f"starting {self._request.nproc} ranks"

    def _since_our_ending_s(self) -> float:
        ended_ns = self._assembly.book.first_ending_ns()
        return (epoch_ns() - ended_ns) / 1e9 if ended_ns else 0.0

    def _since_failure_s(self, record: RunRecord) -> float:
        times = [rank.ended_ns for rank in record.ranks if rank.end in ("raised", "left-by-exit", "signalled")]
        return (epoch_ns() - min(times)) / 1e9 if times else 0.0

    def _record(self, reason: StopReason, text: str) -> RunRecord:
        record = self._ranks.record(msgspec.structs.replace(self._job, stop_reason=reason, stop_text=text))
        expected = record.job.world_size if self._request.spawns_ranks else self._request.nproc
        return msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, ranks_expected=expected))

    def _or_out_of_memory(self, reason: StopReason, text: str) -> tuple[StopReason, str]:
        """Return the same, but where the kernel ended ranks because they need more memory than this machine has."""
        killed = [rank.rank for rank in self._record("", "").ranks if rank.signal == signal.SIGKILL]
        if not killed or kernel_kills() <= self._kernel_kills:
            return reason, text
        return "memory", f"this machine ran out of memory, and its kernel ended {rank_list(killed)}"

    def _final_record(self, reason: StopReason, text: str) -> RunRecord:
        """Return the record with what is only known, or only worth knowing, at the end."""
        record = self._record(reason, text)
        ranks = tuple(msgspec.structs.replace(rank, output_tail=self._output_of(rank)) for rank in record.ranks)
        job = msgspec.structs.replace(
            record.job,
            not_held_back=self._not_held_back(record),
            pretended=tuple(sorted(self._assembly.pretended)),
            notes=self._notes(record),
            output_tail=liveness.script_output(self.directory),
            early_exceptions=self._assembly.book.early_exceptions(),
        )
        record = msgspec.structs.replace(record, job=job, ranks=ranks)
        return _with_earlier_starts(record, self._ranks.records_of_earlier_starts(job))

    def _output_of(self, rank: Rank) -> str:
        if self._request.spawns_ranks or self._request.needs_no_launcher:
            return liveness.script_output(self.directory)
        return liveness.tail_of_rank(self.directory, rank.rank if self._request.nodes > 1 else rank.local_rank)

    def _not_held_back(self, record: RunRecord) -> tuple[str, ...]:
        """Return what the script did beyond this job, as predicates."""
        done = []
        children = sorted({event.detail for event in record.files if event.action == "child-process"})
        if children and not self._job.overlay:
            done.append(f"ran {programs(children)}")
        if self._job.network:
            asked = list(self._asked())
            contacted = f", and contacted {listed(asked)}" if asked else ""
            services = "ports" if self._job.overlay else "services, processes and devices"
            done.append(f"could reach the network and this machine's {services}{contacted}")
        if self._job.overlay and self._request.sockets:
            done.append(f"could reach {listed(_ending(str(path)) for path in self._request.sockets)}")
        if self._box is not None and self._box.unseen:
            done.append(f"could reach sockets and pipes below {listed(map(_ending, self._box.unseen))}")
        return tuple(done)

    def _asked(self) -> dict[str, str]:
        """Return what the script asked for outside, and was not allowed by its name, with the place."""
        own = self._assembly.served.keys() | set(map(str, self._request.sockets))
        return {
            _ending(address): f" at {os.path.basename(file)}:{line}" if file else ""
            for address, (file, line) in self._assembly.asked.items()
            if address not in own
        }

    def _blocked(self) -> Iterator[str]:
        """Yield what the script asked for outside and the box kept from it, in sentences."""
        asked = {} if self._job.network else self._asked()
        for option, of_files in (("--network", False), ("--allow-socket PATH", True)):
            told = [address + place for address, place in asked.items() if ("/" in address) is of_files]
            if told:
                yield f"the script asked for {listed(told)}, which is blocked; `{option}` allows it"

    def _notes(self, record: RunRecord) -> tuple[str, ...]:
        """Sentences on how it was rehearsed and what could not be recorded."""
        notes = [*notes_before(self._request, self._job.device), *notes_after(self._request, record.job.world_size)]
        outputs = (liveness.script_output(self.directory), *map(self._output_of, record.ranks))
        notes += overlay_notes(self._box, self._refusal, outputs)
        notes += self._blocked()
        if self._hides_gpus:
            notes.append("the GPUs of this machine were not used")
        faults = [*self._assembly.faults, *probe_logs(self.directory)]
        if faults:
            notes.append(f"part of the observation failed: {faults[0]}")
        if self._assembly.files.damaged_lines:
            notes.append(f"{self._assembly.files.damaged_lines} lines of the record were damaged")
        return tuple(notes)


def _ending(address: str) -> str:
    """Return an address, of a long path its end, which says most."""
    return address if len(address) <= SHOWN_OF_A_PATH else f"…{address[1 - SHOWN_OF_A_PATH :]}"


def _with_earlier_starts(newest: RunRecord, earlier: tuple[RunRecord, ...]) -> RunRecord:
    """Return the record that the job is judged by, with those of the other starts of its ranks.

    The newest start is where a job fails; where none did, the one that trained most shows most of it.
    """
    if not earlier:
        return newest
    starts = (*earlier, newest)
    failed = newest.job.stop_reason or any(rank.end != "finished" for rank in newest.ranks)
    chosen = newest if failed else max(starts, key=lambda one: (len(one.wraps), one.steps()))
    lines = tuple(row for one in starts for row in one.lines)
    others = tuple(one for one in starts if one is not chosen)
    return msgspec.structs.replace(chosen, lines=lines, other_starts=others)


def _start_of(request: RehearsalRequest) -> str:
    """Return which of the starts for ``--resume`` this one is; empty for none."""
    if request.restore_from is None:
        return "" if request.snapshot_into is None else "first"
    if request.snapshot_into is not None:
        return SIGNALLED
    return TORN if request.restore_from.name == TORN else "second"


def _with_notes(record: RunRecord, notes: Iterable[str]) -> RunRecord:
    return msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, notes=(*record.job.notes, *notes)))
