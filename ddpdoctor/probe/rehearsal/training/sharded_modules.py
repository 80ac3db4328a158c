"""What happens to modules whose parameters are sharded: their shape, and the forwards of the outermost of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from ...call_listeners import on_call
from ...journal import Journal
from ...torch_compat import SHARDED_STATES, after_import
from ..schedule import Ending, Pace

FORWARDS_NOTED = 4_000
INPUTS_DIGESTED = 16
FIRST = -2
"""Stands for the first sharded module where others are known by their wraps; those after it count down from there."""


class ShardedModules:
    """Listeners at the forwards of ``fully_shard`` and of ``FullyShardedDataParallel``."""

    def __init__(
        self,
        journal: Journal,
        ending: Ending,
        torch: Any,
        newest_batch: Callable[[], tuple[int, int, int, bool]],
        pace: Pace,
    ) -> None:
        self._journal = journal
        self._ending = ending
        self._torch = torch
        self._newest_batch = newest_batch
        self._pace = pace
        self.newest = (-1, False)
        """The call chain of the newest forward, and whether it has no gradients."""
        self._known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._of_a_part: set[int] = set()
        """Modules that only some ranks of the job share: others may be fed as they are, as by tensor parallelism."""
        self._steps: dict[int, int] = {}
        self._noted = 0

    def install(self) -> None:
        """Listen once torch's modules are imported, which few scripts do."""
        for name in SHARDED_STATES:
            after_import(name, self._hook_state)
        after_import("torch.distributed.fsdp.fully_sharded_data_parallel", self._hook_wrapper)

    def parameters(self) -> Iterator[tuple[int, str, Any]]:
        """Yield every parameter that sharded modules hold: the number that stands for the module, its name, itself."""
        for module, number in list(self._known.items()):
            for name, parameter in module.named_parameters():
                yield number, name, parameter

    def _hook_state(self, module: ModuleType) -> None:
        state = getattr(module, "FSDPState", None)
        if state is not None and hasattr(state, "_root_pre_forward"):
            on_call(self._journal, state, "_root_pre_forward", after=self._state_entered, harms=("forwards",))

    def _hook_wrapper(self, module: ModuleType) -> None:
        on_call(
            self._journal, module.FullyShardedDataParallel, "forward", before=self._wrapper_entered, harms=("forwards",)
        )

    def _state_entered(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the forward of the outermost module; the ones inside of it come here, too."""
        state, module = arguments[:2]
        if state._state_ctx.iter_forward_root is state:
            self._forward_begins(frame, module, (arguments[2:], options), lambda: _units_of(state))

    def _wrapper_entered(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        wrapper = arguments[0]
        if getattr(wrapper, "_is_root", None) is not False:
            self._forward_begins(frame, wrapper, (arguments[1:], options), lambda: _handles_of(wrapper))

    def _forward_begins(
        self, frame: FrameType, module: Any, inputs: tuple[Any, ...], units: Callable[[], dict[str, Any]]
    ) -> None:
        self._ending.check()
        journal = self._journal
        gradients = bool(self._torch.is_grad_enabled())
        site = journal.site(frame)
        self.newest = site, not gradients
        if module not in self._known:
            self._known[module] = FIRST - len(self._known)
            shape = journal.guarded(units, harms=("sharded_modules",))
            if shape is not None:
                journal.event("sharded_module", module=self._known[module], site=site, **shape)
                if len(shape["ranks"]) < self._torch.distributed.get_world_size():
                    self._of_a_part.add(self._known[module])
        step = 0
        if gradients and module.training:
            step = self._steps[site] = self._steps.get(site, 0) + 1
            journal.step, journal.forward_site = step, site
            journal.forwards += 1
            self._pace.forward_begins()
        self._noted += 1
        if self._noted <= FORWARDS_NOTED and self._known[module] not in self._of_a_part:
            loader, ordinal, batch, looped = self._newest_batch()
            journal.event(
                "forward",
                wrap=self._known[module],
                site=site,
                step=step,
                gradients=gradients,
                training=bool(module.training),
                synchronised=gradients,
                input_digest=self._digest(inputs) if 0 < step <= INPUTS_DIGESTED else "",
                pass_loader=loader,
                pass_ordinal=ordinal,
                batch=batch,
                looped=looped,
            )

    def _digest(self, inputs: tuple[Any, ...]) -> str:
        from ...observed import leaves

        return ".".join(leaves(inputs, self._torch))


def _units_of(state: Any) -> dict[str, Any]:
    """Return what is known of a module and of the units inside of it, each of which is gathered by itself."""
    states = state._state_ctx.all_states
    groups = [
        group for one in states for group in (getattr(one, "_fsdp_param_groups", None) or [one._fsdp_param_group])
    ]
    groups = [group for group in groups if group is not None]
    module = state._modules[0]
    meshes = [group.mesh_info.mesh for group in groups]
    sizes = [sum(_elements(parameter) for parameter in group.fsdp_params) for group in groups]
    return {
        "module_class": type(module).__name__.partition("FSDP")[2] or type(module).__name__,
        "by": "fully_shard",
        "units": [group._module_fqn or "" for group in groups],
        "elements": sizes,
        "ranks": sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}),
        "dimensions": sorted({name for mesh in meshes for name in mesh.mesh_dim_names or ()}),
    }


def _elements(parameter: Any) -> int:
    count = 1
    for size in parameter._orig_size:
        count *= int(size)
    return count


def _handles_of(wrapper: Any) -> dict[str, Any]:
    kind = type(wrapper)
    parts = [
        (name, part) for name, part in wrapper.named_modules() if isinstance(part, kind) and part._handle is not None
    ]
    distributed: Any = sys.modules["torch.distributed"]
    return {
        "module_class": type(wrapper.module).__name__,
        "by": kind.__name__,
        "units": [name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "") for name, _ in parts],
        "elements": [int(part._handle.flat_param._unpadded_unsharded_size.numel()) for _, part in parts],
        "ranks": sorted(distributed.get_process_group_ranks(wrapper.process_group)),
    }
