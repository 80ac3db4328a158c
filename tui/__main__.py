"""Shows the demo: ``python -m ddpdoctor.tui``."""

from __future__ import annotations

from ddpdoctor.monitor.demo import Demo
from ddpdoctor.tui.app import run_screen

if __name__ == "__main__":
    demo = Demo()
    run_screen(demo, playback=demo)
