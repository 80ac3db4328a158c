"""Collectives of a live run by torch's flight recorder: their order is that of the recorder, whatever their stamps."""

from __future__ import annotations

from ddpdoctor.record.assembly.live import FlightTracks
from ddpdoctor.record.events import Flight

UNCOMPRESSED, P, Q = 6, 7, 8
"""Signatures of what PowerSGD's hook sends in one step."""


def dumped(*stamps: tuple[int, int], recorder: int = 0, first: int = 0) -> Flight:
    """A dump of entries that are over: signature and stamp of each."""
    rows = tuple((first + at, 0, first + at, signature, -1, stamp, 1) for at, (signature, stamp) in enumerate(stamps))
    return Flight(recorder=recorder, time_ns=10_000, continues=True, completed=(), rows=rows)


def test_a_collective_that_is_stamped_late_keeps_its_place() -> None:
    flights = FlightTracks()
    flights.take(7, dumped((UNCOMPRESSED, 100), (P, 900), (Q, 120), (UNCOMPRESSED, 200)))
    columns = flights.columns(7)
    assert list(columns["signature"]) == [UNCOMPRESSED, P, Q, UNCOMPRESSED]
    assert list(columns["sequence"]) == [0, 1, 2, 3]
    assert list(columns["started_ns"]) == [100, 120, 120, 200]


def test_one_at_the_end_keeps_its_place_in_front_of_the_next_dump() -> None:
    flights = FlightTracks()
    flights.take(7, dumped((UNCOMPRESSED, 100), (P, 900)))
    flights.take(7, dumped((Q, 120), first=2))
    assert list(flights.columns(7)["signature"]) == [UNCOMPRESSED, P, Q]


def test_two_recorders_are_merged_by_time() -> None:
    flights = FlightTracks()
    flights.take(7, dumped((P, 100), (P, 300)))
    flights.take(7, dumped((Q, 200), (Q, 400), recorder=1))
    assert list(flights.columns(7)["signature"]) == [P, Q, P, Q]
