"""GANs whose discriminator is a representation, as pipelines of generator and discriminator."""

from ._diffusers import SAMPLE_LIMITS, SAMPLE_PICTURES
from ._kind import Kind, ModelFolder, SavedClass


def gan_usage(folder: ModelFolder, name: str, results: dict) -> str:
    """An image, and the features of a picture by the discriminator."""
    mode, size = "L" if folder.config.get("out_channels") == 1 else "RGB", folder.config.get("sample_size")
    return (
        "import numpy as np\n"
        "import torch\n"
        "from diffusers import DiffusionPipeline\n"
        "from PIL import Image\n\n"
        f'pipeline = DiffusionPipeline.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        "image = pipeline(truncation=1.0).images[0]\n\n"
        f'picture = Image.open("picture.png").convert("{mode}").resize(({size}, {size}))\n'
        "pixels = torch.tensor(np.atleast_3d(picture)).movedim(2, 0)[None] / 127.5 - 1  # in [-1, 1]\n"
        "features = pipeline.discriminator.eval()(pixels).pooler_output"
    )


def gan_output(loaded):
    """Two images from fixed latents, and their features, as one tensor."""
    import torch

    latents = torch.randn(2, loaded.generator.config.latent_dim, generator=torch.Generator().manual_seed(0))
    images = loaded(latents=latents, output_type="pt").images.float()
    if loaded.discriminator is None:
        return images
    with torch.no_grad():
        output = loaded.discriminator.eval()(2 * images - 1)
    return torch.cat([images.flatten(1), output.pooler_output, output.raw_embeds], dim=1)


KIND = Kind(
    script="structural_gan",
    library="diffusers",
    classes={
        "StructuralGANPipeline": SavedClass(
            "GAN whose discriminator is a representation",
            "unconditional-image-generation",
            SAMPLE_LIMITS,
            ("DiffusionPipeline",),
        )
    },
    modules={
        "StructuralGANPipeline": "hf_decayed.pipelines.pipeline_structural_gan",
        "StructuralGenerator": "hf_decayed.models.structural_generator",
        "StructuralDiscriminatorModel": "hf_decayed.models.modeling_structural_discriminator",
    },
    usage=gan_usage,
    reference_output=gan_output,
    network="generator",
    has_shortcuts=False,
    pictures=SAMPLE_PICTURES,
    metrics={
        "linear_accuracy": "linear probe on the discriminator's features",
        "linear_accuracy_untrained": "the same of the untrained network",
        "linear_accuracy_pixels": "the same of raw pixels",
        "svm_accuracy": "linear SVM on the discriminator's features",
        "svm_accuracy_untrained": "the same of the untrained network",
        "kmeans_accuracy": "k-means on the discriminator's features",
        "kmeans_accuracy_untrained": "the same of the untrained network",
        "kmeans_accuracy_pixels": "the same of raw pixels",
    },
)
