"""Where a model comes from, a folder or the hub, and what is missing there. Nothing is loaded."""

from __future__ import annotations

import difflib
import json
import re
import ssl
import threading
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from keel.configs.schema import ConfigError
from keel.model.config_file import QUANTISED

HUB_S = 5.0
"""Longest wait for the hub's first answer. transformers itself tries for half a minute."""
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*vocab.json", "tekken.json", "*.tiktoken")
"""Files that a tokenizer's vocabulary may be in."""
TRAINED = {"F64", "F32", "F16", "BF16", "BOOL", "U8", "I8", "I16", "I32", "I64"}
"""Data types of safetensors files that weights to be trained have, and buffers beside them."""
MOST_HEADER = 25 * 2**20
"""Bytes of a safetensors header: 100,000 tensors have some 10 MiB, and reading takes as much time
as there are tensors."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
LFS = b"version https://git-lfs"
LINK = "a link to a file that is not there; copy what it points to, or get it again"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""All weights; or which of them are in which file. Of such names transformers takes the weights,
vLLM those that the index names or all `*.safetensors`, and an update's tensors are compared with
them (weights/manifest.py)."""
_CODED = "｜DSML｜"
"""A token of DeepSeek-V3.2's tokenizer."""
OTHER_WEIGHTS = {
    "model-*-of-*.safetensors": f"without {INDEX}, which says what is in each; get that, too",
    "adapter_*": "an adapter and no model; merge it into its base model (peft's "
    "merge_and_unload) and name what save_pretrained writes",
    "consolidated*": "in its maker's own format; get the model in that of transformers",
    "*.safetensors": f"transformers looks for {WHOLE}; if this is the whole model, rename it",
    "pytorch_model*.bin": "the engine reads safetensors alone; load it with transformers and name "
    "what save_pretrained writes",
    "*.gguf": "weights in llama.cpp's format, mostly quantised; name the model they were made "
    "from, in safetensors",
}
"""Files that weights are in elsewhere → what to do."""


KNOWN = "Decoders like Llama, Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3 are (docs/models.md)"


def written_by_code(tokenizer: Any) -> bool:
    """Whether chats are written by code that is published with the model, and not by a template of
    its tokenizer: DeepSeek-V3.2. `keel.rollout.chat.render` knows that code."""
    return not tokenizer.chat_template and _CODED in tokenizer.get_added_vocab()


def from_anywhere(path: str) -> str:
    """A model's folder by its whole path, since the actors of a cluster that was joined do not work
    where the command does; a name of the hub as it is."""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def check_path(path: str) -> None:
    """Say what is wrong with a local path before it is taken for a hub name.

    Raises ConfigError: it is not there, and the hub does not have it either, or cannot be asked.
    """
    folder = Path(path).expanduser()
    if Path(path).is_dir():
        return
    if folder.is_dir():
        raise ConfigError(f"{path!r}: write it out, {str(folder)!r}: the engines do not know `~`")
    if folder.exists():
        raise ConfigError(f"{path!r} is a file; name the folder that holds config.json")
    if not is_hub_name(path):
        raise ConfigError(
            f"{path!r} does not exist{_beside(folder)}, and it is not a hub name (owner/model)"
            f"{_of_a_run(folder)}"
        )
    if not _cached(path) and not hub_answers():
        raise ConfigError(
            f"{path!r} is no folder here{_beside(folder)}, and the hub ({constants.ENDPOINT}) does "
            "not answer. Correct the path, or download the model where there is a network and name "
            "its folder"
        )


def check_folder(path: str) -> None:
    """Raises ConfigError for a folder that is no model folder of transformers, with what it is
    instead: an adapter, a GGUF file, a run."""
    folder = Path(path)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if dangling(folder, "config.json"):
        raise ConfigError(f"{path!r}: config.json: {LINK}")
    _check_no_run(path)
    raise ConfigError(
        f"{path!r} holds no config.json, so it is no model folder of transformers"
        f"{_instead(folder) or '; name the folder that save_pretrained wrote'}"
    )


def is_hub_name(path: str) -> bool:
    """Whether `path` could be a model of the hub: `owner/model`, or an old one's bare name."""
    return bool(_HUB_NAME.fullmatch(path)) and not path.startswith(".")


def hub_options(path: str) -> dict[str, Any]:
    """What transformers' loaders are told, so that they ask no hub that does not answer, and never
    run code that comes with a model: where nothing is said they ask at the terminal, and take any
    `y` on standard input for a yes."""
    local = not Path(path).is_dir() and _cached(path) and not hub_answers()
    return {"trust_remote_code": False, **({"local_files_only": True} if local else {})}


@cache
def hub_answers() -> bool:
    """Whether the hub says anything within `HUB_S`. Asked once a process."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_S):
                answers.append(True)
        except URLError as error:  # an answer that says no is one, too
            said = isinstance(error, HTTPError) or isinstance(error.reason, ssl.SSLError)
            answers.append(said)
        except OSError:
            answers.append(False)

    # Looking up a name has no deadline of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_S)
    return answers == [True]


def check_tokenizer_files(path: str) -> None:
    """Raises ConfigError for a folder without a vocabulary, where transformers makes up one."""
    folder = Path(path)
    if not folder.is_dir():
        return
    if links := dangling(folder, *VOCABULARIES):
        raise ConfigError(f"{path!r}: {_listed(links)}: {LINK}")
    if not any(True for name in VOCABULARIES for _ in folder.glob(name)):
        _check_no_run(path)
        raise ConfigError(
            f"{path!r} holds no tokenizer ({', '.join(VOCABULARIES)}): copy its files there, or "
            "name the folder that has them in model.tokenizer"
        )


def _check_no_run(path: str) -> None:
    """Raises ConfigError for the folder of a run or of a checkpoint."""
    folder = Path(path)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if (run / "config.yaml").is_file():
        what = "the folder of a run" if run == folder else "a checkpoint, which is no model"
        raise ConfigError(
            f"{path!r} is {what}: the trained model is {str(run / 'model')!r}, written when "
            "the run comes to run.steps"
        )


def missing_weights(path: str) -> str:
    """What of a folder's weights is not there, not whole, or not where transformers and vLLM look;
    nothing for a model of the hub."""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    if links := dangling(folder, WHOLE, INDEX, "*-of-*.safetensors"):
        return f"{_listed(links)}: {LINK}"
    whole, indexed = (folder / WHOLE).is_file(), _indexed(folder)
    names = {WHOLE, *indexed} if whole else indexed
    if not names:
        return f"it holds no weights ({WHOLE}, or its parts and {INDEX}){_instead(folder)}"
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        said = f"{_listed(missing)} of the {len(indexed)} files that {INDEX} names are missing"
        # transformers would take the whole file and not look at the index.
        return said + f". vLLM goes by the index; delete it if {WHOLE} is the whole model" * whole
    others = {file.name for file in folder.glob("*.safetensors")} - names
    if read := [] if indexed else sorted(n for n in others if not n.startswith("consolidated")):
        return f"{_listed(read)} beside {WHOLE}: without an index vLLM reads both; move it away"
    broken = [(name, fault) for name in sorted(names) if (fault := _fault(folder / name))]
    return f"{_listed([name for name, _ in broken])}: {broken[0][1]}" if broken else ""


def dangling(folder: Path, *patterns: str) -> list[str]:
    """Links in a folder, of such names, to files that are not there."""
    links = {file.name for file in folder.iterdir() if file.is_symlink() and not file.exists()}
    return sorted(name for name in links if any(fnmatchcase(name, each) for each in patterns))


def _indexed(folder: Path) -> set[str]:
    """The files that the index names; none without one."""
    index = folder / INDEX
    if not index.is_file():
        return set()
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if wrong := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{wrong[0]!r} is no name of a file in this folder")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index}: not an index of weights: {error!r}") from error
    return names


def _instead(folder: Path) -> str:
    """What a folder without weights has in their place, and what to do with it."""
    for pattern, cure in OTHER_WEIGHTS.items():
        if found := sorted(file.name for file in folder.glob(pattern)):
            return f". There is {_listed(found)}: {cure}"
    return ""


def shapes_of(path: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a folder whose weights are all there, by name."""
    folder = Path(path)
    names = {WHOLE} if (folder / WHOLE).is_file() else _indexed(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        with safe_open(folder / name, framework="np") as file:
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return shapes


def is_zero(path: str, name: str) -> bool:
    """Whether every number of that tensor of a folder is 0."""
    return any(not tensor.any() for tensor in tensors_called(path, name))


def tensors_called(path: str, name: str, rows: int | None = None) -> Iterator[Any]:
    """Torch tensors of this name in the files of a folder, or the first `rows` of each."""
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            if name in set(opened.keys()):
                yield opened.get_slice(name)[:rows]


def _fault(file: Path) -> str:
    """What is wrong with a file of weights, by its header and its size; empty if nothing is."""
    with file.open("rb") as opened:
        if opened.read(len(LFS)) == LFS:
            return "a pointer of Git LFS and not the file; `git lfs pull` gets it"
        opened.seek(0)
        length = int.from_bytes(opened.read(8), "little")
    if MOST_HEADER < length <= file.stat().st_size:
        return f"has a header of {length:,} bytes, more than any model's; get it again"
    try:
        with safe_open(file, framework="np") as opened:
            dtypes = {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        return f"not a whole safetensors file ({why}); get it again"
    if packed := sorted(dtypes - TRAINED):
        return f"has tensors of {', '.join(packed)}: {QUANTISED}"
    return ""


def local_folder(path: str) -> Path | None:
    """Where the files of a folder or of a downloaded hub model are."""
    file = _downloaded(path)
    return Path(path) if Path(path).is_dir() else file.parent if file else None


def _cached(path: str) -> bool:
    return _downloaded(path) is not None


def _downloaded(path: str) -> Path | None:
    """The config.json of what was downloaded of the hub's model."""
    found = try_to_load_from_cache(path, "config.json") if is_hub_name(path) else None
    return Path(found) if isinstance(found, str) else None


def _of_a_run(folder: Path) -> str:
    """Where it is a run that writes the folder, at its end."""
    run = folder.parent
    if folder.name != "model":
        return ""
    if (run / "config.yaml").is_file():
        return f". The run in {run} exports its model at its end, which is to come: go on with it"
    if run.is_dir():
        return ""
    return f". A run exports its model there when it ends, and none has begun in {run}"


def _beside(folder: Path) -> str:
    """What there is instead of a folder that is not."""
    if not folder.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir())
    near = difflib.get_close_matches(folder.name, names, n=3)
    near = near or names[:8] * ("/" in str(folder))
    at = "this folder" if str(folder.parent) == "." else f"{folder.parent}"
    return f" ({at} has {', '.join(near)})" if near else ""


def _listed(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
