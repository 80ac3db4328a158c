"""ddpdoctor: a doctor for PyTorch DistributedDataParallel jobs.

The public functions, documented in ``docs/api.md``::

    import ddpdoctor

    report = ddpdoctor.check("train.py", args=["--epochs", "2"])
    report = ddpdoctor.rehearse("train.py", nproc=4)
    model = ddpdoctor.watch(model)  # in the script itself

This module imports nothing until it is asked for something: it is also loaded inside training processes.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddpdoctor.api import check, rehearse
    from ddpdoctor.errors import ConfigurationError, DdpDoctorError, ExitCode, UsageError
    from ddpdoctor.examination import Examination
    from ddpdoctor.finding import Finding, Severity
    from ddpdoctor.probe.manual import watch, watching

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "DdpDoctorError",
    "Examination",
    "ExitCode",
    "Finding",
    "Severity",
    "UsageError",
    "check",
    "rehearse",
    "watch",
    "watching",
]

_HOMES = {
    "check": "api",
    "rehearse": "api",
    "ConfigurationError": "errors",
    "DdpDoctorError": "errors",
    "ExitCode": "errors",
    "UsageError": "errors",
    "Examination": "examination",
    "Finding": "finding",
    "Severity": "finding",
    "watch": "probe.manual",
    "watching": "probe.manual",
}
"""Where each public name is defined, to be imported when it is first used."""


def __getattr__(name: str) -> object:
    """A public name, imported when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


class _Package(type(sys)):  # type: ignore[misc]
    """Keeps the public functions where a submodule has the same name: its import would put it in their place."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOMES or not isinstance(value, type(sys)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """The public names, and what every module has."""
    return sorted({*globals(), *__all__})
