"""Products and inverses of Kronecker factors against the dense Kronecker product."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size, Tensor, kron

from backpack.utils.kroneckers import (
    EigenKronecker,
    apply_inv_kfac_mat_prod,
    apply_kfac_mat_prod,
    eigh_semidefinite,
    inv_kfac_mat_prod,
    inv_kfacs,
    kfac_mat_prod,
    kfacs_to_mat,
)

DIM = st.integers(1, 4)
SHAPES = st.lists(st.tuples(DIM, DIM), min_size=1, max_size=3)
DIMS = st.lists(DIM, min_size=1, max_size=3)
COLUMNS = st.sampled_from([(), (1,), (5,)])


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Return a random float64 tensor that depends on the shape and the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rand_spd(dim: int, seed: int = 0) -> Tensor:
    """Return a random, well-conditioned, symmetric positive definite matrix."""
    root = rand(dim, dim, seed=seed)
    return root @ root.T + torch.eye(dim, dtype=torch.float64)


def dense(factors: list[Tensor]) -> Tensor:
    """Multiply out by definition: ``(A ⊗ B)[(a, b), (i, j)] = A[a, i] B[b, j]``."""
    product, *others = factors
    for B in others:
        A, (a, i), (b, j) = product, product.shape, B.shape
        product = torch.einsum("ai,bj->abij", A, B).reshape(a * b, i * j)
    return product


@settings(deadline=None, max_examples=30)
@given(SHAPES)
def test_kfacs_to_mat_is_row_major(shapes: list[tuple[int, int]]) -> None:
    factors = [rand(*shape, seed=i) for i, shape in enumerate(shapes)]
    torch.testing.assert_close(kfacs_to_mat(factors), dense(factors))


def test_kfacs_to_mat_is_fresh() -> None:
    factor = rand(3, 3)
    kfacs_to_mat([factor]).zero_()
    assert factor.abs().min() > 0


@settings(deadline=None, max_examples=30)
@given(SHAPES, COLUMNS)
def test_kfac_mat_prod(shapes: list[tuple[int, int]], columns: tuple[int, ...]) -> None:
    factors = [rand(*shape, seed=i) for i, shape in enumerate(shapes)]
    mat = rand(prod(cols for _, cols in shapes), *columns, seed=10)
    expected = dense(factors) @ mat
    torch.testing.assert_close(apply_kfac_mat_prod(factors, mat), expected)
    torch.testing.assert_close(kfac_mat_prod(factors)(mat), expected)


def test_kfac_mat_prod_of_linear_weight() -> None:
    B, A, V = rand(3, 3), rand(4, 4), rand(3, 4)
    result = apply_kfac_mat_prod([B, A], V.flatten())
    torch.testing.assert_close(result.reshape(3, 4), B @ V @ A.T)


def test_kfac_mat_prod_never_forms_the_product() -> None:
    dim = 100  # the dense product would have 10¹² entries
    factors, vec = [rand(dim, dim, seed=i) for i in range(3)], rand(dim**3)
    result = apply_kfac_mat_prod(factors, vec).reshape(dim, dim, dim)
    expected = vec.reshape(dim, dim, dim)
    for equation, factor in zip(
        ["ai,ijk->ajk", "bj,ijk->ibk", "ck,ijk->ijc"], factors, strict=True
    ):
        expected = torch.einsum(equation, factor, expected)
    torch.testing.assert_close(result, expected)


@settings(deadline=None, max_examples=30)
@given(DIMS, COLUMNS, st.sampled_from([None, 0.0, 0.5, [0.1, 0.2, 0.3]]))
def test_inverse(
    dims: list[int], columns: tuple[int, ...], shift: float | list[float] | None
) -> None:
    factors = [rand_spd(dim, seed=i) for i, dim in enumerate(dims)]
    shift = shift[: len(dims)] if isinstance(shift, list) else shift
    shifts = shift if isinstance(shift, list) else [shift or 0.0] * len(dims)
    damped = [f + s * torch.eye(len(f)) for f, s in zip(factors, shifts, strict=True)]
    mat = rand(prod(dims), *columns, seed=10)
    expected = torch.linalg.inv(dense(damped))

    torch.testing.assert_close(kfacs_to_mat(inv_kfacs(factors, shift)), expected)
    torch.testing.assert_close(apply_inv_kfac_mat_prod(factors, mat, shift), expected @ mat)
    torch.testing.assert_close(inv_kfac_mat_prod(factors, shift)(mat), expected @ mat)


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(rand_spd(4) - 3 * torch.eye(4), id="symmetric-indefinite"),
        # Its lower triangle alone looks like that of a positive definite matrix.
        pytest.param(rand_spd(4) + rand(4, 4).triu(1), id="asymmetric"),
        pytest.param(1e-12 * (rand_spd(4) + rand(4, 4).triu(1)), id="tiny-asymmetric"),
        pytest.param(1e-200 * rand_spd(4), id="tiny"),
    ],
)
def test_inverse_of_unusual_factors(factor: Tensor) -> None:
    (inverse,) = inv_kfacs([factor])
    torch.testing.assert_close(inverse @ factor, torch.eye(4, dtype=torch.float64))


def test_inverse_is_differentiable_twice() -> None:
    roots = [rand(dim, dim, seed=dim).requires_grad_() for dim in (2, 3)]

    def product(*roots: Tensor) -> Tensor:
        factors = [root @ root.T for root in roots]
        return apply_inv_kfac_mat_prod(factors, torch.ones(6, 2, dtype=torch.float64), shift=1.0)

    assert torch.autograd.gradcheck(product, roots, fast_mode=True)
    assert torch.autograd.gradgradcheck(product, roots, fast_mode=True)


def test_product_is_differentiable() -> None:
    inputs = [rand(2, 3), rand(3, 2), rand(6, 2)]
    assert torch.autograd.gradcheck(
        lambda A, B, mat: apply_kfac_mat_prod([A, B], mat), [x.requires_grad_() for x in inputs]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular(dtype: torch.dtype) -> None:
    # Rank-deficient only up to round-off, so that neither Cholesky nor LU notice.
    root = rand(20, 6).to(dtype)
    with pytest.raises(ValueError, match=r"\(20, 20\): it is singular"):
        inv_kfacs([rand_spd(2).to(dtype), root @ root.T])
    inv_kfacs([root @ root.T], shift=0.1)
    with pytest.raises(ValueError, match="singular"):
        inv_kfacs([torch.zeros(3, 3, dtype=dtype)])
    with pytest.raises(ValueError, match="singular"):
        inv_kfacs([torch.full((3, 3), torch.nan, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [None, 0.25])
def test_inverse_in_half_precision(dtype: torch.dtype, shift: float | None) -> None:
    """Of factors of layers in half precision, which torch has no solver for: as of single ones."""
    factors = [(rand_spd(3) / 8).to(dtype), rand(3, 3, seed=1).to(dtype), torch.ones(2).to(dtype)]
    expected = inv_kfacs([factor.float() for factor in factors], shift)
    for one, other in zip(inv_kfacs(factors, shift), expected, strict=True):
        assert torch.equal(one, other.to(dtype))
    root = rand(20, 6)  # singular but for the rounding of its entries
    with pytest.raises(ValueError, match=r"\(20, 20\): it is singular"):
        inv_kfacs([(root @ root.T).to(dtype)])


@pytest.mark.parametrize("function", [kfacs_to_mat, kfac_mat_prod, inv_kfacs, inv_kfac_mat_prod])
def test_not_matrices(function) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="list of matrices, got a Tensor"):
        function(rand(2, 2))
    with pytest.raises(ValueError, match="list of matrices, got a generator"):
        function(rand(2, 2) for _ in range(2))
    with pytest.raises(ValueError, match=r"list of matrices, got shapes \[\]"):
        function([])
    with pytest.raises(ValueError, match=r"got shapes \[\(2, 2\), \(3, 1, 1\)\]"):
        function([rand(2, 2), rand(3, 1, 1)])


def test_vectors_are_diagonal_matrices() -> None:
    a, B, c = rand(2).abs() + 1, rand_spd(3), rand(4).abs() + 1
    whole = [a.diag(), B, c.diag()]
    for chosen in ([0, 1, 2], [1, 0], [2], [0, 2]):
        factors, matrices = [[a, B, c][i] for i in chosen], [whole[i] for i in chosen]
        torch.testing.assert_close(kfacs_to_mat(factors), dense(matrices))
        for columns in ((), (5,)):
            mat = rand(len(dense(matrices)), *columns)
            torch.testing.assert_close(apply_kfac_mat_prod(factors, mat), dense(matrices) @ mat)
            solved = apply_inv_kfac_mat_prod(factors, mat, shift=0.5)
            expected = apply_inv_kfac_mat_prod(matrices, mat, shift=0.5)
            torch.testing.assert_close(solved, expected)
    with pytest.raises(ValueError, match=r"\(2,\): it is singular"):
        inv_kfacs([torch.tensor([0.0, 1.0])])
    values, basis = eigh_semidefinite(torch.tensor([2.0, -1e-9, 1.0]))
    assert values.tolist() == [2, 0, 1] and basis.tolist() == [1, 1, 1]


def test_wrong_shapes() -> None:
    factors = [rand(2, 3), rand(4, 5)]
    for shape in [(8,), (15, 1, 1), (8, 15), ()]:
        with pytest.raises(ValueError, match=r"\[15, K\] or \[15\].*\(2, 3\), \(4, 5\)"):
            apply_kfac_mat_prod(factors, rand(*shape))
    with pytest.raises(ValueError, match=r"Only square.*\(2, 3\)"):
        inv_kfacs(factors)
    with pytest.raises(ValueError, match="3 shifts for 2 factors"):
        inv_kfacs([rand_spd(2), rand_spd(2)], shift=[1.0, 2.0, 3.0])


def test_shift_goes_to_the_factors() -> None:
    A, B = rand_spd(2), rand_spd(3)
    damped = kron(A + torch.eye(2), B + 2 * torch.eye(3))
    for shift in ([1.0, 2.0], torch.tensor([1.0, 2.0])):
        inverse = kfacs_to_mat(inv_kfacs([A, B], shift=shift))
        torch.testing.assert_close(inverse @ damped, torch.eye(6, dtype=torch.float64))
    inverse = kfacs_to_mat(inv_kfacs([A, B], shift=torch.tensor(2.0)))
    torch.testing.assert_close(inverse, kfacs_to_mat(inv_kfacs([A, B], shift=2.0)))


def test_factors_of_any_layout() -> None:
    """Eigenvectors lie in memory column by column, which torch.kron refuses beside others."""
    torch.manual_seed(0)
    A, B = torch.rand(3, 3, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)
    expected = torch.einsum("ij,kl->ikjl", A, B).reshape(12, 12)
    column_by_column = A.T.contiguous().T
    assert torch.equal(kfacs_to_mat([column_by_column, B]), expected)
    assert torch.equal(kfacs_to_mat([A, B.T.contiguous().T]), expected)


@pytest.mark.parametrize(
    "other", [rand(2, 2), rand(2, 3).T, rand(1, 2).T], ids=["rows", "columns", "column"]
)
def test_columns_of_any_stride(other: Tensor) -> None:
    """A transposed row counts as contiguous, but torch.kron refuses it."""
    column = rand(1, 3).T
    for factors in ([column, other], [other, column], [column, other, column]):
        torch.testing.assert_close(kfacs_to_mat(factors), dense(factors))


def test_inverse_beyond_the_precision_of_the_factors() -> None:
    """It is no infinite one."""
    for factor in (torch.full((2,), 1e-5), 1e-5 * torch.eye(2)):
        with pytest.raises(ValueError, match="singular"):
            inv_kfacs([factor.half()])
    values = {"A": torch.eye(2), "B": torch.eye(3)}.values()
    assert [len(each) for each in inv_kfacs(values)] == [2, 3]  # type: ignore[arg-type]


def test_a_factor_for_which_single_precision_does_not_converge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As LAPACK's may, for factors of a network with units that are off: double precision is."""
    decompose = torch.linalg.eigh

    def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.dtype == torch.float32 or not matrix.isfinite().all():
            raise torch.linalg.LinAlgError("The algorithm failed to converge.")
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    factor = rand_spd(4).float()
    values, basis = eigh_semidefinite(factor)
    assert values.dtype == basis.dtype == torch.float32
    torch.testing.assert_close(basis * values @ basis.T, factor)
    factor[0, 0] = torch.nan
    with pytest.raises(torch.linalg.LinAlgError, match="not finite: the data"):
        eigh_semidefinite(factor)


def test_products_inside_of_autocast() -> None:
    """In the precision of the factors: torch would refuse to mix that of two products."""
    factors, vector = [rand_spd(3).float(), rand_spd(4).float()], rand(12).float()
    blocks = EigenKronecker(
        [eigh_semidefinite(f)[1] for f in factors], rand(3, 4).float(), Size((3, 4))
    )
    functions = [
        lambda: apply_kfac_mat_prod(factors, vector),
        lambda: apply_inv_kfac_mat_prod(factors, vector, 0.1),
        lambda: blocks.product(vector.reshape(3, 4)),
        lambda: blocks.dense(),
    ]
    expected = [function() for function in functions]
    with torch.autocast("cpu", torch.bfloat16):
        found = [function() for function in functions]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
