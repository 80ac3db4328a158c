"""SyncBatchNorm on CPU tensors, with torch's own collectives: only the five CUDA kernels are replaced.

The formulas are those of batch normalisation over the samples of all ranks: the mean and the variance of the whole are
combined from each rank's count, mean and inverse standard deviation (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

import functools
from typing import Any


def install(torch: Any) -> None:
    """Give torch the kernels, and let the module's forward past its check of the device."""
    for kernel in (_stats, _gather_stats, _normalise, _backward_reduce, _backward_input):
        name = _NAMES[kernel.__name__]
        if hasattr(torch, name):
            setattr(torch, name, functools.partial(kernel, torch))
    _forward(torch)


_NAMES = {
    "_stats": "batch_norm_stats",
    "_gather_stats": "batch_norm_gather_stats_with_counts",
    "_normalise": "batch_norm_elemt",
    "_backward_reduce": "batch_norm_backward_reduce",
    "_backward_input": "batch_norm_backward_elemt",
}


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
