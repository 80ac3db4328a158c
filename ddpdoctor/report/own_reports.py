"""Tells a report of ours from every other file, by its content alone: it may be overwritten by the next one.

What has a place for its producer names it there (JSON, SARIF, JUnit, Code Quality, traces), and is parsed whole. Where
each line has a form of its own (``concise``, ``github``), every line must have it. Prose, which people may continue
writing in, ends with a seal: a line with the digest of all above it.
"""

from __future__ import annotations

import zlib
from hashlib import sha256

import msgspec

from ddpdoctor import __version__
from ddpdoctor.files import regex

TOOL = "ddpdoctor"
LARGEST_BYTES = 1 << 28
"""Of a file that is recognised, packed or not; a trace of 8 ranks has 20 MB."""
SEALED = ("full", "html", "markdown", "text", "diff")
"""Formats whose files end with a seal."""

_SEAL = regex(rb"(?:<!-- |\[)" + TOOL.encode() + rb" \S+, report (?P<digest>[0-9a-f]{16})(?: -->|\])\n\Z")
_LONGEST_SEAL = 120
_FINDING = rb".+:\d+:\d+: (?:error|warning|advice) \w+ [\w-]+: .*"
_DOUBT = rb".+: inconclusive: .*"
_COMMAND = rb"::(?:error|warning|notice) title=ddpdoctor \(.*"
_LINE = regex(rb"|".join((_FINDING, _DOUBT, _COMMAND)))
_NOTHING = (b"", b"[]\n")
"""Contents that are overwritten without a loss; the second is a Code Quality report without a finding."""


class _Tool(msgspec.Struct, frozen=True):
    name: str = ""


class _Driver(msgspec.Struct):
    driver: _Tool


class _Run(msgspec.Struct):
    tool: _Driver


class _Origin(msgspec.Struct, frozen=True):
    tool: str = ""


class _Document(msgspec.Struct):
    """The fields of a report, a SARIF log and a trace that name the producer; others are passed over."""

    tool: _Tool = _Tool()
    runs: tuple[_Run, ...] = ()
    other_data: _Origin = msgspec.field(default=_Origin(), name="otherData")


class _Entry(msgspec.Struct):
    engine_name: str = ""


_DECODER = msgspec.json.Decoder(_Document | tuple[_Entry, ...])


def sealed(text: str, output_format: str) -> str:
    """Return the text of a file in ``output_format`` as it is to be written."""
    if output_format not in SEALED or not text:
        return text
    text = text if text.endswith("\n") else text + "\n"
    head, tail = ("\n<!-- ", " -->") if output_format in ("html", "markdown") else ("\n[", "]")
    body = text + head[0]
    return f"{body}{head[1:]}{TOOL} {__version__}, report {_digest(encoded(body))}{tail}\n"


def encoded(text: str) -> bytes:
    """Return the bytes of a report: halves of characters, which come from file names, are escaped."""
    return text.encode("utf-8", "backslashreplace")


def is_own_report(content: bytes) -> bool:
    """Return whether all of a file's content is a report of ours, or nothing that could be lost."""
    if content in _NOTHING:
        return True
    if content.startswith(b"\x1f\x8b"):
        content = _unpacked(content)
    if content[:1] in (b"{", b"["):
        return _is_own_json(content) or _is_sealed(content)
    if content.startswith(b"<?xml"):
        return _is_own_xml(content)
    *lines, rest = content.split(b"\n")
    return _is_sealed(content) or (not rest and all(map(_LINE.fullmatch, lines)))


def _is_own_json(content: bytes) -> bool:
    try:
        document = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if isinstance(document, tuple):
        return all(entry.engine_name == TOOL for entry in document)
    producers = {run.tool.driver.name for run in document.runs} or {document.tool.name or document.other_data.tool}
    return producers == {TOOL}


def _is_own_xml(content: bytes) -> bool:
    from xml.etree import ElementTree

    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        return False  # ours has none, and entities can be made to explode
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError):
        return False
    return root.tag == "testsuites" and root.get("name") == TOOL


def _is_sealed(content: bytes) -> bool:
    match = _SEAL.search(content, max(0, len(content) - _LONGEST_SEAL))
    return match is not None and match["digest"].decode() == _digest(content[: match.start()])


def _digest(body: bytes) -> str:
    return sha256(body).hexdigest()[:16]


def _unpacked(content: bytes) -> bytes:
    decompressor = zlib.decompressobj(wbits=31)
    try:
        unpacked = decompressor.decompress(content, LARGEST_BYTES)
    except zlib.error:
        return b"?"
    return unpacked if decompressor.eof and not decompressor.unused_data else b"?"
