"""The RunRecord: what is known of one run, whether rehearsed, watched live, or read from what a dead job left.

Times are nanoseconds since the epoch (``*_ns``), sizes are bytes, ranks are global ranks. Collectives are kept in
columns of integers, because there can be millions; everything that repeats (call chains, signatures) is stored once
and referred to by its index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import msgspec

from ddpdoctor.equivalence_section import EquivalenceSection
from ddpdoctor.finding import Frame
from ddpdoctor.record.streams import RowAtLine, RowAtTime, RowOfRank, measured, setup, training
from ddpdoctor.record.streams import collectives as calls

Completeness = Literal["complete", "truncated", "absent"]
RunKind = Literal["rehearsal", "run", "log"]
RankEnd = Literal["finished", "ended-by-rehearsal", "left-by-exit", "raised", "signalled", "running", "unknown"]
StopReason = Literal[
    "", "proof", "time-limit", "interrupted", "no-touch", "no-ranks", "launch-failed", "rank-failed", "cut", "slow",
    "memory", "rendezvous", "stand-in", "overlay",
]  # fmt: skip


def shared_fields(of: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields that a struct has in common with another kind, by their names."""
    return {name: getattr(of, name) for name in _shared_names(type(of), kind)}


@cache
def _shared_names(one: type[msgspec.Struct], other: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in other.__struct_fields__ if name in one.__struct_fields__)


class StreamState(msgspec.Struct, frozen=True):
    """Whether a stream can be trusted to hold everything that happened."""

    state: Completeness
    reason: str = ""
    """Why it is truncated or absent."""


class Site(msgspec.Struct, frozen=True):
    """A call chain through the user's code, innermost frame first; empty when no user code was on the stack."""

    frames: tuple[Frame, ...] = ()

    @property
    def innermost(self) -> Frame | None:
        """The user's line that made the call."""
        return self.frames[0] if self.frames else None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What was started, how, and why it ended."""

    kind: RunKind
    command: tuple[str, ...] = ()
    script: str = ""
    """Absolute path of the entry script."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    """Variables that bear on the job (torch, NCCL, gloo, launcher, CUDA); nothing else of the user's environment."""
    python: str = ""
    """The interpreter that ran the ranks."""
    torch_version: str = ""
    tool_version: str = ""
    commit: str = ""
    """Git commit of the script's directory when it was started, with ``-dirty`` where files differed; empty where it
    is in no repository, or not known."""
    world_size: int = 0
    """As the process group says; 0 when none was made."""
    layout: str = ""
    """``NODESxRANKS``."""
    ranks_of_job: int = 0
    """How many ranks the job has when it is not rehearsed; 0 when nothing says."""
    machine: setup.JobMachine = setup.JobMachine()
    """A node of the job when it is not rehearsed."""
    device: str = ""
    """``cpu``, ``cuda`` or ``stand-in``."""
    backend: str = ""
    batches: int = 0
    """How many batches a pass was cut to; 0 when nothing was cut."""
    batch_size: str = ""
    """Samples that batches were cut to; empty when they were kept."""
    stress: str = ""
    """The cause that was injected: ``nan``, ``short-batch`` or ``slow-rank0``."""
    stressed: bool = False
    """It took effect."""
    interfaces: tuple[str, ...] = ()
    """Names of this machine's network interfaces; empty when they are not known."""
    ranks_expected: int = 0
    ranks_reported: tuple[int, ...] = ()
    """Ranks whose probe answered."""
    stop_reason: StopReason = ""
    """Why the doctor ended the run before it ended by itself; empty when it did not."""
    stop_text: str = ""
    """The same as a sentence for the user."""
    overlay: bool = False
    """The ranks wrote to an overlay, and not to the user's files."""
    network: bool = True
    """The ranks could reach the network and this machine's ports."""
    not_held_back: tuple[str, ...] = ()
    """What the script did beyond this job, as predicates: ``started another program (nvidia-smi)``."""
    option_passed: str = ""
    """An option for the local rank that the command's launcher writes otherwise, and that the rehearsal passed."""
    pretended: tuple[str, ...] = ()
    """What the machine lacks and the rehearsal served in its place: ``MNIST of torchvision (random images)``."""
    notes: tuple[str, ...] = ()
    """What could not be recorded, in sentences."""
    output_tail: str = ""
    """The last lines of what was printed before there was a rank."""
    early_exceptions: tuple[RankException, ...] = ()
    """Exceptions that ended processes of the script before they had become ranks, first in time first."""
    thresholds: Mapping[str, float] = {}
    """What the project has set in the place of the checks' own thresholds, by their names."""
    one_rank_samples_per_s: float | None = None
    """Throughput of the same training on one rank, where a run of it was recorded."""
    started_ns: int = 0
    ended_ns: int = 0


class RankException(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that ended a rank, or reached a handler of the user after a collective failed."""

    time_ns: int
    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    """The user's frames of the traceback, innermost first."""
    traceback: str = ""
    communication: bool = False
    """True when it only echoes that a peer left ("Connection closed by peer")."""
    attribute_owner: str = ""
    """Class of the wrapped model whose attribute was asked of the DDP object around it, where that is what failed."""
    by_signal: int = 0
    """The signal whose handler raised it; 0 for none. What a timer of the script's own sends is none."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process."""

    rank: int
    local_rank: int = 0
    node: int = 0
    host: str = ""
    pid: int = 0
    end: RankEnd = "unknown"
    exit_code: int | None = None
    signal: int | None = None
    main_finished: bool = False
    """The script had run to its end before the process ended, however it ended."""
    ended_ns: int = 0
    exceptions: tuple[RankException, ...] = ()
    waiting_in: int | None = None
    """Index in the rank's collective track of what its main thread is blocked in at the end of the record."""
    sleeps_until_ns: int = 0
    """When the ``time.sleep`` ends that its main thread is in; 0 when it is in none."""
    polls_for: str = ""
    """The file that its main thread asks for again and again, for nothing; set only where it is ``stuck``."""
    stuck: bool = False
    """It will not come to where others wait: it did nothing for the stall time, is in an endless loop, or asks for a
    file for nothing."""
    restless: bool = False
    """Its training thread stands at one place and does nothing, while the rest of its process tree does a little."""
    loops: bool = False
    """It works at one place for so long without a step that it seems to be in an endless loop; it is ``stuck``, too."""
    stopped: bool = False
    """A signal (SIGSTOP, a debugger) has stopped its process."""
    output_tail: str = ""
    """The last lines that the rank wrote."""


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter or a buffer of a wrapped module."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    size_bytes: int = 0
    requires_grad: bool = False


class Wrap(RowAtLine, frozen=True, kw_only=True):
    """A module wrapped in DistributedDataParallel."""

    wrap: int
    """Ordinal of the wrap in its process."""
    by_user: bool = True
    """A line of the user's made it; otherwise a framework, with options of its own."""
    module_class: str = ""
    options: Mapping[str, str | int | float | bool | None] = {}
    """Effective constructor options: ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``,
    ``forward_sync_buffers`` (where torch has it), ``gradient_as_bucket_view``, ``bucket_cap_mb``."""
    parameters: tuple[TensorInfo, ...] = ()
    buffers: tuple[TensorInfo, ...] = ()
    ranks: tuple[int, ...] = ()
    """Global ranks of its process group; empty when not known."""
    ignored: tuple[str, ...] = ()
    """Parameters and buffers that DDP is set to ignore."""
    contains: tuple[int, ...] = ()
    """Wraps that are inside of the module that it wraps."""
    batch_norms: int = 0
    """BatchNorm layers that see their own rank's batch only."""
    synchronised_batch_norms: int = 0
    texts: Mapping[str, tuple[str, ...]] = {}
    """The short lists of texts that the module and its parts hold, by their names."""
    communication_hook: bool = False
    """A hook of the user takes the place of DDP's own reduction."""

    @property
    def reduced(self) -> list[TensorInfo]:
        """The parameters whose gradients DDP reduces, in its order."""
        return [tensor for tensor in self.parameters if tensor.requires_grad and tensor.name not in self.ignored]


class ShardedPart(RowAtLine, frozen=True, kw_only=True):
    """A unit of a sharded module whose gradients a part of the job's ranks reduces, before the first forward."""

    module: int
    ranks: tuple[int, ...]
    place: tuple[int, int]
    """Which shard of how many this rank holds."""
    why: str
    """``hybrid``: one of the older wrapper that shards nothing; ``mesh``: a part of a larger one; ``group``."""
    digests: Mapping[str, str]


class ShardedModule(RowOfRank, frozen=True, kw_only=True):
    """A module whose parameters are sharded over ranks, the outermost one, as its first forward found it."""

    module: int
    """The number that stands for it where modules are known by their wraps: -2 for the first, -3 for the next."""
    site: int = -1
    """Of that forward."""
    module_class: str = ""
    by: str = ""
    """``fully_shard`` or ``FullyShardedDataParallel``."""
    ranks: tuple[int, ...] = ()
    """Those that hold its shards and replicas."""
    replicas: tuple[tuple[tuple[int, ...], Mapping[str, str]], ...] = ()
    """Ranks that hold the same shards as this one, and digests of these by the parameters' names."""
    ignored: tuple[str, ...] = ()
    """Parameters in it that want a gradient and are in none of its units."""
    inputs: str = ""
    """Digest of what the first forward was given."""
    time_ns: int = 0


class Forward(RowAtTime, frozen=True, kw_only=True):
    """A forward through a DDP module, through the module inside it, or through a sharded module."""

    wrap: int
    """Or the number of a sharded module."""
    step: int = 0
    """n-th training forward with this call chain on this rank, from 1; 0 for other forwards."""
    wrapped: bool = True
    """False when it bypassed DDP."""
    gradients: bool = False
    """Gradient mode was on."""
    training: bool = False
    synchronised: bool = False
    """DDP will reduce the gradients of the next backward."""
    input_digest: str = ""
    """Digest of the input tensors; empty when not taken."""
    pass_loader: int = -1
    """Loader of the pass that was drawn from last, -1 when there is none."""
    batch_norms: int | None = None
    """BatchNorm layers in training mode that see their own rank's batch only; None when not counted."""
    pass_ordinal: int = -1
    """Which of the passes over that loader it was, from 0."""
    batch: int = -1
    """Position in that pass of the batch that was drawn last, from 0."""
    looped: bool = False
    """All batches of that pass were drawn by a ``for`` statement of the user's outside of a generator, so that the body
    of the loop is what is done with each of them."""

    @property
    def trains(self) -> bool:
        """DDP, or what shards the module, was not bypassed, and a backward may follow."""
        return self.wrapped and self.gradients and self.training


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that is known of one run."""

    job: Job
    sites: tuple[Site, ...] = ()
    signatures: tuple[calls.Signature, ...] = ()
    streams: Mapping[str, StreamState] = {}
    """State of each name in ``record.streams``; a name that is missing counts as absent."""
    ranks: tuple[Rank, ...] = ()
    groups: tuple[calls.Group, ...] = ()
    waits: tuple[calls.Wait, ...] = ()
    wraps: tuple[Wrap, ...] = ()
    wrap_changes: tuple[training.WrapChange, ...] = ()
    sharded_modules: tuple[ShardedModule, ...] = ()
    sharded_parts: tuple[ShardedPart, ...] = ()
    shared_groups: tuple[calls.SharedGroup, ...] = ()
    loaders: tuple[training.Loader, ...] = ()
    passes: tuple[training.Pass, ...] = ()
    collectives: tuple[calls.CollectiveTrack, ...] = ()
    """One track a rank."""
    forwards: tuple[Forward, ...] = ()
    backwards: tuple[training.Backward, ...] = ()
    optimizer_steps: tuple[training.OptimizerStep, ...] = ()
    missing_gradients: tuple[training.MissingGradient, ...] = ()
    buffers: tuple[training.BufferState, ...] = ()
    gradient_digests: tuple[training.StepDigest, ...] = ()
    parameter_digests: tuple[training.StepDigest, ...] = ()
    made_parameters: tuple[training.MadeParameters, ...] = ()
    own_writes: tuple[training.OwnWrite, ...] = ()
    written_between: tuple[training.WrittenBetween, ...] = ()
    gradients_taken: tuple[training.GradientsTaken, ...] = ()
    training_states: tuple[training.TrainingState, ...] = ()
    plateau_steps: tuple[training.PlateauStep, ...] = ()
    unheld_parameters: tuple[training.UnheldParameters, ...] = ()
    uninitialised: tuple[training.Uninitialised, ...] = ()
    written_averages: tuple[training.WrittenAverages, ...] = ()
    files: tuple[training.FileEvent, ...] = ()
    stacks: tuple[setup.StackDump, ...] = ()
    lines: tuple[setup.LinesExecuted, ...] = ()
    seedings: tuple[setup.Seeding, ...] = ()
    random_states: tuple[setup.RandomState, ...] = ()
    parts: tuple[setup.Part, ...] = ()
    holdings: tuple[setup.Holding, ...] = ()
    settings: tuple[setup.Setting, ...] = ()
    forked_uses: tuple[setup.ForkedUse, ...] = ()
    cpu_threads: tuple[setup.CpuThreads, ...] = ()
    reduced_losses: tuple[calls.ReducedLoss, ...] = ()
    reduced_counts: tuple[calls.ReducedCounts, ...] = ()
    summed_totals: tuple[calls.SummedTotal, ...] = ()
    memory_orders: tuple[calls.MemoryOrder, ...] = ()
    cut_graphs: tuple[calls.CutGraph, ...] = ()
    outsider_calls: tuple[calls.OutsiderCall, ...] = ()
    handled: tuple[calls.Handled, ...] = ()
    endless_loops: tuple[calls.EndlessLoop, ...] = ()
    accesses: tuple[training.Access, ...] = ()
    device_uses: tuple[setup.DeviceUse, ...] = ()
    device_choices: tuple[setup.DeviceChoice, ...] = ()
    checkpoint_loads: tuple[setup.CheckpointLoad, ...] = ()
    state_names: tuple[setup.StateNames, ...] = ()
    step_tracks: tuple[measured.StepTrack, ...] = ()
    """One track a rank, of a live run."""
    call_tracks: tuple[measured.CallTrack, ...] = ()
    heartbeats: tuple[measured.RankHeartbeat, ...] = ()
    """The newest of each rank, of a live run."""
    gpus: tuple[measured.Gpu, ...] = ()
    host_uses: tuple[measured.HostUse, ...] = ()
    """One a rank of this node, of a live run."""
    optimizer_sizes: tuple[measured.OptimizerSize, ...] = ()
    bucket_layouts: tuple[measured.BucketLayout, ...] = ()
    gauges: tuple[measured.Gauge, ...] = ()
    """The newest of each rank and name, of a live run."""
    host_reads: tuple[measured.HostRead, ...] = ()
    looks: tuple[measured.Look, ...] = ()
    """Of a live run; those of one rank, phase and line add up."""
    tensor_reads: tuple[training.TensorRead, ...] = ()
    unused_searches: tuple[training.UnusedSearch, ...] = ()
    """Later ones of a rank and wrap take the place of earlier ones."""
    unfollowed_forwards: tuple[training.UnfollowedForward, ...] = ()
    nonfinites: tuple[training.NonFinite, ...] = ()
    replica_digests: tuple[training.ReplicaDigest, ...] = ()
    resume_steps: tuple[training.ResumeStep, ...] = ()
    resume_saves: tuple[training.ResumeSave, ...] = ()

    equivalence: tuple[EquivalenceSection, ...] = ()
    """One of a rehearsal that was compared with one process."""
    nodes: tuple[setup.Node, ...] = ()
    """The machines of a live run, as far as ranks on them have written."""
    logs: setup.LogEvidence = setup.LogEvidence()
    """What the logs of a dead job tell."""
    other_starts: tuple[RunRecord, ...] = ()
    """Of the other sets of ranks, where a script has started several one after the other (``mp.spawn`` twice)."""

    def stream(self, name: str) -> StreamState:
        """Say whether the stream called ``name`` is complete."""
        return self.streams.get(name, StreamState("absent", "not recorded"))

    def site(self, index: int) -> Site:
        """Resolve a site index; -1 is the empty site."""
        return self.sites[index] if index >= 0 else Site()

    def rank_numbers(self) -> tuple[int, ...]:
        """Return the ranks of this record, ascending."""
        return tuple(sorted(rank.rank for rank in self.ranks))

    def of_rank(self, rank: int) -> Rank | None:
        """Return the process of one rank, if the record knows it."""
        return next(iter(self._rows_of("ranks", rank)), None)

    def track(self, rank: int) -> calls.CollectiveTrack | None:
        """Return the collectives of one rank."""
        return next(iter(self._rows_of("collectives", rank)), None)

    def heartbeat(self, rank: int) -> measured.RankHeartbeat | None:
        """Return what the heart of one rank said last, of a live run."""
        return next(iter(self._rows_of("heartbeats", rank)), None)

    def stacks_of(self, rank: int) -> Sequence[setup.StackDump]:
        """Return the stacks of one rank, in their order."""
        return self._rows_of("stacks", rank)

    def endless_loop(self, rank: int) -> calls.EndlessLoop | None:
        """Return the loop that one rank, or a process that works for it, was seen not to leave."""
        newest = next(reversed(self._rows_of("endless_loops", rank)), None)
        return None if newest is None or newest.over else newest

    def _rows_of(self, stream: str, rank: int) -> Sequence[Any]:
        """Those of one rank; there may be thousands of ranks, and each is looked for again and again."""
        by_rank: dict[int, list[Any]] | None = self.__dict__.get(stream)
        if by_rank is None:
            by_rank = self.__dict__[stream] = {}
            for row in getattr(self, stream):
                by_rank.setdefault(row.rank, []).append(row)
        return by_rank.get(rank, ())

    def steps(self) -> int:
        """Steps that every rank made (of its busiest optimizer), or synchronised backwards where there is none."""
        return min((self._steps_of(rank) for rank in self.rank_numbers()), default=0)

    def _steps_of(self, rank: int) -> int:
        if not self.optimizer_steps:
            return sum(backward.rank == rank and bool(backward.synchronised) for backward in self.backwards)
        counts: dict[int, int] = {}
        for step in self.optimizer_steps:
            if step.rank == rank:
                counts[step.optimizer] = counts.get(step.optimizer, 0) + 1
        return max(counts.values(), default=0)


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Rehearsals: of a job that goes on past a checkpoint, of its second start, of one that finds a torn file, and of
    those around a scheduler's signal.
    """

    first: RunRecord
    second: RunRecord
    torn: RunRecord | None = None
    """It has found what is left by a job that died in the middle of its next save."""
    torn_files: tuple[str, ...] = ()
    """Those of which only a half was there …"""
    whole_files: tuple[str, ...] = ()
    """… and others, of at least half the size of a whole one."""
    step: int
    """Steps of the first start before the checkpoint."""
    files: tuple[str, ...] = ()
    """What the second start found of the first one's."""
    how: str = ""
    """How it was started, in words."""
    own_code: Mapping[str, tuple[str, str]] = {}
    """What the script would add to its checkpoint and where it loads it, by what the second start does otherwise."""
    ended: RunRecord | None = None
    """The same as the second start, until a scheduler's signal, which the script handles …"""
    resumed: RunRecord | None = None
    """… and a start that has found what was left then, where a checkpoint was …"""
    left: tuple[str, ...] = ()
    """… which are these files …"""
    how_resumed: str = ""
    """… and how it was started."""


_BESIDE_STREAMS = ("job", "sites", "signatures", "streams", "heartbeats", "logs", "nodes", "other_starts")
STREAMS = tuple(name for name in RunRecord.__struct_fields__ if name not in _BESIDE_STREAMS)
"""The names of the streams of a record, which are what a check's ``needs`` is compared with."""
