"""How much of "what" and of "where" dense features hold: unsupervised segmentation, and probes of patches.

Dense features have the shape `(images, height, width, dim)`, one vector per patch; masks `(images, height, width)` hold a
class per pixel. `IGNORE_INDEX` marks pixels that do not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from ..errors import UserError
from .knn import check_features, knn_accuracy
from .linear_probe import linear_probe, ridge_regression


IGNORE_INDEX = 255
COORDINATE_GRID = (
    32  # the paper regresses coordinates on a grid of 32 x 32: its errors are in squared cells of that grid
)
SIDES = ("left", "right")


def cluster_miou(
    clusters: torch.Tensor,
    masks: torch.Tensor,
    match: str = "hungarian",
    num_classes: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> float:
    """Mean intersection over union of clusters that are matched with classes over a whole data set.

    Args:
        clusters (`torch.Tensor` of shape `(images, height, width)`): Cluster of each pixel or patch.
        masks (`torch.Tensor` of shape `(images, height, width)`): Classes; clusters of patches are enlarged to their size.
        match (`str`, defaults to `"hungarian"`):
            `hungarian` matches every class with one cluster, so that the most pixels agree, and leaves other clusters
            unmatched; `greedy` gives every cluster the class that most of its pixels have.
        num_classes (`int`, *optional*): By default the largest class + 1. The mean is over classes that occur.
    """
    if match not in ("hungarian", "greedy"):
        raise ValueError(f"`match` must be 'hungarian' or 'greedy', got '{match}'.")
    counts = count_overlaps(clusters, masks, num_classes, ignore_index)
    if match == "greedy":
        classes = counts.argmax(axis=1)
        matched = np.zeros((counts.shape[1], counts.shape[1]), dtype=np.int64)
        np.add.at(matched, classes, counts)
        return mean_iou(matched)
    from scipy.optimize import linear_sum_assignment  # here: scipy comes with an extra

    rows, columns = linear_sum_assignment(counts, maximize=True)
    matched = np.zeros((counts.shape[1], counts.shape[1]), dtype=np.int64)
    matched[columns] = counts[rows]
    return mean_iou(matched, total=counts.sum(axis=0))


def oracle_miou(
    regions: torch.Tensor,
    masks: torch.Tensor,
    num_classes: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> float:
    """Mean intersection over union when every region of every image has the class that most of its pixels have.

    It measures whether regions follow the borders of objects, and forgives regions that are too small.
    """
    num_classes = check_masks(masks, num_classes, ignore_index)
    regions = resize_labels(regions, masks.shape[1:])
    matched = np.zeros((num_classes, num_classes), dtype=np.int64)
    for image_regions, mask in zip(regions, masks):
        if (mask == ignore_index).all():
            continue
        counts = count_overlaps(image_regions.unsqueeze(0), mask.unsqueeze(0), num_classes, ignore_index)
        np.add.at(matched, counts.argmax(axis=1), counts)
    return mean_iou(matched)


def count_overlaps(
    clusters: torch.Tensor, masks: torch.Tensor, num_classes: int | None = None, ignore_index: int = IGNORE_INDEX
) -> np.ndarray:
    """Number of pixels by cluster and class, `(clusters, classes)`."""
    num_classes = check_masks(masks, num_classes, ignore_index)
    clusters = resize_labels(clusters, masks.shape[1:])
    if len(clusters) != len(masks):
        raise ValueError(f"{len(clusters)} images with clusters need as many masks, got {len(masks)}.")
    valid = masks != ignore_index
    chosen_clusters, chosen_classes = clusters[valid].long(), masks[valid].long()
    if chosen_clusters.min() < 0:
        raise ValueError(f"Clusters must be counted from 0, got {int(chosen_clusters.min())}.")
    num_clusters = int(chosen_clusters.max()) + 1
    counts = torch.bincount(chosen_clusters * num_classes + chosen_classes, minlength=num_clusters * num_classes)
    return counts.view(num_clusters, num_classes).cpu().numpy()


def check_masks(masks: torch.Tensor, num_classes: int | None, ignore_index: int) -> int:
    """Checks the classes of masks; returns their number."""
    if masks.ndim != 3:
        raise ValueError(f"Masks must have shape (images, height, width), got {tuple(masks.shape)}.")
    if masks.is_floating_point():
        raise ValueError(f"Masks must hold whole numbers, got {masks.dtype}.")
    classes = masks[masks != ignore_index]
    if len(classes) == 0:
        raise ValueError(f"All pixels of the masks are {ignore_index}, which means to ignore them: nothing is left.")
    smallest, largest = int(classes.min()), int(classes.max())
    if smallest < 0 or (num_classes is not None and largest >= num_classes):
        end = "" if num_classes is None else f" and end at {num_classes - 1}"
        raise ValueError(
            f"Classes of masks must be counted from 0{end}, got {smallest if smallest < 0 else largest}; pixels to ignore "
            f"are {ignore_index}."
        )
    return largest + 1 if num_classes is None else num_classes


def mean_iou(matched: np.ndarray, total: np.ndarray | None = None) -> float:
    """Mean IoU from pixels by predicted and true class; `total` has all pixels by true class, also unmatched ones."""
    total = matched.sum(axis=0) if total is None else total
    intersection = np.diagonal(matched)
    union = matched.sum(axis=1) + total - intersection
    present = total > 0
    return float((intersection[present] / union[present]).mean())


def resize_labels(labels: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Label maps `(images, height, width)` at another size, by nearest neighbour."""
    if labels.ndim != 3:
        raise ValueError(f"Maps must have shape (images, height, width), got {tuple(labels.shape)}.")
    if tuple(labels.shape[1:]) == tuple(size):
        return labels
    return F.interpolate(labels.unsqueeze(1).double(), tuple(size), mode="nearest-exact").squeeze(1).long()


def patch_labels(masks: torch.Tensor, grid: tuple[int, int], ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """The class that most pixels of each patch have, `(images, *grid)`; a patch without a class is ignored."""
    num_classes = check_masks(masks, None, ignore_index)
    if masks.shape[1] < grid[0] or masks.shape[2] < grid[1]:
        raise ValueError(f"Masks of {tuple(masks.shape[1:])} pixels are smaller than the grid of patches, {grid}.")
    best = torch.zeros(len(masks), *grid, device=masks.device)
    labels = torch.full((len(masks), *grid), ignore_index, device=masks.device)
    for number in range(num_classes):  # one class at a time: a one-hot tensor of all would be large
        share = F.adaptive_avg_pool2d((masks == number).float().unsqueeze(1), grid).squeeze(1)
        labels[share > best] = number
        best = torch.maximum(best, share)
    return labels


@torch.no_grad()
def cluster_patches(
    features: torch.Tensor,
    num_clusters: int = 27,
    seed: int = 0,
    normalize: bool = True,
    max_fit_patches: int = 200_000,
) -> torch.Tensor:
    """Clusters `(images, height, width)` of dense features by k-means over the patches of all images.

    Args:
        num_clusters (`int`, defaults to 27): The paper's number, that of the classes of COCO-Stuff-27.
        normalize (`bool`): Layer-normalises every feature, because the scale of tokens differs between networks.
        max_fit_patches (`int`): Largest number of patches that the centres are fitted on; of more, a random subset.
    """
    number, height, width, dim = check_dense(features)
    patches = features.reshape(-1, dim).float().cpu()
    if normalize:
        patches = F.layer_norm(patches, (dim,))
    if num_clusters > len(patches):
        raise ValueError(f"{num_clusters} clusters need as many patches; there are {len(patches)}.")
    fitted = patches
    if len(patches) > max_fit_patches:
        order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))
        fitted = patches[order[:max_fit_patches]]
    k_means = require_sklearn().KMeans(num_clusters, n_init=1, random_state=seed).fit(fitted.numpy())
    return torch.from_numpy(k_means.predict(patches.numpy())).long().view(number, height, width)


@torch.no_grad()
def principal_colours(features: torch.Tensor) -> torch.Tensor:
    """Dense features as colours `(images, height, width, 3)` in [0, 1]: three principal components over all images.

    Each is scaled from its 1st to its 99th percentile, so that patches of one kind have one colour in all images.
    """
    number, height, width, dim = check_dense(features)
    patches = F.layer_norm(features.reshape(-1, dim).double().cpu(), (dim,))
    patches = patches - patches.mean(dim=0)
    _, directions = torch.linalg.eigh(patches.T @ patches)
    directions = directions.flip(1)[:, :3]
    # The sign of an eigenvector is arbitrary; it is fixed here, so that the same weights give the same picture
    # anywhere.
    directions = directions * directions.sum(dim=0).sign().where(directions.sum(dim=0) != 0, torch.ones(1).double())
    colours = F.pad(patches @ directions, (0, 3 - directions.shape[1]))
    low, high = (torch.quantile(colours[: 2**18], share, dim=0) for share in (0.01, 0.99))
    return ((colours - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).view(number, height, width, 3).float()


def require_sklearn():
    """`sklearn.cluster`, or an error that names the extra to install."""
    try:
        import sklearn.cluster
    except ImportError as error:
        raise UserError("Clustering needs scikit-learn: pip install 'hf_decayed[training]'.") from error
    return sklearn.cluster


@dataclass(frozen=True)
class CoordinateProbe:
    """How well a linear probe reads the position of a patch from its features.

    Args:
        accuracy (`float`): Fraction of held-out patches whose position in the grid is classified correctly.
        mse (`float`): Mean squared error of the regressed row and column, in squared cells of a 32 x 32 grid.
        r2 (`float`): Share of the coordinates' variance that the regression explains.
    """

    accuracy: float
    mse: float
    r2: float


@torch.no_grad()
def coordinate_probe(features: torch.Tensor, train_share: float = 0.8, seed: int = 0) -> CoordinateProbe:
    """Position of patches, read from their features by ridge regression; images are split for training and testing.

    Low accuracy and high error mean that features do not say "where".
    """
    number, height, width, dim = check_dense(features)
    if number < 2:
        raise ValueError("A probe of positions needs two images or more: one to train on, one to test on.")
    if height * width < 2:
        raise ValueError("One patch per image has one position: there is nothing to tell apart.")
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    train = order[: min(max(1, round(train_share * number)), number - 1)]
    test = order[len(train) :]
    positions = torch.arange(height * width)
    accuracy = linear_probe(
        features[train].reshape(-1, dim),
        positions.repeat(len(train)),
        features[test].reshape(-1, dim),
        positions.repeat(len(test)),
        protocol="ridge",
    )
    rows, columns = (torch.linspace(0, COORDINATE_GRID - 1, size, dtype=torch.float64) for size in (height, width))
    coordinates = torch.cartesian_prod(rows, columns)
    predicted = ridge_regression(
        features[train].reshape(-1, dim), coordinates.repeat(len(train), 1), features[test].reshape(-1, dim)
    ).cpu()
    errors = (predicted - coordinates.repeat(len(test), 1)) ** 2
    return CoordinateProbe(
        accuracy, errors.mean().item(), 1 - errors.sum().item() / squared_deviation(coordinates, test)
    )


def squared_deviation(coordinates: torch.Tensor, images: torch.Tensor) -> float:
    return len(images) * (coordinates - coordinates.mean(dim=0)).square().sum().item()


def patch_probe(
    train_features: torch.Tensor,
    train_masks: torch.Tensor,
    test_features: torch.Tensor,
    test_masks: torch.Tensor,
    method: str = "linear",
    ignore_index: int = IGNORE_INDEX,
    max_patches: int = 50_000,
    seed: int = 0,
) -> float:
    """Fraction of held-out patches whose class a `linear` (ridge) or `knn` probe reads from their features.

    Args:
        train_masks, test_masks: Classes per pixel; a patch has the class of most of its pixels.
        max_patches (`int`): Largest number of patches per split; of more, a random subset is used.
    """
    if method not in ("linear", "knn"):
        raise ValueError(f"`method` must be 'linear' or 'knn', got '{method}'.")
    splits: list[torch.Tensor] = []
    for features, masks in ((train_features, train_masks), (test_features, test_masks)):
        number, height, width, dim = check_dense(features)
        if len(masks) != number:
            raise ValueError(f"Features of {number} images need as many masks, got {len(masks)}.")
        labels = patch_labels(masks, (height, width), ignore_index).flatten()
        chosen = (labels != ignore_index).nonzero().squeeze(1)
        if len(chosen) > max_patches:
            order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
            chosen = chosen[order[:max_patches].to(chosen.device)]
        splits += [features.reshape(-1, dim)[chosen], labels[chosen]]
    train, train_labels, test, test_labels = splits
    if method == "knn":
        return knn_accuracy(train, train_labels, test, test_labels, k=min(20, len(train)))
    return linear_probe(train, train_labels, test, test_labels, protocol="ridge")


def spatial_labels(
    masks: torch.Tensor,
    ignore_index: int = IGNORE_INDEX,
    min_area: int = 50,
    central_share: float = 0.1,
) -> torch.Tensor:
    """Masks of "spatial semantics": class `2 * c` for regions of class `c` on the left, `2 * c + 1` on the right.

    A connected region is on the side whose border is nearer to its centre. Regions of fewer than `min_area` pixels,
    and those whose centre is within `central_share` of the width from the middle, are ignored.
    """
    from scipy import ndimage  # here: scipy comes with an extra

    num_classes = check_masks(masks, None, ignore_index)
    if 2 * num_classes > ignore_index:
        raise ValueError(f"{num_classes} classes on two sides are more than fit below {ignore_index}.")
    sides = np.full(masks.shape, ignore_index, dtype=np.int64)
    middle = (masks.shape[2] - 1) / 2
    for image, class_index, region in connected_regions(masks, ignore_index):
        if region.sum() < min_area:
            continue
        offset = ndimage.center_of_mass(region)[1] - middle
        if abs(offset) > central_share * masks.shape[2]:
            sides[image][region] = 2 * class_index + int(offset > 0)
    return torch.from_numpy(sides)


def connected_regions(masks: torch.Tensor, ignore_index: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Index of the image, class and pixels of every connected region of every mask."""
    from scipy import ndimage

    for image, mask in enumerate(masks.cpu().numpy()):
        for class_index in np.unique(mask[mask != ignore_index]):
            numbered, count = ndimage.label(mask == class_index)
            for number in range(1, count + 1):
                yield image, int(class_index), numbered == number


def check_dense(features: torch.Tensor) -> tuple[int, int, int, int]:
    """Checks dense features; returns the numbers of images, rows, columns and channels."""
    if features.ndim != 4 or 0 in features.shape:
        raise ValueError(f"Dense features must have shape (images, height, width, dim), got {tuple(features.shape)}.")
    check_features("patches", features.reshape(-1, features.shape[3]))
    number, height, width, dim = features.shape
    return number, height, width, dim
