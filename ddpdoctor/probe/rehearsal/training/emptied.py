"""What ``Module.to_empty`` leaves without a value, and a forward then uses.

Memory that was never written to looks like any other, so each tensor that is emptied is filled with NaN. The first
forward that has such a module in it looks for what still is NaN, and fills that with small numbers, the same on each
rank: the rehearsal goes on as it does with what memory happens to hold, and replicas stay alike.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NamedTuple, Optional
from weakref import ReferenceType, WeakKeyDictionary, ref

from ...journal import Journal
from ...torch_compat import after_import, on_call

HARMED = ("uninitialised",)
MOST_REPORTED = 2_000
"""Tensors of a rank that are reported one by one."""
SPREAD = 0.02
"""Of the numbers that take the place of NaN: what language models are initialised with."""
# NaN of their own in each format of 2, 4 and 8 bytes, so that a buffer that is NaN on purpose is no emptied one.
_PATTERNS = {2: 0x7FDD, 4: 0x7FDD0DDD, 8: 0x7FFD0DDD0DDD0DDD}
_OPAQUE = ("torch._dynamo", "torch.distributed.fsdp.fully_sharded_data_parallel")
"""Modules of these do not read the tensors of what they wrap by their names."""
_SHARDING = "torch/distributed/"
_RECEIVER = re.compile(r"([A-Za-z_][\w.]*)\.to_empty\(")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def _shown(name: str) -> str:
    """Return a name without those of wrappers; one that ends in a dot is a module's."""
    return _WRAPPERS.sub("", name.lstrip("."))


def _class_of(module: Any) -> str:
    name = type(module).__name__
    return name[len("FSDP") :] if name.startswith("FSDP") else name  # fully_shard makes a class of its own.


def _is_read_by_forward(frame: Optional[FrameType]) -> bool:
    """Return whether a forward reads here, and not a hook of a module, or FSDP, which looks names up and uses none."""
    if frame is None or _SHARDING in frame.f_code.co_filename:
        return False
    while frame is not None and frame.f_code.co_name not in ("forward", "_call_impl"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "forward"


class _Origin(NamedTuple):
    """The call that emptied a module."""

    site: int
    module: ReferenceType[Any]
    receiver: str
    """What the script calls the module there; empty where that is not a name."""


class _Tensor(NamedTuple):
    """A tensor in an emptied module, as it is before the first forward."""

    owner: Any
    name: str
    shown: str
    """Its name from the outermost module."""
    kind: str
    part: Any
    """What this rank has of it."""


class _Watched(dict[str, Any]):
    """The parameters or buffers of one module, which reports those that a forward reads by their names."""

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.left: dict[str, Callable[[], Any]] = {}
        """What to do once a name is read."""

    def __getitem__(self, name: str) -> Any:
        if name in self.left and _is_read_by_forward(sys._getframe(2)):  # Between the two is torch's __getattr__.
            self.left.pop(name)()
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if _SHARDING not in sys._getframe(1).f_code.co_filename:
            self.left.pop(name, None)  # It has a value now; FSDP puts what it has gathered here.
        super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # A copy, or a file that the script writes, has nothing of ours.


class Emptied:
    """Every module that was emptied in this process and has not run since."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._origins: WeakKeyDictionary[Any, _Origin] = WeakKeyDictionary()
        self._apart: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """Modules that have run and have no emptied one in them, with the count of emptied ones by then."""
        self._emptied = 0
        self._reported = 0
        self._handle: Any = None

    def install(self) -> None:
        """Listen to the emptying of modules, and to their compiling."""
        module_class = self._torch.nn.Module
        on_call(self._journal, module_class, "to_empty", after=self._was_emptied, harms=HARMED)
        on_call(self._journal, module_class, "load_state_dict", before=self._loads, harms=HARMED)
        on_call(self._journal, module_class, "compile", after=self._was_compiled, harms=HARMED)
        after_import("torch.distributed.fsdp._fully_shard._fully_shard", self._hook_unsharding)

    def _was_emptied(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        module, deep = arguments[0], options.get("recurse", True)
        receiver = _RECEIVER.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        origin = _Origin(self._journal.site(frame), ref(module), receiver.group(1) if receiver and deep else "")
        self._emptied += 1
        if self._handle is None:
            # Where all modules are hooked, ours comes before those of a module, by which FSDP gathers its parameters.
            hooks = self._torch.nn.modules.module
            self._handle = hooks.register_module_forward_pre_hook(lambda module, inputs: self._calls(module))
        for part in module.modules() if deep else (module,):
            self._origins[part] = origin
            for tensor in self._tensors(part, recursive=False):
                self._bits(tensor.part).fill_(_PATTERNS[tensor.part.element_size()])

    def _loads(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Write numbers where a checkpoint that this machine lacks would have written its own."""
        from ..pretend.language_models import NoWeights

        if isinstance(arguments[1] if len(arguments) > 1 else options.get("state_dict"), NoWeights):
            for tensor in self._tensors(arguments[0]):
                self._fill(tensor)

    def _hook_unsharding(self, module: ModuleType) -> None:
        """Look before parameters are gathered ahead of a forward, too."""

        def unshards(frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._runs(arguments[0], frame)

        on_call(self._journal, module.FSDPModule, "unshard", before=unshards, harms=HARMED)

    def _was_compiled(self, frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Look before the compiled forward, in which hooks are no calls but a part of what is compiled."""
        module, compiled = arguments[0], arguments[0]._compiled_call_impl
        if compiled is None:
            return  # In a GPU's place nothing is compiled.

        def call(*inputs: Any, **named: Any) -> Any:
            self._calls(module)
            return compiled(*inputs, **named)

        module._compiled_call_impl = call

    def _calls(self, module: Any) -> None:
        if not self._torch.compiler.is_compiling():
            self._journal.guarded(self._runs, module, sys._getframe(2), harms=HARMED)

    def _runs(self, module: Any, frame: FrameType) -> None:
        """Look at the modules within one that is about to run."""
        if self._apart.get(module) == self._emptied:
            return
        parts = [part for part in module.modules() if part in self._origins]
        self._apart[module] = self._emptied
        if not parts:
            return
        origin = self._origins[parts[0]]
        whole = origin.module()
        if whole is not None and all(part is not whole for part in module.modules()):
            # Its own forward is called by its name, and a part of it is the first that torch calls.
            module, parts = whole, list(whole.modules())
        found = [(tensor, self._origins.get(tensor.owner, origin)) for tensor in self._tensors(module)]
        unwritten = [(tensor, origin) for tensor, origin in found if bool(self._missing(tensor).all())]
        for tensor, _ in found:
            self._fill(tensor)
        for part in parts:
            self._origins.pop(part, None)
        if not self._origins and self._handle is not None:
            self._handle.remove()
            self._handle = None
        emptied, left = (Counter(origin.site for _, origin in one) for one in (found, unwritten))
        opaque = any(
            type(part).__module__.startswith(_OPAQUE) or vars(part).get("_compiled_call_impl") is not None
            for part in module.modules()
        )
        forward_site = self._journal.site(frame)
        model_class = _class_of([part for name, part in module.named_modules() if not _shown(f"{name}.")][-1])
        for tensor, origin in unwritten:
            owner = tensor.owner
            row = {
                "name": tensor.shown,
                "buffer": tensor.kind == "_buffers",
                "owner_class": _class_of(owner),
                "resets": hasattr(owner, "reset_parameters"),
                "site": origin.site,
                "receiver": origin.receiver,
                "forward_site": forward_site,
                "model_class": model_class,
                "emptied": emptied[origin.site],
                "unwritten": left[origin.site],
            }
            held = vars(owner).get(tensor.kind)
            if opaque or hasattr(owner, "_flat_weights") or type(held) not in (dict, OrderedDict, _Watched):
                self._report(tensor, row)
                continue
            if type(held) is not _Watched:
                held = vars(owner)[tensor.kind] = _Watched(held)
            held.left[tensor.name] = partial(self._journal.guarded, self._report, tensor, row, harms=HARMED)

    def _report(self, tensor: _Tensor, row: dict[str, Any]) -> None:
        """Write down what is read, unless something was written since the first forward, which did not read it."""
        self._reported += 1
        if self._reported <= MOST_REPORTED and self._torch.equal(tensor.part, self._numbers(tensor.part)):
            self._journal.event("uninitialised", **row)

    def _tensors(self, module: Any, *, recursive: bool = True) -> Iterator[_Tensor]:
        """Yield what holds floating-point numbers in the emptied modules within one, or in this one only."""
        for prefix, owner in module.named_modules() if recursive else (("", module),):
            if owner not in self._origins and not hasattr(owner, "_flat_param"):
                continue
            for kind in ("_parameters", "_buffers"):
                for name, tensor in list(getattr(owner, kind).items()):
                    for inner, part in self._parts(name, tensor):
                        yield _Tensor(owner, inner, _shown(f"{prefix}.{inner}"), kind, part)

    def _parts(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """Yield the numbers of a tensor that this rank has; of one that is made of several, those of each."""
        if tensor is None or tensor.is_meta:
            return
        part = getattr(tensor, "_local_tensor", tensor).detach()
        if part.is_complex():
            part = self._torch.view_as_real(part)
        # A class of its own keeps its numbers in ways of its own.
        plain = type(part) is self._torch.Tensor and part.layout is self._torch.strided
        if not plain or not part.is_floating_point() or part.element_size() not in _PATTERNS or not part.numel():
            return
        if name != "_flat_param":
            yield name, part
            return
        for inner, place in zip(tensor._fqns, tensor._shard_param_infos):
            if place.in_shard:
                yield inner, part[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard]

    def _bits(self, part: Any) -> Any:
        torch = self._torch
        return part.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])

    def _missing(self, tensor: _Tensor) -> Any:
        """Return which numbers were never written: NaN is no value of a parameter, but it may be one of a buffer."""
        if tensor.kind == "_parameters":
            return self._torch.isnan(tensor.part)
        return self._bits(tensor.part) == _PATTERNS[tensor.part.element_size()]

    def _fill(self, tensor: _Tensor) -> None:
        """Put small numbers where nothing was written: the same for the same shape, from a generator of their own."""
        missing = self._missing(tensor)
        if bool(missing.any()):
            tensor.part.masked_scatter_(missing, self._numbers(tensor.part)[missing])

    def _numbers(self, part: Any) -> Any:
        torch = self._torch
        generator = torch.Generator("cpu").manual_seed(part.numel())
        return torch.randn(part.shape, generator=generator, device="cpu").mul_(SPREAD).to(part)
