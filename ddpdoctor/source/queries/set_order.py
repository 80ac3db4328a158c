"""Which expressions go through a set of texts or of tensors, whose order is another one in every process."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Literal

from ddpdoctor.files import regex
from ddpdoctor.source.queries.divergence import mentions
from ddpdoctor.source.queries.origins import NAMED, Bound, Origins, opens_text
from ddpdoctor.source.script.module import Module, descend, dotted, last_name
from ddpdoctor.source.script.script import Script, calls_any, uses_any

_SETS = frozenset({"set", "frozenset"})
# Methods that give tensors, which are hashed by their addresses.
_TENSORS = frozenset({"parameters", "buffers"})
# Methods of a set that give another set, whose order is as little fixed.
_OF_SETS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
# Functions and methods that give what they are given, or a view of it, in the same order.
_KEEPS_ORDER = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "dict", "keys", "values", "items", "copy"})
_FIXES_ORDER = "PYTHONHASHSEED"
# By these a script starts itself again, with the environment that it has made.
_RESTARTS = frozenset({"execv", "execve", "execvp", "execvpe", "execl", "execle"})
# What puts a list in another order, or gives it what another rank has.
_SETTLES = regex(r"^(sort|broadcast\w*|scatter\w*)$")
_FILLS = frozenset({"add", "update", "append", "extend"})
# Methods of texts that give a text, and those that give several.
_GIVE_TEXT = frozenset(
    {"strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "casefold", "join", "format", "read_text"}
    | {"zfill", "removeprefix", "removesuffix", "decode"}
)
_GIVE_TEXTS = frozenset({"split", "rsplit", "splitlines", "readlines"})
_TEXT_FUNCTIONS = frozenset({"str", "input", "os.path.basename", "os.path.dirname", "os.path.join"})
_TEXTS_FUNCTIONS = frozenset({"os.listdir", "glob.glob", "glob.iglob"})
# Functions and methods that give the items that they are given, whatever their order is then.
_KEEPS_ITEMS = _KEEPS_ORDER - {"enumerate", "values", "items"} | _SETS | _OF_SETS | {"sorted", "fromkeys"}
# Readers of tables, whose cells are texts.
_ROWS = frozenset({"csv.DictReader", "csv.reader"})


def fixes_order(script: Script) -> bool:
    """Return whether a script gives its ranks a seed for hashes: in its own process it comes too late."""
    passed_on = script.spawns_ranks is not None or calls_any(script, _RESTARTS)
    return passed_on and uses_any(script, (_FIXES_ORDER,))


class SetOrders(Origins):
    """Follows the expressions of some modules back to sets, through variables, parameters and functions."""

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__(modules)
        self._open: set[tuple[str, ast.AST]] = set()

    def is_lost(self, module: Module, node: ast.expr) -> bool:
        """Return whether an expression is a set of several texts or of tensors, or goes through one from its start."""
        return self._once("lost", module, node)

    def is_text(self, module: Module, node: ast.expr) -> bool:
        """Return whether an expression is a text."""
        return self._once("text", module, node)

    def _once(self, asked: str, module: Module, node: ast.expr) -> bool:
        """Ask about an expression; what is asked again on the way, as of ``words = list(words)``, decides nothing."""
        if (asked, node) in self._open:
            return True
        self._open.add((asked, node))
        try:
            if asked == "lost":
                return self._is_lost(module, node)
            return self._are_texts(module, node) if asked == "texts" else self._is_text(module, node)
        finally:
            self._open.discard((asked, node))

    def _is_lost(self, module: Module, node: ast.expr) -> bool:
        if isinstance(node, NAMED):
            return self._name_is_lost(module, node)
        if isinstance(node, ast.Set):
            return _are_constants(node.elts)
        if isinstance(node, ast.SetComp):
            return self._once("text", module, node.elt)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
            return self.is_lost(module, node.generators[0].iter)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)):
            return any(self._is_set(module, side) for side in (node.left, node.right))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self.is_lost(module, node.value)
        return isinstance(node, ast.Call) and self._call_is_lost(module, node)

    def _name_is_lost(self, module: Module, node: ast.Name | ast.Attribute) -> bool:
        given = self.bindings(module, node)
        if not given or any(how != "value" for how, _, _ in given) or is_settled(module, node):
            return False
        empty = [value for _, _, value in given if _is_empty_set(value)]
        filled = [(home, value) for _, home, value in given if not _is_empty_set(value)]
        texts = [self._once("text" if how == "add" else "texts", module, value) for how, value in _filled(module, node)]
        if empty and (not texts or not all(texts)) and not filled:
            return False
        wanted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if wanted and filled and not empty and all(mentions(value, (wanted,)) for _, value in filled):
            return False  # Made of itself alone, as of what a class that was not read has put there.
        lost = [self.is_lost(home, value) for home, value in filled]
        # In the other arms of a setting it may have an order.
        chosen = [value for (_, value), is_so in zip(filled, lost, strict=True) if is_so]
        return all(
            is_so or any(home.in_other_arms(value, one) for one in chosen)
            for (home, value), is_so in zip(filled, lost, strict=True)
        )

    def _call_is_lost(self, module: Module, node: ast.Call) -> bool:
        last = last_name(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if owner is None and last in _SETS and len(node.args) == 1:
            values = self.values(module, node.args[0])
            if values and all(isinstance(one, ast.Call) and last_name(one.func) in _TENSORS for one in values):
                return True
            return self._once("texts", module, node.args[0])
        if owner is not None and last in _OF_SETS:
            return self._is_set(module, owner)
        if last in _KEEPS_ORDER or (owner is None and last == "filter"):
            source = owner if owner is not None else node.args[-1] if node.args else None
            return source is not None and self.is_lost(module, source)
        results = self.results(module, node)
        return bool(results) and all(one is not None and self.is_lost(home, one) for home, one in results)

    def _is_set(self, module: Module, node: ast.expr) -> bool:
        """Return whether an operand is itself a set without an order: arithmetic of numbers is written the same way."""
        values = self.values(module, node)
        sets = (ast.Set, ast.SetComp, ast.BinOp)
        return (
            bool(values)
            and all(
                isinstance(one, sets) or (isinstance(one, ast.Call) and last_name(one.func) in _SETS) for one in values
            )
            and self.is_lost(module, node)
        )

    def _are_texts(self, module: Module, node: ast.expr) -> bool:
        """Return whether the items of an expression are texts; those of a text are."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return _are_constants(node.elts)
        if isinstance(node, ast.Dict):
            return _are_constants([key for key in node.keys if key is not None])
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self._once("text", module, node.elt)
        if isinstance(node, ast.DictComp):
            return self._once("text", module, node.key)
        if isinstance(node, NAMED):
            given = self.bindings(module, node)
            if given and all(how == "file" for how, _, _ in given):
                return True
            filled = [self._once("text", module, one) for how, one in _filled(module, node) if how in ("add", "append")]
            left = [
                one
                for one in given or ()
                if not _is_empty_set(one[2]) and not (isinstance(one[2], ast.List) and not one[2].elts)
            ]
            return (bool(filled or left) and all(filled) and all(self._binds("texts", one) for one in left)) or bool(
                given and all(self._binds("text", one) for one in given)
            )
        if isinstance(node, ast.BinOp):
            return all(self._once("texts", module, side) for side in (node.left, node.right))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self._once("texts", module, node.value)
        if isinstance(node, ast.Call):
            last, owner = last_name(node.func), node.func.value if isinstance(node.func, ast.Attribute) else None
            name = module.resolve(node.func)
            if name in _TEXTS_FUNCTIONS or name == "open" or (owner is not None and last in _GIVE_TEXTS):
                return True
            if last in _KEEPS_ITEMS:
                source = node.args[0] if node.args else owner
                return source is not None and self._once("texts", module, source)
            results = self.results(module, node)
            if results:
                return all(one is not None and self._once("texts", home, one) for home, one in results)
        return self._once("text", module, node)

    def _is_text(self, module: Module, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str)
        if isinstance(node, ast.JoinedStr):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return any(self._once("text", module, side) for side in (node.left, node.right))
        if isinstance(node, ast.IfExp):
            return all(self._once("text", module, one) for one in (node.body, node.orelse))
        if isinstance(node, ast.Subscript):
            part = self._once("text" if isinstance(node.slice, ast.Slice) else "texts", module, node.value)
            return part or self._are_cells(module, node.value)
        if isinstance(node, NAMED):
            given = self.bindings(module, node)
            return bool(given) and all(self._binds("text", one) for one in given or ())
        if isinstance(node, ast.Call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if (module.resolve(node.func) or dotted(node.func)) in _TEXT_FUNCTIONS:
                return True
            if owner is not None and last_name(node.func) in _GIVE_TEXT:
                return True
            if owner is not None and last_name(node.func) == "replace":
                return self._once("text", module, owner)
            if owner is not None and last_name(node.func) == "read":
                return self._is_file(module, owner)
            results = self.results(module, node)
            return bool(results) and all(one is not None and self._once("text", home, one) for home, one in results)
        return False

    def _binds(self, asked: Literal["text", "texts"], bound: Bound) -> bool:
        how, module, node = bound
        if how == "file" or (how == "item" and asked == "texts"):
            return asked == "texts" and how == "file"
        return self._once("texts" if how == "item" else asked, module, node)

    def _is_file(self, module: Module, node: ast.expr) -> bool:
        """Return whether something is a file of text that a function opens."""
        if isinstance(node, ast.Call):
            return opens_text(module, node)
        given = self.bindings(module, node) if isinstance(node, NAMED) else None
        return bool(given) and all(how == "file" for how, _, _ in given or ())

    def _are_cells(self, module: Module, node: ast.expr) -> bool:
        """Return whether an expression is a row that a reader of tables gives."""
        given = self.bindings(module, node) if isinstance(node, NAMED) else None
        return bool(given) and all(how == "item" and self._are_rows(home, one) for how, home, one in given or ())

    def _are_rows(self, module: Module, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            if module.resolve(node.func) in _ROWS:
                return True
            return (
                last_name(node.func) in ("list", "tuple") and bool(node.args) and self._are_rows(module, node.args[0])
            )
        given = self.bindings(module, node) if isinstance(node, NAMED) else None
        return bool(given) and all(
            how == "value" and not isinstance(one, NAMED) and self._are_rows(home, one)
            for how, home, one in given or ()
        )


def _filled(module: Module, node: ast.Name | ast.Attribute) -> Iterator[tuple[str, ast.expr]]:
    """Yield how, and with what, a set or a list is filled where its name is known."""
    wanted = ast.unparse(node)
    for call in _calls_around(module, node):
        method = call.func
        if isinstance(method, ast.Attribute) and method.attr in _FILLS and ast.unparse(method.value) == wanted:
            yield from ((method.attr, one) for one in call.args[:1])


def is_settled(module: Module, node: ast.Name | ast.Attribute) -> bool:
    """Return whether something is sorted in place, or taken from another rank."""
    wanted = ast.unparse(node)
    settling = (call for call in _calls_around(module, node) if _SETTLES.match(last_name(call.func)) is not None)
    named = (one for call in settling for one in descend(call) if isinstance(one, NAMED))
    return any(ast.unparse(one) == wanted for one in named)


def _calls_around(module: Module, node: ast.Name | ast.Attribute) -> Iterator[ast.Call]:
    """Yield the calls of the function around a variable, or of the class around an attribute."""
    body = module.body_around(node)
    if isinstance(node, ast.Attribute):
        body = next((one for one in module.ancestors(node) if isinstance(one, ast.ClassDef)), body)
    return (one for one in descend(body) if isinstance(one, ast.Call))


def _is_empty_set(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) in _SETS and not node.args


def _are_constants(elements: Sequence[ast.expr]) -> bool:
    """Return whether several different texts are written out: numbers have the same order in every process."""
    texts = {element.value for element in elements if isinstance(element, ast.Constant)}
    return len(texts) > 1 and all(isinstance(text, str) for text in texts) and len(elements) >= len(texts)
