"""Extensions of the backward pass: pass instances of them to ``backpack(...)``."""

from __future__ import annotations

from backpack.extensions.curvmatprod.ggnmp import GGNMP
from backpack.extensions.curvmatprod.hmp import HMP
from backpack.extensions.curvmatprod.pchmp import PCHMP
from backpack.extensions.firstorder.batch_grad import BatchGrad
from backpack.extensions.firstorder.batch_l2_grad import BatchL2Grad
from backpack.extensions.firstorder.clipped_grad import ClippedGrad
from backpack.extensions.firstorder.grad_gram import GradGram
from backpack.extensions.firstorder.projected_grad import ProjectedGrad
from backpack.extensions.firstorder.sum_grad_squared import SumGradSquared
from backpack.extensions.firstorder.variance import Variance
from backpack.extensions.secondorder.diag_ggn import (
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    DiagGGNExact,
    DiagGGNMC,
)
from backpack.extensions.secondorder.diag_hessian import BatchDiagHessian, DiagHessian
from backpack.extensions.secondorder.ekfac import EKFAC
from backpack.extensions.secondorder.ggn_gram import GGNGram
from backpack.extensions.secondorder.hbp import HBP, KFAC, KFLR, KFRA
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGNExact, SqrtGGNMC

__all__ = [
    "EKFAC",
    "GGNMP",
    "HBP",
    "HMP",
    "KFAC",
    "KFLR",
    "KFRA",
    "PCHMP",
    "BatchDiagGGNExact",
    "BatchDiagGGNMC",
    "BatchDiagHessian",
    "BatchGrad",
    "BatchL2Grad",
    "ClippedGrad",
    "DiagGGNExact",
    "DiagGGNMC",
    "DiagHessian",
    "GGNGram",
    "GradGram",
    "ProjectedGrad",
    "SqrtGGNExact",
    "SqrtGGNMC",
    "SumGradSquared",
    "Variance",
]
