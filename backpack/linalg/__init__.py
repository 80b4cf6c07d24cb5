"""Curvature matrices of a model over a data set, as linear operators.

>>> import torch
>>> from backpack.linalg import GGN
>>> model, loss_function = torch.nn.Linear(3, 2), torch.nn.MSELoss()
>>> data = [(torch.rand(5, 3), torch.rand(5, 2)), (torch.rand(4, 3), torch.rand(4, 2))]
>>> G = GGN(model, loss_function, data)
>>> G.shape
(8, 8)
>>> (G @ torch.rand(8, 10)).shape
torch.Size([8, 10])
"""

from backpack.linalg.approximations import EKFAC, DiagonalGGN, DiagonalHessian, KroneckerGGN
from backpack.linalg.conjugate_gradients import Preconditioner, Solution
from backpack.linalg.curvature import (
    GGN,
    EmpiricalFisher,
    FisherMC,
    Hessian,
    MatrixFreeOperator,
)
from backpack.linalg.density import SpectralDensity, logdet, spectral_density
from backpack.linalg.estimators import Estimate, diagonal, frobenius_norm, trace
from backpack.linalg.jacobian import Jacobian
from backpack.linalg.ntk import NTK
from backpack.linalg.operators import DampedOperator, InverseOperator, LinearOperator
from backpack.linalg.spectrum import GGNSpectrum
from backpack.linalg.structured import (
    DiagonalOperator,
    EigenOperator,
    KroneckerOperator,
    SpectralOperator,
)

__all__ = [
    "EKFAC",
    "GGN",
    "NTK",
    "DampedOperator",
    "DiagonalGGN",
    "DiagonalHessian",
    "DiagonalOperator",
    "EigenOperator",
    "EmpiricalFisher",
    "Estimate",
    "FisherMC",
    "GGNSpectrum",
    "Hessian",
    "InverseOperator",
    "Jacobian",
    "KroneckerGGN",
    "KroneckerOperator",
    "LinearOperator",
    "MatrixFreeOperator",
    "Preconditioner",
    "Solution",
    "SpectralDensity",
    "SpectralOperator",
    "diagonal",
    "frobenius_norm",
    "logdet",
    "spectral_density",
    "trace",
]
