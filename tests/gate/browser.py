"""Opens a page in headless Chromium at a given width, and tells what a user would see go wrong."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LOOK = """
const frame = document.getElementById("page");
frame.onload = () => {
  const page = frame.contentDocument, width = frame.clientWidth, wide = [];
  for (const element of page.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (element.closest("svg") || !box.width || element.classList.contains("skip")) continue;
    if (box.right > width + 1 || box.left < -1 || element.scrollWidth > element.clientWidth + 1 && element.clientWidth)
      wide.push(element.tagName + " " + element.textContent.slice(0, 60));
  }
  const style = frame.contentWindow.getComputedStyle(page.body);
  document.getElementById("result").textContent = JSON.stringify({
    wide, scroll: page.documentElement.scrollWidth - width, text: page.body.innerText, title: page.title,
    marks: [...page.querySelectorAll("script, img, iframe, object, embed, link, a[href^='javascript']")].length,
    ran: Boolean(frame.contentWindow.ran), color: style.color, background: style.backgroundColor,
    focusable: [...page.querySelectorAll("a[href], summary")].length,
  });
};
frame.src = "PAGE";
"""


def browser() -> str | None:
    """The first browser that is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def looked_at(page: Path, folder: Path, width: int, *, dark: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What was measured in the page, and what the console said."""
    program = browser()
    assert program is not None
    around = folder / f"around-{width}.html"
    frame = f'<iframe id="page" style="width:{width}px;height:900px;border:0"></iframe>'
    script = f"<script>{_LOOK.replace('PAGE', page.as_uri())}</script>"
    around.write_text(f'<!doctype html><pre id="result"></pre>{frame}{script}')
    done = subprocess.run(
        [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=5000"),
            *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []),
            *(f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 600) + 60},1000", "--dump-dom"),
            around.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
