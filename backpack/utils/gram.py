"""What follows from inner products of individual gradients, ``[N, N]``.

>>> import torch
>>> from backpack.utils.gram import gradient_diversity
>>> gram = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
>>> round(gradient_diversity(gram).item(), 4)
0.6667
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Module, Parameter


def total_gram(model: Module | Iterable[Parameter], savefield: str = "grad_gram") -> Tensor:
    """Add up the Gram matrices of parameters, as ``GradGram`` or ``GGNGram`` have saved them.

    Args:
        model: A model, or parameters. Those without a result are left out.
        savefield: Attribute of the parameters; ``"ggn_gram"`` for ``GGNGram``.

    Returns:
        ``[N, N]``, the inner products of the whole gradients; ``[V, N, V, N]``, those of the
        columns of the GGN's square root.

    Raises:
        ValueError: If there is no result, or the numbers of samples (or columns) differ.
    """
    params = model.parameters() if isinstance(model, Module) else model
    grams = [gram for gram in (getattr(p, savefield, None) for p in params) if gram is not None]
    if not grams:
        raise ValueError(
            f"No parameter has {savefield!r}. Call backward() inside `with backpack(GradGram()):` "
            "(or GGNGram)."
        )
    if len({gram.shape for gram in grams}) > 1:
        shapes = sorted({tuple(gram.shape[: gram.dim() // 2]) for gram in grams})
        raise ValueError(
            f"Gram matrices of different numbers of samples (or columns and samples), {shapes}, "
            "do not add up. Use one backward pass for each batch, and let the loss see a sample's "
            "positions as one row."
        )
    return sum(grams[1:], start=grams[0].clone())


def _check_gram(gram: object, name: str) -> None:
    """Require a Gram matrix.

    Raises:
        TypeError: If it is something else, such as the model.
        ValueError: If it is not square.
    """
    if not isinstance(gram, Tensor):
        raise TypeError(
            f"{name} needs the Gram matrix of the gradients, a tensor [N, N], got "
            f"{type(gram).__name__}. That of a model is {name}(total_gram(model)), after a "
            "backward pass inside `with backpack(GradGram()):`."
        )
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(
            f"{name} needs the Gram matrix of the gradients, a tensor [N, N], got one of shape "
            f"{list(gram.shape)}."
        )


def cosine_similarities(gram: Tensor) -> Tensor:
    """Return the cosines between gradients, ``[N, N]``; 0 where one is zero."""
    _check_gram(gram, "cosine_similarities")
    norms = gram.diagonal().clamp(min=0).sqrt()
    inverse = norms.reciprocal().masked_fill(norms == 0, 0)
    return inverse.unsqueeze(1) * gram * inverse


def gradient_diversity(gram: Tensor) -> Tensor:
    """Return ``sum_n ‖g_n‖² / ‖sum_n g_n‖²``: 1/N if all are alike, 1 if they are orthogonal.

    Source: Yin, Pananjady, Lam, Papailiopoulos, Ramchandran, Bartlett, Gradient diversity: a key
    ingredient for scalable distributed learning (AISTATS 2018), definition 1.
    """
    _check_gram(gram, "gradient_diversity")
    return gram.diagonal().sum() / gram.sum()


def noise_scale(gram: Tensor) -> Tensor:
    """Return the simple noise scale, ``tr Σ / ‖G‖²``: about the largest batch size that pays.

    Σ and G are covariance and mean of the gradients; both terms are estimated without bias, so that
    the ratio is negative if noise hides G. It does not depend on the scale of the loss.

    Args:
        gram: ``[N, N]``, of at least two samples.

    Raises:
        TypeError: If it is no tensor, such as the model.
        ValueError: If it is not square, or there is one sample.

    Source: McCandlish, Kaplan, Amodei, An empirical model of large-batch training (arXiv
    1812.06162, 2018), appendix A.1.
    """
    _check_gram(gram, "noise_scale")
    count = len(gram)
    if count < 2:
        raise ValueError(f"A variance needs at least two samples, got {count}.")
    mean = gram.mean()  # ‖mean of g‖²
    trace = count / (count - 1) * (gram.diagonal().mean() - mean)
    return trace / (mean - trace / count)
