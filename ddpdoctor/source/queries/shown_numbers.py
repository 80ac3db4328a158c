"""What becomes of a number that the ranks reduce: whether it is only displayed or kept, or nothing gets it.

The other question about such a reduction is how often it runs: a condition that no turn of a loop can change does not
make it rarer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from typing import Literal

import msgspec

from ddpdoctor.source.events import Condition, Event, Placed
from ddpdoctor.source.interpreter.values import is_varying, tags_of
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import function_around, mentions, nodes_of
from ddpdoctor.source.queries.origins import given_for, pairs_of
from ddpdoctor.source.ranks.rank_local_values import OWN_KINDS
from ddpdoctor.source.ranks.ranks import rank_names, size_names
from ddpdoctor.source.script.module import (
    Module,
    all_once,
    argument_of,
    descend,
    functions_named,
    last_name,
    parameters_of,
)
from ddpdoctor.source.script.script import Script

NumberKind = Literal["mean", "sum", "unknown"]
# Methods of a tensor whose result is the same number.
_AS_IT_IS = frozenset({"item", "detach", "cpu", "clone", "float", "double", "to", "cuda", "squeeze", "view", "reshape"})
# Functions that make a tensor or a number of one that they are given.
_MADE_OF = frozenset({"tensor", "as_tensor", "Tensor", "FloatTensor", "float", "full", "stack", "cat"})
_SUMS = frozenset({"sum", "numel", "size", "len", "count_nonzero", "nansum"})
# Functions and methods that keep a number, or a bound in its place.
_BOUNDED = frozenset({"max", "clamp", "clip", "clamp_min"})
_MEANS = frozenset({"mean", "nanmean"})
# In the names of the functions of torch.nn.functional, and of the classes of torch.nn, that give a mean by default.
_LOSSES = ("loss", "entropy", "kl_div")
SHOWS = frozenset(
    {
        *("print", "info", "log", "add_scalar", "add_scalars", "write", "debug", "set_postfix", "log_metric"),
        # Of tqdm's bar, beside set_postfix: StyleSDF and GANgealing show their losses by it.
        *("log_metrics", "set_description"),
    }
)
"""Last names of functions that show a number."""
DEEPEST = 6
"""Assignments that are followed back: further ones were never needed, and cycles end."""


def number_kind(
    modules: Sequence[Module], module: Module, around: ast.AST, node: ast.expr, line: int, depth: int = 0
) -> NumberKind:
    """Return what kind of number an expression is, in a function, before a line."""
    if depth > DEEPEST:
        return "unknown"
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _of_variable(modules, module, around, node, line, depth)
    if isinstance(node, ast.BinOp):
        left = number_kind(modules, module, around, node.left, line, depth + 1)
        right = number_kind(modules, module, around, node.right, line, depth + 1)
        if isinstance(node.op, ast.Div):
            return "mean" if (left, right) == ("sum", "sum") else "unknown"
        return left if right in (left, "unknown") else right if left == "unknown" else "unknown"
    if not isinstance(node, ast.Call):
        return "unknown"
    name = last_name(node.func)
    if isinstance(node.func, ast.Attribute) and name in _AS_IT_IS:
        return number_kind(modules, module, around, node.func.value, line, depth + 1)
    if name in _MADE_OF and node.args:
        given = node.args[-1]
        parts = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]
        kinds = {number_kind(modules, module, around, part, line, depth + 1) for part in parts}
        return kinds.pop() if len(kinds) == 1 else "unknown"
    if name in _BOUNDED:
        held = node.args[0] if isinstance(node.func, ast.Name) and node.args else getattr(node.func, "value", node.func)
        return number_kind(modules, module, around, held, line, depth + 1)
    if name in _SUMS:
        return "sum"
    if name in _MEANS or _is_mean_loss(modules, module, node):
        return "mean"
    return _of_results(modules, name, depth)


def _of_results(modules: Sequence[Module], name: str, depth: int) -> NumberKind:
    """Return what kind of number the only function of a name returns."""
    kinds = {
        number_kind(modules, home, function, one.value, one.lineno, depth + 1)
        for home, function in functions_named(modules, name)
        for one in nodes_of(function)
        if isinstance(one, ast.Return) and one.value is not None
    }
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _of_variable(
    modules: Sequence[Module], module: Module, around: ast.AST, node: ast.expr, line: int, depth: int
) -> NumberKind:
    text = ast.unparse(node)
    if _is_counted_up(module, around, text, line):
        return "sum"
    assigned = [pair for one in module.index.within(around, ast.Assign) for pair in pairs_of(one) if one.lineno <= line]
    values = [value for target, value in assigned if ast.unparse(target) == text]
    if values:
        return number_kind(modules, module, around, values[-1], values[-1].lineno - 1, depth + 1)
    if isinstance(around, ast.FunctionDef):
        kinds = {
            number_kind(modules, caller, caller.body_around(call), given, call.lineno, depth + 1)
            for caller, call, given in given_for(modules, around, text)
        }
        if kinds:
            return kinds.pop() if len(kinds) == 1 else "unknown"
    return _of_attribute(modules, module, around, node, depth) if isinstance(node, ast.Attribute) else "unknown"


def _is_counted_up(module: Module, around: ast.AST, text: str, line: int) -> bool:
    """Return whether a variable is added to before a line, or numbers the turns of a loop."""
    numbers = (
        one.target.elts[0] if isinstance(one.target, ast.Tuple) else one.target
        for one in module.index.within(around, ast.For)
        if isinstance(one.iter, ast.Call) and last_name(one.iter.func) in ("enumerate", "range")
    )
    added = (one for one in module.index.within(around, ast.AugAssign) if one.lineno <= line)
    return any(_adds(one, text) for one in added) or any(ast.unparse(one) == text for one in numbers)


def _of_attribute(
    modules: Sequence[Module], module: Module, around: ast.AST, node: ast.Attribute, depth: int
) -> NumberKind:
    """Return what kind of number an attribute is that the methods of a class add to, or that a property computes."""
    classes = [(home, cls) for home in modules for cls in home.index.of(ast.ClassDef)]
    if ast.unparse(node.value) == "self":
        classes = [(module, one) for one in module.ancestors(around) if isinstance(one, ast.ClassDef)][:1]
    name = f"self.{node.attr}"
    adding = [cls for home, cls in classes if any(_adds(one, name) for one in home.index.within(cls, ast.AugAssign))]
    adding += [cls for home, cls in classes if any(_adds(one, name) for one in home.index.within(cls, ast.Assign))]
    return "sum" if len(set(adding)) == 1 else _of_results(modules, node.attr, depth)


def _adds(statement: ast.Assign | ast.AugAssign, name: str) -> bool:
    """Return whether a statement adds to a variable."""
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add) and ast.unparse(statement.target) == name
    value = statement.value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    added = name in (ast.unparse(value.left), ast.unparse(value.right))
    return added and any(ast.unparse(target) == name for target in statement.targets)


def _is_mean_loss(modules: Sequence[Module], module: Module, call: ast.Call) -> bool:
    """Return whether a call is a loss of torch that takes the mean: of torch.nn.functional, or of an object."""
    full = module.resolve(call.func)
    if full.startswith("torch.nn.functional."):
        return _is_loss(full, "torch.nn.functional.") and not _other_reduction(call)
    name = last_name(call.func)
    made = [
        (one, value)
        for one in modules
        for statement in one.index.of(ast.Assign)
        if any(last_name(target) == name for target in statement.targets)
        for value in _calls_in(statement.value)
    ]
    own = [(one, value) for one, value in made if one is module]  # Other modules may use the name for another loss.
    made = own or made
    losses = [value for one, value in made if _is_loss(one.resolve(value.func), "torch.nn.")]
    return bool(losses) and not any(map(_other_reduction, losses))


def _calls_in(value: ast.expr) -> Iterator[ast.Call]:
    """Yield a call, and what its result is made of by methods: ``nn.CrossEntropyLoss().cuda()``."""
    while isinstance(value, ast.Call):
        yield value
        value = value.func.value if isinstance(value.func, ast.Attribute) else value.func


def _is_loss(full: str, place: str) -> bool:
    return full.startswith(place) and any(word in full.rpartition(".")[2].lower() for word in _LOSSES)


def _other_reduction(call: ast.Call) -> bool:
    return any(
        entry.arg in ("reduction", "reduce", "size_average")
        and not (isinstance(entry.value, ast.Constant) and entry.value.value in ("mean", True))
        for entry in call.keywords
    )


def followers(nodes: Sequence[ast.AST], name: str) -> set[str]:
    """Return a variable, those that are assigned from it, and the meters that it alone is handed to."""
    names = {name}
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    for _ in range(3):
        known = len(names)
        names.update(meter for node in nodes if (meter := _meter_of(node, names)))
        for node in assignments:
            if mentions(node.value, names):
                targets = [target for target in node.targets if isinstance(target, (ast.Name, ast.Attribute))]
                names.update(ast.unparse(target) for target in targets)
        if len(names) == known:
            break
    return names


def _meter_of(node: ast.AST, names: set[str]) -> str:
    """Return the meter of ``meter.update(loss.item())``; one that gets a number of samples, too, may divide by it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "update":
        return ""
    if len(node.args) != 1 or node.keywords or not is_number_of(node.args[0], names):
        return ""
    return ast.unparse(node.func.value)


def is_number_of(node: ast.expr, names: Set[str]) -> bool:
    """Return whether an expression is one of some variables, or its number."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _AS_IT_IS:
        node = node.func.value
    return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names


# Methods by which a list, a dictionary or a meter takes a number in.
_KEEPS = frozenset({"update", "append", "add", "extend", "setdefault"})
# Builtins and methods of builtin types that give a number another form.
_TURNS = frozenset(
    {
        *("bool", "dict", "float", "format", "int", "len", "list", "max", "min", "range", "round", "sorted", "str"),
        *("sum", "tuple", "zip", "enumerate", "items", "keys", "values", "join", "dumps"),
    }
)
_LIBRARIES = ("torch.", "numpy.", "math.", "json.")
# A number that is logged passes a helper, its caller and a function that shows it; cycles end here.
_DEEPEST = 5

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_only_shown(script: Script, event: Event) -> bool:
    """Return whether no condition, backward, attribute, state or unknown call gets what a collective has reduced."""
    places = list(call_chain(script, event))
    if event.name == "gather":
        # Of torch it fills a list; what a framework's returns is the number.
        of_torch = event.module.resolve(getattr(event.node, "func", event.node)).startswith("torch.")
        return not of_torch and _follow(script, places, set(), 0)
    arguments = getattr(event.node, "args", [])
    if not arguments or not isinstance(arguments[0], ast.Name):
        return False
    return _follow(script, places, {arguments[0].id}, 0)


def call_chain(script: Script, event: Event) -> Iterator[Placed]:
    """Yield a collective's call, then the call that leads to it in each caller, as far as each is the only one."""
    yield Placed(event.node, event.module)
    by_file = {str(module.path): module for module in script.modules}
    for inner, frame in zip(event.chain, event.chain[1:], strict=False):
        module, name = by_file.get(frame.file), inner.function.rpartition(".")[2]
        calls = [] if module is None else module.calls_by_name.get(name, ())
        on_line = [call for call in calls if call.lineno <= frame.line <= (call.end_lineno or call.lineno)]
        if module is None or len(on_line) != 1:
            return
        yield Placed(on_line[0], module)


def _follow(script: Script, places: Sequence[Placed], names: set[str], depth: int) -> bool:
    """Follow the number through the function around the first place; ``names`` hold it there beside the node."""
    if not places or depth > _DEEPEST:
        return False
    module, node = places[0].module, places[0].node
    function = function_around(module, node)
    found = _Uses(script, module, function, node, set(names), depth)
    if not found.harmless():
        return False
    given = _given_by_reference(function, node, names) if depth == 0 and names else None
    if given is not None and len(places) > 1:
        outer = _argument(function, places[1].node, given)
        if outer is None:
            return False
        return _follow(script, places[1:], outer, depth + 1)
    return not found.returned or _follow(script, places[1:], set(), depth + 1)


def _given_by_reference(function: ast.AST, node: ast.AST, names: set[str]) -> str | None:
    """Return the parameter that an in-place collective writes to, which is the caller's own tensor."""
    if not isinstance(function, _Function):
        return None
    parameters = parameters_of(function)
    before = [one for one in nodes_of(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    made_here = {one.id for one in before if one.lineno <= getattr(node, "lineno", 0)}
    return next((name for name in names if name in parameters and name not in made_here), None)


def _argument(function: ast.AST, call: ast.AST, parameter: str) -> set[str] | None:
    """Return the variables of the caller behind a parameter: none for a new tensor, None where it is not known."""
    if not isinstance(function, _Function) or not isinstance(call, ast.Call):
        return None
    names = parameters_of(function)
    place = names.index(parameter) - (names[0] in ("self", "cls")) if parameter in names else -1
    given = argument_of(call, parameter, place)
    while isinstance(given, ast.Attribute) and given.attr == "data":
        given = given.value
    if given is None or isinstance(given, ast.Starred):
        return None
    if isinstance(given, ast.Call):
        return set()
    return {ast.unparse(given)} if isinstance(given, (ast.Name, ast.Attribute)) else None


class _Uses:
    """What one function does with a number that an expression or some variables of it hold."""

    def __init__(
        self, script: Script, module: Module, function: ast.AST, node: ast.AST | None, names: set[str], depth: int
    ) -> None:
        self._script, self._module, self._function = script, module, function
        self._node, self._names, self._depth = node, names, depth
        self._nodes = list(nodes_of(function))
        self._line = getattr(node, "lineno", 0)
        # The call holds its result only where that is what was reduced; what a comprehension goes over, its variables.
        self._held: set[ast.AST] = set() if node is None or names else {node}
        self.returned = False
        """The function returns the number, or something that holds it."""

    def harmless(self) -> bool:
        """Return whether every use shows or keeps the number."""
        self._spread()
        for node in self._nodes:
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
                self.returned |= node.value is not None and self._holds(node.value)
        return not any(map(self._is_use, self._nodes))

    def _holds(self, node: ast.AST) -> bool:
        if mentions(node, self._names):
            return True
        return any(one in self._held for one in descend(node))

    def _spread(self) -> None:
        """Take in the variables and containers that get the number."""
        known = -1
        # What stands before the reduction holds its number in the next turn at most, and names are used again.
        later = [node for node in self._nodes if getattr(node, "lineno", self._line) >= self._line]
        while known != len(self._names) + len(self._held):
            known = len(self._names) + len(self._held)
            for node in later:
                self._names.update(self._receivers(node))
                if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                    self._held.update(self._comprehended(node))

    def _receivers(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            if node.value is not None and self._holds(node.value):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield from _targets(target)
        elif isinstance(node, ast.For):
            if self._holds(node.iter):
                yield from _targets(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPS:
            given = (*node.args, *(entry.value for entry in node.keywords))
            if isinstance(node.func.value, ast.Name) and any(map(self._holds, given)):
                yield node.func.value.id

    def _comprehended(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> Iterator[ast.AST]:
        for part in node.generators:
            if self._holds(part.iter):
                bound = set(_targets(part.target))
                yield from (one for one in descend(node) if isinstance(one, ast.Name) and one.id in bound)

    def _is_use(self, node: ast.AST) -> bool:
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            return self._holds(node.test)
        if isinstance(node, ast.Raise):
            return node.exc is not None and self._holds(node.exc)
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            kept = node.value if isinstance(node, ast.Subscript) else node
            return isinstance(kept, ast.Attribute) and ast.unparse(kept) in self._names
        if not isinstance(node, ast.Call) or node is self._node or node.lineno < self._line:
            return False
        given = (*node.args, *(entry.value for entry in node.keywords))
        if isinstance(node.func, ast.Attribute) and self._holds(node.func.value):
            return node.func.attr == "backward"
        if not any(map(self._holds, given)):
            return False
        name = last_name(node.func)
        if name in SHOWS | _KEEPS | _TURNS:
            return False
        # What a function changes in place by a number, as the gradients that it clips, the number decides.
        if self._module.resolve(node.func).startswith(_LIBRARIES) and not name.endswith("_"):
            return False
        return not self._is_harmless_inside(node, name)

    def _is_harmless_inside(self, call: ast.Call, name: str) -> bool:
        """Return whether the only function of this name in the project does nothing else with what it is given."""
        homes = functions_named(self._script.modules, name)
        if len(homes) != 1 or self._depth >= _DEEPEST:
            return False
        module, function = homes[0]
        parameters = parameters_of(function)
        if isinstance(call.func, ast.Attribute) and parameters and parameters[0] in ("self", "cls"):
            parameters = parameters[1:]
        places = dict(enumerate(parameters))
        taken = [places.get(place, "") for place, given in enumerate(call.args) if self._holds(given)]
        taken += [entry.arg or "" for entry in call.keywords if self._holds(entry.value)]
        if not all(taken):
            return False
        inside = _Uses(self._script, module, function, None, set(taken), self._depth + 1)
        return inside.harmless() and not inside.returned


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for one in target.elts:
            yield from _targets(one)
    elif isinstance(target, (ast.Starred, ast.Subscript)):
        yield from _targets(target.value)
    elif isinstance(target, (ast.Name, ast.Attribute)):
        yield ast.unparse(target)


# Conditions that no turn of a loop changes.

# Whether there is a process group, and of how many ranks: the same in every turn.
_OF_THE_JOB = ("torch.distributed.is_", "torch.distributed.get_world_size")


def unsettled(script: Script, conditions: Sequence[Condition], loop: ast.AST, *, any_setting: bool) -> list[str]:
    """Return those of some conditions that a turn of a loop may change.

    The number of ranks and whether there is a process group do not change; with ``any_setting``, neither does what is
    set before the loop.
    """
    return [
        module.excerpt(test, 1_000)
        for module, test in conditions
        if not _Settled(script, loop, any_setting).is_settled(module, test, 0)
    ]


class _Settled:
    def __init__(self, script: Script, loop: ast.AST, any_setting: bool) -> None:
        self._script, self._any_setting = script, any_setting
        inside = descend(loop)
        self._stored = {
            last_name(node)
            for node in inside
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
        }
        self._inside = set(map(id, inside))

    def is_settled(self, module: Module, node: ast.AST, depth: int) -> bool:
        if depth > _DEEPEST:
            return False
        if isinstance(node, ast.Constant):
            return True
        if self._any_setting and isinstance(node, ast.Compare) and _is_of_call(module, node):
            return True
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp)):
            return all(
                self.is_settled(module, part, depth)
                for part in ast.iter_child_nodes(node)
                if isinstance(part, ast.expr)
            )
        if isinstance(node, ast.Call):
            return self._call(module, node, depth)
        if isinstance(node, ast.Name):
            return self._name(module, node, depth)
        return isinstance(node, ast.Attribute) and self._attribute(module, node)

    def _call(self, module: Module, node: ast.Call, depth: int) -> bool:
        if module.resolve(node.func).startswith(_OF_THE_JOB):
            return True
        homes = functions_named(self._script.modules, last_name(node.func))
        if node.args or node.keywords or len(homes) != 1:
            return False
        one, function = homes[0]
        parts = [
            part
            for inner in nodes_of(function)
            for part in ([inner.test] if isinstance(inner, (ast.If, ast.IfExp)) else [getattr(inner, "value", None)])
            if isinstance(inner, (ast.If, ast.Return)) and part is not None
        ]
        return bool(parts) and all(self.is_settled(one, part, depth + 1) for part in parts)

    def _name(self, module: Module, node: ast.Name, depth: int) -> bool:
        function = function_around(module, node)
        stores = [
            one
            for one in module.index.within(function, ast.Name)
            if one.id == node.id and isinstance(one.ctx, ast.Store)
        ]
        if len(stores) == 1:
            statement = module.parents[stores[0]]
            return isinstance(statement, ast.Assign) and self.is_settled(module, statement.value, depth + 1)
        if not self._any_setting or any(id(one) in self._inside for one in stores):
            return False
        # A parameter of a helper may be given another value in each turn; one of the loop's own function may not.
        holds_loop = any(id(inner) in self._inside for inner in nodes_of(function))
        return holds_loop and node.id not in self._stored

    def _attribute(self, module: Module, node: ast.Attribute) -> bool:
        """Return whether a setting such as ``args.distributed`` keeps its value: nothing but a start stores it."""
        if not self._any_setting or not isinstance(node.value, (ast.Name, ast.Attribute)):
            return False
        stores = [
            (one, inner)
            for one in self._script.modules
            for inner in one.index.of(ast.Attribute)
            if inner.attr == node.attr and isinstance(inner.ctx, ast.Store)
        ]
        return not any(id(inner) in self._inside or _is_counted(one, inner) for one, inner in stores)


def _is_of_call(module: Module, node: ast.Compare) -> bool:
    """Return whether a test asks if an argument is given (``step is None``), or is one that holds of every count."""
    function = function_around(module, node)
    left, right = node.left, node.comparators[0]
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
        return isinstance(left.right, ast.Constant) and left.right.value == 1
    given = parameters_of(function) if isinstance(function, _Function) else []
    is_none = isinstance(right, ast.Constant) and right.value is None
    return is_none and isinstance(left, ast.Name) and left.id in given


def _is_counted(module: Module, node: ast.Attribute) -> bool:
    """Return whether an attribute is stored in a loop, or computed from itself."""
    around = list(module.ancestors(node))
    return isinstance(around[0], ast.AugAssign) or any(isinstance(one, (ast.For, ast.While)) for one in around)


# Collectives that write into a tensor that nothing looks at, made of a variable that is used afterwards.

_OF_OBJECTS = "broadcast_object_list"
_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast", _OF_OBJECTS})
# Functions and methods of torch that make a new tensor of their argument or object: another `float()` may be the same.
_MAKES = frozenset({"tensor", "clone", "stack", "cat", "mean", "sum", "new_tensor", "full", "item", "float", "int"})
OF_FORM = frozenset({"shape", "size", "numel", "dim", "ndim", "dtype", "device", "element_size", "backward"})
"""Attributes that are there of a tensor before its numbers are."""


class LostResult(msgspec.Struct, frozen=True, eq=False):
    """What a collective has made of a variable, and that nothing gets."""

    collective: Event
    made: Placed
    """The expression that makes the tensor."""
    name: str
    use: Placed
    """Where the variable is used afterwards."""


@all_once
def lost_results(projection: Projection) -> Iterator[LostResult]:
    """Collectives in place whose tensor serves for nothing else, made of a rank's own number that is used after it."""
    others = rank_names(projection.machine.store) | size_names(projection.machine.store)
    seen: set[ast.AST] = set()
    for event in projection.in_course("collective"):
        if event.name not in _IN_PLACE or not event.positional or not isinstance(event.node, ast.Call):
            continue
        value = event.positional[0]
        if not is_varying(value) or OWN_KINDS.isdisjoint(kind for kind, _ in tags_of(value)):
            continue
        made = _made_for(projection, event)
        if made is None or made.node in seen:
            continue
        new = event.name == _OF_OBJECTS if isinstance(made.node, ast.List) else _is_new(made.node)
        parts = [made.node] if new and isinstance(made.node, ast.expr) else []
        for one in (one for part in parts for one in _variables_in(part)):
            use = None if last_name(one) in others else _used(projection, made, ast.unparse(one))
            if use is not None:
                seen.add(made.node)
                yield LostResult(event, made, ast.unparse(one), use)
                break


def _made_for(projection: Projection, event: Event) -> Placed | None:
    """Return the expression that makes what a collective writes, which nothing but functions that hand it on gets."""
    modules = projection.machine.script.modules
    places = list(call_chain(projection.machine.script, event))
    given = next(iter(event.node.args), None) if isinstance(event.node, ast.Call) else None
    for place, outer in zip(places, [*places[1:], None], strict=True):
        if not isinstance(place.module.parents.get(place.node), ast.Expr) or given is None:
            return None
        function = function_around(place.module, place.node)
        if not isinstance(given, ast.Name):
            return Placed(given, place.module)
        named = [one for one in nodes_of(function) if isinstance(one, ast.Name) and one.id == given.id]
        if any(one is not given and isinstance(one.ctx, ast.Load) for one in named):
            return None
        if len(named) > 1 and isinstance(function, ast.FunctionDef):
            assigned = place.module.assigned(function, given)
            return Placed(assigned[0], place.module) if len(assigned) == 1 == len(named) - 1 else None
        if outer is None or not isinstance(function, ast.FunctionDef):
            return None
        handed = given_for(modules, function, given.id)
        given = next((one for _, call, one in handed if call is outer.node), None)
    return None


def _is_new(node: ast.AST) -> bool:
    """Return whether an expression makes a tensor that shares its numbers with no other."""
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        return True
    if not isinstance(node, ast.Call):
        return False
    inside = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), node.func)
    return last_name(node.func) in _MAKES or _is_new(inside)


def _variables_in(node: ast.expr) -> Iterator[ast.Name | ast.Attribute]:
    """Yield the variables that the numbers of an expression come from; not those of devices and settings."""
    if isinstance(node, ast.Call):
        own = isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name)
        made = isinstance(node.func, ast.Attribute) and (own or last_name(node.func) not in ("tensor", "stack", "cat"))
        for part in [node.func.value] if made else node.args[:1]:  # type: ignore[attr-defined]
            yield from _variables_in(part)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        yield node
    elif isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.List, ast.Tuple)):
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                yield from _variables_in(part)


def _used(projection: Projection, made: Placed, name: str) -> Placed | None:
    """Return where a variable is looked at after a call, before it is set anew; an attribute in any method."""
    module = made.module
    for _, nodes in statements_after(module, made.node):
        same = [one for one in nodes if isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) == name]
        looked = [one for one in same if _is_looked_at(module, one)]
        if looked:
            return Placed(looked[0], module)
        if any(isinstance(one.ctx, ast.Store) for one in same):
            return None
    cls = next((one for one in module.ancestors(made.node) if isinstance(one, ast.ClassDef)), None)
    if cls is None or not name.startswith("self."):
        return None
    inside = set(descend(made.node))
    elsewhere = (
        one
        for one in module.index.within(cls, ast.Attribute)
        if ast.unparse(one) == name and one not in inside and _is_looked_at(module, one)
    )
    return next((Placed(one, module) for one in elsewhere), None)


def _is_looked_at(module: Module, node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load) and getattr(module.parents[node], "attr", "") not in OF_FORM


def statements_after(module: Module, node: ast.AST) -> list[tuple[ast.stmt, list[ast.AST]]]:
    """Return the statements that run after a node in its function, in order, each with the nodes of its own."""
    function, first, last = function_around(module, node), getattr(node, "end_lineno", 0), len(module.lines)
    for inner in (node, *module.ancestors(node)):
        if inner is function:
            break
        blocks = (one for one in vars(module.parents[inner]).values() if isinstance(one, list) and inner in one)
        jumps = [one for one in next(blocks, []) if isinstance(one, (ast.Return, ast.Raise, ast.Break, ast.Continue))]
        # What stands behind such a one is on another path.
        last = min([last, *(one.end_lineno or 0 for one in jumps if one.lineno > first)])
    found: dict[ast.stmt, list[ast.AST]] = {}
    for one in nodes_of(function):
        if first < getattr(one, "lineno", 0) <= last and not module.in_other_arms(node, one):
            statement = next(up for up in (one, *module.ancestors(one)) if isinstance(up, ast.stmt))
            found.setdefault(statement, []).append(one)
    return sorted(found.items(), key=lambda entry: (entry[0].lineno, entry[0].col_offset))
