"""A small GAN in a loop of your own: two models, two optimizers, two steps for every batch.

python examples/gan_loop.py                                one process
manyhands run examples/gan_loop.py data=2                  two, and the same numbers
manyhands run examples/gan_loop.py data=2 merge=local_sgd  two that meet now and then
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands import datasets

torch.manual_seed(0)
run = mh.join()
pictures = datasets.images()[1][0][:10_000].flatten(1)
# of every picture: ranks that draw noise themselves would not train by the numbers of one process
noise = torch.randn(len(pictures), 32)

models = {
    "g": nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 784)),
    "d": nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)),
}
optimizers = {k: torch.optim.Adam(m.parameters(), 5e-4, (0.5, 0.999)) for k, m in models.items()}
data = DataLoader(TensorDataset(pictures, noise), batch_size=64, shuffle=True)
models, optimizers, data = run.prepare(models, optimizers, data)
g, d = models["g"], models["d"]


def says(pictures: torch.Tensor, real: bool) -> torch.Tensor:
    """How far d is from saying so."""
    score = d(pictures)
    return bce(score, torch.full_like(score, float(real)))


for epoch in range(3):
    for real, z in data:
        fake = g(z)
        loss_d = says(real, True) + says(fake.detach(), False)
        run.step(loss_d, optimizer="d")  # instead of zero_grad(), backward() and step() of d's
        loss_g = says(fake, True)  # by d as it is now
        run.step(loss_g, optimizer="g")
    with run.merged(), torch.no_grad():
        made = g(noise[:500])
    if run.rank == 0:
        apart = (made.mean(0) - pictures.mean(0)).abs().mean()
        print(f"epoch {epoch}: d {loss_d:.3f}  g {loss_g:.3f}  mean pictures {apart:.3f} apart")
