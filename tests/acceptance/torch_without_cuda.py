"""An environment with another torch, for its ranks on the CPU: a CUDA build, and next to nothing of CUDA.

The registry has no other build of old torches for Linux. Torch 2.4.1 is 797 MB to download; CUDA's libraries, which it
loads at its import, are 2,038 MB more. Here empty libraries of the same names stand in their place: each function says
that there is no GPU, as the real ones do on a machine without one.

python -m tests.acceptance.torch_without_cuda PYTHON VERSION FOLDER makes one that stays. It needs cc and binutils.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice; the other libraries take every number but 0 for a failure, too."""
_CUDA_NAME = re.compile(r"(cu|nccl|nv)\w*")
_IMPORTED = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools", "sympy", "typing-extensions")
"""What torch imports, and what scripts need."""


def make_environment(python: str, version: str, folder: Path) -> str:
    """Make a virtual environment of ``python`` with that torch; return its interpreter.

    Raises subprocess.CalledProcessError with the output of the command that failed.
    """
    _run(python, "-m", "venv", str(folder))
    made = str(folder / "bin" / "python")
    pip = (made, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check")
    _run(*pip, "--no-deps", f"torch=={version}")
    _run(*pip, *_IMPORTED)
    place = _run(made, "-c", "import importlib.util; print(importlib.util.find_spec('torch').origin)")
    leave_out_cuda(Path(place.strip()).parent / "lib")
    return made


def leave_out_cuda(libraries: Path) -> None:
    """Put an empty library beside torch's own for each one that these need and that is not there."""
    own = sorted(libraries.glob("*.so*"))
    wanted, defined = defaultdict(set), set()
    versions: dict[str, set[str]] = defaultdict(set)
    for path in own:
        for symbol, _, version in (line.split()[-1].partition("@") for line in _nm("--undefined-only", path)):
            wanted[version].add(symbol)
        defined |= {line.split()[-1].partition("@")[0] for line in _nm("--defined-only", path)}
        for name, version in _needed_versions(path):
            versions[name].add(version)
    bare = {symbol for symbol in wanted[""] - defined if _CUDA_NAME.fullmatch(symbol)}
    for name in {name for path in own for name in _needed(path)} - {path.name for path in own}:
        if not _is_on_this_machine(name):
            found = {version: wanted[version] for version in versions[name] if wanted[version]}
            _write_empty(libraries / name, found or {"": bare})


def _write_empty(path: Path, functions: Mapping[str, set[str]]) -> None:
    """Write a library with these functions, by the version that their symbols have; an empty one for none."""
    names = sorted({name for found in functions.values() for name in found})
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
    flags = ["-shared", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{path.name}"]
    if "" not in functions:
        # The loader insists on the version that a symbol was linked with.
        script = path.with_suffix(".map")
        parts = (f"{version} {{ global: {'; '.join(sorted(functions[version]))}; }};" for version in sorted(functions))
        script.write_text("\n".join(parts))
        flags.append(f"-Wl,--version-script={script}")
    _run("cc", *flags, "-x", "c", "-", "-o", str(path), text=source)


def _needed_versions(path: Path) -> Iterator[tuple[str, str]]:
    """Each library that a library needs symbols of, with each version of them."""
    name = ""
    for line in _run("readelf", "--version-info", "--wide", str(path)).splitlines():
        if file := re.search(r"File: (\S+)", line):
            name = file[1]
        elif (version := re.search(r"Name: (\S+)", line)) and "Version:" in line and "Rev:" not in line:
            yield name, version[1]


def _needed(path: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "--dynamic", str(path)))


def _nm(which: str, path: Path) -> list[str]:
    return _run("nm", "--dynamic", which, str(path)).splitlines()


def _is_on_this_machine(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _run(*words: str, text: str = "") -> str:
    return subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    try:
        print(make_environment(sys.argv[1], sys.argv[2], Path(sys.argv[3]).absolute()))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:6])} … ended with {error.returncode}: {error.stderr[-500:]}")
