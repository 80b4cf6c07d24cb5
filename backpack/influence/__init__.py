r"""Which training samples move a prediction.

Scores are the change of a query's loss that is expected if a sample is left out of the training
data: the sample is helpful where it is positive, harmful where it is negative.

.. math:: s_{qn} = \frac{1}{W} \nabla\ell_q^\top (H + \lambda I)^{-1} \nabla\ell_n

H is the curvature of the loss over the training data, :math:`\ell_n` the sum of the terms of the
loss that belong to sample n, and W what the mean divides by (1 for a sum): scores do not depend on
how the loss is reduced. λ has the scale of the loss; it belongs to H if training had that weight
decay.

>>> import torch
>>> from torch import nn
>>> from backpack.influence import Influence
>>> model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
>>> data = [(torch.rand(8, 5), torch.randint(3, (8,))) for _ in range(3)]
>>> influence = Influence(model, nn.CrossEntropyLoss(), data, damping=0.1)
>>> influence.scores((torch.rand(2, 5), torch.tensor([0, 2]))).shape
torch.Size([2, 24])
"""

from backpack.influence.curvature import Influence
from backpack.influence.gradients import ProjectedInfluence, TracIn

__all__ = ["Influence", "ProjectedInfluence", "TracIn"]
