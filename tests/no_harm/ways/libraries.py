"""Libraries that write by themselves, many of them from C where no rule of Python sees them."""

from __future__ import annotations

from tests.no_harm.way import Way, of_python

_READLINE = "import readline; readline.add_history('n'); "
_LIBC = "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
_ASSERTED = "r = {}; assert r >= 0, ctypes.get_errno()"

LIBRARIES = (
    *of_python(
        language="sqlite3 module",
        insert="import sqlite3; b = sqlite3.connect('base.db'); b.execute('insert into t values (2)'); b.commit()",
        attach="import sqlite3; b = sqlite3.connect(':memory:'); b.execute(\"attach 'base.db' as o\"); "
        "b.execute('insert into o.t values (2)'); b.commit()",
        attach_by_the_name_of_a_file="import sqlite3; b = sqlite3.connect(':memory:', uri=True); "
        "b.execute(\"attach 'file:base.db?mode=rw' as o\"); b.execute('drop table o.t'); b.commit()",
        write_ahead_log="import sqlite3; b = sqlite3.connect('base.db'); b.execute('pragma journal_mode=wal'); "
        "b.execute('insert into t values (2)'); b.commit()",
        vacuum_into="import sqlite3; sqlite3.connect('file:base.db?mode=ro', uri=True).execute(\"vacuum into 'n.db'\")",
        backup="import sqlite3; s = sqlite3.connect(':memory:'); s.execute('create table n (x)'); "
        "s.backup(sqlite3.connect('base.db'))",
        new_base_left="import sqlite3; b = sqlite3.connect('new.db'); b.execute('create table n (x)'); b.commit()",
    ),
    *of_python(
        language="readline",
        needs=("readline",),
        history_over=_READLINE + "readline.write_history_file('train.log')",
        history_new=_READLINE + "readline.write_history_file('history')",
        history_append=_READLINE + "readline.append_history_file(1, 'train.log')",
    ),
    *(
        Way(name=name, language="ctypes", body=_LIBC + _ASSERTED.format(call), by="native", says="of the C library")
        for name, call in {
            "unlink": "c.unlink(b'old.txt')",
            "rename": "c.rename(b'old.txt', b'z')",
            "truncate": "c.truncate(b'old.txt', ctypes.c_long(2))",
            "open and write": "c.write(c.open(b'old.txt', 1), b'n', 1)",
            "system": "c.system(b'rm -rf folder')",
            "syscall": "c.syscall(ctypes.c_long(87 if os.uname().machine == 'x86_64' else 35), b'old.txt') if "
            "os.uname().machine == 'x86_64' else c.unlink(b'old.txt')",
        }.items()
    ),
    *of_python(
        language="numpy",
        needs=("numpy",),
        memmap_of_an_old_file="import numpy; m = numpy.memmap('old.bin', dtype='u1', mode='r+'); m[0] = 1; m.flush()",
        load_mapped="import numpy; m = numpy.load('array.npy', mmap_mode='r+'); m[0] = 1; m.flush()",
        save_over="import numpy; numpy.save('array.npy', numpy.ones(16))",
        savez_new="import numpy; numpy.savez('arrays', a=numpy.ones(16))",
    ),
    *of_python(
        language="torch",
        save_over="torch.save({'w': torch.ones(4)}, 'last.pt')",
        save_through_a_symlink="torch.save({'w': torch.ones(4)}, 'latest.pt')",
        storage_from_file="torch.UntypedStorage.from_file('old.bin', True, 64)[0] = 1",
        typed_storage_from_file="torch.FloatStorage.from_file('old.bin', True, 16)[0] = 1.0",
        tensor_from_file="torch.from_file('old.bin', shared=True, size=16).fill_(1)",
        tensor_from_a_file_that_grows="torch.from_file('old.txt', shared=True, size=4096).fill_(1)",
        load_mapped="torch.serialization.set_default_mmap_options(1)\n"
        "torch.load('last.pt', mmap=True)['w'].fill_(1)\nopen('witness', 'w')",
        distributed_checkpoint="import torch.distributed.checkpoint as c\n"
        "c.save({'w': torch.ones(2)}, checkpoint_id='runs/old', no_dist=True)",
        export="torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), 'old.bin')",
        file_store="s = dist.FileStore('old.bin', 1); s.set('a', 'n')",
        file_store_new="s = dist.FileStore('store', 1); s.set('a', 'n'); open('witness', 'w')",
        shared_tensor_left="import torch.multiprocessing as m; m.set_sharing_strategy('file_system'); "
        "t = torch.ones(8).share_memory_(); made('/dev/shm' + t.untyped_storage()._share_filename_cpu_()[1].decode())\n"
        "open('witness', 'w')",
    ),
    *of_python(
        language="safetensors",
        needs=("safetensors",),
        save_over="import safetensors.torch as s; s.save_file({'a': torch.ones(4)}, 'model.safetensors')",
        flattened="import safetensors.torch as s; Path('model.safetensors').write_bytes(s.save({'a': torch.ones(4)}))",
    ),
    *of_python(
        by="native",
        language="h5py",
        needs=("h5py",),
        new_left="import h5py; h5py.File('new.h5', 'w')['a'] = [1]",
    ),
    *of_python(
        language="tensorboard",
        needs=("tensorboard",),
        events="from torch.utils.tensorboard import SummaryWriter as W; w = W('runs/old'); w.add_scalar('a', 1); "
        "w.close()",
    ),
    *of_python(
        language="PIL",
        needs=("PIL",),
        save_over="from PIL import Image; Image.new('RGB', (2, 2)).save(P, 'PNG')",
    ),
    *of_python(
        language="shared memory",
        segment_left="from multiprocessing import resource_tracker as r, shared_memory as s; "
        "r.register = lambda *a: None\nm = s.SharedMemory(f'{TOKEN}-left', create=True, size=8); m.buf[0] = 1\n"
        "open('witness', 'w')",
        segment_named_by_python="from multiprocessing import resource_tracker as r, shared_memory as s; "
        "r.register = lambda *a: None\nm = s.SharedMemory(create=True, size=8); made('/dev/shm/' + m.name)\n"
        "open('witness', 'w')",
        segment_of_another_job_unlinked="from multiprocessing import shared_memory as s; "
        "s.SharedMemory(f'{TOKEN}-job').unlink(); made(f'/dev/shm/{TOKEN}-job'); open('witness', 'w')",
        segment_of_another_job_written="from multiprocessing import shared_memory as s; "
        "m = s.SharedMemory(f'{TOKEN}-job-2'); m.buf[0] = 1; made(f'/dev/shm/{TOKEN}-job-2'); open('witness', 'w')",
        semaphore_left="""
import multiprocessing as m
from multiprocessing import resource_tracker as r
p = os.fork()
if p == 0:
    lock = m.get_context("spawn").Lock()
    made("/dev/shm/sem." + lock._semlock.name.lstrip("/"))
    os.kill(r._resource_tracker._pid, 9)
    os._exit(0)
os.waitpid(p, 0)
open("witness", "w")
""",
    ),
)
