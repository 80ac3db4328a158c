"""The table of what is pretended: what may be absent, and what stands for it where it is.

A provider looks for the real thing first, on the disk and among the packages, and never on the network; only where
there is none it serves something of the same shape, type and number of classes, the same on every rank, and reports it.
"""

from __future__ import annotations

import builtins
import glob
import io
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from ...journal import Journal
from ...torch_compat import after_import, replaces
from ...user_code import OURS, UserCode, outwards
from . import absence, image_datasets, language_models, other_packages, tables
from .absence import OF_NUMBERS, Note
from .other_packages import StandIn, serve_imports

# Names of data that a script lists or reads from a list, where neither the list nor the data are on this machine.

NAMES = 64
"""Enough for several batches on every rank, few enough that a first pass over all of them takes no time."""
_STEM = "pretended"
_NAME = re.compile(_STEM + r"\d{6}")
"""In the path of a pretended file; a directory of the user's may well be called after the stem."""
_LISTS = (".txt", ".lst", ".list")
_KINDS = (
    (".png", re.compile(r"\bImage\.open\b|\bimread\b|\bread_image\b|\bdecode_image\b|\b(pil|default)_loader\b")),
    (".wav", re.compile(r"\bsoundfile\b|\blibrosa\b|\btorchaudio\b|\bwavfile\b")),
)
"""What code does with the files of a directory that it lists."""
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".wav", ".flac", ".ogg", ".mp3")
"""What ``named_files`` can serve."""
_MAGIC = re.compile(r"[*?\[]")
_FILE = re.compile(rf"[\w./~-]+(?:{'|'.join(map(re.escape, (*OF_NUMBERS, *_ENDINGS)))})\b")
"""In the sentence of a script that has looked for a file."""


class ListedData:
    """Replacements of what lists and looks for files, for the user's code alone."""

    def __init__(self, user_code: UserCode, note: Note, missed: str = "") -> None:
        self._user_code = user_code
        self._note = note
        self._missed = {_kind(file) for file in _FILE.findall(missed)}
        """Directories and endings of the files that the script missed."""

    def install(self) -> None:
        """Serve listings, patterns, lists in text files, and questions whether what they name is there."""
        replaces("listdir", os)(self._listed)
        replaces("glob", glob)(self._matching)
        replaces("glob", pathlib.Path)(self._paths_matching)
        replaces("open", builtins)(self._opened)
        for owner, names in ((os.path, ("exists", "isfile")), (pathlib.Path, ("exists", "is_file"))):
            for name in names:
                replaces(name, owner)(self._there)

    def _listed(self, listdir: Callable[..., Any], path: Any = ".") -> Any:
        try:
            return listdir(path)
        except FileNotFoundError:
            ending = self._kind_of_files()
            if not ending:
                raise
            self._note(f"the files of {path} ({NAMES} {ending} files)")
            return [f"{stem}{ending}" for stem in _stems()]

    def _matching(self, find: Callable[..., Any], pathname: Any, **options: Any) -> Any:
        found = find(pathname, **options)
        if found or not isinstance(pathname, str) or not self._lacks(pathname) or self._user_file() is None:
            return found
        self._note(f"the files that {pathname} matches ({NAMES})")
        directory, last = os.path.split(pathname)
        directory = _MAGIC.sub(_STEM, directory.replace("**", "*"))
        return [os.path.join(directory, f"{stem}{os.path.splitext(last)[1]}") for stem in _stems()]

    def _paths_matching(self, find: Callable[..., Any], path: Any, pattern: Any, **options: Any) -> Any:
        whole = os.path.join(path, pattern)
        return map(type(path), self._matching(lambda name, **_: list(find(path, pattern, **options)), whole))

    def _lacks(self, pattern: str) -> bool:
        """Return whether the place of a pattern is absent, and what it would match can be served."""
        place = os.path.dirname(_MAGIC.split(pattern)[0])
        return pattern.lower().endswith(_ENDINGS) and bool(place) and not os.path.exists(place)

    def _opened(self, opened: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        try:
            return opened(file, mode, *arguments, **options)
        except FileNotFoundError:
            name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
            reads = isinstance(mode, str) and set(mode) <= set("rt")
            if not reads or not str(name).endswith(_LISTS) or self._user_file() is None:
                raise
            self._note(f"{name} ({NAMES} names)")
            return io.StringIO("".join(f"{stem}\n" for stem in _stems()))

    def _there(self, is_there: Callable[..., bool], path: Any, **options: Any) -> bool:
        if is_there(path, **options) or not isinstance(path, (str, os.PathLike)):
            return is_there(path, **options)
        name = str(path)
        return _NAME.search(name) is not None or (_kind(name) in self._missed and self._user_file() is not None)

    def _kind_of_files(self) -> str:
        """Return the ending that fits what the code that lists a directory reads; empty where it reads neither."""
        file = self._user_file()
        if file is None:
            return ""
        with open(file, encoding="utf-8", errors="replace") as source:
            text = source.read()
        return next((ending for ending, words in _KINDS if words.search(text)), "")

    def _user_file(self) -> str | None:
        """Return the file of the user's code that asks; None where a library asks for itself."""
        files = (frame.f_code.co_filename for frame in outwards(sys._getframe(1)))
        others = (one for one in files if not one.startswith(OURS) and not self._user_code.is_standard_library(one))
        file = next(others, "")
        return file if self._user_code.holds(file) else None


def _kind(file: str) -> tuple[str, str]:
    return os.path.dirname(os.path.abspath(os.path.expanduser(file))), os.path.splitext(file)[1]


def _stems() -> Iterator[str]:
    return (f"{_STEM}{index:06d}" for index in range(NAMES))


_RANDOM, _DEFAULTS = ("weights", "random ones"), ("settings", "their defaults")
Provider = Callable[[ModuleType, Note, str], None]
"""Patches a module that was imported; gets a directory for what it makes, which goes with the rehearsal."""

PROVIDERS: tuple[tuple[str, Provider], ...] = (
    ("timm.models._builder", language_models.serve_timm),
    ("transformers.modeling_utils", language_models.serve_transformers),
    ("transformers.configuration_utils", language_models.serve_configurations),
    ("transformers.tokenization_utils_base", partial(language_models.serve_tokenizers, "PreTrainedTokenizerBase")),
    ("transformers.models.auto.tokenization_auto", partial(language_models.serve_tokenizers, "AutoTokenizer")),
    ("diffusers.models.modeling_utils", partial(language_models.serve_diffusers, "ModelMixin", *_RANDOM)),
    ("diffusers.schedulers.scheduling_utils", partial(language_models.serve_diffusers, "SchedulerMixin", *_DEFAULTS)),
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
            listed = ListedData(self._journal.user_code, self._note, str(missed))
            self._journal.guarded(listed.install, harms=())
        for name, provider in (*PROVIDERS, *(OF_LACKED if missed else ())):
            after_import(name, partial(self._guarded, provider))

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
