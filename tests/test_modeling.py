"""The models: masking, initial values, the paper's properties, shapes, wrong input."""

import math
import weakref

import pytest
import torch
from conftest import PRESETS, TINY_SIZES, random_weights
from torch.nn import functional as F

from hf_decayed import (
    DecayedViTMAEBackbone,
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
    effective_decay,
)
from hf_decayed.models.modeling_decayed_vit_mae import interpolate_positions, sincos_positions


# Masking happens on request, never as a side effect of train or eval mode.


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_encoder_masks_only_when_asked(mode, pixel_values, noise):
    model = getattr(random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))), mode)()
    whole = model(pixel_values)
    assert whole.last_hidden_state.shape == (3, 17, 32)
    assert whole.mask is None and whole.ids_restore is None
    assert torch.equal(whole.last_hidden_state, model(pixel_values, mask_ratio=0.0).last_hidden_state)

    masked = model(pixel_values, noise=noise)
    assert masked.last_hidden_state.shape == (3, 5, 32)
    assert masked.mask.sum(1).tolist() == [12.0] * 3
    assert model(pixel_values, mask_ratio=0.5).last_hidden_state.shape == (3, 9, 32)
    assert model(pixel_values, noise=noise, mask_ratio=0.5).mask.sum(1).tolist() == [8.0] * 3


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pretraining_always_masks_and_classification_never(mode, pixel_values):
    pretraining = getattr(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES)), mode)()
    assert pretraining(pixel_values).mask.sum(1).tolist() == [12.0] * 3
    assert pretraining(pixel_values, mask_ratio=0.5).mask.sum(1).tolist() == [8.0] * 3
    classifier = random_weights(DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES)))
    classifier = getattr(classifier, mode)()
    hidden_states = classifier(pixel_values, output_hidden_states=True).hidden_states
    assert hidden_states[-1].shape == (3, 17, 32)
    assert torch.equal(classifier(pixel_values).logits, classifier(pixel_values).logits)


def test_heads_that_never_mask_refuse_arguments_of_masking(pixel_values, noise):
    classifier = DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES))
    backbone = DecayedViTMAEBackbone(DecayedViTMAEConfig(**TINY_SIZES))
    for model in (classifier, backbone):
        for name, value in {"noise": noise, "mask_ratio": 0.5, "output_skips": True}.items():
            with pytest.raises(TypeError, match=rf"{type(model).__name__}.forward\(\) has no argument `{name}`"):
                model(pixel_values, **{name: value})
    with pytest.raises(TypeError, match="has no argument `mask_ration`; did you mean `mask_ratio`?"):
        DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))(pixel_values, mask_ration=0.5)


def test_tokens_of_a_whole_image_come_in_patch_order(pixel_values):
    """With zero branches, the tokens are the embedded patches."""
    model = DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES, shortcut_decay=1.0))
    patches = model(pixel_values).last_hidden_state[:, 1:] - model.embeddings.position_embeddings[:, 1:]
    conv = model.embeddings.patch_embeddings.projection
    for index, (row, column) in enumerate((row, column) for row in range(4) for column in range(4)):
        patch = pixel_values[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        torch.testing.assert_close(patches[:, index], conv(patch).flatten(1), rtol=1e-4, atol=1e-5)


def test_visible_only_embedding_equals_the_module_call(pixel_values, noise):
    model = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).eval()
    fast = model(pixel_values, noise=noise).last_hidden_state
    for module in (model.embeddings.patch_embeddings, model.embeddings.patch_embeddings.projection):
        calls = []
        handle = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        through_module = model(pixel_values, noise=noise).last_hidden_state
        assert calls == [1]  # a hooked module is called, so that adapters, offloading and sharding work
        handle.remove()
        torch.testing.assert_close(fast, through_module, rtol=1e-4, atol=1e-5)
    handle = module.register_full_backward_hook(lambda *_: calls.append(2))
    model(pixel_values, noise=noise).last_hidden_state.sum().backward()
    assert calls == [1, 2]
    handle.remove()


def test_loss_alone_equals_loss_with_logits(preset, pixel_values, noise):
    model = random_weights(DecayedViTMAEForPreTraining(preset)).eval()
    full, alone = model(pixel_values, noise=noise), model(pixel_values, noise=noise, return_logits=False)
    assert full.logits.shape == (3, 16, 192) and alone.logits is None
    torch.testing.assert_close(alone.loss, full.loss)
    by_hand = ((full.logits - model.patchify(pixel_values)) ** 2).mean(-1)
    torch.testing.assert_close(full.loss, (by_hand * full.mask).sum() / full.mask.sum())
    assert model(pixel_values, noise=noise, return_loss=False).loss is None


# Initial values, frozen ones first.


def test_decode_ratio_is_a_random_share_of_the_masked_patches(preset, pixel_values, noise):
    """Of a decoder whose tokens do not see one another, the loss is that of the patches of this share."""
    model = random_weights(DecayedViTMAEForPreTraining(preset))
    with torch.no_grad():
        for layer in model.decoder.decoder_layers:
            layer.attention.o_proj.weight.zero_()
            layer.attention.o_proj.bias.zero_()
    whole = model(pixel_values, noise=noise)
    errors = (whole.logits - model.patchify(pixel_values)).square().mean(-1)
    order = noise.argsort(1)  # four visible patches, then twelve masked ones
    for decode_ratio, number in ((1.0, 12), (0.5, 6), (0.01, 1)):
        model.config.decode_ratio = decode_ratio
        loss = model(pixel_values, noise=noise, return_logits=False).loss
        torch.testing.assert_close(loss, errors.gather(1, order[:, 4 : 4 + number]).mean())
        assert torch.equal(model(pixel_values, noise=noise).logits, whole.logits)  # complete, whatever the share
    assert torch.equal(model(pixel_values, noise=noise).loss, whole.loss)


def test_decode_ratio_one_is_bit_equal_to_no_ratio(preset, pixel_values, noise):
    """The decoder of all masked patches, and the decoder that is told their number."""
    model = random_weights(DecayedViTMAEForPreTraining(preset)).eval()
    outputs = model.vit(pixel_values, noise=noise, output_skips=True)
    all_patches = model.decoder(outputs.last_hidden_state, outputs.ids_restore, outputs.skips)
    told = model.decoder(outputs.last_hidden_state, outputs.ids_restore, outputs.skips, num_decoded=12)
    assert told.shape[1] == 12 and torch.equal(told, all_patches[:, 4:])


@pytest.mark.parametrize("name", ["default", "plain", "skips_and_latent"])
def test_decode_ratio_with_checkpointing_and_compiled(name, pixel_values, noise):
    def gradients(prepare):
        torch.manual_seed(0)
        model = random_weights(DecayedViTMAEForPreTraining(PRESETS[name](**TINY_SIZES, decode_ratio=0.5))).train()
        loss = prepare(model)(pixel_values, noise=noise, return_logits=False).loss
        loss.backward()
        return {**{key: parameter.grad for key, parameter in model.named_parameters()}, "loss": loss.detach()}

    def checkpointing(model):
        model.gradient_checkpointing_enable()
        return model

    plain = gradients(lambda model: model)
    assert all(gradient is not None for gradient in plain.values())
    for prepare in (checkpointing, lambda model: torch.compile(model, backend="eager", fullgraph=True)):
        torch.testing.assert_close(gradients(prepare), plain)


def test_initial_value_of_every_parameter(preset):
    model = DecayedViTMAEForPreTraining(preset)
    state = model.state_dict()
    for name, size in (("vit.embeddings.position_embeddings", 32), ("decoder.decoder_pos_embed", 24)):
        torch.testing.assert_close(state.pop(name), sincos_positions((4, 4), size))
        assert name not in dict(model.named_parameters())

    def uniform_in(tensor, bound):
        """Within the bound, nearly up to it, and with the standard deviation of a uniform distribution."""
        assert tensor.abs().max() <= bound
        assert tensor.abs().max() > 0.95 * bound
        assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)

    def xavier(fan_in, fan_out):
        return math.sqrt(6 / (fan_in + fan_out))

    zero_branches = preset.zero_init_branches
    for name, tensor in state.items():
        module, kind = name.rsplit(".", 1)
        leaf = module.rsplit(".", 1)[-1]
        if kind in ("cls_token", "decoder_cls_token", "mask_token"):
            assert 0.005 < tensor.std().item() < 0.04, name  # normal, 0.02, few numbers
        elif kind in ("attention_alpha", "mlp_alpha"):
            assert preset.shortcut_schedule == "learned" and tensor.item() == 1.0
        elif "norm" in leaf:
            assert (tensor == (1.0 if kind == "weight" else 0.0)).all(), name
        elif kind == "bias":
            assert not tensor.any(), name
        elif leaf == "projection":
            uniform_in(tensor, xavier(3 * 8 * 8, 32))
        elif leaf in ("q_proj", "k_proj", "v_proj"):
            uniform_in(tensor, xavier(tensor.shape[1], 3 * tensor.shape[0]))  # as one matrix, He et al.'s way
        elif leaf in ("o_proj", "fc2", "decoder_pred") and zero_branches or leaf == "output_projection":
            assert not tensor.any(), name
        elif leaf in ("encoder_projection", "decoder_projection"):
            uniform_in(tensor, xavier(32 + 24, 24))  # as one matrix over the concatenation
        else:
            assert leaf in ("o_proj", "fc1", "fc2", "decoder_embed", "decoder_pred"), name
            uniform_in(tensor, xavier(tensor.shape[1], tensor.shape[0]))


def test_initial_value_of_the_classifier():
    model = DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES, num_labels=5))
    assert not model.classifier.weight.any() and not model.classifier.bias.any()
    assert (model.fc_norm.weight == 1).all() and not model.fc_norm.bias.any()
    assert model.vit.embeddings.position_embeddings.abs().sum() > 0


def test_same_seed_same_weights():
    def build():
        torch.manual_seed(3)
        return DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES)).state_dict()

    first, second = build(), build()
    assert all(torch.equal(first[name], second[name]) for name in first)


# The paper's properties.


@pytest.mark.parametrize("decay", [1.0, 0.8, 0.6])
def test_the_initial_encoder_multiplies_by_its_alphas(decay, pixel_values):
    model = DecayedViTMAEModel(DecayedViTMAEConfig(**{**TINY_SIZES, "num_hidden_layers": 12}, shortcut_decay=decay))
    outputs = model(pixel_values, output_hidden_states=True, output_skips=True)
    embeddings = outputs.hidden_states[0]
    torch.testing.assert_close(outputs.last_hidden_state, effective_decay(12, decay) * embeddings)
    partial = 1.0
    for (attention, mlp), hidden_states in zip(model.shortcut_alphas(), outputs.hidden_states[1:]):
        partial *= attention * mlp
        torch.testing.assert_close(hidden_states, partial * embeddings)
    assert partial == pytest.approx(effective_decay(12, decay))


def test_skips_are_every_other_layer_deepest_first(pixel_values, noise):
    sizes = {**TINY_SIZES, "num_hidden_layers": 8}  # four candidates, three decoder layers
    model = random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**sizes))).eval()
    outputs = model(pixel_values, noise=noise, output_hidden_states=True, output_skips=True)
    assert len(outputs.skips) == 3
    for skip, layer in zip(outputs.skips, (8, 6, 4)):
        assert torch.equal(skip, outputs.hidden_states[layer])
    assert torch.equal(outputs.skips[0], outputs.last_hidden_state)
    model.config.encoder_decoder_skips = 1  # a number, not `True`
    fewer = model(pixel_values, noise=noise, output_skips=True)
    assert len(fewer.skips) == 1 and torch.equal(fewer.skips[0], outputs.skips[0])


def test_initial_prediction_is_zero_and_its_loss_is_known(pixel_values):
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES, norm_pix_loss=True))
    outputs = model(pixel_values)
    assert not outputs.logits.any()
    assert outputs.loss.item() == pytest.approx(191 / 192, abs=1e-5)


def test_first_step_with_a_gradient(pixel_values, noise):
    """Zero-initialised outputs block gradients: each training step lets them reach one more group of parameters."""
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first_step = {}
    for step in range(1, 5):
        optimizer.zero_grad()
        model(pixel_values, noise=noise).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad.any():
                first_step.setdefault(name, step)
        optimizer.step()
    assert first_step.pop("decoder.decoder_pred.weight") == first_step.pop("decoder.decoder_pred.bias") == 1
    assert first_step["decoder.decoder_embed.weight"] == 2
    assert first_step["decoder.decoder_cls_token"] == 3  # no patch attends to it before attention has an output
    assert first_step["decoder.skips.0.output_projection.weight"] == 2
    assert first_step["decoder.decoder_layers.0.mlp.fc2.weight"] == 2
    assert first_step["decoder.skips.0.encoder_projection.weight"] == first_step["decoder.skips.0.mask_token"] == 3
    assert first_step["vit.embeddings.patch_embeddings.projection.weight"] == 3
    assert first_step["vit.layers.0.attention.o_proj.weight"] == first_step["vit.layers.0.mlp.fc2.weight"] == 3
    assert first_step["vit.layers.0.attention.v_proj.weight"] == first_step["vit.layers.0.mlp.fc1.weight"] == 4
    assert min(first_step.values()) == 2


def test_decoder_sees_the_image_through_the_skips_only(pixel_values, noise):
    model = random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))).eval()
    assert not torch.allclose(
        model(pixel_values, noise=noise).logits[0], model(pixel_values.flip(0), noise=noise).logits[0]
    )
    with torch.no_grad():
        for skip in model.decoder.skips:
            skip.output_projection.weight.zero_()
    blind, other = model(pixel_values, noise=noise).logits, model(pixel_values.flip(0), noise=noise).logits
    assert torch.equal(blind, other)


def test_predictions_do_not_depend_on_masked_patches(preset, pixel_values, noise):
    model = random_weights(DecayedViTMAEForPreTraining(preset)).eval()
    mask = model(pixel_values, noise=noise).mask
    other_image = model.patchify(torch.randn_like(pixel_values))
    mixed = model.unpatchify(torch.where(mask.bool().unsqueeze(-1), other_image, model.patchify(pixel_values)))
    torch.testing.assert_close(model(mixed, noise=noise).logits, model(pixel_values, noise=noise).logits)


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_reconstruction_replaces_masked_patches_alone(norm_pix_loss):
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "image_size": (32, 16)}, norm_pix_loss=norm_pix_loss)
    model = random_weights(DecayedViTMAEForPreTraining(config))
    images, noise = 3 + torch.randn(2, 3, 32, 16), torch.rand(2, 8)
    reconstructed, masked = model.reconstruct(images, noise=noise)
    outputs = model(images, noise=noise)
    assert masked.dtype == torch.bool and masked.shape == reconstructed.shape == images.shape
    assert torch.equal(model.patchify(masked).float().mean(-1), outputs.mask)
    assert torch.equal(reconstructed[~masked], images[~masked])

    # In the normalisation of the loss, the error of the masked patches equals the loss.
    target, predicted = model.patchify(images), model.patchify(reconstructed)
    if norm_pix_loss:
        deviation = (target.var(-1, keepdim=True) + 1e-6).sqrt()
        target, predicted = target / deviation, predicted / deviation
    error = (target - predicted).square().mean(-1)[outputs.mask.bool()].mean()
    torch.testing.assert_close(error, outputs.loss)
    assert not reconstructed.requires_grad
    larger = torch.randn(1, 3, 64, 32)
    assert model.reconstruct(larger, mask_ratio=0.5, interpolate_pos_encoding=True)[1].float().mean() == 0.5


def test_every_parameter_is_trained(preset, pixel_values):
    """Also when half the encoder's layers outnumber the decoder's, as at sizes L and H."""
    preset.num_hidden_layers = 12
    model = random_weights(DecayedViTMAEForPreTraining(preset))
    assert preset.num_skips in (0, 2, 3)
    model(pixel_values).loss.backward()
    # A key's bias adds the same number to every score of a query, and softmax cancels it.
    untrained = [name for name, p in model.named_parameters() if not p.grad.any() and not name.endswith("k_proj.bias")]
    assert untrained == []


def test_learned_alphas_are_trained_and_counted(pixel_values):
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned"))
    alphas = [name for name, _ in model.named_parameters() if name.endswith("_alpha")]
    assert len(alphas) == 8
    assert model.vit.shortcut_alphas() == [(1.0, 1.0)] * 4
    fixed = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in fixed.parameters()) + 8
    attention_only = DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned", shortcut_scope="attention")
    assert sum(name.endswith("_alpha") for name, _ in DecayedViTMAEModel(attention_only).named_parameters()) == 4


# Shapes.


def test_oblong_images_and_patches():
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "image_size": (32, 48), "patch_size": (8, 4)}, num_channels=2)
    model = random_weights(DecayedViTMAEForPreTraining(config))
    images = torch.randn(2, 2, 32, 48)
    outputs = model(images)
    assert outputs.logits.shape == (2, 4 * 12, 8 * 4 * 2)
    assert torch.equal(model.unpatchify(model.patchify(images)), images)
    outputs.loss.backward()


@pytest.mark.parametrize("num_channels", [1, 4])
def test_channels(num_channels):
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES, num_channels=num_channels))
    assert model(torch.randn(2, num_channels, 32, 32)).logits.shape == (2, 16, 64 * num_channels)


def test_positions_are_interpolated_in_two_dimensions():
    table = sincos_positions((4, 6), 16)
    assert interpolate_positions(table, (4, 6), (4, 6)) is table
    larger = interpolate_positions(table, (4, 6), (8, 6))
    assert larger.shape == (1, 49, 16) and torch.equal(larger[:, :1], table[:, :1])
    # The width's half of the table does not depend on the row, so another height must not change it.
    rows = larger[0, 1:].view(8, 6, 16)
    torch.testing.assert_close(
        rows[..., :8], table[0, 1:].view(4, 6, 16)[:1, :, :8].expand(8, -1, -1), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(rows[0, :, 8:], rows[7, :, 8:])


def test_other_image_sizes(preset):
    model = random_weights(DecayedViTMAEForPreTraining(preset)).eval()
    images = torch.randn(2, 3, 48, 64)
    outputs = model(images, interpolate_pos_encoding=True)
    assert outputs.logits.shape == (2, 6 * 8, 192)
    assert model.unpatchify(outputs.logits, (48, 64)).shape == images.shape
    assert model.vit(images, interpolate_pos_encoding=True).last_hidden_state.shape == (2, 49, 32)
    same_size = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.vit(same_size, interpolate_pos_encoding=True)[0], model.vit(same_size)[0])


@pytest.mark.parametrize("pooling", ["cls", "mean", "patch_mean"])
@pytest.mark.parametrize("final_norm", [False, True])
def test_pooling(pooling, final_norm, pixel_values):
    model = random_weights(
        DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES, pooling=pooling, final_norm=final_norm))
    )
    outputs = model(pixel_values)
    tokens = outputs.last_hidden_state
    expected = {"cls": tokens[:, 0], "mean": tokens.mean(1), "patch_mean": tokens[:, 1:].mean(1)}[pooling]
    torch.testing.assert_close(outputs.pooler_output, expected)


def test_classifier_normalises_once(pixel_values):
    for final_norm in (False, True):
        config = DecayedViTMAEConfig(**TINY_SIZES, num_labels=5, final_norm=final_norm, pooling="patch_mean")
        model = random_weights(DecayedViTMAEForImageClassification(config))
        pooled = model.vit(pixel_values).pooler_output
        if not final_norm:
            pooled = F.layer_norm(pooled, (32,), model.fc_norm.weight, model.fc_norm.bias, eps=1e-6)
        torch.testing.assert_close(
            model(pixel_values).logits, F.linear(pooled, model.classifier.weight, model.classifier.bias)
        )
    labels = torch.tensor([0, 4, 2])
    outputs = model(pixel_values, labels=labels)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))


def test_feature_maps(pixel_values):
    config = DecayedViTMAEConfig(**TINY_SIZES, out_features=["stage2", "stage4"])
    backbone = random_weights(DecayedViTMAEBackbone(config)).eval()
    assert backbone.channels == [32, 32]
    maps = backbone(pixel_values).feature_maps
    assert [tuple(feature_map.shape) for feature_map in maps] == [(3, 32, 4, 4)] * 2
    tokens = DecayedViTMAEModel.forward(backbone, pixel_values).last_hidden_state
    assert torch.equal(maps[1][:, :, 1, 2], tokens[:, 1 + 4 * 1 + 2])
    assert backbone(torch.randn(1, 3, 64, 40)).feature_maps[0].shape == (1, 32, 8, 5)


# Wrong input.


@pytest.mark.parametrize(
    "model_class", [DecayedViTMAEModel, DecayedViTMAEForPreTraining, DecayedViTMAEForImageClassification]
)
@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 1, 32, 32), (2, 3, 32, 40), (2, 3, 30, 32)])
def test_wrong_shapes_are_refused(model_class, shape):
    model = model_class(DecayedViTMAEConfig(**TINY_SIZES))
    expected = r"`pixel_values` must have shape \(batch_size, 3, 32, 32\), got \(" + ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=expected):
        model(torch.zeros(shape))


def test_other_wrong_input(pixel_values):
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    with pytest.raises(ValueError, match=r"divisible by the patch size \(8, 8\), got shape \(1, 3, 36, 32\)"):
        model(torch.zeros(1, 3, 36, 32), interpolate_pos_encoding=True)
    with pytest.raises(ValueError, match=r"`noise` must have shape .* = \(3, 16\), got \(3, 15\)"):
        model(pixel_values, noise=torch.rand(3, 15))
    with pytest.raises(ValueError, match="`mask_ratio` must mask at least one of 16 patches, got 0.0"):
        model(pixel_values, mask_ratio=0.0)
    for ratio in (0.99, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=f"leave at least one of 16 patches, got {ratio}"):
            model(pixel_values, mask_ratio=ratio)
    with pytest.raises(ValueError, match="32 x 32 has 4 x 4 patches, got 15"):
        model.unpatchify(torch.zeros(1, 15, 192))


def test_the_encoder_frees_the_output_of_each_layer(pixel_values):
    model = DecayedViTMAEModel(DecayedViTMAEConfig(**{**TINY_SIZES, "num_hidden_layers": 8})).eval()
    outputs, alive = [], []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
        layer.register_forward_pre_hook(lambda *_: alive.append(sum(output() is not None for output in outputs)))
    with torch.no_grad():
        model(pixel_values)
    assert max(alive) == 1


def test_other_depth_means_other_stages():
    config = DecayedViTMAEConfig(**TINY_SIZES)
    config.num_hidden_layers = 8
    backbone = DecayedViTMAEBackbone(config)
    assert backbone.out_features == ["stage8"] and len(backbone.stage_names) == 9
    config = DecayedViTMAEConfig(**TINY_SIZES, out_features=["stage3", "stage4"])
    config.num_hidden_layers = 2
    with pytest.raises(Exception, match="out_features must be a subset of stage_names"):
        DecayedViTMAEBackbone(config)


def test_decay_costs_one_fused_operation_per_branch(pixel_values):
    """With and without decay the encoder runs the same operators: the multiplication is part of the addition."""

    def operators(decay):
        model = DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES, shortcut_decay=decay)).eval()
        with torch.no_grad(), torch.profiler.profile() as profiler:
            model(pixel_values)
        return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("aten::")}

    assert operators(0.6) == operators(1.0)
    assert operators(0.6)["aten::add"] == 2 * 4 + 2  # two per layer; positions of the patches and of the class token
    assert "aten::mul" not in operators(0.6)
