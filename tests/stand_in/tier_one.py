"""Every CUDA API that the stand-in must serve, each used for real.

``python -m tests.stand_in.tier_one DIRECTORY`` puts the stand-in of two GPUs in place, with its journal in the
directory, runs each case in the main thread, in another thread, inside ``backward()`` and in a worker of a
DataLoader, and prints a JSON object: context, then case, then ``"ok"`` or what went wrong.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from ddpdoctor.probe.journal import Journal
from ddpdoctor.probe.stand_in.install import StandIn

warnings.simplefilter("ignore")
CPU = torch.device("cpu")
CASES: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    """Add a case, called as its function."""
    CASES[function.__name__] = function
    return function


@contextlib.contextmanager
def raises(kind: type[BaseException], words: str) -> Any:
    """Expect an error that says ``words``."""
    try:
        yield
    except kind as error:
        assert words in str(error), str(error)  # noqa: PT017
    else:
        raise AssertionError(f"nothing was raised that says {words!r}")


@case
def tensor_cuda() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda().tolist() == tensor.cuda(1).tolist() == tensor.cuda("cuda:0", non_blocking=True).tolist()
    assert tensor.cuda().device == CPU and not tensor.cuda().is_cuda
    assert tensor.cuda(memory_format=torch.contiguous_format).shape == (2,)


@case
def replaced_methods() -> None:
    for name, arguments in (
        ("cuda", (1,)),
        ("to", ("cuda:1",)),
        ("pin_memory", ()),
        ("type", ("torch.cuda.FloatTensor",)),
    ):
        original = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, lambda tensor, *given, original=original: original(tensor, *given))
        try:
            assert getattr(torch.ones(2), name)(*arguments).tolist() == [1, 1]
        finally:
            setattr(torch.Tensor, name, original)


@case
def a_gpu_that_the_node_lacks() -> None:
    for use in (
        lambda: torch.ones(2).cuda(2),
        lambda: torch.ones(2).to("cuda:2"),
        lambda: torch.zeros(1, device="cuda:7"),
        lambda: torch.cuda.set_device(2),
        lambda: torch.cuda.get_device_name(2),
        lambda: torch.cuda.synchronize(5),
        lambda: nn.Linear(1, 1).cuda(3),
    ):
        with raises(RuntimeError, "invalid device ordinal"):
            use()


@case
def tensor_to() -> None:
    tensor = torch.ones(2)
    assert tensor.to("cuda").device == tensor.to(torch.device("cuda", 1)).device == tensor.to(0).device == CPU
    assert tensor.to("cuda", torch.float64).dtype == tensor.to(torch.float64).dtype == torch.float64
    assert tensor.to(device="cuda:1", dtype=torch.float16, non_blocking=True).dtype == torch.float16
    assert tensor.to(torch.ones(1, dtype=torch.int64)).dtype == torch.int64
    assert tensor.to("cuda", copy=True).data_ptr() != tensor.data_ptr()
    assert tensor.to("cpu").device == CPU


@case
def module_to() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = module[0].weight
    assert module.cuda() is module and module.to("cuda:1") is module and module.cuda(0)[0].weight is weight
    assert module.to(1) is module and module.to(0, torch.float32)[0].weight.device == CPU
    with raises(RuntimeError, "invalid device ordinal"):
        module.to(2)
    assert module.to(device="cuda", dtype=torch.float64)[0].weight.dtype == torch.float64
    assert nn.Linear(2, 2, device="cuda").weight.device == CPU


@case
def factories_with_device() -> None:
    device = torch.device("cuda:1")
    made = [
        torch.zeros(2, device="cuda"),
        torch.ones(2, device=device),
        torch.tensor([1.0, 2.0], device=device),
        torch.as_tensor([1.0, 2.0], device=device),
        torch.asarray([1.0, 2.0], dtype=torch.float32, device=device),
        torch.randn(2, device="cuda:0"),
        torch.arange(2, device=0),
        torch.empty(2, device="cuda", pin_memory=False),
        torch.empty(2, pin_memory=True),
        torch.full((2,), 1.0, device="cuda"),
        torch.linspace(0, 1, 2, device="cuda"),
        torch.randint(0, 3, (2,), device="cuda"),
        torch.zeros_like(torch.ones(2), device="cuda"),
        torch.ones(1).new_zeros(2, device="cuda"),
    ]
    assert all(tensor.device == CPU and tensor.numel() == 2 for tensor in made)
    assert torch.randperm(4, device="cuda").sum() == 6


@case
def default_device() -> None:
    with torch.device("cuda"):
        assert torch.zeros(2).device == CPU
    with torch.device("cuda:1"):
        assert nn.Linear(2, 2).weight.device == CPU
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device == CPU
    finally:
        torch.set_default_device(None)


@case
def device_objects() -> None:
    device = torch.device("cuda", 1)
    assert device.type == "cuda" and device.index == 1 and torch.device("cuda:1") == device == torch.device(1)
    assert torch.device(type="cuda", index=1) == device and torch.device(device) == device


@case
def queries() -> None:
    cuda = torch.cuda
    assert cuda.is_available() and cuda.device_count() == 2 and cuda.is_initialized()
    assert isinstance(cuda.get_device_name(), str) and cuda.get_device_name(1) == cuda.get_device_name("cuda:1")
    assert cuda.get_device_capability(0) >= (7, 0)
    properties = cuda.get_device_properties(torch.device("cuda", 0))
    assert properties.total_memory > 2**30 and properties.name and properties.major >= 7
    assert len(str(properties.uuid)) == 36 and properties.uuid != cuda.get_device_properties(1).uuid
    assert cuda.is_bf16_supported() and cuda.nccl.version() > (2, 0)
    assert cuda.synchronize(torch.ones(1).cuda().device) is None and cuda.memory_allocated(torch.ones(1).device) == 0
    with raises(ValueError, "Expected a cuda device"):
        cuda.synchronize("cpu")
    assert cuda.synchronize() is None and cuda.empty_cache() is None and cuda.ipc_collect() is None


@case
def memory() -> None:
    cuda = torch.cuda
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(cuda, name)() == getattr(cuda, name)(1) == 0
    free, total = cuda.mem_get_info()
    assert 0 < free <= total
    cuda.reset_peak_memory_stats()
    assert cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert isinstance(cuda.memory_summary(), str)
    cuda.memory._record_memory_history()
    cuda.memory._dump_snapshot("unwritten.pickle")
    assert cuda.get_allocator_backend() == "native" and cuda.get_device_properties(0).L2_cache_size > 0


@case
def current_device() -> None:
    before = torch.cuda.current_device()
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    with torch.cuda.device("cuda:0"), torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    torch.cuda.set_device(torch.device("cuda", 0))
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(before)


@case
def seeds() -> None:
    torch.manual_seed(7)
    expected = torch.randn(2)
    torch.manual_seed(7)
    torch.cuda.manual_seed(1)
    torch.cuda.manual_seed_all(2)
    assert torch.equal(torch.randn(2), expected), "CUDA's generator is another than the CPU's"
    assert torch.cuda.initial_seed() == 2
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(3)


@case
def generators() -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator) and generator.device == CPU
    assert pickle.loads(pickle.dumps(generator)).initial_seed() == copy.deepcopy(generator).initial_seed() == 3
    one = torch.randn(2, generator=generator, device="cuda")
    assert torch.equal(one, torch.randn(2, generator=torch.Generator("cuda:1").manual_seed(3), device="cuda"))
    own = type("Own", (torch.Generator,), {})("cuda")
    assert isinstance(own, torch.Generator) and torch.randn(2, generator=own, device="cuda").device == CPU


@case
def streams_and_events() -> None:
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        tensor = torch.ones(2).cuda(non_blocking=True)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_stream(stream)
    tensor.record_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    stream.record_event(end)
    stream.wait_event(end)
    end.synchronize()
    assert end.query() and stream.query() and start.elapsed_time(end) >= 0
    stream.synchronize()
    with raises(ValueError, "enable_timing"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())


@case
def streams_and_events_of_any_device() -> None:
    if not hasattr(torch, "Event"):
        return
    stream, event = torch.Stream(device="cuda:1", priority=-1), torch.Event(device="cuda", enable_timing=True)
    assert isinstance(stream, torch.Stream) and isinstance(torch.cuda.current_stream(), torch.Stream)
    assert isinstance(event, torch.Event) and stream.device == torch.device("cuda", 1)
    with stream:
        assert torch.cuda.current_stream() is stream and torch.cuda.current_device() == 1
    event.record(stream)
    stream.wait_event(event)
    assert stream.query() and event.query() and torch.Stream(device="cuda") != stream
    with raises(RuntimeError, "invalid device ordinal"):
        torch.Stream(device="cuda:9")


@case
def autocast() -> None:
    module, batch = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        assert module(batch).dtype == torch.bfloat16 and torch.is_autocast_enabled()
    with torch.cuda.amp.autocast():
        assert module(batch).dtype == torch.bfloat16
    with torch.amp.autocast(device_type="cuda", enabled=False):
        assert module(batch).dtype == torch.float32
    assert not torch.is_autocast_enabled()

    @torch.autocast("cuda")
    def decorated() -> torch.Tensor:
        return module(batch)

    assert decorated().dtype == torch.bfloat16


@case
def grad_scaler() -> None:
    for scaler in (torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler(init_scale=2.0**10)):
        module = nn.Linear(2, 2).cuda()
        before = module.weight.detach().clone()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler.scale(module(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.is_enabled() and scaler.get_scale() > 1 and not torch.equal(module.weight, before)
        optimizer.zero_grad()
        scaler.scale(module(torch.full((1, 2), float("inf"))).sum()).backward()
        scaled, kept = scaler.get_scale(), module.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < scaled and torch.equal(module.weight, kept), "a step with inf is skipped"


@case
def pinned_memory() -> None:
    tensor = torch.ones(2)
    assert tensor.pin_memory().cuda(non_blocking=True).tolist() == [1, 1]


@case
def fused_optimizers() -> None:
    for options in ({"fused": True}, {"foreach": True}, {"capturable": True}):
        module = nn.Linear(2, 2).cuda()
        module(torch.ones(1, 2)).sum().backward()
        before = module.weight.detach().clone()
        torch.optim.AdamW(module.parameters(), lr=0.1, **options).step()
        assert not torch.equal(module.weight, before)


@case
def backend_flags() -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.enabled = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")


@case
def tensor_types() -> None:
    assert torch.cuda.FloatTensor([1, 2]).tolist() == [1, 2]
    assert torch.ones(2).type("torch.cuda.LongTensor").dtype == torch.int64
    assert torch.ones(2).type(torch.cuda.HalfTensor).dtype == torch.float16


@case
def loading() -> None:
    file = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), file)
    for place in ("cuda:1", torch.device("cuda", 0), {"cuda:0": "cuda:1"}, lambda storage, _: storage.cuda(0), None):
        file.seek(0)
        assert list(torch.load(file, map_location=place)) == ["weight", "bias"]
    file.seek(0)
    with raises(RuntimeError, "CUDA device 7"):
        torch.load(file, map_location="cuda:7")


@case
def compiled() -> None:
    module = nn.Linear(2, 2).cuda()
    wrapped = torch.compile(module, mode="max-autotune")
    assert torch.equal(wrapped(torch.ones(1, 2)), module(torch.ones(1, 2))) and wrapped._orig_mod is module
    assert wrapped.in_features == 2 and list(wrapped.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
    wrapped.eval()
    assert not module.training

    @torch.compile
    def decorated(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @torch.compile(fullgraph=True)
    def with_options(value: torch.Tensor) -> torch.Tensor:
        return value * 3

    assert decorated(torch.ones(1)).item() == 2 and with_options(torch.ones(1)).item() == 3
    module.compile()
    assert module(torch.ones(1, 2)).shape == (1, 2)


class Doubled(torch.autograd.Function):
    """Uses a device in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * torch.full((1,), 2.0, device="cuda")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.full((1,), 2.0).cuda()


def scaled(parameter: torch.Tensor) -> None:
    """A hook on a parameter whose gradient is complete."""
    parameter.grad = parameter.grad.cuda() * torch.ones(1, device="cuda")


@case
def custom_functions_hooks_and_recomputation() -> None:
    module = nn.Linear(2, 2).cuda()
    module.weight.register_hook(lambda gradient: gradient * torch.ones(1, device="cuda"))
    module.weight.register_post_accumulate_grad_hook(scaled)
    for reentrant in (True, False):
        batch = torch.ones(1, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            out = checkpoint(lambda value: module(Doubled.apply(value).to("cuda")), batch, use_reentrant=reentrant)
        out.sum().backward()
        assert batch.grad is not None and batch.grad.device == CPU


@case
def data_parallel() -> None:
    module = nn.Linear(2, 2)
    assert torch.equal(nn.DataParallel(module)(torch.ones(3, 2).cuda()), module(torch.ones(3, 2)))


@case
def what_it_cannot_serve() -> None:
    with raises(RuntimeError, "torch.cuda.CUDAGraph"):
        torch.cuda.CUDAGraph()


@case
def profilers() -> None:
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.range_push("forward")
        torch.cuda.nvtx.range_pop()
    if threading.current_thread() is not threading.main_thread() or torch.utils.data.get_worker_info():
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(2, device="cuda").sum()
    assert profile.key_averages()


def results() -> dict[str, str]:
    """Run all cases here."""
    found = {}
    for name, run in CASES.items():
        try:
            with torch.enable_grad():
                run()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class InWorker(Dataset[str]):
    """Its one item is what the cases do in a worker process."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return json.dumps(results())


class InBackward(torch.autograd.Function):
    """Runs the cases inside ``backward()``."""

    found: dict[str, str]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        InBackward.found = results()
        return gradient


def main() -> None:
    StandIn(Journal(sys.argv[1], {}), torch, 2)
    found = {"main": results()}
    thread = threading.Thread(target=lambda: found.update(thread=results()))
    thread.start()
    thread.join()
    InBackward.apply(torch.ones(1, requires_grad=True)).sum().backward()
    found["backward"] = InBackward.found
    found["worker"] = json.loads(next(iter(DataLoader(InWorker(), num_workers=1, batch_size=None, pin_memory=True))))
    print("RESULTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
