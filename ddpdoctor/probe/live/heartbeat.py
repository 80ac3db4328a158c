"""A thread that writes, five times a second, that this rank lives and what its training thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Optional

from ...record import layout
from ...record.writer import offset_ns
from ..heartbeat import ThreadWatch, give_back_the_signal, register_for_stacks, write_crash_dumps, write_stacks
from ..journal import Journal
from ..user_code import UserCode
from . import clocks
from .clocks import BACKWARD, DATA_WAIT, EVALUATION, FINISHED, OTHER, STARTING, OwnClocks
from .flight_recorder import Flights
from .observer import Observer

# The user's line that the training thread has stood at for a while, though what it calls there goes on.

STANDS_AFTER_NS = 500_000_000


class StandingLine:
    """The user's frames from one look to the next."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self._known: list[tuple[tuple[int, int], int]] = []
        """Code and instruction of each frame, outermost first, and since when it and those around it stand there."""

    def look(self, frame: Optional[FrameType], moved_ns: int, now_ns: int) -> Optional[FrameType]:
        """Return the innermost of the user's frames that has stood for a while; None if it did before ``moved_ns``.

        So an evaluation is located at the line that calls it, and a loop that makes steps nowhere.
        """
        frames = list(self._user_code.own(frame))[::-1]
        before, self._known = self._known, []
        stands, found = True, None
        for number, own in enumerate(frames):
            place = (id(own.f_code), own.f_lasti)
            stands = stands and number < len(before) and before[number][0] == place
            since_ns = before[number][1] if stands else now_ns
            self._known.append((place, since_ns))
            if now_ns - since_ns >= STANDS_AFTER_NS:
                found = own if since_ns >= moved_ns else None
        return found


LOOKS_WRITTEN = 25
"""After so many looks they are written: about every 5 s."""
_LOOKED_AT = (DATA_WAIT, OTHER)
"""What a rank does in code of the user's, of the phases that make it late."""


class Looks:
    """How often the training thread was met at a line of the user's while it was in one of some phases."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], int] = {}

    def note(self, phase: int, site: int) -> None:
        """Count a look."""
        self._found[phase, site] = self._found.get((phase, site), 0) + 1

    def write(self, journal: Journal, *, all_of_them: bool) -> None:
        """Write what was counted since the last time, once it is enough."""
        if not all_of_them and sum(self._found.values()) < LOOKS_WRITTEN:
            return
        found, self._found = self._found, {}
        for (phase, site), looks in found.items():
            journal.event("looked", phase=layout.PHASES[phase], site=site, looks=looks)


BEAT_S = 0.2
PATIENCE_S = 0.02
"""A process that is about to end waits no longer for a beat that is under way, which may be reading the recorder."""
FRAMES_HELD_S = 1.0
"""They are held for microseconds, or for as long as others keep the interpreter: nothing waits longer for it."""
SITE_AFTER_MS = 500
"""The user's line is written once the stack of the training thread stands for so long; before, that above its work."""
SUSPICIOUS_AFTER_MS = 1_500
"""A collective that is under way for so long while nothing else happens: the flight recorder is read."""
IDLE_AFTER_MS = 3_000
"""The same without a collective under way: the others may wait for this rank …"""
IDLE_AGAIN_MS = 60_000
"""… which is looked at once a minute at most."""
LATE_DUMPS_NS = 2_000_000_000
DUMPS_REST_NS = 600_000_000_000
"""Where a rank went on after a dump, the next waits for twice as long as that did, up to a tenth of this; after so long
without a dump it begins anew."""
DUMPED_AGAIN = 3
"""Times that progress and recorder are written at most, to be of one moment."""
_REDUCTION = layout.CALL_KINDS.index("reduction")


class HeartbeatThread:
    """A watch on the training thread of its own process, which takes its rows to their files."""

    def __init__(
        self,
        observer: Observer,
        flights: Flights,
        gauges: Gauges,
        note_progress: Callable[[], None],
        meet: Callable[[], None],
    ) -> None:
        """Call ``note_progress`` before a dump, for the passes over loaders, and ``meet`` in each beat."""
        self._observer = observer
        self._flights = flights
        self._gauges = gauges
        self._note_progress = note_progress
        self._meet = meet
        self._finished = False
        self._begin()

    def _begin(self) -> None:
        """Forget everything about the training thread, in a process where no thread of ours runs."""
        self._watch: Optional[ThreadWatch] = None
        self._answered = 0
        self._site = -1
        self._clocks = OwnClocks()
        self._standing = StandingLine(self._observer.journal.user_code)
        self._looks = Looks()
        self._step = self._stepped_ns = 0
        """The newest step, and when it was first seen."""
        self._progress: tuple[int, ...] = ()
        self._progress_ns = 0
        self._dumped: tuple[int, ...] = ()
        """The progress at which the flight recorder was read."""
        self._dumped_ns = 0
        self._gap_ns = 0
        """After a dump, the time within which a pause is a usual one; the monitor may request one meanwhile."""
        self._idle_dump_ns = 0
        self._beating = threading.Lock()
        self._holding_frames = threading.Lock()

    def become_forked_child(self) -> None:
        """Begin anew in a child, perhaps a rank: our thread does not exist in it, and may have held the locks."""
        self._finished = False
        self._begin()

    def start(self, thread: int) -> None:
        """Start to watch a thread of this process, or watch another one from now on; ours dies with the process."""
        is_first = self._watch is None
        self._watch = ThreadWatch(thread, self._observer.journal.user_code)
        if thread != threading.main_thread().ident:
            self._observer.journal.event("training_thread", thread=thread)
        if is_first:
            register_for_stacks(self._observer.journal.run_directory)
            write_crash_dumps(self._observer.journal.run_directory)
            threading.Thread(target=self._run, name="ddpdoctor-pulse", daemon=True).start()

    def let_frames_go(self) -> None:
        """Wait until the heartbeat's thread holds no frame of the training thread, and none of its objects.

        A process group that outlives its destruction keeps the server of its store, and a world that is made anew at
        the same port meets the keys of the old one.
        """
        if self._holding_frames.acquire(timeout=FRAMES_HELD_S):
            self._holding_frames.release()

    def resume(self) -> None:
        """Go on after all, as the script does."""
        self._finished = False

    def beat_now(self) -> None:
        """Beat once, in the calling thread, as the script is over; not where that would mean to wait."""
        self._finished = True
        if self._beating.acquire(timeout=PATIENCE_S):
            try:
                self._beat(dumps=False)
            finally:
                self._beating.release()

    def last_beat(self) -> None:
        """Write everything, as the script is over or about to end itself."""
        with self._beating:
            self._finished = True
            self._dump()
            self._beat()

    def _run(self) -> None:
        self._observer.journal.event("pulse", thread=threading.get_native_id())
        while self._observer.step_ring is not None:
            time.sleep(BEAT_S)
            with self._beating:
                try:
                    self._beat()
                except Exception as error:
                    self._observer.fault("pulse", error, harms=("call_tracks", "step_tracks"))
                    if self._observer.is_off:
                        return

    def _beat(self, *, dumps: bool = True) -> None:
        """Write how this rank is; ``dumps``: and answer requests, and read the flight recorder where that is due."""
        observer = self._observer
        steps_ring, calls_ring, journal = observer.step_ring, observer.call_ring, observer.journal
        watch = self._watch
        if steps_ring is None or calls_ring is None or watch is None:
            return
        if dumps:
            self._answer(steps_ring.requested(), watch)
            journal.guarded(self._meet, harms=())
        now_ns = time.monotonic_ns()
        with observer.moments.lock:
            observer.moments.take_in()
            observer.steps.hand_out(now_ns)
            phase, since_ns, call = observer.watch.phase, observer.watch.since_ns, observer.course.open_call
            step, evaluating = observer.steps.current, observer.steps.evaluating
        journal.guarded(self._gauges.look, step, self._finished, harms=("gauges",))
        calls_ring.flush(call)
        steps_ring.flush()
        watch.compute()
        if step != self._step:
            self._step, self._stepped_ns = step, now_ns
        with self._holding_frames:
            counts = step > 0 and not evaluating and phase in _LOOKED_AT
            is_blocked, wakes_at_ns = self._look_at_frames(watch, now_ns, phase if counts else None)
        self._looks.write(journal, all_of_them=self._finished)
        calls_ring.write_head()
        enqueued, completed, under_way = self._flights.counts()
        if dumps:
            waits = under_way > 0 and is_blocked and watch.unchanged_ms >= SITE_AFTER_MS
            late = waits and watch.since_ns > self._dumped_ns
            self._suspect((enqueued, completed, step, under_way), call is not None, now_ns, late=late)
        kind, sequence = (call[1][0], call[1][2]) if call is not None else (-1, -1)
        if call is None and phase == BACKWARD and enqueued > completed:
            kind = _REDUCTION
        if phase == OTHER and self._finished:
            phase = FINISHED
        elif phase == OTHER and not step:
            phase = STARTING
        elif phase == OTHER and evaluating:
            phase = EVALUATION
        heartbeat = (
            now_ns + offset_ns(),
            phase,
            since_ns + offset_ns(),
            step,
            kind,
            sequence,
            enqueued,
            completed,
            self._site,
            watch.cpu_ns,
            watch.unchanged_ms,
            hash(watch.stack),
            journal.forwards,
            journal.backwards,
            journal.optimizer_steps,
            self._answered,
            wakes_at_ns,
            journal.writer.lost,
            steps_ring.lost + calls_ring.lost,
            int(under_way > 0 and is_blocked),
            steps_ring.moved_bytes
            + steps_ring.heartbeat_bytes
            + calls_ring.moved_bytes
            + calls_ring.begun_bytes
            + journal.writer.moved_bytes
            + clocks.read_bytes,
        )
        steps_ring.write_head(heartbeat)

    def _look_at_frames(self, watch: ThreadWatch, now_ns: int, phase: Optional[int]) -> tuple[bool, int]:
        """Find where the training thread is, while its frames are held, which is to say not for long.

        It is counted for ``phase``, if there is one. Return whether it does nothing, and when a clock wakes it.
        """
        frame = watch.frame()
        is_blocked = watch.look(frame, now_ns)
        if phase is not None and frame is not None:
            self._looks.note(phase, self._observer.journal.site(frame))
        stands = watch.unchanged_ms >= SITE_AFTER_MS
        standing = self._standing.look(frame, self._stepped_ns, now_ns)
        located = frame if stands else standing
        self._site = self._observer.journal.site(located) if located is not None else -1
        return is_blocked, self._clocks.wakes_at_ns(frame, watch.thread, watch.since_ns) if stands else 0

    def _answer(self, requested: int, watch: ThreadWatch) -> None:
        """Write what a reader has requested."""
        journal = self._observer.journal
        give_back_the_signal(journal.run_directory)
        if requested != self._answered:
            write_stacks(journal, watch.thread)
            self._dump()
            self._answered = requested

    def _suspect(self, progress: tuple[int, ...], calls: bool, now_ns: int, *, late: bool) -> None:
        """Read the flight recorder once where nothing happens any more, and again where the thread came to wait later.

        What was open before it came to stand is not what it waits in, as far as a reader can see.
        """
        if progress != self._progress:
            if self._dumped == self._progress:
                # It went on: a job that pauses in every step would fill the disk.
                rests = now_ns - self._dumped_ns > DUMPS_REST_NS
                self._gap_ns = 0 if rests else min(DUMPS_REST_NS // 10, max(LATE_DUMPS_NS, 2 * self._gap_ns))
            self._progress, self._progress_ns = progress, now_ns
            return
        if now_ns - self._dumped_ns < self._gap_ns:
            return
        still_ms = (now_ns - self._progress_ns) // 1_000_000
        late = late and now_ns - self._dumped_ns > LATE_DUMPS_NS
        if (progress == self._dumped and not late) or still_ms < SUSPICIOUS_AFTER_MS:
            return
        if not calls and progress[3] <= 0:
            if still_ms < IDLE_AFTER_MS or now_ns - self._idle_dump_ns < IDLE_AGAIN_MS * 1_000_000:
                return
            self._idle_dump_ns = now_ns
        self._dumped = progress
        self._dump()

    def _dump(self) -> None:
        """Write where this rank is compared with the others.

        Again where a collective began meanwhile: on a loaded machine the training thread may draw a batch and be in its
        backward before the recorder is read, and a pass would seem to be a batch short of its reductions.
        """
        self._dumped_ns = time.monotonic_ns()
        for _ in range(DUMPED_AGAIN):
            enqueued = self._flights.counts()[0]
            self._observer.journal.guarded(self._note_progress, harms=("passes",))
            self._flights.dump()
            if self._flights.counts()[0] == enqueued:
                return


# Figures that hooks add up over the steps, and that the heartbeat's thread writes by name.

EVERY_STEPS = 10
EVERY_SHARE = 100
"""A total is written after so many more steps, or a hundredth more of them where that is more, and at the end: an event
costs about 10 µs, and only the newest counts. So a run of days, or of a million steps, adds a thousand of each."""


class Gauges:
    """The totals of one rank."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._readers: dict[tuple[str, str], Callable[[], int]] = {}
        self._first: dict[tuple[str, str], tuple[int, int]] = {}
        """Step and total at the first look: what was before training counts for no step."""
        self._written_step = 0

    def add(self, name: str, unit: str, total: Callable[[], int]) -> None:
        """Register a total, in ``unit`` (``ns``, ``bytes`` or ``count``), under the ``name`` that the screen shows.

        It only grows, and is shown a step: a level (memory, a temperature) has no meaning a step.
        """
        self._readers[name, unit] = total

    def look(self, step: int, last: bool = False) -> None:
        """Write every total where enough steps were made since the last time; called from the heartbeat's thread."""
        if not step:
            return
        is_due = last or step - self._written_step >= max(EVERY_STEPS, self._written_step // EVERY_SHARE)
        for key, total in self._readers.items():
            if key not in self._first:
                self._first[key] = step, total()
            first_step, first = self._first[key]
            if is_due and step > first_step:
                name, unit = key
                self._journal.event("gauge", name=name, unit=unit, total=total() - first, steps=step - first_step)
        if is_due:
            self._written_step = step
