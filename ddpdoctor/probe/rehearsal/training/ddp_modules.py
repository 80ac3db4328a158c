"""What happens to modules wrapped in DistributedDataParallel: wraps, changes, forwards, buffers, missing gradients."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any, Optional
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

from ...journal import Journal
from ...observed import batch_norms, follow_reads, leaves, tensor_digest, user_reader, wrap_facts
from ...torch_compat import SHARDED_STATES, after_import, named_arguments, on_call
from ...user_code import leave_no_frame
from .. import surroundings
from ..schedule import Ending, Pace
from .reduction import Reduction, accumulates, is_zero

# Which lines change, in place, what a module holds beside the parameters that are trained.

WATCHED_FORWARD = 1
"""The number of the training forward that is watched: in the first a module may fill what it holds."""
MOST_WRITES = 32


def watch_writes(
    journal: Journal,
    torch: Any,
    ddp_class: Any,
    ordinal_of: Callable[[Any], tuple[int, int]],
    written: set[tuple[int, str]],
) -> None:
    """Watch one training forward of each wrap whose module holds what DDP neither averages nor hands on.

    The wrap and the name of what is changed are put into ``written``.
    ``ordinal_of`` returns the number of a wrap and that of its next training forward, which is negative for others.
    """
    from torch.overrides import TorchFunctionMode

    class Writes(TorchFunctionMode):  # type: ignore[misc]
        """What is called on tensors while it is entered."""

        def __init__(self, wrap: int, held: dict[int, str]) -> None:
            super().__init__()
            self._wrap = wrap
            self._held = held
            self._left = MOST_WRITES

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self._left and args and _is_write(getattr(function, "__name__", "")):
                journal.guarded(self._note, args[0], sys._getframe(1), harms=())
            return function(*args, **(kwargs or {}))

        def _note(self, tensor: Any, frame: Any) -> None:
            name = self._held.get(_address(tensor)) if isinstance(tensor, torch.Tensor) else None
            if name is not None:
                self._left -= 1
                written.add((self._wrap, name))
                journal.event("own_write", wrap=self._wrap, name=name, site=journal.site(frame))

    def watch(ddp: Any) -> Any:
        wrap, ordinal = ordinal_of(ddp)
        compiler = sys.modules.get("torch._dynamo.utils")
        # What was compiled in the first forward would be compiled anew for the mode.
        if ordinal != WATCHED_FORWARD or (compiler is not None and compiler.counters["frames"]):
            return None
        held = {_address(p): name for name, p in ddp.module.named_parameters() if not p.requires_grad}
        if not ddp.will_sync_module_buffers():
            held.update((_address(buffer), name) for name, buffer in ddp.module.named_buffers())
        return Writes(wrap, held) if held else None

    forward = ddp_class.forward

    @functools.wraps(forward)
    def watched(ddp: Any, *inputs: Any, **options: Any) -> Any:
        writes = journal.guarded(watch, ddp, harms=())
        try:
            if writes is None:
                return forward(ddp, *inputs, **options)
            with writes:
                return forward(ddp, *inputs, **options)
        except BaseException as error:
            leave_no_frame(error)
            raise

    ddp_class.forward = watched


def _is_write(name: str) -> bool:
    return (
        name in ("__setitem__", "__set__")
        or (name.startswith("__i") and name.endswith("__"))
        or name[-1:] == "_" != name[-2:-1]
    )


def _address(tensor: Any) -> int:
    """Return where the memory of a tensor begins, which all views of it share."""
    return int(tensor.untyped_storage().data_ptr())


# The lines of the user's that read a tensor's value in training, where the job is to run on GPUs.

NOTED = 4_000


class HostReads:
    """The reads of one rank, from its first optimizer step on."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._tensor_class = torch.Tensor
        self._is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
        self._only_cuda = journal.plan.get("device") == "cuda"
        self._thread = get_ident()
        self._noted = 0

    def install(self) -> None:
        """Follow the reads, where the job may run on GPUs."""
        if self._journal.plan["job"]["machine"]["may_use_gpus"]:
            follow_reads(self._journal, self._tensor_class, self._is_watched, self._note_read)

    def _is_watched(self) -> bool:
        return get_ident() == self._thread and not self._is_compiling()

    def _note_read(self, name: str, tensor: Any, frame: FrameType, took_ns: int) -> None:
        journal = self._journal
        if not journal.optimizer_steps or journal.rank is None or self._noted >= NOTED:
            return
        if self._only_cuda and not tensor.is_cuda:
            return
        reader = user_reader(frame, journal.user_code)
        if reader is not None:
            self._noted += 1
            journal.event("tensor_read", method=name, site=journal.site(reader))


FORWARDS_NOTED = 4_000
INPUTS_DIGESTED = 16
BUFFERS_DIGESTED = 6
"""Training forwards of a wrap before which its buffers are digested."""
FORWARDS_COMPARED = 200
"""Training forwards of a wrap before which its parameters are compared with those that DDP listed."""
CHANGES_NOTED = 32
ZEROS_SOUGHT = 32
"""Training forwards of a wrap before backwards after which gradients of zero are looked for."""


class Forwards:
    """The counts of forwards, and the newest ones as events."""

    def __init__(self, journal: Journal, newest_batch: Callable[[], tuple[int, int, int, bool]], pace: Pace) -> None:
        self._journal = journal
        self._newest_batch = newest_batch
        self._pace = pace
        self._steps: dict[int, int] = {}
        self._noted = 0

    def step(self, site: int) -> int:
        """Count a training forward; return its number among those of its call chain."""
        journal = self._journal
        step = self._steps[site] = self._steps.get(site, 0) + 1
        journal.step, journal.forward_site = step, site
        journal.forwards += 1
        self._pace.forward_begins()
        return step

    def note(self, **fields: Any) -> None:
        """Write a forward with the batch that was drawn before it."""
        self._noted += 1
        if self._noted <= FORWARDS_NOTED:
            loader, ordinal, batch, looped = self._newest_batch()
            self._journal.event(
                "forward", pass_loader=loader, pass_ordinal=ordinal, batch=batch, looped=looped, **fields
            )


class Modules:
    """Listeners at ``DistributedDataParallel``."""

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
        self._ddp_class = torch.nn.parallel.DistributedDataParallel
        self._forwards = Forwards(journal, newest_batch, pace)
        self.training_begins: Callable[[], object] = lambda: None
        """Called when a module is wrapped."""
        self._wraps: WeakKeyDictionary[Any, Reduction] = WeakKeyDictionary()
        self._wrapped = 0
        self._named: dict[int, tuple[ReferenceType[Any], int, str]] = {}
        """Each parameter of a wrapped module with its wrap and name, by identity, which a later one may have again."""
        self._dropped: list[tuple[ref[Any], Reduction]] = []
        """Modules whose wrapper is gone, while they may be trained on: nothing reduces their gradients any more."""
        self._layouts: dict[int, tuple[tuple[int, bool], ...]] = {}
        """Identity and requires_grad of every parameter of a wrap when it was last looked at."""
        self.beside: Callable[[], Iterator[tuple[int, str, Any]]] = lambda: iter(())
        """Yields the parameters of sharded modules in the form of ``parameters``."""
        self.apart: dict[int, tuple[ReferenceType[Any], int, str]] = {}
        """The same of sharded modules that a part of the job's ranks reduces; with -1 for a wrap what is ignored."""
        self.written: set[tuple[int, str]] = set()
        """Wrap and name of what a forward was seen to change in place, even where its version is not counted up."""
        self._changes = 0

    def install(self) -> None:
        """Listen to construction, forward and communication hooks."""
        journal, ddp_class = self._journal, self._ddp_class
        watch_writes(journal, self._torch, ddp_class, self._newest_forward, self.written)
        on_call(
            journal,
            ddp_class,
            "__init__",
            before=self._wrap_begins,
            after=self._ddp_made,
            harms=("wraps", "wrap_changes", "forwards", "backwards", "missing_gradients", "buffers"),
        )
        on_call(
            journal,
            ddp_class,
            "forward",
            before=self._forward_begins,
            harms=("wrap_changes", "forwards", "backwards", "missing_gradients", "buffers"),
        )
        on_call(journal, ddp_class, "register_comm_hook", before=self._comm_hook_comes, harms=("wraps",))

    def backward_begins(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the wraps that hold gradients already, and of those under ``no_sync`` only now."""
        adding, too_late = [], []
        for module, reduction in self._dropped:
            reduction.backward_begins()
            held = module()
            if held is not None and accumulates(held.parameters()):
                adding.append(reduction.number)
        for ddp, reduction in list(self._wraps.items()):
            reduction.backward_begins()
            if accumulates(ddp.module.parameters()):
                adding.append(reduction.number)
            if reduction.decision and not ddp.require_backward_grad_sync:
                too_late.append(reduction.number)
        return adding, too_late

    def backward_ended(self, retained: bool) -> dict[int, str]:
        """Return how the gradients fared of each wrap that got some; see ``Reduction.backward_ended``."""
        fates = {reduction.number: reduction.backward_ended(retained) for _, reduction in self._dropped}
        for ddp, reduction in list(self._wraps.items()):
            fates[reduction.number] = fate = reduction.backward_ended(retained)
            if fate == "" and ddp.find_unused_parameters and reduction.training_forwards <= ZEROS_SOUGHT:
                # Where it searches, DDP sends zeros to parameters whose output the loss leaves out, and takes them away
                # again where no rank had more.
                reduction.arrived -= {id(p) for p in ddp.module.parameters() if p.grad is None or is_zero(p.grad)}
        return {number: fate for number, fate in fates.items() if fate is not None}

    def backward_failed(self) -> None:
        """Close the reductions of a backward that was left by an exception: its gradients prove nothing."""
        for reduction in self._wraps.values():
            reduction.close()

    def close_iterations(self) -> None:
        """Note which parameters got no gradient in an iteration that is over: at a step, a new forward, the end."""
        for reduction in list(self._wraps.values()):
            self._close(reduction)

    def number_of(self, ddp: Any) -> Optional[int]:
        """Return the number of a DDP module; None where it was not seen made."""
        reduction = self._wraps.get(ddp)
        return None if reduction is None else reduction.number

    def _newest_forward(self, ddp: Any) -> tuple[int, int]:
        """Return the number of a wrap, and that of the training forward that has just begun; -1 for another one."""
        reduction = self._wraps.get(ddp)
        if reduction is None or not ddp.training or not self._torch.is_grad_enabled():
            return -1, -1
        return reduction.number, reduction.training_forwards - 1

    def name_of(self, parameter: Any, *, apart: bool = False) -> Optional[tuple[int, str]]:
        """Return wrap and name of a parameter; None when no wrapped module holds it, be it one of those ``apart``."""
        known = self._named.get(id(parameter)) or (self.apart.get(id(parameter)) if apart else None)
        return known[1:] if known is not None and known[0]() is parameter else None

    def parameters(self) -> Iterator[tuple[int, str, Any]]:
        """Yield every parameter that wrapped or sharded modules hold by now: its wrap, its name, and itself."""
        for ddp, reduction in list(self._wraps.items()):
            for name, parameter in ddp.module.named_parameters():
                yield reduction.number, name, parameter
        yield from self.beside()

    def saved_buffers(self) -> Iterator[tuple[int, str, Any]]:
        """Yield every buffer of wrapped modules that is part of their state, likewise."""
        for ddp, reduction in list(self._wraps.items()):
            for path, part in ddp.module.named_modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None and name not in part._non_persistent_buffers_set:
                        yield reduction.number, f"{path}.{name}" if path else name, buffer

    def tensor_name(self, tensor: Any) -> str:
        """Return the name of a parameter or a buffer in a wrapped module, with the wrap's number; empty for others."""
        known = self.name_of(tensor)
        if known is None:
            buffers = ((own.number, ddp.module.named_buffers()) for ddp, own in list(self._wraps.items()))
            known = next(((wrap, name) for wrap, held in buffers for name, one in held if one is tensor), None)
        return "" if known is None else f"{known[1]} of model {known[0]}" if known[0] else known[1]

    def inner_owner_of(self, error: BaseException) -> str:
        """Return the class of a wrapped model with the attribute that its DDP wrapper lacks; empty for other errors."""
        if not isinstance(error, AttributeError) or f"'{self._ddp_class.__name__}' object" not in str(error):
            return ""
        name = str(error).rstrip("'").rpartition("'")[2]
        owners = [type(ddp.module).__qualname__ for ddp in self._wraps if hasattr(ddp.module, name)]
        return owners[0] if owners else ""

    def _wrap_begins(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._ending.check()
        module = arguments[1] if len(arguments) > 1 else options.get("module")
        short = self._journal.guarded(self._shortage, module, harms=())
        if short:
            self._ending.end("memory", short)

    def _comm_hook_comes(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        reduction = self._wraps.get(arguments[0])
        if reduction is not None:
            self._journal.event("communication_hook", wrap=reduction.number)

    def _shortage(self, module: Any) -> str:
        """Return a sentence that this machine has not the memory to train the module; empty when it has."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "") or self._torch.distributed.get_world_size())
        return surroundings.shortage(surroundings.need_of(module.parameters(), ranks), surroundings.free_bytes(), ranks)

    def _close(self, reduction: Reduction) -> None:
        synchronised = reduction.decision and reduction.arrived
        missing, local = reduction.close()
        if synchronised and (missing or reduction.last_missing is None):
            same = (missing, local) == reduction.last_missing
            reduction.last_missing = missing, local
            if missing:
                self._journal.event(
                    "missing_gradients",
                    wrap=reduction.number,
                    site=reduction.site,
                    parameters=None if same else missing,
                    local=None if same else local,
                )

    def _ddp_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.training_begins()
        ddp = arguments[0]
        module = ddp.module
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        names = {
            id(parameter): name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        reduction = Reduction(self._wrapped, names)
        inner = [self._wraps[part].number for part in module.modules() if part in self._wraps]
        self._wrapped += 1
        self._wraps[ddp] = reduction
        finalize(ddp, self._wrapper_is_gone, ref(module), reduction).atexit = False
        self._hook(reduction, module)
        facts = wrap_facts(ddp, named_arguments(self._ddp_class.__init__, arguments, options), self._torch)
        reduction.synchronised_norms = facts["synchronised_batch_norms"]
        site, by_user = self._journal.site(frame), self._journal.user_code.holds(frame.f_code.co_filename)
        self._journal.event("wrap", wrap=reduction.number, site=site, by_user=by_user, contains=inner, **facts)

    def _wrapper_is_gone(self, module: ref[Any], reduction: Reduction) -> None:
        reduction.close()
        self._dropped.append((module, reduction))

    def _hook(self, reduction: Reduction, module: Any) -> None:
        """Listen to the gradients of every parameter of a module that wants one, and remember what there is."""
        for name, parameter in module.named_parameters():
            if self.name_of(parameter) is None:
                self._named[id(parameter)] = ref(parameter), reduction.number, name
            if parameter.requires_grad and id(parameter) not in reduction.watched:
                reduction.watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, reduction=reduction: reduction.arrive(id(parameter))
                )
        self._layouts[reduction.number] = _layout(module)

    def _forward_begins(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._ending.check()
        journal, torch, ddp = self._journal, self._torch, arguments[0]
        reduction = self._wraps.get(ddp)
        if reduction is None:
            return
        gradients = bool(torch.is_grad_enabled())
        synchronised = gradients and bool(ddp.require_backward_grad_sync)
        site = journal.site(frame)
        step = 0
        digest = ""
        training_norms = None
        if gradients:
            self._close(reduction)
            reduction.forward_begins(synchronised, site)
        if gradients and ddp.training:
            step = self._forwards.step(site)
            if reduction.training_forwards < INPUTS_DIGESTED:
                digest = ".".join(leaves((arguments[1:], options), torch))
            if reduction.training_forwards == 0:
                training_norms = sum(layer.training for layer in batch_norms(ddp.module, self._torch)[0])
            if reduction.training_forwards < FORWARDS_COMPARED:
                self._compare(ddp, reduction, site)
            if synchronised and reduction.training_forwards < BUFFERS_DIGESTED:
                self._note_buffers(ddp, reduction)
            reduction.training_forwards += 1
        self._forwards.note(
            wrap=reduction.number,
            site=site,
            step=step,
            gradients=gradients,
            training=bool(ddp.training),
            synchronised=synchronised,
            input_digest=digest,
            batch_norms=training_norms,
        )

    def _compare(self, ddp: Any, reduction: Reduction, site: int) -> None:
        """Note which parameters were added, frozen or unfrozen since DDP listed them, and a late SyncBatchNorm."""
        module = ddp.module
        if reduction.training_forwards == 0 and reduction.synchronised_norms is not None:
            late = batch_norms(module, self._torch)[1] - reduction.synchronised_norms
            if late > 0:
                self._journal.event("wrap_change", wrap=reduction.number, site=site, late_batch_norms=late)
        if _layout(module) == self._layouts.get(reduction.number):
            return
        named = dict(module.named_parameters())
        listed = set(reduction.names.values()) | set(getattr(ddp, "parameters_to_ignore", ()))
        wanting = [name for name, parameter in named.items() if parameter.requires_grad]
        replaced = [name for name in wanting if name in listed and id(named[name]) not in reduction.names]
        self._hook(reduction, module)
        added = [*(name for name in wanting if name not in listed), *replaced]
        frozen = [name for name in reduction.names.values() if name in named and not named[name].requires_grad]
        self._changes += 1
        # A model that is switched off as a whole, as a GAN's discriminator is in turn, is not waited for.
        if self._changes <= CHANGES_NOTED and (added or 0 < len(frozen) < len(reduction.names)):
            self._journal.event("wrap_change", wrap=reduction.number, site=site, added=added, frozen=frozen)

    def _note_buffers(self, ddp: Any, reduction: Reduction) -> None:
        buffers = dict(ddp.module.named_buffers())
        if buffers:
            self._journal.event(
                "buffers",
                wrap=reduction.number,
                forward=reduction.training_forwards,
                digests={name: tensor_digest(tensor) for name, tensor in buffers.items()},
            )


def _layout(module: Any) -> tuple[tuple[int, bool], ...]:
    return tuple((id(parameter), parameter.requires_grad) for parameter in module.parameters())


# What happens to modules whose parameters are sharded: their shape, and the forwards of the outermost of them.

FIRST = -2
"""Stands for the first sharded module where others are known by their wraps; those after it count down from there."""


BYTES_OF_SHARDS = 1 << 25
"""Bytes of replicated shards that are digested at the first forward; of large ones a part."""


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
        self._forwards = Forwards(journal, newest_batch, pace)
        self.newest = (-1, False)
        """The call chain of the newest forward, and whether it has no gradients."""
        self.apart: dict[int, tuple[ReferenceType[Any], int, str]] = {}
        self._known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The call chain that made each module a unit."""
        self._of_a_part: set[int] = set()
        """Modules that only some ranks of the job share: others may be fed as they are, as by tensor parallelism."""

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
            on_call(self._journal, state, "init", before=self._unit_made, harms=("sharded_modules",))

    def _hook_wrapper(self, module: ModuleType) -> None:
        wrapper = module.FullyShardedDataParallel
        on_call(self._journal, wrapper, "forward", before=self._wrapper_entered, harms=("forwards",))
        on_call(self._journal, wrapper, "__init__", after=self._unit_made, harms=("sharded_modules",))

    def _unit_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        made = arguments[0] if hasattr(arguments[0], "named_parameters") else arguments[1]
        for module in made if isinstance(made, (list, tuple)) else (made,):
            self._made[module] = self._journal.site(frame)

    def _state_entered(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the forward of the outermost module; the ones inside of it come here, too."""
        state, module = arguments[:2]
        if state._state_ctx.iter_forward_root is state:
            self._forward_begins(frame, module, (arguments[2:], options), lambda: _shape_of(state))

    def _wrapper_entered(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        wrapper = arguments[0]
        if getattr(wrapper, "_is_root", None) is not False:
            self._forward_begins(frame, wrapper, (arguments[1:], options), lambda: _shape_of_wrapper(wrapper))

    def _forward_begins(
        self, frame: FrameType, module: Any, inputs: tuple[Any, ...], shape_of: Callable[[], dict[str, Any]]
    ) -> None:
        self._ending.check()
        journal = self._journal
        gradients = bool(self._torch.is_grad_enabled())
        site = journal.site(frame)
        self.newest = site, not gradients
        if module not in self._known:
            self._known[module] = FIRST - len(self._known)
            shape = journal.guarded(
                lambda: {
                    **shape_of(),
                    "replicas": _replicas_of(module),
                    "ignored": self._note_parts(module),
                    "inputs": ".".join(leaves(inputs, self._torch)),
                },
                harms=("sharded_modules",),
            )
            if shape is not None:
                journal.event("sharded_module", module=self._known[module], site=site, **shape)
                if len(shape["ranks"]) < self._torch.distributed.get_world_size():
                    self._of_a_part.add(self._known[module])
        step = 0
        if gradients and module.training:
            step = self._forwards.step(site)
        if self._known[module] not in self._of_a_part:
            self._forwards.note(
                wrap=self._known[module],
                site=site,
                step=step,
                gradients=gradients,
                training=bool(module.training),
                synchronised=gradients,
                input_digest=".".join(leaves(inputs, self._torch)) if 0 < step <= INPUTS_DIGESTED else "",
            )

    def _note_parts(self, module: Any) -> list[str]:
        """Note the units whose gradients a part of the job's ranks reduces; return the parameters that are in none."""
        world, number, managed = self._torch.distributed.get_world_size(), self._known[module], set[int]()
        named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in module.named_parameters()}
        for part in module.modules():
            for parameters, reach, unit in _units_of(part):
                own = set(map(id, parameters))
                managed |= own
                held = {name: p for name, p in named.items() if id(p) in own and reach < world}
                self.apart.update((id(p), (ref(p), number, name)) for name, p in held.items())
                unit["digests"] = {n: tensor_digest(getattr(p, "_local_tensor", p), 1 << 15) for n, p in held.items()}
                if held:
                    self._journal.event("sharded_part", module=number, site=self._made.get(part, -1), **unit)
        left = {name: p for name, p in named.items() if id(p) not in managed and not hasattr(p, "_local_tensor")}
        self.apart.update((id(p), (ref(p), -1, name)) for name, p in left.items())
        return [name for name, p in left.items() if p.requires_grad]


def _shape_of(state: Any) -> dict[str, Any]:
    """Return what is known of a module and of the ranks that hold the parts inside of it."""
    module = state._modules[0]
    meshes = [group.mesh_info.mesh for one in state._state_ctx.all_states for group in _groups_of(one)]
    return {
        "module_class": type(module).__name__.partition("FSDP")[2] or type(module).__name__,
        "by": "fully_shard",
        "ranks": sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}),
    }


def _units_of(part: Any) -> Iterator[tuple[list[Any], int, dict[str, Any]]]:
    """Yield the parameters that a module shards as a unit, how many ranks reduce their gradients, and which and why.

    The older wrapper shards nothing in a group of one rank, and then forgets the other dimension of a hybrid.
    """
    distributed: Any = sys.modules["torch.distributed"]
    handle: Any = getattr(part, "_handle", None)
    if hasattr(handle, "flat_param"):
        across = getattr(part, "_inter_node_pg", None)
        ranks = distributed.get_process_group_ranks(handle.process_group)
        copies = 1 if across is None else across.size()
        lost = copies > 1 and not handle.uses_sharded_strategy
        unit = {
            "ranks": ranks,
            "place": [handle.rank, handle.world_size],
            "why": "hybrid" if lost else _cut_from(part._device_mesh),
        }
        yield [handle.flat_param, *(handle.flat_param._params or ())], len(ranks) * (1 if lost else copies), unit
    own = getattr(part, "_get_fsdp_state", lambda: None)()
    for group in _groups_of(own) if own is not None and own._modules[0] is part else ():
        info = group.mesh_info
        ranks = info.mesh.mesh.flatten().tolist()
        place = [getattr(info, "shard_mesh_rank", 0), getattr(info, "shard_mesh_size", 1)]
        yield (
            [one.sharded_param for one in group.fsdp_params],
            len(ranks),
            {"ranks": ranks, "place": place, "why": _cut_from(info.mesh)},
        )


def _cut_from(mesh: Any) -> str:
    whole = getattr(mesh, "_get_root_mesh", lambda: None)()
    return "mesh" if whole is not None and whole.size() > mesh.size() else "group"


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _replicas_of(module: Any) -> list[tuple[list[int], dict[str, str]]]:
    """Return digests of this rank's shards by name, for each group of ranks that hold the same shards as it.

    The wrapper names its group itself; in place a mesh has a dimension for it.
    """
    distributed: Any = sys.modules["torch.distributed"]
    found: dict[tuple[int, ...], dict[str, str]] = {}
    named = list(module.named_parameters())
    share = max(64, BYTES_OF_SHARDS // max(1, len(named)))
    wrapper_group = getattr(module, "_inter_node_pg", None)
    for name, parameter in named:
        mesh, groups = getattr(parameter, "device_mesh", None), [wrapper_group] if wrapper_group is not None else []
        if mesh is not None:
            replicated = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
            groups = [mesh.get_group(dim) for dim in replicated if mesh.size(dim) > 1]
        digest = tensor_digest(getattr(parameter, "_local_tensor", parameter), share) if groups else ""
        for group in groups if digest else ():
            found.setdefault(tuple(distributed.get_process_group_ranks(group)), {})[name] = digest
    return [(list(ranks), digests) for ranks, digests in found.items()]


def _shape_of_wrapper(wrapper: Any) -> dict[str, Any]:
    distributed: Any = sys.modules["torch.distributed"]
    return {
        "module_class": type(wrapper.module).__name__,
        "by": type(wrapper).__name__,
        "ranks": sorted(distributed.get_process_group_ranks(wrapper.process_group)),
    }
