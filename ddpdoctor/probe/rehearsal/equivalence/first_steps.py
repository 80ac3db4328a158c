"""The first steps of a job: the state that they begin with, and the gradients that the optimizers get."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import pickle
import sys
from array import array
from types import ModuleType
from typing import Any, Callable, Optional

from ...journal import Journal
from ...observed import digest_of, parameters_of, tensor_digest
from ...torch_compat import SHARDED_STATES, after_import, on_call, replaces
from ..schedule import Ending
from ..training.ddp_modules import Modules
from .feeding import COMPUTED, LENGTHS_FILE, OWN, Draws, Feeding, OfRanks, seed, states
from .named_ranks import NamedRanks

STEPS = 2
"""Of the optimizer that steps first; with them a first gradient that is zero by design is not the only one."""
MOST_STEPS = 8
"""Of all optimizers."""
MOST_ELEMENTS = 400_000
"""Elements of the gradients of a step that are kept; of large parameters a part of them, evenly spread …"""
FEWEST_ELEMENTS = 64
"""… of each parameter so many at least."""
MOST_STATE_BYTES = 1 << 31
DISTURBANCE = 2.0**-22
"""Of a float32; a batch norm over two samples makes a hundredth of the gradient of it."""
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class FirstSteps:
    """The hooks of an examination of equivalence in one process."""

    def __init__(self, journal: Journal, torch: Any, ending: Ending, modules: Modules) -> None:
        spec = journal.plan["equivalence"]
        self._journal = journal
        self._torch = torch
        self._ending = ending
        self._modules = modules
        self._alone = bool(spec.get("ranks"))
        """This process stands for all ranks, or for one of them, here or in another launch."""
        self._of_ranks = OfRanks(journal, spec)
        self._directory = os.path.join(journal.run_directory, "equivalence")
        self._feeding = Feeding(journal, torch, spec, self._of_ranks, self._directory)
        self._draws = Draws(journal, torch, self._feeding, spec, self._of_ranks, self._directory)
        self._draws.is_gradient = self._is_gradient
        self._optimizers: list[Any] = []
        self._prepared = 0
        self._steps: dict[int, int] = {}
        self._events = 0
        self._first: Optional[int] = None
        self._local: dict[int, Any] = {}
        """What backwards added to the gradient of each parameter, by identity, before any reduction."""
        self._passes: dict[int, int] = {}
        self._each: dict[int, int] = {}
        """How many elements of each parameter's gradient are kept."""
        self._clips: list[dict[str, Any]] = []
        self._unsharded: dict[int, Any] = {}
        """What stands for each parameter that ``fully_shard`` has split, while the model is whole, by its identity."""
        self._models: list[Any] = []
        """What DDP wraps, or ``fully_shard`` has split, and what stands for it here."""
        self._known: set[int] = set()
        """Modules that were called, and those inside of sharded ones."""
        self._random: Any = None

    @functools.cached_property
    def _wraps(self) -> list[dict[str, Any]]:
        """Modules of the ranks that none of this process was given the values of by now."""
        return self._of_ranks.entries("modules-0.pickle")

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        facts = {"reduced_precision": False, "plain_norms": False, "synced_norms": False}
        of_ranks = self._of_ranks.document("step-0-0.json") if self._alone else {}
        return {**facts, **of_ranks.get("facts", {})}

    def install(self) -> None:
        """Seed, and hook loaders, random operators, modules, clipping and optimizers."""
        torch, journal = self._torch, self._journal
        os.makedirs(self._directory, exist_ok=True)
        seed(torch, 0)
        self._feeding.on_fetch = self._prepare
        self._feeding.stop = self._stop
        self._feeding.install()
        self._draws.install()
        on_call(journal, torch.optim.Optimizer, "__init__", after=self._optimizer_made, harms=())
        hooks = sys.modules["torch.optim.optimizer"]
        hooks.register_optimizer_step_pre_hook(self._before_step)
        hooks.register_optimizer_step_post_hook(self._after_step)
        torch.nn.modules.module.register_module_forward_pre_hook(self._called)
        for state in SHARDED_STATES:
            after_import(state.replace("_fsdp_state", "_fsdp_param"), self._hook_sharding)
        self._no_dropout()
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._hook_clipping(name)
        if self._alone:
            if journal.plan["equivalence"]["ranks"] != OWN:
                NamedRanks(journal, torch, self._directory, self._stop).install()
            on_call(journal, torch.distributed, "all_gather", after=self._gathered, harms=())
            self._normalise_by_rank()
            if journal.plan["equivalence"]["feed"] == "joined":
                self._measure_alike()

    def _gathered(self, _: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Let what one process gathers of itself be what it gave, gradient and all: no other rank has a part in it."""
        copies, given, *_ = (*arguments, *options.values())
        if not self._torch.is_grad_enabled() or not given.requires_grad:
            return
        # What is gathered into one tensor is a view that torch 2.13 lets nobody write to with a gradient.
        if len(copies) == 1 and copies[0].shape == given.shape and not copies[0].requires_grad:
            copies[0].copy_(given)

    def _stop(self, why: str) -> None:
        """End: this process cannot be given what it asks for."""
        with open(os.path.join(self._directory, "stopped.txt"), "w", encoding="utf-8") as file:
            file.write(why)
        self._ending.end("steps")

    def _optimizer_made(self, frame: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._optimizers.append(arguments[0])
        if not self._draws.active:
            self._draws.active = True
            self._random = states(self._torch)[1:]

    # The state before the first step.

    def _prepare(self) -> None:
        """Keep, or put back, the parameters of the optimizers that were made by now."""
        while self._prepared < len(self._optimizers):
            number, self._prepared = self._prepared, self._prepared + 1
            self._journal.guarded(self._begin, number, harms=())

    def _begin(self, number: int) -> None:
        parameters = parameters_of(self._optimizers[number])
        name = f"optimizer-{number}.pickle"
        if self._alone:
            self._put(parameters, name)
            return
        for parameter in parameters:
            self._each[id(parameter)] = _share(parameters)
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._add, parameter))
        self._keep(parameters, name)
        if self._journal.plan["equivalence"].get("as") == "again":
            self._disturb(parameters)

    def _hook_sharding(self, module: ModuleType) -> None:
        """See the gradients that a backward leaves before they are reduced to pieces."""
        on_call(self._journal, module.FSDPParam, "init_unsharded_param", after=self._made_whole, harms=())

    def _made_whole(self, frame: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        sharded = arguments[0].sharded_param
        if id(sharded) not in self._unsharded and sharded.requires_grad:
            self._unsharded[id(sharded)] = arguments[0]
            arguments[0]._unsharded_param.register_hook(functools.partial(self._add, sharded))

    def _disturb(self, parameters: list[Any]) -> None:
        """Change every parameter by two units in its last place, to see what rounding makes of the gradients."""
        torch = self._torch
        with torch.no_grad():
            for parameter in parameters:
                if parameter.is_floating_point():
                    parameter = getattr(parameter, "_local_tensor", parameter)
                    signs = torch.arange(parameter.numel(), device=parameter.device).remainder(2).mul(2).sub(1)
                    parameter.add_(parameter * signs.view(parameter.shape).to(parameter.dtype), alpha=DISTURBANCE)

    def _keep(self, parameters: list[Any], name: str) -> None:
        if sum(p.numel() * p.element_size() for p in parameters) <= MOST_STATE_BYTES:
            self._dump([self._kept(parameter) for parameter in parameters], name)

    def _kept(self, tensor: Any) -> Any:
        """Return what is kept of a tensor, on rank 0; the pieces of it are gathered by all ranks."""
        whole = _whole(tensor)
        return whole.cpu() if self._journal.rank == 0 else None

    def _dump(self, content: Any, name: str) -> None:
        if self._journal.rank == 0:
            with open(os.path.join(self._directory, name), "ab") as file:
                pickle.dump(content, file)

    def _put(self, parameters: list[Any], name: str) -> None:
        kept = self._of_ranks.entries(name)
        if not kept or [p.shape for p in kept[0]] != [p.shape for p in parameters]:
            return
        with self._torch.no_grad():
            for parameter, value in zip(parameters, kept[0]):
                _set(parameter, value)

    def _add(self, parameter: Any, gradient: Any) -> None:
        self._journal.guarded(self._add_sample, parameter, gradient, harms=())

    def _add_sample(self, parameter: Any, gradient: Any) -> None:
        key = id(parameter)
        if key not in self._each:
            return
        added, before = _sample(gradient, self._each[key]).float().clone(), self._local.get(key)
        if before is None or not self._has_gradient(parameter):
            self._local[key], self._passes[key] = added, 1  # What was zeroed is no part of the step.
        else:
            self._local[key], self._passes[key] = before + added, self._passes[key] + 1

    def _has_gradient(self, parameter: Any) -> bool:
        """Return whether an earlier pass has left a gradient; nothing is gathered here, where a rank may be alone."""
        held = [parameter.grad]
        whole = self._unsharded.get(id(parameter))
        if whole is not None:
            held = [getattr(parameter.grad, "_local_tensor", None), whole.unsharded_accumulated_grad]
            held.append(whole._unsharded_param.grad)
        return any(gradient is not None and bool(_sample(gradient, 64).any()) for gradient in held)

    def _called(self, module: Any, inputs: Any) -> None:
        if (
            not self._torch.compiler.is_compiling()
            and os.getpid() == self._journal.pid
            and self._torch.is_grad_enabled()
        ):
            self._journal.guarded(self._note_call, module, harms=())

    def _note_call(self, module: Any) -> None:
        facts = self._facts
        if not facts["reduced_precision"] and not self._alone:
            facts["reduced_precision"] = any(map(self._torch.is_autocast_enabled, ("cpu", "cuda")))
        if id(module) in self._known:
            return
        self._prepare()
        self._known.add(id(module))
        self._draws.entering.mark(list(module.buffers(recurse=False)), COMPUTED)
        norms = self._torch.nn.modules.batchnorm
        if isinstance(module, norms._BatchNorm) and module.training and not self._alone:
            facts["synced_norms" if isinstance(module, norms.SyncBatchNorm) else "plain_norms"] = True
        sharding = getattr(module, "_get_fsdp_state", None)
        if sharding is not None:
            self._known.update(map(id, module.modules()))
            policy = getattr(sharding(), "_mp_policy", None)
            types = {getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype")}
            facts["reduced_precision"] |= bool(types & {self._torch.float16, self._torch.bfloat16})
        if self._alone:
            self._put_module(module)
        elif sharding is not None or isinstance(module, self._torch.nn.parallel.DistributedDataParallel):
            self._keep_module(module if sharding is not None else module.module)

    def _keep_module(self, module: Any) -> None:
        self._models.append(module)
        rest = {name: self._kept(p) for name, p in module.named_parameters() if not p.requires_grad}
        rest.update({name: self._kept(buffer) for name, buffer in module.named_buffers()})
        self._dump({"shape": _shape(module), "rest": rest}, "modules-0.pickle")

    def _put_module(self, module: Any) -> None:
        shape = _shape(module)
        found = next((one for one in self._wraps if one["shape"] == shape), None)
        if found is None:
            return
        self._wraps.remove(found)
        self._models.append(module)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with self._torch.no_grad():
            for name, value in found["rest"].items():
                if name in own and own[name].shape == value.shape:
                    _set(own[name], value)

    # What is made alike in all processes.

    def _no_dropout(self) -> None:
        """Let nothing be dropped: what is dropped of a sample is a matter of chance."""
        functional = self._torch.nn.functional
        for name in _DROPOUTS:
            if hasattr(functional, name):
                setattr(functional, name, _kept_whole(getattr(functional, name)))

        @replaces("scaled_dot_product_attention", functional)
        def without_dropout(attention: Any, *arguments: Any, **named: Any) -> Any:
            if len(arguments) > 4:
                arguments = (*arguments[:4], 0.0, *arguments[5:])
            else:
                named["dropout_p"] = 0.0
            return attention(*arguments, **named)

    def _normalise_by_rank(self) -> None:
        """Let batch norms take the statistics of each rank's samples where the ranks do, which is known to differ."""
        norm_class, torch, feeding = self._torch.nn.modules.batchnorm._BatchNorm, self._torch, self._feeding
        steps = self

        @replaces("forward", norm_class)
        def forward_by_rank(forward: Any, module: Any, inputs: Any) -> Any:
            whole = sum(feeding.sizes)
            if not module.training or len(feeding.sizes) < 2 or inputs.shape[0] % whole:
                return forward(module, inputs)
            if not steps._facts["plain_norms"] or steps._facts["synced_norms"]:
                return forward(module, inputs)
            times = inputs.shape[0] // whole
            return torch.cat([forward(module, part) for part in inputs.split([n * times for n in feeding.sizes])])

    def _measure_alike(self) -> None:
        """Let loaders be as long as those of a rank: with the batches of all ranks a pass has no more of them."""
        of_ranks = self._of_ranks

        @replaces("__len__", self._torch.utils.data.DataLoader)
        def length_of_rank(length: Any, loader: Any) -> int:
            number = getattr(loader, "_ddpdoctor_number", None)  # A loader that is just made has none.
            known = None if number is None else of_ranks.document(LENGTHS_FILE).get(str(number))
            return int(length(loader)) if known is None else known

    # What the optimizers get.

    def _hook_clipping(self, name: str) -> None:
        clip, steps = getattr(self._torch.nn.utils, name), self
        first, bound = list(inspect.signature(clip).parameters)[:2]

        @functools.wraps(clip)
        def noted(*arguments: Any, **options: Any) -> Any:
            given = {**dict(zip((first, bound, "norm_type"), arguments)), **options}
            parameters = given.get(first)
            if not isinstance(parameters, (steps._torch.Tensor, type(None))):
                # Read twice, which an iterator over them is not.
                parameters = list(parameters)
                arguments = (parameters, *arguments[1:])
                options.pop(first, None)
            kind = given.get("norm_type", 2.0) if name == "clip_grad_norm_" else None
            steps._journal.guarded(
                steps._note_clip, name, parameters, given.get(bound), kind, sys._getframe(1), harms=()
            )
            return clip(*arguments, **options)

        for module in (self._torch.nn.utils, sys.modules["torch.nn.utils.clip_grad"]):
            setattr(module, name, noted)

    def _note_clip(self, name: str, parameters: Any, bound: Any, kind: Any, frame: Any) -> None:
        if len(self._clips) < 64:
            clipped = [parameters] if isinstance(parameters, self._torch.Tensor) else parameters
            file, line = next(((found[0], found[1]) for found in self._journal.user_code.frames_here(frame)), ("", 0))
            clip = {"file": file, "line": line, "norm": _norm(clipped), "most": float(bound), "name": name}
            self._clips.append({**clip, "gradients": sum(p.grad is not None for p in clipped), "is_2_norm": kind == 2})

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if os.getpid() != self._journal.pid or self._journal.rank is None:
            return
        number = next((n for n, one in enumerate(self._optimizers) if one is optimizer), None)
        if number is None:
            return
        self._prepare()
        self._first = number if self._first is None else self._first
        self._steps[number] = self._steps.get(number, 0) + 1
        self._journal.guarded(self._write, optimizer, number, harms=())
        self._events += 1
        if self._events >= MOST_STEPS or self._steps[self._first] >= STEPS:
            self._ending.end("steps")

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        parameters = parameters_of(optimizer)
        self._draws.rescaled = {}  # What the optimizer itself multiplies is no news.
        self._local = {key: value for key, value in self._local.items() if key not in set(map(id, parameters))}
        name = f"after-{self._events - 1}.pickle"
        self._journal.guarded(self._note_beside, optimizer, parameters, harms=())
        self._journal.guarded(self._put if self._alone else self._keep, parameters, name, harms=())

    def _note_beside(self, optimizer: Any, parameters: list[Any]) -> None:
        """Write a part of what the buffers and the optimizer hold now; of a batch norm it is known to differ."""
        held: dict[str, Any] = {}
        for module in self._models:
            for prefix, part in module.named_modules():
                if not isinstance(part, self._torch.nn.modules.batchnorm._NormBase):
                    for name, buffer in part.named_buffers(recurse=False):
                        held[f"buffer {prefix}.{name}".replace(" .", " ")] = buffer
        for number, parameter in enumerate(parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, self._torch.Tensor) and value.numel() > 1:
                    held[f"{key} of parameter {number}"] = value
        content = {what: _sample(value, FEWEST_ELEMENTS).double().tolist() for what, value in held.items()}
        name = os.path.join(self._directory, f"step-{self._journal.rank}-{self._events - 1}.beside")
        with open(name, "w", encoding="utf-8") as text:
            json.dump(content, text)

    def _is_gradient(self, tensor: Any) -> bool:
        """Return whether a tensor lies where the gradient of a parameter that an optimizer holds does."""
        address = _address(tensor)
        held = (p.grad for optimizer in self._optimizers for p in parameters_of(optimizer) if p.grad is not None)
        return bool(address) and any(_address(gradient) == address for gradient in held)

    def _write(self, optimizer: Any, number: int) -> None:
        """Write a step: gradients, and what one has to know to understand how they came about."""
        parameters = parameters_of(optimizer)
        each = _share(parameters)
        rows, numbers = [], array("f")
        owners = {id(one): (module, name) for module, name, one in self._modules.parameters()}
        for index, parameter in enumerate(parameters):
            owner = self._modules.name_of(parameter) or owners.get(id(parameter))
            gradient, local = parameter.grad, self._local.get(id(parameter))
            row: dict[str, Any] = {
                "wrap": -1 if owner is None else owner[0],
                "name": f"parameter {index}" if owner is None else owner[1],
                "shape": list(parameter.shape),
                "gradient": gradient is not None,
                "local": local is not None,
                "passes": self._passes.get(id(parameter), 0),
                "piece": _piece(parameter),
                "stride": _stride(parameter, each),
            }
            kept = [_sample(gradient, each).float()] if row["gradient"] else []
            kept += [local] if row["local"] else []
            row["kept"] = len(kept[0]) if kept else 0
            for tensor in kept:
                numbers.extend(tensor.tolist())
            rows.append(row)
            reduced = gradient is not None and gradient.dtype in (self._torch.float16, self._torch.bfloat16)
            self._facts["reduced_precision"] = self._facts["reduced_precision"] or reduced
        random = states(self._torch)[1:]
        step = {
            "optimizer": number,
            "ordinal": self._steps[number],
            "parameters": rows,
            "clips": self._clips,
            "losses": self._draws.losses,
            "scalings": [[*place, number] for place, number in self._draws.scalings.items()],
            "scaled_back": list(self._draws.scaled_back),
            "counted": [[*place, *where] for place, where in self._draws.counted.items()],
            "rescaled": [list(place) for place in self._draws.rescaled],
            "entered": [[digest, *where] for digest, where in self._draws.entering.noted.items()],
            "unmatched_draws": self._draws.unmatched,
            "state": _hash([tensor_digest(_sample(parameter, each)) for parameter in parameters]),
            "random": _hash(random),
            "random_moved": random != self._random,
            "facts": self._facts,
            "norm": _norm(parameters),
            "drawn": _hash(self._feeding.drawn),
        }
        self._clips, self._draws.losses, self._draws.entering.noted = [], [], {}
        name = os.path.join(self._directory, f"step-{self._journal.rank}-{self._events}")
        with open(f"{name}.numbers", "wb") as file:
            file.write(numbers.tobytes())
        with open(f"{name}.json", "w", encoding="utf-8") as text:
            json.dump(step, text)


def _share(parameters: list[Any]) -> int:
    """Return how many elements of each parameter's gradient are kept."""
    return max(FEWEST_ELEMENTS, MOST_ELEMENTS // max(1, len(parameters)))


def _whole(tensor: Any) -> Any:
    """Return what a tensor holds, gathered from the ranks that have its pieces."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _set(parameter: Any, value: Any) -> None:
    """Give a parameter other values, or this rank's piece of it, which every rank cuts out by itself."""
    tensor = parameter.detach()
    if hasattr(tensor, "full_tensor"):
        pieces, mesh = type(tensor), tensor.device_mesh
        copied = [sys.modules[pieces.__module__].Replicate()] * mesh.ndim
        value = value.to(device=tensor.device, dtype=tensor.dtype)
        whole = pieces.from_local(value, mesh, copied, run_check=False)
        tensor, value = tensor._local_tensor, whole.redistribute(mesh, tensor.placements)._local_tensor
    tensor.copy_(value)


def _sample(tensor: Any, most: int) -> Any:
    """Return at most so many elements of a tensor, evenly spread; of one in pieces all ranks ask together."""
    tensor = _whole(tensor)
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)
    return flat[:: _stride(flat, most)]


def _stride(tensor: Any, most: int) -> int:
    return max(1, -(-int(tensor.numel()) // most))


def _piece(parameter: Any) -> int:
    """Return how many elements of a parameter each rank but the last ones holds, one after the other; 0 where it is not
    divided so.
    """
    mesh: Any = getattr(parameter, "device_mesh", None)
    placements: Any = getattr(parameter, "placements", ())
    if mesh is None or mesh.size() != sys.modules["torch.distributed"].get_world_size() or len(placements) != 1:
        return 0
    if not placements[0].is_shard(0) or not parameter.numel():
        return 0
    rows, each = int(parameter.shape[0]), int(parameter.numel()) // int(parameter.shape[0])
    return each * -(-rows // int(mesh.size()))


def _address(tensor: Any) -> int:
    """Return where the memory of a tensor, or of a rank's part of it, begins."""
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())


def _norm(parameters: list[Any]) -> float:
    return math.sqrt(sum(float(_whole(p.grad.detach().float().norm())) ** 2 for p in parameters if p.grad is not None))


def _shape(module: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name.replace("_orig_mod.", ""), tuple(p.shape)) for name, p in module.named_parameters()]


def _kept_whole(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def whole(input: Any, *arguments: Any, **options: Any) -> Any:
        return input

    return whole


def _hash(value: Any) -> str:
    return digest_of(repr(value).encode())
