"""What the hooks keep is taken in once each, in order, whoever does it and whatever goes wrong meanwhile."""

from __future__ import annotations

import threading

from ddpdoctor.probe.live.observer import MOST_WAITING, Moments


class Told:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.faults: list[str] = []
        self.moments = Moments(lambda where, error, harms: self.faults.append(f"{where}: {error}"))

    def number(self, number: int) -> None:
        self.numbers.append(number)

    def wrong(self, number: int) -> None:
        raise ValueError(number)

    def trains_meanwhile(self, number: int) -> None:
        """As the handler of a signal does that comes while moments are taken in."""
        self.moments.keep((self.number, number))
        self.moments.take_in()
        self.numbers.append(-number)


def test_moments_are_taken_in_order_and_a_fault_loses_its_own_alone() -> None:
    told = Told()
    for function, number in ((told.number, 1), (told.wrong, 2), (told.number, 3)):
        told.moments.keep((function, number))
    assert told.numbers == []
    told.moments.take_in()
    told.moments.take_in()
    assert told.numbers == [1, 3]
    assert told.faults == ["wrong: 2"]


def test_what_is_kept_while_moments_are_taken_in_comes_after_them() -> None:
    told = Told()
    told.moments.keep((told.trains_meanwhile, 1))
    told.moments.keep((told.number, 2))
    told.moments.take_in()
    told.moments.take_in()
    assert told.numbers == [-1, 2, 1]


def test_a_thread_that_keeps_takes_in_itself_when_nobody_else_does() -> None:
    told = Told()
    for number in range(MOST_WAITING - 1):
        told.moments.keep((told.number, number))
        told.moments.make_room()
    assert told.numbers == []
    told.moments.keep((told.number, MOST_WAITING - 1))
    told.moments.make_room()
    assert told.numbers == list(range(MOST_WAITING))


def test_two_threads_take_in_each_moment_once_and_in_order() -> None:
    told = Told()
    over = threading.Event()

    def heartbeat() -> None:
        while not over.is_set():
            told.moments.take_in()

    thread = threading.Thread(target=heartbeat)
    thread.start()
    for number in range(20_000):
        told.moments.keep((told.number, number))
        if number % 7 == 0:
            told.moments.take_in()
            assert told.numbers[-1] == number  # whoever takes in last knows all that was kept before
    over.set()
    thread.join()
    told.moments.take_in()
    assert told.numbers == list(range(20_000))


def test_a_forked_child_takes_in_nothing_of_its_parent_and_does_not_wait_for_its_threads() -> None:
    told = Told()
    held = threading.Event()
    let_go = threading.Event()

    def hold() -> None:
        with told.moments.lock:
            held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    told.moments.keep((told.number, 1))
    told.moments.become_forked_child()
    told.moments.keep((told.number, 2))
    told.moments.take_in()
    assert told.numbers == [2]
    let_go.set()
    thread.join()
