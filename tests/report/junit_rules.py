"""What CI servers expect of JUnit XML, after the schema of Jenkins' xUnit plugin.

https://github.com/jenkinsci/xunit-plugin/blob/master/src/main/resources/org/jenkinsci/plugins/xunit/types/model/xsd/junit-10.xsd
"""

from __future__ import annotations

from xml.etree import ElementTree

_CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testcase"},
    "testcase": {"failure", "skipped", "system-out"},
    "failure": set[str](),
    "skipped": set[str](),
    "system-out": set[str](),
}
_ATTRIBUTES = {
    "testsuites": ({"name", "tests", "failures"}, {"errors", "time"}),
    "testsuite": ({"name", "tests", "failures", "errors", "skipped"}, {"time", "file"}),
    "testcase": ({"name", "classname", "time"}, set[str]()),
    "failure": ({"message", "type"}, set[str]()),
    "skipped": ({"message"}, set[str]()),
    "system-out": (set[str](), set[str]()),
}


def assert_junit(text: str) -> ElementTree.Element:
    """Fail unless the document is well formed, its elements are where they belong, and its numbers add up."""
    root = ElementTree.fromstring(text.encode("utf-8"))
    assert root.tag == "testsuites"
    for element in root.iter():
        assert {child.tag for child in element} <= _CHILDREN[element.tag]
        required, optional = _ATTRIBUTES[element.tag]
        assert required <= set(element.attrib) <= required | optional
        if element.tag.startswith("testsuite"):
            for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
                if attribute in element.attrib:
                    assert int(element.attrib[attribute]) == len(list(element.iter(tag)))
        if element.tag == "testcase":
            assert sum(child.tag in ("failure", "skipped") for child in element) <= 1
        if "time" in element.attrib:
            assert float(element.attrib["time"]) >= 0
    names = [(case.attrib["classname"], case.attrib["name"]) for case in root.iter("testcase")]
    assert len(names) >= 1
    return root
