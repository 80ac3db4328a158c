"""Reads one log: puts its lines of interest together into incidents and ends of ranks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sized
from itertools import count
from signal import SIGABRT
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from ddpdoctor.files.untrusted import reason_of
from ddpdoctor.finding import Frame
from ddpdoctor.postmortem import launchers
from ddpdoctor.postmortem.catalogue.messages import counts_at_any_level, statement_in
from ddpdoctor.postmortem.failed_collectives import FailedCollectives
from ddpdoctor.postmortem.failures import details_of, is_of_rendezvous, own_rank
from ddpdoctor.postmortem.line_forms import BoxedTracebacks, lines_in, parts_of
from ddpdoctor.postmortem.prefixes import Habit, OtherPrefixes, Prefixed, last_time, split
from ddpdoctor.postmortem.scan import Heed, Scanner
from ddpdoctor.postmortem.tracebacks import HEADER, Raised, Tracebacks, hint_of, parse
from ddpdoctor.record.streams.setup import ERROR_LINE, Incident, RankEnding

# Tells whether a job went on after something that it printed: lines of the kind that it wrote before, or its end.

_FINISHED = re.compile(
    r"\b(?:training|train|run|fit|fine-?tuning|trainer)\b[^.:]{0,30}\b(?:complete[d]?|finished|done)\b"
    r"|worker group (?:successfully )?finished|`Trainer\.fit` stopped",
    re.IGNORECASE,
)
"""How trainers (Hugging Face, Lightning, MMEngine, scripts of their own) and torchrun say that they came to the end."""
_FAILED = re.compile(r"error|exception|fail|abort|traceback|exit code [1-9]", re.IGNORECASE)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_KERNEL = re.compile(r"\[ *\d+\.\d{6}\] ")
_COLUMNS = re.compile(r"\t| {2,}")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_BAR = re.compile(r"\d+%\|.*?(?P<done>\d+)/(?P<of>\d+) \[")
_COUNTED = re.compile(
    # torch's examples, Hugging Face and Megatron: "Train Epoch: 1 [640/60000", "'epoch': 0.2", "iteration  100/".
    r"(?<![a-z])(?:epoch|step|iter(?:ation)?)s?(?:\(\w+\)| is)?[\W_]{0,16}?(\d+(?:\.\d+)?)(?:\W{1,16}?(\d+)/)?",
    re.IGNORECASE,
)
_MEASURED = re.compile(r"\d\.\d")
"""Who counts retries measures nothing."""
_RISES = 3
"""So many counts of one rank, each above the one before: a job that gets on, though it wrote no such line earlier."""
_MOST_KINDS = 2_000
_MOST_NOTED = 200
"""Pieces of a log whose kinds of lines are noted."""
_MOST_FOLLOWED = 2_000
"""Lines soon after failures of which the kinds are noted."""
_FINISH = 1_000
"""Lines of progress that a statement of the job's end counts for."""


class Later(msgspec.Struct, frozen=True):
    """A line of progress near the end of a log."""

    line: int
    rank: int | None
    counts: int


class Progress:
    """What one log looks like while its job gets on."""

    def __init__(self, habit: Habit, year: int) -> None:
        self._habit, self._year = habit, year
        self._kinds: set[tuple[str, ...]] = set()
        self._once: set[tuple[str, ...]] = set()
        self._followed = 0
        self._columns = 0
        """Of the table whose rows are being read; 0 outside of one."""
        self._noted = 0

    def note(self, text: bytes) -> None:
        """Note the kinds of lines in a piece of the log that has no failure."""
        if self._noted < _MOST_NOTED and len(self._kinds) < _MOST_KINDS:
            self._noted += 1
            for line in text.decode("utf-8", "replace").splitlines():
                kind = _kind_of(split(line, self._habit, self._year).text)
                if kind:
                    self._kinds.add(kind)

    def note_if_again(self, line: bytes) -> None:
        """Note the kind of a line that stands soon after a failure, when there are two of it: one may be about that."""
        self._followed += 1
        if self._followed > _MOST_FOLLOWED:
            return
        text = split(line.decode("utf-8", "replace"), self._habit, self._year).text
        columns = len(_COLUMNS.split(text.strip()))
        # Rows below a heading are of the failure: the processes that had most of the memory.
        heads = columns > 1 and not any(character.isdigit() for character in text)
        if heads or columns != self._columns:
            self._columns = columns if heads else 0
        kind = _kind_of(text) if not self._columns else ()
        if kind and kind in self._once:
            self._kinds.add(kind)
        self._once.add(kind)

    def at_the_end(self, tail: bytes, first_line: int) -> tuple[Later, ...]:
        """Return the lines of progress in the last piece of the log, whose first line has that number."""
        found = []
        reached: dict[str, int] = {}
        rising: dict[tuple[int | None, tuple[str, ...]], list[tuple[tuple[float, ...], int]]] = {}
        for number, line in enumerate(tail.decode("utf-8", "replace").split("\n"), first_line):
            prefixed = split(line, self._habit, self._year)
            text = prefixed.text
            bar = _BAR.search(text)
            # A bar is drawn once more when its process ends.
            before = reached.get(bar["of"]) if bar else None
            if bar:
                reached[bar["of"]] = max(int(bar["done"]), before or 0)
            if _FAILED.search(text) or prefixed.level in ("E", "F", "W"):
                continue
            kind = _kind_of(text)
            if _FINISHED.search(text):
                found.append(Later(number, prefixed.rank, _FINISH))
            elif int(bar["done"]) > before if bar and before is not None else kind in self._kinds:
                found.append(Later(number, prefixed.rank, 1))
            elif kind and _MEASURED.search(text) and (counts := _COUNTED.findall(text)):
                counted = tuple(float(one or 0) for pair in counts for one in pair)
                before_it = rising.setdefault((prefixed.rank, kind), [])
                if not before_it or counted > before_it[-1][0]:
                    before_it.append((counted, number))
        for (rank, _), counts in rising.items():
            found += [Later(number, rank, 1) for _, number in counts if len(counts) >= _RISES]
        return tuple(found)


def went_on(later: tuple[Later, ...], line: int, rank: int | None) -> int:
    """Return how many lines of progress follow a line that a rank wrote; of any process where it is not known which."""
    return sum(
        one.counts for one in later if one.line > line and (rank is None or one.rank == rank or one.counts == _FINISH)
    )


def _kind_of(text: str) -> tuple[str, ...]:
    """Return the words by which lines of progress are alike; empty for a line that has no figure."""
    if " NCCL INFO " in text or "NVRM: " in text or _KERNEL.match(text) or _ADDRESS.search(text):
        # NCCL traces an error through its files in the lines that it writes while it works; a stack is no progress, and
        # what the kernel writes is none of the job.
        return ()
    if _BAR.search(text):
        return ("%",)
    if not any(character.isdigit() for character in text) or _FAILED.search(text):
        return ()
    return tuple(word.lower() for word in _WORDS.findall(text[:200])[:2])


_OF_TORCH = re.compile(r"\[(?P<level>[IWEF])(?:\d{3,4} [\d:.]+)? (?P<source>[\w./]+\.cpp:\d+)\] (?P<message>.*)")
MARKS = re.compile(rb"^\[rank(\d{1,6})\]:", re.MULTILINE)
_BARE = re.compile(r"(?<![\w.])(?:[a-z_]\w*\.)*(?P<type>[A-Z]\w*(?:Error|Exception)): (?P<message>.+)")
"""An exception whose traceback is not there: the log begins in it, someone kept the last line, or a logger wrote it."""
_QUALIFIED = re.compile(
    r"(?<![\w.])(?!(?:javax?|org|com|scala|kotlin|System)\.)(?:[A-Za-z_]\w*\.){2,}"
    r"(?P<type>[A-Z]\w*(?:Error|Exception)): (?P<message>.+)"
)
"""One that someone quotes within a sentence, with its module; names of Java and .NET are none of Python's."""
_ALONE = re.compile(r"(?P<type>(?<![A-Za-z])[A-Z][a-z]\w*?(?:Error|Exception)):?\s*$")
"""One that stands alone, or at the end of what other ranks wrote in its line."""
_BEFORE_WORDS = re.compile(r"(?:[^\x21-\x7e]|[`*\"'|>-])*")
"""Signs, and the marks of those who quote a line."""
_GRAVE = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
_MILD = re.compile(r"\b(?:INFO|DEBUG|WARN(?:ING)?|[Ww]arning|[Rr]etry\w*)\b")
"""A logger's line that reports no failure, whatever else it says."""
_REPORTED = re.compile(r"(?:[\w./-]+: )?(?:fatal(?: error)?|error)\b: ?\S", re.IGNORECASE)
"""How programs begin a line that says why they end."""
_ENDPOINT = re.compile(rb"rdzv[-_]endpoint[ \t]*[:= ][ \t]*'?([\w.-]+:\d+)")
_WORLD_SAID = re.compile(rb"world[ _]?size[\"' ]?[=:] ?(\d{1,6})|\bnranks (\d{1,6})", re.IGNORECASE)
_TRAINING = re.compile(
    rb"torch|nccl|gloo|c10d|\bcuda|\bXid\b|srun|slurm|mpirun|deepspeed|accelerate|lightning|horovod|\braylet\b"
    rb"|\bray[:.]|\btrain|_train|finetun|fine-tun|dataloader|tensor|\bepoch|\bmodel\b|\bloss\W+\d|\brank\W*\d|\bepochs\b",
    re.IGNORECASE,
)
"""Words of programs that train, and of those that start them; servers, compilers and databases write none of them."""
_AGENT = re.compile(r"/torch/distributed/(?:elastic/(?:agent|rendezvous)/|launcher/|run\.py|launch\.py)")
_TERMINATED = re.compile(
    r"terminate called (?:without an active exception|after throwing an instance of '(?P<type>[^']+)')"
)
_LAST_WORDS = re.compile(r"(?=.{8,120}$)(?:\**[a-z ][^\d|\[\]{}]*|.*Assertion `.+' failed\.)$")
"""What the C library and the runtime of C++ say before they abort: no figure, no capital, no time, no level."""
_WHAT = re.compile(r"what\(\):\s*(?P<message>.*)")
_OF_MESSAGE = re.compile(r"\s*(?:-|socket\w+ ?: |NET/\w+ ?: |Net ?: )")
"""Further lines of a message of torch's C++ side that say who: of desync reports, and NCCL's last error."""
_OF_RAY = re.compile(r"\s*(?:Worker )?(?:(?i:pid): (?P<pid>\d+)|(?i:ip(?: address)?): (?P<host>\w[\w.:]*))\s*$")
"""Further lines of what Ray says of a process that ended."""
_WORLD = re.compile(r"(?:\d+/(?P<joined>\d+) clients joined|world_size[=:] ?(?P<said>\d+))")
_LAUNCHER = re.compile(
    r"/torch/(?:distributed/(?:run|launch|launcher/api|elastic/agent/server/api)|multiprocessing/spawn)\.py$"
)
_STARTER = re.compile(r"/deepspeed/launcher/\w+\.py$|/accelerate/commands/launch\.py$")
"""Launchers that raise what ``subprocess`` says of the ranks."""
_DEAD_ACTORS = frozenset({"ActorDiedError", "RayActorError", "Ray"})
"""What Ray raises, or says, where the process of an actor ended; the second of versions before 2.10."""
_FROM_OUTSIDE = frozenset({"SignalException"})
_GROUPS = frozenset({"ExceptionGroup", "BaseExceptionGroup"})
"""Their parts follow, each with a traceback of its own."""
_ANNOUNCES = frozenset({"ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SystemExit"})
"""What a launcher raises because a rank has failed."""
_SAYS_THAT_ONE_ENDED = re.compile(r"detected that one or more processes exited with non-zero status")
"""What mpirun and horovodrun say because of it: the next lines say which."""
LINES_AFTER = 24
"""After a message of torch's C++ side so many lines may belong to it: reports of a desync, ``what()``."""
LAST_WORDS = 2
"""A warning is what a log ends with where no more lines follow it."""
LAST_LINES = 12
"""An error that no row of the catalogue knows may be the death where the log ends so soon behind it."""
HEAD_OF_A_LINE = 100
"""Characters in which a logger has written the level."""
LONGEST_NAMED, LONGEST_SEARCHED = 500, 5_000
"""Characters of a line in which the name of an exception, or a statement of the catalogue, is looked for."""
MOST_INCIDENTS, MOST_LATEST = 15_000, 2_000
"""Of one log the first and the last ones; those between are counted and not kept."""

_IGNORED = "Exception ignored"
"""Python writes it above the traceback of what it goes on after: in a destructor, a callback, an exit handler."""
_SOON_LINES = 3
"""Lines of other ranks may come between that, or the message of an error file, and the traceback."""


class LogRead(msgspec.Struct, kw_only=True):
    """The content of one log."""

    incidents: list[Incident] = []
    endings: list[RankEnding] = []
    ranks: set[int] = set()
    """Ranks that a prefix names."""
    world_size: int = 0
    lines: int = 0
    dropped: int = 0
    """Incidents beyond those that are kept."""
    attempts: int = 1
    later: tuple[Later, ...] = ()
    """Lines of progress near the end."""
    last_line: int = 0
    """The last one that reports something."""
    endpoint: str = ""
    """Where the ranks meet, as the launcher prints it."""
    failed_in: FailedCollectives = msgspec.field(default_factory=FailedCollectives)
    began_ns: int = 0
    ended_ns: int = 0
    """By its first and its last time stamp."""
    problem: str = ""
    """A clause where it could not be read to its end."""
    of_training: bool = True
    """Something in it speaks of a training, or of a program that starts one."""
    sifted: tuple[int, int] | None = None
    """So many lines report failures that of these, from the first to the last, only what is new was read …"""
    skipped: tuple[int, int] | None = None
    """… and of these nothing."""


class LogReader:
    """Reads one log."""

    def __init__(
        self,
        name: str, habit: Habit, positions: count[int], *, rank: int | None = None, host: str = "", attempt: int = 0,
        year: int = 0,
    ) -> None:  # fmt: skip
        """``rank``, ``host`` and ``attempt`` follow from the log's place among others."""
        self.read_so_far = LogRead(of_training=False)
        self._name, self._habit, self._positions, self._year = name, habit, positions, year
        self._rank, self._host, self._attempt = rank, host, attempt
        self._tracebacks = Tracebacks()
        self._boxes = BoxedTracebacks()
        self._ignored = "", -_SOON_LINES
        self._other_prefixes = OtherPrefixes()
        self._table = launchers.FailureTable()
        self._after = 0
        self._line = 0
        """The one that is being read."""
        self._time_ns = 0
        self._spawned: int | None = None
        self._told_to_end: set[int] = set()
        self._latest: deque[Incident] = deque(maxlen=MOST_LATEST)
        self._local_ranks: set[int] = set()
        """Ranks that may be those on their node only …"""
        self._first_ranks: set[int] = set()
        """… and where they begin, by lines that name both."""
        self._failures: dict[tuple[str, int], list[int]] = {}
        """Where each launcher, by host and process, reported that its ranks had failed."""
        self._terminated: str | None = None
        """The class of the C++ exception that ended a process, until its message comes."""
        self._wrapped = ""
        """The first line of a launcher's sentence, until the second comes."""
        self._unread, self._unread_at = "", -1
        """The last line of which nothing was understood, and its number."""
        self._reported: tuple[Prefixed, str, int] | None = None
        """The last line that reports an error of which nothing else is known."""
        self._of_tasks: list[RankEnding] = []
        """How srun's tasks ended: ranks, or the launchers of nodes."""
        self._progress = Progress(habit, year)
        if rank is not None:
            self.read_so_far.ranks.add(rank)

    def read(self, stream: BinaryIO) -> LogRead:
        """Read the log to its end."""
        scanner = self._scanner = Scanner(self._take, self._note_context, self._leave)
        try:
            scanner.read(stream)
        except (OSError, EOFError) as error:
            self.read_so_far.problem = reason_of(error)
        self._add_raised(self._tracebacks.finish())
        for row in self._table.finish():
            self._take_row(row, Prefixed(""), scanner.lines)
        read = self.read_so_far
        if self._reported and read.of_training and scanner.lines - self._reported[2] < LAST_LINES:
            prefixed, text, number = self._reported
            self._add(
                Incident(kind="said", trouble="exception", type=ERROR_LINE, message=text, loose=True), prefixed, number
            )
        read.incidents += self._latest
        read.lines = scanner.lines
        read.sifted, read.skipped = scanner.sifted, scanner.skipped
        if not self._has_agent():
            read.endings += self._of_tasks
        else:
            read.endings += [replace(one, rank=None) for one in self._of_tasks if one.exit_code < 0]
        self._shift_local_ranks()
        read.last_line = max([read.last_line, *(one.line for one in read.incidents)])
        read.later = self._progress.at_the_end(*scanner.tail)
        read.ended_ns = last_time(scanner.tail[0].decode("utf-8", "replace"), self._year) or self._time_ns
        read.incidents = [
            replace(one, went_on=went_on(read.later, one.line, one.rank)) if one.line else one for one in read.incidents
        ]
        read.incidents = [
            replace(one, loose=read.lines - one.line <= LAST_WORDS)
            if (one.kind, one.trouble) == ("said", "no-rendezvous")
            else one
            for one in read.incidents
        ]
        read.incidents = [replace(one, attempt=self._attempt_at(one.position)) for one in read.incidents]
        read.endings = [replace(one, attempt=self._attempt_at(one.position)) for one in read.endings]
        read.attempts = self._attempt + max((len(positions) for positions in self._failures.values()), default=1)
        return read

    def _attempt_at(self, position: int) -> int:
        """Return how often all launchers had reported a failure before a position, at which there still were ranks."""
        before = [sum(failed < position for failed in positions) for positions in self._failures.values()]
        most = max((len(positions) for positions in self._failures.values()), default=1) - 1
        return self._attempt + min(*before, most) if before else self._attempt

    def _shift_local_ranks(self) -> None:
        """Make ranks of the job of those on a later node, where a line or the launcher's table names both."""
        read = self.read_so_far
        first = self._first_ranks | {
            one.rank - one.local_rank for one in read.endings if one.rank is not None and one.local_rank is not None
        }
        # Of several nodes in one log it is not known whose line one is.
        if len(first) != 1 or (shift := first.pop()) <= max(self._local_ranks, default=0):
            return
        read.ranks = {rank + shift if rank in self._local_ranks else rank for rank in read.ranks}
        read.incidents = [
            replace(one, rank=one.rank + shift) if one.rank is not None and one.rank in self._local_ranks else one
            for one in read.incidents
        ]

    def _has_agent(self) -> bool:
        """Return whether torchrun's agent wrote in this log: then a scheduler's tasks are launchers, not ranks."""
        return any(one.by_agent for one in self.read_so_far.endings) or any(
            _AGENT.search(frame.file) for one in self.read_so_far.incidents for frame in one.frames
        )

    def _leave(self) -> None:
        """Close what is open: lines that belong to it may be left out."""
        self._add_raised(self._tracebacks.finish(goes_on=True))
        self._after = 0

    def _note_context(self, text: bytes) -> None:
        self.note_ranks(text)
        self._progress.note(text)
        self._time_ns = last_time(text.decode("utf-8", "replace"), self._year) or self._time_ns

    def note_ranks(self, text: bytes) -> None:
        """Note which ranks write in a piece of the log."""
        read = self.read_so_far
        if b"[rank" in text:
            read.ranks.update(map(int, MARKS.findall(text)))
        read.of_training = read.of_training or _TRAINING.search(text) is not None
        for said in _WORLD_SAID.findall(text) if b"nranks" in text or b"orld" in text or b"ORLD" in text else ():
            read.world_size = max(read.world_size, int(said[0] or said[1]))
        if b"rdzv" in text and (match := _ENDPOINT.search(text)):
            read.endpoint = match[1].decode()

    def _take(self, line: bytes, number: int) -> Heed:
        before = self._taken_in
        self._line = number
        self.note_ranks(line)
        lines = lines_in(line.decode("utf-8", "replace"), self._habit, self._year)
        self._scanner.count_parts(len(lines) + self._tracebacks.weight)
        for prefixed in lines:
            self._time_ns = prefixed.time_ns or self._time_ns
            if prefixed.local is not None and prefixed.rank is not None:
                self._local_ranks.add(prefixed.local)
                if prefixed.marked.startswith("rank"):
                    self._first_ranks.add(prefixed.rank - prefixed.local)
            for part in parts_of(prefixed.text):
                own = split(part, self._habit, self._year) if part.startswith("[rank") else replace(prefixed, text=part)
                self._other_prefixes.strip(own)
                if own.rank is not None:
                    self.read_so_far.ranks.add(own.rank)
                text = self._boxes.translate(own.marked, own.text)
                if text is not None:
                    self._take_text(own, text, number)
        self._after = max(0, self._after - 1)
        if self._taken_in != before:
            self.read_so_far.last_line = number
        elif self._after and not self._tracebacks.busy:
            self._progress.note_if_again(line)
        if self._tracebacks.busy or self._table.open or self._after > 0 or self._wrapped:
            return "more"
        return "something" if self._taken_in != before else "nothing"

    @property
    def _taken_in(self) -> int:
        read = self.read_so_far
        kept: tuple[Sized, ...] = read.incidents, self._latest, read.endings, self._of_tasks, self._told_to_end
        return read.dropped + sum(map(len, kept))

    def _take_text(self, prefixed: Prefixed, text: str, number: int) -> None:
        if not self._table.open and self._table.begins_within(text):
            self._table.begin()
        if self._table.open:
            for row in self._table.take(text):
                self._take_row(row, prefixed, number)
            return
        begins = self._tracebacks.begins(text)
        if _IGNORED in text:
            self._ignored = prefixed.marked, number
        if begins or self._tracebacks.begins_within(prefixed.marked, text):
            self._tracebacks.begin(
                Raised(
                    marked=prefixed.marked, line=number, host=prefixed.host, pid=prefixed.pid, time_ns=self._time_ns,
                    rank=self._spawned if prefixed.rank is None else prefixed.rank, position=next(self._positions),
                    width=self._boxes.width, headless=not begins, ignored=begins and self._is_ignored(prefixed, number),
                    hint=hint_of(text) or self._boxes.hint,
                ),
                text[: len(text) - len(text.lstrip())] if begins else "",
            )  # fmt: skip
            self._spawned = None
            if begins:
                self._of_launcher(prefixed, text.partition(HEADER)[0])
            if begins or hint_of(text):
                return
        belongs, done = self._tracebacks.take(prefixed.marked, text)
        self._add_raised(done)
        if not belongs:
            self._take_line(prefixed, text, number)
        elif "ChildFailedError" in text and not text.startswith(" "):
            self._table.begin()

    def _is_ignored(self, prefixed: Prefixed, number: int) -> bool:
        """Return whether Python wrote just before that it goes on: nobody is there to catch it, as in ``__del__``."""
        marked, line = self._ignored
        return marked == prefixed.marked and 0 <= number - line <= _SOON_LINES

    def _take_line(self, prefixed: Prefixed, text: str, number: int) -> None:
        """A line outside of any traceback."""
        if self.read_so_far.failed_in.take(prefixed.rank, text):
            self._after = LINES_AFTER
            return
        if ("joined" in text or "world_size" in text) and (match := _WORLD.search(text)):
            self.read_so_far.world_size = max(self.read_so_far.world_size, int(match["joined"] or match["said"]))
        if self._wrapped:
            text, self._wrapped = f"{self._wrapped} {text}", ""
        if (rank := launchers.spawned_rank(text)) is not None:
            self._spawned = rank
        elif ".cpp:" in text and (match := _OF_TORCH.search(text)):
            self._after = LINES_AFTER
            self._of_torch(prefixed, match["message"], number, level=match["level"])
        elif "terminate called" in text and (match := _TERMINATED.search(text)):
            self._after, self._terminated = LINES_AFTER, match["type"] or ""
            if "without" in text:
                self._aborted(prefixed, number, text)
        elif "what():" in text and (match := _WHAT.search(text)):
            self._of_torch(prefixed, match["message"], number, kind=self._terminated or "an exception of C++")
            self._terminated = None
        elif self._after and (match := _OF_RAY.match(text)):
            last = self.read_so_far.incidents[-1:]
            if last and not last[0].frames and number - last[0].line < LINES_AFTER:
                # Whoever tells of it has an address of its own.
                pid, host = int(match["pid"] or last[0].pid), match["host"] or last[0].host
                self.read_so_far.incidents[-1] = replace(last[0], pid=pid, host=host)
        elif self._after and _OF_MESSAGE.match(text):
            self._of_torch(prefixed, text, number)
        elif "ChildFailedError" in text:
            self._table.begin()
        elif any(word in text for word in launchers.WORDS_OF_WRAPPED) and launchers.WRAPPED.search(text):
            self._wrapped = text
        elif not self._of_launcher(prefixed, text):
            self._of_any_program(prefixed, text, number)

    def _of_any_program(self, prefixed: Prefixed, text: str, number: int) -> None:
        """A line that is none of torch's: an end, an incident, an exception without its traceback, or a statement."""
        endings = tuple(launchers.endings_in(text))
        for ending in endings:
            self._add_ending(ending, prefixed, of_task="srun:" in text)
        incidents = tuple(launchers.incidents_in(text))
        for incident in incidents:
            # Of each node with a single process that one is the first.
            elsewhere = incident.type == "deepspeed" and bool(prefixed.host)
            self._add(replace(incident, rank=None) if elsewhere else incident, prefixed, number)
        if endings or incidents or launchers.OF_NCCL in text:
            return
        match = alone = None
        if "Error" in text or "Exception" in text:
            grave = _GRAVE.search(text[:HEAD_OF_A_LINE]) is not None
            match = _BARE.search(text[:LONGEST_NAMED]) if grave else _BARE.match(text, _start_of(text))
            match = match or _QUALIFIED.search(text[:LONGEST_NAMED])
            alone = None if match else _ALONE.search(text[-LONGEST_NAMED:])
        if match:
            self._after = LINES_AFTER
            self._loose(prefixed, number, match["type"], text[match.start("message") :])
        elif alone and not _MILD.search(text[:HEAD_OF_A_LINE]):
            self._loose(prefixed, number, alone["type"], "")
        elif not self._stated(prefixed, number, text):
            before, (self._unread, self._unread_at) = (self._unread, self._unread_at), (text, number)
            # A terminal, or who posted it, may have wrapped the line.
            if before[1] == number - 1 and self._stated(prefixed, number - 1, f"{before[0]} {text}"):
                self._unread = ""

    def _stated(self, prefixed: Prefixed, number: int, text: str) -> bool:
        """Take in the line of any program if it holds a statement of the catalogue; return whether it does."""
        text = text[:LONGEST_SEARCHED].strip()
        if _MILD.search(text[:HEAD_OF_A_LINE]) and not counts_at_any_level(text):
            return False
        return self._loose(prefixed, number, "", text)

    def _loose(self, prefixed: Prefixed, number: int, name: str, message: str) -> bool:
        """Take in an exception without a traceback, or a statement; return whether it is one."""
        ended = launchers.of_command(message) if name == "CalledProcessError" else None
        if _SAYS_THAT_ONE_ENDED.search(message) or (name in _ANNOUNCES and not message):
            return True
        if name in _FROM_OUTSIDE or ended is not None:
            self._add(ended or launchers.signalled_from_outside(name, message), prefixed, number)
            return True
        kind, trouble, more = details_of(name, message, (), anywhere=not name)
        unknown = (kind, trouble) == ("raised", "exception") and "type" not in more
        if unknown and not name:
            grave = _GRAVE.search(message[:HEAD_OF_A_LINE]) or _REPORTED.match(message)
            if grave and ((found := statement_in(message)) is None or found.row.role != "noise"):
                self._reported = prefixed, message, number
            return False
        if kind == "timed-out" or more.get("type") == "Ray":
            self._after = LINES_AFTER  # Horovod lists below who does not come, and Ray which process it was.
        rank, self._spawned = own_rank(message) if self._spawned is None else self._spawned, None
        incident = Incident(
            kind="said" if unknown else kind, trouble=trouble, rank=rank, message=message, loose=True,
            **{"type": name, **more},
        )  # fmt: skip
        self._add(incident, prefixed, number)
        return True

    def _of_torch(self, prefixed: Prefixed, message: str, number: int, *, level: str = "E", kind: str = "") -> None:
        """A message of torch's C++ side; ``kind`` is the class of an exception that no one caught."""
        found, trouble, more = details_of("", message, ())
        known = found != "raised" or trouble in ("out-of-memory", "shared-memory") or "type" in more
        if level in "IW":
            # A warning is no failure, but may say at which port one came to be.
            if trouble != "no-rendezvous" or "already in use" not in message:
                return
            found = "said"
        elif not known:
            if not kind or not message:
                return
            found, more = "said", {**more, "type": kind}
        incident = Incident(
            kind=found, trouble=trouble, rank=own_rank(message), message=message.strip(), **{"type": "", **more}
        )
        self._add(incident, prefixed, number)

    def _of_launcher(self, prefixed: Prefixed, text: str) -> bool:
        if "process" not in text and "exitcode" not in text and "death signal" not in text:
            return False
        if match := launchers.CLOSING.search(text) or launchers.FORCED.search(text):
            self._told_to_end.add(int(match["pid"]))
            self._add_ending(RankEnding(pid=int(match["pid"]), by_agent=True), prefixed)
        elif match := launchers.FAILED.search(text):
            local, pid, code = int(match["local"]), int(match["pid"]), int(match["code"])
            ending = RankEnding(local_rank=local, pid=pid, exit_code=code, by_agent=True)
            if code == -SIGABRT:
                self._aborted(prefixed, self._line)
            self._add_ending(ending, prefixed)
            self._failures.setdefault((prefixed.host, prefixed.pid), []).append(next(self._positions))
        elif match := launchers.TOLD_TO_END.search(text):
            number = int(match["number"]) if match["number"] else None
            self._add(launchers.from_outside(number, "launcher", text.strip()), prefixed, 0)
        else:
            return False
        return True

    def _aborted(self, prefixed: Prefixed, number: int, text: str = "") -> None:
        """Take in that a process aborted; the line in front of it, where no logger wrote that, may say why."""
        before = self._unread.strip() if self._unread_at == number - 1 else ""
        said = [before] if _LAST_WORDS.match(before) else []
        if said or text:
            message = "; ".join([*said, text.strip()] if text else said)
            self._add(
                Incident(kind="signalled", trouble="killed", signal=SIGABRT, type="terminate", message=message),
                replace(prefixed, rank=None) if not text else prefixed,
                number,
            )

    def _take_row(self, row: dict[str, str], prefixed: Prefixed, number: int) -> None:
        """A row stands behind the failure that it is about."""
        ending = launchers.ending_of(row)
        if ending is None:
            return
        self._add_ending(ending, Prefixed(""))
        raised = parse(row.get("traceback", ""))
        if raised is not None:
            raised.rank, raised.time_ns, raised.line = ending.rank, ending.time_ns, number
            raised.root.position = next(self._positions)
            self._add_raised([raised])

    def _add_ending(self, ending: RankEnding, prefixed: Prefixed, *, of_task: bool = False) -> None:
        known = replace(
            ending, host=ending.host or prefixed.host or self._host, time_ns=ending.time_ns or self._time_ns,
            was_ended=ending.pid in self._told_to_end, file=self._name, line=self._line, position=next(self._positions),
        )  # fmt: skip
        (self._of_tasks if of_task else self.read_so_far.endings).append(known)

    def _add_raised(self, done: Iterable[Raised]) -> None:
        for raised in done:
            root = raised.root
            if root.type in _GROUPS or root.ignored or raised.ignored:
                continue
            # Behind the frames of the first exception those in which it was passed on: the user's line may be there.
            frames = tuple(reversed(root.frames)) + (() if root is raised else tuple(reversed(raised.frames)))
            by_launcher = any(_LAUNCHER.search(frame.file) for frame in frames)
            endings = tuple(launchers.endings_in(root.text)) if by_launcher else ()
            by_starter = bool(frames) and _STARTER.search(frames[0].file) is not None
            if root.type in _FROM_OUTSIDE:
                incident = launchers.signalled_from_outside(root.type, root.text)
            elif root.type == "CalledProcessError" and (ended := launchers.of_command(root.text, of_rank=by_starter)):
                incident = ended
            elif by_starter and frames[0].function.endswith("handler"):
                incident = launchers.from_outside(None, root.type, root.text)
            elif endings or (by_launcher and root.type in _ANNOUNCES) or _SAYS_THAT_ONE_ENDED.search(root.text):
                for ending in endings:
                    self._add_ending(ending, Prefixed("", host=raised.host))
                self.read_so_far.last_line = max(self.read_so_far.last_line, root.line)
                continue
            elif not root.type:
                waits = bool(frames) and _LAUNCHER.search(frames[0].file) is not None
                if waits and root.hint in ("", "KeyboardInterrupt"):
                    continue
                incident = replace(_cut_off(frames), type=root.hint)
                last = self.read_so_far.incidents[-1:]
                if last and last[0].loose and last[0].kind == "said" and 0 < root.line - last[0].line <= _SOON_LINES:
                    # Error files of torchelastic have the message above the traceback.
                    incident = replace(self.read_so_far.incidents.pop(), kind="raised", frames=frames, loose=False)
                if waits or root.hint in _DEAD_ACTORS | _ANNOUNCES - {"ProcessRaisedException"}:
                    message = f"{root.hint}: a process ended, and the log is cut off where its parent says how"
                    incident = Incident(kind="signalled", trouble="killed", type="Ray", message=message)
            else:
                kind, trouble, more = details_of(root.type, root.text, frames)
                incident = Incident(
                    kind=kind, trouble=trouble, message=root.text, frames=frames, mixed=root.mixed,
                    rank=own_rank(root.text), **{"type": root.type, **more},
                )  # fmt: skip
            rank = root.rank if raised.rank is None else raised.rank
            prefixed = Prefixed("", rank=rank, host=raised.host, time_ns=raised.time_ns, pid=raised.pid)
            self._add(replace(incident, position=root.position), prefixed, root.line)

    def _add(self, incident: Incident, prefixed: Prefixed, line: int) -> None:
        rank = prefixed.rank if prefixed.rank is not None else self._rank
        if incident.kind == "signalled" and incident.type in _DEAD_ACTORS:
            prefixed = replace(prefixed, host="", pid=0)  # Another process tells of it, perhaps elsewhere.
        is_room = len(self.read_so_far.incidents) < MOST_INCIDENTS
        self.read_so_far.dropped += not is_room and len(self._latest) == MOST_LATEST
        known = replace(
            incident, rank=rank if rank is not None else incident.rank, file=self._name, line=line,
            host=incident.host or prefixed.host or self._host, pid=incident.pid or prefixed.pid,
            time_ns=incident.time_ns or prefixed.time_ns or self._time_ns,
            position=incident.position or next(self._positions),
        )  # fmt: skip
        (self.read_so_far.incidents if is_room else self._latest).append(known)


def _start_of(text: str) -> int:
    """Return where the first word is: signs and words of other scripts stand before errors."""
    match = _BEFORE_WORDS.match(text)
    return match.end() if match else 0


def _cut_off(frames: tuple[Frame, ...]) -> Incident:
    """A traceback without its last line; in the code of a rendezvous it can only be that one which failed."""
    incident = Incident(kind="raised", trouble="exception", message="(the log ends in this traceback)", frames=frames)
    return replace(incident, kind="no-rendezvous", trouble="no-rendezvous") if is_of_rendezvous(frames) else incident
