"""What the diffusion scripts share: images or latents with their classes, and the end of a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch.utils.data import Dataset

from ..data.latents import latent_images, load_vae, pixel_images, sample_shape
from ..data.sources import ImageSplits, load_image_splits, read_class_names
from ..errors import DataError, explain_loading_errors
from ..provenance import model_fingerprint
from .monitors import SampleMonitor
from .records import format_loss
from .run import Run


@dataclass
class DiffusionData:
    """Images of a diffusion model: pixels, or latents of a `vae`; with classes if the data has labels."""

    splits: ImageSplits
    class_names: list[str]
    vae: AutoencoderKL | None
    image_channels: int
    image_size: int
    on_bad_image: str = "stop"

    def model_fields(self) -> dict:
        """Fields of the network's config that follow from the data."""
        channels, sample_size = sample_shape(self.vae, self.image_channels, self.image_size)
        return {"sample_size": sample_size, "in_channels": channels, "num_classes": len(self.class_names)}

    def id2label(self) -> dict[int, str] | None:
        return dict(enumerate(self.class_names)) or None

    def images(
        self,
        run: Run,
        horizontal_flip: bool = True,
        memory_limit: int = 2 * 2**30,
        latents_dir: str | Path | None = None,
    ) -> Dataset:
        """Training images; with a VAE their latents, cached under `latents_dir` if that is given."""
        settings: dict[str, Any] = {
            "horizontal_flip": horizontal_flip,
            "memory_limit": memory_limit,
            "on_bad_image": self.on_bad_image,
        }
        seed = run.options.seed
        if self.vae is None:
            return pixel_images(
                self.splits, self.image_size, self.image_channels, seed, progress=run.progress, **settings
            )
        workers = run.num_workers
        return latent_images(
            self.vae, self.splits, self.image_size, seed, run.accelerator, latents_dir, num_workers=workers, **settings
        )

    def conditions(self, batch: dict[str, torch.Tensor], class_dropout: float) -> dict[str, torch.Tensor]:
        """Class labels for the network; a fraction of them is the null class, which classifier-free guidance needs."""
        if not self.class_names:
            return {}
        dropped = batch["uniform"][:, 1] < class_dropout
        return {"class_labels": torch.where(dropped, len(self.class_names), batch["labels"])}

    def monitor(self, run: Run, guidance_scale: float, **settings) -> SampleMonitor:
        """Monitor of samples; without classes there is no guidance. `settings` are those of [`SampleMonitor`]."""
        if guidance_scale != 1.0 and not self.class_names:
            run.print("there are no classes, so samples are drawn without guidance")
        shape = (self.image_channels, self.image_size, self.image_size)
        return SampleMonitor(
            run.accelerator,
            self.splits,
            shape,
            len(self.class_names),
            guidance_scale=guidance_scale if self.class_names else 1.0,
            on_bad_image=self.on_bad_image,
            **settings,
        )

    def describe(self, images: Dataset) -> dict:
        return {
            "name": self.splits.name,
            "fingerprint": images.fingerprint() if self.vae is None else self.splits.fingerprint(),
            "number": len(images),
            "held_out": self.splits.held_out_rule,
        }


def load_diffusion_data(
    run: Run,
    source: dict,
    image_size: int,
    image_channels: int,
    max_train_samples: int | None = None,
    conditional: bool = True,
    vae: str | None = None,
    on_bad_image: str = "stop",
) -> DiffusionData:
    """Loads the data set of `source`, arguments of `load_image_splits`; a VAE's channels replace `image_channels`."""
    with run.accelerator.main_process_first():
        splits = load_image_splits(**source)
    splits = splits.take(max_train_samples)
    if not conditional:
        splits = replace(splits, label_column=None)
    if splits.label_column and min(splits.train[splits.label_column]) < 0:
        raise DataError("Some labels are negative: train without them (--conditional false), or name another column.")
    class_names = read_class_names(splits.train, splits.label_column) if splits.label_column else []
    network = None
    if vae:
        with explain_loading_errors(vae):
            network = load_vae(vae, run.device)
        image_channels = network.config.in_channels
    run.print(f"{splits.name}: {len(splits.train)} images, {len(class_names)} classes")
    return DiffusionData(splits, class_names, network, image_channels, image_size, on_bad_image)


def finish_diffusion(run: Run, pipeline, monitor: SampleMonitor, data: DiffusionData, images: Dataset) -> None:
    """Saves the pipeline, before the last evaluation, which may fail; then evaluates it and saves the results."""
    run.save(pipeline, "pipeline")
    measured = run.evaluate(monitor, pipeline, "samples")
    sampling = monitor.settings
    results = run.results(
        {
            **measured,
            "dataset": data.describe(images),
            "latents": data.vae and model_fingerprint(data.vae),
            "sampling": {"steps": sampling["num_inference_steps"], "guidance_scale": sampling["guidance_scale"]},
        }
    )
    if run.is_main_process:
        distances = "".join(f", {name} {value:.2f}" for name, value in measured.items())
        print(f"{format_loss(results)}{distances}, {results['seconds']:.0f} s")
    run.finish(results, "pipeline, samples.png")
