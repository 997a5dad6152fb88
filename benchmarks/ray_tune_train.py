"""What both sides of the comparison train: a small network on scikit-learn's digits."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Run

EPOCHS = 27
BATCH = 64
WIDTH = 64
"""Large enough that a short deadline leaves time for few full trainings, and that a second worker pays."""
TEST_EXAMPLES = 897


class Digits:
    """Training data, a model and its optimizer, and the images and labels to test on."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(images))
        test, rest = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
        self._test = (images[test], labels[test])
        self.loader = DataLoader(TensorDataset(images[rest], labels[rest]), batch_size=BATCH, shuffle=True)
        self.model = nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(config["dropout"]),
            nn.Linear(WIDTH * 16, 10),
        )
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=config["lr"], momentum=config["momentum"]
        )

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(self.model(images), labels))
        self.optimizer.step()

    def accuracy(self) -> float:
        self.model.eval()
        with torch.no_grad():
            guesses = self.model(self._test[0]).argmax(1)
        self.model.train()
        return float((guesses == self._test[1]).float().mean())


def train(config: dict[str, Any], run: Run) -> None:
    """A trial of Stretto's."""
    digits = Digits(config)
    _, _, loader = run.prepare(digits.model, digits.optimizer, digits.loader)
    for _epoch in run.epochs(EPOCHS):
        for images, labels in loader:
            digits.step(images, labels)
        run.report(accuracy=digits.accuracy())
