"""The explicit collectives: calls of ``torch.distributed``, waits for asynchronous ones, DDP's broadcast of buffers.

A call inside of another one is not counted, and none inside of a backward is: the communication of gradients is
measured as such. Point-to-point calls have no sequence number: -2 less the peer stands for it, or -1 for any.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable, Optional

from ...record import layout
from ..groups import GroupBook
from ..torch_compat import Capabilities
from ..user_code import leave_no_frame
from .observer import Observer

_now_ns = time.monotonic_ns
Call = tuple[int, int, int, int]
"""Kind, group, sequence number and bytes."""
_PAYLOAD: dict[str, Optional[tuple[int, str]]] = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "gather", "scatter"), (0, "tensor")),
    **dict.fromkeys(("send", "recv", "isend", "irecv"), (0, "tensor")),
    "all_reduce_coalesced": (0, "tensors"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "all_gather_single": (0, "output_tensor"),
    "all_gather_coalesced": (0, "output_tensor_lists"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "reduce_scatter_single": (1, "input"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    **dict.fromkeys(("barrier", "monitored_barrier", "batch_isend_irecv", "all_gather_object", "gather_object")),
    **dict.fromkeys(("broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list")),
}
"""Functions, and where each has the largest of what it moves; None for those whose arguments do not show it."""
_SAME = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Names that torch 2.13 gives to functions that keep their older ones as well."""
_POINT_TO_POINT = frozenset(
    {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
)
_PEERS = {
    layout.CALL_KINDS.index(name): "src" if "recv" in name else "dst" for name in ("send", "recv", "isend", "irecv")
}
"""Kinds with the peer as the second argument, and its name; the n-th operation of a batch has a call of its own."""
_BATCH = layout.CALL_KINDS.index("batch_isend_irecv")
_MOST_PENDING = 1024
_MOST_SITES = 10_000
_BUFFERS = layout.CALL_KINDS.index("buffers")


class Calls:
    """Replacements of the functions of ``torch.distributed``, in both modules that users take them from."""

    def __init__(
        self,
        observer: Observer,
        torch: Any,
        capabilities: Capabilities,
        groups: GroupBook,
    ) -> None:
        self._observer = observer
        self._keep, self._make_room = observer.moments.keep, observer.moments.make_room
        self._call_has_begun, self._call_has_ended = observer.course.call_began, observer.course.call_ended
        self._torch = torch
        self._capabilities = capabilities
        self._groups = groups
        self._sequences: dict[int, int] = {}
        self._pending: dict[int, tuple[Any, Call]] = {}
        """Asynchronous collectives that are not waited for yet, by the identity of their work."""
        self._sites: dict[tuple[int, int, int, int], tuple[int, CodeType, Optional[CodeType]]] = {}
        """Number of the site of each pair of instructions; holds their code, for its ``id`` must not be used again."""
        self._inside = False
        self._bytes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Buffers of each DDP module."""
        self._newest: Optional[tuple[weakref.ref[Any], int, int, int]] = None
        """The module that broadcast last, the bytes of its buffers, its group, and the place of its forward."""

    def install(self) -> None:
        """Replace what this torch has."""
        distributed = self._torch.distributed
        modules = (distributed, distributed.distributed_c10d)
        for name, payload in _PAYLOAD.items():
            function = getattr(distributed, name, None)
            if function is None:
                continue
            replacement = self._timed(name, function, payload)
            for module in modules:
                if getattr(module, name, None) is function:
                    setattr(module, name, replacement)
        work_class, synchronise = self._capabilities.work_class, self._capabilities.synchronise_buffers
        if work_class is not None:
            work_class.wait = self._wait_timed(work_class.wait)
        if synchronise is not None:
            self._torch.nn.parallel.DistributedDataParallel._sync_buffers = self._buffers_timed(synchronise)

    def _timed(self, name: str, function: Callable[..., Any], payload: Optional[tuple[int, str]]) -> Callable[..., Any]:
        calls, observer = self, self._observer
        kind, has_sequence = layout.CALL_KINDS.index(_SAME.get(name, name)), name not in _POINT_TO_POINT
        is_compiling = self._capabilities.is_compiling

        @functools.wraps(function)
        def collective(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return function(*arguments, **options)
            watched = not calls._inside and observer.thread == get_ident()
            noted = work = None
            if watched:
                noted = calls._begins(kind, has_sequence, payload, arguments, options, sys._getframe(1))
            try:
                work = function(*arguments, **options)
                return work
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    calls._ended(noted, work)
                    if kind == _BATCH and work:
                        calls._await_batch(noted, arguments, work)

        return collective

    def _wait_timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        calls, observer = self, self._observer

        @functools.wraps(wait)
        def wait_for_work(work: Any, *arguments: Any, **options: Any) -> Any:
            watched = not calls._inside and observer.thread == get_ident() and id(work) in calls._pending
            noted = calls._wait_begins(work, sys._getframe(1)) if watched else None
            try:
                return wait(work, *arguments, **options)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    calls._ended(noted, None)

        return wait_for_work

    def _buffers_timed(self, synchronise: Callable[[Any], None]) -> Callable[[Any], None]:
        calls, observer, sequences = self, self._observer, self._sequences
        keep, call_began, call_ended = self._keep, self._call_has_begun, self._call_has_ended

        @functools.wraps(synchronise)
        def _sync_buffers(ddp: Any) -> None:
            watched, noted = not calls._inside and observer.thread == get_ident(), False
            if watched:
                calls._inside = True
                try:
                    newest = calls._newest
                    if newest is None or newest[0]() is not ddp:
                        newest = calls._meet(ddp, sys._getframe(1))
                    _, size_bytes, group, site = newest
                    # Its own count: DDP decides from the forwards before whether it broadcasts.
                    sequence = sequences.get(-1 - group, 0)
                    sequences[-1 - group] = sequence + 1
                    keep((call_began, _BUFFERS, group, sequence, size_bytes, site, _now_ns()))
                    noted = True
                except Exception as error:
                    observer.fault("broadcast", error, harms=("call_tracks", "step_tracks"))
            try:
                synchronise(ddp)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if watched:
                    calls._inside = False
                if noted:
                    keep((call_ended, _now_ns()))

        return _sync_buffers

    def _begins(
        self,
        kind: int,
        has_sequence: bool,
        payload: Optional[tuple[int, str]],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        frame: FrameType,
    ) -> Optional[Call]:
        """Note a call; None when it could not be noted."""
        self._inside = True
        observer = self._observer
        if observer.backwards and not observer.shards:
            return None
        try:
            # What moves comes first and is not looked at: a tensor takes its time to find that it lacks an attribute.
            others = arguments if payload is None else arguments[1:]
            plain = not others and not options
            group = self._groups.number_of(None if plain else options.get("group") or _group_among(others))
            sequence = -1
            if has_sequence:
                sequence = self._sequences.get(group, 0)
                self._sequences[group] = sequence + 1
            elif kind in _PEERS:
                sequence = _before(others[0] if others else options.get(_PEERS[kind]))
            size_bytes = 0
            if payload is not None:
                at, name = payload
                size_bytes = _bytes_of(arguments[at] if len(arguments) > at else options.get(name))
            call = self._enter((kind, group, sequence, size_bytes), frame)
            if has_sequence and (plain or not _is_asynchronous(others, options)):
                # Where the ranks' calls do not fit, gloo aborts the process inside of it: the row is written first.
                observer.moments.take_in()
                begun, ring = observer.course.open_call, observer.call_ring
                if begun is not None and ring is not None:
                    ring.begin(begun[1])
            return call
        except Exception as error:
            observer.fault("call", error, harms=("call_tracks", "step_tracks"))
            return None

    def _wait_begins(self, work: Any, frame: FrameType) -> Optional[Call]:
        self._inside = True
        try:
            return self._enter(self._pending.pop(id(work))[1], frame)
        except Exception as error:
            self._observer.fault("wait", error, harms=("call_tracks", "step_tracks"))
            return None

    def _meet(self, ddp: Any, frame: FrameType) -> tuple[weakref.ref[Any], int, int, int]:
        """Return a DDP module, the bytes of its buffers, its group, and the place of its forward."""
        size_bytes = self._bytes.get(ddp)
        if size_bytes is None:
            size_bytes = self._bytes[ddp] = _bytes_of(ddp.modules_buffers)
        group = self._groups.number_of(ddp.process_group)
        self._newest = weakref.ref(ddp), size_bytes, group, self._site(frame)
        return self._newest

    def _enter(self, call: Call, frame: FrameType) -> Call:
        self._keep((self._call_has_begun, *call, self._site(frame), _now_ns()))
        self._make_room()
        return call

    def _ended(self, call: Optional[Call], work: Any) -> None:
        self._inside = False
        if call is None:
            return
        try:
            if work is not None and hasattr(work, "is_completed"):
                self._keep((self._observer.course.call_started, _now_ns()))
                self._await(work, call)
            else:
                self._keep((self._call_has_ended, _now_ns()))
        except Exception as error:
            self._observer.fault("call", error, harms=("call_tracks", "step_tracks"))

    def _await(self, work: Any, call: Call) -> None:
        """Remember an asynchronous collective without keeping it alive."""
        key, pending = id(work), self._pending
        if len(pending) < _MOST_PENDING:
            pending[key] = weakref.ref(work, lambda gone: pending.pop(key, None)), call

    def _await_batch(self, call: Optional[Call], arguments: tuple[Any, ...], works: Any) -> None:
        """Remember the sends and receives of a batch one by one, where torch gives one work for each."""
        try:
            operations = arguments[0] if arguments else ()
            if call is not None and len(operations) == len(works):
                for operation, work in zip(operations, works):
                    kind = layout.CALL_KINDS.index(operation.op.__name__)
                    self._await(work, (kind, call[1], _before(operation.peer), 0))
        except Exception as error:
            self._observer.fault("batch", error, harms=("call_tracks", "step_tracks"))

    def _site(self, frame: FrameType) -> int:
        """Return the call's place; looked up in full once for each pair of the two innermost places."""
        outer, code = frame.f_back, frame.f_code
        # Code hashes all its constants anew each time that it is looked up itself.
        if outer is None:
            outer_code, key = None, (id(code), frame.f_lasti, 0, 0)
        else:
            outer_code = outer.f_code
            key = (id(code), frame.f_lasti, id(outer_code), outer.f_lasti)
        known = self._sites.get(key)
        if known is not None:
            return known[0]
        site = self._observer.journal.site(frame)
        if len(self._sites) < _MOST_SITES:
            self._sites[key] = site, code, outer_code
        return site


def _group_among(arguments: tuple[Any, ...]) -> Any:
    """Return the process group that was given by position; None for the default one."""
    for argument in arguments:
        if hasattr(argument, "group_name"):
            return argument
    return None


def _before(peer: Any) -> int:
    """Return what stands in the place of a sequence number where there is a peer."""
    return -2 - peer if type(peer) is int and peer >= 0 else -1


def _is_asynchronous(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a call may return before it is over; no other argument of a collective is a truth value."""
    if options and options.get("async_op"):
        return True
    for argument in arguments:  # noqa: SIM110 - a loop of this kind takes half the time
        if argument is True:
            return True
    return False


def _bytes_of(value: Any) -> int:
    """Return the bytes of a tensor, or of those in a list."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    try:
        return int(value.numel()) * int(value.element_size())
    except (AttributeError, TypeError):
        return 0
