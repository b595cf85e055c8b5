"""Nested diffusion: chains of U-ViTs from a semantic vector down to the image."""

from ._diffusers import SAMPLE_LIMITS
from ._files import read_field
from ._kind import Kind, ModelFolder, SavedClass


def chain_usage(folder: ModelFolder, name: str, results: dict) -> str:
    """Some images, and variations of the first: the same top latent, other details."""
    sampling = read_field(results, "sampling", dict, "results.json", {})
    steps = read_field(sampling, "steps", int, "results.json", 50)
    top = 1 + len(read_field(folder.config, "condition_levels", list, "level_1/config.json", []))
    label = "class_labels=[0], " if folder.config.get("num_classes") else ""
    return (
        "from diffusers import DiffusionPipeline\n\n"
        f'pipeline = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        f"output = pipeline({label}num_images=4, num_inference_steps={steps})\n"
        f"image, top_latent = output.images[0], output.latents[{top}][:1]\n"
        f"variations = pipeline({label}num_images=4, fixed_latents={{{top}: top_latent}}, num_inference_steps={steps}).images"
    )


def chain_output(loaded):
    """The samples of all levels from a fixed seed, and the latents of an image, as one vector."""
    import torch

    loaded.set_progress_bar_config(disable=True)
    labels = {"class_labels": [0, 0]} if loaded.unet.config.num_classes else {"num_images": 2}
    generator = torch.Generator().manual_seed(0)
    latents = loaded(**labels, num_inference_steps=3, generator=generator, output_type="latent").latents
    parts = list(latents.values())
    if loaded.latent_encoder is not None:
        config = loaded.latent_encoder.config
        image = torch.rand(2, config.num_channels, config.image_size, config.image_size, generator=generator)
        parts += list(loaded.encode_image(image).values())
    return torch.cat([part.flatten(1) for part in parts], dim=1).float()


KIND = Kind(
    script="nested",
    library="diffusers",
    classes={
        "NestedDiffusionPipeline": SavedClass(
            "nested diffusion model that generates images",
            "unconditional-image-generation",
            SAMPLE_LIMITS,
            ("DiffusionPipeline",),
        )
    },
    modules={
        "NestedDiffusionPipeline": "hf_decayed.pipelines.pipeline_nested_diffusion",
        "NestedUViT2DModel": "hf_decayed.models.unet_nested_uvit",
        "HierarchicalLatentEncoder": "hf_decayed.models.modeling_hierarchical_latents",
    },
    usage=chain_usage,
    reference_output=chain_output,
    network="level_1",
    pictures={"samples.png": "samples; those of a row share their top latent"},
)
