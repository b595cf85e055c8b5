"""Discriminators that are representations, as feature extractors of their own."""

from ._kind import Kind, SavedClass
from ._transformers import FEATURE_LIMITS, image_model_usage


def discriminator_output(loaded):
    """Features and embeddings of two images."""
    import torch

    images = torch.randn(2, loaded.config.num_channels, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = loaded.eval()(images)
    return torch.cat([output.pooler_output, output.raw_embeds], dim=1).float()


KIND = Kind(
    script="structural_gan",
    library="transformers",
    classes={
        "StructuralDiscriminatorModel": SavedClass(
            "discriminator of a GAN that is a representation",
            "image-feature-extraction",
            FEATURE_LIMITS,
            ("AutoModel",),
        )
    },
    modules={"StructuralDiscriminatorModel": "hf_decayed.models.modeling_structural_discriminator"},
    usage=image_model_usage,
    reference_output=discriminator_output,
)
