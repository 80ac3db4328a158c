"""What waits for an import is called once it is made, however often somebody asks whether the module is there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddpdoctor.probe.torch_compat import after_import


def test_a_question_for_the_module_is_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked_for_first.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    seen: list[ModuleType] = []
    twice: list[ModuleType] = []
    after_import("asked_for_first", seen.append)
    after_import("asked_for_first", twice.append)
    assert importlib.util.find_spec("asked_for_first") and importlib.util.find_spec("asked_for_first")
    assert seen == []
    module = importlib.import_module("asked_for_first")
    assert seen == twice == [module] and module.VALUE == 7
    assert sys.meta_path == before
    after_import("asked_for_first", seen.append)
    assert seen == [module, module]
