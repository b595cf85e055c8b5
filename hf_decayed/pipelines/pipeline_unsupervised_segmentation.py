"""Regions of images from the attention of a frozen vision encoder, as a pipeline of transformers: no labels, no training.

>>> from transformers import pipeline
>>> segmenter = pipeline("unsupervised-segmentation", model="user/decayed-mae", trust_remote_code=True)
>>> regions = segmenter("photo.jpg")  # [{"label": "region 0", "score": 0.7, "mask": <PIL.Image>}, ...]

This file works alone: it is published beside the weights. It needs scikit-learn, which is imported when it is used.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from transformers import Pipeline, PreTrainedModel
from transformers.image_utils import load_image


__all__ = ["UnsupervisedSegmentationPipeline"]

# Task -> what transformers has to know about it, as `custom_pipelines` of a config says it.
CUSTOM_PIPELINES = {
    "unsupervised-segmentation": {
        "impl": "pipeline_unsupervised_segmentation.UnsupervisedSegmentationPipeline",
        "pt": ["AutoModel"],
    }
}

# Copied from hf_decayed.spectral.clustering.GRAPHS
GRAPHS = ("qk", "vv", "features")
VALUE_PROJECTIONS = ("v_proj", "value")  # their names in the attention modules of transformers
# Copied from hf_decayed.spectral.graphs.TEMPERATURE
TEMPERATURE = 0.2
# Copied from hf_decayed.spectral.graphs.MIN_DEGREE
MIN_DEGREE = 1e-8
# Copied from hf_decayed.spectral.graphs.CHUNK_ENTRIES
CHUNK_ENTRIES = 2**20  # of graphs that are added up at a time: 4 MB, which a cache can hold
# Copied from hf_decayed.spectral.solvers.MAX_DENSE_SIZE
MAX_DENSE_SIZE = 576
# Copied from hf_decayed.spectral.regions.MAX_SILHOUETTE_POINTS
MAX_SILHOUETTE_POINTS = 2048
# Copied from hf_decayed.spectral.capture.MAX_EXTRA_TOKENS
MAX_EXTRA_TOKENS = (
    2  # besides registers: class and distillation tokens of encoders, time and class of diffusion models
)


def require_module(name: str) -> ModuleType:
    """A module of scikit-learn, or of scipy, which scikit-learn brings along."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("Unsupervised segmentation needs scikit-learn: pip install scikit-learn.") from error


class UnsupervisedSegmentationPipeline(Pipeline):
    """Divides images into regions: spectral clustering of the graphs of all layers and heads of a vision encoder.

    Any vision transformer of transformers works whose layers see one grid of patches (ViT, DeiT, DINOv2, DINOv3, CLIP,
    SigLIP, BEiT, ViTMAE and those of this repository). The whole image is resized to the size that the model takes; an
    image processor that crops the middle does not crop here, so that masks cover the image.

    Args:
        graph (`str`, defaults to `"vv"`):
            What connects two patches: `vv`, similar values in all layers, mostly what they show; `qk`, the attention of all
            layers, mostly where they are; `features`, similar hidden states of the last layer.
        n_clusters (`int`, *optional*): Number of regions. By default the number from 2 to 10 with the best silhouette.
        n_components (`int`, defaults to 10): Leading eigenvectors of the averaged graph that are clustered.
        seed (`int`, defaults to 0): Of k-means.
        return_rgb (`bool`, defaults to `False`): Also return the leading components as a picture.
        return_embedding (`bool`, defaults to `False`): Also return the eigenvectors.
        timeout (`float`, *optional*): Seconds to wait for images from the web.

    All of them can be given to `pipeline(...)` and to the call.
    """

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.image_processor is None:
            raise ValueError(
                "Unsupervised segmentation needs the image processor of the model: pass `image_processor`."
            )
        require_module("sklearn")
        self.model.eval()
        self.encoder = find_encoder(self.model)
        self.attention_layers = find_attention_layers(self.encoder)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Divides one image or several into regions.

        Args:
            inputs (`str`, `PIL.Image`, or a list, generator or data set of them): Paths or addresses of images, or images.
            kwargs: The arguments of the class, and `batch_size`.

        Returns:
            A list with a dictionary for each region, the largest first, or a list of such lists for several images:
            `label`, "region 0" and so on; `score`, the mean silhouette of its patches in [-1, 1]; `mask`, a picture of the
            image's size that is 255 in the region and 0 elsewhere.

            With `return_rgb` or `return_embedding`, a dictionary for each image instead: `regions`, that list; `rgb`,
            components 2 to 4 as a picture of the image's size; `embedding`, a tensor `(height, width, components)` over the
            grid of patches.
        """
        return super().__call__(inputs, **kwargs)

    def _sanitize_parameters(
        self,
        graph: str | None = None,
        n_clusters: int | None = None,
        n_components: int | None = None,
        seed: int | None = None,
        return_rgb: bool | None = None,
        return_embedding: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[dict, dict, dict]:
        if graph is not None and graph not in GRAPHS:
            raise ValueError(f"`graph` must be one of {', '.join(GRAPHS)}, got {graph!r}.")
        if n_clusters is not None and n_clusters < 2:
            raise ValueError(f"`n_clusters` must be at least 2, or None for the best number, got {n_clusters}.")
        postprocess = {
            "n_clusters": n_clusters,
            "n_components": n_components,
            "seed": seed,
            "return_rgb": return_rgb,
            "return_embedding": return_embedding,
        }
        parameters = ({"timeout": timeout}, {"graph": graph}, postprocess)
        preprocess, forward, postprocess = (
            {name: value for name, value in part.items() if value is not None} for part in parameters
        )
        return preprocess, forward, postprocess

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """Pixels for the model, `(1, channels, height, width)`, and height and width of the image itself."""
        image = load_image(image, timeout=timeout)
        settings: dict[str, Any] = {}
        if getattr(self.image_processor, "do_center_crop", False):
            crop = dict(self.image_processor.crop_size)
            settings = {"do_center_crop": False, "size": {"height": crop["height"], "width": crop["width"]}}
        pixels: Any = image
        if (
            getattr(self.encoder.config, "num_channels", 3) == 1
        ):  # processors need the channel axis that grey images lack
            pixels = np.asarray(image.convert("L"))[:, :, None]
            settings["input_data_format"] = "channels_last"
        pixel_values = self.image_processor(pixels, return_tensors="pt", **settings)["pixel_values"]
        return {"pixel_values": pixel_values.to(self.dtype), "image_size": torch.tensor([[image.height, image.width]])}

    def _forward(self, model_inputs: dict[str, torch.Tensor], graph: str = "vv") -> dict[str, torch.Tensor]:
        """The averaged graph `(batch, patches, patches)` of every image, its grid, and the size of the image."""
        pixel_values = model_inputs["pixel_values"]
        grid = patch_grid(self.encoder, pixel_values)
        graphs = LayerGraphs(len(pixel_values), grid, self.encoder)
        with (
            graphs.collect(self.attention_layers, graph),
            without_masking(self.encoder, pixel_values, grid) as arguments,
        ):
            self.encoder(pixel_values, **arguments)
        return {
            "graph": graphs.mean(),
            "grid": torch.tensor([grid] * len(pixel_values)),
            "image_size": model_inputs["image_size"],
        }

    def postprocess(
        self,
        model_outputs: dict[str, torch.Tensor],
        n_clusters: int | None = None,
        n_components: int = 10,
        seed: int = 0,
        return_rgb: bool = False,
        return_embedding: bool = False,
    ) -> list[dict[str, Any]] | dict[str, Any]:
        """Regions of one image, see `__call__`."""
        height, width = model_outputs["grid"][0].tolist()
        image_height, image_width = model_outputs["image_size"][0].tolist()
        if n_clusters is not None and n_clusters > height * width:
            raise ValueError(f"{n_clusters} clusters are more than the {height * width} patches.")
        spectrum = exact_eigenvectors(model_outputs["graph"][0], n_components)
        embedding = spectrum.eigenvectors * spectrum.eigenvalues  # one step of the random walk
        if n_clusters is None:
            clusters = best_silhouette_clusters(embedding, seed=seed)
        else:
            clusters = k_means_clusters(embedding, n_clusters, seed)
        labels = sort_by_area(clusters.labels.numpy().reshape(height, width))
        regions = describe_regions(labels, embedding, (image_width, image_height))
        if not return_rgb and not return_embedding:
            return regions
        result: dict[str, Any] = {"regions": regions}
        if return_rgb:
            result["rgb"] = draw_components(embedding, (height, width), (image_width, image_height))
        if return_embedding:
            result["embedding"] = embedding.view(height, width, -1)
        return result


def find_encoder(model: nn.Module) -> nn.Module:
    """The innermost model that takes images: without a head, and without the text tower of CLIP and its kin."""
    encoders = [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and "pixel_values" in inspect.signature(module.forward).parameters
    ]
    if not encoders:
        raise ValueError(f"{type(model).__name__} takes no images (`pixel_values`): choose a vision transformer.")
    return encoders[-1]


def find_attention_layers(encoder: nn.Module) -> list[nn.Module]:
    """Modules that compute attention, in the order of the model: those with a projection of values."""
    layers = [
        module for module in encoder.modules() if any(hasattr(module, projection) for projection in VALUE_PROJECTIONS)
    ]
    if not layers or not isinstance(getattr(encoder.config, "num_attention_heads", None), int):
        raise ValueError(
            f"{type(encoder).__name__} cannot be segmented by its attention: it has no layers of attention over one grid of "
            "patches. Choose a vision transformer such as ViT, DINOv2, CLIP or ViTMAE."
        )
    return layers


def patch_grid(encoder: nn.Module, pixel_values: torch.Tensor) -> tuple[int, int]:
    """Number of patches along height and width."""
    patch_size = encoder.config.patch_size
    patch_height, patch_width = patch_size if isinstance(patch_size, (list, tuple)) else (patch_size, patch_size)
    if pixel_values.ndim != 4:
        raise ValueError(
            f"Images must have the shape (batch, channels, height, width) after processing, got {tuple(pixel_values.shape)}."
        )
    grid = (pixel_values.shape[2] // patch_height, pixel_values.shape[3] // patch_width)
    if grid[0] * grid[1] < 2:
        raise ValueError(
            f"An image of {pixel_values.shape[2]} x {pixel_values.shape[3]} pixels has {grid[0] * grid[1]} patch of "
            f"{patch_height} x {patch_width}; regions need at least two."
        )
    return grid


@contextmanager
def without_masking(
    encoder: nn.Module, pixel_values: torch.Tensor, grid: tuple[int, int]
) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments with which the encoder sees all patches in order: ViTMAE masks and shuffles in evaluation too."""
    config = encoder.config
    if config.model_type != "vit_mae":
        yield {}
        return
    mask_ratio, config.mask_ratio = config.mask_ratio, 0.0
    noise = torch.arange(grid[0] * grid[1], device=pixel_values.device, dtype=torch.float32)
    try:
        yield {"noise": noise.expand(len(pixel_values), -1)}  # patches are sorted by their noise
    finally:
        config.mask_ratio = mask_ratio


class LayerGraphs:
    """Graphs between patches, added up over layers and heads while the encoder runs.

    Args:
        batch_size (`int`): Images in the call.
        grid (`tuple[int, int]`): Number of patches along height and width.
        encoder (`nn.Module`): Model whose attention is read.
    """

    def __init__(self, batch_size: int, grid: tuple[int, int], encoder: nn.Module):
        self.encoder, self.num_patches = encoder, grid[0] * grid[1]
        self.total = torch.zeros(batch_size, self.num_patches, self.num_patches)
        self.number = 0  # of graphs per image

    def mean(self) -> torch.Tensor:
        """Averaged graphs, `(batch, patches, patches)`."""
        if not torch.isfinite(self.total).all():
            raise ValueError("The layers have NaN or infinite values: affinities need finite features.")
        return self.total / self.number

    @contextmanager
    def collect(self, layers: list[nn.Module], graph: str) -> Iterator[None]:
        """Adds the graphs of the calls in the `with` block; leaves no hook behind."""
        with ExitStack() as cleanup:
            if graph == "qk":
                # Other implementations compute no attention weights.
                implementation = self.encoder.config._attn_implementation
                cleanup.callback(self.encoder.set_attn_implementation, implementation)
                self.encoder.set_attn_implementation("eager")
                modules, hook = layers, self.add_attention
            elif graph == "vv":
                modules, hook = [value_projection(layer) for layer in layers], self.add_values
            else:
                modules, hook = [block_of(layers[-1], self.encoder)], self.add_features
            for module in modules:
                cleanup.callback(module.register_forward_hook(hook).remove)
            yield

    def add_attention(self, module: nn.Module, args: tuple, output: tuple) -> None:
        weights = output[1].float()  # (batch, heads, tokens, tokens)
        first = self.num_prefix_tokens(weights.shape[0], weights.shape[2])
        weights = weights[:, :, first:, first:]
        walks = weights / weights.sum(dim=-1, keepdim=True).clamp_min(MIN_DEGREE)
        self.total += walks.sum(dim=1).cpu()
        self.number += weights.shape[1]

    def add_values(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        self.add_similarities(output.unflatten(-1, (self.encoder.config.num_attention_heads, -1)).transpose(1, 2))

    def add_features(self, module: nn.Module, args: tuple, output: Any) -> None:
        hidden_states = output if isinstance(output, torch.Tensor) else output[0]
        self.add_similarities(hidden_states.unsqueeze(1))

    def add_similarities(self, tokens: torch.Tensor) -> None:
        """Adds exp(cosine / temperature), row-normalised, of tokens `(batch, heads, tokens, dim)`."""
        first = self.num_prefix_tokens(tokens.shape[0], tokens.shape[2])
        tokens = tokens[:, :, first:].float().cpu()
        for total, image in zip(self.total, tokens):
            total += sum_of_walks(*cosine_factors(image, image, TEMPERATURE))
        self.number += tokens.shape[1]

    def num_prefix_tokens(self, batch_size: int, num_tokens: int) -> int:
        """Class and register tokens, which stand before the patches."""
        number = num_tokens - self.num_patches
        limit = MAX_EXTRA_TOKENS + (getattr(self.encoder.config, "num_register_tokens", None) or 0)
        if batch_size != len(self.total) or not 0 <= number <= limit:
            raise ValueError(
                f"The attention of {type(self.encoder).__name__} is not over one grid of patches: a layer has {batch_size} x "
                f"{num_tokens} tokens for {len(self.total)} images of {self.num_patches} patches."
            )
        return number


def value_projection(layer: nn.Module) -> nn.Module:
    return next(getattr(layer, name) for name in VALUE_PROJECTIONS if hasattr(layer, name))


def block_of(layer: nn.Module, encoder: nn.Module) -> nn.Module:
    """The block that an attention module is in: the innermost member of a `ModuleList` around it."""
    lists = [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]
    return [block for blocks in lists for block in blocks if any(layer is module for module in block.modules())][-1]


def describe_regions(labels: np.ndarray, embedding: torch.Tensor, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Name, mean silhouette and mask of every region of a map `(height, width)`; `size` is `(width, height)` of the masks."""
    numbers = range(int(labels.max()) + 1)
    scores = np.zeros(labels.size)
    if 2 <= len(numbers) < labels.size:  # otherwise there are no silhouettes
        metrics = require_module("sklearn.metrics")
        scores = metrics.silhouette_samples(check_points(embedding), labels.flatten())
    picture = np.asarray(Image.fromarray(labels.astype(np.int32)).resize(size, Image.Resampling.NEAREST))
    return [
        {
            "label": f"region {number}",
            "score": float(scores[labels.flatten() == number].mean()),
            "mask": Image.fromarray(np.where(picture == number, 255, 0).astype(np.uint8)),
        }
        for number in numbers
    ]


def draw_components(embedding: torch.Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Image.Image:
    """Components 2 to 4 of an embedding `(patches, components)` as colours; principal ones where there are fewer than 4."""
    colours = color_components(embedding, "components" if embedding.shape[1] >= 4 else "pca")
    low, high = colours.amin(dim=0), colours.amax(dim=0)
    colours = (colours - low) / (high - low).clamp_min(1e-12)
    picture = Image.fromarray((255 * colours.view(*grid, 3)).round().byte().numpy())
    return picture.resize(size, Image.Resampling.BILINEAR)


# Copied from hf_decayed.spectral.graphs.cosine_factors
def cosine_factors(tokens: torch.Tensor, others: torch.Tensor, temperature: float = TEMPERATURE):
    """Unit tokens divided by `temperature`, and unit tokens: the product is cosine similarities over `temperature`."""
    return F.normalize(tokens, dim=-1) / temperature, F.normalize(others, dim=-1)


# Copied from hf_decayed.spectral.graphs.sum_of_walks
def sum_of_walks(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sum over heads of `softmax(rows columns^T)`, `(patches, other patches)`, in memory for a few heads at a time.

    Buffers are reused: for large graphs, allocating memory takes longer than the arithmetic.

    Args:
        rows, columns (`torch.Tensor`): `(heads, patches, dim)`, scaled by `query_key_factors` or `cosine_factors`.
    """
    size = rows.shape[1] * columns.shape[1]
    step = min(len(rows), max(1, CHUNK_ENTRIES // size))
    logits = torch.empty(step, rows.shape[1], columns.shape[1])
    total = torch.zeros(rows.shape[1], columns.shape[1])
    for first in range(0, len(rows), step):
        last = min(first + step, len(rows))
        chunk = logits[: last - first]
        torch.bmm(rows[first:last], columns[first:last].mT, out=chunk)
        torch.softmax(chunk, dim=-1, out=chunk)
        for head in chunk:
            total += head
    return total


# Copied from hf_decayed.spectral.graphs.symmetric_normalize
def symmetric_normalize(affinities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`D^-1/2 S D^-1/2` with `S = (A + A^T) / 2`, and the diagonal of `D^1/2`. Its eigenvalues lie in [-1, 1]."""
    symmetric = (affinities + affinities.mT) / 2
    sqrt_degrees = symmetric.sum(dim=-1).clamp_min(MIN_DEGREE).sqrt()
    return symmetric / sqrt_degrees.unsqueeze(-1) / sqrt_degrees.unsqueeze(-2), sqrt_degrees


# Copied from hf_decayed.spectral.solvers.Spectrum
@dataclass
class Spectrum:
    """Leading solutions of `A x = lambda D x`, the largest eigenvalue first.

    Args:
        eigenvalues (`torch.Tensor`): `(components,)`, at most 1.
        eigenvectors (`torch.Tensor`): `(patches, components)`, with `X^T D X = patches * I` for degrees of mean 1: the first
            is constant, entries are about 1, signs are fixed.
    """

    eigenvalues: torch.Tensor
    eigenvectors: torch.Tensor


# Copied from hf_decayed.spectral.solvers.check_components
def check_components(n_components: int, num_patches: int) -> None:
    if not 1 <= n_components <= num_patches:
        raise ValueError(f"`n_components` must be between 1 and the {num_patches} patches, got {n_components}.")


# Copied from hf_decayed.spectral.solvers.exact_eigenvectors
def exact_eigenvectors(graph: torch.Tensor, n_components: int) -> Spectrum:
    """Leading eigenvectors of a dense graph `(patches, patches)`, which is symmetrised first."""
    check_components(n_components, len(graph))
    normalized, sqrt_degrees = symmetric_normalize(graph)
    matrix = normalized.cpu().numpy()
    if len(matrix) <= MAX_DENSE_SIZE or n_components > len(matrix) // 4:
        linalg = require_module("scipy.linalg")
        first = len(matrix) - n_components
        values, vectors = linalg.eigh(matrix, subset_by_index=[first, len(matrix) - 1], check_finite=False)
    else:
        values, vectors = lanczos(matrix, n_components, sqrt_degrees.cpu().numpy())
    return scale_spectrum(values, vectors, sqrt_degrees.cpu().numpy())


# Copied from hf_decayed.spectral.solvers.lanczos
def lanczos(matrix: Any, n_components: int, sqrt_degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`scipy.sparse.linalg.eigsh` from a start vector that is the same in every run.

    The leading eigenvector alone, `sqrt_degrees`, would be a bad start: Lanczos would never leave it.
    """
    linalg = require_module("scipy.sparse.linalg")
    noise = np.random.default_rng(0).standard_normal(len(sqrt_degrees))
    start = (sqrt_degrees / np.linalg.norm(sqrt_degrees) + noise / np.linalg.norm(noise)).astype(matrix.dtype)
    try:
        return linalg.eigsh(matrix, n_components, which="LA", v0=start, tol=1e-4, ncv=2 * n_components + 10)
    except linalg.ArpackNoConvergence as error:
        raise ValueError(
            f"Lanczos iterations found no {n_components} components: choose fewer, or more edges."
        ) from error


# Copied from hf_decayed.spectral.solvers.scale_spectrum
def scale_spectrum(values: np.ndarray, vectors: np.ndarray, sqrt_degrees: np.ndarray) -> Spectrum:
    """Eigenvectors of `D^-1 A` from those of `D^-1/2 A D^-1/2`, sorted and scaled so that the first is all ones."""
    order = np.argsort(-values)
    vectors = vectors[:, order] / sqrt_degrees[:, None] * np.linalg.norm(sqrt_degrees)
    eigenvectors = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
    return Spectrum(torch.from_numpy(values[order].astype(np.float32)), fix_signs(eigenvectors))


# Copied from hf_decayed.spectral.solvers.fix_signs
def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Every column with the sign that makes its sum of cubes positive; solvers return either sign."""
    return vectors * torch.where(vectors.pow(3).sum(dim=0) < 0, -1.0, 1.0)


# Copied from hf_decayed.spectral.regions.Clusters
@dataclass
class Clusters:
    """K-means clusters of points.

    Args:
        labels (`torch.Tensor`): `(points,)`, cluster of each point.
        k_means (`sklearn.cluster.KMeans`): The fitted estimator, whose labels the silhouette was measured on.
        silhouettes (`dict[int, float]`): Silhouette of every number of clusters that was tried.
    """

    labels: torch.Tensor
    k_means: Any
    silhouettes: dict[int, float]


# Copied from hf_decayed.spectral.regions.check_points
def check_points(points: torch.Tensor) -> np.ndarray:
    """Points `(number, dim)` as a float32 array; all finite."""
    if points.ndim != 2:
        raise ValueError(f"Points must have the shape (number, dim), got {tuple(points.shape)}.")
    if not torch.isfinite(points).all():
        raise ValueError("Points have NaN or infinite values, which cannot be clustered.")
    return np.ascontiguousarray(points.detach().cpu().float().numpy())


# Copied from hf_decayed.spectral.regions.k_means_clusters
def k_means_clusters(
    points: torch.Tensor, n_clusters: int, seed: int = 0, n_init: int = 3, mini_batch: bool = False
) -> Clusters:
    """K-means with `n_clusters` clusters of points `(number, dim)`; `mini_batch` for more points than fit a full pass."""
    if not 1 <= n_clusters <= len(points):
        raise ValueError(f"`n_clusters` must be between 1 and the {len(points)} points, got {n_clusters}.")
    cluster = require_module("sklearn.cluster")
    if mini_batch:
        k_means = cluster.MiniBatchKMeans(n_clusters, n_init=n_init, batch_size=4096, random_state=seed)
    else:
        k_means = cluster.KMeans(n_clusters, n_init=n_init, random_state=seed)
    k_means.fit(check_points(points))
    return Clusters(torch.from_numpy(k_means.labels_).long(), k_means, {})


# Copied from hf_decayed.spectral.regions.best_silhouette_clusters
def best_silhouette_clusters(
    points: torch.Tensor, candidates: Iterable[int] = range(2, 11), seed: int = 0, n_init: int = 3
) -> Clusters:
    """K-means with the number of clusters whose silhouette is best; the clusters are those that it was measured on.

    Args:
        points (`torch.Tensor`): `(number, dim)`. Candidates that are not below the number of points are left out.
    """
    candidates = [number for number in candidates if 2 <= number < len(points)]
    if not candidates:
        raise ValueError(
            f"A silhouette needs 2 clusters and more points than clusters; there are {len(points)} points."
        )
    array = check_points(points)
    if not np.ptp(array, axis=0).any():
        raise ValueError("All points are equal: there is nothing to cluster.")
    sample = np.arange(len(array))
    if len(array) > MAX_SILHOUETTE_POINTS:
        sample = np.random.default_rng(seed).choice(len(array), MAX_SILHOUETTE_POINTS, replace=False)
    metrics = require_module("sklearn.metrics")
    distances = metrics.pairwise_distances(array[sample])
    np.fill_diagonal(distances, 0)
    best, silhouettes = None, {}
    for number in candidates:
        clusters = k_means_clusters(points, number, seed, n_init)
        labels = clusters.labels.numpy()[sample]
        if not 2 <= len(np.unique(labels)) < len(labels):  # of a sample, or of points that are equal
            continue
        silhouettes[number] = float(metrics.silhouette_score(distances, labels, metric="precomputed"))
        if best is None or silhouettes[number] > max(best.silhouettes.values()):
            best = Clusters(clusters.labels, clusters.k_means, {number: silhouettes[number]})
    if best is None:
        raise ValueError("Too few points are different: no number of clusters has a silhouette.")
    best.silhouettes = silhouettes
    return best


# Copied from hf_decayed.spectral.regions.color_components
def color_components(points: torch.Tensor, method: str) -> torch.Tensor:
    """Three numbers per point, `(number, 3)`; missing principal components are zero."""
    if method == "components":
        if points.shape[1] < 4:
            raise ValueError(f"`method='components'` needs 4 components, got {points.shape[1]}: choose 'pca'.")
        return points[:, 1:4]
    if method != "pca":
        raise ValueError(f"`method` must be 'components' or 'pca', got {method!r}.")
    centred = (points - points.mean(dim=0)).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    directions = directions.flip(1)[:, :3]
    directions = directions * torch.where(directions.sum(dim=0) < 0, -1.0, 1.0)
    colours = (centred @ directions).float()
    return torch.nn.functional.pad(colours, (0, 3 - colours.shape[1]))


# Copied from hf_decayed.spectral.segmenter.sort_by_area
def sort_by_area(labels: np.ndarray) -> np.ndarray:
    """The same regions, numbered from 0 by falling area: k-means numbers them at random."""
    _, numbers, areas = np.unique(labels, return_inverse=True, return_counts=True)
    ranks = np.empty(len(areas), dtype=np.int64)
    ranks[np.argsort(-areas, kind="stable")] = np.arange(len(areas))
    return ranks[numbers].reshape(labels.shape)
