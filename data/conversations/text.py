"""Read text sources: split documents into token windows, and generate texts with known answers.

Each window is a separate context. Consecutive windows of a document overlap by one token, so that
every token except the first is trained on exactly once.

A generated text can only be predicted by looking far back:

    ..x7-,.,a0--.-. … ?a0,?x7?…

Distinct letters, each followed by a digit, are scattered in random filler. The last part asks for
the letters in a different order. Only the digit after such a letter is predictable.
"""

import random
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.forms import Example, ReadSource
from keel.data.items import digest, malformed_error
from keel.data.rows import (
    KINDS,
    READ_ERRORS,
    BadLine,
    check_file,
    data_extension,
    json_type,
    open_file,
    read_file_rows,
)
from keel.rl.sft import supervised_segment

_WHOLE = (".txt", ".md")
"""Extensions of files that are one document each. In other files (`KINDS`), each row is a
document."""
_KEYS = string.ascii_lowercase
_FILLER = ".,-~"
_ASK = "?"
_ASKING_SHARE = 0.25  # fraction of a generated text's length that asks for letters
_Encode = Callable[[str], Sequence[int]]
"""Convert text to token IDs without special tokens at the beginning or end."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokenizes documents and holds the tokens to add before and after each one."""

    encode: _Encode
    before: tuple[int, ...] = ()
    """Token IDs that the tokenizer puts before every document. Not trained on."""
    after: tuple[int, ...] = ()  # token IDs appended to every document

    def __post_init__(self) -> None:
        if None in self.after:
            raise ValueError(
                "it has no eos_token, which ends a document: choose another model.tokenizer, or "
                "add it to its tokenizer_config.json"
            )


def read_text(source: ConversationsConfig, by: Encoded, *, window: int) -> ReadSource:
    """Split the documents at `source.path` into windows of up to `window` tokens. Raises
    ConfigError if there is no text. A malformed document also raises ConfigError, unless
    `on_bad_line: skip` is set."""
    knob = f"sft.sources[{source.name}]"
    files, others = _find_files(data_path(source.path), f"{knob}.path")
    examples: list[Example] = []
    remaining = Counter({f"files of other kinds ({', '.join(others[:3])})": len(others)})
    skipped: list[str] = []
    documents = 0
    for at, document in (one for file in files for one in _documents(file, f"{knob}.path")):
        if source.size and documents >= source.size:
            break
        if isinstance(document, BadLine):
            skipped.append(f"{at}: {document}")
            if source.on_bad_line == "error":
                raise malformed_error(skipped[0], knob)
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


def generate_texts(source: ConversationsConfig, by: Encoded, *, seed: int) -> ReadSource:
    """Generate `source.size` texts, each one window long. Only the predictable digits are trained
    on. Each of these is tokenized separately, so that it is a single token with any tokenizer."""
    try:
        texts = list(
            _retrieval_texts(source.size, length=source.length, seed=seed, **source.params)
        )
    except ValueError as error:
        raise ConfigError(f"sft.sources[{source.name}].{error}") from error
    examples: list[Example] = []
    for number, text in enumerate(texts):
        ids, trained = list(by.before), [False] * len(by.before)
        begin = 0
        for place in (*_answer_positions(text), len(text)):
            for piece, predictable in ((text[begin:place], False), (text[place : place + 1], True)):
                piece_ids = by.encode(piece) if piece else ()
                ids += piece_ids
                trained += [predictable] * len(piece_ids)
            begin = place + 1
        segment = supervised_segment(f"text {number}", ids, trained)
        examples.append(
            Example(origin=f"text {number}", document=digest(text), segments=(segment,))
        )
    return ReadSource(examples=tuple(examples))


def _retrieval_texts(
    count: int, *, length: int, seed: int, letters: int = len(_KEYS), digits: int = 10
) -> Iterator[str]:
    """Generate `count` texts of `length` characters each, using the first `letters` letters and
    `digits` digits. Raises ValueError if the length is too short, or if there aren't that many
    letters or digits."""
    if length < 16:
        raise ValueError(f"length = {length}: must be at least 16")
    for name, value, most in (("letters", letters, len(_KEYS)), ("digits", digits, 10)):
        if not 1 <= value <= most:
            raise ValueError(f"params.{name} = {value}: must be from 1 to {most}")
    asking = max(3, int(length * _ASKING_SHARE))
    room = length - asking
    pairs = min(letters, room // 4)
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        keys = draw.sample(_KEYS[:letters], pairs)
        values = {key: draw.choice(string.digits[:digits]) for key in keys}
        pieces = [key + values[key] for key in keys]
        pieces += draw.choices(_FILLER, k=room - 2 * pairs)
        draw.shuffle(pieces)
        request = [f"{_ASK}{key}{values[key]}" for key in draw.choices(keys, k=asking // 3)]
        yield ("".join(pieces) + "".join(request)).ljust(length, _ASK)


def _answer_positions(text: str) -> list[int]:
    """Return the positions of the predictable digits in a generated text."""
    return [at + 2 for at, mark in enumerate(text[:-2]) if mark == _ASK and text[at + 2] != _ASK]


def _find_files(path: Path, knob: str) -> tuple[list[Path], list[str]]:
    """Return the files to read, along with the names of unsupported files. Hidden files are
    ignored."""
    files = [path]
    if path.is_dir():
        every = [file for file in sorted(path.rglob("*")) if file.is_file()]
        files = [f for f in every if not any(p[0] == "." for p in f.relative_to(path).parts)]
    else:
        check_file(path, knob)
    readable = [file for file in files if _is_whole(file) or data_extension(file)]
    if not readable:
        raise ConfigError(
            f"{knob} = {str(path)!r}: has no file with text: {' and '.join(_WHOLE)}, one document "
            f"each; {', '.join(KINDS)}, with a `text` a row"
        )
    return readable, [file.name for file in files if file not in readable]


def _is_whole(file: Path) -> bool:
    return file.name.lower().removesuffix(".gz").endswith(_WHOLE)


def _documents(file: Path, knob: str) -> Iterator[tuple[str, str | BadLine]]:
    if _is_whole(file):
        check_file(file, knob)
        try:
            with open_file(file) as content:
                text = content.read().decode("utf-8-sig")
            yield str(file), text if text.strip() else BadLine("is empty")
        except UnicodeDecodeError as error:
            yield str(file), BadLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8")
        except READ_ERRORS as error:
            raise ConfigError(f"{knob} = {str(file)!r}: cannot be read: {error}") from error
        return
    for row in read_file_rows([file], knob):
        document = row.record
        if not isinstance(document, BadLine):
            text = document.get("text")
            document = BadLine(
                f"has no `text`, or it is {json_type(text)}; its keys: {', '.join(document)} "
                "(chats are for source: jsonl)"
            )
            if isinstance(text, str) and text.strip():
                document = text
        yield row.at, document


def _windows(
    at: str, document: str, tokens: Sequence[int], unlearned: int, size: int
) -> Iterator[Example]:
    name = digest(document)
    step = max(1, size - 1)
    for index, start in enumerate(range(0, len(tokens) - 1, step)):
        ids = tokens[start : start + size]
        learned = [place > 0 and start + place >= unlearned for place in range(len(ids))]
        if any(learned):
            yield Example(
                origin=f"{at}, window {index}",
                document=name,
                window=index,
                segments=(supervised_segment(at, ids, learned),),
            )
