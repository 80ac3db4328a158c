"""What every rank numbers or chooses by the order of a set, a hash or an address: each process has another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.check import Verdict
from ddpdoctor.source.events import Event
from ddpdoctor.source.projection import Projection
from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.queries.origins import NAMED
from ddpdoctor.source.queries.set_order import SetOrders, fixes_order, is_settled
from ddpdoctor.source.ranks.random_numbers import TAKES_SEED
from ddpdoctor.source.script.module import Module, descend, last_name
from ddpdoctor.source.script.script import says
from ddpdoctor.source.vocabulary import text_hints_at_ranks

# Functions that make a tensor or an array of numbers.
_MAKES_TENSOR = frozenset({
    "tensor", "as_tensor", "from_numpy", "array", "asarray", "one_hot", "fromiter", "LongTensor", "IntTensor",
    "Tensor",
})  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST = 6
# Expressions that hold a number, or are made of one, and go where they go; and those that make a bucket of it.
_HANDS_ON = (
    ast.Tuple, ast.List, ast.ListComp, ast.GeneratorExp, ast.IfExp, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.keyword,
)  # fmt: skip
_PARTS = (ast.Mod, ast.BitAnd, ast.Div, ast.FloorDiv, ast.RShift)
_Use = tuple[Module, ast.AST]


def numbered_apart(projection: Projection) -> Iterator[Verdict]:
    """Yield what is numbered in a set's order, or by a hash, once each, in a script whose ranks train with DDP."""
    wrap = next(projection.in_course("wrap"), None)
    if wrap is None or fixes_order(projection.machine.script):
        return
    modules = projection.machine.script.modules
    own = {one.name for module in modules for one in module.tree.body if isinstance(one, ast.FunctionDef)}
    finder = _Finder(modules)
    seen: set[ast.AST] = set()
    for module in modules:
        for number, container in _numbers_asked(module):
            if not finder.becomes_data(module, number):
                continue
            found = finder.numbering(module, container, is_list=isinstance(number, ast.Call) and _asks_index(number))
            if found is not None and found[1] not in seen and not _is_of_some_ranks(*found[:2]):
                seen.add(found[1])
                yield _numbered(*found, (module, number), wrap)
        for call in (*module.calls_by_name.get("hash", ()), *module.calls_by_name.get("id", ())):
            if isinstance(call.func, ast.Name) and call.func.id not in own and finder.is_salted(module, call):
                by_rank = text_hints_at_ranks(ast.unparse(call)) or _is_of_some_ranks(module, call)
                use = None if by_rank else finder.decided(module, call)
                if use is not None:
                    yield _numbered(module, call, call, use, wrap, salted=True)


def _numbered(home: Module, node: ast.AST, order: ast.expr, use: _Use, wrap: Event, *, salted: bool = False) -> Verdict:
    """Return that the numbers which a node gives, in a set's order or ``salted`` as hashes, decide data where used."""
    module, number = use
    made = home.excerpt(order, 60)
    of_set = f"a number stands for another item on each rank: `{made}` is in the order of a set, which differs between"
    of_hash = f"`{made}` is another number in every process: hashes of texts are salted, and addresses differ"
    does = "is decided by it" if salted else "puts the number into the data of this rank"
    return Verdict(
        sentence=of_hash if salted else f"{of_set} processes",
        remedy="Use a hash that is the same in every process, such as zlib.crc32(text.encode())."
        if salted
        else "Number the items in sorted order: sorted(...) of the set, on every rank.",
        locations=(home.location(node), module.location(number)),
        because=(
            (f"`{module.excerpt(number, 60)}` {does}", module.location(number)),
            ("DDP averages what the ranks learn of one number", wrap.location),
        ),
    )


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
        self._decided: dict[tuple[ast.AST, bool], _Use | None] = {}
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

    def is_salted(self, module: Module, node: ast.expr) -> bool:
        """Return whether something is a text or bytes, made of such, or its hash; or an address."""
        last = last_name(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, (ast.Tuple, ast.List)) or last in ("hash", "tuple", "frozenset"):
            return any(self.is_salted(module, one) for one in getattr(node, "elts", getattr(node, "args", ())))
        arguments = getattr(module.body_around(node), "args", None)
        known = {one.arg: one.annotation for one in arguments.args} if isinstance(arguments, ast.arguments) else {}
        declared = known.get(node.id) if isinstance(node, ast.Name) else None
        is_bytes = isinstance(node, ast.Constant) and isinstance(node.value, bytes)
        certain = is_bytes or last in ("id", "str", "repr", "encode") or last_name(declared or node) in ("str", "bytes")
        return certain or self._orders.is_text(module, node)

    def decided(self, module: Module, node: ast.AST, part: bool = False) -> _Use | None:
        """Return where a number becomes data or a seed, or a part of it (``hash(key) % 10``) chooses what is done."""
        if (node, part) not in self._decided:
            self._decided[node, part] = None  # What comes to itself again decides nothing by that.
            self._decided[node, part] = self._decides(module, node, part)
        return self._decided[node, part]

    def _decides(self, module: Module, node: ast.AST, part: bool) -> _Use | None:
        around, function, uses = module.parents[node], module.body_around(node), list[_Use]()
        last = last_name(around.func) if isinstance(around, ast.Call) and node is not around.func else ""
        target = around.targets[0] if isinstance(around, ast.Assign) else getattr(around, "func", None)
        if isinstance(target, ast.Subscript) or last == "append":
            target = getattr(target, "value", None)  # A list or a dict, or what else takes it.
        elif last:
            target = None
        if isinstance(target, NAMED) and is_settled(module, target):
            return None
        part = part or (isinstance(around, ast.BinOp) and isinstance(around.op, _PARTS))
        compared = isinstance(around, ast.Compare) and not isinstance(around.ops[0], (ast.In, ast.NotIn))
        item = isinstance(around, ast.Subscript) and isinstance(around.ctx, ast.Load)
        if last in _MAKES_TENSOR | TAKES_SEED:
            sent = getattr(module.parents[around], "targets", [None])[0]
            return None if isinstance(sent, NAMED) and is_settled(module, sent) else (module, around)
        if isinstance(around, _HANDS_ON) or last in ("abs", "int", "float") or (part and (compared or item)):
            uses = [(module, around)]
        elif isinstance(around, (ast.If, ast.comprehension)) and part and node is not getattr(around, "iter", None):
            body = getattr(around, "body", [around])
            said = [one for one in body if isinstance(getattr(one, "value", None), ast.Call) and says(one.value)]
            return (module, node) if len(said) < len(body) else None
        elif isinstance(around, (ast.Return, ast.Yield)) and isinstance(function, _FUNCTIONS):
            cls = module.parents[function]
            if isinstance(cls, ast.ClassDef) and _gives_items(cls) and function.name in ("__getitem__", "__iter__"):
                return module, around
            uses = [(home, call) for home in self._modules for call in home.calls_by_name.get(function.name, ())]
        elif isinstance(target, NAMED):
            nodes = descend(function) if isinstance(target, ast.Name) else module.nodes
            names = [one for one in nodes if isinstance(one, NAMED) and ast.unparse(one) == ast.unparse(target)]
            uses = [(module, one) for one in names if isinstance(one.ctx, ast.Load)]
        found = (self.decided(home, one, part) for home, one in uses)
        return next((one for one in found if one is not None), None)

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
