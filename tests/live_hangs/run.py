"""Runs one job of the table as a user does, ends it as users and launchers do, and judges what was said of it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import psutil

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.monitor.replay import final_snapshot
from ddpdoctor.tui.screens.pages import paint_screen
from ddpdoctor.tui.view import View
from tests.faults.script import STAMPS_VARIABLE
from tests.jobs_of_tests import kill_marked, marked
from tests.live_hangs.cases import MOST_S, TWO_OF_THREE, Ending, Hang
from tests.live_hangs.healthy import SAID

ENDINGS: tuple[Ending, ...] = ("ctrl-c", "term", "launcher", "kill")
START_WITHIN_S = 120.0
HEALTHY_WITHIN_S = 240.0
ENDS_WITHIN_S = 60.0
_SAID = re.compile(r"^(?:\x1b\[[0-9;]*m)*ddpdoctor: (?P<text>.*?)\r?$")
_FINDING = re.compile(
    r"^(?P<severity>error|warning|advice): \S+ \((?P<code>DDP\d+)\)[^:]*(?: at [^ ]+)?: (?P<title>.*)$"
)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One line that the doctor wrote while the job was watched."""

    at_ns: int
    text: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run of a row."""

    name: str
    wrong: tuple[str, ...]
    """What was said wrongly or not at all; empty when all was right."""
    told_after_s: float | None
    """From the fault to the line that tells it."""
    live: str
    """What was told while the job was watched."""
    final: str
    """The verdict at the end."""


def run_hang(name: str, hang: Hang, folder: Path, ending: Ending, python: str = sys.executable) -> Outcome:
    """Run a job that hangs in the empty directory ``folder``, end it once its cause was told, and judge.

    ``python`` is the interpreter of the ranks; it needs torch, and what the row imports.
    """
    ending = hang.ending or ending
    job = _Job(folder, hang.script, python, hang.ranks, hang.command, hang.variables)
    with job.running():
        struck_ns = job.wait_for_fault()
        patience_s = MOST_S[hang.kind] + 12
        line = job.wait_for(lambda told: _is_verdict(told.text, hang), patience_s)
        ended_itself = line is None and job.process.poll() is not None
        if ending != "itself" and not ended_itself:
            time.sleep(1.5)
            job.end(ending)
        job.wait_for_end(killing=ending)
        told = list(job.told)
    after_s = None if line is None or not struck_ns else max(0.0, (line.at_ns - struck_ns) / 1e9)
    live = "" if line is None else _title(line.text)
    report = job.report
    others = job.report_again(), job.report_text(), job.last_screen()
    # Gloo may abort a job at once whose sizes do not fit: then nothing stood that could have been told.
    wrong = [] if ended_itself else [*_wrong_live(hang, after_s, live)]
    wrong += [*_wrong_final(hang, report, live), *_disagreeing(report, *others)]
    if not told and hang.kind != "end" and not ended_itself:
        wrong.append("the doctor said nothing at all")
    if not struck_ns:
        wrong.append(f"the fault did not come: {job.last_output()}")
    return Outcome(name=name, wrong=tuple(wrong), told_after_s=after_s, live=live, final=_verdict(report))


def run_healthy(name: str, script: str, folder: Path, python: str = sys.executable) -> Outcome:
    """Run a job that goes on; what was said of it that should not have been."""
    job = _Job(folder, script, python)
    with job.running():
        job.wait_for_end(HEALTHY_WITHIN_S)
        told = [line.text for line in job.told]
    alarms = [text for text in told if text.startswith(("STALLED", "error:"))]
    wrong = [f"said {text}" for text in alarms]
    report = job.report
    if report.get("verdict", {}).get("state") == "broken":
        wrong.append(f"final: {_verdict(report)}")
    wrong += [
        f"final error {finding['code']}: {finding['title']}"
        for finding in report.get("findings", ())
        if finding["severity"] == "error"
    ]
    if not report:
        wrong.append("no report")
    waits = [text for text in told if "waited" in text and not text.startswith("warning")]
    if name in SAID and not any(SAID[name] in text for text in waits):
        wrong.append(f"did not say {SAID[name]!r} but {waits}")
    return Outcome(
        name=name, wrong=tuple(wrong), told_after_s=None, live=waits[0] if waits else "", final=_verdict(report)
    )


class _Job:
    """One ``ddpdoctor profile`` on a terminal of its own."""

    def __init__(
        self,
        folder: Path,
        script: str,
        python: str,
        ranks: int = 2,
        command: tuple[str, ...] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.told: list[Told] = []
        self._output = folder / "output"
        (folder / "train.py").write_text(script)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "launch.sh").write_text(TWO_OF_THREE.replace("FREE", str(port)).replace("python", python))
        command = tuple(python if word == sys.executable else word for word in command)
        launch = ("--", *command) if command else ("--python", python, "--nproc", str(ranks), "train.py")
        self._words = [
            *(sys.executable, "-m", "ddpdoctor", "profile", "--no-tui", "--run-dir", str(folder / "run")),
            *("--output-format", "json", "-o", str(folder / "report.json"), *launch),
        ]
        self._environment = marked(os.environ, folder) | {
            STAMPS_VARIABLE: str(folder / "stamps"),
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            **variables,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._terminal = -1
        self._news = threading.Condition()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The job, until its end or that of the context; nothing of it is left then."""
        self._terminal, inner = pty.openpty()
        self._stamps = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._stamps.bind(str(self.folder / "stamps"))
        # Not by a function that runs after a fork: rows may run beside each other, in threads.
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *self._words],
            cwd=self.folder,
            env=self._environment,
            stdin=inner,
            stdout=inner,
            stderr=inner,
        )
        os.close(inner)
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            kill_marked(self.folder)
            self._process.wait()
            reader.join(10)
            os.close(self._terminal)
            self._stamps.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """ddpdoctor."""
        assert self._process is not None
        return self._process

    @property
    def report(self) -> dict[str, Any]:
        """The report at the end; empty when there is none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def report_again(self) -> dict[str, Any]:
        """What ``ddpdoctor report RUN`` says afterwards."""
        done = self._doctor("report", str(self.folder / "run"), "--output-format", "json")
        try:
            found: dict[str, Any] = json.loads(done)
        except ValueError:
            return {}
        return found

    def report_text(self) -> str:
        """The same for people."""
        return self._doctor("report", str(self.folder / "run"))

    def last_output(self) -> str:
        """The end of what was written on the terminal, in one line."""
        return " | ".join(self._output.read_text(errors="replace").split("\n")[-12:])

    def last_screen(self) -> str:
        """The overview as it stood on the screen at the end, on a terminal that breaks no line."""
        try:
            snapshot = final_snapshot(self.folder / "run")
        except DdpDoctorError as error:
            return error.message
        painting = paint_screen(View(snapshot=snapshot, page="overview"), 2000, 60)
        return "\n".join("".join(cell.text for cell in cells) for cells in painting.lines)

    def _doctor(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ddpdoctor", *words],
            cwd=self.folder,
            env=self._environment | {"COLUMNS": "400"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    def wait_for_fault(self) -> int:
        """When the fault struck, on the clock of the lines; 0 when it did not."""
        deadline = time.monotonic() + START_WITHIN_S
        self._stamps.settimeout(0.5)
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                return int(self._stamps.recv(64))
            except TimeoutError:
                continue
        return 0

    def wait_for(self, wanted: Any, seconds: float) -> Told | None:
        """The first line that is wanted; None when the job ends or the time is over before."""
        deadline, seen = time.monotonic() + seconds, 0
        while True:
            with self._news:
                lines, seen = self.told[seen:], len(self.told)
                found = next((line for line in lines if wanted(line)), None)
                if found is not None or time.monotonic() > deadline or self.process.poll() is not None:
                    return found
                if len(self.told) == seen:
                    self._news.wait(0.2)

    def end(self, ending: Ending) -> None:
        """End the job in one of the ways in which jobs are ended."""
        if ending == "ctrl-c":
            os.write(self._terminal, b"\x03")
        elif ending == "term":
            self.process.send_signal(signal.SIGTERM)
        else:
            below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
            direct = psutil.Process(self.process.pid).children() if below else []
            for process in direct if ending == "launcher" else below:
                try:
                    process.send_signal(signal.SIGTERM if ending == "launcher" else signal.SIGKILL)
                except psutil.Error:
                    continue

    def wait_for_end(self, seconds: float = ENDS_WITHIN_S, *, killing: str = "") -> None:
        """Wait until ddpdoctor has ended; what a stopped launcher leaves is killed after a while."""
        try:
            self.process.wait(seconds / 4 if killing else seconds)
        except subprocess.TimeoutExpired:
            if killing:
                # As a user whose first Ctrl-C did not do.
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    return

    def _read(self) -> None:
        rest = b""
        with self._output.open("wb") as output:
            while True:
                try:
                    data = os.read(self._terminal, 1 << 16)
                except OSError:
                    return
                if not data:
                    return
                now_ns = time.monotonic_ns()
                output.write(data)
                output.flush()
                *lines, rest = (rest + data).split(b"\n")
                with self._news:
                    for line in lines:
                        said = _SAID.match(line.decode(errors="replace"))
                        if said is not None:
                            self.told.append(Told(at_ns=now_ns, text=said["text"]))
                    self._news.notify_all()


def _is_verdict(text: str, hang: Hang) -> bool:
    """Tell whether a line tells a hang of this kind."""
    if hang.kind == "busy":
        return text.startswith(("waiting: ", "STALLED: ", "error: ", "warning: hang"))
    if hang.kind == "loop":
        return "endless loop" in text or text.startswith(("STALLED: ", "error: "))
    return text.startswith(("STALLED: ", "error: "))


def _title(text: str) -> str:
    found = _FINDING.match(text)
    title = found["title"] if found is not None else text.partition(": ")[2]
    return title.removesuffix(" (it may recover)")


def _wrong_live(hang: Hang, after_s: float | None, live: str) -> Iterator[str]:
    if hang.kind == "end":
        return
    if after_s is None or not live:
        yield "not told while it stood"
    elif after_s > MOST_S[hang.kind]:
        yield f"told only after {after_s:.1f} s"


def _wrong_final(hang: Hang, report: dict[str, Any], live: str) -> Iterator[str]:
    verdict = report.get("verdict")
    if verdict is None:
        yield "no report"
        return
    if hang.kind != "busy" and verdict["state"] != "broken":
        yield f"ends as {verdict['state']}"
    if verdict["state"] == "healthy":
        yield "is called healthy"
    if verdict["code"] not in hang.codes:
        yield f"code {verdict['code'] or 'none'}, not {' or '.join(hang.codes)}"
    if hang.says not in verdict["text"]:
        yield f"does not say {hang.says!r}"
    one, other = _plain(live), _plain(verdict["text"])
    if live and hang.kind not in ("busy", "end") and not (one.startswith(other) or other.startswith(one)):
        yield f"live was: {live}"
    finding = next((one for one in report["findings"] if one["code"] == verdict["code"]), None)
    if finding is None:
        yield "no finding for its verdict"
        return
    if tuple(finding["ranks"]) not in hang.culprits:
        yield f"names ranks {finding['ranks']}"
    wanted = {number for number, line in enumerate(hang.script.splitlines(), 1) if line.endswith("# here")}
    places = {location["line"] for location in finding["locations"]}
    if wanted and not wanted & places:
        yield f"names lines {sorted(places)}, not {sorted(wanted)}"


def _disagreeing(report: dict[str, Any], again: dict[str, Any], text: str, screen: str) -> Iterator[str]:
    """How the screen's last page and ``ddpdoctor report`` differ from the report at the end."""
    if report and again.get("verdict") != report.get("verdict"):
        yield f"the report says later: {_verdict(again)}"
    elif report and report["verdict"]["text"] not in " ".join(text.split()):
        yield f"the text says: {text[:200]}"
    if report:
        state, said = report["verdict"]["state"].upper(), report["verdict"]["text"]
        if f"{state}  {said[:1].upper()}{said[1:]}" not in screen:
            yield f"the screen says: {screen[:600]}"


def _plain(title: str) -> str:
    """A title without its durations, which grow."""
    return re.sub(r"\b\d[\d.,]* ?(ms|s|min|h)\b", "T", title)


def _verdict(report: dict[str, Any]) -> str:
    verdict = report.get("verdict")
    return "no report" if not verdict else f"{verdict['state'].upper()} {verdict['code']}: {verdict['text']}"
