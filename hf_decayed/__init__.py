"""Decayed identity shortcuts for Hugging Face models.

>>> import hf_decayed  # registers the models with transformers' Auto classes
>>> from transformers import AutoModel
>>> model = AutoModel.from_pretrained("path/or/repository")
"""

import importlib

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForPreTraining,
)

from .models.configuration_decayed_resnet import DecayedResNetConfig
from .models.configuration_decayed_vit_mae import DecayedViTMAEConfig
from .models.modeling_decayed_resnet import DecayedResNetForImageClassification, DecayedResNetModel
from .models.modeling_decayed_vit_mae import (
    DecayedViTMAEBackbone,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)
from .models.shortcut_decay import effective_decay, suggest_shortcut_decay


__version__ = "0.1.0"

__all__ = [
    "DecayedResNetConfig",
    "DecayedResNetForImageClassification",
    "DecayedResNetModel",
    "DecayedSiTPipeline",
    "DecayedSiTTransformer2DModel",
    "DecayedUViT2DModel",
    "DecayedUViTPipeline",
    "DecayedViTMAEBackbone",
    "DecayedViTMAEConfig",
    "DecayedViTMAEForImageClassification",
    "DecayedViTMAEForPreTraining",
    "DecayedViTMAEModel",
    "SiTSDEScheduler",
    "effective_decay",
    "suggest_shortcut_decay",
]

AutoConfig.register(DecayedViTMAEConfig.model_type, DecayedViTMAEConfig, exist_ok=True)
AutoModel.register(DecayedViTMAEConfig, DecayedViTMAEModel, exist_ok=True)
AutoModelForPreTraining.register(DecayedViTMAEConfig, DecayedViTMAEForPreTraining, exist_ok=True)
AutoModelForImageClassification.register(DecayedViTMAEConfig, DecayedViTMAEForImageClassification, exist_ok=True)
AutoBackbone.register(DecayedViTMAEConfig, DecayedViTMAEBackbone, exist_ok=True)

AutoConfig.register(DecayedResNetConfig.model_type, DecayedResNetConfig, exist_ok=True)
AutoModel.register(DecayedResNetConfig, DecayedResNetModel, exist_ok=True)
AutoModelForImageClassification.register(DecayedResNetConfig, DecayedResNetForImageClassification, exist_ok=True)

# Of diffusers, and imported with it only when they are asked for.
DIFFUSION = {
    "DecayedUViT2DModel": ".models.unet_decayed_uvit",
    "DecayedSiTTransformer2DModel": ".models.transformer_decayed_sit",
    "DecayedUViTPipeline": ".pipelines.pipeline_decayed_uvit",
    "DecayedSiTPipeline": ".pipelines.pipeline_decayed_sit",
    "SiTSDEScheduler": ".pipelines.scheduling_sit_sde",
}


def __getattr__(name: str):
    if name in DIFFUSION:
        return getattr(importlib.import_module(DIFFUSION[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *DIFFUSION})
