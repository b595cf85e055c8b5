"""A residual network with decayed shortcuts, `x <- alpha * x + f(x)`, on transformers' ResNet.

The supervised study of Zhang et al. (CVPR 2026), appendix B.2. No new parameters: with `shortcut_decay=1.0` this is
transformers' network, and it loads that network's weights.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.resnet.modeling_resnet import (
    ResNetBasicLayer,
    ResNetBottleNeckLayer,
    ResNetConvLayer,
    ResNetEmbeddings,
    ResNetEncoder,
    ResNetForImageClassification,
    ResNetModel,
    ResNetPreTrainedModel,
    ResNetStage,
)

from .configuration_decayed_resnet import DecayedResNetConfig


__all__ = ["DecayedResNetForImageClassification", "DecayedResNetModel"]


class DecayedResNetEmbeddings(ResNetEmbeddings):
    def __init__(self, config: DecayedResNetConfig):
        super().__init__(config)
        if config.stem == "small":
            self.embedder = ResNetConvLayer(config.num_channels, config.embedding_size, activation=config.hidden_act)
            self.pooler = nn.Identity()


class DecayedResNetBasicLayer(ResNetBasicLayer):
    alpha: float  # set by the stage

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(hidden_state)
        hidden_state = torch.add(self.layer(hidden_state), shortcut, alpha=self.alpha)
        return self.activation(hidden_state)


class DecayedResNetBottleNeckLayer(ResNetBottleNeckLayer):
    alpha: float

    # Copied from hf_decayed.models.modeling_decayed_resnet.DecayedResNetBasicLayer.forward
    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(hidden_state)
        hidden_state = torch.add(self.layer(hidden_state), shortcut, alpha=self.alpha)
        return self.activation(hidden_state)


class DecayedResNetStage(ResNetStage):
    def __init__(
        self, config: DecayedResNetConfig, in_channels: int, out_channels: int, stride: int, alphas: list[float]
    ):
        nn.Module.__init__(self)
        layer_class, arguments = DecayedResNetBasicLayer, {}
        if config.layer_type == "bottleneck":
            layer_class = DecayedResNetBottleNeckLayer
            arguments = {"downsample_in_bottleneck": config.downsample_in_bottleneck}
        layers = []
        for alpha in alphas:
            layers.append(layer_class(in_channels, out_channels, stride, config.hidden_act, **arguments))
            layers[-1].alpha = alpha
            in_channels, stride = out_channels, 1
        self.layers = nn.Sequential(*layers)


class DecayedResNetEncoder(ResNetEncoder):
    def __init__(self, config: DecayedResNetConfig):
        nn.Module.__init__(self)
        alphas = iter(config.shortcut_alphas())
        widths = [config.embedding_size, *config.hidden_sizes]
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(config.depths):
            stride = 2 if stage > 0 or config.downsample_in_first_stage else 1
            stage_alphas = [next(alphas) for _ in range(depth)]
            self.stages.append(DecayedResNetStage(config, widths[stage], widths[stage + 1], stride, stage_alphas))


class DecayedResNetPreTrainedModel(ResNetPreTrainedModel):
    config: DecayedResNetConfig
    config_class = DecayedResNetConfig

    def __init__(self, config: DecayedResNetConfig):
        if config.model_type != DecayedResNetConfig.model_type:
            raise ValueError(f"`config` must be a DecayedResNetConfig, got {type(config).__name__}.")
        config.validate()  # fields may have changed since the config was constructed
        # Not super(): transformers' classes further along would build stages without decay.
        PreTrainedModel.__init__(self, config)

    def save_pretrained(self, save_directory, *args, **kwargs):
        self.config.auto_map = dict(AUTO_MAP)  # for every Auto class, whichever class was saved
        return super().save_pretrained(save_directory, *args, **kwargs)


class DecayedResNetModel(DecayedResNetPreTrainedModel, ResNetModel):
    _keys_to_ignore_on_load_unexpected = [r"^classifier\."]

    def __init__(self, config: DecayedResNetConfig):
        super().__init__(config)
        self.embedder = DecayedResNetEmbeddings(config)
        self.encoder = DecayedResNetEncoder(config)
        self.pooler = nn.AdaptiveAvgPool2d((1, 1))
        self.post_init()


class DecayedResNetForImageClassification(DecayedResNetPreTrainedModel, ResNetForImageClassification):
    def __init__(self, config: DecayedResNetConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.resnet = DecayedResNetModel(config)
        width, number = config.hidden_sizes[-1], config.num_labels
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(width, number) if number > 0 else nn.Identity())
        self.post_init()


AUTO_MAP = {
    "AutoConfig": "configuration_decayed_resnet.DecayedResNetConfig",
    "AutoModel": "modeling_decayed_resnet.DecayedResNetModel",
    "AutoModelForImageClassification": "modeling_decayed_resnet.DecayedResNetForImageClassification",
}
DecayedResNetModel.register_for_auto_class("AutoModel")
DecayedResNetForImageClassification.register_for_auto_class("AutoModelForImageClassification")
