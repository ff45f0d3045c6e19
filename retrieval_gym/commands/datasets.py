"""``retrieval_gym datasets``: every environment id, where its data are, and how much there is."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from functools import cache
from typing import Any

from retrieval_gym.datasets import RetrievalDataset, load_dataset
from retrieval_gym.datasets.sources import SOURCES, SPLITS, find_local
from retrieval_gym.registration import ENVIRONMENTS

HEADINGS = {
    "id": "id",
    "dataset": "dataset",
    "steps": "steps",
    "pool": "pool",
    "questions": "questions",
    "passages": "passages",
    "licence": "licence",
    "found": "found",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``datasets``."""
    parser = subparsers.add_parser("datasets", help="list the environments and their data", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object an environment")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; nothing is downloaded and nothing is generated."""
    rows = [describe(env_id) for env_id in ENVIRONMENTS]
    if args.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    cells = [
        list(HEADINGS.values()),
        *(
            [_cell("not found" if key == "found" and row[key] is None else row[key]) for key in HEADINGS]
            for row in rows
        ),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if any(row["found"] is None for row in rows):
        print("\nnot found: set RETRIEVAL_GYM_DATA, pass path=, or let the first gym.make fetch it from the Hub")
    return 0


def describe(env_id: str) -> dict[str, Any]:
    """Return what is known of an environment's data.

    Returns:
        ``id``, ``dataset``, ``steps``; ``found``, the place of the data or None; ``questions``, split to count;
        ``passages``, split to size of the corpus; ``pool``, the largest pool, or None where a question picks from the
        whole corpus; ``licence``. What is not known is None or an empty object.
    """
    kwargs = ENVIRONMENTS[env_id]
    name, form = kwargs.get("dataset", ""), kwargs.get("form", "pool")
    source = name.removesuffix("-long")
    composed = source != name  # from the questions of the source, over the corpus of its open form
    one_form = composed or f"{name}_texts" in SOURCES  # over a whole corpus, with nothing to choose
    row: dict[str, Any] = dict.fromkeys(HEADINGS)
    row |= {"id": env_id, "dataset": name or None, "steps": kwargs["max_steps"], "questions": {}, "passages": {}}
    if name == "synthetic":
        return row | _synthetic(form)
    if name.startswith(("babilong-", "niah-")):
        return row | {"found": "generated", "questions": _generated_documents(name), "licence": "MIT"}
    if source not in SOURCES:
        return row | {"found": "where path= says" if name else "what dataset= says"}
    row["licence"] = SOURCES[source].licence
    unions: dict[str, int | None] = {}
    for split in SPLITS:
        found = find_local(source, split, siblings=composed or form == "corpus")
        if found is not None and composed:
            row["found"] = found.place  # also where no question can be composed
        sizes = None if found is None else _sizes(name, split, found.place, None if one_form else "pool")
        if found is None or sizes is None:
            continue
        passages: int | None
        questions, passages, pool = sizes
        if form == "corpus":
            if found.place not in unions:  # every split there has the same
                dataset = _load(name, split, form)
                unions[found.place] = None if dataset is None else len(dataset.corpus)
            if (passages := unions[found.place]) is None:
                continue
        elif not one_form:
            row["pool"] = max(row["pool"] or 0, pool)
        row["found"] = found.place
        row["questions"][split], row["passages"][split] = questions, passages
    return row


def _synthetic(form: str) -> dict[str, Any]:
    from retrieval_gym.datasets.synthetic.loading import NUM_QUESTIONS, load_synthetic

    defaults = {key: value.default for key, value in inspect.signature(load_synthetic).parameters.items()}
    row = {"found": "generated", "questions": dict(NUM_QUESTIONS), "licence": "MIT"}
    if form == "pool":
        return row | {"pool": defaults["pool_size"]}
    return row | {"passages": dict.fromkeys(NUM_QUESTIONS, defaults["corpus_size"])}


def _generated_documents(name: str) -> dict[str, int]:
    from retrieval_gym.datasets import babilong, ruler

    return dict((babilong if name.startswith("babilong-") else ruler).NUM_QUESTIONS)


@cache
def _sizes(name: str, split: str, place: str, form: str | None) -> tuple[int, int, int] | None:
    """Return the numbers of questions, of passages and of candidates in the largest pool; None if unreadable."""
    dataset = _load(name, split, form)
    return None if dataset is None else (len(dataset), len(dataset.corpus), dataset.max_pool or 0)


def _load(name: str, split: str, form: str | None) -> RetrievalDataset | None:
    """Return a split; None, with a line on stderr, when it is malformed, has no labels or cannot be read.

    ``form`` is None for a dataset that has but one.
    """
    try:
        return load_dataset(name, split, **({} if form is None else {"form": form}))
    except (ValueError, OSError) as error:
        print(f"retrieval_gym: {name} {split} ({form or 'its only form'}) does not load: {error}", file=sys.stderr)
        return None


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{split} {count:,}" for split, count in value.items()) or "-"
    if isinstance(value, int):
        return f"{value:,}"
    return value or "-"
