"""``ddpdoctor.watch(model)`` and ``ddpdoctor.watching()``: the probe for those who prefer a line of Python.

Both have the effect of the environment, from that line on, and none where the environment has woken the probe already.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Optional, TypeVar

from ..record import layout
from ..record.writer import share_clock
from .environment import number_in, plan_of
from .journal import Journal
from .process import ProcessEnd, rank_of_environment

if TYPE_CHECKING:
    from .live.install import Live

Model = TypeVar("Model")

_live: Optional[Live] = None


def watch(model: Model) -> Model:
    """Watch this rank's training from now on, and return the model as it was.

    Call it once the process group is there, before or after the model is wrapped. Attach with ``ddpdoctor profile``.
    """
    _start()
    return model


@contextmanager
def watching() -> Iterator[None]:
    """Watch what this rank trains inside of the ``with`` block."""
    live = _start()
    try:
        yield
    finally:
        if live is not None:
            live.stop()


def _start() -> Optional[Live]:
    """Install the hooks once, and begin to measure; None where the environment has seen to it."""
    global _live
    if "_ddpdoctor.probe.start" in sys.modules:
        return None
    import torch

    if _live is None:
        from .live.install import Live

        directory = os.environ.get(layout.RUN_VARIABLE) or _directory_of_this_job()
        plan = plan_of(directory)
        share_clock(plan.get("clock"))
        journal = Journal(directory, plan)
        journal.rank = rank_of_environment()
        journal.hold()
        local_rank = number_in("LOCAL_RANK")
        journal.event("process", parent=os.getppid(), rank=journal.rank, local_rank=local_rank, kind="start")
        process_end = ProcessEnd(journal)
        process_end.install()
        os.register_at_fork(after_in_child=journal.become_forked_child)
        _live = Live(journal, process_end)
        _live.after_torch(torch)
        journal.event("torch", version=str(torch.__version__))
    _live.meet_world(torch)
    return _live


def _directory_of_this_job() -> str:
    """Return the same directory for all ranks that one launcher started on this machine."""
    base = os.environ.get("XDG_STATE_HOME", "")
    state = base if os.path.isabs(base) else os.path.join(_home(), ".local", "state")
    launcher = os.getppid()
    name = f"run-{_started(launcher)}-{launcher}"
    return os.path.join(state, "ddpdoctor", "runs", name)


def _home() -> str:
    """Return the user's home, which a HOME that is no absolute path does not name."""
    named = os.path.expanduser("~")
    if os.path.isabs(named):
        return named
    import pwd

    return pwd.getpwuid(os.getuid()).pw_dir


def _started(pid: int) -> str:
    """Return when a process was started, in words that sort; today where the system does not show it."""
    try:
        changed_s = os.stat(f"/proc/{pid}").st_mtime
    except OSError:
        return time.strftime("%Y%m%d")
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(changed_s))
