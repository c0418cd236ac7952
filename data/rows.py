"""Find data files in a folder or a hub dataset, and read their rows.

`.jsonl` and `.ndjson` files have one object per line, and `.json` files can also contain a list.
`.csv` and `.tsv` files have a header. All of these can be compressed (`.gz`). `.parquet` and
`.arrow` files are read with pyarrow. Each row records its location for messages.

A folder has the same layout as on the hub or from `save_to_disk` of the package `datasets`:
`data/train-00000-of-00002.parquet`, `main/test.jsonl`, `train/data-00000-of-00001.arrow`. The split
is part of the name of a file or its folder, and the subset is part of the folder name.
"""

import codecs
import csv
import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date, time
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]: of httpx or httpx2, by its release
)

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig, SourceConfig
from keel.rl.strict_json import allow_long_integers

allow_long_integers()

_LINES, _LISTS, _SHEETS = (".jsonl", ".ndjson"), (".json",), {".csv": ",", ".tsv": "\t"}
_TABLES = (".parquet", ".arrow")
KINDS = (*_LINES, *_LISTS, *_SHEETS, *_TABLES)
READ_ERRORS = (OSError, EOFError, zlib.error)
"""Errors raised if a file cannot be read or decompressed."""
_TABLE_BATCH = 1024  # number of table rows to convert at a time
_SMALL_TASKS = "small-tasks"  # folder of the recipes that use the tasks in `keel.examples.small`
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


class BadLine(ValueError):
    """Raised if a line or row of the data can't be used."""


class Row(NamedTuple):
    at: str  # location of the row: `file:line`, or `file, row 3` in a list or a table
    number: int  # line number, or row number in a list, a table or several files
    record: dict[str, Any] | BadLine
    """Columns of the row, or the error that explains why it cannot be read."""
    written: dict[str, Any] | None
    """The record with numbers as written in the file. None for a table, where every row has all
    columns and an empty cell is a missing value."""


def data_extension(path: Path) -> str:
    """Return a file's extension without `.gz`, or "" if the extension is unknown."""
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind in KINDS if name.endswith(kind)), "")


def json_type(value: object) -> str:
    """Return the name of a JSON value's type for use in error messages."""
    if value is None:
        return "missing or null"
    if isinstance(value, str):
        return "text" if value.strip() else "blank"
    kinds: dict[type, str] = {bool: "true or false", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, decompressing it if its name ends in `.gz`."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _label(path: Path, knob: str) -> str:
    return f"{knob} = {str(path)!r}" if knob else str(path)


def check_file(path: Path, knob: str) -> None:
    """Raise ConfigError naming the setting `knob`, if given, if the file doesn't exist."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "no such file"
        if _SMALL_TASKS in path.parts and not path.parent.exists():
            problem += f"; run `python -m keel.examples.small {_SMALL_TASKS}` to make it"
        raise ConfigError(f"{_label(path, knob)}: {problem}")


def read_lines(path: Path, knob: str = "") -> Iterator[tuple[int, bytes]]:
    """Yield a file's non-blank lines along with their line numbers. Raises ConfigError naming the
    file and the setting `knob`, if given, if the file can't be read."""
    check_file(path, knob)
    try:
        with open_file(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
    except READ_ERRORS as error:
        raise ConfigError(f"{_label(path, knob)}: {error}") from error


def parse_object(
    line: bytes, *, replace_surrogates: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a line as a JSON object and return two versions: one parsed normally, and one that
    keeps numbers as written, because `match: exact` distinguishes 0.10 from 0.1.

    A policy can sample lone surrogates. If `replace_surrogates` is true, they are replaced with
    replacement characters, as tokenizers do (`keel.rollout.chat.render`). Raises BadLine if the
    line isn't an object.
    """
    try:
        text = line.decode(errors="surrogatepass") if replace_surrogates else line.decode()
        if replace_surrogates and _SURROGATE.search(text):
            text = json.dumps(json.loads(text), ensure_ascii=False)
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        record = json.loads(text)
        written = json.loads(text, parse_int=str, parse_float=str)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        # The decoder counts the end of a line as the beginning of the next one.
        column = min(error.pos, len(text.rstrip())) + 1
        raise BadLine(f"not JSON: {error.msg} (column {column})") from error
    except ValueError as error:  # an integer with too many digits
        raise BadLine(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadLine("nested too deeply") from error
    return _checked(record), written


def _checked(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise BadLine(f"must be an object, is {json_type(record)}")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # legal JSON, but no tokenizer accepts it
        raise BadLine("holds half of a surrogate pair (\\ud800 … \\udfff)") from error
    return cast(dict[str, Any], record)


def _read_jsonl_rows(path: Path, knob: str) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file, whatever its extension."""
    for number, line in read_lines(path, knob):
        at = f"{path}:{number}"
        try:
            yield Row(at, number, *parse_object(line))
        except BadLine as error:
            if line.startswith(b"["):
                hint = "a JSON list needs the extension .json and source: file"
                error = BadLine(f"{error}; {hint}")
            yield Row(at, number, error, {})


def read_file_rows(paths: list[Path], knob: str) -> Iterator[Row]:
    """Yield the rows of all files in order. Raises ConfigError with `knob` and the file name if a
    file can't be read."""
    number = 0
    for path in paths:
        check_file(path, knob)
        for row in _rows(path, knob):
            number += 1
            yield row if len(paths) == 1 else row._replace(number=number)


def _rows(path: Path, knob: str) -> Iterator[Row]:
    kind = data_extension(path)
    if not kind:
        raise ConfigError(
            f"{knob} = {str(path)!r} must end in one of {', '.join(KINDS)}; source: jsonl reads "
            "JSON lines under any name"
        )
    try:
        if kind in _LISTS:
            yield from _json_rows(path, knob)
        elif kind in _SHEETS:
            yield from _sheet_rows(path, _SHEETS[kind])
        elif kind in _TABLES:
            for number, record in enumerate(_table_rows(path, knob), start=1):
                yield Row(f"{path}, row {number}", number, record, None)
        else:
            yield from _read_jsonl_rows(path, knob)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{knob} = {str(path)!r} is not UTF-8 (byte 0x{error.object[error.start]:02x}); "
            f"convert it, for example by iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    except READ_ERRORS as error:
        raise ConfigError(f"{knob} = {str(path)!r} cannot be read: {error}") from error


def _json_rows(path: Path, knob: str) -> Iterator[Row]:
    with open_file(path) as file:
        text = file.read().decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _read_jsonl_rows(path, knob)
        return
    try:
        records = json.loads(text)
        written = json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    for number, record in enumerate(records, start=1):
        at = f"{path}, row {number}"
        try:
            yield Row(at, number, _checked(record), written[number - 1])
        except BadLine as error:
            yield Row(at, number, error, {})


def _sheet_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a CSV file, each with the number of its first line. The separator can also
    be `;`, which spreadsheets use in countries with a decimal comma."""
    csv.field_size_limit(1 << 30)
    with open_file(path) as file:
        lines = (line.decode("utf-8-sig", "replace") for line in file)
        title = next((line for line in lines if line.strip()), "")
    if delimiter not in title:
        delimiter = next((other for other in ";\t|," if other in title), delimiter)
    with open_file(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header: list[str] = []
        line = 1
        try:
            for row in reader:
                line, begin = reader.line_num + 1, line
                if not "".join(row).strip():
                    continue
                if not header:
                    header = [name.strip() for name in row]
                    if len({*header}) < len(header):
                        raise ConfigError(f"{path}:{begin}: two columns have the same name")
                    continue
                record: dict[str, Any] | BadLine = dict(zip(header, row, strict=False))
                if len(row) != len(header):
                    record = BadLine(f"has {len(row)} cells, but the header has {len(header)}")
                yield Row(f"{path}:{begin}", begin, record, None)
        except csv.Error as error:
            raise ConfigError(
                f'{path}:{line}: not CSV: {error}; write a quote inside a cell twice ("")'
            ) from error


def _table_rows(path: Path, knob: str) -> Iterator[dict[str, Any]]:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{knob} = {str(path)!r} needs pyarrow: pip install 'pyarrow>=20' (the extra `data`)"
        ) from error
    try:
        if path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path) as file:
                names = _text_columns(file.schema_arrow)
                for batch in file.iter_batches(batch_size=_TABLE_BATCH, columns=names):
                    yield from map(_plain, batch.to_pylist())
            return
        with arrow.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"  # otherwise a stream, as `datasets` writes it
            source.seek(0)
            with (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(source) as reader:
                names = _text_columns(reader.schema)
                count = reader.num_record_batches if is_file else 0
                for batch in map(reader.get_batch, range(count)) if is_file else reader:
                    for start in range(0, batch.num_rows, _TABLE_BATCH):
                        part = batch.select(names).slice(start, _TABLE_BATCH)
                        yield from map(_plain, part.to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{knob} = {str(path)!r} cannot be read: {error}") from error


def _text_columns(schema: Any) -> list[str]:
    return [field.name for field in schema if "binary" not in str(field.type)]


def _plain(value: Any) -> Any:
    """Convert a table value to JSON data. Times and decimals become strings, and NaN becomes
    null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast(list[Any], value)]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float) and value != value:
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def check_keys(columns: Mapping[str, str], known: Collection[str], knob: str) -> None:
    for key in columns:
        if key not in known:
            raise ConfigError(f"{knob}.columns.{key}: unknown key; use {', '.join(sorted(known))}")


def select_columns(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of those keys in `columns` that are present and not null."""
    values = {key: look_up(record, name) for key, name in columns.items() if name}
    return {key: value for key, value in values.items() if value is not None}


def look_up(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a dotted path into nested objects. Returns None if there
    is no such value."""
    if name in record or "." not in name:
        return record.get(name)
    value: Any = record
    for step in name.split("."):
        value = cast(Mapping[str, Any], value).get(step) if isinstance(value, Mapping) else None
    return value


def parse_json(key: str, text: str) -> Any:
    """Parse text from a row as JSON. Raises BadLine if it isn't valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"`{key}` is not JSON: {error}") from error


def drop_nulls(value: Any) -> Any:
    """Remove null values from nested objects. Tables contain nulls for keys that occur only in
    other rows."""
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return {key: drop_nulls(each) for key, each in pairs if each is not None}
    return [drop_nulls(v) for v in cast(list[Any], value)] if isinstance(value, list) else value


# --- Finding files ---

_HUB_TIMEOUT_S = 10.0
_CONVERTED = "refs/convert/parquet"
"""Revision in which the hub stores its Parquet conversion, as `subset/split/0000.parquet`."""
_PLAIN_FOLDERS = ("data", "default")  # folder names that are not subsets
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "eval"), "test"),
}
_METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\..+")


class _FilesNotFound(ValueError):
    """Raised if the split or subset has no files, or if there are several subsets and the user has
    to choose one."""


_Source = SourceConfig | ConversationsConfig


def read_source_rows(source: _Source, knob: str) -> Iterator[Row]:
    """Yield a source's rows. `knob` is the name of the setting that holds the source's path. Raises
    ConfigError listing the available splits or subsets if no file matches."""
    if source.source == "jsonl":
        return _read_jsonl_rows(data_path(source.path), knob)
    return read_file_rows(_files_of(source, knob), knob)


def _files_of(source: _Source, knob: str) -> list[Path]:
    try:
        if source.source == "hub":
            return _find_hub_files(source)
        path = data_path(source.path)
        if path.is_dir():
            if saved := _find_saved_files(path, source.split):
                return saved
            return [path / name for name in _choose_files(_list_files(path), source)]
    except _FilesNotFound as error:
        raise ConfigError(f"{knob} = {source.path!r}: {error}") from error
    if source.subset or source.split:
        name = "subset" if source.subset else "split"
        knob = f"{knob.removesuffix('.path')}.{name}"
        raise ConfigError(f"{knob} is for folders, but {source.path!r} is a file")
    return [path]


def _choose_files(names: Iterable[str], source: _Source) -> list[str]:
    split, subset = source.split, source.subset
    subsets: dict[str, list[str]] = {}
    for name in sorted(names):
        *folders, file = PurePosixPath(name).parts
        if data_extension(Path(file)) and file not in _METADATA:
            own = [f for f in folders if f not in _PLAIN_FOLDERS and not _split_of(f)]
            subsets.setdefault(own[-1] if own else "", []).append(name)
    if not subsets:
        raise _FilesNotFound("has no file of a known kind (.jsonl, .json, .csv, .parquet, …)")
    if not subset and len(subsets) == 1:
        subset = next(iter(subsets))
    if subset not in subsets:
        problem = f"has no subset {subset!r}" if subset else "has several subsets"
        raise _FilesNotFound(f"{problem}; set subset to one of {', '.join(filter(None, subsets))}")
    splits: dict[str, list[str]] = {}
    for name in subsets[subset]:
        parts = reversed(PurePosixPath(name).parts)
        splits.setdefault(next(filter(None, map(_split_of, parts)), ""), []).append(name)
    exact = [n for n in subsets[subset] if split and _stem(PurePosixPath(n).name) == split]
    canonical = _SPLITS.get(split, split) or "train"
    if canonical == "train" and set(splits) == {""}:
        canonical = ""
    if not exact and canonical not in splits:
        has = ", ".join(each or f"files without one ({splits[each][0]}, …)" for each in splits)
        raise _FilesNotFound(f"has no split {split or 'train'!r}; it has {has} (set split)")
    chosen = exact or splits[canonical]
    for name in chosen:
        if shard := _SHARD.fullmatch(PurePosixPath(name).name):
            count = sum(_stem(PurePosixPath(each).name) == shard[1] for each in chosen)
            if count != int(shard[3]):
                raise _FilesNotFound(f"has {count} of the {int(shard[3])} parts of {name}")
    return chosen


def cached_places() -> list[Path]:
    """Return the local folders where hub datasets are cached."""
    return sorted(Path(constants.HF_HUB_CACHE).glob("datasets--*"))


def _stem(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    return shard[1] if shard else name.partition(".")[0]


def _split_of(name: str) -> str:
    stem = _stem(name)
    if _SHARD.fullmatch(name) and stem != "data":
        return _SPLITS.get(stem, stem)
    return _SPLITS.get(re.split(r"[^a-z]", stem.lower(), maxsplit=1)[0], "")


def _list_files(folder: Path) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]


def _find_saved_files(folder: Path, split: str) -> list[Path]:
    """Return the files that the index files of `save_to_disk` list, or [] if there are no index
    files. A folder can contain other files, such as the cache of `map` or an earlier save."""
    try:
        if (index := folder / "dataset_dict.json").is_file():
            splits: list[str] = json.loads(index.read_text("utf-8"))["splits"]
            name = split or (splits[0] if len(splits) == 1 else "train")
            if name not in splits:
                problem = f"has no split {name!r}; it has {', '.join(splits)} (set split)"
                raise _FilesNotFound(problem)
            folder = folder / name
        if not (state := folder / "state.json").is_file():
            return []
        files = json.loads(state.read_text("utf-8"))["_data_files"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise _FilesNotFound(f"{folder} cannot be read: {error!r}") from error
    return [folder / entry["filename"] for entry in files]


def _find_hub_files(source: _Source) -> list[Path]:
    """Download a hub dataset, or look it up in the cache if the hub refuses or does not answer."""
    try:
        return _download(source, lambda revision: _names(source.path, revision))
    except (HTTPError, HFValidationError, OSError) as refusal:
        try:
            return _download(source, lambda revision: _cached_names(source.path, revision), True)
        except OSError as error:
            raise _FilesNotFound(
                f"the hub ({constants.ENDPOINT}) does not give it ({refusal}), and there is no "
                f"complete download ({error}). Correct the name (owner/name), set HF_TOKEN if it "
                "is private or gated, or download it elsewhere (`hf download --repo-type dataset "
                f"{source.path}`) and name its folder with source: file"
            ) from refusal


def _download(
    source: _Source, list_names: Callable[[str], list[str]], cached: bool = False
) -> list[Path]:
    """Download the files of a split, from the dataset or else from its conversion to Parquet. If
    `cached` is true, only check that all parts have been downloaded."""
    revision = constants.DEFAULT_REVISION
    try:
        files = _choose_files(list_names(revision), source)
    except (_FilesNotFound, FileNotFoundError) as original:
        revision = _CONVERTED
        try:
            files = _choose_files(list_names(revision), source)
        except (_FilesNotFound, HTTPError, OSError):
            raise original from None
    parts = sorted({re.sub(r"\d+", "*", name) for name in files}) if cached else files
    options: dict[str, Any] = {"repo_type": "dataset", "local_files_only": cached}
    folder = snapshot_download(source.path, revision=revision, allow_patterns=parts, **options)
    return [Path(folder, name) for name in files]


def _names(repo: str, revision: str) -> list[str]:
    info = HfApi().dataset_info(repo, revision=revision, timeout=_HUB_TIMEOUT_S)
    return [each.rfilename for each in info.siblings or []]


def _cached_names(repo: str, revision: str) -> list[str]:
    cache = Path(constants.HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}"
    commit = (cache / "refs" / revision).read_text("utf-8").strip()
    return _list_files(cache / "snapshots" / commit)
