"""Words, labels and samples that every rank numbers by the order of a set, which is another one in every process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import msgspec

from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.queries.set_order import SetOrders, fixes_order
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.vocabulary import text_hints_at_ranks

# Functions that make a tensor or an array of numbers.
_MAKES_TENSOR = frozenset(
    {
        "tensor",
        "as_tensor",
        "from_numpy",
        "array",
        "asarray",
        "one_hot",
        "fromiter",
        "LongTensor",
        "IntTensor",
        "Tensor",
    }
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST = 6


class Numbering(msgspec.Struct, frozen=True, eq=False):
    """Numbers that stand for the items of a set in its order, and a place where they become data of a model."""

    module: Module
    node: ast.AST
    """What gives the numbers."""
    order: ast.expr
    use: tuple[Module, ast.expr]
    wrap: Event


def numbered_in_set_order(projection: Projection) -> Iterator[Numbering]:
    """Yield what is numbered in the order of a set, once each, in a script whose ranks train one model with DDP."""
    wrap = next(projection.in_course("wrap"), None)
    if wrap is None or fixes_order(projection.machine.script):
        return
    modules = projection.machine.script.modules
    finder = _Finder(modules)
    seen: set[ast.AST] = set()
    for module in modules:
        for number, container in _numbers_asked(module):
            if not finder.becomes_data(module, number):
                continue
            found = finder.numbering(module, container, is_list=isinstance(number, ast.Call) and _asks_index(number))
            if found is not None and found[1] not in seen and not _is_of_some_ranks(*found[:2]):
                seen.add(found[1])
                yield Numbering(*found, (module, number), wrap)


def _numbers_asked(module: Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield expressions that may ask for the number of an item, with what they ask."""
    for node in module.index.of(ast.Subscript):
        if isinstance(node.ctx, ast.Load) and not isinstance(node.slice, (ast.Slice, ast.Constant)):
            yield node, node.value
    for call in module.index.of(ast.Call):
        if isinstance(call.func, ast.Attribute):
            if call.func.attr == "get" or _asks_index(call):
                yield call, call.func.value
            elif call.func.attr == "map" and len(call.args) == 1:
                yield call, call.args[0]


def _asks_index(call: ast.Call) -> bool:
    return last_name(call.func) == "index" and len(call.args) == 1


def _is_of_some_ranks(module: Module, node: ast.AST) -> bool:
    """Return whether a test of the rank is around something: the others get what one of them made."""
    tests = (one.test for one in module.ancestors(node) if isinstance(one, (ast.If, ast.IfExp)))
    return any(text_hints_at_ranks(ast.unparse(test)) for test in tests)


_Found = tuple[Module, ast.AST, ast.expr]


class _Finder:
    def __init__(self, modules: tuple[Module, ...]) -> None:
        self._modules = modules
        self._orders = SetOrders(modules)
        self._leading: dict[str, bool] = {}
        self._collating = frozenset(
            last_name(word.value)
            for module in modules
            for call in module.index.of(ast.Call)
            for word in call.keywords
            if word.arg == "collate_fn"
        )

    def numbering(self, module: Module, node: ast.expr, is_list: bool = False, depth: int = 0) -> _Found | None:
        """Return what numbers the keys of a dict, or places the items of a list, in a set's order, and that set."""
        if depth > _DEEPEST:
            return None
        if is_list:
            return (module, node, node) if self._orders.is_lost(module, node) else None
        order = _order_of_keys(node)
        if order is not None:
            return (module, node, order) if self._orders.is_lost(module, order) else None
        given = self._orders.given(module, node)
        if isinstance(node, ast.Call):
            given = [(home, one) for home, one in self._orders.results(module, node) if one is not None]
        found = [self._filled(home, node, one) or self.numbering(home, one, depth=depth + 1) for home, one in given]
        return found[0] if found and all(found) else None

    def _filled(self, module: Module, name: ast.expr, made: ast.expr) -> _Found | None:
        """Return the loop over a set that gives each item the next number in a dict, which was made empty."""
        if not isinstance(made, ast.Dict) or made.keys:
            return None
        wanted = ast.unparse(_target_of(module, made) or name)
        for loop in (one for one in descend(module.body_around(made)) if isinstance(one, ast.For)):
            order = loop.iter
            if isinstance(order, ast.Call) and last_name(order.func) == "enumerate" and order.args:
                order = order.args[0]
            names = [one.id for one in descend(loop.target) if isinstance(one, ast.Name)]
            fills = any(
                isinstance(target, ast.Subscript) and ast.unparse(target.value) == wanted and mentions(target, names)
                for one in descend(loop)
                if isinstance(one, ast.Assign) and _counts(module, one.value, names)
                for target in one.targets
            )
            if fills and self._orders.is_lost(module, order):
                return module, loop, order
        return None

    def becomes_data(self, module: Module, node: ast.AST) -> bool:
        """Return whether a number is put into a tensor, or given by a data set or by what makes batches."""
        for around in module.ancestors(node):
            if isinstance(around, ast.Call) and last_name(around.func) in _MAKES_TENSOR:
                return True
            if isinstance(around, ast.Call) and any(word.arg == "collate_fn" for word in around.keywords):
                return True
            if isinstance(around, ast.ClassDef) and _gives_items(around):
                return True
            name = getattr(around, "name", "") if isinstance(around, _FUNCTIONS) else ""
            if isinstance(around, ast.Assign) and isinstance(around.value, ast.Lambda):
                name = last_name(around.targets[0])
            if name and self._leads_to_data(name):
                return True
        return False

    def _leads_to_data(self, name: str) -> bool:
        """Return whether what calls functions of a name puts their results into data; each name is asked once."""
        known = self._leading.get(name)
        if known is None:
            self._leading[name] = False  # A function that calls itself leads nowhere by that.
            known = self._leading[name] = name in self._collating or any(
                self.becomes_data(module, call)
                for module in self._modules
                for call in module.calls_by_name.get(name, ())
            )
        return known


def _gives_items(cls: ast.ClassDef) -> bool:
    methods = {one.name for one in cls.body if isinstance(one, ast.FunctionDef)}
    return bool(methods & {"__getitem__", "__iter__"}) and any("Dataset" in last_name(base) for base in cls.bases)


def _target_of(module: Module, value: ast.expr) -> ast.expr | None:
    statement = module.parents.get(value)
    if isinstance(statement, ast.Assign):
        return statement.targets[0]
    return statement.target if isinstance(statement, ast.AnnAssign) else None


def _counts(module: Module, value: ast.expr, names: list[str]) -> bool:
    """Return whether a value is the number of a turn: of ``enumerate``, the length until then, or a counter."""
    if isinstance(value, ast.Call):
        return last_name(value.func) == "len"
    body = module.body_around(value)
    return isinstance(value, ast.Name) and (
        value.id in names[:1]
        or any(isinstance(one, ast.AugAssign) and ast.unparse(one.target) == value.id for one in descend(body))
    )


def _order_of_keys(node: ast.expr) -> ast.expr | None:
    """Return in whose order a dict numbers its keys, where it is written as a whole."""
    if isinstance(node, ast.DictComp):
        return _order_of_pair(node.key, node.value, node.generators[0])
    if not isinstance(node, ast.Call) or last_name(node.func) != "dict" or len(node.args) != 1:
        return None
    items = node.args[0]
    if isinstance(items, (ast.GeneratorExp, ast.ListComp)) and isinstance(items.elt, ast.Tuple):
        pair = items.elt.elts
        return _order_of_pair(pair[0], pair[1], items.generators[0]) if len(pair) == 2 else None
    if isinstance(items, ast.Call) and last_name(items.func) == "zip" and len(items.args) == 2:
        counts = items.args[1]
        return items.args[0] if isinstance(counts, ast.Call) and last_name(counts.func) in ("range", "count") else None
    return None


def _order_of_pair(key: ast.expr, value: ast.expr, generator: ast.comprehension) -> ast.expr | None:
    over, target = generator.iter, generator.target
    if not isinstance(over, ast.Call):
        return None
    called = last_name(over.func)
    if called in ("enumerate", "zip") and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        first, second = target.elts
        number, item, order = (
            (first, second, over.args[:1]) if called == "enumerate" else (second, first, over.args[:1])
        )
        names = [last_name(number)], [one.id for one in descend(item) if isinstance(one, ast.Name)]
        return order[0] if order and mentions(value, names[0]) and mentions(key, names[1]) else None
    if called == "range" and isinstance(key, ast.Subscript) and ast.unparse(key.slice) == ast.unparse(target):
        return key.value if mentions(value, [last_name(target)]) else None
    return None
