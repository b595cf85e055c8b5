"""Supervised residual networks, of the paper's study of rank."""

from ._kind import Kind, SavedClass
from ._transformers import CLASSIFIER_LIMITS, FEATURE_LIMITS, image_model_usage


MODELING = "hf_decayed.models.modeling_decayed_resnet"


def reference_output(loaded):
    """Logits of a classifier, feature maps of the network without a head."""
    import torch

    images = torch.randn(2, loaded.config.num_channels, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = loaded.eval()(images)
    return (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state).float()


KIND = Kind(
    script="resnet",
    library="transformers",
    classes={
        "DecayedResNetForImageClassification": SavedClass(
            "residual image classifier",
            "image-classification",
            CLASSIFIER_LIMITS,
            ("AutoModelForImageClassification", "AutoModel"),
        ),
        "DecayedResNetModel": SavedClass(
            "residual network", "image-feature-extraction", FEATURE_LIMITS, ("AutoModel",)
        ),
    },
    modules={"DecayedResNetForImageClassification": MODELING, "DecayedResNetModel": MODELING},
    usage=image_model_usage,
    reference_output=reference_output,
)
