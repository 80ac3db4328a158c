"""What the processes of a job write of themselves, a type for each event: the lines of ``events-PID.jsonl``.

Call chains (``site``), signatures and groups are numbered by each process for itself. An event whose fields are those
of a row of the record is a ``Row``: its type is the row's, in ``record/model.py`` and ``record/streams``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from ddpdoctor.finding import Frame
from ddpdoctor.record.streams.training import FileAction, PassEnd

Chain = tuple[tuple[str, int, str], ...]
"""File, line and function of each frame of the user's, innermost first."""


def tag_of(name: str) -> str:
    """``PassEnded`` is the event ``pass_ended``."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=tag_of):
    """Something that a process has seen or done."""

    time_ns: int = 0
    """By the machine's clock; 0 of an event that has no moment."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is a row of the record but for its rank, which the process itself need not know."""

    kind: str
    time_ns: int = 0
    fields: Mapping[str, Any]


class Process(Event, frozen=True, kw_only=True):
    """A process of the job has begun, by itself or as a fork of another one."""

    kind: Literal["start", "fork"]
    parent: int
    owner: int | None = None
    """The rank's process that has started it, perhaps by other programs."""
    rank: int | None = None
    local_rank: int | None = None
    node: int | None = None
    world_size: int | None = None


class World(Event, frozen=True, kw_only=True):
    """The process has joined the job's process group."""

    rank: int
    local_rank: int
    world_size: int
    backend: str


class Host(Event, frozen=True, kw_only=True):
    """The machine that the process is on, and what of its environment bears on where the others are."""

    name: str
    interfaces: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    """Those that it may use, by their numbers."""


class Head(Event, frozen=True, kw_only=True):
    """Where the monitor is that sees all nodes, as the job's store says."""

    told: str


class HeartbeatBegun(Event, frozen=True, kw_only=True, tag="pulse"):
    """The probe's own thread has begun, which beats from now on."""

    thread: int
    """As the system numbers it."""


class TrainingThread(Event, frozen=True, kw_only=True):
    """A thread that is not the main one trains."""

    thread: int
    """As Python numbers it."""


class Torch(Event, frozen=True, kw_only=True):
    """The hooks are in place."""

    version: str


class Raised(Event, frozen=True, kw_only=True):
    """An exception ends the process, or a thread of it, or has reached a handler that ends the script."""

    type: str
    message: str
    frames: Chain
    traceback: str
    communication: bool
    attribute_owner: str = ""
    of_a_thread: bool = False
    by_signal: int = 0


class Exit(Event, frozen=True, kw_only=True):
    """The script is over, in order."""

    code: Any
    """What it gave to ``sys.exit``."""
    finished: bool


class OsExit(Event, frozen=True, kw_only=True):
    """The process leaves at once, by ``os._exit``."""

    code: Any
    site: int


class Ended(Event, frozen=True, kw_only=True):
    """The rehearsal has ended the process, or what the rehearsal changed has."""

    reason: str
    text: str = ""
    type: str = ""
    frames: Chain = ()


class Site(Event, frozen=True, kw_only=True):
    """A call chain of the user's, before it is first referred to."""

    number: int
    frames: Chain


class Group(Event, frozen=True, kw_only=True):
    """A process group, before it is first referred to."""

    number: int
    ranks: tuple[int, ...]
    backend: str = ""
    timeout_ns: int = 0
    name: str = ""


class WaitBegun(Event, frozen=True, kw_only=True):
    """As in ``waits.Wait``."""

    number: int
    kind: Literal["init_process_group", "new_group", "destroy_process_group"]
    ranks: tuple[int, ...]
    site: int
    direct: bool = False
    backend: str = ""
    meets_elsewhere: str = ""
    named_device: bool = False


class Led(Event, frozen=True, kw_only=True):
    """The newest wait was led to where the ranks of a rehearsal meet."""

    address: str | None = None
    """Where the script would have met."""
    ranks: int | None = None
    """For how many it would have waited."""
    rank: int | None = None
    """The number that it took and that another one had."""


class WaitEnded(Event, frozen=True, kw_only=True):
    """A wait is over."""

    number: int
    error: str = ""
    mentions_cuda: bool = False


class CommunicationHook(Event, frozen=True, kw_only=True):
    """A hook of the user's takes the place of a DDP module's reduction."""

    wrap: int


class DatasetSample(Event, frozen=True, kw_only=True, tag="sample"):
    """As in ``data.SampleProbe``, of the data set that has such a type and length."""

    dataset_type: str
    dataset_length: int | None
    index: int
    leaves: tuple[str, ...]


class PassProgress(Event, frozen=True, kw_only=True):
    """How far a pass over a loader has come, as in ``data.Pass``."""

    number: int
    yielded: int
    backwards: int
    averaged: int | None
    looped: bool


class PassEnded(Event, frozen=True, kw_only=True):
    """The pass is over, as in ``data.Pass``."""

    number: int
    yielded: int
    end: PassEnd
    backwards: int
    by_length: bool = False
    averaged: int | None = None
    looped: bool = False
    batch_count: int | None = None
    index_count: int | None = None
    index_digest: str = ""
    indices: str = ""
    """Name of the file that holds them."""


class PassTrained(Event, frozen=True, kw_only=True):
    """A backward that belongs to a pass came after its end."""

    number: int
    backwards: int


class MissingGradients(Event, frozen=True, kw_only=True):
    """Parameters of a DDP module that got no gradient in a backward."""

    wrap: int
    site: int
    parameters: tuple[str, ...] | None
    """None for those of the module's event before."""
    local: tuple[str, ...] | None = None
    """Those of them that got one without synchronisation since the reduction before; None likewise."""


class File(Event, frozen=True, kw_only=True):
    """Something was done to a file, or another program was started; as in ``training.FileEvent``."""

    action: FileAction
    path: str = ""
    existed: bool = False
    detail: str = ""
    site: int


class Refused(Event, frozen=True, kw_only=True):
    """The rehearsal has refused a change to a file."""

    path: str
    text: str
    """A sentence without its subject, which is the user's line."""
    site: int


class Stressed(Event, frozen=True, kw_only=True):
    """A cause was injected."""


class Stack(Event, frozen=True, kw_only=True):
    """What a thread was at."""

    thread: str
    main: bool
    daemon: bool = True
    frames: Chain


class ProbeFault(Event, frozen=True, kw_only=True):
    """A part of the probe has failed."""

    where: str
    text: str
    harms: tuple[str, ...] | None = None
    """Streams of the record that lack something; None for all."""


class Lost(Event, frozen=True, kw_only=True):
    """So many events could not be written by now."""

    events: int


class Network(Event, frozen=True, kw_only=True):
    """The process asked for a host, a port of this machine or a Unix socket, or serves one."""

    address: str
    serves: bool = False
    file: str = ""
    line: int = 0
    """Where the user's code did."""


class Pretended(Event, frozen=True, kw_only=True):
    """Something that this machine lacks was served."""

    what: str


class StateLoaded(Event, frozen=True, kw_only=True):
    """``load_state_dict`` of the optimizer, scheduler or scaler that ``training.TrainingState`` numbers so."""

    kind: str
    number: int
    site: int


class LinesBegun(Event, frozen=True, kw_only=True):
    """The lines that are executed are noted from now on."""

    late: bool


class Lines(Event, frozen=True, kw_only=True):
    """Lines of a file that were executed since the last event of it."""

    file: str
    lines: tuple[int, ...]
    unwatched: tuple[int, ...]
    """First lines of functions that were entered and not watched."""
    by_chance: bool = False
    """Seen in a stack, not traced."""


class LinesLost(Event, frozen=True, kw_only=True):
    """Executed lines are noted no longer."""

    reason: str


class Flight(Event, frozen=True, kw_only=True):
    """What is new in a flight recorder of torch's; the columns are ``flight_tracks.COLUMNS``."""

    recorder: int
    continues: bool
    """Nothing is missing between this and the last event of the recorder."""
    rows: tuple[tuple[int, ...], ...]
    completed: tuple[int, ...]
    """Entries that were written before and are over now."""


class MissingCapability(Event, frozen=True, kw_only=True):
    """A name that this torch lacks."""

    name: str
    cost: str
    """What that means for the user."""


@cache
def event_types() -> Mapping[str, type[Event]]:
    """Return the types of all events but rows by their names."""
    return {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}


def typed(fields: Mapping[str, Any]) -> Event | Row:
    """Return the event that a line holds. Raises msgspec.ValidationError, a ValueError, where it has other fields."""
    name = str(fields["event"])
    kind = event_types().get(name)
    if kind is not None:
        return msgspec.convert(fields, kind)
    time_ns = fields.get("time_ns", 0)
    if not isinstance(time_ns, int):
        raise msgspec.ValidationError(f"Expected `int`, got `{type(time_ns).__name__}` - at `$.time_ns`")
    return Row(kind=name, time_ns=time_ns, fields=fields)


def frames_of(chain: Chain) -> tuple[Frame, ...]:
    """Return the frames of a call chain."""
    return tuple(Frame(*frame) for frame in chain)
