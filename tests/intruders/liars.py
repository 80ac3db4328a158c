"""Who has a key of the job, and floods the head or says what is not so."""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import zmq

from ddpdoctor.monitor.nodes import screens
from ddpdoctor.monitor.nodes.attached import AttachedRun
from ddpdoctor.monitor.nodes.messages import (
    MOST_BYTES,
    PROTOCOL,
    SENT,
    JobFacts,
    Request,
    Update,
    pack,
    pack_field,
    pack_rows,
    unpack_answer,
)
from ddpdoctor.record.model import Job as JobOfRecord
from ddpdoctor.record.model import Rank, RunRecord, Site
from ddpdoctor.record.streams.measured import Gauge, StepTrack
from tests.diagnosis.measured_job import MeasuredJob
from tests.intruders.attack import again_and_again, held_back, with_keys
from tests.intruders.job import Job, until
from tests.intruders.strangers import Attack

_FUTURE_NS = 1 << 60
_GAUGE = {"rank": 1, "name": "liar", "unit": "ns", "steps": 1}
_RECORD = MeasuredJob(2).run(50, {"forward": 20.0, "backward": 40.0}, transfer=1.0).record()


def told(number: int = 1, *, session: str = "liar", world: int = 2, **more: Any) -> bytes:
    """An update of this form."""
    update = Update(
        protocol=PROTOCOL,
        session=session,
        number=number,
        host="liar",
        sent_at_ns=time.time_ns(),
        clock=(time.time_ns(), -1_000, 1_000),
        job=JobFacts(world_size=world, ranks_reported=(1,)),
    )
    return pack(msgspec.structs.replace(update, **more))


def of_ranks(*ranks: int, step_ns: int = 1_000, start_ns: int = 0) -> dict[str, Any]:
    """The streams and steps of ranks that are not the sender's."""
    start_ns = start_ns or time.time_ns()
    record = RunRecord(
        job=JobOfRecord(kind="run", world_size=2),
        ranks=tuple(Rank(rank=rank, host="liar", pid=1, end="running") for rank in ranks),
        gauges=tuple(Gauge(rank=rank, name="liar", unit="ns", steps=1, total=1 << 60) for rank in ranks),
    )
    tracks = []
    for rank in ranks:
        columns = {name: array("q", [1] * 50) for name in StepTrack.__struct_fields__ if name != "rank"}
        columns["ended_at_ns"] = array("q", [start_ns + step_ns * at for at in range(50)])
        tracks.append(
            pack_rows(msgspec.structs.replace(_RECORD.step_tracks[0], rank=rank, **_only(columns)), anew=True)
        )
    return {"fields": {name: pack_field(record, name) for name in SENT}, "steps": tuple(tracks)}


def _only(columns: dict[str, Any]) -> dict[str, Any]:
    return {
        name: column for name, column in columns.items() if isinstance(getattr(_RECORD.step_tracks[0], name), array)
    }


def _says(*contents: Callable[[], bytes], of: str = "meeting", count: int = 1, pause_s: float = 0.05) -> Attack:
    """Connections with a key that send these in turn for as long as it lasts, whatever they are answered."""

    def attack(job: Job) -> Iterator[None]:
        with with_keys(getattr(job.keys, of), job.port, count) as held:
            number = 0

            def say() -> None:
                nonlocal number
                for one in held:
                    one.send(contents[number % len(contents)](), zmq.NOBLOCK)
                    with suppress(zmq.Again):
                        one.recv(zmq.NOBLOCK)
                number += 1
                time.sleep(pause_s)

            with again_and_again(say):
                yield

    return attack


def _refused(why: str, content: Callable[[], bytes]) -> Attack:
    """One that says it once a second, and is told why it is not believed; the user is, too."""

    def attack(job: Job) -> Iterator[None]:
        with with_keys(job.keys.meeting, job.port) as (own,):
            answers = []

            def say() -> None:
                own.send(content(), zmq.NOBLOCK)
                if own.poll(5_000):
                    answers.append(unpack_answer(own.recv()).refused)
                time.sleep(0.2)

            with again_and_again(say):
                yield
                until(lambda: any(why in answer for answer in answers), 20)
                until(lambda: why in job.said() and "they are ignored" in job.said(), 20)

    return attack


def _in_parts(frames: int, size: int) -> Attack:
    def attack(job: Job) -> Iterator[None]:
        with with_keys(job.keys.meeting, job.port, 4) as held:
            for one in held:
                one.send_multipart([bytes(size)] * frames)
            time.sleep(1.0)
            yield

    return attack


def _unfinished(job: Job) -> Iterator[None]:
    with ExitStack() as stack:
        port = stack.enter_context(held_back(job.port, MOST_BYTES - 100_000))
        for one in stack.enter_context(with_keys(job.keys.meeting, port, 60)):
            one.send(bytes(MOST_BYTES - 1_000))
        time.sleep(2.0)
        yield


def _silent(job: Job) -> Iterator[None]:
    with with_keys(job.keys.meeting, job.port, 300):
        time.sleep(1.0)
        yield


def _sessions(job: Job) -> Iterator[None]:
    draw = random.Random(2)

    def fresh() -> bytes:
        return told(session=draw.randbytes(8).hex(), fields={"ranks": b"\x90", "sites": b"\x90"})

    yield from _says(fresh, count=4, pause_s=0.0)(job)


def _drawn(job: Job) -> Iterator[None]:
    """Well formed, and random: of each stream any bytes, of each rank, any number, any state."""
    draw = random.Random(3)

    def content() -> bytes:
        whole = of_ranks(draw.choice((1, 7)), step_ns=draw.randrange(1 << 40), start_ns=draw.randrange(1, 1 << 61))
        for name in draw.sample(SENT, 5):
            whole["fields"][name] = draw.randbytes(draw.randrange(40))
        return told(draw.randrange(1, 4), world=draw.choice((0, 2)), session=draw.choice("abc"), **whole)

    yield from _says(content, count=2, pause_s=0.01)(job)


def _screens(job: Job) -> Iterator[None]:
    """So many as never are attached; who is one of the first sees the job all the same."""
    run = AttachedRun(msgspec.structs.replace(job.keys.screens, addresses=("127.0.0.1",)))
    try:
        with with_keys(job.keys.screens, job.port, 30) as held:
            numbers = iter(range(1, 1 << 40))

            def ask() -> None:
                for one in held:
                    one.send(pack(Request(protocol=PROTOCOL, number=next(numbers), host="x")), zmq.NOBLOCK)

            with again_and_again(ask):
                yield
                now_ns = run.last_snapshot().now_ns
                until(lambda: run.snapshot().now_ns > now_ns, 5)
    finally:
        run.close()


def _deaf_screens(job: Job) -> Iterator[None]:
    with with_keys(job.keys.screens, job.port, screens.MOST_SCREENS) as held:
        for number in range(1, 200):
            for one in held:
                with suppress(zmq.Again):
                    one.send(pack(Request(protocol=PROTOCOL, number=number, host="x")), zmq.NOBLOCK)
            time.sleep(0.005)
        yield


LIARS: Mapping[str, Attack] = {
    "rubbish with a key": _says(lambda: random.randbytes(300), count=8, pause_s=0.0),
    "a zip bomb with a key": _says(lambda: zlib.compress(bytes(64 << 20), 9), pause_s=0.2),
    "messages of 9 MiB": _says(lambda: bytes(9 << 20), pause_s=0.2),
    "messages of 5,000 frames": _in_parts(5_000, 0),
    "a message of 20 MB in frames": _in_parts(2_000, 10_000),
    "60 unfinished messages of 8 MiB": _unfinished,
    "300 connections with a key that say nothing": _silent,
    "thousands of sessions": _sessions,
    "random updates that are well formed": _drawn,
    "an update again and again": _says(lambda: told(7), count=8, pause_s=0.0),
    "65,536 ranks": _says(lambda: told(fields={"ranks": b"\xdd\x00\x01\x00\x00" + b"\x81\xa4rank\x01" * 65_536})),
    "60,000 empty entries": _says(
        lambda: told(fields={"sites": pack_sites(60_000)}, session=random.randbytes(4).hex())
    ),
    "another version, again and again": _says(lambda: told(protocol="7.1+abc"), count=4, pause_s=0.0),
    "the rank of this machine": _refused("runs on this machine", lambda: told(**of_ranks(0))),
    "the rank of another node, in the far future": _refused(
        "are of rank 1, which", lambda: told(**of_ranks(1, start_ns=_FUTURE_NS))
    ),
    "figures that are no numbers": _says(
        lambda: told(fields={"gauges": msgspec.msgpack.encode([{**_GAUGE, "total": float("nan")}])})
    ),
    "a rank that there is not": _refused("are of rank 70000 of a job of 2", lambda: told(**of_ranks(70_000))),
    "a job of another size": _refused("are of a job of 9,999 ranks".replace(",", ""), lambda: told(world=9_999)),
    "the screens' key sends updates": _says(lambda: told(**of_ranks(1)), of="screens", pause_s=0.01),
    "the nodes' key asks for snapshots": _says(
        lambda: pack(Request(protocol=PROTOCOL, number=1, host="x")), pause_s=0.01
    ),
    "30 screens that ask without a pause": _screens,
    "16 screens that read nothing": _deaf_screens,
}


def pack_sites(count: int) -> bytes:
    """So many call chains, of a byte each."""
    return msgspec.msgpack.encode((Site(),) * count)
