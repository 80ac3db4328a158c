"""A rank catches a failure and continues without its peers.

What it finds
    A handler of failures that can hit one rank alone (out of memory, a corrupt sample, a bare except, an exception of
    the project's own that is raised for what a rank's batch holds) around a collective or a backward of the DDP model,
    or in a loop with one, that does not end the rank: it continues to later collectives, or leaves a loop in which the
    others continue. And one around the whole training of a job that may use NCCL, which only prints the failure, so
    that the process ends with exit code 0.

Why it is bad
    The failed rank skipped collectives in which the others still wait. From there on it is one behind: the job
    hangs, or pairs its next gradients with those of another step. The log shows a harmless "skipping batch". A launcher
    ends the other ranks when one fails, not when one has ended: they wait for it until NCCL's timeout.

Example
    try:
        loss = model(batch).mean()
        loss.backward()
    except RuntimeError:                # out of memory on this rank only
        optimizer.zero_grad()
        continue

Remedy
    Let the exception end the rank, so that the launcher ends the job; or all-reduce whether all ranks succeeded, before
    the first collective of the step, and skip the step together.

When it is wrong
    Where the caught failure happens on every rank at the same place.

References
    https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence

from ddpdoctor.check import Check, Reason, RunRecord, Script
from ddpdoctor.files import regex
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.source.events import Event, OwnTest
from ddpdoctor.source.interpreter.values import NONE, constant
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.queries.divergence import events_through, function_around, nodes_of, reported_lines
from ddpdoctor.source.queries.job_kind import initialisations, starts
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.script.script import says

CHECK = Check(
    code="DDP311",
    name="exception-divergence",
    stands_for="caught-exception",
    severity={"source": Severity.WARNING, "rehearsal": Severity.ERROR},
    needs=frozenset({"ranks", "collectives", "handled"}),
    subjects=("collectives",),
    triggers=("except",),
)


def in_run(record: RunRecord) -> Iterator[Finding]:
    """Report the exception in whose handler a rank waits for ranks that did not raise it."""
    from ddpdoctor.diagnosis.divergence.describe import disputed_call
    from ddpdoctor.diagnosis.divergence_kind import diverged

    yield from diverged(
        CHECK,
        record,
        lambda divergence: (
            f"Fix the exception on rank {divergence.culprit}, and take {disputed_call(divergence)} out of the handler: "
            "ranks that did not fail never come to it."
        ),
    )


_UNIFORM = (ImportError, NotImplementedError, StopIteration, StopAsyncIteration, SyntaxError, Warning)
"""What fails alike on every rank, or ends an iteration; any other error of Python can hit one rank alone."""
_OF_CONTENT = (LookupError, TypeError, AttributeError, NameError)
"""What a configuration raises alike on every rank, and only data of its own on one."""
_SETTING_UP = frozenset({"init_process_group", "new_group"})
_ENDS = regex(r"exit|quit$|abort|kill|terminate|shutdown|destroy|fatal|fail", re.IGNORECASE)
_JUMPS = (ast.Continue, ast.Break, ast.Return)
_LEAVES = frozenset({"exit", "_exit", "quit"})
_FETCHES = frozenset({"next", "anext"})


def in_source(script: Script) -> Iterator[Finding]:
    """Report handlers that swallow a failure of one rank around or before its collectives."""
    projection = whole_projection(script)
    events = [event for event in projection.synchronising if event.name not in _SETTING_UP and not event.in_parent]
    told = reported_lines(projection)
    for module in projection.machine.script.modules if events else ():
        for node in module.index.of(ast.Try):
            if node.handlers:
                ends = _ends_job(projection, module, node, events)
                missed = ends or _missed(module, node, events)
                if missed is None or (str(missed.module.path), getattr(missed.node, "lineno", 0)) in told:
                    continue
                for handler in node.handlers:
                    raised = _own_raise(projection, module, node, handler)
                    if raised is None and not _catches_local_failures(module, node, handler):
                        continue
                    goes_on = _swallows(module, handler, events) and not _makes_up_for(handler, missed)
                    if all(map(_only_says, handler.body)) if ends else goes_on:
                        yield _finding(module, handler, missed, raised, ends=ends is not None)


def _finding(
    module: Module, handler: ast.ExceptHandler, missed: Event, raised: tuple[OwnTest, ast.AST] | None, *, ends: bool
) -> Finding:
    caught = ast.unparse(handler.type) if handler.type is not None else "everything"
    location = module.head_location(handler)
    because: list[Reason] = [
        (f"this handler catches {caught} and can continue as if nothing had happened", location),
        (f"every rank must reach this {missed.name}", missed.location),
    ]
    if raised is not None:
        test, place = raised
        text = f"it is raised here, where `{test.module.excerpt(test.node)}` differs by rank"
        because.append((text, test.module.location(place)))
    if isinstance(handler.body[-1], _JUMPS):
        because.append(("the rank leaves here, alone", module.location(handler.body[-1])))
    skipped = f"{missed.name} at line {missed.location.line}"
    return CHECK.finding(
        f"a rank that fails here ends with exit code 0, and the others wait for it in {skipped} until a timeout"
        if ends
        else f"a rank that fails here skips {skipped} and continues, while the others wait for it",
        remedy="Raise the exception again at the end of the handler, so that the launcher ends the other ranks."
        if ends
        else "Let the exception end the rank, or all-reduce whether every rank succeeded and let all of them skip "
        "the step.",
        locations=(location, missed.location),
        because=because,
    )


def _swallows(module: Module, handler: ast.ExceptHandler, events: Sequence[Event]) -> bool:
    """Return whether a rank continues after a failure of its own without notifying the others."""
    if _ends(handler.body):
        return False
    return not any(events_through(events, module, handler.lineno, handler.end_lineno or handler.lineno))


def _makes_up_for(handler: ast.ExceptHandler, missed: Event) -> bool:
    """Return whether a handler calls again what was missed: ``loss.mean().backward()`` where there are many losses."""
    name = last_name(missed.node.func) if isinstance(missed.node, ast.Call) else ""
    calls = (node for statement in handler.body for node in descend(statement) if isinstance(node, ast.Call))
    return bool(name) and any(last_name(call.func) == name for call in calls)


def _missed(module: Module, node: ast.Try, events: Sequence[Event]) -> Event | None:
    """Return the collective that a failure in the body skips, when more of them follow."""
    first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
    inside = [event for event in events_through(events, module, first, last) if not _runs_anyway(event)]
    loop = _loop_around(module, node)
    if inside and _only_calls(node.body, inside):
        return None
    if inside:
        later = any(event.ordinal > inside[-1].ordinal for event in events if event.scopes[:1] == inside[-1].scopes[:1])
        return inside[0] if loop is not None or later else None
    if loop is None or _only_fetches(node.body):
        return None
    leaving = {type(handler.body[-1]) for handler in node.handlers}
    if leaving & {ast.Continue, ast.Break}:
        behind = next(events_through(events, module, last + 1, loop.end_lineno or last), None)
        if behind is not None:
            return behind
    if leaving & {ast.Break, ast.Return}:  # The next turns are missed whole.
        return next(events_through(events, module, loop.body[0].lineno, node.lineno), None)
    return None


def _runs_anyway(event: Event) -> bool:
    """Return whether a context manager runs a collective before what it surrounds, or however that ends."""
    function = function_around(event.module, event.node)
    given = next((one for one in nodes_of(function) if isinstance(one, ast.Yield)), None)
    if given is None or "contextmanager" not in map(last_name, getattr(function, "decorator_list", ())):
        return False
    around = (one for one in event.module.ancestors(given) if isinstance(one, ast.Try))
    finally_ = {inner for one in around for statement in one.finalbody for inner in descend(statement)}
    return event.node in finally_ or event.location.line < given.lineno


def _ends_job(projection: Projection, module: Module, node: ast.Try, events: Sequence[Event]) -> Event | None:
    """Return the first collective of a loop in the body, where nothing but the end of the process follows a handler.

    Connections of gloo break with the process, and its peers fail at once; so they may where the group is destroyed.
    """
    first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
    inside = list(events_through(events, module, first, last))
    if not inside or events[-1] is not inside[-1] or _loop_around(module, node) is not None:
        return None
    handled = {inner for handler in node.handlers for inner in descend(handler)}
    rest = (one for one in nodes_of(function_around(module, node)) if isinstance(one, ast.stmt) and one.lineno > last)
    backends = {constant(one.argument("backend", 0) or NONE) for one in initialisations(projection)}
    if backends == {"gloo"} or any(one not in handled and _ends([one]) for one in rest):
        return None
    launches = any(events_through(starts(projection), module, first, last))  # Its ranks have ended when that fails.
    return None if launches else next((event for event in inside if event.loops), None)


def _only_says(line: ast.stmt) -> bool:
    """Return whether a line of a handler leaves no trace but a message; if it ends the process, with exit code 0."""
    if isinstance(line, ast.If):
        return all(_only_says(inner) for inner in (*line.body, *line.orelse))
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
        code = line.value.args[0] if line.value.args else ast.Constant(0)
        leaves = last_name(line.value.func) in _LEAVES and isinstance(code, ast.Constant) and code.value in (0, None)
        return leaves or says(line.value)
    return isinstance(line, (ast.Pass, ast.Import, ast.ImportFrom)) or (
        isinstance(line, ast.Return) and (line.value is None or ast.unparse(line.value) == "None")
    )


def _only_calls(body: Sequence[ast.stmt], inside: Sequence[Event]) -> bool:
    """Return whether only a collective can fail there, which fails on every rank: a probe, a barrier that counts."""
    nodes = {event.node for event in inside if event.kind == "collective"}
    calls = [inner for statement in body for inner in descend(statement) if isinstance(inner, ast.Call)]
    others = [call for call in calls if call not in nodes and not any(call in descend(node) for node in nodes)]
    return any(call in nodes for call in calls) and all(_makes_tensor(call) for call in others)


def _makes_tensor(call: ast.Call) -> bool:
    text = ast.unparse(call.func)
    return text.startswith("torch.") or text.endswith((".cuda", ".to", ".wait", ".detach", ".clone"))


def _loop_around(module: Module, node: ast.Try) -> ast.For | ast.While | None:
    function = function_around(module, node)
    for around in module.ancestors(node):
        if around is function:
            return None
        if isinstance(around, (ast.For, ast.While)):
            return around
    return None


def _only_fetches(body: Sequence[ast.stmt]) -> bool:
    calls = [inner for statement in body for inner in descend(statement) if isinstance(inner, ast.Call)]
    return not calls or any(isinstance(call.func, ast.Name) and call.func.id in _FETCHES for call in calls)


def _caught(handler: ast.ExceptHandler) -> list[str]:
    """Return the last names of the classes that a handler catches; it is none for a bare ``except``."""
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [last_name(entry) for entry in types if entry is not None]


def _catches_local_failures(module: Module, node: ast.Try, handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches an error of Python's, or of memory, that data can raise on one rank alone."""
    if handler.type is None:
        return True
    for name in _caught(handler):
        known = getattr(builtins, name, None)
        if name == "OutOfMemoryError":
            return True
        if not isinstance(known, type) or not issubclass(known, BaseException) or issubclass(known, _UNIFORM):
            continue
        if issubclass(known, Exception) or known is BaseException:
            return not issubclass(known, _OF_CONTENT) or _uses_turn(module, node)
    return False


def _uses_turn(module: Module, node: ast.Try) -> bool:
    """Return whether the body of a ``try`` uses what the loop around it goes over."""
    loop = _loop_around(module, node)
    if not isinstance(loop, ast.For):
        return False
    given = {name.id for name in descend(loop.target) if isinstance(name, ast.Name)}
    return any(isinstance(name, ast.Name) and name.id in given for line in node.body for name in descend(line))


def _own_raise(
    projection: Projection, module: Module, node: ast.Try, handler: ast.ExceptHandler
) -> tuple[OwnTest, ast.AST] | None:
    """Return what in the body raises something that the handler catches, where a rank's own data decides."""
    caught = set(_caught(handler))
    first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
    for test, raised in projection.machine.own_raises:
        within = any(frame.file == str(module.path) and first <= frame.line <= last for frame in test.chain)
        error = raised.exc if isinstance(raised, ast.Raise) else None
        name = last_name(error.func if isinstance(error, ast.Call) else error) if error is not None else ""
        if within and name and (not caught or caught & _ancestry(projection, name)):
            return test, raised
    return None


def _ancestry(projection: Projection, name: str) -> set[str]:
    """Return the names of an exception class and of those above it, in the project and in Python."""
    found: set[str] = set()
    rest = [name]
    while rest:
        name = rest.pop()
        if name in found:
            continue
        found.add(name)
        known = getattr(builtins, name, None)
        found |= {above.__name__ for above in known.__mro__} if isinstance(known, type) else set()
        for module in projection.machine.script.modules:
            made = (one for one in module.index.of(ast.ClassDef) if one.name == name)
            rest += [last_name(base) for one in made for base in one.bases]
    return found


def _goes_on(arm: Sequence[ast.stmt]) -> bool:
    """Return whether one arm of a condition leaves the handler silently."""
    return bool(arm) and isinstance(arm[-1], _JUMPS) and not _ends(arm)


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Return whether a handler ends the rank, so that its peers learn of it."""
    for statement in body:
        if isinstance(statement, ast.Raise):
            return True
        if isinstance(statement, ast.If) and any(map(_goes_on, (statement.body, statement.orelse))):
            return False
        if isinstance(statement, ast.If) and statement.orelse and _ends(statement.body) and _ends(statement.orelse):
            return True
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call and _ENDS.search(ast.unparse(statement).partition("(")[0]):
            return True
    return False
