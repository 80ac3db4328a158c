"""Whose NaN it was: the loss of each backward, one gradient before its reduction and one parameter after each step.

Three numbers are read in a step. Only when one is not finite is there more to do: the graph of that loss, which is
still whole, shows the operation, and the modules of the next forward, followed for that one alone, tell whose operation
that was. What is found is held back until parameters are no longer finite, or for many backwards nothing was: a script
that skips such steps, as a gradient scaler does, is in order.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional
from weakref import ref

from .journal import Journal
from .torch_compat import in_place, on_call

STREAK = 64
"""Backwards without a finite one between them that no scaler explains: from its first 65,536 it halves 16 times."""
HELD = 16
"""Backwards since the newest step that left the parameters finite; of more, the newest are let go."""
MOST_NODES = 50_000
MOST_NAMES = 8
MOST_SAMPLES = 16
SAMPLED_ELEMENTS = 1 << 16
AMONG_FIRST = 8
"""The parameter that is sampled is among so many first ones: what goes wrong in a backward goes on to them."""
VALUES_READ = 16
"""Of that parameter after each step: 64 bytes of float32, as much as a processor fetches at once."""
GRADIENTS_READ = 2_048
"""Numbers of a gradient that are read in place: more of them torch adds up faster."""
EXAMINED_SHARE = 0.005
"""Of the time that has passed may go into looking closer, beyond the first second of it."""
_INPUTS = frozenset(
    {"self", "other", "input", "target", "mat1", "mat2", "tensor1", "tensor2", "weight", "vec", "batch2"}
)
"""As autograd names what an operation was given, in ``derivatives.yaml``."""


class Batch(NamedTuple):
    """Where the newest batch came from; -1 and empty where that is not known."""

    loader: int = -1
    ordinal: int = -1
    batch: int = -1
    indices: tuple[int, ...] = ()
    """Of its samples in the data set, in the order of its rows."""


_SIZES = {"torch.float32": 4, "torch.float64": 8, "torch.bfloat16": 2}
"""Bytes of a number, the largest of which has seven bits of the exponent: all are set in NaN, inf and large numbers."""
_LARGEST = -1 if sys.byteorder == "little" else 0


class Sample:
    """One parameter of a module on the CPU, read where it lies, as its gradient is: operations of torch take longer."""

    __slots__ = ("_address", "_bytes", "high", "kind", "parameter", "size")

    def __init__(self, parameter: Any) -> None:
        self.parameter: Callable[[], Any] = ref(parameter)
        self.kind = parameter.dtype
        self.size = _SIZES.get(str(self.kind), 0)
        self.high = slice(_LARGEST % self.size, None, self.size) if self.size else slice(0)
        """The largest byte of each number."""
        self._address, self._bytes = 0, in_place(parameter, ctypes.c_char, 0)

    def is_broken(self) -> bool:
        """Return whether it is no longer finite, by some of its numbers."""
        parameter = self.parameter()
        if parameter is None or not parameter.is_cpu:
            return False
        if self.size and parameter.dtype is self.kind:
            address = parameter.data_ptr()
            if address != self._address:  # at the first look, and where it has been given other memory
                self._address, self._bytes = address, in_place(parameter, ctypes.c_char, VALUES_READ * self.size)
            high = self._bytes.raw[self.high]
            if 0x7F not in high and 0xFF not in high:
                return False
        return not is_finite(parameter)


class Followed:
    """One DDP module."""

    __slots__ = ("broken", "buffers", "ddp", "module", "names", "number", "sample", "streak", "until")

    def __init__(self, number: int, ddp: Any) -> None:
        module = ddp.module
        self.number = number
        self.ddp, self.module = ref(ddp), ref(module)
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.broken = frozenset(name for name, parameter in module.named_parameters() if not is_finite(parameter))
        """Parameters that hold such values from the beginning, as a mask does."""
        self.buffers = {buffer.data_ptr() for buffer in module.buffers() if type(buffer).__name__ == "Tensor"}
        """Where they lie: a layer may spoil its own in a forward, which then show nothing."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][:AMONG_FIRST]
        # Weights rather than a bias: a sample that is not finite and does not count in the loss spoils only these.
        fit = (one for one in trained if 0 < one.numel() <= SAMPLED_ELEMENTS and _is_plain(one))
        self.sample = next((Sample(one) for one in fit), None)
        self.streak = 0
        """Backwards in a row that were not finite."""
        self.until = 0
        """Autograd's number when the newest forward ended."""


class NonFinite:
    """The losses, gradients and parameters of one rank."""

    def __init__(
        self,
        journal: Journal,
        torch: Any,
        wrap_number: Callable[[Any], Optional[int]],
        newest_batch: Callable[[], Batch],
        step: Callable[[], int],
        *,
        every_gradient: bool = False,
    ) -> None:
        self._journal = journal
        self._torch = torch
        self._tensor = torch.Tensor
        self._wrap_number = wrap_number
        self._newest_batch = newest_batch
        self._step = step
        self._every_gradient = every_gradient
        self.sequence: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
        self._followed: dict[int, Followed] = {}
        self.samples: list[Sample] = []
        """One of each module that has a parameter to sample."""
        self.newest: Optional[Followed] = None
        """Whose forward was the newest that records gradients."""
        self._backwards = 0
        self.held: list[dict[str, Any]] = []
        self._packs = False
        """Saved tensors pass through hooks of the script or a library: to look at them would call these."""
        self._parts: tuple[Any, ...] = ()
        self.waiting: Optional[dict[str, Any]] = None
        """What a module is to be found for."""
        self.places: Optional[Places] = None
        self._began_s = time.monotonic()
        self._spent_s = 0.0
        self._on_device = Delayed(torch)
        self.is_over = False
        """Parameters are no longer finite: what comes after that shows nothing."""

    def install(self) -> None:
        """Listen to what changes how one may look."""
        hooks = getattr(self._torch.autograd.graph, "saved_tensors_hooks", None)
        if hooks is not None:
            on_call(self._journal, hooks, "__init__", before=self._saving_is_hooked, harms=("nonfinites",))

    def listen(self) -> None:
        """Listen to what a live run has replacements of its own for."""
        torch, journal = self._torch, self._journal
        ddp_class = torch.nn.parallel.DistributedDataParallel

        def forward_begins(_: Any, arguments: tuple[Any, ...], __: Any) -> None:
            if torch.is_grad_enabled():
                self.forward_begins(arguments[0])

        def backward_begins(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            self.backward_begins(arguments[0] if arguments else options.get("tensors", ()))

        on_call(
            journal,
            ddp_class,
            "forward",
            before=forward_begins,
            after=lambda *_: self.forward_ended(),
            harms=("nonfinites",),
        )
        on_call(
            journal,
            torch.autograd,
            "backward",
            before=backward_begins,
            after=lambda *_: self.backward_ended(),
            harms=("nonfinites",),
        )
        # The package hides its module of the same name.
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(
            lambda optimizer, *_: journal.guarded(self.stepped, optimizer, harms=("nonfinites",))
        )

    def batch_came(self, batch: Any) -> None:
        """Remember the tensors of a batch, for as long as the script holds them."""
        kind = type(batch)
        parts = batch if kind is list or kind is tuple else batch.values() if kind is dict else (batch,)
        try:
            self._parts = tuple(map(ref, parts))
        except TypeError:  # What is no tensor may not be referred to.
            self._parts = tuple([ref(part) for part in parts if isinstance(part, self._tensor)])

    def forward_begins(self, ddp: Any) -> None:
        """Begin a forward that records gradients."""
        followed = self._followed.get(id(ddp))
        if followed is None or followed.ddp() is not ddp:
            followed = self._meet(ddp)
        self.newest = followed
        if self.places is not None:  # An exception has ended the forward that they are of.
            self.places.close()
            self.places = None
        if self.waiting is not None and self.waiting["wrap"] == followed.number:
            self.places = Places(self._torch, ddp.module, self.sequence)

    def forward_ended(self) -> None:
        """End it, by an exception or not."""
        newest = self.newest
        if newest is None:
            return
        newest.until = self.sequence()
        if self.places is not None:
            self.places.close()

    def backward_begins(self, roots: Any) -> None:
        """Look at the loss from which a backward starts."""
        self._backwards += 1
        if self.places is not None:
            self._journal.guarded(self._place, roots, harms=("nonfinites",))
        if self.is_over or self.newest is None:
            return
        for root in roots if isinstance(roots, (list, tuple)) else (roots,):
            if type(root) is not self._tensor and not _is_plain(root):
                continue
            is_here = root.is_cpu
            if (root.dim() and root.numel() != 1) or not (is_here or _is_plain(root)):
                continue
            if not is_here:
                self._later(self._on_device.put(root.detach(), self._backwards, self._step))
            else:
                value = root.item()
                if value - value != 0:
                    self._journal.guarded(self._found, "loss", value, root, harms=("nonfinites",))
                    return

    def backward_ended(self) -> None:
        """End a backward; one that left nothing behind ends a streak."""
        newest = self.newest
        if newest is not None and newest.streak and not (self.held and self.held[-1]["backward"] == self._backwards):
            newest.streak = 0

    def stepped(self, optimizer: Any) -> None:
        """Look at parameters after the step of an optimizer."""
        if self.is_over:
            return
        if (self.held or any(map(Sample.is_broken, self.samples))) and not self._parameters_broke(optimizer):
            # Another optimizer may yet step with what this backward has left.
            self.held = [row for row in self.held if row["backward"] == self._backwards]

    def close(self) -> None:
        """Write what is held if the parameters are no longer finite, as the process is about to end."""
        self._later(self._on_device.take(wait=True))
        if not self.is_over and (self.held or any(map(Sample.is_broken, self.samples))):
            self._parameters_broke()

    def _meet(self, ddp: Any) -> Followed:
        number = self._wrap_number(ddp)
        followed = Followed(-1 if number is None else number, ddp)
        # Of models that come and go those that are gone are not kept.
        self._followed = {key: one for key, one in self._followed.items() if one.ddp() is not None}
        self._followed[id(ddp)] = followed
        self.samples = [one.sample for one in self._followed.values() if one.sample is not None]
        trained = [one for one in ddp.module.parameters() if one.requires_grad and _is_plain(one)]
        trained = trained if self._every_gradient else []
        is_compiling = getattr(getattr(self._torch, "compiler", None), "is_dynamo_compiling", lambda: False)

        sampled = [] if followed.sample is None else [followed.sample.parameter()]

        def follow(parameter: Any) -> None:
            sample, count = Sample(parameter), parameter.numel()
            reads = sample.size and count <= GRADIENTS_READ
            read = (ctypes.c_char * (count * sample.size)).from_address if reads else None
            kind, high = sample.kind, sample.high

            def arrived(parameter: Any) -> None:
                # DDP takes the gradient for the reduction after this: it is still this rank's own.
                try:
                    if self.is_over or is_compiling():
                        return
                    gradient = parameter.grad
                    if gradient is None:
                        return  # DDP's search for unused parameters takes back what no rank used.
                    if read and gradient.dtype is kind and gradient.is_cpu and gradient.is_contiguous():
                        largest = read(gradient.data_ptr()).raw[high]
                        if 0x7F not in largest and 0xFF not in largest:
                            return
                    value = float(gradient.sum())
                    if value - value != 0:
                        self._journal.guarded(self._gradient_came, followed, parameter, value, harms=("nonfinites",))
                except Exception as error:
                    self.is_over = True
                    self._journal.event("probe_fault", where="gradient", text=repr(error), harms=["nonfinites"])

            parameter.register_post_accumulate_grad_hook(arrived)

        for parameter in trained or sampled:
            if parameter.device.type == "cpu" and hasattr(parameter, "register_post_accumulate_grad_hook"):
                follow(parameter)
        return followed

    def _gradient_came(self, followed: Followed, parameter: Any, value: float) -> None:
        if self.held and self.held[-1]["backward"] == self._backwards:
            return  # The loss was not finite either, or another gradient before this one.
        if is_finite(parameter.grad):
            return  # Their sum alone is too large.
        self.newest = followed
        self._found("gradient", value, None)

    def _found(self, kind: str, value: float, root: Any) -> None:
        """Hold a backward whose loss or gradient is not finite."""
        newest = self.newest
        if newest is None or newest.module() is None:
            return
        newest.streak += 1
        begun_s = time.monotonic()
        broken = self._broken(newest)
        row = self._row(kind, value, newest)
        if broken:
            sample = None if newest.sample is None else newest.sample.parameter()
            row.update(kind="parameter", parameters=broken[:MOST_NAMES], broken=len(broken))
            row["sampled"] = sample is not None and newest.names.get(id(sample)) in broken
        elif self._spent_s < 1 + EXAMINED_SHARE * (begun_s - self._began_s):
            row.update(self._batch_of(newest))
            if kind == "loss" and not self._packs:
                row.update(self._operation(root, newest))
            elif kind == "gradient":
                row["parameters"] = self._first_gradients(newest)
        self._spent_s += time.monotonic() - begun_s
        self.held = [*self.held[1 - HELD :], row]
        if broken:
            self._write()
        elif newest.streak == STREAK:
            self.held = [dict(self.held[-1], streak=STREAK)]
            self._write()
        elif row.get("near") and not row["in_loss"] and not self._is_compiled(newest):
            self.waiting = row

    def _row(self, kind: str, value: float, followed: Followed) -> dict[str, Any]:
        return {
            "kind": kind,
            "value": "NaN" if value != value else "inf",
            "wrap": followed.number,
            "backward": self._backwards,
            "step": self._step(),
            "site": self._journal.here(),
        }

    def _parameters_broke(self, optimizer: Any = None) -> bool:
        """Write what is held, and the parameters that are no longer finite; False when all are."""
        for followed in list(self._followed.values()):
            broken = self._broken(followed)
            module = followed.module()
            if not broken or module is None:
                continue
            named = dict(module.named_parameters())
            # The gradients that the step used are there until somebody clears them.
            gradients = [named[name].grad for name in broken]
            known = [gradient for gradient in gradients if gradient is not None]
            row = self._row("parameter", float("nan"), followed)
            row.update(parameters=broken[:MOST_NAMES], broken=len(broken), after_step=optimizer is not None)
            groups = () if optimizer is None else optimizer.param_groups
            row["learning_rates"] = [str(float(group["lr"])) for group in groups if "lr" in group][:MOST_NAMES]
            row["gradients_finite"] = all(map(is_finite, known)) if len(known) == len(broken) else None
            self.held.append(row)
            self._write()
            return True
        return False

    def _write(self) -> None:
        """Write what is held; nothing more is to be learned once parameters are not finite."""
        self.is_over = self.is_over or any(row["kind"] == "parameter" for row in self.held)
        for row in self.held:
            self._journal.event("nonfinite", **row)
            row["is_written"] = True
        self.held = []

    def _later(self, found: Optional[tuple[int, int]]) -> None:
        """Take in that a loss on a device was not finite, some backwards ago."""
        newest = self.newest
        if found is None or newest is None or newest.module() is None:
            return
        row = self._row("loss", float("nan"), newest)
        row.update(backward=found[0], step=found[1])
        self.held = [row]
        if not self._parameters_broke():
            self.held = []

    def _broken(self, followed: Followed) -> list[str]:
        module = followed.module()
        named = () if module is None else module.named_parameters()
        return [name for name, parameter in named if name not in followed.broken and not is_finite(parameter)]

    def _first_gradients(self, followed: Followed) -> list[str]:
        """Return the parameters whose gradients are not finite, those first that a backward reaches first."""
        module = followed.module()
        named = [] if module is None else list(module.named_parameters())
        return [name for name, one in reversed(named) if one.grad is not None and not is_finite(one.grad)][:MOST_NAMES]

    def _batch_of(self, followed: Followed) -> dict[str, Any]:
        """Return where the newest batch came from, whether it is finite, and which of its samples are not."""
        batch = self._newest_batch()
        living = [part for part in (one() for one in self._parts) if part is not None]
        parts = [part for part in living if isinstance(part, self._tensor)]
        floating = [part for part in parts if part.is_floating_point()]
        rows = sorted({row for part in floating for row in _bad_rows(part)})
        known = batch.indices if len(batch.indices) > max(rows, default=0) else ()
        samples = [known[row] for row in rows if known][:MOST_SAMPLES]
        finite: Optional[bool] = not rows if parts and len(living) == len(self._parts) else False if rows else None
        return {
            "pass_ordinal": batch.ordinal,
            "batch": batch.batch,
            "batch_finite": finite,
            "rows": rows[:MOST_SAMPLES],
            "samples": samples,
        }

    def _operation(self, root: Any, followed: Followed) -> dict[str, Any]:
        """Return the first operation of a graph whose result is not finite, as far as the graph has kept it."""
        first, outside, infinite = None, False, None
        is_nan = bool(root != root)
        nodes: dict[int, Any] = {}
        for node in _nodes(root.grad_fn):
            nodes[_number(node)] = node
            for name, tensor in _kept(node, self._torch.Tensor):
                if is_nan and tensor.grad_fn is not None and _spoils(tensor, False):
                    number = _number(tensor.grad_fn)
                    infinite = number if infinite is None else min(number, infinite)
                if tensor.data_ptr() in followed.buffers or not _spoils(tensor, is_nan):
                    continue
                made_by = node if tensor.grad_fn is None else tensor.grad_fn
                if first is None or _number(made_by) < first:
                    first = _number(made_by)
                    # Of what has no gradient a node keeps its inputs, and statistics that it has made.
                    outside = tensor.grad_fn is None and not tensor.requires_grad and name in _INPUTS
        if first is None:
            first = _number(root.grad_fn)
        if infinite is not None and infinite < first and first in nodes:
            # What is inf first and NaN then began as inf, if the one was made of the other.
            below = any(_number(node) == infinite for node in _nodes(nodes[first]))
            first, outside, is_nan = (infinite, False, False) if below else (first, outside, is_nan)
        if outside:
            return {"outside": True}
        number, name, near = next(one for one in self._operations(root, followed) if one[0] == first)
        alike = [one[0] for one in self._operations(root, followed) if one[1:] == (name, near)]
        return {
            "operation": name,
            "value": "NaN" if is_nan else "inf",
            "near": near,
            "nth": alike.index(number) if number in alike else -1,
            "alike": len(alike),
            "in_loss": number >= followed.until,
        }

    def _operations(self, root: Any, followed: Followed) -> list[tuple[int, str, str]]:
        """Return number and name of each operation of a graph, with the parameter that was used last before it."""
        near, found = "", []
        for node in sorted(_nodes(root.grad_fn), key=_number):
            near = self._name_of(node, followed) or near
            found.append((_number(node), _plain_name(node.name()), near))
        return found

    def _place(self, roots: Any) -> None:
        """Find the operation that made a value in the graph of the next forward, and so the module that made it."""
        places, self.places = self.places, None
        row, self.waiting = self.waiting, None
        newest = self.newest
        for root in roots if isinstance(roots, (list, tuple)) else (roots,):
            if row is None or newest is None or places is None or root.grad_fn is None:
                return
            key = row["operation"], row["near"]
            alike = [one[0] for one in self._operations(root, newest) if one[1:] == key]
            if len(alike) == row["alike"] and 0 <= row["nth"] < len(alike):
                module, class_name = places.of(alike[row["nth"]])
                row.update(module=module, module_class=class_name)
                if row.pop("is_written", False):
                    self._journal.event("nonfinite", **row)
                return

    def _name_of(self, node: Any, followed: Followed) -> str:
        """Return the name of a parameter that a node takes in; empty when it takes in none."""
        for below, _ in node.next_functions:
            parameter = getattr(below, "variable", None)
            if parameter is not None:
                return str(followed.names.get(id(parameter), ""))
        return ""

    def _is_compiled(self, followed: Followed) -> bool:
        module = followed.module()
        return module is None or any(hasattr(part, "_orig_mod") for part in module.modules())

    def _saving_is_hooked(self, *_: Any) -> None:
        self._packs = True


class Places:
    """The modules of one forward, with what autograd has numbered in each."""

    def __init__(self, torch: Any, module: Any, sequence: Callable[[], int]) -> None:
        self._sequence = sequence
        self._names = {id(part): (name, type(part).__name__) for name, part in module.named_modules()}
        self._open: list[tuple[int, int]] = []
        self._spans: list[tuple[int, int, int]] = []
        """Nodes that were made in a call of a module, before which, and its identity."""
        hooks = torch.nn.modules.module
        self._handles = (
            hooks.register_module_forward_pre_hook(self._begins),
            hooks.register_module_forward_hook(self._ends),
        )

    def close(self) -> None:
        """Follow no longer; what was seen stays."""
        for handle in self._handles:
            handle.remove()

    def of(self, number: int) -> tuple[str, str]:
        """Return name and class of the innermost module in which a node of this number was made."""
        around = [span for span in self._spans if span[1] - span[0] <= number < span[1]]
        return self._names[min(around)[2]] if around else ("", "")

    def _begins(self, module: Any, _: Any) -> None:
        self._open.append((id(module), self._sequence()))

    def _ends(self, module: Any, _: Any, __: Any) -> None:
        while self._open:
            identity, since = self._open.pop()
            if identity == id(module):  # What a forward has left by an exception does not end.
                now = self._sequence()
                if identity in self._names:
                    self._spans.append((now - since, now, identity))
                return


class Delayed:
    """Losses on a device, which are read some steps later so that nothing waits for them."""

    EVERY = 8

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._waiting: list[tuple[int, int, Any]] = []
        self._sent: Optional[tuple[list[tuple[int, int, Any]], Any, Any]] = None

    def put(self, loss: Any, backward: int, step: Callable[[], int]) -> Optional[tuple[int, int]]:
        """Keep a loss; return backward and step of the first that is not finite among those that have come over."""
        torch = self._torch
        if torch.cuda.is_current_stream_capturing():
            return None
        self._waiting.append((backward, step(), loss))
        if len(self._waiting) < self.EVERY:
            return None
        found = self.take(wait=False)
        if self._sent is None:
            values = torch.stack([loss.reshape(()).float() for _, _, loss in self._waiting])
            host = torch.empty(len(self._waiting), pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent, self._waiting = (self._waiting, host, event), []
        else:
            del self._waiting[0]
        return found

    def take(self, *, wait: bool) -> Optional[tuple[int, int]]:
        """Return the first that is not finite of what was sent, once it is there, or with ``wait`` of all."""
        sent = self._sent
        if sent is not None and (wait or sent[2].query()):
            sent[2].synchronize()
            self._sent = None
            for (backward, step, _), value in zip(sent[0], sent[1].tolist()):
                if value - value != 0:
                    return backward, step
        if wait:
            for backward, step, loss in self._waiting:
                value = float(loss)
                if value - value != 0:
                    return backward, step
        return None


def is_finite(tensor: Any) -> bool:
    """Return whether a tensor holds finite values only; what has none, or is a share of another, is taken to."""
    tensor = tensor.detach()
    if not _is_plain(tensor) or tensor.is_sparse or not tensor.is_floating_point():
        return True
    value = float(tensor.sum())
    return value - value == 0 or bool(tensor.isfinite().all())


def _is_plain(tensor: Any) -> bool:
    """Return whether its numbers are here: to read one of a DTensor is a collective, of a meta tensor an error."""
    return type(tensor).__name__ in ("Tensor", "Parameter") and tensor.device.type in ("cpu", "cuda")


def _spoils(tensor: Any, is_nan: bool) -> bool:
    """Return whether a value that a graph has kept is NaN, or inf where the loss is: a mask is -inf in good order."""
    if type(tensor).__name__ not in ("Tensor", "Parameter") or not tensor.is_floating_point():
        return False
    own = tensor.detach()
    value = float(own.sum())
    if value - value == 0:
        return False
    return bool((own.isnan() if is_nan else own == float("inf")).any())


def _bad_rows(tensor: Any) -> list[int]:
    """Return the first rows that hold NaN or inf; -inf is a mask."""
    if not tensor.dim() or is_finite(tensor):
        return []
    own = tensor.detach()
    bad = (own.isnan() | (own == float("inf"))).reshape(own.shape[0], -1).any(1)
    return [int(row) for row in bad.nonzero().reshape(-1)[:MOST_SAMPLES].tolist()]


def _nodes(root: Any) -> Iterator[Any]:
    seen, waiting = {root}, [root]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if hasattr(node, "variable"):
            continue
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


def _kept(node: Any, tensor_class: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a node has kept for its backward, by name; what was changed in place since is left out."""
    names = [name for name in dir(type(node)) if name.startswith("_saved_")]
    for name in names or (["saved_tensors"] if hasattr(node, "saved_tensors") else []):
        try:
            value = getattr(node, name)
        except RuntimeError:
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, tensor_class):
                yield name.rpartition("_saved_")[2], one


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _plain_name(name: str) -> str:
    """``NativeLayerNormBackward0`` is ``native_layer_norm``."""
    plain = name.rpartition("::")[2].rstrip("0123456789").replace("Backward", "") or name
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in str(plain))
    return words.lstrip("_")
