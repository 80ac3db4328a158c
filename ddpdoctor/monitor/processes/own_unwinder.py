"""Takes the stack of a rank on Python 3.14 or newer with what its own interpreter brings, where py-spy is not there.

The interpreter is started once more, apart from the job, and reads the rank's memory from outside as py-spy does.
``sys.remote_exec``, the public way of 3.14, runs code inside of the rank instead, once its main thread comes back to
Python: of three ranks on 3.14.10 that slept, waited for a lock, and computed in a loop, only the last one answered, and
in the others our code stayed behind until they continued. It neither helps in a hang nor leaves the job alone.
"""

from __future__ import annotations

import os
import subprocess

PATIENCE_S = 10.0
NO_UNWINDER = 4
"""Exit code of an interpreter that has none: before 3.14, or built without it."""
PROGRAM = """
import json, sys
try:
    from _remote_debugging import RemoteUnwinder
except ImportError:
    sys.exit(4)
seen = RemoteUnwinder(int(sys.argv[1]), all_threads=True).get_stack_trace()
threads = [thread for one in seen for thread in getattr(one, "threads", [one])]
def line_of(frame):
    line = getattr(frame, "lineno", None)
    return line if line is not None else getattr(getattr(frame, "location", None), "lineno", 0)
print(json.dumps([{
    "os_thread_id": thread.thread_id,
    "frames": [{"name": f.funcname, "filename": f.filename, "line": line_of(f)} for f in thread.frame_info],
} for thread in threads]))
"""


def read_stack(pid: int) -> tuple[bytes, str]:
    """Return the stacks of a process in py-spy's JSON; where there are none, an empty one and why, as a clause."""
    try:
        interpreter = os.readlink(f"/proc/{pid}/exe")
        done = subprocess.run(
            (interpreter, "-I", "-S", "-c", PROGRAM, str(pid)),
            capture_output=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return b"", "its interpreter did not answer"
    except OSError as error:
        return b"", f"its interpreter cannot be started: {error.strerror or error}"
    if done.returncode == NO_UNWINDER:
        return b"", "py-spy is not installed, and only Python 3.14 or newer works without it"
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return b"", last[0][:160] if last else "its interpreter could not read it"
    return done.stdout, ""
