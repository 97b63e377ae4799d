"""Which handwritten digits pull hardest on a trained network?

Trains a small CNN on scikit-learn's digits, asks eachgrad for the norm of each sample's gradient,
and draws the digits with the largest and the smallest ones to out/digits_norms.png.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import eachgrad as eg

PICTURE = Path(__file__).resolve().parents[1] / "out" / "digits_norms.png"
BATCH_SIZE = 256
COLUMNS = 8


def load() -> tuple[Tensor, Tensor]:
    """The digits as images (N, 1, 8, 8) in [0, 1] and labels (N,)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target, dtype=torch.long)


def build() -> nn.Module:
    """A CNN from (B, 1, 8, 8) to (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int = 5) -> None:
    """Trains with plain Adam, in place."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()


def check_mean(model: nn.Module, x: Tensor, y: Tensor, total: dict[str, Tensor]) -> None:
    """Asserts that the sum over samples, divided by B, is the ordinary gradient of the mean loss."""
    parameters = dict(model.named_parameters())
    ordinary = torch.autograd.grad(F.cross_entropy(model(x), y), list(parameters.values()))
    assert total.keys() == parameters.keys()
    for name, gradient in zip(parameters, ordinary, strict=True):
        torch.testing.assert_close(total[name] / len(x), gradient, rtol=1e-4, atol=1e-6)


def draw(x: Tensor, y: Tensor, norms: Tensor, path: Path) -> None:
    """Writes a picture with a row of the largest norms above a row of the smallest."""
    order = norms.argsort(descending=True).tolist()
    rows = {"largest": order[:COLUMNS], "smallest": order[: -COLUMNS - 1 : -1]}
    figure = Figure(figsize=(1.4 * COLUMNS, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, COLUMNS)
    for (title, samples), line in zip(rows.items(), axes, strict=True):
        for i, axis in zip(samples, line, strict=True):
            axis.imshow(x[i, 0].numpy(), cmap="gray_r")
            axis.set_title(f"{y[i].item()}: {norms[i].item():.2g}")
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(title)
    figure.suptitle("Digits by the norm of their gradient (label: norm)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    torch.manual_seed(0)
    images, labels = load()
    model = build()
    train(model, images, labels)

    x, y = images[:BATCH_SIZE], labels[:BATCH_SIZE]
    with eg.record(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    grads = tape.backward(losses)
    norms = grads.norms().detach()
    print(grads.receipt())

    low, max_norm, high = norms.min().item(), norms.median().item(), norms.max().item()
    clipped = (norms > max_norm).float().mean().item()
    print(f"norms of {len(norms)} samples: min {low:.3g}, median {max_norm:.3g}, max {high:.3g}")
    print(f"max_norm = median would clip {clipped:.1%} of the samples")

    check_mean(model, x, y, grads.weighted_sum(torch.ones(len(x))))
    print("the mean of the samples' gradients is the ordinary gradient")

    draw(x, y, norms, PICTURE)
    print(f"picture: {PICTURE}")


if __name__ == "__main__":
    main()
