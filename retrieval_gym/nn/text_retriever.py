"""``load_retriever``: a finished run asked in plain strings, for people who have no dataset of questions."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from retrieval_gym import mdp
from retrieval_gym.chains import Chains, final_ranking, greedy_chain, single_search, stop_by_threshold
from retrieval_gym.datasets.base import Corpus, Question, RetrievalDataset
from retrieval_gym.datasets.jsonl import corpus_path, read_corpus
from retrieval_gym.nn.dense import DenseRetriever
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.run import Run, resolve_device
from retrieval_gym.nn.trained import load_run
from retrieval_gym.ranking import Ids, Retriever


@dataclass(frozen=True)
class Hit:
    """A passage that was found.

    Attributes:
        id: its id in the corpus file.
        title: may be empty.
        text: without the title.
        score: of the search that found it; inner product, or Q-value for a run of ``agents/pqn.py``.
    """

    id: str
    title: str
    text: str
    score: float


@dataclass(frozen=True)
class Chain:
    """What one question has found.

    Attributes:
        question: as it was asked.
        hits: the picked passages in pick order.
        ranking: the picked passages, then all others by their best score in any search; as long as was asked for.
        stopped_at: the score of the pick that fell below the threshold and ended the chain, or None.
    """

    question: str
    hits: tuple[Hit, ...]
    ranking: tuple[Hit, ...] = ()
    stopped_at: float | None = None


class TextRetriever:
    """Searches a whole corpus for questions given as strings; see ``load_retriever`` for the usual way in.

    Calls from several threads take turns. Each distinct question is tokenised once and its tokens are kept, about half
    a kilobyte each.

    Args:
        corpus: what is searched.
        make: called once, with a dataset over this corpus to which every question asked is added.
    """

    def __init__(self, corpus: Corpus, make: Callable[[RetrievalDataset], Retriever]) -> None:
        self.corpus = corpus
        # A dataset needs a question with gold. This one is never asked, and nothing here looks at gold.
        self._questions = [Question("", "never asked", (0,))]
        self._known: dict[str, int] = {}
        self._dataset = RetrievalDataset("strings", "test", corpus, self._questions)
        self._retriever = make(self._dataset)
        self._lock = threading.Lock()

    @classmethod
    def from_encoder(
        cls,
        name_or_path: str | Path,
        dataset_or_path: RetrievalDataset | Corpus | str | Path,
        *,
        layers: Sequence[int] | None = None,
        max_passage_tokens: int | None = None,
        device: str | torch.device = "auto",
        cache_dir: str | Path | None = None,
        progress: bool = False,
    ) -> TextRetriever:
        """Return an encoder that was not trained here, as the retriever ``dense`` plays it; see ``load_retriever``."""
        corpus = corpus_of(dataset_or_path)
        encoder = TextEncoder.load(name_or_path, device=resolve_device(str(device)), layers=layers)
        return cls(
            corpus,
            lambda dataset: DenseRetriever(
                dataset, encoder, max_passage_tokens=max_passage_tokens, cache_dir=cache_dir, progress=progress
            ),
        )

    @property
    def truncated(self) -> int:
        """Number of passages, questions and states that were cut to fit."""
        return int(getattr(self._retriever, "truncated", 0))

    def search(self, questions: Sequence[str], k: int = 10) -> list[list[Hit]]:
        """Search once for each question alone, and return its ``k`` best passages, best first.

        Args:
            questions: N strings that are not blank.
            k: at least 1; fewer are returned where the corpus is smaller.

        Raises:
            ValueError: when ``questions`` is one string or holds something else, a question is blank or has half of a
                surrogate pair, or ``k`` is below 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}: ask for at least 1 passage")
        asked = self._ask(questions)
        if len(asked) == 0:
            return []
        with self._lock:
            found = single_search(self._retriever, self._dataset, asked, 1, depth=k)
        return [
            self._hits(ids, scores) for ids, scores in zip(found.step_ids[:, 0], found.step_scores[:, 0], strict=True)
        ]

    def chain(self, question: str, steps: int = 4, threshold: float | None = None, *, k: int = 0) -> Chain:
        """Pick the best passage, search again with it in the query, and so on; see ``chains``."""
        return self.chains([question], steps, threshold, k=k)[0]

    def chains(
        self, questions: Sequence[str], steps: int = 4, threshold: float | None = None, *, k: int = 0
    ) -> list[Chain]:
        """Walk one greedy chain for each question.

        Args:
            questions: N strings that are not blank.
            steps: most passages to pick.
            threshold: stop before the first pick whose score is below this (Q-RAG's early stopping); None never does.
            k: length of the ranking to return beside the chain; 0 for none.

        Raises:
            ValueError: as in ``search``, or when a number is out of range.
        """
        steps = mdp.check_max_steps(steps, "steps")
        if k < 0:
            raise ValueError(f"k is {k}: ask for 0 passages (no ranking) or more")
        if threshold is not None and math.isnan(threshold):
            raise ValueError("threshold is NaN: give a number, or None to walk to the end of the budget")
        asked = self._ask(questions)
        if len(asked) == 0:
            return []
        with self._lock:
            found = greedy_chain(self._retriever, self._dataset, asked, steps, depth=max(1, k))
        kept = (found.picked >= 0).sum(axis=1) if threshold is None else stop_by_threshold(found, threshold)
        return [self._chain(found, row, int(kept[row]), k) for row in range(len(found))]

    def _ask(self, questions: Sequence[str]) -> Ids:
        """Return the index of each question in the dataset, int64 ``(N,)``; new ones are added."""
        if isinstance(questions, str) or not all(isinstance(question, str) for question in questions):
            raise ValueError(f"questions must be a list of strings, got {questions!r:.80}")
        for question in questions:
            if not question.strip():
                raise ValueError("a question is blank: ask something")
            try:
                question.encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])
                raise ValueError(
                    f"question {question!a:.80} has half of a surrogate pair ({half}): correct it"
                ) from error
        with self._lock:
            for question in questions:
                if question not in self._known:
                    self._known[question] = len(self._questions)
                    self._questions.append(Question(str(len(self._questions)), question, (0,)))
        return np.array([self._known[question] for question in questions], np.int64)

    def _chain(self, found: Chains, row: int, kept: int, k: int) -> Chain:
        picks, scores = found.picked[row, :kept], found.scores[row, :kept]
        steps = found.picked.shape[1]
        fell = kept < steps and found.picked[row, kept] >= 0
        ranking: list[Hit] = []
        if k:
            # The search whose best passage fell below the threshold was made, so what it found is ranked too.
            walked = slice(0, min(kept + 1, steps))
            pad = np.full((1, steps - kept), -1)
            cut = Chains(
                found.questions[[row]],
                np.concatenate([picks[None], pad], axis=1),
                found.scores[[row]],
                found.step_ids[[row], walked],
                found.step_scores[[row], walked],
                found.searches[[row]],
                found.seconds,
            )
            best: dict[int, float] = {}
            for i, score in zip(cut.step_ids.ravel().tolist(), cut.step_scores.ravel().tolist(), strict=True):
                best[i] = max(score, best.get(i, -math.inf))
            best |= dict(zip(picks.tolist(), scores.tolist(), strict=True))
            ids = final_ranking(cut, k)[0]
            ranking = self._hits(ids, np.array([best.get(i, -math.inf) for i in ids.tolist()]))
        question = self._questions[int(found.questions[row])].text
        stopped_at = float(found.scores[row, kept]) if fell else None
        return Chain(question, tuple(self._hits(picks, scores)), tuple(ranking), stopped_at)

    def _hits(self, ids: Ids, scores: np.ndarray) -> list[Hit]:
        keys = self.corpus.keys
        return [
            Hit(keys[i], self.corpus[i].title, self.corpus[i].text, float(score))
            for i, score in zip(ids.tolist(), scores.tolist(), strict=True)
            if i >= 0
        ]


def load_retriever(
    run_dir: str | Path,
    dataset_or_path: RetrievalDataset | Corpus | str | Path,
    *,
    device: str | torch.device = "auto",
    cache_dir: str | Path | None = None,
) -> TextRetriever:
    """Return what a finished run trained, to be asked in plain strings.

    Args:
        run_dir: a run folder of ``agents/infonce.py``, ``agents/pao.py`` or ``agents/pqn.py``.
        dataset_or_path: what is searched: a corpus, a dataset, a ``corpus.jsonl`` of ``{id, title, text}`` or its
            folder. Pools of a dataset play no part: the whole corpus is searched.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"mps"``.
        cache_dir: where the corpus's embeddings are kept from call to call; None embeds it anew.

    Raises:
        FileNotFoundError: when there is no such folder or corpus, or the run has not finished.
        ValueError: when the folder is not that of such a run, or the run scores passages by their place in a document.
    """
    positions = Run.open(run_dir).config.get("positions", "none")
    if positions != "none":
        raise ValueError(
            f"{run_dir} was trained with positions={positions!r}: it scores a passage by its place in the question's "
            "own document, which a corpus does not have; score it with retrieval_gym evaluate"
        )
    corpus = corpus_of(dataset_or_path)
    where = resolve_device(str(device))
    return TextRetriever(corpus, lambda dataset: load_run(run_dir, dataset, device=where, cache_dir=cache_dir))


def corpus_of(dataset_or_path: RetrievalDataset | Corpus | str | Path) -> Corpus:
    """Return the corpus of a dataset, or the one in a ``corpus.jsonl`` or its folder."""
    if isinstance(dataset_or_path, RetrievalDataset):
        return dataset_or_path.corpus
    if isinstance(dataset_or_path, Corpus):
        return dataset_or_path
    return read_corpus(corpus_path(dataset_or_path))
