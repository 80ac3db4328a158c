"""Fits a Lightning Trainer or Fabric to the ranks of the rehearsal: as many devices as there are ranks, on one node.

Lightning refuses to start when the devices that a script names are not the ranks that a launcher started.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from ...journal import Journal
from ...torch_compat import after_import

_CLASSES = (
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
)
_GPUS = ("auto", "gpu", "cuda")
_OWN_RANKS = ("spawn", "fork", "notebook")
"""Strategies that start their ranks themselves, even in a script that a launcher started."""


class LightningTrainers:
    """Changes to the arguments of trainers and fabrics, in ranks that a launcher started."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._device = str(journal.plan.get("job", {}).get("device", ""))

    def install(self) -> None:
        """Wait for Lightning's import."""
        if os.environ.get("LOCAL_WORLD_SIZE", "").isdigit():
            for module, name in _CLASSES:
                after_import(module, functools.partial(self._fit_guarded, name))

    def _fit_guarded(self, name: str, module: ModuleType) -> None:
        self._journal.guarded(self._fit, getattr(module, name), harms=("passes",))

    def _fit(self, made: Any) -> None:
        make = made.__init__

        @functools.wraps(make)
        def make_fitted(self_: Any, *arguments: Any, **options: Any) -> None:
            options.update(self._journal.guarded(self._fitted, options, harms=("passes",)) or {})
            make(self_, *arguments, **options)

        made.__init__ = make_fitted

    def _fitted(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that a rehearsal sets; none for a strategy that is not DDP."""
        strategy = options.get("strategy", "auto")
        name = strategy if isinstance(strategy, str) else type(strategy).__name__.lower()
        if not name.startswith(("ddp", "auto")) or any(word in name for word in _OWN_RANKS):
            return {}
        fitted: dict[str, Any] = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": 1}
        if self._device == "cpu" and options.get("accelerator", "auto") in _GPUS:
            fitted["accelerator"] = "cpu"
            if str(options.get("precision", "")).startswith("16"):
                fitted["precision"] = "32-true"
        return fitted
