"""Records of several nodes, put together: whose numbers and whose clock count."""

from __future__ import annotations

import typing
from array import array

import msgspec

from ddpdoctor.finding import Frame
from ddpdoctor.record.joining import SITES, TIMES, Clock, Joiner, NodePart
from ddpdoctor.record.model import RunRecord, Site, StreamState
from ddpdoctor.record.streams.collectives import Group
from ddpdoctor.record.streams.measured import RankHeartbeat
from ddpdoctor.record.streams.setup import Node
from tests.diagnosis.measured_job import MeasuredJob

AHEAD_NS = 5_000_000_000
PHASES = {"data_wait": 1.0, "forward": 20.0, "backward": 40.0}
LINES = [Site((Frame(f"train.py{number}", number, "main"),)) for number in range(3)]
DURATIONS = {
    "timeout_ns", "data_wait_ns", "forward_ns", "backward_ns", "explicit_ns", "optimizer_ns", "exposed_ns", "window_ns",
    "device_forward_ns", "device_backward_ns", "device_optimizer_ns", "main_cpu_ns", "watched_ns",
    "main_waited_ns", "wait_ns", "clock_error_ns", "lasted_ns",
}  # fmt: skip
"""Times of a record that are no moments, so that no clock moves them."""


def job() -> RunRecord:
    record = MeasuredJob(4).run(30, PHASES, barrier=True, transfer=1.0).record()
    beats = tuple(RankHeartbeat(rank=rank, beat_at_ns=40_000_000_000, site=rank % 2) for rank in range(4))
    return msgspec.structs.replace(record, heartbeats=beats, sites=tuple(LINES[:2]))


def node(record: RunRecord, ranks: tuple[int, ...], ahead_ns: int = 0, renumbered: bool = False) -> RunRecord:
    """What one node has recorded, whose clock is ahead, and which may have met lines and groups in another order."""
    move = Clock(offset_ns=ahead_ns)
    part = Joiner().join([NodePart(name="", record=record, clock=move)]) if ahead_ns else record
    part = msgspec.structs.replace(
        part,
        **{
            name: tuple(row for row in getattr(part, name) if row.rank in ranks)
            for name in ("ranks", "step_tracks", "call_tracks", "heartbeats")
        },
    )
    if not renumbered:
        return part
    other = Group(ranks=(2, 3))
    return msgspec.structs.replace(
        part,
        sites=(LINES[2], *reversed(part.sites)),
        groups=(other, *part.groups),
        heartbeats=tuple(msgspec.structs.replace(beat, site=2 - beat.site) for beat in part.heartbeats),
        call_tracks=tuple(
            msgspec.structs.replace(
                track, group=array("q", [number + 1 for number in track.group]), site=array("q", [0] * len(track))
            )
            for track in part.call_tracks
        ),
    )


def test_what_two_nodes_recorded_is_what_one_would_have() -> None:
    whole = job()
    parts = [
        NodePart(name="a", record=node(whole, (0, 1))),
        NodePart(name="b", record=node(whole, (2, 3), AHEAD_NS, renumbered=True), clock=Clock(offset_ns=-AHEAD_NS)),
    ]
    joined = Joiner().join(parts)
    assert joined.step_tracks == whole.step_tracks
    assert [beat.beat_at_ns for beat in joined.heartbeats] == [40_000_000_000] * 4
    sites = [[record.site(beat.site) for beat in record.heartbeats] for record in (joined, whole)]
    assert sites[0] == sites[1]
    for ours, theirs in zip(joined.call_tracks, whole.call_tracks, strict=True):
        assert [joined.groups[number] for number in ours.group] == [whole.groups[number] for number in theirs.group]
        assert (ours.entered_at_ns, ours.left_at_ns) == (theirs.entered_at_ns, theirs.left_at_ns)
    assert {joined.site(number) for number in joined.call_tracks[3].site} == {LINES[2]}
    assert joined.rank_numbers() == (0, 1, 2, 3)


def test_numbers_that_were_given_never_change() -> None:
    whole, joiner = job(), Joiner()
    first = joiner.join([NodePart(name="a", record=node(whole, (0, 1)))])
    parts = [
        NodePart(name="b", record=node(whole, (2, 3), renumbered=True)),
        NodePart(name="a", record=node(whole, (0, 1))),
    ]
    later = joiner.join(parts)
    assert later.sites[: len(first.sites)] == first.sites
    assert later.groups[: len(first.groups)] == first.groups


def test_a_rank_that_two_nodes_have_is_where_it_beat_last() -> None:
    whole = job()
    moved = msgspec.structs.replace(
        node(whole, (1,)),
        heartbeats=(RankHeartbeat(rank=1, beat_at_ns=90_000_000_000),),
        nodes=(Node(host="b", ranks=(1,)),),
    )
    joined = Joiner().join([NodePart(name="a", record=node(whole, (0, 1))), NodePart(name="b", record=moved)])
    assert [(rank.rank) for rank in joined.ranks] == [0, 1]
    assert [beat.beat_at_ns for beat in joined.heartbeats] == [40_000_000_000, 90_000_000_000]
    assert len(joined.step_tracks) == 2


def test_a_stream_is_as_complete_as_where_it_is_least_so() -> None:
    def with_state(state: StreamState) -> NodePart:
        return NodePart(name=state.state, record=msgspec.structs.replace(job(), streams={"waits": state}))

    complete, absent = StreamState("complete"), StreamState("absent", "why")
    assert Joiner().join([with_state(complete), with_state(complete)]).stream("waits") == complete
    assert Joiner().join([with_state(complete), with_state(absent)]).stream("waits").state == "truncated"
    assert Joiner().join([with_state(absent), with_state(absent)]).stream("waits") == absent


def test_what_is_no_time_stays_and_drift_adds_up() -> None:
    clock = Clock(offset_ns=1_000, at_ns=1_000_000_000, drift=1e-3)
    assert (clock.moved(0), clock.moved(-1)) == (0, -1)
    assert clock.moved(1_000_000_000) == 1_000_001_000
    assert clock.moved(2_000_000_000) == 2_001_001_000


def _structs(kind: object, found: set[type]) -> None:
    for inner in typing.get_args(kind):
        _structs(inner, found)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
        found.add(kind)
        for name, text in kind.__annotations__.items():
            if "array" not in str(text):
                _structs(typing.get_type_hints(_Only.of(kind, name))["field"], found)


class _Only:
    """Resolves one annotation: a column's type cannot be asked for on Python 3.10 and 3.11."""

    @staticmethod
    def of(kind: type, name: str) -> type:
        annotations = {"field": kind.__annotations__[name]}
        return type("Field", (), {"__annotations__": annotations, "__module__": kind.__module__})


def test_every_time_of_a_record_is_known_as_a_moment_or_a_duration_and_every_line_as_one() -> None:
    found: set[type] = set()
    for name in RunRecord.__struct_fields__:
        if name not in ("job", "logs", "other_starts"):
            _structs(typing.get_type_hints(RunRecord)[name], found)
    assert len(found) > 40
    names = {name for kind in found for name in kind.__annotations__}
    times = {name for name in names if name.endswith("_ns") and not name.endswith("_at_ns")}
    assert times == TIMES | (DURATIONS & times)
    assert {name for name in names if name.endswith("site")} == SITES
    assert {kind.__name__ for kind in found if "signature" in kind.__annotations__} == {"CollectiveTrack"}
    assert {kind.__name__ for kind in found if "group" in kind.__annotations__} == {"CollectiveTrack", "CallTrack"}
