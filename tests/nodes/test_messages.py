"""What goes over the wire comes out as it went in; anything else is refused, and costs little."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest

from ddpdoctor.errors import RecordError, UsageError
from ddpdoctor.monitor.nodes import messages
from ddpdoctor.monitor.nodes.attached import HeldNode
from ddpdoctor.monitor.nodes.meeting import Meeting, host_and_port, read_meeting
from ddpdoctor.monitor.nodes.messages import (
    PROTOCOL,
    Rows,
    Update,
    pack,
    pack_field,
    pack_rows,
    unpack_field,
    unpack_rows,
)
from ddpdoctor.monitor.nodes.screens import unpack_request
from ddpdoctor.record.joining import Clock
from ddpdoctor.record.streams.measured import CallTrack, StepTrack
from tests.diagnosis.measured_job import MeasuredJob

KEY = "a" * 40
RECORD = MeasuredJob(2).run(50, {"forward": 20.0, "backward": 40.0}, barrier=True, transfer=1.0).record()


def unpack_update(content: bytes) -> messages.Update:
    return messages.decoded(content, messages.UPDATES, messages.MOST_UNPACKED_BYTES)


def update(number: int = 1, **more: object) -> Update:
    return msgspec.structs.replace(
        Update(protocol=PROTOCOL, session="s", number=number, host="b", sent_at_ns=1), **more
    )


def test_messages_that_change_are_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(msgspec.Struct):
        protocol: str
        added: int

    assert messages._protocol() == PROTOCOL
    monkeypatch.setattr(messages, "Update", Longer)
    assert messages._protocol() != PROTOCOL


def test_a_message_of_another_version_is_told_from_nonsense() -> None:
    class Later(msgspec.Struct):
        protocol: str = "7.1+abc"
        number: int = 7
        host: str = "node7"
        session: int = 3

    for unpack in (unpack_update, unpack_request):
        with pytest.raises(messages.OtherVersion, match=r"it runs ddpdoctor 7\.1, and this machine ") as told:
            unpack(pack(Later()))
        assert (told.value.host, told.value.number) == ("node7", 7)
        assert told.value.reason.endswith("and this machine 7.1: install the same one on both")


def test_streams_and_rows_come_out_as_they_went_in() -> None:
    for name in messages.SENT:
        assert unpack_field(name, pack_field(RECORD, name)) == getattr(RECORD, name)
    tracks: tuple[StepTrack | CallTrack, ...] = (*RECORD.step_tracks, *RECORD.call_tracks)
    for track in tracks:
        columns = unpack_rows(pack_rows(track, 5, anew=False), type(track))
        assert all(column == getattr(track, name)[5:] for name, column in columns.items())
    whole = update(steps=tuple(pack_rows(track, anew=True) for track in RECORD.step_tracks))
    assert unpack_update(pack(whole)) == whole


def test_rows_that_are_told_again_take_the_place_of_what_was_there() -> None:
    track = RECORD.call_tracks[0]
    node = HeldNode("s", "b")
    ranks = {"ranks": pack_field(RECORD, "ranks")}
    node.take(update(1, fields=ranks, calls=(pack_rows(track, 0, anew=True),)), 1, 4096)
    node.take(update(2, calls=(pack_rows(track, 30, anew=False),)), 2, 4096)
    (held,) = node.part(Clock()).record.call_tracks
    assert held.entered_at_ns == track.entered_at_ns
    assert node.ranks == (0, 1)


def test_an_update_tells_of_the_moment_when_it_was_sent() -> None:
    node = HeldNode("s", "b")
    node.take(update(1), 7_000, 16)
    assert node.reported_ns() == 7_000, "nothing is known of its clock"
    node.take(msgspec.structs.replace(update(2, clock=(1_000, 5_000, 5_010)), sent_at_ns=1_500), 9_000, 16)
    assert 6_500 <= node.reported_ns() <= 6_510 < node.received_ns


def test_what_is_held_of_a_rank_is_bounded() -> None:
    track = RECORD.step_tracks[0]
    node = HeldNode("s", "b")
    ranks = {"ranks": pack_field(RECORD, "ranks")}
    for number in range(1, 51):
        piece = msgspec.structs.replace(
            track, **{name: getattr(track, name)[number - 1 : number] for name in messages.COLUMNS[StepTrack]}
        )
        node.take(update(number, fields=ranks, steps=(pack_rows(piece, anew=number == 1),)), number, 16)
    (held,) = node.part(Clock()).record.step_tracks
    assert list(held.step)[-16:] == list(track.step)[-16:]
    assert len(held) <= 20


def test_a_damaged_update_changes_nothing() -> None:
    node = HeldNode("s", "b")
    node.take(update(1, fields={"ranks": pack_field(RECORD, "ranks")}), 1, 4096)
    rows = pack_rows(RECORD.step_tracks[0], anew=True)
    fewer = {"ranks": pack_field(msgspec.structs.replace(RECORD, ranks=RECORD.ranks[:1]), "ranks")}
    harmful = [
        update(2, fields={"ranks": pack_field(RECORD, "groups") + b"x"}),
        update(2, fields={"no_such_stream": b"\x90"}),
        *(
            update(2, fields=fewer, steps=(msgspec.structs.replace(rows, content=content),))
            for content in (rows.content[:-1], b"", b"\x7f" * len(rows.content))
        ),
    ]
    for wrong in harmful:
        with pytest.raises(RecordError):
            node.take(wrong, 2, 4096)
    assert (node.number, node.ranks) == (1, (0, 1))


def test_random_bytes_are_no_messages_and_a_bomb_is_not_unpacked() -> None:
    draw = random.Random(0)
    good = pack(update(steps=(pack_rows(RECORD.step_tracks[0], anew=True),)))
    for _ in range(1_000):
        content = bytearray(good if draw.random() < 0.5 else draw.randbytes(draw.randrange(300)))
        for _ in range(draw.randrange(4)):
            if content:
                content[draw.randrange(len(content))] = draw.randrange(256)
        try:
            unpack_update(bytes(content))
        except RecordError:
            continue
    with pytest.raises(RecordError, match="too long"):
        unpack_update(zlib.compress(bytes(messages.MOST_UNPACKED_BYTES + 1)))
    with pytest.raises(RecordError):
        unpack_update(pack(msgspec.structs.replace(update(), number=-1)))
    too_many = Rows(rank=0, count=10**9, content=b"")
    with pytest.raises(RecordError):
        unpack_update(pack(update(calls=(too_many,))))


def test_where_the_head_is_comes_out_as_it_went_in_and_nonsense_is_none() -> None:
    meeting = Meeting(
        port=5,
        server_key=KEY,
        client_key=KEY,
        client_secret=KEY,
        addresses=("10.0.0.1", "fd00::2"),
        protocol=PROTOCOL,
    )
    assert read_meeting(meeting.text()) == meeting
    assert len(msgspec.structs.replace(meeting, addresses=("x" * 250,) * 8).text()) <= 1024
    newer = read_meeting(f"7.1+abc 5 {KEY} {KEY} {KEY} node0 what-a-later-version-adds")
    assert newer is not None and (newer.protocol, newer.port, newer.server_key) == ("7.1+abc", 5, KEY)
    draw = random.Random(0)
    nonsense = ("", PROTOCOL, f"{PROTOCOL} 2 3 4 5", f"{PROTOCOL} 99999 {KEY} {KEY} {KEY}")
    for text in (*nonsense, *(str(draw.randbytes(80)) for _ in range(200))):
        assert read_meeting(text) is None
    kept = read_meeting(f"{PROTOCOL} 5 {KEY} {KEY} {KEY} $(reboot) 10.0.0.1")
    assert kept is not None and kept.addresses == ("10.0.0.1",)


@pytest.mark.parametrize("text", ["node0", "node0:", "node0:x", ":5", "node0:0", "node0:70000", "fd00::2:5", "a b:5"])
def test_no_address_is_a_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError):
        host_and_port(text, "--head")


def test_addresses_are_taken_apart() -> None:
    assert host_and_port("node0:29600", "--head") == ("node0", 29600)
    assert host_and_port("[fd00::2]:5", "--head") == ("fd00::2", 5)
