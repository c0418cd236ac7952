"""The page of supported models matches `keel check`."""

from __future__ import annotations

import json
from pathlib import Path

from keel.model.config_file import check_config
from keel.trainer.placement.supported import FAMILIES, PAGE, config_of, page

DOCS = Path(__file__).parents[3] / "docs"


def test_models_page_is_up_to_date() -> None:
    assert (DOCS / PAGE).read_text("utf-8") == page(), (
        "python -m keel.trainer.placement.supported docs rewrites it"
    )


def test_every_family_passes_the_config_check() -> None:
    for family in FAMILIES:
        content = json.loads(json.dumps(config_of(family).to_dict(), default=str))
        check_config(family.model_type, content)
