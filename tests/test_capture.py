"""Recording of attention: every family against its own eager attention weights, with nothing changed or left behind."""

import copy

import diffusers
import pytest
import torch
import transformers
from diffusers.models.attention_processor import AttnProcessor
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

import hf_decayed
from hf_decayed import (
    DecayedSiTTransformer2DModel,
    DecayedUViT2DModel,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
    attention_map,
    record_attention,
)
from hf_decayed.errors import UserError


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "patch_size": 8,
}
IMAGE = {"image_size": 32, **SIZES}
IN_ORDER = {"noise": torch.arange(16.0).expand(2, -1)}

# Model, prefix tokens, further arguments of its call. Images are 32 x 32 with patches of 8 x 8.
ENCODERS = {
    "vit": (lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGE)), 1, {}),
    "vit_classifier": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE)), 1, {}),
    "vit_mae": (lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(mask_ratio=0.0, **IMAGE)), 1, IN_ORDER),
    "decayed_vit_mae": (lambda: DecayedViTMAEModel(DecayedViTMAEConfig(**IMAGE)), 1, {}),
    "deit": (lambda: transformers.DeiTModel(transformers.DeiTConfig(**IMAGE)), 2, {}),
    "dinov2": (lambda: transformers.Dinov2Model(transformers.Dinov2Config(mlp_ratio=2, **IMAGE)), 1, {}),
    "dinov2_with_registers": (
        lambda: transformers.Dinov2WithRegistersModel(
            transformers.Dinov2WithRegistersConfig(mlp_ratio=2, num_register_tokens=3, **IMAGE)
        ),
        4,
        {},
    ),
    "dinov3": (
        lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(num_register_tokens=4, **IMAGE)),
        5,
        {},
    ),
    "clip": (lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE)), 1, {}),
    "owlvit": (lambda: transformers.OwlViTVisionModel(transformers.OwlViTVisionConfig(**IMAGE)), 1, {}),
    "siglip": (lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGE)), 0, {}),
    "beit": (lambda: transformers.BeitModel(transformers.BeitConfig(use_relative_position_bias=True, **IMAGE)), 1, {}),
}


def pixels(height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def randomize(model: nn.Module) -> nn.Module:
    """Weights without zeros: new models have zero biases, positions and gates, which would hide mistakes."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def tensors_of(output) -> list[torch.Tensor]:
    return [tensor for tensor in output.to_tuple() if isinstance(tensor, torch.Tensor)]


def traces(model: nn.Module) -> dict:
    """Everything that a recording could leave behind."""
    modules = list(model.modules())
    hooks = [
        len(getattr(module, name))
        for module in modules
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    ]
    return {
        "hooks": hooks,
        "implementations": [getattr(getattr(m, "config", None), "_attn_implementation", None) for m in modules],
        "registered": (list(AttentionInterface._global_mapping), list(AttentionMaskInterface._global_mapping)),
        "processors": [id(m.get_processor()) for m in modules if hasattr(m, "get_processor")],
        "attributes": [sorted(module.__dict__) for module in modules],
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_recorded_attention_is_that_of_the_encoder(family, implementation):
    make, num_prefix_tokens, arguments = ENCODERS[family]
    model = randomize(make())
    model.set_attn_implementation("eager")
    reference = model(pixels(), output_attentions=True, output_hidden_states=True, **arguments)
    model.set_attn_implementation(implementation)
    expected, before = model(pixels(), **arguments), traces(model)

    with record_attention(model, what=("query", "key", "value", "output", "hidden_states")) as record:
        output = model(pixels(), **arguments)

    assert traces(model) == before
    assert all(torch.equal(*pair) for pair in zip(tensors_of(output), tensors_of(expected), strict=True))
    assert len(record.layers) == len(reference.attentions) == 4
    for layer, attention, hidden_states in zip(record.layers, reference.attentions, reference.hidden_states[1:]):
        assert layer.grid == (4, 4) and layer.num_prefix_tokens == num_prefix_tokens and layer.timestep is None
        assert layer.query.shape == layer.key.shape == layer.value.shape == layer.output.shape == (2, 4, 16, 8)
        torch.testing.assert_close(attention_map(layer), attention, rtol=1e-4, atol=1e-5)
        weighted_values = attention @ layer.recorded("value")
        torch.testing.assert_close(layer.output, weighted_values[:, :, num_prefix_tokens:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.hidden_states, hidden_states[:, num_prefix_tokens:], rtol=1e-4, atol=1e-4)


def test_attention_map_over_patches_only():
    model = randomize(ENCODERS["vit"][0]())
    with record_attention(model, layers=-1) as record:
        model(pixels())
    layer = record.layers[0]
    scores = torch.einsum("bhqd,bhkd->bhqk", layer.query, layer.key) / 8**0.5
    torch.testing.assert_close(attention_map(layer, patches_only=True), scores.softmax(-1))
    assert not layer.query.requires_grad


def test_rotary_positions_are_in_the_record():
    model = randomize(ENCODERS["dinov3"][0]())
    projections = []
    module = model.get_submodule(list(record_names(model))[0])
    hook = module.q_proj.register_forward_hook(lambda module, args, output: projections.append(output))
    with torch.no_grad(), record_attention(model, layers=0) as record:
        model(pixels())
    hook.remove()
    unrotated = projections[0].unflatten(2, (4, 8)).transpose(1, 2)[:, :, 5:]
    assert (record.layers[0].query - unrotated).abs().max() > 0.1


def record_names(model: nn.Module) -> list[str]:
    with record_attention(model) as record:
        with torch.no_grad():
            model(pixels())
    return record.names


@torch.no_grad()
def test_grid_of_an_image_that_is_not_square():
    model = randomize(ENCODERS["dinov2"][0]())
    with record_attention(model, layers=0, what="hidden_states") as record:
        model(pixels(24, 40))
    assert record.layers[0].grid == (3, 5) and record.layers[0].hidden_states.shape == (2, 15, 32)


@torch.no_grad()
def test_both_towers_of_clip_record_the_vision_layers():
    text = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"intermediate_size": 64, "max_position_embeddings": 8, "eos_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16)
    model = randomize(transformers.CLIPModel(config))
    inputs = {"input_ids": torch.tensor([[2, 3, 4, 1], [5, 6, 1, 1]]), "attention_mask": torch.ones(2, 4).long()}
    model.vision_model.set_attn_implementation("eager")  # towers may differ, and both are restored
    expected, before = model(**inputs, pixel_values=pixels()), traces(model)
    with record_attention(model) as record:
        output = model(**inputs, pixel_values=pixels())
    assert torch.equal(output.logits_per_image, expected.logits_per_image) and traces(model) == before
    assert {layer.name.split(".")[0] for layer in record.layers} == {"vision_model"} and len(record.layers) == 4


def tiny_swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=3,
        use_absolute_embeddings=False,
    )
    return randomize(transformers.SwinModel(config, add_pooling_layer=False))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_windows_of_swin(implementation):
    """Maps are those of the windows; tensors come back in patch order from padded and shifted windows."""
    model = tiny_swin()
    images = pixels(32, 20)  # 16 x 10 patches: windows of 3 x 3 need padding
    model.set_attn_implementation("eager")
    blocks = [block for stage in model.encoder.layers for block in stage.blocks]
    weights, inputs = [], []
    hooks = [b.attention.register_forward_hook(lambda m, args, output: weights.append(output[1])) for b in blocks]
    hooks += [b.layernorm_before.register_forward_hook(lambda m, args, output: inputs.append(output)) for b in blocks]
    model(images)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(implementation)
    expected, before = model(images).last_hidden_state, traces(model)

    with record_attention(model, what=("query", "key", "hidden_states")) as record:
        output = model(images).last_hidden_state

    assert torch.equal(output, expected) and traces(model) == before
    assert [layer.grid for layer in record.layers] == [(16, 10), (16, 10), (8, 5), (8, 5)]
    assert [layer.windows.shift for layer in record.layers] == [0, 1, 0, 1]
    for layer, block, attention, normalized in zip(record.layers, blocks, weights, inputs, strict=True):
        torch.testing.assert_close(attention_map(layer), attention, rtol=1e-4, atol=1e-5)
        query = block.attention.q_proj(normalized).unflatten(2, (layer.query.shape[1], -1)).transpose(1, 2)
        torch.testing.assert_close(layer.query, query, rtol=1e-4, atol=1e-5)
        assert layer.hidden_states.shape == normalized.shape


def tiny_unet() -> nn.Module:
    return randomize(
        diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=12,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
    )


def recompute(layer) -> torch.Tensor:
    return attention_map(layer) @ layer.recorded("value")


@pytest.mark.parametrize("processor", ["default", "eager"])
@torch.no_grad()
def test_unet_at_two_timesteps(processor):
    model = tiny_unet()
    if processor == "eager":
        model.set_attn_processor(AttnProcessor())
    sample = torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    expected = [model(sample, timestep, text).sample for timestep in (10, 500)]
    before = traces(model)

    with record_attention(model, what=("query", "key", "value", "output", "hidden_states")) as record:
        outputs = [model(sample, 10, text).sample, model(sample, torch.tensor([500, 500]), text).sample]

    assert all(map(torch.equal, outputs, expected)) and traces(model) == before
    assert [layer.call for layer in record.layers] == [0] * 4 + [1] * 4
    names = [layer.name.split(".")[0] for layer in record.layers[:4]]
    assert names == ["down_blocks", "mid_block", "up_blocks", "up_blocks"]
    assert all(layer.name.endswith("attn1") for layer in record.layers)  # no cross-attention
    assert record.names == [layer.name for layer in record.layers[:4]]
    assert [layer.grid for layer in record.layers[:4]] == [(8, 12), (4, 6), (8, 12), (8, 12)]
    assert all(torch.equal(layer.timestep, torch.full((2,), 10.0)) for layer in record.layers[:4])
    assert all(torch.equal(layer.timestep, torch.full((2,), 500.0)) for layer in record.layers[4:])
    assert not torch.equal(record.layers[0].query, record.layers[4].query)
    for layer in record.layers:
        torch.testing.assert_close(layer.output, recompute(layer), rtol=1e-4, atol=1e-5)
        assert layer.hidden_states.shape[:2] == (2, layer.grid[0] * layer.grid[1])


@torch.no_grad()
def test_unet_without_text():
    """Its attention modules take images, not tokens."""
    model = randomize(
        diffusers.UNet2DModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )
    sample = torch.randn(2, 3, 8, 16)
    expected, before = model(sample, 3).sample, traces(model)
    with record_attention(model, what=("query", "key", "value", "output", "hidden_states")) as record:
        output = model(sample, 3).sample
    assert torch.equal(output, expected) and traces(model) == before
    for layer in record.layers:
        assert layer.grid == (4, 8) and layer.hidden_states.shape == (2, 32, 32) and layer.query.shape == (2, 4, 32, 8)
        torch.testing.assert_close(layer.output, recompute(layer), rtol=1e-4, atol=1e-5)


TRANSFORMER_SIZES = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_attention_heads": 4}
DIFFUSION_TRANSFORMERS = {
    "uvit": (lambda: DecayedUViT2DModel(num_layers=4, **TRANSFORMER_SIZES), 1, {}),
    "uvit_with_classes": (
        lambda: DecayedUViT2DModel(num_layers=4, num_classes=3, **TRANSFORMER_SIZES),
        2,
        {"class_labels": torch.tensor([0, 2])},
    ),
    "sit": (lambda: DecayedSiTTransformer2DModel(num_layers=4, num_classes=0, **TRANSFORMER_SIZES), 0, {}),
    "dit": (
        lambda: diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, norm_num_groups=4
        ),
        0,
        {"class_labels": torch.tensor([0, 2])},
    ),
}


@pytest.mark.filterwarnings("ignore:`shortcut_decay")
@pytest.mark.parametrize("family", DIFFUSION_TRANSFORMERS)
@torch.no_grad()
def test_diffusion_transformers(family):
    make, num_prefix_tokens, arguments = DIFFUSION_TRANSFORMERS[family]
    model = randomize(make())
    sample, timestep = torch.randn(2, 4, 8, 8), torch.tensor([0.25, 0.75])
    timestep = (timestep * 100).long() if family == "dit" else timestep
    expected, before = model(sample, timestep=timestep, **arguments).sample, traces(model)

    with record_attention(model, what=("query", "key", "value", "output", "hidden_states")) as record:
        output = model(sample, timestep=timestep, **arguments).sample

    assert torch.equal(output, expected) and traces(model) == before
    assert len(record.layers) == len(record.names) == {"dit": 3, "sit": 4}.get(family, 5)
    for layer in record.layers:
        assert layer.grid == (4, 4) and layer.num_prefix_tokens == num_prefix_tokens
        assert torch.equal(layer.timestep, timestep.float())
        assert layer.query.shape == (2, 4, 16, 8) and layer.hidden_states.shape == (2, 16, 32)
        torch.testing.assert_close(layer.output, recompute(layer)[:, :, num_prefix_tokens:], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`shortcut_decay")
@torch.no_grad()
def test_hidden_states_are_those_that_the_model_returns():
    model = randomize(DIFFUSION_TRANSFORMERS["uvit_with_classes"][0]())
    sample = torch.randn(2, 4, 8, 4)
    with record_attention(model, what="hidden_states") as record:
        expected = model(sample, 3, output_hidden_states=True).hidden_states
    assert all(torch.equal(layer.hidden_states, tokens) for layer, tokens in zip(record.layers, expected, strict=True))
    assert record.layers[0].grid == (4, 2)


@pytest.mark.filterwarnings("ignore:`shortcut_decay")
@pytest.mark.parametrize("family", ["decayed_vit_mae", "uvit"])
def test_an_exception_in_the_block_or_in_the_model_restores_the_model(family):
    model = randomize({**ENCODERS, **DIFFUSION_TRANSFORMERS}[family][0]())
    inputs = (pixels(),) if family == "decayed_vit_mae" else (torch.randn(2, 4, 8, 8), 3)
    before, expected = traces(model), tensors_of(model(*inputs))[0]
    with pytest.raises(KeyError, match="mine"), record_attention(model):
        model(*inputs)
        raise KeyError("mine")
    assert traces(model) == before

    def fail(module, args, output):
        raise KeyError("inside of attention")

    projections = [m for n, m in model.named_modules() if n.endswith(("attention.o_proj", "attn.to_out.0"))]
    hook = projections[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="inside"), record_attention(model):
        model(*inputs)
    hook.remove()
    assert traces(model) == before and torch.equal(tensors_of(model(*inputs))[0], expected)
    # A torch function mode that was not left would see this call.
    assert torch.overrides._get_current_function_mode() is None
    assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3).sum() == 4


@torch.no_grad()
def test_nested_recordings():
    model = randomize(ENCODERS["vit"][0]())
    before, expected = traces(model), model(pixels()).last_hidden_state
    with record_attention(model, layers=0) as outer:
        with record_attention(model, layers=[0, 1]) as inner:
            assert torch.equal(model(pixels()).last_hidden_state, expected)
        model(pixels())
    assert traces(model) == before and len(outer.layers) == 2 and len(inner.layers) == 2
    assert torch.equal(outer.layers[0].query, inner.layers[0].query)


@torch.no_grad()
def test_choice_of_layers():
    model = randomize(ENCODERS["vit"][0]())
    names = record_names(model)

    def chosen(layers):
        with record_attention(model, layers=layers) as record:
            model(pixels())
        return [names.index(layer.name) for layer in record.layers]

    assert chosen([-1, 0]) == [0, 3] and chosen(-2) == [2] and chosen(names[1]) == [1]
    assert chosen([names[2].rpartition(".")[0], 2]) == [2]  # the block's name, and the same layer again
    for layers, message in [
        (4, r"integers in \[-4, 3\]"),
        ([-5], r"integers in \[-4, 3\]"),
        (0.5, "integers in"),
        ("decoder", "names 'decoder'"),
        ([], "at least one layer"),
    ]:
        with pytest.raises(UserError, match=message), record_attention(model, layers=layers):
            pass
    for limit in (0, "4 GB"):
        with pytest.raises(UserError, match="`memory_limit` must"), record_attention(model, memory_limit=limit):
            pass
    for what in ("queries", ("query", "q"), ()):
        with pytest.raises(UserError, match="`what` must"), record_attention(model, what=what):
            pass


@torch.no_grad()
def test_memory_is_told_before_it_is_taken():
    model = randomize(ENCODERS["beit"][0]())  # with a position bias, which the attention map needs
    with record_attention(model, what=("query", "key", "hidden_states")) as record:
        estimate = record.estimate(pixels())
        assert record.layers == [] and record.memory == 0
        model(pixels())
    stored = sum(tensor.nbytes for layer in record.layers for tensor in layer.tensors.values())
    assert estimate == record.memory == stored > 4 * 3 * 2 * 17 * 32 * 4
    with pytest.raises(UserError, match="inside of the `with"):
        record.estimate(pixels())

    expected, before = model(pixels()).last_hidden_state, traces(model)
    limit = estimate * 1.5e-9
    with pytest.raises(UserError, match=f"needs {2 * estimate / 1e9:.3g} GB .*choose fewer `layers`"):
        with record_attention(model, what=("query", "key", "hidden_states"), memory_limit=limit) as record:
            model(pixels())
            model(pixels())
    assert len(record.layers) == 4 and record.memory == estimate  # the first call fits
    assert traces(model) == before and torch.equal(model(pixels()).last_hidden_state, expected)
    with record_attention(model, memory_limit=None) as record:
        model(pixels())


@torch.no_grad()
def test_records_are_copies():
    """A view of a fused projection would hold three times its memory, and in-place changes would reach it."""
    model = randomize(ENCODERS["decayed_vit_mae"][0]())
    outputs = []
    hook = model.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    with record_attention(model, layers=0, what=("query", "hidden_states")) as record:
        model(pixels())
    hook.remove()
    expected = record.layers[0].hidden_states.clone()
    outputs[0].zero_()
    assert torch.equal(record.layers[0].hidden_states, expected)
    for tensor in record.layers[0].tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_models_that_cannot_be_recorded():
    resnet = transformers.ResNetModel(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    )
    autoencoder = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    for model, message in [
        (resnet, "ResNetModel has no attention over image patches"),
        (autoencoder, "AutoencoderTiny has no self-attention"),
        (nn.Linear(2, 2), "takes a model of transformers or diffusers.* got Linear"),
        ("vit-base", "got str"),
    ]:
        with pytest.raises(UserError, match=message), record_attention(model):
            pass


@torch.no_grad()
def test_inputs_that_are_no_grid():
    dinov2 = randomize(ENCODERS["dinov2"][0]())
    with pytest.raises(UserError, match="4 x 32 pixels is smaller than a patch of 8 x 8"):
        with record_attention(dinov2):
            dinov2(pixels(4, 32))

    ours = randomize(ENCODERS["decayed_vit_mae"][0]())
    for arguments, message in [
        ({"mask_ratio": 0.75}, "sees 4 of 16 patches in the order of their noise"),
        ({"noise": IN_ORDER["noise"], "mask_ratio": 0.5}, "sees 8 of 16 patches, not a whole grid"),
        ({"noise": -IN_ORDER["noise"], "mask_ratio": 0.0}, "sees 16 of 16 patches in the order"),
    ]:
        with pytest.raises(UserError, match=message), record_attention(ours):
            ours(pixels(), **arguments)
    with pytest.raises(UserError, match="sees 4 of 16 patches"):
        stock = transformers.ViTMAEModel(transformers.ViTMAEConfig(mask_ratio=0.75, **IMAGE))
        with record_attention(stock):
            stock(pixels())

    video = transformers.VideoMAEModel(transformers.VideoMAEConfig(num_frames=4, **IMAGE))
    with pytest.raises(UserError, match="was not called with images of shape"), record_attention(video):
        video(pixels().unsqueeze(1).expand(-1, 4, -1, -1, -1))

    yolos = transformers.YolosModel(
        transformers.YolosConfig(num_detection_tokens=5, **{**IMAGE, "image_size": [32, 32]})
    )
    with pytest.raises(UserError, match="2 x 22 tokens for 2 images of 4 x 4 patches"), record_attention(yolos):
        yolos(pixels())

    with pytest.raises(UserError, match="Nothing was recorded"), record_attention(ours):
        pass


@torch.no_grad()
def test_decoder_of_a_masked_autoencoder_is_not_listed():
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**IMAGE)).eval()
    with (
        pytest.raises(UserError, match="which has no recordable attention"),
        record_attention(model, layers="decoder"),
    ):
        pass


@torch.no_grad()
def test_processors_that_hide_attention():
    model = tiny_unet()
    model.set_attention_slice(1)
    arguments = (torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, 12))
    model(*arguments)
    before = traces(model)
    with pytest.raises(UserError, match="cannot be recorded with SlicedAttnProcessor"), record_attention(model):
        model(*arguments)
    assert traces(model) == before and torch.overrides._get_current_function_mode() is None


def test_gradients_pass_and_what_was_not_recorded_is_named():
    model = randomize(ENCODERS["vit"][0]()).train()
    plain = copy.deepcopy(model)
    plain(pixels()).last_hidden_state.sum().backward()
    with record_attention(model, what="value") as record:
        model(pixels()).last_hidden_state.sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(parameter.grad, other.grad) if other.grad is not None else parameter.grad is None
    with pytest.raises(UserError, match="`query` of .* was not recorded"):
        attention_map(record.layers[0])


@pytest.mark.filterwarnings("ignore:`shortcut_decay")
def test_gradient_checkpointing_records_once():
    """Attention runs a second time in the backward pass, which is not a call of the model."""
    model = randomize(DIFFUSION_TRANSFORMERS["uvit"][0]()).train()
    model.enable_gradient_checkpointing()
    with record_attention(model) as record:
        model(torch.randn(2, 4, 8, 8), 3).sample.sum().backward()
    assert len(record.layers) == 5 and torch.overrides._get_current_function_mode() is None


@pytest.mark.filterwarnings("ignore:`shortcut_decay")
def test_recording_of_a_pipeline():
    """Every step of the sampler is a call; with guidance, the batch has both halves."""
    model = randomize(DIFFUSION_TRANSFORMERS["uvit_with_classes"][0]())
    pipeline = hf_decayed.DecayedUViTPipeline(model, diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    with record_attention(pipeline.unet, layers="mid_block", what="value") as record:
        pipeline(class_labels=[1], num_inference_steps=3, guidance_scale=2.0, output_type="latent")
    assert [layer.call for layer in record.layers] == [0, 1, 2] and record.layers[0].value.shape[0] == 2
    timesteps = [layer.timestep[0].item() for layer in record.layers]
    assert timesteps == sorted(timesteps, reverse=True) and len(set(timesteps)) == 3


def test_public_names():
    assert hf_decayed.record_attention is record_attention and "record_attention" in hf_decayed.__all__
