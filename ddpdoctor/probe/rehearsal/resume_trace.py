"""What a rehearsal for ``--resume`` writes of each step and of each checkpoint, so that two starts can be compared.

The first start goes on past its second checkpoint, so that it is the uninterrupted run as well; the files as they were
then are copied aside for the second start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable
from weakref import WeakSet

from ..journal import Journal
from ..nonfinite import Batch
from ..observed import tensor_digest
from ..torch_compat import on_call
from .training.ddp_modules import Modules

CHECKPOINT = 2
"""The restart is from this one, so that the order of its epoch is neither the first nor the last."""
LAST = {"first": 4, "second": 2}
"""The checkpoint at which each start ends: what a schedule does next shows at the end of an epoch."""
STEPS_NOTED = 400
BYTES_OF_A_TENSOR = 1 << 16
MOST_TENSORS = 512
MOST_KEYS = 200
MOST_FILES = 2_000
MOST_BYTES = 1 << 31
_COUNTERS = ("epoch", "step", "iter")


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
        self._steps = 0
        self._saved_at: list[int] = []
        """Steps after which checkpoints were written."""
        self._paths: list[str] = []
        self._snapshot_due = False

    def install(self) -> None:
        """Listen to forwards, steps, constructors and saves."""
        torch, journal = self._torch, self._journal
        ddp_class = torch.nn.parallel.DistributedDataParallel
        on_call(journal, ddp_class, "forward", before=self._forward_begins, harms=("resume_steps", "resume_saves"))
        on_call(journal, torch, "save", before=self._saves, harms=("resume_steps", "resume_saves"))
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None) or torch.cuda.amp.GradScaler
        on_call(
            journal,
            scaler,
            "__init__",
            after=lambda _, given, __: self._scalers.add(given[0]),
            harms=("resume_steps", "resume_saves"),
        )
        # The package hides its module of the same name.
        optimizers = sys.modules["torch.optim.optimizer"]
        on_call(
            journal,
            torch.optim.Optimizer,
            "__init__",
            after=lambda _, given, __: self._optimizers.add(given[0]),
            harms=("resume_steps", "resume_saves"),
        )
        optimizers.register_optimizer_step_pre_hook(
            lambda *_: journal.guarded(self._step_begins, harms=("resume_steps", "resume_saves"))
        )

    def _forward_begins(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._torch.is_grad_enabled() or not arguments[0].training or self._steps > STEPS_NOTED:
            return
        if not self._row:
            self._row = {"batches": [], **self._state()}
        batch = self._newest_samples()
        self._row["batches"].append([batch.loader, batch.ordinal, batch.batch, list(batch.indices)])

    def _step_begins(self) -> None:
        row, self._row = self._row, {}
        if row:  # Of several optimizers the first one's step ends it.
            self._steps += 1
            self._journal.event("resume_step", ordinal=self._steps, **row)
        if self._snapshot_due:
            self._snapshot_due = False
            if self._start == "first" and len(self._saved_at) <= CHECKPOINT:
                self._copy_files()

    def _state(self) -> dict[str, Any]:
        """Return what the ranks hold before a step."""
        tensors: dict[str, str] = {}
        for wrap, name, parameter in self._modules.parameters():
            if len(tensors) < MOST_TENSORS:
                tensors[f"{wrap}:{name}"] = tensor_digest(parameter, BYTES_OF_A_TENSOR)
        optimizers = [one for one in self._optimizers if any(one.param_groups)]
        optimizers.sort(key=lambda one: (type(one).__name__, sum(len(group["params"]) for group in one.param_groups)))
        return {
            "weights": tensors,
            "optimizer": [self._digest(_state_of(one)) for one in optimizers],
            "learning_rates": [str(float(group["lr"])) for one in optimizers for group in one.param_groups][:32],
            "scales": [str(one.get_scale()) for one in self._scalers if one.is_enabled()],
        }

    def _digest(self, value: Any) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for part in _flat(value, self._torch.Tensor):
            is_tensor = isinstance(part, self._torch.Tensor)
            digest.update((tensor_digest(part, BYTES_OF_A_TENSOR) if is_tensor else repr(part)).encode())
        return digest.hexdigest()

    def _saves(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        held = arguments[0] if arguments else options.get("obj")
        target = arguments[1] if len(arguments) > 1 else options.get("f")
        path = target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", None)
        if path is None or not isinstance(held, dict):
            return
        keys = {str(key): self._shown(value) for key, value in list(held.items())[:MOST_KEYS]}
        whole = _holds_optimizer(held) or any(word in key.lower() for key in keys for word in _COUNTERS)
        path = os.path.abspath(os.fspath(path))
        new = whole and (not self._saved_at or self._saved_at[-1] != self._steps)
        self._journal.event(
            "resume_save",
            path=path,
            step=self._steps,
            whole=whole,
            keys=keys,
            optimizer=_holds_optimizer(held),
            over_only=whole and path in self._paths and self._is_only(path),
            site=self._journal.site(frame),
        )
        self._paths.append(path)
        if new:
            self._saved_at.append(self._steps)
        self._snapshot_due = self._snapshot_due or whole
        if new and len(self._saved_at) == LAST[self._start]:
            # As a scheduler would: no handler and no `finally` of the script's has its turn.
            self._journal.event("ended", reason="resume")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)

    def _is_only(self, path: str) -> bool:
        """Return whether a file is there, and nothing of its size beside it or below the working directory."""
        began_s = int(self._journal.plan["job"]["started_ns"]) / 1e9
        folders = {os.getcwd(), *(os.path.dirname(one) for one in self._paths)}
        try:
            size = os.path.getsize(path)
            return not any(
                2 * os.path.getsize(other) >= size and not os.path.samefile(other, path)
                for folder in folders
                for other in _new_files(folder, began_s)
            )
        except OSError:  # It is not there, or another rank is replacing files meanwhile.
            return False

    def _shown(self, value: Any) -> str:
        """Return a whole number as it is, and anything else by its kind and digest."""
        if isinstance(value, int):
            return f"int {value}"
        kind = "tensors" if any(isinstance(one, self._torch.Tensor) for one in _flat(value, self._torch.Tensor)) else ""
        return f"{kind or type(value).__name__} {self._digest(value)}"

    def _copy_files(self) -> None:
        """Copy what the job has written beside its checkpoints, with a list of where it belongs."""
        target = os.path.join(self._journal.run_directory, "snapshot")
        shutil.rmtree(target, ignore_errors=True)
        os.mkdir(target)
        began_s = int(self._journal.plan["job"]["started_ns"]) / 1e9
        places: dict[str, str] = {}
        left = MOST_BYTES
        for directory in dict.fromkeys(os.path.dirname(path) for path in self._paths):
            for path in _new_files(directory, began_s):
                left -= os.path.getsize(path)
                if left < 0 or len(places) >= MOST_FILES:
                    return
                places[path] = str(len(places))
                shutil.copy2(path, os.path.join(target, places[path]))
        with open(os.path.join(target, "places.json"), "w", encoding="utf-8") as file:
            json.dump({"step": self._saved_at[-1], "places": places}, file)


def _state_of(optimizer: Any) -> list[Any]:
    """Return the state of an optimizer in the order of its parameters."""
    return [
        {name: optimizer.state[parameter][name] for name in sorted(optimizer.state.get(parameter, {}), key=str)}
        for group in optimizer.param_groups
        for parameter in group["params"]
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


def _new_files(directory: str, since_s: float, depth: int = 3) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if depth and not entry.name.startswith("."):
                        yield from _new_files(entry.path, since_s, depth - 1)
                elif entry.is_file(follow_symlinks=False) and entry.stat().st_mtime >= since_s:
                    yield entry.path
    except OSError:
        return
