"""JUnit XML, as CI servers read it: one suite a file, one test case a finding, and a suite of the checks.

A finding at or above ``--fail-on`` is a failure. A check that found nothing has passed; one that could not know, or was
not asked to, is skipped with the reason.
"""

from __future__ import annotations

from xml.etree import ElementTree

from ddpdoctor.check import OutcomeState
from ddpdoctor.examination import Examination
from ddpdoctor.finding import Finding, shown_path
from ddpdoctor.report.finding_fields import stated
from ddpdoctor.report.formats.concise import leaves_doubt, why_incomplete
from ddpdoctor.report.streams import one_line, visible


def render(examination: Examination) -> str:
    """Render the document."""
    suites = ElementTree.Element("testsuites", name="ddpdoctor")
    for file in dict.fromkeys(_file(finding, examination) for finding in examination.findings):
        suite = ElementTree.SubElement(suites, "testsuite", name=file, file=file)
        for finding in examination.findings:
            if _file(finding, examination) == file:
                _add_finding(suite, finding, examination, file)
    checks = ElementTree.SubElement(suites, "testsuite", name=one_line(f"checks of {examination.target}"))
    for outcome in examination.outcomes:
        if outcome.state is OutcomeState.FINDINGS:
            continue
        case = _case(checks, f"{outcome.code} {outcome.name}", one_line(examination.target))
        if outcome.state is not OutcomeState.PASSED:
            reason = outcome.reason or "the script has nothing of what this check looks at"
            ElementTree.SubElement(case, "skipped", message=one_line(reason))
    if leaves_doubt(examination):
        case = _case(checks, "everything was examined", one_line(examination.target))
        ElementTree.SubElement(case, "skipped", message=one_line(f"inconclusive: {why_incomplete(examination)}"))
    seconds = examination.source.seconds + examination.rehearsal.seconds
    for suite in suites:
        _count(suite)
    _count(suites)
    for element in (suites, checks):
        element.set("time", f"{seconds:.3f}")
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _file(finding: Finding, examination: Examination) -> str:
    place = finding.location
    return one_line(examination.target if place is None else shown_path(place.file, examination.root))


def _case(suite: ElementTree.Element, name: str, class_name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", name=one_line(name), classname=class_name, time="0.000")


def _add_finding(suite: ElementTree.Element, finding: Finding, examination: Examination, file: str) -> None:
    line = "" if finding.location is None else f":{finding.location.line}"
    case = _case(suite, f"{finding.code} {finding.name} {file}{line}", file)
    facts = [f"- {fact.text} ({fact.basis})" for fact in finding.evidence]
    text = visible(
        "\n".join(
            [
                f"{file}{line}: {stated(finding)}",
                *facts,
                f"do: {finding.remedy}",
                f"more: ddpdoctor explain {finding.code}",
            ]
        )
    )
    if finding.severity.at_least(examination.fail_on):
        failure = ElementTree.SubElement(
            case, "failure", type=finding.severity.value, message=f"{stated(finding)} ({file}{line})"
        )
        failure.text = text
    else:
        ElementTree.SubElement(case, "system-out").text = text


def _count(element: ElementTree.Element) -> None:
    element.set("tests", str(len(list(element.iter("testcase")))))
    element.set("failures", str(len(list(element.iter("failure")))))
    element.set("errors", "0")
    if element.tag == "testsuite":
        # The root has no such attribute in the schema of Jenkins' xUnit plugin.
        element.set("skipped", str(len(list(element.iter("skipped")))))
