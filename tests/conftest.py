import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

# A shell has what it starts in the background ignore Ctrl-C, tests of it and all that they start included.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from retrieval_gym.datasets import Corpus, Question, RetrievalDataset  # noqa: E402

# Passage 7 reads the same as passage 1, so either of them is the gold passage "Ulm".
PASSAGES = [
    ("Einstein", "Albert Einstein was born in Ulm."),
    ("Ulm", "Ulm lies on the Danube."),
    ("Danube", "The Danube ends in the Black Sea."),
    ("Curie", "Marie Curie was born in Warsaw."),
    ("Warsaw", "Warsaw lies on the Vistula."),
    ("Wisła", "The Vistula ends in the Baltic Sea 🌊."),
    ("", "A passage without a title."),
    ("Ulm", "Ulm lies on the Danube."),
    ("Nile", "The Nile ends in the Mediterranean."),
    ("Elbe", "The Elbe ends in the North Sea."),
]
QUESTIONS = [
    Question("q0", "Which river flows through Einstein's birthplace?", (0, 1), ("Danube",)),
    Question("q1", "Into which sea flows the river of Einstein's birthplace?", (0, 1, 2), ("Black Sea",)),
    Question("q2", "Into which sea flows the river of Curie's birthplace?", (3, 4, 5), ("Baltic Sea",)),
    Question("q3", "Where was Curie born?", (3,), ("Warsaw",)),
    Question("q4", "Do the rivers of Ulm and Warsaw end in the same sea?", (1, 2, 4, 5), ("no",), ordered=False),
]
POOLS = [[0, 1, 3, 7, 8], [0, 1, 2, 6, 7, 8, 9], [1, 3, 4, 5, 9], [3, 6], [1, 2, 4, 5, 7, 8]]


def make_dataset(form: str = "pool") -> RetrievalDataset:
    """Five questions over ten passages, with pools of two to seven, or over the whole corpus."""
    corpus = Corpus([title for title, _ in PASSAGES], [text for _, text in PASSAGES])
    pools = [np.array(pool, np.int64) for pool in POOLS] if form == "pool" else None
    return RetrievalDataset("hand-made", "train", corpus, QUESTIONS, pools)


@pytest.fixture(params=["pool", "corpus"])
def dataset(request: pytest.FixtureRequest) -> RetrievalDataset:
    return make_dataset(request.param)


@pytest.fixture
def pool_dataset() -> RetrievalDataset:
    return make_dataset("pool")


@pytest.fixture
def corpus_dataset() -> RetrievalDataset:
    return make_dataset("corpus")


@pytest.fixture
def real_data() -> Path:
    """The folder of real data; the test is skipped when the environment variable is not set."""
    return _real_data()


@pytest.fixture
def real_file() -> Callable[[str], Path]:
    """Return a file of the real data by its path inside the folder; the test is skipped when it is not there."""

    def find(name: str) -> Path:
        path = _real_data() / name
        if not path.exists():
            pytest.skip(f"RETRIEVAL_GYM_DATA has no {name}")
        return path

    return find


def _real_data() -> Path:
    folder = os.environ.get("RETRIEVAL_GYM_DATA")
    if not folder:
        pytest.skip("RETRIEVAL_GYM_DATA is not set")
    return Path(folder)


@contextmanager
def skip_without_data(env_id: str) -> Iterator[None]:
    """Skip, with the reason, where this environment's data are not here or too small a part of them is."""
    if env_id in {"ChainRetrieval-v0", "ChainRetrieval-BEIR-v0", "ChainRetrieval-Custom-v0"}:
        pytest.skip("has no data of its own")
    try:
        yield
    except FileNotFoundError as error:
        pytest.skip(f"no data: {str(error).splitlines()[0]}")
    except ValueError as error:
        if "can be composed" not in str(error):
            raise
        pytest.skip(f"too small a part of the data: {error}")
