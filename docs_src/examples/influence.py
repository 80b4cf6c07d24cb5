"""Which digits help, and which do harm
=====================================

Influence functions tell how the loss of a prediction would change if a sample were left out of the
training data. Here a network learns handwritten digits, some of which have a wrong label: these are
found among the samples of the largest influence on themselves, and pictures show the most helpful
and the most harmful samples for a few predictions.
"""

# %%
# 600 digits, of which 30 get a wrong label. The network is trained to a minimum of the loss with
# weight decay: influence functions start from there.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from backpack.influence import Influence
from backpack.linalg import DiagonalGGN, KroneckerGGN

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))
X, y = torch.tensor(images / 16).float()[order], torch.tensor(labels)[order]
X_train, y_train, X_test, y_test = X[:600], y[:600].clone(), X[600:], y[600:]
wrong = torch.randperm(600)[:30]
y_train[wrong] = (y_train[wrong] + torch.randint(1, 10, (30,))) % 10

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
loss_function = nn.CrossEntropyLoss()
decay = 1e-3
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay)
for epoch in range(60):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 - epoch / 60)
    for batch in torch.randperm(600).split(100):
        optimizer.zero_grad()
        loss_function(model(X_train[batch]), y_train[batch]).backward()
        optimizer.step()
accuracy = (model(X_test).argmax(1) == y_test).float().mean()
print(f"accuracy on other digits: {accuracy:.3f}")

# %%
# Wrong labels
# ------------
# The curvature is computed once, with Kronecker factors, and the weight decay is its damping. A
# sample that has a large influence on its own loss is memorised. Sorted by that, wrong labels come
# first.

data = list(zip(X_train.split(200), y_train.split(200), strict=True))
influence = Influence(model, loss_function, data, KroneckerGGN, damping=decay)
own = influence.self_scores()
suspects = own.argsort(descending=True)
for count in (15, 30, 60):
    found = torch.isin(suspects[:count], wrong).sum().item()
    print(f"wrong labels among the first {count}: {found}")
assert found > 20

# %%
# Helpful and harmful samples
# ---------------------------
# Queries are digits that the network gets wrong. ``top`` keeps the samples of the largest influence
# on each, so that many more than these could be looked through. A helpful sample lowers the loss of
# the query, a harmful one raises it.

missed = (model(X_test).argmax(1) != y_test).nonzero().squeeze(1)[:4]
queries = (X_test[missed], y_test[missed])
helpful, helpful_samples = influence.top(4, queries)
harmful, harmful_samples = influence.top(4, queries, harmful=True)
assert (helpful > 0).all() and (harmful < 0).all()

# %%
# Harmful samples look like the query, and have another label. Another curvature gives other numbers
# and mostly the same samples.

other = Influence(model, loss_function, data, DiagonalGGN, damping=decay)
agreement = torch.corrcoef(
    torch.stack([influence.scores(queries).flatten(), other.scores(queries).flatten()])
)[0, 1]
print(f"correlation of the scores with Kronecker factors and with the diagonal: {agreement:.2f}")
assert agreement > 0.5

# %%
# What a layer contributes:

by_module = influence.scores(queries, by="module")
assert torch.allclose(sum(by_module.values()), influence.scores(queries), rtol=1e-3, atol=1e-6)

# %%
# The pictures
# ------------
# Red labels are the wrong ones.

fig, axes = plt.subplots(len(missed), 9, figsize=(9, 4.8), layout="constrained")
for row, query in enumerate(missed.tolist()):
    predicted = model(X_test[query]).argmax().item()
    axes[row, 0].imshow(X_test[query].reshape(8, 8), cmap="gray_r")
    axes[row, 0].set_title(f"{y_test[query]} (taken for {predicted})", fontsize=8)
    for start, samples in ((1, helpful_samples[row]), (5, harmful_samples[row])):
        for i, sample in enumerate(samples.tolist()):
            axis = axes[row, start + i]
            axis.imshow(X_train[sample].reshape(8, 8), cmap="Greens" if start == 1 else "Oranges")
            color = "red" if sample in wrong else "black"
            axis.set_title(f"label {y_train[sample]}", fontsize=8, color=color)
for axis in axes.flat:
    axis.set_xticks([])
    axis.set_yticks([])
axes[0, 0].set_ylabel("queries")
axes[-1, 2].set_xlabel("most helpful")
axes[-1, 6].set_xlabel("most harmful")
plt.show()
