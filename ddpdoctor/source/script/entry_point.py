"""Scripts that start or are a distributed job, as against modules and everything else."""

from __future__ import annotations

import ast

from ddpdoctor.source.script.code_words import imports_any, uses_part
from ddpdoctor.source.script.module import Module
from ddpdoctor.source.script.script import Script
from ddpdoctor.source.script.syntax_index import descend

FRAMEWORKS = (b"torch", b"accelerate", b"lightning", b"transformers", b"deepspeed", b"horovod")
_JOINS = (
    "init_process_group",
    "DataParallel",
    "Accelerator",
    "init_distributed",
    "horovod",
    "init_device_mesh",
)
"""What joins the ranks of a job or wraps a model for them; ``DataParallel`` is in the name of DDP too."""


def may_be_entry(raw: bytes) -> bool:
    """Return whether the bytes of a file make it worth parsing: they mention torch or something built on it."""
    return any(word in raw for word in FRAMEWORKS)


def is_entry(script: Script) -> bool:
    """Return whether a script, when it is run, may start or join a distributed job.

    It does something when it is run (below a test of ``__name__``, or calls at its top level), and it or a module that
    it imports makes a process group or wraps a model.
    """
    return acts(script.entry) and (uses_part(script, _JOINS) or imports_any(script, ("deepspeed",)))


def acts(module: Module) -> bool:
    """Return whether a file does something when it is run: below a test of ``__name__``, or by calls at top level."""
    known: bool | None = module.__dict__.get("_acts")
    if known is None:
        body = module.tree.body
        called = not _is_only_imported(module) and any(map(_statement_acts, body))
        known = module.__dict__["_acts"] = called or any(map(_tests_how_it_is_run, body))
    return known


def _is_only_imported(module: Module) -> bool:
    """Return whether a file with no test of how it is run is part of a package: run by itself, it could not import."""
    relative = any(isinstance(statement, ast.ImportFrom) and statement.level for statement in module.tree.body)
    return relative or module.path.name == "__init__.py"


def _tests_how_it_is_run(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in descend(statement.test)
    )


def _statement_acts(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return any(map(_statement_acts, statement.body)) or any(map(_statement_acts, statement.orelse))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not _sets_up_a_module(statement.value)
    return isinstance(statement, (ast.For, ast.While, ast.With))


_SETTING_UP = frozenset(
    {"filterwarnings", "simplefilter", "basicConfig", "append", "insert", "setdefault", "update", "register", "extend"}
)
"""Last names of calls that modules make at their top level when they are imported."""


def _sets_up_a_module(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _SETTING_UP or name.startswith(("set_", "use_", "register"))
