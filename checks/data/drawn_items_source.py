"""What the items of a data set call, and data sets whose items are drawn, whatever their index."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from ddpdoctor.files import regex
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import bases_of, bound_to, class_attribute
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    NONE,
    ExternalObject,
    Function,
    Instance,
    ProjectClass,
    Value,
    options_of,
    parts_of,
)
from ddpdoctor.source.script.module import Module, descend, dotted
from ddpdoctor.source.script.script import says

DRAWS = regex(
    r"(random\.(random|randint|uniform|choice|choices|gauss|shuffle|sample|randrange))$"
    r"|(numpy\.random\.(rand|randn|randint|uniform|normal|choice|random|permutation|beta|shuffle))$"
    r"|(torch\.(rand|randn|randint|randperm|bernoulli|normal|rand_like|randn_like))$"
)
"""Functions that draw from the one stream that a library has in each process."""


def held(machine: Machine, value: Value, seen: set[int]) -> Iterator[Instance | Event]:
    """Yield the objects that a value is made of, with what they were given and hold: the project's, and libraries'."""
    if isinstance(value, (Instance, ExternalObject)) and value.number not in seen:
        seen.add(value.number)
        made = machine.events.get(value.number)
        parts: list[Value] = [] if made is None else [*made.positional, *made.named.values()]
        if isinstance(value, Instance):
            yield value
            parts += machine.store.held(value.number)
        elif made is not None:
            yield made
        for part in parts:
            yield from held(machine, part, seen)
    elif not isinstance(value, (Instance, ExternalObject)):
        for part in parts_of(value):
            yield from held(machine, part, seen)


def callees(machine: Machine, module: Module, function: Function, name: ast.expr) -> Iterator[Function]:
    """Yield what a call in a function of the project may run: a function, a method, or an object that is held."""
    owner = function.receiver
    if isinstance(name, ast.Name):
        yield from called(machine, machine.store.get(machine.scope_modules.get(module.name, -1), name.id) or NONE)
    elif isinstance(name, ast.Attribute) and isinstance(owner, Instance):
        of = ast.unparse(name.value)
        if of == "self":
            yield from methods(machine, owner, name.attr)
            yield from called(machine, machine.store.get(owner.number, name.attr) or NONE)
        elif of == "super()":
            for base in bases_of(machine, owner.cls):
                method = class_attribute(machine, base, name.attr) if isinstance(base, ProjectClass) else None
                if isinstance(method, Function) and method.node is not function.node:
                    yield bound_to(method, owner)
                    return


def called(machine: Machine, value: Value) -> Iterator[Function]:
    """Yield what runs where a value is called: a function, or the objects of the project that are called in turn."""
    for option in options_of(value):
        if isinstance(option, Function):
            yield option
    for one in held(machine, value, set()):
        if isinstance(one, Instance):
            yield from methods(machine, one, "__call__")
            yield from methods(machine, one, "forward")


def methods(machine: Machine, owner: Value, name: str) -> Iterator[Function]:
    """Yield the method of this name that an object of the project has, if it has one."""
    method = class_attribute(machine, owner.cls, name) if isinstance(owner, Instance) else None
    if isinstance(method, Function):
        yield bound_to(method, owner)


_INDEX, _DRAW = "index", "draw"
Origins = frozenset[str]
"""What a value comes from, or depends on by a condition: the index of the item, a draw."""
_NOTHING: Origins = frozenset()


def draws_its_items(machine: Machine, loader: Event) -> bool:
    """Return whether a loader's data set chooses each item by draws, and the index of the item has no effect on it."""
    options = list(options_of(loader.argument("dataset", 0) or NONE))
    return bool(options) and all(_is_drawn(machine, one) for one in options)


def _is_drawn(machine: Machine, dataset: Value) -> bool:
    item = next(methods(machine, dataset, "__getitem__"), None)
    if item is None or any(methods(machine, dataset, "__getitems__")):
        return False
    kept: dict[str, Origins] = {}
    for _ in range(2):  # What an item leaves in the data set meets the next one.
        found = _Followed(machine, {}, ()).call(item, [frozenset({_INDEX})], {}, kept)
        if found != {_DRAW}:
            return False
    return True


class _Followed:
    """A function that is followed: what its names, and the attributes of its object, come from."""

    def __init__(self, machine: Machine, names: dict[str, Origins], around: Sequence[ast.AST]) -> None:
        self._machine, self._names, self._around = machine, names, around
        self._given: Origins = _NOTHING

    def call(
        self, function: Function, given: Sequence[Origins], named: dict[str, Origins], kept: dict[str, Origins]
    ) -> Origins:
        """Return what a call's result comes from; ``kept``, what the object's attributes do, is brought up to date."""
        node, module = function.node, self._machine.script.module(function.module)
        whole = _NOTHING.union(*given, *named.values(), *kept.values())
        if not isinstance(node, ast.FunctionDef) or module is None or node in self._around or node.decorator_list:
            return whole | {_INDEX}
        places = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        places = places[1:] if function.receiver is not None else places
        if node.args.vararg or node.args.kwarg or len(given) > len(places):
            return whole | {_INDEX}
        inner = _Followed(self._machine, dict(kept), (*self._around, node))
        inner._names |= dict(zip(places, given, strict=False)) | named
        inner._block(module, function, node.body, _NOTHING)
        kept.update({name: came for name, came in inner._names.items() if name.startswith("self.")})
        return inner._given

    def _block(self, module: Module, function: Function, block: Iterable[ast.stmt], under: Origins) -> None:
        for statement in block:
            self._statement(module, function, statement, under)

    def _statement(self, module: Module, function: Function, one: ast.stmt, under: Origins) -> None:
        def of(node: ast.AST | None) -> Origins:
            return _NOTHING if node is None else self._of(module, function, node)

        if isinstance(one, ast.Return):
            self._given |= of(one.value) | under
        elif isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            came = of(one.value) | under | (of(one.target) if isinstance(one, ast.AugAssign) else _NOTHING)
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                self._bind(module, function, target, came)
        elif isinstance(one, ast.Expr):
            self._run(module, function, one.value, of(one.value) | under)
        elif isinstance(one, ast.If):
            self._ways(module, function, (one.body, one.orelse), under | of(one.test))
        elif isinstance(one, (ast.For, ast.While)):
            for _ in range(2):  # What a turn leaves meets the next one.
                inside = under | of(one.iter if isinstance(one, ast.For) else one.test)
                if isinstance(one, ast.For):
                    self._bind(module, function, one.target, inside)
                self._ways(module, function, (one.body, ()), inside)
            self._block(module, function, one.orelse, under)
        elif isinstance(one, ast.With):
            for entry in one.items:
                if entry.optional_vars is not None:
                    self._bind(module, function, entry.optional_vars, of(entry.context_expr) | under)
            self._block(module, function, one.body, under)
        elif isinstance(one, ast.Try):
            self._ways(module, function, ([*one.body, *one.orelse], *(entry.body for entry in one.handlers)), under)
            self._block(module, function, one.finalbody, under)
        elif isinstance(one, (ast.Break, ast.Continue)):
            self._given |= under
        elif not isinstance(one, (ast.Raise, ast.Assert, ast.Pass, ast.Import, ast.ImportFrom)):
            self._given |= {_INDEX}  # It was not followed.

    def _ways(self, module: Module, function: Function, ways: Iterable[Iterable[ast.stmt]], under: Origins) -> None:
        """Take each of several ways, and keep what a name comes from on any of them."""
        before = dict(self._names)
        after = dict(self._names)
        for way in ways:
            self._names = dict(before)
            self._block(module, function, way, under)
            for name, came in self._names.items():
                after[name] = after.get(name, _NOTHING) | came
        self._names = after

    def _run(self, module: Module, function: Function, node: ast.expr, came: Origins) -> None:
        """Note what a call that stands alone may have changed: its object, what it is given, or a stream of draws."""
        if not isinstance(node, ast.Call) or says(node):
            return
        if any(callees(self._machine, module, function, node.func)):
            return
        if _INDEX in came:
            self._given |= {_INDEX}
        own = [node.func.value] if isinstance(node.func, ast.Attribute) and not _draws(module, node) else []
        for changed in (*own, *node.args):
            if name := dotted(changed):
                self._names[name] = self._names.get(name, _NOTHING) | came

    def _bind(self, module: Module, function: Function, target: ast.expr, came: Origins) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._bind(module, function, part, came)
        elif isinstance(target, ast.Name):
            self._names[target.id] = came
        elif isinstance(target, ast.Starred):
            self._bind(module, function, target.value, came)
        else:
            written = target.value if isinstance(target, ast.Subscript) else target
            came |= self._of(module, function, target)
            name = dotted(written)
            self._names[name] = came if name else self._not_followed()

    def _not_followed(self) -> Origins:
        self._given |= {_INDEX}
        return frozenset({_INDEX})

    def _of(self, module: Module, function: Function, node: ast.AST) -> Origins:
        """Return what an expression comes from."""
        if isinstance(node, (ast.Name, ast.Attribute)) and (name := dotted(node)):
            return _NOTHING.union(
                *(
                    came
                    for known, came in self._names.items()
                    if known == name or name.startswith(f"{known}.") or known.startswith(f"{name}.")
                )
            )
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for entry in node.generators:
                taken = self._of(module, function, entry.iter)
                for part in (one for one in descend(entry.target) if isinstance(one, ast.Name)):
                    self._names[part.id] = self._names.get(part.id, _NOTHING) | taken
        if isinstance(node, ast.NamedExpr):
            self._bind(module, function, node.target, self._of(module, function, node.value))
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return self._not_followed()
        if isinstance(node, ast.Call) and ast.unparse(node) == "len(self)" and function.receiver is not None:
            node = ast.parse("self.__len__()", mode="eval").body
        run = list(callees(self._machine, module, function, node.func)) if isinstance(node, ast.Call) else []
        unlisted = isinstance(node, ast.Call) and (
            any(isinstance(one, ast.Starred) for one in node.args) or any(word.arg is None for word in node.keywords)
        )
        if not isinstance(node, ast.Call) or not run or unlisted:
            whole = _NOTHING.union(*(self._of(module, function, part) for part in ast.iter_child_nodes(node)))
            return whole | {_DRAW} if isinstance(node, ast.Call) and _draws(module, node) else whole
        given = [self._of(module, function, one) for one in node.args]
        named = {word.arg: self._of(module, function, word.value) for word in node.keywords if word.arg}
        result = _NOTHING
        for one in run:
            of_same = one.receiver is not None and one.receiver == function.receiver
            kept = {name: came for name, came in self._names.items() if of_same and name.startswith("self.")}
            result |= self.call(one, given, named, kept)
            self._names |= kept
        return result


def _draws(module: Module, call: ast.Call) -> bool:
    return DRAWS.match(module.resolve(call.func)) is not None and all(word.arg != "generator" for word in call.keywords)
