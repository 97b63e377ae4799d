"""Benign or malignant, learned without giving any patient away: a table of 30 numbers per patient, epsilon = 2.

A logistic regression on scikit-learn's breast cancer data. A patient is one sample, so that the guarantee is for a patient.
"""

import re

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import eachgrad.private

EPSILON, DELTA = 2.0, 1e-4
TEST = 114  # a fifth


def load() -> tuple[TensorDataset, Tensor, Tensor]:
    """The training set, and the test patients (114, 30) with their labels (114,)."""
    data = load_breast_cancer()
    # The ranges are those that the data set's description prints. Ranges measured on the training patients would give
    # something away that no noise covers.
    ranges = re.findall(r"^[a-z ]+ \((?:mean|standard error|worst)\): +([\d.]+) +([\d.]+)", data.DESCR, re.MULTILINE)
    low, high = torch.tensor([[float(a), float(b)] for a, b in ranges]).T
    x = 2 * (torch.tensor(data.data, dtype=torch.float32) - low) / (high - low) - 1
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST], order[TEST:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """One loss for each patient, (B,)."""
    return F.cross_entropy(logits, y, reduction="none")


def main() -> None:
    torch.manual_seed(0)
    train, x, y = load()
    model = nn.Linear(30, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = eachgrad.private.make_private(
        model, optimizer, train, loss_fn=losses, batch_size=128, epochs=30, target_epsilon=EPSILON, target_delta=DELTA
    )
    for batch in run.loader:
        run.step(batch)
    print(run.receipt())

    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"accuracy on {len(y)} other patients: {accuracy:.3f}; always the commoner answer: {commoner(y):.3f}")
    assert accuracy >= 0.9
    assert run.epsilon() <= EPSILON


def commoner(y: Tensor) -> float:
    """The accuracy of one answer for all."""
    return y.bincount().max().item() / len(y)


if __name__ == "__main__":
    main()
