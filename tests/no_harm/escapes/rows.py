"""The ways out: each asks something outside of the box to act, or acts on what is outside."""

from __future__ import annotations

import os
import shutil

import msgspec

from tests.no_harm.escapes.outside import _SOCKETS as SOCKETS
from tests.no_harm.way import Way


class Escape(msgspec.Struct, frozen=True, kw_only=True):
    """One way."""

    name: str
    body: str
    """Python: ``O`` has what there is to reach by name, ``MARK`` is the file that means that it was reached."""
    needs: tuple[str, ...] = ()
    """Programs without which there is nothing to try."""
    root: bool = False
    """Only root can do it outside."""
    by_end: bool = False
    """It is reached where the body comes to its end: it changes nothing that could be looked at."""

    @property
    def is_here(self) -> bool:
        """Whether there is something to try on this machine."""
        return all(map(shutil.which, self.needs)) and (not self.root or os.geteuid() == 0)

    @property
    def way(self) -> Way:
        """The same as a row of the job."""
        return Way(name=self.name, language="escape", body=_HEAD + self.body, by="program", effect=False)


_HEAD = """
import ctypes, signal, socket, time
libc = ctypes.CDLL(None, use_errno=True)
names = {name: value for name, value in O.items() if '\\0' not in value}
def sh(command, **more): run(['sh', '-c', command], env={**os.environ, **names, 'MARK': MARK, **more}, timeout=20)
def ok(result): assert result >= 0, os.strerror(ctypes.get_errno()); return result
def say(kind, address, family=socket.AF_UNIX):
    line = socket.socket(family, kind)
    line.settimeout(5)
    line.connect(address)
    line.sendall(MARK.encode() + b'\\n')
    line.close()
def put(path, text):
    number = os.open(path, os.O_WRONLY)
    os.write(number, text.encode())
"""
_KEYS = r"\"touch $MARK\" Enter"
_PSQL = 'psql -p "$PG" -U postgres -h {} -c "copy (select 1) to program \'touch $MARK\'"'


def _of_sockets() -> list[Escape]:
    return [
        *(Escape(name=f"a socket named {name}", body=f"say(socket.SOCK_STREAM, O[{name!r}])") for name in SOCKETS),
        Escape(name="a socket of packets", body="say(socket.SOCK_SEQPACKET, O['packets'])"),
        Escape(name="a socket of datagrams", body="say(socket.SOCK_DGRAM, O['datagrams'])"),
        Escape(name="a socket by a relative path", body="os.chdir(O['dir']); say(socket.SOCK_STREAM, 'docker.sock')"),
        Escape(
            name="a socket by a link to it",
            body="os.symlink(O['docker.sock'], 'l'); say(socket.SOCK_STREAM, os.path.abspath('l'))",
        ),
        Escape(
            name="a socket by a hard link to it",
            body="os.link(O['docker.sock'], O['dir'] + '/h'); say(socket.SOCK_STREAM, O['dir'] + '/h')",
        ),
        Escape(
            name="a socket by /proc/1/root",
            body="say(socket.SOCK_STREAM, '/proc/1/root' + O['docker.sock'])",
        ),
        Escape(name="an abstract socket", body="say(socket.SOCK_STREAM, O['abstract'])"),
        Escape(name="an abstract socket of datagrams", body="say(socket.SOCK_DGRAM, O['abstract datagrams'])"),
        Escape(
            name="docker's socket by curl",
            needs=("curl",),
            body=("sh('curl -s --max-time 5 --unix-socket $DOCKER http://x$MARK || true', DOCKER=O['docker.sock'])"),
        ),
        Escape(
            name="docker's command",
            needs=("docker",),
            body="""
sh('docker -H unix://$DOCKER version || true', DOCKER=O['docker.sock'])
say(socket.SOCK_STREAM, O['docker.sock'])
""",
        ),
        Escape(name="a port", body="say(socket.SOCK_STREAM, ('127.0.0.1', int(O['tcp'])), socket.AF_INET)"),
        Escape(
            name="a port by another of the machine's addresses",
            body=(
                "say(socket.SOCK_STREAM, (socket.gethostbyname(socket.gethostname()), int(O['tcp'])), socket.AF_INET)"
            ),
        ),
        Escape(name="a port of IPv6", body="say(socket.SOCK_STREAM, ('::1', int(O['tcp6'])), socket.AF_INET6)"),
        Escape(name="a port of datagrams", body="say(socket.SOCK_DGRAM, ('127.0.0.1', int(O['udp'])), socket.AF_INET)"),
        Escape(
            name="a port by a shell",
            needs=("bash",),
            body=("run(['bash', '-c', f'echo {MARK} > /dev/tcp/127.0.0.1/{O[\"tcp\"]}'])"),
        ),
        Escape(name="a port by curl", needs=("curl",), body="sh('curl -s --max-time 5 127.0.0.1:$tcp$MARK || true')"),
        Escape(
            name="a port after unshare",
            needs=("unshare", "bash"),
            body=("run(['unshare', '-Ur', 'bash', '-c', f'echo {MARK} > /dev/tcp/127.0.0.1/{O[\"tcp\"]}'])"),
        ),
        Escape(
            name="a pipe with a reader",
            body=("n = os.open(O['fifo'], os.O_WRONLY | os.O_NONBLOCK); os.write(n, MARK.encode() + b'\\n')"),
        ),
        Escape(name="a terminal", body="put(O['terminal'], MARK + '\\n')"),
    ]


def _of_programs() -> list[Escape]:
    return [
        Escape(name="tmux: keys", needs=("tmux",), body=f'sh("""tmux -S $tmux send-keys -t x {_KEYS}""")'),
        Escape(name="tmux: a command", needs=("tmux",), body="sh('tmux -S $tmux run-shell \"touch $MARK\"')"),
        Escape(name="tmux: a new window", needs=("tmux",), body="sh('tmux -S $tmux new-window \"touch $MARK\"')"),
        Escape(
            name="screen: keys",
            needs=("screen",),
            body=("sh('screen -S x -p 0 -X stuff \"touch $MARK$(printf \\\\\\\\015)\"', SCREENDIR=O['screens'])"),
        ),
        Escape(
            name="screen: a command",
            needs=("screen",),
            body=("sh('screen -S x -p 0 -X screen touch $MARK', SCREENDIR=O['screens'])"),
        ),
        Escape(
            name="ssh-agent: a key",
            needs=("ssh-agent",),
            body=("sh('chmod 600 $key; ssh-add -q $key', SSH_AUTH_SOCK=O['agent'])"),
        ),
        Escape(
            name="redis on a Unix socket",
            needs=("redis-server", "redis-cli"),
            body="sh('redis-cli -s $redis set by-socket x')",
        ),
        Escape(
            name="redis on a port",
            needs=("redis-server", "redis-cli"),
            body=("sh('redis-cli -h 127.0.0.1 -p $PORT set by-port 1', PORT=O['redis port'])"),
        ),
        Escape(
            name="a database on a Unix socket",
            needs=("psql", "postgres", "initdb"),
            body=(f"sh({_PSQL.format('$postgres')!r}, PG=O['postgres port'])"),
        ),
        Escape(
            name="a database on a port",
            needs=("psql", "postgres", "initdb"),
            body=(f"sh({_PSQL.format('127.0.0.1')!r}, PG=O['postgres port'])"),
        ),
        Escape(
            name="D-Bus: a service is started",
            needs=("dbus-daemon", "dbus-send"),
            body=(
                "sh('dbus-send --print-reply --reply-timeout=2000 --dest=org.x.Touch / org.x.Do || true', "
                "DBUS_SESSION_BUS_ADDRESS='unix:path=' + O['bus'])"
            ),
        ),
        Escape(
            name="at: a job",
            needs=("at", "atd"),
            root=True,
            body=("sh('echo touch $marks/by-at | at now + 5 minutes')"),
        ),
        Escape(
            name="a debugger on a process",
            needs=("gdb",),
            body="""
sh('gdb -batch -p $pid -ex "call (int)system(\\\\"touch $MARK\\\\")" >/dev/null 2>&1')
""",
        ),
        Escape(
            name="a debugger's server",
            needs=("gdb", "gdbserver"),
            body="""
sh('gdb -batch -ex "target extended-remote 127.0.0.1:$PORT" -ex "set remote exec-file /usr/bin/env" '
   '-ex "set args touch $MARK" -ex "run" /usr/bin/env', PORT=O['gdbserver port'])
""",
        ),
    ]


def _of_processes() -> list[Escape]:
    write = "ctypes.create_string_buffer(MARK.encode())"
    return [
        Escape(name="signal USR1", body="os.kill(int(O['pid']), signal.SIGUSR1)"),
        Escape(name="signal USR2", body="signal.pidfd_send_signal(os.pidfd_open(int(O['pid'])), signal.SIGUSR2)"),
        Escape(name="signal HUP", body="os.killpg(int(O['pid']), signal.SIGHUP)"),
        Escape(name="signal TERM", needs=("pkill",), body="sh('pkill -TERM -f $marks')"),
        Escape(
            name="memory by /proc",
            body=(
                "with open(f\"/proc/{O['pid']}/mem\", 'r+b', buffering=0) as m:\n"
                "    m.seek(int(O['page'])); m.write(MARK.encode() + b'\\0')"
            ),
        ),
        Escape(
            name="memory by process_vm_writev",
            body=f"""
class V(ctypes.Structure): _fields_ = [('b', ctypes.c_void_p), ('n', ctypes.c_size_t)]
w = {write}
l, r = V(ctypes.addressof(w), len(w)), V(int(O['page']), len(w))
ok(libc.process_vm_writev(int(O['pid']), ctypes.byref(l), 1, ctypes.byref(r), 1, 0))
""",
        ),
        Escape(name="priority of a process", body="os.setpriority(os.PRIO_PROCESS, int(O['pid']), 7)"),
        Escape(name="cores of a process", body="os.sched_setaffinity(int(O['pid']), {0})"),
        Escape(name="the root of a process", body="open(f\"/proc/{O['pid']}/root{MARK}\", 'w')"),
        Escape(
            name="the root of the first process",
            body="""
# In the box the first process is its own, and what is written by it goes to the overlay.
open('/proc/1/root' + MARK, 'w'); assert os.path.exists(MARK)
""",
        ),
        Escape(name="the namespaces of a process", needs=("nsenter",), body="sh('nsenter -t $pid -m -p touch $MARK')"),
        Escape(
            name="message queue",
            body="""
q = ok(libc.mq_open(O['queue'].encode(), os.O_WRONLY)); ok(libc.mq_send(q, b'x', ctypes.c_size_t(1), 0))
""",
        ),
        Escape(
            name="shared memory by key",
            body="""
libc.shmat.restype = ctypes.c_void_p
ctypes.memset(libc.shmat(ok(libc.shmget(int(O['segment']), 4096, 0)), None, 0), 1, 1)
""",
        ),
        Escape(name="shared memory by name", body="open('/dev/shm/' + O['token'] + '-mine', 'w').write('theirs')"),
        Escape(name="kernel's key ring", needs=("keyctl",), body="sh('keyctl add user $token secret @u')"),
    ]


def _of_the_machine() -> list[Escape]:
    def same(path: str) -> str:
        return f"put({path!r}, open({path!r}).read())"

    return [
        Escape(name=name, body=body, by_end=True, root=True)
        for name, body in (
            ("kernel's log", "put('/dev/kmsg', 'ddpdoctor-test\\n')"),
            ("kernel's log is cleared", "ok(libc.klogctl(8, None, 1))"),
            ("system console", "os.open('/dev/console', os.O_WRONLY | os.O_NOCTTY)"),
            ("virtual terminal", "os.open('/dev/tty0', os.O_WRONLY | os.O_NOCTTY)"),
            ("memory device", "os.open('/dev/mem', os.O_RDWR)"),
            (
                "a disk",
                "import glob; os.open([p for p in glob.glob('/dev/vd?') + glob.glob('/dev/sd?') + "
                "glob.glob('/dev/nvme?n?')][0], os.O_WRONLY)",
            ),
            ("a disk by a new node", "os.mknod('d', 0o60600, os.makedev(254, 0)); os.open('d', os.O_WRONLY)"),
            ("file systems of FUSE", "os.open('/dev/fuse', os.O_RDWR)"),
            ("tunnels", "os.open('/dev/net/tun', os.O_RDWR)"),
            ("loop devices", "os.open('/dev/loop-control', os.O_RDWR)"),
            ("virtual machines", "os.open('/dev/kvm', os.O_RDWR)"),
            ("settings of the kernel", same("/proc/sys/vm/swappiness")),
            ("program for core dumps", same("/proc/sys/kernel/core_pattern")),
            ("magic keys", "put('/proc/sysrq-trigger', 'h')"),
            ("settings of /sys", same("/sys/kernel/profiling")),
            ("name of the machine", "socket.sethostname(socket.gethostname())"),
            ("clock", "time.clock_settime(time.CLOCK_REALTIME, time.time())"),
            ("restart keys", "ok(libc.reboot(0))"),
            (
                "control groups",
                "import glob; d = sorted(glob.glob('/sys/fs/cgroup/*/'))[0] + O['token']; os.mkdir(d); os.rmdir(d)",
            ),
            (
                "a mount",
                "ok(libc.mount(b'none', os.getcwd().encode(), b'tmpfs', 0, None)); "
                "libc.umount2(os.getcwd().encode(), 2)",
            ),
            (
                "files by their handles",
                """
h = ctypes.create_string_buffer(136); h[0:4] = (128).to_bytes(4, 'little'); m = ctypes.c_int()
ok(libc.name_to_handle_at(-100, b'.', h, ctypes.byref(m), 0))
ok(libc.open_by_handle_at(os.open('.', os.O_RDONLY), h, os.O_RDONLY))
""",
            ),
            ("sockets of the hypervisor", "socket.socket(40, socket.SOCK_STREAM)"),
        )
    ] + [
        Escape(
            name="chroot and back",
            root=True,
            body="""
os.mkdir('c'); up = os.open('.', os.O_RDONLY); os.chroot('c'); os.fchdir(up)
for _ in range(64): os.chdir('..')
os.chroot('.'); open(MARK, 'w')
""",
        ),
        Escape(
            name="namespaces of its own",
            needs=("unshare",),
            body=("sh('unshare -Urm sh -c \"umount -l /dev; umount -l /proc; umount -l /; touch $MARK\"')"),
        ),
    ]


ESCAPES: tuple[Escape, ...] = (*_of_sockets(), *_of_programs(), *_of_processes(), *_of_the_machine())
