"""Files of the project that say how its jobs are started: shell scripts, cluster manifests, and the README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from ddpdoctor.files.patterns import home_directory
from ddpdoctor.source.script.script import Script

LEVELS_DOWN = 2
"""How far below the project's root such files are looked for: ``deploy/kubernetes/job.yaml``."""
MOST_FILES, MOST_BYTES = 60, 200_000
_JOB = re.compile(r"^kind:\s*['\"]?PyTorchJob\b", re.MULTILINE)
_LAUNCH_FILES = re.compile(r"^readme|^requirements.*\.txt$|\.(sh|slurm|sbatch|ya?ml)$", re.IGNORECASE)


def exports(script: Script, variable: str) -> bool:
    """Return whether a file sets a variable of the environment: ``export MASTER_ADDR=localhost``."""
    setting = re.compile(rf"^\s*(export|ENV)\s+{variable}\b|^\s*(-\s+)?name:\s*['\"]?{variable}\b", re.MULTILINE)
    return any(setting.search(text) for _, text in _texts(script.root))


def asks_for_old_torch(script: Script) -> bool:
    """Return whether the project's requirements name a release of torch before 2.0."""
    asked = r"^\W*(py)?torch *(==?|<=?|~=) *1\."  # As pip's and conda's files write it.
    texts = (text for path, text in _texts(script.root) if path.suffix in (".txt", ".yml", ".yaml"))
    return any(re.search(asked, text, re.MULTILINE) for text in texts)


def is_started_by_old_launcher(script: Script) -> bool:
    """Return whether a file starts the script with torch.distributed.launch, which passes it the local rank.

    Not under ``--use_env``.
    """
    entry = script.entry.path
    name = re.escape(entry.name)
    command = rf"torch\.distributed\.launch\b(?:\\\n|[^\n|;&])*?[\s/]{name}(?![\w.])"
    return any(
        "--use_env" not in match[0] and "--use-env" not in match[0] and _means(match[0].split()[-1], path, entry)
        for path, text in _texts(script.root)
        for match in re.finditer(command, text)
    )


def _means(written: str, file: Path, entry: Path) -> bool:
    """Return whether a path in a command may be the entry, from a directory above or below that of the command's file.

    ``$HOME/project/train.py`` is taken for what follows the variable.
    """
    parts = re.sub(r"^.*\$[^/]*/|^(\.{0,2}/)+", "", written).split("/")
    if list(entry.parts[-len(parts) :]) != parts:
        return False
    base, beside = entry.parents[len(parts) - 1], file.parent
    return base == beside or base in beside.parents or beside in base.parents


def gives_each_rank_a_machine(script: Script) -> bool:
    """Return whether a manifest of a cluster starts the job as pods of one GPU each."""
    return any(
        _JOB.search(text) is not None and set(re.findall(r"nvidia\.com/gpu:\s*['\"]?(\d+)", text)) == {"1"}
        for _, text in _texts(script.root)
    )


def _texts(root: Path) -> Iterator[tuple[Path, str]]:
    beside = _files(root.parent, 0) if root.parent != home_directory() else ()  # The README next to ``src``.
    for path in islice(chain(beside, _files(root, LEVELS_DOWN)), MOST_FILES):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield path, file.read(MOST_BYTES)
        except OSError:
            continue


def _files(directory: Path, levels: int) -> Iterator[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return
    yield from (entry for entry in entries if _LAUNCH_FILES.search(entry.name) and entry.is_file())
    for entry in entries if levels else ():
        if not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, levels - 1)
