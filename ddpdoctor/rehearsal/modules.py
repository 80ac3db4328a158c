"""What happens to modules wrapped in DistributedDataParallel: wraps, forwards, buffers, missing gradients."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any
from weakref import WeakKeyDictionary

from ..probe.journal import Journal
from .digests import tensor_digest
from .ending import Ending

FORWARDS_NOTED = 4_000
INPUTS_DIGESTED = 16
BUFFERS_DIGESTED = 6
"""Training forwards of a wrap before which its buffers are digested."""
OPTIONS = (
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
)


class Wrapped:
    """What is known of one wrap."""

    def __init__(self, number: int, names: dict[int, str]) -> None:
        self.number = number
        self.names = names
        """Names of the parameters that want gradients, by identity."""
        self.arrived: set[int] = set()
        """Parameters that got a gradient since the last forward that DDP will reduce."""
        self.synchronised = False
        self.site = -1
        self.training_forwards = 0
        self.last_missing: tuple[str, ...] | None = None


class Modules:
    """Patches ``DistributedDataParallel``."""

    def __init__(self, journal: Journal, ending: Ending, torch: Any, newest_loader: Any) -> None:
        self._journal = journal
        self._ending = ending
        self._torch = torch
        self._newest_loader = newest_loader
        self._wraps: WeakKeyDictionary[Any, Wrapped] = WeakKeyDictionary()
        self._steps: dict[int, int] = {}
        self._noted = 0

    def install(self) -> None:
        """Patch construction and forward."""
        ddp_class = self._torch.nn.parallel.DistributedDataParallel
        construct, forward = ddp_class.__init__, ddp_class.forward
        parameters = inspect.signature(construct).parameters
        modules = self

        @functools.wraps(construct)
        def __init__(ddp: Any, *arguments: Any, **options: Any) -> None:
            modules._ending.check()
            site = modules._journal.here()
            construct(ddp, *arguments, **options)
            bound = dict(zip(list(parameters)[1:], arguments))
            bound.update(options)
            modules._journal.guarded(modules._note_wrap, ddp, bound, site)

        @functools.wraps(forward)
        def forward_noted(ddp: Any, *arguments: Any, **options: Any) -> Any:
            modules._ending.check()
            modules._journal.guarded(modules._note_forward, ddp, arguments, options, sys._getframe(1))
            return forward(ddp, *arguments, **options)

        ddp_class.__init__, ddp_class.forward = __init__, forward_noted

    def backward_ended(self) -> tuple[list[int], list[int]]:
        """Numbers of the wraps whose parameters got gradients, and of those whose gradients were reduced."""
        reached = [wrapped for wrapped in self._wraps.values() if wrapped.arrived]
        return [wrapped.number for wrapped in reached], [w.number for w in reached if w.synchronised]

    def close_iterations(self) -> None:
        """An iteration is over (a step, a new forward, the end): note which parameters got no gradient in it."""
        for wrapped in list(self._wraps.values()):
            self._close(wrapped)

    def _close(self, wrapped: Wrapped) -> None:
        arrived, wrapped.arrived = wrapped.arrived, set()
        if not arrived or not wrapped.synchronised:
            return
        wrapped.synchronised = False
        missing = tuple(name for key, name in wrapped.names.items() if key not in arrived)
        if missing or wrapped.last_missing is None:
            same = missing == wrapped.last_missing
            wrapped.last_missing = missing
            if missing:
                self._journal.event(
                    "missing_gradients",
                    wrap=wrapped.number,
                    backward=self._journal.backwards - 1,
                    site=wrapped.site,
                    parameters=None if same else missing,
                )

    def _note_wrap(self, ddp: Any, bound: dict[str, Any], site: int) -> None:
        module = ddp.module
        names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
        wrapped = Wrapped(len(self._wraps), names)
        self._wraps[ddp] = wrapped
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, wrapped=wrapped: wrapped.arrived.add(id(parameter))
                )
        options: dict[str, Any] = {}
        for option in OPTIONS:
            if option in bound or hasattr(ddp, option):
                value = getattr(ddp, option, bound.get(option))
                options[option] = value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
        self._journal.event(
            "wrap",
            wrap=wrapped.number,
            site=site,
            module_class=type(module).__qualname__,
            options=options,
            parameters=[_describe(name, tensor) for name, tensor in module.named_parameters()],
            buffers=[_describe(name, tensor) for name, tensor in module.named_buffers()],
        )

    def _note_forward(self, ddp: Any, arguments: Any, options: Any, frame: Any) -> None:
        journal, torch = self._journal, self._torch
        wrapped = self._wraps.get(ddp)
        if wrapped is None:
            return
        self._close(wrapped)
        gradients = bool(torch.is_grad_enabled())
        synchronised = gradients and bool(ddp.require_backward_grad_sync)
        site = journal.site(frame)
        step = 0
        digest = ""
        if gradients:
            wrapped.synchronised, wrapped.site = synchronised, site
        if gradients and ddp.training:
            step = self._steps[site] = self._steps.get(site, 0) + 1
            journal.step, journal.forward_site = step, site
            journal.forwards += 1
            if wrapped.training_forwards < INPUTS_DIGESTED:
                digest = self._digest_inputs(arguments, options)
            if synchronised and wrapped.training_forwards < BUFFERS_DIGESTED:
                self._note_buffers(ddp, wrapped)
            wrapped.training_forwards += 1
        self._noted += 1
        if self._noted <= FORWARDS_NOTED:
            journal.event(
                "forward",
                wrap=wrapped.number,
                site=site,
                step=step,
                gradients=gradients,
                training=bool(ddp.training),
                synchronised=synchronised,
                input_digest=digest,
                pass_loader=self._newest_loader(),
            )

    def _note_buffers(self, ddp: Any, wrapped: Wrapped) -> None:
        buffers = dict(ddp.module.named_buffers())
        if buffers:
            self._journal.event(
                "buffers",
                wrap=wrapped.number,
                forward=wrapped.training_forwards,
                digests={name: tensor_digest(tensor) for name, tensor in buffers.items()},
            )

    def _digest_inputs(self, arguments: Any, options: Any) -> str:
        from .digests import leaves

        return ".".join(leaves((arguments, options), self._torch))


def _describe(name: str, tensor: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).replace("torch.", ""),
        "size_bytes": tensor.numel() * tensor.element_size(),
        "requires_grad": bool(tensor.requires_grad),
    }
