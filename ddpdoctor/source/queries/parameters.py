"""Which parts of a module its forward can come to, as far as the text of its class shows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from itertools import chain

import msgspec

from ddpdoctor.check import Verdict
from ddpdoctor.files import regex
from ddpdoctor.finding import Location
from ddpdoctor.source.events import Event
from ddpdoctor.source.interpreter.attributes import base_names, bases_of, family
from ddpdoctor.source.interpreter.state import Machine
from ddpdoctor.source.interpreter.values import (
    Const,
    ExternalObject,
    Function,
    Instance,
    PerRank,
    ProjectClass,
    SequenceValue,
    Value,
    constant,
    options_of,
    parts_of,
    truth,
)
from ddpdoctor.source.libraries.lightning import MODULES, has_several, searches_unused
from ddpdoctor.source.projection import Projection, whole_projection
from ddpdoctor.source.script.module import Module, children_of, descend, last_name, once, once_each
from ddpdoctor.source.script.script import Script, uses_part
from ddpdoctor.source.torch_model.buffers import MAXIMUM_PARTS, parts_of_module
from ddpdoctor.source.torch_model.recorded_calls import SET_REQUIRES_GRAD

HAS_PARAMETERS = regex(
    r"torch\.nn\.(Linear|Bilinear|Conv\dd|ConvTranspose\dd|Embedding|EmbeddingBag|LayerNorm|GroupNorm|RMSNorm|BatchNorm\dd"
    r"|PReLU|LSTM|GRU|RNN|LSTMCell|GRUCell|MultiheadAttention|Transformer\w*|Parameter)$"
)
"""Modules of torch.nn that have parameters by default."""
# Words by which a method may come to any attribute.
_ALL_AT_ONCE = frozenset(
    {"getattr", "children", "named_children", "modules", "named_modules", "_modules", "__dict__", "vars", "parameters"}
)
_TREATED_OPTIONS = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params")
# Attributes and functions whose results have no graph; any use beside these lets gradients through.
_WITHOUT_GRADIENT = frozenset({"argmax", "argmin", "detach", "data"})
# Position of `find_unused_parameters` among DDP's arguments.
_UNUSED_POSITION = 5


# Methods of a module that are run in a training without being named in the script.
_ENTERED = frozenset({"forward", "__call__", "__init__", "training_step"})


def unused_parts(projection: Projection) -> Iterator[Verdict]:
    """Yield attributes with parameters of wrapped modules that no method which forward calls mentions.

    Of several models that a setting chooses from only where each of them has such an attribute.
    """
    demanding = [wrap for wrap in projection.in_course("wrap") if demands_all(wrap)]
    searching = [wrap for wrap in projection.in_course("wrap") if _searches(wrap)]
    fits = [fit for fit, one in fits_on_several(projection) if not searches_unused(projection.machine, one)]
    seen, left = set[ast.ClassDef](), set[tuple[ast.ClassDef, str]]()
    for wrap in (*demanding, *fits, *searching):
        module = _module_of(wrap)
        models = [] if module is None or isinstance(module, PerRank) else list(options_of(module))
        found = [list(_unused_in(projection, wrap, model, seen, left, hidden=wrap in searching)) for model in models]
        if all(found):
            yield from chain.from_iterable(found)


def _unused_in(
    projection: Projection,
    wrap: Event,
    model: Value,
    seen: set[ast.ClassDef],
    left: set[tuple[ast.ClassDef, str]],
    *,
    hidden: bool,
) -> Iterator[Verdict]:
    """Yield the verdicts on one model that a wrap may hold.

    ``seen`` has the classes that were looked at, ``left`` their attributes that nothing comes to.
    """
    machine, frozen = projection.machine, frozen_before(projection, wrap)
    found: list[tuple[Instance, list[str], bool, frozenset[ast.AST]]] = []
    for part in _readable_parts(machine, model):
        if part.cls.node in seen or part.number in frozen:
            continue
        seen.add(part.cls.node)
        held = [
            name
            for name in parameter_attributes(machine, part)
            if getattr(machine.store.get(part.number, name), "number", None) not in frozen
        ]
        dead = dead_code(machine, part)
        unused = [name for name in held if not _is_used(machine, part, name, dead)]
        teaching = [name for name in held if name not in unused and _is_without_gradient(machine, part, name)]
        left.update((part.cls.node, name) for name in (*unused, *teaching))
        # A part without use, or a teacher that is averaged, is what the search is asked to put up with.
        teaching = [name for name in teaching if not hidden or not _is_copied(machine, part, name)]
        found += [(part, [] if hidden else unused, False, dead), (part, teaching, True, _NOTHING_DEAD)]
    reached = _layers_in(machine, model, left) if any(names for _, names, *_ in found) else set()
    for part, names, is_run, dead in found:
        own = [name for name in names if _layers_in(machine, machine.store.get(part.number, name)) - reached]
        if own:
            places = tuple(_places(machine, part, own))
            verdict = _unused(wrap, part.cls.node.name, own, places, is_run=is_run, is_hidden=hidden)
            ruled_out = [
                module.location(node)
                for name in own
                for module, node in _uses(machine, part, name)
                if not dead.isdisjoint((node, *module.ancestors(node)))
            ]
            if ruled_out:
                reason = "this is not reached: settings of the module, which only its constructor makes, rule it out"
                verdict = msgspec.structs.replace(verdict, because=(*verdict.because, (reason, ruled_out[0])))
            yield verdict


def _layers_in(machine: Machine, module: Value | None, left: Set[tuple[ast.ClassDef, str]] = frozenset()) -> set[int]:
    """Return the numbers of the layers with parameters in all that a module holds, or was handed.

    ``left`` has the attributes of classes that are not gone into: nothing comes to a layer by them.
    """
    waiting, seen, found = [module], set[int](), set[int]()
    while waiting and len(seen) < MAXIMUM_PARTS:
        value = waiting.pop()
        if not isinstance(value, (Instance, ExternalObject)):
            waiting.extend(parts_of(value) if value is not None else ())
        elif value.number not in seen:
            seen.add(value.number)
            if isinstance(value, Instance):
                names = (name for name in machine.store.names(value.number) if (value.cls.node, name) not in left)
                waiting.extend(machine.store.get(value.number, name) for name in names)
            elif (made := machine.object(value)) is not None:
                waiting.extend(made.values)
                found |= {value.number} if HAS_PARAMETERS.search(value.name) else set()
    return found


def _unused(
    wrap: Event, owner: str, parts: Sequence[str], places: tuple[Location, ...], *, is_run: bool, is_hidden: bool
) -> Verdict:
    """Return what is wrong with attributes of a class that forward never comes to.

    ``is_run``: it runs them under ``no_grad``, or uses of what they give only what carries no gradient. ``is_hidden``:
    ``find_unused_parameters=True`` hides it, and nothing fails.
    """
    names = ", ".join(f"self.{name}" for name in parts)
    reaches = f"takes nothing with gradients from {names}" if is_run else f"never reaches {names}"
    follows = f"so DDP waits for {'its gradients' if len(parts) == 1 else 'their gradients'} for ever"
    freeze = "freeze it with requires_grad_(False) before the wrap"
    option, omit = "neither find_unused_parameters=True nor static_graph=True", ""
    if is_hidden:
        follows = "and find_unused_parameters=True hides that it never learns"
        option, omit = "find_unused_parameters=True", "; then omit find_unused_parameters"
    return Verdict(
        sentence=f"{'training_step' if wrap.name == 'Trainer.fit' else 'forward'} of {owner} {reaches}, {follows}",
        remedy=f"Let the loss depend on it through operations that carry gradients, or {freeze}{omit}."
        if is_run
        else f"Remove it, or {freeze}.",
        locations=places,
        because=((f"DDP has {option}", wrap.location),),
    )


def frozen_before(projection: Projection, wrap: Event) -> set[int]:
    """Return the numbers of the modules of which parameters, possibly all, want no gradient when they are wrapped."""
    events = [event for event in projection.in_course("training") if event.ordinal < wrap.ordinal]
    off = [event for event in events if event.name == SET_REQUIRES_GRAD and constant(event.positional[0]) is not True]
    loops = {loop.node for event in off for loop in event.loops}
    freezing = [
        event
        for event in events
        if (event.name == "requires_grad_" and constant(event.argument("requires_grad", 0) or Const(True)) is not True)
        or (event.name in ("parameters", "named_parameters") and loops & set(event.module.ancestors(event.node)))
    ]
    owners: list[Value] = [event.receiver for event in freezing if event.receiver is not None]
    parts = (part for owner in owners for part in parts_of_module(projection.machine, owner))
    return {part.number for part in parts if isinstance(part, (Instance, ExternalObject))}


def _searches(wrap: Event) -> bool:
    flag = wrap.argument("find_unused_parameters", _UNUSED_POSITION)
    return wrap.complete and flag is not None and constant(flag) is True


def fits_on_several(projection: Projection) -> Iterator[tuple[Event, Event]]:
    """Yield the trainings by Trainers of Lightning with several ranks, and their Trainers."""
    for event in projection.in_course("collective"):
        trainer = projection.machine.object(event.receiver) if event.receiver is not None else None
        if event.name == "Trainer.fit" and trainer is not None and has_several(projection.machine, trainer):
            yield event, trainer


def needless_searches(projection: Projection) -> Iterator[tuple[Event, int]]:
    """Yield wraps with ``find_unused_parameters=True`` of modules that are read and always run completely.

    With the number of attributes with parameters that forward uses.
    """
    machine = projection.machine
    if uses_part(machine.script, ("requires_grad",)):
        return
    for wrap in projection.in_course("wrap"):
        flag = wrap.argument("find_unused_parameters", _UNUSED_POSITION)
        if flag is None or constant(flag) is not True or constant(wrap.named.get("static_graph", Const(False))) is True:
            continue
        modules = list(modules_of(machine, wrap))
        count = _always_used(machine, wrap, modules)
        if count:
            yield wrap, count


def demands_all(wrap: Event) -> bool:
    """Return whether a wrap of DDP waits for the gradients of all parameters in each step."""
    return (
        wrap.complete
        and len(wrap.positional) <= _UNUSED_POSITION
        and not any(option in wrap.named for option in _TREATED_OPTIONS)
    )


def modules_of(machine: Machine, wrap: Event) -> Iterator[Instance]:
    """Yield the project's modules in a wrapped module; none if the module itself is not certain."""
    module = _module_of(wrap)
    if module is not None and len(list(options_of(module))) == 1:
        yield from _readable_parts(machine, module)


def _readable_parts(machine: Machine, model: Value) -> Iterator[Instance]:
    for part in parts_of_module(machine, model):
        if isinstance(part, Instance) and _is_readable(machine, part.cls):
            yield part


def _module_of(wrap: Event) -> Value | None:
    return wrap.argument("model" if wrap.name == "Trainer.fit" else "module", 0)


def _is_readable(machine: Machine, cls: ProjectClass) -> bool:
    external = [base for base in bases_of(machine, cls) if not isinstance(base, ProjectClass)]
    names = base_names(machine, cls)
    return len(names) == len(external) and (set(names) == {"torch.nn.Module"} or set(names) <= MODULES)


def parameter_attributes(machine: Machine, part: Instance, *, in_some_way: bool = False) -> Iterator[str]:
    """Yield the attributes of a module that certainly have parameters, or have them in some way of making it."""
    for name in machine.store.names(part.number):
        value = machine.store.get(part.number, name)
        options = () if value is None else options_of(value) if in_some_way else (value,)
        if any(has_parameters(machine, option) for option in options):
            yield name


def has_parameters(machine: Machine, value: Value) -> bool:
    """Return whether a module certainly has parameters of its own, or in its parts."""
    if isinstance(value, ExternalObject):
        made = machine.object(value)
        if made is None or not made.complete:
            return False
        if value.name in {"torch.nn.Sequential", "torch.nn.ModuleList"}:
            items = (item.values if isinstance(item, SequenceValue) else (item,) for item in made.positional)
            return any(has_parameters(machine, part) for part in chain.from_iterable(items))
        plain = not any(constant(option) is False for option in made.named.values())
        return plain and HAS_PARAMETERS.search(value.name) is not None
    if isinstance(value, Instance):
        return _is_readable(machine, value.cls) and next(parameter_attributes(machine, value), None) is not None
    return False


_NOTHING_DEAD: frozenset[ast.AST] = frozenset()


def _is_used(machine: Machine, part: Instance, name: str, dead: frozenset[ast.AST]) -> bool:
    """Return whether an attribute is mentioned outside of dead code and of methods that are never called."""
    if name not in _forward_attributes(machine, (part.cls, _NOTHING_DEAD)):
        reached = _reached_text(machine, (part.cls, _NOTHING_DEAD))
        if reached is not None and name not in reached:
            return False
    if not dead or name in _forward_attributes(machine, (part.cls, dead)):
        return True
    reached = _reached_text(machine, (part.cls, dead))
    return reached is None or name in reached


def dead_code(machine: Machine, part: Instance) -> frozenset[ast.AST]:
    """Return what the settings of a module rule out in its methods, and the tests that they decide."""
    dead: set[ast.AST] = set()
    for cls in family(machine, part.cls):
        module = machine.script.module(cls.module)
        for test in module.index.within(cls.node, ast.IfExp) if module is not None else ():
            holds = _holds(machine, part, test.test)
            if holds is not None:
                dead |= {test.test, test.orelse if holds else test.body}
        for branch in module.index.within(cls.node, ast.If) if module is not None else ():
            holds = _holds(machine, part, branch.test)
            if holds is None or module is None:
                continue
            kept, gone = (branch.body, branch.orelse) if holds else (branch.orelse, branch.body)
            dead |= {branch.test, *gone}
            if kept and isinstance(kept[-1], (ast.Return, ast.Raise)):
                around = getattr(module.parents.get(branch), "body", [])
                dead.update(around[around.index(branch) + 1 :] if branch in around else ())
    return frozenset(dead)


def _holds(machine: Machine, part: Instance, test: ast.expr) -> bool | None:
    """Return how a test of a module's settings comes out, which only its constructor sets; None where that is open."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(machine, part, test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        decides = isinstance(test.op, ast.Or)
        found = [_holds(machine, part, one) for one in test.values]
        return decides if decides in found else None if None in found else not decides
    asked = test.left if isinstance(test, ast.Compare) and len(test.ops) == 1 else test
    if not isinstance(asked, ast.Attribute) or not is_own(asked) or asked.attr in _changed_later(machine.script):
        return None
    value = machine.store.get(part.number, asked.attr)
    if value is None or not isinstance(test, ast.Compare):
        return None if value is None else truth(value)
    other, known = test.comparators[0], constant(value)
    if known is ... or not isinstance(other, ast.Constant) or not isinstance(test.ops[0], _EQUALITY):
        return None
    return (known == other.value) == isinstance(test.ops[0], (ast.Eq, ast.Is))


_EQUALITY = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


@once
def _changed_later(script: Script) -> frozenset[str]:
    """Return the names of attributes that are set outside of constructors, or that a text in the script may name."""
    found: set[str] = set()
    for module in script.modules:
        for node in module.index.of(ast.Attribute):
            if not isinstance(node.ctx, ast.Load) and getattr(module.body_around(node), "name", "") != "__init__":
                found.add(node.attr)
        found.update(node.value for node in module.index.of(ast.Constant) if isinstance(node.value, str))
    return frozenset(found)


def _live(method: ast.AST, dead: Set[ast.AST]) -> list[ast.AST]:
    """Return a method and all below it, dead code left out."""
    found = [method]
    for node in found:
        found += [inner for inner in children_of(node) if inner not in dead]
    return found


def _is_without_gradient(machine: Machine, part: Instance, name: str) -> bool:
    """Return whether no use of an attribute records gradients, as with a teacher, and nothing is frozen anywhere."""
    script = machine.script
    if uses_part(script, ("requires_grad",)):
        return False
    uses = list(_uses(machine, part, name))
    alone = _all_loaded_words(script)[name] == len(uses)
    return (
        bool(uses)
        and alone
        and all(_records_nothing(module, node) or _ends_graph(module, node) for module, node in uses)
    )


def _uses(machine: Machine, part: Instance, name: str) -> Iterator[tuple[Module, ast.Attribute]]:
    for cls in family(machine, part.cls):
        module = machine.script.module(cls.module)
        for node in module.index.within(cls.node, ast.Attribute) if module is not None else ():
            if node.attr == name and isinstance(node.ctx, ast.Load) and module is not None:
                yield module, node


def _is_copied(machine: Machine, part: Instance, name: str) -> bool:
    """Return whether the parameters of an attribute are asked for, as those of a teacher that follows the student."""
    around = (module.parents.get(node) for module, node in _uses(machine, part, name))
    return any(isinstance(above, ast.Attribute) for above in around)


def _ends_graph(module: Module, node: ast.AST) -> bool:
    """Return whether of what a call of a part gives only indices or copies without a graph are used."""
    call = module.parents.get(node)
    return isinstance(call, ast.Call) and call.func is node and _is_cut(module, call)


def _is_cut(module: Module, value: ast.expr) -> bool:
    around = module.parents.get(value)
    if isinstance(around, ast.Attribute):
        return around.attr in _WITHOUT_GRADIENT
    if isinstance(around, ast.Call):
        return value in around.args and last_name(around.func) in _WITHOUT_GRADIENT
    if not (isinstance(around, ast.Assign) and len(around.targets) == 1 and isinstance(around.targets[0], ast.Name)):
        return False
    body, kept = module.body_around(value), around.targets[0].id
    named = [name for name in module.index.within(body, ast.Name) if name.id == kept]
    loads = [name for name in named if isinstance(name.ctx, ast.Load)]
    once = len(named) - len(loads) == 1
    return (
        once
        and bool(loads)
        and all(not isinstance(module.parents.get(name), ast.Assign) and _is_cut(module, name) for name in loads)
    )


def _records_nothing(module: Module, node: ast.AST) -> bool:
    """Return whether no gradients are recorded where a node stands, by a ``with`` or a decorator around it."""
    for around in module.ancestors(node):
        if isinstance(around, ast.With) and any(_is_no_grad(item.context_expr) for item in around.items):
            return True
        if isinstance(around, ast.FunctionDef):
            return any(map(_is_no_grad, around.decorator_list))
    return False


def _is_no_grad(node: ast.expr) -> bool:
    return last_name(node.func if isinstance(node, ast.Call) else node) in {"no_grad", "inference_mode"}


@once_each
def _forward_attributes(machine: Machine, key: tuple[ProjectClass, frozenset[ast.AST]]) -> frozenset[str]:
    cls, dead = key
    forwards = [node for node in cls.node.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    attributes = [node for method in forwards for node in _live(method, dead) if node.__class__ is ast.Attribute]
    return frozenset(node.attr for node in attributes if isinstance(node.ctx, ast.Load))


@once_each
def _reached_text(machine: Machine, key: tuple[ProjectClass, frozenset[ast.AST]]) -> set[str] | None:
    """Return the words outside of methods of a class that nothing leads to; None when any attribute may be meant.

    With the class goes the code in it that is dead.
    """
    cls, dead = key
    script, own = machine.script, family(machine, cls)
    bodies = {node for cls in own for node in descend(cls.node)}
    inside = Counter(word for node in bodies for word in _loaded_words(node))
    outside = {word for word, count in _all_loaded_words(script).items() if count > inside[word]}
    methods: dict[str, list[ast.AST]] = {}
    for cls in own:
        for statement in cls.node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                methods.setdefault(statement.name, []).append(statement)
    waiting = [name for name in methods if name in outside or name in _ENTERED]
    words, seen = set(outside), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = {word for method in methods[name] for node in _live(method, dead) for word in _loaded_words(node)}
        if found & _ALL_AT_ONCE and name != "__init__":
            return None
        if name == "__init__" and found & {"getattr", "setattr", "__dict__", "add_module"}:
            return None
        words |= found
        waiting.extend(found & methods.keys())
    return words


@once
def _all_loaded_words(script: Script) -> Counter[str]:
    kinds = (ast.Attribute, ast.Constant, ast.Name)
    nodes = (node for module in script.modules for kind in kinds for node in module.index.of(kind))
    return Counter(word for node in nodes for word in _loaded_words(node))


def _loaded_words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if len(node.value) < 200 and not any(map(str.isspace, node.value)):  # Sentences name no attribute.
            yield from re.findall(r"\w+", node.value)
    elif isinstance(node, ast.Name) and (node.id in _ALL_AT_ONCE or node.id == "setattr"):
        yield node.id


def _places(machine: Machine, part: Instance, names: Sequence[str]) -> Iterator[Location]:
    for name in names:
        for cls in family(machine, part.cls):
            module = machine.script.module(cls.module)
            for node in descend(cls.node):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
                if stored and module is not None:
                    yield module.location(node)
                    break


def _always_used(machine: Machine, wrap: Event, modules: Sequence[Instance]) -> int:
    """Return how many attributes with parameters are used in every forward; 0 where any of it is not certain."""
    module = wrap.argument("module", 0)
    if module is None or not modules or not _only_known_parts(machine, module):
        return 0
    count = 0
    for part in modules:
        forwards = [node for node in part.cls.node.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
        others = [base for base in bases_of(machine, part.cls) if isinstance(base, ProjectClass)]
        names, dead = list(parameter_attributes(machine, part, in_some_way=True)), dead_code(machine, part)
        if len(forwards) != 1 or others or not _is_straight(_live(forwards[0], dead), names, dead):
            return 0
        words = {word for node in _live(forwards[0], dead) for word in _loaded_words(node)}
        if any(name not in words for name in names):
            return 0
        count += len(names)
    return count


def _only_known_parts(machine: Machine, module: Value) -> bool:
    for part in parts_of_module(machine, module):
        # Of two modules, one of which is made, or of one that may be missing, the own parts are not walked.
        known = all(
            isinstance(option, (Const, SequenceValue))  # Its items are parts themselves.
            or (isinstance(option, ExternalObject) and option.name.startswith("torch.nn."))
            for option in options_of(part)
        )
        if not known and not (isinstance(part, Instance) and _is_readable(machine, part.cls)):
            return False
    return True


def _is_straight(forward: Sequence[ast.AST], names: Sequence[str], dead: Set[ast.AST]) -> bool:
    """Return whether a forward comes to every part in ``names`` with each input, as far as its statements show."""
    branching = (
        *(ast.If, ast.IfExp, ast.While, ast.Try, ast.Match, ast.BoolOp, ast.For, ast.ListComp, ast.With, ast.Lambda),
        *(ast.Continue, ast.Break),
    )
    words = {word for node in forward for word in _loaded_words(node)}
    if words & {"no_grad", "checkpoint", "training", "inference_mode", "item", *_WITHOUT_GRADIENT}:
        return False
    return all(
        _skips_absent_part(node, names) or _goes_through_parts(node)
        for node in forward
        if isinstance(node, branching) and getattr(node, "test", None) not in dead
    )


def _skips_absent_part(node: ast.AST, names: Sequence[str]) -> bool:
    """Return whether a statement skips only an absent part: ``if self.norm is not None: x = self.norm(x)``."""
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.test, ast.Compare):
        return False
    asked, (other,), (operator,) = node.test.left, node.test.comparators[:1], node.test.ops[:1]
    is_there = isinstance(operator, ast.IsNot) and isinstance(other, ast.Constant) and other.value is None
    if not (is_there and len(node.test.ops) == 1 and is_own(asked)):
        return False
    inside = [inner for statement in node.body for inner in descend(statement)]
    if any(isinstance(inner, (ast.Return, ast.Raise)) for inner in inside):
        return False
    used = {inner.attr for inner in inside if isinstance(inner, ast.Attribute)}
    return isinstance(asked, ast.Attribute) and not used & {name for name in names if name != asked.attr}


def _goes_through_parts(node: ast.AST) -> bool:
    """Return whether a loop goes through all parts, ``for layer in self.layers``, without ``return`` or ``raise``."""
    if not isinstance(node, ast.For) or node.orelse or not is_own(node.iter):
        return False
    return not any(isinstance(inner, (ast.Return, ast.Raise)) for inner in descend(node))


def is_own(node: ast.AST) -> bool:
    """Return whether an expression is an attribute of ``self``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


# The names of the parameters of wrapped modules in the order in which DDP counts them, as far as the source shows.
#
# A module's own parameters come before those of its parts, and its parts in the order of their first assignment: DDP
# counts those that need a gradient. Behind a part with unknown parameters no number is known.

_WEIGHT_AND_BIAS = regex(
    r"torch\.nn\.(Linear|Bilinear|Conv\dd|ConvTranspose\dd|LayerNorm|GroupNorm|BatchNorm\dd|SyncBatchNorm)$"
)
_WEIGHT = regex(r"torch\.nn\.(Embedding|EmbeddingBag|RMSNorm|PReLU)$")
_WITHOUT = regex(
    r"torch\.nn\.(\w*Loss|\w*ReLU6?|\w*ELU|Sigmoid|LogSigmoid|Tanh\w*|\w*[sS]oftmax\w*|Soft\w+|Hard\w+|SiLU|Mish"
    r"|\w*Dropout\w*|\w*Pool\dd|Flatten|Unflatten|Identity|Upsample|\w*Pad\dd|Pixel(?:Uns|S)huffle|Fold|Unfold"
    r"|CosineSimilarity|PairwiseDistance|InstanceNorm\dd|LocalResponseNorm)$"
)
_ATTENTION = "torch.nn.MultiheadAttention"
_CONTAINERS = frozenset({"torch.nn.Sequential", "torch.nn.ModuleList"})
_PARAMETER = "torch.nn.Parameter"
MOST_NAMES = 100_000


class _UnknownError(Exception):
    """The source does not show which parameter comes next."""


def parameter_names(script: Script) -> tuple[str, ...]:
    """Return the names by their numbers; fewer than there are where the source does not show them, or wraps differ."""
    if uses_part(script, ("requires_grad",)):
        return ()  # Which ones DDP counts is then decided elsewhere.
    projection = whole_projection(script)
    found: set[tuple[str, ...]] = set()
    for wrap in projection.in_course("wrap"):
        module = wrap.argument("module", 0)
        names: list[str] = []
        try:
            if module is None or len(list(options_of(module))) != 1:
                return ()
            for name in _names(projection.machine, module, ""):
                names.append(name)
                if len(names) >= MOST_NAMES:
                    break
        except _UnknownError:
            pass
        found.add(tuple(names))
    return found.pop() if len(found) == 1 else ()


def _names(machine: Machine, value: Value, prefix: str) -> Iterator[str]:
    if isinstance(value, (Const, Function, ProjectClass)):
        return
    if isinstance(value, Instance):
        yield from _of_instance(machine, value, prefix)
        return
    made = machine.object(value)
    if made is None or not made.complete:
        raise _UnknownError
    if made.name in _CONTAINERS:
        parts = [part for item in made.positional for part in _items(item)]
        for number, part in enumerate(parts):
            yield from _names(machine, part, f"{prefix}{number}.")
    elif _WITHOUT.match(made.name):
        if "InstanceNorm" in made.name and made.named:
            raise _UnknownError
    else:
        yield from (f"{prefix}{name}" for name in _of_layer(made))


def _items(value: Value) -> tuple[Value, ...]:
    if not isinstance(value, SequenceValue):
        return (value,)
    if value.open:
        raise _UnknownError
    return value.values


def _of_layer(made: Event) -> tuple[str, ...]:
    named = ("bias", "affine", "elementwise_affine")
    switches = {name: constant(option) for name, option in made.named.items() if name in named}
    if any(not isinstance(switch, bool) for switch in switches.values()):
        raise _UnknownError
    if switches.get("affine") is False or switches.get("elementwise_affine") is False:
        return ()
    bias = () if switches.get("bias") is False else ("bias",)
    if _WEIGHT_AND_BIAS.match(made.name):
        if made.name == "torch.nn.Linear" and len(made.positional) > 2:
            raise _UnknownError
        return ("weight", *bias)
    if _WEIGHT.match(made.name):
        return ("weight",)
    if made.name == _ATTENTION and not made.named.keys() & {"kdim", "vdim", "add_bias_kv"}:
        inner = ("in_proj_bias",) if bias else ()
        return ("in_proj_weight", *inner, "out_proj.weight", *(f"out_proj.{name}" for name in bias))
    raise _UnknownError


def _of_instance(machine: Machine, value: Instance, prefix: str) -> Iterator[str]:
    if not _is_plain(machine, value.cls):
        raise _UnknownError
    attributes = [name for name in machine.store.names(value.number) if not name.startswith(("buffer ", "__"))]
    parts: list[tuple[str, Value]] = []
    for name in attributes:
        part = machine.store.get(value.number, name)
        if part is None:
            continue
        if isinstance(part, ExternalObject) and part.name == _PARAMETER:
            yield f"{prefix}{name}"
        else:
            parts.append((name, part))
    for name, part in parts:
        yield from _names(machine, part, f"{prefix}{name}.")


def _is_plain(machine: Machine, cls: ProjectClass) -> bool:
    """Return whether the parts of a module are assigned one after the other, whatever its arguments are."""
    if set(base_names(machine, cls)) != {"torch.nn.Module"} or any(
        isinstance(base, ProjectClass) for base in bases_of(machine, cls)
    ):
        return False
    for method in cls.node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for node in descend(method):
                if isinstance(node, (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.IfExp, ast.Match)):
                    return False
                if isinstance(node, ast.Attribute) and node.attr in {"add_module", "register_module", "apply"}:
                    return False
    return True
