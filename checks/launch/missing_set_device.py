"""Tensors go to the current GPU, and no process ever selects its own.

What it finds
    `.cuda()` without an index, or `.to("cuda")`, on all ranks of a job that joins a process group and in which nothing
    selects a GPU for the process: no set_device, no CUDA_VISIBLE_DEVICES, no framework that does it. In Accelerate
    scripts, code before the Accelerator is created.

Why it is bad
    The current GPU of a new process is GPU 0. All ranks of a node put their model and their batches there: it runs out
    of memory while the others idle, and NCCL refuses two ranks on one GPU ("Duplicate GPU detected") or hangs.

Example
    dist.init_process_group("nccl")
    model = DDP(Net().cuda())

Remedy
    Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything touches the GPU, or name the device of
    each tensor.

When it is wrong
    Where the launcher shows each process one GPU only (Slurm with --gpus-per-task, one process a node).

References
    https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check, Script, Via
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import Const, PerRank, constant, options_of
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.job_kind import depends_on_mode, framework, initialisations, is_nccl_only, on_every_rank
from ddpdoctor.source.script.script import gives_each_rank_a_machine, uses_part
from ddpdoctor.source.torch_model.recorded_calls import SET_VARIABLE
from ddpdoctor.source.vocabulary import ACCELERATE_STATES

CHECK = Check(
    code="DDP502",
    name="missing-set-device",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "device_uses", "settings"}),
    subjects=("job",),
    triggers=("cuda", "nccl"),
)
MAXIMUM_PLACES = 5
REMEDY = 'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of the GPU.'


def in_source(script: Script) -> Iterator[Finding]:
    """Report the moves to the current GPU of a job that never chooses one, as one finding."""
    moves = unchosen_devices(whole_projection(script))
    if not moves:
        yield from _before_accelerator(script)
        yield from _left_to_torch(script)
        return
    yield CHECK.finding(
        "every rank moves this to the current GPU, which is GPU 0 in all of them: no process selects its own",
        remedy=REMEDY,
        locations=tuple(move.location for move in moves[:MAXIMUM_PLACES]),
        because=(
            "neither set_device nor CUDA_VISIBLE_DEVICES occurs in the script and its modules",
            Via(moves[0].module.location(moves[0].node), moves[0].chain),
            {"places": len(moves)},
        ),
    )


def _before_accelerator(script: Script) -> Iterator[Finding]:
    """Report the moves that come before the choice of the GPU, as one finding."""
    moves = moves_before_accelerator(whole_projection(script))
    if moves:
        yield CHECK.finding(
            "every rank moves this to GPU 0: the Accelerator selects the GPU of a process, and is not created yet",
            remedy="Create the Accelerator first, and let prepare() move the model and the batches.",
            locations=tuple(move.location for move in moves[:MAXIMUM_PLACES]),
        )


def _left_to_torch(script: Script) -> Iterator[Finding]:
    """Advise where every tensor is placed by its index, and the current GPU stays GPU 0 nevertheless."""
    for joined in unchosen_devices_of_collectives(whole_projection(script)):
        yield CHECK.finding(
            "no process selects its GPU: barriers, collectives of objects and pinned memory use GPU 0 from every rank",
            remedy=REMEDY,
            locations=joined.location,
            severity=Severity.ADVICE,
        )


in_run = CHECK.judged_by("checks.launch.environment_run", "shared_first_gpu", REMEDY)


# Which GPU a process works on, and when it chooses it.

# Each may give the process its GPU.
_CHOOSES = ("set_device", "CUDA_VISIBLE_DEVICES", "set_default_device", "init_distributed_device")
# Collectives that bring no tensor of their own: NCCL takes the process's current device.
_GUESSES = frozenset({
    "barrier", "monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list",
})  # fmt: skip
# Functions that initialise CUDA, whatever they are called with.
_INITIALISING = frozenset(f"torch.cuda.{name}" for name in (
    "init", "synchronize", "current_device", "get_device_name", "get_device_properties", "mem_get_info", "empty_cache",
))  # fmt: skip


def unchosen_devices(projection: Projection) -> tuple[Event, ...]:
    """Moves to the current GPU, on all ranks, in a job in which no process ever chooses its GPU."""
    script = projection.machine.script
    if _chooses(script) or framework(script):
        return ()
    joined = [event for event in initialisations(projection) if "device_id" not in event.named]
    if not joined:
        return ()
    moves = tuple(_moves_of_all(projection))
    return () if moves and gives_each_rank_a_machine(script) else moves


def moves_before_accelerator(projection: Projection) -> tuple[Event, ...]:
    """Moves to the current GPU, on all ranks, before an Accelerator is made, which chooses the GPU of its process."""
    states = ACCELERATE_STATES | {ACCELERATOR}
    made = next((event for event in projection.in_course("object") if event.name in states), None)
    if made is None or made.conditions or _chooses(projection.machine.script):
        return ()
    earlier = (event for event in _moves_of_all(projection) if event.ordinal < made.ordinal)
    return tuple(event for event in earlier if event.root == made.root)


def _chooses(script: Script) -> bool:
    """Return whether the code chooses a GPU for its process anywhere, followed or not."""
    names = (name for module in script.modules for _, name in module.calls())
    return uses_part(script, _CHOOSES) or "torch.cuda.device" in names


def _moves_of_all(projection: Projection) -> Iterator[Event]:
    """Moves to the current GPU that every rank makes, whatever the mode, each once."""
    seen: set[ast.AST] = set()
    for event in projection.in_course("device", "call"):
        if event.node not in seen and _moves_to_current(event) and on_every_rank(event) and not depends_on_mode(event):
            seen.add(event.node)
            yield event


def unchosen_devices_of_collectives(projection: Projection) -> tuple[Event, ...]:
    """Return where an NCCL group is made after which tensors go to explicit GPUs, and no process chooses its GPU."""
    script = projection.machine.script
    if _chooses(script) or framework(script) or not is_nccl_only(projection):
        return ()
    joined = [event for event in initialisations(projection) if "device_id" not in event.named]
    placed = any(
        event.name in {"cuda", "to", "device_ids"} and isinstance(event.positional[0], PerRank)
        for event in projection.in_course("device")
        if event.positional
    )
    return tuple(joined[:1]) if placed and _uses_current(projection) else ()


def _uses_current(projection: Projection) -> bool:
    """Return whether something takes the current GPU unasked: a collective without a tensor, or pinned memory."""
    if any(event.name in _GUESSES and "device_ids" not in event.named for event in projection.in_course("collective")):
        return True
    pinned = (event.named.get("pin_memory") for event in projection.in_course("loader"))
    return any(value is not None and constant(value) is True for value in pinned)


def late_visibilities(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Assignments to CUDA_VISIBLE_DEVICES in a process that already initialised CUDA, and what did that."""
    seen: set[ast.AST] = set()
    before: list[Event] = []
    for event in projection.events:
        if initialises_cuda(event):
            before.append(event)
        is_setting = event.name == SET_VARIABLE and constant(event.positional[0]) == "CUDA_VISIBLE_DEVICES"
        if is_setting and event.node not in seen:
            earlier = _in_the_same_course(before, event)
            if earlier is not None:
                seen.add(event.node)
                yield event, earlier


def early_collectives(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield the first collective without a tensor that comes before ``set_device`` in an NCCL job, and that."""
    if not is_nccl_only(projection):
        return
    if any("device_id" in event.named for event in initialisations(projection)):
        return
    choice = next((event for event in projection.in_course("device") if event.name == "set_device"), None)
    if choice is None:
        return
    for event in projection.in_course("collective"):
        if event.ordinal > choice.ordinal:
            return
        if event.name in _GUESSES and "device_ids" not in event.named and event.root == choice.root:
            if "group" not in event.named and event.complete:
                yield event, choice
            return


def _moves_to_current(event: Event) -> bool:
    if event.kind == "call":
        return event.name == "cuda"
    return event.name in {"cuda", "to"} and constant(event.positional[0]) == "cuda"


def initialises_cuda(event: Event) -> bool:
    """Return whether CUDA is certainly initialised after an event, if it was not before."""
    if event.kind == "call":
        return event.name == "cuda" or event.name in _INITIALISING
    if event.kind != "device" or event.name == "device":
        return False
    if event.name in {"set_device", "cuda"}:
        return True
    return event.name == "to" and all(
        isinstance(option, Const) and isinstance(option.value, str) and option.value.startswith("cuda")
        for option in options_of(event.positional[0])
    )


def _in_the_same_course(earlier: Sequence[Event], event: Event) -> Event | None:
    """Return the first of some events that happened before another in the same call of its function or below it."""
    for other in earlier:
        same = event.scopes[-1] in other.scopes and other.in_parent == event.in_parent and other.ranks & event.ranks
        if same and set(other.conditions) <= set(event.conditions):
            return other
    return None
