"""One parsed file: its tree, its imports, and the names that its expressions stand for."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, lru_cache, wraps
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from ddpdoctor.finding import Location
from ddpdoctor.source.vocabulary import canonical

Node = TypeVar("Node", bound=ast.AST)


class NodeIndex:
    """Every node of a tree, parents before children; operators and contexts (``Load``) are left out.

    All checks use the index instead of walking the tree: walking it once costs half of what parsing cost.
    """

    def __init__(self, tree: ast.AST) -> None:
        found: list[ast.AST] = [tree]
        places: dict[type[ast.AST], list[int]] = defaultdict(list)
        definitions = [-1]
        outer: dict[int, int] = {}
        parents: list[ast.AST] = []
        for position, node in enumerate(found):
            kind = node.__class__
            places[kind].append(position)
            fields = _FIELDS.get(kind)
            if not fields:
                if fields is None:
                    fields = _fields_of(kind)
                if not fields:
                    continue
            if kind in DEFINITIONS:
                outer[position] = definitions[position]
                definitions[position] = position
            before = len(found)
            for name in fields:
                value = getattr(node, name, None)
                if value.__class__ is list:
                    found += [child for child in value if child is not None] if kind in _WITH_GAPS else value
                elif value is not None:
                    found.append(value)
            count = len(found) - before
            if count == 1:
                definitions.append(definitions[position])
                parents.append(node)
            elif count:
                definitions += [definitions[position]] * count
                parents += [node] * count
        self.nodes: Sequence[ast.AST] = found
        self.definitions: Sequence[int] = definitions
        """For every node the position in ``nodes`` of the function or class around it, or of itself; -1 for none."""
        self.outer_definitions: Mapping[int, int] = outer
        """For the position of every function and class that of the one around it; -1 for none."""
        self._places: Mapping[type[ast.AST], Sequence[int]] = dict(places)
        self._parents = parents
        self._by_class: dict[type[ast.AST], list[ast.AST]] = {}

    def places(self, *kinds: type[ast.AST]) -> Sequence[int]:
        """Return the positions in ``nodes`` of the nodes of some classes, in order."""
        if len(kinds) == 1:
            return self._places.get(kinds[0], ())
        return sorted(place for kind in kinds for place in self._places.get(kind, ()))

    def of(self, kind: type[Node]) -> Sequence[Node]:
        """Return the nodes of one class, in order."""
        known = self._by_class.get(kind)
        if known is None:
            known = self._by_class[kind] = [self.nodes[place] for place in self._places.get(kind, ())]
        return known  # type: ignore[return-value]

    def within(self, around: ast.AST, kind: type[Node]) -> Sequence[Node]:
        """Return the nodes of one class, with places in the text, inside of a function, a statement or the module."""
        nodes = self.of(kind)
        if isinstance(around, ast.Module):
            return nodes
        start, end = _start(around), _end(around)
        return [node for node in nodes if start <= _start(node) and _end(node) <= end]

    @cached_property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        """The parent of every node but the root."""
        return dict(zip(self.nodes[1:], self._parents, strict=True))


def _start(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def children_of(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node, operators and contexts left out."""
    kind = node.__class__
    fields = _FIELDS.get(kind)
    if fields is None:
        fields = _fields_of(kind)
    found: list[ast.AST] = []
    for name in fields:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [child for child in value if child is not None] if kind in _WITH_GAPS else value
        elif value is not None:
            found.append(value)
    return found


def descend(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it, parents first; operators and contexts are left out."""
    found = [node]
    for inner in found:
        if inner.__class__ not in LEAVES:
            found += children_of(inner)
    return found


def descend_outside(node: ast.AST, closed: Set[type[ast.AST]]) -> Iterator[ast.AST]:
    """Yield the nodes below a node, without going into those of some classes."""
    waiting = children_of(node)
    while waiting:
        inner = waiting.pop()
        yield inner
        if inner.__class__ not in closed:
            waiting += children_of(inner)


def made_from(node: ast.AST, body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, and of what the variables that it reads are assigned in the body around it."""
    return _followed(node, dict(_bound_in(body, False)))


def origins_of(node: ast.AST, body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, and of what its variables are assigned, run over, filled or shuffled by."""
    return _followed(node, dict(_bound_in(body, True)))


FILLS = frozenset({"add", "append", "extend", "insert", "update"})
"""Methods by which a list, a set or a dictionary takes something in; they return nothing."""


@lru_cache(maxsize=64)  # Checks ask one body after the other: without it a seventh of their time went here.
def _bound_in(body: ast.AST, by_any_way: bool) -> dict[str, list[ast.expr]]:
    """Return what the variables of a body are assigned; ``by_any_way``, what else they get, too."""
    bound: dict[str, list[ast.expr]] = {}
    # At the top of a module a function's variables are others of the same names.
    for inner in descend_outside(body, DEFINITIONS) if isinstance(body, ast.Module) else descend(body):
        targets: Iterable[tuple[ast.expr | None, ast.expr]] = ()
        if isinstance(inner, ast.Assign):
            targets = [(target, inner.value) for target in inner.targets]
        elif not by_any_way:
            continue
        elif isinstance(inner, (ast.For, ast.comprehension)):
            targets = [(inner.target, inner.iter)]
        elif isinstance(inner, ast.With):
            targets = [(item.optional_vars, item.context_expr) for item in inner.items]
        elif isinstance(inner, ast.Call) and last_name(inner.func) == "shuffle" and inner.args:
            targets = [(inner.args[0], inner)]
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in FILLS:
            targets = [(inner.func.value, given) for given in inner.args]
        for target, value in targets:
            for name in _names_bound(target) if by_any_way else (target,):
                if isinstance(name, ast.Name):
                    bound.setdefault(name.id, []).append(value)
    return bound


def _names_bound(target: ast.expr | None) -> Iterator[ast.expr | None]:
    """Yield the variables that get something of what a target is given: of ``name, one`` both, of ``rows[0]`` rows."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from _names_bound(part)
    else:
        while isinstance(target, (ast.Subscript, ast.Starred)):
            target = target.value
        yield target


def _followed(node: ast.AST, bound: dict[str, list[ast.expr]]) -> Iterator[ast.AST]:
    pending = [node]
    while pending:
        for inner in descend(pending.pop()):
            yield inner
            if isinstance(inner, ast.Name):
                pending += bound.pop(inner.id, ())


def functions_named(modules: Iterable[Module], name: str) -> list[tuple[Module, ast.FunctionDef]]:
    """Return the functions and methods of a name in some modules."""
    return [(module, one) for module in modules for one in module.index.of(ast.FunctionDef) if one.name == name]


def argument_of(call: ast.AST, name: str, position: int = -1) -> ast.expr | None:
    """Return what a call is given by a name or at a position, as it is written; None for another node."""
    if not isinstance(call, ast.Call):
        return None
    by_position = call.args[position] if 0 <= position < len(call.args) else None
    return next((word.value for word in call.keywords if word.arg == name), by_position)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters of a function that have a name, those that are given by position first."""
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def last_name(node: ast.AST) -> str:
    """Return the last name of what is called or taken from something: ``c`` in ``a.b().c``; empty when it has none."""
    kind = node.__class__
    if kind is ast.Attribute:
        return node.attr  # type: ignore[attr-defined,no-any-return]
    return node.id if kind is ast.Name else ""  # type: ignore[attr-defined]


LEAVES = frozenset({ast.Name, ast.Constant, ast.alias, ast.Global, ast.Nonlocal, ast.Pass, ast.Break, ast.Continue})
"""Classes of nodes that hold no others."""
DEFINITIONS = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef})
"""Classes of nodes that bind a name to code which runs at another time, or in a scope of its own."""
_WITH_GAPS = frozenset({ast.Dict, ast.arguments})
"""Classes whose lists of nodes may hold None: ``{**other}``, and parameters without a default."""
# Fields that hold no nodes, or only operators and contexts.
_WITHOUT_NODES = frozenset(
    {"arg", "attr", "conversion", "ctx", "id", "is_async", "kind", "kwd_attrs", "lineno", "module", "level", "name"}
    | {"op", "ops", "rest", "simple", "str", "tag", "type_comment", "type_ignores"}
)
# Fields that hold nodes, of classes in which a field of the same name as in others holds something else.
_EXCEPTIONS: Mapping[str, tuple[str, ...]] = {"MatchSingleton": (), "TypeAlias": ("name", "type_params", "value")}
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = dict.fromkeys(LEAVES, ())
"""Fields that hold nodes, by the class of a node, filled as classes are met."""


def _fields_of(kind: type[ast.AST]) -> tuple[str, ...]:
    fields = _EXCEPTIONS.get(kind.__name__)
    if fields is None:
        fields = tuple(name for name in kind._fields if name not in _WITHOUT_NODES)
    _FIELDS[kind] = fields
    return fields


# Names that `from torch.utils.data import *` and the like bring, as far as something is made of them here.

_DISTRIBUTED = """
    init_process_group destroy_process_group is_initialized is_available get_rank get_world_size new_group barrier
    monitored_barrier all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single
    broadcast broadcast_object_list gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter
    scatter_object_list ReduceOp
"""
_MODULES = """
    Module Sequential ModuleList ModuleDict Parameter Linear Bilinear Identity Flatten Unflatten Embedding Dropout
    Dropout2d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d BatchNorm2d BatchNorm3d
    SyncBatchNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d GroupNorm LayerNorm ReLU LeakyReLU PReLU ELU GELU SiLU
    Tanh Sigmoid Softmax LogSoftmax MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d
    AdaptiveAvgPool2d AdaptiveMaxPool2d Upsample ZeroPad2d RNN LSTM GRU MultiheadAttention Transformer
    TransformerEncoder TransformerEncoderLayer CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss BCELoss
    BCEWithLogitsLoss DataParallel
"""
_DATA = """
    DataLoader Dataset IterableDataset TensorDataset Subset ConcatDataset ChainDataset StackDataset random_split Sampler
    SequentialSampler RandomSampler SubsetRandomSampler WeightedRandomSampler BatchSampler DistributedSampler
    get_worker_info
"""
_DATASETS = """
    MNIST FashionMNIST KMNIST EMNIST QMNIST USPS Omniglot CIFAR10 CIFAR100 SVHN STL10 ImageNet ImageFolder DatasetFolder
    FakeData CelebA Caltech101 Caltech256 Cityscapes CocoCaptions CocoDetection VOCDetection VOCSegmentation Flowers102
    Food101 OxfordIIITPet Places365 StanfordCars SBDataset LSUN LFWPairs LFWPeople UCF101 HMDB51 Kinetics
"""
_TRANSFORMS = """
    Compose ToTensor PILToTensor Normalize Resize CenterCrop RandomCrop RandomResizedCrop RandomHorizontalFlip
    RandomVerticalFlip RandomRotation RandomAffine RandomErasing RandomGrayscale RandomApply RandomChoice ColorJitter
    GaussianBlur AutoAugment RandAugment TrivialAugmentWide Pad Grayscale Lambda
"""
_OPTIMIZERS = "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD LBFGS SparseAdam"
_SCHEDULERS = """
    LambdaLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR CosineAnnealingLR CosineAnnealingWarmRestarts
    CyclicLR OneCycleLR ReduceLROnPlateau SequentialLR PolynomialLR
"""
STARS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        module: frozenset(names.split())
        for module, names in (
            ("torch.distributed", _DISTRIBUTED),
            ("torch.nn", _MODULES),
            ("torch.nn.parallel", "DistributedDataParallel DataParallel"),
            ("torch.multiprocessing", "spawn Process Queue set_start_method"),
            ("torch.utils.data", _DATA),
            ("torch.utils.data.distributed", "DistributedSampler"),
            ("torch.optim", _OPTIMIZERS),
            ("torch.optim.lr_scheduler", _SCHEDULERS),
            ("torchvision.datasets", _DATASETS),
            ("monai.data", "DataLoader DistributedSampler"),
            ("torchvision.transforms", _TRANSFORMS),
        )
    }
)
"""By module the names that its star brings."""


Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Import(msgspec.Struct, frozen=True):
    """One imported name, wherever in the module the statement stands."""

    module: str
    """Absolute dotted name of the module; empty when a relative import leaves the project."""
    name: str
    """Name taken from the module; empty for ``import module``, ``*`` for a star import."""
    bound_as: str
    """Local name; empty for a star import."""
    line: int


Held = TypeVar("Held")
Found = TypeVar("Found")
Key = TypeVar("Key")


def once(function: Callable[[Held], Found]) -> Callable[[Held], Found]:
    """Compute once for each script, module or projection that it is given, and keep it there."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(owner: Held) -> Found:
        held = owner.__dict__
        if name not in held:
            held[name] = function(owner)
        found: Found = held[name]
        return found

    return kept


def once_each(function: Callable[[Held, Key], Found]) -> Callable[[Held, Key], Found]:
    """As ``once``, for each second argument: an object, a class, or a name."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(owner: Held, key: Key) -> Found:
        held: dict[Key, Found] = owner.__dict__.setdefault(name, {})
        if key not in held:
            held[key] = function(owner, key)
        return held[key]

    return kept


def all_once(function: Callable[[Held], Iterable[Found]]) -> Callable[[Held], tuple[Found, ...]]:
    """As ``once``, of all that a function yields."""
    return once(wraps(function)(lambda owner: tuple(function(owner))))


class Module(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A parsed source file."""

    path: Path
    """Absolute."""
    name: str
    """Dotted name by which project files import it; ``__main__`` for the entry script."""
    package: str
    """Dotted name of the package that relative imports start from; empty outside of packages."""
    text: str
    tree: ast.Module

    @cached_property
    def index(self) -> NodeIndex:
        """Every node of the tree."""
        return NodeIndex(self.tree)

    @property
    def nodes(self) -> Sequence[ast.AST]:
        """Every node, parents before children; operators and contexts (``Load``), which nodes share, are left out."""
        return self.index.nodes

    @property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        """The parent of every node but the root."""
        return self.index.parents

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import statement of the file, those in functions included."""
        nodes = self.index.nodes
        statements = (nodes[place] for place in self.index.places(ast.Import, ast.ImportFrom))
        return tuple(entry for statement in statements for entry in _imports_of(statement, self.package))

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Local names that stand for dotted full names, by imports and by plain assignments at module level."""
        names = self._of_stars()
        names.update({entry.bound_as: full_name(entry) for entry in self.imports if entry.bound_as and entry.module})
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Name, ast.Attribute)):
                target = dotted(statement.value)
                head, _, rest = target.partition(".")
                if target and head in names:
                    full = f"{names[head]}.{rest}" if rest else names[head]
                    names.update({name.id: full for name in statement.targets if isinstance(name, ast.Name)})
        return names

    def _of_stars(self) -> dict[str, str]:
        """Return what star imports of libraries bring, but for what the module defines itself."""
        stars = [entry.module for entry in self.imports if entry.name == "*" and entry.module in STARS]
        brought = {name: canonical(f"{star}.{name}") for star in stars for name in STARS[star]}
        if brought:
            own = {statement.name for statement in self.tree.body if isinstance(statement, Scope)}
            own |= {node.id for node in self.index.of(ast.Name) if isinstance(node.ctx, ast.Store)}
            brought = {name: full for name, full in brought.items() if name not in own}
        return brought

    def adopt(self, names: Mapping[str, str]) -> None:
        """Take in names that a star import brings, where the file gives them no other meaning."""
        new = {name: full for name, full in names.items() if name not in self.aliases}
        if new:
            self.__dict__["aliases"] = {**self.aliases, **new}
            self.__dict__.pop("_calls", None)

    def resolve(self, node: ast.AST) -> str:
        """Return the canonical full name of an expression, such as ``torch.distributed.all_reduce``; or empty."""
        names: list[str] = []
        while node.__class__ is ast.Attribute:
            names.append(node.attr)
            node = node.value
        full = self.aliases.get(node.id) if node.__class__ is ast.Name else None
        if not full:
            return ""
        names.append(full)
        return canonical(".".join(reversed(names)))

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield every call with the full name of what it calls, where an import or an alias shows it."""
        return iter(self._calls)

    @cached_property
    def calls_by_name(self) -> Mapping[str, Sequence[ast.Call]]:
        """Every call by the last name of what it calls."""
        found: dict[str, list[ast.Call]] = {}
        for node in self.index.of(ast.Call):
            found.setdefault(last_name(node.func), []).append(node)
        return found

    @property
    def sets_by_name(self) -> bool:
        """Whether it may set attributes by names that are not written as attributes: setattr, vars, ``__dict__``."""
        by_call = not self.calls_by_name.keys().isdisjoint(("setattr", "__setattr__", "vars"))
        return by_call or "__dict__" in self.text

    @cached_property
    def words(self) -> frozenset[str]:
        """The attributes that occur in the file, and the variables that it reads."""
        names = [node.id for node in self.index.of(ast.Name) if node.ctx.__class__ is ast.Load]
        return frozenset(names).union([node.attr for node in self.index.of(ast.Attribute)])

    @cached_property
    def _calls(self) -> tuple[tuple[ast.Call, str], ...]:
        found = ((node, self.resolve(node.func)) for node in self.index.of(ast.Call))
        return tuple((node, name) for node, name in found if name)

    def assigning(self, around: ast.AST, *names: str) -> list[ast.Assign]:
        """Return the assignments to variables of some names inside of a function, a statement or the module."""
        found = self.index.within(around, ast.Assign)
        return [one for one in found if any(isinstance(to, ast.Name) and to.id in names for to in one.targets)]

    def assigned(self, around: ast.AST, name: ast.expr) -> list[ast.expr]:
        """Return what a variable or an attribute, as it is written, is set to inside of a function or the module."""
        last, text = last_name(name), ast.unparse(name)
        found = self.index.within(around, ast.Assign)
        return [one.value for one in found for to in one.targets if last_name(to) == last and ast.unparse(to) == text]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around ``node``, innermost first."""
        parents = self.parents
        while node in parents:
            node = parents[node]
            yield node

    def in_function(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around ``node`` in its function, innermost first."""
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return takewhile(lambda around: not isinstance(around, functions), self.ancestors(node))

    def is_in_handler(self, node: ast.AST) -> bool:
        """Return whether a node stands in an ``except`` clause of its function."""
        return any(isinstance(around, ast.ExceptHandler) for around in self.in_function(node))

    def in_other_arms(self, one: ast.AST, other: ast.AST) -> bool:
        """Return whether two nodes are in different arms of an ``if``."""
        mine, others = self._arms(one), self._arms(other)
        return any(others[around] != arm for around, arm in mine.items() if around in others)

    def _arms(self, node: ast.AST) -> dict[ast.If, bool]:
        """Return the ``if`` statements around a node, with True where it is in the body and False where in the else."""
        arms: dict[ast.If, bool] = {}
        for around in self.ancestors(node):
            if isinstance(around, ast.If) and node is not around.test:
                arms[around] = node in around.body
            node = around
        return arms

    def body_around(self, node: ast.AST) -> ast.AST:
        """Return the innermost function around a node; the whole tree at module level."""
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((around for around in self.ancestors(node) if isinstance(around, functions)), self.tree)

    def block_around(self, node: ast.AST) -> ast.AST:
        """Return the first statement of the list that a node is in: the one body that runs or is passed over."""
        inner = node
        for around in self.ancestors(node):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(around, field, None)
                if isinstance(statements, list) and inner in statements:
                    first: ast.AST = statements[0]
                    return first
            inner = around
        return self.tree

    def function_of(self, node: ast.AST) -> str:
        """Return the qualified name of the function (or class) around a node; empty at module level."""
        names = [around.name for around in self.ancestors(node) if isinstance(around, Scope)]
        return ".".join(reversed(names))

    def location(self, node: ast.AST) -> Location:
        """Return the whole extent of a node."""
        line = getattr(node, "lineno", 1)
        end_line = getattr(node, "end_lineno", None) or line
        return Location(
            file=str(self.path),
            line=line,
            column=self.column(line, getattr(node, "col_offset", 0)),
            end_line=end_line,
            end_column=self.column(end_line, getattr(node, "end_col_offset", None) or 0),
            function=self.function_of(node),
        )

    def head_location(self, node: ast.AST) -> Location:
        """Return the first line of a statement, without its body."""
        whole = self.location(node)
        return Location(file=whole.file, line=whole.line, column=whole.column, function=whole.function)

    def column(self, line: int, offset_bytes: int) -> int:
        """Turn the parser's byte offset in a line into a 1-based column of characters."""
        source = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        return len(source.encode("utf-8")[:offset_bytes].decode("utf-8", "replace")) + 1

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of the text as the parser counts them."""
        return tuple(self.text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node as it stands in the file; empty when the node has no end."""
        return ast.get_source_segment("\n".join(self.lines), node) or ""

    def excerpt(self, node: ast.AST, longest: int = 80) -> str:
        """Return the source of a node on one line, shortened."""
        text = self._text_of(node)
        return text if len(text) <= longest else text[: longest - 3] + "..."

    @once_each
    def _text_of(self, node: ast.AST) -> str:
        try:
            return " ".join(ast.unparse(node).split())
        except RecursionError:
            start = getattr(node, "lineno", 1) - 1
            return " ".join(" ".join(self.lines[start : getattr(node, "end_lineno", start + 1)]).split())


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for a chain of attributes on a name; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def full_name(entry: Import) -> str:
    """Return what the local name of an import stands for."""
    if entry.name:
        return f"{entry.module}.{entry.name}"
    return (
        entry.module if "." not in entry.module or entry.bound_as != entry.module.partition(".")[0] else entry.bound_as
    )


def _imports_of(node: ast.AST, package: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound_as = alias.asname or alias.name.partition(".")[0]
            yield Import(alias.name, "", bound_as, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        module = absolute(node.module or "", node.level, package)
        for alias in node.names:
            bound_as = "" if alias.name == "*" else alias.asname or alias.name
            yield Import(module, alias.name, bound_as, node.lineno)


def absolute(module: str, level: int, package: str) -> str:
    """Resolve a relative import of ``level`` dots within ``package``; empty when it leaves the project."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if level - 1 > len(parts):
        return ""
    base = parts[: len(parts) - (level - 1)]
    return ".".join([*base, module] if module else base)


RECURSION_LIMIT = 12_000
"""Enough for sums of 3,000 terms."""


@contextmanager
def deep_recursion(depth: int = RECURSION_LIMIT) -> Iterator[None]:
    """Allow for code that is nested deeply: a long sum is as deep as it has terms."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, depth))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
