"""Records out of json, jsonl and parquet files, and errors that say where a bad one stands."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_REQUIRED = object()
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_jsonl(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield one object a line, with where it stands (``"FILE, line 3"``).

    A ``.gz`` file is decompressed; a byte order mark, Windows line ends and blank lines are accepted.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when a line is not UTF-8, not JSON or not an object, or has half of a surrogate pair, when the file
            holds none, or when its gzip stream is broken.
    """
    path = Path(path)
    count = 0
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        record = parse_line(line, where)
        if record is not None:
            count += 1
            yield where, record
    if count == 0:
        raise ValueError(f"{path} is empty: it needs one JSON object a line")


def read_json(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield the objects of one JSON array, with where each stands (``"FILE, record 3"``, counted from 1).

    A file that starts with an object instead of an array is read as jsonl; compression and encoding as in
    ``read_jsonl``.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: as in ``read_jsonl``.
    """
    path = Path(path)
    text = _decode(b"".join(read_lines(path)), str(path))
    if text.lstrip()[:1] == "{":
        yield from read_jsonl(path)
        return
    records = _parse(text, str(path)) if text.strip() else []
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path} holds no record: it needs a JSON array of objects")
    surrogates = _has_surrogate(text)
    for number, record in enumerate(records, start=1):
        where = f"{path}, record {number}"
        yield where, _object(record, where, surrogates)


def read_parquet(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield the rows of a parquet file, with where each stands (``"FILE, record 3"``, counted from 1).

    Raises:
        FileNotFoundError: when there is no such file.
        ImportError: when pyarrow (extra ``data``) is not installed.
        ValueError: when the file is not parquet, is damaged or holds no row.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow: pip install 'retrieval-gym[data]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, record {number}", row
    except FileNotFoundError:
        raise
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a parquet file, or a damaged one ({error}): delete it and fetch it again"
        ) from error
    if number == 0:
        raise ValueError(f"{path} holds no record: it needs at least one row")


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a ``.json``, ``.jsonl`` (each also ``.gz``) or ``.parquet`` file, with where each stands.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file has another ending, or as in the reader of its kind.
    """
    name = Path(path).name.removesuffix(".gz")
    for ending, reader in ((".jsonl", read_jsonl), (".json", read_json), (".parquet", read_parquet)):
        if name.endswith(ending):
            return reader(path)
    raise ValueError(f"cannot tell the format of {path}: name it .json, .jsonl, .json.gz, .jsonl.gz or .parquet")


def get_field(record: Record, name: str, kind: type, where: str, default: Any = _REQUIRED) -> Any:
    """Return ``record[name]``, checked to be a ``kind``; a missing or null field gives ``default`` if there is one.

    Raises:
        ValueError: when the field is missing or of another type; the message starts with ``where``.
    """
    value = record.get(name)
    if value is None:
        if default is not _REQUIRED:
            return default
        raise ValueError(f"{where}: field {name!r} is missing; it has {', '.join(map(repr, record)) or 'no field'}")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where}: field {name!r} must be a {kind.__name__}, got {value!r:.80}")
    return value


def get_text(record: Record, name: str, where: str) -> str:
    """Return a string field that holds more than white space.

    Raises:
        ValueError: as ``get_field``, or when nothing but white space is there.
    """
    text = get_field(record, name, str, where)
    if not text.strip():
        raise ValueError(f"{where}: field {name!r} is empty: fill it in or remove the record")
    return text


def get_strings(record: Record, name: str, where: str, default: Any = _REQUIRED) -> list[str]:
    """Return a list field whose members are all strings.

    Raises:
        ValueError: as ``get_field``, or when a member is not a string.
    """
    values = get_field(record, name, list, where, default)
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{where}: field {name!r} must hold strings, got {value!r:.80}")
    return values


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file as they are, those of a ``.gz`` file decompressed.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is a folder, or its gzip stream is broken.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file")
    if path.suffix != ".gz":
        with open(path, "rb") as file:
            yield from file
        return
    try:
        with gzip.open(path, "rb") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): fetch it again") from error


def parse_line(line: bytes, where: str) -> Record | None:
    """Return the object of one line, or None where it is blank.

    Raises:
        ValueError: when the line is not UTF-8, not JSON or not an object, or has half of a surrogate pair.
    """
    text = _decode(line, where)
    return _object(_parse(text, where), where, _has_surrogate(text)) if text.strip() else None


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        place = f"{where}, line {line}" if line > 1 else where
        raise ValueError(f"{place}: not UTF-8 ({error}): convert the file to UTF-8") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{where}: not JSON ({error.msg} at {place}column {error.colno}): {text[:60]!r}") from error
    except ValueError as error:  # an integer of too many digits
        raise ValueError(f"{where}: not readable ({error}): {text[:60]!r}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to read: {text[:60]!r}") from error


def _has_surrogate(text: str) -> bool:
    return _SURROGATE.search(text) is not None


def _object(value: Any, where: str, surrogates: bool) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a JSON object, got {value!r:.80}")
    # JSON can spell half of a surrogate pair, which no UTF-8 file can hold.
    if surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(
                f"{where}: the text has half of a surrogate pair ({half}): correct or remove it"
            ) from error
    return value


def get_key(value: Any, name: str, where: str) -> str:
    """Return an identifier as a string.

    Raises:
        ValueError: when it is neither a string that is not empty nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise ValueError(f"{where}: field {name!r} must be a string or an integer, got {value!r:.80}")
    return str(value)
