"""A job that is started to be observed: its run directory, its environment and the plan that its ranks find there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor import __version__
from ddpdoctor.errors import ConfigurationError
from ddpdoctor.launch.environment import ObservedCommand, observed
from ddpdoctor.record import layout
from ddpdoctor.record.writer import epoch_ns

if TYPE_CHECKING:
    from ddpdoctor.launch.job import LaunchedJob


NOWHERE = Path(os.devnull) / "run"
"""A run directory that no process can make: the probe does nothing there."""


class ObservedJob:
    """What is known of the job before it starts."""

    def __init__(
        self,
        command: ObservedCommand,
        run_dir: str | None = None,
        one_rank_samples_per_s: float | None = None,
        *,
        even_unobserved: bool = False,
    ) -> None:
        """Make the run directory and write the plan; raises UsageError for a directory that cannot be used.

        Raises ConfigurationError where there is none; with ``even_unobserved`` the job is started without a record.
        """
        from ddpdoctor.launch.kept_runs import new_run_directory

        self._command = command
        environment = {name: value for name, value in os.environ.items() if name not in command.without}
        environment |= command.environment
        self._plan = _plan(command, environment | observed(NOWHERE, environment), one_rank_samples_per_s)
        self.why_unobserved = ""
        """Why nothing of it can be recorded; empty where it can."""
        try:
            self.directory = new_run_directory(run_dir, self._plan)
        except ConfigurationError as error:
            if not even_unobserved or run_dir is not None:
                raise
            self.directory, self.why_unobserved = NOWHERE, error.message
        self._environment = environment | observed(self.directory, environment)

    def launch(self, *, apart: bool = False, output: int | None = None) -> LaunchedJob:
        """Start it, on our own streams (``output`` takes the place of its stdout), or ``apart`` with a file.

        Raises UsageError when it cannot be started.
        """
        from ddpdoctor.launch.job import LaunchedJob
        from ddpdoctor.launch.kept_runs import write_plan
        from ddpdoctor.monitor.processes.liveness import launcher_output

        file = launcher_output(self.directory) if apart else None
        job = LaunchedJob(self._command.words, self._environment, self.directory, output=output, apart=file)
        with suppress(ConfigurationError):
            write_plan(self.directory, self._plan | {"launcher_pid": job.pid})
        return job


def _plan(
    command: ObservedCommand, environment: Mapping[str, str], one_rank_samples_per_s: float | None
) -> dict[str, Any]:
    import msgspec

    from ddpdoctor.launch.interpreter import commit_of
    from ddpdoctor.probe.environment import recorded_environment
    from ddpdoctor.probe.free_port import network_interfaces
    from ddpdoctor.record.model import Job

    here = Path.cwd()
    script = Path(command.script) if command.script.endswith(".py") else None
    job = Job(
        kind="run",
        command=command.words,
        script=str(here / script) if script is not None else command.script,
        arguments=command.arguments,
        environment=recorded_environment(environment),
        python=command.python,
        tool_version=__version__,
        commit=commit_of((here / script).parent if script is not None else here),
        interfaces=network_interfaces(),
        one_rank_samples_per_s=one_rank_samples_per_s,
        started_ns=epoch_ns(),
    )
    outside = script is not None and not (here / script).resolve().is_relative_to(here.resolve())
    return {
        "version": layout.VERSION,
        "kind": "run",
        "supervisor_pid": os.getpid(),
        "project_root": str((here / script).resolve().parent if script is not None and outside else here),
        "name": command.name,
        "job": msgspec.to_builtins(job),
    }
