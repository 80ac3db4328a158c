"""Every rank loads the checkpoint of GPU 0 onto GPU 0.

What it finds
    torch.load without map_location, or with one GPU for all ranks of a machine, on several ranks and from one path, of
    what is a checkpoint by its name, by its path or by the load_state_dict that it goes into, or a model by what is
    done with it, in a job with GPUs.

Why it is bad
    torch.save remembers the device of each tensor, and torch.load puts it back there. What rank 0 saved from GPU 0 is
    loaded by all ranks onto GPU 0: it briefly holds as many copies as the node has ranks and runs out of memory, and
    each process keeps a CUDA context there for the rest of the job.

Example
    model.load_state_dict(torch.load("checkpoint.pt"))

Remedy
    torch.load(path, map_location="cpu"), or map_location=f"cuda:{local_rank}".

When it is wrong
    Where the checkpoint holds CPU tensors only.

References
    https://docs.pytorch.org/docs/stable/generated/torch.load.html
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Check, Script, Via
from ddpdoctor.checks.state.loads_source import is_published, unmapped_loads
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.fix import Fix, call_at, fix_of, with_keyword
from ddpdoctor.source.interpreter.values import NONE, constant
from ddpdoctor.source.projection import whole_projection
from ddpdoctor.source.script.module import Module, Scope

CHECK = Check(
    code="DDP602",
    name="load-without-map-location",
    stands_for="missing-device",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.WARNING),
    needs=frozenset({"ranks", "files", "checkpoint_loads"}),
    subjects=("job",),
    triggers=("load",),
)

REMEDY = 'Give it map_location="cpu", or the rank\'s own device.'


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads of a checkpoint on all ranks that name no device."""
    for load in unmapped_loads(whole_projection(script)):
        location = load.location
        is_mapped = constant(load.argument("map_location", 1) or NONE) is not None
        onto, given = ("one GPU", "the same, too") if is_mapped else ("the GPU from which it was saved", "not given")
        yield CHECK.finding(
            f"every rank loads this checkpoint onto {onto}",
            remedy=REMEDY,
            locations=location,
            severity=Severity.ADVICE if is_published(load) else None,
            because=(f"the path is the same on every rank, and map_location is {given}", Via(location, load.chain)),
        )


in_run = CHECK.judged_by("diagnosis.files", "judge_map_locations", REMEDY)


# The fix of a checkpoint that is loaded onto the GPU from which it was saved.


def fixes(script: Script, finding: Finding) -> Iterator[Fix]:
    """Give the load ``map_location="cpu"``.

    It is safe where all that is loaded goes into ``load_state_dict``, which copies it to where it belongs, or is looked
    up by a key; tensors that are used as they are would be on another device than before.
    """
    found = call_at(script, finding)
    if found is not None:
        edit = with_keyword(*found, "map_location", '"cpu"')
        yield from fix_of(finding, 'load with map_location="cpu"', edit, safe=_goes_into_state(*found))


def _goes_into_state(module: Module, node: ast.expr) -> bool:
    around = module.parents.get(node)
    if isinstance(around, ast.Assign) and len(around.targets) == 1 and isinstance(around.targets[0], ast.Name):
        return _is_only_looked_into(module, around, around.targets[0].id)
    while isinstance(around, (ast.Subscript, ast.Attribute)):
        around = module.parents.get(around)
    return _is_load(around)


def _is_only_looked_into(module: Module, assignment: ast.Assign, name: str) -> bool:
    scope = next((inner for inner in module.ancestors(assignment) if isinstance(inner, Scope)), module.tree)
    uses = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    into_state = [use for use in uses if any(_is_load(around) for around in module.ancestors(use))]
    by_key = [use for use in uses if isinstance(module.parents.get(use), (ast.Subscript, ast.Compare))]
    return bool(into_state) and set(uses) == {*into_state, *by_key}


def _is_load(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict"
