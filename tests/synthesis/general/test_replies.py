"""Author replies, and wrong answers derived from right ones."""

from __future__ import annotations

import pytest

from keel.synthesis.author import AuthorReply
from keel.synthesis.general.gates import MAX_MUTATIONS, mutations, plausible
from keel.synthesis.general.pipeline import renamed, sections
from keel.synthesis.ledger import Rejected

REPLY = """\
Here is a harder one.

## question
Which is it? A list.

### solve.py
```python
# tools
def solve(tools):
    return [1]
```

## verify:
~~~
def verify(answer, database):
    return answer == [1]
~~~
"""


def test_sections_of_a_reply() -> None:
    parts = sections(AuthorReply(content=REPLY), ("question", "solve", "verify"), ("tools",))
    assert list(parts) == ["question", "solve", "verify"]
    assert parts["question"] == "Which is it? A list.\n"
    assert renamed(parts["solve"], "solve", 2).startswith("# tools\ndef solve_2(tools):")
    assert parts["verify"].endswith("== [1]\n")
    capitals = REPLY.replace("## verify", "## Verify")
    assert sections(AuthorReply(content=capitals), ("question", "solve", "verify")) == parts
    for cut, text in ((True, REPLY), (False, REPLY.replace("verify:", "proof"))):
        with pytest.raises(Rejected):
            sections(AuthorReply(content=text, cut=cut), ("question", "solve", "verify"))
    with pytest.raises(Rejected):
        renamed("def solve(tools):\n    pass\ndef solve(tools):\n    pass", "solve", 0)


def test_mutations_reach_every_part() -> None:
    answer = {"days": [{"hotel": "Inn", "price": 3}, {"hotel": "House", "price": 2.5}], "ok": True}
    items = mutations(answer)
    labels = [name for name, _ in items]
    assert len(labels) == len(set(labels)) and all(other != answer for _, other in items)
    for part in (
        "['days'][0]['hotel'] = ''",
        "['days'][1]['price'] = -3.5",
        "['days'][0] without 'price'",
        "['days'] without entry 1",
        "['days'] with an entry twice",
        "['ok'] = False",
        "the answer without 'ok'",
    ):
        assert part in labels
    assert answer["days"][0] == {"hotel": "Inn", "price": 3}  # none of it was changed
    assert len(mutations({"long": list(range(500))})) == MAX_MUTATIONS
    others = plausible(answer, ["Inn", "Park"], 1)
    assert others == plausible(answer, ["Inn", "Park"], 1) and answer not in others
    assert {one["days"][0]["hotel"] for one in others} == {"Inn", "Park"}
