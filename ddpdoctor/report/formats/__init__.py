"""The output formats by name; a renderer is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpdoctor.check import LoadedCheck
from ddpdoctor.examination import Examination

FORMATS = ("full", "concise", "json", "github", "gitlab", "html", "junit", "markdown", "sarif")
FOR_PEOPLE = ("full", "concise")
"""The formats beside which an error is told on stderr; the others print a whole document even
where the target is no script."""
_EXPLAINING = ("html", "sarif")
"""The formats that hold the documentation of the checks that have findings."""


def rendered(
    examination: Examination,
    output_format: str,
    checks_of: Callable[[Examination], Sequence[LoadedCheck]],
    width: int,
    *,
    colour: bool,
) -> str:
    """Render in one of ``FORMATS``; ``full`` alone costs the import of rich and minds width and colours.

    ``checks_of`` loads the checks that have findings, for a format that shows their documentation.
    """
    if output_format == "full":
        from ddpdoctor.report.formats import full

        return full.render(examination, width, colour=colour)
    from importlib import import_module

    render: Callable[..., str] = import_module(f"ddpdoctor.report.formats.{output_format}").render
    return render(examination, checks_of(examination)) if output_format in _EXPLAINING else render(examination)
