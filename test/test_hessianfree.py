"""Matrix-free products against dense matrices of ``torch.autograd.functional``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from backpack.hessianfree.ggnvp import ggn_vector_product, ggn_vector_product_from_plist
from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op, transposed_jacobian_vector_product
from backpack.hessianfree.rop import R_op, jacobian_vector_product


def rand(*shape: int, seed: int = 0, requires_grad: bool = False) -> Tensor:
    """Return a random float64 tensor that depends on the shape and the seed only."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.rand(shape, generator=generator, dtype=torch.float64)
    return tensor.requires_grad_(requires_grad)


def flat(tensors: tuple[Tensor, ...]) -> Tensor:
    """Concatenate flattened tensors."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def dense_jacobian(function: Callable[..., tuple[Tensor, ...]], xs: tuple[Tensor, ...]) -> Tensor:
    """Return the Jacobian of the flattened outputs with respect to the flattened inputs."""
    blocks: Any = jacobian(function, xs)
    ys = function(*xs)
    return torch.cat(
        [
            torch.cat([b.reshape(y.numel(), x.numel()) for b, x in zip(row, xs, strict=True)], 1)
            for row, y in zip(blocks, ys, strict=True)
        ]
    )


def dense_hessian(function: Callable[..., Tensor], xs: tuple[Tensor, ...]) -> Tensor:
    """Return the Hessian with respect to the flattened inputs."""
    blocks: Any = hessian(function, xs)
    return torch.cat(
        [
            torch.cat([b.reshape(x.numel(), z.numel()) for b, z in zip(row, xs, strict=True)], 1)
            for row, x in zip(blocks, xs, strict=True)
        ]
    )


# R_op, L_op


def two_outputs(x: Tensor, z: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs that depend on both inputs, on one only, and linearly."""
    return (x @ z).sin() * x.sum(), z.exp().sum(), 2 * x.T


def inputs(requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs for :func:`two_outputs`."""
    shapes = [(2, 3), (3, 4), (2,)]
    x, z, unused = (rand(*s, seed=i, requires_grad=requires_grad) for i, s in enumerate(shapes))
    return x, z, unused


def test_R_op() -> None:
    xs, vs = inputs(), tuple(rand(*x.shape, seed=10) for x in inputs())
    ys = two_outputs(*xs)
    J = dense_jacobian(two_outputs, inputs(requires_grad=False))

    for _ in range(2):  # the graph stays usable
        result = R_op(ys, xs, vs)
        assert isinstance(result, tuple)
        assert [r.shape for r in result] == [y.shape for y in ys]
        assert not any(r.requires_grad for r in result)
        torch.testing.assert_close(flat(result), J @ flat(vs))
    ys[0].sum().backward()
    assert jacobian_vector_product is R_op


def test_L_op() -> None:
    xs = inputs()
    ys = two_outputs(*xs)
    ws = tuple(rand(*y.shape, seed=10) for y in ys)
    J = dense_jacobian(two_outputs, inputs(requires_grad=False))

    for _ in range(2):
        result = L_op(ys, xs, ws)
        assert isinstance(result, tuple)
        assert [r.shape for r in result] == [x.shape for x in xs]
        assert not any(r.requires_grad for r in result)
        torch.testing.assert_close(flat(result), flat(ws) @ J)
    ys[0].sum().backward()
    assert transposed_jacobian_vector_product is L_op


@pytest.mark.parametrize("op", [R_op, L_op])
def test_ops_of_single_tensors_and_iterables(op: Callable[..., tuple[Tensor, ...]]) -> None:
    x, v = rand(3, requires_grad=True), rand(3, seed=1)
    y = x**3
    for arguments in [(y, x, v), ([y], [x], [v]), (iter([y]), (x,), v)]:
        (result,) = op(*arguments)
        torch.testing.assert_close(result, 3 * x.detach() ** 2 * v)


@pytest.mark.parametrize("op", [R_op, L_op])
def test_ops_are_differentiable(op: Callable[..., tuple[Tensor, ...]]) -> None:
    x, v = rand(3, requires_grad=True), rand(3, seed=1, requires_grad=True)
    (result,) = op(x**3, x, v, detach=False)
    grad_x, grad_v = torch.autograd.grad(result.sum(), [x, v])
    torch.testing.assert_close(grad_x, (6 * x * v).detach())
    torch.testing.assert_close(grad_v, (3 * x**2).detach())


@pytest.mark.parametrize("f", [torch.square, torch.abs, lambda z: z.conj() * 1j])
def test_R_op_of_complex_numbers(f: Callable[[Tensor], Tensor]) -> None:
    z, v = (torch.complex(rand(3, seed=s), rand(3, seed=s + 1)) for s in (0, 2))
    z.requires_grad_()
    (result,) = R_op(f(z), z, v)
    with torch.no_grad():
        difference = (f(z + 1e-6 * v) - f(z - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(result, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("op", [R_op, L_op])
def test_ops_can_free_the_graph(op: Callable[..., tuple[Tensor, ...]]) -> None:
    x, v = rand(3, requires_grad=True), rand(3, seed=1)
    y = x.exp()
    (result,) = op(y, x, v, retain_graph=False)
    torch.testing.assert_close(result, (x.exp() * v).detach())
    if op is L_op:
        with pytest.raises(RuntimeError, match="second time"):
            op(y, x, v)


@pytest.mark.parametrize("op", [R_op, L_op])
def test_ops_give_zeros_for_what_is_independent(op: Callable[..., tuple[Tensor, ...]]) -> None:
    x, z = rand(3, requires_grad=True), rand(3, seed=1, requires_grad=True)
    (result,) = op(x**2, z, rand(3))
    assert torch.equal(result, torch.zeros_like(x))
    constant = rand(3)
    dependent, independent = op([x**2, constant], [x, z], [rand(3), rand(3)])
    assert dependent.abs().min() > 0
    assert torch.equal(independent, torch.zeros_like(x))


def test_parameters_without_axes_and_no_parameters() -> None:
    x, z = rand(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    square, unused = L_op(x**2, [x, z], torch.ones(3))
    assert torch.equal(square, 2 * x)
    assert torch.equal(unused, torch.tensor(0.0))
    assert torch.equal(hessian_vector_product(3 * z, z, torch.tensor(1.0))[0], torch.tensor(0.0))
    (moved,) = R_op(torch.tensor(1.0) * z, z, torch.tensor(4.0))
    assert torch.equal(moved, torch.tensor(4.0))
    output = x**2
    assert hessian_vector_product(output.sum(), [], []) == ()
    assert ggn_vector_product_from_plist(output.sum(), output, [], []) == ()


def test_op_errors() -> None:
    x = rand(2, 3, requires_grad=True)
    y = x.sum(1)
    with pytest.raises(ValueError, match=r"vs\[0\] and xs\[0\].*\(3, 2\) and \(2, 3\)"):
        R_op(y, x, rand(3, 2))
    with pytest.raises(ValueError, match="vs and xs must have the same length, got 2 and 1"):
        R_op(y, x, [x, x])
    with pytest.raises(ValueError, match=r"ws\[1\] and ys\[1\].*\(3,\) and \(2,\)"):
        L_op([y, y], x, [y, rand(3)])
    with pytest.raises(ValueError, match="ws and ys must have the same length, got 1 and 2"):
        L_op([y, y], x, y)
    for op in (R_op, L_op):
        with pytest.raises(ValueError, match="without a graph"):
            op(x.detach(), x, x)


# hessian_vector_product


def scalar(x: Tensor, z: Tensor, unused: Tensor) -> Tensor:
    """Return a function that is not separable, and linear in a part of its inputs."""
    return (x @ z).pow(4).sum() * x.sin().sum() + z.sum()


@pytest.mark.parametrize("known_gradient", [None, "graph", "no graph"])
def test_hessian_vector_product(known_gradient: str | None) -> None:
    xs, vs = inputs(), tuple(rand(*x.shape, seed=10) for x in inputs())
    f = scalar(*xs)
    gradient = None
    if known_gradient is not None:
        gradient = torch.autograd.grad(
            f,
            xs,
            create_graph=known_gradient == "graph",
            retain_graph=True,
            materialize_grads=True,
        )
    expected = dense_hessian(scalar, inputs(requires_grad=False)) @ flat(vs)

    for _ in range(2):
        result = hessian_vector_product(f, xs, vs, grad_params=gradient)
        assert isinstance(result, tuple)
        assert [r.shape for r in result] == [x.shape for x in xs]
        assert not any(r.requires_grad for r in result)
        torch.testing.assert_close(flat(result), expected)
    f.backward()


def test_hessian_vector_product_uses_the_known_gradient() -> None:
    x = rand(3, requires_grad=True)
    (result,) = hessian_vector_product((x**2).sum(), x, rand(3), grad_params=5 * x)
    torch.testing.assert_close(result, 5 * rand(3))


@pytest.mark.parametrize("detached", [0, 1])
def test_hessian_vector_product_of_a_gradient_without_a_part_of_its_graph(detached: int) -> None:
    """What has no graph may be no constant: its part of the product is there all the same."""
    xs = [rand(3, requires_grad=True), rand(3, seed=1, requires_grad=True)]
    f = (xs[0] ** 3 * xs[1] ** 2).sum()
    vs = [rand(3, seed=2), rand(3, seed=3)]
    gradient = [*torch.autograd.grad(f, xs, create_graph=True)]
    expected = hessian_vector_product(f, xs, vs, grad_params=gradient)
    gradient[detached] = gradient[detached].detach()
    for one, other in zip(
        hessian_vector_product(f, xs, vs, grad_params=gradient), expected, strict=True
    ):
        torch.testing.assert_close(one, other)


def test_hessian_vector_product_of_simple_functions() -> None:
    x, v = rand(3, requires_grad=True), rand(3, seed=1)
    (linear,) = hessian_vector_product(x.sum(), x, v)
    assert torch.equal(linear, torch.zeros_like(x))
    (result,) = hessian_vector_product(x.prod(), iter([x]), iter([v]), detach=False)
    a, b, c = x.detach()
    matrix = torch.tensor([[0, c, b], [c, 0, a], [b, a, 0]], dtype=torch.float64)
    torch.testing.assert_close(result.detach(), matrix @ v)
    (third,) = torch.autograd.grad(result @ v, x)
    torch.testing.assert_close(third, 2 * torch.stack([v[1] * v[2], v[0] * v[2], v[0] * v[1]]))


def test_hessian_of_weight_normalisation_is_refused_where_it_is_wrong() -> None:
    """The second derivative of torch's function takes the norms for constants."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double())
    norms, weight = layer.parametrizations.weight.parameters()

    def loss() -> Tensor:
        return layer(rand(4, 3)).sin().sum()

    for p in (norms, weight):
        with pytest.raises(NotImplementedError, match=r"weight normalisation.*Use HMP"):
            hessian_vector_product(loss(), p, torch.ones_like(p))
    (product,) = hessian_vector_product(loss(), layer.bias, torch.ones_like(layer.bias))
    torch.testing.assert_close(product, -layer(rand(4, 3)).sin().sum(0).detach())

    # products with the GGN need first derivatives alone
    v, step = rand(*weight.shape, seed=1), 1e-5
    f = layer(rand(4, 3))
    (ggn,) = ggn_vector_product_from_plist(f.pow(2).sum() / 2, f, [weight], [v])
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            moved = weight + sign * step * v
            normalised = norms * moved / moved.norm(dim=1, keepdim=True)
            ends.append(nn.functional.linear(rand(4, 3), normalised, layer.bias))
    tangent = (ends[0] - ends[1]) / (2 * step)
    (expected,) = torch.autograd.grad(layer(rand(4, 3)), weight, tangent)
    torch.testing.assert_close(ggn, expected, rtol=1e-7, atol=1e-9)


def test_hessian_vector_product_errors() -> None:
    x, z = rand(2, 3, requires_grad=True), rand(3, requires_grad=True)
    f = (x @ z).sum()
    with pytest.raises(ValueError, match="v and params must have the same length, got 1 and 2"):
        hessian_vector_product(f, [x, z], [x])
    with pytest.raises(ValueError, match=r"v\[1\] and params\[1\].*\(2, 3\) and \(3,\)"):
        hessian_vector_product(f, [x, z], [x, x])
    with pytest.raises(ValueError, match=r"grad_params\[0\] and params\[0\].*\(3,\) and \(2, 3\)"):
        hessian_vector_product(f, x, x, grad_params=z)
    with pytest.raises(ValueError, match=r"grad_params and params .* length, got 0 and 1"):
        hessian_vector_product(f, x, x, grad_params=[])
    with pytest.raises(ValueError, match=r"scalar, got shape \(2,\)"):
        hessian_vector_product(x @ z, x, x)
    with pytest.raises(ValueError, match="without a graph"):
        hessian_vector_product(f.detach(), x, x)


# ggn_vector_product


def dense_ggn(model: nn.Module, X: Tensor, loss_function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the generalized Gauss-Newton matrix of the trainable parameters."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def evaluate(*params: Tensor) -> tuple[Tensor]:
        arguments = dict(zip(trainable, params, strict=True))
        return (torch.func.functional_call(model, arguments, (X,)),)

    J = dense_jacobian(evaluate, tuple(p.detach() for p in trainable.values()))
    H = dense_hessian(loss_function, (model(X).detach(),))
    return J.T @ H @ J


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with a frozen and an unused parameter, its input, and labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model.register_parameter("unused", nn.Parameter(rand(2)))
    model[0].bias.requires_grad_(False)
    return model, rand(5, 4), torch.tensor([0, 1, 2, 1, 0])


def test_ggn_vector_product() -> None:
    model, X, y = model_and_data()
    G = dense_ggn(model, X, lambda out: nn.functional.cross_entropy(out, y))
    params = [p for p in model.parameters() if p.requires_grad]
    v = [rand(*p.shape, seed=i) for i, p in enumerate(params)]
    output = model(X)
    loss = nn.functional.cross_entropy(output, y)

    for _ in range(2):
        result = ggn_vector_product(loss, output, model, v)
        assert isinstance(result, tuple)
        assert [r.shape for r in result] == [p.shape for p in params]
        torch.testing.assert_close(flat(result), G @ flat(tuple(v)))
    loss.backward()


def test_ggn_vector_product_from_plist() -> None:
    model, X, y = model_and_data()
    G = dense_ggn(model, X, lambda out: nn.functional.cross_entropy(out, y))
    output = model(X)
    loss = nn.functional.cross_entropy(output, y)
    weight = model.get_parameter("0.weight")
    v = rand(*weight.shape, seed=3)
    (start, num) = (2, weight.numel())  # behind the unused parameter
    expected = (G[start : start + num, start : start + num] @ v.flatten()).view_as(weight)
    arguments: list[tuple[Any, Any]] = [(weight, v), ([weight], [v]), (iter([weight]), iter([v]))]
    for plist, vs in arguments:
        (result,) = ggn_vector_product_from_plist(loss, output, plist, vs)
        torch.testing.assert_close(result, expected)


def test_ggn_vector_product_of_linear_loss_is_zero() -> None:
    model, X, _ = model_and_data()
    output = model(X)
    v = [rand(*p.shape) for p in model.parameters() if p.requires_grad]
    assert not flat(ggn_vector_product(output.sum(), output, model, v)).any()


def test_ggn_vector_product_errors() -> None:
    model, X, y = model_and_data()
    output = model(X)
    loss = nn.functional.cross_entropy(output, y)
    v = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ValueError, match="same length, got 3 and 4"):
        ggn_vector_product(loss, output, model, v[:-1])
    with pytest.raises(ValueError, match=r"vs\[0\] and xs\[0\].*\(3,\) and \(2,\)"):
        ggn_vector_product(loss, output, model, v[::-1])
    with pytest.raises(RuntimeError, match=r"does not depend on the output\. .*another call"):
        ggn_vector_product(loss, model(X), model, v)


class Cube(torch.autograd.Function):
    """The third power, whose backward pass autograd can differentiate, or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str) -> Tensor:
        """[*] -> [*]."""
        ctx.save_for_backward(x)
        ctx.way = way
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute with a graph, or without one."""
        (x,) = ctx.saved_tensors
        with torch.set_grad_enabled(ctx.way == "graph" and torch.is_grad_enabled()):
            product = 3 * x**2 * grad
        return product, None


class CubeOnce(Cube):
    """Marked as what autograd cannot differentiate twice."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Cube.backward))


class Steps(torch.autograd.Function):
    """Values that are rounded, beside those that are not: the gradient of the first is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """[*] -> [*], [*]."""
        return x.round(), 2 * x

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        """One gradient may be zeros without a graph."""
        return torch.zeros_like(first) + 2 * second


class Sign(torch.autograd.Function):
    """A sign, whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[*] -> [*]."""
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return zero."""
        return torch.zeros_like(grad)


class Scaled(torch.autograd.Function):
    """A product of which one factor has a gradient without a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, data: Tensor) -> Tensor:
        """[*], [*] -> [*]."""
        ctx.save_for_backward(x, data)
        return x * data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the second gradient without a graph."""
        x, data = ctx.saved_tensors
        return grad * data, (grad * x).detach()


@pytest.mark.parametrize("cube, way", [(Cube, "none"), (CubeOnce, "graph")], ids=["none", "once"])
def test_backward_passes_without_a_derivative(cube: type[Cube], way: str) -> None:
    """Autograd takes them for constants: the Hessian was without a part, and symmetric."""
    x, v = rand(4, requires_grad=True), rand(4, seed=1)
    with pytest.raises(RuntimeError, match=f"function {cube.__name__} cannot be differentiated"):
        hessian_vector_product(cube.apply(x, way).sin().sum(), x, v)
    with pytest.raises(RuntimeError, match=f"function {cube.__name__} cannot be differentiated"):
        R_op(cube.apply(x, way), x, v)
    with pytest.raises(RuntimeError, match=f"function {cube.__name__} cannot be differentiated"):
        hessian_vector_product(cube.apply(x, way).sum(), x, v)  # of a gradient that is constant


def test_functions_whose_constant_gradients_are_zero_or_of_others() -> None:
    x, v, data = rand(4, requires_grad=True), rand(4, seed=1), rand(4, seed=2).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return (x + Sign.apply(x)).pow(3)

    H = hessian(lambda x: ((x + x.detach().sign()).pow(3) * data).sin().sum(), x.detach())
    (product,) = hessian_vector_product(Scaled.apply(f(x), data).sin().sum(), x, v)
    torch.testing.assert_close(product, H @ v)
    (product,) = R_op(Scaled.apply(f(x), data), x, v)
    torch.testing.assert_close(product, 3 * (x + x.sign()).square() * data * v)
    with pytest.raises(RuntimeError, match="function Scaled cannot be differentiated"):
        hessian_vector_product(Scaled.apply(f(x), data).sin().sum(), (x, data), (v, v))


def test_gradients_that_are_zero_at_a_point_alone() -> None:
    """They have a derivative all the same, such as that of a square."""
    x = torch.zeros(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="function CubeOnce cannot be differentiated"):
        hessian_vector_product(CubeOnce.apply(x, "graph").sum(), x, torch.ones(4))


@pytest.mark.parametrize("output", [0, 1])
def test_functions_in_python_with_a_derivative(output: int) -> None:
    """One that is differentiable, one whose gradient is zero, and one with an unused output."""
    x, v = rand(4, requires_grad=True), rand(4, seed=1)

    def f(x: Tensor, cube: Any, steps: Any) -> Tensor:
        return cube(x).sin().sum() + (x * steps(x)[output]).exp().sum()

    def steps(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach().round(), 2 * x

    H = hessian(lambda x: f(x, lambda y: y**3, steps), x.detach())
    (product,) = hessian_vector_product(f(x, lambda y: Cube.apply(y, "graph"), Steps.apply), x, v)
    torch.testing.assert_close(product, H @ v)
