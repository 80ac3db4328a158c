"""Edits of calls and bodies, made in scripts of one call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddpdoctor.fix import CannotRewrite, Edit, after, edited, first_in_body, with_keyword, without_keyword
from ddpdoctor.source.script.module import Module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f()", "f(k=1)"),
        ("f(a)", "f(a, k=1)"),
        ("f(a, b=2)", "f(a, b=2, k=1)"),
        ("f(a,)", "f(a, k=1,)"),
        ("f('é', a)", "f('é', a, k=1)"),
        ("f(\n    a,  # first\n)", "f(\n    a, k=1,  # first\n)"),
        ("f(*a)", "f(*a, k=1)"),
        ("f(b=2, *a)", "f(b=2, *a, k=1)"),
        ("f(g(a))", "f(g(a), k=1)"),
        ("f(k=2)", None),
        ("f(**a)", None),
        ("f((a))", None),
        ("f(x for x in a)", None),
    ],
)
def test_a_keyword_is_added_behind_the_other_arguments(text: str, expected: str | None) -> None:
    module, call = _call(text)
    assert _made(module, with_keyword(module, call, "k", "1")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(k=1)", "f()"),
        ("f(a, k=1)", "f(a)"),
        ("f(a, k=1, b=2)", "f(a, b=2)"),
        ("f(k=1, b=2)", "f(b=2)"),
        ("f(\n    a,\n    k=1,\n)", "f(\n    a,\n)"),
        ("f(a, b=2)", None),
    ],
)
def test_a_keyword_is_taken_out_with_its_comma(text: str, expected: str | None) -> None:
    module, call = _call(text)
    assert _made(module, without_keyword(module, call, "k")) == expected


def test_an_edit_that_would_take_a_parenthesis_along_is_refused() -> None:
    module, call = _call("f((a), k=1)")
    with pytest.raises(CannotRewrite):
        _made(module, without_keyword(module, call, "k"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for i in x:\n    y\n", "for i in x:\n    s\n    y\n"),
        ("for i in x:\n\t# c\n\ty\n", "for i in x:\n\t# c\n\ts\n\ty\n"),
        ("for i in x:\n    @d\n    def f(): pass\n", "for i in x:\n    s\n    @d\n    def f(): pass\n"),
        ("for i in x: y\n", None),
    ],
)
def test_a_statement_is_put_first_in_a_body(text: str, expected: str | None) -> None:
    module = _module(text)
    (loop,) = module.tree.body
    assert isinstance(loop, ast.For)
    assert _made(module, first_in_body(module, loop.body, "s")) == expected


def test_text_goes_right_behind_an_expression() -> None:
    module = _module("if (a.b):\n    pass\n")
    (statement,) = module.tree.body
    assert isinstance(statement, ast.If)
    assert _made(module, after(module, statement.test, "()")) == "if (a.b()):\n    pass\n"


def _call(text: str) -> tuple[Module, ast.Call]:
    module = _module(text)
    return module, next(node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def _module(text: str) -> Module:
    return Module(Path("/f.py"), "f", "", text, ast.parse(text))


def _made(module: Module, edit: Edit | None) -> str | None:
    return None if edit is None else edited(module.text.encode(), [edit]).decode()
