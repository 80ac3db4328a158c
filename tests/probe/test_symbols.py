"""The probe imports nothing while the training thread does: Python would hand that a half-made module."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
import sys, threading, time
from ddpdoctor.probe.live.flights import symbols

symbols._NEEDED = "outer.ours"
importing, let_go = threading.Event(), threading.Event()
sys.modules["gate"] = type(sys)("gate")
sys.modules["gate"].pass_through = lambda: (importing.set(), let_go.wait())

def imports():
    import outer
thread = threading.Thread(target=imports)
thread.start()
importing.wait()
said = [symbols.ready() for _ in range(5)]
let_go.set()
thread.join()
print(said, symbols.ready(), sys.modules["outer.ours"].made, sys.modules["outer"].made)
"""


def test_it_waits_for_another_threads_import_and_then_makes_its_own(tmp_path: Path) -> None:
    package = tmp_path / "outer"
    package.mkdir()
    (package / "__init__.py").write_text("import gate; gate.pass_through()\nmade = True\n")
    (package / "ours.py").write_text("import outer\nmade = True\n")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[False, False, False, False, False] True True True", done.stderr
