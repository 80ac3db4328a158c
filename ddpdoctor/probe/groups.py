"""Process groups, and the waits that are no collectives: making the world, making and destroying groups."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Optional

from .environment import has_launcher, number_in
from .journal import Journal
from .user_code import leave_no_frame

FILES_READ = 100
WAITS = ("init_process_group", "new_group", "destroy_process_group")
_sleep = time.sleep
LET_GO_S = 0.1
"""After the end of a gloo world gloo's thread has so long to release the last backward. It needs the interpreter for
that, and deadlocks with the main thread where a DDP model is freed meanwhile (torch 2.13, under load)."""


class GroupBook:
    """The numbers of the process groups of this process."""

    def __init__(self, journal: Journal, torch: Any) -> None:
        self._journal = journal
        self._torch = torch
        self._known: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._names: dict[int, str] = {}
        self._world = -1

    def note(self, group: Any) -> tuple[int, tuple[int, ...]]:
        """Number a group when it is made: its ordinal must not depend on which rank uses which group first."""
        distributed = self._torch.distributed
        known = self._known.get(group.group_name)
        if known is None:
            ranks = tuple(sorted(distributed.get_process_group_ranks(group)))
            known = self._known[group.group_name] = (len(self._known), ranks)
            self._journal.event(
                "group",
                number=known[0],
                ranks=ranks,
                backend=distributed.get_backend(group),
                timeout_ns=_timeout_ns(group, self._torch),
                name=self._names.setdefault(known[0], _mesh_name(group)),
            )
        return known

    def name_of(self, number: int) -> str:
        """Return the name that a device mesh has for a group; empty for other groups."""
        return self._names.get(number, "")

    def number_of(self, group: Any) -> int:
        """Return the number of a group; None is the default one."""
        return self._world if group is None else self.note(group)[0]

    def number_named(self, name: str) -> Optional[int]:
        """Return the number of the group of this world that has a name in torch; None for an unknown one."""
        known = self._known.get(name)
        return known[0] if known is not None else None

    def note_world(self) -> None:
        """Begin a new world: groups made from now on are others, even under old names."""
        self._known = {name + "\0old": known for name, known in self._known.items()}
        self._world = self.note(self._torch.distributed.group.WORLD)[0]


class Groups:
    """Patches of the functions of ``torch.distributed`` that wait in the store."""

    def __init__(
        self,
        journal: Journal,
        torch: Any,
        book: GroupBook,
        world_made: Callable[[int, int], None],
        world_ends: Callable[[], None] = lambda: None,
        world_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Call ``world_ends`` and ``world_ended`` before and after the default group is destroyed."""
        self._journal = journal
        self._torch = torch
        self._world_made = world_made
        self._world_ends = world_ends
        self._world_ended = world_ended
        self._book = book
        self._waits = 0

    def install(self) -> None:
        """Replace the functions in the modules that users take them from, and in that of meshes, which makes worlds."""
        distributed = self._torch.distributed
        if not distributed.is_available():
            return
        for name in WAITS:
            function = getattr(distributed, name)
            replacement = self._noted(name, function)
            for module in (distributed, distributed.distributed_c10d, sys.modules.get("torch.distributed.device_mesh")):
                if hasattr(module, name):
                    setattr(module, name, replacement)

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        @functools.wraps(function)
        def wait_noted(*arguments: Any, **options: Any) -> Any:
            number = self._waits = self._waits + 1
            ranks = options.get("ranks", arguments[0] if arguments else None) if name == "new_group" else None
            launched = has_launcher(journal.plan)
            asked = _init_arguments(arguments, options, launched=launched) if name == "init_process_group" else {}
            journal.event(
                "wait_begun",
                number=number,
                kind=name,
                ranks=_plain(ranks),
                site=journal.here(),
                direct=journal.user_code.holds(sys._getframe(1).f_code.co_filename),
                **asked,
            )
            ends = name == "destroy_process_group" and self._is_world(*arguments, **options)
            gloo = False
            if ends:
                gloo = bool(journal.guarded(self._is_on_gloo, harms=()))
                journal.guarded(self._world_ends, harms=())
            try:
                result = function(*arguments, **options)
            except Exception as error:
                journal.event(
                    "wait_ended",
                    number=number,
                    error=f"{type(error).__name__}: {error}"[:2000],
                    mentions_cuda=bool(journal.guarded(self._mentions_cuda, harms=())),
                )
                leave_no_frame(error)
                raise
            except BaseException as error:
                leave_no_frame(error)
                raise
            journal.event("wait_ended", number=number)
            if ends:
                journal.guarded(self._world_ended, harms=())
            if gloo:
                _sleep(LET_GO_S)
            if name == "init_process_group":
                journal.guarded(self.note_world, harms=("ranks", "groups"))
            elif name == "new_group" and isinstance(result, self._torch.distributed.ProcessGroup):
                journal.guarded(self._book.note, result, harms=("groups",))
            return result

        return wait_noted

    def _is_world(self, group: Any = None, *_: Any, **__: Any) -> bool:
        return group is None or group is self._torch.distributed.group.WORLD

    def _is_on_gloo(self) -> bool:
        distributed = self._torch.distributed
        return distributed.is_initialized() and "gloo" in str(distributed.get_backend())

    def _mentions_cuda(self) -> bool:
        """Return whether "cuda" occurs in a file of the user that was imported by now."""
        files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
        mine = [name for name in files if name.endswith(".py") and self._journal.user_code.holds(name)]
        return any("cuda" in "".join(linecache.getlines(name)) for name in mine[:FILES_READ])

    def note_world(self) -> None:
        """Note that the default group is there: this process is a rank."""
        distributed = self._torch.distributed
        rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
        local_rank = number_in("LOCAL_RANK")
        self._journal.event(
            "world",
            rank=rank,
            world_size=world_size,
            backend=str(distributed.get_backend()),
            local_rank=rank if local_rank is None else local_rank,
        )
        self._world_made(rank, world_size)


def _init_arguments(arguments: tuple[Any, ...], options: dict[str, Any], *, launched: bool) -> dict[str, Any]:
    """Return the backend that a call names, and its rendezvous where it is not the launcher's."""
    named = dict(zip(("backend", "init_method"), arguments))
    named.update(options)
    method, port = str(named.get("init_method") or ""), os.environ.get("MASTER_PORT", "")
    elsewhere = launched and method.startswith("tcp://") and not method.endswith(f":{port}")
    return {
        "backend": str(named.get("backend") or ""),
        "meets_elsewhere": method if elsewhere else "",
        "named_device": named.get("device_id") is not None,
    }


def _plain(ranks: Any) -> list[int]:
    """Return the ranks of a new group; empty for all ranks, and for an iterator that only the script may use up."""
    try:
        return [int(rank) for rank in ranks] if ranks is not None and len(ranks) else []
    except (TypeError, ValueError):
        return []


def _mesh_name(group: Any) -> str:
    """Return the name of the dimension of a device mesh whose group it is; the same on every rank."""
    description = str(getattr(group, "group_desc", ""))
    return description[len("mesh_") :] if description.startswith("mesh_") else ""


def _timeout_ns(group: Any, torch: Any) -> int:
    """Return how long a collective of a group may wait; 0 when its backend has no timeout."""
    for device in ("cuda", "cpu"):
        try:
            return int(group._get_backend(torch.device(device)).options._timeout.total_seconds() * 1e9)
        except (RuntimeError, AttributeError, TypeError):
            continue
    return 0
