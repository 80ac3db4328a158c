"""What a rehearsed rank finds around it: memory, CPU threads, devices, sleep, Lightning, and injected failures."""

from __future__ import annotations

import functools
import io
import os
import threading
import time
from collections.abc import Callable, Iterable
from time import monotonic, sleep  # As they are before a rehearsal follows what sleeps.
from types import FrameType, ModuleType
from typing import Any, NamedTuple, Optional

from ...record.writer import epoch_ns
from ..journal import Journal
from ..torch_compat import after_import, on_call, replaces

# Whether a rank sleeps, and when it wakes, so that it is not taken for a stuck one.


def hook_sleep(journal: Journal) -> None:
    """Note while the main thread is in ``time.sleep``, and until when."""
    pause = time.sleep

    @functools.wraps(pause)
    def sleep(seconds: Any, /) -> None:
        if threading.current_thread() is not threading.main_thread():
            return pause(seconds)
        journal.sleeps_until_ns = journal.guarded(_end_ns, seconds, harms=("ranks",)) or 0
        try:
            pause(seconds)
        finally:
            journal.sleeps_until_ns = 0

    time.sleep = sleep


def _end_ns(seconds: Any) -> int:
    return min(epoch_ns() + int(seconds * 1e9), 1 << 62)


_TERMINAL = os.terminal_size((80, 24))
"""Columns and lines."""


def hook_terminal() -> None:
    """Answer what asks for the size of the terminal, as progress bars do: a rehearsed rank has none.

    Scripts ask by ``os.get_terminal_size()``, which raises then, and by ``os.popen("stty size")``, which says nothing.
    """

    @replaces("get_terminal_size", os)
    def get_terminal_size(size: Callable[..., os.terminal_size], *descriptor: Any) -> os.terminal_size:
        try:
            return size(*descriptor)
        except OSError:
            return _TERMINAL

    @replaces("popen", os)
    def popen(start: Any, cmd: str, mode: str = "r", buffering: int = -1) -> Any:
        if isinstance(cmd, str) and cmd.split() == ["stty", "size"]:
            return io.StringIO(f"{_TERMINAL.lines} {_TERMINAL.columns}\n")
        return start(cmd, mode, buffering)


# Fits a Lightning Trainer or Fabric to the ranks of the rehearsal: as many devices as there are ranks, on one node.

_CLASSES = (
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
)
_GPUS = ("auto", "gpu", "cuda")
_OWN_RANKS = ("spawn", "fork", "notebook")
"""Strategies that start their ranks themselves, even in a script that a launcher started."""


class LightningTrainers:
    """Changes to the arguments of trainers and fabrics, in ranks that a launcher started."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._device = str(journal.plan.get("job", {}).get("device", ""))

    def install(self) -> None:
        """Wait for Lightning's import."""
        if os.environ.get("LOCAL_WORLD_SIZE", "").isdigit():
            for module, name in _CLASSES:
                after_import(module, functools.partial(self._fit_guarded, name))

    def _fit_guarded(self, name: str, module: ModuleType) -> None:
        self._journal.guarded(self._fit, getattr(module, name), harms=("passes",))

    def _fit(self, made: Any) -> None:
        @replaces("__init__", made)
        def make_fitted(make: Any, self_: Any, *arguments: Any, **options: Any) -> None:
            options.update(self._journal.guarded(self._fitted, options, harms=("passes",)) or {})
            make(self_, *arguments, **options)

    def _fitted(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that a rehearsal sets; none for a strategy that is not DDP."""
        strategy = options.get("strategy", "auto")
        name = strategy if isinstance(strategy, str) else type(strategy).__name__.lower()
        if not name.startswith(("ddp", "auto")) or any(word in name for word in _OWN_RANKS):
            return {}
        fitted: dict[str, Any] = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": 1}
        if self._device == "cpu" and options.get("accelerator", "auto") in _GPUS:
            fitted["accelerator"] = "cpu"
            if str(options.get("precision", "")).startswith("16"):
                fitted["precision"] = "32-true"
        return fitted


# Keeps a rank that fails until the others have shown whether they fail alike.

STAYS_S = 3.0
"""At most; well under the five seconds after which a rehearsal ends that a failed rank has not brought to its end."""
LOOK_EVERY_S = 0.02
_FAILED = "failed-"


class Failure:
    """A delay of the end of a process that an exception ends."""

    def __init__(self, journal: Journal, started: Callable[[], int]) -> None:
        """Delay ends where ``started`` returns how many processes were started as ranks, 0 where that is not known."""
        self._journal = journal
        self._started = started

    def stay(self, error: BaseException) -> None:
        """Return once as many processes have failed as were started, or after ``STAYS_S``."""
        journal, expected = self._journal, self._started()
        of_the_script = isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
        if expected < 2 or not journal.may_be_rank or not of_the_script:
            return
        with open(os.path.join(journal.run_directory, f"{_FAILED}{os.getpid()}"), "w"):
            pass
        ends_s = monotonic() + STAYS_S
        while self._failed() < expected and monotonic() < ends_s:
            sleep(LOOK_EVERY_S)

    def _failed(self) -> int:
        return sum(name.startswith(_FAILED) for name in os.listdir(self._journal.run_directory))


# When a process chooses its GPU, and the barriers before that which have to guess it.

NOTED = 20


class DeviceChoices:
    """Listeners at ``torch.cuda.set_device`` and ``torch.distributed.barrier``."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._chosen = 0
        self._early = 0

    def install(self) -> None:
        """Listen to both functions."""
        cuda, distributed, journal = self._torch.cuda, self._torch.distributed, self._journal
        on_call(journal, cuda, "set_device", after=self._note_choice, harms=("device_choices",))
        if distributed.is_available():
            on_call(journal, distributed, "barrier", before=self._note_early, harms=("device_choices",))

    def _note_choice(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._chosen += 1
        if self._chosen <= NOTED:
            self._journal.event("device_choice", chosen=True, site=self._journal.site(frame))

    def _note_early(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._chosen or options.get("device_ids") is not None:
            return
        self._early += 1
        if self._early <= NOTED and self._journal.user_code.holds(frame.f_code.co_filename):
            self._journal.event("device_choice", chosen=False, site=self._journal.site(frame))


# On how many threads torch computes in a rank, and whether so many were chosen.


class CpuThreads:
    """Reported at the first optimizer step: what a script sets, it has set by then."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._set = False

    def install(self) -> None:
        """Listen to ``torch.set_num_threads``."""
        on_call(self._journal, self._torch, "set_num_threads", before=self._chosen, harms=("cpu_threads",))

    def note_threads(self) -> None:
        """Write the number of threads."""
        chosen = self._set or bool(self._journal.plan.get("threads_chosen"))
        self._journal.event("cpu_threads", threads=int(self._torch.get_num_threads()), chosen=chosen)

    def _chosen(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._set = True


STATE_BYTES = 16
"""Of each parameter that is trained: weight, gradient and Adam's two moments in single precision."""
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Need(NamedTuple):
    """What the ranks of this machine need for one model."""

    parameters: int
    total_bytes: int
    missing_bytes: int
    """What is not allocated yet when DDP is built."""


def need_of(parameters: Iterable[Any], ranks: int) -> Need:
    """Return the need of ``ranks`` ranks for a module with these parameters; those on other devices do not count."""
    count = total = held = 0
    for parameter in parameters:
        if parameter.device.type != "cpu":
            continue
        own = parameter.numel() * parameter.element_size()
        count += parameter.numel()
        held += own
        total += max(own, parameter.numel() * STATE_BYTES) if parameter.requires_grad else own
    return Need(count, ranks * total, ranks * (total - held))


def free_bytes(root: str = "/") -> Optional[int]:
    """Return what this machine and the container around us still give; None where both are unknown."""
    limits = [_of_machine(root), *(_of_cgroup(root, *names) for names in _CGROUPS)]
    return min((limit for limit in limits if limit is not None), default=None)


def shortage(need: Need, free: Optional[int], ranks: int) -> str:
    """Return a sentence that the memory does not suffice; empty when it does, or when that is not known."""
    if free is None or need.missing_bytes <= free:
        return ""
    return (
        f"the model has {need.parameters:,} parameters: {ranks} ranks need {_gigabytes(need.total_bytes)} for weights,"
        f" gradients and optimizer state, {_gigabytes(need.missing_bytes)} of it still to come,"
        f" and {_gigabytes(free)} of memory are free"
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def _of_machine(root: str) -> Optional[int]:
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_cgroup(root: str, limit: str, used: str) -> Optional[int]:
    try:
        numbers = []
        for name in (limit, used):
            with open(os.path.join(root, name.lstrip("/")), encoding="ascii") as file:
                numbers.append(int(file.read()))
    except (OSError, ValueError):  # none, or "max"
        return None
    return max(0, numbers[0] - numbers[1])
