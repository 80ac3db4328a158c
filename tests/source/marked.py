"""Scripts whose comments say what is to be found: ``# DDP301`` on a line means one finding of that check there."""

from __future__ import annotations

import re
import textwrap
from importlib import import_module
from pathlib import Path

from ddpdoctor.finding import Finding
from ddpdoctor.source.script.script import Script, read_script
from tests.index_of_checks import BUILT_IN, READ_IN_SOURCE

HEAD = """\
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
_MARK = re.compile(r"#\s*((?:DDP\d{3}\s*)+)$")


def written(directory: Path, text: str, name: str = "train.py", head: str = HEAD) -> Path:
    """Write a script, the usual imports first."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + textwrap.dedent(text), encoding="utf-8")
    return path


def findings_of(script: Script, *codes: str) -> list[Finding]:
    """What the checks say of a script's source."""
    found: list[Finding] = []
    for code in sorted(codes or READ_IN_SOURCE):
        found.extend(import_module(BUILT_IN[code]).in_source(script))
    return found


def places(path: Path, *codes: str) -> list[tuple[str, int]]:
    """Code and first line of every finding, sorted."""
    found = findings_of(read_script(path), *codes)
    return sorted((finding.code, finding.locations[0].line) for finding in found)


def marks(path: Path, *codes: str) -> list[tuple[str, int]]:
    """Code and line of every mark in a script, sorted."""
    expected: list[tuple[str, int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _MARK.search(line)
        for code in match[1].split() if match else ():
            if not codes or code in codes:
                expected.append((code, number))
    return sorted(expected)


def check_marks(directory: Path, text: str, *codes: str, head: str = HEAD) -> None:
    """Write a script and assert that its findings (of some checks) are exactly its marks."""
    path = written(directory, text, head=head)
    assert places(path, *codes) == marks(path, *codes)
