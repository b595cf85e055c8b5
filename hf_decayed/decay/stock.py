"""Stock models: classes of transformers that compute what our encoders compute, and load without our code.

With P_k the product of the alphas up to addition k and P that of all, u = (P / P_k) * x obeys `u <- u + (P / P_k) * f(norm(u))`:
embeddings take the factor P, the last layer of every branch P / P_k, and what leaves the last layer is x itself.
"""

import math

import torch
from torch import nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BeitModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
)

from ..errors import UserError
from ..models.modeling_decayed_vit_mae import (
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)


__all__ = ["stock_model"]

SHARED_FIELDS = (
    "attention_probs_dropout_prob",
    "hidden_act",
    "hidden_dropout_prob",
    "hidden_size",
    "image_size",
    "initializer_range",
    "intermediate_size",
    "num_attention_heads",
    "num_channels",
    "num_hidden_layers",
    "patch_size",
)
DECODER_FIELDS = (
    "decoder_hidden_size",
    "decoder_intermediate_size",
    "decoder_num_attention_heads",
    "decoder_num_hidden_layers",
    "mask_ratio",
    "norm_pix_loss",
)


def stock_model(model: nn.Module) -> PreTrainedModel:
    """A model of transformers with the weights of one of ours, folded, so that its outputs are the same.

    `last_hidden_state` of an encoder, `logits` of a classifier, and loss and `logits` of a plain masked autoencoder agree to
    the precision of the weights and the eps of the norms; hidden states of earlier layers are scaled. Encoders without a
    final norm become `BeitModel`, whose key projections have no bias: it changes no attention. Encoders with one become
    `ViTModel`. Their `pooler_output` is not ours: BEiT's is the mean of the patches after a norm, ViT's the class
    token.

    Raises `UserError` for models without such a class. Returns a new model; the old one stays as it is.

    >>> stock_model(AutoModel.from_pretrained("decayed-mae", trust_remote_code=True)).save_pretrained("stock")
    """
    stock_class = find_stock_class(model)
    config = model.config
    encoder = getattr(model, "vit", model)
    alphas = [alpha for pair in encoder.shortcut_alphas() for alpha in pair]
    if min(alphas) <= 0:
        raise UserError("A shortcut with an alpha of 0 has no stock form: weights would be divided by it.")
    stock = stock_class(stock_config(stock_class, config, math.prod(alphas))).to(model.dtype).eval()
    weights = {name.removeprefix("vit."): tensor.detach().clone() for name, tensor in model.state_dict().items()}
    scale_weights(weights, alphas, encoder.layers[0].branch_scale)
    load_stock_weights(stock, weights)
    return stock


def find_stock_class(model: nn.Module) -> type[PreTrainedModel]:
    if not isinstance(model, (DecayedViTMAEModel, DecayedViTMAEForPreTraining, DecayedViTMAEForImageClassification)):
        raise UserError(
            f"{type(model).__name__} has no stock form: there is one of masked autoencoders and their classifiers, and of "
            "models of `decay_shortcuts` by `fold_shortcuts`."
        )
    config = model.config
    is_square = isinstance(config.image_size, int) and isinstance(config.patch_size, int)
    if isinstance(model, DecayedViTMAEForImageClassification):
        if config.pooling == "cls":
            return ViTForImageClassification
        if config.pooling == "patch_mean" and not config.final_norm and is_square:
            return BeitForImageClassification
        raise UserError(
            f"No classifier of transformers pools as `pooling='{config.pooling}'` with `final_norm={config.final_norm}` does: "
            "train it with pooling 'cls', or 'patch_mean' without a final norm, or fold its encoder alone."
        )
    if not config.final_norm and not is_square:
        raise UserError("The stock form of an encoder without a final norm is BEiT, which needs square images.")
    has_stock_decoder = config.decoder_input == "latent" and not config.encoder_decoder_skips
    if isinstance(model, DecayedViTMAEForPreTraining) and config.final_norm and has_stock_decoder:
        return ViTMAEForPreTraining
    return ViTModel if config.final_norm else BeitModel


def stock_config(stock_class: type[PreTrainedModel], config, product: float):
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    # The first layers see a stream that is smaller by the whole product, and need an eps that is small compared with
    # it.
    fields["layer_norm_eps"] = config.layer_norm_eps * product**2
    if "ForImageClassification" in stock_class.__name__:
        fields |= {"id2label": config.id2label, "label2id": config.label2id}
    if stock_class.config_class is BeitConfig:
        return BeitConfig(
            **fields,
            use_absolute_position_embeddings=True,
            use_mean_pooling=True,
            layer_scale_init_value=0.0,
            drop_path_rate=0.0,
        )
    fields["qkv_bias"] = config.qkv_bias
    if stock_class is ViTMAEForPreTraining:
        return ViTMAEConfig(**fields, **{name: getattr(config, name) for name in DECODER_FIELDS})
    return ViTConfig(**fields, pooler_act="linear")


def scale_weights(weights: dict[str, torch.Tensor], alphas: list[float], branch_scale: float) -> None:
    """Scales embeddings and the outputs of all branches; names are without the prefix of the encoder."""
    scale = math.prod(alphas)
    projection = "embeddings.patch_embeddings.projection"
    for name in (
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        f"{projection}.weight",
        f"{projection}.bias",
    ):
        weights[name] *= scale
    for index, alpha in enumerate(alphas):
        scale /= alpha
        layer = f"layers.{index // 2}.{'mlp.fc2' if index % 2 else 'attention.o_proj'}"
        weights[f"{layer}.weight"] *= branch_scale * scale
        weights[f"{layer}.bias"] *= branch_scale * scale


def load_stock_weights(stock: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Fills every parameter of a stock model: with ours of the same name, or with values that change nothing."""
    prefix = "" if isinstance(stock, (BeitModel, ViTModel)) else f"{stock.base_model_prefix}."
    loaded = {}
    for name, parameter in stock.state_dict().items():
        own_name = name.removeprefix(prefix)
        if own_name not in weights:
            # The norm of a classifier follows its pooling, where BEiT has the norm of its pooler.
            own_name = own_name.replace("pooler.layernorm", "fc_norm").replace("layernorm", "fc_norm")
        if own_name in weights:
            loaded[name] = weights[own_name]
        elif name == "pooler.dense.weight":
            loaded[name] = torch.eye(len(parameter))
        else:  # the norm of BEiT's pooler, and biases that ours may lack
            loaded[name] = torch.ones_like(parameter) if name.endswith("norm.weight") else torch.zeros_like(parameter)
    stock.load_state_dict(loaded)
