"""Latent intrinsics, which relight images."""

from ._kind import Kind, ModelFolder, SavedClass


LIMITS = (
    "It relights images like those it was trained on. Its albedo is not measured but decoded without light, up to a factor, "
    "and saturated pixels cannot be recovered. Do not take relit images for photographs of anything."
)

CITATION = """\
@inproceedings{zhang2024latent,
  title     = {Latent Intrinsics Emerge from Training to Relight},
  author    = {Zhang, Xiao and Gao, William and Jain, Seemandhar and Maire, Michael and Forsyth, David and Bhattad, Anand},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year      = {2024}
}"""


def relighting_usage(folder: ModelFolder, name: str, results: dict) -> str:
    """One image relit as another, and without light."""
    prior_import = prior = ""
    if results.get("prior"):  # the encoder whose features the network was trained with
        prior_import = "from hf_decayed.run.relighting import DensePrior\n"
        prior = (
            f'pipeline.prior = DensePrior("path/to/{results["prior"]}", pipeline.device)  # the encoder of training\n'
        )
    return (
        "from diffusers import DiffusionPipeline\n"
        f"{prior_import}"
        "from PIL import Image\n\n"
        f'pipeline = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        f"{prior}"
        'image, reference = Image.open("picture.png"), Image.open("reference.png")\n'
        "relit = pipeline(image, reference).images[0]\n"
        "albedo = pipeline.albedo(image).images[0]"
    )


def relighting_output(loaded):
    """Two images relit, and without light, as one tensor."""
    import torch

    size = loaded.autoencoder.config.sample_size
    generator = torch.Generator().manual_seed(0)
    images, references = torch.rand(2, 2, 3, size, size, generator=generator)
    if loaded.autoencoder.config.prior_channels > 0:  # any features will do for a comparison
        features = torch.rand(1, loaded.autoencoder.config.prior_channels, 4, 4, generator=generator)
        loaded.prior = lambda pixel_values: features.expand(len(pixel_values), -1, -1, -1)
    relit = loaded(images, references, output_type="pt").images
    return torch.cat([relit, loaded.albedo(images, output_type="pt").images]).float()


KIND = Kind(
    script="relight",
    library="diffusers",
    classes={
        "RelightingPipeline": SavedClass(
            "autoencoder that relights images", "image-to-image", LIMITS, ("DiffusionPipeline",)
        )
    },
    modules={
        "RelightingPipeline": "hf_decayed.pipelines.pipeline_relighting",
        "LatentIntrinsicsModel": "hf_decayed.models.latent_intrinsics",
    },
    usage=relighting_usage,
    reference_output=relighting_output,
    network="autoencoder",
    has_shortcuts=False,
    paper="2405.21074",
    citation=CITATION,
    pictures={"samples.png": "input, reference, relit, truth, albedo, true albedo, of held-out scenes"},
    metrics={
        "relit_rmse": "RMSE of relit images, in [-1, 1]",
        "wrong_reference_rmse": "the same with a reference of another light",
        "mean_light_rmse": "the same of the scene averaged over all lights, which ignores the reference",
        "copy_rmse": "the same of the unchanged image",
        "relit_rmse_corrected": "RMSE of relit images after colour correction",
        "copy_rmse_corrected": "the same of the unchanged image",
        "relit_ssim": "SSIM of relit images",
        "copy_ssim": "the same of the unchanged image",
        "albedo_error": "scale-invariant error of the albedo",
        "albedo_error_of_input": "the same of the image itself",
    },
)
