"""Runs one shell command in a box and prints, as JSON, what became of it: a program, so that it can give up powers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from ddpdoctor.launch.box.start import BoxRefused, remove_layers, start_in_box


def main() -> None:
    """``driver.py COMMAND [network] [socket=PATH] [keep=DIRECTORY]``."""
    with tempfile.TemporaryDirectory(prefix="run-") as run:
        print(json.dumps(_become(Path(run))))


def _become(run: Path) -> dict[str, object]:
    (run / "shared").mkdir()
    kept = next((Path(word.removeprefix("keep=")) for word in sys.argv[2:] if word.startswith("keep=")), None)
    began = time.monotonic()
    output = run / "output"
    with output.open("wb") as sink:
        try:
            box = start_in_box(
                ["/bin/bash", "-c", sys.argv[1]],
                os.environ | {"SHARED": str(run / "shared")},
                Path.cwd(),
                run,
                sink,
                network="network" in sys.argv,
                sockets=[Path(word.removeprefix("socket=")) for word in sys.argv[2:] if word.startswith("socket=")],
                keep=kept is not None,
            )
        except BoxRefused as refused:
            return {"refused": refused.message}
        built_s = time.monotonic() - began
        code = box.process.wait()
        box.end()
    places = box.keep(kept) if kept is not None else {}
    remove_layers(run)
    return {
        "code": code,
        "kept": {lower: str(place) for lower, place in places.items()},
        "output": output.read_text(encoding="utf-8", errors="replace"),
        "built_s": built_s,
        "read_only": box.read_only,
        "left": sorted(path.name for path in run.iterdir()),
        "shared": {path.name: path.read_text() for path in (run / "shared").iterdir()},
    }


main()
