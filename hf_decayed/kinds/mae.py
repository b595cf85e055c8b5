"""Masked autoencoders, and the classifiers that are fine-tuned from them."""

from ._kind import Kind, SavedClass
from ._transformers import CLASSIFIER_LIMITS, FEATURE_LIMITS, image_model_usage


MODELING = "hf_decayed.models.modeling_decayed_vit_mae"
SEGMENTATION = "hf_decayed.pipelines.pipeline_unsupervised_segmentation"


def reference_output(loaded):
    """Reconstructions of a pretraining model, for fixed noise; logits or tokens of the others."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = loaded.config.image_size
    size = size if isinstance(size, (list, tuple)) else (size, size)
    images = torch.randn(2, loaded.config.num_channels, *size, generator=generator)
    with torch.no_grad():
        if hasattr(loaded, "reconstruct"):
            height, width = loaded.vit.embeddings.patch_grid(images, interpolate_pos_encoding=False)
            noise = torch.rand(2, height * width, generator=generator)
            return loaded.eval().reconstruct(images, noise=noise)[0].float()
        outputs = loaded.eval()(images)
    return (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state).float()


KIND = Kind(
    script="mae",
    library="transformers",
    classes={
        "DecayedViTMAEForPreTraining": SavedClass(
            "masked autoencoder",
            "image-feature-extraction",
            FEATURE_LIMITS,
            ("AutoModelForPreTraining", "AutoModel"),
        ),
        "DecayedViTMAEModel": SavedClass(
            "encoder of a masked autoencoder", "image-feature-extraction", FEATURE_LIMITS, ("AutoModel",)
        ),
        "DecayedViTMAEBackbone": SavedClass(
            "encoder of a masked autoencoder", "image-feature-extraction", FEATURE_LIMITS, ("AutoModel",)
        ),
        "DecayedViTMAEForImageClassification": SavedClass(
            "image classifier",
            "image-classification",
            CLASSIFIER_LIMITS,
            ("AutoModelForImageClassification", "AutoModel"),
        ),
    },
    modules={
        "DecayedViTMAEForPreTraining": MODELING,
        "DecayedViTMAEModel": MODELING,
        "DecayedViTMAEBackbone": MODELING,
        "DecayedViTMAEForImageClassification": MODELING,
    },
    usage=image_model_usage,
    reference_output=reference_output,
    pipelines=(SEGMENTATION,),
    metrics={
        "cluster_miou": "unsupervised segmentation by patches, mean IoU",
        "cluster_miou_pixels": "the same of raw pixels",
        "patch_accuracy": "class of a patch, linear probe",
        "position_accuracy": "position of a patch, linear probe: how much features say where",
    },
    pictures={
        "reconstructions.png": "images, the patches that the encoder sees, and the reconstruction",
        "patches.png": "held-out images, and below them the features of their patches: three principal components as colours",
    },
)
