"""The database of cases itself: everything builds, runs, and is what its tags say."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, random_dag, select
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def _check(case: Case) -> None:
    model, loss, X, y = case.build()
    assert model.training == case.train
    assert X.shape[0] == 3

    value = loss(model(X), y)
    assert value.shape == ()
    value.backward()

    trainable = [p for p in model.parameters() if p.requires_grad]
    assert trainable
    for p in trainable:
        assert p.dtype == torch.float64
        assert p.grad is not None
        assert p.grad.isfinite().all()
    assert ("frozen" in case.tags) == any(not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_builds_and_has_gradients(case: Case) -> None:
    _check(case)


@given(st.integers(0, 10_000))
def test_random_dag(seed: int) -> None:
    _check(random_dag(seed))


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [*select("network"), *select("loss")][::5], ids=str)
def test_build_is_repeatable(case: Case) -> None:
    state = torch.get_rng_state()
    first, second, other = case.build(), case.build(), case.build(seed=1)
    assert torch.equal(torch.get_rng_state(), state)

    assert torch.equal(first.X, second.X)
    assert torch.equal(first.y, second.y)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p is not q
    assert not torch.equal(first.X, other.X)


def test_dtype_and_requires_grad() -> None:
    (case,) = [case for case in CASES if case.name == "input-requires-grad"]
    model, loss, X, y = case.build(dtype=torch.float32)
    assert X.is_leaf
    assert X.requires_grad
    assert loss(model(X), y).dtype == torch.float32


def test_tags_tell_the_structure() -> None:
    for case in CASES:
        model = case.build().model
        if "nonsequential" not in case.tags:
            containers = [m for m in model.modules() if any(m.children())]
            assert all(isinstance(m, nn.Sequential) for m in containers), case.name
        if "tied" not in case.tags:
            owned = [p for m in model.modules() for p in m._parameters.values() if p is not None]
            assert len(owned) == len(set(owned)), case.name


def test_select() -> None:
    assert set(select("conv", "module")) < set(select("module"))
    assert not {"tied", "rows"} & set().union(*(c.tags for c in select(without="tied rows")))
