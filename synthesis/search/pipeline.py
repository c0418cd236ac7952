"""`family: search` of `keel synthesize`: create search questions, and select existing prompts that
search helps to answer.

A question has a rule that checks the answer, and a prompt has a rubric.

tasks.jsonl   accepted tasks, for `source: jsonl` with the search environment
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self

import regex

from keel.agents.environments.search.documents import (
    Library,
    SearchIndex,
    ensure_index,
    letters_and_digits,
)
from keel.agents.environments.search.environment import load_library
from keel.configs.sections.base import ConfigError
from keel.configs.synthesis import SearchTasksConfig
from keel.rewards.judge.specs import Rubric
from keel.rl.turns import seed_of
from keel.synthesis.author import Author
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.question import (
    AcceptedQuestions,
    Answerer,
    Workspace,
    accepts,
    answer_rule,
    collect_answers,
    measure_gain,
    verify_answers,
    write_draft,
)


def _rubric_of(task: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: task[name] for name in ("criteria", "reference") if name in task}
    return {"kind": "rubric", **fields}


class SearchPipeline:
    """Creates search tasks."""

    def __init__(
        self,
        config: SearchTasksConfig,
        author: Author,
        another: Callable[[Mapping[str, Any]], Author],
        folder: Path,
        *,
        seed: int,
    ) -> None:
        """Set up the pipeline. `another` is a factory for authors with different settings. Raises
        ValueError if those settings are invalid."""
        self._config, self._author, self._folder, self._seed = config, author, folder, seed
        self._answerers = [
            Answerer(
                author=another(one.author) if one.author else author,
                system=one.system,
                tools=one.tools,
            )
            for one in config.answerers
        ]
        self._verifier = another(config.verifier) if config.verifier else author
        self._kept, self._written = AcceptedQuestions(), set[str]()
        self._starts: dict[str, tuple[str, str]] = {}
        self._prompts: dict[str, dict[str, Any]] = {}
        self.keys: Sequence[str] = ()

    async def __aenter__(self) -> Self:
        config = self._config
        where = "library" if config.library else "corpus"
        try:
            library: Library
            if config.library:
                library = load_library(config.library, config.options)
            else:
                index = Path(config.index).expanduser() if config.index else None
                path = ensure_index(Path(config.corpus), index, without=[self._file])
                library = SearchIndex(path)
        except Exception as error:  # a user's function raises anything
            raise ConfigError(f"search.{where} = {getattr(config, where)}: {error}") from error
        self._workspace = Workspace(library=library, config=config)
        self._starts = self._drawn(library)
        self._prompts = self._given_prompts()
        self.keys = [*self._starts, *self._prompts]
        self._read_accepted()
        return self

    async def __aexit__(self, *_: object) -> None:
        if isinstance(self._workspace.library, SearchIndex):
            self._workspace.library.close()

    async def make(self, key: str) -> None:
        if key in self._written:  # written, but not in the ledger
            return
        if key in self._prompts:
            line = await self._filtered(self._prompts[key])
        else:
            entity, language = self._starts[key]
            line = await self._question(entity, language, key)
        line["provenance"] |= {
            "authors": sorted({one.author.name for one in self._answerers} | {self._author.name}),
            "verifier": self._verifier.name,
        }
        # The drafted answer; the line may hold a pattern of all spellings.
        answer = line["provenance"].get("answer", "")
        documents = line["environment"]["evidence"]
        self._kept.check(line["prompt"], answer, documents)  # a concurrent task may have added it
        self._kept.add(line["prompt"], answer, documents)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": key, **line}, ensure_ascii=False) + "\n")
        self._written.add(key)

    async def _question(self, entity: str, language: str, key: str) -> dict[str, Any]:
        draft = await write_draft(self._workspace, self._author, entity, language, self._kept)
        rule = answer_rule(draft.spellings)
        taken = accepts(rule)
        if lost := [one for one in draft.spellings if not taken(one)]:
            raise Rejected("rule", f"the rule rejects the answer {lost[0]!r}")
        wrong = await collect_answers(self._workspace, self._answerers, draft.text, taken)
        await verify_answers(
            self._workspace,
            self._verifier,
            draft.text,
            draft.spellings,
            wrong,
            passes=self._config.passes,
            seed=str(seed_of(self._seed, "verify", key)),
        )
        return {
            "prompt": draft.text,
            **rule,
            "environment": {"evidence": draft.documents},
            "provenance": {
                "answer": draft.answer,
                "evidence": draft.evidence,
                "wrong_answers": wrong,
                "passes": self._config.passes,
                "entity": entity,
                "language": language,
            },
        }

    async def _filtered(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self._kept.check(task["prompt"], "", ())
        scores = await measure_gain(
            self._workspace, self._author, self._verifier, task["prompt"], _rubric_of(task)
        )
        return {**task, "environment": {"evidence": []}, "provenance": {"scores": scores}}

    def _given_prompts(self) -> dict[str, dict[str, Any]]:
        prompts: dict[str, dict[str, Any]] = {}
        name = self._config.prompts
        try:
            lines = Path(name).expanduser().read_bytes().split(b"\n") if name else []
            for line in filter(None, lines):
                task: dict[str, Any] = json.loads(line)
                if not isinstance(task["prompt"], str):
                    raise TypeError("`prompt` must be text")
                Rubric.parse(_rubric_of(task))
                task.pop("id", None)
                prompts[f"prompt/{hashlib.blake2b(line, digest_size=6).hexdigest()}"] = task
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            form = "each line must have `prompt` and `criteria`"
            raise ConfigError(f"search.prompts = {name}: {form}: {error!r}") from error
        return prompts

    @property
    def _file(self) -> Path:
        return self._folder / "tasks.jsonl"

    def _drawn(self, library: Library) -> dict[str, tuple[str, str]]:
        """Draw the entities to start from, each with the language of its question."""
        config = self._config
        entities: list[str] = []
        if config.entities:
            try:
                text = Path(config.entities).expanduser().read_text("utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"search.entities = {config.entities}: {error}") from error
            entities = [*dict.fromkeys(filter(None, map(str.strip, text.splitlines())))]
            entities = entities[: config.count]
        elif isinstance(library, SearchIndex):
            entities = _rare_entities(
                library, count=config.count, most_documents=config.most_documents, seed=self._seed
            )
        if len(entities) < config.count:
            cure = "lower it, add to search.entities, or raise search.most_documents"
            raise ConfigError(f"search.count = {config.count}: {len(entities)} entities; {cure}")
        pairs = zip(entities, cycle(config.languages), strict=False)
        return {f"{entity}/{language}": (entity, language) for entity, language in pairs}

    def _read_accepted(self) -> None:
        """Read the tasks accepted by earlier runs, and drop any incomplete last line."""
        if not self._file.exists():
            return
        data = self._file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self._file.write_bytes(whole)
        for line in whole.splitlines():
            task = json.loads(line)
            self._written.add(task["id"])
            self._kept.add(
                task["prompt"],
                task["provenance"].get("answer", ""),
                task["environment"]["evidence"],
            )


_MAX_DOCUMENTS = 50_000
_MAX_NAME = 60
_MIN_LETTERS, _MIN_SIGNS = 4, 2
"""Minimum length of a name in letters, or in characters of a script without spaces."""
_QUOTED = re.compile(r"[《「『“]([^《》「」『』“”\n]{2,40})[》」』”]")
_KATAKANA = re.compile(r"[ァ-ヺー][ァ-ヺー・]{2,30}[ァ-ヺー]")
_BETWEEN = "of|the|de|la|le|du|von|van|der|den|del|di|da|do|y"
_WORDS = regex.compile(
    rf"(\p{{Lu}}[\w'’-]*(?: (?:(?:{_BETWEEN}) )*\p{{Lu}}[\w'’-]*)*)|[^\W\d_][\w'’-]*"
)
"""Matches runs of capitalized words, which may be names, as group 1, and other words."""
_OPENERS = frozenset(
    {"the", "a", "an", "in", "on", "at", "its", "his", "her", "when", "after", "from", "for"}
)
_ENDS = re.compile(r"[.!?:;\n“\"(。]\s*$|^\s*$")


def _rare_entities(index: SearchIndex, *, count: int, most_documents: int, seed: int) -> list[str]:
    names = sorted(_candidates(index))
    random.Random(seed).shuffle(names)
    rare = (name for name in names if 1 <= index.document_count(name) <= most_documents)
    return list(islice(rare, count))


def _candidates(index: SearchIndex) -> set[str]:
    result, plain, alone = set[str](), set[str](), set[str]()
    for document in islice(index.documents(), _MAX_DOCUMENTS):
        text = document.text
        names = [match[1] for match in _QUOTED.finditer(text)]
        names += [match[0] for match in _KATAKANA.finditer(text)]
        if document.title != document.name:
            names.append(document.title)
        for run in _WORDS.finditer(text):
            if run[1] is None:
                plain.add(run[0])
                continue
            words = run[0].split(" ")
            if _ENDS.search(text[max(0, run.start() - 4) : run.start()]):
                # Start of a sentence: drop a leading article, or a single word.
                words = words[len(words) == 1 or words[0].lower() in _OPENERS :]
            if words:
                names.append(re.sub(r"['’]s?$", "", " ".join(words)))
            if len(words) == 1:
                alone.add(names[-1])
        for name in names:
            least = _MIN_SIGNS if ord(name[0]) > 0x2FFF else _MIN_LETTERS
            if len(name) <= _MAX_NAME and len(letters_and_digits(name)) >= least:
                result.add(name)
    # A word that is capitalized only at the start of sentences is not a name.
    return {name for name in result if name not in alone or name.lower() not in plain}
