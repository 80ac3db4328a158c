"""The random numbers that a training step draws from torch, kept by the ranks and put together in one process.

Noise, masks and latent codes have a value for each sample: one process has to draw, for the samples of a rank, what
that rank drew. Where a script draws its batches themselves, without a loader, they come together in the same way.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, BinaryIO, Optional

from ...journal import Journal
from ...observed import tensor_digest
from .feeding import Feeding, read_all

MOST_BYTES = 1 << 26
LOSSES_NOTED = 64
_LOSSES = {"aten::nll_loss_forward": 2, "aten::nll_loss2d_forward": 2, "aten::binary_cross_entropy_with_logits": 3}
"""Losses that take weights of classes, behind each function and module of torch's that does, and the argument."""
_SCALINGS = {"aten::mul": "mul", "aten::mul_": "mul", "aten::div": "div", "aten::div_": "div"}
Key = tuple[str, str, int, int]
"""Operator, file and line of the user's, and how often it was met there before."""


class Draws:
    """What random operators returned, and the losses with weights."""

    def __init__(self, journal: Journal, torch: Any, feeding: Feeding, ranks: list[int], directory: str) -> None:
        self._journal = journal
        self._torch = torch
        self._feeding = feeding
        self._directory = directory
        self._ranks = ranks
        self._in_turn = journal.plan["equivalence"].get("feed") == "in-turn"
        self._singles = 0, 0
        """The newest batch, and how many single numbers were drawn since."""
        self._met: dict[tuple[str, str, int], int] = {}
        self._kept: Optional[BinaryIO] = None
        self._bytes = 0
        self._drawn: list[dict[Key, Any]] = []
        self.active = False
        self.losses: list[list[Any]] = []
        """Since the last step: line, digest of the weights, and how many targets count."""
        self.scalings: dict[tuple[str, str, int], float] = {}
        """The numbers by which losses are multiplied or divided: operation, file and line of the user's, …"""
        self.scaled_back: dict[tuple[str, float], None] = {}
        """… and by which backward multiplies or divides: what is there, too, is no loss for a log."""
        self.unmatched = 0
        """Draws of one process that no rank made in that way."""

    def install(self) -> None:
        """See every operator of this thread from now on."""
        from torch.utils._python_dispatch import TorchDispatchMode

        draws, torch, tag = self, self._torch, self._torch.Tag.nondeterministic_seeded

        class Seen(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                if draws.active and not draws._feeding.fetches:
                    name = function._schema.name
                    if tag in function.tags:
                        single = isinstance(result, torch.Tensor) and result.numel() == 1 and draws._feeding.batch
                        if single and not (kwargs or {}).get("generator"):
                            alike = draws._journal.guarded(draws._alike, function, args, kwargs or {}, harms=())
                            return result if alike is None else alike
                        drawn = draws._journal.guarded(draws._drawn_by, name, result, harms=())
                        return result if drawn is None else drawn
                    if name in _LOSSES:
                        draws._journal.guarded(draws._note_loss, name, args, harms=())
                    if name in _SCALINGS and isinstance(result, torch.Tensor) and not result.dim():
                        draws._journal.guarded(draws._note_scaling, _SCALINGS[name], args, harms=())
                return result

        if self._ranks:
            directory = str(self._journal.plan["equivalence"]["from"])
            for rank in self._ranks:
                self._drawn.append(dict(read_all(directory, f"draws-{rank}.pickle")))
        Seen().__enter__()

    def _alike(self, function: Any, arguments: Any, options: Any) -> Any:
        """Draw a single number, as of a choice, so that it is the same in all processes."""
        generator = self._torch.default_generator
        state = generator.get_state()
        batch, drawn = self._singles
        self._singles = (batch, drawn + 1) if batch == self._feeding.batch else (self._feeding.batch, 0)
        generator.manual_seed(7919 * self._singles[0] + self._singles[1])
        try:
            return function(*arguments, **options)
        finally:
            generator.set_state(state)

    def _drawn_by(self, name: str, result: Any) -> Any:
        if os.getpid() != self._journal.pid or not isinstance(result, self._torch.Tensor):
            return result
        file, line = self._line()
        count = self._met.get((name, file, line), 0)
        self._met[name, file, line] = count + 1
        key = (name, os.path.basename(file), line, count)
        if not self._ranks:
            self._keep(key, result)
            return result
        parts = [drawn.get(key) for drawn in self._drawn]
        if self._in_turn:
            which = self._drawn[count % len(self._drawn)]
            parts = [which.get((*key[:3], count // len(self._drawn)))]
        value = None if any(part is None for part in parts) else self._together(name, result, parts)
        if value is None:
            self.unmatched += 1
            return result
        value = value.to(dtype=result.dtype, device=result.device)
        return result.copy_(value) if value.shape == result.shape else value

    def _together(self, name: str, result: Any, parts: list[Any]) -> Any:
        """Return what the ranks drew, as one draw; None where that makes no sense."""
        torch, first = self._torch, parts[0]
        shape = tuple(result.shape)
        alike = all(part.shape == first.shape for part in parts)
        if alike and tuple(first.shape) == shape:
            if all(torch.equal(part, first) for part in parts):
                return first
            # Without a loader a script asks for the batch of a rank, whoever runs it.
            own_batches = not self._feeding.has_batches and first.dim() > 0 and first.shape[0] > 1
            return torch.cat(parts) if own_batches and not name.endswith("_") else None
        if any(part.dim() != result.dim() for part in parts):
            return None
        for dimension in range(result.dim()):
            others = shape[:dimension] + shape[dimension + 1 :]
            if (
                all(tuple(p.shape[:dimension] + p.shape[dimension + 1 :]) == others for p in parts)
                and sum(part.shape[dimension] for part in parts) == shape[dimension]
            ):
                if name == "aten::randperm":
                    ends = [sum(len(part) for part in parts[:number]) for number in range(len(parts))]
                    parts = [part + end for part, end in zip(parts, ends)]
                return torch.cat(parts, dimension)
        return None

    def _keep(self, key: Key, result: Any) -> None:
        self._bytes += result.numel() * result.element_size()
        if self._bytes > MOST_BYTES:
            return
        if self._kept is None:
            self._kept = open(os.path.join(self._directory, f"draws-{self._journal.rank}.pickle"), "wb")  # noqa: SIM115
        pickle.dump((key, result.detach().cpu().clone()), self._kept)
        self._kept.flush()

    def _note_loss(self, name: str, arguments: Any) -> None:
        if len(self.losses) >= LOSSES_NOTED:
            return
        file, line = self._line()
        weights = arguments[_LOSSES[name]] if len(arguments) > _LOSSES[name] else None
        digest = tensor_digest(weights) if isinstance(weights, self._torch.Tensor) else ""
        counted = None
        if "nll" in name:
            counted = int((arguments[1] != arguments[4]).sum())
        self.losses.append([file, line, digest, counted])

    def _note_scaling(self, name: str, arguments: Any) -> None:
        loss, number = arguments[:2]
        if type(number) not in (int, float):
            return
        in_backward = getattr(self._torch._C, "_current_graph_task_id", lambda: -1)() != -1
        if in_backward and len(self.scaled_back) < LOSSES_NOTED:
            self.scaled_back[name, float(number)] = None
        elif not in_backward and loss.requires_grad and len(self.scalings) < LOSSES_NOTED:
            self.scalings.setdefault((name, *self._line()), float(number))

    def _line(self) -> tuple[str, int]:
        frames = self._journal.user_code.frames_here(sys._getframe(2))
        return (frames[0][0], frames[0][1]) if frames else ("", 0)
