"""Derivatives by autograd, for functions and modules without formulas of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import Module, Parameter

from backpack.context import disable
from backpack.core.derivatives import by_autograd
from backpack.core.derivatives.basederivatives import BaseDerivatives
from backpack.core.derivatives.conditions import Conditions
from backpack.core.derivatives.evaluation import Evaluation, drawn, generator_at, is_real
from backpack.core.derivatives.facts import never
from backpack.core.derivatives.following import Following, treatment_by
from backpack.core.derivatives.reductions import slice_size
from backpack.core.derivatives.sample_axes import BatchAxis
from backpack.core.derivatives.vectors import first_of, listed
from backpack.core.record.calls import Call
from backpack.core.record.context import Context
from backpack.core.record.data_flow import assumption_behind, is_all_data, is_of_inputs, tensors_in
from backpack.core.record.generators import evaluated_alike, evaluated_apart
from backpack.core.record.kinds import ENTRIES, MOVES, RESHAPES
from backpack.core.record.layout import Layout, unbatched
from backpack.core.record.module_state import cast, describe
from backpack.core.record.origins import flatten_outputs
from backpack.core.record.registry import register
from backpack.core.record.visits import Visit
from backpack.core.types import Changes, OfInputs, OfParams
from backpack.custom_module.function_module import FunctionModule
from backpack.hessianfree.graph import nodes_above

UNKNOWN: Final = object()


class AutomaticDerivatives(BaseDerivatives):
    """Any function of any number of tensors, and of parameters of any name and shape.

    The module must treat the samples of the batch independently and always return the same for the
    same arguments; both is checked.
    """

    includes_children = True
    keeps_facts_alone = True

    def own(self, module: Module) -> Mapping[str, Parameter | None]:
        """Return all parameters, those of children included: the call is one function."""
        has_any = module._parameters or module._modules
        return dict(module.named_parameters()) if has_any else {}

    def param_names(self, module: Module) -> tuple[str, ...]:
        """Return the names of all parameters."""
        return tuple(self.own(module))

    hessian_is_zero = never  # nothing is known

    def is_linear_in_params(self, module: Module) -> bool:
        """Return whether there are no parameters: else nothing is known."""
        return not self.own(module)

    def saved(
        self, module: Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Keep which inputs need a gradient."""
        needed = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
        return {"needed": needed}

    def unsupported_reason(self, c: Context) -> str | None:
        """Say why the derivatives of the call at hand cannot be computed; None if they can."""
        saved, module = c.saved, c.module
        if "hidden" not in saved:
            saved["hidden"], saved["repeatable"] = evaluated_again(self._evaluation(c))
        if saved["hidden"]:
            return (
                f"{describe(module)} depends on parameters of shapes "
                f"{[list(p.shape) for p in saved['hidden']]} other than through its arguments and "
                "its own parameters as they are now (a cache, an attribute, another module's "
                "parameter). Compute it in each forward pass, from own parameters and arguments."
            )
        if saved["repeatable"]:
            return None
        if c.call.has_changed_outputs:
            return (
                f"What {describe(module)} has returned was changed in place afterwards (x += y, "
                "x.relu_(), …), so it cannot be seen whether it returns the same when it is "
                "evaluated again. Use the out-of-place form, or extend(model, use_converter=True)."
            )
        return (
            f"{describe(module)} returns something else when it is evaluated again (is it random, "
            "or does it change its own state?), so its derivatives cannot be computed "
            "automatically. Use eval(), or register derivatives "
            "(backpack.core.derivatives.register). If it changes its input in place, set "
            "self.inplace = True in its __init__."
        )

    def evaluation(self, c: Context) -> Evaluation:
        """Return how to evaluate the call at hand again; an error if that gives something else."""
        reason = self.unsupported_reason(c)
        if reason is not None:
            raise NotImplementedError(reason)
        return self._evaluation(c)

    def _evaluation(self, c: Context) -> Evaluation:
        return super().evaluation(c)

    def vjp(self, c: Context, v: Any) -> Any:
        """Apply the transposed Jacobian by autograd."""
        evaluation = self.evaluation(c)
        vs = [v] if isinstance(v, Tensor) else list(v)
        needed = c.saved["needed"]
        apart = []  # what has no samples, though the outputs have
        if self._has_samples(evaluation):
            apart = [i for i in needed if evaluation.axis(i) is None]
        others = [i for i in needed if i not in apart]
        found: dict[Any, Tensor | None] = {}
        if others:
            found |= by_autograd.transposed_products(evaluation, vs, others, c.rows)
        if apart:
            found |= self._cotangents_of_samples(evaluation, vs, apart)
        if len(evaluation.inputs) == 1:
            return found[0]
        return tuple(found.get(i) for i in range(len(evaluation.inputs)))

    def _cotangents_of_samples(
        self, evaluation: Evaluation, vs: Sequence[Tensor | None], keys: Sequence[int]
    ) -> dict[Any, Tensor | None]:
        """Apply the transposed Jacobian of inputs without samples, for each sample: by number."""
        rows, numbers = evaluation.c.rows, evaluation.c.numbers(evaluation.num_samples)
        return by_autograd.per_sample_products(evaluation, vs, keys, rows, numbers)

    @staticmethod
    def _has_samples(evaluation: Evaluation) -> bool:
        return any(axis is not None for axis in evaluation.axes_out)

    def jvp(self, c: Context, t: Any) -> Any:
        """Apply the Jacobian by autograd."""
        evaluation = self.evaluation(c)
        tangents = dict(enumerate(listed(t)))
        if self._has_samples(evaluation):
            for i, one in tangents.items():
                if one is not None and evaluation.axis(i) is None:
                    tangents[i] = one[:, 0]  # the same for all samples
        results = by_autograd.products(evaluation, tangents, c.rows)
        return results[0] if len(results) == 1 else tuple(results)

    def param_vjp(self, c: Context, name: str, v: Any) -> Tensor:
        """Apply the transposed Jacobian of a parameter for each sample by autograd.

        Those of all parameters of a call are computed at once, where they are few.
        """
        known = {} if c.memo is None else c.memo.get("products", {})
        if name in known:
            return known.pop(name)
        evaluation, vs = self.evaluation(c), listed(v)
        numbers, names, like = c.numbers(evaluation.num_samples), [name], first_of(vs)
        if c.memo is not None and "products" not in c.memo:
            entries = len(like) * sum(p.numel() for p in c.call.trained.values())
            if 1 < len(numbers) <= slice_size(entries, like.device):
                names, c.memo["products"] = [*c.call.trained], known
        found = by_autograd.per_sample_products(evaluation, vs, names, c.rows, numbers)
        for each, product in found.items():
            shape = len(numbers), *evaluation.value(each).shape
            known[each] = _or_zeros(product, like, *shape)
        return known.pop(name)

    def param_vjp_sum(self, c: Context, name: str, v: Any) -> Tensor:
        """Apply the transposed Jacobian of a parameter, summed over the samples, by autograd."""
        evaluation, vs = self.evaluation(c), listed(v)
        product = by_autograd.transposed_products(evaluation, vs, [name], c.rows)[name]
        return _or_zeros(product, first_of(vs), *evaluation.value(name).shape)

    def param_jvp(self, c: Context, name: str, t: Tensor) -> Any:
        """Apply the Jacobian of a parameter by autograd."""
        results = by_autograd.products(self.evaluation(c), {name: t}, c.rows)
        return results[0] if len(results) == 1 else tuple(results)


def _or_zeros(product: Tensor | None, v: Tensor, *shape: int) -> Tensor:
    """Return a product of V vectors, ``[V, *shape]``; zeros for None."""
    return v.new_zeros(len(v), *shape) if product is None else product


def with_gradients(inputs: Sequence[Any], needed: Sequence[int]) -> list[Any]:
    """Let inputs need a gradient that do in the call: derivatives may be a part of the output."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap does not know of that
        return [*inputs]
    return [
        x.clone().requires_grad_() if i in needed and not x.requires_grad else x
        for i, x in enumerate(inputs)
    ]


def evaluated_again(evaluation: Evaluation) -> tuple[list[Parameter], bool]:
    """Evaluate a call again, apart from the program.

    Returns:
        The parameters that outputs depend on other than as arguments or own parameters: they are
        upstream of the outputs while inputs and own parameters are detached. And whether the call
        gives the same, and draws nothing: a draw may come out as before by chance, but the
        derivatives would draw once more.
    """
    c = evaluation.c
    with c.call.as_it_was():  # it may have tied some since
        own = {name: c.params[name] for name in evaluation.rule.own(c.module)}
    values: dict[Any, Tensor] = {n: p.detach() for n, p in own.items() if p is not None}
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in evaluation.inputs]
    with torch.enable_grad():
        outputs, is_random = evaluated_apart(lambda: evaluation.outputs(values, inputs))
    leaves = [getattr(node, "variable", None) for node in nodes_above(y.grad_fn for y in outputs)]
    hidden = [leaf for leaf in leaves if isinstance(leaf, Parameter)]
    return hidden, not is_random and evaluation.agree(outputs, c.outputs)


class FunctionDerivatives(AutomaticDerivatives):
    """Functions whose tensors may have their samples along any axis, or have none.

    Where the samples are in the output is found out, see
    :mod:`backpack.core.derivatives.following`, and by trying at random values whether the function
    is affine. The answers depend on the shapes alone, as a rule, and are kept.
    """

    batch_axis = BatchAxis.FOLLOWED
    depends_on_layouts = True
    # the answer for a key, and what it depends on besides that
    _known: ClassVar[WeakKeyDictionary[Module, dict[Any, tuple[Any, Conditions | None]]]] = (
        WeakKeyDictionary()
    )

    def hvp_unbatched(self, c: Context, inputs: OfInputs, params: OfParams) -> Changes:
        """Apply the second derivative of a call without samples, for the gradient of one sample."""
        evaluation = self.evaluation(c)
        if params:  # each of them varies with the inputs
            num_v = len(next(iter(params.values())))
            inputs = [
                x.new_zeros(num_v, *x.shape) if t is None and is_real(x) else t
                for t, x in zip(inputs, evaluation.inputs, strict=True)
            ]
        tangents: dict[Any, Tensor] = dict(params)
        tangents |= {i: t for i, t in enumerate(inputs) if t is not None}
        found = by_autograd.second_of_samples(evaluation, c.grad_out, tangents, None)
        return [found.get(i) for i in range(len(inputs))], {name: found[name] for name in params}

    def is_deterministic(self, module: Module) -> bool:
        """Return whether it is known to read its inputs alone, and to give the same again."""
        return False

    def unsupported_reason(self, c: Context) -> str | None:
        """Say why the derivatives of the call at hand cannot be computed; None if they can."""
        return None if self.is_deterministic(c.module) else super().unsupported_reason(c)

    def _cotangents_of_samples(
        self, evaluation: Evaluation, vs: Sequence[Tensor | None], keys: Sequence[int]
    ) -> dict[Any, Tensor | None]:
        """Apply the transposed Jacobian of inputs without samples: entries move back."""
        c, found = evaluation.c, None
        if moves_entries(c.module) and not torch.is_grad_enabled():
            numbers = c.numbers(evaluation.num_samples)
            found = by_autograd.moved_products(evaluation, vs, keys, numbers)
        return super()._cotangents_of_samples(evaluation, vs, keys) if found is None else found

    def evaluate(self, c: Context, params: Mapping[str, Tensor], *inputs: Any) -> Any:
        """Return the output for other inputs and parameters, which it may change in place."""
        if treatment_by(c.module) is None:
            inputs = tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)
        return super().evaluate(c, params, *inputs)

    sees_samples_first = never  # the rule needs to know the axes

    def is_curved(self, call: Visit) -> bool:
        """Return whether the function is not affine, at random values or at those of the call.

        It may be piecewise so, or for other data: a loss of targets that are 1 or -1.
        """
        if not call.saved["affine"]:
            return True
        if self.hessian_is_zero(call.module) or moves_entries(call.module):
            return False
        try:
            return self._bends(call, "hessian_is_zero", of_params=False)
        except NotImplementedError:  # torch has no second derivative, such as of grid_sample
            key = "affine at its values"
            if key not in call.saved:
                evaluate = self._following(call, 0).evaluate
                call.saved[key] = self._is_affine(call, evaluate, call.whole_inputs())
            return not call.saved[key]

    def axes_in(self, c: Context) -> list[int | None]:
        """Return the batch axis of each input."""
        places = map(c.call.place_in, range(len(c.inputs)))
        return [None if place is None else place.axis for place in places]

    def axes_out(self, c: Context) -> list[int | None]:
        """Return the batch axis of each output."""
        places = map(c.call.place_out, range(len(c.outputs)))
        return [None if place is None else place.axis for place in places]

    def has_sample_tangents(self, call: Call, i: int) -> bool:
        """Return whether input ``i`` has no samples while the output has."""
        return i in call.unbatched_inputs

    def seen(
        self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return the tensors as they are."""
        return list(inputs), list(outputs)

    # ------------------------------------------------------------------ where the samples are

    def keeps_rows(self, call: Call) -> bool:
        """Return whether the function is one of each entry, and all rows are in one place."""
        tensors = [*zip(call.layouts_in, call.shape_in, strict=True)]
        tensors += zip(call.layouts_out, call.shape_out, strict=True)
        batched = [one for one in tensors if one[0] is not None and one[0].is_batched]
        places = {(one.facts, shape) for one, shape in batched if one is not None}
        return len(places) == 1 and treatment_by(call.module) == ENTRIES

    def layouts(self, call: Call) -> list[Layout | None]:
        """Find where the samples are in the outputs by trying.

        Raises:
            ValueError: If every output entry depends on several samples.
        """
        if () in call.shape_in:
            refuse_totals(call)
        if None in call.layouts_in:
            self._assume_rows(call, of_indices=False)
            if not any(layout is not None and layout.is_batched for layout in call.layouts_in):
                self._assume_rows(call, of_indices=True)
        call.note("affine", False)
        found = self._tried(call)
        if found is None and self._give_rows(call):
            found = self._tried(call)
        while found is None:
            self._mark_one_unbatched(call)
            found = self._tried(call)
        affine, layouts = found
        call.note("affine", affine)
        return layouts

    @staticmethod
    def _assume_rows(call: Call, of_indices: bool) -> None:
        """Let data (else indices) have its samples first, until a later module knows better."""
        call.set_layouts_in(
            Layout.of_axis(shape, 0, assumed=True)
            if layout is None and shape and (of_indices or x.is_floating_point())
            else layout
            for layout, x, shape in zip(call.layouts_in, call.inputs, call.shape_in, strict=True)
        )

    @staticmethod
    def _give_rows(call: Call) -> bool:
        """Give constants that samples fill, such as torch.zeros(N, …), a row for each sample."""
        samples = {one.samples for one in call.layouts_in if one is not None and one.is_batched}
        layouts = [*call.layouts_in]
        for i, (layout, shape) in enumerate(zip(call.layouts_in, call.shape_in, strict=True)):
            is_constant = layout is not None and layout.is_constant and not layout.is_batched
            if is_constant and shape and {shape[0]} == samples:
                layouts[i] = Layout(1, shape[0], True, len(shape), is_constant=True)
        differ = layouts != [*call.layouts_in]
        call.set_layouts_in(layouts)
        return differ

    @staticmethod
    def _mark_one_unbatched(call: Call) -> None:
        """Take back one assumption: of what has fewer axes, or a single entry along the first.

        Of what is alike, arguments of the model are the last.
        """
        batched = [
            (len(shape or ()), layout.dims, layout.samples > 1, layout)
            for layout, shape in zip(call.layouts_in, call.shape_in, strict=True)
            if layout is not None and layout.is_batched
        ]
        for *_, layout in batched:
            if layout.is_constant:
                layout.mark_unbatched()
                return
        doubtful = [x for x in batched if x[-1].assumed and not is_all_data(x[-1])]
        others = len({id(layout._root) for *_, layout in batched}) > 1
        doubtful.sort(key=lambda entry: (entry[2], entry[0], entry[1], is_of_inputs(entry[-1])))
        ranks = [entry[:3] for entry in batched]
        if not doubtful or not others or (len(set(ranks)) == 1 and len(doubtful) == len(batched)):
            raise ValueError(
                f"{call!r} combines different samples of the batch, or changes the batch axis in "
                "a way that cannot be followed. Extensions need functions that act on each sample "
                f"alone.{assumption_behind(layout for *_, layout in batched)}{_advice(call)}"
            )
        taken_back = doubtful[0][-1]
        if taken_back.samples > 1 and is_of_inputs(taken_back):  # perhaps a target that broadcasts
            call.mixed_data = (
                f"{call!r}, where an argument of the model has the same rows for all samples (if "
                "it is a table, let it have an axis of one entry in front, x[None])"
            )
        taken_back.mark_unbatched()

    def _tried(self, call: Call) -> tuple[bool, list[Layout | None]] | None:
        """Return whether the function is affine, and the layouts of the outputs if it has them."""
        facts = [None if one is None else one.facts for one in call.layouts_in]
        answers, key = self._known.setdefault(call.module, {}), self._key(call, facts)
        found, conditions = answers.get(key, (UNKNOWN, None))
        if conditions is not None and not conditions.hold(call):
            found = UNKNOWN
        batched = [one for one in call.layouts_in if one is not None and one.is_batched]
        if found is UNKNOWN:
            counts = {layout.samples for layout in batched}
            if len(counts) > 1:
                return None
            following = self._following(call, counts.pop() if counts else 0)
            found = self._found(call, following)
            conditions = following.conditions()
            if conditions is not None:
                is_bound = conditions.values or conditions.state  # else it always holds
                answers[key] = found, conditions if is_bound else None
        if found is None:
            return None
        affine, places = found
        if not batched:
            return affine, [unbatched() for _ in call.shape_out]
        first = batched[0]
        if all(one is first for one in batched) and all(place == first.facts for place in places):
            return affine, [first for _ in places]
        is_constant = all(layout.is_constant for layout in batched)
        batched = [layout for layout in batched if is_constant or not layout.is_constant]
        for layout in batched[1:]:
            batched[0].unify(layout)
        assumed = all(layout.assumed for layout in batched)
        layouts: list[Layout | None] = []
        for place in places:
            same = [one for one in batched if place == one.facts]
            if place is None or same:
                layouts.append(same[0] if place is not None else None)
            elif not place[1]:
                layouts.append(unbatched())
            else:
                before, count, owners, *marks = place
                is_fixed = bool(marks)  # the entries are a constant
                sources = batched if assumed and not is_fixed else ()
                known = assumed or is_fixed, batched[0].dims, sources
                layouts.append(Layout(before, count, *known, owners, is_constant or is_fixed))
        return affine, layouts

    @staticmethod
    def _key(call: Call, facts: Sequence[Any]) -> Any:
        """Return what the answer depends on, unless it depends on values of tensors as well."""
        others: tuple[Any, ...] = ()
        if None in call.shape_in:
            others = tuple([x if isinstance(x, (int, float, str)) else None for x in call.inputs])
        return (
            call.shape_in,
            call.training,
            call.index < 0,
            bool(call.saved.get("needed")),
            others,
            *[getattr(x, "dtype", None) for x in call.inputs],
            *facts,
        )

    def _following(self, call: Call, count: int) -> Following:
        generator = generator_at(call.inputs)
        # parameters, too: at their values now (such as zero), less may depend on less
        params = {
            name: (2 * drawn(p.shape, generator)).to(p)
            for name, p in self.own(call.module).items()
            if p is not None
        }

        c = Context(Visit(call), call.inputs, call.outputs)
        collect = tensors_in if call.index < 0 else flatten_outputs  # data: of any precision

        def evaluate(leaves: Sequence[Any], dtype: Any = None) -> list[Tensor]:
            own = params
            if dtype is not None:
                own = {name: p.to(dtype) for name, p in params.items()}
                leaves = [cast(x, dtype) for x in leaves]
            with torch.no_grad(), disable():
                return list(evaluated_alike(lambda: collect(self.evaluate(c, own, *leaves))))

        return Following(call, evaluate, call.shape_out, count)

    def _found(self, call: Call, following: Following) -> Any:
        if any(isinstance(x, Tensor) and (x.is_meta or is_fake(x)) for x in call.inputs):
            raise ValueError(
                f"{call!r}: a tensor has no values (it is on the meta device, or a FakeTensor), so "
                "what the function does cannot be found out. Use tensors with values."
            )
        affine = bool(call.saved.get("needed")) and self._is_affine(call, following.evaluate)
        if not following.samples:
            return affine, [unbatched().facts for _ in call.shape_out]
        try:
            places = following.places()
        except Exception as error:
            raise ValueError(
                f"{call!r}: where the samples of the batch are in the output cannot be found out "
                f"({error}). Make it a module with derivatives "
                "(backpack.core.derivatives.register)."
            ) from error
        return None if places is None else (affine, places)

    @staticmethod
    def _is_affine(call: Call, evaluate: Any, values: Sequence[Any] | None = None) -> bool:
        """Whether ``f(x + y) = f(x) + f(y) - f(0)`` at random points, or at values and others."""
        generator = generator_at(call.inputs)
        pairs = enumerate(zip(call.inputs, call.layouts_in, strict=True))
        known = {i: x for i, (x, layout) in pairs if layout is not None and is_real(x)}

        def draw() -> dict[int, Tensor]:
            return {i: (2 * drawn(x.shape, generator)).to(x.device) for i, x in known.items()}

        one, other = draw(), draw()
        if values is not None:
            one = {i: values[i].detach().to(x.dtype) for i, x in one.items()}
        both = {i: one[i] + other[i] for i in one}
        zero = {i: torch.zeros_like(x) for i, x in one.items()}
        try:
            found = [
                evaluate([at.get(i, x) for i, x in enumerate(call.inputs)], torch.float64)
                for at in (both, one, other, zero)
            ]
        except Exception:  # it is not defined everywhere
            return False
        return all(
            z.is_floating_point()
            and bool(torch.isfinite(z).all())
            and torch.allclose(b - z, (x - z) + (y - z), rtol=1e-9, atol=1e-9)
            for b, x, y, z in zip(*found, strict=True)
        )


def _advice(call: Call) -> str:
    """Return what to do where a call puts together what a loop has computed of one sample each."""
    read = [len(shape) for shape in call.shape_in if shape is not None]
    if len(read) < 2 or max(read) >= min(map(len, call.shape_out)):
        return ""
    return (
        " Where a loop calls a module for one sample at a time, keep the axis of the batch: "
        "torch.cat([layer(row.unsqueeze(0)) for row in x]), or layer(x) at once."
    )


def moves_entries(module: Module) -> bool:
    """Return whether a module stands for a function whose results are entries of its argument."""
    return isinstance(module, FunctionModule) and treatment_by(module) in (MOVES, RESHAPES)


def refuse_totals(call: Call) -> None:
    """Refuse to combine samples with a number that was computed from all of them."""
    totals = [
        mark is not None and mark.is_output and shape == () and layout is None
        for mark, shape, layout in zip(call.origins_in, call.shape_in, call.layouts_in, strict=True)
    ]
    if any(totals) and any(layout is not None and layout.is_batched for layout in call.layouts_in):
        raise ValueError(
            f"{call!r} reads a number that was computed from all samples of the batch, so their "
            "results depend on each other. Compute it for each sample (dim=...), or detach() it if "
            "it is meant to be constant."
        )


register(
    *(nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, nn.LocalResponseNorm),
    *(nn.CosineSimilarity, nn.PairwiseDistance),
)(FunctionDerivatives)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
COLLECTIONS = (list, deque, dict, set)


@contextmanager
def attributes_kept(module: Module) -> Iterator[None]:
    """Call the module without hooks of users, and undo what its ``forward`` does to attributes."""
    states = [(vars(m), dict(vars(m))) for m in module.modules()]
    held = [
        (value, copy(value))
        for _, before in states
        for name, value in before.items()
        if isinstance(value, COLLECTIONS) and not name.startswith("_")
    ]
    vars(module).update({name: {} for name in HOOKS})
    try:
        yield
    finally:
        for own, before in states:  # never empty: passes of other threads look at all calls
            own.update(before)
            for name in own.keys() - before.keys():
                del own[name]
        for value, as_it_was in held:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(as_it_was)


@register(nn.AdaptiveLogSoftmaxWithLoss, nn.CrossMapLRN2d)
class RefusedDerivatives(AutomaticDerivatives):
    """Modules of torch without derivatives, and what to use instead."""

    advice: ClassVar[dict[type[Module], str]] = {
        nn.AdaptiveLogSoftmaxWithLoss: "sends each sample through other layers, depending on its "
        "target. Use its log_prob(input), which passes all of them, and CrossEntropyLoss; extend "
        "its parts head and tail for that, and the model with use_converter='record'.",
        nn.CrossMapLRN2d: "has a backward pass in torch that is not the derivative of its forward "
        "pass. Use LocalResponseNorm.",
    }

    def unsupported_reason(self, c: Context) -> str | None:
        """Say what to use instead."""
        advice = next(text for cls, text in self.advice.items() if isinstance(c.module, cls))
        return f"{describe(c.module)} {advice}"
