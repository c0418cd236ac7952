"""Internationalised addresses: the formats `iri` and `iri-reference` of a JSON schema.

jsonschema checks them with a package that builds a parser when it is imported. That takes seconds,
and every process of Ray imports jsonschema.
"""

from __future__ import annotations

import re

from rfc3986_validator import validate_rfc3986  # pyright: ignore

_PLANES = "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
_UCSCHAR = re.compile(f"[\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef{_PLANES}\U000e1000-\U000efffd]")
_IPRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
"""Characters beyond ASCII that may stand in an IRI, and in its query alone. RFC 3987, 2.2."""


def is_iri(value: object) -> bool:
    """Whether a text is an IRI. A format says nothing of other values: they are right."""
    return not isinstance(value, str) or _follows(value, "URI")


def is_iri_reference(value: object) -> bool:
    """The same of an IRI or a relative reference."""
    return not isinstance(value, str) or _follows(value, "URI_reference")


def _follows(text: str, rule: str) -> bool:
    """An IRI is what becomes a URI when what is beyond ASCII is percent-encoded (RFC 3987, 3.1):
    the two grammars allow `ucschar` and `pct-encoded` in the same places."""
    rest, hash_mark, fragment = text.partition("#")
    path, question_mark, query = rest.partition("?")
    given = path + question_mark + _IPRIVATE.sub("%20", query) + hash_mark + fragment
    uri = _UCSCHAR.sub("%20", given)
    return not uri.endswith("\n") and bool(validate_rfc3986(uri, rule))
