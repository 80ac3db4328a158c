"""What a monitor makes of the other nodes: whose verdict counts, who may speak for a node, and what is joined."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from ddpdoctor.diagnosis.divergence.matching import Matcher
from ddpdoctor.diagnosis.performance.summary import RunVerdict
from ddpdoctor.monitor.nodes.attached import LOST_AFTER_NS
from ddpdoctor.monitor.nodes.nodes import RETRIED_AFTER_NS, SETTLED_AFTER_NS, UNHEARD_AFTER_NS, Nodes
from ddpdoctor.record import layout
from ddpdoctor.record.model import RunRecord
from ddpdoctor.record.writer import epoch_ns
from tests.diagnosis.measured_job import MeasuredJob
from tests.nodes.test_head import RECORD, flights, forwarding, until, with_flights


def book(*ranks: int) -> Any:
    """What is known of four ranks, some of them here."""
    processes = {rank: SimpleNamespace(rank=rank) for rank in ranks}
    return SimpleNamespace(head="", worlds=dict.fromkeys(ranks, (4, "gloo")), processes=processes)


@contextmanager
def beside(directory: Path, *ranks: int) -> Iterator[Nodes]:
    """A monitor of these ranks that has looked for long enough."""
    directory.mkdir(exist_ok=True)
    nodes = Nodes(directory, lambda rank: None)
    try:
        for now_ns in (1, 1 + SETTLED_AFTER_NS):
            nodes.look(book(*ranks), "", now_ns)
        yield nodes
    finally:
        nodes.close()


def test_a_rank_is_named_to_find_the_head_only_where_rank_0_is_elsewhere(tmp_path: Path) -> None:
    with beside(tmp_path / "all", 0, 1, 2, 3), beside(tmp_path / "first", 0, 1), beside(tmp_path / "second", 2, 3):
        written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
        assert (tmp_path / "second" / layout.SEEK_FILE).read_text() == "2\n"
    first = (layout.PLACE_FILE, layout.HEAD_FILE, layout.HEAD_KEY_FILE, layout.ATTACH_FILE)
    second = (layout.PLACE_FILE, layout.SEEK_FILE)
    assert written == {*(f"first/{name}" for name in first), *(f"second/{name}" for name in second)}


def test_a_port_that_is_taken_is_told_of_and_taken_once_it_is_free(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = Nodes(tmp_path, lambda rank: None, ("127.0.0.1", port))
        for now_ns in (1, 1 + SETTLED_AFTER_NS):
            nodes.look(book(0, 1), "", now_ns)
        (note,) = nodes.notes(1)
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; each keeps its own record" in note
    try:
        nodes.look(book(0, 1), "", RETRIED_AFTER_NS)
        assert nodes.notes(1) == (note,)
        nodes.look(book(0, 1), "", 1 + SETTLED_AFTER_NS + RETRIED_AFTER_NS)
        assert nodes.notes(1) == ()
        assert (tmp_path / layout.HEAD_FILE).exists()
    finally:
        nodes.close()


def test_a_node_that_nobody_reaches_and_one_that_is_told_nothing_say_so(tmp_path: Path) -> None:
    with beside(tmp_path / "first", 0, 1) as first, beside(tmp_path / "second", 2, 3) as second:
        soon_ns, later_ns = epoch_ns() + UNHEARD_AFTER_NS // 2, epoch_ns() + 2 * UNHEARD_AFTER_NS
        assert first._head is not None
        assert not first.notes(soon_ns) and not second.notes(UNHEARD_AFTER_NS)
        (note,) = first.notes(later_ns)
        assert note.startswith(f"no monitor of another node has connected to port {first._head.meeting.port} of this ")
        (note,) = second.notes(later_ns)
        assert note.startswith("the node of rank 0 has not announced its monitor's address yet")
        with forwarding(first._head.meeting) as agent:
            until(lambda: bool(agent.answered_s))
        # Its farewell may still be on its way.
        assert not any(note.startswith("no monitor of another node") for note in first.notes(later_ns))


def test_a_second_monitor_of_a_node_takes_the_place_of_the_first_once_that_ends(tmp_path: Path) -> None:
    with beside(tmp_path, 0, 1) as first:
        assert first.is_head
        with beside(tmp_path, 0, 1) as second:
            assert not second.is_head
            assert any("another monitor on this machine" in note for note in second.notes(1))
    with beside(tmp_path, 0, 1) as third:
        assert third.is_head and not third.notes(1)


def verdict(state: Any, text: str) -> RunVerdict:
    return RunVerdict(state=state, code="", text=text)


def test_a_verdict_that_becomes_unknown_is_passed_on(tmp_path: Path) -> None:
    with beside(tmp_path, 0, 1) as nodes:
        assert nodes._head is not None
        nodes.tell(verdict("unknown", "no steps yet"))
        assert nodes._head.verdict == ""
        nodes.tell(verdict("healthy", "all is well"))
        nodes.tell(verdict("unknown", "2 of 4 ranks are visible"))
        assert nodes._head.verdict == "UNKNOWN: 2 of 4 ranks are visible"


def elsewhere(record: RunRecord) -> RunRecord:
    """The same of ranks 2 and 3 of four."""

    def moved(rows: Any) -> Any:
        if not isinstance(rows, tuple):
            return rows
        return tuple(
            msgspec.structs.replace(row, rank=row.rank + 2) if getattr(row, "rank", -1) >= 0 else row for row in rows
        )

    job = msgspec.structs.replace(record.job, world_size=4, ranks_reported=(2, 3))
    streams = {name: moved(getattr(record, name)) for name in RunRecord.__struct_fields__ if name != "job"}
    return RunRecord(job=job, **streams)


def test_nodes_are_joined_once_their_clock_is_known_and_lost_ones_count_for_nothing(tmp_path: Path) -> None:
    own = MeasuredJob(2).run(5, {"forward": 20.0}).record()
    with beside(tmp_path, 0, 1) as nodes:
        assert nodes._head is not None
        with forwarding(nodes._head.meeting, elsewhere(with_flights(flights(0, 1_000)))) as agent:
            until(lambda: bool(agent.answered_s))
            assert nodes.joined(own, 0, time.time_ns()) is own  # It came without a clock.
            agent.offer(elsewhere(RECORD), is_quiet=True, ended=False, exit_code=None)
            until(lambda: nodes.are_quiet)
            assert nodes.joined(own, 0, time.time_ns()) is not own
            ((session, _),) = nodes.epoch
            assert session == agent._session
            (node,) = nodes._head.nodes.values()
            node.received_ns -= 2 * LOST_AFTER_NS
            assert not nodes.are_quiet
            assert nodes.joined(own, 0, time.time_ns()) is own
            assert nodes.epoch == ()


def test_a_node_whose_data_make_a_look_fail_is_left_out_and_told(tmp_path: Path) -> None:
    own = MeasuredJob(2).run(5, {"forward": 20.0}).record()
    with beside(tmp_path, 0, 1) as nodes:
        assert nodes._head is not None
        assert not nodes.leave_out_one(ValueError())
        with forwarding(nodes._head.meeting, elsewhere(RECORD)) as agent:
            until(lambda: bool(agent.answered_s))
            assert nodes.leave_out_one(ValueError())
            agent.offer(elsewhere(RECORD), is_quiet=True, ended=False, exit_code=None)
            until(lambda: agent.trouble == "what this node reports cannot be used")
            assert nodes.joined(own, 0, time.time_ns()) is own
            assert any("cannot be used (ValueError): its ranks are left out" in note for note in nodes.notes(1))


def test_a_rank_whose_collectives_are_gone_is_compared_with_nobody() -> None:
    def of(*ranks: int) -> RunRecord:
        return with_flights(*(flights(rank, 1_000) for rank in ranks))

    matcher = Matcher()
    matcher._split = {0: 1, 1: 1}
    matcher._lane(flights(0, 1_000), 0, 0).rows.append(0)
    matcher._lane(flights(1, 1_000), 0, 0).rows.append(0)
    assert matcher.advance(of(0)) is None
    assert matcher.advance(of()) is None
