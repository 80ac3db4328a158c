"""Processes of the script: Python that inherits the rules, Python that does not, and what outlives the script."""

from __future__ import annotations

from tests.no_harm.way import Way, of_python

_CODE = "open('old.txt', 'w').write('n')"
_WRITER = f"{_CODE!r}"
_LATE = "for i in $(seq 600); do echo n >> late; sleep 1; done"
_FOREVER = "import time\nwhile True: open('late', 'a').write('n'); time.sleep(1)"
_WAIT = (
    "import time\n_end = time.monotonic() + 20\n"
    "while not os.path.exists('late') and time.monotonic() < _end: time.sleep(0.02)\n"
)


def _left(name: str, body: str, says: str, language: str = "left running", needs: tuple[str, ...] = ()) -> Way:
    """A row that leaves a process, which writes again and again, beside it."""
    return Way(
        name=name, language=language, body=f"LATE = {_LATE!r}\n{body}\n{_WAIT}", by="program", says=says, needs=needs
    )


CHILDREN = (
    *of_python(
        language="Python child",
        of_a_command=f"run([PYTHON, '-c', {_WRITER}])",
        of_a_script="open('child.py', 'w').write(" + _WRITER + "); run([PYTHON, 'child.py'])",
        of_a_module="open('child.py', 'w').write(" + _WRITER + "); run([PYTHON, '-m', 'child'])",
        forked="p = os.fork()\nif p == 0:\n    try: open('old.txt', 'w').write('n')\n    finally: os._exit(0)\n"
        "os.waitpid(p, 0)",
        forked_by_multiprocessing="import multiprocessing as m; p = m.get_context('fork').Process(target=os.truncate, "
        "args=('old.txt', 0)); p.start(); p.join()",
        spawned_by_multiprocessing="import multiprocessing as m; p = m.get_context('spawn').Process(target=os.truncate,"
        " args=(os.path.abspath('old.txt'), 0)); p.start(); p.join()",
        of_a_fork_server="import multiprocessing as m; p = m.get_context('forkserver').Process(target=os.truncate, "
        "args=(os.path.abspath('old.txt'), 0)); p.start(); p.join()",
        of_a_pool="from concurrent.futures import ProcessPoolExecutor as P\nwith P(1) as pool: "
        "pool.submit(os.truncate, os.path.abspath('old.txt'), 0).result()",
        in_place_of_a_fork="p = os.fork()\nif p == 0: os.execv(PYTHON, [PYTHON, '-c', " + _WRITER + "])\n"
        "os.waitpid(p, 0)",
        through_a_shell="open('child.py', 'w').write(" + _WRITER + "); run(['sh', '-c', f'{PYTHON} child.py'])",
        below_asyncio="import asyncio\nasync def go(): await (await asyncio.create_subprocess_exec(PYTHON, '-c', "
        + _WRITER
        + ")).wait()\nasyncio.run(go())",
    ),
    *(
        Way(name=name, language="child outside", body=body, by="program", says=says)
        for name, body, says in (
            ("python -I", f"run([PYTHON, '-I', '-c', {_WRITER}])", "bin/python"),
            ("python -S -E", f"run([PYTHON, '-S', '-E', '-c', {_WRITER}])", "bin/python"),
            ("python without environment", f"run([PYTHON, '-c', {_WRITER}], env={{}})", "bin/python"),
            ("env -i python", f"run(['env', '-i', PYTHON, '-c', {_WRITER}])", "env -i"),
            ("env -i rm", "run(['env', '-i', 'rm', 'old.txt'])", "env -i rm old.txt"),
            ("rm without environment", "run(['rm', 'old.txt'], env={})", "rm old.txt"),
            ("rm by os.system", "os.system('rm old.txt')", "rm old.txt"),
            ("rm by os.popen", "os.popen('rm old.txt').read()", "rm old.txt"),
            ("rm by posix_spawn", "os.waitpid(os.posix_spawnp('rm', ['rm', 'old.txt'], {}), 0)", "rm old.txt"),
            ("rm by spawnlp", "os.spawnlp(os.P_WAIT, 'rm', 'rm', 'old.txt')", "rm old.txt"),
            (
                "rm in place of a fork",
                "p = os.fork()\nif p == 0: os.execlp('rm', 'rm', 'old.txt')\nos.waitpid(p, 0)",
                "rm old.txt",
            ),
            ("rm by pty", "import pty; pty.spawn(['rm', 'old.txt'])", "rm old.txt"),
            (
                "descriptor handed on",
                "f = os.open('new', os.O_RDWR | os.O_CREAT); "
                "run(['bash', '-c', f'echo n >&{f}; rm old.txt'], pass_fds=[f])",
                "rm old.txt",
            ),
            ("stdout of a child", "run(['sh', '-c', 'echo n; rm old.txt'])", "rm old.txt"),
        )
    ),
    _left("in the background", "subprocess.Popen(['sh', '-c', LATE])", "for i in"),
    _left("nohup", "subprocess.Popen(['nohup', 'sh', '-c', LATE], stdout=subprocess.DEVNULL)", "nohup"),
    _left("setsid", "subprocess.Popen(['setsid', 'sh', '-c', LATE])", "setsid", needs=("setsid",)),
    _left("setsid -f", "run(['setsid', '-f', 'sh', '-c', LATE])", "setsid -f", needs=("setsid",)),
    _left("env -i", "subprocess.Popen(['env', '-i', 'sh', '-c', LATE])", "env -i"),
    _left("env -i setsid", "run(['env', '-i', 'setsid', '-f', 'sh', '-c', LATE])", "env -i setsid", needs=("setsid",)),
    _left("background of a shell", "run(['sh', '-c', f'({LATE}) &'])", "for i in"),
    _left("new session", "subprocess.Popen(['sh', '-c', LATE], start_new_session=True, env={})", "for i in"),
    _left("daemon in C", "run([HELPER, 'daemon', 'late'])", "helper", needs=("cc",)),
    _left("python -I", f"subprocess.Popen([PYTHON, '-I', '-c', {_FOREVER!r}], start_new_session=True)", "bin/python"),
    *of_python(
        language="left running",
        forked_twice="p = os.fork()\nif p == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    "
        + _FOREVER.replace("\n", "\n    ")
        + "\nos.waitpid(p, 0)\n"
        + _WAIT,
        forked_twice_without_environment="p = os.fork()\nif p == 0:\n    os.setsid(); os.environ.clear()\n"
        "    if os.fork(): os._exit(0)\n    " + _FOREVER.replace("\n", "\n    ") + "\nos.waitpid(p, 0)\n" + _WAIT,
        python_child=f"subprocess.Popen([PYTHON, '-c', {_FOREVER!r}], start_new_session=True)\n" + _WAIT,
        ignores_signals="p = os.fork()\nif p == 0:\n    import signal\n    for s in (1, 2, 15): signal.signal(s, "
        "signal.SIG_IGN)\n    " + _FOREVER.replace("\n", "\n    ") + "\n" + _WAIT,
    ),
)
