r"""A normal distribution over the weights of a trained network, and what it predicts.

.. math:: p(\theta \mid D) \approx \mathcal N(\theta^*, (H / T + \delta I)^{-1})

H is the curvature of the negative log likelihood of the data, the *summed* loss: a mean is
multiplied with what it divides by. δ is the precision of a normal prior, one for all weights or one
for each parameter or layer, and μ its mean, zero by default. T is the temperature, 1 by default,
which divides the log likelihood and nothing else. Training has minimised the summed loss, divided
by T, plus ``δ / 2 |θ - μ|²``.

>>> import torch
>>> from torch import nn
>>> from backpack.laplace import Laplace
>>> model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
>>> data = [(torch.rand(8, 5), torch.randint(3, (8,))) for _ in range(3)]
>>> laplace = Laplace(model, nn.CrossEntropyLoss(), data, prior_precision=1.0)
>>> laplace.predict(torch.rand(2, 5)).shape
torch.Size([2, 3])
"""

from backpack.laplace.selection import Laplace

__all__ = ["Laplace"]
