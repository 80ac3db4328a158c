"""The public functions of the package, ``ddpdoctor.check`` and ``ddpdoctor.rehearse``; the command line builds on them.

What they return is an ``Examination``, whose fields are documented where it is defined and in ``docs/api.md``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpdoctor.errors import UsageError
from ddpdoctor.finding import Severity
from ddpdoctor.launch.request import DEVICES, FEWEST_RANKS, MOST_RANKS, STRESSES, Device, Stress

if TYPE_CHECKING:
    from ddpdoctor.examination import Examination
    from ddpdoctor.examine.one_script import ExamineRequest, OnProgress

SeverityName = Literal["error", "warning", "advice"]
_BATCH_SIZES = {"auto": None, "keep": 0}


def check(
    script: str | os.PathLike[str] = "",
    args: Sequence[str] = (),
    *,
    command: Sequence[str] = (),
    module: bool = False,
    static: bool = False,
    nproc: int = 2,
    layout: str | None = None,
    stress: Sequence[Stress] = (),
    resume: bool | Literal["torn"] = False,
    resume_with: str | None = None,
    resume_ranks: int | None = None,
    equivalence: bool | None = None,
    against: str | None = None,
    thorough: bool = False,
    batches: int = 4,
    full: bool = False,
    batch_size: int | Literal["auto", "keep"] = "auto",
    time_limit_s: float | None = None,
    stall_after_s: float = 5.0,
    python: str | None = None,
    device: Device = "auto",
    overlay: bool = True,
    network: bool | None = None,
    sockets: Sequence[str | os.PathLike[str]] = (),
    pretend: bool = True,
    allow_writes: bool = False,
    keep: bool = False,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: SeverityName | None = None,
    rehearsal_only: bool = False,
) -> Examination:
    """Read a script's source, rehearse it on a few ranks, and return what is wrong with it.

    ``args`` are the script's own; with ``module`` it is the dotted name of what ``python -m`` runs; in its place
    ``command`` may name the whole launch command, as ``["torchrun", "train.py"]``. All else means what the option of
    ``ddpdoctor check`` of the same name does, and the project's settings count as they do there. ``rehearsal_only``
    leaves out what the source alone makes suspicious.

    The rehearsal's processes are gone when it returns, whatever happens. Raises UsageError for what cannot be examined,
    ConfigurationError for settings, an interpreter or an installation that cannot be used (both are DdpDoctorErrors),
    and KeyboardInterrupt.
    """
    from ddpdoctor.examine.one_script import ExamineRequest
    from ddpdoctor.launch.request import Launch, LaunchLine, parse_layout

    target = os.fspath(script)
    if bool(target) == bool(command):
        raise UsageError("pass either a script or a launch command")
    if command and (args or module):
        raise UsageError("the script's arguments are part of the launch command")
    if static and rehearsal_only:
        raise UsageError("either the source only or the rehearsal only, not both")
    sizes = {"nproc": nproc, "batches": batches, "batch_size": batch_size if isinstance(batch_size, int) else 0}
    _refuse_bounds(**sizes, time_limit_s=time_limit_s, stall_after_s=stall_after_s)
    _refuse_others("device", (device,), DEVICES)
    _refuse_others("stress", stress, STRESSES)
    _refuse_others("fail_on", (fail_on,) if fail_on is not None else (), tuple(one.value for one in Severity))
    if not isinstance(batch_size, int):
        _refuse_others("batch_size", (batch_size,), tuple(_BATCH_SIZES))
    if command:
        from ddpdoctor.launch.command_line import read_launch_line

        line = read_launch_line(tuple(command), os.environ)
    else:
        line = LaunchLine(target=target, arguments=tuple(args), launch=Launch(module=module))
    request = ExamineRequest(
        target=line.target,
        arguments=line.arguments,
        launch=line.launch,
        static=static,
        rehearsal_only=rehearsal_only,
        nproc=nproc,
        layout=parse_layout(layout) if layout is not None else None,
        stress=tuple(stress),
        resume="torn" if resume == "torn" else "after" if resume or resume_with or resume_ranks else "",
        resume_with=resume_with,
        resume_ranks=resume_ranks or 0,
        equivalence=equivalence,
        against=against or "",
        thorough=thorough,
        batches=batches,
        full=full,
        batch_size=batch_size if isinstance(batch_size, int) else _BATCH_SIZES[batch_size],
        time_limit_s=time_limit_s,
        stall_after_s=stall_after_s,
        python=python,
        device=device,
        overlay=overlay,
        network=network,
        sockets=tuple(Path(path).absolute() for path in sockets),
        pretend=pretend,
        allow_writes=allow_writes,
        keep=keep,
        select=tuple(select),
        ignore=tuple(ignore),
    )
    return checked(request, Severity(fail_on) if fail_on is not None else None)


def rehearse(
    script: str | os.PathLike[str] = "",
    args: Sequence[str] = (),
    *,
    command: Sequence[str] = (),
    module: bool = False,
    nproc: int = 2,
    layout: str | None = None,
    batches: int = 4,
    full: bool = False,
    batch_size: int | Literal["auto", "keep"] = "auto",
    time_limit_s: float | None = None,
    stall_after_s: float = 5.0,
    python: str | None = None,
    device: Device = "auto",
    overlay: bool = True,
    network: bool | None = None,
    sockets: Sequence[str | os.PathLike[str]] = (),
    pretend: bool = True,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: SeverityName | None = None,
) -> Examination:
    """Rehearse a script on a few ranks, and return what that shows, and nothing that only its source makes suspicious.

    Takes, and raises, what ``check`` does. The verdict is ``inconclusive`` where the script did not get to its end.
    """
    return check(
        script,
        args,
        command=command,
        module=module,
        equivalence=False,
        nproc=nproc,
        layout=layout,
        batches=batches,
        full=full,
        batch_size=batch_size,
        time_limit_s=time_limit_s,
        stall_after_s=stall_after_s,
        python=python,
        device=device,
        overlay=overlay,
        network=network,
        sockets=sockets,
        pretend=pretend,
        select=select,
        ignore=ignore,
        fail_on=fail_on,
        rehearsal_only=True,
    )


def _refuse_bounds(
    *, nproc: int, batches: int, batch_size: int, time_limit_s: float | None, stall_after_s: float
) -> None:
    """Refuse numbers that the command line would not take either; raises UsageError."""
    if not FEWEST_RANKS <= nproc <= MOST_RANKS:
        raise UsageError(f"nproc must be a number of ranks from {FEWEST_RANKS} to {MOST_RANKS}, not {nproc!r}")
    if batches < 1:
        raise UsageError(f"batches must be the number of batches that a pass yields, at least 1, not {batches!r}")
    if batch_size < 0:
        raise UsageError(f"batch_size must be a number of samples, `auto` or `keep`, not {batch_size!r}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise UsageError(f"time_limit_s must be a number of seconds above 0, not {time_limit_s!r}")
    if not stall_after_s >= 1:
        raise UsageError(f"stall_after_s must be a number of seconds, at least 1, not {stall_after_s!r}")


def _refuse_others(option: str, values: Iterable[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise UsageError(f"{option} is one of {', '.join(known)}, not {value!r}")


def checked(
    request: ExamineRequest, fail_on: Severity | None = None, on_progress: OnProgress = lambda progress: None
) -> Examination:
    """Examine what is asked for under the settings of the project that it belongs to; raises what ``examine`` does."""
    from msgspec.structs import replace

    from ddpdoctor.config import find_settings
    from ddpdoctor.examine.one_script import examine

    beside = Path.cwd() if request.launch.module else Path(request.target).absolute().parent
    settings = find_settings(beside)
    request = replace(request, settings=settings, fail_on=fail_on or settings.fail_on or Severity.WARNING)
    return examine(request, on_progress)
