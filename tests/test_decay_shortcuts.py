"""`decay_shortcuts` against an oracle, in every family; folding, saving, the optimizer rule, refusals."""

import copy
import math
import pickle
from types import MethodType, SimpleNamespace

import diffusers
import numpy
import peft
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from decay_families import FAMILIES, IMAGES, VIT_SIZES, ShortcutOracle, build, family_output, images, shrink_eps
from safetensors.torch import load_file
from torch import nn

from hf_decayed import (
    DecayedResNetConfig,
    DecayedResNetForImageClassification,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    decay_shortcuts,
    fold_shortcuts,
    remove_decay,
    set_shortcut_decay,
    shortcut_alphas,
    shortcut_parameter_groups,
    suggest_shortcut_decay,
)
from hf_decayed.errors import UserError
from hf_decayed.models.shortcut_decay import layer_shortcut_factors


pytestmark = pytest.mark.filterwarnings("ignore:In the folded model:UserWarning")

FOLDING = [name for name, family in FAMILIES.items() if family.folds]


def gradients(model: nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a fixed weighted sum of the output."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def assert_same(actual, expected, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_decay_is_that_of_the_oracle(name):
    plain, inputs = build(name)
    without_decay = family_output(name, plain, inputs)
    decayed = decay_shortcuts(copy.deepcopy(plain), 0.6)
    oracle = ShortcutOracle(plain, FAMILIES[name], 0.6)
    oracle.prepare(lambda: plain(**inputs))
    output = family_output(name, decayed, inputs)
    with oracle:
        expected = family_output(name, plain, inputs)
    assert [list(alphas) for alphas in shortcut_alphas(decayed)] == list(oracle.alphas.values())
    assert not torch.allclose(output, without_decay, rtol=1e-3, atol=1e-3)
    assert_same(output, expected, 1e-10)
    actual, expected = gradients(decayed, output), gradients(plain, expected)
    assert actual.keys() == expected.keys()
    assert_same(actual, expected, 1e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_decay_of_one_changes_no_bit(name):
    plain, inputs = build(name, torch.float32)
    decayed = decay_shortcuts(copy.deepcopy(plain), 1.0)
    expected, output = family_output(name, plain, inputs), family_output(name, decayed, inputs)
    assert torch.equal(output, expected)
    assert_same(gradients(decayed, output), gradients(plain, expected))
    assert list(decayed.state_dict()) == list(plain.state_dict())
    assert repr(decayed) == repr(plain) and isinstance(decayed, type(plain))


@pytest.mark.parametrize("name", ["ViT", "CLIP", "Swin", "GPT-2", "Llama", "ConvNeXt"])
def test_hidden_states_are_those_of_the_decayed_network(name):
    plain, inputs = build(name)
    decayed = decay_shortcuts(copy.deepcopy(plain), 0.6)
    oracle = ShortcutOracle(plain, FAMILIES[name], 0.6)
    oracle.prepare(lambda: plain(**inputs))
    actual = decayed(**inputs, output_hidden_states=True).hidden_states
    embeddings = plain(**inputs, output_hidden_states=True).hidden_states[0]
    with oracle:
        expected = plain(**inputs, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected) > 1
    assert torch.equal(actual[0], embeddings)  # not multiplied by what the first block needs
    assert_same(actual, expected, 1e-10)


def test_attention_weights_and_generation():
    plain, inputs = build("GPT-2")
    decayed = decay_shortcuts(shrink_eps(plain), 0.5)
    decayed.set_attn_implementation("eager")
    assert len(decayed(**inputs, output_attentions=True).attentions) == 3
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with_cache = decayed.generate(**inputs, use_cache=True, **settings)
    assert torch.equal(with_cache, decayed.generate(**inputs, use_cache=False, **settings))
    assert torch.equal(with_cache, fold_shortcuts(decayed).generate(**inputs, **settings))


def test_our_masked_autoencoder_is_the_decayed_one_of_transformers():
    theirs, inputs = build("ViTMAE")
    sizes = {**VIT_SIZES, **IMAGES}
    sizes |= {name: value for name, value in vars(theirs.config).items() if name.startswith("decoder_")}
    config = DecayedViTMAEConfig.plain(**sizes, shortcut_decay=0.6, layer_norm_eps=theirs.config.layer_norm_eps)
    ours = DecayedViTMAEForPreTraining(config).double().eval()
    ours.load_state_dict(theirs.state_dict())
    decay_shortcuts(theirs, 0.6)
    assert shortcut_alphas(theirs) == ours.vit.shortcut_alphas()
    actual, expected = theirs(**inputs), ours(**inputs)
    assert_same(actual.logits, expected.logits, 1e-10)
    assert_same(actual.loss, expected.loss, 1e-10)


@pytest.mark.parametrize("name", ["ResNet, basic", "ResNet, bottleneck"])
def test_our_resnet_is_the_decayed_one_of_transformers(name):
    theirs, inputs = build(name)
    sizes = {key: getattr(theirs.config, key) for key in ("embedding_size", "hidden_sizes", "depths", "layer_type")}
    config = DecayedResNetConfig(**sizes, shortcut_decay=0.6, stem="imagenet", num_labels=theirs.config.num_labels)
    ours = DecayedResNetForImageClassification(config).double().eval()
    ours.load_state_dict(theirs.state_dict())
    decay_shortcuts(theirs, 0.6)
    assert_same(theirs(**inputs).logits, ours(**inputs).logits, 1e-10)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
@pytest.mark.parametrize("scope", ["both", "attention", "mlp"])
def test_alphas_are_those_of_our_models(schedule, granularity, scope):
    model = decay_shortcuts(build("ViT")[0], 0.6, schedule, granularity, scope)
    expected = layer_shortcut_factors(3, 0.6, schedule, granularity, scope)
    assert_same(torch.tensor(shortcut_alphas(model)), torch.tensor(expected), 1e-12)


def test_auto_is_the_rule_of_our_models():
    sizes = {**VIT_SIZES, **IMAGES, "num_hidden_layers": 12}
    model = decay_shortcuts(transformers.ViTModel(transformers.ViTConfig(**sizes)))
    assert shortcut_alphas(model)[-1][-1] == pytest.approx(suggest_shortcut_decay(12), abs=2e-6)


def test_copies_and_pickles_are_decayed():
    model, inputs = build("ViT")
    decay_shortcuts(model, 0.6)
    expected = model(**inputs)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs)[0], expected)
        assert shortcut_alphas(other) == shortcut_alphas(model)
        set_shortcut_decay(other, 0.9)
        assert shortcut_alphas(model)[-1] == pytest.approx((0.68, 0.6))
        assert torch.equal(model(**inputs)[0], expected) and not torch.equal(other(**inputs)[0], expected)


def test_decay_can_be_changed_and_removed():
    plain, inputs = build("SD3")
    model = decay_shortcuts(copy.deepcopy(plain), 1.0)
    set_shortcut_decay(model, 0.7)
    assert_same(model(**inputs)[0], decay_shortcuts(copy.deepcopy(plain), 0.7)(**inputs)[0])
    set_shortcut_decay(model, 1)
    assert torch.equal(model(**inputs)[0], plain(**inputs)[0])
    for value, sentence in (("auto", "must be a number, got 'auto'"), (0, "must be above 0 here")):
        with pytest.raises(UserError, match=sentence):
            set_shortcut_decay(model, value)
    set_shortcut_decay(model, numpy.float32(0.7))
    assert remove_decay(model) is model
    assert torch.equal(model(**inputs)[0], plain(**inputs)[0])
    for actual, expected in zip(model.modules(), plain.modules(), strict=True):
        assert type(actual) is type(expected) and vars(actual).keys() == vars(expected).keys()


@pytest.mark.parametrize("name", ["ViT", "Llama", "DiT", "SD3"])
def test_gradient_checkpointing(name):
    model, inputs = build(name)
    decay_shortcuts(model.train(), 0.6)
    torch.manual_seed(1)  # DiT drops labels at random
    expected = gradients(model, family_output(name, model, inputs))
    if isinstance(model, diffusers.ModelMixin):
        model.enable_gradient_checkpointing()
    else:
        model.gradient_checkpointing_enable()
    calls = []
    model.get_submodule(first_norm(model)).register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    assert_same(gradients(model, family_output(name, model, inputs)), expected, 1e-12)
    assert len(calls) == 2  # the block ran again for its gradients


def first_norm(model: nn.Module) -> str:
    names = ("layernorm_before", "input_layernorm", "norm1")
    return next(name for name, _ in model.named_modules() if name.endswith(names))


def test_dropout_and_drop_path_draw_the_same_numbers():
    """Stochastic layers between adder and addition: one seed, one output, decayed by the oracle or by us."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        **VIT_SIZES, **IMAGES, mlp_ratio=2, drop_path_rate=0.5, hidden_dropout_prob=0.3, layerscale_value=0.5
    )
    plain = transformers.Dinov2Model(config).double().train()
    inputs = {"pixel_values": torch.randn(8, 3, 16, 16, dtype=torch.float64)}
    decayed = decay_shortcuts(copy.deepcopy(plain), 0.6)
    oracle = ShortcutOracle(plain, FAMILIES["DINOv2"], 0.6)
    oracle.prepare(lambda: plain(**inputs))
    torch.manual_seed(1)
    actual = decayed(**inputs)[0]
    torch.manual_seed(1)
    with oracle:
        expected = plain(**inputs)[0]
    assert_same(actual, expected, 1e-10)


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    model, inputs = build("ViT", torch.float32)
    decay_shortcuts(model, 0.6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(**inputs)[0], model(**inputs)[0], 1e-6)
    set_shortcut_decay(model, 0.8)
    assert_same(compiled(**inputs)[0], model(**inputs)[0], 1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, backend",
    [
        ("ViT", "inductor"),
        *((name, "aot_eager") for name in ("DiT", "SD3", "Flux", "UNet2D", "ConvNeXt", "Swin", "Llama")),
    ],
)
def test_compiled_training_step(name, backend):
    model, inputs = build(name)
    decay_shortcuts(model, 0.6)
    expected = gradients(model, family_output(name, model, inputs))
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    actual = gradients(model, family_output(name, compiled, inputs))
    # Compiled models have gradients of zero where eager ones have none.
    assert_same({key: actual[key] for key in expected}, expected, 1e-8)


def lora(model: nn.Module, *target_modules: str) -> nn.Module:
    config = peft.LoraConfig(r=24, target_modules=list(target_modules), init_lora_weights=False)
    return peft.get_peft_model(model, config).double().eval()


def test_adapters_before_and_after():
    plain, inputs = build("ViT")
    torch.manual_seed(1)
    adapted = lora(copy.deepcopy(plain), "q_proj", "o_proj", "fc1", "fc2")
    oracle = ShortcutOracle(adapted, FAMILIES["ViT"], 0.6)
    before = decay_shortcuts(copy.deepcopy(adapted), 0.6)
    oracle.prepare(lambda: adapted(**inputs))
    with oracle:
        expected = adapted(**inputs)[0]
    torch.manual_seed(1)
    after = lora(decay_shortcuts(copy.deepcopy(plain), 0.6), "q_proj", "o_proj", "fc1", "fc2")
    assert_same(before(**inputs)[0], expected, 1e-10)
    assert_same(after(**inputs)[0], expected, 1e-10)
    with pytest.raises(UserError, match="merge adapters"):
        fold_shortcuts(after)
    merged = after.merge_and_unload()
    assert_same(merged(**inputs)[0], expected, 1e-10)
    assert_same(fold_shortcuts(shrink_eps(merged))(**inputs)[0], expected, 1e-6)


def test_module_that_was_replaced_after_the_decay_is_refused():
    model, inputs = build("ConvNeXt")
    adapted = lora(decay_shortcuts(model, 0.6), "dwconv")
    with pytest.raises(UserError, match="'dwconv' of ConvNextLayer was replaced after `decay_shortcuts`"):
        adapted(**inputs)


@pytest.mark.parametrize("name", FOLDING)
def test_folded_model_is_stock_and_computes_the_same(name):
    plain, inputs = build(name)
    model = decay_shortcuts(shrink_eps(copy.deepcopy(plain)), 0.6)
    expected = family_output(name, model, inputs)
    folded = fold_shortcuts(copy.deepcopy(model))
    # Llama's norms compute in float32.
    assert_same(family_output(name, folded, inputs), expected, 1e-5 if name == "Llama" else 1e-8)
    for actual, original in zip(folded.modules(), plain.modules(), strict=True):
        assert type(actual) is type(original)
    assert torch.equal(family_output(name, model, inputs), expected)  # the copy was folded, not the model


@pytest.mark.parametrize("name", FOLDING)
def test_keep_function_and_back(name):
    plain, inputs = build(name)
    model = decay_shortcuts(copy.deepcopy(plain), 0.4, keep_function=True)
    # To rounding errors, with eps as it is, and without a final norm.
    assert_same(model(**inputs)[0], plain(**inputs)[0], 1e-9)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, plain.state_dict()[key])]
    assert changed and len(changed) < len(plain.state_dict()) / 2
    with pytest.raises(UserError, match="cannot be changed"):
        set_shortcut_decay(model, 0.9)
    with pytest.raises(UserError, match="fold_shortcuts"):
        remove_decay(model)
    folded = fold_shortcuts(model)
    assert_same(dict(folded.state_dict()), dict(plain.state_dict()), 1e-14)
    assert_same(folded(**inputs)[0], plain(**inputs)[0], 1e-12)


def test_keep_function_is_the_decayed_network():
    """What remains after `keep_function` is the ordinary decay with other weights."""
    plain, inputs = build("ViT")
    continued = decay_shortcuts(shrink_eps(copy.deepcopy(plain)), 0.6, keep_function=True)
    ordinary = decay_shortcuts(shrink_eps(copy.deepcopy(plain)), 0.6)
    ordinary.load_state_dict(continued.state_dict())
    assert_same(ordinary(**inputs)[0], continued(**inputs)[0], 1e-8)


@pytest.mark.parametrize("name", ["ViT", "ViTMAE", "GPT-2", "ConvNeXt", "DiT"])
def test_saved_folder_is_stock_and_can_be_decayed_again(name, tmp_path):
    plain, inputs = build(name, torch.float32)
    model = decay_shortcuts(copy.deepcopy(plain), 0.6)
    expected = family_output(name, model, inputs)
    model.save_pretrained(tmp_path)
    assert torch.equal(family_output(name, model, inputs), expected)
    stock = type(plain).from_pretrained(tmp_path).eval()
    assert type(stock) is type(plain)
    assert_same(family_output(name, stock, inputs), expected, 1e-2)  # the stock eps, on random weights
    again = decay_shortcuts(copy.deepcopy(stock), 0.6, keep_function=True)
    assert_same(again(**inputs)[0], stock(**inputs)[0], 1e-4)
    # As a `Trainer` resumes: the file's weights go into a model that is decayed already.
    file = next(tmp_path.glob("*.safetensors"))
    resumed = decay_shortcuts(copy.deepcopy(plain), 0.6)
    if name in ("ViT", "ViTMAE"):  # transformers writes these with the names of older versions
        with pytest.raises(UserError, match="has no .*o_proj"):
            resumed.load_state_dict(load_file(file), strict=False)
    else:
        with torch.no_grad():
            for parameter in resumed.parameters():
                parameter.zero_()
        resumed.load_state_dict(load_file(file), strict=False)
        assert_same(dict(resumed.state_dict()), dict(model.state_dict()), 1e-6)


def test_trainer_resumes_a_decayed_model(tmp_path):
    plain, _ = build("GPT-2", torch.float32)
    examples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 30, (8, 6))]
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    settings |= {"report_to": [], "use_cpu": True, "optim": "sgd", "disable_tqdm": True}

    def trained(folder: str, checkpoint=None) -> nn.Module:
        model = decay_shortcuts(copy.deepcopy(plain), 0.6)
        arguments = transformers.TrainingArguments(str(tmp_path / folder), **settings)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
        trainer.train(resume_from_checkpoint=checkpoint)
        return model

    unbroken = dict(trained("unbroken").state_dict())
    resumed = dict(trained("resumed", tmp_path / "unbroken" / "checkpoint-2").state_dict())
    assert not torch.allclose(unbroken["transformer.h.2.mlp.c_proj.weight"], plain.transformer.h[2].mlp.c_proj.weight)
    assert_same(resumed, unbroken, 1e-5)


def test_trainer_style_state_dict_is_folded(tmp_path):
    model, _ = build("ViT", torch.float32)
    decay_shortcuts(model, 0.6)
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "passed", state_dict=model.state_dict())
    own, passed = (load_file(tmp_path / folder / "model.safetensors") for folder in ("own", "passed"))
    assert_same(passed, own)
    fold_shortcuts(model).save_pretrained(tmp_path / "stock")
    stock = load_file(tmp_path / "stock" / "model.safetensors")
    assert own.keys() - stock.keys() == {"folded_shortcuts"} and stock.keys() < own.keys()


def test_part_of_a_model_is_saved_folded(tmp_path):
    config = transformers.ViTConfig(**VIT_SIZES, **IMAGES)
    model = decay_shortcuts(transformers.ViTForImageClassification(config).eval(), 0.6)
    inputs = {"pixel_values": torch.randn(1, 3, 16, 16)}
    model.vit.save_pretrained(tmp_path)
    stock = transformers.ViTModel.from_pretrained(tmp_path)
    assert_same(stock(**inputs)[0], model.vit(**inputs)[0], 1e-4)


def clip() -> nn.Module:
    torch.manual_seed(0)
    sizes = {**VIT_SIZES, "projection_dim": 8}
    text = {**sizes, "vocab_size": 30, "max_position_embeddings": 8}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config={**sizes, **IMAGES}, projection_dim=8)
    ).eval()


def test_towers_of_a_larger_model():
    model = clip()
    with pytest.raises(UserError, match="several residual stacks.*as in `part='vision_model'`"):
        decay_shortcuts(model, 0.6)
    with pytest.raises(UserError, match="CLIPModel has no `part` 'vision'; its own are: text_model, vision_model,"):
        decay_shortcuts(model, 0.6, part="vision")
    decay_shortcuts(model, 0.6, part="vision_model")
    assert len(shortcut_alphas(model)) == len(shortcut_alphas(model.vision_model)) == 3
    decay_shortcuts(model, 0.7, part="text_model")
    with pytest.raises(UserError, match="decayed already"):
        decay_shortcuts(model, 0.7, part="text_model")
    assert [block[-1] for block in shortcut_alphas(model)][2::3] == pytest.approx([0.7, 0.6])
    groups = shortcut_parameter_groups(clip(), 0.6, lr=1.0, part="vision_model")
    assert max(group["lr"] for group in groups) == pytest.approx(
        1 / math.prod(sum(shortcut_alphas(model.vision_model), ()))
    )
    with pytest.warns(UserWarning) as warned:  # the text tower has a final norm, the vision tower has none
        fold_shortcuts(model)
    assert len(warned) == 1 and "`last_hidden_state`" in str(warned[0].message)
    with pytest.raises(UserError, match="no decayed shortcuts"):
        shortcut_alphas(model)


def test_larger_model_is_saved_folded_or_not_at_all(tmp_path):
    inputs = images()
    model = decay_shortcuts(clip(), 0.6, part="vision_model")
    model.save_pretrained(tmp_path / "whole")
    stock = transformers.CLIPModel.from_pretrained(tmp_path / "whole")
    expected = model.get_image_features(**inputs)
    assert_same(stock.get_image_features(**inputs).pooler_output, expected.pooler_output, 1e-3)
    model = clip()
    decay_shortcuts(model.vision_model, 0.6)  # the whole model does not know of it
    with pytest.raises(UserError, match="CLIPModel would be saved without the decay of its CLIPVision"):
        model.save_pretrained(tmp_path / "tower")
    assert not list((tmp_path / "tower").glob("*.safetensors"))
    assert model.state_dict().keys() == stock.state_dict().keys()
    lora(model, "q_proj").save_pretrained(tmp_path / "adapter")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, tokens):
        return self.proj(tokens.mean(1, keepdim=True) + tokens)


class MyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(8), Attention()
        self.norm2, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens):
        tokens = tokens + self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


BRANCHES = [("norm1", "attn", "attn.proj"), ("norm2", "mlp", "mlp.2")]


def own_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(MyBlock() for _ in range(3)), nn.LayerNorm(8)).double()


def test_blocks_of_the_user():
    model, tokens = own_model(), torch.randn(2, 5, 8, dtype=torch.float64)
    stream = tokens
    for block, (attention, mlp) in zip(model, layer_shortcut_factors(3, 0.6)):
        stream = attention * stream + block.attn(block.norm1(stream))
        stream = mlp * stream + block.mlp(block.norm2(stream))
    expected = model[-1](stream)
    decayed = decay_shortcuts(copy.deepcopy(model), 0.6, blocks={MyBlock: [pair[:2] for pair in BRANCHES]})
    assert_same(decayed(tokens), expected, 1e-10)
    with pytest.raises(UserError, match="names no output layers"):
        fold_shortcuts(decayed)
    decayed = decay_shortcuts(shrink_eps(copy.deepcopy(model)), 0.6, blocks={MyBlock: BRANCHES})
    expected = decayed(tokens)
    with pytest.warns(UserWarning, match="what leaves the last block is .* the same if a norm stands behind that"):
        folded = fold_shortcuts(decayed)
    assert_same(folded(tokens), expected, 1e-10)


@pytest.mark.parametrize("reader", [nn.Linear(8, 8), nn.BatchNorm1d(5)], ids=["linear", "batch norm"])
def test_user_blocks_that_read_without_a_norm_are_not_folded(reader):
    """They decay, but a stock network would read another scale."""
    model, tokens = own_model(), torch.randn(2, 5, 8, dtype=torch.float64)
    for block in model[:-1]:
        block.norm2 = copy.deepcopy(reader).double()
    groups = {"lr": 1e-3, "blocks": {MyBlock: BRANCHES}}
    for attempt in (
        lambda: fold_shortcuts(decay_shortcuts(copy.deepcopy(model), 0.6, blocks={MyBlock: BRANCHES})),
        lambda: decay_shortcuts(copy.deepcopy(model), 0.6, blocks={MyBlock: BRANCHES}, keep_function=True),
        lambda: shortcut_parameter_groups(model, 0.6, **groups),
    ):
        with pytest.raises(UserError, match="the reader 'norm2' .* is no norm, so it sees the scale of the stream"):
            attempt()
    assert decay_shortcuts(model.eval(), 0.6, blocks={MyBlock: BRANCHES})(tokens).shape == tokens.shape


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.full((8,), 1.5))


class CachingBlock(MyBlock):
    """Keeps earlier tokens, averages what it sees, and shares a buffer with the other blocks."""

    def __init__(self, shared):
        super().__init__()
        self.average, self.shared = nn.BatchNorm1d(8), shared

    def forward(self, tokens, cache=None):
        if cache is not None:
            cache.tokens.append(tokens)
        self.average(tokens.detach().flatten(0, 1))
        tokens = tokens + self.attn(self.norm1(tokens) * self.shared.gain)
        return tokens + self.mlp(self.norm2(tokens))


def test_the_first_input_of_a_user_block_leaves_no_traces():
    shared = Gain()
    model = nn.ModuleList(CachingBlock(shared) for _ in range(2)).train()
    decay_shortcuts(model, 0.6, blocks={CachingBlock: BRANCHES})
    tokens, cache = torch.randn(2, 5, 8, requires_grad=True), SimpleNamespace(tokens=[])
    cache.owner = SimpleNamespace(cache=cache)
    for block in model:
        tokens = block(tokens, cache=cache)
    tokens.sum().backward()  # no buffer was written to in between
    assert len(cache.tokens) == 2 and cache.tokens[1].requires_grad  # the check copies tensors with a gradient, too
    assert [block.average.num_batches_tracked.item() for block in model] == [1, 1]
    expected = nn.BatchNorm1d(8)
    expected(cache.tokens[0].flatten(0, 1))
    torch.testing.assert_close(model[0].average.running_mean, expected.running_mean)


class PostNormBlock(MyBlock):
    def forward(self, tokens):
        tokens = self.norm1(tokens + self.attn(tokens))
        return self.norm2(tokens + self.mlp(tokens))


class GatedBlock(MyBlock):
    """Reads its stream for a gate, beside the norms."""

    def forward(self, tokens):
        tokens = tokens + self.attn(self.norm1(tokens)) * tokens.mean()
        return tokens + self.mlp(self.norm2(tokens))


@pytest.mark.parametrize(
    "block_class, branches, sentence",
    [
        (PostNormBlock, [("attn", "attn"), ("mlp", "mlp")], "PostNormBlock does not return its input when attn, mlp"),
        (PostNormBlock, [("attn", "norm1"), ("mlp", "norm2")], "PostNormBlock does not return its input"),
        (MyBlock, [("norm1", "attn")], "MyBlock does not return its input when attn return zero"),
        (MyBlock, [("norm1", "attn"), ("norm1", "mlp")], "MyBlock reads its stream elsewhere than in norm1"),
        (GatedBlock, BRANCHES, "GatedBlock reads its stream elsewhere than in norm1, norm2"),
        (MyBlock, [("norm1", "attn"), ("norm2", "ffn")], None),
        (MyBlock, BRANCHES, ""),
    ],
)
def test_what_the_user_says_of_blocks_is_tried(block_class, branches, sentence):
    torch.manual_seed(0)
    model, tokens = nn.Sequential(block_class(), block_class()).train(), torch.randn(2, 5, 8)
    if sentence is None:
        with pytest.raises(UserError, match="MyBlock has no submodule 'ffn'"):
            decay_shortcuts(model, 0.6, blocks={block_class: branches})
        return
    decay_shortcuts(model, 0.6, blocks={block_class: branches})
    state = torch.get_rng_state()
    if sentence:
        with pytest.raises(UserError, match=sentence):
            model(tokens)
        with pytest.raises(UserError, match=sentence):  # not only once
            model(tokens)
    else:
        assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "name, optimizer",
    [("ViT", optimizer) for optimizer in ("adamw", "adam", "sgd", "lars", "lamb")]
    + [("PixArt", "adamw"), ("PixArt", "sgd"), ("SD3", "adamw")],
)
def test_optimizer_rule_trains_the_decayed_network(name, optimizer):
    plain, inputs = build(name)
    rates = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
    decayed = shrink_eps(plain)
    stock = fold_shortcuts(decay_shortcuts(copy.deepcopy(decayed), 0.4))
    equal_rates = copy.deepcopy(stock)
    losses = {}
    for label, model, decay in (("decayed", decayed, 1.0), ("rule", stock, 0.4), ("equal", equal_rates, 1.0)):
        step = optimizer_step(optimizer, shortcut_parameter_groups(model, decay, optimizer, **rates))
        if label == "decayed":
            decay_shortcuts(model, 0.4)
        losses[label] = train(name, model, inputs, step, 30 if name == "ViT" else 5)
    assert losses["decayed"][-1] < losses["decayed"][0]
    rule, expected = (torch.tensor(losses[label], dtype=torch.float64) for label in ("rule", "decayed"))
    assert_same(rule, expected, 1e-9)
    assert losses["equal"][-1] != pytest.approx(losses["decayed"][-1], rel=1e-5)


def train(name: str, model: nn.Module, inputs: dict, step, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = (family_output(name, model, inputs) - 1).square().mean()
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def optimizer_step(name: str, groups: list[dict]):
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=0.9).step
    if name in ("adam", "adamw"):
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups).step
    return trust_ratio_step(groups, adaptive=name == "lamb")


def trust_ratio_step(groups: list[dict], adaptive: bool):
    """LARS, or LAMB without momentum: the update of a matrix has the norm of its weight; biases have no trust ratio."""

    @torch.no_grad()
    def step():
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad
                if adaptive:
                    update = update / (update.abs() + group["eps"])
                update = update + group["weight_decay"] * parameter
                trust_ratio = parameter.norm() / update.norm() if parameter.ndim > 1 and update.any() else 1.0
                parameter.sub_(update * (group["lr"] * trust_ratio))

    return step


def test_parameter_groups_hold_every_parameter_once():
    model, _ = build("ViT")
    groups = shortcut_parameter_groups(model, 0.6, lr=1.0, weight_decay=0.5)
    parameters = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(parameters) == sorted(map(id, model.parameters()))
    product = 1.0 * 0.92 * 0.84  # up to the attention of the second layer
    weight = next(
        group for group in groups if any(p is model.layers[1].attention.o_proj.weight for p in group["params"])
    )
    assert weight["lr"] == pytest.approx(1 / product) and weight["weight_decay"] == pytest.approx(0.5 * product)
    bias = next(group for group in groups if any(p is model.layers[1].attention.o_proj.bias for p in group["params"]))
    assert bias["lr"] == pytest.approx(1 / product) and bias["weight_decay"] == 0
    frozen = model.requires_grad_(False).layers[0].requires_grad_(True)
    groups = shortcut_parameter_groups(model, 0.6, lr=1.0)
    assert sum(len(group["params"]) for group in groups) == len(list(frozen.parameters()))


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"shortcut_decay": 0}, "must be above 0 here: the stream is divided by it"),
        ({"shortcut_decay": 1.2}, r"must lie in \(0, 1\], got 1.2"),
        ({"shortcut_decay": -0.5}, r"must lie in \(0, 1\], got -0.5"),
        ({"shortcut_decay": float("nan")}, r"must lie in \(0, 1\], got nan"),
        ({"shortcut_decay": "half"}, "must be a number or 'auto', got 'half'"),
        ({"shortcut_decay": True}, "must be a number or 'auto', got True"),
        ({"schedule": "linar"}, "`schedule` must be one of constant, cosine, linear, got 'linar'"),
        ({"granularity": "block"}, "`granularity` must be 'sublayer' or 'layer'"),
        ({"scope": "all"}, "`scope` must be 'both', 'attention' or 'mlp'"),
        ({"blocks": {}}, "`blocks` must be a dictionary"),
        ({"blocks": {MyBlock: BRANCHES}}, "ViTModel has no block of class MyBlock"),
        ({"blocks": {"ViTLayer": BRANCHES}}, "must have classes of modules as keys, got 'ViTLayer'"),
        ({"blocks": {MyBlock: ["norm1", "attn"]}}, r"must be a list of \(reader, adder\)"),
        ({"blocks": {MyBlock: []}}, r"must be a list of \(reader, adder\)"),
    ],
)
def test_bad_settings_are_refused(settings, sentence):
    model, _ = build("ViT")
    with pytest.raises(UserError, match=sentence):
        decay_shortcuts(model, **{"shortcut_decay": 0.6, **settings})
    with pytest.raises(UserError, match=sentence):
        shortcut_parameter_groups(model, **{"shortcut_decay": 0.6, **settings}, lr=1e-3)
    with pytest.raises(UserError, match="no decayed shortcuts"):
        shortcut_alphas(model)


def test_functions_take_modules():
    for function in (fold_shortcuts, remove_decay, shortcut_alphas, decay_shortcuts):
        with pytest.raises(UserError, match="`model` must be a torch module, got str"):
            function("facebook/dinov2-base")


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes))


def shared_blocks() -> nn.Module:
    model, _ = build("ViT")
    model.layers[2] = model.layers[0]
    return model


def shared_norms() -> nn.Module:
    model, _ = build("ViT")
    model.layers[2].layernorm_after = model.layers[0].layernorm_after
    return model


def mixed_blocks() -> nn.Module:
    model, _ = build("ViT")
    model.layers[1] = MyBlock()
    return model


def hooked() -> nn.Module:
    model, _ = build("ViT")
    norm = model.layers[1].layernorm_after
    norm.forward = norm.forward  # as accelerate does for `device_map`
    return model


def cross_attention() -> nn.Module:
    sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2Model(transformers.GPT2Config(**sizes, add_cross_attention=True))


@pytest.mark.parametrize(
    "model, sentence",
    [
        (lambda: decay_shortcuts(build("ViT")[0], 0.6), "ViTModel is decayed already"),
        (bert, r"BertModel normalises after each addition \(BertLayer\)"),
        (own_model, r"Sequential has no blocks of a known family \(ViT, .*`blocks=\{MyBlock"),
        (shared_blocks, "shared modules have no depth"),
        (shared_norms, "shared modules have no depth"),
        (mixed_blocks, "'layers' of ViTModel has blocks of unknown classes: MyBlock"),
        (hooked, "has a replaced `forward`, as with `device_map`"),
        (cross_attention, "has a branch that runs only at times"),
    ],
)
def test_models_that_cannot_be_decayed(model, sentence):
    with pytest.raises(UserError, match=sentence):
        decay_shortcuts(model(), 0.6)


def test_scopes_that_would_decay_nothing_are_refused():
    for name in ("ConvNeXt", "ResNet, basic", "UNet2D", "Flux"):
        with pytest.raises(UserError, match="`scope='mlp'` needs blocks of attention and MLP branches"):
            decay_shortcuts(build(name)[0], 0.6, scope="mlp")
    model = transformers.ViTModel(transformers.ViTConfig(**{**VIT_SIZES, **IMAGES, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match="changes no shortcut"):
        decay_shortcuts(model, 0.6, scope="attention")
    with pytest.raises(UserError, match="aims at an effective decay"):
        decay_shortcuts(model, scope="attention")


@pytest.mark.parametrize("name", ["ResNet, basic", "UNet2D"])
def test_models_that_cannot_be_folded(name, tmp_path):
    plain, inputs = build(name)
    model = decay_shortcuts(copy.deepcopy(plain), 0.6)
    expected = model(**inputs)[0]
    for attempt in (
        lambda: fold_shortcuts(model),
        lambda: model.save_pretrained(tmp_path / "model"),
        lambda: decay_shortcuts(plain, 0.6, keep_function=True),
        lambda: shortcut_parameter_groups(plain, 0.6, lr=1e-3),
    ):
        with pytest.raises(UserError, match="stock weights: .* without a norm"):
            attempt()
    assert torch.equal(model(**inputs)[0], expected) and not (tmp_path / "model").exists()
    resumed = decay_shortcuts(copy.deepcopy(plain), 0.6)
    resumed.load_state_dict(model.state_dict())
    assert torch.equal(resumed(**inputs)[0], expected)


def quantise(model: nn.Module) -> None:
    layer = model.layers[1].mlp.fc2
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


def replace_layer(model: nn.Module) -> None:
    model.layers[1].mlp.fc2 = nn.Sequential(model.layers[1].mlp.fc2)  # as libraries of quantisation and adapters do


def offload(model: nn.Module) -> None:
    model.layers[1].mlp.fc2.to("meta")


def shard(model: nn.Module) -> None:
    model.layers[1].mlp.fc2.weight.data = torch.empty(0, dtype=torch.float64)  # as ZeRO-3 leaves it


def tie(model: nn.Module) -> None:
    model.layers[1].mlp.fc2.weight = model.layers[0].mlp.fc2.weight


@pytest.mark.parametrize(
    "change, sentence",
    [
        (quantise, r"Weights of Linear are quantised \(torch.int8\)"),
        (offload, "Weights of Linear are sharded, offloaded or quantised"),
        (shard, "Weights of Linear are sharded, offloaded or quantised"),
        (tie, "layers of different depth share weights"),
        (replace_layer, "Sequential cannot be folded: fold before quantisation, and merge adapters"),
    ],
)
def test_weights_that_cannot_be_folded(change, sentence):
    model, _ = build("ViT")
    decay_shortcuts(model, 0.6)
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    with pytest.raises(UserError, match=sentence):
        fold_shortcuts(model)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert shortcut_alphas(model)


def test_float16_overflow_is_told_before_it_happens():
    model, _ = build("ViT", torch.float16)
    decay_shortcuts(model, 0.05, schedule="constant")
    with pytest.raises(UserError, match="float16 is too small to fold this decay: activations change by a factor of"):
        fold_shortcuts(model)
    set_shortcut_decay(model, 0.9)
    with torch.no_grad():
        model.layers[2].mlp.fc2.weight[0, 0] = 6e4
    with pytest.raises(UserError, match="float16 is too small"):
        fold_shortcuts(model)
    assert torch.isfinite(fold_shortcuts(model.to(torch.bfloat16)).layers[2].mlp.fc2.weight).all()
    with pytest.raises(UserError, match="float16"):
        decay_shortcuts(build("ViT", torch.float16)[0], 0.05, "constant", keep_function=True)


def test_output_without_a_final_norm_is_told():
    model, inputs = build("CLIP")
    decay_shortcuts(shrink_eps(model), 0.6)
    expected = model(**inputs)
    product = math.prod(math.prod(alphas) for alphas in shortcut_alphas(model))
    with pytest.warns(UserWarning, match=f"In the folded model `last_hidden_state` is {1 / product:.4g} times"):
        folded = fold_shortcuts(model)
    assert_same(folded(**inputs).last_hidden_state * product, expected.last_hidden_state, 1e-8)


def test_models_that_read_hidden_states_are_not_folded():
    config = transformers.Dinov2Config(**VIT_SIZES, **IMAGES, mlp_ratio=2, out_features=["stage1", "stage3"])
    model = decay_shortcuts(transformers.Dinov2Backbone(config), 0.6)
    with pytest.raises(UserError, match="Dinov2Backbone reads hidden states without a norm"):
        fold_shortcuts(model)
    assert len(shortcut_alphas(model)) == 3


def test_readers_outside_of_the_part_are_found():
    """LLaVA takes a layer of its vision tower without a norm; a backbone, that of its encoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=2)
    llava = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text)
    )
    with pytest.raises(UserError, match="reads hidden states without a norm"):
        decay_shortcuts(llava, 0.6, part="model.vision_tower", keep_function=True)
    decayed = decay_shortcuts(llava, 0.6, part="model.vision_tower")
    with pytest.raises(UserError, match="LlavaForConditionalGeneration reads hidden states without a norm"):
        fold_shortcuts(decayed)
    remove_decay(decayed)
    fold_shortcuts(
        decay_shortcuts(llava, 0.6, part="model.language_model", keep_function=True)
    )  # nobody reads its layers
    config = transformers.Dinov2Config(**sizes, image_size=16, patch_size=8, apply_layernorm=False)
    backbone = decay_shortcuts(transformers.Dinov2Backbone(config), 0.6, part="encoder")
    with pytest.raises(UserError, match="Dinov2Backbone reads hidden states without a norm"):
        fold_shortcuts(backbone)


def test_replaced_forward_is_refused():
    model, inputs = build("ViT")
    decay_shortcuts(model, 0.6)
    norm = model.layers[1].layernorm_after
    norm.forward = MethodType(nn.LayerNorm.forward, norm)  # as libraries of kernels do
    with pytest.raises(UserError, match="'layernorm_after' of ViTLayer was replaced"):
        model(**inputs)
    del norm.forward
    model.layers[1].layernorm_after = nn.LayerNorm(16)
    for change in (remove_decay, fold_shortcuts):
        with pytest.raises(UserError, match="LayerNorm was replaced, or given another class"):
            change(model)


def test_hooks_of_accelerate_after_the_decay():
    model, inputs = build("ViT")
    decay_shortcuts(model, 0.6)
    expected = model(**inputs)[0]
    add_hook_to_module(model, ModelHook())
    for module in model.layers.modules():
        add_hook_to_module(module, ModelHook())
    assert torch.equal(model(**inputs)[0], expected)


def test_bfloat16_stays_bfloat16():
    model, inputs = build("ViT", torch.bfloat16)
    decay_shortcuts(model, 0.6)
    output = model(**inputs)[0]
    assert output.dtype == torch.bfloat16
    expected = copy.deepcopy(model).double()(pixel_values=inputs["pixel_values"].double())[0]
    assert_same(output.double(), expected, 0.1)


def test_part_of_a_stack_is_refused():
    model, _ = build("ViT")
    decay_shortcuts(model, 0.6)
    del model.layers[0]
    with pytest.raises(UserError, match="holds 2 of 3 decayed blocks"):
        shortcut_alphas(model)


def test_unknown_optimizer_and_decayed_model_have_no_rule():
    model, _ = build("ViT")
    with pytest.raises(UserError, match="`optimizer` must be one of adamw, .*, got 'adafactor'"):
        shortcut_parameter_groups(model, 0.6, "adafactor", lr=1e-3)
    for rates, sentence in (
        ({"lr": -1.0}, "`lr` must be a number of at least 0, got -1.0"),
        ({"lr": "1e-3"}, "`lr` must be a number of at least 0, got '1e-3'"),
        ({"lr": 1e-3, "weight_decay": math.nan}, "`weight_decay` must be a number of at least 0, got nan"),
    ):
        with pytest.raises(UserError, match=sentence):
            shortcut_parameter_groups(model, 0.6, **rates)
    decay_shortcuts(model, 0.6)
    with pytest.raises(UserError, match="decayed already"):
        shortcut_parameter_groups(model, 0.6, lr=1e-3)


def test_unusual_decays_warn():
    with pytest.warns(UserWarning, match="below 0.45"):
        decay_shortcuts(build("ViT")[0], 0.3)
    with pytest.warns(UserWarning, match="effective decay of 5.2e-01, outside"):
        decay_shortcuts(build("ViT")[0], 0.8)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
def test_every_family_with_every_schedule(name, schedule, granularity):
    """Against the newest libraries: training mode, another schedule, set after the decay, by the oracle's arithmetic."""
    plain, inputs = build(name)
    plain.train()
    decayed = decay_shortcuts(copy.deepcopy(plain), 1.0, schedule, granularity)
    set_shortcut_decay(decayed, 0.5)
    oracle = ShortcutOracle(plain, FAMILIES[name], 0.5)
    torch.manual_seed(1)
    oracle.prepare(lambda: plain(**inputs))
    alphas = dict(zip(oracle.alphas, shortcut_alphas(decayed), strict=True))
    assert [len(values) for values in alphas.values()] == [len(values) for values in oracle.alphas.values()]
    oracle.alphas = {block: list(values) for block, values in alphas.items()}
    torch.manual_seed(1)
    output = family_output(name, decayed, inputs)
    torch.manual_seed(1)
    with oracle:
        expected = family_output(name, plain, inputs)
    assert_same(output, expected, 1e-9)
    assert_same(gradients(decayed, output), gradients(plain, expected), 1e-6)
