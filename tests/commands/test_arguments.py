"""What `keel.train` refuses to be handed, and what it says then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.commands import api
from keel.configs.schema import ConfigError

ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]


async def waits(step: int, numbers: Any) -> None:
    """No callback: nobody awaits it."""


def yields(step: int, numbers: Any) -> Any:
    """No callback: what it returns is true, which ends the run."""
    yield 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": []}, "there is none"),
        ({"prompts": "Say hi."}, "must be rows, is one str"),
        ({"prompts": [3]}, "row 1 is a int"),
        ({"prompts": "Say hi."}, "give a list of them, .* A file of prompts is a source of the re"),
        ({"holdout": 3}, "is for prompts"),
        ({"holdout": -1}, r"holdout=-1\): must be a whole number, 0 or more: how many of the pro"),
        ({"prompts": ROWS, "holdout": -1}, r"train\(holdout=-1\): must be a whole number, 0 or m"),
        ({"prompts": ROWS, "holdout": 0.5}, r"train\(holdout=0\.5\): must be a whole number"),
        ({"prompts": ROWS, "holdout": "3"}, r"train\(holdout='3'\): must be a whole number"),
        ({"prompts": ROWS, "holdout": True}, r"train\(holdout=True\): must be a whole number"),
        ({"prompts": ROWS, "holdout": None}, r"train\(holdout=None\): must be a whole number"),
        ({"prompts": ROWS, "holdout": ROWS * 9}, r"train\(holdout=\[.{58}…\): must be a whole nu"),
        ({"recipe": ""}, r"recipe=''\): must be a file, a name or a mapping"),
        ({"knobs": "run.steps=3"}, r"must be a list of texts, .*: \[\"run\.steps=20\"\], or \{"),
        ({"knobs": None}, r"knobs=None\): must be a list of texts, or a mapping"),
        ({"knobs": [("run.steps", 3)]}, "must be a list of texts"),
        ({"knobs": {"run.steps": object()}}, r"knobs=run\.steps\): a object is no value"),
        ({"prompts": ["Hi.", "a\ud800"]}, "row 2 holds half of a surrogate pair"),
        ({"prompts": [{"prompt": "a", (1, 2): 3}]}, "row 1: keys must be"),
        ({"rewards": "correct"}, r"rewards='correct'\): must be a function"),
        ({"rewards": 3}, "must be a function"),
        (
            {"rewards": []},
            r"rewards=\[\]\): names none; leave it out for those of the recipe",
        ),
        ({"rewards": {}}, r"rewards=\{\}\): names none"),
        ({"rewards": [None]}, "None is no function and no name of a part; give a function, a lis"),
        ({"rewards": {1: 0.5}}, "1 is no function and no name of a part"),
        ({"rewards": {"correct": "1"}}, "weight of correct is '1': must be a finite number, such"),
        ({"rewards": {"correct": math.nan}}, "weight of correct is nan: must be a finite number"),
        ({"rewards": {yields: True}}, "the weight of yields is True: must be a finite number"),
        ({"rewards": {"mine": yields}}, "of mine is <fun.*The function stands before its weight"),
        ({"callbacks": 3}, "callbacks=3"),
        ({"callbacks": [waits]}, "must be a plain function"),
        ({"callbacks": lambda metrics: None}, "a step and its metrics .too many positional"),
        ({"callbacks": [lambda step, metrics, *, view: None]}, "argument: 'view'.; it must be"),
        ({"callbacks": [dict]}, r"is a class; .*def callback\(step, metrics\)"),
        ({"callbacks": [yields]}, "is a generator, and"),
        ({"rewards": [lambda prompt, trajectory: 1.0]}, "<lambda>: has no name"),
    ],
)
def test_what_cannot_be_handed_over_is_said(
    given: Mapping[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.main, "train", lambda *_, **__: pytest.fail("it is a run"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        keel.train(**{"recipe": "quickstart", "knobs": [f"run.dir={tmp_path}"], **given})
    assert not (tmp_path / "passed").exists(), "refused before anything is written"
