"""Sources that try to keep the reading busy: 500 of them, each the same at every start.

``python -m tests.source.hostile [FIRST [LAST]]`` reads them, one process each, and prints what takes too long.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.machine_speed import is_within

COUNT = 500
LONGEST_S, LARGEST_BYTES = 5.0, 500_000_000
_HEAD = """import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
"""
_TAIL = """
if rank == x:
    dist.barrier()
model = DDP(torch.nn.Linear(4, 4))
for step in range(10):
    model(torch.randn(4, 4)).sum().backward()
print(x)
"""
_GROWTHS = (
    "x = (x, x, x)",
    "x = [x, x]",
    "x = {'a': x, 'b': x}",
    "x = {1: x, 2: [x, x]}",
    "x = x + x",
    "x = x * 3",
    "x = [*x, *x]",
    "x = {**x, 'k': x}",
    "x = x if len(os.sys.argv) > 1 else (x, x)",
    "x = x if rank == 1 else [x, x]",
    "x += x",
    "x.append(x)",
    "x.extend([x, x])",
    "x['k'] = x",
    "x.update(a=x, b=x)",
    "x = [y for y in (x, x)]",
    "x = {k: x for k in ('a', 'b')}",
    "x = zip(x, x)",
    "x = list((x, x))",
    "x = dict(a=x, b=x)",
    "x = x.attribute",
    "x = x.call(x, x)",
    "x = lambda x=x: (x, x)",
    "x = f'{x}{x}'",
    "x = str(x) + str(x)",
    "x = [x][0], x",
    "x, y = (x, x), x",
    "x = getattr(x, 'a', (x, x))",
    "x = __import__('functools').partial(print, x, x)",
    "x = type('T', (), {'x': x, 'y': x})",
    "x = torch.stack([x, x])",
    "x = os.environ.get('A', x)",
    "x = x or (x, x)",
    "x = x and [x, x]",
    "x = not x, x",
    "x = (y := (x, x))",
    "x = rank and x, rank or x",
)


def hostile(number: int) -> str:
    """Return the source of a number."""
    chance = random.Random(number)
    return _HEAD + KINDS[number % len(KINDS)](chance) + _TAIL


def _growth(chance: random.Random) -> str:
    start = chance.choice(["1", "[1]", "(1, 2)", "{}", "{'a': 1}", "'ab'", "torch.zeros(3)", "rank"])
    lines = [chance.choice(_GROWTHS) for _ in range(chance.randint(1, 4))]
    return f"x = {start}\n" + "\n".join(lines * chance.choice([20, 60, 400])) + "\n"


def _growth_in_loop(chance: random.Random) -> str:
    lines = "\n        ".join(chance.choice(_GROWTHS) for _ in range(chance.randint(1, 12)))
    return f"x = {{}}\nfor i in range({chance.choice([3, 100, 10**9])}):\n    while x:\n        {lines}\n"


def _growth_through_calls(chance: random.Random) -> str:
    growth = chance.choice(_GROWTHS[:12])
    depth = chance.choice([10, 40, 200])
    functions = "\n".join(f"def f{i}(x):\n    {growth}\n    return f{i + 1}(x), f{i + 1}(x)" for i in range(depth))
    return f"{functions}\ndef f{depth}(x):\n    return x\nx = f0([1])\n"


_NODE = """class Node:
    def __init__(self, left, right):
        self.left, self.right = left, right

    def grow(self):
        self.left = Node(self, self.right)
        return self.left.grow()
x = Node(1, 2)
"""


def _growth_in_objects(chance: random.Random) -> str:
    return _NODE + "x = Node(x, x)\n" * chance.choice([30, 2_000]) + "x.grow()\n"


def _nesting(chance: random.Random) -> str:
    depth = chance.choice([50, 90, 180])
    opening, closing = chance.choice([("(", ",)"), ("[", "]"), ("{1: ", "}"), ("f(", ")"), ("-(", ")"), ("[*", "]")])
    return f"def f(y):\n    return y, y\nx = {opening * depth}[1]{closing * depth}\n"


def _blocks(chance: random.Random) -> str:
    heads = ["if rank == {i}:", "for i{i} in range(3):", "while rank < {i}:", "with torch.no_grad():", "try:"]
    depth, lines, closing = chance.choice([10, 18]), ["x = 1"], []
    for level in range(depth):
        head = chance.choice(heads)
        lines.append("    " * level + head.format(i=level))
        if head == "try:":
            closing.append("    " * level + "finally:\n" + "    " * (level + 1) + "x = (x, x)")
    lines.append("    " * depth + "dist.barrier()")
    return "\n".join([*lines, *reversed(closing)]) + "\n"


def _long(chance: random.Random) -> str:
    line = chance.choice(
        [
            "a{i} = {i}",
            "dist.barrier()",
            "if rank == {i}: dist.barrier()",
            "x = [x, {i}]",
            "def f{i}(): return f{j}()",
            "print(rank, {i})",
            "os.environ['V{i}'] = '{i}'",
            "x = x + {i}",
        ]
    )
    return "x = 1\n" + "\n".join(line.format(i=i, j=max(0, i - 1)) for i in range(50_000)) + "\n"


def _literals(chance: random.Random) -> str:
    count = chance.choice([5_000, 50_000])
    text = chance.choice(["{i}", "'{i}'", "({i}, {i})", "{{'a': {i}, 'b': [{i}]}}", "{i} + rank"])
    items = ", ".join(text.format(i=i) for i in range(count))
    return chance.choice([f"x = [{items}]\n", f"x = dict(enumerate([{items}]))\n", f"x = ({items})\nx = x + x\n"])


def _chains(chance: random.Random) -> str:
    link = chance.choice([".a", "[0]", "()", ".a()", "['k']", ".cuda()", ".module"])
    return f"x = model = DDP(torch.nn.Linear(4, 4))\nx = x{link * chance.choice([100, 900])}\n"


def _sums(chance: random.Random) -> str:
    operator = chance.choice([" + ", " and ", " or ", " == ", " if rank else "])
    terms = chance.choice([100, 900])
    return f"x = {operator.join(['rank'] * terms)}{' else rank' * (terms - 1) if 'if' in operator else ''}\n"


_CLASSES = (
    """class C{i}(C{j}):
    def __init__(self, x):
        super().__init__(C{j}(x))
        self.x = C{j}(self)
""",
    "class C{i}(C{j}, metaclass=type(C{j})):\n    a = C{j}(1), C{j}(2)\n",
    "@C{j}\nclass C{i}(C{j}):\n    __getattr__ = C{j}\n",
    "class C{i}(C{j}):\n    C{i} = C{j}\n    x = C{i}(1)\n",
)


def _classes(chance: random.Random) -> str:
    count, kind = chance.choice([50, 500]), chance.choice(_CLASSES)
    head = "class C0:\n    def __init__(self, x):\n        self.x = x\n"
    return head + "".join(kind.format(i=i, j=i - 1) for i in range(1, count)) + f"x = C{count - 1}(1)\n"


def _decorators(chance: random.Random) -> str:
    count = chance.choice([20, 300])
    return (
        "def twice(f):\n    def inner(*a, **k):\n        return f(*a, **k), f(*a, **k)\n    return inner\n"
        + "@twice\n" * count
        + "def g(*a):\n    dist.barrier()\n    return a\nx = g(1)\n"
    )


def _recursion(chance: random.Random) -> str:
    count = chance.choice([2, 6, 30])
    calls = ", ".join(f"f{callee}((x, x))" for callee in range(count))
    body = "def f{i}(x):\n    if rank == {i}:\n        return [{calls}]\n    dist.barrier()\n"
    return "".join(body.format(i=i, calls=calls) for i in range(count)) + "x = f0(1)\n"


def _matches(chance: random.Random) -> str:
    patterns = ("[x, *y]", "{%d: x}", "%d | None", "str(x)", "[[x, _], y]")
    cases = (pattern.replace("%d", str(i)) for i in range(chance.choice([5, 120])) for pattern in patterns)
    return "x = [rank]\nmatch x:\n" + "".join(f"    case {case}:\n        x = (x, x)\n" for case in cases)


def _comprehensions(chance: random.Random) -> str:
    depth = chance.choice([5, 18])
    return "x = [1]\nx = " + "[" * depth + "x" + "".join(f" for y{i} in x]" for i in range(depth)) + "\n"


KINDS: tuple[Callable[[random.Random], str], ...] = (
    *(_growth, _growth_in_loop, _growth_through_calls, _growth_in_objects, _nesting, _blocks, _long, _literals),
    *(_chains, _sums, _classes, _decorators, _recursion, _matches, _comprehensions),
)


# ru_maxrss begins with the size of the process that started this one; VmHWM does not.
_WATCHED = """
import sys
from ddpdoctor.cli.main import main

peak = sys.argv.pop(1)
try:
    code = main()
finally:
    with open("/proc/self/status") as status, open(peak, "w") as kept:
        kept.write(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
sys.exit(code)
"""


def read(number: int, directory: Path) -> str:
    """Read the source of a number in a process of its own; return what is wrong with how it went."""
    place, said = directory / f"hostile_{number}.py", directory / f"hostile_{number}.txt"
    peak = directory / f"hostile_{number}.peak"
    place.write_text(hostile(number), encoding="utf-8")
    command = [sys.executable, "-c", _WATCHED, str(peak)]
    command += ["check", "--static", "--output-format", "concise", str(place)]
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=_limit)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    kind, text = KINDS[number % len(KINDS)].__name__, said.read_text(errors="replace")
    if process.returncode not in (0, 1, 2, 3) or "Traceback" in text or "check failed" in text:
        return f"{kind}: exit code {process.returncode}: {text[-300:]}"
    cpu_s, largest_bytes = used.ru_utime + used.ru_stime, int(peak.read_text()) * 1024
    if largest_bytes > LARGEST_BYTES:
        return f"{kind}: {largest_bytes / 1e6:.0f} MB"
    return "" if is_within(cpu_s, LONGEST_S) else f"{kind}: {cpu_s:.1f} s"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_AS, (4 * LARGEST_BYTES, 4 * LARGEST_BYTES))


def main() -> int:
    """Read them all; return 1 if one takes too long or too much memory."""
    first, last = (*map(int, sys.argv[1:3]), *(0, COUNT)[len(sys.argv[1:3]) :])[:2]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        wrong = [
            (number, text)
            for number, text in enumerate(pool.map(lambda n: read(n, Path(directory)), range(first, last)), first)
            if text
        ]
    for number, text in wrong:
        print(f"{number}: {text}")
    print(
        f"{last - first - len(wrong)} of {last - first} sources are read within {LONGEST_S:g} s of a machine like ours"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
