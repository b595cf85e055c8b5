"""The residual stack of a model: its blocks in the order in which they run, or why there is none."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import UserError
from .families import (
    FAMILIES,
    POST_NORM,
    READERS_OF_HIDDEN_STATES,
    Block,
    Branch,
    Family,
    describe_unet_attention,
    describe_unet_resnet,
    has_module,
    scaled_names,
)


# Only the user knows whether a norm follows the last of these blocks.
USER_OUTPUT = "what leaves the last block"
UNET_REFUSAL = "the skips and resampling layers of a UNet read its stream without a norm"
UNET_PARTS = ("DownBlock2D", "AttnDownBlock2D", "UNetMidBlock2D", "UpBlock2D", "AttnUpBlock2D")


@dataclass
class Stack:
    """Residual blocks of a model in the order in which they run."""

    modules: list[nn.Module]
    blocks: list[Block]
    # Why the decay cannot be folded into stock weights; empty if it can.
    fold_refusal: str = ""
    raw_output: str = ""
    is_unchecked: bool = False  # the user's blocks are compared with `blocks` when they first run


def find_stack(model: nn.Module, blocks: dict[type, list[tuple[str, ...]]] | None = None) -> Stack:
    """The residual stack of a model that is not decayed yet; raises `UserError` where there is none, or several.

    Args:
        blocks (`dict`, *optional*): Branches of the user's block classes, `(reader, adder)` or
            `(reader, adder, output_layer)`.
    """
    if blocks is not None:
        stack = find_user_blocks(model, blocks)
    elif any(library_class(module) == "UNet2DModel" for module in model.modules()):
        stack = find_unet_blocks(model)
    else:
        stack = find_family_blocks(model)
    check_blocks(model, stack)
    return stack


def find_part(model: nn.Module, part: str = "") -> nn.Module:
    """The submodule of this name; without a name, the model itself."""
    if not isinstance(model, nn.Module):
        raise UserError(f"`model` must be a torch module, got {type(model).__name__}.")
    if not has_module(model, part):
        names = ", ".join(name for name, _ in model.named_children())
        raise UserError(f"{type(model).__name__} has no `part` '{part}'; its own are: {names}.")
    return model.get_submodule(part)


def library_class(module: nn.Module) -> str | None:
    """Name of the module's class if transformers or diffusers define it."""
    module_class = type(module)
    in_library = module_class.__module__.split(".")[0] in ("transformers", "diffusers")
    return module_class.__name__ if in_library else None


def find_family_blocks(model: nn.Module) -> Stack:
    families = {name: blocks for name, family in FAMILIES.items() if (blocks := named_blocks(model, family))}
    if not families:
        raise UserError(no_family_sentence(model))
    if len(families) > 1:
        raise UserError(
            f"{type(model).__name__} has several residual stacks ({', '.join(families)}): name the one to be decayed as `part`."
        )
    (name, named), *_ = families.items()
    family = FAMILIES[name]
    parents = list(dict.fromkeys(block_name.rpartition(".")[0] for block_name, _ in named))
    if not family.staged and len(parents) > len(family.describe):
        raise UserError(
            f"{type(model).__name__} has several residual stacks ({', '.join(parents)}): name the one to be decayed, "
            "as in `part='vision_model'`."
        )
    for parent in parents:
        strangers = {type(child).__name__ for child in model.get_submodule(parent).children()}
        if strangers := strangers - family.describe.keys():
            raise UserError(
                f"'{parent}' of {type(model).__name__} has blocks of unknown classes: {', '.join(strangers)}."
            )
    raw_output = "" if has_final_norm(model, family.final_norm) else family.raw_output
    stack = Stack([], [], family.fold_refusal or hidden_states_refusal(model), raw_output)
    for block_name, module in named:
        block = family.describe[type(module).__name__](module)
        stage = parents.index(block_name.rpartition(".")[0]) if family.staged else 0
        stack.modules.append(module)
        stack.blocks.append(Block(block.steps, block.stream_outputs, stage))
    return stack


def has_final_norm(model: nn.Module, final_norm: str) -> bool:
    return any(
        name.rpartition(".")[2] == final_norm and "pooler" not in name and not isinstance(module, nn.Identity)
        for name, module in model.named_modules()
    )


def hidden_states_refusal(model: nn.Module, decayed: Sequence[nn.Module] = ()) -> str:
    """Why hidden states of the `decayed` blocks may not change their scale; empty if nothing reads them without a norm."""
    for module in model.modules():
        reads = any(word in type(module).__name__ for word in READERS_OF_HIDDEN_STATES)
        config = getattr(module, "config", None)
        if hasattr(config, "vision_feature_layer") or hasattr(config, "vision_feature_layers"):  # as in LLaVA
            blocks = set(decayed)
            reads |= any("vision" in name for name, child in module.named_modules() if child in blocks)
        if reads:
            return f"{type(module).__name__} reads hidden states without a norm"
    return ""


def named_blocks(model: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if library_class(module) in family.describe and not (family.skip and family.skip in name)
    ]


def no_family_sentence(model: nn.Module) -> str:
    names = {library_class(module) for module in model.modules()}
    if post_norm := [name for name in POST_NORM if name in names]:
        return (
            f"{type(model).__name__} normalises after each addition ({post_norm[0]}), which undoes a decay of the "
            "shortcut: only pre-norm blocks can be decayed."
        )
    return (
        f"{type(model).__name__} has no blocks of a known family ({', '.join(FAMILIES)}, UNet2D): name its pre-norm blocks, "
        'as in `blocks={MyBlock: [("norm1", "attn"), ("norm2", "mlp")]}`.'
    )


def find_unet_blocks(model: nn.Module) -> Stack:
    """Blocks of a `UNet2DModel` in the order in which they run, which is not the order of its modules."""
    unets = [module for module in model.modules() if library_class(module) == "UNet2DModel"]
    if len(unets) > 1:
        raise UserError(f"{type(model).__name__} has {len(unets)} UNet2DModels: name the one to be decayed as `part`.")
    unet = unets[0]
    parts = [*unet.down_blocks, *([unet.mid_block] if unet.mid_block is not None else []), *unet.up_blocks]
    modules = [module for part in parts for module in unet_part_blocks(part)]
    describe = {"ResnetBlock2D": describe_unet_resnet, "Attention": describe_unet_attention}
    return Stack(modules, [describe[type(module).__name__](module) for module in modules], UNET_REFUSAL)


def unet_part_blocks(part: nn.Module) -> Iterator[nn.Module]:
    if type(part).__name__ not in UNET_PARTS:
        raise UserError(f"A UNet2D is supported with the blocks {', '.join(UNET_PARTS)}, not {type(part).__name__}.")
    resnets, attentions = list(part.resnets), list(getattr(part, "attentions", []))
    if type(part).__name__ == "UNetMidBlock2D":  # resnet, then pairs of attention and resnet
        yield resnets[0]
        pairs = zip(attentions, resnets[1:])
    else:
        pairs = zip(resnets, attentions or [None] * len(resnets))
    for pair in pairs:
        yield from (module for module in pair if module is not None)
    resamplers = [*(getattr(part, "downsamplers", None) or []), *(getattr(part, "upsamplers", None) or [])]
    yield from (module for module in resamplers if type(module).__name__ == "ResnetBlock2D")


def find_user_blocks(model: nn.Module, blocks: dict[type, list[tuple[str, ...]]]) -> Stack:
    if not isinstance(blocks, dict) or not blocks:
        raise UserError("`blocks` must be a dictionary from block classes to lists of (reader, adder) names.")
    described = {block_class: describe_user_block(block_class, pairs) for block_class, pairs in blocks.items()}
    modules = [module for _, module in model.named_modules(remove_duplicate=False) if type(module) in described]
    if missing := [block_class.__name__ for block_class in described if block_class not in map(type, modules)]:
        raise UserError(f"{type(model).__name__} has no block of class {', '.join(missing)}, which `blocks` names.")
    stack = Stack(modules, [described[type(module)] for module in modules], is_unchecked=True)
    stack.raw_output = USER_OUTPUT
    if any(not branch.output_layers for block in stack.blocks for step in block.steps for branch in step):
        stack.fold_refusal = '`blocks` names no output layers; add them, as in `("norm1", "attn", "attn.proj")`'
    elif reader := next(readers_without_norm(stack), None):
        stack.fold_refusal = f"the reader {reader} is no norm, so it sees the scale of the stream"
    return stack


def readers_without_norm(stack: Stack) -> Iterator[str]:
    """Readers whose output depends on the scale of their input, as far as their classes tell. Batch norms have a fixed scale."""
    for module, block in zip(stack.modules, stack.blocks):
        for step in block.steps:
            for branch in step:
                if branch.reader and has_module(module, branch.reader):
                    name = type(module.get_submodule(branch.reader)).__name__
                    if "norm" not in name.lower() or "batch" in name.lower():
                        yield f"'{branch.reader}' ({name})"


def describe_user_block(block_class: type, pairs: list[tuple[str, ...]]) -> Block:
    if not (isinstance(block_class, type) and issubclass(block_class, nn.Module)):
        raise UserError(f"`blocks` must have classes of modules as keys, got {block_class!r}.")
    valid = isinstance(pairs, (list, tuple)) and all(isinstance(pair, (list, tuple)) for pair in pairs)
    if not (valid and pairs and all(2 <= len(pair) <= 3 and all(isinstance(n, str) for n in pair) for pair in pairs)):
        raise UserError(
            f"`blocks[{block_class.__name__}]` must be a list of (reader, adder) or (reader, adder, output layer) "
            f"names, got {pairs!r}."
        )
    kinds = ["attention", "mlp"] if len(pairs) == 2 else ["unknown"] * len(pairs)
    stream = forward_parameters(block_class)[0]
    steps = [
        (Branch(kind, pair[0], pair[1], (stream,), output_layers=tuple(pair[2:])),) for kind, pair in zip(kinds, pairs)
    ]
    return Block(tuple(steps))


def forward_parameters(module_class: type) -> list[str]:
    """Names of the arguments of `forward`, without `self`."""
    return list(inspect.signature(module_class.forward).parameters)[1:]  # type: ignore[attr-defined]


def check_blocks(model: nn.Module, stack: Stack) -> None:
    """Refuses blocks that lack a named module, share modules, or have a `forward` that a hook replaced."""
    scaled = list(stack.modules)
    for module, block in zip(stack.modules, stack.blocks):
        branches = [branch for step in block.steps for branch in step]
        for branch in branches:
            for name in (branch.reader, branch.adder, branch.shortcut, *branch.output_layers, *branch.input_layers):
                if name and not has_module(module, name):
                    raise UserError(
                        f"{type(module).__name__} has no submodule '{name}': it is not the block that was expected, or of "
                        "another version."
                    )
        scaled += [module.get_submodule(name) for name in scaled_names(block)]
    if len({id(module) for module in scaled}) < len(scaled):
        raise UserError(f"{type(model).__name__} uses blocks or norms several times: shared modules have no depth.")
    for module in scaled:
        if "forward" in vars(module):
            raise UserError(
                f"{type(module).__name__} has a replaced `forward`, as with `device_map`: decay the model before that."
            )
