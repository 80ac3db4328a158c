"""The table of what is pretended: what may be absent, and what stands for it where it is.

A provider looks for the real thing first, on the disk and among the packages, and never on the network; only where
there is none it serves something of the same shape, type and number of classes, the same on every rank, and reports it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...journal import Journal
from ...torch_compat import after_import
from . import absence, image_datasets, language_models, listed_data, other_packages, tables
from .absence import Note
from .other_packages import StandIn, serve_imports

Provider = Callable[[ModuleType, Note, str], None]
"""Patches a module that was imported; gets a directory for what it makes, which goes with the rehearsal."""

PROVIDERS: tuple[tuple[str, Provider], ...] = (
    ("timm.models._builder", language_models.serve_timm),
    ("transformers.modeling_utils", language_models.serve_transformers),
    ("transformers.configuration_utils", language_models.serve_configurations),
    ("transformers.tokenization_utils_base", language_models.serve_tokenizers),
    ("transformers.models.auto.tokenization_auto", language_models.serve_auto_tokenizer),
    ("diffusers.models.modeling_utils", language_models.serve_models),
    ("diffusers.schedulers.scheduling_utils", language_models.serve_schedulers),
    ("datasets.load", tables.serve_datasets),
    ("evaluate.loading", tables.serve_evaluate),
    ("torchvision.datasets", image_datasets.serve_torchvision),
    ("torchvision.datasets", image_datasets.serve_pictures),
    ("timm.data.readers.reader_image_folder", image_datasets.serve_timm),
    ("timm.data.readers.reader_factory", image_datasets.serve_timm_factory),
    ("urllib.request", language_models.serve_urllib),
    ("requests", language_models.serve_requests),
    ("fsspec", language_models.serve_fsspec),
    ("numpy", absence.serve_numpy),
    ("PIL.Image", tables.serve_pillow),
    ("cv2", tables.serve_opencv),
    ("scipy.io.wavfile", tables.serve_scipy),
    ("soundfile", tables.serve_soundfile),
    ("librosa.core.audio", tables.serve_librosa),
    ("torchaudio", tables.serve_torchaudio),
)
"""The module that would serve the real thing, and its provider."""
OF_LACKED: tuple[tuple[str, Provider], ...] = (("numpy", absence.serve_arrays),)
"""Beside them where a script has ended for lack of data: many look for such a file and go on without it."""
OF_TORCH: tuple[Provider, ...] = (language_models.serve_hub, language_models.serve_modules)
"""The same of torch itself, before other libraries take its functions."""


class Pretence:
    """The providers in one process of the job."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._noted: set[str] = set()

    def before_torch(self) -> None:
        """Serve what scripts may load before torch."""
        self.make_directories()
        takes_all = StandIn(other_packages.unseen_module, other_packages.TAKES_ALL)
        others = takes_all if self._journal.plan.get("unseen_packages") else None
        serve_imports(self._stand_ins(), self._journal.user_code, self._note, others)
        absence.Labels.are_few = bool(self._journal.plan.get("few_labels"))
        if missed := self._journal.plan.get("absent_data"):
            listed = listed_data.ListedData(self._journal.user_code, self._note, str(missed))
            self._journal.guarded(listed.install, harms=())
        for name, provider in (*PROVIDERS, *(OF_LACKED if missed else ())):
            after_import(name, functools.partial(self._guarded, provider))

    def _stand_ins(self) -> dict[str, StandIn]:
        silent = StandIn(other_packages.SilentModule, "a silent tracker")
        stand_ins = dict.fromkeys(other_packages.TRACKERS, silent)
        if "apex" in self._journal.plan.get("absent_packages", ()):
            stand_ins["apex"] = StandIn(other_packages.module_of, other_packages.WHAT)
        return stand_ins

    def after_torch(self, torch: Any) -> None:
        """Serve what torch itself downloads."""
        for provider in OF_TORCH:
            self._guarded(provider, torch)
        absent = self._journal.plan.get("absent_weights")
        if absent:
            self._journal.guarded(language_models.serve_checkpoints, torch, self._note, frozenset(absent), harms=())

    def make_directories(self) -> None:
        """Make the directories that a first try missed, where an overlay will throw them away.

        They are in the plan only under an overlay, but a second try may be refused one.
        """
        if self._journal.plan.get("mount_points") is None:
            return
        for path in self._journal.plan.get("absent_directories") or ():
            self._journal.guarded(self._make_directory, path, harms=())

    def _make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        self._note(f"the directory {path} (empty)")

    def _guarded(self, provider: Provider, module: Any) -> None:
        self._journal.guarded(provider, module, self._note, self._journal.run_directory, harms=())

    def _note(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._journal.event("pretended", what=what)
