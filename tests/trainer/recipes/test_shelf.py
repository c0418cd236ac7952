"""Each recipe of the shelf fits the machine in its name, and says what `keel check` does."""

from __future__ import annotations

import re

import pytest

from benchmarks.training.shelf import PAGE, SHAPES, commented, entry, facts, files, tabled
from keel.configs.load import load_config
from keel.trainer.planning.placement import place

SHELF = files()
AGAIN = "python -m benchmarks.training.shelf writes what the planner says now"
FIGURE = re.compile(r"\d+\.\d+(?= (?:s|GiB)\b)")


def same(text: str, now: str) -> bool:
    """But for figures, which may have moved a little."""
    pairs = zip(FIGURE.findall(text), FIGURE.findall(now), strict=True)
    close = all(float(old) == pytest.approx(float(new), rel=0.05) for old, new in pairs)
    return close and FIGURE.sub("", text) == FIGURE.sub("", now)


@pytest.mark.parametrize("name", SHELF)
def test_it_fits_and_its_figures_are_the_plans(name: str) -> None:
    found = entry(name)
    config, gib = found.config, found.gib
    assert (config.run.dir, config.run.gpus_per_node, config.run.gpu_gib) == (
        f"runs/{name}",
        found.gpus,
        gib,
    )
    assert place(config, found.hardware.idle).shared
    # Not to the last byte: cards have a little less than their name says.
    both = (found.engine_gib, found.rank_gib)
    assert (max(both) if config.rollout.sleep else sum(both)) < 0.96 * gib
    text = SHELF[name].read_text()
    assert same(text, commented(text, found)), AGAIN


def test_the_page_has_the_same_figures() -> None:
    page = PAGE.read_text()
    assert same(page, tabled(page, [entry(name).row() for name in SHELF])), AGAIN


def test_the_shelf_has_the_common_sizes_in_their_own_shapes() -> None:
    assert len(SHELF) >= 7
    assert {load_config(name).model.path for name in SHELF} == set(SHAPES)
    for model, (_, parameters) in SHAPES.items():
        assert facts(model).parameters == pytest.approx(parameters, rel=2e-3), model
