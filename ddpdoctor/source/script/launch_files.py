"""Files of the project that say how its jobs are started: shell scripts, cluster manifests, and the README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from ddpdoctor.files.directories import home_directory
from ddpdoctor.source.script.script import Script

LEVELS_DOWN = 2
"""How far below the project's root such files are looked for: ``deploy/kubernetes/job.yaml``."""
MOST_FILES, MOST_BYTES = 60, 200_000
_JOB = re.compile(r"^kind:\s*['\"]?PyTorchJob\b", re.MULTILINE)
_LAUNCH_FILES = re.compile(r"^readme|\.(sh|slurm|sbatch|ya?ml)$", re.IGNORECASE)


def exports(script: Script, variable: str) -> bool:
    """Return whether a file sets a variable of the environment: ``export MASTER_ADDR=localhost``."""
    setting = re.compile(rf"^\s*(export|ENV)\s+{variable}\b|^\s*(-\s+)?name:\s*['\"]?{variable}\b", re.MULTILINE)
    return any(setting.search(text) for text in _texts(script.root))


def old_launch(script: Script) -> str:
    """Return the command by which a file starts the script with torch.distributed.launch; empty when none does.

    Not one with ``--use_env``, under which that launcher passes no argument.
    """
    name = re.escape(script.entry.path.name)
    command = re.compile(rf"torch\.distributed\.launch\b(?:\\\n|[^\n|;&])*?[\s/]{name}(?![\w.])")
    found = (match[0] for text in _texts(script.root) for match in command.finditer(text))
    return next((text for text in found if "--use_env" not in text and "--use-env" not in text), "")


def gives_each_rank_a_machine(script: Script) -> bool:
    """Return whether a manifest of a cluster starts the job as pods of one GPU each."""
    return any(
        _JOB.search(text) is not None and set(re.findall(r"nvidia\.com/gpu:\s*['\"]?(\d+)", text)) == {"1"}
        for text in _texts(script.root)
    )


def _texts(root: Path) -> Iterator[str]:
    beside = _files(root.parent, 0) if root.parent != home_directory() else ()  # The README next to ``src``.
    for path in islice(chain(beside, _files(root, LEVELS_DOWN)), MOST_FILES):
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                yield file.read(MOST_BYTES)
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
