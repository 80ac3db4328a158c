"""The result of a collective is discarded, or used before it is there.

What it finds
    A collective that returns its result (Horovod's `allreduce`, functional collectives, those of
    `torch.distributed.nn`, Accelerate's `gather` and `reduce`) called as a statement on a variable that is used
    afterwards as if it had been changed in place. Also one with `async_op=True`, or `irecv`, whose tensor is used
    before anything waits for the handle that it returns, or though nothing ever does; an `isend` whose tensor is
    changed in place before that; and either of them in `batch_isend_irecv`. Also a list that a collective fills and
    that holds one tensor several times (`[torch.zeros(1)] * world_size`), or that nothing reads, as a warning; and an
    all_reduce, broadcast, reduce or scatter of a view whose numbers do not lie side by side in memory, such as a
    column.

Why it is bad
    The variable still holds this rank's own value. Nothing fails: gradients are not averaged, or rank 0's metric is
    reported as the job's. After an asynchronous call it holds what has arrived by then. Of a view, gloo takes as many
    numbers as it has from its first on, as they lie in memory: of a column the numbers of the first rows.

Example
    hvd.allreduce(loss)                 # returns the average; loss stays local
    print(loss.item())

Remedy
    Assign the result (loss = hvd.allreduce(loss)), or call the in-place form (hvd.allreduce_, dist.all_reduce). Keep
    the handle of an asynchronous call, and call its wait() before the use. Give collectives contiguous tensors.

When it is wrong
    If the call only serves to synchronise the ranks, or code that was not followed waits for the device.

References
    https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch
    https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ddpdoctor.check import Check, RunRecord, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import NONE, constant
from ddpdoctor.source.projection import Projection, project
from ddpdoctor.source.queries.divergence import function_around, nodes_of
from ddpdoctor.source.queries.origins import NAMED, Origins, pairs_of
from ddpdoctor.source.queries.shown_numbers import OF_FORM, lost_results, statements_after
from ddpdoctor.source.ranks.ranks import rank_names
from ddpdoctor.source.script.module import Module, descend, last_name, once, origins_of
from ddpdoctor.source.script.script import calls_any
from ddpdoctor.source.vocabulary import COLLECTIVES, PART_GATHERS

CHECK = Check(
    code="DDP315",
    name="discarded-collective-result",
    severity=dict.fromkeys(("source", "rehearsal"), Severity.ERROR),
    needs=frozenset({"memory_orders"}),
    subjects=("collectives",),
    triggers=("reduce", "gather", "broadcast", "scatter", "to_all", "toall", "pad_across", "irecv", "isend"),
)


# Collectives that return their result and whose result no one takes.

_HOROVOD = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped_allreduce")
_FUNCTIONAL = (
    "all_reduce", "all_gather", "all_gather_tensor", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "gather", "scatter",
)  # fmt: skip
RETURNING = frozenset(
    {
        *(f"horovod.torch.{name}" for name in _HOROVOD),
        *(f"torch.distributed._functional_collectives.{name}" for name in _FUNCTIONAL),
        *(f"torch.distributed.nn.{name}" for name in _FUNCTIONAL),
        *(f"torch.distributed.nn.functional.{name}" for name in _FUNCTIONAL),
    }
)
"""Full names of collectives that leave their argument as it was."""
_RETURNING_NAMES = frozenset((*_HOROVOD, *_FUNCTIONAL))
# Methods of an Accelerator: all of them return what they made and leave the argument.
_OF_ACCELERATE = frozenset({"gather", "gather_for_metrics", "reduce", "pad_across_processes"})


def in_source(script: Script) -> Iterator[Finding]:
    """Report collectives whose result no one takes, or waits for."""
    projection = project(script)
    yield from _not_waited_for(projection)
    yield from _into_one_tensor(projection)
    yield from _in_pieces(projection)
    if calls_any(script, PART_GATHERS):
        from ddpdoctor.checks.data.gathered_order_source import collected_in_vain

        yield from CHECK.suspected(collected_in_vain(projection))
    for lost in lost_results(projection):
        made = lost.made.module.excerpt(lost.made.node, 60)
        yield CHECK.finding(
            f"{lost.collective.name} writes into `{made}`, which nothing reads: `{lost.name}` stays this rank's own",
            remedy="Keep the tensor in a variable, and use that afterwards.",
            locations=lost.made.location,
            because=(f"`{lost.name}` is used here, with this rank's own value", lost.use.location),
        )
    for module in projection.machine.script.modules:
        others = [name for name, full in module.aliases.items() if full in RETURNING]
        for last in _RETURNING_NAMES.union(others).intersection(module.calls_by_name):
            for call in module.calls_by_name[last]:
                name = module.resolve(call.func)
                if name in RETURNING:
                    yield from _judged(module, call, name.rpartition(".")[2])
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.name in _OF_ACCELERATE and isinstance(event.node, ast.Call) and event.node not in seen:
            seen.add(event.node)
            if isinstance(event.node.func, ast.Attribute) and not event.module.resolve(event.node.func):
                yield from _judged(event.module, event.node, event.name)


def _judged(module: Module, call: ast.Call, collective: str) -> Iterator[Finding]:
    statement = module.parents.get(call)
    if not isinstance(statement, ast.Expr) or not call.args or not isinstance(call.args[0], (ast.Name, ast.Attribute)):
        return
    name = ast.unparse(call.args[0])
    after = (node for _, nodes in statements_after(module, call) for node in nodes)
    uses = [node for node in after if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == name]
    first = min(uses, key=lambda node: (node.lineno, node.col_offset), default=None)
    if first is not None and isinstance(first.ctx, ast.Load):
        yield CHECK.finding(
            f"{collective} returns its result and leaves `{name}` unchanged; the result is discarded",
            remedy=f"Assign it: {name} = {module.excerpt(call)}.",
            locations=module.location(call),
            because=(f"`{name}` is used here, with this rank's own value", module.location(first)),
        )


# The list that a collective fills, and its position.
_FILLED = {"all_gather": ("tensor_list", 0), "gather": ("gather_list", 1), "all_to_all": ("output_tensor_list", 0)}


def _into_one_tensor(projection: Projection) -> Iterator[Finding]:
    """Yield collectives that fill a list that holds one tensor several times: ``[torch.zeros(1)] * world_size``."""
    seen: set[ast.AST] = set()
    for event in projection.of_kind("collective"):
        if event.name not in _FILLED or event.node in seen or not isinstance(event.node, ast.Call):
            continue
        seen.add(event.node)
        for given in _arguments(event.node, *_FILLED[event.name]):
            made = given
            if isinstance(given, ast.Name):
                assigned = event.module.assigning(function_around(event.module, event.node), given.id)
                made = assigned[0].value if len(assigned) == 1 else given
            if not isinstance(made, ast.BinOp) or not isinstance(made.op, ast.Mult):
                continue
            one = next((side for side in (made.left, made.right) if isinstance(side, ast.List)), None)
            if one is not None and len(one.elts) == 1 and not isinstance(one.elts[0], ast.Constant):
                text = event.module.excerpt(made)
                yield CHECK.finding(
                    f"`{text}` holds one tensor several times: what {event.name} gets of each rank overwrites the one "
                    "before",
                    remedy="Make a tensor for each rank: [torch.zeros(...) for _ in range(world_size)].",
                    locations=event.location,
                    because=("the list is made here", event.module.location(made)),
                )


# Collectives that gloo runs on the memory of a tensor as it lies there, whatever view of it they are given.

_ON_MEMORY = frozenset({"all_reduce", "broadcast", "reduce"})
_CONTIGUOUS = (
    "Give it numbers that lie side by side, part = view.contiguous(), and copy them back where the view is read: "
    "view.copy_(part). Or give it the whole tensor."
)
# Methods that give a view of a part of each row, or all parts, and where they are given the dimension to cut.
_PART_OF_ROWS = {"narrow": 0, "select": 0, "expand": 0}
_PARTS_OF_ROWS = {"chunk": 1, "split": 1, "tensor_split": 1, "unbind": 0}


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report collectives that were given numbers which lie in memory otherwise than the collective takes them."""
    from ddpdoctor.diagnosis.wording import rank_list, site_location

    holding: dict[tuple[object, ...], set[int]] = {}
    for row in record.memory_orders:
        holding.setdefault((row.kind, row.shape, row.strides), set()).add(row.rank)
    by_line: dict[tuple[str, Location | None], dict[tuple[object, ...], tuple[str, bool]]] = {}
    for row in record.memory_orders:
        ranks, place = holding[row.kind, row.shape, row.strides], site_location(record.site(row.site))
        if row.gaps or row.kind == "scatter" or not ranks >= set(row.ranks):
            named = f"shape {list(row.shape)}, strides {list(row.strides)} on {rank_list(tuple(sorted(ranks)))}"
            by_line.setdefault((row.kind, place), {})[row.shape, row.strides] = named, row.gaps
    for (kind, place), views in by_line.items():
        how = "do not lie side by side" if any(gaps for _, gaps in views.values()) else "lie in an order of their own"
        yield CHECK.finding(
            f"{kind} is given a view whose numbers {how} in memory: it moves other ones",
            basis=record.job.kind,
            remedy=_CONTIGUOUS,
            locations=place,
            ranks=record.rank_numbers(),
            because=tuple((named, place) for named, _ in views.values()),
        )


def _in_pieces(projection: Projection) -> Iterator[Finding]:
    """Yield collectives that are given columns, every other number, or what ``expand`` shows several times."""
    origins, seen = Origins(projection.machine.script.modules), set[ast.AST]()
    for event in projection.of_kind("collective"):
        if event.name not in _ON_MEMORY or event.node in seen:
            continue
        seen.add(event.node)
        for given in _arguments(event.node, "tensor", 0):
            views = _pieces(origins, event.module, given)
            if views:
                text = views[0][0].excerpt(views[0][1], 60)
                yield CHECK.finding(
                    f"{event.name} is given `{text}`, whose numbers do not lie side by side in memory: gloo moves "
                    "others",
                    remedy=_CONTIGUOUS,
                    locations=event.location,
                    because=("it is a view of a part of each row", views[0][0].location(views[0][1])),
                    severity=Severity.WARNING,
                )


def _pieces(origins: Origins, module: Module, node: ast.expr, depth: int = 3) -> list[tuple[Module, ast.expr]]:
    """Return the views with gaps that a tensor is, wherever it is set here, or in some call of its function."""
    while isinstance(around := node.func if isinstance(node, ast.Call) else node, ast.Attribute):
        if around.attr not in ("data", "detach"):
            break
        node = around.value
    if not isinstance(node, NAMED):
        return [(module, node)] if _has_gaps(origins, module, node) else []
    here: list[list[tuple[Module, ast.expr]]] = []
    elsewhere: list[list[tuple[Module, ast.expr]]] = []
    for how, home, value in origins.bindings(module, node) or () if depth else ():
        found = [(home, value)] if how == "item" and _is_cut(value, _PARTS_OF_ROWS) else []
        found = _pieces(origins, home, value, depth - 1) if how == "value" else found
        local = home is module and function_around(home, value) is function_around(module, node)
        (here if local else elsewhere).append(found)
    return [one for each in here or elsewhere for one in each] if all(here) else []


def _has_gaps(origins: Origins, module: Module, node: ast.expr) -> bool:
    if not isinstance(node, ast.Subscript):
        return _is_cut(node, _PART_OF_ROWS)
    if _is_cut(node.value, _PARTS_OF_ROWS):
        return True
    kept = gaps = False
    for part in getattr(node.slice, "elts", [node.slice]):
        if isinstance(part, ast.Slice):
            gaps = gaps or (kept and not part.lower is part.upper is None) or not _is_one(part.step)
            kept = True
        elif isinstance(part, ast.Constant) and part.value is ...:
            kept = True
        elif _is_number(origins, module, part):
            gaps = gaps or kept
        elif not (isinstance(part, ast.Constant) and part.value is None):
            return False  # Of an index that is a tensor or a list torch makes a copy.
    return gaps


def _is_one(step: ast.expr | None) -> bool:
    return step is None or (isinstance(step, ast.Constant) and step.value in (None, 1))


def _is_number(origins: Origins, module: Module, node: ast.expr) -> bool:
    """Return whether an index is one whole number: written out, or counted by a loop."""
    if isinstance(node, ast.Name):
        found = origins.bindings(module, node) or []
        calls = [one for how, _, one in found if how == "item" and isinstance(one, ast.Call)]
        return bool(found) and len(calls) == len(found) and all(last_name(one.func) == "range" for one in calls)
    number = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(number, ast.Constant) and type(number.value) is int


def _is_cut(node: ast.expr, methods: Mapping[str, int]) -> bool:
    """Return whether a method gives views of parts of each row, or one number at several places."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in methods:
        return False
    along = _arguments(node, "dim", methods[node.func.attr])
    number = along[0].value if along and isinstance(along[0], ast.Constant) else 0
    return node.func.attr == "expand" or (isinstance(number, int) and number > 0)


# Asynchronous calls whose tensor is used before anything waits for the handle that they return.

_KEEP = "Keep what the call returns, and wait for it before the use: handle = ..., then handle.wait()."
_SOONER = "Call wait() of what the call returns before the first use."
_BATCH = "torch.distributed.batch_isend_irecv"
_STARTS = frozenset({"torch.distributed.irecv", "torch.distributed.isend", _BATCH})
# After these calls what was started before is done, or may be: of a handle, of the device, of all ranks.
_WAITS = regex(r"^(wait(_\w+)?|\w*synchronize|\w*barrier|is_completed|get_future|destroy_process_group)$")
# What collectives call the tensor that they write; a later one of these is what others of them read.
_WRITTEN = ("gather_list", "tensor_list", "output_tensor_list", "output_tensor", "output", "tensor")
# Views of a tensor, and what only keeps it.
_VIEWS = frozenset({"data", "detach", "view", "view_as", "reshape", "flatten", "chunk", "split", "unbind", "narrow"})
_KEEPS = frozenset({"append", "extend", "put", "len", "id", "isinstance", "record_stream", "list", "tuple", "zip"})
# Methods that are spelled as those that change numbers, and change none.
_OF_FLAGS = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
_PARTS = (ast.Name, ast.Attribute, ast.Subscript)
_PASSES_ON = (
    *_DISPLAYS, ast.Assign, ast.AnnAssign, ast.Return, ast.Yield, ast.For, ast.Expr, ast.Delete, ast.Subscript,
    ast.ListComp,
)  # fmt: skip
_RETURNED = "return"
_Found: TypeAlias = "tuple[Module, ast.AST] | None"


def _not_waited_for(projection: Projection) -> Iterator[Finding]:
    seen: set[ast.AST] = set()
    for event in projection.of_kind("call"):
        given = (*event.positional, event.named.get("async_op", NONE))
        starts = event.name in COLLECTIVES and any(constant(one) is True for one in given)
        if event.node in seen or not (starts or event.name in _STARTS):
            continue
        handle = _Handle(projection.machine.script, event, rank_names(projection.machine.store))
        holder, use = handle.used()
        if use is not None:
            seen.add(event.node)
            how = "only later is its handle waited for" if holder else "nothing waits for the handle it returns"
            uses, needs = ("changed", "changes what it sends") if handle.sends else ("used", "needs what it writes")
            yield CHECK.finding(
                f"{event.name.rpartition('.')[2]} may still run when its tensor is {uses}: {how}",
                remedy=_SOONER if holder else _KEEP,
                locations=event.location,
                because=((f"`{use[0].excerpt(use[1], 60)}` {needs}", use[0].location(use[1])),),
            )


class _Handle:
    """Follows the handle and the tensors of one asynchronous call through the statements that come after it."""

    def __init__(self, script: Script, event: Event, ranks: frozenset[str]) -> None:
        self._script, self._event, self._callers = script, event, list(event.chain[1:])
        self._ranks = ranks
        self._tensors = set(_tensors_of(event))
        self._sent = set(_names_of(event, list(_handed(event, "isend")))) if event.name in _STARTS else set[str]()
        self.sends = False
        """What was found changes a tensor that is sent; else it uses one that is written."""
        self._peers = {ast.unparse(one) for one in _arguments(event.node, "dst", 1)} if self._sent else set[str]()
        self._of_gradients = any(".grad" in one for one in self._tensors)

    def used(self) -> tuple[str | None, _Found]:
        """Return which variable holds the handle, if any, and what uses the tensor before that is waited for."""
        place: _Found = (self._event.module, self._event.node)
        if not self._tensors | self._sent or any("coalescing" in ast.unparse(one.node) for one in self._event.contexts):
            return None, None
        while place is not None and (holder := self._holder(*place)) == _RETURNED:
            place = self._caller(*place)
        return (None, None) if place is None or holder is None else (holder, self._use(*place, holder))

    def _holder(self, module: Module, made: ast.AST) -> str | None:
        """Return which variable of its function holds a handle; empty where nothing does, None where that is open."""
        around = module.parents.get(made)
        if isinstance(around, _DISPLAYS) or (isinstance(around, ast.ListComp) and made is around.elt):
            return self._holder(module, around)
        if isinstance(around, (ast.Expr, ast.Return)):
            return "" if isinstance(around, ast.Expr) else _RETURNED
        target = around.targets[0] if isinstance(around, ast.Assign) else getattr(around, "func", None)
        is_part = isinstance(target, ast.Subscript) or getattr(target, "attr", "") == "append"
        if target is None or (isinstance(around, ast.Call) and not is_part):
            return None
        holder = getattr(target, "value", target) if is_part else target
        if isinstance(holder, ast.Attribute):
            return None if any(_looks(one, holder) for one in self._script.modules) else ""
        function = function_around(module, made)
        if not isinstance(holder, ast.Name) or (function is module.tree and module is not self._script.entry):
            return None
        assigned = (pair for one in nodes_of(function) if isinstance(one, ast.Assign) for pair in pairs_of(one))
        values = [value for to, value in assigned if last_name(to) == holder.id]
        if is_part and not (values and all(isinstance(one, (*_DISPLAYS, ast.ListComp)) for one in values)):
            return None  # What is put into a list of others, they may wait for.
        looks = [one for one in _looks(module, holder) if function in module.ancestors(one)]
        if any(function_around(module, one) is not function for one in looks):
            return None
        returned = bool(looks) and all(isinstance(module.parents[one], ast.Return) for one in looks)
        return _RETURNED if returned else holder.id if looks else ""

    def _caller(self, module: Module, node: ast.AST) -> _Found:
        """Return the call that runs the function around a node here, with the tensors by their names there."""
        function = function_around(module, node)
        if not self._callers or not isinstance(function, ast.FunctionDef):
            return None
        frame = self._callers.pop(0)
        home = next((one for one in self._script.modules if str(one.path) == frame.file), module)
        named = home.calls_by_name.get(function.name, ()) if "__" not in function.name else home.index.of(ast.Call)
        calls = [one for one in named if one.lineno == frame.line]
        if len(calls) != 1:
            return None
        call, names = calls[0], [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        given = {word.arg or "": word.value for word in call.keywords}
        given.update(zip(names, [owner, *call.args] if names[:1] == ["self"] else call.args, strict=False))
        self._tensors, self._sent = (
            {ast.unparse(given[root]) + dot + rest for root, dot, rest in parts if root in given}
            for parts in ([one.partition(".") for one in names] for names in (self._tensors, self._sent))
        )
        return home, call

    def _use(self, module: Module, made: ast.AST, holder: str) -> _Found:
        """Return the first use after a call, in its function or, of what is dropped, in the functions before it."""
        returned = False
        for statement, nodes in statements_after(module, made):
            if any(getattr(one, "id", None) == holder or self._waits(one) for one in nodes):
                return None
            for one in nodes:
                is_tensor = isinstance(one, _PARTS) and ast.unparse(one) in self._tensors
                steps = isinstance(one, ast.Call) and last_name(one.func) in ("step", "clip_grad_norm_")
                if (is_tensor and self._reads(module, one)) or (steps and self._of_gradients):
                    return module, one
                if isinstance(one, _PARTS) and ast.unparse(one) in self._sent and _changes(module, one):
                    self.sends = True
                    return module, one
            if isinstance(statement, ast.Return) and statement.value is not None:
                returned = ast.unparse(_bare(statement.value)) in self._tensors
            written = {ast.unparse(one) for one in nodes if isinstance(getattr(one, "ctx", None), ast.Store)}
            for names in (self._tensors, self._sent):
                parsed = {one: descend(ast.parse(one, mode="eval").body) for one in names}
                names -= {one for one, parts in parsed.items() if not written.isdisjoint(map(ast.unparse, parts))}
        found = None if holder else self._caller(module, made)
        if found is None or (returned and self._reads(*found)):
            return found
        if returned:
            self._tensors |= {ast.unparse(one) for one in getattr(found[0].parents[found[1]], "targets", ())}
        return self._use(*found, "")

    def _waits(self, call: ast.AST) -> bool:
        """Return whether a call may wait: a collective does, too, where they come one after another."""
        last = last_name(call.func) if isinstance(call, ast.Call) else ""
        if last == "recv" and self._peers & {ast.unparse(one) for one in _arguments(call, "src", 1)}:
            return True  # The peer may answer what it was sent.
        collective = f"torch.distributed.{last}" in COLLECTIVES and "async_op" not in ast.unparse(call)
        return collective or _WAITS.match(last) is not None or last in _names_that_wait(self._script)

    def _reads(self, module: Module, node: ast.AST) -> bool:
        """Return whether the numbers of a tensor are needed where it is named, and not only a view of it is made."""
        around = module.parents[node]
        if isinstance(around, ast.Attribute) and around.attr in _VIEWS:
            outer = module.parents[around]
            return self._reads(module, outer if isinstance(outer, ast.Call) and outer.func is around else around)
        if isinstance(around, ast.Subscript) and isinstance(around.ctx, ast.Load):
            return node is not around.value or self._reads(module, around)
        if isinstance(around, ast.Attribute):
            return around.attr not in OF_FORM | _KEEPS
        last = last_name(around.func) if isinstance(around, ast.Call) else ""
        if isinstance(around, _PASSES_ON) or last in _KEEPS or f"torch.distributed.{last}" in COLLECTIVES:
            return False
        tests = (one.test for one in module.ancestors(node) if isinstance(one, (ast.If, ast.IfExp)))
        of_ranks = any(last_name(part) in self._ranks for test in tests for part in descend(test))
        of_source = self._event.name.endswith(".broadcast")  # It has all the while what the others get.
        is_none = isinstance(around, ast.Compare) and isinstance(around.ops[0], (ast.Is, ast.IsNot))
        return not is_none and not (of_source and of_ranks)


def _tensors_of(event: Event) -> Iterator[str]:
    """Yield the tensors that a call writes, and what they are views of, as the function around it names them."""
    call, how = event.node, COLLECTIVES.get(event.name)
    if not isinstance(call, ast.Call):
        return
    written = [call.args[place] for place in (how.writes if how else (0,)) if place < len(call.args)]
    if event.name in _STARTS:
        written = list(_handed(event, "irecv"))
    elif not written and (how is None or how.writes):
        given = {word.arg: word.value for word in call.keywords}
        written = [given[name] for name in _WRITTEN if name in given][:1]
    yield from _names_of(event, written)


def _handed(event: Event, way: str) -> Iterator[ast.expr]:
    """Yield the tensors that a call sends, or receives into: its own, or those of the operations of a batch."""
    calls: Iterable[ast.AST] = (event.node,)
    if event.name == _BATCH and isinstance(event.node, ast.Call) and event.node.args:
        parts = origins_of(event.node.args[0], function_around(event.module, event.node))
        calls = [one for one in parts if isinstance(one, ast.Call) and last_name(one.func) == "P2POp"]
    for call in (one for one in calls if isinstance(one, ast.Call)):
        batched = call is not event.node
        if any(last_name(one) == way for one in (_arguments(call, "op", 0) if batched else [call.func])):
            yield from _arguments(call, "tensor", int(batched))


def _arguments(call: ast.AST, name: str, place: int) -> list[ast.expr]:
    """Return what a call is given by a name or at a place, if anything."""
    if not isinstance(call, ast.Call):
        return []
    return [word.value for word in call.keywords if word.arg == name] or list(call.args[place : place + 1])


def _changes(module: Module, node: ast.AST) -> bool:
    """Return whether a tensor is changed in place where it is named, or a part of it."""
    around = module.parents[node]
    if isinstance(around, ast.AugAssign):
        return around.target is node
    if isinstance(around, ast.Subscript) and around.value is node:
        return not isinstance(around.ctx, ast.Load) or _changes(module, around)
    if not isinstance(around, ast.Attribute):
        return False
    outer = module.parents[around]
    called = isinstance(outer, ast.Call) and outer.func is around
    if around.attr in _VIEWS:
        return _changes(module, outer if called else around)
    return called and around.attr.endswith("_") and not around.attr.endswith("__") and around.attr not in _OF_FLAGS


def _names_of(event: Event, written: Sequence[ast.expr]) -> Iterator[str]:
    """Yield the names of tensors, and of what they are views of."""
    call = event.node
    assigned = [one for one in nodes_of(function_around(event.module, call)) if isinstance(one, ast.Assign)]
    for part in (part for one in written for part in getattr(one, "elts", [one])):
        name = ast.unparse(_bare(part))
        values = [_bare(value) for each in assigned for to, value in pairs_of(each) if ast.unparse(to) == name]
        yield from (ast.unparse(value) for value in values if len(values) == 1 and isinstance(value, NAMED))
        if isinstance(_bare(part), _PARTS):
            yield name


def _bare(node: ast.expr) -> ast.expr:
    """Return the tensor that an expression is, or is a view of."""
    if isinstance(node, ast.Call) and last_name(node.func) in ("list", "tuple") and node.args:
        return _bare(node.args[0])
    method = node.func if isinstance(node, ast.Call) else node
    return _bare(method.value) if isinstance(method, ast.Attribute) and method.attr in _VIEWS else node


def _looks(module: Module, holder: ast.Name | ast.Attribute) -> list[ast.AST]:
    """Return the places where a variable, or an attribute of any object, is looked at, and not only filled."""
    named = [one for one in module.index.of(type(holder)) if last_name(one) == last_name(holder)]
    around = [(one, module.parents[one]) for one in named if isinstance(one.ctx, ast.Load)]
    fills = [one for one, up in around if getattr(up, "attr", "") in ("append", "extend", "clear")]
    fills += [one for one, up in around if isinstance(getattr(up, "ctx", None), ast.Store) and up.value is one]  # type: ignore[attr-defined]
    return [one for one, _ in around if one not in fills]


@once
def _names_that_wait(script: Script) -> frozenset[str]:
    """Return the names of the functions of a script that may wait for what was started, themselves or in others."""
    functions = [one for module in script.modules for one in module.index.of(ast.FunctionDef)]
    calls = {one: {last_name(each.func) for each in descend(one) if isinstance(each, ast.Call)} for one in functions}
    found = {one.name for one in functions if any(map(_WAITS.match, calls[one]))}
    while more := {one.name for one in functions if calls[one] & found} - found:
        found |= more
    return frozenset(found)
