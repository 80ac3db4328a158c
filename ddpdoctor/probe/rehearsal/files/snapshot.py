"""Files of a job's checkpoints: copied aside with a list of where they belong, and put back for its next start.

A program of its own, too, of the standard library alone: ``snapshot.py RESTORE LEAVE COMMAND…``. Run in the box, whose
layers take the files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Callable, Optional

MOST_FILES = 2_000
MOST_BYTES = 1 << 31
PLACES = "places.json"


def new_files(directory: str, since_s: float, depth: int = 3) -> Iterator[str]:
    """Yield what was written in a directory, and below it, since a time."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if depth and not entry.name.startswith("."):
                        yield from new_files(entry.path, since_s, depth - 1)
                elif entry.stat(follow_symlinks=False).st_mtime >= since_s and (entry.is_symlink() or entry.is_file()):
                    yield entry.path
    except OSError:
        return


def copy_files(
    target: str,
    files: Iterable[str],
    step: int,
    torn: Callable[[str], Optional[bytes]] = lambda _: None,
) -> None:
    """Copy files into a new directory, unless another rank does it, with a list of where they belong.

    Of those that are ``torn`` it is another content; one that is empty is left out.
    """
    try:
        os.makedirs(target)
    except FileExistsError:
        return
    places: dict[str, str] = {}
    cut: list[str] = []
    left = MOST_BYTES
    for path in dict.fromkeys(files):
        content = torn(path)
        if content == b"":
            continue
        places[path] = str(len(places))
        copy = os.path.join(target, places[path])
        if content is not None:
            cut.append(path)
            with open(copy, "wb") as file:
                file.write(content)
            continue
        left -= os.lstat(path).st_size
        if left < 0 or len(places) >= MOST_FILES:
            return
        shutil.copy2(path, copy, follow_symlinks=False)
    with open(os.path.join(target, PLACES), "w", encoding="utf-8") as file:
        json.dump({"step": step, "places": places, "torn": cut}, file)


def main(restore: str, leave: str, *command: str) -> None:
    """Copy the files of a snapshot to their places, and execute a command; copy what it leaves there afterwards."""
    with open(os.path.join(restore, PLACES), encoding="utf-8") as file:
        places = json.load(file)["places"]
    for path, name in places.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy2(os.path.join(restore, name), path, follow_symlinks=False)
    if not leave:
        os.execv(command[0], command)
    began_s = time.time()
    status = subprocess.call(command)
    folders = dict.fromkeys([*map(os.path.dirname, places), os.getcwd()])
    new = [path for folder in folders for path in new_files(folder, began_s)]
    copy_files(leave, [*filter(os.path.lexists, places), *new], 0)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(*sys.argv[1:])
