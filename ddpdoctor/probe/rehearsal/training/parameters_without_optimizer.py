"""Parameters with gradients that no optimizer holds, though one was built for the model that they are in."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

from ...call_listeners import on_call
from ...journal import Journal
from ...observed import tensor_digest
from .ddp_modules import Modules
from .reduction import calls_written, is_zero

STEPS_WATCHED = 2
"""First steps of an optimizer in which what no optimizer holds must have a gradient and keep its value."""
MOST_OPTIMIZERS = 16
MOST_NAMES = 200
BYTES_OF_A_TENSOR = 1 << 16


class _LeftOut(NamedTuple):
    wrap: int
    name: str
    parameter: Any
    digest: str


class Unheld:
    """When each parameter came into a module, and what every optimizer leaves out in its first steps."""

    def __init__(self, journal: Journal, modules: Modules) -> None:
        self._journal = journal
        self._modules = modules
        self._came: dict[int, tuple[ReferenceType[Any], int]] = {}
        """When a parameter first came into a module, by its identity, which a later one may have again."""
        self._moment = 0
        self._made: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """When each optimizer was made, and the user's call chain that made it."""
        self._watched: WeakKeyDictionary[Any, list[_LeftOut]] = WeakKeyDictionary()

    def install(self) -> None:
        """Listen to the making of optimizers, and to torch's hook of registered parameters, there since torch 2.0."""
        optimizer_class = sys.modules["torch.optim.optimizer"].Optimizer
        on_call(self._journal, optimizer_class, "__init__", after=self._optimizer_made, harms=("unheld_parameters",))
        register = getattr(sys.modules["torch.nn.modules.module"], "register_module_parameter_registration_hook", None)
        if register is not None:
            register(
                lambda module, name, parameter: self._journal.guarded(
                    self._note_registered, parameter, harms=("unheld_parameters",)
                )
            )

    def before_step(self, optimizer: Any, ordinal: int) -> None:
        """Look at what no optimizer holds before a step of this one."""
        self._made.setdefault(optimizer, (sys.maxsize, -1))  # A copy is made without its constructor.
        if ordinal >= STEPS_WATCHED or len(self._watched) > MOST_OPTIMIZERS:
            return
        left_out = self._left_out(optimizer)
        if ordinal:
            before = {id(one.parameter): one.digest for one in self._watched.get(optimizer, ())}
            left_out = [one for one in left_out if one.digest and before.get(id(one.parameter)) == one.digest]
        self._watched[optimizer] = left_out

    def after_step(self, optimizer: Any, ordinal: int) -> None:
        """Report, after the last step that is watched, what had gradients and is as it was before the first."""
        if ordinal + 1 != STEPS_WATCHED or not (watched := self._watched.pop(optimizer, [])):
            return
        held = self._held()
        kept = [one for one in watched if id(one.parameter) not in held and _digest(one.parameter) == one.digest]
        if not kept or any(calls_written(self._journal, frozenset({"add_param_group"}))):
            return
        for wrap in sorted({one.wrap for one in kept}):
            names = [one.name for one in kept if one.wrap == wrap]
            self._journal.event(
                "unheld_parameters",
                wrap=wrap,
                site=self._made[optimizer][1],
                optimizer_type=type(optimizer).__qualname__,
                parameters=names[:MOST_NAMES],
                count=len(names),
                elements=sum(one.parameter.numel() for one in kept if one.wrap == wrap),
                strangers=len(self._strangers(optimizer)),
                steps=STEPS_WATCHED,
            )

    def _optimizer_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._made[arguments[0]] = self._moment, self._journal.site(frame)

    def _note_registered(self, parameter: Any) -> None:
        if parameter is None:
            return
        known = self._came.get(id(parameter))
        if known is None or known[0]() is not parameter:
            self._moment += 1
            self._came[id(parameter)] = ref(parameter), self._moment

    def _left_out(self, optimizer: Any) -> list[_LeftOut]:
        """Return what no optimizer holds of the models that this one was built for, where it has a gradient.

        It was built for a model of which it holds a part: then what came into the model later is left out. Or it was
        built for one of which every parameter was replaced: then what it holds has no gradient, and the same shapes.
        """
        made, _ = self._made[optimizer]
        held = self._held()
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        by_wrap: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        for wrap, name, parameter in self._modules.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                by_wrap.setdefault(wrap, {})[name] = parameter
        found: list[_LeftOut] = []
        for wrap, parameters in by_wrap.items():
            trained = {name: p for name, p in parameters.items() if id(p) not in held and _has_gradient(p)}
            if any(id(p) in own for p in parameters.values()):
                trained = {name: p for name, p in trained.items() if self._came_after(p, made)}
            elif any(id(p) in held for p in parameters.values()) or not _fits(trained, self._strangers(optimizer)):
                continue
            found += [_LeftOut(wrap, name, p, _digest(p)) for name, p in trained.items()]
        return found

    def _came_after(self, parameter: Any, moment: int) -> bool:
        known = self._came.get(id(parameter))
        return known is not None and known[0]() is parameter and known[1] > moment

    def _held(self) -> set[int]:
        """Return the identities of the parameters that any optimizer of the process holds."""
        return {
            id(parameter)
            for optimizer in list(self._made)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _strangers(self, optimizer: Any) -> list[Any]:
        """Return what an optimizer holds that is in no wrapped module and has no gradient."""
        now = {id(parameter) for _, _, parameter in self._modules.parameters()}
        return [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is None and id(parameter) not in now
        ]


def _has_gradient(parameter: Any) -> bool:
    return bool(parameter.requires_grad) and parameter.grad is not None and not is_zero(_own_part(parameter.grad))


def _digest(parameter: Any) -> str:
    return tensor_digest(_own_part(parameter), BYTES_OF_A_TENSOR)


def _own_part(tensor: Any) -> Any:
    """Return what a rank holds of a tensor that may be distributed; the whole would take a collective."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part.detach()


def _fits(trained: dict[str, Any], strangers: list[Any]) -> bool:
    """Return whether parameters of the same shapes are among those that an optimizer holds for nothing."""
    return not Counter(tuple(p.shape) for p in trained.values()) - Counter(tuple(p.shape) for p in strangers)
