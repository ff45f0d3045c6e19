"""``EmbeddingObservation``: states as one vector of numbers, for learners that cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.wrappers.cached_encode import CachedEncode, Encode, Vectors
from retrieval_gym.wrappers.candidates import num_candidates

_OF_CANDIDATES = ("scores", "candidates")
_DEFAULT = (("steps_left", "question", "picked"), ("steps_left", "scores"))


class EmbeddingObservation(gym.Wrapper, RecordConstructorArgs):
    """Turn the observation into a flat float32 vector with the help of any text encoder.

    Question, picked passages and candidates are embedded, each distinct text once. The observation is a 1-D ``Box``,
    the concatenation of some of these parts, with ``n`` candidates (the largest pool, or the ``k`` of
    ``TopKCandidates``), ``T`` steps and vectors of length ``D``:

    | part | shape | value |
    |---|---|---|
    | `steps_left` | `(1,)` | share of the budget that is left |
    | `scores` | `(n, 2 + T)` | a row a candidate; see below |
    | `question` | `(D,)` | the question |
    | `picked` | `(D,)` | mean of the picked passages, 0 where there is none yet |
    | `candidates` | `(n, D)` | a row a candidate |

    A row of `scores` holds 1 where the candidate can be picked, else 0; its inner product with the question; and its
    inner products with the 1st, ..., T-th picked passage, 0 where there is none yet. Rows of padding are 0.

    By default an observation with candidates is ``("steps_left", "scores")``: ``1 + n * (2 + T)`` numbers whatever the
    encoder, and nothing by which a learner could know a question by heart. Over a whole corpus, where candidates are
    not listed, it is ``("steps_left", "question", "picked")``. ``info``, masks, actions and rewards stay as they are;
    what the wrapped environment observes is not read, so ``observation="ids"`` saves its work.

    ``env.slices["scores"]`` says where a part lies and ``env.shapes["scores"]`` how to fold it, for a network that
    treats every candidate alike: ``obs[:, env.slices["scores"]].reshape(-1, *env.shapes["scores"])``.

    Args:
        env: a ``ChainRetrievalEnv``, or ``TopKCandidates`` over one, wrapped or not.
        encode: embeds N texts as ``(N, D)`` numbers; see ``CachedEncode``, which several environments can share.
        encode_candidates: embeds candidates where they need a function of their own, such as
            ``SentenceTransformer.encode_document`` beside ``encode_query``; ``encode`` embeds the question and what is
            picked, the two sides of a state, and by default candidates too.
        parts: which parts, in this order.
        normalize: scale each vector to length 1 (0 stays 0), so that all numbers lie in [-1, 1]; False for encoders
            whose vectors' lengths mean something.

    Attributes:
        observes_candidates: whether a part is about candidates.
        shapes: shape of each part.
        slices: where each part lies in the observation.

    Raises:
        ValueError: when a part is unknown, given twice or needs candidates that the environment does not list, or the
            encoder does not return finite numbers of one shape.
    """

    def __init__(
        self,
        env: gym.Env,
        encode: Encode,
        encode_candidates: Encode | None = None,
        parts: Sequence[str] | None = None,
        normalize: bool = True,
    ) -> None:
        RecordConstructorArgs.__init__(
            self,
            encode=encode,
            encode_candidates=encode_candidates,
            parts=parts,
            normalize=normalize,
            _disable_deepcopy=True,  # an encoder may be a model of gigabytes
        )
        gym.Wrapper.__init__(self, env)
        self._dataset, self._max_steps = env.get_wrapper_attr("dataset"), int(env.get_wrapper_attr("max_steps"))
        self._encode = CachedEncode.of(encode)
        self._encode_candidates = self._encode if encode_candidates is None else CachedEncode.of(encode_candidates)
        self._normalize = normalize

        size = num_candidates(env)
        chosen = _DEFAULT[size is not None] if parts is None else tuple(parts)
        width, dim = size or 0, self._encode([self._dataset.questions[0].text]).shape[1]
        known = {
            "steps_left": (1,),
            "scores": (width, 2 + self._max_steps),
            "question": (dim,),
            "picked": (dim,),
            "candidates": (width, dim),
        }
        unknown = [part for part in chosen if part not in known]
        if unknown or not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"parts must be distinct ones of {', '.join(known)}, got {chosen}")
        needy = [part for part in chosen if part in _OF_CANDIDATES]
        if needy and size is None:
            raise ValueError(
                f"part {needy[0]!r} needs candidates, but {env} picks from a whole corpus of "
                f"{len(self._dataset.corpus)} passages: wrap it in TopKCandidates first"
            )
        self.observes_candidates = bool(needy)
        self.shapes: dict[str, tuple[int, ...]] = {part: known[part] for part in chosen}
        ends = np.cumsum([0] + [int(np.prod(shape)) for shape in self.shapes.values()]).tolist()
        self.slices = {part: slice(*ends[i : i + 2]) for i, part in enumerate(chosen)}
        bound = np.float32(1 if normalize else np.inf)
        low, high = np.full(ends[-1], -bound), np.full(ends[-1], bound)
        if "steps_left" in chosen:
            low[self.slices["steps_left"]], high[self.slices["steps_left"]] = 0, 1
        if "scores" in chosen:
            start = self.slices["scores"].start
            stop, step = self.slices["scores"].stop, 2 + self._max_steps
            low[start:stop:step], high[start:stop:step] = 0, 1
        self.observation_space = spaces.Box(low, high, dtype=np.float32)
        self._ids = np.zeros(0, np.int64)
        self._candidates = np.zeros((0, dim), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vectors, dict[str, Any]]:
        """Begin an episode."""
        _, info = self.env.reset(seed=seed, options=options)
        return self._observe(info), info

    def step(self, action: Any) -> tuple[Vectors, Any, bool, bool, dict[str, Any]]:
        """Pick one passage."""
        _, reward, terminated, truncated, info = self.env.step(action)
        return self._observe(info), reward, terminated, truncated, info

    def _observe(self, info: dict[str, Any]) -> Vectors:
        states: mdp.States = self.env.get_wrapper_attr("states")
        picked_ids = states.picked[0][states.picked[0] >= 0]
        texts = [self._dataset.questions[int(states.question[0])].text, *self._dataset.corpus.texts(picked_ids)]
        state = self._scaled(self._encode(texts))
        parts: dict[str, NDArray] = {
            "steps_left": states.steps_left / self._max_steps,
            "question": state[0],
            "picked": state[1:].mean(axis=0) if len(picked_ids) else np.zeros_like(state[0]),
        }
        if self.observes_candidates:
            vectors = self._look_up(info["candidates"])
            if vectors.shape[1] != state.shape[1]:
                raise ValueError(
                    f"encode returns vectors of length {state.shape[1]}, encode_candidates of length "
                    f"{vectors.shape[1]}: they must be equal for inner products"
                )
            scores = np.zeros((len(vectors), 2 + self._max_steps), np.float32)
            scores[:, 0] = info["action_mask"]
            scores[:, 1 : 1 + len(state)] = vectors @ state.T
            parts |= {"scores": scores, "candidates": vectors}
        observation = np.concatenate([parts[part].ravel() for part in self.shapes]).astype(np.float32)
        # Rounding may carry an inner product of unit vectors past 1.
        return np.clip(observation, -1, 1) if self._normalize else observation

    def _look_up(self, ids: NDArray[np.int64]) -> Vectors:
        """Return the vectors of candidates, float32 ``(n, D)``, 0 for padding; kept until the candidates change."""
        if not np.array_equal(ids, self._ids):
            real = ids >= 0
            found = self._scaled(self._encode_candidates(self._dataset.corpus.texts(ids[real])))
            self._candidates = np.zeros((len(ids), found.shape[1]), np.float32)
            self._ids, self._candidates[real] = ids.copy(), found
        return self._candidates

    def _scaled(self, vectors: Vectors) -> Vectors:
        if not self._normalize:
            return vectors
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms > 0, norms, np.float32(1))
