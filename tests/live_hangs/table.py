"""All jobs that hang: the faults of the rehearsal while they are watched, and those of the other tables."""

from __future__ import annotations

from tests.faults.cases import FAULTS
from tests.live_hangs.cases import NEW, Hang, Kind
from tests.live_hangs.library import LIBRARY

_LIVE_CODES = {
    "SIGKILL": ("DDP703", "DDP306"),
    "early return": ("DDP306",),
    "skipped backward on both, other steps": ("DDP312", "DDP302"),
    "continue on a bad batch": ("DDP302", "DDP312", "DDP103"),
    "loss keys of the batch": ("DDP302", "DDP301"),
    "another group": ("DDP304", "DDP301", "DDP305"),
    "a wait beyond the timeout": ("DDP307", "DDP308"),
    "port in use": ("DDP706", "DDP504", "DDP705"),
    "different models": ("DDP304", "DDP706"),
    "DDP on a subset": ("DDP314", "DDP301"),
    "an infinite loop": ("DDP307", "DDP305"),
    "a rank polls for what its peer makes later": ("DDP307", "DDP305"),
    "new_group by two of 3": ("DDP309", "DDP306"),
}
_NO_HANG = frozenset(
    {
        "another reduce operation",
        "rank 0 forward, buffers, no gradients",
        "swapped same-shape calls",
        "one loop in two orders",
        "skipped backward on both, other steps",
        "mp.spawn with no worker",
        "another root",
        "another group",
    }
)
"""Faults after which the job ends well: a rehearsal, which sees every call, knows more of them."""
_MAY_ABORT, _ABORTED = frozenset({"DDP301", "DDP302", "DDP304"}), ("DDP703",)
"""Where sizes do not fit gloo ends a process at once, perhaps before its peer has told what it was in."""
_ENDS_ITSELF = frozenset({"DDP706", "DDP703", "DDP306", "DDP201"})


_LIVE_LINES = {"continue on a bad batch": "for step, x in enumerate(loader):"}
"""Faults of which a live run knows another line: not where a batch was passed over, but the loop that drew it."""


_IMPORTED = {"DDP on a subset": "import torch._dynamo\n"}
"""DDP's first constructor imports torch's compiler, for seconds in which its rank works and nobody stands still."""


def _marked(script: str, line: str) -> str:
    """The script with the mark at another line, if one is given."""
    return script if not line else script.replace("  # here", "").replace(line, f"{line}  # here")


def _of_rehearsal() -> dict[str, Hang]:
    rows = {}
    for name, fault in FAULTS.items():
        if name in _NO_HANG:
            continue
        kind: Kind = "stuck" if fault.basis == "strong" else "proof"
        if name in ("an infinite loop", "a rank polls for what its peer makes later"):
            kind = "busy"
        elif fault.code in _ENDS_ITSELF or fault.code == "DDP304" or name in ("a wait beyond the timeout",):
            kind = "end"
        loose = fault.culprit is None or fault.either
        rows[f"rehearsal: {name}"] = Hang(
            script=_IMPORTED.get(name, "") + _marked(fault.script, _LIVE_LINES.get(name, "")),
            codes=(*_LIVE_CODES.get(name, (fault.code,)), *(_ABORTED if fault.code in _MAY_ABORT else ())),
            culprits=tuple({tuple(range(fault.ranks)), *((rank,) for rank in range(fault.ranks))})
            if loose or fault.culprit is None
            else ((fault.culprit,), *(((0, 1),) if fault.ranks == 2 else ())),
            kind=kind,
            ranks=fault.ranks,
        )
    return rows


HANGS: dict[str, Hang] = {**_of_rehearsal(), **NEW, **LIBRARY}
