"""What happens to a signal that reaches the monitor while it watches.

* SIGINT, SIGTERM, SIGHUP and SIGQUIT go to the launcher of a job that was started here, which ends the ranks; one that
  comes two seconds later, or after that, kills them.
* SIGUSR1 and SIGUSR2, on which scripts save a checkpoint (Slurm's ``--signal=USR1@60``), go to the uppermost processes
  of the job that handle them: the launcher where it does, as srun and mpirun do, or else the ranks. A process that
  handles them not is left alone: it would die of them, and torchrun does not handle them.
* All others do nothing, but those that stop a process, that let it continue, or that say that it is broken.

A job that was not started here gets none.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ddpdoctor.diagnosis.wording import count
from ddpdoctor.report import streams
from ddpdoctor.report.streams import one_line

if TYPE_CHECKING:
    from ddpdoctor.launch.job import LaunchedJob

_END = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_RELAYED = frozenset((signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT))
_OF_A_SCREEN = _END | {signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH}
_BROKEN = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP)
_KEPT = signal.valid_signals() - {signal.SIGTSTP, signal.SIGCONT, *_BROKEN}
_LEFTOVERS_EVERY_S = 0.25
_SENT_BY_THE_KERNEL = 0
"""``si_code`` is above this when no process sent a signal: the terminal did, and to all of its foreground processes."""


@contextmanager
def kept() -> Iterator[None]:
    """Keep signals until they are waited for, so that none interrupts a look, and none ends the watching."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        while signal.sigtimedwait(_KEPT - before - _END, 0) is not None:
            pass  # What came and meant nothing may not end the program now.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def taken() -> Iterator[None]:
    """Hear those signals again that the screen takes itself, while it is shown."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_A_SCREEN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_A_SCREEN)


def wait(seconds: float) -> signal.struct_siginfo | None:
    """Sleep until the time is over, a child ends, or a signal comes that asks to end, which is given then.

    Not ``sigtimedwait``: when the process is stopped in it and continues after the time, Python 3.10 to 3.14 return
    what happened to be in memory.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
    received = signal.sigwaitinfo(_END | {signal.SIGCHLD, signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, 0)
    return received if received.si_signo in _END else None


def tell_to_end(job: LaunchedJob, received: signal.struct_siginfo, *, aloud: bool = True) -> None:
    """Pass on a signal that asks to end."""
    if aloud and not job.told_to_end:
        name = signal.Signals(received.si_signo).name
        streams.say(
            f"ddpdoctor: {name} forwarded to the job, which may take a while to end; repeat it after 2 s to "
            "kill the job"
        )
    by_key = received.si_signo in (signal.SIGINT, signal.SIGQUIT) and received.si_code > _SENT_BY_THE_KERNEL
    if by_key and not job.is_apart:
        job.was_told_by_the_terminal()
    else:
        job.forward(received.si_signo)


def end_leftovers(job: LaunchedJob) -> None:
    """End what a launcher that was told to end has left, unless the job means to leave it."""

    def wait_a_moment() -> None:
        if (received := wait(_LEFTOVERS_EVERY_S)) is not None:
            tell_to_end(job, received)

    job.end_leftovers(wait_a_moment, lambda text: streams.say(f"ddpdoctor: {one_line(text)}"))


class Relay:
    """Passes on the signals that neither end the watching nor are the screen's, by a thread of its own."""

    def __init__(self, job: LaunchedJob | None) -> None:
        """``job`` is None where it was not started here, so that nothing is done to it."""
        self._job = job
        self._aloud = True
        self._over = False
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-signals", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        if self._thread.ident is not None and self._thread.is_alive():
            signal.pthread_kill(self._thread.ident, signal.SIGUSR1)
        self._thread.join()

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Say nothing for a while: a screen is shown."""
        self._aloud = False
        try:
            yield
        finally:
            self._aloud = True

    def _run(self) -> None:
        while True:
            received = signal.sigwaitinfo(_RELAYED)
            if self._over:
                return
            self._pass_on(received)

    def _pass_on(self, received: signal.struct_siginfo) -> None:
        name = signal.Signals(received.si_signo).name
        if self._job is None:
            self._say(f"ddpdoctor: {name} was not forwarded: the job was not started here")
        elif received.si_signo == signal.SIGQUIT:
            tell_to_end(self._job, received, aloud=self._aloud)
        elif told := self._job.notify(received.si_signo):
            self._say(f"ddpdoctor: {name} was forwarded to {count(told, 'process', 'processes')} of the job")
        else:
            self._say(f"ddpdoctor: {name} was not forwarded: no process of the job handles it, so it would kill them")

    def _say(self, text: str) -> None:
        if self._aloud:
            streams.say(text)
