"""A state dict of the DDP wrapper meets a bare model, or the reverse.

What it finds
    A save and a load of one path, or of one key of the dict that is saved there, of which one goes through the DDP
    wrapper and the other through the bare module.

Why it is bad
    Names in the wrapper's state dict begin with "module.". Loaded into a bare model they are missing and unexpected
    keys and the load fails; with strict=False nothing is loaded at all, without a message.

Example
    torch.save(ddp_model.state_dict(), path)
    fresh.load_state_dict(torch.load(path))

Remedy
    Save ddp_model.module.state_dict() and always load into the bare module.

When it is wrong
    Where the names are changed between the two outside of what was read.

References
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import partial
from posixpath import normpath, split

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, ExternalObject, Instance, Value
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.files import FileUse
from ddpdoctor.source.queries.job_kind import noted
from ddpdoctor.source.script.module import Module, argument_of, descend
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.script.written_paths import UNKNOWN_PART, may_be
from ddpdoctor.source.vocabulary import DDP

CHECK = Check(
    code="DDP604",
    name="module-prefix",
    severity=dict.fromkeys(("source", "rehearsal", "run"), Severity.ADVICE),
    needs=frozenset({"ranks", "state_names"}),
    subjects=("wrap",),
    triggers=("load_state_dict",),
)

REMEDY = "Save and load through the bare module: ddp_model.module.state_dict()."


def in_source(script: Script) -> Iterator[Finding]:
    """Report loads whose names do not fit what was saved."""
    yield from CHECK.suspected(prefix_mismatches(whole_projection(script)), REMEDY)


in_run = CHECK.judged_by("diagnosis.files", "judge_prefixes", REMEDY)


_MOVES = ("os.replace", "os.rename", "shutil.move")
"""Give a file that is whole the name that it is loaded by."""
# A name in braces stands in a path for what is not written out.
_BY_SIZE = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_NAMES = (ast.Name, ast.Attribute)
_PART = regex(r"\{[^{}]*\}")
_HANDLE_PREFIX = ("module.", "consume_prefix", "strip_prefix")


def prefix_mismatches(projection: Projection) -> Iterator[Verdict]:
    """Saves and loads of one path, and one key of it, of which one goes through the DDP wrapper and the other not."""
    script = projection.machine.script
    if not any(noted(projection, "load_state_dict")) or uses_part(script, _HANDLE_PREFIX):
        return
    states = {event.node: event.receiver for event in noted(projection, "state_dict")}
    saves = list(projection.in_course("save"))
    if not saves:
        return
    loads = {event.node: event for event in noted(projection, "torch.load")}
    moves = list(noted(projection, *_MOVES))
    seen, at = set[ast.AST](), partial(_path, projection)
    for event in noted(projection, "load_state_dict"):
        load, key = _loaded(event, loads)
        target = _is_wrapper(event.receiver)
        if target is None and _is_wrapped_later(projection, event):
            target = False
        if load is None or target is None or event.node in seen or "strict" in event.named:
            continue
        path = at(load, "f", 0)
        among = _by_number(load)
        paths = [path, *(at(move, "src", 0) for move in moves if at(move, "dst", 1)[1] == path[1])]
        fitting = [save for save in saves if any(_may_read(one, at(save, "f", 1), among) for one in paths)]
        held = [(save, kept[key]) for save in fitting if key in (kept := _saved_states(save, states))]
        if held and all(wrapped is (not target) for _, wrapped in held):
            seen.add(event.node)
            bare, wrapper = "a bare model", "the DDP wrapper"
            saved, loaded = (bare, wrapper) if target else (wrapper, bare)
            yield Verdict(
                sentence=f'{loaded} loads what was saved from {saved}: the names differ by the prefix "module."',
                locations=event.location,
                because=("it was saved here", held[0][0].location),
            )


def _is_wrapped_later(projection: Projection, event: Event) -> bool:
    """Return whether what loads a state is wrapped afterwards, by the name that it has: a model that was not read."""
    whose, body = _owner(event.node), event.module.body_around(event.node)
    return any(
        wrap.ordinal > event.ordinal
        and wrap.module is event.module
        and event.module.body_around(wrap.node) is body
        and any(isinstance(one, ast.expr) and ast.unparse(one) == whose for one in descend(wrap.node))
        for wrap in projection.of_kind("wrap")
    )


def _owner(call: ast.AST) -> str:
    return ast.unparse(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _saved_states(save: Event, states: Mapping[ast.AST, Value | None]) -> Mapping[str, bool | None]:
    """Return whether what is saved is the state dict of the wrapper (True) or of a bare module, by its key in a dict.

    The key of a state dict that is saved itself is empty; None stands for what cannot be told.
    """
    call = save.node
    saved = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(saved, ast.Name):
        saved = _assigned(save.module, call, saved.id)
    parts: list[tuple[str, ast.expr]] = [("", saved)] if saved is not None else []
    if isinstance(saved, ast.Dict):
        parts = [(_text(key), value) for key, value in zip(saved.keys, saved.values, strict=True) if _text(key)]
    return {key: _is_wrapper(states[part]) for key, part in parts if part in states}


def _is_wrapper(value: Value | None) -> bool | None:
    if isinstance(value, ExternalObject):
        if value.name == DDP:
            return True
        return False if value.name.startswith("torch.nn.") else None
    return False if isinstance(value, Instance) else None


def _loaded(event: Event, loads: Mapping[ast.AST, Event]) -> tuple[Event | None, str]:
    """Return the load that a state dict comes from, and the key under which it stands there; empty for all of it."""
    call = event.node
    state = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if isinstance(state, ast.Name):
        state = _assigned(event.module, call, state.id)
    key = ""
    if isinstance(state, ast.Subscript) and _text(state.slice):
        key, state = _text(state.slice), state.value
    if isinstance(state, ast.Name):
        state = _assigned(event.module, call, state.id)
    return (loads.get(state) if state is not None else None), key


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _assigned(module: Module, node: ast.AST, name: str) -> ast.expr | None:
    """Return the value of the only assignment to a name in the function around a node."""
    function = next((around for around in module.ancestors(node) if isinstance(around, ast.FunctionDef)), None)
    found = module.assigning(function or module.tree, name)
    return found[0].value if len(found) == 1 else None


def _path(projection: Projection, event: Event, name: str, position: int) -> tuple[str, str]:
    """Return a path as it is written, and how the code makes it: texts, and names in braces."""
    from ddpdoctor.checks.state.lone_shard_saved import name_of

    use = FileUse(event, event.argument(name, position) or NONE, argument_of(event.node, name, position))
    return use.source, normpath(name_of(projection, use))


def _may_read(read: tuple[str, str], written: tuple[str, str], among: bool) -> bool:
    """Return whether a path is the written one, or ``among`` the files with such a name in its folder."""
    same = read[0] == written[0] or read[1] == written[1]
    if same or not among:
        return same
    (folder, chosen), (other, name) = (split(made) for _, made in (read, written))
    alike = set(_PART.findall(chosen)).intersection(_PART.findall(name))
    known = partial(_PART.sub, lambda one: one[0] if one[0] in alike else UNKNOWN_PART)
    template, name = known(chosen), known(name)
    return folder == other != "" and UNKNOWN_PART in template and may_be(template, name)


def _by_number(load: Event) -> bool:
    """Return whether the path of a load holds a number: what is compared by size, or where a count begins."""
    path = argument_of(load.node, "f", 0)
    path = _assigned(load.module, load.node, path.id) if isinstance(path, ast.Name) else path
    sized = (one for one in load.module.index.of(ast.Compare) if isinstance(one.ops[0], _BY_SIZE))
    counts = (one for name in ("range", "enumerate") for one in load.module.calls_by_name.get(name, ()))
    sides = [
        *(side for one in sized for side in (one.left, *one.comparators)),
        *(arg for one in counts for arg in one.args),
    ]
    parts = (part for one in sides for part in ((one.left, one.right) if isinstance(one, ast.BinOp) else (one,)))
    numbers = {ast.unparse(part) for part in parts if isinstance(part, _NAMES)}
    return path is not None and any(isinstance(one, _NAMES) and ast.unparse(one) in numbers for one in descend(path))
