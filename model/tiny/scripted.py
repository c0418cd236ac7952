"""Scripted conversations in environments, by whoever a recipe names for them
(`data.sources[].environment.demonstrations`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from keel.configs.schema import Config, ConfigError, SourceConfig
from keel.model.tiny.conversations import Demonstration

SHOWS = ("tools", "worked", "hasty")
"""Of a demonstration."""
MOST = 100
"""Times as many as are asked for: what makes more of them does not end."""


def demonstrate(config: Config, source: str, count: int) -> Sequence[Demonstration]:
    """About `count` conversations in the environment of a source. Raises ConfigError."""
    (of,) = (each for each in config.data.sources if each.name == source)
    make = demonstrator(of)
    # A copy: episodes get these arguments, too.
    arguments = deepcopy(dict(of.environment.arguments))
    most_s = config.model.tiny.cold_start.max_seconds
    with _blamed(of):
        made = partial(make, count, seed=config.run.seed, arguments=arguments)
        shown = _within(most_s, lambda: list(islice(made(), MOST * count + 1)))
        if len(shown) > MOST * count:
            raise ValueError(f"it made more than {MOST * count}, and {count} were asked for")
        for one in shown:
            if lacking := [name for name in SHOWS if not hasattr(one, name)]:
                raise TypeError(f"{one!r} has no {' and no '.join(lacking)}")
    return shown


def _within(most_s: float, make: Callable[[], list[Any]]) -> list[Any]:
    """What `make` returns. Raises TimeoutError, and leaves it to a thread that ends with this
    process, where it takes longer."""
    done: Future[list[Any]] = Future()

    def run() -> None:
        try:
            done.set_result(make())
        except BaseException as error:  # raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="demonstrations", daemon=True).start()
    try:
        return done.result(most_s)
    except TimeoutError:
        if done.done():  # its own
            raise
        raise TimeoutError(
            f"it made no conversations within model.tiny.cold_start.max_seconds = {most_s:g}; "
            "a script must end, and so must the environment that it is played in"
        ) from None


def demonstrator(source: SourceConfig) -> Callable[..., Any]:
    """What makes them. Its module is looked for where the environment's is. Raises ConfigError."""
    _found_beside(source)
    module, _, name = source.environment.demonstrations.partition(":")
    with _blamed(source):
        _check_file(source, find_spec(module))
        return getattr(import_module(module), name)


def digest_of(source: SourceConfig) -> str:
    """Of the file that holds it, and of the environment's where that is in its folder; "" for
    Keel's own, and where there is none. Raises ConfigError."""
    _found_beside(source)
    module = source.environment.demonstrations.partition(":")[0]
    with _blamed(source):
        spec = None if module.startswith("keel.") else find_spec(module)
        _check_file(source, spec)
    if not (spec and spec.has_location and spec.origin):
        return ""
    target = source.environment.target.rpartition(":")[0]
    played = Path(target if target.endswith(".py") else f"{target.replace('.', '/')}.py")
    played = Path(source.environment.folder).absolute() / played
    read = [Path(spec.origin).read_bytes(), played.read_bytes() if played.is_file() else b""]
    return sha256(b"\0".join(read)).hexdigest()


def _found_beside(source: SourceConfig) -> None:
    """Import from the environment's folder, too, unless the script is Keel's own: the folder may be
    a stranger's (`keel replay`)."""
    if source.environment.demonstrations.startswith("keel."):
        return
    if (folder := str(Path(source.environment.folder).absolute())) not in sys.path:
        sys.path.append(folder)  # after everything: a file called `json.py` must not replace json


def _check_file(source: SourceConfig, spec: ModuleSpec | None) -> None:
    """Of the environment's folder and not another one of its name, where there is one."""
    module = source.environment.demonstrations.partition(":")[0]
    own = Path(source.environment.folder).absolute() / f"{module.replace('.', '/')}.py"
    found = Path(spec.origin or "") if spec else own
    if own.is_file() and found.resolve() != own.resolve():
        raise ImportError(f"{module} is {found} in this process, and not {own}; rename the file")


@contextmanager
def _blamed(source: SourceConfig) -> Generator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ConfigError(
            f"data.sources[{source.name}].environment.demonstrations = "
            f"{source.environment.demonstrations!r}: {type(error).__name__}: {error}"
        ) from error
