"""Text to learn from: documents of files, and made ones, cut into windows of tokens.

A window is a context of its own. A document that fills several goes on in the next one with the
token that the one before ends with, so every token of it but the first is learned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.types import Example, Read
from keel.data.items import digest
from keel.data.rows.lines import BROKEN, BadLine, check_file, kind_of, opened
from keel.data.rows.read import KINDS, kind_of_file, rows_of_files
from keel.data.text.retrieval import pieces, retrieval_texts
from keel.rl.sft import supervised_segment

WHOLE = (".txt", ".md")
"""Files that are one document; of others (`KINDS`) each row is one."""
SHOWN = 3
"""Files that a folder leaves out, by name."""
Encode = Callable[[str], Sequence[int]]
"""The ids of a text, without any that stands for its beginning or its end."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """How text becomes tokens."""

    encode: Encode
    before: tuple[int, ...] = ()
    """Ids that every document begins with, as the tokenizer has it; not learned."""
    after: tuple[int, ...] = ()
    """Ids that it ends with."""

    def __post_init__(self) -> None:
        if None in self.after:
            raise ValueError(
                "it has no eos_token, and a document ends with one: name a tokenizer that has, by "
                "model.tokenizer, or add it to its tokenizer_config.json"
            )


def read_text(source: ConversationsConfig, by: Encoded, *, window: int) -> Read:
    """The documents of `source.path`, in windows of at most `window` tokens.

    Raises ConfigError naming the file, and the line, for what is no text, unless `on_bad_line:
    skip`; and where there is nothing to read.
    """
    knob = f"sft.sources[{source.name}]"
    files, others = _files(data_path(source.path), f"{knob}.path")
    examples: list[Example] = []
    left: Counter[str] = Counter()
    if others:
        names = ", ".join(file.name for file in others[:SHOWN]) + ", …" * (len(others) > SHOWN)
        left[f"files of other kinds ({names})"] = len(others)
    skipped: list[str] = []
    documents = 0
    for file in files:
        for at, document in _documents(file, f"{knob}.path"):
            if source.size and documents >= source.size:
                break
            if isinstance(document, BadLine):
                if source.on_bad_line == "error":
                    raise ConfigError(
                        f"{at}: {document} ({knob}; repair it, or set on_bad_line: skip to leave "
                        "such documents out)"
                    ) from document
                skipped.append(f"{at}: {document}")
                continue
            documents += 1
            tokens = [*by.before, *by.encode(document), *by.after]
            windows = list(_windows(at, document, tokens, len(by.before), window))
            left["too short to learn from"] += not windows
            examples += windows
    if not documents:
        why = f"; {len(skipped)} are left out, the first: {skipped[0]}" if skipped else ""
        raise ConfigError(f"{knob}.path = {source.path!r}: there is no text in it{why}")
    return Read(examples=tuple(examples), skipped=tuple(skipped), unselected=left)


def made_texts(source: ConversationsConfig, by: Encoded, *, seed: int) -> Read:
    """`source.size` texts of `keel.data.text.retrieval`, each one window, of which the digits that
    can be known are learned."""
    try:
        made = retrieval_texts(source.size, length=source.length, seed=seed, **source.params)
        texts = list(made)
    except ValueError as error:
        raise ConfigError(f"sft.sources[{source.name}].{error}") from error
    examples: list[Example] = []
    for number, text in enumerate(texts):
        ids, said = list(by.before), [False] * len(by.before)
        for piece, learned in pieces(text):
            own = by.encode(piece)
            ids += own
            said += [learned] * len(own)
        name = digest(text)
        segment = supervised_segment(f"text {number}", ids, said)
        examples.append(Example.of_text(f"text {number}", name, 0, segment))
    return Read(examples=tuple(examples))


def _files(path: Path, knob: str) -> tuple[list[Path], list[Path]]:
    """Those to read, and those of a folder that are of no kind that is read; hidden ones aside.
    Raises ConfigError naming `knob`."""
    kinds = f"{' and '.join(WHOLE)}, one document each; {', '.join(KINDS)}, with a `text` a row"
    if not path.is_dir():
        check_file(path, knob)
        if not _is_read(path):
            raise ConfigError(
                f"{knob} = {str(path)!r}: of no known kind; let its name say which it is ({kinds})"
            )
        return [path], []
    there = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    files = [file for file in there if _is_read(file)]
    if not files:
        raise ConfigError(
            f"{knob} = {str(path)!r}: holds no file with text ({kinds}); name a folder with some, "
            "or a file"
        )
    return files, [file for file in there if not _is_read(file)]


def _is_whole(file: Path) -> bool:
    return file.name.lower().removesuffix(".gz").endswith(WHOLE)


def _is_read(file: Path) -> bool:
    return _is_whole(file) or bool(kind_of_file(file))


def _documents(file: Path, knob: str) -> Iterator[tuple[str, str | BadLine]]:
    """Where each stands, and its text or why there is none."""
    if _is_whole(file):
        yield str(file), _whole(file, knob)
        return
    for row in rows_of_files([file], knob):
        yield row.at, row.record if isinstance(row.record, BadLine) else _text_of(row.record)


def _whole(file: Path, knob: str) -> str | BadLine:
    check_file(file, knob)
    try:
        with opened(file) as content:
            text = content.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8")
    except BROKEN as error:
        raise ConfigError(f"{knob} = {str(file)!r}: cannot be read: {error}") from error
    return text if text.strip() else BadLine("is empty")


def _text_of(record: Mapping[str, Any]) -> str | BadLine:
    if "text" not in record:
        has = ", ".join(record) or "none"
        return BadLine(f"has no `text`; its keys: {has} (chats are for source: jsonl)")
    text = record["text"]
    if not isinstance(text, str):
        return BadLine(f"`text` must be text, is {kind_of(text)}")
    return text if text.strip() else BadLine("`text` is empty")


def _windows(
    at: str, document: str, tokens: Sequence[int], unlearned: int, most: int
) -> Iterator[Example]:
    """unlearned: tokens that a document begins with."""
    name = digest(document)
    step = max(1, most - 1)
    for index, start in enumerate(range(0, len(tokens) - 1, step)):
        ids = tokens[start : start + most]
        learned = [place > 0 and start + place >= unlearned for place in range(len(ids))]
        if any(learned):
            segment = supervised_segment(at, ids, learned)
            yield Example.of_text(f"{at}, window {index}", name, index, segment)
