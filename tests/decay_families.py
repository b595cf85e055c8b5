"""Tiny models of every family that `decay_shortcuts` knows, and an oracle that decays them without names of modules."""

from collections.abc import Callable
from dataclasses import dataclass, field

import diffusers
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_decayed.models.shortcut_decay import shortcut_factors


ADDITIONS = ("add", "__add__", "__radd__", "__iadd__", "add_")
IMAGES = {"image_size": 16, "patch_size": 8}
VIT_SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


@dataclass
class Family:
    """How to build a tiny model, what to feed it, and the classes and streams of its blocks."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict]
    blocks: tuple[str, ...]
    streams: tuple[str, ...] = ("hidden_states",)
    folds: bool = True
    skip: str = ""
    output: Callable = field(default=lambda output: output[0])


def images(size: int = 16, channels: int = 3) -> dict:
    return {"pixel_values": torch.randn(2, channels, size, size)}


def token_ids() -> dict:
    return {"input_ids": torch.randint(0, 30, (2, 6))}


def vision(name: str, block: str, **fields) -> Family:
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")
    return Family(lambda: getattr(transformers, name)(config(**{**VIT_SIZES, **IMAGES, **fields})), images, (block,))


def unet_inputs() -> dict:
    return {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 7])}


def build_unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=2,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def build_dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=4,
        num_embeds_ada_norm=10,
    )


def dit_inputs() -> dict:
    timestep, labels = torch.tensor([1, 5]), torch.tensor([0, 3])
    return {"hidden_states": torch.randn(2, 4, 4, 4), "timestep": timestep, "class_labels": labels}


def build_pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=4,
        cross_attention_dim=16,
        caption_channels=12,
        use_additional_conditions=False,
    )


def pixart_inputs() -> dict:
    return {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "timestep": torch.tensor([1, 5]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def build_sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=4,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=4,
        dual_attention_layers=(1,),
    )


def sd3_inputs() -> dict:
    return {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([1, 5]),
    }


def build_flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )


def flux_inputs() -> dict:
    return {
        "hidden_states": torch.randn(2, 4, 4),
        "encoder_hidden_states": torch.randn(2, 5, 12),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([0.1, 0.5]),
        "img_ids": torch.randn(4, 3),
        "txt_ids": torch.randn(5, 3),
    }


def build_mae() -> nn.Module:
    decoder = {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    }
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**VIT_SIZES, **IMAGES, **decoder))


def build_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=30,
        n_positions=16,
        n_embd=16,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def build_llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, pad_token_id=0, **VIT_SIZES)
    return transformers.LlamaForCausalLM(config)


def build_resnet(layer_type: str) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": layer_type}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))


def build_convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 12], depths=[2, 2], num_stages=2, patch_size=4)
    return transformers.ConvNextForImageClassification(config)


def build_swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    return transformers.SwinForImageClassification(config)


JOINT = ("hidden_states", "encoder_hidden_states")
RESNET_BLOCKS = ("ResNetBasicLayer", "ResNetBottleNeckLayer")
FAMILIES = {
    "ViT": vision("ViTModel", "ViTLayer"),
    "DeiT": vision("DeiTModel", "DeiTLayer"),
    "DINOv2": vision("Dinov2Model", "Dinov2Layer", mlp_ratio=2),
    "DINOv2, SwiGLU": vision("Dinov2Model", "Dinov2Layer", mlp_ratio=2, use_swiglu_ffn=True),
    "DINOv2 with registers": vision("Dinov2WithRegistersModel", "Dinov2WithRegistersLayer", mlp_ratio=2),
    "DINOv3": vision("DINOv3ViTModel", "DINOv3ViTLayer"),
    "DINOv3, gated": vision("DINOv3ViTModel", "DINOv3ViTLayer", use_gated_mlp=True),
    "CLIP": vision("CLIPVisionModel", "CLIPEncoderLayer"),
    "SigLIP": vision("SiglipVisionModel", "SiglipEncoderLayer"),
    "BEiT": vision("BeitModel", "BeitLayer", use_relative_position_bias=True),
    "ViTMAE": Family(build_mae, lambda: {**images(), "noise": torch.rand(2, 4)}, ("ViTMAELayer",), skip="decoder"),
    "Swin": Family(build_swin, images, ("SwinLayer",)),
    "GPT-2": Family(build_gpt2, token_ids, ("GPT2Block",)),
    "Llama": Family(build_llama, token_ids, ("LlamaDecoderLayer",)),
    "ConvNeXt": Family(build_convnext, lambda: images(32), ("ConvNextLayer",), ("features",)),
    "ResNet, basic": Family(lambda: build_resnet("basic"), lambda: images(32), RESNET_BLOCKS, folds=False),
    "ResNet, bottleneck": Family(lambda: build_resnet("bottleneck"), lambda: images(32), RESNET_BLOCKS, folds=False),
    "DiT": Family(build_dit, dit_inputs, ("BasicTransformerBlock",)),
    "PixArt": Family(build_pixart, pixart_inputs, ("BasicTransformerBlock",)),
    "SD3": Family(build_sd3, sd3_inputs, ("JointTransformerBlock",), JOINT),
    "Flux": Family(build_flux, flux_inputs, ("FluxTransformerBlock", "FluxSingleTransformerBlock"), JOINT),
    "UNet2D": Family(
        build_unet, unet_inputs, ("ResnetBlock2D", "Attention"), ("input_tensor", "hidden_states"), False
    ),
}
# Models without a final norm behind their blocks: what folding leaves as it is, is the normalised output.
NORMALISED_OUTPUTS = {"CLIP": "pooler_output", "BEiT": "pooler_output"}


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict]:
    """A model whose weights are all at work (zero gates, layer scales and small values are not), and its inputs."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.build().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    inputs = family.inputs()
    inputs = {
        key: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    return model, inputs


def shrink_eps(model: nn.Module) -> nn.Module:
    """Makes norms blind to the scale of their input, to the precision of float64: then folding is exact."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-18)
    return model


def family_output(name: str, model: nn.Module, inputs: dict) -> torch.Tensor:
    output = model(**inputs)
    if name == "ViTMAE":
        return output.logits
    return output[NORMALISED_OUTPUTS[name]] if name in NORMALISED_OUTPUTS else output[0]


class ShortcutOracle(TorchFunctionMode):
    """Multiplies the shortcuts of a plain model: the operand of an addition that is the input of the running block.

    It knows blocks by their classes and streams by the names of arguments, and no module inside of a block, but for the
    projections of convolutional shortcuts. A first pass counts the additions and the order of the blocks.
    """

    def __init__(self, model: nn.Module, family: Family, shortcut_decay: float):
        super().__init__()
        self.family, self.shortcut_decay = family, shortcut_decay
        self.streams: dict[int, tuple[torch.Tensor, nn.Module, str, int]] = {}
        self.additions: dict[nn.Module, dict[str, int]] = {}
        self.alphas: dict[nn.Module, list[float]] = {}
        for name, module in model.named_modules():
            if type(module).__name__ in family.blocks and not (family.skip and family.skip in name):
                self.watch(module)

    def watch(self, block: nn.Module) -> None:
        projection = getattr(block, "shortcut", None) or getattr(block, "conv_shortcut", None)
        if isinstance(projection, nn.Module):
            projection.register_forward_hook(lambda _, args, output: self.follow(output, block, "shortcut", 0))
        else:
            block.register_forward_pre_hook(self.enter, with_kwargs=True)

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if type(block).__name__ == "Attention" and not block.residual_connection:
            return
        streams = {name: kwargs[name] for name in self.family.streams if name in kwargs} or {"first": args[0]}
        for name, tensor in streams.items():
            self.follow(tensor, block, name, 0)

    def follow(self, tensor: torch.Tensor, block: nn.Module, stream: str, number: int) -> None:
        self.additions.setdefault(block, {})
        self.streams[id(tensor)] = (tensor, block, stream, number)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.__name__ in ADDITIONS:
            for shortcut, branch in (args[:2], args[1::-1]):
                if id(shortcut) in self.streams:
                    return self.add(shortcut, branch)
        result = function(*args, **kwargs)
        if function is torch.cat and all(id(tensor) in self.streams for tensor in args[0]):
            _, block, _, number = self.streams[id(args[0][0])]
            self.follow(result, block, "both", number)
        return result

    def add(self, shortcut: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        _, block, stream, number = self.streams.pop(id(shortcut))
        counts = self.additions[block]
        counts[stream] = max(counts.get(stream, 0), number + 1)
        alpha = 1.0
        if self.alphas:
            alphas = self.alphas[block]
            # The text stream of SD3 has no part in a second attention.
            alpha = alphas[number if number == 0 or stream != "encoder_hidden_states" else -1]
        result = alpha * shortcut + branch
        self.follow(result, block, stream, number + 1)
        return result

    def prepare(self, run: Callable) -> None:
        """Counts additions in a run of the plain model, and gives each its alpha."""
        with torch.no_grad(), self:
            run()
        steps = {block: max(counts.values()) for block, counts in self.additions.items()}
        total = sum(steps.values())
        factors = iter(shortcut_factors([k / (total - 1) for k in range(total)], self.shortcut_decay))
        self.alphas = {block: [next(factors) for _ in range(count)] for block, count in steps.items()}
        self.streams.clear()
