"""What a rank of a test is observed by: the hooks of a whole rehearsal, of which nothing is cut, refused or ended."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pytest

from ddpdoctor.probe.groups import GroupBook, Groups
from ddpdoctor.probe.heartbeat import log_as_rank, register_for_stacks
from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.process import ProcessEnd
from ddpdoctor.probe.rehearsal.collective_hook import CollectiveHook, hook_non_member_calls
from ddpdoctor.probe.rehearsal.data.loaders import Loaders
from ddpdoctor.probe.rehearsal.files.accesses import Accesses, listen
from ddpdoctor.probe.rehearsal.loop_subjects import Subjects
from ddpdoctor.probe.rehearsal.schedule import Ending, Pace, Schedule
from ddpdoctor.probe.rehearsal.surroundings import hook_sleep
from ddpdoctor.probe.rehearsal.training.ddp_modules import Modules
from ddpdoctor.probe.rehearsal.training.reduction import ReducedLosses
from ddpdoctor.probe.rehearsal.training.steps import Steps
from ddpdoctor.probe.stand_in.install import StandIn

# Reads the mark `ddp` of a test; stdlib and pytest only.

Device = Literal["cpu", "stand-in", "cuda"]
MOST_RANKS = 64


@dataclass(frozen=True)
class DdpMark:
    """What a test asks for."""

    nproc: int = 2
    timeout: float = 60.0
    """Seconds, of the body and of what its modules import, and not of starting the ranks."""
    device: Device = "cpu"
    init: bool = True
    """The default process group is there when the body begins."""


def mark_of(item: pytest.Item) -> DdpMark:
    """Return what the nearest mark of a test says; fails the test where it says nonsense."""
    mark = item.get_closest_marker("ddp")
    assert mark is not None
    return asked_of(*mark.args, **mark.kwargs)


def asked_of(*arguments: Any, **options: Any) -> DdpMark:
    """Return what a mark or ``ddp_run`` asks for; fails the test where it is nonsense."""
    try:
        given = inspect.signature(DdpMark).bind(*arguments, **options)
    except TypeError as error:
        pytest.fail(f"a test on ranks takes nproc, timeout, device and init: {error}", pytrace=False)
    asked = DdpMark(*given.args, **given.kwargs)
    if type(asked.nproc) is not int or not 1 <= asked.nproc <= MOST_RANKS:
        pytest.fail(f"a test on ranks needs 1 to {MOST_RANKS} ranks, not {asked.nproc!r}", pytrace=False)
    if not isinstance(asked.timeout, (int, float)) or not 0 < asked.timeout < math.inf:
        pytest.fail(f"a test on ranks needs a timeout in seconds, not {asked.timeout!r}", pytrace=False)
    if asked.device not in get_args(Device):
        known = ", ".join(get_args(Device))
        pytest.fail(f"a test on ranks knows the devices {known}, not {asked.device!r}", pytrace=False)
    return asked


class RankHooks:
    """Hooks that lie in wait in a warm process, and write once ``begin`` has made a rank of it."""

    def __init__(self, torch: Any, root: str, device: str, gpus: int) -> None:
        """``root`` is the user's directory; the stand-in pretends so many ``gpus``."""
        self._torch = torch
        journal = self.journal = Journal("", {"kind": "warm", "project_root": root, "device": device})
        journal.hold()
        self.process_end = ProcessEnd(journal)
        ending = Ending(journal, self.process_end)
        hook_sleep(journal)
        if device == "stand-in":
            StandIn(journal, torch, gpus)
        schedule, pace = Schedule(ending, 0, full=True), Pace(ending, 0.0, float("inf"))
        loaders = Loaders(journal, schedule, ending, torch)
        loaders.install()
        modules = _Modules(journal, ending, torch, loaders.newest_batch, pace)
        modules.install()
        self._modules = modules
        reduced = ReducedLosses(journal)
        Steps(journal, modules, loaders, schedule, pace, ending, torch, reduced).install()
        self._groups = GroupBook(journal, torch)
        Groups(journal, torch, self._groups, self._world_made).install()
        self._collective_hook = CollectiveHook(
            journal, torch, reduced, Subjects(journal, torch, modules.tensor_name), self._groups
        )
        if torch.distributed.is_available():
            self._collective_hook.install()
        hook_non_member_calls(journal, torch)

    def begin(self, run_directory: str, plan: dict[str, Any], rank: int, world_size: int) -> None:
        """This process, forked or not, is a rank of the run from now on."""
        journal = self.journal
        journal.begin(run_directory, plan, rank)
        self.process_end.install()
        os.register_at_fork(after_in_child=journal.become_forked_child)
        register_for_stacks(run_directory)
        # Tells a rank that asks for a file for nothing from one that is at work.
        accesses = Accesses(journal)
        listen(journal, accesses.listeners())
        accesses.install()
        journal.release()
        journal.event(
            "process",
            parent=os.getppid(),
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            kind="start",
        )
        journal.event("torch", version=str(self._torch.__version__))

    def finished(self, code: int) -> None:
        """The test's body is over, by ``sys.exit(code)`` where that is not 0; nothing after it counts."""
        self._close()
        self.journal.event("exit", code=code, finished=code == 0)

    def failed(self, error: BaseException) -> None:
        """The body has raised what fails the test."""
        self._close()
        self.journal.guarded(self.process_end.report, error, harms=("ranks",))

    def _close(self) -> None:
        self.journal.guarded(self._modules.close_iterations, harms=("backwards", "missing_gradients"))
        self.journal.settle()

    def _world_made(self, rank: int, world_size: int) -> None:
        """The process group is there: log its collectives from now on, and say that this rank lives."""
        if not log_as_rank(self.journal, rank):
            return
        self._groups.note_world()


class _Modules(Modules):
    """Those of a test, which ends by itself however much memory it takes."""

    def _shortage(self, module: Any) -> str:
        return ""
