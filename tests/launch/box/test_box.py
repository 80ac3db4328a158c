"""What a program does in the box stays in the box, whatever program it is; what it reads is the real thing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpdoctor.launch.box.reach import hide_channels

from .conftest import WITHOUT_POWER, InBox

WAYS = {
    "overwrite": "echo new > old.txt",
    "append": "echo new >> old.txt",
    "truncate": ": > old.txt",
    "in place": "sed -i s/old/new/ old.txt",
    "delete": "rm old.txt",
    "delete a tree": "rm -rf tree && mkdir tree && echo new > tree/new.txt",
    "rename": "mv old.txt other.txt",
    "rename a directory": "mv tree other",
    "copy over": "cp /etc/hostname old.txt",
    "replace": "echo new > fresh && mv fresh old.txt",
    "links": "ln old.txt hard && echo new > hard && ln -sf /etc/hostname soft",
    "mode and times": "chmod 600 old.txt && touch -d 2001-01-01 old.txt && chmod 700 tree",
    "a new tree": "mkdir -p a/b/c && echo new > a/b/c/new.txt",
    "odd names": "echo new > $'odd\\nname, a:b' && mkdir 'with, comma' && echo new > 'with, comma/x'",
    "by Python": "{python} -c \"import os, shutil; open('old.txt', 'w').write('new'); shutil.rmtree('tree'); "
    "os.mkfifo('pipe'); open('new', 'w').write('x')\"",
    "mapped": "{python} -c \"import mmap; f = open('old.txt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[:3] = b'new'; "
    'm.flush()"',
    "git": "git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm a && git clean -fdxq",
    "home": "echo new > ~/new.txt && rm ~/old-in-home.txt",
    "temporary": "echo new > $OTHER/new.txt && rm $OTHER/old.txt",
}


def described(directory: Path) -> dict[str, tuple[object, ...]]:
    """Name, kind, mode, time of change and content of all that lies below a directory."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A project, a home and another directory with files that were there before."""
    for name in ("project", "home", "other"):
        (tmp_path / "places" / name / "tree" / "deep").mkdir(parents=True)
        (tmp_path / "places" / name / "old.txt").write_text("old content\n")
        (tmp_path / "places" / name / "tree" / "deep" / "old.txt").write_text("deep\n")
    (tmp_path / "places" / "home" / "old-in-home.txt").write_text("old\n")
    return tmp_path / "places"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_is_written_stays(in_box: InBox, places: Path, way: str) -> None:
    before = described(places)
    command = WAYS[way].replace("{python}", sys.executable)
    answer = in_box(
        command, directory=places / "project", HOME=str(places / "home"), OTHER=str(places / "other"), TMPDIR="/tmp"
    )
    assert answer["code"] == 0, answer["output"]
    assert described(places) == before
    assert answer["left"] == ["box.json", "output", "shared"]


def test_reads_see_the_real_files_and_writes_what_was_written(in_box: InBox, places: Path) -> None:
    answer = in_box(
        "cat old.txt; echo new > old.txt; cat old.txt; rm -r tree; ls; echo kept > $SHARED/record",
        directory=places / "project",
    )
    assert answer["output"].split() == ["old", "content", "new", "old.txt"]
    assert answer["shared"] == {"record": "kept\n"}


def test_shared_memory_is_shared_inside_and_unseen_outside(in_box: InBox, tmp_path: Path) -> None:
    name = f"ddpdoctor-test-{os.getpid()}"
    Path("/dev/shm", name).write_text("mine")
    try:
        command = f"cat /dev/shm/{name}; rm /dev/shm/{name}; echo x > /dev/shm/{name}-new; ls /dev/shm | grep {name}"
        assert in_box(command)["output"].split() == [f"mine{name}-new"]
        assert Path("/dev/shm", name).read_text() == "mine"
        assert not Path("/dev/shm", f"{name}-new").exists()
    finally:
        Path("/dev/shm", name).unlink()


@pytest.mark.parametrize(
    "escape",
    [
        "nohup sleep N >/dev/null 2>&1 &",
        "setsid sleep N &",
        "env -i setsid -f sleep N",
        "(setsid bash -c 'trap \"\" TERM HUP; sleep N & sleep N' &)",
    ],
)
def test_no_process_outlives_the_command(in_box: InBox, escape: str) -> None:
    seconds = f"1000.{os.getpid()}"
    answer = in_box(f"{escape.replace('N', seconds)}\npgrep -fc 'sleep {seconds}'; echo started")
    assert answer["code"] == 0 and "started" in answer["output"]
    assert not [process for process in psutil.process_iter(["cmdline"]) if seconds in (process.info["cmdline"] or ())]


def test_the_command_dies_with_its_supervisor(tmp_path: Path) -> None:
    here = Path(__file__).parent
    driver = subprocess.Popen(
        [sys.executable, str(here / "driver.py"), f"echo $$ > $SHARED/up; exec sleep 12345.{os.getpid()}"],
        env=os.environ | {"PYTHONPATH": str(here.parents[2]), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("run-*/shared/up")):
            if driver.poll() is not None:
                pytest.skip("no box can be made here")
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    seconds = f"12345.{os.getpid()}"
    while any(seconds in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "the command outlives a supervisor that was killed"
        time.sleep(0.02)


def test_root_can_neither_undo_the_box_nor_change_the_machine(in_box: InBox, tmp_path: Path) -> None:
    answer = in_box(
        "umount /tmp; umount -l /; mount -t tmpfs none /mnt && echo mounted; echo 1 > /sys/kernel/profiling"
    )
    assert answer["code"] != 0
    assert "mounted" not in answer["output"] and "Read-only file system" in answer["output"]


def test_the_network_is_there_by_choice(in_box: InBox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached || echo alone"
        assert in_box(reach, "network")["output"].strip() == "reached"
        assert in_box(reach)["output"].strip() == "alone"
    own = (
        f"{sys.executable} -c \"import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "c = socket.create_connection(s.getsockname()); print('spoke')\""
    )
    assert in_box(own)["output"].strip() == "spoke"
    named = own.replace("'127.0.0.1'", "socket.gethostname()")
    assert in_box(named)["output"].strip() == "spoke", "the machine's own name leads to no address in the box"


def test_only_the_sockets_that_are_allowed_can_be_reached(in_box: InBox, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "service"))
        server.listen()

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"hello\n")

        service = threading.Thread(target=answer)
        service.start()
        ask = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('service'); print(s.recv(9).decode())"
        assert "ConnectionRefusedError" in in_box(f'{sys.executable} -c "{ask}"')["output"]
        allowed = in_box(f'{sys.executable} -c "{ask}"', f"socket={tmp_path / 'service'}")
        assert allowed["output"].strip() == "hello"
        service.join()


def test_sockets_of_datagrams_can_be_reached_where_they_are_allowed(in_box: InBox, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "log"))
        log.settimeout(60)
        say = "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.sendto(b'hello', 'log')"
        assert "ConnectionRefusedError" in in_box(f'{sys.executable} -c "{say}"')["output"]
        in_box(f'{sys.executable} -c "{say}"', f"socket={tmp_path / 'log'}")
        assert log.recv(9) == b"hello"


def test_what_is_kept_lies_where_it_was_written(in_box: InBox, places: Path, tmp_path: Path) -> None:
    command = "echo new > made.txt; mkdir out; echo deep > out/x; rm old.txt; chmod 555 out"
    answer = in_box(command, f"keep={tmp_path / 'kept'}", directory=places / "project")
    ((lower, place),) = ((low, place) for low, place in answer["kept"].items() if low in ("/", "/tmp"))
    below = Path(place) / (places / "project").relative_to(lower)
    found = {path for path in below.rglob("*") if path.is_file()}
    assert {str(path.relative_to(below)): path.read_text() for path in found} == {
        "made.txt": "new\n",
        "out/x": "deep\n",
    }


def test_cleaning_up_follows_no_link(in_box: InBox, places: Path) -> None:
    before = described(places)
    command = "mkdir d; ln -s $PWD/old.txt d/link; ln -s $PWD/tree d/tree; chmod 555 d; mkdir shut; chmod 0 shut"
    answer = in_box(command, directory=places / "project")
    assert answer["code"] == 0 and answer["left"] == ["box.json", "output", "shared"]
    assert described(places) == before


def test_a_user_is_the_same_user_inside(in_box: InBox) -> None:
    assert in_box("id -u; id -g; stat -c %u /")["output"].split()[:2] == [str(os.geteuid()), str(os.getegid())]


def test_the_exit_code_and_the_signal_come_through(in_box: InBox) -> None:
    assert in_box("exit 7")["code"] == 7
    assert in_box("kill -SEGV $$")["code"] == 128 + 11


def test_a_command_that_is_not_there_is_said(in_box: InBox) -> None:
    assert in_box("exec /no/such/program")["code"] == 127


def test_what_belongs_to_others_is_taken_over_where_the_user_may(tmp_path: Path) -> None:
    """Root without the power to mount still may stand for every user; a user may not, and is told of whom."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of others")
    (tmp_path / "shared").mkdir()
    os.chown(tmp_path / "shared", 1234, 5678)
    for powers, outcome in (("-sys_admin", "new"), ("-sys_admin,-setuid,-setgid", "user 1234 and group 5678")):
        done = subprocess.run(
            [
                *("setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}"),
                *(sys.executable, str(Path(__file__).parent / "driver.py"), "echo new > x; cat x"),
            ],
            cwd=tmp_path / "shared",
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        if "unshare" in done.stdout:
            pytest.skip(done.stdout)
        assert outcome in done.stdout
        assert list((tmp_path / "shared").iterdir()) == []


@pytest.fixture
def mounts(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a command in a box in a mount namespace of the test's own, after the commands that mount something there."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")

    def run(prepare: str, command: str, *, powers: bool, directory: Path = tmp_path) -> dict[str, Any]:
        words = [sys.executable, str(Path(__file__).parent / "driver.py"), command]
        driver = shlex.join([*([] if powers else WITHOUT_POWER), *words])
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)}
        script = f"set -e; {prepare}; {driver}; find /dev/made-in-the-box* 2>/dev/null || true"
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", script], cwd=directory, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0 and "unshare" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run


@pytest.mark.parametrize("powers", [True, False])
def test_other_mounts_are_covered_too_whatever_their_name(
    mounts: Callable[..., dict[str, Any]], powers: bool, tmp_path: Path
) -> None:
    name = "Données, データ: x"
    (tmp_path / name).mkdir()
    (tmp_path / "project").mkdir()
    mounted = f"'{tmp_path}/{name}'"
    check = f"cat {mounted}/data; echo new > {mounted}/data; cat {mounted}/data"
    prepare = f"mount -t tmpfs none {mounted}; echo real > {mounted}/data"
    answer = mounts(prepare, check, powers=powers, directory=tmp_path / "project")
    if not powers and "/tmp: something else is mounted below" in answer.get("refused", ""):
        return  # the test's directory lies in /tmp
    assert answer.get("output", str(answer)).split() == ["real", "new"]


def test_what_others_delete_while_it_is_looked_through_refuses_no_box(tmp_path: Path) -> None:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            for number in range(30):
                (tmp_path / f"{number}" / "inner").mkdir(parents=True, exist_ok=True)
            for number in range(30):
                shutil.rmtree(tmp_path / f"{number}")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        # One look in a hundred met a directory that was gone.
        assert all(hide_channels("", str(tmp_path), deep=True) for _ in range(600))
    finally:
        over.set()
        worker.join()


def test_where_a_mount_lies_below_the_directory_a_user_gets_no_box(
    mounts: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    answer = mounts("mount -t tmpfs none data", "true", powers=False)
    assert "something else is mounted below" in answer["refused"]


def test_what_no_overlay_covers_cannot_be_written_to(mounts: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Devices, the settings of the machine, and root's ways around a mount."""
    answer = mounts(
        "true",
        "rm /dev/null; echo 61 > /proc/sys/vm/swappiness; mknod disk b 254 0; ls /dev; "
        "unshare -m true; echo x > /dev/null && echo written",
        powers=True,
    )
    assert answer["output"].count("Read-only file system") == 1, answer["output"]
    assert "kmsg" not in answer["output"] and "null" in answer["output"]
    assert answer["output"].count("peration not permitted") == 2, answer["output"]
    assert answer["output"].split()[-1] == "written"


def test_signals_to_its_group_reach_the_command_alone(in_box: InBox) -> None:
    answer = in_box(
        f"trap '' TERM; kill -TERM 0; {sys.executable} -c 'import os; print(os.getpgrp() > 0, os.getsid(0) > 0)'"
    )
    assert answer["code"] == 0 and answer["output"].split() == ["True", "True"]


def test_what_is_shown_of_the_machine_keeps_its_mode(in_box: InBox) -> None:
    """Of root all these are the machine's own files: a device, the one at standard input, and Python itself."""
    before = [os.stat(path).st_ctime_ns for path in ("/dev/null", "/dev/full", sys.executable)]
    answer = in_box("chmod 0666 /dev/full; chmod 0666 /proc/self/fd/0; chmod 0755 /proc/1/exe; true")
    assert answer["output"].count("Read-only file system") == 2 and "ermission denied" in answer["output"]
    assert [os.stat(path).st_ctime_ns for path in ("/dev/null", "/dev/full", sys.executable)] == before


def test_a_name_service_can_be_asked(in_box: InBox, tmp_path: Path) -> None:
    place = Path("/run/nslcd")
    if os.geteuid() != 0 or place.exists():
        pytest.skip("only root can stand in for a name service, where there is none")
    place.mkdir()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place / "socket"))
            server.listen()
            ask = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/nslcd/socket'); print('asked')"
            assert in_box(f'{sys.executable} -c "{ask}"')["output"].strip() == "asked"
    finally:
        (place / "socket").unlink(missing_ok=True)
        place.rmdir()


def test_calls_that_no_namespace_covers_are_refused(in_box: InBox) -> None:
    said = in_box(
        f"""{sys.executable} - <<'END'
import ctypes, os, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
number = {{"x86_64": (250, 425, 435), "aarch64": (219, 425, 435)}}.get(os.uname().machine, ())
print([(libc.syscall(one, 0, 0, 0, 0), os.strerror(ctypes.get_errno())) for one in number])
print(libc.unshare(0x10000000), os.strerror(ctypes.get_errno()))
try:
    socket.socket(40, socket.SOCK_STREAM)
except OSError as error:
    print(error.strerror)
thread = threading.Thread(target=print, args=("a thread",))
thread.start(), thread.join()
END"""
    )["output"]
    assert said.count("Function not implemented") in (0, 3) and "-1 Operation not permitted" in said
    assert "Address family not supported" in said and "a thread" in said


@pytest.mark.parametrize("powers", [True, False])
def test_a_socket_in_a_mount_that_no_overlay_covers_is_hidden(
    mounts: Callable[..., dict[str, Any]], powers: bool, tmp_path: Path
) -> None:
    """An overlay over two overlays is one too many for the kernel."""
    for name in ("l", "u", "w", "m", "u2", "w2", "m2", "project"):
        (tmp_path / name).mkdir()
    prepare = (
        f"cd '{tmp_path}'; mount -t tmpfs none u; mkdir u/1 u/2 u/3 u/4; "
        "mount -t overlay o -o lowerdir=l,upperdir=u/1,workdir=u/2 m; "
        "mount -t overlay o -o lowerdir=m,upperdir=u/3,workdir=u/4 m2; mkdir -p m2/a/b; "
        f"{sys.executable} -c \"import os, socket; s = socket.socket(socket.AF_UNIX); os.chdir('m2/a/b'); "
        "s.bind('s'); s.listen(); os.mkfifo('f'); print('bound', flush=True); import time; time.sleep(60)\" > u/said & "
        "while ! grep -q bound u/said; do sleep 0.05; done; cd project"
    )
    check = (
        f"cd '{tmp_path}/m2/a/b' && {sys.executable} -c \"import socket; "
        "s = socket.socket(socket.AF_UNIX); s.connect('s'); print('reached')\"; ls -l"
    )
    answer = mounts(prepare, check, powers=powers, directory=tmp_path / "project")
    if not powers and "something else is mounted below" in answer.get("refused", ""):
        return  # the test's directory lies in /tmp
    assert "reached" not in answer["output"] and "s" in answer["output"], answer["output"]
