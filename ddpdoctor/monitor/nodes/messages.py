"""What an agent sends the head each second, and what it is answered: packed, bounded, and decoded strictly.

An update holds the streams of the agent's record that changed since the last one that was acknowledged, and of steps
and explicit collectives the new rows. Their columns are differences of microseconds by planes of bytes, which zlib
makes small.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from itertools import accumulate, chain
from operator import sub
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
import zmq

from ddpdoctor import __version__
from ddpdoctor.errors import RecordError
from ddpdoctor.monitor.nodes.meeting import Meeting
from ddpdoctor.monitor.snapshot import Snapshot
from ddpdoctor.record import layout
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.streams.collectives import CollectiveTrack
from ddpdoctor.record.streams.measured import CallTrack, StepTrack

# A connection to the head, with the keys that let one in.

GIVEN_UP_AFTER_S = 15
"""A connection to a machine that is gone, which closes nothing."""


def connected(
    context: zmq.Context[zmq.Socket[bytes]],
    meeting: Meeting,
    where: str,
    most_bytes: int,
    *,
    immediate: bool = True,
) -> zmq.Socket[bytes]:
    """Return a socket that continues trying to reach the head, and takes no message that is longer.

    ``immediate``: nothing can be sent while there is no connection, and what a lost one brought last is lost, too.
    """
    own = context.socket(zmq.DEALER)
    own.curve_serverkey = meeting.server_key.encode("ascii")
    own.curve_publickey = meeting.client_key.encode("ascii")
    own.curve_secretkey = meeting.client_secret.encode("ascii")
    own.ipv6 = True
    own.maxmsgsize = most_bytes
    own.sndhwm = own.rcvhwm = 8
    own.reconnect_ivl, own.reconnect_ivl_max = 500, 5_000
    # Not by heartbeats of ZeroMQ: it ends the process (4.3.5: "Assertion failed: !_io_error") where one is due on a
    # connection that the other side has closed while more had come than was taken.
    own.tcp_keepalive, own.tcp_keepalive_idle, own.tcp_keepalive_intvl, own.tcp_keepalive_cnt = 1, 5, 5, 2
    own.setsockopt(zmq.TCP_MAXRT, 1_000 * GIVEN_UP_AFTER_S)
    own.immediate = immediate
    own.connect(where)
    return own


def received(own: zmq.Socket[bytes], most_frames: int) -> tuple[list[zmq.Frame], int]:
    """Return the next message, of which one frame more than there may be is kept at most, and the bytes of all of it.

    Raises zmq.Again where none is there.
    """
    frames: list[zmq.Frame] = []
    size = 0
    while True:
        frame = own.recv(zmq.NOBLOCK, copy=False)
        size += len(frame)
        if len(frames) <= most_frames:
            frames.append(frame)
        if not own.rcvmore:
            return frames, size


MOST_BYTES = 8 << 20
"""Of a message as it is sent; who sends a longer one is cut off."""
MOST_UNPACKED_BYTES = 64 << 20
MOST_ROWS = layout.LIVE_ROWS
"""Of a rank in one message."""
MOST_RANKS = 65_536
MOST_ENTRIES = 65_536
"""Of a stream in one message; what one of them costs in memory is up to 50 times what it costs in the message."""
_MOST_NS = 1 << 61
"""In the year 2043; what is more cannot be moved to every other clock any more."""
_UNIT_NS = 1_000
_ROUNDED = "_ns"
"""Columns whose names end so are sent in microseconds."""
SENT = tuple(
    name
    for name in RunRecord.__struct_fields__
    if name not in ("job", "logs", "step_tracks", "call_tracks", "collectives", "other_starts")
)
"""The streams that are sent as they are, whenever they changed."""
SELDOM = {"gpus": 10, "host_uses": 5, "gauges": 5, "files": 5, "host_reads": 5, "looks": 25}
"""Streams that change all the time, and are sent again after so many updates at the soonest."""
Message = TypeVar("Message")
Track = StepTrack | CallTrack | CollectiveTrack
_HINTS = get_type_hints(RunRecord)
ShortText = Annotated[str, msgspec.Meta(max_length=255)]
Reason = Annotated[str, msgspec.Meta(max_length=500)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Moment = Annotated[int, msgspec.Meta(gt=-_MOST_NS, lt=_MOST_NS)]


class _Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a message of every version has, so that one that differs is reported instead of misread.

    The same holds for ``number``, ``host`` and ``refused`` of an answer, and for zlib (not of answers) and MessagePack.
    """

    protocol: ShortText
    number: Number
    host: ShortText


class OtherVersion(RecordError):
    """A message of a monitor that speaks another version of the protocol."""

    def __init__(self, told: _Envelope) -> None:
        super().__init__(differing(told.protocol, "it", "this machine"))
        self.host = told.host
        self.reason = differing(PROTOCOL, "it", "this machine", told.protocol)
        """As whoever sent it reads it."""
        self.number = told.number


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one rank's track; they take the place of all that it had from the time of the first of them on."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    anew: bool = False
    """What was sent before is of another process, or not known to be there."""
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)]
    content: bytes
    """All columns in one, each of so many numbers: with thousands of ranks it is the number of pieces that costs."""


_ManyRows = Annotated[tuple[Rows, ...], msgspec.Meta(max_length=MOST_RANKS)]


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of the job."""

    world_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    ranks_reported: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_RANKS)] = ()
    torch_version: ShortText = ""
    backend: ShortText = ""
    started_ns: Number = 0


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One node's news."""

    protocol: ShortText
    session: ShortText
    """Drawn by each agent when it starts."""
    number: Number
    host: ShortText
    sent_at_ns: Number
    state: Literal["running", "ended", "left"] = "running"
    """``left``: the ranks continue, but no more of them will be sent."""
    exit_code: int | None = None
    is_quiet: bool = False
    """Some of its ranks have made no step for a while."""
    clock: tuple[_Moment, _Moment, _Moment] | None = None
    """A time by its clock, and the lower and upper bound of the head's lead then, from its exchanges so far."""
    job: JobFacts = JobFacts()
    fields: Annotated[dict[str, bytes], msgspec.Meta(max_length=len(SENT))] = {}
    steps: _ManyRows = ()
    calls: _ManyRows = ()
    collectives: _ManyRows | None = None
    """What the ranks wrote of their flight recorders, as a whole; None where that has not changed."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the head says to an update."""

    number: Number = 0
    received_at_ns: Number = 0
    sent_at_ns: Number = 0
    send_all: bool = False
    """It does not have what the update builds on."""
    refused: Reason = ""
    host: ShortText = ""
    verdict: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    """The verdict on all ranks, as it stands."""
    asks: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    """Ranks whose stacks are wanted."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a screen asks the head for."""

    protocol: ShortText
    number: Number
    host: ShortText
    has_ns: Number = 0
    """Time of the snapshot that it has; 0 for none."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What the head says to that; a picture is a second part of the message."""

    number: Number = 0
    host: ShortText = ""
    refused: Reason = ""
    has_left: bool = False
    """Nothing more is shown here, although the job may continue."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for a screen elsewhere."""

    snapshot: Snapshot
    lines: dict[str, dict[int, str]] = {}
    """The source lines that are shown with it, by file and number."""


def differing(theirs: str, they: str, here: str, ours: str = "") -> str:
    """Why two monitors do not talk, as a sentence: the versions of ddpdoctor that they run, or that these are alike."""
    versions = [version.partition("+")[0] for version in (theirs, ours or PROTOCOL)]
    if versions[0] == versions[1]:
        return f"{they} and {here} run different builds of ddpdoctor {versions[0]}: install the same one on both"
    return f"{they} runs ddpdoctor {versions[0]}, and {here} {versions[1]}: install the same one on both"


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    return zlib.compress(msgspec.msgpack.encode(message), 1)


def pack_answer(answer: Answer | Shown) -> bytes:
    """Return an answer as it is sent: not compressed, for zlib releases the GIL, and getting it back takes long."""
    return msgspec.msgpack.encode(answer)


def unpack_answer(content: bytes) -> Answer:
    """Read an answer; raises RecordError for anything else."""
    try:
        return _ANSWERS.decode(content)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise RecordError(f"an answer that cannot be read: {error}") from error


def pack_field(record: RunRecord, name: str) -> bytes:
    """One stream of a record."""
    return msgspec.msgpack.encode(getattr(record, name))


def unpack_field(name: str, content: bytes) -> Any:
    """Read a stream; raises RecordError where it is none."""
    decoder = _FIELDS.get(name)
    if decoder is None:
        raise RecordError(f"{name[:40]!r} is not a stream of a record")
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"the stream {name} cannot be read: {error}") from error


def pack_rows(track: Track, start: int = 0, *, anew: bool) -> Rows:
    """Return the rows of a track from one on, and no more than a message holds: the newest."""
    start = max(start, len(track) - MOST_ROWS)
    names, rounded = COLUMNS[type(track)], _ROUNDED_COLUMNS[type(track)]
    values = list(chain.from_iterable(getattr(track, name)[start:] for name in names))
    count = len(track) - start
    values[: count * rounded] = [value // _UNIT_NS for value in values[: count * rounded]]
    differences = array("q", map(sub, values, chain((0,), values))).tobytes()
    return Rows(rank=track.rank, anew=anew, count=count, content=b"".join(differences[at::8] for at in range(8)))


def unpack_rows(rows: Rows, kind: type[Track]) -> dict[str, array[int]]:
    """Return the columns of rows; raises RecordError where they are not those of their kind, or differ in length."""
    names, count, rounded = COLUMNS[kind], rows.count, rows.count * _ROUNDED_COLUMNS[kind]
    size = count * len(names)
    if len(rows.content) != 8 * size:
        raise RecordError(f"columns of {len(rows.content)} bytes for {count} rows")
    whole = bytearray(8 * size)
    for at in range(8):
        whole[at::8] = rows.content[at * size : (at + 1) * size]
    try:
        values = array("q", accumulate(memoryview(whole).cast("q")))
        values[:rounded] = array("q", [value * _UNIT_NS if value != -1 else -1 for value in values[:rounded]])
    except OverflowError as error:
        raise RecordError("columns of numbers that are too large") from error
    if values and not -_MOST_NS < min(values) <= max(values) < _MOST_NS:
        raise RecordError("columns of numbers that are too large")
    return {name: values[at * count : (at + 1) * count] for at, name in enumerate(names)}


def _columns_of(kind: type[Track]) -> tuple[str, ...]:
    """Those that are rounded come first."""
    names = (name for name in kind.__struct_fields__ if name not in ("rank", "kinds"))
    return tuple(sorted(names, key=lambda name: not name.endswith(_ROUNDED)))


COLUMNS: Mapping[type[Any], tuple[str, ...]] = {
    kind: _columns_of(kind) for kind in (StepTrack, CallTrack, CollectiveTrack)
}
_ROUNDED_COLUMNS = {kind: sum(name.endswith(_ROUNDED) for name in names) for kind, names in COLUMNS.items()}
"""How many these are."""


def decoded(content: bytes, decoder: msgspec.msgpack.Decoder[Message], most_bytes: int) -> Message:
    """Return a message of no more bytes; raises RecordError for anything else, OtherVersion for that of another one."""
    plain = unpacked(content, most_bytes)
    try:
        envelope = _ENVELOPES.decode(plain)
        if envelope.protocol != PROTOCOL:
            raise OtherVersion(envelope)
        return decoder.decode(plain)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise RecordError(f"a message that cannot be read: {error}") from error


def unpacked(content: bytes, most_bytes: int) -> bytes:
    """Return what was packed, where it is no more than so much; raises RecordError."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(content, most_bytes)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise RecordError("a message that is too long, or cut")
        return plain
    except (zlib.error, OverflowError) as error:
        raise RecordError(f"a message that cannot be read: {error}") from error


_ENVELOPES: msgspec.msgpack.Decoder[_Envelope] = msgspec.msgpack.Decoder(_Envelope)
UPDATES: msgspec.msgpack.Decoder[Update] = msgspec.msgpack.Decoder(Update)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_FIELDS: Mapping[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(Annotated[_HINTS[name], msgspec.Meta(max_length=MOST_ENTRIES)]) for name in SENT
}


def _protocol() -> str:
    """Version of ddpdoctor, and a digest of all that is sent, so that no change of it goes unnoticed."""
    kinds = (Update, Answer, Request, Shown, Picture, *(_HINTS[name] for name in SENT))
    shape = repr((_without_words(msgspec.json.schema_components(kinds)), COLUMNS))
    return f"{__version__}+{zlib.crc32(shape.encode()):08x}"


def _without_words(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_words(value) for key, value in schema.items() if key != "description"}
    return [_without_words(entry) for entry in schema] if isinstance(schema, (list, tuple)) else schema


PROTOCOL = _protocol()
"""Of all that monitors send each other; those with different ones tell each other so, and nothing else."""
