"""Plain texts that a script reads from an address of the web, as small language models do: generated words."""

from __future__ import annotations

import functools
import io
import os
import random
from typing import Any
from urllib.parse import urlparse

from .absence import Note
from .tables import sentence

TEXT_BYTES = 1 << 20
"""As long as the collected plays of Shakespeare, the text that most of these scripts read."""


def serve_urllib(module: Any, note: Note, directory: str) -> None:
    """Serve ``urllib.request.urlopen``, which ``urlretrieve`` goes through, too."""
    opened = module.urlopen

    @functools.wraps(opened)
    def urlopen(url: Any, *arguments: Any, **options: Any) -> Any:
        address = url if isinstance(url, str) else getattr(url, "full_url", "")
        if not _is_text(address):
            return opened(url, *arguments, **options)
        content = _generated(address, note)
        headers = __import__("email.message").message.Message()
        headers["Content-Type"], headers["Content-Length"] = "text/plain; charset=utf-8", str(len(content))
        return module.addinfourl(io.BytesIO(content), headers, address, 200)

    module.urlopen = urlopen


def serve_requests(module: Any, note: Note, directory: str) -> None:
    """Serve ``requests.get``, alone or of a session."""
    ask = module.Session.request

    @functools.wraps(ask)
    def request(self: Any, method: Any, url: Any, *arguments: Any, **options: Any) -> Any:
        if str(method).upper() != "GET" or not _is_text(url):
            return ask(self, method, url, *arguments, **options)
        answer = module.Response()
        answer.status_code, answer.reason, answer.url, answer.encoding = 200, "OK", url, "utf-8"
        answer.raw = io.BytesIO(_generated(url, note))
        return answer

    module.Session.request = request


def serve_fsspec(module: Any, note: Note, directory: str) -> None:
    """Serve ``fsspec.open``."""
    opened = module.open

    @functools.wraps(opened)
    def open_text(urlpath: Any, *arguments: Any, **options: Any) -> Any:
        if not _is_text(urlpath):
            return opened(urlpath, *arguments, **options)
        made = os.path.join(directory, f"pretended-{os.getpid()}-{os.path.basename(urlparse(urlpath).path)}")
        with open(made, "wb") as file:
            file.write(_generated(urlpath, note))
        return opened(made, *arguments, **options)

    module.open = open_text


def _is_text(address: Any) -> bool:
    """Return whether an address is that of a plain text on the web."""
    if not isinstance(address, str) or not address.startswith(("http://", "https://")):
        return False
    return urlparse(address).path.endswith(".txt")


def _generated(address: str, note: Note) -> bytes:
    """Return the same words for the same address."""
    note(f"the text {os.path.basename(urlparse(address).path)} of {urlparse(address).hostname} (generated words)")
    draw = random.Random(address)
    content = bytearray()
    while len(content) < TEXT_BYTES:
        content += f"{sentence(draw).capitalize()}.\n".encode()
    return bytes(content)
