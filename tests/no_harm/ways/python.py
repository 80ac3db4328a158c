"""What Python itself does to files: all the writers of ``tests.probe.no_touch`` on an old file, and what they leave."""

from __future__ import annotations

from tests.no_harm.way import Way, of_python
from tests.probe.no_touch.writers import REMOVERS, WRITERS

_WRITERS = tuple(
    Way(
        name=writer.name.replace("_", " "),
        language=f"Python ({writer.needs})" if writer.needs else "Python",
        body=writer.code,
        suffix=writer.suffix,
        needs=(writer.needs,) if writer.needs else (),
    )
    for writer in WRITERS
    if not writer.name.startswith("sqlite")  # what is no data base is none to them
)
_REMOVERS = tuple(Way(name=name, language="Python", body=code) for name, code in REMOVERS.items())

PYTHON = (
    *_WRITERS,
    *_REMOVERS,
    *of_python(
        open_read_and_write="open(P, 'r+').write('n')",
        open_exclusively="open('new', 'x').write('n')",
        open_and_truncate="open('old.txt', 'r+').truncate(3)",
        rename_a_directory="os.rename('folder', 'moved')",
        replace_a_directory="os.mkdir('other'); os.replace('other', 'empty')",
        renames="os.renames('folder/deep/b.txt', 'else/where/b.txt')",
        removedirs="os.unlink('folder/deep/b.txt'); os.removedirs('folder/deep')",
        rmdir="os.rmdir('empty')",
        mkdir="os.makedirs('made/deep')",
        rmtree="shutil.rmtree('folder')",
        rmtree_and_make_again="shutil.rmtree('runs', ignore_errors=True); os.makedirs('runs')",
        link="os.link('old.txt', 'linked')",
        replace_a_hard_link="os.replace(fresh(), 'hard.bin')",
        write_through_a_hard_link="open('hard.bin', 'r+b').write(b'n')",
        symlink="os.symlink('old.txt', 'linked')",
        replace_a_symlink="os.symlink('source.txt', 'l'); os.replace('l', 'link')",
        unlink_a_symlink="os.unlink('link')",
        write_through_an_old_symlink="open('link', 'w').write('n')",
        utime="os.utime('old.txt', (5, 5)); open('witness', 'w')",
        utime_of_a_directory="os.utime('folder', (5, 5)); open('witness', 'w')",
        touch="Path('old.txt').touch(); open('witness', 'w')",
        chown="os.chown('old.txt', os.getuid(), os.getgid()); os.chmod('old.txt', 0o600)",
        setxattr="os.setxattr('old.txt', 'user.new', b'n')",
        removexattr="os.removexattr('marked.txt', 'user.mark')",
        chmod_of_a_directory="os.chmod('folder', 0o700); os.chmod('folder', 0o750)",
        mkstemp_left="import tempfile; made(tempfile.mkstemp()[1]); tempfile.mkstemp(dir='.')",
        mkdtemp_left="import tempfile; made(tempfile.mkdtemp()); tempfile.mkdtemp(dir='.')",
        named_temporary_file_left="import tempfile; tempfile.NamedTemporaryFile(dir='.', delete=False).write(b'n')",
        move_a_directory="shutil.move('folder', 'empty')",
        copytree="shutil.copytree('folder', 'copy')",
        copytree_over="shutil.copytree('folder', 'runs', dirs_exist_ok=True); shutil.copytree('runs', 'folder', "
        "dirs_exist_ok=True)",
        copystat="os.utime('source.txt', (5, 5)); shutil.copystat('empty', 'source.txt'); shutil.copymode("
        "'old.txt', 'source.txt')",
        path_unlink="Path('folder/a.txt').unlink()",
        path_rename_of_a_directory="Path('folder').rename('moved')",
        path_hardlink="Path('linked').hardlink_to('old.txt')",
        path_open="Path(P).open('a').write('n')",
        mmap_shared="import mmap; f = open('old.bin', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 1; m.flush()",
        open_below_a_descriptor="d = os.open('folder', 0); os.write(os.open('a.txt', os.O_WRONLY, dir_fd=d), b'n')",
        truncate_below_a_descriptor="os.open('a.txt', os.O_RDWR | os.O_TRUNC, dir_fd=os.open('folder', 0))",
        unlink_below_a_descriptor="os.unlink('a.txt', dir_fd=os.open('folder', 0))",
        rename_below_descriptors="d = os.open('folder', 0); os.rename('a.txt', 'z', src_dir_fd=d, dst_dir_fd=d)",
        fchdir_and_write="os.fchdir(os.open('folder', 0)); open('a.txt', 'w').write('n')",
        write_by_proc_self_fd="f = os.open('old.txt', 0); open(f'/proc/self/fd/{f}', 'r+').write('n')",
        write_by_proc_self_cwd="open('/proc/self/cwd/old.txt', 'w').write('n')",
        dup_and_write="f = os.dup(os.open('old.txt', os.O_WRONLY)); os.write(f, b'n')",
        pwrite="os.pwrite(os.open('old.txt', os.O_WRONLY), b'n', 3)",
        writev="os.writev(os.open('old.txt', os.O_WRONLY), [b'n', b'n'])",
        ftruncate="os.ftruncate(os.open('old.txt', os.O_RDWR), 2)",
        copy_file_range="os.copy_file_range(os.open('source.txt', 0), os.open('old.txt', os.O_WRONLY), 1)",
        splice_from_a_pipe="r, w = os.pipe(); os.write(w, b'n'); os.splice(r, os.open('old.txt', os.O_WRONLY), 1)",
        unnamed_file_linked="f = os.open('.', os.O_TMPFILE | os.O_RDWR); "
        "os.link(f'/proc/self/fd/{f}', 'named', src_dir_fd=f)",
        fileinput_in_place="import fileinput\nfor line in fileinput.input('old.txt', inplace=True): print('n')",
        mkfifo="os.mkfifo('pipe')",
        socket_left="import socket; socket.socket(socket.AF_UNIX).bind('socket')",
        lock_file="import fcntl; fcntl.flock(open('data.lock', 'a'), fcntl.LOCK_EX); open('new.lock', 'w')",
        import_writes_bytecode="sys.dont_write_bytecode = False; sys.path.insert(0, '.'); import module; "
        "open('witness', 'w')",
        pickle_update="import pickle; f = open('old.bin', 'r+b'); pickle.dump({}, f)",
        shelve_new="import shelve; s = shelve.open('shelf'); s['a'] = 1; s.close()",
        dbm_dumb="import dbm.dumb as d; b = d.open('dumb', 'c'); b['a'] = 'n'; b.close()",
        csv_append="import csv; csv.writer(open('metrics.csv', 'a')).writerow([4, 0.4])",
        zip_append="import zipfile; zipfile.ZipFile('pack.zip', 'a').writestr('b', 'n')",
        zip_extract_over="import zipfile; zipfile.ZipFile('pack.zip').extractall('.')",
        tar_append="import tarfile; t = tarfile.open('pack.tar', 'a'); t.add('source.txt'); t.close()",
        tar_extract_over="import tarfile; tarfile.open('pack.tar').extractall('.', filter='data')",
        gzip_append="import gzip; gzip.open('old.bin', 'ab').write(b'n')",
        bz2_over="import bz2; bz2.open('old.bin', 'wb').write(b'n')",
        unpack_archive_over="shutil.unpack_archive('pack.zip', '.')",
        log_append="import logging; logging.basicConfig(filename='train.log', force=True); logging.error('x')",
        log_rotation="import logging, logging.handlers as h\nlog = h.RotatingFileHandler('train.log', maxBytes=4, "
        "backupCount=2)\nfor _ in range(4): log.emit(logging.makeLogRecord({'msg': 'long enough'}))",
        config_rewritten="import json; d = json.load(open('new.json')) if os.path.exists('new.json') else {}; "
        "json.dump(d, open('module.py', 'w'))",
        writer_at_exit="import atexit; atexit.register(lambda: open('old.txt', 'w').write('n')); open('w', 'w'); "
        "atexit._run_exitfuncs()",
        writer_in_a_signal="import signal; signal.signal(10, lambda *a: open(P, 'w').write('n')); os.kill(os.getpid(), "
        "10)",
        thread_writes="import threading; t = threading.Thread(target=lambda: os.truncate('old.txt', 0)); t.start(); "
        "t.join()",
        asyncio_thread_writes="import asyncio; asyncio.run(asyncio.to_thread(Path('old.txt').write_text, 'n'))",
        big_file="with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))",
        odd_names="open('new\\nline \\udcff', 'w').write('n'); os.unlink('old.txt')",
    ),
)
