"""Training on several processes
================================

KFAC on several processes, each with its part of every batch. Run it with

.. code-block:: bash

    torchrun --nproc_per_node 2 distributed_training.py
    torchrun --nproc_per_node 2 distributed_training.py --fully-shard

Each process has all weights, or with ``--fully-shard`` a part of them. As a plain program it runs
on one process.
"""

# %%
# Digits, for this process and the others. In double precision, two ways to add up the same numbers
# agree to many digits.

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from backpack import backpack, extend
from backpack.extensions import KFLR, Variance
from backpack.optim import KFAC

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
STEPS, BATCH_SIZE = 30, 120
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images) / 16, torch.tensor(labels)
if "RANK" in os.environ:  # by torchrun
    distributed.init_process_group("gloo")
else:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
rank, processes = distributed.get_rank(), distributed.get_world_size()


# %%
# The training loop is that of one process, except for the part of the batch. The optimiser asks for
# Kronecker factors. Because ``p.grad`` is averaged over the processes, so are they: each process
# does the same step. The variance is that of all samples, too.


def train(model, rank, processes):
    """Return the weights after training, and the mean variance in the last step."""
    loss_function = extend(nn.CrossEntropyLoss())
    optimiser = KFAC(model.parameters(), extension=KFLR())
    generator = torch.Generator().manual_seed(0)  # the same batches for all
    for _ in range(STEPS):
        batch = torch.randint(len(labels), (BATCH_SIZE,), generator=generator)
        own = batch.chunk(processes)[rank]
        optimiser.zero_grad()
        loss = loss_function(model(images[own]), labels[own])
        with backpack(*optimiser.extensions, Variance()):
            loss.backward()
        optimiser.step()
    return flat(model.parameters()), flat([p.variance for p in model.parameters()]).mean()


def flat(tensors):
    """Put tensors into one vector, and the parts of those that are sharded together."""
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole])


def make_model():
    """Build the network, with the same weights each time."""
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))


def spread(model):
    """Let gradients be averaged; the weights are on all processes, or each has a part of them."""
    if "--fully-shard" not in sys.argv:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (processes,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


weights, variance = train(spread(make_model()), rank, processes)
of_all = [torch.empty_like(weights) for _ in range(processes)]
distributed.all_gather(of_all, weights)
distributed.destroy_process_group()

# %%
# All processes have the same weights, to the last bit. They are those of one process that sees all
# samples.

if rank == 0:
    alone, variance_alone = train(make_model(), 0, 1)
    with torch.no_grad():
        model = make_model()
        nn.utils.vector_to_parameters(weights, model.parameters())
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    rows = {
        "processes": processes,
        "samples of each in a step": BATCH_SIZE // processes,
        "weights are sharded": "--fully-shard" in sys.argv,
        "same weights on all": all(torch.equal(weights, other) for other in of_all),
        "largest difference to one process": f"{(weights - alone).abs().max().item():.1e}",
        "the same, of the variance": f"{(variance - variance_alone).abs().item():.1e}",
        "accuracy": f"{accuracy:.3f}",
    }
    print("─" * 44)
    for name, value in rows.items():
        print(f"{name:<36}{value!s:>8}")
    print("─" * 44)
    assert all(torch.equal(weights, other) for other in of_all)
    assert torch.allclose(weights, alone, rtol=1e-8, atol=1e-10)
    assert torch.allclose(variance, variance_alone, rtol=1e-8)
