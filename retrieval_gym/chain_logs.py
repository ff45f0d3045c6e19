"""Chains that somebody else's system walked, out of a jsonl file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrieval_gym import mdp
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.datasets.readers import Record, get_field, get_key, get_text, read_jsonl
from retrieval_gym.diagnostics import Walk


def read_chain_logs(paths: Sequence[str | Path], dataset: RetrievalDataset) -> dict[str, Walk]:
    """Read logged chains, one JSON object a line, plain or ``.gz``; other fields are ignored.

    - ``id``: the question's id in the dataset.
    - ``picked``: ids of passages in the corpus, in the order of the steps. A step that adds several passages is a list
      of them, and one that adds none an empty list.
    - ``retriever``: optional name of the system, so that one file can hold several; by default the file's name.

    ``retrieval_gym evaluate --per-question`` writes such a file.

    Returns:
        Each system's chains, by its name behind ``log:``, questions in ascending order.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when a file is empty or malformed, a question or passage is unknown or no candidate of its
            question, a passage is picked twice in a chain, a question occurs twice for a system, a system's name in
            two files, or systems were not asked the same questions. The message names file and line.
    """
    questions = {question.id: i for i, question in enumerate(dataset.questions)}
    chains: dict[str, dict[int, tuple[list[list[int]], str]]] = {}
    for path in paths:
        systems: dict[str, dict[int, tuple[list[list[int]], str]]] = {}
        for where, record in read_jsonl(path):
            name = Path(path).name.removesuffix(".gz").removesuffix(".jsonl")
            if record.get("retriever") is not None:
                name = get_text(record, "retriever", where)
            key = get_key(record.get("id"), "id", where)
            if key not in questions:
                raise ValueError(
                    f"{where}: question {key!r} is not in {dataset.name}, split {dataset.split}: correct the id, or "
                    "name the environment and the split that were asked"
                )
            of_system = systems.setdefault(f"log:{name}", {})
            if questions[key] in of_system:
                raise ValueError(
                    f"{where}: question {key!r} occurs twice for {name}, first at {of_system[questions[key]][1]}: keep "
                    "one chain, or tell runs apart by the field 'retriever'"
                )
            of_system[questions[key]] = (_steps(record, where, questions[key], dataset), where)
        for name in sorted(systems.keys() & chains.keys()):
            raise ValueError(f"{path}: {name} is in another file too: rename it in the field 'retriever'")
        chains |= systems
    first = next(iter(chains))
    for name, of_system in chains.items():
        apart = sorted(of_system.keys() ^ chains[first].keys())
        if apart:
            has, lacks = (name, first) if apart[0] in of_system else (first, name)
            where = chains[has][apart[0]][1]
            raise ValueError(f"{where}: {has} was asked this question and {lacks} was not: give both the same ones")
        if not any(step for steps, _ in of_system.values() for step in steps):
            raise ValueError(f"{name} picks no passage in any of its {len(of_system)} chains: log what it picked")
    return {name: _walk({i: steps for i, (steps, _) in of_system.items()}) for name, of_system in chains.items()}


def _steps(record: Record, where: str, question: int, dataset: RetrievalDataset) -> list[list[int]]:
    """Return the corpus ids of each step of a chain."""
    steps = get_field(record, "picked", list, where)
    if len(steps) > mdp.MAX_STEPS:
        raise ValueError(f"{where}: {len(steps)} steps: a chain has at most {mdp.MAX_STEPS}")
    ids, pool, seen = dataset.corpus.ids, dataset.pool(question), set()
    members = None if pool is None else set(pool.tolist())
    chain = []
    for step in steps:
        keys = [get_key(key, "picked", where) for key in (step if isinstance(step, list) else [step])]
        for key in keys:
            if key not in ids:
                raise ValueError(f"{where}: passage {key!r} is not in the corpus of {dataset.name}: correct the id")
            if members is not None and ids[key] not in members:
                raise ValueError(
                    f"{where}: passage {key!r} is not in the question's pool: name an environment over the whole corpus"
                )
            if key in seen:
                raise ValueError(f"{where}: passage {key!r} is picked twice: name it where it was picked first")
            seen.add(key)
        chain.append([ids[key] for key in keys])
    return chain


def _walk(chains: dict[int, list[list[int]]]) -> Walk:
    questions = sorted(chains)
    taken = np.array([len(chains[i]) for i in questions], np.int64)
    width = max(len(step) for steps in chains.values() for step in steps)
    picked = np.full((len(questions), taken.max(), width), -1, np.int64)
    for row, i in enumerate(questions):
        for column, step in enumerate(chains[i]):
            picked[row, column, : len(step)] = step
    return Walk(np.array(questions, np.int64), picked, taken)
