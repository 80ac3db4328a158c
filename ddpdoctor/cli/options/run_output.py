"""Where what is said of watched runs goes, and in which form: options of the commands that read or make such runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

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


def kind_and_file(word: str, kinds: Sequence[str], option: str = "--report") -> tuple[str, str]:
    """Divide what was given; raises UsageError for a kind that there is not, and without a file."""
    kind, _, path = word.partition("=")
    if kind not in kinds:
        from difflib import get_close_matches

        close = get_close_matches(kind, kinds, n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        there_are = f"There are {', '.join(kinds)}." if len(kinds) > 1 else f"Write `{option} {kinds[0]}=FILE`."
        raise UsageError(f"there is no {option[2:]} kind {kind!r}", f"{meant}{there_are}")
    if not path:
        raise UsageError(f"`{option} {word}` has no file name", f"Write `{option} {kind}=FILE`.")
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
    """For the trace or the plot: ``KIND=FILE``."""
    exports: tuple[str, ...] = ("trace",)
    """The kinds there are of it."""
    force: bool = False
    """Overwrite what is no report of ours."""
    no_color: bool = False

    def refuse_what_cannot_be_written(self, source: str | None = None) -> None:
        """Raise UsageError now for what would fail when the run is over, or overwrite ``source``, the script."""
        files = [path for _, path in self._further()]
        for name in (self.file, self.exported, *files):
            if name is not None:
                OutputFile(name, force=self.force, sources=(Path(source),) if source else ()).refuse()
        refuse_twice((*files, *filter(None, (self.file, self.exported))))

    @property
    def exported(self) -> str | None:
        """The file of the trace or the plot; raises UsageError where the kind is none."""
        return None if self.export is None else kind_and_file(self.export, self.exports, "--export")[1]

    def write(self, snapshot: Snapshot, *, beside_a_job: bool = False) -> None:
        """Write the report of a run: see ``write_rendered``."""

        def render(kind: str, width: int, colour: bool) -> str:
            return _rendered(snapshot, kind, width, colour=colour)

        self.write_rendered(render, beside_a_job=beside_a_job)

    def write_rendered(self, render: Callable[[str, int, bool], str], *, beside_a_job: bool = False) -> None:
        """Write a report, which ``render`` makes from kind, columns and whether in colour.

        It goes to its file, or to stdout; as text beside a job, whose stdout that is, to stderr.
        """
        failures: list[UsageError] = []
        for kind, path in self._further():
            try:
                OutputFile(path, force=self.force).write_text(render(kind, streams.PLAIN_WIDTH, False), kind)
            except UsageError as error:
                failures.append(error)  # What else there is to write is written first.
        colour = self.file is None and not beside_a_job and streams.colours_wanted(self.no_color)
        width = streams.PLAIN_WIDTH if self.file is not None or beside_a_job else streams.result_width()
        text = render(self.format, width, colour)
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
        file = self.exported
        if file is None:
            return
        import gzip

        from ddpdoctor.report.run.chrome_trace import encode

        content = encode(record)
        packed = file.endswith(".gz")
        OutputFile(file, force=self.force).write(content if packed else gzip.decompress(content))


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


def run_output_options(*exports: str, help: str = "") -> Callable[[Decorated], Decorated]:
    """Return the options that make a ``RunOutput``, which the command takes as ``wanted``.

    ``exports`` are the kinds of what ``--export KIND=FILE`` writes, of which ``help`` tells.
    """

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def gathered(*arguments: Any, **given: Any) -> Any:
            wanted = RunOutput(
                format=given.pop("output_format"),
                file=given.pop("output"),
                reports=given.pop("reports"),
                export=given.pop("export", None),
                exports=exports,
                force=given.pop("force"),
                no_color=given.pop("no_color"),
            )
            return function(*arguments, wanted=wanted, **given)

        export = click.option("--export", metavar="KIND=FILE", help=help)
        for option in (
            click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same."),
            click.option("--force", is_flag=True, help="Overwrite files even if they are not ddpdoctor reports."),
            *((export,) if exports else ()),
            report_option(RUN_FORMATS),
            click.option("-o", "--output", metavar="FILE", help="Write the report to a file instead of stdout."),
            click.option(
                "--output-format",
                type=click.Choice(RUN_FORMATS),
                default="text",
                show_default=True,
                help="Format of the report.",
            ),
        ):
            option(gathered)
        return cast("Decorated", gathered)

    return decorate


def of_text(kind: str, title: str, text: str) -> str:
    """Return a text, or the page that shows it where ``kind`` is ``html``."""
    if kind != "html":
        return text
    from ddpdoctor.report.formats import html

    return html.render_text(title, text)


TRACE = run_output_options("trace", help="Write a trace for Perfetto: trace=FILE; packed where its name ends with .gz.")
"""The options of ``profile`` and ``report``."""
