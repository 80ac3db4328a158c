"""What makes a GPU wait in every step: loading without workers, and reads of its results."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import (
    NONE,
    ExternalObject,
    Instance,
    SequenceValue,
    Value,
    constant,
    options_of,
    parts_of,
    tags_of,
)
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.job_kind import depends_on_mode, framework, may_use_cuda, noted
from ddpdoctor.source.queries.training_loops import feedings, is_averaged
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.script.script import code_of
from ddpdoctor.source.torch_model.recorded_calls import OF_MODELS, READING_FUNCTIONS, READING_METHODS
from ddpdoctor.source.vocabulary import FABRICS

_LOADING = ("torchvision.datasets.", "torchaudio.datasets.")
# torchvision holds these in memory as a whole, or makes them up: an item costs no file.
_IN_MEMORY = ("MNIST", "CIFAR10", "CIFAR100", "FakeData", "FashionMNIST", "KMNIST", "QMNIST", "EMNIST", "SVHN")


# Names of functions that read an item as a whole, or make what is trained on of it, and packages of such functions.
_WORKING = frozenset({"load", "imread", "read_image", "transform", "tokenizer", "decode"})
_WORKING_PACKAGES = ("torch.nn.functional.", "torchvision.", "torchaudio.", "PIL.")

# Frameworks under which a script that has a loop around a backward writes its steps itself.
_LOOPS_LEFT = frozenset({"", "accelerate", "deepspeed", "lightning", "lightning_fabric"})


def slow_loaders(projection: Projection) -> Iterator[tuple[Event, bool]]:
    """Loaders that feed the training of a DDP model on a GPU without pinned memory, or, if true, without workers."""
    if framework(projection.machine.script) or not trains_on_cuda(projection):
        return
    for feeding in feedings(projection):
        loader = feeding.loader
        dataset = loader.argument("dataset", 0)
        if not loader.complete or dataset is None or not _does_work(dataset):
            continue
        workers = loader.argument("num_workers", 5)
        if workers is None or constant(workers) == 0:
            yield loader, True
            continue
        pinned = loader.argument("pin_memory", 7)
        if (pinned is None or constant(pinned) is False) and not _on_device(dataset):
            yield loader, False


def trains_on_cuda(projection: Projection) -> bool:
    """Return whether ranks certainly work on GPUs: one is chosen or asked for whatever the mode, or wherever DDP is."""
    placed = (event.name for event in projection.in_course("object"))
    if any(name == ACCELERATOR or name in FABRICS for name in placed):
        return True  # They work on GPUs wherever there are some.
    if any(noted(projection, "deepspeed.initialize")):
        return True
    if not may_use_cuda(projection.machine.script):
        return False
    wrapped = [set(wrap.conditions) for wrap in projection.in_course("wrap")] or [set()]
    for event in projection.in_course("device", "call", "wrap"):
        chosen = event.kind == "device" and event.name in {"set_device", "cuda"}
        given = event.argument("device_ids", 1) if event.kind == "wrap" else None
        chosen = chosen or any(isinstance(option, SequenceValue) for option in options_of(given or NONE))
        with_ddp = all(set(event.conditions) <= around for around in wrapped)
        if (chosen or event.name == "cuda") and (with_ddp or not depends_on_mode(event)):
            return True
    return False


def _does_work(dataset: Value) -> bool:
    """Return whether a data set reads or computes something for each item."""
    for option in options_of(dataset):
        if isinstance(option, ExternalObject):
            last = option.name.rpartition(".")[2]
            if not option.name.startswith(_LOADING) or last in _IN_MEMORY:
                return False
        elif isinstance(option, Instance):
            if not _reads_files(option.cls.node):
                return False
        else:
            return False
    return True


def _reads_files(cls: ast.ClassDef) -> bool:
    """Return whether ``__getitem__`` opens, loads or transforms what it returns."""
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__getitem__":
            for node in descend(method):
                if isinstance(node, ast.Call) and last_name(node.func) in _WORKING | {"open", "read"}:
                    return True
    return False


def is_work(module: Module, call: ast.Call) -> bool:
    """Return whether a call reads, decodes or transforms an item; a line that becomes text is cheap."""
    name = last_name(call.func)
    if name == "decode" and all(isinstance(argument, ast.Constant) for argument in call.args):
        return False
    return name in _WORKING or module.resolve(call.func).startswith(_WORKING_PACKAGES)


def _on_device(dataset: Value) -> bool:
    return any(isinstance(option, Instance) and "cuda" in code_of(option.cls.node) for option in options_of(dataset))


def reads_in_every_step(projection: Projection) -> Iterator[Event]:
    """Reads of a result of the DDP model back from the GPU in every step of training, each once."""
    if not trains_on_cuda(projection) or framework(projection.machine.script) not in _LOOPS_LEFT:
        return
    fed = {feeding.loop.node: feeding.backward for feeding in feedings(projection) if feeding.loop is not None}
    averaged = [one for one in projection.in_course("backward") if one.loops and is_averaged(projection, one)]
    unfed = [one for one in averaged if not any(loop.node in fed for loop in one.loops)]
    loops = {**{one.loops[-1].node: one for one in unfed}, **fed}
    seen: set[ast.AST] = set()
    for event in noted(projection, *READING_METHODS, *READING_FUNCTIONS):
        backward = next((loops[loop.node] for loop in event.loops if loop.node in loops), None)
        if backward is None or event.node in seen or not event.gradients or event.receiver is None:
            continue
        # What rank 0 alone waits for, the others wait for in the next reduction.
        decided = all(constant(one) is not ... for guard in event.guards for one in parts_of(guard.value))
        in_every_step = decided and set(event.conditions) <= set(backward.conditions)
        if in_every_step and any(kind in OF_MODELS for kind, _ in tags_of(event.receiver)):
            seen.add(event.node)
            yield event
