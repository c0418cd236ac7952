"""Rows of Parquet and Arrow files, by pyarrow, which only such files need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, cast

from keel.configs.schema import ConfigError

TABLES = (".parquet", ".arrow")
ROWS = 1024
"""That are Python's objects at a time."""
INSTALL = "pip install 'pyarrow>=20' (the extra `data`)"


def table_rows(path: Path, knob: str) -> Iterator[dict[str, Any]]:
    """Each row in terms of JSON: times and decimals as text, a NaN as null. Binary columns, such as
    images, are left out. Raises ConfigError naming `knob` where pyarrow is missing, and for a file
    that is none."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"{knob} = {str(path)!r}: is read by pyarrow, which is not installed: {INSTALL}"
        ) from error
    try:
        if path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path) as file:
                names = _texts(arrow, file.schema_arrow)
                for batch in file.iter_batches(batch_size=ROWS, columns=names):
                    yield from map(_plain, batch.to_pylist())
        else:
            with arrow.memory_map(str(path)) as source, _opened(arrow, source) as batches:
                names = _texts(arrow, batches.schema)
                for whole in batches:
                    for start in range(0, whole.num_rows, ROWS):
                        yield from map(_plain, whole.select(names).slice(start, ROWS).to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{knob} = {str(path)!r}: cannot be read: {error}") from error


def _opened(arrow: Any, source: Any) -> Any:
    """A stream, as `datasets` writes it, or an Arrow file's batches as one."""
    if source.read(6) != b"ARROW1":
        source.seek(0)
        return arrow.ipc.open_stream(source)
    source.seek(0)
    file = arrow.ipc.open_file(source)
    batches = [file.get_batch(index) for index in range(file.num_record_batches)]
    return arrow.RecordBatchReader.from_batches(file.schema, batches)


def _texts(arrow: Any, schema: Any) -> list[str]:
    """Columns without binary data."""

    def binary(kind: Any) -> bool:
        inner = [kind.field(index).type for index in range(kind.num_fields)]
        of = arrow.types
        alone = of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind)
        return alone or any(map(binary, inner))

    return [field.name for field in schema if not binary(field.type)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast(list[Any], value)]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, float) and value != value:
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)
