"""What a rehearsed rank finds around it: memory, CPU threads, devices, sleep, Lightning, and injected failures."""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from time import monotonic, sleep  # As they are before a rehearsal follows what sleeps.
from types import FrameType, ModuleType
from typing import Any, NamedTuple, Optional

from ...record.writer import epoch_ns
from ..journal import Journal
from ..torch_compat import after_import, on_call, replaces
from .data.lengths import short_batch_samples
from .schedule import Trail

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
                fit = functools.partial(self._journal.guarded, self._fit, name, harms=("passes",))
                after_import(module, fit)

    def _fit(self, name: str, module: ModuleType) -> None:
        @replaces("__init__", getattr(module, name))
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


# One injected cause: a loss of one rank that is not a number, a short last batch, a slow rank 0.

NAN, SHORT_BATCH, SLOW_RANK = "nan", "short-batch", "slow-rank0"
STRESSED_RANK = 1
"""The rank with a loss unlike the others', and with a short last batch where no loader shows its length."""
NAN_STEP = 3
"""Training forward whose output is not a number; those before show that the script works."""
SLOW_STEP = 2
"""Optimizer step after which rank 0 is slow."""
FALLBACK_TIMEOUT_S = 600.0
"""How long rank 0 is slow where a group's timeout is not known: NCCL's default."""
_CLOCKS = ("time", "monotonic", "perf_counter")


class Stress:
    """The cause that the plan names, injected; none in a plan without one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._kind = str(journal.plan.get("stress") or "")
        self._forwards = 0
        self._steps = 0
        self._late_s = 0.0
        """How much later it is by the user's clocks than it is."""

    def before_torch(self) -> None:
        """Replace the clocks by some that can be put forward, before the user's code imports them by name."""
        if self._kind == SLOW_RANK:
            for name in _CLOCKS:
                setattr(time, name, self._clock(getattr(time, name), 1))
                setattr(time, name + "_ns", self._clock(getattr(time, name + "_ns"), 10**9))

    def after_torch(self, torch: Any) -> None:
        """Install what needs torch."""
        if self._kind == NAN:
            self._poison_forward(torch)
        elif self._kind == SLOW_RANK:
            # The package hides its module of the same name.
            optimizer = sys.modules["torch.optim.optimizer"]
            optimizer.register_optimizer_step_post_hook(lambda *step: self._after_step())

    def hand_out(self, trail: Trail, batch: Any, inner: Any) -> Any:
        """Return the batch that the user gets: the last of a training pass is short where the loader's own is."""
        if self._kind != SHORT_BATCH or not trail.backwards:
            return batch
        batches = int(self._journal.plan.get("batches", 4))
        if trail.yielded != min(batches, trail.true):
            return batch
        ranks_of_job = int((self._journal.plan.get("job") or {}).get("ranks_of_job") or 0)
        samples = self._journal.guarded(short_batch_samples, inner, ranks_of_job, harms=())
        if samples is None and self._journal.rank == STRESSED_RANK:
            samples = 1
        elif not samples or trail.true <= batches:
            # Every batch is full, or the pass is so short that this one is the loader's own last.
            return batch
        short = self._journal.guarded(self._cut, batch, samples, harms=())
        return batch if short is None else short

    def _cut(self, batch: Any, samples: int) -> Any:
        """Return the first so many samples of a batch, and fewer than it has; None where it cannot be cut so."""
        import torch

        sizes = {len(leaf) for leaf in _leaves(batch, torch) if leaf.dim()}
        if len(sizes) != 1:
            return None
        (size,) = sizes
        # A batch of one sample is a case of its own, which a last batch of several does not show.
        kept = min(samples, size - 1)
        if kept < min(samples, 2):
            return None
        self._journal.event("stressed")
        return _mapped(batch, lambda leaf: leaf[:kept] if _length(leaf) == size else leaf, torch)

    def _poison_forward(self, torch: Any) -> None:
        ddp_class = torch.nn.parallel.DistributedDataParallel

        @replaces("forward", ddp_class)
        def forward_poisoned(forward: Any, ddp: Any, *arguments: Any, **options: Any) -> Any:
            output = forward(ddp, *arguments, **options)
            if self._journal.rank == STRESSED_RANK and torch.is_grad_enabled() and ddp.training:
                self._forwards += 1
                if self._forwards == NAN_STEP:
                    self._journal.event("stressed")
                    return _mapped(output, lambda leaf: _not_a_number(leaf, torch), torch)
            return output

    def _after_step(self) -> None:
        self._steps += 1
        if self._journal.rank == 0 and self._steps == SLOW_STEP:
            self._late_s = float(self._journal.guarded(self._timeout_s, harms=()) or FALLBACK_TIMEOUT_S)
            self._journal.event("stressed")

    def _timeout_s(self) -> float:
        import torch

        group = torch.distributed.group.WORLD
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return float(seconds)

    def _clock(self, clock: Callable[[], Any], unit: int) -> Callable[[], Any]:
        """Return a clock of ``time``, in ``unit`` to the second, that is put forward for the user's own code."""
        holds = self._journal.user_code.holds

        @functools.wraps(clock)
        def user_clock() -> Any:
            now = clock()
            if self._late_s and holds(sys._getframe(1).f_code.co_filename):
                return now + type(now)(self._late_s * unit)
            return now

        return user_clock


def _leaves(value: Any, torch: Any) -> list[Any]:
    """Return the tensors of nested lists, tuples and mappings."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    _mapped(value, note, torch)
    return found


def _mapped(value: Any, change: Callable[[Any], Any], torch: Any) -> Any:
    """Return the same structure with each leaf changed; objects of other kinds stay what they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _mapped(item, change, torch) for key, item in value.items()}
    if type(value) in (list, tuple):
        whole = change(value)
        return type(value)(_mapped(item, change, torch) for item in value) if whole is value else whole
    if isinstance(value, dict) and hasattr(value, "to_tuple"):  # outputs of Hugging Face models
        for key, item in list(value.items()):
            value[key] = _mapped(item, change, torch)
    return value


def _length(value: Any) -> int:
    """Return the samples of a leaf with a batch: a tensor's first dimension, or a list of texts, numbers; else -1."""
    if hasattr(value, "dim"):
        return int(value.shape[0]) if value.dim() else -1
    plain = isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value)
    return len(value) if plain else -1


def _not_a_number(leaf: Any, torch: Any) -> Any:
    return leaf * float("nan") if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
