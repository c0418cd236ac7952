"""Results of tests in JUnit's format, of any runner.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import os
import stat
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

MOST_BYTES = 32 << 20
RANK = ("failed", "skipped", "passed")
"""Of several results of one name, the first of these counts."""


def results_in(folder: str) -> dict[str, str]:
    """Name of each test → passed, failed or skipped, from all .xml files. A file that is no JUnit
    counts as if it were not there, and so do the tests that it would have had."""
    found: dict[str, str] = {}
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return found
    for name in sorted(os.listdir(folder)):
        if name.endswith(".xml"):
            for test, result in _read(os.path.join(folder, name)):
                if test not in found or RANK.index(result) < RANK.index(found[test]):
                    found[test] = result
    return found


def _read(path: str) -> list[tuple[str, str]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
            return []
        text = file.read(MOST_BYTES)
    # Entities that grow. UTF-16 and UTF-32, which have zeros, would spell them in other bytes.
    if b"\0" in text or b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        return []
    try:
        return list(_cases(ElementTree.fromstring(text), ()))
    except (ElementTree.ParseError, ValueError, LookupError, RecursionError):
        return []  # the last three: encodings that there are not, and suites in suites


def _cases(element: ElementTree.Element, suites: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The root's name is the runner's, or the machine's: it tells tests apart nowhere."""
    for child in element:
        if child.tag == "testsuite":
            yield from _cases(child, (*suites, child.get("name", "")))
        elif child.tag == "testcase":
            parts = (*suites, child.get("classname", ""), child.get("name", ""))
            tags = {one.tag for one in child}
            # ctest says it in an attribute.
            status = child.get("status", "run")
            if tags & {"failure", "error"} or status == "fail":
                result = "failed"
            elif "skipped" in tags or status in ("notrun", "disabled"):
                result = "skipped"
            else:
                result = "passed"
            yield "::".join(part for part in parts if part), result
