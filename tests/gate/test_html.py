"""The HTML report: one file, nothing loaded, nothing run, nothing cut off."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.catalogue.registry import find, load, read_catalogue
from ddpdoctor.examination import Examination, GateSection, Verdict
from ddpdoctor.finding import Fact, Finding, Frame, Severity
from ddpdoctor.gate.budget import together
from ddpdoctor.gate.judge import compared
from ddpdoctor.report.finding_fields import headline
from ddpdoctor.report.formats import html, markdown
from ddpdoctor.report.own_reports import encoded, is_own_report, sealed
from tests.demo.job import demo_snapshot
from tests.gate.browser import browser, looked_at
from tests.gate.budgets import budget, place, share
from tests.report.examples import at, examination, finding, result
from tests.report.test_reports import EXAMINATIONS

HOSTILE = "<script>ran=1</script><img src=x onerror=ran=1>\"'&{{7*7}}</style>.py"
needs_a_browser = pytest.mark.skipif(browser() is None, reason="no Chromium is installed")


class Reader(HTMLParser):
    """Collects what a page is made of, and that what is opened is closed."""

    VOID = ("meta", "rect", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        assert not [name for name in values if name.startswith("on")]
        if tag not in self.VOID or tag == "rect":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def gated() -> Examination:
    """A gate of two targets, one with a hang and one whose budget grew."""
    line = "optimizer_with_a_rather_long_name_that_has_no_blank_in_it_at_all" * 2
    old = budget(share("collectives", (1, 1, 1)), share("model_state_bytes", (4096,), what="Net", at=place(3)))
    new = budget(share("collectives", (1, 2, 2)), share("model_state_bytes", (4096,), what=line, at=place(3)))
    section = GateSection(against="ddpdoctor-baseline.json", figures=compared(old, new, "/job", 0.0), steps=3)
    hang = finding(
        "DDP301",
        "rank-divergent-collective",
        Severity.ERROR,
        at(3),
        basis="rehearsal",
        evidence=tuple(
            Fact(
                text=f"rank {rank} waits",
                basis="rehearsal",
                rank=rank,
                stack=(Frame(f"/job/{line}.py", rank + 1, line),),
            )
            for rank in (0, 1)
        ),
    )
    one = msgspec.structs.replace(examination(result(hang)), gate=section)
    return together([one, msgspec.structs.replace(one, target="tools/tune.py")])


def hostile() -> Examination:
    """Markup wherever a report shows text from outside."""
    fact = Fact(text=HOSTILE, basis="source", rank=0, stack=(Frame(f"/job/{HOSTILE}", 1, HOSTILE),))
    found = Finding(
        code="DDP101",
        name=HOSTILE,
        severity=Severity.ERROR,
        title=HOSTILE,
        basis=frozenset({"source"}),
        remedy=HOSTILE,
        locations=(at(1, file=f"/job/{HOSTILE}", function=HOSTILE),),
        evidence=(fact, msgspec.structs.replace(fact, rank=1)),
        unconfirmed=HOSTILE,
    )
    one = examination()
    return msgspec.structs.replace(one, target=HOSTILE, findings=(found,), notes=(HOSTILE,))


def run_page() -> str:
    """The demo's run of 8 ranks."""
    return html.render_run(demo_snapshot(0, 1_700_000_000_000_000_000), "/job")


PAGES: dict[str, Callable[[], str]] = {
    "gate": lambda: html.render(gated()),
    "hostile": lambda: html.render(hostile()),
    "run": run_page,
    **{build.__name__: (lambda build=build: html.render(build())) for build in EXAMINATIONS},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_loads_nothing(name: str) -> None:
    page = Reader(PAGES[name]())
    assert not {"script", "img", "iframe", "object", "embed", "link", "form"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids), "links lead to places in the page"


def test_a_page_says_what_the_text_says() -> None:
    shown = gated()
    text = Reader(html.render(shown)).text
    for found in shown.findings:
        assert found.title in text
        assert found.remedy in text
    assert "collectives a step" in text
    assert "train.py:10, all_reduce: 1 → 2" in text


def test_a_comment_has_the_budget_and_the_commands_to_go_on_with() -> None:
    update = "ddpdoctor gate train.py --update -- --out 'a|b'"
    shown = gated()
    section = shown.parts[0].gate
    assert section is not None
    section = msgspec.structs.replace(section, reproduce="ddpdoctor gate train.py", accept=update)
    text = markdown.render(msgspec.structs.replace(shown.parts[0], gate=section))
    assert text.startswith("## ddpdoctor: gate failed: 1 error\n")
    assert "| collectives a step | 1 | 2 | **grown +100%** | train.py:10, all\\_reduce: 1 → 2 |" in text
    assert "- To run it again: `ddpdoctor gate train.py`" in text
    assert "To accept it: " in text
    assert "a\\|b" in text, "a bar ends no cell"
    assert "`ddpdoctor explain DDP301`" in text


def test_each_check_is_explained_in_the_page() -> None:
    check = load(find(read_catalogue(), "DDP301"))
    page = Reader(html.render(gated(), [check]))
    assert "#about-DDP301" in page.links
    assert "about-DDP301" in page.ids
    assert "When it is wrong" in page.text


@pytest.mark.parametrize(
    ("verdict", "gate", "wanted"),
    [
        ("clean", GateSection(against="b"), "gate passed"),
        ("findings", GateSection(against="b"), "gate failed: 1 warning"),
        ("clean", GateSection(against="b", written=True), "baseline written"),
        ("inconclusive", GateSection(against="b"), "gate inconclusive"),
        ("clean", None, "nothing found"),
        ("findings", None, "1 warning"),
        ("inconclusive", None, "inconclusive"),
    ],
)
def test_the_headline_of_a_gate_is_its_verdict(verdict: Verdict, gate: GateSection | None, wanted: str) -> None:
    found = (finding(),) if verdict == "findings" else ()
    assert headline(msgspec.structs.replace(examination(), verdict=verdict, findings=found, gate=gate)) == wanted


def test_markup_in_names_is_text() -> None:
    page = Reader(html.render(hostile()))
    assert page.text.count(HOSTILE) > 5
    assert "49" not in page.text, "a name is no template"


def test_a_page_is_known_as_a_report_of_ours() -> None:
    content = encoded(sealed(html.render(gated()), "html"))
    assert is_own_report(content)
    assert not is_own_report(content.replace(b"Budget", b"budget"))


def test_the_phases_of_each_rank_are_drawn_to_scale() -> None:
    text = run_page()
    assert text.count('<div class="bar">') == 8
    assert 'class="data_wait"' in text
    assert "100.000%" in text or "99.99" in text or text.count("<rect") == 64


@needs_a_browser
@pytest.mark.parametrize("name", ["gate", "hostile", "run"])
def test_a_browser_shows_all_of_it_at_any_width(name: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(PAGES[name](), encoding="utf-8")
    colours = set()
    for width, dark in ((360, False), (1440, True)):
        seen, console = looked_at(page, tmp_path, width, dark=dark)
        assert console == []
        assert seen["wide"] == []
        assert seen["scroll"] <= 0
        assert not seen["ran"]
        assert seen["marks"] == 0
        assert seen["focusable"]
        colours.add((seen["color"], seen["background"]))
    assert len(colours) == 2, "light and dark differ"
