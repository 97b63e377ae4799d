"""Handwritten digits with a privacy guarantee: epsilon = 3 at delta = 1e-4, five times.

Trains a small CNN on scikit-learn's digits with eachgrad.private, each time with another split and other random numbers,
and ends with asserts on the mean test accuracy and on epsilon. Needs the extras "private" and "demo".
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from eachgrad.private import Run, make_private

EPSILON, DELTA = 3.0, 1e-4
SEEDS, TEST = 5, 360


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Images (N, 1, 8, 8) with labels (N,), split at random: 1,437 to train on, 360 to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST], order[TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build() -> nn.Module:
    """A CNN from (B, 1, 8, 8) to (B, 10); a group norm looks at one sample at a time, a batch norm would not."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out, labels, reduction="none")  # one loss for each sample


def train(data: TensorDataset) -> Run:
    """A run that has spent its budget; the model is `run.model`."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = make_private(
        model, optimizer, data, loss_fn=loss_fn, batch_size=256, epochs=60, target_epsilon=EPSILON, target_delta=DELTA
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.settings.steps)
    for batch in run.loader:
        run.step(batch)
        schedule.step()
    return run


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    torch.set_num_threads(1)  # the model is too small to be shared between cores
    scores = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)  # of the initial weights; noise and sampling are seeded by the operating system
        data, test = load(seed)
        start = time.perf_counter()
        run = train(data)
        scores.append(accuracy(run.model, test))
        print(
            f"seed {seed}: accuracy {scores[-1]:.3f}, epsilon {run.epsilon():.3f}, {time.perf_counter() - start:.1f} s"
        )
        assert run.epsilon() <= EPSILON
    print(run.receipt())
    mean = sum(scores) / SEEDS
    print(f"mean accuracy {mean:.4f}")
    # 30 runs with seeds that no setting was chosen by had the mean 0.945 and the standard deviation 0.014. The noise is new
    # each time, so that a mean of five falls below this about once in a hundred runs.
    assert mean >= 0.93


if __name__ == "__main__":
    main()
