"""Backward passes and optimizer steps."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Optional
from weakref import ReferenceType, WeakKeyDictionary, ref

from ...journal import Journal
from ...observed import OptimizerSizes, parameters_of, tensor_digest
from ...torch_compat import on_call
from ..data.loaders import Loaders
from ..schedule import Ending, Pace, Schedule
from ..surroundings import CpuThreads
from .ddp_modules import Modules
from .reduction import ReducedLosses, calls_written, is_zero, note_written_averages

# When and where each parameter came into a module, and what it is called there.

_DEEPEST = 64


class _Origin(NamedTuple):
    parameter: ReferenceType[Any]
    moment: int
    site: int
    module: ReferenceType[Any]
    name: str


class Origins:
    """Listeners at torch's hooks of registered parameters and modules."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._came: dict[int, _Origin] = {}
        """When a parameter first came into a module, by its identity, which a later one may have again."""
        self._above: WeakKeyDictionary[Any, tuple[ReferenceType[Any], str]] = WeakKeyDictionary()
        """The module that each module is a part of, and its name there."""
        self.moment = 0
        """Parameters that came by now."""

    def install(self) -> None:
        """Listen from here on."""
        hooks, journal = sys.modules["torch.nn.modules.module"], self._journal
        for kind, note in (("parameter", self._note_parameter), ("module", self._note_module)):
            register = getattr(hooks, f"register_module_{kind}_registration_hook")
            register(lambda *made, note=note: journal.guarded(note, *made, harms=("unheld_parameters",)))

    def came_after(self, parameter: Any, moment: int) -> bool:
        """Return whether a parameter came into a module after a moment; False where it was not seen to come."""
        known = self._known(parameter)
        return known is not None and known.moment > moment

    def origin_of(self, parameter: Any) -> tuple[int, str]:
        """Return the call chain that made a parameter, -1 where it is not known, and its name and model, likewise."""
        known = self._known(parameter)
        if known is None:
            return -1, ""
        path, module = [known.name], known.module()
        while module is not None and len(path) < _DEEPEST and (above := self._above.get(module)) is not None:
            owner = above[0]()
            if owner is None:
                break
            path, module = [above[1], *path], owner
        return known.site, f"{'.'.join(path)} of {type(module).__qualname__}" if module is not None else ""

    def _known(self, parameter: Any) -> Optional[_Origin]:
        known = self._came.get(id(parameter))
        return known if known is not None and known.parameter() is parameter else None

    def _note_parameter(self, module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and self._known(parameter) is None:
            self.moment += 1
            site = self._journal.site(sys._getframe())
            self._came[id(parameter)] = _Origin(ref(parameter), self.moment, site, ref(module), name)

    def _note_module(self, module: Any, name: str, part: Any) -> None:
        if part is not None:
            self._above[part] = ref(module), name


# Which ranks load the state of optimizers, schedulers and gradient scalers, and what these hold at the first step.

LOADS_NOTED = 200
VALUES_DIGESTED = 512
BYTES_OF_A_TENSOR = 1 << 12


class TrainingState:
    """Objects with training state, counted in the order in which they are made, and what is loaded into them."""

    def __init__(self, journal: Journal, torch: Any, replicas: Replicas) -> None:
        self._journal = journal
        self._replicas = replicas
        self._torch = torch
        self._known: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
        self._made: dict[str, int] = {}
        self._kinds: dict[Any, str] = {}
        """What objects of a class are, and of those that derive from it."""
        self._loads = 0
        self._plateau_steps = 0

    def install(self) -> None:
        """Listen to construction and loading of the base classes."""
        torch = self._torch
        schedulers = [
            class_
            for class_ in vars(torch.optim.lr_scheduler).values()
            if isinstance(class_, type) and hasattr(class_, "load_state_dict")
        ]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        on_call(self._journal, plateau, "step", before=self._note_plateau, harms=("training_states",))
        self._kinds = {
            **dict.fromkeys(schedulers, "scheduler"),
            torch.optim.Optimizer: "optimizer",
            torch.amp.GradScaler: "scaler",
        }
        for class_ in self._kinds:
            for name, tell in (("__init__", self._count), ("load_state_dict", self._note_load)):
                if name in vars(class_):
                    on_call(self._journal, class_, name, after=tell, harms=("training_states",))

    def note_first_step(self) -> None:
        """Digest every state, before the first optimizer step: what was loaded or sent around is there by then."""
        for held, (kind, number) in list(self._known.items()):
            self._journal.event(
                "training_state",
                kind=kind,
                number=number,
                type=type(held).__qualname__,
                digest=self._digest(_optimizer_values(held) if kind == "optimizer" else vars(held).values()),
                wraps=self._wraps_of(held),
            )

    def _wraps_of(self, held: Any) -> list[int]:
        """Return the wraps of the parameters that it steers; empty when that is not known."""
        steered = held if isinstance(held, self._torch.optim.Optimizer) else getattr(held, "optimizer", None)
        return [] if steered is None else self._replicas.scope_of(steered)[0]

    def _digest(self, values: Iterable[Any]) -> str:
        """Return a digest of the numbers and tensors among some values; other objects are left out."""
        digest = hashlib.blake2b(digest_size=8)
        for value in itertools.islice(values, VALUES_DIGESTED):
            if isinstance(value, self._torch.Tensor):
                digest.update(tensor_digest(value, BYTES_OF_A_TENSOR).encode())
            elif _is_plain(value):
                digest.update(repr(value).encode())
        return digest.hexdigest()

    def _count(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        held = arguments[0]
        if held not in self._known:
            kind = next(self._kinds[class_] for class_ in type(held).__mro__ if class_ in self._kinds)
            self._known[held] = (kind, self._made.get(kind, 0))
            self._made[kind] = self._made.get(kind, 0) + 1

    def _note_load(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._loads += 1
        known = self._known.get(arguments[0])
        if known is not None and self._loads <= LOADS_NOTED:
            kind, number = known
            self._journal.event("state_loaded", kind=kind, number=number, site=self._journal.site(frame))

    def _note_plateau(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        known, given = self._known.get(arguments[0]), options.get("metrics", *arguments[1:2])
        if known is None or given is None or self._plateau_steps == LOADS_NOTED:
            return
        self._plateau_steps += 1
        value = float(given)
        if math.isfinite(value):
            self._journal.event("plateau_step", number=known[1], value=value, site=self._journal.site(frame))


def _optimizer_values(optimizer: Any) -> Iterator[Any]:
    """Yield the options and the state of an optimizer, in the order of its parameters."""
    for group in optimizer.param_groups:
        for name in sorted(group):
            if name != "params":
                yield group[name]
        for parameter in group["params"]:
            yield from optimizer.state.get(parameter, {}).values()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


NOTED = 4_000


class Steps:
    """The counts of backwards and optimizer steps, at which the rehearsal may end."""

    def __init__(
        self,
        journal: Journal,
        modules: Modules,
        loaders: Loaders,
        schedule: Schedule,
        pace: Pace,
        ending: Ending,
        torch: Any,
        reduced: ReducedLosses,
    ) -> None:
        self._journal = journal
        self._modules = modules
        self._loaders = loaders
        self._schedule = schedule
        self._pace = pace
        self._ending = ending
        self._torch = torch
        self._origins = Origins(journal)
        self._replicas = Replicas(journal, modules, self._origins)
        self._unheld = Unheld(journal, modules, self._origins)
        self._state = TrainingState(journal, torch, self._replicas)
        self._sizes = OptimizerSizes(journal, torch, 1, any_device=journal.plan.get("device") != "cuda")
        self._threads = CpuThreads(journal, torch)
        self._reduced = reduced
        self._optimizers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._made = 0
        self._ordinals: dict[int, int] = {}
        self._taken = 0
        self._running = 0
        """Backwards that are running: more than one when checkpointing recomputes inside of one."""

    def install(self) -> None:
        """Patch backward and register torch's own optimizer hooks."""
        self._hook_backward(self._torch.autograd)
        self._origins.install()
        self._unheld.install()
        self._state.install()
        self._threads.install()
        # The package hides its module of the same name.
        optimizer = sys.modules["torch.optim.optimizer"]
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)

    def _hook_backward(self, autograd: Any) -> None:
        backward, take, steps = autograd.backward, autograd.grad, self

        @functools.wraps(backward)
        def backward_noted(*arguments: Any, **options: Any) -> None:
            if steps._running:
                backward(*arguments, **options)
                return
            steps._ending.check()
            begun = steps._journal.guarded(steps._modules.backward_begins, harms=("backwards",)) or ([], [])
            steps._journal.guarded(steps._before_backward, arguments, options, sys._getframe(1), harms=("backwards",))
            steps._running += 1
            try:
                backward(*arguments, **options)
            except BaseException:
                steps._journal.guarded(steps._modules.backward_failed, harms=("backwards", "missing_gradients"))
                raise
            finally:
                steps._running -= 1
            steps._journal.guarded(
                steps._note_backward, sys._getframe(1), begun, _keeps_graph(arguments, options), harms=("backwards",)
            )

        @functools.wraps(take)
        def grad_noted(outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(inputs, Iterator):
                inputs = tuple(inputs)
            result = take(outputs, inputs, *arguments, **options)
            steps._journal.guarded(steps._note_taken, inputs, sys._getframe(1), harms=("gradients_taken",))
            return result

        autograd.backward, autograd.grad = backward_noted, grad_noted

    def _before_backward(self, arguments: Any, options: Any, frame: Any) -> None:
        roots = arguments[0] if arguments else options.get("tensors", ())
        self._reduced.before_backward(roots, self._journal.site(frame))

    def _note_backward(self, frame: Any, begun: tuple[list[int], list[int]], keeps_graph: bool) -> None:
        journal = self._journal
        journal.backwards += 1
        self._loaders.trained()
        self._pace.backward_ended()
        fates = self._modules.backward_ended(keeps_graph)
        if journal.backwards <= NOTED and journal.rank is not None:
            journal.event(
                "backward",
                site=journal.site(frame),
                wraps=list(fates),
                synchronised=[wrap for wrap, fate in fates.items() if not fate],
                unreduced=[{"wrap": wrap, "why": fate} for wrap, fate in fates.items() if fate],
                accumulated=[wrap for wrap in begun[0] if wrap in fates],
                inside_no_sync=[wrap for wrap in begun[1] if wrap in fates],
            )

    def _note_taken(self, inputs: Any, frame: Any) -> None:
        """Note gradients of parameters that were computed as values."""
        owners = [self._modules.name_of(item) for item in (inputs if isinstance(inputs, (list, tuple)) else (inputs,))]
        wraps = sorted({owner[0] for owner in owners if owner is not None})
        if not wraps:
            return
        self._taken += 1
        if self._taken <= NOTED and self._journal.rank is not None:
            self._journal.event("gradients_taken", wraps=wraps, site=self._journal.site(frame))

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._ending.check()
        self._journal.guarded(self._modules.close_iterations, harms=("backwards", "missing_gradients"))
        if self._journal.is_rank:
            number, ordinal = self._place(optimizer)
            if not self._ordinals:
                self._modules.training_begins()  # Of a job that wraps nothing in DDP and has no loader.
                self._journal.guarded(self._state.note_first_step, harms=("training_states",))
                self._journal.guarded(note_written_averages, self._journal, harms=("written_averages",))
                self._journal.guarded(self._threads.note_threads, harms=("cpu_threads",))
            self._journal.guarded(
                self._replicas.before_step,
                optimizer,
                number,
                ordinal,
                harms=("gradient_digests", "parameter_digests", "unheld_parameters"),
            )
            self._journal.guarded(
                self._unheld.before_step,
                optimizer,
                ordinal,
                harms=("gradient_digests", "parameter_digests", "unheld_parameters"),
            )

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        journal = self._journal
        number, ordinal = self._place(optimizer)
        self._ordinals[number] = ordinal + 1
        journal.optimizer_steps += 1
        if journal.optimizer_steps <= NOTED and journal.rank is not None:
            journal.guarded(
                self._note_step,
                optimizer,
                number,
                ordinal,
                sys._getframe(1),
                harms=("optimizer_steps", "parameter_digests"),
            )
        self._schedule.optimizer_stepped(number)

    def _note_step(self, optimizer: Any, number: int, ordinal: int, frame: Any) -> None:
        wraps, elements = self._replicas.scope_of(optimizer)
        self._journal.event(
            "optimizer_step",
            optimizer=number,
            ordinal=ordinal + 1,
            site=self._journal.site(frame),
            wraps=wraps,
            elements=elements,
            learning_rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group][:16],
            **({"divided": True} if any(map(_is_part, parameters_of(optimizer))) else {}),
        )
        if self._journal.is_rank:
            self._replicas.after_step(optimizer, number, ordinal)
            self._journal.guarded(self._sizes.stepped, optimizer, harms=("optimizer_sizes",))
            self._journal.guarded(self._unheld.after_step, optimizer, ordinal, harms=("unheld_parameters",))

    def _place(self, optimizer: Any) -> tuple[int, int]:
        """Return the number of an optimizer, and how many steps it has made."""
        number = self._optimizers.get(optimizer)
        if number is None:
            number, self._made = self._made, self._made + 1
            self._optimizers[optimizer] = number
        return number, self._ordinals.get(number, 0)


def _is_part(parameter: Any) -> bool:
    """Return whether ranks of a mesh hold a part of a parameter each."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.size() > 1 and any(placement.is_shard() for placement in parameter.placements)


def _keeps_graph(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a backward leaves its graph for another one: ``retain_graph`` or ``create_graph``."""
    keeps = options.get("retain_graph", arguments[2] if len(arguments) > 2 else None)
    creates = options.get("create_graph", arguments[3] if len(arguments) > 3 else False)
    return bool(creates if keeps is None else keeps)


# Digests of gradients and parameters around the first optimizer steps, so that the ranks' replicas can be compared.

STEPS_DIGESTED = 6
"""First steps of an optimizer around which is looked; later around two after every six, and around each before which
parameters were changed in place since the last."""
LOOKS = 32
"""Looks of a process in all."""
MOST_TENSORS = 512
"""With more parameters a part of them is looked at, the same on every rank."""
MOST_BYTES = 1 << 25
"""Bytes of gradients, and as many of parameters, that are digested around a step; large tensors are sampled."""

Named = list[tuple[int, str, Any]]
"""Wrap (-1 for a parameter of no wrapped module), name, parameter."""


def _changes_of(optimizer: Any) -> dict[int, int]:
    """Return how often each parameter of an optimizer was changed in place; tensors of inference have no count."""
    return {id(one): one._version for one in parameters_of(optimizer) if not one.is_inference()}


def _is_looked_at(ordinal: int) -> bool:
    return ordinal < STEPS_DIGESTED or ordinal % (STEPS_DIGESTED + 2) >= STEPS_DIGESTED


class Replicas:
    """Digests of what an optimizer holds, before and after it steps."""

    def __init__(self, journal: Journal, modules: Modules, origins: Origins) -> None:
        self._journal = journal
        self._modules = modules
        self._origins = origins
        self._looks = 0
        self._versions: dict[int, int] = {}
        """How often parameters that want no gradient had been changed at the first look, by their identity."""
        self._left: dict[int, dict[int, dict[str, str]]] = {}
        """Digests of the parameters as the newest step of an optimizer left them, by its number and wrap."""
        self._counts: dict[int, dict[int, int]] = {}
        """How often its parameters had been changed by then, by the number of an optimizer and their identity."""
        self._looking: set[int] = set()
        """Optimizers of which the present step is looked at."""

    def before_step(self, optimizer: Any, number: int, ordinal: int) -> None:
        """Digest the gradients that the step will use, and the parameters before the first of them."""
        counts = self._counts.pop(number, {})
        written = bool(counts) and counts != _changes_of(optimizer)
        self._looking.discard(number)
        if not (_is_looked_at(ordinal) or written) or self._looks >= LOOKS:
            self._left.pop(number, None)
            return
        self._looking.add(number)
        self._looks += 1
        named = self._parameters(optimizer)
        with_gradient = [(wrap, name, p.grad) for wrap, name, p in named if p.grad is not None]
        self._write("gradient_digests", number, ordinal + 1, with_gradient)
        if ordinal == 0:
            self._write("parameter_digests", number, 0, named)
            self._note_origins(number, [(name, parameter) for wrap, name, parameter in named if wrap == -1])
        changed: dict[int, list[str]] = {}
        for wrap, left in self._left.pop(number, {}).items():
            now = self._digests(named).get(wrap, {})
            changed[wrap] = [name for name, digest in left.items() if now.get(name, digest) != digest]
        for wrap, name, parameter in named if written and not changed else ():
            if counts.get(id(parameter), -1) not in (-1, parameter._version):
                changed.setdefault(wrap, []).append(name)
        for wrap, names in changed.items():
            if names:
                self._journal.event("written_between", optimizer=number, step=ordinal, wrap=wrap, names=names)

    def _note_origins(self, number: int, named: list[tuple[str, Any]]) -> None:
        """Note what is in no wrapped module, by the call chains that made it: nothing else has its names."""
        by_site: dict[int, dict[str, str]] = {}
        for name, parameter in named:
            site, known = self._origins.origin_of(parameter)
            by_site.setdefault(site, {})[name] = known
        for site, names in by_site.items():
            self._journal.event("parameters_made", optimizer=number, site=site, names=names)

    def after_step(self, optimizer: Any, number: int, ordinal: int) -> None:
        """Digest the parameters that the step has made."""
        self._counts[number] = _changes_of(optimizer)
        if number in self._looking:
            self._left[number] = self._write("parameter_digests", number, ordinal + 1, self._parameters(optimizer))

    def scope_of(self, optimizer: Any) -> tuple[list[int], int]:
        """Return the wraps of the parameters that an optimizer steps, -1 for no wrapped module, and their elements."""
        parameters = parameters_of(optimizer)
        owners = [self._modules.name_of(parameter) or (-1, "") for parameter in parameters]
        return sorted({wrap for wrap, _ in owners}), sum(parameter.numel() for parameter in parameters)

    def _parameters(self, optimizer: Any) -> Named:
        named: Named = []
        for parameter in parameters_of(optimizer):
            shape = "x".join(map(str, parameter.shape)) or "scalar"
            owner = self._modules.name_of(parameter, apart=True) or (-1, f"parameter {len(named)} ({shape})")
            named.append((*owner, parameter))
        named += self._changed(named)
        stride = -(-len(named) // MOST_TENSORS)
        return named[:: max(1, stride)]

    def _changed(self, named: Named) -> Named:
        """Return what the same modules hold beside, want no gradient for, and change in place while they train."""
        held, wraps = {id(parameter) for _, _, parameter in named}, {wrap for wrap, _, _ in named}
        return [
            entry
            for entry in self._modules.parameters()
            if entry[0] in wraps
            and not entry[2].requires_grad
            and id(entry[2]) not in held
            # ``_version`` counts changes in place; inference tensors have none.
            and not entry[2].is_inference()
            and (
                self._versions.setdefault(id(entry[2]), entry[2]._version) != entry[2]._version
                or entry[:2] in self._modules.written
            )
        ]

    def _write(self, event: str, number: int, step: int, tensors: Named) -> dict[int, dict[str, str]]:
        by_wrap = self._digests(tensors)
        for wrap, digests in by_wrap.items():
            self._journal.event(event, optimizer=number, step=step, wrap=wrap, digests=digests)
        return by_wrap

    def _digests(self, tensors: Named) -> dict[int, dict[str, str]]:
        total = sum(tensor.numel() * tensor.element_size() for _, _, tensor in tensors)
        share = None if total <= MOST_BYTES else max(64, MOST_BYTES // len(tensors))
        by_wrap: dict[int, dict[str, str]] = {}
        for wrap, name, tensor in tensors:
            # Of shards the ranks that hold the same ones are compared, and only where not all ranks reduce together.
            digest = tensor_digest(_own_part(tensor) if wrap < -1 else tensor, share)
            if digest:
                by_wrap.setdefault(wrap, {})[name] = digest
        return by_wrap


# Parameters with gradients that no optimizer holds, though one was built for the model that they are in.

STEPS_WATCHED = 2
"""First steps of an optimizer in which what no optimizer holds must have a gradient and keep its value."""
MOST_OPTIMIZERS = 16
MOST_NAMES = 200
BYTES_SEARCHED = 1 << 16


class _LeftOut(NamedTuple):
    wrap: int
    name: str
    parameter: Any
    digest: str


class Unheld:
    """What every optimizer leaves out in its first steps."""

    def __init__(self, journal: Journal, modules: Modules, origins: Origins) -> None:
        self._journal = journal
        self._modules = modules
        self._origins = origins
        self._made: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """When each optimizer was made, and the user's call chain that made it."""
        self._watched: WeakKeyDictionary[Any, list[_LeftOut]] = WeakKeyDictionary()

    def install(self) -> None:
        """Listen to the making of optimizers."""
        optimizer_class = sys.modules["torch.optim.optimizer"].Optimizer
        on_call(self._journal, optimizer_class, "__init__", after=self._optimizer_made, harms=("unheld_parameters",))

    def before_step(self, optimizer: Any, ordinal: int) -> None:
        """Look at what no optimizer holds before a step of this one."""
        self._made.setdefault(optimizer, (sys.maxsize, -1))  # A copy is made without its constructor.
        if ordinal >= STEPS_WATCHED or len(self._watched) > MOST_OPTIMIZERS:
            return
        left_out = self._left_out(optimizer)
        if ordinal:
            before = {id(one.parameter): one.digest for one in self._watched.get(optimizer, ())}
            left_out = [one for one in left_out if one.digest and before.get(id(one.parameter)) == one.digest]
        self._watched[optimizer] = left_out

    def after_step(self, optimizer: Any, ordinal: int) -> None:
        """Report, after the last step that is watched, what had gradients and is as it was before the first."""
        if ordinal + 1 != STEPS_WATCHED or not (watched := self._watched.pop(optimizer, [])):
            return
        held = self._held()
        kept = [one for one in watched if id(one.parameter) not in held and _digest(one.parameter) == one.digest]
        if not kept or any(calls_written(self._journal, frozenset({"add_param_group"}))):
            return
        for wrap in sorted({one.wrap for one in kept}):
            names = [one.name for one in kept if one.wrap == wrap]
            self._journal.event(
                "unheld_parameters",
                wrap=wrap,
                site=self._made[optimizer][1],
                optimizer_type=type(optimizer).__qualname__,
                parameters=names[:MOST_NAMES],
                count=len(names),
                elements=sum(one.parameter.numel() for one in kept if one.wrap == wrap),
                strangers=len(self._strangers(optimizer)),
                steps=STEPS_WATCHED,
            )

    def _optimizer_made(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._made[arguments[0]] = self._origins.moment, self._journal.site(frame)

    def _left_out(self, optimizer: Any) -> list[_LeftOut]:
        """Return what no optimizer holds of the models that this one was built for, where it has a gradient.

        It was built for a model of which it holds a part: then what came into the model later is left out. Or it was
        built for one of which every parameter was replaced: then what it holds has no gradient, and the same shapes.
        """
        made, _ = self._made[optimizer]
        held = self._held()
        own = set(map(id, parameters_of(optimizer)))
        by_wrap: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        for wrap, name, parameter in self._modules.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                by_wrap.setdefault(wrap, {})[name] = parameter
        found: list[_LeftOut] = []
        for wrap, parameters in by_wrap.items():
            trained = {name: p for name, p in parameters.items() if id(p) not in held and _has_gradient(p)}
            if any(id(p) in own for p in parameters.values()):
                trained = {name: p for name, p in trained.items() if self._origins.came_after(p, made)}
            elif any(id(p) in held for p in parameters.values()) or not _fits(trained, self._strangers(optimizer)):
                continue
            found += [_LeftOut(wrap, name, p, _digest(p)) for name, p in trained.items()]
        return found

    def _held(self) -> set[int]:
        """Return the identities of the parameters that any optimizer of the process holds."""
        return {id(parameter) for optimizer in list(self._made) for parameter in parameters_of(optimizer)}

    def _strangers(self, optimizer: Any) -> list[Any]:
        """Return what an optimizer holds that is in no wrapped module and has no gradient."""
        now = {id(parameter) for _, _, parameter in self._modules.parameters()}
        return [one for one in parameters_of(optimizer) if one.grad is None and id(one) not in now]


def _has_gradient(parameter: Any) -> bool:
    return bool(parameter.requires_grad) and parameter.grad is not None and not is_zero(_own_part(parameter.grad))


def _digest(parameter: Any) -> str:
    return tensor_digest(_own_part(parameter), BYTES_SEARCHED)


def _own_part(tensor: Any) -> Any:
    """Return what a rank holds of a tensor that may be distributed; the whole would take a collective."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part.detach()


def _fits(trained: dict[str, Any], strangers: list[Any]) -> bool:
    """Return whether parameters of the same shapes are among those that an optimizer holds for nothing."""
    return not Counter(tuple(p.shape) for p in trained.values()) - Counter(tuple(p.shape) for p in strangers)
