"""What the examples share: MNIST, and a slow but simple diagonal of the GGN to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader

from backpack.hessianfree.hvp import hessian_vector_product
from backpack.hessianfree.lop import L_op
from backpack.hessianfree.rop import R_op
from backpack.utils.convert_parameters import vector_to_parameter_list
from backpack.utils.subsampling import subsample

if TYPE_CHECKING:
    from torchvision.datasets import MNIST


def load_mnist_dataset() -> MNIST:
    """Load the training set of MNIST, normalized to zero mean and unit variance.

    It is downloaded to the cache folder of :mod:`torch.hub` when it is not there yet.

    Returns:
        Data set of pairs of an image ``[1, 28, 28]`` and a label.

    Raises:
        ImportError: If torchvision is not installed.
    """
    try:
        from torchvision import datasets, transforms
    except ImportError as error:
        raise ImportError(
            "Loading MNIST needs torchvision. Install it with `pip install torchvision`."
        ) from error

    normalize = transforms.Normalize(mean=(0.1307,), std=(0.3081,))
    return datasets.MNIST(
        root=Path(torch.hub.get_dir()) / "datasets",
        train=True,
        transform=transforms.Compose([transforms.ToTensor(), normalize]),
        download=True,
    )


def get_mnist_dataloader(batch_size: int = 64, shuffle: bool = True) -> DataLoader:
    """Return batches of the training set of MNIST.

    Args:
        batch_size: Number of samples in a batch.
        shuffle: Draw the samples in random order.

    Returns:
        Data loader for batches of images ``[N, 1, 28, 28]`` and labels ``[N]``.

    Raises:
        ImportError: If torchvision is not installed.
    """
    return DataLoader(load_mnist_dataset(), batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(
    batch_size: int = 64, shuffle: bool = True, flat: bool = False
) -> tuple[Tensor, Tensor]:
    """Return one batch of the training set of MNIST.

    Args:
        batch_size: Number of samples in the batch.
        shuffle: Draw random samples rather than the first ones.
        flat: Flatten the images into vectors.

    Returns:
        Images ``[N, 1, 28, 28]``, or ``[N, 784]`` if flat, and labels ``[N]``.

    Raises:
        ImportError: If torchvision is not installed.
    """
    X, y = next(iter(get_mnist_dataloader(batch_size, shuffle)))
    return (X.flatten(start_dim=1) if flat else X), y


def autograd_diag_ggn_exact(
    X: Tensor,
    y: Tensor,
    model: Module,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    idx: Sequence[int] | None = None,
) -> Tensor:
    """Compute the diagonal of the generalized Gauss-Newton matrix with plain autograd.

    The matrix is ``G = Jᵀ H J`` with the Jacobian ``J`` of the model's output with respect to the
    trainable parameters and the Hessian ``H`` of the loss with respect to the output. Neither is
    stored: time grows with the number of entries asked for, or of outputs if these are fewer.

    Args:
        X: Input of the model. ``[N, *]``
        y: Labels. ``[N, *]``
        model: The model. Its output may have any shape, and mix samples.
        loss_function: Maps the model's output and the labels to a scalar.
        idx: Entries of the diagonal to compute, all if ``None``.

    Returns:
        Diagonal with respect to the parameters, flattened and concatenated, or its entries at
        ``idx``. ``[D]`` or ``[len(idx)]``

    Raises:
        ValueError: If the loss is not a scalar, or ``idx`` does not fit the parameters.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    num_params = sum(p.numel() for p in params)
    entries = subsample(torch.arange(num_params), subsampling=idx)

    output = model(X)
    loss = loss_function(output, y)

    if len(entries) <= 2 * output.numel():
        return _diag_ggn_by_columns(loss, output, params, entries)
    return _diag_ggn_by_rows(loss, output, params)[entries]


def _diag_ggn_by_columns(
    loss: Tensor, output: Tensor, params: Sequence[Tensor], entries: Tensor
) -> Tensor:
    """Evaluate ``G_ii = (J e_i)ᵀ H (J e_i)`` for some unit vectors of the parameters: ``[K]``."""
    diag = params[0].new_empty(len(entries))
    for k, i in enumerate(entries):
        unit = params[0].new_zeros(sum(p.numel() for p in params))
        unit[i] = 1
        (column,) = R_op(output, params, vector_to_parameter_list(unit, params))
        (h_column,) = hessian_vector_product(loss, output, column)
        diag[k] = (column * h_column).sum()
    return diag


def _diag_ggn_by_rows(loss: Tensor, output: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Evaluate ``diag(G) = sum over a of (Jᵀ e_a) ⊙ (Jᵀ H e_a)`` for unit vectors of the output."""
    diags = [torch.zeros_like(p) for p in params]
    for a in range(output.numel()):
        unit = output.new_zeros(output.numel())
        unit[a] = 1
        unit = unit.view_as(output)
        rows = L_op(output, params, unit)
        h_rows = L_op(output, params, hessian_vector_product(loss, output, unit))
        for diag, row, h_row in zip(diags, rows, h_rows, strict=True):
            diag.addcmul_(row, h_row)
    return torch.cat([diag.flatten() for diag in diags])
