"""Text to learn from: documents of files, and made ones, cut into windows of tokens.

A window is a context of its own. A document that fills several goes on in the next one with the
token that the one before ends with, so every token of it but the first is learned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.types import Example, Read
from keel.data.items import digest
from keel.data.rows.lines import BadLine, kind_of, lines_of, object_of
from keel.data.text.retrieval import pieces, retrieval_texts
from keel.rl.supervised.lessons import shown

LINES = (".jsonl", ".json", ".ndjson")
"""Files with a document a line; all others are one as a whole."""
KINDS = (".txt", *LINES)
"""What is read of a folder."""
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


def read_text(source: ConversationsConfig, by: Encoded, *, window: int) -> Read:
    """The documents of `source.path`, in windows of at most `window` tokens.

    Raises ConfigError naming the file, and the line, for what is no text, unless `on_bad_line:
    skip`; and where there is nothing to read.
    """
    knob = f"sft.sources[{source.name}]"
    path = data_path(source.path)
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file())
    if not files:
        raise ConfigError(
            f"{knob}.path = {source.path!r}: holds no {', '.join(KINDS)} file; name a folder with "
            "text, or a file"
        )
    examples: list[Example] = []
    left: Counter[str] = Counter()
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
        segment = shown(f"text {number}", ids, said)
        examples.append(Example.of_text(f"text {number}", name, 0, segment))
    return Read(examples=tuple(examples))


def _documents(file: Path, knob: str) -> Iterator[tuple[str, str | BadLine]]:
    """Where each stands, and its text or why there is none."""
    if file.suffix in LINES:
        for number, line in lines_of(file, knob):
            try:
                yield f"{file}:{number}", _text_of(line)
            except BadLine as error:
                yield f"{file}:{number}", error
        return
    if next(lines_of(file, knob), None) is None:
        yield str(file), BadLine("is empty")
        return
    try:
        yield str(file), file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield str(file), BadLine(f"not UTF-8 (byte {error.start})")


def _text_of(line: bytes) -> str:
    record = object_of(line)[0]
    if "text" not in record:
        has = ", ".join(record) or "none"
        raise BadLine(f"has no `text`; its keys: {has} (chats are for source: jsonl)")
    text = record["text"]
    if not isinstance(text, str):
        raise BadLine(f"`text` must be text, is {kind_of(text)}")
    if not text.strip():
        raise BadLine("`text` is empty")
    return text


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
            segment = shown(at, ids, learned)
            yield Example.of_text(f"{at}, window {index}", name, index, segment)
