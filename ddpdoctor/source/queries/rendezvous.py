"""How ranks find each other: variables of the environment, addresses in the code, and arguments of old launchers."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

from ddpdoctor.files import regex
from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.values import ALL_RANKS, constant
from ddpdoctor.source.projection import Projection, project
from ddpdoctor.source.queries.job_kind import framework, initialisations, may_spawn
from ddpdoctor.source.script.launch_facts import declared_options, launcher_rank_reads, reads_launcher_rank
from ddpdoctor.source.script.module import Module, argument_of
from ddpdoctor.source.script.script import (
    Script,
    asks_for_old_torch,
    calls_any,
    exports,
    is_started_by_old_launcher,
    uses_any,
    uses_part,
)
from ddpdoctor.source.torch_model.recorded_calls import SET_VARIABLE
from ddpdoctor.source.vocabulary import LAUNCHER_VARIABLES, LOCAL_RANK_VARIABLES

LOCAL_RANK_OPTIONS = frozenset({"--local_rank", "--local-rank"})
_ADDRESS = frozenset({"MASTER_ADDR", "MASTER_PORT"})
_NAMES_THIS_MACHINE = regex(r"localhost$|127\.|::1$|0\.0\.0\.0$")
_FIXED = _ADDRESS | {"WORLD_SIZE", "RANK"}


Legacy: TypeAlias = Literal["argument", "required", "refused", "refused later", "text", "module"]
"""The local rank is read from the command line, has to stand there, is refused as the project's launcher writes it (in
the torch that it asks for, or from 2.0 on), is read as text, or the old launcher itself is called."""


def legacy_launches(script: Script) -> Iterator[tuple[Location, Legacy]]:
    """Yield options of the launcher before torchrun without the environment beside them, and calls of that launcher."""
    if framework(script):
        return
    for module in script.modules:
        for entry in module.imports:
            if f"{entry.module}.{entry.name}".startswith("torch.distributed.launch."):
                yield Location(file=str(module.path), line=entry.line), "module"
    reads = any(
        _is_reached(script, module, node) and not _is_compared(module, node)
        for module in script.modules
        for node in launcher_rank_reads(module, LOCAL_RANK_VARIABLES)
    )
    used, assigned = _is_used(script), _is_assigned(script)
    for module in script.modules:
        for node in _local_rank_options(module):
            if _is_for_old_torch(module, node) or not _is_reached(script, module, node):
                continue
            if used and _is_required(node) and script.spawns_ranks is None:
                yield module.location(node), "required"
            elif used and not reads and script.spawns_ranks is None and not assigned:
                yield module.location(node), "argument"
            elif unknown_to_the_launcher(script) and is_started_by_old_launcher(script):
                form: Legacy = "refused later" if asks_for_old_torch(script) else "refused"
                yield module.location(node), form
            elif used and _is_text(node):
                yield module.location(node), "text"


def _is_compared(module: Module, node: ast.AST) -> bool:
    """Return whether a variable is only tested: ``int(os.environ["LOCAL_RANK"]) == 0`` gives no device its number."""
    around = itertools.takewhile(lambda one: isinstance(one, ast.expr), module.ancestors(node))
    return any(isinstance(one, ast.Compare) for one in around)


def _is_reached(script: Script, module: Module, node: ast.AST) -> bool:
    """Return whether the script comes to a place: another entry, which it takes functions from, has its own options."""
    function = module.body_around(node)
    return module is script.entry or function is module.tree or function in project(script).machine.visited


def _is_for_old_torch(module: Module, node: ast.AST) -> bool:
    """Return whether an option is declared only for the versions of torch that pass it."""
    return any(
        isinstance(around, ast.If) and "version" in ast.unparse(around.test).lower()
        for around in module.ancestors(node)
    )


def required_local_rank(script: Script) -> str:
    """Return the option for the local rank that a script refuses to start without; empty when there is none."""
    required = (
        one
        for module in script.modules
        for one in _local_rank_options(module)
        if _is_required(one) and _is_reached(script, module, one)
    )
    names = (entry.value for one in required for entry in one.args if isinstance(entry, ast.Constant))
    return next((str(name) for name in names if name in LOCAL_RANK_OPTIONS), "")


def unknown_to_the_launcher(script: Script) -> str:
    """Return ``--local_rank`` where a script takes it and not ``--local-rank``, as torch.distributed.launch passes."""
    taken: set[object] = set()
    if calls_any(script, ("parse_known_args",)):
        return ""  # What is unknown to it stays.
    for module in script.modules:
        for node in _local_rank_options(module):
            # A parser that nothing asks refuses nothing.
            if _is_reached(script, module, node):
                taken |= {entry.value for entry in node.args if isinstance(entry, ast.Constant)}
    return "--local_rank" if "--local_rank" in taken and "--local-rank" not in taken else ""


def _is_required(call: ast.Call) -> bool:
    required = argument_of(call, "required")
    return isinstance(required, ast.Constant) and required.value is True


def _local_rank_options(module: Module) -> Iterator[ast.Call]:
    """Yield what declares the option for the local rank: ``add_argument``, or a record of one that is added later."""
    if "--local" not in module.text:
        return
    yield from (call for call in declared_options(module) if _names_option(call.args))
    for call in module.index.of(ast.Call):
        if call.args and isinstance(call.args[0], (ast.List, ast.Tuple)) and _names_option(call.args[0].elts):
            yield call


def _names_option(entries: Iterable[ast.expr]) -> bool:
    return any(isinstance(entry, ast.Constant) and entry.value in LOCAL_RANK_OPTIONS for entry in entries)


def _is_text(call: ast.Call) -> bool:
    default = argument_of(call, "default")
    number = isinstance(default, ast.UnaryOp) or (isinstance(default, ast.Constant) and type(default.value) is int)
    return number and argument_of(call, "type") is None and argument_of(call, "action") is None


def _is_used(script: Script) -> bool:
    attributes = (node.attr for module in script.modules for node in module.index.of(ast.Attribute))
    keys = (getattr(node.slice, "value", None) for module in script.modules for node in module.index.of(ast.Subscript))
    return "local_rank" in attributes or "local_rank" in keys


def _is_assigned(script: Script) -> bool:
    """Return whether an attribute of that name gets another value than what the option says."""
    for module in script.modules:
        for node in module.index.of(ast.Attribute):
            if node.attr == "local_rank" and isinstance(node.ctx, ast.Store):
                around = module.parents.get(node)
                if not (isinstance(around, ast.Assign) and _tells_nothing(script, around.value)):
                    return True
    return False


def _tells_nothing(script: Script, value: ast.expr) -> bool:
    """Return whether a value is a number for a job without ranks, or an option read before.

    ``options.local_rank = args.local_rank``.
    """
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.Name):
        passed = (word for module in script.modules for word in module.index.of(ast.keyword))
        return any(word.arg == value.id and _is_local_rank_of(word.value) for word in passed)
    return _is_local_rank_of(value)


def _is_local_rank_of(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "local_rank"


def fixed_rendezvous(projection: Projection) -> Iterator[tuple[Event, str, str, bool]]:
    """Yield constants that override what the launcher sets, in scripts that take their ranks from a launcher.

    Each with what it is for (``MASTER_PORT``, ``init_method`` or ``world_size``), its value, and whether it works when
    the script is launched as intended.
    """
    script = projection.machine.script
    if may_spawn(script) or framework(script):
        return
    joined = list(initialisations(projection))
    if not joined or any(constant(event.named["world_size"]) == 1 for event in joined if "world_size" in event.named):
        return
    launched = any(_takes_rank_of_launcher(script, event) for event in joined)
    if not launched and not any(reads_launcher_rank(module) for module in script.modules):
        return
    # These launchers hand out ranks and no address: a script has to set one, and may fix it to one machine.
    other = not launched and uses_part(script, ("SLURM_", "OMPI_", "PMI_"))
    seen: set[ast.AST] = set()
    for event in projection.in_course("call"):
        if event.name != SET_VARIABLE or event.node in seen or event.conditions or event.guards:
            continue
        name, value = constant(event.positional[0]), constant(event.positional[1])
        if name in _FIXED and isinstance(value, str) and not _is_tested(event.module, event.node):
            seen.add(event.node)
            if not other or (name == "MASTER_ADDR" and not _NAMES_THIS_MACHINE.match(value)):
                yield event, str(name), value, other
    for event in joined:
        size = event.argument("world_size", 3)
        fixed = constant(size) if size is not None else None
        if type(fixed) is int and fixed > 1 and event.ranks == ALL_RANKS and not event.conditions:
            yield event, "world_size", str(fixed), True
        address = constant(event.named["init_method"]) if "init_method" in event.named else None
        if isinstance(address, str) and address.startswith("tcp://") and not event.conditions and not other:
            yield event, "init_method", address, False


def _takes_rank_of_launcher(script: Script, initialisation: Event) -> bool:
    """Return whether a group takes the rank from the environment, in a script with the old launcher's option.

    It is then started by that launcher or by torchrun, whatever else the script asks the environment for.
    """
    if not initialisation.complete or initialisation.named.keys() & {"rank", "store"} or _sets(script, "RANK"):
        return False
    # Any other address needs the rank beside it, or in it.
    address = initialisation.argument("init_method", 1)
    return (address is None or constant(address) in (..., "env://")) and any(
        any(_local_rank_options(module)) for module in script.modules
    )


def _is_tested(module: Module, node: ast.AST) -> bool:
    """Return whether a test other than that of ``__name__`` stands around a node in its function."""
    tests = (around for around in module.in_function(node) if isinstance(around, (ast.If, ast.Try)))
    return any("__name__" not in ast.unparse(getattr(around, "test", around)) for around in tests)


def missing_environments(projection: Projection) -> Iterator[tuple[Event, tuple[str, ...], bool]]:
    """Yield initialisations, in ranks that the script spawns itself, that read variables which are never set.

    Each with their names, and whether nothing outside of the script can set them.
    """
    script = projection.machine.script
    if script.spawns_ranks is None or framework(script) or _needs_launcher(script.entry):
        return
    if not projection.machine.started:
        return  # The walk took the way of ranks that a launcher has started.
    for event in initialisations(projection):
        if not event.complete or "store" in event.named or len(event.positional) > 1 or event.ranks == 0:
            continue
        address = event.named.get("init_method")
        if address is not None and constant(address) not in (None, "env://"):
            continue
        missing = tuple(
            name
            for name, option in (("RANK", "rank"), ("WORLD_SIZE", "world_size"))
            if option not in event.named and not _sets(script, name)
        )
        places = tuple(name for name in sorted(_ADDRESS) if not _sets(script, name))
        if missing or (places and not exports(script, places[0])):
            yield event, (*places, *missing), bool(missing)


def _needs_launcher(entry: Module) -> bool:
    """Return whether a script cannot start without a launcher's variables, which its processes then inherit."""
    for node in entry.index.of(ast.Subscript) if "environ" in entry.text else ():
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        read = key in LAUNCHER_VARIABLES and isinstance(node.ctx, ast.Load)
        if read and entry.resolve(node.value) == "os.environ" and not entry.function_of(node):
            around = entry.ancestors(node)
            if all(_lets_pass(one) for one in around if isinstance(one, (ast.If, ast.IfExp, ast.Try))):
                return True
    return False


def _lets_pass(around: ast.If | ast.IfExp | ast.Try) -> bool:
    """Return whether a process always runs or fails in a statement: a test of ``__name__``, or handlers that raise."""
    if isinstance(around, ast.Try):
        return all(isinstance(handler.body[-1], ast.Raise) for handler in around.handlers)
    return "__name__" in ast.unparse(around.test)


def _sets(script: Script, name: str) -> bool:
    """Return whether a variable is named anywhere in the code, so that it may be set."""
    return uses_any(script, (name,))
