"""Positions by hand, and rotation against complex numbers."""

import math

import pytest

torch = pytest.importorskip("torch")

from retrieval_gym.nn.rotary import (  # noqa: E402
    RelativeProducts,
    candidate_positions,
    relative_positions,
    rotate,
    rotated_products,
)


def test_relative_positions_by_hand():
    # Document of 10, picked 6 then 2: intervals [0, 2), [2, 6), [6, 10).
    rho = relative_positions(torch.tensor([[6, 2, -1]]), torch.tensor([10]), 10)
    by_hand = [0, 4.5, 10, 12.25, 14.5, 16.75, 20, 22.25, 24.5, 26.75]
    assert rho[0].tolist() == pytest.approx(by_hand)


def test_relative_positions_without_picks_and_at_the_edges():
    rho = relative_positions(torch.tensor([[-1, -1], [0, 4]]), torch.tensor([4, 5]), 5)
    assert rho[0, :4].tolist() == pytest.approx([0, 2.25, 4.5, 6.75])
    # Picked first and last of five: intervals [0, 0) is empty, [0, 4), [4, 5).
    assert rho[1].tolist() == pytest.approx([10, 12.25, 14.5, 16.75, 20])


def test_relative_positions_stay_real_numbers():
    rho = relative_positions(torch.tensor([[-1]]), torch.tensor([500_000]), 500_000)
    assert rho.is_floating_point() and len(rho.unique()) > 400_000


def test_rotation_is_multiplication_by_a_complex_number():
    generator = torch.Generator().manual_seed(0)
    vectors, positions = torch.randn(3, 8, generator=generator), torch.tensor([0.0, 2.5, 7.25])
    planes = torch.complex(vectors[:, :4], vectors[:, 4:])
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    turned = planes * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotate(vectors, positions), torch.cat([turned.real, turned.imag], dim=1))


def test_inner_products_depend_on_the_difference_of_positions_alone():
    a, b = torch.randn(2, 16, dtype=torch.float64)
    near = rotate(a, torch.tensor(3.0)) @ rotate(b, torch.tensor(5.5))
    far = rotate(a, torch.tensor(103.0)) @ rotate(b, torch.tensor(105.5))
    assert near.item() == pytest.approx(far.item(), abs=1e-9)


def test_halves_rotate_each_half_as_a_vector_of_its_own():
    vectors, positions = torch.randn(5, 12), torch.arange(5.0)
    whole = rotate(vectors, positions, halves=True)
    parts = [rotate(part, positions) for part in vectors.split(6, dim=1)]
    torch.testing.assert_close(whole, torch.cat(parts, dim=1))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_products_with_rotated_vectors_are_those_of_the_rotated_vectors(halves, rows):
    query, vectors = torch.randn(3, 24, requires_grad=True), torch.randn(3, 7, 24, requires_grad=True)
    positions = 60 * torch.rand(rows, 7)
    fast = rotated_products(query, vectors, positions, halves=halves)
    slow = torch.einsum("bd,bpd->bp", query, rotate(vectors, positions, halves=halves))
    torch.testing.assert_close(fast, slow)
    weights = torch.randn(3, 7)
    for got, expected in zip(
        torch.autograd.grad((weights * fast).sum(), (query, vectors)),
        torch.autograd.grad((weights * slow).sum(), (query, vectors)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("span", [0.0, 0.5, 9.0, 60.0])
@pytest.mark.parametrize("picked", [[], [0], [149], [0, 1], [90, 3, 40], [148, 149, 0, 77]])
def test_products_in_series_are_those_of_the_rotated_vectors(picked, span, halves):
    generator = torch.Generator().manual_seed(len(picked))
    query, vectors = (torch.randn(*shape, 48, generator=generator) for shape in ((), (160,)))
    picked, settings = torch.tensor([*picked, -1, -1]), {"delta": 7.0, "span": span}
    positions = relative_positions(picked[None], torch.tensor([150]), 150, **settings)
    expected = (rotate(vectors[:150].double(), positions[0].double(), halves=halves) @ query.double()).float()
    series = RelativeProducts(query, picked, 150, halves=halves, **settings)
    parts = torch.cat([series(part, start) for start, part in zip(range(0, 160, 64), vectors.split(64), strict=True)])
    assert parts.shape == (160,)
    rows = torch.randperm(160, generator=generator)  # candidates share vectors, and stand anywhere among them
    terms = series.terms_of(vectors[rows])
    again = torch.cat(
        [series.from_terms(terms, part, s) for s, part in zip(range(0, 160, 64), rows.argsort().split(64), strict=True)]
    )
    torch.testing.assert_close(again[:150], parts[:150], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        parts[:150], expected, atol=2e-6 * float(query.norm() * vectors.norm(dim=1).max()), rtol=0
    )


def test_far_positions_are_exact():
    # The turns of position 428,204 in double precision, by Python's own arithmetic.
    place, planes = 428_204, 192
    query, vectors = torch.randn(1, 2 * planes), torch.randn(1, 1, 2 * planes)
    by_hand = 0.0
    for plane in range(planes):
        turn = complex(math.cos(angle := place * 10_000.0 ** (-plane / planes)), math.sin(angle))
        turned = complex(vectors[0, 0, plane], vectors[0, 0, plane + planes]) * turn
        by_hand += float(query[0, plane]) * turned.real + float(query[0, plane + planes]) * turned.imag
    positions = candidate_positions("absolute", torch.tensor([[-1]]), torch.tensor([place + 1]), 1, start=place)
    assert rotated_products(query, vectors, positions).item() == pytest.approx(by_hand, abs=2e-4)


def test_a_dimension_without_planes_is_refused():
    with pytest.raises(ValueError, match="dimension 6.*divisible by 4"):
        rotate(torch.randn(2, 6), torch.zeros(2), halves=True)


def test_modes():
    picked, length = torch.tensor([[1]]), torch.tensor([3])
    assert candidate_positions("none", picked, length, 3) is None
    assert candidate_positions("absolute", picked, length, 3).tolist() == [[0, 1, 2]]
    assert candidate_positions("relative", picked, length, 3)[0].tolist() == pytest.approx([0, 10, 14.5])
