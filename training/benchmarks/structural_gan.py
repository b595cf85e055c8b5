"""Speed of a step of the structural GAN, discriminator and generator, against hinge loss with an R1 penalty.

python training/benchmarks/structural_gan.py
python training/benchmarks/structural_gan.py --sizes tiny --rounds 5
"""

import argparse
import copy
from collections.abc import Callable

import torch
from timing import benchmark_parser, compare, run_benchmark
from torch.nn import functional as F

from hf_decayed.losses.adversarial import (
    NeighbourBank,
    gaussian_divergence,
    hinge_discriminator_loss,
    hinge_generator_loss,
    jacobian_norm,
    neighbour_alignment,
    norm_hinge,
)
from hf_decayed.models.modeling_structural_discriminator import (
    StructuralDiscriminatorConfig,
    StructuralDiscriminatorModel,
)
from hf_decayed.models.structural_generator import StructuralGenerator


SIZES_HELP = "tiny has the networks of the recipe tiny, base those of cifar10"
NETWORKS = {"tiny": ("tiny", 28, 1, 64), "base": ("cifar", 32, 3, 8)}  # name, image size, channels, batch size
PEER = "hinge loss and R1 penalty"


class Networks:
    """Both networks with their optimizers, and an image batch; `projection_size` 1 is an ordinary discriminator."""

    def __init__(self, size: str, options: argparse.Namespace, **fields):
        name, image_size, channels, batch_size = NETWORKS[size]
        self.batch_size = options.batch_size or batch_size
        config = StructuralDiscriminatorConfig.from_size(name, num_channels=channels, **fields)
        self.discriminator = StructuralDiscriminatorModel(config).to(options.device)
        self.generator = StructuralGenerator.from_size(name, sample_size=image_size, out_channels=channels)
        self.generator.to(options.device)
        self.optimizers = [
            torch.optim.AdamW(network.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
            for network in (self.discriminator, self.generator)
        ]
        self.real = torch.rand(self.batch_size, channels, image_size, image_size, device=options.device) * 2 - 1

    def generate(self) -> torch.Tensor:
        return self.generator(
            torch.randn(self.batch_size, self.generator.config.latent_dim, device=self.real.device)
        ).sample

    def update(self, index: int, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizers[index].step()
        self.optimizers[index].zero_grad()


def hinge_step(networks: Networks) -> Callable[[], None]:
    discriminator = networks.discriminator

    def step() -> None:
        with torch.no_grad():
            generated = networks.generate()
        real = networks.real.clone().requires_grad_()
        scores = discriminator(torch.cat([real, generated])).raw_embeds
        (gradient,) = torch.autograd.grad(scores[: len(real)].sum(), real, create_graph=True)
        penalty = gradient.square().sum() / len(real)
        networks.update(0, hinge_discriminator_loss(*scores.chunk(2)) + 5 * penalty)
        discriminator.requires_grad_(False)
        networks.update(1, hinge_generator_loss(discriminator(networks.generate()).raw_embeds))
        discriminator.requires_grad_(True)

    return step


def structural_step(networks: Networks, smoothness_images: int) -> Callable[[], None]:
    discriminator, dim = networks.discriminator, networks.discriminator.config.projection_size
    average = copy.deepcopy(discriminator)  # the keys come from an average of the weights
    bank = NeighbourBank(
        10_240 // networks.batch_size * networks.batch_size, dim, discriminator.config.hidden_sizes[-1]
    )
    bank.to(networks.real.device)
    bank.count.fill_(bank.size)
    covariance = "full" if networks.batch_size >= dim else "diagonal"

    @torch.no_grad()
    def keys(images):
        return F.normalize(average(images).pooler_output, dim=1)

    def embed(images):
        return discriminator(images).raw_embeds

    def step() -> None:
        with torch.no_grad():
            generated = networks.generate()
        real, real_keys = networks.real, keys(networks.real)
        output = discriminator(torch.cat([real, generated]))
        first, second = output.image_embeds.chunk(2)
        candidates = bank.candidates(first, real_keys)
        alignment = neighbour_alignment(first, real_keys, *candidates, exclude_self=True)
        alignment = alignment - neighbour_alignment(second, keys(generated), *candidates)
        loss = -gaussian_divergence(first, second, covariance=covariance) - 3 * alignment
        loss = loss + 20 * norm_hinge(output.raw_embeds[: len(real)])
        if smoothness_images:
            images = torch.cat([real[:smoothness_images], generated[:smoothness_images]])
            sigma = jacobian_norm(embed, images, torch.randn(len(images), dim, device=images.device))
            loss = loss + 5 * (sigma - 1).square().mean()
        networks.update(0, loss)
        discriminator.requires_grad_(False)
        generated = networks.generate()
        second = discriminator(generated).image_embeds
        with torch.no_grad():
            first = discriminator(real).image_embeds
        loss = gaussian_divergence(first, second, covariance=covariance)
        loss = loss - 3 * neighbour_alignment(second, keys(generated), *bank.candidates(first, real_keys))
        networks.update(1, loss)
        bank.update(first, real_keys)
        discriminator.requires_grad_(True)

    return step


def benchmark(options: argparse.Namespace) -> list[dict]:
    return [benchmark_size(size, options) for size in options.sizes]


def benchmark_size(size: str, options: argparse.Namespace) -> dict:
    hinge = Networks(size, options, projection_size=1)
    batch_size = hinge.batch_size
    steps = {PEER: hinge_step(hinge)}
    for label, number in (
        ("full objective", batch_size),
        ("the Jacobian of a quarter of the images", max(1, batch_size // 4)),
        ("without the Jacobian", 0),
    ):
        steps[label] = structural_step(Networks(size, options), number)
    return compare(f"{size}: step of discriminator and generator, batch {batch_size}", steps, batch_size, options)


if __name__ == "__main__":
    run_benchmark(benchmark, benchmark_parser(__doc__, SIZES_HELP))
