"""Evaluation of nested diffusion: what the upper latents leak, what they decide, and a single network of equal cost.

Images are tensors `(number, channels, height, width)` in [0, 1]; image i of a draw has its own seed.
"""

import torch

from ..data.keyed_random import sample_seed
from ..models.unet_nested_uvit import NestedUViT2DModel
from .knn import check_features


def image_generators(seed: int, indices: range) -> list[torch.Generator]:
    """Generators of the images with these numbers; on the CPU, so that every device draws the same."""
    return [torch.Generator().manual_seed(sample_seed(seed, index)) for index in indices]


def batches(number: int, batch_size: int) -> list[range]:
    return [range(start, min(start + batch_size, number)) for start in range(0, number, batch_size)]


def oracle_reconstruction(
    pipeline, images: torch.Tensor, from_level: int = 2, seed: int = 0, batch_size: int = 64, **arguments
) -> dict[str, float]:
    """How much of an image the latents from `from_level` upwards leak, which condition noise is meant to reduce.

    Images are sampled given their own true latents. `oracle_rmse` is the root mean squared error of a sample against
    its image, and `other_rmse` that against another image; if the latents carry no information, the two are equal.

    Args:
        pipeline (`NestedDiffusionPipeline`): A chain with a `latent_encoder`.
        arguments: Arguments of the pipeline's call, such as `num_inference_steps` and `gamma`.
    """
    if len(images) < 2:
        raise ValueError(
            f"An oracle reconstruction is compared with other images: pass at least two, got {len(images)}."
        )
    samples = torch.cat(
        [
            pipeline.vary(
                images[indices.start : indices.stop],
                from_level=from_level,
                num_images=1,
                generator=image_generators(seed, indices),
                output_type="pt",
                **arguments,
            ).images.cpu()
            for indices in batches(len(images), batch_size)
        ]
    )
    return {
        "oracle_rmse": root_mean_square(samples - images),
        "other_rmse": root_mean_square(samples - images.roll(1, dims=0)),
    }


def root_mean_square(differences: torch.Tensor) -> float:
    return float(differences.double().square().mean().sqrt())


def sample_groups(
    pipeline,
    num_latents: int,
    images_per_latent: int,
    num_classes: int = 0,
    seed: int = 0,
    batch_size: int = 64,
    **arguments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples groups of images that share their top latent; returns the images, in order, and their group numbers.

    Args:
        num_latents (`int`): Top latents to sample; they take the classes in turn, if there are any.
        arguments: Arguments of the pipeline's call.
    """
    top, number = pipeline.num_levels, num_latents * images_per_latent
    groups = torch.arange(num_latents).repeat_interleave(images_per_latent)
    generators = image_generators(seed, range(num_latents + number))
    labels = [index % num_classes for index in range(num_latents)] if num_classes else None
    first = {"num_images": num_latents} if labels is None else {"class_labels": labels}
    settings = {**arguments, "output_type": "latent", "generator": generators[:num_latents]}
    top_latents = pipeline(**first, **settings).latents[top].cpu()
    images = []
    for indices in batches(number, batch_size):
        members = groups[indices.start : indices.stop]
        classes = {} if labels is None else {"class_labels": [labels[group] for group in members.tolist()]}
        own = generators[num_latents + indices.start : num_latents + indices.stop]
        fixed = {top: top_latents[members]}
        images.append(pipeline(**classes, fixed_latents=fixed, generator=own, output_type="pt", **arguments).images)
    return torch.cat(images).float().cpu(), groups


@torch.no_grad()
def group_neighbours(features: torch.Tensor, groups: torch.Tensor, k: int = 1) -> dict[str, float]:
    """Whether images with the same top latent are neighbours, from features `(number, dim)` and their group numbers.

    `same_latent_knn` is the fraction of the `k` nearest other images, by cosine similarity, that are in the same
    group, and `same_latent_chance` what it would be by chance. `within_distance` and `between_distance` are mean
    Euclidean distances of pairs within a group and between groups.
    """
    check_features("features", features)
    if len(features) != len(groups):
        raise ValueError(f"There must be a group for each of {len(features)} features, got {len(groups)}.")
    same = groups.unsqueeze(0) == groups.unsqueeze(1)
    others = ~torch.eye(len(groups), dtype=torch.bool)
    if not (same & others).any() or same.all() or not 1 <= k < len(groups):
        raise ValueError(
            "Neighbours need two groups, one of them with two images, and `k` smaller than the number of images."
        )
    normalised = torch.nn.functional.normalize(features.double(), dim=1)
    similarity = (normalised @ normalised.T).masked_fill(~others, -torch.inf)
    nearest = similarity.topk(k, dim=1).indices
    distances = torch.cdist(features.double(), features.double(), compute_mode="donot_use_mm_for_euclid_dist")
    return {
        "same_latent_knn": float(same.gather(1, nearest).double().mean()),
        "same_latent_chance": float((same & others).double().sum() / others.double().sum()),
        "within_distance": float(distances[same & others].mean()),
        "between_distance": float(distances[~same].mean()),
    }


def chain_macs(pipeline) -> int:
    """Multiply-accumulate operations of one sampling step of every level, for one image without guidance."""
    return sum(network.count_macs() for network in pipeline.networks.values())


def single_macs(network: torch.nn.Module, **changes) -> int:
    """Multiply-accumulates of a U-ViT, or of one level without conditions; `changes` override config fields."""
    fields = {name: value for name, value in network.config.items() if not name.startswith("_")}
    fields |= {"condition_levels": [], "condition_sigmas": [], "shortcut_decay": 1.0}  # the decay has no cost
    with torch.device("meta"):
        return NestedUViT2DModel(**{**fields, **changes}).count_macs()


def equal_mac_depth(pipeline) -> tuple[int, int]:
    """Depth of the single network whose cost comes nearest to the chain's, and its multiply-accumulate operations.

    The network is level 1 without conditions; its `num_layers` must be even.
    """
    network, target, costs = pipeline.networks[1], chain_macs(pipeline), {}
    for num_layers in range(2, 4 * network.config.num_layers + 1, 2):
        costs[num_layers] = single_macs(network, num_layers=num_layers)
        if costs[num_layers] > target:
            break
    depth = min(costs, key=lambda num_layers: abs(costs[num_layers] - target))
    return depth, costs[depth]
