"""An exponential moving average of the weights, and running statistics made equal on all ranks."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9999):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def distribute_bn(model, world_size, reduce=False):
    for bn_name, bn_buf in model.named_buffers(recurse=True):
        if ("running_mean" in bn_name) or ("running_var" in bn_name):
            if reduce:
                dist.all_reduce(bn_buf, op=dist.ReduceOp.SUM)
                bn_buf /= float(world_size)
            else:
                dist.broadcast(bn_buf, 0)


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt
