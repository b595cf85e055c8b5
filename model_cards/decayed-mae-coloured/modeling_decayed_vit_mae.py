"""Masked autoencoder with decayed identity shortcuts, `x <- alpha * x + f(x)`: layer, encoder, skips, decoder, heads."""

import copy
import difflib
import json
import math
import os
import warnings
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, ViTMAEForPreTraining, ViTMAEModel, ViTMAEPreTrainedModel
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BackboneOutput, ImageClassifierOutput
from transformers.models.vit_mae.modeling_vit_mae import (
    ViTMAEForPreTrainingOutput,
    ViTMAELayer,
    ViTMAEModelOutput,
    ViTMAEPatchEmbeddings,
    build_2d_sinusoidal_position_embedding,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_decayed_vit_mae import DecayedViTMAEConfig, as_pair
from .image_processing_decayed import default_image_processor


__all__ = [
    "DecayedViTMAEBackbone",
    "DecayedViTMAEForImageClassification",
    "DecayedViTMAEForPreTraining",
    "DecayedViTMAEModel",
]

# Parameter names of ViTMAE checkpoints -> ours, for `from_pretrained`. ViTMAE's `save_pretrained` still writes the older
# names, and `decoder_encoder.layer` for the decoder's layers, which the first rule renames too.
VIT_MAE_KEY_MAPPING = {
    r"encoder\.layer\.": "layers.",
    r"attention\.attention\.query": "attention.q_proj",
    r"attention\.attention\.key": "attention.k_proj",
    r"attention\.attention\.value": "attention.v_proj",
    r"attention\.output\.dense": "attention.o_proj",
    r"intermediate\.dense": "mlp.fc1",
    r"(?<!attention\.)output\.dense": "mlp.fc2",
}
# Prefixes of the parameters of each head: they may be new, or left over, when a checkpoint of another head is loaded.
HEADS = [("decoder.",), ("classifier.", "fc_norm.")]
FINAL_NORM = ("layernorm.weight", "layernorm.bias")
# Arguments that some `forward` of this family takes.
ARGUMENTS = ["noise", "mask_ratio", "interpolate_pos_encoding", "output_skips", "return_loss", "return_logits"]


@dataclass
class DecayedViTMAEModelOutput(ViTMAEModelOutput):
    r"""
    last_hidden_state (`torch.FloatTensor` of shape `(batch_size, 1 + num_patches, hidden_size)`):
        Class token, then the patches in patch order; under masking, the visible patches in the order of their noise.
    mask (`torch.FloatTensor` of shape `(batch_size, num_patches)`, *optional*):
        1 for masked patches, 0 for visible ones. `None` without masking.
    ids_restore (`torch.LongTensor` of shape `(batch_size, num_patches)`, *optional*):
        Index of each patch in the shuffled order, in which visible patches come first. `None` without masking.
    pooler_output (`torch.FloatTensor` of shape `(batch_size, hidden_size)`):
        One feature per image, pooled by `config.pooling`.
    skips (`tuple(torch.FloatTensor)`, *optional*, returned when `output_skips=True`):
        Outputs of every other layer, deepest first: the decoder's skip inputs.
    """

    pooler_output: torch.FloatTensor | None = None
    skips: tuple[torch.FloatTensor, ...] | None = None


def sincos_positions(grid_size: tuple[int, int], hidden_size: int) -> torch.Tensor:
    """Fixed 2-D sine-cosine table of shape `(1, 1 + height * width, hidden_size)`; the class token's row is zero."""
    table = build_2d_sinusoidal_position_embedding(*grid_size, embed_dim=hidden_size, cls_token=True)
    height_half, width_half = table.chunk(2, dim=-1)
    # He et al. put the width's half first, and their released weights rely on it.
    return torch.cat([width_half, height_half], dim=-1).unsqueeze(0)


def interpolate_positions(
    table: torch.Tensor, grid_size: tuple[int, int], new_grid_size: tuple[int, int]
) -> torch.Tensor:
    """Bicubic interpolation of the table, in height and width, to another grid of patches."""
    if new_grid_size == grid_size:
        return table
    patches = table[:, 1:].reshape(1, *grid_size, -1).permute(0, 3, 1, 2).float()
    patches = F.interpolate(patches, size=new_grid_size, mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1], patches.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def select_rows(tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`tokens[b, ids[b]]` for every image b. One index per row is twice as fast as `gather` with one per element."""
    batch_size, length, hidden_size = tokens.shape
    rows = ids + length * torch.arange(batch_size, device=ids.device).unsqueeze(1)
    return tokens.flatten(0, 1).index_select(0, rows.flatten()).view(*ids.shape, hidden_size)


def pool_tokens(tokens: torch.Tensor, pooling: str) -> torch.Tensor:
    """One feature per image: the class token (`cls`), the mean of all tokens (`mean`) or of the patches (`patch_mean`)."""
    if pooling == "cls":
        return tokens[:, 0]
    return tokens.mean(dim=1) if pooling == "mean" else tokens[:, 1:].mean(dim=1)


def reject_unknown_arguments(arguments: dict, model: nn.Module) -> None:
    """Raises for arguments of this family that the model's `forward` does not take, and for misspelt ones.

    Other keyword arguments go to the attention kernels, which ignore unknown names.
    """
    for name in arguments:
        nearest = difflib.get_close_matches(name, ARGUMENTS, 1, 0.8) if not torch.compiler.is_compiling() else []
        if name in ARGUMENTS or nearest:
            hint = "" if name in ARGUMENTS else f"; did you mean `{nearest[0]}`?"
            raise TypeError(f"{type(model).__name__}.forward() has no argument `{name}`{hint}")


def is_unmodified(module: nn.Module, expected_class: type) -> bool:
    """Whether calling the module runs its class's `forward` and nothing else.

    Adapters, quantisation, sharding, offloading and observers replace a module or hook its call.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is expected_class and "forward" not in module.__dict__ and not any(hooks)


class DecayedViTMAEEmbeddings(nn.Module):
    """Patches, fixed positions and class token. Under masking, only the visible patches are embedded."""

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__()
        self.config = config
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.patch_embeddings = ViTMAEPatchEmbeddings(config)
        # A buffer, where ViTMAE has a frozen parameter: loading a checkpoint makes every parameter trainable.
        table = sincos_positions(config.grid_size, config.hidden_size)
        self.register_buffer("position_embeddings", table.to(self.cls_token.dtype))

    def forward(
        self,
        pixel_values: torch.Tensor,
        noise: torch.Tensor | None = None,
        mask_ratio: float | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        grid_size = self.patch_grid(pixel_values, interpolate_pos_encoding)
        batch_size, num_patches = pixel_values.shape[0], math.prod(grid_size)
        pixel_values = pixel_values.to(self.cls_token.dtype)
        positions = interpolate_positions(self.position_embeddings, self.config.grid_size, grid_size)
        cls_tokens = (self.cls_token + positions[:, :1]).expand(batch_size, -1, -1)

        if noise is None and not mask_ratio:
            patches = self.patch_embeddings(pixel_values) + positions[:, 1:]  # (batch, num_patches, dim)
            return torch.cat([cls_tokens, patches], dim=1), None, None

        mask_ratio = self.config.mask_ratio if mask_ratio is None else mask_ratio
        if not 0.0 <= mask_ratio < 1.0 or int(num_patches * (1 - mask_ratio)) == 0:
            raise ValueError(
                f"`mask_ratio` must lie in [0, 1) and leave at least one of {num_patches} patches, got {mask_ratio}."
            )
        num_visible = int(num_patches * (1 - mask_ratio))
        if noise is None:
            noise = torch.rand(batch_size, num_patches, device=pixel_values.device)
        elif noise.shape != (batch_size, num_patches):
            raise ValueError(
                f"`noise` must have shape (batch_size, num_patches) = {(batch_size, num_patches)}, "
                f"got {tuple(noise.shape)}."
            )
        ids_shuffle = noise.to(pixel_values.device).argsort(dim=1)
        ids_restore = ids_shuffle.argsort(dim=1)
        mask = (ids_restore >= num_visible).float()
        ids_keep = ids_shuffle[:, :num_visible]

        patches = self.embed_visible(pixel_values, ids_keep)  # (batch, num_visible, dim)
        patches = patches + positions[0, 1:][ids_keep]
        return torch.cat([cls_tokens, patches], dim=1), mask, ids_restore

    def embed_visible(self, pixel_values: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
        """Embeds only the patches `ids_keep`."""
        projection = self.patch_embeddings.projection
        if not (is_unmodified(self.patch_embeddings, ViTMAEPatchEmbeddings) and is_unmodified(projection, nn.Conv2d)):
            return select_rows(self.patch_embeddings(pixel_values), ids_keep)
        patch_height, patch_width = self.patch_embeddings.patch_size
        patches = pixel_values.unfold(2, patch_height, patch_height).unfold(3, patch_width, patch_width)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (batch, num_patches, channels * p * q)
        return F.linear(select_rows(patches, ids_keep), projection.weight.flatten(1), projection.bias)

    def patch_grid(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool) -> tuple[int, int]:
        """Number of patches along height and width; raises for a wrong shape."""
        image_size, patch_size = as_pair(self.config.image_size), as_pair(self.config.patch_size)
        shape = tuple(pixel_values.shape)
        expected = f"(batch_size, {self.config.num_channels}, {image_size[0]}, {image_size[1]})"
        if len(shape) != 4 or shape[1] != self.config.num_channels:
            raise ValueError(f"`pixel_values` must have shape {expected}, got {shape}.")
        if not interpolate_pos_encoding and shape[2:] != image_size:
            raise ValueError(
                f"`pixel_values` must have shape {expected}, got {shape}. "
                "For another height and width pass `interpolate_pos_encoding=True`."
            )
        if shape[2] % patch_size[0] != 0 or shape[3] % patch_size[1] != 0 or 0 in shape[2:]:
            raise ValueError(
                f"`pixel_values` must have a height and width divisible by the patch size {patch_size}, got shape {shape}."
            )
        return shape[2] // patch_size[0], shape[3] // patch_size[1]


# Copied from hf_decayed.models.unet_decayed_uvit.add_learned_shortcut
def add_learned_shortcut(
    branch: torch.Tensor, hidden_states: torch.Tensor, alpha: torch.Tensor | float
) -> torch.Tensor:
    """`alpha * hidden_states + branch` for a trained alpha, in the dtype that the sum has with a fixed alpha."""
    if isinstance(alpha, float):  # the branch that `shortcut_scope` leaves at 1
        return torch.add(branch, hidden_states, alpha=alpha)
    return torch.addcmul(branch, hidden_states, alpha.to(hidden_states.dtype))


class DecayedViTMAELayer(ViTMAELayer):
    """Transformer layer with weighted identity shortcuts; with both weights 1 it equals ViTMAE's layer, bit for bit."""

    def __init__(
        self,
        config: DecayedViTMAEConfig,
        attention_alpha: float | nn.Parameter = 1.0,
        mlp_alpha: float | nn.Parameter = 1.0,
        branch_scale: float = 1.0,
    ):
        super().__init__(config)
        # Floats, neither parameters nor buffers (`learned` apart), so that weights keep ViTMAE's names.
        self.attention_alpha = attention_alpha
        self.mlp_alpha = mlp_alpha
        self.has_learned_alphas = not (isinstance(attention_alpha, float) and isinstance(mlp_alpha, float))
        self.branch_scale = branch_scale
        # Xavier on query, key and value apart, with this gain, is Xavier on the one matrix that He et al. initialise.
        for projection in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj):
            projection.init_gain = 2**-0.5
        for projection in (self.attention.o_proj, self.mlp.fc2):
            projection.init_gain = 0.0 if config.zero_init_branches else 1.0

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        if self.has_learned_alphas:
            return self.forward_learned(hidden_states, attention_mask, **kwargs)
        if self.branch_scale != 1.0:
            return self.forward_scaled(hidden_states, attention_mask, **kwargs)
        attention_output, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = torch.add(self.dropout(attention_output), hidden_states, alpha=self.attention_alpha)
        mlp_output = self.mlp(self.layernorm_after(hidden_states))
        hidden_states = torch.add(self.dropout(mlp_output), hidden_states, alpha=self.mlp_alpha)
        return hidden_states

    def forward_learned(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`forward` for `shortcut_schedule="learned"`."""
        attention_output, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = add_learned_shortcut(self.dropout(attention_output), hidden_states, self.attention_alpha)
        mlp_output = self.mlp(self.layernorm_after(hidden_states))
        return add_learned_shortcut(self.dropout(mlp_output), hidden_states, self.mlp_alpha)

    def forward_scaled(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """`forward` for the ablations `residual_form="scale_both"` and `"scale_branch"`, which scale the branches too."""
        attention_output, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        attention_output = self.branch_scale * self.dropout(attention_output)
        hidden_states = torch.add(attention_output, hidden_states, alpha=self.attention_alpha)
        mlp_output = self.mlp(self.layernorm_after(hidden_states))
        mlp_output = self.branch_scale * self.dropout(mlp_output)
        return torch.add(mlp_output, hidden_states, alpha=self.mlp_alpha)


class DecayedViTMAESkip(nn.Module):
    """Encoder-decoder skip: `y + W2 SiLU(W1 [encoder tokens, y])`, with a learned mask token for the masked patches.

    `W1` is stored as two column blocks. The encoder's block is applied to the visible tokens and to the one mask token,
    instead of to a full grid of mostly equal tokens.
    """

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__()
        encoder_size, decoder_size = config.hidden_size, config.decoder_hidden_size
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder_size))
        self.encoder_projection = nn.Linear(encoder_size, decoder_size)
        self.decoder_projection = nn.Linear(decoder_size, decoder_size, bias=False)
        self.output_projection = nn.Linear(decoder_size, decoder_size)
        # Each block is drawn as part of the one Xavier matrix (encoder_size + decoder_size -> decoder_size).
        fan_sum = encoder_size + 2 * decoder_size
        self.encoder_projection.init_gain = math.sqrt((encoder_size + decoder_size) / fan_sum)
        self.decoder_projection.init_gain = math.sqrt(2 * decoder_size / fan_sum)
        self.output_projection.init_gain = 0.0

    def forward(self, hidden_states: torch.Tensor, encoder_tokens: torch.Tensor) -> torch.Tensor:
        batch_size, num_visible, _ = encoder_tokens.shape
        visible = self.encoder_projection(encoder_tokens)
        masked = self.encoder_projection(self.mask_token).expand(batch_size, hidden_states.shape[1] - num_visible, -1)
        inner = torch.cat([visible, masked], dim=1) + self.decoder_projection(hidden_states)
        return hidden_states + self.output_projection(F.silu(inner))


class DecayedViTMAEDecoder(nn.Module):
    """Transformer that predicts pixels. Its shortcuts are never decayed.

    Tokens stay in the shuffled order of the masking: class token, visible patches, masked patches. Attention does not
    depend on the order, and the visible and the masked patches are slices, so that no skip needs a scatter.
    """

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__()
        self.config = config
        layer_config = copy.copy(config)
        layer_config.hidden_size = config.decoder_hidden_size
        layer_config.num_attention_heads = config.decoder_num_attention_heads
        layer_config.intermediate_size = config.decoder_intermediate_size

        table = sincos_positions(config.grid_size, config.decoder_hidden_size)
        self.register_buffer("decoder_pos_embed", table.to(torch.get_default_dtype()))
        if config.decoder_input == "positions":
            self.decoder_cls_token = nn.Parameter(torch.zeros(1, 1, config.decoder_hidden_size))
            self.decoder_embed = nn.Linear(config.decoder_hidden_size, config.decoder_hidden_size)
        else:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, config.decoder_hidden_size))
            self.decoder_embed = nn.Linear(config.hidden_size, config.decoder_hidden_size)
        self.skips = nn.ModuleList([DecayedViTMAESkip(config) for _ in range(config.num_skips)])
        self.decoder_layers = nn.ModuleList(
            [DecayedViTMAELayer(layer_config) for _ in range(config.decoder_num_hidden_layers)]
        )
        for layer in self.decoder_layers:
            # Attention reads the kernel's name from its config at every call: with the model's config, one switch
            # changes the kernel of encoder and decoder.
            layer.attention.config = config
        self.decoder_norm = nn.LayerNorm(config.decoder_hidden_size, eps=config.layer_norm_eps)
        patch_dim = math.prod(as_pair(config.patch_size)) * config.num_channels
        self.decoder_pred = nn.Linear(config.decoder_hidden_size, patch_dim)
        self.decoder_pred.init_gain = 0.0 if config.zero_init_branches else 1.0

    def forward(
        self,
        latent: torch.Tensor,
        ids_restore: torch.Tensor,
        skips: tuple[torch.Tensor, ...] = (),
        grid_size: tuple[int, int] | None = None,
        num_decoded: int | None = None,
    ) -> torch.Tensor:
        """Predicted patches in shuffled order, visible patches first; with `num_decoded`, so many masked patches alone.

        Args:
            latent (`torch.Tensor` of shape `(batch, 1 + num_visible, hidden_size)`): Encoder output.
            ids_restore (`torch.Tensor` of shape `(batch, num_patches)`): Index of each patch in the shuffled order.
            skips (`tuple(torch.Tensor)`): Encoder outputs for the first decoder layers, deepest first.
            grid_size (`tuple(int, int)`, *optional*): Patches along height and width; the configured grid by default.
            num_decoded (`int`, *optional*):
                Number of masked patches that the decoder gets, the first in the shuffled order: as the order is random, a
                random share of them. By default it gets all.
        """
        batch_size, num_visible = latent.shape[0], latent.shape[1] - 1
        ids_shuffle = ids_restore.argsort(dim=1)
        if num_decoded is not None:
            ids_shuffle = ids_shuffle[:, : num_visible + num_decoded]
        order = F.pad(ids_shuffle + 1, (1, 0))  # the class token stays first: (batch, 1 + decoder patches)
        positions = interpolate_positions(
            self.decoder_pos_embed, self.config.grid_size, grid_size or self.config.grid_size
        )

        if self.config.decoder_input == "positions":
            tokens = self.decoder_embed(torch.cat([self.decoder_cls_token, positions[:, 1:]], dim=1))
            hidden_states = tokens[0].index_select(0, order.flatten()).view(*order.shape, -1)
        else:
            masked = self.mask_token.expand(batch_size, ids_shuffle.shape[1] - num_visible, -1)
            hidden_states = torch.cat([self.decoder_embed(latent), masked], dim=1) + positions[0][order]

        for index, layer in enumerate(self.decoder_layers):
            if index < len(self.skips):
                hidden_states = self.skips[index](hidden_states, skips[index])
            hidden_states = layer(hidden_states)

        hidden_states = hidden_states[:, 1:] if num_decoded is None else hidden_states[:, 1 + num_visible :]
        return self.decoder_pred(self.decoder_norm(hidden_states))


class DecayedViTMAEPreTrainedModel(ViTMAEPreTrainedModel):
    """Initialisation, loading and saving shared by the encoder and its heads."""

    config: DecayedViTMAEConfig
    _no_split_modules = ["DecayedViTMAEEmbeddings", "DecayedViTMAELayer"]

    def __init__(self, config: DecayedViTMAEConfig):
        if config.model_type != DecayedViTMAEConfig.model_type:
            raise ValueError(
                f"`config` must be a DecayedViTMAEConfig, got {type(config).__name__}; "
                "`DecayedViTMAEConfig.plain(...)` describes transformers' ViTMAE."
            )
        config.validate()  # fields may have changed since the config was constructed
        # Not super(): the ViTMAE classes further along would build modules without decay.
        PreTrainedModel.__init__(self, config)

    @torch.no_grad()
    def _init_weights(self, module):
        # Functions of `init` skip tensors that a checkpoint has filled; they need the tensor itself, not a view of it.
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=getattr(module, "init_gain", 1.0))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            # Xavier of the linear map from a patch's pixels to the embedding.
            bound = math.sqrt(6 / (module.weight[0].numel() + module.weight.shape[0]))
            init.uniform_(module.weight, -bound, bound)
            init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, DecayedViTMAELayer):
            for learned_alpha in module.parameters(recurse=False):
                init.ones_(learned_alpha)
        elif isinstance(module, (DecayedViTMAEEmbeddings, DecayedViTMAESkip, DecayedViTMAEDecoder)):
            for token in module.parameters(recurse=False):
                init.normal_(token, std=self.config.initializer_range)
            # The tables are never trained: left at zero, every masked patch gets the same prediction.
            for table in module.buffers(recurse=False):
                init.copy_(table, sincos_positions(self.config.grid_size, table.shape[-1]))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """Loads a checkpoint of this family, or one of transformers' ViTMAE as the plain preset.

        Weights must be safetensors and must fill the encoder. A head is loaded as a whole or starts untrained. Anything
        else is an error that lists the keys. Arguments are those of `PreTrainedModel.from_pretrained`.
        """
        source = pretrained_model_name_or_path
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise ValueError("`use_safetensors` must be True: pickled weights are read by `hf-decayed convert` only.")
        source_type = cls.config_class.model_type
        if source is not None:
            # `get_config_dict` does not use `trust_remote_code`, and would warn of it.
            download = {name: value for name, value in kwargs.items() if name != "trust_remote_code"}
            try:
                source_type = PreTrainedConfig.get_config_dict(source, **download)[0].get("model_type")
            except OSError:
                if "config" not in kwargs:
                    raise
        if source_type == "vit_mae":
            kwargs.setdefault("key_mapping", VIT_MAE_KEY_MAPPING)
        try:
            model, info = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights of '{source}' are damaged or incomplete ({error}): download them again."
            ) from error
        except OSError as error:
            if source is not None and os.path.exists(os.path.join(source, "pytorch_model.bin")):
                raise OSError(
                    f"'{source}' holds pickled weights, not safetensors; `hf-decayed convert --from vit-mae` reads those."
                ) from error
            raise
        model._check_loaded_keys(source, source_type, **info)
        return (model, info) if output_loading_info else model

    def _check_loaded_keys(self, source, source_type, missing_keys, unexpected_keys, mismatched_keys=(), **info):
        mismatched = [key if isinstance(key, str) else key[0] for key in mismatched_keys]
        # `ignore_mismatched_sizes` may drop a classifier with other labels, and nothing else.
        absent = {*missing_keys, *(key for key in mismatched if not key.startswith("classifier."))}
        # A head is loaded as a whole or is new as a whole; a head of another class is ignored.
        own = {prefix for head in HEADS for prefix in head if hasattr(self, prefix.rstrip("."))}
        new = {
            prefix
            for head in HEADS
            for prefix in head
            if all(key in absent for key in self.state_dict() if key.startswith(head))
        }
        foreign = {prefix for head in HEADS for prefix in head} - own
        missing = [key for key in absent if not key.startswith(tuple(new))]
        unexpected = [key for key in unexpected_keys if not key.startswith(tuple(foreign))]
        if "classifier." in own & new and not self.config.final_norm:
            # A new classifier may drop the encoder's final norm: it has its own norm after pooling.
            unexpected = [key for key in unexpected if key.removeprefix("vit.") not in FINAL_NORM]
        if "decoder." in own & new:
            if source_type != self.config_class.model_type:
                missing += [key for key in absent if key.startswith("decoder.")]
            else:
                warnings.warn(f"'{source}' holds no decoder: it starts untrained.", stacklevel=3)
        if missing or unexpected:
            raise ValueError(
                f"The weights of '{source}' do not fit {type(self).__name__}. Missing or of another shape: "
                f"{sorted(missing) or 'none'}. Unexpected: {sorted(unexpected) or 'none'}. "
                "`hf-decayed convert` reads other formats; for other image sizes pass `interpolate_pos_encoding=True`."
            )

    def save_pretrained(self, save_directory, is_main_process=True, *args, push_to_hub=False, **kwargs):
        """Writes weights, config, image processor and this code, so that any `Auto` class loads the folder.

        Arguments are those of `PreTrainedModel.save_pretrained`. An image processor of this image size and number of
        channels that is already in the folder is not overwritten.
        """
        encoder = getattr(self, "vit", self)
        if self.config.residual_form == "decay" and self.config.shortcut_schedule != "learned":
            if encoder.shortcut_alphas() != self.config.shortcut_alphas():
                raise ValueError(
                    "The config's shortcut fields have changed since the model was built, so the saved config would not "
                    "describe this network."
                )
        if push_to_hub:  # a fresh copy is uploaded: complete, and without files of an older save
            repository = kwargs.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
            self.save_pretrained(save_directory, is_main_process)
            return self.push_to_hub(repository, **kwargs)
        self.config.auto_map = dict(AUTO_MAP)
        keep_saved_pipelines(self.config, save_directory)
        kwargs.setdefault("save_original_format", False)  # our parameter names, also for converted weights
        if is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            processor = image_processor(self.config)
            path = os.path.join(save_directory, "preprocessor_config.json")
            if not os.path.exists(path) or not fits_saved_processor(processor, path):
                processor.save_pretrained(save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)


class DecayedViTMAEModel(DecayedViTMAEPreTrainedModel, ViTMAEModel):
    """The encoder. It sees the whole image, in patch order, unless `noise` or `mask_ratio` is passed."""

    # Heads of other classes in a checkpoint are ignored without a report; other unexpected keys are an error.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^classifier\.", r"^fc_norm\."]

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__(config)
        self.embeddings = DecayedViTMAEEmbeddings(config)
        self.layers = nn.ModuleList()
        for attention_alpha, mlp_alpha in config.shortcut_alphas():
            branch_scale = 1.0 if config.residual_form == "decay" else math.sqrt(0.5)
            if config.residual_form == "scale_both":
                attention_alpha = mlp_alpha = math.sqrt(0.5)
            if config.shortcut_schedule == "learned":
                if config.shortcut_scope in ("both", "attention"):
                    attention_alpha = nn.Parameter(torch.ones(1))
                if config.shortcut_scope in ("both", "mlp"):
                    mlp_alpha = nn.Parameter(torch.ones(1))
            self.layers.append(DecayedViTMAELayer(config, attention_alpha, mlp_alpha, branch_scale))
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.final_norm else nn.Identity()
        )
        self.post_init()

    def shortcut_alphas(self) -> list[tuple[float, float]]:
        """The current `(attention_alpha, mlp_alpha)` of every layer, learned or not."""
        alphas = [(layer.attention_alpha, layer.mlp_alpha) for layer in self.layers]
        return [tuple(alpha.item() if isinstance(alpha, torch.Tensor) else alpha for alpha in pair) for pair in alphas]

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        noise: torch.Tensor | None = None,
        mask_ratio: float | None = None,
        interpolate_pos_encoding: bool = False,
        attention_mask: torch.Tensor | None = None,
        output_skips: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> DecayedViTMAEModelOutput:
        r"""
        pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`):
            Images, normalised by ImageNet's mean and standard deviation.
        noise (`torch.Tensor` of shape `(batch_size, num_patches)`, *optional*):
            The share `mask_ratio` of patches with the largest values is masked. Pass it to repeat a masking.
        mask_ratio (`float`, *optional*):
            Share of patches to mask, in [0, 1). Defaults to `config.mask_ratio` with `noise`, and to no masking
            without it.
        interpolate_pos_encoding (`bool`, *optional*, defaults to `False`):
            Accept a height and width other than `config.image_size`; positions are interpolated in two dimensions.
        output_skips (`bool`, *optional*, defaults to `False`):
            Return the inputs of the decoder's skips.
        """
        reject_unknown_arguments(kwargs, self)
        hidden_states, mask, ids_restore = self.embeddings(
            pixel_values, noise=noise, mask_ratio=mask_ratio, interpolate_pos_encoding=interpolate_pos_encoding
        )
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        skips = []
        for index, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
            if output_skips and index % 2 == 1:
                skips.append(hidden_states)
        sequence_output = self.layernorm(hidden_states)
        if output_skips:
            # The deepest skip is the encoder's output, so a final norm gets a gradient even if nothing else uses it.
            skips = [sequence_output, *skips[-2::-1]][: self.config.num_skips]
        return DecayedViTMAEModelOutput(
            last_hidden_state=sequence_output,
            mask=mask,
            ids_restore=ids_restore,
            pooler_output=pool_tokens(sequence_output, self.config.pooling),
            skips=tuple(skips) if output_skips else None,
        )


class DecayedViTMAEForPreTraining(DecayedViTMAEPreTrainedModel, ViTMAEForPreTraining):
    """Encoder and decoder for masked-autoencoder pretraining. It always masks, in training and in evaluation."""

    _no_split_modules = ["DecayedViTMAEEmbeddings", "DecayedViTMAELayer", "DecayedViTMAEDecoder"]
    # The loss is a mean over this batch: `Trainer` must divide it by the number of accumulation steps.
    accepts_loss_kwargs = False

    # Heads of other classes in a checkpoint are ignored without a report; other unexpected keys are an error.
    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^fc_norm\."]

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__(config)
        self.vit = DecayedViTMAEModel(config)
        self.decoder = DecayedViTMAEDecoder(config)
        self.post_init()

    def patchify(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False) -> torch.Tensor:
        """Splits images into patches: `(batch, channels, height, width)` -> `(batch, num_patches, p * q * channels)`."""
        grid_height, grid_width = self.vit.embeddings.patch_grid(pixel_values, interpolate_pos_encoding)
        patch_height, patch_width = as_pair(self.config.patch_size)
        patches = pixel_values.reshape(
            -1, self.config.num_channels, grid_height, patch_height, grid_width, patch_width
        )
        return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def unpatchify(
        self, patchified_pixel_values: torch.Tensor, original_image_size: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """The inverse of `patchify`; `original_image_size` is `(height, width)`, the configured size by default."""
        height, width = original_image_size or as_pair(self.config.image_size)
        patch_height, patch_width = as_pair(self.config.patch_size)
        grid_height, grid_width = height // patch_height, width // patch_width
        if patchified_pixel_values.shape[1] != grid_height * grid_width:
            raise ValueError(
                f"An image of {height} x {width} has {grid_height} x {grid_width} patches, "
                f"got {patchified_pixel_values.shape[1]}."
            )
        patches = patchified_pixel_values.reshape(
            -1, grid_height, grid_width, patch_height, patch_width, self.config.num_channels
        )
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        noise: torch.Tensor | None = None,
        mask_ratio: float | None = None,
        interpolate_pos_encoding: bool = False,
        attention_mask: torch.Tensor | None = None,
        return_loss: bool = True,
        return_logits: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ViTMAEForPreTrainingOutput:
        r"""
        noise, mask_ratio, interpolate_pos_encoding:
            As in [`DecayedViTMAEModel.forward`], but `mask_ratio` always defaults to `config.mask_ratio`.
        return_loss (`bool`, *optional*, defaults to `True`):
            Compute the mean squared error over the masked patches.
        return_logits (`bool`, *optional*, defaults to `True`):
            Return predictions of all patches, in patch order. With `False` only masked patches are predicted, which is
            enough for the loss: the share `config.decode_ratio` of them.
        """
        reject_unknown_arguments(kwargs, self)
        mask_ratio = self.config.mask_ratio if mask_ratio is None else mask_ratio
        grid_size = self.vit.embeddings.patch_grid(pixel_values, interpolate_pos_encoding)
        if 0.0 <= mask_ratio < 1.0 and int(math.prod(grid_size) * (1 - mask_ratio)) == math.prod(grid_size):
            raise ValueError(
                f"`mask_ratio` must mask at least one of {math.prod(grid_size)} patches, got {mask_ratio}."
            )
        outputs = self.vit(
            pixel_values,
            noise=noise,
            mask_ratio=mask_ratio,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            output_skips=True,
            return_dict=True,
            **kwargs,
        )
        num_visible = outputs.last_hidden_state.shape[1] - 1
        num_decoded = num_masked = math.prod(grid_size) - num_visible
        if not return_logits:
            num_decoded = max(1, round(self.config.decode_ratio * num_masked))
        predicted = self.decoder(
            outputs.last_hidden_state,
            outputs.ids_restore,
            outputs.skips,
            grid_size,
            num_decoded=None if return_logits else num_decoded,
        )
        loss = None
        if return_loss:
            ids_decoded = outputs.ids_restore.argsort(dim=1)[:, num_visible : num_visible + num_decoded]
            target = select_rows(self.patchify(pixel_values, interpolate_pos_encoding), ids_decoded)
            # In float32 at least, and on the decoder's device, which may not be the image's.
            target = target.to(predicted.device, torch.promote_types(predicted.dtype, torch.float32))
            if self.config.norm_pix_loss:
                variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
                target = (target - mean) / (variance + 1.0e-6) ** 0.5
            # Every image has the same number of them, so one mean over all pixels is the mean over patches.
            loss = F.mse_loss(predicted[:, -num_decoded:].to(target.dtype), target)

        return ViTMAEForPreTrainingOutput(
            loss=loss,
            logits=select_rows(predicted, outputs.ids_restore.to(predicted.device)) if return_logits else None,
            mask=outputs.mask,
            ids_restore=outputs.ids_restore,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @torch.no_grad()
    def reconstruct(
        self,
        pixel_values: torch.Tensor,
        noise: torch.Tensor | None = None,
        mask_ratio: float | None = None,
        interpolate_pos_encoding: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images with predictions in place of the masked patches, and the mask: both in the shape of `pixel_values`.

        A model with `norm_pix_loss` predicts normalised patches; each prediction gets the mean and the standard
        deviation of the true patch.
        """
        outputs = self(
            pixel_values,
            noise=noise,
            mask_ratio=mask_ratio,
            interpolate_pos_encoding=interpolate_pos_encoding,
            return_loss=False,
            return_dict=True,
        )
        target = self.patchify(pixel_values, interpolate_pos_encoding)
        predicted = outputs.logits.to(target)
        if self.config.norm_pix_loss:
            variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
            predicted = predicted * (variance + 1.0e-6) ** 0.5 + mean
        size = tuple(pixel_values.shape[2:])
        masked = outputs.mask.to(target.device).bool().unsqueeze(-1).expand_as(target)
        return self.unpatchify(torch.where(masked, predicted, target), size), self.unpatchify(masked, size)


class DecayedViTMAEForImageClassification(DecayedViTMAEPreTrainedModel):
    """Encoder and a linear classifier on the pooled feature. It never masks."""

    # Heads of other classes in a checkpoint are ignored without a report; other unexpected keys are an error.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\."]

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = DecayedViTMAEModel(config)
        self.fc_norm = (
            nn.Identity() if config.final_norm else nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.classifier.init_gain = 0.0  # a new classifier gives every class the same score
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Classes in [0, `config.num_labels`) for a cross-entropy loss; floats, with one label, for a regression.
        """
        reject_unknown_arguments(kwargs, self)
        outputs = self.vit(
            pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.fc_norm(outputs.pooler_output))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class DecayedViTMAEBackbone(BackboneMixin, DecayedViTMAEModel):
    """Encoder that returns dense feature maps `(batch, hidden_size, height, width)` for detection or segmentation heads.

    `out_features` or `out_indices` select the layers (`stem`, `stage1`, ...; the last by default). Height and width of
    the images must be divisible by the patch size.
    """

    def __init__(self, config: DecayedViTMAEConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * (1 + config.num_hidden_layers)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        reject_unknown_arguments(kwargs, self)
        outputs = DecayedViTMAEModel.forward(
            self, pixel_values, interpolate_pos_encoding=True, return_dict=True, **kwargs
        )
        grid_size = self.embeddings.patch_grid(pixel_values, interpolate_pos_encoding=True)
        feature_maps = tuple(
            self.layernorm(hidden_states)[:, 1:].transpose(1, 2).unflatten(2, grid_size).contiguous()
            for stage, hidden_states in zip(self.stage_names, outputs.hidden_states)
            if stage in self.out_features
        )
        return BackboneOutput(
            feature_maps=feature_maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def fits_saved_processor(processor, path: str) -> bool:
    """Whether a `preprocessor_config.json` has the image size and the number of channels of a processor."""
    with open(path) as file:
        saved = json.load(file)
    size = saved.get("crop_size") or saved.get("size")
    return size == processor.size and len(saved.get("image_mean", [])) == len(processor.image_mean)


def keep_saved_pipelines(config: DecayedViTMAEConfig, folder: str | os.PathLike) -> None:
    """Drops custom pipelines whose code is not in the folder, and makes the others plain: `pipeline()` puts classes in."""
    entries = config.__dict__.pop("custom_pipelines", None) or {}
    files = {task: os.path.join(folder, f"{entry['impl'].partition('.')[0]}.py") for task, entry in entries.items()}
    saved = {
        task: {**entry, "pt": [getattr(auto_class, "__name__", auto_class) for auto_class in entry["pt"]]}
        for task, entry in entries.items()
        if os.path.exists(files[task])
    }
    if saved:
        config.custom_pipelines = saved


def image_processor(config: DecayedViTMAEConfig):
    """The image processor that is saved with a model of this config."""
    return default_image_processor(config.image_size, config.num_channels)


AUTO_MAP = {
    "AutoConfig": "configuration_decayed_vit_mae.DecayedViTMAEConfig",
    "AutoModel": "modeling_decayed_vit_mae.DecayedViTMAEModel",
    "AutoModelForPreTraining": "modeling_decayed_vit_mae.DecayedViTMAEForPreTraining",
    "AutoModelForImageClassification": "modeling_decayed_vit_mae.DecayedViTMAEForImageClassification",
    "AutoBackbone": "modeling_decayed_vit_mae.DecayedViTMAEBackbone",
}
DecayedViTMAEModel.register_for_auto_class("AutoModel")
DecayedViTMAEForPreTraining.register_for_auto_class("AutoModelForPreTraining")
DecayedViTMAEForImageClassification.register_for_auto_class("AutoModelForImageClassification")
DecayedViTMAEBackbone.register_for_auto_class("AutoBackbone")
