"""What a record knows of the ranks' replicas of a model: what DDP left out, and what the optimizers hold.

Times are nanoseconds since the epoch; sites are indices into ``RunRecord.sites``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

UnreducedBecause = Literal["no-sync", "bypass", "again"]
StatefulKind = Literal["optimizer", "scheduler", "scaler"]


class WrapChange(msgspec.Struct, frozen=True, kw_only=True):
    """A wrapped module that is no longer what DDP took note of, as seen before a training forward."""

    rank: int
    wrap: int
    site: int = -1
    """Call chain of the forward."""
    added: tuple[str, ...] = ()
    """Parameters that want a gradient and that DDP did not list: added, replaced, or frozen at the wrap."""
    frozen: tuple[str, ...] = ()
    """Parameters that DDP listed and that no longer want a gradient."""
    late_batch_norms: int = 0
    """SyncBatchNorm layers that were not there at the wrap."""


class Unreduced(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients of a wrap that DDP left as they were on their rank."""

    wrap: int
    why: UnreducedBecause
    """The forward ran under ``no_sync``; no forward through DDP led to them; or they came after the reduction, in a
    further backward."""


class StepDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of what an optimizer holds of one wrap around one of its first steps."""

    rank: int
    optimizer: int
    step: int
    """n-th step of the optimizer, from 1: gradients before it, parameters after it. 0: parameters before the first."""
    wrap: int
    """-1 stands for parameters of no wrapped module."""
    digests: Mapping[str, str] = {}
    """By name; large tensors are sampled, and with many tensors some are left out, alike on every rank."""


class GradientsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients of parameters of wrapped modules that ``torch.autograd.grad`` returned."""

    rank: int
    wraps: tuple[int, ...]
    site: int = -1
    time_ns: int = 0


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer, a scheduler or a gradient scaler held at the first optimizer step."""

    rank: int
    kind: StatefulKind
    number: int
    """Ordinal among objects of its kind in the process."""
    type: str = ""
    digest: str = ""
    loads: tuple[int, ...] = ()
    """Call chains of the calls of ``load_state_dict`` on it."""
