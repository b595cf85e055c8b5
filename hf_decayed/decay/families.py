"""Residual branches of known blocks: which module reads the stream, and which module's output is added to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from ..errors import UserError


@dataclass(frozen=True)
class Branch:
    """One residual addition, `x + f(x)`, by the names of submodules of its block.

    Args:
        kind (`str`): `attention`, `mlp`, `convolution`, or `parallel` for attention and MLP in one addition.
        reader (`str`, *optional*): First module that gets the stream; `None` if an earlier branch's reader reads for it.
        adder (`str`, *optional*): Module whose output is added, directly or through layer scale, gate, dropout.
        streams (`tuple[str]`): Arguments of the block's `forward` that hold the stream, concatenated if there are several.
        adder_output (`int`): Element of the adder's output that is added, if the output is a tuple.
        output_layers (`tuple[str]`): Last linear layers of the branch: scaling their weights scales the branch.
        input_layers (`tuple[str]`): Linear layers that read the stream without a norm.
        shortcut (`str`, *optional*): Module that computes the shortcut, for blocks that have one.
    """

    kind: str
    reader: str | None = None
    adder: str | None = None
    streams: tuple[str, ...] = ("hidden_states",)
    adder_output: int = 0
    output_layers: tuple[str, ...] = ()
    input_layers: tuple[str, ...] = ()
    shortcut: str | None = None


@dataclass(frozen=True)
class Block:
    """Additions of a block in the order of its `forward`; branches of one step share an alpha, one for each stream."""

    steps: tuple[tuple[Branch, ...], ...]
    # Position of each stream in the output of the block, if the output is a tuple.
    stream_outputs: dict[str, int] = field(default_factory=dict)
    stage: int = 0


def scaled_names(block: Block) -> list[str]:
    """Submodules of a block whose inputs or outputs the decay scales; the last adder needs no scale."""
    names = []
    for streams in block_streams(block):
        branches = stream_branches(block, streams)
        names += [branch.reader for branch in branches] + [branch.adder for branch in branches[:-1]]
        names += [branch.shortcut for branch in branches]
    return [name for name in dict.fromkeys(names) if name]


def block_streams(block: Block) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(branch.streams for step in block.steps for branch in step))


def stream_branches(block: Block, streams: tuple[str, ...]) -> list[Branch]:
    return [branch for step in block.steps for branch in step if branch.streams == streams]


def pre_norm(
    attention_norm: str, attention: str, mlp_norm: str, mlp: str, outputs: tuple[str, str, str | None]
) -> Callable[[nn.Module], Block]:
    """A transformer layer of two branches; `outputs` are their last layers, the third for another form of the MLP."""

    def describe(block: nn.Module) -> Block:
        attention_output, mlp_output, other_output = outputs
        if other_output and not has_module(block, mlp_output):
            mlp_output = other_output
        return Block(
            (
                (Branch("attention", attention_norm, attention, output_layers=(attention_output,)),),
                (Branch("mlp", mlp_norm, mlp, output_layers=(mlp_output,)),),
            )
        )

    return describe


def has_module(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def describe_gpt2(block: nn.Module) -> Block:
    if hasattr(block, "crossattention"):
        raise UserError(
            "GPT-2 with `add_cross_attention=True` has a branch that runs only at times: it has no fixed decay."
        )
    return pre_norm("ln_1", "attn", "ln_2", "mlp", ("attn.c_proj", "mlp.c_proj", None))(block)


def describe_convnext(block: nn.Module) -> Block:
    branch = Branch(
        "convolution", "dwconv", streams=("features",), output_layers=("pwconv2",), input_layers=("dwconv",)
    )
    return Block(((branch,),))


def describe_resnet(block: nn.Module) -> Block:
    return Block(((Branch("convolution", streams=("hidden_state",), shortcut="shortcut"),),))


def describe_basic_transformer(block: nn.Module) -> Block:
    """diffusers' `BasicTransformerBlock` in the forms that DiT and PixArt have."""
    if block.norm_type not in ("ada_norm_zero", "ada_norm_single") or hasattr(block, "fuser"):
        raise UserError(
            f"BasicTransformerBlock is supported as DiT and PixArt have it, not with norm_type '{block.norm_type}'"
            f"{' and GLIGEN layers' if hasattr(block, 'fuser') else ''}."
        )
    attention_norm = "norm1.norm" if block.norm_type == "ada_norm_zero" else "norm1"
    attention = Branch("attention", attention_norm, "attn1", output_layers=("attn1.to_out.0",))
    mlp_norm = "norm3" if block.norm_type == "ada_norm_zero" else "norm2"
    mlp = Branch("mlp", mlp_norm, "ff", output_layers=("ff.net.2",))
    if block.attn2 is None:
        return Block(((attention,), (mlp,)))
    # PixArt's cross-attention reads the stream itself: its norm2 belongs to the MLP.
    if block.norm_type == "ada_norm_single":
        reader, inputs = "attn2", ("attn2.to_q",)
    else:
        reader, inputs = "norm2", ()
    cross = Branch("attention", reader, "attn2", output_layers=("attn2.to_out.0",), input_layers=inputs)
    return Block(((attention,), (cross,), (mlp,)))


JOINT_OUTPUTS = {"encoder_hidden_states": 0, "hidden_states": 1}


def describe_joint_transformer(block: nn.Module) -> Block:
    """Blocks of SD3 and Flux with an image stream and a text stream, which attend to one another."""
    text = ("encoder_hidden_states",)
    has_text_branches = not getattr(block, "context_pre_only", False)
    attention = [Branch("attention", "norm1.norm", "attn", output_layers=("attn.to_out.0",))]
    mlp = [Branch("mlp", "norm2", "ff", output_layers=("ff.net.2",))]
    if has_text_branches:
        attention += [Branch("attention", "norm1_context.norm", "attn", text, 1, output_layers=("attn.to_add_out",))]
        mlp += [Branch("mlp", "norm2_context", "ff_context", text, output_layers=("ff_context.net.2",))]
    steps = [tuple(attention), tuple(mlp)]
    if getattr(block, "use_dual_attention", False):  # SD3.5: norm1 reads for both attentions
        steps.insert(1, (Branch("attention", None, "attn2", output_layers=("attn2.to_out.0",)),))
    return Block(tuple(steps), JOINT_OUTPUTS)


def describe_flux_single(block: nn.Module) -> Block:
    branch = Branch(
        "parallel", "norm.norm", streams=("encoder_hidden_states", "hidden_states"), output_layers=("proj_out",)
    )
    return Block(((branch,),), JOINT_OUTPUTS)


def describe_unet_resnet(block: nn.Module) -> Block:
    """diffusers' `ResnetBlock2D`; a shortcut that projects is decayed like the others."""
    if block.conv_shortcut is not None:
        return Block(((Branch("convolution", streams=("input_tensor",), shortcut="conv_shortcut"),),))
    return Block(((Branch("convolution", "norm1", streams=("input_tensor",)),),))


def describe_unet_attention(block: nn.Module) -> Block:
    if not block.residual_connection or block.group_norm is None or block.spatial_norm is not None:
        raise UserError("Attention of a UNet2D is supported with its own shortcut and a group norm only.")
    return Block(((Branch("attention", "group_norm"),),))


VIT = pre_norm(
    "layernorm_before", "attention", "layernorm_after", "mlp", ("attention.o_proj", "mlp.fc2", "mlp.down_proj")
)
DINO = pre_norm("norm1", "attention", "norm2", "mlp", ("attention.o_proj", "mlp.fc2", "mlp.down_proj"))
CLIP = pre_norm("layer_norm1", "self_attn", "layer_norm2", "mlp", ("self_attn.out_proj", "mlp.fc2", None))
LLAMA = pre_norm(
    "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", ("self_attn.o_proj", "mlp.down_proj", None)
)


@dataclass(frozen=True)
class Family:
    """Blocks of an architecture by class name; `staged` if downsampling through a norm begins a new stream."""

    describe: dict[str, Callable[[nn.Module], Block]]
    staged: bool = False
    fold_refusal: str = ""
    skip: str = ""  # blocks with this word in their names are not decayed
    raw_output: str = ""  # output that comes from the stream without a final norm
    final_norm: str = ""  # module that follows the blocks in some models of the family: then no output is raw


FAMILIES = {
    "ViT": Family({"ViTLayer": VIT}),
    "DeiT": Family({"DeiTLayer": VIT}),
    "DINOv2": Family({"Dinov2Layer": DINO}),
    "DINOv2 with registers": Family({"Dinov2WithRegistersLayer": DINO}),
    "DINOv3": Family({"DINOv3ViTLayer": DINO}),
    "CLIP": Family({"CLIPEncoderLayer": CLIP}, raw_output="`last_hidden_state`", final_norm="final_layer_norm"),
    "SigLIP": Family({"SiglipEncoderLayer": CLIP}),
    "BEiT": Family({"BeitLayer": VIT}, raw_output="`last_hidden_state`", final_norm="layernorm"),
    "ViTMAE": Family({"ViTMAELayer": VIT}, skip="decoder"),  # the paper decays only the encoder
    "Swin": Family({"SwinLayer": VIT}, staged=True),
    "GPT-2": Family({"GPT2Block": describe_gpt2}),
    "Llama": Family({"LlamaDecoderLayer": LLAMA}),
    "ConvNeXt": Family({"ConvNextLayer": describe_convnext}, staged=True, raw_output="`last_hidden_state`"),
    "ResNet": Family(
        {"ResNetBasicLayer": describe_resnet, "ResNetBottleNeckLayer": describe_resnet},
        staged=True,
        fold_refusal="the convolutions and the classifier of a ResNet read its stream without a norm",
    ),
    "DiT and PixArt": Family({"BasicTransformerBlock": describe_basic_transformer}),
    "SD3": Family({"JointTransformerBlock": describe_joint_transformer}),
    "Flux": Family(
        {
            "FluxTransformerBlock": describe_joint_transformer,
            "FluxSingleTransformerBlock": describe_flux_single,
        }
    ),
}
# Words in the names of model classes that read hidden states between the blocks, where folding changes their scale.
READERS_OF_HIDDEN_STATES = ("Backbone", "Segmentation", "DepthEstimation", "Detection")
# Layers that normalise after the addition: the norm undoes any factor before it.
POST_NORM = (
    "AlbertLayer",
    "BartEncoderLayer",
    "BertLayer",
    "CamembertLayer",
    "DebertaV2Layer",
    "DebertaLayer",
    "ElectraLayer",
    "ErnieLayer",
    "MPNetLayer",
    "RobertaLayer",
    "TransformerBlock",  # DistilBERT
    "Wav2Vec2EncoderLayer",
    "XLMRobertaLayer",
)
