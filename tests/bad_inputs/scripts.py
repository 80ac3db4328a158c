"""Sources that no training should have: what is wrong with them, and how it may be answered."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.bad_inputs.case import ANSWERS, CLEAN, ERROR, FINDINGS, INCONCLUSIVE

EXAMPLES = tuple(sorted((Path(__file__).parents[2] / "examples").glob("*.py")))
BASE = b"import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
NO_TEXT = ("rot13", "hex", "base64", "zlib", "bz2", "uu", "quopri", "nowhere", "undefined", "mbcs")
TEXT = ("utf-16", "utf-7", "idna", "punycode", "unicode_escape", "raw_unicode_escape", "cp037", "utf-8-sig", "latin-1")
_READ = frozenset({CLEAN, FINDINGS, INCONCLUSIVE})
_REFUSED = frozenset({ERROR})


def bad_source(random: Random) -> tuple[bytes, frozenset[int]]:
    """The content of a script, and the exit codes of an examination of its source."""
    return random.choice(_KINDS)(random)


def _cookie_of_no_text(random: Random) -> tuple[bytes, frozenset[int]]:
    return f"# -*- coding: {random.choice(NO_TEXT)} -*-\n".encode() + BASE, _REFUSED


def _cookie(random: Random) -> tuple[bytes, frozenset[int]]:
    return f"# coding: {random.choice(TEXT)}\n".encode() + BASE + b"x = '\\ud800 \\N{nope}'\n", ANSWERS


def _bytes(random: Random) -> tuple[bytes, frozenset[int]]:
    return random.randbytes(random.choice([1, 10, 1_000, 100_000])) + b"\0", _REFUSED


def _nesting(random: Random) -> tuple[bytes, frozenset[int]]:
    depth = random.choice([90, 1_000, 20_000, 300_000])
    opening, closing = random.choice([(b"(", b")"), (b"[", b"]"), (b"-", b"1"), (b"f(", b")"), (b"{1:", b"}")])
    return BASE + b"x = " + opening * depth + b"1" + closing * (depth if closing != b"1" else 0) + b"\n", ANSWERS


def _long_sum(random: Random) -> tuple[bytes, frozenset[int]]:
    operator = random.choice([b"+", b" or ", b"**", b" < ", b".a"])
    return BASE + b"x = y" + (operator + (b"" if operator == b".a" else b"y")) * 20_000 + b"\n", ANSWERS


def _blocks(random: Random) -> tuple[bytes, frozenset[int]]:
    depth = random.choice([19, 99, 120])
    head = random.choice(["if x:", "for x in y:", "def f():", "class A:", "with x:"])
    lines = [" " * level + head for level in range(depth)]
    return BASE + "\n".join([*lines, " " * depth + "pass", ""]).encode(), ANSWERS


def _huge_number(random: Random) -> tuple[bytes, frozenset[int]]:
    number = random.choice([b"9" * 5_000, b"0x" + b"f" * 100_000, b"1e999", b"1_" * 3_000 + b"1", b"10**10**10"])
    uses = random.choice([b"x = %s\n", b"torch.ones(%s)\n", b"for i in range(%s): dist.barrier()\n", b"[0] * %s\n"])
    return BASE + uses % number, ANSWERS


def _comments(random: Random) -> tuple[bytes, frozenset[int]]:
    count = random.choice([1_000, 100_000])
    comment = random.choice(
        [
            b"# ddpdoctor: ignore[DDP101]\n" * count,
            b"x = 1  # ddpdoctor: ignore[nope]\n" * count,
            b"x = 1  # ddpdoctor: ignore[" + b", ".join(b"w%d" % number for number in range(count)) + b"]\n",
            b"x = 1  " + b"# ddpdoctor: ignore[" * count + b"\n",
            b"#" * count + b" ddpdoctor" + b" " * count + b":\n",
        ]
    )
    return BASE + comment, _READ


def _odd_lines(random: Random) -> tuple[bytes, frozenset[int]]:
    end = random.choice([b"\r", b"\r\n", b"\n\r", b"\x0c", b"\\\n", b"\xc2\x85", b"\xe2\x80\xa8"])
    return BASE.replace(b"\n", end) * random.choice([1, 100]), ANSWERS


def _mutated(random: Random) -> tuple[bytes, frozenset[int]]:
    """A real script in which somebody's cat has walked on the keyboard."""
    content = bytearray(random.choice(EXAMPLES).read_bytes())
    for _ in range(random.choice([1, 3, 30])):
        place = random.randrange(len(content))
        what = random.randrange(4)
        if what == 0:
            content[place] = random.randrange(256)
        elif what == 1:
            del content[place : place + random.randrange(1, 40)]
        elif what == 2:
            content[place:place] = content[random.randrange(len(content)) :][: random.randrange(1, 200)]
        else:
            content[place:place] = random.choice(
                [b"\0", b"\t", b"(", b'"""', b"\xff", b"lambda:", b"async ", b"*", b":="]
            )
        content = content or bytearray(b"\n")
    return bytes(content), ANSWERS


def _odd_python(random: Random) -> tuple[bytes, frozenset[int]]:
    lines = (
        b"from . import *\n",
        b"import " + b".".join([b"a"] * 500) + b"\n",
        b"from " + b"." * 300 + b"x import y\n",
        b"import train\n",
        b"__name__ = 1\nif __name__: dist.barrier()\n",
        b"def f(f=f(f)): return f\nf(f)(f)[f]\n",
        b"class A(A): pass\nA.A.A = A\n",
        b"f = lambda: f()\nf()\ng = lambda x: g(g(x))\ng(g)\n",
        b"x = [x for x in x for x in x if x]\n",
        b"while True: dist.barrier()\n",
        b"exec('dist.barrier()'); eval(compile('1', '', 'eval'))\n",
        b"import os; os.environ['RANK'] = '\\udc80'; rank = int(os.environ['RANK'])\nif rank: dist.barrier()\n",
        b"rank = dist.get_rank()\n" + b"if rank == 0:\n    x = 1\nelse:\n    x = 2\n" * 300 + b"if x: dist.barrier()\n",
        b"match dist.get_rank():\n    case 0 | 1: dist.barrier()\n    case _: pass\n",
        b"dist.all_reduce(*a, **k); dist.all_reduce(**{'x': 1}); dist.broadcast()\n",
        b"torch.utils.data.DataLoader(batch_size=-1 << 40, sampler=None)(1)(2)\n",
        b"'%s' % (1, 2); '{' .format(); f'{1/0}'; b'' + ''; 1 @ 2; -''; not (); 1 / 0; 1 << 10**9; 'a' * 10**12\n",
    )
    return BASE + b"".join(random.sample(lines, random.randrange(1, 5))), ANSWERS


def _large(random: Random) -> tuple[bytes, frozenset[int]]:
    return BASE + b"x = '" + b"a" * 6_000_000 + b"'\n", _REFUSED


def _empty(random: Random) -> tuple[bytes, frozenset[int]]:
    return random.choice([b"", b"\n", b"#", b"\xef\xbb\xbf", b" ", b"pass"]), ANSWERS


_KINDS = (
    _cookie_of_no_text,
    _cookie,
    _bytes,
    _nesting,
    _long_sum,
    _blocks,
    _huge_number,
    _comments,
    _odd_lines,
    _mutated,
    _mutated,
    _mutated,
    _odd_python,
    _odd_python,
    _large,
    _empty,
)
