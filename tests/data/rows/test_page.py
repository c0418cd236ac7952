"""The recipes of docs/data.md are ones."""

from __future__ import annotations

import re
from pathlib import Path

from keel.configs.load import load_config

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_every_recipe_of_the_page_is_read(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    for number, block in enumerate(blocks):
        recipe = tmp_path / f"{number}.yaml"
        recipe.write_text(block)
        assert load_config(recipe).data.sources
