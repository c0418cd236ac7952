"""Scripted conversations in environments, by whoever a recipe names for them
(`data.sources[].environment.demonstrations`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from keel.configs.schema import Config, ConfigError, SourceConfig
from keel.model.embedded.conversations import Demonstration

SHOWS = ("tools", "worked", "hasty")
"""Of a demonstration."""


def demonstrate(config: Config, source: str, count: int) -> Sequence[Demonstration]:
    """About `count` conversations in the environment of a source. Raises ConfigError."""
    (of,) = (each for each in config.data.sources if each.name == source)
    make = demonstrator(of)
    with _blamed(of):
        shown = list(make(count, seed=config.run.seed, arguments=of.environment.arguments))
        for one in shown:
            if lacking := [name for name in SHOWS if not hasattr(one, name)]:
                raise TypeError(f"{one!r} has no {' and no '.join(lacking)}")
    return shown


def demonstrator(source: SourceConfig) -> Callable[..., Any]:
    """What makes them. Its module is looked for where the environment's is. Raises ConfigError."""
    _found_beside(source)
    module, _, name = source.environment.demonstrations.partition(":")
    with _blamed(source):
        return getattr(import_module(module), name)


def digest_of(source: SourceConfig) -> str:
    """Of the file that holds it; "" for Keel's own, and where there is none. Raises ConfigError."""
    _found_beside(source)
    module = source.environment.demonstrations.partition(":")[0]
    with _blamed(source):
        spec = None if module.startswith("keel.") else find_spec(module)
    file = spec.origin if spec and spec.has_location else None
    return sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _found_beside(source: SourceConfig) -> None:
    if (folder := str(Path(source.environment.folder).absolute())) not in sys.path:
        sys.path.append(folder)  # after everything: a file called `json.py` must not replace json


@contextmanager
def _blamed(source: SourceConfig) -> Generator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ConfigError(
            f"data.sources[{source.name}].environment.demonstrations = "
            f"{source.environment.demonstrations!r}: {type(error).__name__}: {error}"
        ) from error
