"""The parts of a rehearsal inside a process of the job, put together."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from ..endless_loops import watch_workers
from ..environment import Settings
from ..groups import GroupBook, Groups
from ..heartbeat import log_as_rank
from ..journal import Journal
from ..nonfinite import NonFinite
from ..process import ProcessEnd
from ..stand_in.install import StandIn, install_compiling
from ..stand_in.process_groups import average_on_gloo
from ..user_code import beyond, calling_frame
from .collective_hook import CollectiveHook, hook_non_member_calls
from .data.lengths import cut_batches
from .data.loaders import Loaders
from .data.samples import Division, Randomness, Samples
from .executed_lines import Lines
from .files import no_touch
from .files.accesses import Accesses, listen
from .files.created_log import Checkpoints
from .files.open_files import share_directories
from .loop_subjects import Subjects
from .pretend.providers import Pretence
from .rendezvous import Rendezvous, hook_network
from .resume_trace import ResumeTrace
from .schedule import RESUMED_PASSES, TRAINING_PASSES, Ending, Pace, Schedule, Trail
from .surroundings import DeviceChoices, Failure, LightningTrainers, Stress, hook_sleep, hook_terminal
from .training.ddp_modules import HostReads, Modules, ShardedModules
from .training.emptied import Emptied
from .training.reduction import ReducedLosses
from .training.steps import Steps


class Rehearsal:
    """The hooks of one process, which live as long as it."""

    def __init__(self, journal: Journal, process_end: ProcessEnd) -> None:
        self._journal = journal
        self._ending = Ending(journal, process_end)
        self._process_end = process_end
        self._collective_hook: Optional[CollectiveHook] = None
        self._groups: Optional[GroupBook] = None
        self._modules: Optional[Modules] = None
        self._nonfinite: Optional[NonFinite] = None
        self._lines = Lines(journal)
        self._stress = Stress(journal)
        self._rendezvous = Rendezvous(journal, self._ending)
        self._pretence = Pretence(journal) if journal.plan.get("pretend") else None

    def before_torch(self) -> None:
        """Hook what must be in place before the user's first line: no-touch rule, what is not held back, lines."""
        journal = self._journal
        self._stress.before_torch()
        if self._pretence is not None:
            self._pretence.before_torch()
        hook_sleep(journal)
        hook_terminal()
        hook_network(journal)
        if journal.rank is not None or journal.plan.get("spawns_ranks"):
            journal.guarded(self._lines.start_before_torch, harms=("lines",))
            journal.on_beat = self._beat
        mount_points = journal.plan.get("mount_points")
        self._process_end.consequence = lambda error: no_touch.caused_by_overlay(error, mount_points)
        self._process_end.after_raising = Failure(journal, self._rendezvous.started).stay
        no_touch.install(
            journal.run_directory,
            bool(journal.plan.get("allow_writes")),
            self._refused,
            lambda action, path, existed: journal.event(
                "file", action=action, path=path, existed=existed, site=journal.here()
            ),
            self._child_started,
            mount_points,
            self._is_by_user,
        )
        if journal.plan.get("shares_directories"):
            share_directories(int(journal.plan["job"]["started_ns"]))
        accesses = Accesses(journal)
        settings = Settings(journal, lambda: journal.ring is not None)
        listen(journal, {"os.putenv": settings.put, "os.unsetenv": settings.remove, **accesses.listeners()})
        accesses.install()

    def after_torch(self, torch: Any) -> None:
        """Install the hooks once torch is there."""
        journal = self._journal
        no_touch.wrap_torch_writers(torch)
        plan = journal.plan
        stand_in = StandIn(journal, torch, int(plan["gpus_per_node"])) if plan.get("device") == "stand-in" else None
        if stand_in is None and plan.get("in_a_gpus_place"):
            # For the CPU the compiler calls the one for C++: a minute of both cores for a small model.
            install_compiling(torch)
            average_on_gloo(torch)
        if self._pretence is not None:
            self._pretence.after_torch(torch)
        passes = RESUMED_PASSES if plan.get("resume") else TRAINING_PASSES
        schedule = Schedule(self._ending, int(plan.get("batches", 4)), bool(plan.get("full")), passes)
        started_s = int(plan["job"]["started_ns"]) / 1e9
        pace = Pace(self._ending, started_s, float(plan.get("time_limit_s", "inf")))
        schedule.on_pace = pace.stepped
        schedule.on_enough = lambda: journal.guarded(self._lines.enough_rehearsed, harms=("lines",))
        if plan.get("batch_size"):
            cut_batches(torch, int(plan["batch_size"]))
        loaders = Loaders(journal, schedule, self._ending, torch)
        modules = Modules(journal, self._ending, torch, loaders.newest_batch, pace)
        if plan.get("equivalence"):
            from .equivalence.first_steps import FirstSteps

            loaders.no_workers = True
            FirstSteps(journal, torch, self._ending, modules).install()
        reduced = ReducedLosses(journal)
        self._groups = GroupBook(journal, torch)
        sharded = ShardedModules(journal, self._ending, torch, loaders.newest_batch, pace)
        sharded.install()
        modules.beside, modules.apart = sharded.parameters, sharded.apart
        self._collective_hook = CollectiveHook(
            journal,
            torch,
            reduced,
            Subjects(journal, torch, modules.tensor_name),
            self._groups,
            lambda: sharded.newest,
        )
        loaders.training_begins = modules.training_begins = lambda: journal.guarded(
            self._lines.training_begins, harms=("lines",)
        )
        self._nonfinite = nonfinite = NonFinite(
            journal,
            torch,
            modules.number_of,
            loaders.newest_samples,
            lambda: journal.optimizer_steps + 1,
            every_gradient=True,
        )

        trace = ResumeTrace(journal, torch, modules, loaders.newest_samples) if plan.get("resume") else None

        def hand_out(trail: Trail, batch: Any, inner: Any) -> Any:
            given = self._stress.hand_out(trail, batch, inner)
            journal.guarded(loaders.draws_from, inner, harms=())
            journal.guarded(nonfinite.batch_came, given, harms=("nonfinites",))
            if trace is not None:
                journal.guarded(trace.batch_came, given, harms=("resume_steps",))
            return given

        loaders.hand_out = hand_out
        loaders.install()
        watch_workers(journal, torch)
        randomness, division = Randomness(journal, torch), Division(journal, torch)
        randomness.install()
        division.install()
        samples = Samples(journal, torch, randomness, division)
        samples.install()
        loaders.in_workers_place = samples.leave_out
        modules.install()
        self._stress.after_torch(torch)
        nonfinite.install()
        nonfinite.listen()
        if trace is not None:
            trace.install()
        Steps(journal, modules, loaders, schedule, pace, self._ending, torch, reduced).install()
        Checkpoints(journal, torch).install()
        DeviceChoices(journal, torch).install()
        HostReads(journal, torch).install()
        Emptied(journal, torch).install()
        self._rendezvous.install()
        LightningTrainers(journal).install()
        Groups(journal, torch, self._groups, self._world_made).install()
        hook_non_member_calls(journal, torch)
        self._modules = modules
        self._process_end.before_report = self._close
        self._process_end.consequence = lambda error: (
            no_touch.caused_by_overlay(error, plan.get("mount_points"))
            or loaders.caused(error)
            or (stand_in.caused(error) if stand_in is not None else "")
        )
        self._process_end.owner_of_attribute = modules.inner_owner_of

    def _beat(self) -> None:
        """Write, a few times a second, what must outlive a process that is killed."""
        self._journal.guarded(self._lines.flush, harms=("lines",))
        no_touch.settle()
        self._ending.end_overdue(waits=self._journal.waits)

    def _close(self) -> None:
        """Write what is still open, as the process is about to end."""
        if self._modules is not None:
            self._modules.close_iterations()
        if self._nonfinite is not None:
            self._journal.guarded(self._nonfinite.close, harms=("nonfinites",))
        self._journal.guarded(self._lines.close, harms=("lines",))
        self._journal.settle()

    def _world_made(self, rank: int, world_size: int) -> None:
        """Log the collectives of this process, a rank, from now on, and start its heartbeat."""
        if not log_as_rank(self._journal, rank):
            return
        if self._collective_hook is not None:
            self._collective_hook.install()
        if self._groups is not None:
            self._groups.note_world()

    def _is_by_user(self) -> bool:
        """Return whether the user's own code is at work, and no library."""
        frame = beyond(calling_frame(), (ctypes.__file__,))
        return frame is not None and self._journal.user_code.holds(frame.f_code.co_filename)

    def _child_started(self, command: str, keeps_the_rules: bool) -> None:
        """Note a program that the user's code starts; what torch starts for itself is no news."""
        site = self._journal.here()
        if site >= 0:
            action = "held-child" if keeps_the_rules else "child-process"
            self._journal.event("file", action=action, detail=command[:500], site=site)

    def _refused(self, action: str, path: str, sentence: str) -> None:
        journal = self._journal
        journal.event("refused", path=path, text=sentence, site=journal.here())
        self._ending.end("no-touch")
