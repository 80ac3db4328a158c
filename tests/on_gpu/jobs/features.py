"""Trains by one feature of torch after another, and says what the weights came to: features.py OUT NAME,NAME,…"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.on_gpu.jobs.rank import device_ids, digest, join, leave

OUT, NAMES = sys.argv[1], sys.argv[2].split(",")
STEPS = 45
"""The probe's newest sampling, that of reads, ends after 40."""
GPU = torch.cuda.is_available()


def images(device: Any) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4))
    return model.to(device)


def wrapped(model: Any, device: Any) -> Any:
    return DistributedDataParallel(model, device_ids=device_ids(device))


def batches(device: Any, **options: Any) -> Any:
    data = TensorDataset(torch.randn(8 * STEPS, 3, 8, 8), torch.arange(8 * STEPS) % 4)
    for inputs, targets in DataLoader(data, 8, **options):
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def trained(model: Any, device: Any, *, forward: Any = None, dtype: Any = None, **options: Any) -> list[Any]:
    """Train, under autocast and with a scaler where a type is given; return the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    for inputs, targets in batches(device, **options):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy((model if forward is None else forward)(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [*model.parameters()]


def compiled(device: Any) -> list[Any]:
    model = wrapped(images(device), device)
    return trained(model, device, forward=torch.compile(model, backend="inductor" if GPU else "aot_eager"))


def graphs(device: Any) -> list[Any]:
    """Two whole steps with DDP are captured once and replayed, as the notes on CUDA graphs say.

    The capture begins while the events of step 21, which the probe times on the GPU, may yet be unread, and it lasts
    longer than the pause of the probe's thread: a query from another thread would spoil it.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        model = wrapped(images(device), device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    inputs = torch.zeros(8, 3, 8, 8, device=device)
    targets = torch.zeros(8, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    with torch.cuda.stream(aside):
        for _ in range(21):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        step()
        time.sleep(1.0)
    for new_inputs, new_targets in batches(device):
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()
    torch.cuda.synchronize()
    return [*model.parameters()]


def amp(device: Any) -> list[Any]:
    return trained(wrapped(images(device), device), device, dtype=torch.float16 if GPU else torch.bfloat16)


def channels_last(device: Any) -> list[Any]:
    model = images(device).to(memory_format=torch.channels_last)
    return trained(wrapped(model, device), device)


def prefetching(device: Any) -> list[Any]:
    options = {"num_workers": 2, "prefetch_factor": 2, "pin_memory": GPU, "persistent_workers": True}
    return trained(wrapped(images(device), device), device, **options)


def sharded(device: Any) -> list[Any]:
    """FSDP2 on all ranks; its ranks on gloo compute on the CPU."""
    place = device if dist.get_world_size() == 1 else torch.device("cpu")
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 4)).to(place)
    mesh = dist.device_mesh.init_device_mesh(place.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if place.type == "cuda" else None)
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return [parameter.to_local() for parameter in trained(model, place)]


FEATURES: dict[str, Callable[[Any], list[Any]]] = {
    "compile": compiled, "graphs": graphs, "amp": amp, "channels_last": channels_last, "prefetching": prefetching,
    "fully_shard": sharded,
}  # fmt: skip


def main() -> None:
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    device = join("gloo" if int(os.environ["WORLD_SIZE"]) > 1 else "")
    found: dict[str, str] = {}
    for name in NAMES:
        torch.manual_seed(0)
        try:
            found[name] = digest(FEATURES[name](device))
        except Exception as error:
            # The other features have yet to be tried; the part shows the words.
            found[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    leave(OUT, digests=found)


main()
