"""Logs every collective before it starts, by overriding each c10d operator at the ``BackendSelect`` key.

Groups, backend names, arguments and results are untouched: the override writes its row and redispatches.
"""

from __future__ import annotations

import ast
import concurrent.futures.thread
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional
from weakref import WeakKeyDictionary

from ..groups import GroupBook
from ..journal import Journal
from ..process import is_echo, text_of
from ..torch_compat import on_call
from ..user_code import described, origin_of, outwards, sharded_module, tree_around
from .loop_subjects import KINDS as NAMED_KINDS
from .loop_subjects import Subjects, covering
from .training.reduction import ReducedLosses, last_name

# Uses of a group by ranks that are no members of it: torch then does nothing but warn.


def hook_non_member_calls(journal: Journal, torch: Any) -> None:
    """Note each line that calls a collective on a group which leaves this rank out; torch without the hook is left."""
    if not torch.distributed.is_available():
        return
    module = torch.distributed.distributed_c10d
    if not hasattr(module, "_warn_not_in_group"):
        return
    noted: set[int] = set()

    def note(frame: FrameType, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        site = journal.site(frame)
        if site not in noted:
            noted.add(site)
            journal.event("outsider_call", operation=str(arguments[0]), site=site)

    on_call(journal, module, "_warn_not_in_group", before=note, harms=("outsider_calls",))


# The reduce operation of a collective that is about to start, as a number that indexes `REDUCE_OPS`.

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

_AUTOGRAD = os.path.join("torch", "autograd", "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class ReduceOps:
    """The reduce operation, from the operator's argument, or from the call where this torch keeps the argument closed.

    The boxed argument has a field to read in torch 2.10, none in 2.8. Functions of torch.distributed hand it over in
    options that they have just made, a local variable of theirs; DDP's reducer, which is C++, always sums.
    """

    def __init__(self, torch: Any) -> None:
        names = ("AllreduceOptions", "AllreduceCoalescedOptions", "ReduceOptions", "ReduceScatterOptions")
        c10d = torch._C._distributed_c10d
        self._options = tuple(getattr(c10d, name) for name in names if hasattr(c10d, name))

    def number_of(self, boxed: Any, caller: Optional[FrameType]) -> Optional[int]:
        """Return it; None where neither the argument nor ``caller``, the innermost frame, shows it."""
        if boxed._has_method("op"):
            return int(boxed.op())
        if caller is None or _AUTOGRAD in caller.f_code.co_filename:
            return REDUCE_OPS.index("sum")
        given = [value for value in caller.f_locals.values() if isinstance(value, self._options)]
        return int(given[0].reduceOp.op) if len(given) == 1 else None


# Which dictionary a tensor was put together from, when a function stacks a dictionary's values and reduces them.

MOST_ENTRIES = 100
MOST_VARIABLES = 200
"""Variables of a function among which the dictionary is looked for."""

_PUTS_TOGETHER = frozenset({"stack", "cat", "concat", "hstack", "tensor", "as_tensor", "FloatTensor"})


class DictEntries:
    """Whether each call chain reduces what its function has put together."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._put_together: dict[int, bool] = {}

    def entries_of(self, site: int, frame: Optional[FrameType], elements: int) -> str:
        """Return the name of the dictionary with as many entries as a tensor has elements, or an empty text."""
        if self.has_none(site):
            return ""
        frame = next(self._journal.user_code.own(frame), None)
        if frame is None:
            return ""
        if site not in self._put_together:
            tree = tree_around(frame)
            self._put_together[site] = tree is not None and puts_together(tree, frame.f_lineno)
        if not self._put_together[site] or not 0 < elements <= MOST_ENTRIES:
            return ""
        variables = list(frame.f_locals.items())[:MOST_VARIABLES]
        fitting = (name for name, held in variables if isinstance(held, dict) and len(held) == elements)
        return next((name for name in fitting if not name.startswith("_")), "")

    def has_none(self, site: int) -> bool:
        """Return whether this call chain is known to reduce nothing that its function has put together."""
        return self._put_together.get(site) is False


def puts_together(tree: ast.AST, line: int) -> bool:
    """Return whether a call at a line is given a variable that its function makes by ``torch.stack`` or the like."""
    nodes = covering(tree, line)
    given = {
        argument.id
        for call in nodes
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Name)
    }
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = max(functions, key=lambda function: function.lineno) if functions else tree
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in given for target in node.targets)
        and any(isinstance(call, ast.Call) and last_name(call.func) in _PUTS_TOGETHER for call in ast.walk(node.value))
        for node in ast.walk(inside)
    )


Arguments = tuple[str, Optional[int], Optional[int], Optional[int]]
"""Name as users spell it, and where an operator has its tensors, its reduce op, and its root or peer."""

OPERATORS: dict[str, Arguments] = {
    "allreduce_": ("all_reduce", 0, 2, None),
    "allreduce_coalesced_": ("all_reduce", 0, 2, None),
    "broadcast_": ("broadcast", 0, None, 2),
    "reduce_": ("reduce", 0, 2, 3),
    "allgather_": ("all_gather", 1, None, None),
    "_allgather_base_": ("all_gather_into_tensor", 1, None, None),
    "allgather_coalesced_": ("all_gather", 1, None, None),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor", 1, None, None),
    "reduce_scatter_": ("reduce_scatter", 0, 3, None),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 0, 3, None),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", 0, 3, None),
    "gather_": ("gather", 1, None, 3),
    "scatter_": ("scatter", 0, None, 3),
    "alltoall_": ("all_to_all", 1, None, None),
    "alltoall_base_": ("all_to_all_single", 1, None, None),
    "barrier": ("barrier", None, None, None),
    "monitored_barrier_": ("monitored_barrier", None, None, None),
    "send": ("send", 0, None, 2),
    "recv_": ("recv", 0, None, 2),
    "recv_any_source_": ("recv", 0, None, None),
}

_NOTHING = ("", "")
_LISTS = {"allgather_": 0, "reduce_scatter_": 1}
"""Where an operator has a list with one tensor for each rank."""

_AS_IN_MEMORY = {"allreduce_": (0,), "broadcast_": (0,), "reduce_": (0,), "scatter_": (0, 1)}
"""Where operators have tensors of which gloo takes the numbers as they lie in memory; the others copy them first."""

_MOST_FAULTS = 8
"""After so many nothing is logged any more: each costs an event, and the record shows what it lacks."""


class CollectiveHook:
    """The library of the overrides, with registrations that must stay alive."""

    def __init__(
        self,
        journal: Journal,
        torch: Any,
        reduced: ReducedLosses,
        subjects: Subjects,
        groups: GroupBook,
        forward_of: Callable[[], tuple[int, bool]] = lambda: (-1, False),
    ) -> None:
        """``forward_of`` gives the call chain of a sharded module's newest forward, and whether it has no gradients."""
        self._journal = journal
        self._torch = torch
        self._reduced = reduced
        self._subjects = subjects
        self._entries = DictEntries(journal)
        self._reduce_ops = ReduceOps(torch)
        self._nameless: set[int] = set()
        """Call chains of collectives that neither a loop nor a dictionary names."""
        self._groups = groups
        self._forward_of = forward_of
        self._group_at: dict[str, int] = {}
        """Position of the process group among each operator's arguments."""
        self._unbox_group: Callable[[Any], Any] = torch.distributed.ProcessGroup.unbox
        self._unbox_work: Callable[[Any], Any] = torch._C._distributed_c10d.Work.unbox
        self._sequences: dict[int, int] = {}
        self._library: Any = None
        self._faults = 0
        self._forked_use_noted = False
        self._threads = ThreadsOfGroups(journal)
        self._handlers: set[tuple[int, str]] = set()
        """Call chain and type of exception of the collectives in a handler that were reported."""

    def install(self) -> None:
        """Override the operators that this torch has; what it lacks is nothing to override."""
        if self._library is not None:
            return
        torch = self._torch
        self._threads.install()
        self._library = torch.library.Library("c10d", "IMPL")
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for operator in OPERATORS:
            packet = getattr(torch.ops.c10d, operator, None)
            if packet is not None:
                kernel = self._kernel(operator, packet.default, after)
                self._library.impl(operator, kernel, "BackendSelect", with_keyset=True)

    def _kernel(self, operator: str, overload: Any, after: Any) -> Callable[..., Any]:
        redispatch = overload._handle.redispatch_boxed
        log, follow = self._log, self._follow
        places = OPERATORS[operator]

        def kernel(keyset: Any, *arguments: Any, **options: Any) -> Any:
            row = log(operator, places, arguments)
            result = redispatch(keyset & after, *arguments, **options)
            if row >= 0:
                follow(row, result)
            return result

        return kernel

    def _follow(self, row: int, result: Any) -> None:
        """Keep the work of a collective that has begun, by which its end is known; a fault costs that end alone."""
        journal = self._journal
        try:
            work = result[-1] if isinstance(result, tuple) else result
            if work is not None:
                journal.started.append((row, self._unbox_work(work)))
            elif journal.ring is not None:
                journal.ring.complete(row)
        except Exception as error:
            self._note_fault(error)

    def _note_fault(self, error: Exception) -> None:
        self._faults += 1
        self._journal.event("probe_fault", where="collectives", text=repr(error), harms=["collectives"])

    def _about(self, site: int, frame: FrameType, tensors: tuple[Any, ...]) -> tuple[str, str]:
        """Return what a collective is about, and the dictionary with the entries that it moves, or empty texts."""
        subject = self._subjects.subject_of(site, frame)
        if subject or len(tensors) != 1:
            return subject, ""
        entries_of = self._entries.entries_of(site, frame, tensors[0].numel())
        if self._subjects.has_none(site) and self._entries.has_none(site):
            self._nameless.add(site)
        return "", entries_of

    def _log(self, operator: str, places: Arguments, arguments: tuple[Any, ...]) -> int:
        """Write the row; -1 when it could not be written, which must not stop the collective."""
        journal = self._journal
        ring = journal.ring
        if ring is None or self._faults > _MOST_FAULTS:
            if journal.forked_from is not None:
                journal.guarded(self._note_forked_use, places[0], sys._getframe(2), harms=("forked_uses",))
            return -1
        try:
            journal.settle()
            kind, tensors_at, op_at, root_at = places
            group, ranks = self._group(operator, arguments)
            frame = sys._getframe(2)
            tensors = _flat(arguments[tensors_at]) if tensors_at is not None else ()
            reduce_op = self._reduce_ops.number_of(arguments[op_at], frame) if op_at is not None else None
            root = None
            if root_at is not None and int(arguments[root_at]) < len(ranks):
                root = ranks[int(arguments[root_at])]
            origin, module, site = origin_of(_frames(frame)), "", journal.site(frame)
            if origin.startswith("fsdp"):
                module = journal.guarded(sharded_module, frame, harms=()) or ""
            if origin == "fsdp-forward":
                # The line that runs the model, and not the one inside of it, which all who run it share.
                called, evaluates = self._forward_of()
                origin, site = "fsdp-eval" if evaluates else origin, called if called >= 0 else site
            dtype = tensors[0].dtype if tensors else None
            list_at = _LISTS.get(operator)
            uneven = None if list_at is None else len({part.numel() for part in _flat(arguments[list_at])}) > 1
            handled = sys.exc_info()[1]
            if handled is not None:
                journal.guarded(self._note_handled, handled, site, harms=())
            about = _NOTHING
            if origin == "user":
                self._reduced.note(kind, tensors, site)
                summed = reduce_op is not None and dict(enumerate(REDUCE_OPS)).get(int(reduce_op)) == "sum"
                if summed and len(ranks) > 1:
                    journal.guarded(self._reduced.note_counts, kind, tensors, site, group, harms=())
                if operator in _AS_IN_MEMORY and len(ranks) > 1:
                    given = tuple([one for place in _AS_IN_MEMORY[operator] for one in _flat(arguments[place])])
                    journal.guarded(self._reduced.note_orders, kind, given, site, ranks, harms=())
                if kind in NAMED_KINDS and site not in self._nameless:
                    about = journal.guarded(self._about, site, frame, tensors, harms=()) or _NOTHING
            users = (group, ranks, self._groups.name_of(group))
            journal.guarded(self._threads.note, users, kind, site, harms=("shared_groups",))
            shapes = tuple([tensor.shape for tensor in tensors])
            key = (kind, shapes, dtype, reduce_op, root, origin, about, uneven, module)
            signature = journal.signature(
                key, lambda: _described(tensors, kind, reduce_op, root, origin, about, uneven, module)
            )
            sequence = self._sequences.get(group, 0)
            self._sequences[group] = sequence + 1
            return ring.append(group, sequence, signature, site, journal.step, journal.forward_site)
        except Exception as error:
            self._note_fault(error)
            return -1

    def _note_handled(self, error: BaseException, site: int) -> None:
        """Note a collective in the handler of an exception, which the other ranks need not have raised."""
        message, key = text_of(error), (site, type(error).__name__)
        frames = self._journal.user_code.raised_frames(error.__traceback__)
        if key in self._handlers or not frames or is_echo(message):
            return
        self._handlers.add(key)
        file, line, function = frames[0]
        self._journal.event(
            "handled", site=site, type=key[1], message=message[:400], file=file, line=line, function=function
        )

    def _note_forked_use(self, kind: str, frame: Optional[FrameType]) -> None:
        """Note the first time that a process that a rank forked uses the rank's group, which does not work there."""
        if not self._forked_use_noted:
            self._forked_use_noted = True
            self._journal.event("forked_use", kind=kind, site=self._journal.site(frame))

    def _group(self, operator: str, arguments: tuple[Any, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number and the global ranks of the process group among an operator's arguments."""
        at = self._group_at.get(operator)
        if at is None:
            at = next(at for at, argument in enumerate(arguments) if _is_process_group(argument))
            self._group_at[operator] = at
        return self._groups.note(self._unbox_group(arguments[at]))


class ThreadsOfGroups:
    """Finds groups that two threads of a rank use at once: which comes first is chance, and differs by rank.

    Seen from the one that calls, another is at work on the group; or the one that calls got its work before another
    thread called its newest collective of the group, so that nothing put the two in order.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._newest: dict[int, dict[threading.Thread, tuple[float, str, int]]] = {}
        """By group, the threads that have used it: when they called their newest collective, its kind and its site."""
        self._shared: set[int] = set()
        self._given: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """When a thread got the work that it is at; when the work was made that a pool is to do."""
        self._waiting: set[int] = set()
        """The threads that wait for another, as for an item of a queue."""

    def install(self) -> None:
        """Listen to what gives a thread its work: its start, a pool, and what it waits for."""
        journal = self._journal
        on_call(journal, threading.Thread, "start", before=self._starts, harms=())
        on_call(journal, threading.Condition, "wait", before=self._waits, after=self._waited, harms=())
        work = getattr(concurrent.futures.thread, "_WorkItem", None)
        if work is not None:
            on_call(journal, work, "__init__", before=self._made, harms=())
            on_call(journal, work, "run", before=self._taken, harms=())

    def _starts(self, frame: FrameType, arguments: tuple[Any, ...], options: Any) -> None:
        self._journal.user_code.thread_starts(frame, arguments, options)
        self._made(frame, arguments, options)

    def _made(self, _frame: FrameType, arguments: tuple[Any, ...], _: Any) -> None:
        self._given[arguments[0]] = time.monotonic()

    def _taken(self, _frame: FrameType, arguments: tuple[Any, ...], _: Any) -> None:
        made = self._given.pop(arguments[0], None)
        if made is not None:
            self._given[threading.current_thread()] = made

    def _waits(self, *_: Any) -> None:
        self._waiting.add(threading.get_ident())

    def _waited(self, *_: Any) -> None:
        self._waiting.discard(threading.get_ident())
        self._given[threading.current_thread()] = time.monotonic()

    def note(self, users: tuple[int, tuple[int, ...], str], kind: str, site: int) -> None:
        """Note a collective that this thread calls now, of a group given by its number, its ranks and its name.

        A thread of the interpreter's own, as autograd's, works while the caller waits for it. One that has used the
        group and waits for work, as one of a pool, has nothing but Python's own on its stack, or waits by a condition.
        """
        group, ranks, name = users
        here = threading.current_thread()
        newest = self._newest.setdefault(group, {})
        newest[here] = (time.monotonic(), kind, site)
        if len(newest) < 2 or group in self._shared or isinstance(here, threading._DummyThread):
            return
        frames = sys._current_frames()
        main = threading.main_thread()
        given = self._given.get(here) if here is not main else None
        for thread, (when, other_kind, other_site) in newest.items():
            if thread is here or isinstance(thread, threading._DummyThread) or not thread.is_alive():
                continue
            ident = thread.ident or 0
            if given is not None and when > given:
                found = {"thread": here.name, "other_site": site, "kind": other_kind, "site": other_site}
            elif thread is not main and ident not in self._waiting and self._is_at_work(frames.get(ident)):
                found = {"thread": thread.name, "other_site": other_site, "kind": kind, "site": site}
            else:
                continue
            self._shared.add(group)
            self._journal.event("shared_group", name=name, ranks=ranks, **found)
            return

    def _is_at_work(self, frame: Optional[FrameType]) -> bool:
        is_pythons = self._journal.user_code.is_standard_library
        return any(not is_pythons(one.f_code.co_filename) for one in outwards(frame))


def _frames(frame: Optional[FrameType]) -> Iterator[tuple[str, str]]:
    """Yield file and function of a frame and of those that led to it, but ours: the stand-in's stand for torch's."""
    codes = (one.f_code for one in outwards(frame))
    return ((code.co_filename, code.co_name) for code in codes if not code.co_filename.startswith(_OURS))


def _is_process_group(argument: Any) -> bool:
    kind = getattr(argument, "_type", None)
    return kind is not None and "ProcessGroup" in str(kind())


def _described(
    tensors: tuple[Any, ...],
    kind: str,
    reduce_op: Optional[int],
    root: Optional[int],
    origin: str,
    about: tuple[str, str],
    uneven: Optional[bool],
    module: str,
) -> dict[str, Any]:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    dtype = str(tensors[0].dtype).replace("torch.", "") if tensors else ""
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    named_op = "" if reduce_op is None else dict(enumerate(REDUCE_OPS)).get(int(reduce_op), str(reduce_op))
    return {
        **described(kind, shapes, dtype, size_bytes, origin, reduce_op=named_op, root=root),
        **{name: value for name, value in zip(("subject", "entries_of"), about) if value},
        **({} if uneven is None else {"uneven": uneven}),
        **({"module": module} if module else {}),
    }


def _flat(tensors: Any) -> tuple[Any, ...]:
    if not isinstance(tensors, (list, tuple)):
        return (tensors,)
    if tensors and not isinstance(tensors[0], (list, tuple)):
        return tuple(tensors)
    found: list[Any] = []
    for item in tensors:
        found.extend(_flat(item))
    return tuple(found)
