"""What training scripts do to their checkpoints, caches and logs, in the ranks themselves."""

from __future__ import annotations

import msgspec

from tests.no_harm.way import of_python

_SAVE = "torch.save({'epoch': 9, 'w': torch.ones(4)}, "
_ALONE = of_python(
    language="habit",
    overwrite_last=_SAVE + "'last.pt')",
    overwrite_last_atomically=_SAVE + "'last.tmp'); os.replace('last.tmp', 'last.pt')",
    rotate_old_checkpoints="import glob\n" + _SAVE + "'ckpt_3.pt')\n"
    "for old in sorted(glob.glob('ckpt_*.pt'))[:-2]: os.remove(old)",
    rotate_by_renaming="os.replace('ckpt_2.pt', 'ckpt_2.bak'); os.replace('last.pt', 'ckpt_2.pt'); "
    + _SAVE
    + "'last.pt')",
    move_the_latest_link=_SAVE + "'ckpt_3.pt'); os.remove('latest.pt'); os.symlink('ckpt_3.pt', 'latest.pt')",
    resume_and_overwrite="state = torch.load('last.pt'); state['w'] += 1; torch.save(state, 'last.pt')\n"
    "assert torch.load('last.pt')['w'].sum() == 4",
    remove_output_at_start="shutil.rmtree('runs'); os.makedirs('runs/new'); open('runs/new/log', 'w').write('n')",
    cache_of_tokens="os.makedirs('tokens.tmp'); open('tokens.tmp/0.bin', 'wb').write(bytes(64)); "
    "os.rename('tokens.tmp', 'tokens'); assert os.listdir('tokens') == ['0.bin']",
    cache_replaced="os.makedirs('cache.tmp'); open('cache.tmp/part-0.arrow', 'w').write('n'); shutil.rmtree('cache'); "
    "os.rename('cache.tmp', 'cache')",
    lock_and_append="import fcntl\nwith open('data.lock', 'a') as lock:\n    fcntl.flock(lock, fcntl.LOCK_EX)\n"
    "    open('metrics.csv', 'a').write('4,0.4\\n')",
    copy_to_best="shutil.copyfile('last.pt', 'ckpt_0.pt')",
    statistics_then_log="import csv, logging\ncsv.writer(open('stats.csv', 'w')).writerow([1])\n"
    "logging.FileHandler('train.log').emit(logging.makeLogRecord({'msg': 'n'}))",
    new_run_only="os.makedirs('runs/new'); " + _SAVE + "'runs/new/last.pt'); os.symlink('new', 'runs/latest')",
    clean_checkout="shutil.rmtree('repository/.git')",
)
_TOGETHER = of_python(
    language="both ranks",
    one_file_mapped_by_both="""
import mmap
if rank == 0: open('shared', 'wb').write(bytes(4096))
dist.barrier()
with open('shared', 'r+b') as file: mapped = mmap.mmap(file.fileno(), 0)
mapped[rank] = 7
dist.barrier()
assert (mapped[0], mapped[1]) == (7, 7), 'the ranks do not share the mapping'
""",
    each_its_own_checkpoint="torch.save({'r': rank}, f'rank_{rank}.pt'); dist.barrier(); "
    "assert torch.load(f'rank_{1 - rank}.pt')['r'] == 1 - rank",
    first_makes_both_read="""
if rank == 0:
    os.makedirs('prepared.tmp'); open('prepared.tmp/x', 'w').write('ready'); os.rename('prepared.tmp', 'prepared')
dist.barrier()
assert open('prepared/x').read() == 'ready'
""",
    socket_between_the_ranks="""
import socket
if rank == 0:
    server = socket.socket(socket.AF_UNIX); server.bind('meet'); server.listen()
dist.barrier()
if rank == 1:
    line = socket.socket(socket.AF_UNIX); line.connect('meet'); line.sendall(b'x')
else:
    assert server.accept()[0].recv(1) == b'x'
dist.barrier()
""",
)

HABITS = (
    *(msgspec.structs.replace(way, ranks="first") for way in _ALONE),
    *(msgspec.structs.replace(way, ranks="both") for way in _TOGETHER),
)
