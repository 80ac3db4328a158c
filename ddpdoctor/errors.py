"""Errors that reach the user, and the exit codes of every command.

DdpDoctorError            any error of ours that has a sentence for the user
├── UsageError            wrong flags, missing file, a script that cannot be read: exit 2
├── ConfigurationError    a damaged installation or a wrong setting: exit 2
├── NoGround              a run that is too short, or not whole: exit 3
└── RecordError           a damaged or newer record: exit 2
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process of ddpdoctor returns to the shell."""

    CLEAN = 0
    """Everything asked for was examined and nothing at or above ``--fail-on`` was found."""
    FINDINGS = 1
    """At least one finding at or above ``--fail-on``."""
    ERROR = 2
    """Wrong usage, wrong configuration, or a bug of ours."""
    INCONCLUSIVE = 3
    """The rehearsal could not run to its end, or an analysis hit its bound."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM."""


class DdpDoctorError(Exception):
    """An error with a sentence for the user and a hint about what to do."""

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        """What is wrong, and where."""
        self.hint = hint
        """What to do about it; may be empty."""


class UsageError(DdpDoctorError):
    """The command was called with something that cannot be examined."""


class UnreadableScript(UsageError):
    """The script is there and is no Python that can be parsed."""


class ConfigurationError(DdpDoctorError):
    """The installation or a setting is broken."""


class NoGround(DdpDoctorError):
    """A run does not hold what the answer would stand on."""

    exit_code = ExitCode.INCONCLUSIVE


class RecordError(DdpDoctorError):
    """A run directory is missing, damaged, or of another version."""
