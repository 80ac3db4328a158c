"""What a rehearsal for ``--resume`` writes of each step and of each checkpoint, so that two starts can be compared.

The first start goes on past its second checkpoint, so that it is the uninterrupted run as well; the files as they were
then are copied aside for the second start, and for another one those that a death amid the next save would leave.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable, Optional
from weakref import WeakSet

from ..journal import Journal
from ..nonfinite import Batch
from ..observed import parameters_of, tensor_digest
from ..torch_compat import after_import, on_call
from .files.snapshot import copy_files, new_files
from .training.ddp_modules import Modules

CHECKPOINT = 2
"""The restart is from this one, so that the order of its epoch is neither the first nor the last."""
LAST = {"first": 4, "second": 2, "torn": 1}
"""The checkpoint at which each start ends: what a schedule does next shows at the end of an epoch."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm, Kubernetes and torchrun announce the end by the first one; ``sbatch --signal`` has the others, too."""
SIGNALLED_AFTER = 2
"""Steps of a start that a scheduler ends: in the middle of an epoch."""
GRACE_S = 30.0
"""As Slurm, Kubernetes and torchrun have it, until SIGKILL …"""
GRACE_STEPS = 12
"""… or so many further steps, which are several shortened epochs."""
STEPS_NOTED = 400
BYTES_OF_A_TENSOR = 1 << 16
MOST_TENSORS = 512
MOST_KEYS = 200
METADATA = ".metadata"
"""Of a sharded checkpoint, written when all shards are there."""
_COUNTERS = ("epoch", "step", "iter")
_HARMED = ("resume_steps", "resume_saves")
_HELD = ("obj", "state_dict", "tensors")
"""As torch.save, sharded checkpoints and safetensors call what is saved."""


class ResumeTrace:
    """The steps and checkpoints of one rank."""

    def __init__(self, journal: Journal, torch: Any, modules: Modules, newest_samples: Callable[[], Batch]) -> None:
        self._journal = journal
        self._torch = torch
        self._modules = modules
        self._newest_samples = newest_samples
        self._start = str(journal.plan["resume"])
        self._optimizers: Any = WeakSet()
        self._scalers: Any = WeakSet()
        self._row: dict[str, Any] = {}
        """Of the step that is under way."""
        self._came = ""
        """A digest of the newest batch."""
        self._steps = 0
        self._saved_at: list[int] = []
        """Steps after which checkpoints were written."""
        self._paths: list[str] = []
        self._snapshot_due = False
        self._is_whole = False
        """A checkpoint that holds more than weights was written."""
        self._tearing = False
        self._signal = 0
        """What a scheduler has sent."""
        self._metadata: dict[str, bytes] = {}
        """Of a directory what a sharded save replaces last of all."""
        self._nameless: list[tuple[dict[str, Any], Any, float]] = []
        """What was saved into buffers since the newest step, with the buffer and the time."""

    def install(self) -> None:
        """Listen to forwards, steps, constructors and saves."""
        torch, journal = self._torch, self._journal
        listen = functools.partial(on_call, journal, harms=_HARMED)
        listen(torch.nn.parallel.DistributedDataParallel, "forward", before=self._forward_begins)
        listen(torch, "save", before=self._saves)
        for verb, module in (("save", "state_dict_saver"), ("load", "state_dict_loader")):
            after_import(f"torch.distributed.checkpoint.{module}", functools.partial(self._hook_sharded, verb))
        after_import("safetensors.torch", self._hook_safetensors)
        for owner, known in ((torch.amp.GradScaler, self._scalers), (torch.optim.Optimizer, self._optimizers)):
            listen(owner, "__init__", after=functools.partial(_remember, known))
        # The package hides its module of the same name.
        optimizers = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_pre_hook(
            lambda optimizer, *_: journal.guarded(self._step_begins, optimizer, harms=_HARMED)
        )
        # A closure that is given to a step makes the forward: the step's row is there only afterwards.
        optimizers.register_optimizer_step_post_hook(lambda *_: journal.guarded(self._step_ends, harms=_HARMED))
        if self._start == "signalled":
            # What a handler raises belongs to the script.
            optimizers.register_optimizer_step_post_hook(lambda *_: self._receive())

    def _hook_sharded(self, verb: str, module: Any) -> None:
        listener = self._saves_sharded if verb == "save" else self._loads_otherwise
        after = self._tears_sharded if verb == "save" else None
        on_call(self._journal, module, verb, before=listener, after=after, harms=("resume_saves",))

    def _hook_safetensors(self, module: Any) -> None:
        on_call(self._journal, module, "load_file", before=self._loads_otherwise, harms=("resume_saves",))
        on_call(self._journal, module, "save_file", before=self._saves, harms=("resume_saves",))

    def _saves_sharded(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if (path := _directory_of(options)) is not None and isinstance(held := _held(arguments, options), dict):
            with contextlib.suppress(OSError), open(os.path.join(path, METADATA), "rb") as file:
                self._metadata[path] = file.read()
            states = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in held.items()}
            self._note_save(frame, states, path, is_file=False)

    def _loads_otherwise(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note what no call of torch.load reads: a sharded checkpoint, or a file of safetensors."""
        given = options.get("filename", arguments[0] if arguments else None)
        is_path = isinstance(given, (str, os.PathLike))
        if (path := _directory_of({"checkpoint_id": given} if is_path else options)) is not None:
            self._journal.event("checkpoint_loaded", path=path, site=self._journal.site(frame))

    def batch_came(self, batch: Any) -> None:
        """Take in the batch that the script is given."""
        if self._steps <= STEPS_NOTED:
            self._came = self._digest(self._tensors(batch))

    def _forward_begins(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._torch.is_grad_enabled() or not arguments[0].training or self._steps > STEPS_NOTED:
            return
        if not self._row:
            self._row = {"batches": [], "inputs": "", "random": self._random(), **self._state()}
        batch = self._newest_samples()
        given = self._tensors([*arguments[1:], options])
        self._row["inputs"] = self._digest([self._row["inputs"], self._came, given])
        self._row["batches"].append([batch.loader, batch.ordinal, batch.batch, list(batch.indices)])

    def _step_begins(self, optimizer: Any) -> None:
        if self._row:
            stepped = parameters_of(optimizer)[:MOST_TENSORS]
            # The norm of one that is spread over ranks is a collective.
            plain = [one.grad if type(one.grad) is self._torch.Tensor else None for one in stepped]
            self._row["gradients"] = [0.0 if one is None else float(one.detach().norm()) for one in plain]
        for row, buffer, time_s in self._nameless:
            size = buffer.getbuffer().nbytes
            found = (one for one in new_files(os.getcwd(), time_s, 6) if os.path.getsize(one) == size)
            if path := max(found, key=os.path.getmtime, default=None):
                self._write_save({**row, "path": path})
        self._nameless.clear()
        if self._snapshot_due:
            self._snapshot_due = False
            if self._start == "first" and len(self._saved_at) <= CHECKPOINT:
                self._copy_files(f"second-{self._saved_at[-1]:06}", self._saved_at[-1])

    def _step_ends(self) -> None:
        row, self._row = self._row, {}
        if row:  # Of several optimizers the first one's step ends it.
            self._steps += 1
            self._journal.event("resume_step", ordinal=self._steps, handled=self._handled(), **row)
            if self._start == "torn" or (self._signal and self._steps > SIGNALLED_AFTER + GRACE_STEPS):
                self._leave()

    def _handled(self) -> int:
        """Return the first of a scheduler's signals that the script has a handler for; 0 for none."""
        for number in SIGNALS:
            handler: Any = signal.getsignal(number)
            handler = getattr(handler, "func", handler)  # functools.partial
            found = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
            if found is not None and self._journal.user_code.holds(found.co_filename):
                return int(number)
        return 0

    def _receive(self) -> None:
        """Have this process get, between two steps, the signal by which a scheduler ends a job."""
        if self._steps == SIGNALLED_AFTER and not self._signal:
            self._signal = self._journal.guarded(self._handled, harms=()) or 0
            if self._signal:
                timer = threading.Timer(GRACE_S, self._leave)
                timer.daemon = True
                timer.start()
                os.kill(os.getpid(), self._signal)

    def _state(self) -> dict[str, Any]:
        """Return what the ranks hold before a step."""
        tensors: dict[str, str] = {}
        for wrap, name, parameter in self._modules.parameters():
            if len(tensors) < MOST_TENSORS:
                tensors[f"{wrap}:{name}"] = tensor_digest(parameter, BYTES_OF_A_TENSOR)
        buffers = {
            f"{wrap}:{name}": tensor_digest(buffer, BYTES_OF_A_TENSOR)
            for wrap, name, buffer in itertools.islice(self._modules.saved_buffers(), MOST_TENSORS)
        }
        optimizers = [one for one in self._optimizers if any(one.param_groups)]
        optimizers.sort(key=lambda one: (type(one).__name__, len(parameters_of(one))))
        return {
            "weights": tensors,
            "buffers": buffers,
            "optimizer": [self._digest(_state_of(one)) for one in optimizers],
            "learning_rates": [str(float(group["lr"])) for one in optimizers for group in one.param_groups][:32],
            "scales": [str(one.get_scale()) for one in self._scalers if one.is_enabled()],
        }

    def _random(self) -> list[str]:
        """Return digests of the generators of torch, Python and NumPy that what has none of its own draws from."""
        numpy: Any = sys.modules.get("numpy.random")
        of_numpy = (numpy.get_state()[1].tobytes(), numpy.get_state()[2:]) if numpy else ()
        return [self._digest(one) for one in (self._torch.get_rng_state(), repr(random.getstate()), repr(of_numpy))]

    def _tensors(self, value: Any) -> list[Any]:
        return [one for one in _flat(value, self._torch.Tensor) if isinstance(one, self._torch.Tensor)]

    def _digest(self, value: Any) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for part in _flat(value, self._torch.Tensor):
            is_tensor = isinstance(part, self._torch.Tensor)
            digest.update((tensor_digest(part, BYTES_OF_A_TENSOR) if is_tensor else repr(part)).encode())
        return digest.hexdigest()

    def _saves(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        held = _held(arguments, options)
        target = arguments[1] if len(arguments) > 1 else options.get("f", options.get("filename"))
        if not self._tearing and isinstance(held, dict):
            path = target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", None)
            if isinstance(target, io.BytesIO):
                self._note_save(frame, held, target)
            elif path is not None:
                self._note_save(frame, held, os.path.abspath(os.fspath(path)))

    def _note_save(self, frame: FrameType, held: dict[Any, Any], target: Any, *, is_file: bool = True) -> None:
        """Note what is saved into a file, a buffer or a directory."""
        keys = {str(key): self._shown(value) for key, value in list(held.items())[:MOST_KEYS]}
        tensors = {key for key, shown in keys.items() if shown.startswith("tensors ")}
        row = {
            "step": self._steps,
            "whole": _holds_optimizer(held)
            or any(word in key.lower() for key in keys if key not in tensors for word in _COUNTERS),
            "weights": bool(tensors),
            "keys": keys,
            "optimizer": _holds_optimizer(held),
            "random": any(map(functools.partial(_equal, self._torch.get_rng_state()), self._tensors(held))),
            "site": self._journal.site(frame),
        }
        if isinstance(target, io.BytesIO):
            self._nameless.append((row, target, time.time()))
            return
        if self._signal:
            self._journal.event("resume_step", ordinal=self._steps + 1, **self._state())
            row["signal"] = self._signal
        counts = row["whole"] or (row["weights"] and not self._is_whole)
        row["over_only"] = is_file and counts and target in self._paths and self._is_only(target)
        if counts and is_file and self._start == "first" and self._is_new() and len(self._saved_at) == CHECKPOINT:
            self._tear(held, target)
        self._write_save({**row, "path": target})

    def _is_new(self) -> bool:
        return not self._saved_at or self._saved_at[-1] != self._steps

    def _write_save(self, row: dict[str, Any]) -> None:
        self._journal.event("resume_save", **row)
        self._paths.append(row["path"])
        if row["whole"] and not self._is_whole:
            # What was saved before were weights alone, which nobody goes on from where there is more.
            self._is_whole = True
            self._saved_at.clear()
        if not row["step"] or (not row["whole"] and (self._is_whole or not row["weights"])):
            return  # Before the first step there is nothing yet that a restart could lose.
        new = not self._saved_at or self._saved_at[-1] != row["step"]
        if new:
            self._saved_at.append(row["step"])
        self._snapshot_due = True
        if new and self._is_whole and len(self._saved_at) == LAST.get(self._start):
            self._leave()

    def _leave(self) -> None:
        """End as a scheduler would: no handler and no ``finally`` of the script's has its turn."""
        self._journal.event("ended", reason="resume")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def _tear(self, held: Any, path: str) -> None:
        """Copy the files as they are when the job dies in the middle of a save: of what is saved a half is there."""
        self._tearing = True
        whole = io.BytesIO()
        try:
            self._torch.save(held, whole)
        finally:
            self._tearing = False
        half = bytes(whole.getbuffer()[: len(whole.getbuffer()) // 2])

        def torn(other: str) -> Optional[bytes]:
            there = os.path.exists(path) and os.path.exists(other)
            return half if other == path or (there and os.path.samefile(path, other)) else None

        self._copy_files("torn", self._saved_at[-1], torn, path)

    def _tears_sharded(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Do the same with a directory: of each shard a half is there, and what is written last is not, or is that of
        the save before.
        """
        folder = _directory_of(options)
        if folder is None or self._start != "first" or len(self._saved_at) != CHECKPOINT + 1:
            return

        def torn(path: str) -> Optional[bytes]:
            if os.path.dirname(path) != folder:
                return None
            if os.path.basename(path) == METADATA:
                return self._metadata.get(folder, b"")
            with open(path, "rb") as file:
                return file.read(max(1, os.path.getsize(path) // 2))

        self._copy_files("torn", self._saved_at[-2], torn)

    def _is_only(self, path: str) -> bool:
        """Return whether a file is there, and nothing of its size beside it or below the working directory."""
        began_s = int(self._journal.plan["job"]["started_ns"]) / 1e9
        folders = {os.getcwd(), *(os.path.dirname(one) for one in self._paths)}
        try:
            size = os.path.getsize(path)
            return not any(
                2 * os.path.getsize(other) >= size and not os.path.samefile(other, path)
                for folder in folders
                for other in new_files(folder, began_s)
            )
        except OSError:  # It is not there, or another rank is replacing files meanwhile.
            return False

    def _shown(self, value: Any) -> str:
        """Return a whole number as it is, and anything else by its kind and digest; beside tensors nothing counts, for
        it may be the path of this very file.
        """
        if isinstance(value, int):
            return f"int {value}"
        tensors = self._tensors(value)
        return f"{'tensors' if tensors else type(value).__name__} {self._digest(tensors or value)}"

    def _copy_files(
        self, name: str, step: int, torn: Callable[[str], Optional[bytes]] = lambda _: None, *others: str
    ) -> None:
        """Copy what the job has written beside its checkpoints; by one rank of all."""
        began_s = int(self._journal.plan["job"]["started_ns"]) / 1e9
        folders = dict.fromkeys(os.path.dirname(path) for path in self._paths)
        found = [one for folder in folders for one in new_files(folder, began_s)]
        copy_files(os.path.join(self._journal.run_directory, "snapshot", name), [*found, *others], step, torn)


def _remember(known: Any, _: FrameType, arguments: tuple[Any, ...], __: dict[str, Any]) -> None:
    known.add(arguments[0])


def _held(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return arguments[0] if arguments else next((options[key] for key in _HELD if key in options), None)


def _directory_of(options: dict[str, Any]) -> Optional[str]:
    """Return where a sharded checkpoint is, by the options of torch's functions for them."""
    path = options.get("checkpoint_id") or next(
        (getattr(options[key], "path", None) for key in ("storage_writer", "storage_reader") if options.get(key)), None
    )
    return None if path is None else os.path.abspath(os.fspath(path))


def _equal(tensor: Any, other: Any) -> bool:
    return bool(other.dtype == tensor.dtype and other.shape == tensor.shape and (other.cpu() == tensor).all())


def _state_of(optimizer: Any) -> list[Any]:
    """Return the state of an optimizer in the order of its parameters."""
    return [
        {name: optimizer.state[parameter][name] for name in sorted(optimizer.state.get(parameter, {}), key=str)}
        for parameter in parameters_of(optimizer)
    ]


def _holds_optimizer(held: Any, depth: int = 3) -> bool:
    if not isinstance(held, dict) or not depth:
        return isinstance(held, (list, tuple)) and depth > 0 and any(_holds_optimizer(one, depth - 1) for one in held)
    return ("param_groups" in held and "state" in held) or any(
        _holds_optimizer(one, depth - 1) for one in held.values()
    )


def _flat(value: Any, tensor_class: Any, depth: int = 8) -> Iterator[Any]:
    """Yield the tensors and plain values in something, in its own order; of other objects their kind alone."""
    if isinstance(value, dict) and depth:
        for key, held in value.items():
            yield str(key)
            yield from _flat(held, tensor_class, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for held in value:
            yield from _flat(held, tensor_class, depth - 1)
    elif isinstance(value, (tensor_class, bool, int, float, str)) or value is None:
        yield value
    else:
        yield type(value).__name__
