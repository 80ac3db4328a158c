"""Which statements of torch's distributed code and of NCCL no row of the catalogue classifies.

The statements are those in ``printed``: what the Python files log as an error or a warning, and what the C++ side and
NCCL print, taken from their binaries and their source. A statement that the installed torch has and the list has not
is told as new, and so are those of another torch or a source of NCCL that is named. An exception of the Python files
that has no row is read as what it is, an exception (DDP706); a warning of NCCL without one is an error of NCCL.
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.postmortem.catalogue.messages import statement_in, statement_of_nccl

PRINTED = Path(__file__).parent / "printed"
_ROOMS = ("distributed", "nn/parallel", "multiprocessing", "utils/data")
_LEFT_OUT = re.compile(r"/(?:_tools|tensor|_shard|_tensor|pipelining|rpc|checkpoint|algorithms|benchmarks|autograd)/")
_LOGGED = frozenset({"error", "exception", "critical", "warning", "warn"})
_LITERAL = re.compile(rb"[\t\n\x20-\x7e]{24,4000}(?=\0)")
_C10D_FILE = re.compile(rb"/torch/csrc/distributed/c10d/(?!symm_mem/)[\w/]+\.[ch]\w*\0")
"""Literals of one source file lie next to its name; symmetric memory is an interface of its own, and is left out."""
_NEAR_BYTES = 8_192
_NO_STATEMENT = re.compile(
    r"INTERNAL ASSERT FAILED|wait_counter|to be true, but got false|/(?:csrc|third_party|aten|c10)/|constexpr |-> |::_"
    r"|^[^ ]*$|^(?:but|of) |^[\w:]+<.*>$|Tensor\(|DMA connectivity"
    # Interfaces of their own: symmetric memory, the collectives within a node.
    r"|SymmetricMemory|symm_mem|IntraNodeComm|NVLink|multicast|ShotAllReduce|CubeAllReduce|async_input_mm|alloc_id"
    r"|aligment|cuda driver|kBFloat16|sizes\(\)\[\d\] == |create socket:$|overlapping devices"
    r"|However, this is unexpected|^must be greater than 0 \(got$"
    # Headers of others: ATen, c10, fmt, the C++ library, a server of HTTP.
    r"|Caffe2|DispatchKey|mkldnn|IValues|GenericList|ComplexDouble|createWithContained|schema registered|not an accel"
    r"|'s device type|Future (?:is already|as complete)|Expected (?:all d|dev)|resizable storage|std::|chrono value"
    r"|Both events must|__pos|format s(?:pecifier|tring)|precision (?:is|not)|fill character"
    r"|argument indexing|Prohibited header"
    # Constants without an end, one behind the other.
    r"|[a-z](?:TORCH_|getD|number is|Environ|appli|checkSame|Unrec)|inputotal|deprecated; Failed"
)
_SAYS_A_FAILURE = re.compile(
    r"\b(?:not|no|cannot|can't|\w+n't|fail\w*|errors?|abort\w*|invalid|un(?:supported|able|known|implemented|expected"
    r"|initialized|set|available|waited)|timed? ?out|timeout|must|should|exceptions?|caught|mismatch\w*|miss(?:es|ing)"
    r"|require[sd]?|only|already|exceeds|overflows|null|expected|deprecated|empty|nan|incompatible|disagree|double|non"
    r"|detected|leak|ignor\w+|without|disabl\w+|crash|stuck)\b",
    re.IGNORECASE,
)
"""A literal without such a word is information, the text of a help, or the half of a message that another one names."""
_HOLE = re.compile(r"%[-#0-9.]*[lzh]*(?P<form>[a-zA-Z])|\{\}")
_FILLED = {"s": "abc", "p": "0x7f", "c": "c", "m": "failure"}
_WARN = re.compile(r'\bWARN\(\s*(?P<texts>(?:"(?:[^"\\]|\\.)*"\s*)+)')
_LONGEST = 200
"""Characters of a statement of Python in the list."""
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
        if node.func.attr in _LOGGED and any(map(str.isalpha, text)):
            yield "logged", " ".join(text.split())[:_LONGEST].rstrip()


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


def of_library(root: Path) -> Iterator[str]:
    """Yield the literals of c10d in the C++ libraries."""
    for library in sorted((root / "lib").glob("libtorch_c*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            done = 0
            for name in _C10D_FILE.finditer(content):
                low, high = name.start() if name.start() > done + _NEAR_BYTES else done, name.end()
                for match in _LITERAL.finditer(content, low, high):
                    text = " ".join(match[0].decode("ascii").split())
                    if _SAYS_A_FAILURE.search(text) and not _NO_STATEMENT.search(text):
                        yield text
                done = high


def of_nccl(source: Path) -> Iterator[str]:
    """Yield the formats that a source tree of NCCL passes to ``WARN``."""
    for path in sorted((source / "src").rglob("*.[chm]*")):
        for match in _WARN.finditer(path.read_text(encoding="utf-8", errors="replace")):
            texts = re.findall(r'"((?:[^"\\]|\\.)*)"', match["texts"])
            text = " ".join("".join(texts).replace("\\n", " ").replace("\\t", " ").replace('\\"', '"').split())
            if text and text != "%s":
                yield text


def printed(name: str) -> tuple[list[str], list[str]]:
    """Return the statements of a list, and the parts and the information behind them."""
    statements, _, parts = (PRINTED / name).read_text(encoding="utf-8").partition("\n# Parts")
    return statements.splitlines()[1:], parts.splitlines()[1:]


def filled(text: str) -> str:
    """Return a format with something in its holes."""
    return _HOLE.sub(lambda match: _FILLED.get(match["form"], "7"), text)


def unclassified() -> list[str]:
    """Return the statements of the lists that no row classifies."""
    torch, nccl = printed("torch.txt")[0] + printed("python.txt")[0], printed("nccl.txt")[0]
    return [text for text in torch if statement_in(filled(text)) is None] + [
        text for text in nccl if statement_of_nccl(filled(text)) is None
    ]


def main(arguments: list[str]) -> int:
    """Print what no row classifies, and what the lists lack; arguments are unpacked torches and sources of NCCL."""
    root = torch_directory()
    python = list(dict.fromkeys(of_python(root)))
    raised = [text for kind, text in python if kind == "raised"]
    logged, listed = {text for kind, text in python if kind == "logged"}, set(printed("python.txt")[0])
    rows = sum(found is not None and found.row.role != "noise" for found in map(statement_in, raised))
    print(f"{len(raised)} exceptions of Python files: {rows} have a row, the others are read as exceptions")
    unread = unclassified()
    torch, nccl = (len(printed(name)[0]) for name in ("torch.txt", "nccl.txt"))
    print(
        f"{len(unread)} of {len(listed):,} statements that torch's Python files log, {torch:,} of its C++ side and "
        f"{nccl:,} of NCCL have no row"
    )
    print(f"{len(logged - listed)} of {len(logged):,} that those of the installed torch log are not in the list")
    known = "\n".join(filled(line) for part in printed("torch.txt") for line in part)
    new, of_list = sorted(logged - listed), set(printed("nccl.txt")[0])
    for other in (root, *map(Path, arguments)):
        if (other / "lib").is_dir():
            literals = list(dict.fromkeys(of_library(other)))
            lacking = [text for text in literals if filled(text).strip(" .,:7")[:150] not in known]
            print(f"{len(lacking)} of {len(literals):,} literals of c10d in {other} are not in the list")
        else:
            literals = list(dict.fromkeys(of_nccl(other)))
            lacking = [text for text in literals if text[:200] not in of_list]
            print(f"{len(lacking)} of {len(literals):,} warnings in {other} are not in the list")
        new += lacking
    for text in (*unread, *new[:SHOWN]):
        print("  ", text[:150])
    return 1 if unread else 0
