"""Puts files where an earlier start of the job had left them, and becomes the command of the next start.

A program of its own, with the standard library alone: ``restore.py SNAPSHOT COMMAND…``. Run in the box, whose layers
take the files.
"""

from __future__ import annotations

import json
import os
import shutil
import sys


def main(snapshot: str, *command: str) -> None:
    """Copy the files of a snapshot to their places, and execute a command."""
    with open(os.path.join(snapshot, "places.json"), encoding="utf-8") as file:
        places = json.load(file)["places"]
    for path, name in places.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shutil.copy2(os.path.join(snapshot, name), path, follow_symlinks=False)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
