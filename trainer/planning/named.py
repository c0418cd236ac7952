"""Files, models and rewards that a recipe names and that are not there: said before torch loads."""

from __future__ import annotations

from pathlib import Path

from keel.configs.paths import data_path
from keel.configs.schema import Config, ConfigError
from keel.data.conversations.files import read_rows, read_trajectories
from keel.data.jsonl import load_jsonl
from keel.model.source import check_path, is_hub_name
from keel.rewards.compose import check_weights
from keel.trainer.run.trackers.known import check_trackers

SOON = 2**22
"""Bytes of a file that is read here already: a tenth of a second."""


def check_named(config: Config, command: str) -> None:
    """Raises ConfigError, in the words of whoever reads them later. What takes longer to know (the
    hub's models, the lines of a large file, functions of one's own) is found there alone."""
    supervised = command in ("sft", "pretrain")
    if supervised or command in ("train", "check"):
        check_trackers(config.run.trackers)
    sampled = () if supervised else config.data.sources
    learned = config.sft.sources if supervised or command == "check" else ()
    for source in sampled:
        if source.source == "jsonl" and _soon_read(data_path(source.path)):
            load_jsonl(source)
    for source in learned:
        if source.source == "jsonl" and _soon_read(data_path(source.path)):
            read_rows(source)
        if source.source == "trajectories" and not data_path(source.path).exists():
            read_trajectories(source, tokenizer="")
    parts = {
        domain: {part: weight for part, weight in weights.items() if "." not in part}
        for domain, weights in config.data.rewards_by_domain.items()
    }
    try:
        check_weights({} if supervised else parts, config.data.domains_with_environments)
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error
    model = config.model.path
    if model != "embedded" and not config.endpoint.base_url:
        for path in (model, config.model.tokenizer or model):
            if not is_hub_name(path):
                check_path(path)


def _soon_read(file: Path) -> bool:
    """Whether to read it, or to say that it is not there."""
    return not file.is_file() or file.stat().st_size <= SOON
