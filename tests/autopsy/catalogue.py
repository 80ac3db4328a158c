"""Which messages of the installed torch no row of the catalogue classifies.

Of the Python files: the texts of exceptions, and what is logged as an error or a warning. Of the C++ library: strings
that name a thing of torch.distributed and read like a statement. An exception that has no row is read as what it is, an
exception (DDP706); what is logged, or printed by C++, without a row counts for nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.postmortem.catalogue.messages import statement_in

_ROOMS = ("distributed", "nn/parallel", "multiprocessing", "utils/data")
_LEFT_OUT = re.compile(r"/(?:_tools|tensor|_shard|_tensor|pipelining|rpc|checkpoint|algorithms|benchmarks|autograd)/")
_LOGGED = frozenset({"error", "exception", "critical", "warning", "warn"})
_STRING = re.compile(rb"[\t\x20-\x7e]{24,400}(?=\0)")
_OF_C10D = re.compile(
    r"\b(?:NCCL|nccl\w+|gloo|TCPStore|c10d|ProcessGroup\w*|process group|watchdog|collective|monitoredBarrier|heartbeat"
    r"|client socket|server socket|rendezvous|DDP|reducer|in the prior iteration|flight ?recorder|communicator)\b",
    re.IGNORECASE,
)
_NO_STATEMENT = re.compile(r"^[\w:<>*&(),~ -]+\(|\.(?:cpp|hpp|h|py)\b|[{};]|::|-> |^\(|^[^ ]*$|^ - |\bself\b|\(default")
SHOWN = 40


def torch_directory() -> Path:
    """Return where torch is installed; it is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def of_python(root: Path) -> Iterator[tuple[str, str]]:
    """Yield what the Python files of torch.distributed raise and log, each as a kind and a text."""
    for room in _ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            if not _LEFT_OUT.search(path.as_posix()):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    yield from _statements(node)


def _statements(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        text = _text(node.exc.args[0])
        if text:
            yield "raised", f"{ast.unparse(node.exc.func).rpartition('.')[2]}: {text}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        text = _text(node.args[0])
        if node.func.attr in _LOGGED and text:
            yield "logged", text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


def of_library(root: Path) -> Iterator[str]:
    """Yield the statements of torch.distributed in the C++ library."""
    seen = set()
    for library in sorted((root / "lib").glob("libtorch_c*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for match in _STRING.finditer(content):
                text = match[0].decode("ascii").strip()
                if " " in text and text not in seen and _OF_C10D.search(text) and not _NO_STATEMENT.search(text):
                    seen.add(text)
                    yield text


def main() -> int:
    """Print what no row classifies."""
    root = torch_directory()
    python = list(dict.fromkeys(of_python(root)))
    raised = [text for kind, text in python if kind == "raised"]
    logged = [text for kind, text in python if kind == "logged" and statement_in(text) is None]
    library = list(of_library(root))
    unread = [text for text in library if statement_in(text) is None]
    rows = sum(statement_in(text) is not None for text in raised)
    print(f"{len(raised)} exceptions of Python files: {rows} have a row, the others are read as exceptions")
    print(f"{len(logged)} of {sum(kind == 'logged' for kind, _ in python)} logged texts of Python files have no row")
    print(f"{len(unread)} of {len(library)} statements of the C++ library have no row")
    for text in (*logged[:SHOWN], *unread[:SHOWN]):
        print("  ", " ".join(text.split())[:150])
    return 0
