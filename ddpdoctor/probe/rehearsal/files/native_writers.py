"""Writers that Python's audit hooks do not see, or not well enough: judged before they open their file."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_SAFETENSORS_MODULES = ("safetensors", "safetensors.torch", "safetensors.numpy")
_MARK = "_ddpdoctor_guarded"
_SCRIPT_CLASSES = ("ScriptModule", "ScriptFunction")
_SCRIPT_WRITERS = ("save", "_save_for_mobile")
_PROFILE = "_autograd", "_ProfilerResult", "save"
_FILE_STORE = "_distributed_c10d", "FileStore", "__init__"
"""Module and class in ``torch._C``, and the method whose first argument is the path."""

Judge = Callable[[object], None]
"""Called with the path that is about to be written; raises when it must not be."""
Done = Callable[[], None]
"""Called when a writer is done with its file."""


def wrap_torch(torch: Any, judge: Judge, judge_for_good: Judge, done: Done) -> None:
    """Guard what saves, packs, exports, maps and rendezvouses through files.

    ``torch.save``, ``torch.package``, ``torch.export.save``, ``torch.jit.save``, the profiler, ``from_file`` and
    ``FileStore``, which judges by ``judge_for_good``: it writes on as long as the process lives.
    """
    native = torch._C
    if hasattr(native, _MARK):
        return
    setattr(native, _MARK, True)
    if hasattr(native, "PyTorchFileWriter"):
        native.PyTorchFileWriter = _guarded_writer(native.PyTorchFileWriter, judge, done)
    for class_name in _SCRIPT_CLASSES:
        script_class = getattr(native, class_name, None)
        for method_name in _SCRIPT_WRITERS:
            method = getattr(script_class, method_name, None)
            if method is not None:
                setattr(script_class, method_name, _guarded_method(method, judge, done))
    torch.from_file = _guarded_mapping(torch.from_file, judge)
    torch.UntypedStorage.from_file = staticmethod(_guarded_mapping(torch.UntypedStorage.from_file, judge))
    for (module_name, class_name, method_name), judges, then in (
        (_PROFILE, judge, done),
        (_FILE_STORE, judge_for_good, _nothing),
    ):
        owner = getattr(getattr(native, module_name, None), class_name, None)
        if hasattr(owner, method_name):
            setattr(owner, method_name, _guarded_method(getattr(owner, method_name), judges, then))


def _nothing() -> None:
    """Do nothing after the first call of a writer that is never done."""


def _guarded_mapping(from_file: Any, judge: Judge) -> Any:
    """Judge a tensor or storage that shares a file's memory, as it writes to the file; a private one does not."""

    @functools.wraps(from_file)
    def mapped(filename: Any, shared: Any = False, *arguments: Any, **options: Any) -> Any:
        if shared:
            judge(filename)
        return from_file(filename, shared, *arguments, **options)

    return mapped


def _guarded_writer(writer: Any, judge: Judge, done: Done) -> Any:
    def __init__(self: Any, target: object, *arguments: Any, **options: Any) -> None:
        if isinstance(target, (str, bytes, os.PathLike)):
            judge(target)
        writer.__init__(self, target, *arguments, **options)

    def write_end_of_file(self: Any) -> Any:
        result = writer.write_end_of_file(self)
        done()
        return result

    members = {"__init__": __init__, "write_end_of_file": write_end_of_file, "__module__": writer.__module__}
    return type(writer)(writer.__name__, (writer,), members)


def _guarded_method(method: Any, judge: Judge, done: Done) -> Any:
    def save(self: Any, path: object, *arguments: Any, **options: Any) -> Any:
        judge(path)
        try:
            return method(self, path, *arguments, **options)
        finally:
            done()

    save.__name__ = getattr(method, "__name__", "save")
    return save


def wrap_safetensors(judge: Judge, done: Done) -> None:
    """Guard ``safetensors``' file writer in those of its modules that are imported; doing it again changes nothing."""
    for name in _SAFETENSORS_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            _guard_serialize_file(module, judge, done)


def _guard_serialize_file(module: ModuleType, judge: Judge, done: Done) -> None:
    original = getattr(module, "serialize_file", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def serialize_file(tensors: Any, filename: Any, *arguments: Any, **options: Any) -> Any:
        judge(filename)
        try:
            return original(tensors, filename, *arguments, **options)
        finally:
            done()

    vars(module)["serialize_file"] = serialize_file
