"""Real text that is on any machine with Python: sources and documents of its standard library, and
of installed packages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

KINDS = (".py", ".pyi", ".txt", ".md", ".rst")
LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "encodings", "lib2to3", "turtledemo")
)
"""Packages are named by themselves; tables of characters are no text."""
HELD_OUT = 10
"""A file of so many is held out."""
LONG = 100_000
"""Characters of a file that is not held out, whatever its name: the measured ones are many."""
END = "<|endoftext|>"
TRAINED_ON = 20_000_000
"""Characters that the tokenizer is made from, at most."""


@dataclass(frozen=True, slots=True)
class Files:
    learned: Sequence[str]
    held: Sequence[str]


@dataclass(frozen=True, slots=True)
class Tokens:
    tokenizer: PreTrainedTokenizerFast
    end: int
    _known: dict[str, list[int]]

    def encode(self, text: str) -> list[int]:
        return self._known[text]


def gathered(packages: Sequence[str], most: int) -> Files:
    """A file of up to `LONG` characters is held out or not by its name alone, and by their names
    some are taken where there are more than `most` characters to learn; a text counts once.

    Raises ValueError for a package that is not there.
    """
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:  # a file's folder holds all others
            raise ValueError(f"--packages {name}: no package of that name is installed here")
        folders += map(Path, spec.submodule_search_locations)
    found: dict[str, bytes] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            own = path.relative_to(folder)
            wanted = path.suffix in KINDS or path.name.startswith("LICENSE")
            if not wanted or LEFT_OUT & set(own.parts) or not path.is_file():
                continue
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                found.setdefault(text, hashlib.sha256(f"{folder.name}/{own}".encode()).digest())
    split: tuple[list[str], list[str]] = ([], [])
    room = [most, most // HELD_OUT]
    for text in sorted(found, key=lambda text: found[text][1:]):
        out = found[text][0] % HELD_OUT == 0 and len(text) <= LONG
        if room[out] > 0:
            split[out].append(text)
            room[out] -= len(text)
    return Files(*split)


def tokenized(files: Files, vocabulary: int) -> Tokens:
    """By byte-level BPE of what is learned; the end of a text is the last id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    step = max(1, sum(map(len, files.learned)) // TRAINED_ON)
    tokenizer.train_from_iterator(files.learned[::step], trainer)
    texts = [*files.learned, *files.held]
    ids = (one.ids for one in tokenizer.encode_batch(texts))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    known = dict(zip(texts, ids, strict=True))
    return Tokens(wrapped, wrapped.convert_tokens_to_ids(END), known)  # type: ignore[arg-type]


def written(files: Files, folder: Path) -> None:
    """As `source: text` reads them."""
    for name in ("learned", "held"):
        lines = (json.dumps({"text": text}) + "\n" for text in getattr(files, name))
        (folder / f"{name}.jsonl").write_text("".join(lines))
