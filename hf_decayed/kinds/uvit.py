"""U-ViT pipelines."""

from ._diffusers import SAMPLE_LIMITS, SAMPLE_PICTURES, pipeline_output, pipeline_usage
from ._kind import Kind, SavedClass


KIND = Kind(
    script="uvit",
    library="diffusers",
    classes={
        "DecayedUViTPipeline": SavedClass(
            "U-ViT that generates images", "unconditional-image-generation", SAMPLE_LIMITS, ("DiffusionPipeline",)
        )
    },
    modules={
        "DecayedUViTPipeline": "hf_decayed.pipelines.pipeline_decayed_uvit",
        "DecayedUViT2DModel": "hf_decayed.models.unet_decayed_uvit",
    },
    usage=pipeline_usage,
    reference_output=pipeline_output,
    network="unet",
    pictures=SAMPLE_PICTURES,
)
