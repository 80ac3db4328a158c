"""The labelled public scripts: by repository, commit and path, with the lines of their defects. No code of theirs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ddpdoctor.checks import GONE

LABELS = Path(__file__).with_name("labels.json")
LARGEST_BYTES, LARGEST_OF_ALL_BYTES = 2_000_000, 20_000_000
"""Larger files of a repository are no source that a reading needs, or no file that a start needs (lists of samples)."""
_TEXTS = (".py", ".sh", ".slurm", ".sbatch", ".toml", ".cfg", ".ini", ".yaml", ".yml", ".json", ".txt", ".md")
Confidence = Literal["certain", "likely", "debatable"]


class Defect(msgspec.Struct, frozen=True):
    """Something wrong with a script, as a person read it."""

    codes: tuple[str, ...]
    """The checks that may tell of it."""
    lines: tuple[int, ...]
    confidence: Confidence = "certain"
    title: str = ""
    """Its class, in a word or two."""
    path: str = ""
    """The file, where it is not the script itself."""
    elsewhere: tuple[str, ...] = ()
    """Other places of it, ``PATH:LINE``: where the function is called, say."""
    expected: bool = True
    """It counts for the recall: the source alone shows it, and it is worth a warning."""


class Verdict(msgspec.Struct, frozen=True):
    """What a person who read the code says of a finding that no label speaks of."""

    code: str
    line: int
    right: bool
    why: str
    path: str = ""


class Labelled(msgspec.Struct, frozen=True, kw_only=True):
    """A script and what is known of it."""

    repo: str
    commit: str
    path: str
    defects: tuple[Defect, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    whole: bool = True
    """A person read the whole script, so that every defect is labelled; else only what was found was read."""
    clean: bool = False
    """Nothing is wrong with it that deserves a warning."""

    @property
    def name(self) -> str:
        """Repository and path, as the tables show them."""
        return f"{self.repo}/{self.path}"


def newest(code: str) -> str:
    """The code of the check that reports now what a check that there was reported when it was labelled."""
    return GONE[code].into or code if code in GONE else code


def read_labels() -> tuple[Labelled, ...]:
    """All scripts of the corpus."""
    return msgspec.json.decode(LABELS.read_bytes(), type=tuple[Labelled, ...])


class Missing(Exception):
    """A repository that the mirror does not have at its commit."""


def lay_out(mirror: Path, repo: str, commit: str, target: Path, *, texts_only: bool = True) -> None:
    """Write the texts of a repository at a commit, or all of its files, below a directory. Raises Missing.

    Snapshots may lack large files, which ``git archive`` would stop at.
    """
    git = git_directory(mirror, repo)
    listed = subprocess.run(
        ["git", "--git-dir", git, "ls-tree", "-r", "-l", "-z", commit], capture_output=True, check=False
    )
    if listed.returncode:
        raise Missing(f"{repo} is not in the mirror at {commit}")
    wanted: list[tuple[str, str]] = []
    largest = LARGEST_BYTES if texts_only else LARGEST_OF_ALL_BYTES
    for line in listed.stdout.decode("utf-8", "replace").split("\0"):
        about, _, path = line.partition("\t")
        fields = about.split()
        is_file = len(fields) == 4 and fields[0] in {"100644", "100755"} and fields[3].isdigit()
        if is_file and int(fields[3]) <= largest and (not texts_only or path.endswith(_TEXTS)):
            wanted.append((fields[2], path))
    for path, content in _contents(git, wanted):
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def git_directory(mirror: Path, repo: str) -> str:
    """Where a mirror keeps a repository. Raises Missing."""
    for place in (mirror / repo.replace("/", "+") / "repo", mirror / repo.replace("/", "+"), mirror / repo):
        for git in (place / ".git", place):
            if (git / "HEAD").is_file():
                return str(git)
    raise Missing(f"{repo} is not in the mirror")


def _contents(git: str, wanted: list[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
    asked = "".join(f"{blob}\n" for blob, _ in wanted).encode()
    raw = subprocess.run(
        ["git", "--git-dir", git, "cat-file", "--batch"], input=asked, capture_output=True, check=True
    ).stdout
    start = 0
    for _, path in wanted:
        end = raw.index(b"\n", start)
        head = raw[start:end].split()
        start = end + 1
        if head[-1] == b"missing":
            continue
        size = int(head[2])
        yield path, raw[start : start + size]
        start += size + 1


def as_json(scripts: tuple[Labelled, ...]) -> str:
    """The labels as they are kept: one line a defect, so that changes can be read."""
    parts: list[str] = []
    for script in scripts:
        fields = msgspec.to_builtins(script)
        head = {key: fields[key] for key in ("repo", "commit", "path", "whole", "clean")}
        lines = [json.dumps(head)[1:-1]]
        for key in ("defects", "verdicts"):
            entries = ",\n  ".join(json.dumps(entry) for entry in fields[key])
            lines.append(f' "{key}": [\n  {entries}]' if entries else f' "{key}": []')
        parts.append("{" + ",\n".join(lines) + "}")
    return "[\n" + ",\n".join(parts) + "\n]\n"
