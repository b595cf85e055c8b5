"""How well images are relit, how good an albedo is, and whether light codes mean the same in all scenes.

Relit images are compared in [-1, 1], as the network outputs them and as the dissertation does (chapter 6). Albedos are
non-negative linear intensities.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from ..losses.relighting import structural_similarity


class Judgement(NamedTuple):
    """Which of two points people see as darker.

    Args:
        point1, point2 (`tuple[float, float]`): x and y, as fractions of width and height.
        darker (`str`): `1` or `2`, the point of darker material, or `E` for about equal, as the files of Intrinsic Images in
            the Wild (IIW) label them.
        weight (`float`): Confidence of the judgement.
    """

    point1: tuple[float, float]
    point2: tuple[float, float]
    darker: str
    weight: float = 1.0


class LightConsistency(NamedTuple):
    """Mean cosine similarity of light codes of different images: with the same light, and with different lights."""

    same_light: float
    different_light: float


def relighting_errors(
    predicted: torch.Tensor, target: torch.Tensor, correction: Literal["scale", "shift"] = "scale"
) -> dict[str, float]:
    """RMSE and SSIM of relit images, as they are and after colour correction; means over images.

    Args:
        predicted, target (`torch.Tensor` of shape `(number, 3, height, width)`): Images in [-1, 1].
        correction (`str`, defaults to `"scale"`): See [`correct_colours`].
    """
    check_pair(predicted, target)
    corrected = correct_colours(predicted, target, correction)
    errors = {}
    for suffix, images in (("", predicted), ("_corrected", corrected)):
        errors[f"rmse{suffix}"] = (images - target).square().mean(dim=(1, 2, 3)).sqrt().mean().item()
        errors[f"ssim{suffix}"] = structural_similarity(images, target).mean().item()
    return errors


def correct_colours(
    predicted: torch.Tensor, target: torch.Tensor, method: Literal["scale", "shift"] = "scale"
) -> torch.Tensor:
    """Matches the colours of images to the target's, as far as one number per channel can.

    Args:
        predicted, target (`torch.Tensor` of shape `(number, 3, height, width)`): Images in [-1, 1].
        method (`str`, defaults to `"scale"`):
            `scale` is the dissertation's: intensities, from 0 to 1, times a factor by least squares. `shift` is the
            release's, and used for its table: the mean of every channel is moved to the target's.
    """
    check_pair(predicted, target)
    if method == "shift":
        return predicted + (target - predicted).mean(dim=(2, 3), keepdim=True)
    if method != "scale":
        raise ValueError(f"`method` must be 'scale' or 'shift', got {method!r}.")
    intensity, wanted = (predicted + 1) / 2, (target + 1) / 2
    factor = least_squares_factor(intensity, wanted, dims=(2, 3))
    return 2 * factor * intensity - 1


def reference_leakage(relit: torch.Tensor, target: torch.Tensor, reference: torch.Tensor) -> float:
    """Whether the reference's scene shows in relit images: correlation of their error with its edges, mean over images.

    Near 0 if only the light is transferred, because edges of another scene do not tell where errors are.

    Args:
        relit, target, reference (`torch.Tensor` of shape `(number, 3, height, width)`): Images in [-1, 1].
    """
    check_pair(relit, target)
    check_pair(reference, target)
    error = (relit - target).abs().mean(dim=1)[:, :-1, :-1]
    edges = (reference.diff(dim=2)[..., :-1].abs() + reference.diff(dim=3)[:, :, :-1].abs()).mean(dim=1)
    error, edges = (values.flatten(1) - values.flatten(1).mean(dim=1, keepdim=True) for values in (error, edges))
    return F.cosine_similarity(error, edges, dim=1).mean().item()


def albedo_error(albedo: torch.Tensor, true_albedo: torch.Tensor) -> float:
    """RMSE of albedos after the best factor for each image, which no method can know; mean over images.

    Args:
        albedo, true_albedo (`torch.Tensor` of shape `(number, 3, height, width)`): Linear intensities.
    """
    check_pair(albedo, true_albedo)
    scaled = least_squares_factor(albedo, true_albedo, dims=(1, 2, 3)) * albedo
    return (scaled - true_albedo).square().mean(dim=(1, 2, 3)).sqrt().mean().item()


def least_squares_factor(values: torch.Tensor, target: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The factor that brings `values` closest to `target`, over some dimensions; 0 where all values are 0."""
    product, square = ((values * other).sum(dim=dims, keepdim=True) for other in (target, values))
    return product / square.clamp(min=1e-12)


def whdr(albedo: torch.Tensor, judgements: Sequence[Judgement], delta: float = 0.1) -> float:
    """Weighted human disagreement rate (Bell et al., 2014) of one albedo, in [0, 1]; lower is better.

    The lightness of a point is the mean of its red, green and blue. A point is darker if the other is lighter by more than
    the factor `1 + delta`.

    Args:
        albedo (`torch.Tensor` of shape `(3, height, width)`): Linear intensities.
        judgements (`Sequence[Judgement]`): People's judgements of pairs of points.
    """
    if not judgements or sum(judgement.weight for judgement in judgements) <= 0:
        raise ValueError("WHDR needs judgements with a weight above 0.")
    if delta < 0:
        raise ValueError(f"`delta` must be at least 0, got {delta}.")
    lightness = albedo.mean(dim=0).clamp(min=1e-10)
    wrong = total = 0.0
    for judgement in judgements:
        if judgement.darker not in ("1", "2", "E"):
            raise ValueError(f"`darker` must be '1', '2' or 'E', got {judgement.darker!r}.")
        first, second = (lightness_at(lightness, point) for point in (judgement.point1, judgement.point2))
        darker = "E"
        if second / first > 1 + delta:
            darker = "1"
        elif first / second > 1 + delta:
            darker = "2"
        wrong += judgement.weight * (darker != judgement.darker)
        total += judgement.weight
    return wrong / total


def lightness_at(lightness: torch.Tensor, point: tuple[float, float]) -> float:
    height, width = lightness.shape
    column, row = min(int(point[0] * width), width - 1), min(int(point[1] * height), height - 1)
    return lightness[row, column].item()


def read_iiw_judgements(content: dict) -> list[Judgement]:
    """Judgements from the JSON file of an image of IIW; points on transparent or mirroring material are left out."""
    points = {point["id"]: point for point in content["intrinsic_points"] if point["opaque"]}
    judgements = []
    for comparison in content["intrinsic_comparisons"]:
        first, second = (points.get(comparison[name]) for name in ("point1", "point2"))
        score = comparison["darker_score"]
        if first and second and comparison["darker"] in ("1", "2", "E") and score and score > 0:
            point1, point2 = ((point["x"], point["y"]) for point in (first, second))
            judgements.append(Judgement(point1, point2, comparison["darker"], score))
    return judgements


def light_consistency(codes: torch.Tensor, lights: torch.Tensor) -> LightConsistency:
    """Whether codes of one light are alike across scenes: the first number should be near 1, the second lower.

    Args:
        codes (`torch.Tensor` of shape `(number, dim)`): Light codes of images of different scenes.
        lights (`torch.Tensor` of shape `(number,)`): Which light each image has.
    """
    codes, lights = F.normalize(codes.float(), dim=1), torch.as_tensor(lights)
    if codes.shape[:1] != lights.shape:
        raise ValueError(f"There must be a light for each of {len(codes)} codes, got {tuple(lights.shape)}.")
    similarity = codes @ codes.T
    same = lights[:, None] == lights[None]
    others = ~torch.eye(len(codes), dtype=torch.bool, device=codes.device)
    if not (same & others).any() or same.all():
        raise ValueError("Light codes are compared within and across lights: give two lights, and two images of one.")
    return LightConsistency(similarity[same & others].mean().item(), similarity[~same].mean().item())


def check_pair(predicted: torch.Tensor, target: torch.Tensor) -> None:
    if predicted.ndim != 4 or predicted.shape != target.shape:
        raise ValueError(
            f"Images must have one shape (number, 3, height, width), got {tuple(predicted.shape)} and "
            f"{tuple(target.shape)}."
        )
