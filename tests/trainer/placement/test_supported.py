"""The page of models says what `keel check` does."""

from __future__ import annotations

import json
from pathlib import Path

from keel.model.config_file import check_config
from keel.trainer.placement.supported import FAMILIES, PAGE, config_of, page

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_models_is_generated() -> None:
    assert (DOCS / PAGE).read_text("utf-8") == page(), (
        "python -m keel.trainer.placement.supported docs writes it anew"
    )


def test_no_family_is_out_of_bounds() -> None:
    for family in FAMILIES:
        content = json.loads(json.dumps(config_of(family).to_dict(), default=str))
        check_config(family.model_type, content)
