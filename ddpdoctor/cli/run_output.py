"""Where the report of a watched run goes, and in which form: options that ``profile`` and ``report`` have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
import msgspec

from ddpdoctor.errors import UsageError
from ddpdoctor.report import streams

if TYPE_CHECKING:
    from ddpdoctor.monitor.snapshot import Snapshot
    from ddpdoctor.record.model import RunRecord

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class RunOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written of a run."""

    format: Literal["text", "json"] = "text"
    file: str | None = None
    """For the report, instead of a stream."""
    export: str | None = None
    """For the trace."""
    no_color: bool = False

    def refuse_what_cannot_be_written(self) -> None:
        """Raise UsageError now for what would fail when the run is over."""
        for name in (self.file, self.export):
            if name is None:
                continue
            path = Path(name)
            if path.is_dir():
                raise UsageError(f"cannot write {name}: it is a directory")
            if not path.absolute().parent.is_dir():
                raise UsageError(f"cannot write {name}: there is no directory {path.absolute().parent}")
            if path.suffix == ".py":
                raise UsageError(f"cannot write {name}: that is the name of a Python file")

    def write(self, snapshot: Snapshot, *, beside_a_job: bool = False) -> None:
        """Write the report: to its file, or to stdout; as text beside a job, whose stdout that is, to stderr."""
        root = str(Path.cwd())
        if self.format == "json":
            from ddpdoctor.report import run_json

            text = run_json.render(snapshot, root)
        else:
            from ddpdoctor.report import run_text

            colour = self.file is None and not beside_a_job and streams.colours_wanted(self.no_color)
            width = streams.PLAIN_WIDTH if self.file is not None or beside_a_job else streams.result_width()
            text = run_text.render(snapshot, root, width, colour=colour)
        if self.file is not None:
            streams.write_result_file(Path(self.file), text)
        elif beside_a_job and self.format == "text":
            streams.say(text)
        else:
            streams.write_result(text)

    def write_trace(self, record: RunRecord) -> None:
        """Write the trace where one is wanted; raises UsageError when that is not possible."""
        if self.export is None:
            return
        import gzip

        from ddpdoctor.report.chrome_trace import encode

        content = encode(record)
        try:
            Path(self.export).write_bytes(content if self.export.endswith(".gz") else gzip.decompress(content))
        except OSError as error:
            raise UsageError(f"cannot write {self.export}: {error.strerror or error}") from error


def run_output_options(function: Decorated) -> Decorated:
    """The options that make a ``RunOutput``: ``output_format``, ``output``, ``export`` and ``no_color``."""
    for option in (
        click.option("--no-color", is_flag=True, help="No colours; NO_COLOR in the environment does the same."),
        click.option("--export", metavar="FILE", help="Write a trace for Perfetto, such as trace.json.gz."),
        click.option("-o", "--output", metavar="FILE", help="Write the report to a file."),
        click.option(
            "--output-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Form of the report.",
        ),
    ):
        function = option(function)
    return function
