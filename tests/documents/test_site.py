"""The site is built without the network and without a warning, and a broken link breaks the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.index_of_checks import BUILT_IN

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(r'<(?:script|link|img|iframe|source)[^>]+(?:src|href)="(https?:[^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a configuration, strictly."""
    return subprocess.run(
        (sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)),
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_every_check_has_a_page_with_its_documentation(site: Path) -> None:
    names = [module.rpartition(".")[2].replace("_", "-") for module in BUILT_IN.values()]
    lacking = [name for name in names if not (site / "checks" / f"{name}.html").exists()]
    assert lacking == []
    page = (site / "checks" / "missing-set-epoch.html").read_text(encoding="utf-8")
    assert all(f">{heading}<" in page for heading in ("What it finds", "Remedy", "When it is wrong"))
    assert "Scripts that it is tested on" in page


def test_the_options_of_a_command_are_those_of_its_help(site: Path) -> None:
    assert "--stall-after SECONDS" in (site / "check.html").read_text(encoding="utf-8")
    assert "<!-- options" not in "".join(path.read_text(encoding="utf-8") for path in site.glob("*.html"))


def test_the_search_works_from_a_disk(site: Path) -> None:
    """What it needs is there; that a browser finds words with it was seen in Chromium 156."""
    assert (site / "search" / "search_index.js").exists()
    for page, up in (("index.html", ""), ("checks/straggler.html", "../")):
        scripts = re.findall('<script src="([^"]+)"', (site / page).read_text(encoding="utf-8"))
        assert scripts[0] == f"{up}assets/search-from-disk.js", "before the search's own script"
        assert (site / page).parent.joinpath(scripts[0]).exists()


def test_the_site_loads_nothing_from_elsewhere_and_shows_every_picture(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [(path.name, _LOADED.findall(text)) for path, text in pages.items() if _LOADED.search(text)] == []
    shown = re.findall(r'<img[^>]+src="(screens/[^"]+)"', pages[site / "screens.html"])
    assert len(shown) >= 10
    assert [name for name in shown if not (site / name).exists()] == []


def test_a_broken_link_breaks_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "faq.md").open("a", encoding="utf-8") as page:
        page.write("\n[gone](no-such-page.md) and [gone, too](check.md#no-such-heading)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: [{ROOT / 'docs/hooks/pages.py'}]\n")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "no-such-page.md" in done.stderr and "no-such-heading" in done.stderr
