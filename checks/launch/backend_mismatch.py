"""The backend of the process group does not fit the job's device.

What it finds
    The nccl backend in a script that never mentions a GPU, whose ranks put the model or the batches on one GPU though
    each has another one at hand, or which sets CUDA_VISIBLE_DEVICES to one GPU for all ranks of a launcher; and the
    gloo backend in a script that trains a DDP model on GPUs and mentions no other backend. Ranks of one group that
    request different backends are an error. In a run: an initialisation that failed because there is no GPU, which is
    advice where the script is written for GPUs.

Why it is bad
    NCCL only handles CUDA tensors: with a model on the CPU the first collective fails with "No backend type associated
    with device type cpu", and two ranks on one GPU are refused ("Duplicate GPU detected") or hang. Gloo does work with
    CUDA tensors, but it copies every gradient through the host's memory, many times slower than NCCL over NVLink. And
    ranks of different backends wait for each other until the timeout.

Example
    dist.init_process_group("gloo")
    torch.cuda.set_device(local_rank)
    model = DDP(Net().cuda(), device_ids=[local_rank])

Remedy
    "nccl" for CUDA, "gloo" for the CPU; or omit the backend and let torch choose one for each device.

When it is wrong
    If gloo is used on purpose, for a machine on which NCCL does not run. A mention of nccl anywhere in the script
    is taken as a sign of that.

References
    https://docs.pytorch.org/docs/stable/distributed.html#which-backend-to-use
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal, TypeAlias

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.finding import Finding, Location, Refuted, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import RANKS, PerRank, constant, is_guessed, on_rank
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import function_around
from ddpdoctor.source.queries.job_kind import (
    framework,
    gpus_of,
    holds_with,
    initialisations,
    is_nccl_only,
    on_every_rank,
    shared_gpus,
    speaks_of_devices,
)
from ddpdoctor.source.queries.subjects import gaps
from ddpdoctor.source.ranks.ranks import ranks_text
from ddpdoctor.source.script.module import Module, argument_of, descend, last_name
from ddpdoctor.source.script.script import gives_each_rank_a_machine, uses_part
from ddpdoctor.source.torch_model.recorded_calls import SET_VARIABLE

CHECK = Check(
    code="DDP505",
    name="backend-mismatch",
    stands_for="no-backend",
    severity={"source": Severity.WARNING, **dict.fromkeys(("rehearsal", "run", "log"), Severity.ERROR)},
    needs=frozenset({"waits"}),
    subjects=("job", "device"),
    triggers=("init_process_group",),
)
MAXIMUM_PLACES = 5
_TITLES = {
    "nccl-without-gpu": "NCCL needs CUDA tensors, and nothing in the script uses a GPU",
    "shared-gpu": "all ranks of a machine use one and the same GPU here, and NCCL needs one per rank",
    "one-visible": "every rank leaves itself one and the same GPU, and NCCL needs one GPU per rank",
    "gloo-for-cuda": "the model trains on GPUs, and gloo copies every gradient through host memory",
    "mixed": "ranks of one group request different backends and wait for each other",
}
_REMEDIES = {
    "shared-gpu": "Give each process the GPU of its local rank, here as in torch.cuda.set_device.",
    "one-visible": "Leave CUDA_VISIBLE_DEVICES to the launch: the ranks choose among the GPUs that it names.",
    "nccl-without-gpu": 'Use "gloo" for a job on the CPU.',
    "gloo-for-cuda": 'Use "nccl", or omit the backend: torch then uses NCCL for CUDA tensors.',
    "mixed": 'Give all ranks the same backend; "cpu:gloo,cuda:nccl" serves tensors on either device.',
}


def in_source(script: Script) -> Iterator[Finding]:
    """Report process groups whose backend does not fit."""
    for events, form, backends in backend_mismatches(whole_projection(script)):
        asked = "; ".join(f"{ranks_text(ranks)}: {name}" for name, ranks in backends.items())
        yield CHECK.finding(
            _TITLES[form] + (f" ({asked})" if asked else ""),
            remedy=_REMEDIES[form],
            locations=tuple(event.location for event in events)[:MAXIMUM_PLACES],
            severity=Severity.ERROR if asked else None,
        )


def in_run(record: RunRecord) -> Iterator[Finding | Refuted]:
    """Report initialisations of NCCL that failed because there is no GPU."""
    from ddpdoctor.diagnosis.failures import failed_initialisations

    if record.job.device == "stand-in" or record.job.environment.get("CUDA_VISIBLE_DEVICES") == "":
        return
    for wait, location in failed_initialisations(record):
        if "nccl" not in wait.backend.lower() or "NCCL" not in wait.error:
            continue
        yield CHECK.finding(
            "NCCL needs GPUs, and there are none here: init_process_group fails"
            if wait.mentions_cuda
            else "NCCL needs GPUs, and the script uses none: init_process_group fails",
            basis=record.job.kind,
            remedy='Use "gloo" where there is no GPU: "nccl" if torch.cuda.is_available() else "gloo".',
            locations=location,
            because=(wait.error[:200], location),
            severity=Severity.ADVICE if wait.mentions_cuda else None,
        )


# Position and name of the tensor that a rank gives to the collective.
_TENSOR_POSITION = {
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "reduce_scatter_tensor": (1, "input"),
    "gather": (0, "tensor"),
}
_FACTORIES = frozenset(
    f"torch.{name}"
    for name in ("zeros", "ones", "empty", "full", "rand", "randn", "arange", "FloatTensor", "LongTensor", "Tensor")
)
_FROM_DATA = frozenset({"torch.tensor", "torch.as_tensor"})
# Their results are numbers of Python: a tensor of them lies in the host's memory.
_NUMBERS = frozenset({"int", "float", "len", "sum", "bool", "item", "time", "perf_counter", "tolist"})
_DESTROYS = "destroy_process_group"
# After them a factory without a device makes its tensor elsewhere.
_OTHER_DEFAULTS = ("set_default_device", "set_default_tensor_type")
_BACKENDS = ("nccl", "NCCL")
# Names of one backend for every device.
_ALONE = frozenset({"nccl", "gloo", "mpi"})
# A script that names one of them chooses the backend by where it runs: there CUDA has gloo alone.
_PLATFORMS = ("win32", "Windows")


Form: TypeAlias = Literal["nccl-without-gpu", "gloo-for-cuda", "shared-gpu", "one-visible", "mixed"]
Mismatch: TypeAlias = "tuple[Sequence[Event], Form, Mapping[str, int]]"
"""Where a group is made, or what goes to the GPU that all ranks share; what does not fit; and of ranks that ask for
different backends each with the mask of its ranks."""
_NONE: Mapping[str, int] = {}


def backend_mismatches(projection: Projection) -> Iterator[Mismatch]:
    """Process groups of NCCL in scripts without a GPU, and of gloo in scripts that train on one."""
    script = projection.machine.script
    if framework(script):
        return
    for event in initialisations(projection):
        backend = event.argument("backend", 0)
        name = constant(backend) if backend is not None else None
        if not isinstance(name, str) or not event.complete:
            continue
        hidden = any("device" in gap.hides for gap in gaps(projection))
        unused = not event.conditions and not speaks_of_devices(script) and not hidden
        if name == "nccl" and unused and _communicates(projection) and not _moves_by_number(projection):
            yield (event,), "nccl-without-gpu", _NONE
        if name.lower() == "gloo" and not _on_purpose(projection, event) and _trains_on_gpu(projection, event):
            yield (event,), "gloo-for-cuda", _NONE
    if is_nccl_only(projection) and (shared := shared_gpus(projection)):
        yield shared, "shared-gpu", _NONE
    yield from _only_visible_gpus(projection)
    mixed = _mixed_backends(projection)
    if mixed is not None:
        yield mixed


def _mixed_backends(projection: Projection) -> Mismatch | None:
    """Return the first initialisation that some ranks ask for NCCL and others for gloo; the group must be of one."""
    asked: dict[str, int] = {}
    first: Event | None = None
    for event in projection.in_course("collective"):
        backend = event.argument("backend", 0) if event.name == "init_process_group" else None
        if backend is None or event.undecided or is_guessed(backend) or any(one.guessed for one in event.guards):
            continue
        first = first or event
        for rank in RANKS:
            name = constant(on_rank(backend, rank))
            if event.ranks >> rank & 1 and name in _ALONE:
                asked[str(name)] = asked.get(str(name), 0) | 1 << rank
    masks = list(asked.values())
    if first is None or len(masks) < 2 or any(one & other for one, other in combinations(masks, 2)):
        return None
    return (first,), "mixed", asked


def _moves_by_number(projection: Projection) -> bool:
    """Return whether anything goes to a device that is no word: ``tensor.to(2 * local_rank)`` speaks of no GPU."""
    moves = (event for event in projection.of_kind("device") if event.positional)
    return any(not isinstance(constant(event.positional[0]), str) for event in moves)


def _communicates(projection: Projection) -> bool:
    """Return whether anything goes through the group: NCCL makes its connections with the first collective."""
    return any(event.name != "init_process_group" for event in projection.of_kind("wrap", "collective"))


def _only_visible_gpus(projection: Projection) -> Iterator[Mismatch]:
    """Yield where a process leaves itself one GPU, the same on all ranks of a launcher that each choose another one."""
    script = projection.machine.script
    if script.spawns_ranks is not None or not is_nccl_only(projection) or gives_each_rank_a_machine(script):
        return
    if not any(isinstance(event.positional[0], PerRank) for event in projection.in_course("device")):
        return
    for event in projection.in_course("call"):
        if event.name == SET_VARIABLE and constant(event.positional[0]) == "CUDA_VISIBLE_DEVICES":
            left = constant(event.positional[1])
            if isinstance(left, str) and left.isdigit() and on_every_rank(event) and not event.conditions:
                yield (event,), "one-visible", _NONE
                return


def _on_purpose(projection: Projection, event: Event) -> bool:
    """Return whether the code speaks of NCCL elsewhere, or of a platform without it: ``sys.platform == "win32"``."""
    own = {node for node in descend(event.node) if isinstance(node, ast.Constant)}
    for module in projection.machine.script.modules:
        for node in module.index.of(ast.Constant):
            text = node.value if isinstance(node.value, str) and node not in own else ""
            if any(word in text for word in (*_BACKENDS, *_PLATFORMS)) and not any(map(str.isspace, text)):
                return True
    return uses_part(projection.machine.script, ("is_nccl_available",))


def _trains_on_gpu(projection: Projection, joined: Event) -> bool:
    """Return whether a model is wrapped in the mode in which a group is joined, and went to a GPU in that mode."""
    moves = list(projection.in_course("device", "call"))
    return not _only_asks(projection) and any(
        holds_with(joined, wrap)
        and any(_is_gpu(projection, one, wrap) and holds_with(one, wrap) for one in moves if one.ordinal < wrap.ordinal)
        for wrap in projection.in_course("wrap")
    )


def _is_gpu(projection: Projection, move: Event, wrap: Event) -> bool:
    """Return whether a process chooses its GPU, or the model that it wraps goes to one, whatever the machine has."""
    if move.name in {"device_ids", "set_device"}:
        return move.kind == "device"
    if move.name != "to" or not move.positional or move.receiver != wrap.argument("module", 0):
        return move.name == "cuda"
    script = projection.machine.script
    asks = script.demands_cuda is None and uses_part(script, ("is_available",))
    return not asks and (None not in gpus_of(move.positional[0]) or constant(move.positional[0]) == "cuda")


def _only_asks(projection: Projection) -> bool:
    """Return whether a job runs no backward, though it runs the model, or code that it imports could train it."""
    if any(projection.in_course("backward")):
        return False
    runs = any(projection.in_course("ddp-forward"))
    return runs or any("backward" in module.words for module in projection.machine.script.modules)


def _may_destroy(projection: Projection, module: Module) -> bool:
    """Return whether a module destroys a group outside of functions that no one calls."""
    if _DESTROYS not in module.text or _DESTROYS not in module.words:
        return False
    called = frozenset[str]().union(*(one.words for one in projection.machine.script.modules))
    for node in (*module.index.of(ast.Name), *module.index.of(ast.Attribute)):
        if last_name(node) == _DESTROYS:
            around = next((one for one in module.ancestors(node) if isinstance(one, ast.FunctionDef)), None)
            if around is None or around.name in called or around.name.startswith("__"):
                return True
    return False


def forgotten_groups(projection: Projection) -> Iterator[Event]:
    """Yield the first initialisation of a process group in a script that never destroys one."""
    script = projection.machine.script
    if any(_may_destroy(projection, module) for module in script.modules) or framework(script):
        return
    yield from list(initialisations(projection))[:1]


def cpu_tensors(projection: Projection) -> Iterator[tuple[Event, str, Location]]:
    """Tensors made in the host's memory that go into a collective of a group which has NCCL only."""
    script = projection.machine.script
    if not is_nccl_only(projection) or uses_part(script, _OTHER_DEFAULTS):
        return
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective"):
        where = _TENSOR_POSITION.get(event.name)
        if where is None or event.node in seen or not isinstance(event.node, ast.Call) or "group" in event.named:
            continue
        seen.add(event.node)
        position, name = where
        tensor = argument_of(event.node, name, position)
        made = _made_on_cpu(event.module, event.node, tensor)
        if made is not None and tensor is not None and not _under_other_default(event.module, made):
            yield event, event.module.excerpt(tensor, 50), event.module.location(made)


def _made_on_cpu(module: Module, call: ast.Call, tensor: ast.expr | None) -> ast.AST | None:
    """Return where a tensor is made on the CPU, here or in the only assignment to its name in the same function."""
    if isinstance(tensor, ast.Call):
        return tensor if _is_cpu_factory(module, tensor) else None
    if not isinstance(tensor, ast.Name):
        return None
    function = function_around(module, call)
    made = [one.value for one in module.assigning(function, tensor.id) if one.lineno < call.lineno]
    whole = len(list(_assignments(function, tensor.id))) == len(made)
    on_cpu = [value for value in made if isinstance(value, ast.Call) and _is_cpu_factory(module, value)]
    last = made[-1] if made else None
    if whole and on_cpu and last in on_cpu and all(value in on_cpu or _is_text(module, value) for value in made):
        return last
    return None


def _is_text(module: Module, value: ast.expr) -> bool:
    """Return whether a value is certainly no tensor: what ``socket`` or ``os`` gives."""
    return isinstance(value, ast.Call) and module.resolve(value.func).startswith(("socket.", "os.", "time."))


def _assignments(function: ast.AST, name: str) -> Iterator[ast.AST]:
    """Every statement that gives a name a value, and parameters of that name."""
    for node in descend(function):
        if isinstance(node, ast.arg):
            if node.arg == name:
                yield node
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr, ast.withitem)):
            stored = [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, (ast.Tuple, ast.Name))]
            names = [one for entry in stored for one in descend(entry) if isinstance(one, ast.Name)]
            if any(one.id == name and isinstance(one.ctx, ast.Store) for one in names):
                yield node


def _is_cpu_factory(module: Module, call: ast.Call) -> bool:
    name = module.resolve(call.func)
    if any(entry.arg == "device" or entry.arg is None for entry in call.keywords):
        return False
    if name in _FACTORIES:
        return True
    return name in _FROM_DATA and bool(call.args) and _is_plain_data(call.args[0])


def _is_plain_data(node: ast.expr) -> bool:
    """Return whether data of a new tensor is numbers: a tensor given to ``torch.tensor`` keeps its device."""
    if isinstance(node, (ast.Constant, ast.List, ast.Tuple, ast.ListComp)):
        return True
    if isinstance(node, ast.Call):
        return last_name(node.func) in _NUMBERS
    if isinstance(node, ast.BinOp):
        return _is_plain_data(node.left) and _is_plain_data(node.right)
    return isinstance(node, ast.UnaryOp) and _is_plain_data(node.operand)


def _under_other_default(module: Module, node: ast.AST) -> bool:
    """Return whether a ``with`` statement around a construction may name another device."""
    return any(
        isinstance(around, ast.With) and "device" in ast.unparse(around.items[0].context_expr)
        for around in module.ancestors(node)
    )
