"""Text sources: cuts documents and generated texts into windows of tokens.

Each window is a separate context. Consecutive windows in a document overlap by one token, so that
every token except the first is learned exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.retrieval import pieces, retrieval_texts
from keel.data.conversations.types import Example, ReadSource
from keel.data.items import digest
from keel.data.rows.read import (
    KINDS,
    READ_ERRORS,
    BadLine,
    check_file,
    kind_of,
    kind_of_file,
    open_file,
    rows_of_files,
)
from keel.rl.sft import supervised_segment

_WHOLE = (".txt", ".md")
"""Extensions of files that form one document. In other files (`KINDS`), each row is a document."""
_MAX_SHOWN = 3
"""How many ignored files to list by name."""
Encode = Callable[[str], Sequence[int]]
"""Converts text to token IDs, without special IDs at the beginning or end."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """How to tokenize documents."""

    encode: Encode
    before: tuple[int, ...] = ()
    """The IDs that the tokenizer puts before every document. They are not learned."""
    after: tuple[int, ...] = ()
    """The IDs that follow every document."""

    def __post_init__(self) -> None:
        if None in self.after:
            raise ValueError(
                "it has no eos_token, which ends a document: choose another model.tokenizer, or "
                "add it to its tokenizer_config.json"
            )


def read_text(source: ConversationsConfig, by: Encoded, *, window: int) -> ReadSource:
    """Read the documents in `source.path` as windows with at most `window` tokens.

    Raises ConfigError if there is no text. Unless `on_bad_line: skip` is set, it is also raised for
    a malformed document, with its file and line.
    """
    knob = f"sft.sources[{source.name}]"
    files, others = _files(data_path(source.path), f"{knob}.path")
    examples: list[Example] = []
    remaining: Counter[str] = Counter()
    if others:
        names = ", ".join(file.name for file in others[:_MAX_SHOWN]) + ", …" * (
            len(others) > _MAX_SHOWN
        )
        remaining[f"files of other kinds ({names})"] = len(others)
    skipped: list[str] = []
    documents = 0
    for file in files:
        for at, document in _documents(file, f"{knob}.path"):
            if source.size and documents >= source.size:
                break
            if isinstance(document, BadLine):
                if source.on_bad_line == "error":
                    raise ConfigError(
                        f"{at}: {document} ({knob}; repair it, or set on_bad_line: skip to "
                        "omit such documents)"
                    ) from document
                skipped.append(f"{at}: {document}")
                continue
            documents += 1
            tokens = [*by.before, *by.encode(document), *by.after]
            windows = list(_windows(at, document, tokens, len(by.before), window))
            remaining["too short to learn from"] += not windows
            examples += windows
    if not documents:
        why = f"; {len(skipped)} omitted, the first: {skipped[0]}" if skipped else ""
        raise ConfigError(f"{knob}.path = {source.path!r}: there is no text in it{why}")
    return ReadSource(examples=tuple(examples), skipped=tuple(skipped), unselected=remaining)


def made_texts(source: ConversationsConfig, by: Encoded, *, seed: int) -> ReadSource:
    """Generate `source.size` texts of one window each, and mark only predictable digits as
    learned."""
    try:
        texts = list(retrieval_texts(source.size, length=source.length, seed=seed, **source.params))
    except ValueError as error:
        raise ConfigError(f"sft.sources[{source.name}].{error}") from error
    examples: list[Example] = []
    for number, text in enumerate(texts):
        ids, trained = list(by.before), [False] * len(by.before)
        for piece, predictable in pieces(text):
            piece_ids = by.encode(piece)
            ids += piece_ids
            trained += [predictable] * len(piece_ids)
        segment = supervised_segment(f"text {number}", ids, trained)
        examples.append(Example.of_text(f"text {number}", digest(text), 0, segment))
    return ReadSource(examples=tuple(examples))


def _files(path: Path, knob: str) -> tuple[list[Path], list[Path]]:
    """Return the files to read, and the other files in the folder. Hidden files are ignored.

    Raises ConfigError with the setting `knob` if there are none.
    """
    kinds = f"{' and '.join(_WHOLE)}, one document each; {', '.join(KINDS)}, with a `text` a row"
    if not path.is_dir():
        check_file(path, knob)
        if not _is_read(path):
            raise ConfigError(
                f"{knob} = {str(path)!r}: unknown kind of file; choose a known suffix ({kinds})"
            )
        return [path], []
    visible = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    files = [file for file in visible if _is_read(file)]
    if not files:
        raise ConfigError(
            f"{knob} = {str(path)!r}: has no file with text ({kinds}); name a file, or another "
            "folder"
        )
    return files, [file for file in visible if not _is_read(file)]


def _is_whole(file: Path) -> bool:
    return file.name.lower().removesuffix(".gz").endswith(_WHOLE)


def _is_read(file: Path) -> bool:
    return _is_whole(file) or bool(kind_of_file(file))


def _documents(file: Path, knob: str) -> Iterator[tuple[str, str | BadLine]]:
    """Yield each document's place together with its text, or with the error if it is malformed."""
    if _is_whole(file):
        yield str(file), _whole(file, knob)
        return
    for row in rows_of_files([file], knob):
        yield row.at, row.record if isinstance(row.record, BadLine) else _text_of(row.record)


def _whole(file: Path, knob: str) -> str | BadLine:
    check_file(file, knob)
    try:
        with open_file(file) as content:
            text = content.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8")
    except READ_ERRORS as error:
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
    at: str, document: str, tokens: Sequence[int], unlearned: int, size: int
) -> Iterator[Example]:
    """Cut a document into windows. The first `unlearned` tokens in it are not learned."""
    name = digest(document)
    step = max(1, size - 1)
    for index, start in enumerate(range(0, len(tokens) - 1, step)):
        ids = tokens[start : start + size]
        learned = [place > 0 and start + place >= unlearned for place in range(len(ids))]
        if any(learned):
            segment = supervised_segment(at, ids, learned)
            yield Example.of_text(f"{at}, window {index}", name, index, segment)
