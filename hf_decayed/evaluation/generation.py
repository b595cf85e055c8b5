"""Judging generated images: features of real and generated ones, and how far apart they lie.

    encode, identity = image_features("facebook/dinov2-base")
    real, generated = (extract_features(encode, each, "outputs/features", ...) for each in (real_images, samples))
    scores(real, generated, ["frechet", "kid", "prdc"])

A distance is a number of one feature network, one number of samples and one reference. Only on Inception's features is it
the FID that papers report; on others it has another name.
"""

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel

from ..data.shards import Encoder
from ..errors import DataError
from ..provenance import model_fingerprint
from .features import transformer_encoder
from .frechet import check_pair, distance_from, kernel_distance, neighbours


METRICS = ("frechet", "kid", "prdc")
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def pixel_features(images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] averaged down to 8 x 8 and flattened: crude features that need no trained network."""
    return F.adaptive_avg_pool2d(images.float(), 8).flatten(1)


def image_features(network: str = "pixels", device="cpu", revision: str | None = None) -> tuple[Encoder, str]:
    """An encoder of images in [0, 1], and what it depends on.

    `pixels` are [`pixel_features`]; `inception` is the network of FID and Inception Score, from torch-fidelity, which
    downloads its weights; anything else is a folder or repository that `AutoModel` loads. All in float32.
    """
    if network == "pixels":
        return lambda images, places: {"features": pixel_features(images)}, "pixels averaged to 8 x 8"
    if network == "inception":
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise DataError("Inception's features need torch-fidelity: pip install 'hf_decayed[fid]'.") from error
        inception = FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"]).to(device)
        return inception_encoder(inception), "inception-v3-compat of torch-fidelity"
    model = AutoModel.from_pretrained(network, revision=revision, dtype=torch.float32).to(device)
    processor = AutoImageProcessor.from_pretrained(network, revision=revision)
    pooling = getattr(model.config, "pooling", "mean")
    encode = transformer_encoder(model, [f"last.{pooling}"])
    channels = getattr(model.config, "num_channels", 3)

    def encode_prepared(images, places):
        arrays = list(in_bytes(images, channels).permute(0, 2, 3, 1).cpu().numpy())
        prepared = processor(arrays, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        with torch.autocast(images.device.type, enabled=False):
            (features,) = encode(prepared.to(device), places).values()
        return {"features": features}

    preparation = hashlib.sha256(processor.to_json_string().encode()).hexdigest()[:8]
    return (
        encode_prepared,
        f"{type(model).__name__} {model_fingerprint(model)}, last.{pooling}, processor {preparation}",
    )


def inception_encoder(inception: torch.nn.Module) -> Encoder:
    def encode(images, places):
        with torch.autocast(images.device.type, enabled=False):
            features, logits = inception(in_bytes(images, 3))
        return {"features": features, "logits": logits}

    return encode


def in_bytes(images: torch.Tensor, channels: int) -> torch.Tensor:
    """Images in [0, 1] as bytes; grey ones in colour where so many channels are wanted, and the other way round."""
    if images.shape[1] != channels:
        images = images.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1)
    return (255 * images).round().to(torch.uint8)


class SampledImages(torch.utils.data.Dataset):
    """Samples that lie on the disk, as [`extract_features`] takes them: a folder of images, or bytes in an `.npz` file."""

    def __init__(self, path: str | Path):
        path = Path(path)
        record = path / "sampling.json"
        if record.exists() and not json.loads(record.read_text()).get("finished"):
            raise DataError(f"'{path}' holds samples that are not finished: give the command that draws them again.")
        if path.is_dir() and (path / "samples.npz").exists():
            path = path / "samples.npz"
        if path.is_dir():
            folder = path / "images" if (path / "images").is_dir() else path
            self.images = sorted(each for each in folder.iterdir() if each.suffix.lower() in IMAGE_FILES)
            if not self.images:
                raise DataError(f"'{path}' holds no images.")
            digest = hashlib.sha256()
            for each in self.images:
                digest.update(each.read_bytes())
        else:
            with np.load(path) as arrays:  # no pickles: numpy's own default
                if "arr_0" not in arrays or arrays["arr_0"].dtype != np.uint8 or arrays["arr_0"].ndim != 4:
                    raise DataError(f"'{path.name}' has no bytes `(number, height, width, channels)` under `arr_0`.")
                self.images = arrays["arr_0"]
            digest = hashlib.sha256(self.images)
        self.fingerprint = digest.hexdigest()[:16]
        self.first_shape = self[0].shape

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width, of the first."""
        height, width, channels = self.first_shape
        return channels, height, width

    def __getitem__(self, place: int) -> np.ndarray:
        image = self.images[place]
        if isinstance(image, Path):
            image = Image.open(image)
            image = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return image if image.ndim == 3 else image[..., None]

    def __getitems__(self, places: list[int]) -> dict[str, torch.Tensor]:
        images = [self[place] for place in places]
        for place, image in zip(places, images):
            if image.shape != self.first_shape:
                raise DataError(
                    f"Samples must have one shape: number {place} is {image.shape} (height, width, channels), the first "
                    f"{self.first_shape}."
                )
        return {
            "pixel_values": torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255,
            "labels": torch.full((len(places),), -1),
            "places": torch.tensor(places),
            "checksums": torch.tensor([zlib.crc32(image.tobytes()) for image in images]),
        }


def scores(
    real: dict[str, torch.Tensor],
    generated: dict[str, torch.Tensor],
    metrics: list[str],
    name: str | None = None,
    bootstraps: int = 20,
    subset_size: int = 1000,
    k: int = 5,
    most_neighbours: int = 10_000,
    seed: int = 0,
) -> dict[str, float]:
    """How far the features of generated images are from those of real ones; each distance with its `_spread`.

    Args:
        real, generated (`dict`): `features` of each, and Inception's `logits`.
        name (`str`, *optional*): Of the features, in the names of what is returned. Without one they are Inception's: FID,
            KID and Inception Score.
        bootstraps (`int`): Draws of as many generated samples, with repeats, whose deviation is the Frechet distance's
            spread.
        subset_size (`int`): For the kernel distance; at most half of the smaller set, so that subsets differ.
        k (`int`): The neighbour that sets the reach for precision, recall, density and coverage.
        most_neighbours (`int`): These compare everything with everything, so they take at most so many of each.
    """
    found = {}
    real_features, features = real["features"], generated["features"]
    check_pair(real_features, features, at_least=max(4, k + 1))
    generator = torch.Generator().manual_seed(seed)
    if "frechet" in metrics:
        label = f"frechet_{name}" if name else "fid"
        distance = distance_from(real_features)
        found[label] = distance(features)
        draws = [torch.randint(len(features), (len(features),), generator=generator) for _ in range(bootstraps)]
        found[f"{label}_spread"] = float(np.std([distance(features[draw]) for draw in draws]))
    if "kid" in metrics:
        label = f"kernel_distance_{name}" if name else "kid"
        size = min(subset_size, min(len(real_features), len(features)) // 2)
        found[label], found[f"{label}_spread"] = kernel_distance(
            real_features, features, subset_size=size, generator=generator
        )
    if "prdc" in metrics:
        pair = [
            each[torch.randperm(len(each), generator=generator)[:most_neighbours]]
            for each in (real_features, features)
        ]
        precision, density, coverage = neighbours(pair[1], pair[0], k)
        recall = neighbours(pair[0], pair[1], k)[0]
        found |= {"precision": precision, "recall": recall, "density": density, "coverage": coverage}
    if name is None and "logits" in generated:
        found["inception_score"], found["inception_score_spread"] = inception_score(generated["logits"], seed=seed)
    return found


@torch.no_grad()
def inception_score(logits: torch.Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Inception Score (Salimans et al., 2016) of `(number, classes)` logits: mean and deviation over as many parts."""
    logits = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))].double()
    parts = []
    for part in logits.tensor_split(min(splits, len(logits))):
        log_probabilities = part.log_softmax(dim=1)
        log_marginal = log_probabilities.logsumexp(dim=0) - np.log(len(part))
        divergences = (log_probabilities.exp() * (log_probabilities - log_marginal)).sum(dim=1)
        parts.append(divergences.mean().exp())
    parts = torch.stack(parts)
    return float(parts.mean()), float(parts.std(correction=0))
