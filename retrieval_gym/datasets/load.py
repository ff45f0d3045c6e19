"""``load_dataset``: one name, or several joined with ``+``, to one dataset."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_gym.datasets.base import Corpus, Passage, RetrievalDataset, merge_gold

SPLITS = ("train", "dev", "test")
LOADERS = {
    "synthetic": "retrieval_gym.datasets.synthetic:load_synthetic",
    "musique": "retrieval_gym.datasets.musique:load_musique",
    "hotpotqa": "retrieval_gym.datasets.hotpotqa:load_hotpotqa",
    "2wiki": "retrieval_gym.datasets.twowiki:load_2wiki",
    "hotpotqa-long": "retrieval_gym.datasets.long:load_hotpotqa_long",
    "2wiki-long": "retrieval_gym.datasets.long:load_2wiki_long",
    "scifact": "retrieval_gym.datasets.beir:load_scifact",
    "msmarco": "retrieval_gym.datasets.beir:load_msmarco",
    "beir": "retrieval_gym.datasets.beir:load_beir",
    "babilong-qa1": "retrieval_gym.datasets.babilong:load_qa1",
    "babilong-qa2": "retrieval_gym.datasets.babilong:load_qa2",
    "babilong-qa3": "retrieval_gym.datasets.babilong:load_qa3",
    "babilong-qa4": "retrieval_gym.datasets.babilong:load_qa4",
    "babilong-qa5": "retrieval_gym.datasets.babilong:load_qa5",
    "niah-single": "retrieval_gym.datasets.ruler:load_niah_single",
    "niah-multikey": "retrieval_gym.datasets.ruler:load_niah_multikey",
    "niah-multivalue": "retrieval_gym.datasets.ruler:load_niah_multivalue",
    "niah-multiquery": "retrieval_gym.datasets.ruler:load_niah_multiquery",
    "ruler-qa1": "retrieval_gym.datasets.ruler:load_ruler_qa1",
    "ruler-qa2": "retrieval_gym.datasets.ruler:load_ruler_qa2",
    "custom": "retrieval_gym.datasets.jsonl:load_custom",
}


def load_dataset(name: str, split: str = "train", path: str | Path | None = None, **options: Any) -> RetrievalDataset:
    """Load a dataset by name.

    Args:
        name: one of ``LOADERS``, or several joined with ``+`` (``"musique+2wiki"``). Joined datasets share one corpus
            in which equal passages are one, and keep their questions in the order of the names.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: a file or folder that holds the data; by default ``$RETRIEVAL_GYM_DATA``, the cache and the Hub are
            searched in this order.
        options: what the dataset itself takes, such as ``form="pool"|"corpus"``, ``corpus=PATH``, ``seed=`` or
            ``pool_size=``. Of several joined datasets each takes the options that it knows.

    Raises:
        ValueError: when a name, the split or an option is unknown, a name occurs twice, the data are malformed, or
            datasets cannot be joined.
        FileNotFoundError: when the data are nowhere; the message names every place searched and the remedy.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    if not isinstance(name, str):
        raise ValueError(f"dataset is {name!r}: give its name, one of {', '.join(LOADERS)}")
    if not isinstance(path, str | os.PathLike | None):
        raise ValueError(f"path is {path!r}: give the name of a file or folder")
    names = name.split("+")
    for part in names:
        if part not in LOADERS:
            raise ValueError(f"unknown dataset {part!r}: choose one of {', '.join(LOADERS)}, or join several with '+'")
        if names.count(part) > 1:
            raise ValueError(f"dataset {name!r} names {part!r} twice: name each dataset once")
    loaders = [_loader(part) for part in names]
    known = [inspect.signature(loader).parameters for loader in loaders]
    for option in options:
        if not any(option in parameters for parameters in known):
            valid = sorted({p for parameters in known for p in parameters} - {"split", "path"})
            raise ValueError(f"dataset {name!r} takes no option {option!r}: it takes {', '.join(valid)}")
    parts = [
        loader(split, path, **{key: value for key, value in options.items() if key in parameters})
        for loader, parameters in zip(loaders, known, strict=True)
    ]
    return parts[0] if len(parts) == 1 else join_datasets(parts)


def _loader(name: str) -> Callable[..., RetrievalDataset]:
    module, function = LOADERS[name].split(":")
    return getattr(import_module(module), function)


def join_datasets(parts: list[RetrievalDataset]) -> RetrievalDataset:
    """Join datasets of the same split into one over the union of their corpora; equal passages become one.

    Raises:
        ValueError: when some have pools and others do not, or one makes its documents on demand.
    """
    made = [part.name for part in parts if type(part).pool is not RetrievalDataset.pool]
    if made:
        raise ValueError(f"cannot join {made[0]!r}: its documents are made on demand; play it alone")
    if len({part.pools is None for part in parts}) > 1:
        raise ValueError(f"cannot join {[p.name for p in parts]}: some have pools and others a whole corpus")
    index: dict[Passage, int] = {}
    questions, pools = [], []
    for part in parts:
        ids = np.fromiter((index.setdefault(p, len(index)) for p in part.corpus), np.int64, len(part.corpus))
        for i, question in enumerate(part.questions):
            gold, grades = merge_gold(ids[list(question.gold)].tolist(), question.grades)
            questions.append(replace(question, gold=gold, grades=grades))
            if part.pools is not None:
                _, first = np.unique(ids[part.pools[i]], return_index=True)
                pools.append(ids[part.pools[i][np.sort(first)]])
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, count in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return RetrievalDataset(
        name="+".join(part.name for part in parts),
        split=parts[0].split,
        corpus=Corpus([p.title for p in index], [p.text for p in index]),
        questions=questions,
        pools=pools if parts[0].pools is not None else None,
        dropped=dropped,
        source=" + ".join(part.source for part in parts),
        licence=" + ".join(dict.fromkeys(part.licence for part in parts)),
    )
