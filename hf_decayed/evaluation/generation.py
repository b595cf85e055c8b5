"""Evaluation of generated images: features of real and generated images, and the distances between the two sets.

    >>> encode, identity = image_features("facebook/dinov2-base")
    >>> real = extract_features(encode, real_images, "outputs/features", {"network": identity, "images": "real"})
    >>> generated = extract_features(encode, samples, "outputs/features", {"network": identity, "images": "generated"})
    >>> sample_scores(real, generated, ["frechet", "kid", "prdc"], name="dinov2-base")

A distance depends on the feature network, the number of samples and the reference. With Inception's features it is the FID
that papers report; with other features it has another name.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

from ..data.datasets import EvaluationDataset
from ..data.decoding import is_grey
from ..data.shards import Encoder
from ..data.sources import ImageSplits
from ..data.transforms import CenterCropProcessor
from ..errors import DataError, UserError, explain_loading_errors
from ..models.image_processing_decayed import to_pixels
from ..provenance import model_fingerprint
from .encoders import count_skipped
from .features import Extraction, hash_json, transformer_encoder
from .frechet import check_pair, distance_from, kernel_distance, neighbours


SAMPLE_METRICS = ("frechet", "kid", "prdc")
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class SampleMetrics:
    """Metrics of samples, and their settings.

    Args:
        metrics (`Sequence[str]`): Some of `frechet`, `kid` and `prdc`.
        bootstraps (`int`), seed (`int`): Arguments of [`sample_scores`].
    """

    metrics: Sequence[str] = SAMPLE_METRICS
    bootstraps: int = 20
    seed: int = 0

    def protocol(self) -> dict[str, str]:
        """The settings, as results record them."""
        texts = {
            "frechet": f"spread: deviation over {self.bootstraps} bootstraps of the samples",
            "kid": "unbiased, cubic kernel, 100 subsets of 1000, or of half the smaller set; spread: deviation over subsets",
            "prdc": "5 neighbours, of at most 10000 images each",
        }
        return {metric: texts[metric] for metric in self.metrics}


def evaluate_samples(
    samples: "SampledImages",
    reference: "ImageSplits | SampledImages",
    label: str,
    feature_net: str = "pixels",
    metrics: SampleMetrics | None = None,
    extraction: Extraction | None = None,
    accelerator: Accelerator | None = None,
    feature_net_revision: str | None = None,
) -> dict:
    """Distances between samples and real images, with protocol and data set; all processes call it.

    Args:
        samples (`SampledImages`): Generated images.
        reference (`ImageSplits` or `SampledImages`):
            Real images: the training images of a data set, cropped to the size of the samples, or a folder or file of
            images. Held-out images of a data set get a row too, for scale: the distance between two sets of real
            images.
        label (`str`): Names the row of the samples.
        feature_net (`str`), feature_net_revision (`str`, *optional*): Arguments of [`image_features`].
    """
    metrics, extraction = metrics or SampleMetrics(), extraction or Extraction()
    accelerator = accelerator or Accelerator()
    encode, network = image_features(feature_net, accelerator.device, feature_net_revision)
    sets: dict[str, tuple] = {"samples": (samples, samples.fingerprint)}
    sets |= reference_sets(reference, samples.shape, extraction.on_bad_image)
    features = {
        name: extraction.extract(
            encode, images, {"network": network, "images": identity}, accelerator, f"features of {name}"
        )
        for name, (images, identity) in sets.items()
    }
    generated, real, *held_out = features.values()
    name = {"inception": None, "pixels": "pixels"}.get(feature_net, Path(feature_net).name)
    rows = {}
    if accelerator.is_main_process:
        rows[label] = sample_scores(real, generated, name=name, **asdict(metrics))
        for held_out_features in held_out:
            row = f"{len(held_out_features['labels'])} held-out images"
            rows[row] = sample_scores(real, held_out_features, name=name, **asdict(metrics))
    is_dataset = isinstance(reference, ImageSplits)
    preparation = f"the middle of each, {samples.shape[1]} x {samples.shape[2]}" if is_dataset else "as they lie"
    return {
        "rows": rows,
        "protocol": {
            "features": network,
            "reference": f"{len(real['labels'])} images, {preparation}",
            "samples": len(samples),
            **metrics.protocol(),
            **({"inception_score": "10 parts in random order"} if name is None else {}),
            "precision": "float32",
            "seed": metrics.seed,
        },
        "dataset": {
            "name": reference.name,
            **({"held_out": reference.held_out_rule} if is_dataset else {}),
            "number": len(real["labels"]),
            "fingerprint": hash_json(real["checksums"].tolist()),
            "samples": samples.fingerprint,
            **count_skipped(
                {name: (len(images), len(features[name]["labels"])) for name, (images, _) in sets.items()}
            ),
        },
    }


def reference_sets(
    reference: "ImageSplits | SampledImages", shape: tuple[int, int, int], on_bad_image: str
) -> dict[str, tuple[torch.utils.data.Dataset, object]]:
    """Real images by name, each set with its identity: the reference, then the held-out images of a data set.

    `shape` is that of the samples, (channels, height, width): images of a data set are cropped to it.
    """
    if isinstance(reference, SampledImages):
        if reference.shape != shape:
            raise UserError(f"Samples are {shape} (channels, height, width), the reference {reference.shape}.")
        return {"reference": (reference, reference.fingerprint)}
    channels, height, width = shape
    crop = CenterCropProcessor(height, width)
    return {
        name: (
            EvaluationDataset(rows, reference.image_column, None, crop, channels, on_bad_image),
            [rows._fingerprint, reference.image_column, channels, crop.to_json_string()],
        )
        for name, rows in (("train", reference.train), ("held-out", reference.held_out))
    }


def pixel_features(images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] averaged down to 8 x 8 and flattened: crude features that need no trained network."""
    return F.adaptive_avg_pool2d(images.float(), 8).flatten(1)


def image_features(network: str = "pixels", device="cpu", revision: str | None = None) -> tuple[Encoder, str]:
    """An encoder of images in [0, 1], and a text that identifies it. Features are float32.

    `pixels` are [`pixel_features`]; `inception` is the network of FID and Inception Score, from torch-fidelity, which
    downloads its weights; anything else is a folder or repository that `AutoModel` loads.
    """
    if network == "pixels":
        return lambda images, indices: {"features": pixel_features(images)}, "pixels averaged to 8 x 8"
    if network == "inception":
        inception = require_inception()("inception-v3-compat", ["2048", "logits_unbiased"]).to(device)
        return inception_encoder(inception), "inception-v3-compat of torch-fidelity"
    with explain_loading_errors(network):
        model = AutoModel.from_pretrained(network, revision=revision, dtype=torch.float32).to(device)
        processor = AutoImageProcessor.from_pretrained(network, revision=revision)
    pooling = getattr(model.config, "pooling", "mean")
    encode = transformer_encoder(model, [f"last.{pooling}"])
    num_channels = getattr(model.config, "num_channels", 3)

    @torch.no_grad()
    def encode_images(images, indices):
        arrays = list(to_bytes(images, num_channels).permute(0, 2, 3, 1).cpu().numpy())
        pixel_values = processor(arrays, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        with torch.autocast(images.device.type, enabled=False):
            (features,) = encode(pixel_values.to(device), indices).values()
        return {"features": features}

    preparation = hashlib.sha256(processor.to_json_string().encode()).hexdigest()[:8]
    identity = f"{type(model).__name__} {model_fingerprint(model)}, last.{pooling}, processor {preparation}"
    return encode_images, identity


def require_inception() -> type:
    """torch-fidelity's Inception network; only the extra `fid` has it."""
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise UserError("Inception's features need torch-fidelity: pip install 'hf_decayed[fid]'.") from error
    return FeatureExtractorInceptionV3


def inception_encoder(inception: torch.nn.Module) -> Encoder:
    def encode(images, indices):
        with torch.autocast(images.device.type, enabled=False):
            features, logits = inception(to_bytes(images, 3))
        return {"features": features, "logits": logits}

    return encode


def to_bytes(images: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Images in [0, 1] as bytes; grey images become RGB and RGB images grey where `num_channels` differs."""
    if images.shape[1] != num_channels:
        images = images.mean(dim=1, keepdim=True).expand(-1, num_channels, -1, -1)
    return (255 * images).round().to(torch.uint8)


class SampledImages(torch.utils.data.Dataset):
    """Images on disk for [`extract_features`]: a folder of image files, or bytes in an `.npz` file."""

    def __init__(self, path: str | Path):
        path = Path(path)
        self.name = path.name
        record = path / "sampling.json"
        if record.exists() and not json.loads(record.read_text()).get("finished"):
            raise DataError(f"The samples in '{path}' are incomplete: run the command that draws them again.")
        if path.is_dir() and (path / "samples.npz").exists():
            path = path / "samples.npz"
        if path.is_dir():
            folder = path / "images" if (path / "images").is_dir() else path
            self.images = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_FILES)
            if not self.images:
                raise DataError(f"'{path}' holds no images.")
            digest = hashlib.sha256()
            for file in self.images:
                digest.update(file.read_bytes())
        else:
            with np.load(path) as arrays:  # numpy refuses pickles by default
                if "arr_0" not in arrays or arrays["arr_0"].dtype != np.uint8 or arrays["arr_0"].ndim != 4:
                    raise DataError(f"'{path.name}' has no bytes `(number, height, width, channels)` under `arr_0`.")
                self.images = arrays["arr_0"]
            digest = hashlib.sha256(np.ascontiguousarray(self.images))
        self.fingerprint = digest.hexdigest()[:16]
        self.first_shape = self[0].shape

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        height, width, channels = self.first_shape
        return channels, height, width

    def __getitem__(self, index: int) -> np.ndarray:
        image = self.images[index]
        if isinstance(image, Path):
            with Image.open(image) as opened:
                image = to_pixels(opened, 1 if is_grey(opened) else 3)
        return image if image.ndim == 3 else image[..., None]

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        images = [self[index] for index in indices]
        for index, image in zip(indices, images):
            if image.shape != self.first_shape:
                raise DataError(
                    f"Samples must have one shape: number {index} is {image.shape} (height, width, channels), the first "
                    f"{self.first_shape}."
                )
        return {
            "pixel_values": torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255,
            "labels": torch.full((len(indices),), -1),
            "indices": torch.tensor(indices),
            "checksums": torch.tensor([zlib.crc32(image.tobytes()) for image in images]),
        }


def sample_scores(
    real: dict[str, torch.Tensor],
    generated: dict[str, torch.Tensor],
    metrics: Sequence[str],
    name: str | None = None,
    bootstraps: int = 20,
    subset_size: int = 1000,
    k: int = 5,
    max_neighbour_images: int = 10_000,
    seed: int = 0,
) -> dict[str, float]:
    """Distances between the features of generated and of real images; those that are estimates have a `_spread` too.

    Args:
        real, generated (`dict`): `features` of the images, and Inception's `logits`.
        name (`str`, *optional*): Name of the features, for the names of the results. Without a name, the features are
            Inception's, and the results are FID, KID and Inception Score.
        bootstraps (`int`): Resamplings of the generated images, whose standard deviation is the spread of the Frechet
            distance.
        subset_size (`int`): Subset size of the kernel distance; at most half of the smaller set, so that subsets
            differ.
        k (`int`): Neighbour whose distance is the radius for precision, recall, density and coverage.
        max_neighbour_images (`int`): Images per set for these four metrics, which compare all pairs.
    """
    scores = {}
    real_features, features = real["features"], generated["features"]
    check_pair(real_features, features, at_least=max(4, k + 1))
    generator = torch.Generator().manual_seed(seed)
    if "frechet" in metrics:
        metric = f"frechet_{name}" if name else "fid"
        distance = distance_from(real_features)
        scores[metric] = distance(features)
        resamplings = [torch.randint(len(features), (len(features),), generator=generator) for _ in range(bootstraps)]
        scores[f"{metric}_spread"] = float(np.std([distance(features[indices]) for indices in resamplings]))
    if "kid" in metrics:
        metric = f"kernel_distance_{name}" if name else "kid"
        size = min(subset_size, min(len(real_features), len(features)) // 2)
        scores[metric], scores[f"{metric}_spread"] = kernel_distance(
            real_features, features, subset_size=size, generator=generator
        )
    if "prdc" in metrics:
        real_subset, subset = (
            rows[torch.randperm(len(rows), generator=generator)[:max_neighbour_images]]
            for rows in (real_features, features)
        )
        precision, density, coverage = neighbours(subset, real_subset, k)
        recall = neighbours(real_subset, subset, k)[0]
        scores |= {"precision": precision, "recall": recall, "density": density, "coverage": coverage}
    if name is None and "logits" in generated:
        scores["inception_score"], scores["inception_score_spread"] = inception_score(generated["logits"], seed=seed)
    return scores


@torch.no_grad()
def inception_score(logits: torch.Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Inception Score (Salimans et al., 2016) of `(number, classes)` logits: mean and deviation over `splits` parts."""
    logits = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))].double()
    scores = []
    for part in logits.tensor_split(min(splits, len(logits))):
        log_probabilities = part.log_softmax(dim=1)
        log_marginal = log_probabilities.logsumexp(dim=0) - np.log(len(part))
        divergences = (log_probabilities.exp() * (log_probabilities - log_marginal)).sum(dim=1)
        scores.append(divergences.mean().exp())
    scores = torch.stack(scores)
    return float(scores.mean()), float(scores.std(correction=0))
