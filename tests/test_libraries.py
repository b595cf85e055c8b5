"""Features of the libraries around a model: attention kernels, gradient checkpointing, compile, half precision,
offloading, pipelines, Trainer, adapters, export."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from conftest import PRESETS, TINY_SIZES, random_weights
from PIL import Image
from transformers import Trainer, TrainingArguments, UperNetConfig, UperNetForSemanticSegmentation, pipeline

from hf_decayed import (
    DecayedViTMAEBackbone,
    DecayedViTMAEConfig,
    DecayedViTMAEForImageClassification,
    DecayedViTMAEForPreTraining,
    DecayedViTMAEModel,
)
from hf_decayed.models.image_processing_decayed import default_image_processor


def default_model(model_class=DecayedViTMAEForPreTraining, **fields):
    return random_weights(model_class(DecayedViTMAEConfig(**TINY_SIZES, **fields)))


def test_one_switch_changes_the_kernel_of_encoder_and_decoder(pixel_values, noise):
    model = default_model().eval()
    kernels = []
    for module in model.modules():
        if type(module).__name__ == "ViTMAEAttention":
            module.register_forward_hook(lambda module, *_: kernels.append(module.config._attn_implementation))
    with torch.no_grad():
        sdpa = model(pixel_values, noise=noise).logits
        assert kernels == ["sdpa"] * 7
        kernels.clear()
        model.set_attn_implementation("eager")
        eager = model(pixel_values, noise=noise).logits
    assert kernels == ["eager"] * 7
    torch.testing.assert_close(sdpa, eager, rtol=1e-4, atol=1e-5)
    config = DecayedViTMAEConfig(**TINY_SIZES, attn_implementation="eager")
    assert (
        DecayedViTMAEForPreTraining(config).decoder.decoder_layers[0].attention.config._attn_implementation == "eager"
    )


@pytest.mark.parametrize("name", ["default", "plain", "learned"])
def test_gradient_checkpointing_gives_the_same_gradients(name, pixel_values, noise):
    model = random_weights(DecayedViTMAEForPreTraining(PRESETS[name](**TINY_SIZES))).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert all(layer.gradient_checkpointing for layer in [*model.vit.layers, *model.decoder.decoder_layers])
        model.zero_grad()
        model(pixel_values, noise=noise).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for without, with_checkpoints in zip(*gradients):
        torch.testing.assert_close(without, with_checkpoints)


def test_hidden_states_and_attentions(pixel_values):
    model = default_model(attn_implementation="eager").eval()
    outputs = model(pixel_values, output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(3, 5, 32)] * 5
    assert [tuple(attention.shape) for attention in outputs.attentions] == [(3, 4, 5, 5)] * 4
    plain = model(pixel_values)
    assert plain.hidden_states is None and plain.attentions is None
    encoder = model.vit(pixel_values, output_hidden_states=True, output_attentions=True)
    assert encoder.attentions[0].shape == (3, 4, 17, 17) and len(encoder.hidden_states) == 5
    assert isinstance(model(pixel_values, return_dict=False), tuple)
    assert torch.equal(model.vit(pixel_values, return_dict=False)[0], model.vit(pixel_values).last_hidden_state)


def run_in_subprocess(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=os.path.dirname(__file__),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_weights_and_autocast(dtype):
    """In a subprocess: some CPUs advertise bf16 units that they do not have, and the variable turns them off in oneDNN."""
    output = run_in_subprocess(
        f"""
        import torch
        from conftest import TINY_SIZES, random_weights
        from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
        torch.manual_seed(0)
        pixel_values, noise = torch.randn(3, 3, 32, 32), torch.rand(3, 16)
        for config in (DecayedViTMAEConfig(**TINY_SIZES), DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule="learned")):
            model = DecayedViTMAEForPreTraining(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.05)
            expected = model(pixel_values, noise=noise).loss
            with torch.autocast("cpu", torch.{dtype}):
                autocast = model(pixel_values, noise=noise).loss
            half = model.to(torch.{dtype})
            outputs = half(pixel_values, noise=noise)  # float32 images, as the processor makes them
            assert outputs.logits.dtype == torch.{dtype} and outputs.loss.dtype == torch.float32
            outputs.loss.backward()
            for loss in (autocast, outputs.loss):
                assert abs(loss.item() - expected.item()) < 0.02 * expected.item(), (loss, expected)
        print("ran")
        """,
        ONEDNN_MAX_CPU_ISA="AVX512_CORE_FP16",
    )
    assert "ran" in output


def test_offloading_to_disk(tmp_path, pixel_values, noise):
    model = default_model().eval()
    model.save_pretrained(tmp_path / "model")
    for device_map in (
        {"vit": "cpu", "decoder": "disk"},
        {"vit.embeddings": "disk", "vit.layers": "cpu", "vit.layernorm": "cpu", "decoder": "disk"},
    ):
        offloaded = DecayedViTMAEForPreTraining.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        with torch.no_grad():
            torch.testing.assert_close(
                offloaded(pixel_values, noise=noise).logits,
                model(pixel_values, noise=noise).logits,
                rtol=1e-4,
                atol=1e-5,
            )


def test_feature_extraction_pipeline(tmp_path):
    model = default_model(DecayedViTMAEModel).eval()
    model.save_pretrained(tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 60, 3), dtype=np.uint8))
    extractor = pipeline("image-feature-extraction", model=str(tmp_path))
    assert np.array(extractor(image)).shape == (1, 17, 32)
    assert np.array(extractor(image, pool=True)).shape == (1, 32)
    # Deterministic, unlike ViTMAE's: nothing is masked.
    assert extractor(image) == extractor(image)


def test_trainer_pretrains_and_evaluates(tmp_path):
    torch.manual_seed(0)
    images = [{"pixel_values": image} for image in torch.randn(16, 3, 32, 32)]
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=images, eval_dataset=images)
    assert trainer.train().training_loss > 0
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "preprocessor_config.json").exists()


def test_trainer_classifies(tmp_path):
    examples = [{"pixel_values": image, "labels": index % 3} for index, image in enumerate(torch.randn(12, 3, 32, 32))]
    model = DecayedViTMAEForImageClassification(DecayedViTMAEConfig(**TINY_SIZES, num_labels=3))
    arguments = TrainingArguments(tmp_path, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)
    trainer.train()
    assert trainer.predict(examples).predictions.shape == (12, 3)


def test_trainer_divides_the_loss_by_accumulation(tmp_path):
    """With labels in the batch, Trainer must not assume that the model normalises its loss over accumulation steps."""
    torch.manual_seed(0)
    examples = [{"pixel_values": image, "label": index % 2} for index, image in enumerate(torch.randn(8, 3, 32, 32))]
    norms = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        torch.manual_seed(0)
        model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))
        arguments = TrainingArguments(
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=examples)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    # Only the prediction head has a gradient in the first step, and its norm hardly depends on the masks.
    assert norms[0] == pytest.approx(norms[1], rel=0.3)


def test_fsdp_finds_the_layers_to_wrap():
    for model_class in (DecayedViTMAEModel, DecayedViTMAEForPreTraining, DecayedViTMAEForImageClassification):
        for name in ("default", "plain"):
            model = model_class(PRESETS[name](**TINY_SIZES))
            plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
            plugin.set_auto_wrap_policy(model)
            assert plugin.auto_wrap_policy is not None


def test_sharded_by_fully_shard():
    """FSDP2 of the default preset, the learned schedule and the patch embedding, on a mesh of one CPU."""
    output = run_in_subprocess(
        """
        import os, torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from conftest import TINY_SIZES, random_weights
        from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining, shortcut_alphas
        from hf_decayed.run.decay_warmup import DecayWarmup
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        pixel_values, noise = torch.randn(3, 3, 32, 32), torch.rand(3, 16)
        for schedule in ("linear", "learned"):
            model = random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES, shortcut_schedule=schedule)))
            expected = model(pixel_values, noise=noise).loss.item()
            warmup = DecayWarmup([model.vit], schedule_steps=8, end=0.5 if schedule == "linear" else None)
            alphas = shortcut_alphas(model)
            fully_shard(model.vit.embeddings.patch_embeddings, mesh=mesh)
            for layer in [*model.vit.layers, *model.decoder.decoder_layers]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            loss = model(pixel_values, noise=noise).loss
            loss.backward()
            assert abs(loss.item() - expected) < 1e-5
            assert all(p.grad is not None for p in model.parameters())
            if schedule == "linear":  # blocks are of other classes now
                warmup.set(0)
                assert {alpha for pair in shortcut_alphas(model) for alpha in pair} == {1.0}
                warmup.set(3)
            assert shortcut_alphas(model) == alphas
        torch.distributed.destroy_process_group()
        print("sharded")
        """
    )
    assert "sharded" in output


def test_lora_under_reentrant_checkpointing(pixel_values, noise):
    peft = pytest.importorskip("peft")
    model = default_model()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
    adapted(pixel_values, noise=noise).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_B" in name and "vit" in name)


def test_tuples_by_config(pixel_values):
    for model_class in (DecayedViTMAEModel, DecayedViTMAEForPreTraining, DecayedViTMAEForImageClassification):
        model = model_class(DecayedViTMAEConfig(**TINY_SIZES))
        model.config.return_dict = False
        assert isinstance(model(pixel_values), tuple)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK"])
def test_processor_takes_images_of_every_mode(mode):
    processor = default_image_processor(image_size=32)
    assert processor(Image.new(mode, (50, 40)), return_tensors="pt").pixel_values.shape == (1, 3, 32, 32)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["projection", "fc1"]])
def test_lora(tmp_path, targets, pixel_values, noise):
    peft = pytest.importorskip("peft")
    model = default_model(DecayedViTMAEForPreTraining)
    before = model(pixel_values, noise=noise).loss.item()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    assert adapted(pixel_values, noise=noise).loss.item() == pytest.approx(before, rel=1e-5)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(pixel_values, noise=noise).loss.backward()
        optimizer.step()
    after = adapted(pixel_values, noise=noise).loss.item()
    # The patch embedding's adapter is used for masked images too.
    assert all(p.grad.any() for name, p in adapted.named_parameters() if "lora_B" in name)
    assert after != pytest.approx(before, rel=1e-5)
    adapted.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    merged = adapted.merge_and_unload()
    assert merged(pixel_values, noise=noise).loss.item() == pytest.approx(after, rel=1e-4)


def test_backbone_under_a_segmentation_head(tmp_path, pixel_values):
    """A segmentation head of transformers builds the backbone through AutoBackbone and takes its feature maps."""
    default_model().save_pretrained(tmp_path)
    backbone = DecayedViTMAEBackbone.from_pretrained(tmp_path, out_indices=[1, 2, 3, 4])
    config = UperNetConfig(backbone_config=backbone.config, num_labels=5, hidden_size=16, auxiliary_in_channels=32)
    segmenter = UperNetForSemanticSegmentation(config).eval()
    assert isinstance(segmenter.backbone, DecayedViTMAEBackbone)
    segmenter.backbone.load_state_dict(backbone.state_dict())
    for ours, theirs in zip(backbone(pixel_values).feature_maps, segmenter.backbone(pixel_values).feature_maps):
        assert torch.equal(ours, theirs)
    assert segmenter(pixel_values).logits.shape == (3, 5, 32, 32)


def test_export_of_the_encoder(pixel_values):
    model = default_model(DecayedViTMAEModel).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (pixel_values,), dynamic_shapes=({0: batch},))
    for images in (pixel_values, torch.randn(5, 3, 32, 32)):
        torch.testing.assert_close(exported.module()(images).pooler_output, model(images).pooler_output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["default", "plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("learned", "scale_both"))]
)
def test_no_graph_breaks(name, pixel_values, noise):
    """`fullgraph=True` with a backend that only traces; the slow test below compiles."""
    model = random_weights(DecayedViTMAEForPreTraining(PRESETS[name](**TINY_SIZES)))
    check_compiled(model, "eager", pixel_values, noise)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["default", "plain", "learned"])
def test_compiled_by_inductor(name, pixel_values, noise):
    model = random_weights(DecayedViTMAEForPreTraining(PRESETS[name](**TINY_SIZES)))
    check_compiled(model, "inductor", pixel_values, noise)


def check_compiled(model, backend, pixel_values, noise):
    torch.compiler.reset()
    encoder = torch.compile(model.vit, fullgraph=True, backend=backend)
    torch.testing.assert_close(
        encoder(pixel_values).last_hidden_state, model.vit(pixel_values).last_hidden_state, rtol=1e-3, atol=1e-4
    )
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.isfinite(compiled(pixel_values).loss)  # draws its own mask
    losses, gradients = [], []
    for forward in (model, compiled):
        model.zero_grad()
        losses.append(forward(pixel_values, noise=noise).loss)
        losses[-1].backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for eager_gradient, gradient in zip(*gradients):
        torch.testing.assert_close(gradient, eager_gradient, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "model_class", [DecayedViTMAEModel, DecayedViTMAEForPreTraining, DecayedViTMAEForImageClassification]
)
def test_save_load_train_two_steps(model_class, preset, tmp_path, pixel_values):
    model = random_weights(model_class(preset)).eval()
    model.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.to_json_string() == model.config.to_json_string()
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    # Position tables are not trainable after loading either: they are not parameters.
    assert not any("pos" in name for name, _ in loaded.named_parameters())
    assert loaded.config.shortcut_alphas() == model.config.shortcut_alphas()

    loaded.train()
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.manual_seed(0)
        arguments = {"labels": torch.tensor([0, 1, 0])} if model_class is DecayedViTMAEForImageClassification else {}
        outputs = loaded(pixel_values, **arguments)
        loss = outputs.pooler_output.square().mean() if model_class is DecayedViTMAEModel else outputs.loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


COLOUR = np.random.default_rng(0).integers(0, 255, (50, 60, 3), dtype=np.uint8)
KINDS_OF_IMAGES = {
    "RGB": Image.fromarray(COLOUR),
    "grey": Image.fromarray(COLOUR).convert("L"),
    "RGBA": Image.fromarray(COLOUR).convert("RGBA"),
    "palette": Image.fromarray(COLOUR).convert("P"),
}


def test_grey_models_take_every_kind_of_image_in_pipelines(tmp_path):
    for name, model_class in (("encoder", DecayedViTMAEModel), ("head", DecayedViTMAEForImageClassification)):
        default_model(model_class, num_channels=1, num_labels=3).save_pretrained(tmp_path / name)
    extractor = pipeline("image-feature-extraction", model=str(tmp_path / "encoder"))
    classifier = pipeline("image-classification", model=str(tmp_path / "head"))
    features = {kind: np.array(extractor(image, pool=True)) for kind, image in KINDS_OF_IMAGES.items()}
    answers = {kind: classifier(image) for kind, image in KINDS_OF_IMAGES.items()}
    np.testing.assert_allclose(features["RGB"], features["grey"], atol=1e-5)
    assert np.array_equal(features["RGB"], features["RGBA"]) and features["palette"].shape == (1, 32)
    assert answers["RGB"] == answers["RGBA"] and all(len(answer) == 3 for answer in answers.values())


def test_the_grey_processor_reads_images_as_training_does():
    processor = default_image_processor(50, num_channels=1)
    processor.size = {"height": 50, "width": 60}

    def pixels(image, **settings):
        values = processor(image, return_tensors="pt", **settings)["pixel_values"]
        return (255 * (values * processor.image_std[0] + processor.image_mean[0])).squeeze()

    grey = torch.tensor(np.asarray(KINDS_OF_IMAGES["grey"])).float()
    for image in (KINDS_OF_IMAGES["RGB"], KINDS_OF_IMAGES["grey"], COLOUR, torch.tensor(COLOUR).permute(2, 0, 1)):
        torch.testing.assert_close(pixels(image), grey, atol=1.0, rtol=0)
    torch.testing.assert_close(pixels(COLOUR / 255.0, do_rescale=False), grey, atol=1.01, rtol=0)
    see_through = KINDS_OF_IMAGES["RGB"].copy()
    see_through.putalpha(0)
    assert pixels(see_through).min() > 254  # white
    assert processor([COLOUR, KINDS_OF_IMAGES["palette"]], return_tensors="pt")["pixel_values"].shape == (2, 1, 50, 60)


def test_a_grey_folder_in_a_process_without_the_package(tmp_path):
    default_model(DecayedViTMAEForImageClassification, num_channels=1, num_labels=3).save_pretrained(
        tmp_path / "model"
    )
    KINDS_OF_IMAGES["RGBA"].save(tmp_path / "image.png")
    code = """
import sys
sys.modules["hf_decayed"] = None
from PIL import Image
from transformers import pipeline
for task in ("image-feature-extraction", "image-classification"):
    task = pipeline(task, model=sys.argv[1], trust_remote_code=True)
    task(sys.argv[2]), task(Image.open(sys.argv[2]).convert("L"))
    print(type(task.image_processor).__name__)
task.save_pretrained(sys.argv[3])
"""
    arguments = [str(tmp_path / name) for name in ("model", "image.png", "again")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd="/")
    assert result.stdout.split() == ["GreyImageProcessor"] * 2, result.stderr[-2000:]
    assert "image_processing_decayed.GreyImageProcessor" in (tmp_path / "again/preprocessor_config.json").read_text()
