"""Situations: what programs do to a network, each a few lines as a user would write them.

A situation is a function of a :class:`~program.Program`, which runs it with the library and without
it. Data says where that ends: on which networks it runs, what is refused, what warns.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from networks import NETWORKS, Network
from program import Program
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from backpack import disable, memory_cleanup

Action = Callable[[Program], None]


@dataclass(frozen=True)
class Situation:
    """What happens, and what is expected of the library beside what plain PyTorch does."""

    name: str
    act: Action
    without: tuple[str, ...] = ()  # networks where it makes no sense
    only: tuple[str, ...] = ()  # networks, where others take long
    # what the error says, by order, or by order and network ("" if there is none on this one)
    refused: dict[str, str] = field(default_factory=dict)
    warns: str = ""  # what warnings say that plain PyTorch has not (some are given only once)
    told: str = ""  # what a warning of second order has to say, and none of first order
    lost: str = ""  # what a warning says about parameters that have no quantities
    tolerance: float = 1e-10
    quantities: bool = True  # whether they are compared

    def __call__(self, program: Program) -> None:
        self.act(program)

    def networks(self) -> list[Network]:
        """List those on which it makes sense."""
        names = [n for n in self.only or NETWORKS if n not in self.without]
        return [NETWORKS[name] for name in names]

    def __repr__(self) -> str:
        return self.name


SITUATIONS: dict[str, Situation] = {}

ORDERS = ("first", "second")
# Second order has to know every function, or to read it from the graph, if that tells enough. First
# order asks autograd, which knows.
UNKNOWN_FUNCTION = {"second": "through an operation that is not a module"}
# Second order goes without hooks that change gradients.
CHANGED_GRADIENT = "has changed the gradient of what"
CHANGED = "was changed (in place )?afte(r the forward pass|rwards)"


def add(act: Action, name: str, **data: Any) -> None:
    assert name not in SITUATIONS
    SITUATIONS[name] = Situation(name, act, **data)


def situation(**data: Any) -> Callable[[Action], Action]:
    """Add a function, whose name describes it."""

    def register(act: Action) -> Action:
        add(act, act.__name__, **data)
        return act

    return register


# ------------------------------------------------------------------ hooks of modules


def scaled(value: Any, factor: float = 0.5) -> Any:
    """Scale a tensor, or the first of several."""
    return factor * value if isinstance(value, Tensor) else (factor * value[0], *value[1:])


def change_output(p: Program, module: nn.Module, inputs: Any, output: Any) -> Any:
    return scaled(output)


def change_input(p: Program, module: nn.Module, inputs: Any) -> Any:
    return scaled(inputs)


def change_gradient(p: Program, module: nn.Module, *gradients: Any) -> Any:
    return tuple(None if g is None else p.alter(g) for g in gradients[0])


HOOKS: dict[str, Callable[..., Any]] = {
    "forward_hook": change_output,
    "forward_pre_hook": change_input,
    "full_backward_hook": change_gradient,
    "full_backward_pre_hook": change_gradient,
}


def hook_of(p: Program, kind: str) -> Callable[..., Any]:
    return p.noted(kind, lambda *args: HOOKS[kind](p, *args))


def hooks_of_modules(kind: str, is_before: bool, prepend: bool) -> Action:
    def act(p: Program) -> None:
        if not is_before:
            p.extend()
        for layer in p.layers:
            getattr(layer, f"register_{kind}")(hook_of(p, kind), prepend=prepend)
        if is_before:
            p.extend()
        p.step()
        p.step()

    return act


def global_hooks(kind: str) -> Action:
    def act(p: Program) -> None:
        p.extend()
        hook, layers = hook_of(p, kind), p.layers
        register = getattr(nn.modules.module, f"register_module_{kind}")
        handle = register(lambda module, *args: hook(module, *args) if module in layers else None)
        p.stack.callback(handle.remove)
        p.step()
        p.step()

    return act


def lost(kind: str, place: str) -> str:
    return HOOK_BEFORE if kind == "forward_hook" and place in BEFORE_OURS else ""


HOOK_BEFORE = "forward hook that runs before backpack's"
BEFORE_OURS = ("first_after_extend", "global")


def refused(kind: str, place: str) -> dict[str, str]:
    """What a hook changes, a function changes, which has to be seen."""
    if "backward" in kind:
        return {}
    if kind == "forward_hook" and place in BEFORE_OURS:
        return {"second": f"{HOOK_BEFORE}|{UNKNOWN_FUNCTION['second']}"}
    # recorded is what runs before our last hook before a module, and after our first behind it
    is_outermost = "pre" not in kind or place != "last_after_extend"
    return {**UNKNOWN_FUNCTION, **({"second recorded": ""} if is_outermost else {})}


for _kind in HOOKS:
    for _before in (True, False):
        for _prepend in (True, False):
            _place = f"{'first' if _prepend else 'last'}_{'before' if _before else 'after'}_extend"
            act = hooks_of_modules(_kind, _before, _prepend)
            add(
                act,
                f"{_kind}_{_place}",
                refused=refused(_kind, _place),
                lost=lost(_kind, _place),
                told=CHANGED_GRADIENT if "backward" in _kind else "",
            )
    add(
        global_hooks(_kind),
        f"global_{_kind}",
        refused=refused(_kind, "global"),
        lost=lost(_kind, "global"),
        told=CHANGED_GRADIENT if "backward" in _kind else "",
    )


@situation()
def hooks_that_only_look(p: Program) -> None:
    p.extend()
    for i, layer in enumerate(p.layers):
        layer.register_forward_hook(p.noted(f"forward of {i}", lambda *_: None))
        layer.register_forward_pre_hook(p.noted(f"before {i}", lambda *_: None))
        layer.register_full_backward_hook(p.noted(f"backward of {i}", lambda *_: None))
        layer.register_full_backward_pre_hook(p.noted(f"before backward of {i}", lambda *_: None))
    p.step()
    p.step()


@situation()
def hooks_that_only_look_before_ours(p: Program) -> None:
    p.extend()
    look, layers = p.noted("forward", lambda *_: None), p.layers
    register = nn.modules.module.register_module_forward_hook
    p.stack.callback(register(lambda m, *_: look() if m in layers else None).remove)
    for layer in layers:
        layer.register_forward_hook(p.noted("first", lambda *_: None), prepend=True)
    p.step()
    p.step()


@situation(refused={**UNKNOWN_FUNCTION, "second recorded": ""})
def hooks_that_leave(p: Program) -> None:
    handles = [layer.register_forward_hook(hook_of(p, "forward_hook")) for layer in p.layers]
    p.extend()
    p.step()
    for handle in handles:
        handle.remove()
    p.step()


@situation(warns="computed automatically")
def class_with_another_forward(p: Program) -> None:
    plain = nn.Linear.forward
    nn.Linear.forward = lambda self, x: plain(self, x) * 0.5  # type: ignore[method-assign]
    p.stack.callback(setattr, nn.Linear, "forward", plain)
    p.extend()
    p.step()


# ------------------------------------------------------------------ hooks of tensors and nodes


@situation(told=CHANGED_GRADIENT)
def hook_of_the_output(p: Program) -> None:
    p.extend()
    output = p.model(p.X)
    output.register_hook(p.noted("tensor", p.alter))
    p.backward(p.loss(output))


@situation()
def gradient_of_the_output_is_kept(p: Program) -> None:
    p.extend()
    output = p.model(p.X)
    output.retain_grad()
    p.backward(p.loss(output))
    p.see("gradient of the output", output.grad)


@situation(told=CHANGED_GRADIENT)
def hooks_of_activations(p: Program) -> None:
    def attach(module: Any, inputs: Any, output: Any) -> None:
        output = output if isinstance(output, Tensor) else output[0]
        output.register_hook(p.noted("activation", p.alter))

    p.extend()
    for layer in p.layers:
        layer.register_forward_hook(attach)
    p.step()


@situation()
def gradients_of_activations_are_kept(p: Program) -> None:
    kept = []

    def attach(module: Any, inputs: Any, output: Any) -> None:
        output = output if isinstance(output, Tensor) else output[0]
        output.retain_grad()
        kept.append(output)

    p.extend()
    for layer in p.layers:
        layer.register_forward_hook(attach)
    p.step()
    for activation in kept:
        p.see("gradient of an activation", activation.grad)
    kept.clear()


def nodes(root: Any) -> Iterator[Any]:
    """The functions of a graph, from its root on."""
    seen, queue = {root}, [root]
    for node in queue:
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)


def hooks_of_nodes(before_they_run: bool, names: tuple[str, ...]) -> Action:
    def act(p: Program) -> None:
        def change(gradients: Any, *_: Any) -> Any:
            return tuple(None if g is None else p.alter(g) for g in gradients)

        p.extend()
        loss = p.forward()
        for node in nodes(loss.grad_fn):
            if any(name in node.name() for name in names):
                register = node.register_prehook if before_they_run else node.register_hook
                register(p.noted(node.name(), change))
        p.backward(loss)

    return act


BETWEEN = ("Relu", "Tanh", "Sigmoid", "MaxPool", "View", "Reshape")
# Inside of these modules, nodes are theirs: autograd does not tell that they have hooks.
OF_MANY_NODES = ("lstm", "attention")
add(hooks_of_nodes(False, BETWEEN), "hooks_of_nodes_between_layers", without=OF_MANY_NODES)
add(hooks_of_nodes(True, BETWEEN), "prehooks_of_nodes_between_layers", without=OF_MANY_NODES)


# ------------------------------------------------------------------ hooks of parameters


@situation()
def hooks_of_parameters(p: Program) -> None:
    p.extend()
    for weight in p.parameters:
        weight.register_hook(p.noted("parameter", p.alter_finally))
    p.step()


@situation()
def hooks_after_accumulation(p: Program) -> None:
    p.extend()
    for name, weight in zip(p.names, p.parameters, strict=True):
        weight.register_post_accumulate_grad_hook(
            p.noted(name, lambda w: p.see("accumulated", w.grad))
        )
    p.step()
    p.step()


# ------------------------------------------------------------------ changes in place


@situation(refused=UNKNOWN_FUNCTION)
def output_changed_in_place(p: Program) -> None:
    p.extend()
    output = p.model(p.X)
    output.mul_(0.5)
    p.backward(p.loss(output))


@situation(
    refused={**UNKNOWN_FUNCTION, "second recorded": "", **{f"{o} lstm": CHANGED for o in ORDERS}}
)
def activations_changed_in_place(p: Program) -> None:
    def change(module: Any, inputs: Any, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).mul_(0.5)

    p.extend()
    for layer in p.layers:
        layer.register_forward_hook(change)
    p.step()


@situation()
def activations_in_place(p: Program) -> None:
    for module in p.model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    p.extend()
    p.step()
    p.step()


@situation(
    refused={f"{order} {name}": CHANGED for order in ORDERS for name in ("lstm", "attention")}
)
def data_changed_after_the_forward_pass(p: Program) -> None:
    p.extend()
    loss = p.forward()
    p.X.mul_(0.5)
    p.backward(loss)


@situation()
def data_changed_before_the_next_forward_pass(p: Program) -> None:
    p.extend()
    for _ in range(3):
        p.step()
        p.X.mul_(0.5)


@situation()
def buffer_for_data(p: Program) -> None:
    """A buffer that every batch is copied to."""
    p.extend()
    buffer, X = torch.empty_like(p.X), p.X
    for factor in (1.0, 0.5):
        buffer.copy_(factor * X)
        p.X = buffer
        p.step()


@situation()
def parameters_changed_after_the_forward_pass(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with torch.no_grad():
        for weight in p.parameters:
            weight.mul_(0.5)
    p.backward(loss)


@situation()
def state_loaded_after_the_forward_pass(p: Program) -> None:
    p.extend()
    state = {name: 0.5 * value for name, value in p.model.state_dict().items()}
    loss = p.forward()
    p.model.load_state_dict(state)
    p.backward(loss)


@situation()
def bias_changed_after_the_forward_pass(p: Program) -> None:
    """Autograd does not read it again."""
    p.extend()
    loss = p.forward()
    if not p.is_truth_of_curvature:
        p.parameters[-1].data.mul_(0.5)
    p.backward(loss)


@situation()
def steps_of_an_optimiser(p: Program) -> None:
    """Only the first step has the weights of the truth: those after it are compared alone."""
    p.extend()
    optimiser = torch.optim.AdamW(p.parameters, lr=0.1)
    p.step()
    for _ in range(2):
        optimiser.step()
        optimiser.zero_grad()
        with p.context():
            p.forward().backward()


@situation()
def fixed_steps(p: Program) -> None:
    """Weights that every role of the program changes alike, in place and by their data."""
    p.extend()
    p.step()
    with torch.no_grad():
        for weight in p.parameters:
            weight.mul_(0.5)
    p.step()
    for weight in p.parameters:
        weight.data = 0.5 * weight.data
    p.step()


# ------------------------------------------------------------------ threads


@situation(without=("attention", "recorded"))
def two_threads(p: Program) -> None:
    """Each with a copy of the model, and a context of its own."""
    p.extend()
    model, lossfunc = copy.deepcopy(p.model), copy.deepcopy(p.lossfunc)
    barrier, errors = threading.Barrier(2), []

    def steps(forward: Callable[[], Tensor], parameters: list[nn.Parameter]) -> None:
        try:
            for _ in range(4):
                barrier.wait(60)
                for weight in parameters:
                    weight.grad = None
                with p.context():
                    forward().backward()
        except Exception as error:
            errors.append(error)
            barrier.abort()

    def other() -> Tensor:
        return lossfunc(model(p.X), p.y)

    def own() -> Tensor:
        return p.loss(p.model(p.X))

    threads = [
        threading.Thread(target=steps, args=arguments)
        for arguments in ((own, p.parameters), (other, list(model.parameters())))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    p.measure()


@situation()
def plain_pass_in_another_thread(p: Program) -> None:
    """It runs without extensions, while a context is open here."""
    p.extend()
    model = copy.deepcopy(p.model)

    def work() -> None:
        model(p.X).sum().backward()

    loss = p.forward()
    with p.context():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        loss.backward()
    p.measure()
    fields = [ext.savefield for ext in p.exts]
    p.see("results", any(hasattr(w, f) for w in model.parameters() for f in fields))


# ------------------------------------------------------------------ around a forward pass


@situation()
def checkpointed(p: Program) -> None:
    p.extend()
    for i, layer in enumerate(p.layers):
        layer.register_forward_pre_hook(p.noted(f"layer {i}", lambda *_: None))
    p.backward(p.loss(checkpoint(p.model, p.X, use_reentrant=False)))


@situation(without=("recorded", "traced"))
def checkpointed_layers(p: Program) -> None:
    p.extend()
    x = p.X
    for layer in p.model.children():
        x = checkpoint(layer, x, use_reentrant=False)
    p.backward(p.loss(x))


@situation(refused={"second": "use it with use_reentrant=False"})
def checkpointed_by_a_backward_pass(p: Program) -> None:
    p.extend()
    p.backward(p.loss(checkpoint(p.model, p.X.requires_grad_(), use_reentrant=True)))


@situation(tolerance=2e-2)
def autocast(p: Program) -> None:
    p.extend()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = p.model(p.X)
    p.backward(p.loss(output.double()))


@situation()
def anomaly_detection(p: Program) -> None:
    p.extend()
    with torch.autograd.detect_anomaly(check_nan=True):
        p.step()


@situation()
def saved_tensors_hooks(p: Program) -> None:
    p.extend()
    pack = p.noted("pack", lambda x: x.numpy(force=True) if x.is_leaf else x)
    unpack = p.noted("unpack", lambda x: x if isinstance(x, Tensor) else torch.from_numpy(x))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = p.forward()
    p.backward(loss)


@situation()
def saved_on_cpu(p: Program) -> None:
    p.extend()
    with torch.autograd.graph.save_on_cpu():
        loss = p.forward()
    p.backward(loss)


@situation()
def other_passes_in_between(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with torch.no_grad():
        p.see("no_grad", p.model(p.X))
    with torch.inference_mode():
        p.see("inference", p.model(p.X).clone())
    p.model(p.X)
    p.backward(loss)


@situation()
def inference_inside_of_the_context(p: Program) -> None:
    p.extend()
    with p.context():
        with torch.inference_mode():
            p.see("inference", p.model(p.X).clone())
        p.forward().backward()
    p.measure()


@situation()
def evaluation_mode(p: Program) -> None:
    p.extend()
    p.model.eval()
    p.step()


@situation()
def gradient_of_the_data(p: Program) -> None:
    p.extend()
    p.X.requires_grad_()
    p.step()
    if p.sample is None:
        p.see("gradient of the data", p.X.grad)


@situation()
def another_pass_in_a_hook(p: Program) -> None:
    """Through the layers that the outer pass has yet to reach, and those behind it."""
    p.extend()
    p.X.requires_grad_()
    loss, inner = p.forward(), list[Tensor]()

    def again(grad: Tensor) -> None:
        if not inner:
            inner.extend(torch.autograd.grad(loss, p.X, retain_graph=True))

    weight = p.layers[-1].weight
    handle = weight.register_hook(again)
    p.backward(loss, retain_graph=True)
    handle.remove()  # the graph would own itself
    if p.sample is None:
        p.see("gradient of the data", inner[0])


@situation(without=("lstm",))
def gradients_of_all_outputs_at_once(p: Program) -> None:
    p.extend()
    p.X.requires_grad_()
    output = p.model(p.X)
    rows = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape)
    loss = p.loss(output)
    with p.context():
        (jacobian,) = torch.autograd.grad(
            output, p.X, rows, is_grads_batched=True, retain_graph=True
        )
        loss.backward()
    p.measure()
    p.see("Jacobian", jacobian)


@situation()
def jacobian_inside_of_a_context(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with p.context():
        jacobian = torch.autograd.functional.jacobian(p.model, p.X)
        loss.backward()
    p.measure()
    p.see("Jacobian", jacobian)


@situation(only=("convolutions", "tied"))
def tangents_of_the_data(p: Program) -> None:
    p.extend()
    with forward_ad.dual_level():
        loss = p.loss(p.model(forward_ad.make_dual(p.X, torch.ones_like(p.X))))
        with p.context():
            loss.backward()
        for weight in p.parameters:
            primal, tangent = forward_ad.unpack_dual(weight.grad)
            p.see("tangent of a gradient", tangent)
            weight.grad = primal.clone()
    p.measure()


@situation()
def transforms_inside_of_a_context(p: Program) -> None:
    p.extend()
    values = {name: w.detach() for name, w in p.model.named_parameters()}

    def plain_loss(values: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(p.model, values, (p.X,))
        return nn.functional.cross_entropy(output, p.y)

    loss = p.forward()
    with p.context():
        for name, g in torch.func.grad(plain_loss)(values).items():
            p.see(f"functional gradient of {name}", g)
        loss.backward()
    p.measure()


@situation()
def transform_of_the_data_inside_of_a_context(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with p.context():
        gradient = torch.func.grad(lambda X: nn.functional.cross_entropy(p.model(X), p.y))(p.X)
        p.see("gradient of the data", gradient)
        loss.backward()
    p.measure()


@situation(only=("convolutions", "tied"))
def compiled(p: Program) -> None:
    p.extend()
    model = torch.compile(p.model, backend="aot_eager")
    p.stack.callback(torch._dynamo.reset)
    p.see("output of the compiled model", model(p.X))


@situation(only=("convolutions", "tied"))
def compiled_as_a_whole(p: Program) -> None:
    p.extend()
    model = torch.compile(p.model, backend="aot_eager", fullgraph=True)
    p.stack.callback(torch._dynamo.reset)
    p.see("output of the compiled model", model(p.X))


@situation()
def traced_by_jit(p: Program) -> None:
    p.extend()
    p.see("output of the traced model", torch.jit.trace(p.model, p.X, check_trace=False)(p.X))
    p.step()


# ------------------------------------------------------------------ copies and states


@situation()
def copied(p: Program) -> None:
    p.extend()
    p.model, p.lossfunc = copy.deepcopy(p.model), copy.deepcopy(p.lossfunc)
    p.step()
    p.model = copy.deepcopy(p.model)
    p.step()


@situation(without=("recorded",))
def pickled(p: Program) -> None:
    p.extend()
    p.step()
    p.model, p.lossfunc = pickle.loads(pickle.dumps((p.model, p.lossfunc)))
    p.model.zero_grad()
    p.step()


@situation()
def saved_and_loaded(p: Program) -> None:
    p.extend()
    p.step()
    file = io.BytesIO()
    torch.save(p.model.state_dict(), file)
    p.see("keys of the state", list(p.model.state_dict()))
    file.seek(0)
    p.model.load_state_dict(torch.load(file))
    p.step()


# ------------------------------------------------------------------ other parametrisations


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrised(how: Callable[[nn.Module], Any], is_before: bool) -> Action:
    def act(p: Program) -> None:
        if not is_before:
            p.extend()
        for layer in p.layers:
            if isinstance(layer, nn.Linear) and type(layer) is nn.Linear:
                how(layer)
        p.names = [name for name, _ in p.model.named_parameters()]
        if is_before:
            p.extend()
        p.step()
        p.step()

    return act


PARAMETRISATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "doubled_weights": lambda layer: parametrize.register_parametrization(
        layer, "weight", Doubled()
    ),
    "weight_norm": parametrizations.weight_norm,
    "pruned_weights": lambda layer: prune.l1_unstructured(layer, "weight", amount=2),
}
EXTEND_AGAIN = "Call extend.model. once more"
# What a recorded model follows, wherever it comes from.
FOLLOWED = ("doubled_weights", "weight_norm")
for _name in FOLLOWED:
    _act = parametrised(PARAMETRISATIONS[_name], False)
    add(_act, f"{_name}_after_extend_recorded", only=("recorded",))
for _name, _how in PARAMETRISATIONS.items():
    for _before in (True, False):
        add(
            parametrised(_how, _before),
            f"{_name}_{'before' if _before else 'after'}_extend",
            without=(
                *("tied", "attention"),
                *(["recorded"] if _name in FOLLOWED and not _before else []),
            ),
            refused={} if _before else {"second": EXTEND_AGAIN},
            lost="" if _before else EXTEND_AGAIN,
        )


# ------------------------------------------------------------------ which gradients


@situation()
def frozen_parameters(p: Program) -> None:
    p.layers[0].requires_grad_(False)
    p.extend()
    p.step()


@situation()
def parameters_frozen_and_thawed(p: Program) -> None:
    p.extend()
    p.step()
    p.layers[-1].requires_grad_(False)
    p.step()
    p.layers[-1].requires_grad_(True)
    p.step()


@situation()
def only_some_inputs(p: Program) -> None:
    p.extend()
    p.backward(p.forward(), inputs=p.parameters[-2:])


@situation()
def gradient_without_backward(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with p.context():
        gradients = torch.autograd.grad(loss, p.parameters)
    for weight, gradient in zip(p.parameters, gradients, strict=True):
        p.see("gradient", gradient)
        weight.grad = gradient
    p.measure()


@situation()
def graph_kept(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with p.context(retain_graph=True):
        for _ in range(2):
            before = p.copies_of_gradients()
            loss.backward(retain_graph=True)
            p.measure(before)


@situation()
def graph_of_the_gradients(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with p.context():
        gradients = torch.autograd.grad(loss, p.parameters, create_graph=True)
    penalty = sum((g**2).sum() for g in gradients)
    penalty.backward()
    p.drop_results()  # which have a graph


@situation()
def gradients_set_before(p: Program) -> None:
    p.extend()
    for weight in p.parameters:
        weight.grad = torch.ones_like(weight)
    p.step()


@situation()
def gradients_of_another_layout_set_before(p: Program) -> None:
    p.extend()
    for weight in p.parameters:
        strides = sorted(weight.stride())
        weight.grad = (
            torch.ones(weight.numel(), dtype=weight.dtype)
            .as_strided(weight.shape[::-1], strides[::-1])
            .permute(*range(weight.ndim)[::-1])
        )
    p.step()


@situation()
def micro_batches(p: Program) -> None:
    p.extend()
    for _ in range(2):
        p.backward(p.weighted(p.forward(), 0.5))


@situation()
def gradients_set_to_zero(p: Program) -> None:
    p.extend()
    held = []
    for _ in range(2):
        p.step()
        held.append([w.grad for w in p.parameters])
        p.model.zero_grad(set_to_none=False)
    p.see("in place", all(a is b for a, b in zip(*held, strict=True)))


@situation()
def gradients_clipped(p: Program) -> None:
    p.extend()
    p.step()
    p.see("norm", nn.utils.clip_grad_norm_(p.parameters, 0.1) if p.sample is None else None)


@situation()
def two_losses_of_one_model(p: Program) -> None:
    """Two losses of one model, whose sum is differentiated: of equal ones it is twice the loss."""
    p.extend()
    if p.is_truth_of_curvature:
        p.backward(p.weighted(p.forward(), 2.0))
    else:
        p.backward(p.forward() + p.forward())


@situation()
def scaled_loss(p: Program) -> None:
    p.extend()
    p.backward(p.weighted(p.forward(), 4.0))


@situation()
def root_with_a_gradient(p: Program) -> None:
    p.extend()
    weight = p.weighted(torch.tensor(1.0, dtype=torch.float64), 4.0)
    p.backward(p.forward(), gradient=weight)


@situation()
def two_models(p: Program) -> None:
    """Another one is trained with the same library in the same loop."""
    p.extend()
    first, other = p.model, p.network()
    p.model = other
    p.extend()
    other, p.model = p.model, first
    for _ in range(2):
        with p.context():
            p.lossfunc(other(p.X), p.y).backward()
        p.step()


@situation()
def two_models_in_one_loss(p: Program) -> None:
    p.extend()
    first, other = p.model, p.network()
    p.model = other
    p.extend()
    other, p.model = p.model, first
    p.backward(p.loss(p.model(p.X)) + p.loss(other(p.X)))


@situation()
def model_beside_a_plain_one(p: Program) -> None:
    other = copy.deepcopy(p.model)
    p.extend()
    loss = nn.functional.cross_entropy(other(p.X), p.y)
    p.backward(p.forward())
    loss.backward()
    for weight in other.parameters():
        p.see("gradient of the other", weight.grad)


# ------------------------------------------------------------------ contexts


@situation()
def context_around_everything(p: Program) -> None:
    p.extend()
    with p.context():
        for _ in range(2):
            before = p.copies_of_gradients()
            p.forward().backward()
            p.measure(before)


@situation()
def plain_passes_in_between(p: Program) -> None:
    p.extend()
    p.forward().backward()
    p.model.zero_grad()
    p.step()
    p.model.zero_grad()
    p.forward().backward()


@situation()
def exception_in_the_backward_pass(p: Program) -> None:
    def fails(gradient: Tensor) -> None:
        raise ArithmeticError

    p.extend()

    def attach(module: Any, inputs: Any, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).register_hook(fails)

    handle = p.layers[0].register_forward_hook(attach)
    with suppress(ArithmeticError), p.context():
        p.forward().backward()
    handle.remove()
    p.model.zero_grad()
    p.step()


@situation()
def exception_in_the_forward_pass(p: Program) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError

    p.extend()
    handle = p.layers[-1].register_forward_pre_hook(fails)
    with suppress(ArithmeticError), p.context():
        p.forward().backward()
    handle.remove()
    p.step()


@situation()
def disabled(p: Program) -> None:
    p.extend()
    with disable():
        p.see("output without a record", p.model(p.X))
    p.step()


@situation()
def cleaned_up(p: Program) -> None:
    p.extend()
    p.model(p.X)
    memory_cleanup(p.model)
    p.step()
    memory_cleanup(p.model)


@situation()
def graph_that_is_never_used(p: Program) -> None:
    p.extend()
    for _ in range(3):
        p.model(p.X)
    p.step()


@situation()
def backward_without_grad_mode(p: Program) -> None:
    p.extend()
    loss = p.forward()
    with torch.no_grad():
        p.backward(loss)
