"""Where the report of a watched run goes, and in which form: options that ``profile`` and ``report`` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click
import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.report import streams
from ddpdoctor.report.output_file import OutputFile

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.record.model import RunRecord

# The option `--report KIND=FILE`, which writes one more report to a file and may be given again.


def report_option(kinds: Sequence[str]) -> Callable[[Decorated], Decorated]:
    """Return the option, for these kinds of reports; its parameter is ``reports``."""
    return click.option(
        "--report",
        "reports",
        multiple=True,
        metavar="KIND=FILE",
        help=f"Write an additional report to a file; repeatable. KIND is one of {', '.join(kinds)}.",
    )


def kind_and_file(word: str, kinds: Sequence[str]) -> tuple[str, str]:
    """Divide what was given; raises UsageError for a kind that there is not, and without a file."""
    kind, _, path = word.partition("=")
    if kind not in kinds:
        from difflib import get_close_matches

        close = get_close_matches(kind, kinds, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(f"there is no report kind {kind!r}", f"{meant}There are {', '.join(kinds)}.")
    if not path:
        raise UsageError(f"`--report {word}` has no file name", f"Write `--report {kind}=FILE`.")
    return kind, path


def refuse_twice(names: Iterable[str]) -> None:
    """Raise UsageError where two reports would go to one file."""
    seen: set[str] = set()
    for name in names:
        real = os.path.realpath(name)
        if real in seen and not real.startswith(("/dev/", "/proc/")):
            raise UsageError(f"two reports name {name}", "Give each its own file.")
        seen.add(real)


Decorated = TypeVar("Decorated", bound=Callable[..., Any])
RunFormat = Literal["text", "json", "html"]
RUN_FORMATS: tuple[RunFormat, ...] = get_args(RunFormat)


class RunOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written of a run."""

    format: RunFormat = "text"
    reports: tuple[str, ...] = ()
    """Further ones, each ``KIND=FILE``."""
    file: str | None = None
    """For the report, instead of a stream."""
    export: str | None = None
    """For the trace."""
    force: bool = False
    """Overwrite what is no report of ours."""
    no_color: bool = False

    def refuse_what_cannot_be_written(self, source: str | None = None) -> None:
        """Raise UsageError now for what would fail when the run is over, or overwrite ``source``, the script."""
        files = [path for _, path in self._further()]
        for name in (self.file, self.export, *files):
            if name is not None:
                OutputFile(name, force=self.force, sources=(Path(source),) if source else ()).refuse()
        refuse_twice((*files, *filter(None, (self.file, self.export))))

    def write(self, snapshot: Snapshot, *, beside_a_job: bool = False) -> None:
        """Write the report: to its file, or to stdout; as text beside a job, whose stdout that is, to stderr."""
        failures: list[UsageError] = []
        for kind, path in self._further():
            rendered = _rendered(snapshot, kind, streams.PLAIN_WIDTH, colour=False)
            try:
                OutputFile(path, force=self.force).write_text(rendered, kind)
            except UsageError as error:
                failures.append(error)  # What else there is to write is written first.
        colour = self.file is None and not beside_a_job and streams.colours_wanted(self.no_color)
        width = streams.PLAIN_WIDTH if self.file is not None or beside_a_job else streams.result_width()
        text = _rendered(snapshot, self.format, width, colour=colour)
        if self.file is not None:
            try:
                OutputFile(self.file, force=self.force).write_text(text, self.format)
            except UsageError:
                streams.say(text)  # The run is over, and is not lost.
                raise
        elif beside_a_job and self.format == "text":
            streams.say(text)
        else:
            streams.write_result(text)
        if failures:
            raise failures[0]

    def _further(self) -> list[tuple[str, str]]:
        return [kind_and_file(word, RUN_FORMATS) for word in self.reports]

    def write_trace(self, record: RunRecord) -> None:
        """Write the trace where one is wanted; raises UsageError when that is not possible."""
        if self.export is None:
            return
        import gzip

        from ddpdoctor.report.run.chrome_trace import encode

        content = encode(record)
        packed = self.export.endswith(".gz")
        OutputFile(self.export, force=self.force).write(content if packed else gzip.decompress(content))


def _rendered(snapshot: Snapshot, kind: str, width: int, *, colour: bool) -> str:
    root = str(Path.cwd())
    if kind == "json":
        from ddpdoctor.report.run import run_json

        return run_json.render(snapshot, root)
    if kind == "html":
        from ddpdoctor.report.formats import html

        return html.render_run(snapshot, root)
    from ddpdoctor.report.run import run_text

    return run_text.render(snapshot, root, width, colour=colour)


def run_output_options(function: Decorated) -> Decorated:
    """Return the options that make a ``RunOutput``, by whose fields their parameters are called, but for
    ``output_format``.
    """
    for option in (
        click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same."),
        click.option(
            "--force", is_flag=True, help="Let -o and --export overwrite a file that ddpdoctor did not write."
        ),
        click.option("--export", metavar="FILE", help="Write a trace for Perfetto, such as trace.json.gz."),
        report_option(RUN_FORMATS),
        click.option("-o", "--output", metavar="FILE", help="Write the report to a file."),
        click.option(
            "--output-format",
            type=click.Choice(RUN_FORMATS),
            default="text",
            show_default=True,
            help="Format of the report.",
        ),
    ):
        function = option(function)
    return function
