"""Ways to files that have no audit events in Python: sqlite's ATTACH, readline, shared memory, libc by ctypes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...torch_compat import replaces

# Writers that Python's audit hooks do not see, or not well enough: judged before they open their file.

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
    if hasattr(getattr(module, "serialize_file", None), "__wrapped__") or not hasattr(module, "serialize_file"):
        return

    @replaces("serialize_file", module)
    def serialize_file(original: Any, tensors: Any, filename: Any, *arguments: Any, **options: Any) -> Any:
        judge(filename)
        try:
            return original(tensors, filename, *arguments, **options)
        finally:
            done()


_SQLITE_OK = 0
_SQLITE_ATTACH = 24
"""Action code of ``sqlite3_set_authorizer``."""
_READLINE_WRITERS = ("write_history_file", "append_history_file")
_READLINE_DEFAULT = "~/.history"
"""Where readline writes when it is given no name."""
_SHARED_MEMORY = "/dev/shm"
# fmt: off
LIBC_WRITERS = frozenset((
    "unlink", "unlinkat", "remove", "rmdir", "rename", "renameat", "renameat2", "truncate", "truncate64", "open",
    "open64", "openat", "openat64", "creat", "creat64", "fopen", "fopen64", "freopen", "freopen64", "mkdir", "mkdirat",
    "symlink", "symlinkat", "link", "linkat", "chmod", "fchmodat", "chown", "lchown", "mkstemp", "utime",
    "utimes", "utimensat", "setxattr", "shm_open", "shm_unlink",
))
"""Functions of the C library that make, change or remove a file by its name."""
LIBC_STARTERS = frozenset((
    "system", "popen", "execl", "execlp", "execle", "execv", "execve", "execvp", "execvpe", "posix_spawn",
    "posix_spawnp", "fork", "vfork", "clone", "syscall",
))
"""Those that start other programs, or may do anything."""
# fmt: on


def wrap_sqlite(sqlite: ModuleType, judge: Callable[[object], object]) -> None:
    """Judge a database before it is attached to a connection; ``judge`` gets its path, None where it is unknown.

    ``sqlite`` is the module in C, from which the others take ``connect``.
    """

    def authorize(action: int, first: Any, *others: Any) -> int:
        if action == _SQLITE_ATTACH:
            judge(first)
        return _SQLITE_OK

    @replaces("connect", sqlite)
    def connect(original: Any, *arguments: Any, **options: Any) -> Any:
        connection = original(*arguments, **options)
        connection.set_authorizer(authorize)
        return connection


def wrap_readline(readline: ModuleType, judge: Callable[[object], object], done: Callable[[], object]) -> None:
    """Guard the history file of readline, a new module object or one that is imported already."""
    for name in _READLINE_WRITERS:
        original = getattr(readline, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            index = 0 if name == "write_history_file" else 1
            vars(readline)[name] = _judged(original, index, judge, done)


def _judged(original: Any, index: int, judge: Callable[[object], object], done: Callable[[], object]) -> Any:
    @functools.wraps(original)
    def write(*arguments: Any) -> Any:
        name = arguments[index] if len(arguments) > index else None
        if name is None:
            from os.path import expanduser

            name = expanduser(_READLINE_DEFAULT)
        judge(name)
        try:
            return original(*arguments)
        finally:
            done()

    return write


def wrap_shared_memory(
    opened: Callable[[object, object], object], removed: Callable[[object], object], done: Callable[[], object]
) -> None:
    """Guard named shared memory where it is a file: segments of a running job are not the ranks'."""
    if not sys.platform.startswith("linux"):
        return
    try:
        import _posixshmem  # type: ignore[import-not-found]
    except ImportError:
        return

    @replaces("shm_open", _posixshmem)
    def shm_open(open_segment: Any, path: str, flags: int, mode: int = 0o777) -> int:
        opened(_segment(path), flags)
        descriptor: int = open_segment(path, flags, mode=mode)
        done()
        return descriptor

    @replaces("shm_unlink", _posixshmem)
    def shm_unlink(unlink_segment: Any, path: str) -> None:
        removed(_segment(path))
        unlink_segment(path)

    _follow_semaphores(opened, done)


def _follow_semaphores(opened: Callable[[object, object], object], done: Callable[[], object]) -> None:
    """Note the semaphores of ``multiprocessing``, which stay behind where a process that spawns others is killed."""
    try:
        import _multiprocessing  # type: ignore[import-not-found]
    except ImportError:
        return

    class SemLock(_multiprocessing.SemLock):  # type: ignore[misc]
        def __new__(cls, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> Any:
            if not unlink:
                opened(_segment(f"sem.{name.lstrip('/')}"), os.O_CREAT | os.O_RDWR | os.O_EXCL)
            made = super().__new__(cls, kind, value, maxvalue, name, unlink)
            if not unlink:
                done()
            return made

    vars(_multiprocessing)["SemLock"] = SemLock


def _segment(name: object) -> object:
    return f"{_SHARED_MEMORY}/{name.lstrip('/')}" if isinstance(name, str) else name
