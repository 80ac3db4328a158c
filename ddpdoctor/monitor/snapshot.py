"""What the faces of a watched run show: one immutable snapshot, the same from a live run, a replay and the demo.

None means that it is not known and is shown as —, never as 0. ``*_at_ns`` are times since the epoch, ``*_ns``
durations.
A face computes ages from ``Snapshot.now_ns``, never from a clock of its own.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from ddpdoctor.diagnosis.performance.summary import DEFAULTS, JobFigures, Phases, RankFigures, RunVerdict, StepTimes
from ddpdoctor.finding import Finding, Frame
from ddpdoctor.record.streams.measured import Gauge, Gpu

RunState = Literal["waiting", "running", "stalled", "ended"]
"""``waiting``: no rank has trained a step yet."""


class RankView(RankFigures, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    node: int | None = None
    host: str = ""
    pid: int | None = None
    gpu_index: int | None = None
    state: str
    """What it does now in words: ``computing (backward)``, ``waiting in all_reduce #412``, ``exited with code 1``."""
    state_since_ns: int | None = None
    """Of an evaluation the end of the step before it."""
    where: Frame | None = None
    """The user's line that its main thread is at, where that is known."""
    alive: bool = True
    failed: bool = False
    """Its process has ended, and not well: by an exception, by a signal, or with another code than 0."""
    culprit: bool = False
    """It is the one that makes the others late, or that a verdict names."""
    step: int | None = None
    stepped_at_ns: int | None = None
    """When its newest step ended."""
    step_times: StepTimes | None = None
    phases: Phases | None = None
    lateness_ns: tuple[float | None, ...] = ()
    """What the others waited for it alone, per slice of ``History.slices_at_ns``; None where nothing was measured."""
    bytes_per_step: float | None = None
    collectives_per_step: float | None = None
    measured_steps: int = 0
    """Steps behind these figures."""
    measured_at_ns: int | None = None
    """Time of the newest step behind these figures."""
    beat_at_ns: int | None = msgspec.field(default=None, name="pulse_at_ns")
    """When it wrote its newest heartbeat; recorded histories have the older name."""
    calls: tuple[CallView, ...] = ()
    """Its newest explicit collectives, newest last."""
    gauges: tuple[Gauge, ...] = ()
    """Further figures that hooks add up over its steps."""
    stack: tuple[Frame, ...] = ()
    """Taken on demand or at a verdict, innermost first."""
    stack_taken_at_ns: int | None = None

    @property
    def median_ns(self) -> float | None:
        """Its median step."""
        return None if self.step_times is None else self.step_times.p50_ns


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """One explicit collective of a rank."""

    kind: str
    group: str
    sequence: int
    entered_at_ns: int
    left_at_ns: int
    """0 while inside."""
    size_bytes: int = 0


class BucketView(msgspec.Struct, frozen=True, kw_only=True):
    """One gradient bucket of a DDP module, in the order in which the buckets became ready."""

    module: str
    order: int
    size_bytes: int
    parameters: int | None
    """None where DDP does not tell which parameters lie in which bucket."""
    first_parameter: str = ""


class FindingView(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of the run and when it held."""

    finding: Finding
    since_ns: int
    until_ns: int | None = None
    """None while it holds."""


class StallSide(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of a standstill that stand at the same place."""

    ranks: tuple[int, ...]
    text: str
    """What they do: ``wait in all_reduce #412``, ``have left``, ``sleep at train.py:88``."""
    stack: tuple[Frame, ...] = ()
    """Innermost first."""
    culprit: bool = False


class StallView(msgspec.Struct, frozen=True, kw_only=True):
    """A standstill, or another proof that the job will not continue."""

    title: str
    since_ns: int
    sides: tuple[StallSide, ...]
    remedy: str = ""
    timeout_at_ns: int | None = None
    """When the process group gives up, where its timeout is known."""
    may_go_on: bool = False
    """It is not proved (yet) that the ranks will stand for good."""
    cut_short: bool = False
    """Someone ended the job in it before that was proved: it continues no more, but might have."""

    @property
    def proved(self) -> bool:
        """Whether it is proved that the ranks stand for good, by themselves."""
        return not self.may_go_on and not self.cut_short


class WaitView(msgspec.Struct, frozen=True, kw_only=True):
    """A wait for a rank that is at work: no standstill, and no news either."""

    late: int
    since_ns: int
    text: str
    """Who has waited how long for whom, and what that rank does there."""
    timeout_at_ns: int | None = None
    """When the process group gives up, where its timeout is known."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Series for sparklines and heat strips, oldest first, thinned to a few hundred slices; None: nothing seen."""

    slices_at_ns: tuple[int, ...] = ()
    step_p50_ns: tuple[float | None, ...] = ()
    step_p95_ns: tuple[float | None, ...] = ()
    samples_per_s: tuple[float | None, ...] = ()
    exposed_share: tuple[float | None, ...] = ()


class Snapshot(JobFigures, frozen=True, kw_only=True):
    """Everything that is shown of a run at one moment."""

    now_ns: int
    source: Literal["live", "attached", "replay", "demo", "autopsy"] = "live"
    """``attached``: shown by a monitor elsewhere, and only looked at here. Of an autopsy no duration is known: how long
    a job has stood, or has been dead, is in nothing that it reads."""
    name: str
    """Name of the run: the script's, or that of the run directory."""
    command: tuple[str, ...] = ()
    run_directory: str = ""
    launched: bool = False
    """This program started the job, and would end it."""
    launcher_pid: int = 0
    """The process that it started; 0 where it has started none."""
    state: RunState
    started_at_ns: int
    ended_at_ns: int | None = None
    exit_code: int | None = None
    world_size: int | None = None
    nodes: int | None = None
    backend: str = ""
    device: str = ""
    torch_version: str = ""
    verdict: RunVerdict
    steps: int | None = None
    """Steps that every rank has made."""
    one_rank_samples_per_s: float | None = None
    """What the same training did on one rank, where a run of it was named."""
    scaling_efficiency: float | None = None
    """Measured: throughput against that of so many times one rank."""
    gpu_utilisation_percent: float | None = None
    gpu_utilisation_corrected_percent: float | None = None
    """Without the share of time in which the GPU only spins in communication kernels."""
    exposed_limit: float = DEFAULTS["exposed-communication"]
    """The share of a step from which on the project calls exposed communication too much."""
    overdue_ns: int | None = None
    """For how long some rank has made no step, where the next is overdue."""
    meanwhile: str = ""
    """What the ranks do while it is: ``ranks 0-7 evaluating at train.py:88 for 40 s``."""
    ranks: tuple[RankView, ...] = ()
    buckets: tuple[BucketView, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpus_note: str = ""
    """Why there are no GPU figures, where there are none."""
    findings: tuple[FindingView, ...] = ()
    stall: StallView | None = None
    wait: WaitView | None = None
    cause: Finding | None = None
    """The finding to blame if the job ended now, in the standstill or the wait that it is in."""
    history: History = History()
    notes: tuple[str, ...] = ()
    """What could not be measured or read, in sentences."""


class Listener(Protocol):
    """What gets each new snapshot besides the screen."""

    note: str
    """What the user has to know of it, as a sentence without a full stop; may be empty."""

    def take(self, snapshot: Snapshot) -> None:
        """Take in a snapshot; returns at once."""
        ...


class SnapshotSource(Protocol):
    """Where a face gets its snapshots: a live run, a recorded one, or the demo."""

    def snapshot(self) -> Snapshot:
        """Return the newest one; cheap enough to be asked four times a second."""
        ...

    def ask_for_stacks(self, rank: int) -> None:
        """Have the stack of one rank taken; it shows up in a later snapshot. Does nothing where that cannot be."""
        ...

    def end_job(self) -> None:
        """End a job that was launched by this program; does nothing to any other."""
        ...

    def close(self) -> None:
        """Let go of files; the job continues."""
        ...


class OnlyShown:
    """What a source answers of whose job nothing can be asked: it is over, or it was not started by this program."""

    def ask_for_stacks(self, rank: int) -> None:
        """Do nothing."""

    def end_job(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


class PlaybackState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source whose time can be moved stands."""

    elapsed_ns: int
    """Since the beginning of the run."""
    length_ns: int | None = None
    """None: it has no end."""
    speed: float = 1.0
    """Seconds of the run per second; 0 while it holds still."""


class Playback(Protocol):
    """What a source whose time can be moved offers besides its snapshots: a replay, the demo."""

    def playback(self) -> PlaybackState:
        """Return where it stands."""
        ...

    def play(self, speed: float) -> None:
        """Go on at this speed; 0 holds still."""
        ...

    def seek(self, elapsed_ns: int) -> None:
        """Go to a moment of the run; beyond its ends means to its ends."""
        ...
