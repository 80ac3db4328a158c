"""What ranks report: lines that every rank prints, and numbers of one rank that stand for the job's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ddpdoctor.files import regex
from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event, LoopAround, Placed
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    ALL_RANKS,
    NONE,
    RANKS,
    SYNCHRONISED,
    DictValue,
    ExternalObject,
    Instance,
    PerRank,
    Value,
    constant,
    is_varying,
    on_rank,
    options_of,
    parts_of,
    tags_of,
)
from ddpdoctor.source.libraries.lightning import LOG, has_several
from ddpdoctor.source.libraries.python_logging import Screen
from ddpdoctor.source.libraries.rank_attributes import ACCELERATOR
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import function_around
from ddpdoctor.source.queries.job_kind import is_distributed, is_of_one_process, left_in_mode, on_every_rank
from ddpdoctor.source.queries.origins import pairs_of
from ddpdoctor.source.queries.shown_numbers import lost_results
from ddpdoctor.source.queries.training_loops import division, feedings, sampler_division, takes_own_part, where_there
from ddpdoctor.source.ranks.ranks import FIRST_RANKS
from ddpdoctor.source.script.module import Module, argument_of, descend, last_name, made_from
from ddpdoctor.source.torch_model.recorded_calls import PRINT_REPLACED
from ddpdoctor.source.vocabulary import DATA_LOADER

_BARS = ("tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.trange", "tqdm.auto.trange")
# Functions that open a run of a tracker; `aim.Run` and the like are objects.
_TRACKERS = regex(
    r"(wandb\.init|mlflow\.start_run|neptune(\.new)?\.(init|init_run)|comet_ml\.start|clearml\.Task\.init|swanlab\.init)$"
)
_WRITERS = regex(
    r"(tensorboard|tensorboardX)\.(\w+\.)?SummaryWriter$|^comet_ml\.(Offline)?Experiment$|^aim\.Run$|^neptune\.(new\.)?Run$"
)
_RANK_NAMED = regex(r"rank|gpu|device|worker|proc|host|node|pid|world|file=|stderr", re.IGNORECASE)
_OUTPUT = frozenset({"print", "stdout"})
_PRINTS = frozenset(
    # What the standard library and rich print with, and the functions that print a model's table as they return it.
    {"builtins.print", "pprint.pprint", "pprint.pp", "rich.print", "torchinfo.summary", "torchsummary.summary"}
)
_PRINTING_METHODS = {"pprint": "pprint.PrettyPrinter"}
# Of the name of a collective: it brings values of all ranks together.
_REDUCING = regex(r"reduce|gather")
_CURVES = frozenset({"add_scalar", "add_scalars", "log_metric", "log_metrics"})
_REPORTS = _CURVES | {"info", "set_description", "set_postfix"}
_REPORTING = regex(
    r"^(builtins\.print|wandb\.log|logging\.info|mlflow\.log_metrics?|tqdm\.(\w+\.)?tqdm\.write)$|\.info$"
)
# Hooks of Lightning that report on batches to evaluate on.
_EVALUATES = regex(r"(^|[._])(validation|test)_(step|epoch_end|batch_end)$")
_TRAINS = regex(r"(^|[._])(training|train)_(step|epoch_end|batch_end)$")
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit"})


def lines_of_every_rank(projection: Projection) -> Iterator[Event]:
    """Yield prints, log lines, progress bars and trackers that every rank of a job comes to, in order, each once."""
    if not is_distributed(projection):
        return
    found: dict[ast.AST, Event] = {}
    in_arms: dict[ast.AST, int] = {}
    quiet = _loggers_are_quiet(projection)
    screen = None if quiet else Screen(projection.machine, projection.in_course("call"), on_every_rank)
    for event in projection.in_course("call", "object"):
        if event.node in found or not (on_every_rank(event) or _in_all_arms(event, in_arms)):
            continue
        if not _is_output(event) and not (screen is not None and screen.shows(event) and _says_something(event)):
            continue
        if left_in_mode(projection, event) is None and not is_of_one_process(projection, event):
            found[event.node] = event
    if found:
        silenced = _print_is_replaced(projection)
        replaced = min(
            (event.ordinal for event in projection.in_course("call") if event.name == PRINT_REPLACED), default=0
        )
        for event in found.values():
            if event.name != "builtins.print" or not silenced or event.ordinal < replaced:
                yield event


def _in_all_arms(event: Event, reached: dict[ast.AST, int]) -> bool:
    """Return whether the arms of rank tests around a loop or a bar bring every rank to it, one after another.

    ``if rank == 0: train(loader, writer)``, and ``else: train(loader, None)``: each rank shows the bar in it.
    """
    certain = event.guards and not event.undecided and not any(guard.guessed for guard in event.guards)
    if event.in_parent or not certain or not (event.loops or event.name in _BARS):
        return False
    reached[event.node] = reached.get(event.node, 0) | event.ranks
    return reached[event.node] == ALL_RANKS


def _is_output(event: Event) -> bool:
    if event.kind == "object":
        return _WRITERS.search(event.name) is not None and not _depends_on_rank(event)
    if _TRACKERS.search(event.name):
        apart = any(name in event.named and is_varying(event.named[name]) for name in ("group", "mode", "id", "name"))
        return "group" not in event.named and "mode" not in event.named and event.complete and not apart
    if event.name in _BARS:
        return event.complete and not any(_differs(event, name) for name in ("disable", "position"))
    printer = event.receiver.name if isinstance(event.receiver, ExternalObject) else ""
    prints = event.name in _PRINTS or printer == _PRINTING_METHODS.get(event.name)
    return bool(event.positional) and prints and _says_something(event)


def _says_something(event: Event) -> bool:
    """Return whether a line has nothing of the rank; a fixed text stands in a loop or where every run comes to it."""
    if not event.loops and event.undecided and all(constant(value) is not ... for value in event.positional):
        return False  # "debug mode": once, and hardly ever.
    if any(isinstance(value, PerRank) for value in event.positional):
        return False
    text = event.module.excerpt(event.node, 1_000)
    return not _RANK_NAMED.search(text) and not _reports_failure(event.module, event.node)


def _differs(event: Event, option: str) -> bool:
    """Return whether an option of a progress bar may be another one on some ranks."""
    value = event.named.get(option)
    return value is not None and (is_varying(value) or constant(value) in (..., True))


def _depends_on_rank(event: Event) -> bool:
    """Return whether an argument differs by rank; a directory named by the clock or the settings does not."""
    given = (*event.positional, *event.named.values())
    return not event.complete or any(isinstance(value, PerRank) for value in given)


def _reports_failure(module: Module, node: ast.AST) -> bool:
    """Return whether a node stands in an ``except``, or in a block that leaves the program."""
    inner = node
    for around in module.ancestors(node):
        if isinstance(around, ast.ExceptHandler):
            return True
        if isinstance(around, ast.If) and any(
            inner in arm and _leaves_program(module, arm[-1]) for arm in (around.body, around.orelse)
        ):
            return True
        inner = around
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
    return False


def _leaves_program(module: Module, statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and (module.resolve(call.func) or ast.unparse(call.func)) in _EXITS


def _print_is_replaced(projection: Projection) -> bool:
    """Return whether a function that replaces ``print`` is called, or a module does it."""
    machine = projection.machine
    for module in machine.script.modules:
        stored: list[ast.AST] = [node for node in module.index.of(ast.FunctionDef) if node.name == "print"]
        stored += [node for node in module.index.of(ast.Name) if node.id in _OUTPUT and _is_stored(node)]
        stored += [
            node
            for node in module.index.of(ast.Attribute)
            if node.attr == "redirect_stdout" or (node.attr in _OUTPUT and _is_stored(node))
        ]
        for node in stored:
            around = [one for one in module.ancestors(node) if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
            if not around or any(one in machine.visited for one in around):
                return True
    return False


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def local_metrics(projection: Projection) -> Iterator[Event]:
    """Yield reports of values that come from a rank's own batches and were not reduced.

    They are those of the first rank, of the job or of a node (in a job that reduces something only summaries after a
    pass), and those of every rank that do not name it, where the batches are of an evaluation.
    """
    if not is_distributed(projection):
        return
    reducing = [event for event in projection.in_course("collective") if _reduces_metric(event)]
    # What a rank gathers alone hangs: it is not said that it was not gathered as well.
    gathered = SYNCHRONISED.tags if any(event.ranks in FIRST_RANKS for event in reducing) else frozenset()
    # What was reduced in vain is no news, nor is it right to say that nothing reduces it.
    in_vain = {tag for lost in lost_results(projection) for tag in tags_of(lost.collective.positional[0])}
    silenced, quiet_loggers = _print_is_replaced(projection), _loggers_are_quiet(projection)
    training = {feeding.loader.ordinal for feeding in feedings(projection)}
    seen: set[ast.AST] = set()
    for event in projection.in_course("call"):
        if event.node in seen or not _is_report(event) or _warns(event):
            continue
        given = [_there(value, event.ranks) for value in (*event.positional, *event.named.values())]
        parts = (part for value in given for part in (parts_of(value) if isinstance(value, DictValue) else (value,)))
        said = [
            one
            for one in parts
            if is_local(one)
            and not (tags_of(one) & gathered or _may_be_agreed(projection, one))
            and not any(tag in in_vain for tag in tags_of(one) if tag[0] == "batch")
        ]
        if not said:
            continue
        in_pass = any(_is_over_batches(loop, said) for loop in event.loops)
        if event.ranks in FIRST_RANKS or _is_of_first_rank(event):
            of_these = [one for one in reducing if _may_reduce(one, said)]
            kept = event.name in _CURVES or event.name.endswith(".log") or event.name == "log"
            found = not (in_pass and reducing) or (kept and not _shares_pass(event, of_these, said))
            found = found and not all(
                _is_of_shared_batch(projection, event.loops, one) if in_pass else is_of_whole_set(projection, one)
                for one in said
            )
        else:
            alone = (silenced and event.name == "builtins.print") or (quiet_loggers and _is_log_line(event))
            named = _RANK_NAMED.search(event.module.excerpt(event.node, 1_000))
            found = not in_pass and (alone or on_every_rank(event)) and named is None
            found = found and (
                any(_is_of_shard(projection, value, training) for value in said)
                or (
                    quiet_loggers
                    and _is_log_line(event)
                    and not reducing
                    and not all(is_of_whole_set(projection, one) for one in said)
                )
            )
        if found and not communicates(projection, event):
            seen.add(event.node)
            yield event


def reported(projection: Projection, event: Event) -> tuple[Location, tuple[str, ...]]:
    """Return where a report is made, and of what values of the rank's own batches.

    Of a function that reports what it is given it is the call of that, through however many of them.
    """
    module, node, location = event.module, event.node, event.location
    parts = [part for part in _shown(node) if _is_own(projection, event, module, part)]
    for caller in event.chain[1:]:
        function = function_around(module, node)
        given = [one.arg for one in descend(getattr(function, "args", function)) if isinstance(one, ast.arg)]
        names = {one.id for part in parts for one in descend(part) if isinstance(one, ast.Name)}
        if not names or not names <= set(given) or not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        modules = (one for one in projection.machine.script.modules if str(one.path).endswith(caller.file))
        calls = ((one, call) for one in modules for call in one.calls_by_name.get(function.name, ()))
        found = next((one for one in calls if one[1].lineno == caller.line), None)
        location = Location(file=caller.file, line=caller.line, function=caller.function)
        if found is None:
            break
        module, node = found
        offset = given[:1] in (["self"], ["cls"]) and isinstance(node.func, ast.Attribute)
        arguments = (argument_of(node, name, given.index(name) - offset) for name in names)
        shown = (part for one in arguments if one is not None for part in _shown_in([one]))
        parts = [part for part in shown if _is_own(projection, event, module, part)]
    return location, tuple(dict.fromkeys(ast.unparse(part) for part in parts))


def _is_own(projection: Projection, event: Event, module: Module, part: ast.expr) -> bool:
    """Return whether a variable in an expression held something of the rank's own batches, and not only a loop's
    counter or key.
    """
    store, loops = projection.machine.store, (one for one in module.ancestors(part) if isinstance(one, ast.For))
    counted = [
        one.target.elts[0]
        for one in loops
        if isinstance(one.target, ast.Tuple)
        and isinstance(one.iter, ast.Call)
        and last_name(one.iter.func) in ("enumerate", "items")
    ]
    keys = {last_name(one) for one in counted}
    for node in descend(part):
        if isinstance(node, ast.Name) and node.id not in keys:
            held = (store.get(scope, node.id) for scope in reversed(event.scopes))
            if any(map(is_local, options_of(next((one for one in held if one is not None), NONE)))):
                return True
    return False


def _shown(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a call is given, of texts what they are made of."""
    return _shown_in([*node.args, *(one.value for one in node.keywords)] if isinstance(node, ast.Call) else [])


def _shown_in(given: list[ast.expr]) -> Iterator[ast.expr]:
    while given:
        one = given.pop(0)
        if isinstance(one, ast.JoinedStr):
            given[:0] = [part.value for part in one.values if isinstance(part, ast.FormattedValue)]
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) and isinstance(one.left, ast.Constant):
            given[:0] = one.right.elts if isinstance(one.right, ast.Tuple) else [one.right]
        elif isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add) and _is_text(one):
            given[:0] = [one.left, one.right]
        elif isinstance(one, ast.Dict):
            given[:0] = one.values
        elif isinstance(one, ast.Call) and last_name(one.func) in ("format", "str", "float", "round", "item"):
            given[:0] = one.args or ([one.func.value] if isinstance(one.func, ast.Attribute) else [])
        elif not isinstance(one, ast.Constant):
            yield one


def _is_text(sum_: ast.BinOp) -> bool:
    """Return whether a sum has a text written in it, so that all of it is one."""
    parts = (sum_.left, sum_.right)
    return any(
        isinstance(one, ast.JoinedStr)
        or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        or (isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add) and _is_text(one))
        for one in parts
    )


def _there(value: Value, ranks: int) -> Value:
    """Return what a value is on the ranks that report it, where it is one and the same on them."""
    lanes = [on_rank(value, rank) for rank in RANKS if ranks >> rank & 1]
    return lanes[0] if lanes and all(lane == lanes[0] for lane in lanes) else value


def _is_of_first_rank(event: Event) -> bool:
    """Return whether all ranks make a call that does something on the first one alone."""
    receiver = event.receiver
    accelerates = isinstance(receiver, ExternalObject) and receiver.name == ACCELERATOR
    return accelerates and event.name in ("log", "print")


def _may_reduce(collective: Event, values: Sequence[Value]) -> bool:
    """Return whether a collective may reduce one of some values: unless what it reduces is of other batches."""
    reduced = {number for value in collective.positional for kind, number in tags_of(value) if kind == "batch"}
    return not reduced or any(("batch", number) in tags_of(value) for value in values for number in reduced)


def own_choices(projection: Projection) -> Iterator[tuple[Event, Placed | None]]:
    """Yield the checkpoints that one rank of a job saves or not by a value of its own batches, each once, with where
    that value, and nothing else, is compared with the best so far.

    Of a loader from whose batches anything is reduced the value may be the reduced one, by a way that was not followed.
    """
    if not is_distributed(projection):
        return
    reducing = filter(_reduces_metric, projection.in_course("collective"))
    tags = (tag for event in reducing for value in event.positional for tag in tags_of(value))
    reduced = {number for kind, number in tags if kind == "batch"}
    seen: set[ast.AST] = set()
    for event in projection.in_course("save"):
        if event.node in seen or event.ranks not in FIRST_RANKS or event.in_parent:
            continue
        for value in event.deciding:
            loaders = {number for kind, number in tags_of(value) if kind == "batch"}
            in_doubt = loaders & reduced or _may_be_agreed(projection, value)
            if is_local(value) and loaders and not in_doubt and not is_of_whole_set(projection, value):
                seen.add(event.node)
                tests = [(guard.module, guard.node) for guard in event.guards] + list(event.undecided)
                found = ((module, _compared_with_best(module, test)) for module, test in tests)
                best = {node: Placed(node, module) for module, node in found if node is not None}
                alone = len(best) == 1 and all(map(is_local, event.deciding))
                yield event, next(iter(best.values())) if alone else None
                break


def _compared_with_best(module: Module, test: ast.AST) -> ast.Compare | None:
    """Return where a condition compares a value with the best so far, which then becomes that value."""
    body = module.body_around(test)
    kept = [
        (ast.unparse(target), value)
        for statement in module.index.within(body, ast.Assign)
        for target, value in pairs_of(statement)
    ]
    for node in made_from(test, body):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], _ORDERS):
            sides = [_variables(side) for side in (node.left, node.comparators[0])]
            # A margin may stand beside the best, and `item()` behind the value.
            if any(
                target in best and own & _variables(value)
                for best, own in (sides, sides[::-1])
                for target, value in kept
                if target not in own
            ):
                return node
    return None


def _variables(expression: ast.expr) -> set[str]:
    """Return the variables, attributes and entries that an expression reads."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    return {ast.unparse(node) for node in descend(expression) if isinstance(node, kinds)}


def _may_be_agreed(projection: Projection, value: Value) -> bool:
    return any(kind == "batch" and number in projection.machine.agreed_items for kind, number in tags_of(value))


def _loggers_are_quiet(projection: Projection) -> bool:
    """Return whether ranks but the first log nothing: their loggers have another level, or no handlers."""
    for event in projection.in_course("call"):
        by_level = event.name in ("setLevel", "logging.basicConfig", "logging.disable", "addHandler")
        levels = (*event.positional, *(value for name, value in event.named.items() if name == "level"))
        if by_level and (
            any(isinstance(level, PerRank) for level in levels) or (event.guards and event.ranks != ALL_RANKS)
        ):
            return True
    return False


def _is_log_line(event: Event) -> bool:
    return event.name in ("info", "logging.info") or event.name.endswith(".info")


def _reduces_metric(event: Event) -> bool:
    """Return whether a collective brings values of all ranks together that are no gradients."""
    return _REDUCING.search(event.name) is not None and ".grad" not in event.module.excerpt(event.node, 1_000)


def _shares_pass(event: Event, others: Sequence[Event], values: Sequence[Value]) -> bool:
    """Return whether one of some events happens in the same loop over the batches of some values as an event."""
    loops = {loop.node for loop in event.loops if _is_over_batches(loop, values)}
    return any(loop.node in loops for other in others for loop in other.loops)


def unreduced_logs(projection: Projection) -> Iterator[Event]:
    """Yield what modules of Lightning log without ``sync_dist`` in a job of several ranks, that of evaluations first.

    What only the progress bar shows of a training is a sign of life.
    """
    machine = projection.machine
    of_training: list[Event] = []
    seen: set[ast.AST] = set()
    for event in projection.in_course("call"):
        if event.name != LOG or event.node in seen or not isinstance(event.receiver, Instance):
            continue
        trainer = machine.object(machine.store.get(event.receiver.number, "trainer") or NONE)
        evaluates = any(_EVALUATES.search(frame.function) for frame in event.chain)
        trains = any(_TRAINS.search(frame.function) for frame in event.chain)
        kept = constant(event.named.get("logger", NONE)) is not False
        value = event.positional[0]
        parts = parts_of(value) if isinstance(value, DictValue) else (value,)
        if trainer is None or not has_several(machine, trainer) or not any(map(is_local, parts)):
            continue
        seen.add(event.node)
        if evaluates:
            yield event
        elif trains and kept:
            of_training.append(event)
    yield from of_training


def _is_report(event: Event) -> bool:
    if event.name in _REPORTS or _REPORTING.search(event.name) is not None:
        return True
    return event.name in ("log", "print") and event.receiver is not None


def _warns(event: Event) -> bool:
    """Return whether a value is reported because it is beyond a bound: ``if torch.min(wave) < -1.0: print(…)``."""
    told = {ast.unparse(node) for node in descend(event.node) if isinstance(node, (ast.Call, ast.Name))}
    return any(
        module is event.module
        and isinstance(test, ast.Compare)
        and isinstance(test.ops[0], _ORDERS)
        and isinstance(getattr(test.comparators[0], "operand", test.comparators[0]), ast.Constant)
        and ast.unparse(test.left) in told
        for module, test in event.undecided
    )


def _is_of_shard(projection: Projection, value: Value, training: set[int]) -> bool:
    """Return whether a value comes from a loader that divides a data set to evaluate on between the ranks."""
    machine = projection.machine
    loaders = {number for kind, number in tags_of(value) if kind == "batch"} - training
    made = [machine.events.get(number) for number in loaders]
    return bool(made) and all(one is not None and _divides(machine, one) for one in made)


def _divides(machine: Machine, loader: Event) -> bool:
    divided = division(machine, loader)
    return divided == "sharded" or (
        divided == "unknown" and loader.complete and takes_own_part(machine, loader.argument("dataset", 0) or NONE)
    )


def communicates(projection: Projection, event: Event) -> bool:
    """Return whether ranks communicate for the arguments of a call, which may then hold the part of all ranks."""
    place = event.location
    return any(
        frame.file == place.file and place.line <= frame.line <= place.end_line
        for collective in projection.in_course("collective")
        for frame in collective.chain
    )


def is_local(value: Value) -> bool:
    """Return whether a value comes from a rank's own batches and was not reduced since."""
    return is_varying(value) and any(kind in ("batch", "ddp") for kind, _ in tags_of(value))


def is_of_whole_set(projection: Projection, value: Value) -> bool:
    """Return whether a value comes from batches of a loader that gives every rank the whole of one data set.

    Names of another loop's batch are used again, and leave their loader among the origins.
    """
    numbers = {number for kind, number in tags_of(value) if kind == "batch"}
    return any(_gives_all(projection, projection.machine.events.get(number)) for number in numbers)


def _is_of_shared_batch(projection: Projection, loops: Sequence[LoopAround], value: Value) -> bool:
    """Return whether a value comes from a batch that all ranks have which go over its loader, in the innermost pass."""
    numbers = {number for kind, number in tags_of(value) if kind == "batch"}
    for loop in reversed(loops):
        over = {number for kind, number in tags_of(loop.iterable) if kind == "loader"}
        over.update(one.number for one in options_of(loop.iterable) if isinstance(one, ExternalObject))
        if over & numbers:
            loaders = [projection.machine.events.get(number) for number in over & numbers]
            return all(_gives_all(projection, one) and not _may_differ(one) for one in loaders)
    return False


def _may_differ(loader: Event | None) -> bool:
    """Return whether batches of a loader that gives every rank the whole may be other samples on each: not where one
    rank alone has the data, nor where they come in the order of the data.
    """
    if loader is None or loader.ranks in FIRST_RANKS:
        return loader is None
    data = loader.argument("dataset", 0) or NONE
    orders = [
        value for name, place in (("sampler", 3), ("batch_sampler", 4)) if (value := loader.argument(name, place))
    ]
    in_order = all(one == NONE or getattr(one, "name", "").endswith("SequentialSampler") for one in orders)
    alone = isinstance(data, PerRank) and where_there(data) != data
    return not (alone or (in_order and constant(loader.argument("shuffle", 2) or NONE) is not True))


def _gives_all(projection: Projection, loader: Event | None) -> bool:
    if loader is None or not loader.complete or loader.ordinal in projection.machine.prepared:
        return False
    samplers = (loader.argument("sampler", 3), loader.argument("batch_sampler", 4))
    data = where_there(loader.argument("dataset", 0) or NONE)
    whole = all(sampler is None or sampler_division(projection.machine, sampler) == "whole" for sampler in samplers)
    return whole and data != NONE and not is_varying(data) and not takes_own_part(projection.machine, data)


def _is_over_batches(loop: LoopAround, values: Sequence[Value]) -> bool:
    """Return whether a loop goes over the batches that some values come from; not that over what was made of them.

    Of a loader that is not known, or a value of which no batch is known, it may be that one.
    """
    numbers = {number for value in values for kind, number in tags_of(value) if kind == "batch"}
    return any(
        (isinstance(option, ExternalObject) and (option.name != DATA_LOADER or not numbers or option.number in numbers))
        or any(kind == "loader" and (not numbers or number in numbers) for kind, number in tags_of(option))
        for option in options_of(loop.iterable)
    )
