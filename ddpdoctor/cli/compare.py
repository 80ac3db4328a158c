"""``ddpdoctor compare``: what differs between two recorded runs."""

from __future__ import annotations

import click

from ddpdoctor.cli.options.command import Share, help_option
from ddpdoctor.cli.options.command import runs as complete_runs
from ddpdoctor.cli.output import RunOutput, of_page, run_output_options
from ddpdoctor.cli.report import finished_run, run_directory
from ddpdoctor.errors import DdpDoctorError, ExitCode


@click.command(add_help_option=False)
@click.argument("before", shell_complete=complete_runs)
@click.argument("after", shell_complete=complete_runs)
@click.option(
    "--allowed-growth",
    type=Share(),
    default="5%",
    show_default=True,
    metavar="SHARE",
    help="The share by which the step may become longer, such as 5%.",
)
@run_output_options()
@help_option()
@click.pass_context
def compare(ctx: click.Context, before: str, after: str, allowed_growth: float, wanted: RunOutput) -> None:
    """Compare two recorded runs of a job, BEFORE and AFTER: run directories, or names of kept runs.

    Step time and phases come with a bootstrap interval, which separates change from noise; then bytes, new and resolved
    findings, and different settings: versions, environment, DDP's options, the script's git commit. Exits with 1 when
    the step is longer by more than --allowed-growth beyond noise, and with 3 when too little was measured.
    """
    from ddpdoctor.diagnosis.performance import run_comparison
    from ddpdoctor.report.run import compare_text

    wanted.refuse_what_cannot_be_written()
    opened = [finished_run(run_directory(run)) for run in (before, after)]
    (first, one), (second, other) = opened
    try:
        compared = run_comparison.compare(one, other)
    except run_comparison.TooShort as gap:
        error = DdpDoctorError(
            f"{(before, after)[gap.position]} is too short: {gap.steps} steps were measured on all ranks after the "
            f"warm-up, and at least {run_comparison.FEWEST_STEPS} are needed",
            "Profile a longer run of the job.",
        )
        error.exit_code = ExitCode.INCONCLUSIVE
        raise error from gap
    findings = [
        {view.finding.fingerprint: view.finding for view in snapshot.findings if view.until_ns is None}
        for snapshot in (first, second)
    ]
    gone = [finding for mark, finding in findings[0].items() if mark not in findings[1]]
    come = [finding for mark, finding in findings[1].items() if mark not in findings[0]]

    def render(kind: str, width: int, colour: bool) -> str:
        if kind == "json":
            return compare_text.as_json(compared, gone, come, allowed_growth)
        name = f"{first.name} and {second.name}"
        return of_page(kind, compare_text.page(compared, gone, come, allowed_growth, name), width, colour=colour)

    wanted.write_rendered(render)
    ctx.exit(ExitCode.FINDINGS if compared.is_regression(allowed_growth) else ExitCode.CLEAN)
