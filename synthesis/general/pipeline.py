"""`family: general` of `keel synthesize`.

tasks/NAME/   finished environments (keel.agents.environments.general.author_code)
making/       unfinished ones, started again by the next start
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig, slug
from keel.rl.seeds import seed_of
from keel.synthesis.author import Author
from keel.synthesis.general.environment_writer import EnvironmentWriter
from keel.synthesis.general.sandboxes import GeneralSandboxes
from keel.synthesis.general.search import search_of
from keel.synthesis.ledger import Rejected


class GeneralPipeline:
    """Makes general tasks. Implements `keel.commands.synthesize.Pipeline` with a category and a
    number as the key."""

    def __init__(
        self,
        config: GeneralConfig,
        folder: Path,
        *,
        author: Author,
        reference: Author,
        seed: int,
    ) -> None:
        """Prepare the pipeline. The attempts of `reference` measure the difficulty of a task.
        Raises ConfigError if a setting cannot be used."""
        if not config.categories:
            raise ConfigError("general.categories is empty. Name the topics of the tasks")
        self.keys: Sequence[str] = [
            f"{slug(category)}-{number}"
            for number in range(config.per_category)
            for category in config.categories
        ]
        self._category = {slug(category): category for category in config.categories}
        self._config, self._author, self._seed = config, author, seed
        self._reference = reference
        self._search = search_of(config.documents)
        self._done = folder.absolute() / "tasks"
        self._rooms = GeneralSandboxes(folder.absolute() / "making", config)

    async def __aenter__(self) -> Self:
        self._done.mkdir(parents=True, exist_ok=True)
        await self._rooms.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._rooms.__aexit__(*error)

    async def make(self, key: str) -> Sequence[Rejected] | None:
        """Make one task. See `keel.commands.synthesize.Make`."""
        done, path = self._done / key, self._rooms.making / key
        if done.exists():  # an earlier start ended before it wrote the ledger
            return None
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        path.chmod(0o755)
        name, _, number = key.rpartition("-")
        making = EnvironmentWriter(
            self._rooms,
            path,
            category=self._category[name],
            number=int(number),
            author=self._author,
            reference=self._reference,
            search=self._search,
            seed=seed_of(self._seed, key),
        )
        try:
            await making.run()
            os.replace(path, done)
        except Rejected as refused:
            refused.drafts = making.drafts
            raise
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return making.drafts
