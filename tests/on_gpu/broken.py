"""A part that comes to a bad end, the way that ``BROKEN`` says: for the tests of what is left of its table then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.on_gpu.claims import Bench, Claim

LIMIT_S = 30.0
CLAIMS = {
    "before": Claim("what was measured before", "it is kept", pretends=True),
    "after": Claim("what would have come afterwards", "it is said not to have been measured", pretends=True),
    "never": Claim("what needs a GPU", "it is left out where one is pretended"),
}
_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def measure(bench: Bench) -> None:
    """Measure one claim, and come to a bad end."""
    bench.judge("before", True, "it is kept")
    way = os.environ["BROKEN"]
    if way == "hangs":
        # A job in a session of its own that heeds no SIGTERM, as ranks of a launcher in a call of the driver.
        child = subprocess.Popen((sys.executable, "-c", _DEAF), start_new_session=True)
        (bench.folder / "child").write_text(f"{child.pid}")
        time.sleep(600)
    elif way == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif way == "loses its device":
        from tests.gpu.machine import HEALTHY, build_library, machine

        with machine(build_library(bench.folder), bench.folder, HEALTHY | {"hang": "1"}) as asked:
            look = asked.wait_until(lambda look: look.note != "")
            raise RuntimeError(look.note)
