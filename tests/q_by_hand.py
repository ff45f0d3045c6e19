"""Q once more, slowly: SentenceTransformer's vectors, positions in plain Python, rotations by complex numbers."""

import cmath
import math

import numpy as np
import pytest

sentence_transformers = pytest.importorskip("sentence_transformers")


def encode_with(folder):
    """Open an encoder's folder elsewhere; the function returned gives a list of texts float64 vectors."""
    model, known = sentence_transformers.SentenceTransformer(str(folder), device="cpu"), {}

    def encode(texts):
        for text in set(texts) - known.keys():
            known[text] = model.encode(text).astype(np.float64)
        return np.stack([known[text] for text in texts])

    return encode


def position(mode, place, picked, length):
    """Section 3.3 of the Q-RAG paper for one passage."""
    if mode == "absolute":
        return float(place)
    below = [b for b in sorted(picked) if b <= place]
    start = below[-1] if below else 0
    end = next((b for b in sorted(picked) if b > place), length)
    return 10.0 * len(below) + 9.0 * (place - start) / (end - start)


def turn(vector, angle_at):
    """Multiply the planes (k, k + d/2) by e^(i position / 10000^(2k/d))."""
    half = len(vector) // 2
    planes = [
        complex(vector[k], vector[k + half]) * cmath.exp(1j * angle_at / 10_000 ** (k / half)) for k in range(half)
    ]
    return np.array([z.real for z in planes] + [z.imag for z in planes])


def by_hand(reference, dataset, states, row, mode="none", order="pick", halves=False, place_at=position):
    """Q of each candidate of one state, by its place."""
    picked = [i for i in states.picked[row].tolist() if i >= 0]
    pool = list(range(len(dataset.corpus)))
    if states.pool is not None:
        pool = [i for i in states.pool[row].tolist() if i >= 0]
    told = picked if order == "pick" else sorted(picked, key=pool.index)
    text = "\n".join([dataset.questions[states.question[row]].text, *dataset.corpus.texts(told)])
    state = reference[0]([text])[0]
    values = []
    for place, vector in enumerate(reference[1](dataset.corpus.texts(pool))):
        if mode != "none":
            at = place_at(mode, place, [pool.index(i) for i in picked], len(pool))
            parts = np.split(vector, 2) if halves else [vector]
            vector = np.concatenate([turn(part, at) for part in parts])
        values.append(float(state @ vector))
    return values


def dueling_by_hand(products, left, v, alpha):
    """v plus the logarithm of the policy times alpha, of the actions ``left`` by their place."""
    best = max(products[place] for place in left)
    if alpha == 0:
        return {place: v + products[place] - best for place in left}
    weights = {place: math.exp((products[place] - best) / alpha) for place in left}
    return {place: v + alpha * math.log(weight / sum(weights.values())) for place, weight in weights.items()}
