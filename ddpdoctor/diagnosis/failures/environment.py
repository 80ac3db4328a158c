"""Exceptions that come of where a rehearsal runs and not of the script: no network, no data, a package that is missing.

On the machine of the job they do not happen, so that they accuse no one there or here: the rehearsal is inconclusive.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

import msgspec

from ddpdoctor.record.joining import headline
from ddpdoctor.record.model import RankException, RunRecord

_NETWORK_TYPES = frozenset(
    {
        "URLError",
        "HTTPError",
        "gaierror",
        "ConnectTimeout",
        "ConnectError",
        "ReadTimeout",
        "MaxRetryError",
        "NameResolutionError",
        "NewConnectionError",
        "ProxyError",
        "SSLError",
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "RemoteDisconnected",
    }
)
_NETWORK_WORDS = re.compile(
    r"name resolution|name or service not known|network is unreachable|max retries exceeded|getaddrinfo failed|"
    r"failed to resolve|couldn't connect to|cannot connect to host|https?://\S+ (is|was) not reach|offline mode|"
    r"urlopen error|if you were trying to load it from 'https?://",
    re.IGNORECASE,
)
_DATA_WORDS = re.compile(
    r"dataset not found|not found or corrupted|found no valid file|found 0 (files|images|samples)|couldn't find any "
    r"(class|data) folder|no such file or directory|num_samples should be a positive integer value, but got "
    r"num_samples=0|(data|dataset|folder|directory|file|path)\b.{0,400}\b(does not exist|doesn't exist|not found)|"
    r"couldn't find (a )?(dataset|any data file)",
    re.IGNORECASE,
)
_MODULE = re.compile(r"No module named '([\w.]+)'")
_OTHER_VERSION = re.compile(r"cannot import name '\w+' from '(\w+)[\w.]*' \(.*\b(?:site|dist)-packages\b")
_OTHER_BUILD = re.compile(r"operator (torch\w+)::\w+ does not exist|Could not load this library: .*/(?:lib)?(torch\w+)")
"""Compiled for another torch, or for CUDA where there is none."""
_QUOTED = re.compile(r"'([^']+)'")
_DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "mpi4py": "mpi4py",
    "bs4": "beautifulsoup4",
    "Levenshtein": "python-Levenshtein",
    "google": "protobuf",
    "attr": "attrs",
    "dotenv": "python-dotenv",
    "git": "GitPython",
    "clip": "git+https://github.com/openai/CLIP.git",
    "apex": "",
}
"""What is installed for a module whose package is called otherwise; empty for what is built from its sources."""


class Lack(msgspec.Struct, frozen=True):
    """What a rank needed and this machine does not have."""

    kind: Literal["network", "data", "package", "version", "program"]
    """``version``: the package is there, and is not the one that the script was written for. ``program``: one that the
    script starts is not there, or fails, as one that downloads does without a network."""
    name: str = ""
    """Of the module, where it is a package."""


def lack_behind(raised: RankException, record: RunRecord | None = None) -> Lack | None:
    """Return what the environment lacked, where that raised an exception; None where the script has to answer for it.

    With a record, a file that the ranks themselves made, or whose directory they made, is the script's own affair.
    """
    if raised.communication:
        return None
    if raised.type in ("ModuleNotFoundError", "ImportError"):
        found = _MODULE.search(f"{raised.message}\n{raised.traceback}")
        if found:
            # What an older or newer torch has is no package of its own.
            return Lack("version", "torch") if found[1].startswith("torch.") else Lack("package", found[1])
        other = _OTHER_VERSION.search(raised.message)
        return Lack("version", other[1]) if other else None
    foreign = _OTHER_BUILD.search(raised.message)
    if foreign:
        return Lack("version", foreign[1] or foreign[2])
    if raised.type == "CalledProcessError" or "_execute_child" in raised.traceback:
        return Lack("program")
    message = headline(raised)
    if raised.type in _NETWORK_TYPES or _NETWORK_WORDS.search(raised.message):
        return Lack("network")
    is_file = raised.type in ("FileNotFoundError", "NotADirectoryError")
    if not (is_file or _DATA_WORDS.search(raised.message)):
        return None
    return None if record is not None and _was_made(message, record) else Lack("data")


def install_line(module: str) -> str:
    """Return the command that installs the package of a module; empty for one that is built from its sources."""
    top = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(top, top)
    return f"pip install {distribution}" if distribution else ""


def _was_made(message: str, record: RunRecord) -> bool:
    """Return whether a path in a message, or the directory that it is in, is of the ranks' own making."""
    paths = [PurePath(path) for path in _QUOTED.findall(message)]
    made = {PurePath(event.path) for event in record.files if not event.existed and event.action != "child-process"}
    made |= {PurePath(access.path) for access in record.accesses if access.action == "make"}
    return any(_same(path, one) or any(_same(parent, one) for parent in path.parents) for path in paths for one in made)


def _same(path: PurePath, made: PurePath) -> bool:
    """Compare a path as a message has it, perhaps relative, with an absolute one."""
    parts = path.parts
    return path == made or (not path.is_absolute() and bool(parts) and made.parts[-len(parts) :] == parts)
