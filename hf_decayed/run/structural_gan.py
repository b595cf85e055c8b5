"""What `training/structural_gan.py` needs besides its loop: evaluation of features and of samples."""

from pathlib import Path

import torch
from accelerate import Accelerator

from ..data.keyed_random import sample_seed
from ..data.shards import encode_dataset
from ..data.sources import ImageSplits, take_subset
from ..evaluation import frechet_distance, linear_probe
from ..evaluation.clustering import kmeans_metrics, linear_svm
from ..evaluation.features import transformer_encoder, with_pixels
from ..evaluation.generation import pixel_features
from ..plots import save_grid
from .monitors import evaluation_dataset, evaluation_mode, has_classes, nearest_neighbours


SAMPLES_PER_BATCH = 100
# Metrics of the closing table, with their titles.
COMPARED = {"knn_accuracy": "kNN", "kmeans_accuracy": "k-means", "linear_accuracy": "linear probe"}
MAX_SIGMA, NORM_RANGE = 10.0, (0.05, 100.0)  # limits of smoothness and norm of healthy discriminators


class StructuralGANMonitor:
    """kNN, linear probe, SVM and k-means of the discriminator's features, and samples with their distance to real images.

    Features come from held-out images exactly as `hf-decayed evaluate` computes them. Without labels, only samples are
    evaluated.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        splits: ImageSplits,
        processor,
        num_channels: int,
        max_train_samples: int,
        max_eval_samples: int,
        num_images: int = 36,
        on_bad_image: str = "stop",
    ):
        """`num_images` is the number of samples in a picture."""
        self.accelerator, self.num_images = accelerator, num_images
        subsets = (take_subset(splits.train, max_train_samples), take_subset(splits.held_out, max_eval_samples))
        self.bank, self.queries = (
            evaluation_dataset(rows, splits, processor, num_channels, on_bad_image) for rows in subsets
        )
        self.labelled = splits.label_column is not None and has_classes(self.bank, self.queries)
        encode = lambda pixel_values, indices: {"features": pixel_features((pixel_values + 1) / 2)}  # noqa: E731
        self.reference = encode_dataset(encode, self.queries, accelerator, description="held-out images")["features"]
        self.samples: torch.Tensor | None = None  # of the pipeline that was evaluated last

    def evaluate(self, pipeline) -> dict[str, float]:
        return {**self.evaluate_samples(pipeline), **self.evaluate_features(pipeline.discriminator)}

    def evaluate_features(self, model: torch.nn.Module) -> dict[str, float]:
        """Metrics of the features `last.mean`; empty without labels."""
        if not self.labelled:
            return {}
        with evaluation_mode(model):
            encode = transformer_encoder(model.to(self.accelerator.device), ["last.mean"])
            bank, queries = (encode_dataset(encode, images, self.accelerator) for images in (self.bank, self.queries))
        splits = bank["last.mean"], bank["labels"], queries["last.mean"], queries["labels"]
        return {**feature_metrics(bank, queries, "last.mean"), "svm_accuracy": linear_svm(*splits)}

    def evaluate_pixels(self) -> dict[str, float]:
        """The same metrics of raw pixels, except for the SVM, which takes minutes on so many features."""
        if not self.labelled:
            return {}
        encode = with_pixels(lambda pixel_values, indices: {})
        bank, queries = (encode_dataset(encode, images, self.accelerator) for images in (self.bank, self.queries))
        return feature_metrics(bank, queries, "pixels")

    def evaluate_samples(self, pipeline) -> dict[str, float]:
        """Frechet distance between held-out images and as many samples, seeded as `hf-decayed sample` does."""
        network, number = pipeline.generator.to(self.accelerator.device), max(self.num_images, len(self.reference))
        seeds = [sample_seed(0, index) for index in range(number)]
        latents = [torch.randn(network.config.latent_dim, generator=torch.Generator().manual_seed(s)) for s in seeds]
        with evaluation_mode(network):
            batches = torch.stack(latents).to(self.accelerator.device).split(SAMPLES_PER_BATCH)
            samples = torch.cat([(network(batch).sample.float().cpu() + 1) / 2 for batch in batches])
        self.samples = samples if torch.isfinite(samples).all() else None
        if self.samples is None:
            self.accelerator.print("no picture: some samples are not finite")
            return {}
        distance = frechet_distance(self.reference, pixel_features(samples[: len(self.reference)]))
        return {f"frechet_pixels_{len(self.reference)}": distance}

    def picture(self, path: Path) -> None:
        """A grid of the samples that were drawn last."""
        if self.samples is not None and self.accelerator.is_main_process:
            save_grid(path, self.samples[: self.num_images].permute(0, 2, 3, 1).numpy())


def feature_metrics(bank: dict, queries: dict, name: str) -> dict[str, float]:
    splits = bank[name], bank["labels"], queries[name], queries["labels"]
    return {
        "knn_accuracy": nearest_neighbours(bank, queries, name),
        "linear_accuracy": linear_probe(*splits, protocol="ridge"),
        **kmeans_metrics(queries[name], queries["labels"]),
    }


def format_comparison(results: dict[str, dict]) -> str:
    """Feature metrics of one or more runs, the first one's untrained discriminator and pixels; empty without
    labels."""
    first = next(iter(results.values()))
    lines = [
        "features, in percent".ljust(22) + "".join(title.rjust(14) for title in (*results, "untrained", "pixels"))
    ]
    for name, title in COMPARED.items():
        if name in first:
            values = [run[name] for run in results.values()] + [first[f"{name}_untrained"], first[f"{name}_pixels"]]
            lines.append(title.ljust(22) + "".join(f"{100 * value:14.1f}" for value in values))
    return "\n".join(lines) if len(lines) > 1 else ""


def runaway_warning(sigma: float, norm: float, lipschitz: float) -> str | None:
    """A warning if the discriminator's Jacobian or the norm of its embeddings leaves the range of healthy training."""
    if sigma > MAX_SIGMA * lipschitz:
        return f"the Jacobian's norm is {sigma:.3g}, far above {lipschitz:g}: raise --smoothness_weight"
    if not NORM_RANGE[0] <= norm <= NORM_RANGE[1]:
        advice = "raise --norm_weight" if norm < NORM_RANGE[0] else "use --hinge_side above"
        return f"the embeddings' norm is {norm:.3g}, which should be about 1: {advice}"
    return None
