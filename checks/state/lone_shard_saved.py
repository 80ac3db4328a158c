"""One rank saves what each rank has a part of, or has for itself.

What it finds
    A torch.save under a rank test whose object comes from the state_dict of a model that fully_shard has sharded, or
    from get_model_state_dict without full_state_dict, and that nothing has gathered; and the state_dict of an optimizer
    over such a model, or over one that FullyShardedDataParallel has sharded, be it saved by one rank or by all under
    one path. Also a file with the number of
    the rank in its name, which ranks read that never write theirs; and a state that differs between the ranks, such as
    the position in a stream of which each has its share, that rank 0 saves and all ranks load.

Why it is bad
    The entries are distributed tensors: each rank has its own part of them, and pickling one saves that part. The file
    holds one rank's share of every parameter, or of its moments, which every rank then loads as its own. The rest is
    lost, which shows when the checkpoint is needed. A rank that has written no file of its own does not find it, goes
    on without, or reads that of an earlier run.

Example
    fully_shard(model)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")

Remedy
    Let every rank write its part with torch.distributed.checkpoint.save; or gather the whole on all ranks with
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), and save that on one. For an optimizer,
    get_optimizer_state_dict does it, or FSDP.optim_state_dict of the older wrapper.

When it is wrong
    In a job of one rank.

References
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ddpdoctor.check import Check, Script, Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Frame, Location, Severity, grouped
from ddpdoctor.source.interpreter.scopes import SIZES
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    Const,
    DictValue,
    PerRank,
    Value,
    is_guessed,
    is_varying,
    tags_of,
)
from ddpdoctor.source.libraries.sharding import SHARDS
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import guard_of
from ddpdoctor.source.queries.files import FileUse, opened_to_write, reads, shared_saves
from ddpdoctor.source.queries.job_kind import is_distributed
from ddpdoctor.source.ranks.ranks import numbers_in, ranks_text
from ddpdoctor.source.script.module import Module, functions_named, last_name
from ddpdoctor.source.script.script import uses_part
from ddpdoctor.source.vocabulary import text_hints_at_ranks

CHECK = Check(
    code="DDP609",
    name="lone-shard-saved",
    severity={"source": Severity.ERROR},
    subjects=("job",),
    triggers=("fully_shard", "FullyShardedDataParallel", "rank", "RANK", "process_index"),
)


def in_source(script: Script) -> Iterator[Finding]:
    """Report saves of a rank's own part under a rank test, where nothing is gathered entry by entry; and files of each
    rank that some ranks read without writing theirs.
    """
    projection = whole_projection(script)
    yield from CHECK.suspected((*lone_files(projection), *own_states(projection)))
    if uses_part(script, ("full_tensor",)):
        return
    for save in projection.in_course("save"):
        saved = save.argument("obj", 0)
        parts = {number for kind, number in tags_of(saved) if kind == SHARDS} if saved is not None else set()
        guard = next((guard for guard in reversed(save.guards) if guard.arm != ALL_RANKS), None)
        guard = guard or (guard_of(projection, save) if save.ranks not in (0, ALL_RANKS) else None)
        by_all = (save.node is shared.event.node for shared in shared_saves(projection) if 0 not in parts)
        if not parts or (guard is None and not any(by_all)):
            continue
        lost = f"saved by {ranks_text(save.ranks)} only: the other parts are lost"
        if guard is None:
            lost = "saved by every rank under one path: one part is left, and the others are lost"
        decides = () if guard is None else ((f"`{guard.module.excerpt(guard.node)}` decides", guard.location),)
        yield CHECK.finding(
            f"a rank's own part of {'a sharded model' if 0 in parts else _OF_OPTIMIZER} is {lost}",
            remedy=_REMEDIES[0 not in parts],
            locations=(save.location, *(place for _, place in decides)),
            because=decides or (("there is no rank test around this call or its callers", save),),
        )


_OF_OPTIMIZER = "the optimizer's state of a sharded model"
_REMEDIES = (  # For the weights, and for the state of an optimizer.
    "Save on all ranks with torch.distributed.checkpoint.save; or gather the state on all ranks first, with "
    "get_model_state_dict and StateDictOptions(full_state_dict=True).",
    "Gather the state on all ranks first, with get_optimizer_state_dict and StateDictOptions(full_state_dict=True), "
    "and load it with set_optimizer_state_dict; or let every rank save and load a file of its own.",
)


RANK = "{rank}"
"""In a name the place of the rank's number."""
_NUMBERS = frozenset({"rank", "global_rank", "local_rank", "process_index", "get_rank", "get_global_rank"})
# Placeholders of printf and of format.
_PLACES = regex(r"%\d*[ds]|\{\w*(?::\w*)?\}")
MOST_STEPS = 40
"""Names, calls and attributes that are followed for one path."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def lone_files(projection: Projection) -> Iterator[Verdict]:
    """Yield the reads of files that are named by the rank and that some of the reading ranks never write."""
    if not is_distributed(projection):
        return
    own = (use for use in opened_to_write(projection) if is_varying(use.path))
    written = grouped(own, lambda use: name_of(projection, use))
    seen: set[str] = set()
    for use in reads(projection) if any(RANK in name for name in written) else ():
        name = name_of(projection, use) if is_varying(use.path) else ""
        uses = written.get(name, ())
        without = use.event.ranks
        for one in uses:
            without &= ~one.event.ranks
        if RANK not in name or not uses or not without or name in seen or _is_written_for(use, uses, without):
            continue
        if any(_may_be(name, other) and use.event.ranks & without for other in written for use in written[other]):
            continue
        seen.add(name)
        write, read = uses[0].event, use.event
        guard = next((around for around in reversed(write.guards) if around.arm != ALL_RANKS), None)
        readers = "every rank reads" if read.ranks == ALL_RANKS else f"{ranks_text(read.ranks)} read"
        yield Verdict(
            sentence=f"{readers} a file of its own, `{name}`, and only {ranks_text(write.ranks)} "
            f"{'write' if write.ranks & (write.ranks - 1) else 'writes'} one: the others find none, or an old one",
            remedy="Let every rank write its own file, outside of the test of the rank; or let all ranks read that of "
            "rank 0, under a name without their numbers.",
            locations=(None if guard is None else guard.module.location(guard.node), write.location, read.location),
            because=(("it is written here", write), ("it is read here", read)),
            severity=Severity.WARNING,
        )


# What differs between the ranks and only rank 0 saves, for all of them to go on from.

# Kinds of the origins of what ranks have for another reason than their numbers.
# What is counted up, as the samples of a share, may come to the same on all ranks: a library divided them.
_NOT_BY_NUMBER = frozenset(
    {"clock", "random", "drawn", "store", "own", "batch", "ddp", "files", "statistic", "agreed", "counted"}
)
_COPIES = frozenset({"clone", "int", "list", "tuple", "deepcopy", "copy", "float", "tensor", "to"})


def own_states(projection: Projection) -> Iterator[Verdict]:
    """Yield saves by rank 0 of its own position in the data, say, that every rank then takes for its own."""
    loads = [event for event in projection.in_course("call") if event.name == "torch.load"]
    together = all(one.ranks == ALL_RANKS and not any(map(is_varying, one.positional[:1])) for one in loads)
    if not loads or not together or not is_distributed(projection):
        return
    seen, taken = set[ast.AST](), _taken(projection)
    for save in projection.in_course("save"):
        guard = guard_of(projection, save)
        if save.ranks != 1 or guard is None or guard.guessed or save.node in seen:
            continue
        for path, value in _entries(save.argument("obj", 0)):
            kinds = {kind for kind, _ in tags_of(value)}
            by_number = is_varying(value) and not is_guessed(value) and not kinds & _NOT_BY_NUMBER
            if by_number and (not kinds or kinds - SIZES) and taken.keys() >= set(path) and taken[path[-1]] is not None:
                seen.add(save.node)
                yield Verdict(
                    sentence=f"`{'/'.join(path)}` differs between the ranks, and only rank 0 saves its own: from the "
                    "checkpoint every rank goes on with that of rank 0",
                    remedy="Save it for each rank: gather the states with all_gather_object and load the rank's own, "
                    "or let every rank save and load a file of its own.",
                    locations=save.location,
                    because=(
                        (f"`{guard.module.excerpt(guard.node)}` decides who saves", guard.location),
                        ("every rank takes it from the checkpoint here", taken[path[-1]]),
                    ),
                    severity=Severity.WARNING,
                )
                break


def _entries(value: Value | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield what a dict holds, and the dicts in it, by their keys."""
    if isinstance(value, PerRank):
        value = value.values[0] if all(isinstance(one, DictValue) for one in value.values) else value
    if not isinstance(value, DictValue):
        yield from [] if value is None or not path else [(path, value)]
        return
    for key, inner in value.entries:
        if isinstance(key, str):
            yield from _entries(inner, (*path, key))


def _taken(projection: Projection) -> dict[str, Location | None]:
    """Return the keys by which dicts are read, with where an attribute is set to just that on every rank."""
    found: dict[str, Location | None] = {}
    for module in projection.machine.script.modules:
        read = [(one, one.slice) for one in module.index.of(ast.Subscript)]
        gets = [one for one in module.calls_by_name.get("get", ()) if one.args]
        for node, key in (*read, *((one, one.args[0]) for one in gets)):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            around: ast.AST | None = module.parents.get(node)
            while (
                isinstance(around, (ast.Call, ast.Attribute)) and last_name(getattr(around, "func", around)) in _COPIES
            ):
                around = module.parents.get(around)
            tests = (one.test for one in module.ancestors(node) if isinstance(one, (ast.If, ast.IfExp)))
            lone = any(text_hints_at_ranks(ast.unparse(test)) for test in tests)
            sets = isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Attribute) and not lone
            body = module.body_around(node)
            run = body is module.tree or body in projection.machine.visited
            found[key.value] = found.get(key.value) or (module.location(node) if sets and run else None)
    return found


def _is_written_for(read: FileUse, writes: Sequence[FileUse], without: int) -> bool:
    """Return whether some rank writes the very files that the others read: names that several ranks share."""
    if not isinstance(read.path, PerRank) or not all(isinstance(one, Const) for one in read.path.values):
        return False
    made = {
        write.path.values[rank]
        for write in writes
        if isinstance(write.path, PerRank)
        for rank in numbers_in(write.event.ranks)
    }
    return any(read.path.values[rank] in made for rank in numbers_in(without))


def _may_be(name: str, other: str) -> bool:
    """Return whether the name of another file, which was not followed to its end, may be this one."""
    own, unknown = (one.rpartition("/")[2] for one in (name, other))
    open_ended = not other or "{" in unknown.replace(RANK, "")
    return name != other and open_ended and (not other or own.rpartition(".")[2] == unknown.rpartition(".")[2])


def name_of(projection: Projection, use: FileUse) -> str:
    """Return how the code makes the path of a file, as far as it can be followed: texts, and names in braces."""
    if use.node is None:
        return ""
    module = use.event.module
    place = _Place(module, module.body_around(use.event.node), use)
    return _Names(projection.machine.script.modules).text(use.node, place)


class _Place(msgspec.Struct, frozen=True, eq=False):
    """Where an expression stands."""

    module: Module
    function: ast.AST
    use: FileUse | None = None
    """Whose chain of calls leads here; None in a function that a path comes from, …"""
    given: Mapping[str, str] = {}
    """… of which this is what its parameters are."""
    depth: int = 0
    """How far up the chain."""


class _Names:
    """Follows the expressions of paths."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = modules
        self._steps = 0

    def text(self, node: ast.expr, place: _Place) -> str:
        """Return an expression as a text."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, place) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value, place)
        self._steps += 1
        if self._steps > MOST_STEPS:
            return ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
            between = "/" if isinstance(node.op, ast.Div) else ""
            return f"{self.text(node.left, place)}{between}{self.text(node.right, place)}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            parts = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            return self._filled(self.text(node.left, place), parts, place)
        if isinstance(node, ast.Call):
            return self._of_call(node, place)
        if last_name(node) in _NUMBERS:
            return RANK
        found = None
        if isinstance(node, ast.Name):
            found = self._of_name(node.id, place)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found = self._of_attribute(node, place)
        return f"{{{ast.unparse(node)}}}" if found is None else found

    def _filled(self, template: str, parts: Sequence[ast.expr], place: _Place) -> str:
        texts = [self.text(part, place) for part in parts]
        return _PLACES.sub(lambda _: texts.pop(0) if texts else "", template)

    def _of_call(self, call: ast.Call, place: _Place) -> str:
        name = last_name(call.func)
        if name in _NUMBERS and not call.args:
            return RANK
        if name in ("join", "Path", "joinpath") and call.args:
            return "/".join(self.text(one, place) for one in call.args)
        if name in ("str", "int", "fspath", "abspath") and len(call.args) == 1:
            return self.text(call.args[0], place)
        if name == "format" and isinstance(call.func, ast.Attribute):
            parts = [*call.args, *(word.value for word in call.keywords)]
            return self._filled(self.text(call.func.value, place), parts, place)
        made = functions_named(self._modules, name)
        if len(made) == 1:
            module, function = made[0]
            returned = [one.value for one in module.index.within(function, ast.Return) if one.value is not None]
            if len(returned) == 1:
                given = {key: self.text(value, place) for key, value in _arguments(function, call).items()}
                return self.text(returned[0], _Place(module, function, None, given))
        return f"{{{ast.unparse(call)}}}"

    def _of_name(self, name: str, place: _Place) -> str | None:
        if name in place.given:
            return place.given[name]
        function = place.function
        if isinstance(function, _Function) and name in _parameters(function):
            return self._of_parameter(name, function, place)
        for body in (function, place.module.tree) if function is not place.module.tree else (function,):
            assigned = place.module.assigning(body, name)
            values = [one.value for one in assigned if place.module.body_around(one) is body]
            if len(values) == 1:
                return self.text(values[0], _Place(place.module, body, place.use, place.given, place.depth))
            if values:
                return None
        return None

    def _of_parameter(self, name: str, function: _Function, place: _Place) -> str | None:
        """Return what the caller gives, by the chain of calls that leads to a read or a write."""
        chain: Sequence[Frame] = () if place.use is None else place.use.event.chain
        if place.depth + 1 >= len(chain):
            return None
        frame = chain[place.depth + 1]
        for module in self._modules:
            if not module.location(function).file or str(module.path) != str(frame.file):
                continue
            for call in module.calls_by_name.get(function.name, ()):
                if call.lineno <= frame.line <= (call.end_lineno or call.lineno):
                    value = _arguments(function, call).get(name)
                    above = _Place(module, module.body_around(call), place.use, {}, place.depth + 1)
                    return None if value is None else self.text(value, above)
        return None

    def _of_attribute(self, node: ast.Attribute, place: _Place) -> str | None:
        """Return what the only assignment to an attribute of the object gives it."""
        cls = next((one for one in place.module.ancestors(place.function) if isinstance(one, ast.ClassDef)), None)
        if cls is None:
            return None
        values = [
            one for one in place.module.index.within(cls, ast.Assign) for target in one.targets if _is(target, node)
        ]
        if len(values) != 1:
            return None
        return self.text(values[0].value, _Place(place.module, place.module.body_around(values[0])))


def _is(target: ast.expr, node: ast.Attribute) -> bool:
    return isinstance(target, ast.Attribute) and ast.unparse(target) == ast.unparse(node)


def _parameters(function: _Function) -> list[str]:
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _arguments(function: _Function, call: ast.Call) -> dict[str, ast.expr]:
    """Return what a call gives to the parameters of a function, by their names."""
    names = _parameters(function)
    if names[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute):
        names = names[1:]
    given = dict(zip(names, call.args, strict=False))
    return {**given, **{word.arg: word.value for word in call.keywords if word.arg}}
