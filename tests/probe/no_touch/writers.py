"""Ways in which training scripts write files, as lines of code about the path ``P``."""

from __future__ import annotations

import importlib.util

import msgspec


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write."""

    name: str
    code: str
    needs: str = ""
    """Package that it takes."""
    suffix: str = ""
    """What the writer appends to the path that it is given, or insists on."""

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def _of(needs: str, suffix: str = "", **codes: str) -> tuple[Writer, ...]:
    return tuple(Writer(name=name, code=code, needs=needs, suffix=suffix) for name, code in codes.items())


WRITERS: tuple[Writer, ...] = (
    *_of(
        "",
        open_write="open(P, 'w').write('n')",
        open_append="open(P, 'ab').write(b'n')",
        file_io="import io; io.FileIO(P, 'w').write(b'n')",
        codecs_open="import codecs; codecs.open(P, 'w', 'utf8').write('n')",
        os_open="import os; os.write(os.open(P, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), b'n')",
        os_fallocate="import os; os.posix_fallocate(os.open(P, os.O_WRONLY | os.O_CREAT), 0, 100)",
        os_sendfile="import os; os.sendfile(os.open(P, os.O_WRONLY | os.O_CREAT), os.open(FROM, 0), 0, 1)",
        mmap="import mmap, os; f = os.open(P, os.O_RDWR | os.O_CREAT); os.ftruncate(f, 64); mmap.mmap(f, 64)[0] = 1",
        pickle="import pickle; pickle.dump(1, open(P, 'wb'))",
        json="import json; json.dump({}, open(P, 'w'))",
        csv="import csv; csv.writer(open(P, 'w')).writerow([1])",
        configparser="import configparser; configparser.ConfigParser().write(open(P, 'w'))",
        gzip="import gzip; gzip.open(P, 'wb').write(b'n')",
        bz2="import bz2; bz2.open(P, 'wb').write(b'n')",
        lzma="import lzma; lzma.open(P, 'wb').write(b'n')",
        zipfile="import zipfile; zipfile.ZipFile(P, 'w').writestr('a', 'n')",
        zip_extracted="import zipfile; zipfile.ZipFile(zipped(P)).extractall('/')",
        tarfile="import tarfile; tarfile.open(P, 'w').close()",
        shutil_copy="import shutil; shutil.copy(FROM, P)",
        shutil_copyfile="import shutil; shutil.copyfile(FROM, P)",
        shutil_copy2="import shutil; shutil.copy2(FROM, P)",
        shutil_move="import shutil; shutil.move(fresh(), P)",
        os_replace="import os; os.replace(fresh(), P)",
        os_rename="import os; os.rename(fresh(), P)",
        mkstemp="import os, tempfile; f, name = tempfile.mkstemp(dir='.'); os.write(f, b'n'); os.replace(name, P)",
        path_write_text="from pathlib import Path; Path(P).write_text('n')",
        path_write_bytes="from pathlib import Path; Path(P).write_bytes(b'n')",
        path_replace="from pathlib import Path; Path(fresh()).replace(P)",
        path_rename="from pathlib import Path; Path(fresh()).rename(P)",
        file_handler="import logging; logging.FileHandler(P).emit(logging.makeLogRecord({'msg': 'n'}))",
        rotating_handler="import logging, logging.handlers as h\nhandler = h.RotatingFileHandler(P, maxBytes=9, "
        "backupCount=1)\nfor _ in range(3): handler.emit(logging.makeLogRecord({'msg': 'long enough'}))",
        timed_handler="import logging.handlers as h; h.TimedRotatingFileHandler(P).stream.write('n')",
        sqlite="import sqlite3; sqlite3.connect(P).execute('create table t (x)')",
        sqlite_uri="import sqlite3; sqlite3.connect(f'file:{P}?mode=rwc', uri=True).execute('create table t (x)')",
        retrieved="import urllib.request; urllib.request.urlretrieve('file://' + FROM, P)",
        profiled="import cProfile; cProfile.runctx('1', {}, {}, P)",
        thread="import threading; t = threading.Thread(target=open, args=(P, 'w')); t.start(); t.join()",
        executor="from concurrent.futures import ThreadPoolExecutor as T; T(1).submit(open, P, 'w').result()",
        relative_after_chdir="import os; here = os.getcwd(); os.chdir('/')\n"
        "try: open(os.path.relpath(P), 'w').write('n')\nfinally: os.chdir(here)",
        through_a_symlink="import os; os.symlink(P, P + '.symlink'); open(P + '.symlink', 'w').write('n')",
        descriptor="open(os.open(P, os.O_WRONLY | os.O_CREAT), 'w').write('n')",
    ),
    *_of("", suffix=".zip", make_archive="import shutil; shutil.make_archive(P.removesuffix('.zip'), 'zip', EMPTY)"),
    *_of(
        "numpy",
        suffix=".npy",
        numpy_save="import numpy; numpy.save(P, numpy.zeros(3))",
        numpy_memmap="import numpy; numpy.memmap(P, dtype='u1', mode='w+', shape=(64,))[0] = 1",
        numpy_open_memmap="import numpy; numpy.lib.format.open_memmap(P, dtype='u1', mode='w+', shape=(64,))[0] = 1",
        numpy_tofile="import numpy; numpy.zeros(3).tofile(P)",
        numpy_savetxt="import numpy; numpy.savetxt(P, numpy.zeros(3))",
    ),
    *_of("numpy", suffix=".npz", numpy_savez="import numpy; numpy.savez(P, a=numpy.zeros(3))"),
    *_of(
        "torch",
        torch_save="import torch; torch.save({}, P)",
        torch_save_legacy="import torch; torch.save({}, P, _use_new_zipfile_serialization=False)",
        torch_jit_save="import torch; torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)).save(P)",
        torch_package="import torch.package as p; e = p.PackageExporter(P); e.save_text('a', 'b', 'c'); e.close()",
        torch_profiler="import torch\nwith torch.profiler.profile() as run: torch.ones(2)\nrun.export_chrome_trace(P)",
        torch_from_file="import torch; torch.from_file(P, shared=True, size=4)[0] = 1",
        torch_storage="import torch; torch.UntypedStorage.from_file(P, True, 16)[0] = 1",
        torch_worker="from torch.utils.data import DataLoader\nclass Cached(list):\n    def __getitem__(self, i):\n"
        "        open(P, 'w').write('n'); return i\nlist(DataLoader(Cached([1]), num_workers=1))",
    ),
    *_of(
        "safetensors",
        safetensors="import torch, safetensors.torch as s; s.save_file({'a': torch.ones(2)}, P)",
        safetensors_model="import torch, safetensors.torch as s; s.save_model(torch.nn.Linear(2, 2), P)",
        safetensors_numpy="import numpy, safetensors.numpy as s; s.save_file({'a': numpy.ones(2)}, P)",
    ),
    *_of("PIL", suffix=".png", image="from PIL import Image; Image.new('RGB', (2, 2)).save(P)"),
)

REMOVERS: dict[str, str] = {
    "os.remove": "os.remove(P)",
    "os.unlink": "os.unlink(P)",
    "Path.unlink": "Path(P).unlink()",
    "shutil.rmtree": "shutil.rmtree(os.path.dirname(P))",
    "os.rename": "os.rename(P, P + '.1')",
    "Path.rename": "Path(P).rename(P + '.1')",
    "shutil.move": "shutil.move(P, P + '.moved')",
    "os.truncate": "os.truncate(P, 0)",
    "os.chmod": "os.chmod(P, 0o600)",
    "Path.chmod": "Path(P).chmod(0o600)",
    "os.fchmod": "os.fchmod(os.open(P, os.O_RDONLY), 0o600)",
    "link and write": "os.link(P, P + '.link'); open(P + '.link', 'w')",
}
"""What takes an old file away, or changes what is not its content."""
