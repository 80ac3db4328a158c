"""Facts about a whole script that its launch depends on: who starts the ranks, and on what."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddpdoctor.finding import Location
from ddpdoctor.source.script.call_graph import leads_to
from ddpdoctor.source.script.module import (
    Module,
    argument_of,
    descend,
    dotted,
    functions_named,
    last_name,
    parameters_of,
)
from ddpdoctor.source.vocabulary import GLOBAL_RANK_VARIABLES, LOCAL_RANK_VARIABLES, PROCESSES, SPAWNERS

_MOVES_TO_CUDA = frozenset(
    {
        *("torch.cuda.set_device", "torch.cuda.device"),
        *("torch.accelerator.set_device_index", "torch.accelerator.set_device_idx", "torch.accelerator.device_index"),
    }
)


_STARTING_WORDS = frozenset(name.rpartition(".")[2] for name in (*SPAWNERS, *PROCESSES))
_JOIN = "torch.distributed.init_process_group"
_TEST_CASES = frozenset({"MultiProcessTestCase", "MultiProcContinuousTest", "DistributedTestBase"})


def rank_launch(modules: Sequence[Module]) -> Location | None:
    """Return where the script starts its own ranks.

    A launch under a condition counts only when the script does not also read its rank from a launcher's environment:
    such scripts serve both, and a launcher serves them. What only the started function reads says nothing of who
    starts it. The test cases of torch start their ranks as processes.
    """
    tested = next((found for module in modules for found in _test_cases(module)), None)
    if tested is not None:
        return tested[0].location(tested[1])
    found = [(module, call) for module in modules for call in launches(module, modules)]
    if not found:
        return None
    started = {node for _, call in found for _, function in _targets(call, modules) for node in descend(function)}
    names = GLOBAL_RANK_VARIABLES | LOCAL_RANK_VARIABLES
    both = any(read not in started for module in modules for read in launcher_rank_reads(module, names))
    for module, call in found:
        if not (both and _conditional(module, call)) or _or_runs_alone(module, call):
            return module.location(call)
    return None


def cuda_demand(modules: Sequence[Module]) -> Location | None:
    """Return the first place that needs CUDA or NCCL and is not under a condition that tests whether they are there."""
    calls = ((module, call) for module in modules for call in module.index.of(ast.Call))
    found = (one for one in calls if _demands_cuda(*one) and not tests_for_gpu(*one))
    return next((module.location(call) for module, call in found), None)


def reads_launcher_rank(module: Module, names: frozenset[str] = GLOBAL_RANK_VARIABLES | LOCAL_RANK_VARIABLES) -> bool:
    """Return whether a module reads a rank from the environment, RANK or LOCAL_RANK, or what is in ``names``."""
    return next(launcher_rank_reads(module, names), None) is not None


def launcher_rank_reads(module: Module, names: frozenset[str]) -> Iterator[ast.Constant]:
    """Yield the names of variables of the environment where a module reads them."""
    if not any(name in module.text for name in names):
        return
    for node in module.index.of(ast.Constant):
        if node.value.__class__ is str and node.value in names:
            around = module.parents.get(node)
            if isinstance(around, (ast.List, ast.Tuple)):  # One of several names that a function looks up.
                around = module.parents.get(around)
            stored = isinstance(around, ast.Subscript) and isinstance(around.ctx, ast.Store)
            if not stored and isinstance(around, (ast.Subscript, ast.Call, ast.Compare)):
                yield node


def declared_options(module: Module) -> Iterator[ast.Call]:
    """Yield the calls that declare an option of the command line, by whatever name: ``arg = parser.add_argument``."""
    if "add_argument" not in module.text:
        return
    yield from (call for call in module.calls_by_name.get("add_argument", ()) if isinstance(call.func, ast.Attribute))
    for statement in module.index.of(ast.Assign):
        target = statement.targets[0]
        if last_name(statement.value) == "add_argument" and isinstance(target, ast.Name):
            yield from (call for call in module.calls_by_name.get(target.id, ()) if isinstance(call.func, ast.Name))


def destination(declared: ast.Call) -> str:
    """Return the attribute that holds an option's value; empty where its name is not known."""
    written = argument_of(declared, "dest")
    if isinstance(written, ast.Constant) and isinstance(written.value, str):
        return written.value
    names = sorted(spellings(declared), key=lambda name: not name.startswith("--"))
    return names[0].lstrip("-").replace("-", "_") if names else ""


def spellings(declared: ast.Call) -> list[str]:
    """Return the names by which an option may be given."""
    names = [entry.value for entry in declared.args if isinstance(entry, ast.Constant)]
    return [name for name in names if isinstance(name, str)]


def offered(modules: Sequence[Module], name: str) -> Iterator[object]:
    """Yield the values that options of a name let the user choose, and their defaults, where they are literal."""
    for module in modules:
        for declared in declared_options(module):
            for entry in declared.keywords if destination(declared) == name else ():
                try:
                    value = ast.literal_eval(entry.value) if entry.arg in ("choices", "default") else ()
                except ValueError:
                    continue
                yield from value if isinstance(value, (list, tuple)) else (value,)


def launches(module: Module, modules: Sequence[Module]) -> Iterator[ast.Call]:
    """Yield calls of a module that start ranks, under whatever condition."""
    if not any(word in module.text for word in _STARTING_WORDS):
        return
    for call, name in module.calls():
        if name in SPAWNERS:
            if _reached(module, call, modules):
                yield call
        elif name in PROCESSES and _starts_a_rank(call, modules):
            yield call
    for call in module.calls_by_name.get("Process", ()):
        if not module.resolve(call.func) and _starts_a_rank(call, modules):
            yield call  # Of a context: multiprocessing.get_context("spawn").Process(target=…).
    for cls in module.index.of(ast.ClassDef):
        if any(module.resolve(base) in PROCESSES for base in cls.bases) and any(
            leads_to(module, method, _JOIN, modules)
            for method in cls.body
            if isinstance(method, ast.FunctionDef) and method.name == "run"
        ):
            yield from module.calls_by_name.get(cls.name, ())


def _test_cases(module: Module) -> Iterator[tuple[Module, ast.expr]]:
    """Yield base classes of a module's classes that start a process for each rank of a test."""
    for cls in module.index.of(ast.ClassDef) if any(word in module.text for word in _TEST_CASES) else ():
        for base in cls.bases:
            full = module.resolve(base)
            if full.startswith("torch.testing._internal.") and full.rpartition(".")[2] in _TEST_CASES:
                yield module, base


def _reached(module: Module, node: ast.AST, modules: Sequence[Module]) -> bool:
    """Return whether the function around a node is mentioned anywhere; an unused vendored launcher is not."""
    function = module.function_of(node).rpartition(".")[2]
    if not function or module is modules[0]:
        return True
    return any(function in around.words for around in modules)


def _starts_a_rank(call: ast.Call, modules: Sequence[Module]) -> bool:
    """Return whether the function of a process is that of a rank: it gets a rank, or joins a process group."""
    for module, function in _targets(call, modules):
        if not {"rank", "local_rank", "gpu", "global_rank"}.isdisjoint(parameters_of(function)):
            return True
        if leads_to(module, function, _JOIN, modules):
            return True
    return False


def _targets(call: ast.Call, modules: Sequence[Module]) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """Yield the functions that a process may run, by the last name of what it is given."""
    given = argument_of(call, "target")
    name = dotted(given).rpartition(".")[2] if given is not None else ""
    if name:
        yield from functions_named(modules, name)


def _conditional(module: Module, node: ast.AST) -> bool:
    for around in module.ancestors(node):
        if isinstance(around, ast.Try):
            return True
        if isinstance(around, (ast.If, ast.IfExp)) and "__name__" not in module.excerpt(around.test, 1_000):
            return True
    return False


def _or_runs_alone(module: Module, call: ast.Call) -> bool:
    """Return whether the other arm of the condition calls the same function as rank 0: one process, and no launcher,
    unless the module reads a launcher's variables itself.
    """
    if reads_launcher_rank(module):
        return False
    given = argument_of(call, "fn", 0)
    started = last_name(given) if given is not None else ""
    arms = (around.orelse for around in module.ancestors(call) if isinstance(around, ast.If))
    return any(
        isinstance(node, ast.Call) and bool(started) and last_name(node.func) == started and _is_first(node)
        for arm in arms
        for statement in arm
        for node in descend(statement)
    )


def _is_first(call: ast.Call) -> bool:
    rank = argument_of(call, "rank", 0)
    return isinstance(rank, ast.Constant) and rank.value == 0


def _demands_cuda(module: Module, call: ast.Call) -> bool:
    name = module.resolve(call.func)
    if name == _JOIN:
        backend = argument_of(call, "backend", 0)
        return isinstance(backend, ast.Constant) and isinstance(backend.value, str) and "nccl" in backend.value.lower()
    if name in _MOVES_TO_CUDA:
        return True
    if name == "torch.device" or (isinstance(call.func, ast.Attribute) and call.func.attr == "to"):
        return bool(call.args) and _names_cuda(call.args[0])
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda"


def _names_cuda(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0] if isinstance(node.values[0], ast.Constant) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")


def tests_for_gpu(module: Module, node: ast.AST) -> bool:
    """Return whether a node stands under a condition that tests for a GPU, or under a ``try``."""
    for around in module.ancestors(node):
        if isinstance(around, (ast.If, ast.IfExp, ast.While)):
            test = ast.unparse(around.test).lower()
            if any(word in test for word in ("cuda", "gpu", "device", "backend", "nccl", "accelerator")):
                return True
        if isinstance(around, ast.Try):
            return True
    return False
