"""Regions of an image from a frozen vision model: attention of all layers, spectral clustering, pictures.

>>> segmenter = Segmenter.from_pretrained("facebook/dinov2-base")
>>> segmentation = segmenter(image)
>>> segmentation.labels, segmentation.rgb
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

from ..errors import UserError, explain_loading_errors
from ..evaluation.features import unmasked_inputs
from ..plots import denormalize
from .capture import record_attention
from .clustering import GRAPHS, LayerSpectralClustering
from .regions import components_to_rgb


__all__ = ["Segmenter"]

RECORDED = {"qk": ("query", "key"), "vv": ("value",), "features": ("hidden_states",)}
# Well apart for readers with and without full colour vision (Okabe and Ito), then further ones.
PALETTE = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (86, 180, 233))
PALETTE += ((213, 94, 0), (120, 94, 240), (128, 128, 128), (20, 20, 20))
MAX_REGIONS = 256  # values of a byte
# All others, so that Pillow saves a byte per pixel: with a short palette it drops the upper bits. 101 has no factor in common with 256.
PALETTE += tuple(
    ((101 * number + 7) % 256, 53 * number % 256, 197 * number % 256) for number in range(10, MAX_REGIONS)
)


@dataclass(frozen=True)
class Segmentation:
    """Regions of one image.

    Args:
        image (`PIL.Image.Image`): What the model saw, before normalisation.
        labels (`np.ndarray` of shape `(height, width)`): Region of every patch, numbered from 0 by falling area.
        embedding (`torch.Tensor` of shape `(patches, components)`): Spectral embedding that regions are clusters of.
        silhouettes (`dict[int, float]`): Silhouette of every number of regions that was tried.
    """

    image: Image.Image
    labels: np.ndarray
    embedding: torch.Tensor
    silhouettes: dict[int, float]

    @property
    def grid(self) -> tuple[int, int]:
        return self.labels.shape[0], self.labels.shape[1]

    @property
    def mask(self) -> Image.Image:
        """Regions at the size of the image, as a picture with a palette: the value of a pixel is the number of its region."""
        picture = Image.fromarray(self.labels.astype(np.uint8)).resize(self.image.size, Image.Resampling.NEAREST)
        picture.putpalette([value for colour in PALETTE for value in colour])
        return picture

    @property
    def overlay(self) -> Image.Image:
        """The image with its regions in colour."""
        return Image.blend(self.image.convert("RGB"), self.mask.convert("RGB"), 0.5)

    @property
    def rgb(self) -> Image.Image:
        """Components 2 to 4 of the embedding as colours."""
        return rgb_pictures([self])[0]


class Segmenter:
    """Divides images into regions by the layers of a vision model, without labels and without training.

    Args:
        model: A vision encoder of transformers; see [`record_attention`] for those whose attention can be read.
        processor: The image processor of the model.
        graph (`str`, defaults to `"vv"`): `vv` (what), `qk` (where) or `features`, those of the last of the layers.
        layers: As [`record_attention`] takes them; by default all.
        settings: Arguments of [`LayerSpectralClustering`], such as `n_clusters` and `solver`.
    """

    def __init__(self, model: torch.nn.Module, processor, graph: str = "vv", layers=None, **settings):
        if graph not in GRAPHS:
            raise UserError(f"`graph` must be one of {', '.join(GRAPHS)}, got '{graph}'.")
        if (settings.get("n_clusters") or 0) > MAX_REGIONS:
            raise UserError(f"`n_clusters` must be at most {MAX_REGIONS}, got {settings['n_clusters']}.")
        self.model, self.processor, self.graph = model.eval(), processor, graph
        self.layers = -1 if layers is None and graph == "features" else layers
        self.clustering = LayerSpectralClustering(graph=graph, **settings)

    @classmethod
    def from_pretrained(
        cls, model: str, revision: str | None = None, trust_remote_code: bool = False, **settings
    ) -> "Segmenter":
        """Loads the model and its image processor from a folder or repository."""
        origin = {"revision": revision, "trust_remote_code": trust_remote_code}
        with explain_loading_errors(model):
            network = AutoModel.from_pretrained(model, dtype=torch.float32, **origin)
            network = getattr(network, "vision_model", network)  # for CLIP and similar models
            processor = AutoImageProcessor.from_pretrained(model, **origin)
        return cls(network, processor, **settings)

    @torch.no_grad()
    def features(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """Features of the patches after the last layer, layer-normalised, `(patches, dim)`; and the grid of the patches."""
        with record_attention(self.model, -1, "hidden_states") as record:
            self.run(self.pixel_values(image))
        states = record.layers[-1].hidden_states[0].float()
        return F.layer_norm(states, states.shape[-1:]), record.layers[-1].grid

    @torch.no_grad()
    def __call__(self, image: Image.Image) -> Segmentation:
        pixel_values = self.pixel_values(image)
        with record_attention(self.model, self.layers, RECORDED[self.graph]) as record:
            self.run(pixel_values)
        layers: list[Any] = list(record.layers)
        grid = None
        if self.graph == "features":  # the block's output, not the attention's, which features of a record are
            grid, layers = layers[-1].grid, [layers[-1].hidden_states[0].float()]
        labels = self.clustering.fit_predict(layers, grid=grid)
        return Segmentation(
            image=to_picture(denormalize(pixel_values, self.processor)[0]),
            labels=sort_by_area(labels.numpy()),
            embedding=self.clustering.embedding_,
            silhouettes=self.clustering.silhouettes_,
        )

    def run(self, pixel_values: torch.Tensor) -> None:
        """Calls the model on all patches, in order."""
        pixel_values = pixel_values.to(self.model.device)
        self.model(pixel_values, **unmasked_inputs(self.model, pixel_values))

    def pixel_values(self, image: Image.Image) -> torch.Tensor:
        channels = getattr(self.model.config, "num_channels", 3)
        if channels == 1:
            pixels = np.asarray(image.convert("L"))[:, :, None]
            return self.processor([pixels], return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        return self.processor([image.convert("RGB")], return_tensors="pt")["pixel_values"]


def to_picture(pixels: torch.Tensor) -> Image.Image:
    """A picture from pixels `(height, width, channels)` in [0, 1]."""
    values = (255 * pixels).round().byte().numpy()
    return Image.fromarray(values.squeeze(2) if values.shape[2] == 1 else values)


def sort_by_area(labels: np.ndarray) -> np.ndarray:
    """The same regions, numbered from 0 by falling area: k-means numbers them at random."""
    _, numbers, areas = np.unique(labels, return_inverse=True, return_counts=True)
    ranks = np.empty(len(areas), dtype=np.int64)
    ranks[np.argsort(-areas, kind="stable")] = np.arange(len(areas))
    return ranks[numbers].reshape(labels.shape)


def rgb_pictures(segmentations: list[Segmentation]) -> list[Image.Image]:
    """Embeddings as colours at the size of the images; PCA over all of them where there are few components."""
    embeddings = [segmentation.embedding for segmentation in segmentations]
    method = "components" if min(embedding.shape[1] for embedding in embeddings) >= 4 else "pca"
    colours = components_to_rgb(embeddings, [segmentation.grid for segmentation in segmentations], method)
    return [
        to_picture(colour).resize(segmentation.image.size, Image.Resampling.BILINEAR)
        for colour, segmentation in zip(colours, segmentations)
    ]
