"""NCCL groups served by gloo, and DDP modules with the devices of a GPU."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..torch_compat import after_import, replaces
from .cuda_module import Devices

NCCL = "nccl"
NCCL_VERSION = (2, 21, 5)


def install(torch: Any, devices: Devices) -> None:
    """Translate calls of ``torch.distributed`` and of ``DistributedDataParallel``."""
    torch.cuda.nccl.version = lambda: NCCL_VERSION
    distributed = torch.distributed
    if not distributed.is_available():
        return
    average_on_gloo(torch)
    _Backends(torch, devices).install()
    _ddp(torch, devices)
    after_import("torch.distributed.fsdp._init_utils", lambda module: _not_to_refuse_the_cpu(module, devices))
    after_import("torch.distributed.fsdp._fully_shard._fsdp_init", lambda module: _on_the_cpus_mesh(torch, module))
    after_import(
        "torch.distributed.fsdp.fully_sharded_data_parallel", lambda module: _older_fsdp(torch, module, devices)
    )


class ProcessGroupNCCL:
    """A stand-in for the class that a torch without NCCL lacks; no group is one."""

    class Options:
        """Options of an NCCL group, which are taken and not used."""

        backend = NCCL

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


class _Backends:
    """Which groups were made for NCCL, because ``get_backend`` must return it."""

    def __init__(self, torch: Any, devices: Devices) -> None:
        self._distributed = torch.distributed
        self._devices = devices
        self._backends: dict[str, str] = {}
        """Backend of the call that made it, by the name of the group."""

    def install(self) -> None:
        distributed = self._distributed
        functions = distributed.distributed_c10d
        distributed.is_nccl_available = functions.is_nccl_available = lambda: True
        if not hasattr(distributed, "ProcessGroupNCCL"):
            distributed.ProcessGroupNCCL = functions.ProcessGroupNCCL = ProcessGroupNCCL
        for name in ("init_process_group", "new_group"):
            replacement = self._with_gloo(name, getattr(functions, name))
            setattr(functions, name, replacement)
            setattr(distributed, name, replacement)
        # torch reads its own module, where gloo must be called gloo.
        replaces("get_backend", distributed)(self._get_backend)
        replaces("barrier", distributed)(self._barrier)
        replaces("all_gather", distributed)(self._all_gather)

    def _with_gloo(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def with_gloo(given: dict[str, Any]) -> Any:
            asked = given.get("backend")
            default = name == "new_group" and asked is None
            inherited = self._backends.get(self._name(None), "") if default else ""
            given = {**given, "backend": "gloo" if inherited else on_gloo(asked)}
            device = given.pop("device_id", None)
            if device is not None:
                self._devices.checked(self._devices.index(device))
            if given["backend"] == "gloo":
                given.pop("pg_options", None)
            made = function(**given)
            self._backends[self._name(made)] = inherited or str(asked or ("" if default else NCCL)).lower()
            return made

        return _by_name(function, with_gloo)

    def _name(self, group: Any) -> str:
        """Return the name of a group; of the default one for what is no group."""
        if not isinstance(group, self._distributed.ProcessGroup):
            group = self._distributed.group.WORLD
        return str(getattr(group, "group_name", ""))

    def _get_backend(self, get: Any, group: Any = None) -> Any:
        real = get(group)
        asked = self._backends.get(self._name(group), "")
        return self._distributed.Backend(NCCL) if names_nccl(asked) and real == "gloo" else real

    def _all_gather(self, gather: Any, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        """Serve lists of unequal sizes, which NCCL gathers and gloo does not: each rank broadcasts its part."""
        even = len({part.numel() for part in tensor_list}) < 2
        if even or not names_nccl(self._backends.get(self._name(group), "")):
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        distributed, work = self._distributed, None
        ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        tensor_list[distributed.get_rank(group)].copy_(tensor.detach())
        for rank, part in zip(ranks, tensor_list):
            last = rank == ranks[-1]
            work = distributed.broadcast(part, src=rank, group=group, async_op=async_op and last)
        return work

    def _barrier(self, barrier: Any, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        for device in device_ids or ():
            self._devices.checked(self._devices.index(device))
        return barrier(group=group, async_op=async_op)


def names_nccl(backend: str) -> bool:
    """Return whether a backend's name has NCCL in it: ``nccl``, ``cpu:gloo,cuda:nccl``."""
    return NCCL in backend.lower()


def on_gloo(backend: Any) -> Any:
    """Return the backend that serves instead; one without NCCL stays, and None means both, so gloo."""
    return "gloo" if backend is None or names_nccl(str(backend)) else backend


def average_on_gloo(torch: Any) -> None:
    """Let gloo average where NCCL does: up to torch 2.12 it may refuse ``ReduceOp.AVG``, or give the sum in silence.

    Of torch 2.4 ``all_reduce`` and ``reduce`` refuse it; of 2.4 and 2.8 ``reduce_scatter_tensor`` sums, with which
    ``fully_shard`` averages gradients; of 2.13 all four give the mean.
    """
    distributed = torch.distributed
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= (2, 13) or not distributed.is_available() or not hasattr(distributed.ReduceOp, "AVG"):
        return
    functions = distributed.distributed_c10d
    for name, source in (("all_reduce", 0), ("reduce", 0), ("reduce_scatter_tensor", 1), ("reduce_scatter", 1)):
        averaging = _averaging(torch, getattr(functions, name), source)
        setattr(functions, name, averaging)
        setattr(distributed, name, averaging)


def _averaging(torch: Any, function: Callable[..., Any], source: int) -> Callable[..., Any]:
    """Return a collective that sums parts of what it is given, the ``source``-th argument, in place of an average."""
    distributed, parameter = torch.distributed, list(inspect.signature(function).parameters)[source]

    def averaged(given: dict[str, Any]) -> Any:
        group, backend_of = given.get("group"), distributed.distributed_c10d.get_backend
        averages = given.get("op") == distributed.ReduceOp.AVG
        # Of a group that this rank is not in torch says no more than that it is none.
        if not averages or distributed.get_rank(group) < 0 or backend_of(group) != "gloo":
            return function(**given)
        ranks, held = distributed.get_world_size(group), given[parameter]
        with torch.no_grad():
            if not source:
                held.div_(ranks)
            else:
                held = [one / ranks for one in held] if isinstance(held, (list, tuple)) else held / ranks
        return function(**{**given, parameter: held, "op": distributed.ReduceOp.SUM})

    return _by_name(function, averaged)


def _by_name(function: Callable[..., Any], replacement: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return what takes the calls of a function, and gives its replacement the arguments by their names."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            given = dict(signature.bind(*arguments, **options).arguments)
        except TypeError:
            return function(*arguments, **options)  # torch words the error
        return replacement(given)

    return called


def _ddp(torch: Any, devices: Devices) -> None:
    """Let DDP take CPU modules with ``device_ids`` or SyncBatchNorm, which its check of the devices would refuse."""
    ddp = torch.nn.parallel.DistributedDataParallel
    construct = ddp.__init__

    def on_cpu(given: dict[str, Any]) -> None:
        for device in given.get("device_ids") or ():
            devices.use(device)
        if devices.is_cuda(given.get("output_device")):
            devices.use(given["output_device"])
        given.update(device_ids=None, output_device=None)
        further = given.pop("kwargs", {})
        construct(**given, **further)

    ddp.__init__ = _by_name(construct, on_cpu)
    if hasattr(ddp, "_passing_sync_batchnorm_handle"):
        ddp._passing_sync_batchnorm_handle = lambda self, module: None
    _data_parallel(torch)


def _older_fsdp(torch: Any, module: Any, devices: Devices) -> None:
    """Let ``FullyShardedDataParallel`` compute on the CPU, where all parameters are, offloaded or not."""
    fsdp = module.FullyShardedDataParallel
    construct = fsdp.__init__

    def on_cpu(given: dict[str, Any]) -> None:
        device = given.get("device_id")
        if device is not None:
            devices.use(device)
        further = given.pop("kwargs", {})
        construct(**{**given, "device_id": torch.device("cpu"), "cpu_offload": None}, **further)

    fsdp.__init__ = _by_name(construct, on_cpu)
    handle = getattr(sys.modules.get("torch.distributed.fsdp._flat_param"), "FlatParamHandle", None)
    if handle is not None:
        _moved_by_a_copy(handle)


def _moved_by_a_copy(handle: Any) -> None:
    """Let what is offloaded to the CPU be a copy, as of a GPU: FSDP lets go of the original at once."""

    @replaces("flat_param_to", handle)
    def flat_param_to(move: Any, self: Any, *target: Any, **options: Any) -> None:
        move(self, *target, **{**options, "copy": True})


def _not_to_refuse_the_cpu(module: Any, devices: Devices) -> None:
    """Let ``sync_module_states`` broadcast parameters that are on the CPU, which gloo can.

    A hybrid shards among the GPUs of a node, of which a CPU says that there is one.
    """
    module._check_module_states_for_sync_module_states = lambda states: None
    if hasattr(module, "_init_intra_and_inter_node_groups"):

        @replaces("_init_intra_and_inter_node_groups", module)
        def _init_intra_and_inter_node_groups(make: Any, group: Any, num_devices_per_node: int) -> Any:
            return make(group, devices.count())


def _on_the_cpus_mesh(torch: Any, module: Any) -> None:
    """Let ``fully_shard`` compute where the parameters are, on a mesh of GPUs as on the one that it makes itself."""
    module._get_device_from_mesh = lambda mesh: torch.device("cpu")


def _data_parallel(torch: Any) -> None:
    """Let ``DataParallel`` run its module once, as it does where it has no devices."""
    data_parallel = torch.nn.DataParallel

    @replaces("__init__", data_parallel)
    def __init__(
        construct: Any, self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        self.device_ids = []
        self.dim = dim


# SyncBatchNorm on CPU tensors, with torch's own collectives: only the five CUDA kernels are replaced.


def install_sync_batch_norm(torch: Any) -> None:
    """Give torch the kernels, and let the module's forward past its check of the device."""
    kernels: dict[str, Callable[..., Any]] = {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _normalise,
        "batch_norm_backward_reduce": _backward_reduce,
        "batch_norm_backward_elemt": _backward_input,
    }
    for name, kernel in kernels.items():
        if hasattr(torch, name):
            setattr(torch, name, functools.partial(kernel, torch))
    _forward(torch)


def _over(tensor: Any) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _spread(channels: Any, tensor: Any) -> Any:
    return channels.view(1, -1, *([1] * (tensor.dim() - 2)))


def _stats(torch: Any, batch: Any, eps: float) -> tuple[Any, Any]:
    """Return the mean and inverse standard deviation of each channel, in float32 for shorter types."""
    values = batch.float() if batch.element_size() < 4 else batch
    mean = values.mean(_over(batch))
    variance = values.var(_over(batch), unbiased=False)
    return mean, torch.rsqrt(variance + eps)


def _gather_stats(
    torch: Any,
    batch: Any,
    means: Any,
    inverse_deviations: Any,
    running_mean: Any,
    running_variance: Any,
    momentum: float,
    eps: float,
    counts: Any,
) -> tuple[Any, Any]:
    """Return the mean and inverse standard deviation over all ranks; update the running ones."""
    weights = counts.to(means.dtype).view(-1, 1)
    total = weights.sum()
    mean = (means * weights).sum(0) / total
    variances = inverse_deviations.pow(-2) - eps
    variance = ((variances + (means - mean).pow(2)) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    if running_variance is not None:
        unbiased = variance * (total / (total - 1).clamp(min=1))
        running_variance.mul_(1 - momentum).add_(unbiased.to(running_variance.dtype), alpha=momentum)
    return mean, torch.rsqrt(variance + eps)


def _normalise(torch: Any, batch: Any, weight: Any, bias: Any, mean: Any, inverse_deviation: Any, eps: float) -> Any:
    """Return the normalised batch, in its own type."""
    result = (batch.to(mean.dtype) - _spread(mean, batch)) * _spread(inverse_deviation, batch)
    if weight is not None:
        result = result * _spread(weight, batch)
    if bias is not None:
        result = result + _spread(bias, batch)
    return result.to(batch.dtype)


def _backward_reduce(
    torch: Any,
    gradient: Any,
    batch: Any,
    mean: Any,
    inverse_deviation: Any,
    weight: Any,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Any, Any, Any, Any]:
    """Return sums over this rank's samples, and the gradients of weight and bias."""
    wide = gradient.to(mean.dtype)
    sum_dy = wide.sum(_over(batch))
    sum_dy_xmu = (wide * (batch.to(mean.dtype) - _spread(mean, batch))).sum(_over(batch))
    dtype = weight.dtype if weight is not None else mean.dtype
    of_weights = (sum_dy_xmu * inverse_deviation).to(dtype) if of_weight else None
    return sum_dy, sum_dy_xmu, of_weights, sum_dy.to(dtype) if of_bias else None


def _backward_input(
    torch: Any,
    gradient: Any,
    batch: Any,
    mean: Any,
    inverse_deviation: Any,
    weight: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    counts: Any,
) -> Any:
    """Return the gradient of the batch, from sums over all ranks."""
    total = counts.sum().to(mean.dtype)
    centred = batch.to(mean.dtype) - _spread(mean, batch)
    projected = centred * _spread(inverse_deviation.pow(2) * sum_dy_xmu / total, batch)
    result = (gradient.to(mean.dtype) - _spread(sum_dy / total, batch) - projected) * _spread(inverse_deviation, batch)
    if weight is not None:
        result = result * _spread(weight, batch)
    return result.to(gradient.dtype)


def _forward(torch: Any) -> None:
    """Replace torch's forward, which refuses CPU tensors; without peers it is that of any batch norm."""
    batch_norm = torch.nn.SyncBatchNorm
    distributed = torch.distributed
    synchronised = torch.nn.modules.batchnorm.sync_batch_norm
    alone = torch.nn.modules.batchnorm._BatchNorm.forward

    def forward(self: Any, batch: Any) -> Any:
        group = self.process_group or (
            distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
        )
        if not self.training or group is None or distributed.get_world_size(group) < 2:
            return alone(self, batch)
        self._check_input_dim(batch)
        tracked = self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return synchronised.apply(
            batch,
            self.weight,
            self.bias,
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.eps,
            momentum,
            group,
            distributed.get_world_size(group),
        )

    batch_norm.forward = functools.wraps(batch_norm.forward)(forward)
