"""Accuracy of a linear classifier on frozen features, by published protocols."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .effective_rank import in_double
from .knn import check_splits


@dataclass(frozen=True)
class ProbeProtocol:
    """How a linear classifier is trained on features.

    Args:
        optimizer (`str`): `lars`, `adamw` (weight decay 0.01, torch's default), or `ridge`: no steps, the least-squares
            solution for one-hot targets on standardised features, with `learning_rate` as its regularisation.
        learning_rate (`float`): Peak value; with `scale_learning_rate`, per 256 images of a batch.
        batch_norm (`bool`): A `BatchNorm1d` without affine parameters before the classifier.
        augment (`bool`): Random resized crop and flip; not possible with cached features.
    """

    optimizer: str
    learning_rate: float
    batch_size: int = 0
    epochs: int = 0
    warmup_epochs: int = 0
    scale_learning_rate: bool = False
    batch_norm: bool = False
    augment: bool = False


PROTOCOLS = {
    # He et al.'s protocol for ImageNet-1K, which the paper follows there.
    "mae_imagenet1k": ProbeProtocol(
        "lars", 0.1, 16384, 90, 10, scale_learning_rate=True, batch_norm=True, augment=True
    ),
    # The paper's protocol for ImageNet-100, on cached features.
    "paper_imagenet100": ProbeProtocol("adamw", 0.01, 1024, 200),
    # Closed form, for a quick look and for many layers.
    "ridge": ProbeProtocol("ridge", 1e-3, batch_norm=True),
}


def linear_probe(
    train_features: torch.Tensor,
    train_labels: torch.Tensor,
    test_features: torch.Tensor,
    test_labels: torch.Tensor,
    protocol: str | ProbeProtocol = "paper_imagenet100",
    num_classes: int | None = None,
    seed: int = 0,
) -> float:
    """Fraction of test features that a linear classifier, trained on the training features, gets right.

    Args:
        protocol (`str` or `ProbeProtocol`, defaults to `"paper_imagenet100"`):
            A name in `PROTOCOLS`, or a protocol. The batch size is at most the size of the training set, and a scaled
            learning rate follows it. Features are cached, so nothing is augmented.
    """
    num_classes = check_splits(train_features, train_labels, test_features, test_labels, num_classes)
    protocol = PROTOCOLS[protocol] if isinstance(protocol, str) else protocol
    if protocol.optimizer == "ridge":
        predicted = ridge(train_features, train_labels, test_features, num_classes, protocol.learning_rate)
    else:
        classifier = probe_classifier(train_features.shape[1], num_classes, protocol, seed).to(train_features.device)
        train_probe(classifier, train_features.float(), train_labels.long(), protocol, seed)
        with torch.no_grad():
            predicted = classifier.eval()(test_features.float()).argmax(dim=1)
    return (predicted == test_labels.to(predicted.device)).double().mean().item()


def probe_classifier(dim: int, num_classes: int, protocol: ProbeProtocol, seed: int) -> torch.nn.Sequential:
    linear = torch.nn.Linear(dim, num_classes)
    with torch.no_grad():
        linear.weight.normal_(0.0, 0.01, generator=torch.Generator().manual_seed(seed))
        linear.bias.zero_()
    norm = torch.nn.BatchNorm1d(dim, affine=False, eps=1e-6) if protocol.batch_norm else torch.nn.Identity()
    return torch.nn.Sequential(norm, linear)


def probe_optimizer(classifier: torch.nn.Module, protocol: ProbeProtocol, number: int) -> torch.optim.Optimizer:
    """The protocol's optimizer; warns if `number` images are too few for its learning rate."""
    if protocol.optimizer == "lars":
        # LARS moves the weights by steps times learning rate, which is epochs times images for any batch size.
        if protocol.epochs * protocol.learning_rate * number < 100_000:
            warnings.warn(
                f"{protocol.epochs} epochs of {number} images are few for this protocol: the classifier hardly moves. "
                "Choose 'paper_imagenet100', or more epochs.",
                stacklevel=2,
            )
        return LARS(classifier.parameters(), lr=protocol.learning_rate)
    return torch.optim.AdamW(classifier.parameters(), lr=protocol.learning_rate)


def train_probe(classifier, features, labels, protocol: ProbeProtocol, seed: int) -> None:
    number = len(features)
    batch_size = min(protocol.batch_size, number)
    steps_per_epoch = math.ceil(number / batch_size)
    total_steps = protocol.epochs * steps_per_epoch
    warmup_steps = min(protocol.warmup_epochs * steps_per_epoch, total_steps // 4)
    peak = protocol.learning_rate * (batch_size / 256 if protocol.scale_learning_rate else 1.0)
    optimizer = probe_optimizer(classifier, protocol, number)
    generator = torch.Generator().manual_seed(seed)
    classifier.train()
    for step in range(total_steps):
        if step % steps_per_epoch == 0:
            order = torch.randperm(number, generator=generator).to(features.device)
        rows = order[step % steps_per_epoch * batch_size :][:batch_size]
        if len(rows) == 1 and protocol.batch_norm:  # one image has no variance
            continue
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup_cosine(step + 1, warmup_steps, total_steps)
        F.cross_entropy(classifier(features[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def ridge(train_features, train_labels, test_features, num_classes: int, regularization: float) -> torch.Tensor:
    """Classes of test features: the largest of the regressed one-hot targets."""
    targets = F.one_hot(train_labels.to(train_features.device).long(), num_classes)
    return ridge_regression(train_features, targets, test_features, regularization).argmax(dim=1)


@torch.no_grad()
def ridge_regression(
    train_features: torch.Tensor, targets: torch.Tensor, test_features: torch.Tensor, regularization: float = 1e-3
) -> torch.Tensor:
    """Targets `(number, dim)` of test features by a linear regression on standardised features."""
    train, test = in_double(train_features), in_double(test_features)
    mean, deviation = train.mean(dim=0), train.std(dim=0).clamp(min=1e-12)
    train, test = (train - mean) / deviation, (test - mean) / deviation
    targets = targets.to(train)
    average = targets.mean(dim=0)
    identity = torch.eye(train.shape[1], dtype=torch.float64, device=train.device)
    gram = train.T @ train / len(train) + regularization * identity
    return test @ torch.linalg.solve(gram, train.T @ (targets - average) / len(train)) + average


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up over `warmup_steps`, then a cosine down to 0."""
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al., 2017), as linear probing uses it; torch does not have it.

    The update of a matrix is scaled by `trust_coefficient` times its norm over that of its gradient; biases have plain
    momentum.
    """

    def __init__(
        self, parameters, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust_coefficient=0.001
    ):
        super().__init__(
            parameters,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient},
        )

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad
                if parameter.ndim > 1:
                    update = update.add(parameter, alpha=group["weight_decay"])
                    length, update_length = parameter.norm(), update.norm()
                    trust = group["trust_coefficient"] * length / update_length
                    update = update * torch.where((length > 0) & (update_length > 0), trust, torch.ones_like(trust))
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(update)
                parameter.add_(velocity, alpha=-group["lr"])
        return loss
