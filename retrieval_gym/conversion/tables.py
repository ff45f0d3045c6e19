"""Single files of records, whatever their kind, with errors that name file and line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from retrieval_gym.datasets.readers import Record, read_lines, read_records

DELIMITERS = {".csv": ",", ".tsv": "\t"}
RECORDS = (".json", ".jsonl", ".parquet")
LONGEST_CELL = 2**31 - 1  # characters; the csv module's own limit is 131,072


def suffix(path: str | Path) -> str:
    """Return how the name of a file ends, ``.gz`` apart."""
    return Path(Path(path).name.removesuffix(".gz")).suffix


def read_table(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a csv, tsv, json, jsonl (each also ``.gz``) or parquet file, with where each stands.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it ends otherwise, or is malformed; the message names file and line.
    """
    ending = suffix(path)
    return _read_csv(Path(path), DELIMITERS[ending]) if ending in DELIMITERS else read_records(path)


def _read_csv(path: Path, delimiter: str) -> Iterator[tuple[str, Record]]:
    """Yield the rows below a header; cells are text as they stand, and None where they are empty."""
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(_decoded(path), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        where = f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            raise ValueError(f"{where}: not a row of a table ({error}): correct its quotes and line ends") from error
        if not any(cells):
            continue
        if header is None:
            header = cells
            twice = next((name for name in header if header.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{where}: the column {twice!r} occurs twice: give each a name of its own")
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"{where}: {len(cells)} cells where the header has {len(header)}: put quotes around a cell that holds "
                f"{delimiter!r}, or correct the line"
            )
        yield where, {name: cell or None for name, cell in zip(header, cells, strict=True)}
    if header is None:
        raise ValueError(f"{path} is empty: it needs a header and one row a line")


def _decoded(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error}): convert the file to UTF-8") from error
