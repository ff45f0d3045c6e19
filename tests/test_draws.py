"""Draws in stock against single draws from generators of the same seeds."""

import numpy as np
from gymnasium.utils import seeding
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_gym.envs.draws import STOCK, RowDraws

ROWS = 3
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("uniform"), st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True)),
        st.tuples(st.just("pool"), st.integers(0, ROWS - 1)),  # a dataset that draws itself, 32 bits too
        st.tuples(st.just("seed"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("state"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("lend"), st.integers(0, ROWS - 1)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(calls=CALLS)
def test_nobody_sees_that_draws_are_in_stock(calls):
    draws = RowDraws(ROWS)
    plain = [seeding.np_random(row)[0] for row in range(ROWS)]
    for row in range(ROWS):
        draws.seed(row, row)
    for number, (kind, what) in enumerate(calls):
        if kind == "uniform":
            assert draws.uniform(np.array(what)).tolist() == [plain[row].random() for row in what]
        elif kind == "pool":
            (generator,) = draws.generators(np.array([what]))
            size = number % 4 + 1
            expected = plain[what].integers(0, 9, size, dtype=np.uint32)
            assert generator.integers(0, 9, size, dtype=np.uint32).tolist() == expected.tolist()
        elif kind == "seed":
            draws.seed(what, 100 + number)
            plain[what], _ = seeding.np_random(100 + number)
        elif kind == "state":
            (generator,) = draws.generators(np.array([what]))
            assert generator.bit_generator.state == plain[what].bit_generator.state
        else:
            assert draws.lend()[what].normal() == plain[what].normal()


def test_many_draws_of_changing_rows_are_each_row_s_own():
    draws, plain, rng = RowDraws(5), [seeding.np_random(seed)[0] for seed in range(5)], np.random.default_rng(0)
    for row in range(5):
        draws.seed(row, row)
    for _ in range(5 * STOCK):
        rows = np.flatnonzero(rng.random(5) < np.linspace(0.1, 1, 5))  # the last row runs out ten times as often
        assert draws.uniform(rows).tolist() == [plain[row].random() for row in rows]


def test_a_lent_generator_stays_the_row_s_own():
    draws, plain = RowDraws(1), seeding.np_random(7)[0]
    draws.seed(0, 7)
    assert draws.uniform(np.array([0]))[0] == plain.random()
    (lent,) = draws.lend()
    for _ in range(STOCK + 3):
        assert draws.uniform(np.array([0]))[0] == plain.random() and lent.random() == plain.random()


def test_rows_without_a_seed_get_fresh_entropy():
    draws = RowDraws(2)
    first, second = draws.uniform(np.arange(2))
    assert first != second and len({*draws.seeds}) == 2 and min(draws.seeds) >= 0
    draws.restore([seeding.np_random(3)[0]] * 2)
    assert draws.seeds == (-1, -1)
