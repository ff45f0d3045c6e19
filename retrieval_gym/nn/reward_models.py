"""Reward models: what a passage is worth as the next one, given a question and the passages picked so far.

Two calls, one inside the other. A ``RewardModel`` judges texts, one number a passage, as a reranker or somebody else's
service can; it never sees an id. ``ListRewards`` is what an agent calls, states and lists of corpus ids in, one number
a place out. ``TextRewards`` makes the second out of any of the first. ``GoldRewards`` is the second itself and no
``RewardModel``: gold is a set of ids, and texts alone do not tell it where two questions read the same, or where
sentences that read the same are told apart by their place in a document.
"""

from __future__ import annotations

import hashlib
import zipfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.files import lock, write_atomically
from retrieval_gym.mdp import Ids
from retrieval_gym.nn import model_files
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.retrieval import import_callable

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

Floats = NDArray[np.float64]
Output = Literal["logits", "sigmoid"]

KINDS = "gold, reranker:NAME_OR_PATH or package.module:function"
# The ends of the names of model classes that score a pair; any other has no head, and would be given a random one.
SCORING_CLASSES = ("ForSequenceClassification", "ForCausalLM")


class RewardModel(Protocol):
    """Any callable that judges passages by text: a function will do."""

    def __call__(
        self, questions: list[str], histories: list[list[str]], passages: list[str], /
    ) -> NDArray[np.floating]:
        """Return one finite number a passage, ``(N,)``; only how they compare within a list matters to PAO.

        Args:
            questions: N questions.
            histories: for each the passages picked so far, oldest first; empty at the first step.
            passages: for each a passage that may be picked next.
        """
        ...


class ListRewards(Protocol):
    """What an agent asks: the reward of every passage of a list."""

    def __call__(self, states: mdp.States, lists: Ids) -> Floats:
        """Return float64 ``(B, K)``, 0 where a list has ended.

        Args:
            states: B states.
            lists: corpus ids, int64 ``(B, K)``, padded with -1.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for a resumed run to be given the same numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        ...

    def keep(self) -> None:
        """Write what later runs can use; called at every checkpoint."""
        ...


class GoldRewards:
    """1 for a gold passage that is still missing, or a copy of one in title and text, else 0.

    A list without a missing gold passage has rewards of 0 throughout, and so no advantage: nothing is put into it.

    Args:
        dataset: whose gold.
    """

    def __init__(self, dataset: RetrievalDataset) -> None:
        self.dataset = dataset

    def __call__(self, states: mdp.States, lists: Ids) -> Floats:
        """Return float64 ``(B, K)``; see ``ListRewards``."""
        missing = np.where(mdp.found_gold(states, self.dataset), -1, self.dataset.gold[states.question])
        listed = np.where(lists >= 0, self.dataset.corpus.canonical[lists], -2)  # -2 equals no gold, nor its padding
        return (listed[:, :, None] == missing[:, None, :]).any(axis=2).astype(np.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: gold does not change."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over nothing."""

    def keep(self) -> None:
        """Write nothing."""


class TextRewards:
    """A reward model on the texts of states and lists, and what it returns checked.

    Args:
        model: called once for all passages of a batch of lists. Where it has ``state_dict`` and ``load_state_dict``,
            as ``Reranker`` has, checkpoints hold its state; where it has ``keep``, it is called at each.
        dataset: whose questions and passages.
        name: of the model, in error messages.
    """

    def __init__(self, model: RewardModel, dataset: RetrievalDataset, name: str = "the reward model") -> None:
        self.model, self.dataset, self.name = model, dataset, name

    def __call__(self, states: mdp.States, lists: Ids) -> Floats:
        """Return float64 ``(B, K)``; see ``ListRewards``.

        Raises:
            ValueError: when the model returns anything but one finite number a passage.
        """
        rows, columns = np.nonzero(lists >= 0)
        corpus, size = self.dataset.corpus, len(states)
        questions = [self.dataset.questions[i].text for i in states.question.tolist()]
        histories = [corpus.texts(picked[picked >= 0]) for picked in states.picked]
        passages = corpus.texts(lists[rows, columns])
        # A list of each history's own: a model may change what it is given.
        asked = [questions[row] for row in rows.tolist()], [list(histories[row]) for row in rows.tolist()], passages
        values = check_rewards(self.model(*asked), len(passages), self.name)
        table = np.zeros((size, lists.shape[1]))
        table[rows, columns] = values
        return table

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state, where it has one."""
        return self.model.state_dict() if hasattr(self.model, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the model the state that ``state_dict`` returned."""
        if hasattr(self.model, "load_state_dict"):
            self.model.load_state_dict(state)

    def keep(self) -> None:
        """Let the model write what later runs can use, where it does so."""
        if hasattr(self.model, "keep"):
            self.model.keep()


class Reranker:
    """A cross-encoder on the state's text (the question, and picked passages below it) and the passage.

    Pairs are batched sorted by length, and each is scored once while it stays in the cache. The cross-encoder's own
    limit cuts what is too long.

    Args:
        name_or_path: a sentence-transformers ``CrossEncoder`` with one output, by Hub id or folder.
        device: where it runs.
        output: ``"logits"``, the head's output as it is, or ``"sigmoid"`` of it, from 0 to 1.
        batch_size: pairs in one forward pass.
        cache_size: most pairs kept, about 150 bytes each; the oldest go first.
        cache_dir: folder that hands the scores from run to run, a file for each model and output; None is nowhere.

    Attributes:
        scored: number of pairs that went through the model.

    Raises:
        FileNotFoundError: when there is no such model.
        ValueError: when the model has no head that scores a pair, or more than one output; or a file of scores is
            damaged.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        device: str | torch.device = "cpu",
        output: Output = "logits",
        batch_size: int = 64,
        cache_size: int = 2_000_000,
        cache_dir: str | Path | None = None,
    ) -> None:
        from sentence_transformers import CrossEncoder

        folder = model_files.find_model(name_or_path)
        classes = model_files.read_json(folder / "config.json").get("architectures") or []
        if not any(str(name).endswith(SCORING_CLASSES) for name in classes):
            raise ValueError(f"{name_or_path} is no cross-encoder (its config.json says {classes}): give one")
        with model_files.quiet_transformers():
            self._model = CrossEncoder(str(folder), device=str(device))
        if self._model.num_labels != 1:
            raise ValueError(f"{name_or_path} has {self._model.num_labels} outputs: give a cross-encoder with one")
        self._activation = torch.nn.Sigmoid() if output == "sigmoid" else torch.nn.Identity()
        self._batch_size, self._cache_size = batch_size, cache_size
        self._cache: dict[bytes, float] = {}
        self.scored = self._kept = 0
        self._file: Path | None = None
        if cache_dir is not None:
            weights = model_files.weights_hash(self._model)
            self._file = Path(cache_dir) / f"{weights[:32]}-{self._model.tokenizer.model_max_length}-{output}.npz"
            self._cache = _read_scores(self._file)

    def __call__(self, questions: list[str], histories: list[list[str]], passages: list[str]) -> NDArray[np.float32]:
        """Return float32 ``(N,)``; see ``RewardModel``."""
        states = [TextEncoder.state_text(*asked) for asked in zip(questions, histories, strict=True)]
        pairs = list(zip(states, passages, strict=True))
        keys = [_digest(*pair) for pair in pairs]
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._cache}
        known = {key: self._cache[key] for key in keys if key not in new}
        if new:
            known |= zip(new, self._score(list(new.values())), strict=True)
            self._cache |= {key: known[key] for key in new}
            for key in list(islice(self._cache, max(0, len(self._cache) - self._cache_size))):
                del self._cache[key]
        return np.array([known[key] for key in keys], np.float32)

    def _score(self, pairs: list[tuple[str, str]]) -> list[float]:
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        sent = [list(pairs[i]) for i in order]
        scores = self._model.predict(
            sent, batch_size=self._batch_size, activation_fn=self._activation, show_progress_bar=False
        )
        self.scored += len(pairs)
        back = np.empty(len(pairs), np.float32)
        back[order] = scores
        return back.tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the cache: digests uint8 ``(N, 16)`` and scores float32 ``(N,)``, oldest first.

        A score depends on its batch in the last bits, so a resumed run needs the old ones to be the same bit for bit.
        """
        digests = np.frombuffer(b"".join(self._cache), np.uint8).reshape(-1, 16).copy()
        return {"digests": torch.from_numpy(digests), "scores": torch.tensor(list(self._cache.values()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the cache by one that ``state_dict`` returned."""
        digests = [row.tobytes() for row in state["digests"].cpu().numpy()]
        self._cache = dict(zip(digests, state["scores"].tolist(), strict=True))

    def keep(self) -> None:
        """Write the scores into ``cache_dir``, beside those that other runs have written there by now.

        Raises:
            OSError: when they cannot be written.
            ValueError: when the file that is there is damaged.
        """
        if self._file is None or self.scored == self._kept:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        held = lock(self._file.with_suffix(".lock"), wait=True)
        try:
            scores = _read_scores(self._file) | self._cache
            digests = np.frombuffer(b"".join(scores), np.uint8).reshape(-1, 16)
            values = np.array(list(scores.values()), np.float32)
            write_atomically(self._file, lambda file: np.savez(file, digests=digests, scores=values))
        finally:
            if held is not None:
                held.close()
        self._kept = self.scored


def _read_scores(file: Path) -> dict[bytes, float]:
    """Return the scores of pairs by digest that ``Reranker.keep`` wrote; none where there is no file."""
    if not file.is_file():
        return {}
    try:
        with np.load(file) as kept:
            digests, values = kept["digests"], kept["scores"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and its pairs are scored again") from error
    return dict(zip([row.tobytes() for row in digests], values.tolist(), strict=True))


def _digest(state: str, passage: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for text in (state, passage):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def make_list_rewards(
    name: str,
    dataset: RetrievalDataset,
    *,
    device: str | torch.device = "cpu",
    output: Output = "logits",
    cache_dir: str | Path | None = None,
) -> ListRewards:
    """Return a reward model by name.

    Args:
        name: ``"gold"``, ``"reranker:NAME_OR_PATH"`` or ``"package.module:function"``, a ``RewardModel`` that is
            imported, from the working directory too.
        dataset: what is asked and picked.
        device: where a reranker runs.
        output: of a reranker.
        cache_dir: where a reranker's scores are kept from run to run; None is nowhere.

    Raises:
        FileNotFoundError: when there is no such reranker.
        ValueError: when the name is unknown or cannot be imported, or the reranker is none.
    """
    if name == "gold":
        return GoldRewards(dataset)
    kind, _, rest = name.partition(":")
    if kind == "reranker" and rest:
        return TextRewards(Reranker(rest, device=device, output=output, cache_dir=cache_dir), dataset, name)
    return TextRewards(import_callable(name, "reward model", f"give {KINDS}"), dataset, name)


def check_rewards(values: Any, size: int, name: str) -> Floats:
    """Return what a reward model gave as float64 ``(size,)``.

    Raises:
        ValueError: when it is not one finite number a passage.
    """
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} returned {type(values).__name__}: it must return one number a passage") from error
    if numbers.shape != (size,):
        raise ValueError(f"{name} returned shape {numbers.shape} for {size} passages: it must return ({size},)")
    if not np.isfinite(numbers).all():
        bad = int((~np.isfinite(numbers)).sum())
        raise ValueError(f"{name} returned {bad} numbers of {size} that are not finite: it must return finite ones")
    return numbers
