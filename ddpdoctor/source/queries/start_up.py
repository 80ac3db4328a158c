"""What a script does when it is started with certain arguments: who starts its ranks, and whether it wants a GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.source.events import Event
from ddpdoctor.source.queries.job_kind import keyword
from ddpdoctor.source.script.launch_facts import declared_options, launches, tests_for_gpu
from ddpdoctor.source.script.module import Module, dotted
from ddpdoctor.source.script.script import Script

_ON_CUDA = frozenset({"torch.device", "torch.cuda.set_device"})


def starts_own_ranks(script: Script, arguments: Sequence[str], *, by_python: bool) -> bool:
    """Return whether a script starts its ranks itself when it gets these arguments.

    One that serves a launcher too does so where a flag among the arguments chooses it (``if
    args.multiprocessing_distributed: mp.spawn(...)``), or where plain Python runs it (``by_python``).
    """
    if script.spawns_ranks is not None:
        return True
    for module in script.modules:
        for call in launches(module, script.modules):
            if by_python or _is_chosen(script, module, call, arguments):
                return True
    return False


def wants_cuda(script: Script, arguments: Sequence[str]) -> bool:
    """Return whether a script demands CUDA or NCCL, by name or by what an option or a variable holds.

    A variable or an option that holds something else as well ("cpu" in one place, "cuda" in another) demands nothing.
    """
    if script.demands_cuda is not None:
        return True
    for module in script.modules:
        for call in module.index.of(ast.Call):
            asked = _asked(call, module.resolve(call.func))
            if asked is None or tests_for_gpu(module, call):
                continue
            value, wanted = asked
            known = dotted(value).rpartition(".")[2]
            texts = set(_texts(script, known, wanted, arguments)) if known else set()
            if texts and all(wanted in text for text in texts):
                return True
    return False


def is_run_again(script: Script, event: Event) -> bool:
    """Return whether each rank runs again what the process that spawns it has run: it imports the script anew.

    That is what stands at the top level outside of the test of ``__name__``. A forked process starts with a copy.
    """
    words = script.entry.words
    if not event.in_parent or "spawn" not in words or "fork" in words:
        return False
    around = list(event.module.ancestors(event.node))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    if any(isinstance(node, functions) for node in around):
        return False
    return not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in around)


def rank_options(script: Script) -> tuple[str, ...]:
    """Return the spellings of the option that ``init_process_group`` gets as the rank; none where it is no option."""
    names = {
        dotted(value).rpartition(".")[2]
        for module in script.modules
        for call in module.index.of(ast.Call)
        if module.resolve(call.func) == "torch.distributed.init_process_group"
        and (value := keyword(call, "rank")) is not None
    }
    declared = [call for call in _declared(script) if _destination(call) in names - {""}]
    return tuple(sorted({spelling for call in declared for spelling in _spellings(call)}))


def _is_chosen(script: Script, module: Module, call: ast.Call, arguments: Sequence[str]) -> bool:
    inner: ast.AST = call
    for around in module.ancestors(call):
        if isinstance(around, ast.If) and inner in around.body:
            flags = {dotted(test).rpartition(".")[2] for test in _alternatives(around.test)} - {""}
            if any(_flag(declared) in flags for declared in _declared(script) if _given(declared, arguments)):
                return True
        inner = around
    return False


def _alternatives(test: ast.expr) -> Sequence[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]


def _flag(declared: ast.Call) -> str:
    """Return the attribute that a ``store_true`` option sets; empty for other options."""
    action = keyword(declared, "action")
    return _destination(declared) if isinstance(action, ast.Constant) and action.value == "store_true" else ""


def _declared(script: Script) -> Iterator[ast.Call]:
    for module in script.modules:
        yield from declared_options(module)


def _spellings(declared: ast.Call) -> list[str]:
    names = [entry.value for entry in declared.args if isinstance(entry, ast.Constant)]
    return [name for name in names if isinstance(name, str)]


def _destination(declared: ast.Call) -> str:
    named = keyword(declared, "dest")
    if isinstance(named, ast.Constant) and isinstance(named.value, str):
        return named.value
    names = sorted(_spellings(declared), key=lambda name: not name.startswith("--"))
    return names[0].lstrip("-").replace("-", "_") if names else ""


def _given(declared: ast.Call, arguments: Sequence[str]) -> bool:
    return any(name in arguments for name in _spellings(declared))


def _asked(call: ast.Call, name: str) -> tuple[ast.expr, str] | None:
    """Return what decides about the device or the backend in a call, and the word that would demand a GPU."""
    first = call.args[0] if call.args else None
    if name == "torch.distributed.init_process_group":
        backend = first or keyword(call, "backend")
        return None if backend is None else (backend, "nccl")
    moves = name in _ON_CUDA or (isinstance(call.func, ast.Attribute) and call.func.attr == "to")
    return (first, "cuda") if moves and first is not None else None


def _texts(script: Script, name: str, wanted: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the texts that a variable or an option of a name holds, in lower case.

    Those with the word ``wanted`` are left out where a condition tests for a GPU first.
    """
    for declared in _declared(script):
        if _destination(declared) == name:
            default = keyword(declared, "default")
            given = _value(_spellings(declared), arguments)
            if given:
                yield given.lower()
            elif default is not None and _text(default):
                yield _text(default)
    for module in script.modules:
        if name not in module.words:
            continue
        for node, targets, value in _assignments(module):
            if all(dotted(target).rpartition(".")[2] != name for target in targets):
                continue
            text = _text(value)
            if text and not (wanted in text and tests_for_gpu(module, node)):
                yield text


def _assignments(module: Module) -> Iterator[tuple[ast.stmt, Sequence[ast.expr], ast.expr]]:
    for plain in module.index.of(ast.Assign):
        yield plain, plain.targets, plain.value
    for annotated in module.index.of(ast.AnnAssign):
        if annotated.value is not None:
            yield annotated, [annotated.target], annotated.value


def _text(value: ast.expr) -> str:
    """Return a text in lower case; ``either`` for a choice between several, and an empty one for what is not known."""
    if isinstance(value, ast.Constant):
        return value.value.lower() if isinstance(value.value, str) else ""
    return "either" if any(isinstance(node, (ast.IfExp, ast.BoolOp)) for node in ast.walk(value)) else ""


def _value(names: Sequence[str], arguments: Sequence[str]) -> str:
    """Return what the arguments give to an option; empty when they don't name it."""
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option in names and option.startswith("-"):
            return value if equals else next(iter(arguments[position + 1 : position + 2]), "")
    return ""
