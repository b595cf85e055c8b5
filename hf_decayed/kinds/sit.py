"""SiT pipelines."""

from ._diffusers import SAMPLE_LIMITS, SAMPLE_PICTURES, pipeline_output, pipeline_usage
from ._kind import Kind, SavedClass


KIND = Kind(
    script="sit",
    library="diffusers",
    classes={
        "DecayedSiTPipeline": SavedClass(
            "SiT that generates images", "unconditional-image-generation", SAMPLE_LIMITS, ("DiffusionPipeline",)
        )
    },
    modules={
        "DecayedSiTPipeline": "hf_decayed.pipelines.pipeline_decayed_sit",
        "DecayedSiTTransformer2DModel": "hf_decayed.models.transformer_decayed_sit",
        "SiTSDEScheduler": "hf_decayed.pipelines.scheduling_sit_sde",
    },
    usage=pipeline_usage,
    reference_output=pipeline_output,
    network="transformer",
    pictures=SAMPLE_PICTURES,
)
