"""The settings of a project: ``[tool.ddpdoctor]`` in its pyproject.toml, or the whole of a ddpdoctor.toml.

::

    [tool.ddpdoctor]
    select = ["DDP1", "rank-divergent-collective"]   # codes, prefixes of codes, or names; all when absent
    ignore = ["DDP506"]
    fail-on = "error"                                # error, warning (the default), or advice
    exclude = ["third_party/", "*_pb2.py"]           # not examined when found in a directory
    entry-points = ["train.py", "scripts/*.py"]      # the scripts of a directory, instead of those that are found

    [tool.ddpdoctor.per-file-ignores]
    "examples/" = ["DDP605"]

    [tool.ddpdoctor.thresholds]                      # of what is measured, by the check's name
    straggler = 0.10

    [tool.ddpdoctor.job]                             # the machines of the job, where it is not rehearsed on them
    device-memory-gib = 80                           # of one GPU
    cores = 64                                       # of one node
    ranks-per-node = 8

    [tool.ddpdoctor.gate]
    targets = ["train.py --epochs 2", "torchrun --nproc-per-node 4 tools/finetune.py"]
    baseline = "ddpdoctor-baseline.json"             # the default
    allowed-growth = 0.05                            # of each figure of the budget; 0 by default
    time-limit = 900                                 # seconds for all of it; 600 by default

Paths are patterns as in ``.gitignore``, relative to the directory of the file. What the command line says wins.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ddpdoctor.errors import ConfigurationError
from ddpdoctor.files.patterns import Pattern, matches_below, parse_patterns
from ddpdoctor.files.untrusted import quoted, read_untrusted, reason_of
from ddpdoctor.finding import Severity
from ddpdoctor.record.streams.setup import JobMachine

OWN_FILE = "ddpdoctor.toml"
SHARED_FILE = "pyproject.toml"


class GateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a project has set for ``ddpdoctor gate``."""

    targets: tuple[str, ...] = ()
    """Command lines, relative to the directory of the settings."""
    baseline: str = ""
    """Relative to the same directory; empty for the default."""
    allowed_growth: float | None = None
    time_limit_s: float | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a project has set; what it has not is None or empty."""

    file: str = ""
    """Absolute path of the file that says so; empty when there is none."""
    directory: Path = Path("/")
    """What patterns are relative to."""
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Patterns of files, and the codes, prefixes or names that are ignored in them."""
    fail_on: Severity | None = None
    exclude: tuple[Pattern, ...] = ()
    entry_points: tuple[Pattern, ...] = ()
    thresholds: Mapping[str, float] = {}
    """In the place of the checks' own, as ``ddpdoctor.diagnosis.performance.summary`` lists them."""
    job: JobMachine = JobMachine()
    """What the project says of the machines of its job."""
    gate: GateSettings = GateSettings()

    def relative(self, path: Path) -> str | None:
        """Return the path as patterns see it; None when it lies outside of the project."""
        try:
            return path.relative_to(self.directory).as_posix()
        except ValueError:
            return None

    def excludes(self, path: Path) -> bool:
        """Return whether a file is not to be examined."""
        relative = self.relative(path)
        return relative is not None and matches_below(self.exclude, relative)

    def ignored_in(self, path: Path) -> tuple[str, ...]:
        """Return the codes, prefixes and names that are ignored in a file."""
        relative = self.relative(path)
        if relative is None:
            return ()
        return tuple(
            word
            for pattern, words in self.per_file_ignores
            if matches_below(parse_patterns((pattern,)), relative)
            for word in words
        )


NO_SETTINGS = Settings()


def find_settings(start: Path) -> Settings:
    """Read the settings nearest to ``start``, an absolute path of a file or directory, in it or above it.

    Raises ConfigurationError for a file that cannot be read and for settings that do not exist or make no sense.
    """
    for directory in (start, *start.parents):
        for name in (OWN_FILE, SHARED_FILE):
            raw = _read(directory / name)
            if raw is None or (name == SHARED_FILE and b"ddpdoctor" not in raw):
                continue
            table = _table(directory / name, raw)
            if table is not None:
                return _settings(directory / name, table)
    return NO_SETTINGS


LARGEST_BYTES = 10_000_000


def _read(file: Path) -> bytes | None:
    try:
        return read_untrusted(file, LARGEST_BYTES) if file.is_file() else None
    except OSError as error:
        raise ConfigurationError(f"the settings file {file} cannot be read: {reason_of(error)}") from error


def _table(file: Path, raw: bytes) -> Mapping[str, Any] | None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except RecursionError as error:
        raise ConfigurationError(f"{file} is not valid TOML: it is nested too deeply") from error
    except ValueError as error:  # of TOML, of UTF-8, and of Python for numbers of thousands of digits
        raise ConfigurationError(f"{file} is not valid TOML: {quoted(error)}") from error
    if file.name == OWN_FILE:
        return document
    tool = document.get("tool")
    table = tool.get("ddpdoctor") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigurationError(f"{file}: tool.ddpdoctor is not a table")
    return table


def _settings(file: Path, table: Mapping[str, Any]) -> Settings:
    for key in table:
        if key not in _READERS:
            raise ConfigurationError(f"{file}: there is no setting called {key!r}", _meant(key, _READERS))
    values = {key.replace("-", "_"): _READERS[key](file, key, value) for key, value in table.items()}
    return Settings(file=str(file), directory=file.parent, **values)


def _meant(key: str, names: Collection[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key.lower().replace("_", "-"), names, n=1)
    known = f"The settings are {', '.join(sorted(names))}."
    return f"Did you mean {close[0]}? {known}" if close else known


def _strings(file: Path, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigurationError(f"{file}: {key} must be a list of strings", f'As in `{key} = ["..."]`.')
    return tuple(value)


def _patterns(file: Path, key: str, value: Any) -> tuple[Pattern, ...]:
    return parse_patterns(_strings(file, key, value))


def _severity(file: Path, key: str, value: Any) -> Severity:
    names = [severity.value for severity in Severity]
    if value not in names:
        raise ConfigurationError(f"{file}: {key} must be one of {', '.join(names)}, not {_shown(value)}")
    return Severity(value)


def _by_pattern(file: Path, key: str, value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{file}: {key} must be a table", 'As in `"examples/" = ["DDP605"]` below its head.')
    return tuple((pattern, _strings(file, f'{key}."{pattern}"', words)) for pattern, words in value.items())


def _thresholds(file: Path, key: str, value: Any) -> Mapping[str, float]:
    from ddpdoctor.diagnosis.performance.summary import DEFAULTS

    if not isinstance(value, dict):
        raise ConfigurationError(f"{file}: {key} must be a table", "As in `straggler = 0.10` below its head.")
    for name, number in value.items():
        if name not in DEFAULTS:
            raise ConfigurationError(
                f"{file}: {key}: there is no threshold called {name!r}", f"There are {', '.join(sorted(DEFAULTS))}."
            )
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 1:
            raise ConfigurationError(f"{file}: {key}: {name} must be a number from 0 to 1, not {_shown(number)}")
    return {name: float(number) for name, number in value.items()}


def _machine(file: Path, key: str, value: Any) -> JobMachine:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{file}: {key} must be a table", "As in `device-memory-gib = 80` below its head.")
    for name, number in value.items():
        if name not in _OF_A_NODE:
            raise ConfigurationError(f"{file}: {key}: there is no setting called {name!r}", _meant(name, _OF_A_NODE))
        kind, most, what = _OF_A_NODE[name]
        if isinstance(number, bool) or not isinstance(number, kind) or not 0 < number <= most:
            raise ConfigurationError(f"{file}: {key}: {name} must be {what}, not {_shown(number)}")
    return JobMachine(
        device_memory_bytes=int(value.get("device-memory-gib", 0) * 2**30),
        cores=value.get("cores", 0),
        ranks_per_node=value.get("ranks-per-node", 0),
    )


def _gate(file: Path, key: str, value: Any) -> GateSettings:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{file}: {key} must be a table", 'As in `targets = ["train.py"]` below its head.')
    for name in value:
        if name not in _OF_A_GATE:
            raise ConfigurationError(f"{file}: {key}: there is no setting called {name!r}", _meant(name, _OF_A_GATE))
    baseline = value.get("baseline", "")
    if not isinstance(baseline, str):
        raise ConfigurationError(f"{file}: {key}: baseline must be a file name, not {_shown(baseline)}")
    for name, most in (("allowed-growth", 100.0), ("time-limit", 604_800.0)):
        number = value.get(name, 1)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= most:
            raise ConfigurationError(f"{file}: {key}: {name} must be a number up to {most:g}, not {_shown(number)}")
    return GateSettings(
        targets=_strings(file, f"{key}.targets", value.get("targets", [])),
        baseline=baseline,
        allowed_growth=value.get("allowed-growth"),
        time_limit_s=value.get("time-limit"),
    )


def _shown(value: Any) -> str:
    """Return a value of a settings file, shortened; Python refuses to write whole numbers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_OF_A_NODE: Mapping[str, tuple[type[Any] | tuple[type[Any], ...], int, str]] = {
    "device-memory-gib": ((int, float), 1_000_000, "a number of GiB above 0, up to a million"),
    "cores": (int, 1_000_000, "a whole number above 0, up to a million"),
    "ranks-per-node": (int, 1_000_000, "a whole number above 0, up to a million"),
}
_OF_A_GATE = ("targets", "baseline", "allowed-growth", "time-limit")
_READERS: Mapping[str, Any] = {
    "select": _strings,
    "ignore": _strings,
    "per-file-ignores": _by_pattern,
    "fail-on": _severity,
    "exclude": _patterns,
    "entry-points": _patterns,
    "thresholds": _thresholds,
    "job": _machine,
    "gate": _gate,
}
