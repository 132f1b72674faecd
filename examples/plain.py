"""A plain single-process training script; `own_loop.py` is the same with five lines changed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from manyhands import datasets

torch.manual_seed(0)
(x, y), (x_test, y_test) = datasets.images()[1:]
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
dataset = TensorDataset(x, y)
data = DataLoader(dataset, batch_size=64, shuffle=True)

for epoch in range(2):
    for inputs, target in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean()
    print(f"epoch {epoch}: loss {loss.item():.4f}  accuracy {accuracy:.4f}")
