"""Where reports go, and in which forms: those of examinations, of watched runs, and of what is computed from runs.

One report goes to stdout or to ``-o FILE``; each ``--report KIND=PATH`` writes one more. ``check``, ``gate`` and
``autopsy`` have an ``ExaminationOutput``, the commands that read or make watched runs a ``RunOutput``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import click
import msgspec

from ddpdoctor.check import LoadedCheck
from ddpdoctor.errors import DdpDoctorError, UsageError
from ddpdoctor.examination import Examination
from ddpdoctor.report import streams
from ddpdoctor.report.formats import FORMATS, rendered

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.record.model import RunRecord
    from ddpdoctor.report.blocks import Page
    from ddpdoctor.report.output_file import OutputFile

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
RunFormat = Literal["text", "json", "html"]
RUN_FORMATS: tuple[RunFormat, ...] = get_args(RunFormat)
LIST_FORMATS: tuple[RunFormat, ...] = ("text", "json")
"""Of what lists runs and checks."""
KINDS = ("text", *(name for name in FORMATS if name != "full"))
"""What a file may hold of an examination; ``text`` is what ``full`` is on a screen."""


_FORCE = click.option("--force", is_flag=True, help="Overwrite files even if they are not ddpdoctor reports.")
_OUTPUT = click.option("-o", "--output", metavar="FILE", help="Write the report to a file instead of stdout.")


def _options(
    function: Decorated,
    gathered_as: Callable[..., object],
    kinds: Sequence[str],
    formats: Sequence[str],
    help: str,
    *more: Any,
) -> Decorated:
    """Add the options, ``more`` among them, of which ``gathered_as`` makes what the command takes as ``wanted``.

    The first of ``formats`` is the default, which ``help`` explains.
    """

    @functools.wraps(function)
    def gathered(*arguments: Any, **given: Any) -> Any:
        named = {name: given.pop(name) for name in ("reports", "export", "force", "no_color") if name in given}
        wanted = gathered_as(format=given.pop("output_format"), file=given.pop("output"), **named)
        return function(*arguments, wanted=wanted, **given)

    for option in (
        click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same."),
        _FORCE,
        *more,
        click.option(
            "--report",
            "reports",
            multiple=True,
            metavar="KIND=FILE",
            help=f"Write an additional report to a file; repeatable. KIND is one of {', '.join(kinds)}.",
        ),
        _OUTPUT,
        click.option("--output-format", type=click.Choice(formats), default=formats[0], show_default=True, help=help),
    ):
        gathered = option(gathered)
    return cast("Decorated", gathered)


def output_options(function: Decorated) -> Decorated:
    """Return the options that make an ``ExaminationOutput``, which the command takes as ``wanted``."""
    meaning = "Text, one line per finding, JSON, an HTML page, or a format for CI servers."
    return _options(function, ExaminationOutput, KINDS, FORMATS, meaning)


def run_output_options(
    *exports: str, help: str = "", formats: tuple[RunFormat, ...] = RUN_FORMATS
) -> Callable[[Decorated], Decorated]:
    """Return the options that make a ``RunOutput``, which the command takes as ``wanted``.

    ``exports`` are the kinds of what ``--export KIND=FILE`` writes, of which ``help`` tells.
    """
    made = functools.partial(RunOutput, exports=exports, formats=formats)
    more = (click.option("--export", metavar="KIND=FILE", help=help),) if exports else ()
    return lambda function: _options(function, made, formats, formats, "Format of the report.", *more)


def file_options(function: Decorated) -> Decorated:
    """Return the options of what prints a document of one form: the command takes ``write``, which prints it."""

    @functools.wraps(function)
    def gathered(*arguments: Any, **given: Any) -> Any:
        file, force = given.pop("output"), given.pop("force")

        def write(text: str) -> None:
            if file is None:
                streams.write_result(text)
            else:
                _output_file(file, force=force).write(text.encode())

        return function(*arguments, write=write, **given)

    for option in (_FORCE, _OUTPUT):
        gathered = option(gathered)
    return cast("Decorated", gathered)


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


def _refuse_twice(names: Iterable[str]) -> None:
    """Raise UsageError where two reports would go to one file."""
    seen: set[str] = set()
    for name in names:
        real = os.path.realpath(name)
        if real in seen and not real.startswith(("/dev/", "/proc/")):
            raise UsageError(f"two reports name {name}", "Give each its own file.")
        seen.add(real)


def _output_file(path: str, *, force: bool, sources: Iterable[Path] = ()) -> OutputFile:
    # Most runs write to stdout alone, and need neither hashes nor what tells our reports from other files.
    from ddpdoctor.report.output_file import OutputFile

    return OutputFile(path, force=force, sources=sources)


def _put_all(reports: Iterable[tuple[str, OutputFile]], text_of: Callable[[str], str]) -> list[DdpDoctorError]:
    """Write the further reports; what failed is returned, so that the others are written nevertheless."""
    failures = []
    for kind, report in reports:
        try:
            report.write_text(text_of(kind), kind)
        except DdpDoctorError as error:
            failures.append(error)
    return failures


def of_run(snapshot: Snapshot, kind: str, width: int = streams.PLAIN_WIDTH, *, colour: bool = False) -> str:
    """Return the report of a watched run: as JSON, as a page, or as text."""
    root = str(Path.cwd())
    if kind == "json":
        from ddpdoctor.report.run import run_json

        return run_json.render(snapshot, root)
    if kind == "html":
        from ddpdoctor.report.formats import html

        standing = {view.finding.code for view in snapshot.findings if view.until_ns is None}
        return html.render_run(snapshot, root, _checks(standing))
    from ddpdoctor.report.run import run_text

    return run_text.render(snapshot, root, width, colour=colour)


class _Output(msgspec.Struct, kw_only=True):
    format: str
    file: str | None = None
    """For the report, instead of a stream."""
    reports: tuple[str, ...] = ()
    """Further ones, each ``KIND=FILE``."""
    force: bool = False
    """Overwrite what is no report of ours."""
    no_color: bool = False


class ExaminationOutput(_Output):
    """What is to be written of an examination."""

    sources: tuple[Path, ...] = ()
    """The scripts, which are never overwritten."""

    def refuse(self, sources: Iterable[Path] = ()) -> None:
        """Raise UsageError now for reports that are none, and for what could not be written when the work is done.

        ``sources`` are the scripts, which are never overwritten.
        """
        self.sources = tuple(sources)
        further = self._further()
        _refuse_twice((*([self.file] if self.file else []), *(path for _, path in further)))
        if self.file is None:
            streams.demand_stdout()
        else:
            self._to(self.file).refuse()
        for _, path in further:
            self._to(path).refuse()
        if self._summary:
            from ddpdoctor.report.output_file import refuse_step_summary

            refuse_step_summary(self._summary, self.sources)

    @property
    def _summary(self) -> str | None:
        return os.environ.get("GITHUB_STEP_SUMMARY") if self.format == "github" else None

    def _further(self) -> list[tuple[str, str]]:
        return [kind_and_file(word, KINDS) for word in self.reports]

    def _to(self, path: str) -> OutputFile:
        return _output_file(path, force=self.force, sources=self.sources)

    def write(self, examination: Examination) -> None:
        """Write everything; one file that cannot be written keeps none of the others from it, and is raised at last."""
        width = streams.PLAIN_WIDTH if self.file is not None else streams.result_width()
        colour = self.file is None and streams.colours_wanted(self.no_color)
        failures = self._put_further(lambda kind: _plain(examination, kind))
        self.write_text(rendered(examination, self.format, checks_of, width, colour=colour))
        self._finish(examination, failures)

    @property
    def takes_stdout(self) -> bool:
        """The report is a document on stdout, where nothing else may stand."""
        return self.file is None and self.format != "full"

    def write_run(self, snapshot: Snapshot, examination: Examination) -> None:
        """Write the same of a command that was watched: for people and as a page the run, otherwise its findings."""

        def render(kind: str) -> str:
            return of_run(snapshot, kind) if kind in ("full", "html") else _plain(examination, kind)

        failures = self._put_further(render)
        text = render(self.format)
        if self.file is None and self.format == "full":
            streams.say(text)  # stdout is the command's.
        else:
            self.write_text(text)
        self._finish(examination, failures)

    def write_text(self, text: str, output_format: str = "") -> None:
        """Write the one report that goes to stdout or to the file, as text in a format."""
        if self.file is None:
            streams.write_result(text)
            return
        try:
            self._to(self.file).write_text(text, output_format or self.format)
        except UsageError:
            streams.write_result(text)  # The minutes that it took are not lost.
            raise

    def _put_further(self, render: Callable[[str], str]) -> list[DdpDoctorError]:
        kinds = [("full" if kind == "text" else kind, self._to(path)) for kind, path in self._further()]
        return _put_all(kinds, render)

    def _finish(self, examination: Examination, failures: Sequence[DdpDoctorError]) -> None:
        """Append to the summary of a step of GitHub, then raise what had failed first."""
        if self._summary:
            from ddpdoctor.report.formats import markdown
            from ddpdoctor.report.output_file import append_step_summary
            from ddpdoctor.report.own_reports import encoded

            append_step_summary(self._summary, encoded(markdown.render(examination)), self.sources)
        for failure in failures:
            raise failure


def _plain(examination: Examination, kind: str) -> str:
    return rendered(examination, kind, checks_of, streams.PLAIN_WIDTH, colour=False)


def checks_of(examination: Examination) -> list[LoadedCheck]:
    """Return the checks that have findings."""
    return _checks({finding.code for finding in examination.findings})


def _checks(codes: Iterable[str]) -> list[LoadedCheck]:
    from ddpdoctor.catalogue.registry import find, load, read_catalogue

    catalogue = read_catalogue()
    return [load(find(catalogue, code)) for code in sorted(codes)]


class RunOutput(_Output):
    """What is to be written of a run."""

    export: str | None = None
    """For the trace or the plot: ``KIND=FILE``."""
    exports: tuple[str, ...] = ("trace",)
    """The kinds there are of it."""
    formats: tuple[RunFormat, ...] = RUN_FORMATS

    def refuse_what_cannot_be_written(self, source: str | None = None) -> None:
        """Raise UsageError now for what would fail when the run is over, or overwrite ``source``, the script."""
        files = [path for _, path in self._further()]
        for name in (self.file, self.exported, *files):
            if name is not None:
                _output_file(name, force=self.force, sources=(Path(source),) if source else ()).refuse()
        _refuse_twice((*files, *filter(None, (self.file, self.exported))))

    @property
    def exported(self) -> str | None:
        """The file of the trace or the plot; raises UsageError where the kind is none."""
        return None if self.export is None else kind_and_file(self.export, self.exports, "--export")[1]

    def write(self, snapshot: Snapshot, *, beside_a_job: bool = False) -> None:
        """Write the report of a run: see ``write_rendered``."""

        def render(kind: str, width: int, colour: bool) -> str:
            return of_run(snapshot, kind, width, colour=colour)

        self.write_rendered(render, beside_a_job=beside_a_job)

    def write_page(self, page: Callable[[], Page], as_json: Callable[[], str]) -> None:
        """Write what a command says of runs as text, as a page of HTML, or as JSON: see ``write_rendered``."""

        def render(kind: str, width: int, colour: bool) -> str:
            if kind == "json":
                return as_json()
            if kind == "html":
                from ddpdoctor.report.formats import html

                return html.render_page(page())
            from ddpdoctor.report import blocks

            return blocks.rendered(page(), width, colour=colour)

        self.write_rendered(render)

    def write_rendered(self, render: Callable[[str, int, bool], str], *, beside_a_job: bool = False) -> None:
        """Write a report, which ``render`` makes from kind, columns and whether in colour.

        It goes to its file, or to stdout; as text beside a job, whose stdout that is, to stderr.
        """
        reports = [(kind, _output_file(path, force=self.force)) for kind, path in self._further()]
        failures = _put_all(reports, lambda kind: render(kind, streams.PLAIN_WIDTH, False))
        colour = self.file is None and not beside_a_job and streams.colours_wanted(self.no_color)
        width = streams.PLAIN_WIDTH if self.file is not None else streams.result_width(on_stderr=beside_a_job)
        text = render(self.format, width, colour)
        if self.file is not None:
            try:
                _output_file(self.file, force=self.force).write_text(text, self.format)
            except UsageError:
                streams.say(text)  # The run is over, and is not lost.
                raise
        elif beside_a_job and self.format == "text":
            streams.say(text)
        else:
            streams.write_result(text)
        for failure in failures:
            raise failure

    def _further(self) -> list[tuple[str, str]]:
        return [kind_and_file(word, self.formats) for word in self.reports]

    def write_trace(self, record: RunRecord) -> None:
        """Write the trace where one is wanted; raises UsageError when that is not possible."""
        file = self.exported
        if file is None:
            return
        import gzip

        from ddpdoctor.report.run.chrome_trace import encode

        content = encode(record)
        packed = file.endswith(".gz")
        _output_file(file, force=self.force).write(content if packed else gzip.decompress(content))


TRACE = run_output_options("trace", help="Write a trace for Perfetto: trace=FILE; packed where its name ends with .gz.")
"""The options of ``profile`` and ``report``."""
