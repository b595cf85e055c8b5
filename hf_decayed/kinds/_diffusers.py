"""What the kinds of diffusers pipelines share."""

from ._files import read_field
from ._kind import ModelFolder


SAMPLE_LIMITS = (
    "It draws images like those it was trained on, as well as the figures of this card say and no better. It may reproduce "
    "training images closely; do not take its images for photographs of anything."
)
SAMPLE_PICTURES = {"samples.png": "samples"}


def pipeline_usage(folder: ModelFolder, name: str, results: dict) -> str:
    """One image, of the first class if there are classes, with the settings of the samples that training drew."""
    sampling = read_field(results, "sampling", dict, "results.json", {})
    steps = read_field(sampling, "steps", int, "results.json", 50)
    guidance_scale = read_field(sampling, "guidance_scale", float, "results.json", 1.0)
    class_names = list(read_field(folder.index, "id2label", dict, "model_index.json", {}).values())
    label = f"[{class_names[0]!r}]" if class_names else "[0]" if folder.config.get("num_classes") else ""
    guidance = f", guidance_scale={guidance_scale}" if label and guidance_scale != 1 else ""
    arguments = f"{label}{guidance}{', ' if label else ''}num_inference_steps={steps}"
    return (
        "from diffusers import DiffusionPipeline\n\n"
        f'pipeline = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        f"image = pipeline({arguments}).images[0]"
    )


def pipeline_output(loaded):
    """Two images from a fixed seed; latents for a pipeline of latents without an autoencoder, as `convert` writes it."""
    import torch

    loaded.set_progress_bar_config(disable=True)
    output_type = "latent" if getattr(loaded, "vae", None) is None else "pt"
    network = loaded.unet if hasattr(loaded, "unet") else loaded.transformer
    labels = {"class_labels": [*list(loaded.label2id)[:1], 0]} if network.config.num_classes else {"batch_size": 2}
    generator = torch.Generator().manual_seed(0)
    return loaded(**labels, num_inference_steps=3, generator=generator, output_type=output_type).images.float()
