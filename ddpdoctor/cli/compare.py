"""``ddpdoctor compare``: what differs between two recorded runs."""

from __future__ import annotations

import click

from ddpdoctor.cli.options.command import Share, help_option
from ddpdoctor.cli.options.command import runs as complete_runs
from ddpdoctor.cli.options.recorded_run import finished_run, run_directory
from ddpdoctor.errors import DdpDoctorError, ExitCode
from ddpdoctor.report import streams


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
@click.option(
    "--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Text or JSON."
)
@click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same.")
@help_option()
@click.pass_context
def compare(
    ctx: click.Context, before: str, after: str, allowed_growth: float, output_format: str, no_color: bool
) -> None:
    """Compare two recorded runs of a job, BEFORE and AFTER: run directories, or names of kept runs.

    Step time and phases come with a bootstrap interval, which separates change from noise; then bytes, new and resolved
    findings, and different settings: versions, environment, DDP's options, the script's git commit. Exits with 1 when
    the step is longer by more than --allowed-growth beyond noise, and with 3 when too little was measured.
    """
    from ddpdoctor.diagnosis.performance import run_comparison
    from ddpdoctor.report.run import compare_text

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
    if output_format == "json":
        streams.write_result(compare_text.as_json(compared, gone, come, allowed_growth))
    else:
        colour = streams.colours_wanted(no_color)
        text = compare_text.render(compared, gone, come, allowed_growth, streams.result_width(), colour=colour)
        streams.write_result(text)
    ctx.exit(ExitCode.FINDINGS if compared.is_regression(allowed_growth) else ExitCode.CLEAN)
