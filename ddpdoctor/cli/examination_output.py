"""Where the report of an examination goes, and in which forms: what ``check``, ``gate`` and ``autopsy`` have in common.

One report goes to stdout or to ``-o FILE``; each ``--report KIND=PATH`` writes one more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddpdoctor.check import LoadedCheck
from ddpdoctor.cli.options.run_output import kind_and_file, refuse_twice, report_option
from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.report import streams
from ddpdoctor.report.formats import FORMATS, rendered

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.report.output_file import OutputFile

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
KINDS = ("text", *(name for name in FORMATS if name != "full"))
"""What a file may hold; ``text`` is what ``full`` is on a screen."""


def output_options(function: Decorated) -> Decorated:
    """Return the options that make an ``ExaminationOutput``."""
    for option in (
        click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same."),
        click.option("--force", is_flag=True, help="Overwrite files even if they are not ddpdoctor reports."),
        report_option(KINDS),
        click.option("-o", "--output", metavar="FILE", help="Write the report to a file instead of stdout."),
        click.option(
            "--output-format",
            type=click.Choice(FORMATS),
            default="full",
            show_default=True,
            help="Text, one line per finding, JSON, an HTML page, or a format for CI servers.",
        ),
    ):
        function = option(function)
    return function


class ExaminationOutput:
    """What is to be written of an examination."""

    def __init__(
        self,
        output_format: str,
        file: str | None,
        reports: Sequence[str],
        *,
        force: bool,
        no_color: bool,
        sources: Iterable[Path] = (),
    ) -> None:
        """``sources`` are the scripts, which are never overwritten. Raises UsageError for reports that are none."""
        self.format = output_format
        self._sources = tuple(sources)
        self._force = force
        self._file = None if file is None else self._output_file(file)
        self._no_color = no_color
        named = [kind_and_file(word, KINDS) for word in reports]
        self._reports = [(kind, self._output_file(path)) for kind, path in named]
        refuse_twice((*([file] if file else []), *(path for _, path in named)))
        self._summary = os.environ.get("GITHUB_STEP_SUMMARY") if output_format == "github" else None

    def refuse(self) -> None:
        """Raise UsageError now for what could not be written when the work is done."""
        if self._file is None:
            streams.demand_stdout()
        else:
            self._file.refuse()
        for _, report in self._reports:
            report.refuse()
        if self._summary:
            from ddpdoctor.report.output_file import refuse_step_summary

            refuse_step_summary(self._summary, self._sources)

    def write(self, examination: Examination) -> None:
        """Write everything; one file that cannot be written keeps none of the others from it, and is raised at last."""

        def in_a_file(kind: str) -> str:
            return rendered(examination, kind, checks_of, streams.PLAIN_WIDTH, colour=False)

        failures = [self._put(report, kind, in_a_file) for kind, report in self._reports]
        width = streams.PLAIN_WIDTH if self._file is not None else streams.result_width()
        colour = self._file is None and streams.colours_wanted(self._no_color)
        text = rendered(examination, self.format, checks_of, width, colour=colour)
        self.write_text(text)
        self._append_summary(examination)
        for failure in filter(None, failures):
            raise failure

    @property
    def takes_stdout(self) -> bool:
        """The report is a document on stdout, where nothing else may stand."""
        return self._file is None and self.format != "full"

    def write_run(self, snapshot: Snapshot, examination: Examination) -> None:
        """Write the same of a command that was watched: for people and as a page the run, otherwise its findings."""
        root = str(Path.cwd())

        def of_run(kind: str) -> str:
            if kind == "full":
                from ddpdoctor.report.run import run_text

                return run_text.render(snapshot, root, streams.PLAIN_WIDTH, colour=False)
            if kind == "html":
                from ddpdoctor.report.formats import html

                return html.render_run(snapshot, root)
            return rendered(examination, kind, checks_of, streams.PLAIN_WIDTH, colour=False)

        failures = [self._put(report, kind, of_run) for kind, report in self._reports]
        text = of_run(self.format)
        if self._file is None and self.format == "full":
            streams.say(text)  # stdout is the command's.
        else:
            self.write_text(text)
        self._append_summary(examination)
        for failure in filter(None, failures):
            raise failure

    def write_text(self, text: str, output_format: str = "") -> None:
        """Write the one report that goes to stdout or to the file, as text in a format."""
        if self._file is None:
            streams.write_result(text)
            return
        try:
            self._file.write_text(text, output_format or self.format)
        except UsageError:
            streams.write_result(text)  # The minutes that it took are not lost.
            raise

    def _append_summary(self, examination: Examination) -> None:
        if self._summary:
            from ddpdoctor.report.formats import markdown
            from ddpdoctor.report.output_file import append_step_summary
            from ddpdoctor.report.own_reports import encoded

            append_step_summary(self._summary, encoded(markdown.render(examination)), self._sources)

    def _output_file(self, path: str) -> OutputFile:
        # Most runs write to stdout alone, and need neither hashes nor what tells our reports from other files.
        from ddpdoctor.report.output_file import OutputFile

        return OutputFile(path, force=self._force, sources=self._sources)

    def _put(self, report: OutputFile, kind: str, text_of: Callable[[str], str]) -> DdpDoctorError | None:
        """Write one file; what failed, so that the others are written nevertheless."""
        kind = "full" if kind == "text" else kind
        try:
            report.write_text(text_of(kind), kind)
        except DdpDoctorError as error:
            return error
        return None


def checks_of(examination: Examination) -> list[LoadedCheck]:
    """Return the checks that have findings."""
    from ddpdoctor.catalogue.registry import find, load, read_catalogue

    catalogue = read_catalogue()
    return [load(find(catalogue, code)) for code in sorted({finding.code for finding in examination.findings})]
