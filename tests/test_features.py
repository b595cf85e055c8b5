"""Features: the same as the model's own forward, in the data's order, kept in shards, whoever computes them."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import TINY_SIZES, random_weights, run_script
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from diffusers import (
    DDPMScheduler,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTImageProcessorPil,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEModel
from hf_decayed.data.datasets import EvaluationDataset
from hf_decayed.errors import DataError
from hf_decayed.evaluation.features import diffusion_encoder, extract_features, transformer_encoder
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.provenance import model_fingerprint


SIDE = TINY_SIZES["image_size"]
PROCESSOR = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


def pictures(number=10, bad=()):
    random_pixels = np.random.default_rng(0).integers(0, 256, (number, 20, 24, 3), dtype=np.uint8)
    rows = []
    for index, pixels in enumerate(random_pixels):
        image = Image.fromarray(pixels)
        rows.append({"bytes": b"junk", "path": f"{index}.png"} if index in bad else image)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    return Dataset.from_dict({"image": rows, "label": [index % 2 for index in range(number)]}, features=features)


def in_order(**options):
    return EvaluationDataset(pictures(bad=options.pop("bad", ())), "image", "label", PROCESSOR, **options)


def decayed_model():
    torch.manual_seed(0)
    return random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).eval()


def test_features_are_the_models_own(tmp_path):
    model = decayed_model()
    names = ["last.mean", "last.cls", "last.patch_mean", "last.pooler", "0.mean", "2.cls"]
    found = extract_features(transformer_encoder(model, names), in_order(), tmp_path, {}, batch_size=3, shard_size=3)
    pixel_values = PROCESSOR(list(pictures()["image"]), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        outputs = model(pixel_values, output_hidden_states=True)
    last = outputs.last_hidden_state
    expected = [last.mean(1), last[:, 0], last[:, 1:].mean(1), outputs.pooler_output]
    expected += [outputs.hidden_states[0].mean(1), outputs.hidden_states[2][:, 0]]
    for name, tensor in zip(names, expected):
        torch.testing.assert_close(found[name], tensor, msg=name)
    assert found["labels"].tolist() == [0, 1] * 5 and len(found["checksums"].unique()) == 10


def test_an_interrupted_shard_is_made_again_and_the_others_kept(tmp_path):
    calls = []

    def encode(pixel_values, places):
        calls.append(places)
        if places[0] == stop_at:
            raise KeyboardInterrupt
        return {"x": pixel_values.flatten(1)}

    stop_at = 6
    with pytest.raises(KeyboardInterrupt):
        extract_features(encode, in_order(), tmp_path, {"model": 1}, batch_size=3, shard_size=3)
    stop_at = None
    calls.clear()
    found = extract_features(encode, in_order(), tmp_path, {"model": 1}, batch_size=3, shard_size=3)
    assert calls == [[6, 7, 8], [9]] and len(found["x"]) == 10
    # A damaged file is not trusted, a whole one is; another model is another folder.
    damaged = sorted(tmp_path.rglob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-5])
    calls.clear()
    again = extract_features(encode, in_order(), tmp_path, {"model": 1}, batch_size=3, shard_size=3)
    assert calls == [[3, 4, 5]] and torch.equal(again["x"], found["x"])
    extract_features(encode, in_order(), tmp_path, {"model": 2}, batch_size=3, shard_size=3)
    assert len(calls) == 5 and not list(tmp_path.rglob(".writing*"))


def test_bad_images(tmp_path):
    def encode(pixel_values, places):
        return {"x": torch.tensor(places, dtype=torch.float32).unsqueeze(1)}

    with pytest.raises(DataError, match="'4.png' .row 4. cannot be decoded"):
        extract_features(encode, in_order(bad=(4,)), tmp_path, {}, batch_size=3)
    images = in_order(bad=(3, 4, 5), on_bad_image="skip")  # a whole batch among them
    found = extract_features(encode, images, tmp_path, {}, batch_size=3)
    assert found["x"].flatten().tolist() == [0, 1, 2, 6, 7, 8, 9] and found["labels"].tolist() == [0, 1, 0, 0, 1, 0, 1]


def test_any_encoder(tmp_path):
    sizes = {name: value for name, value in TINY_SIZES.items() if not name.startswith("decoder")}
    models = {
        "vit": (ViTModel(ViTConfig(**sizes)), ["last.cls", "1.mean"]),
        "vit_mae": (ViTMAEModel(ViTMAEConfig(**sizes)), ["last.mean", "last.cls"]),
        "resnet": (
            ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
            ["last.mean", "1.mean"],
        ),
    }
    for kind, (model, names) in models.items():
        encode = transformer_encoder(model, names)
        found = extract_features(encode, in_order(), tmp_path, {"model": kind}, batch_size=4)
        assert found[names[0]].shape == (10, 16 if kind == "resnet" else sizes["hidden_size"])
        # Nothing random in it: not even ViTMAE masks.
        again = extract_features(encode, in_order(), tmp_path, {"model": f"{kind} again"}, batch_size=4)
        torch.testing.assert_close(again[names[0]], found[names[0]], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no class token: pool by `mean`"):
        transformer_encoder(models["resnet"][0], ["last.cls"])(torch.randn(1, 3, SIDE, SIDE), [0])
    with pytest.raises(ValueError, match="got 'first.cls'"):
        transformer_encoder(models["vit"][0], ["first.cls"])
    with pytest.raises(ValueError, match="'9.cls': the model has layers 0 to"):
        transformer_encoder(models["vit"][0], ["9.cls"])(torch.randn(1, 3, SIDE, SIDE), [0])


@pytest.mark.parametrize(
    "scheduler", [DDPMScheduler(), DPMSolverMultistepScheduler(), FlowMatchEulerDiscreteScheduler()], ids=type
)
def test_diffusion_models_at_any_block_and_noise_level(scheduler):
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8, patch_size=2
    )
    blocks, levels = ["transformer_blocks.0", "transformer_blocks.1"], [0.001, 0.5]
    inputs = {"class_labels": torch.tensor([7])}
    encode = diffusion_encoder(model, scheduler, blocks, levels, **inputs)
    images = torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        whole = encode(images, list(range(6)))
        parts = [encode(images[place : place + 2], [place, place + 1]) for place in (0, 2, 4)]
    assert set(whole) == {f"{block}@{level}" for block in blocks for level in levels}
    for name, features in whole.items():
        assert features.shape == (6, 16)
        # The noise belongs to the image, not to the batch it comes in.
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), features)
    # Little noise leaves the image, much noise hides it; what the model is given agrees with the scheduler.
    given = []
    model.register_forward_pre_hook(lambda module, arguments: given.append(arguments))
    encode(torch.ones(64, 3, 8, 8), list(range(64)))
    for (sample, time), level in zip(given, levels):
        flows = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        kept = 1 - level if flows else float(scheduler.alphas_cumprod[round(1000 * level)].sqrt())
        assert abs(float(sample.mean()) - kept) < 0.03
        assert abs(float(sample.std()) - (level if flows else math.sqrt(1 - kept**2))) < 0.03
        torch.testing.assert_close(time.float(), torch.full((64,), 1000 * level))
    assert (whole["transformer_blocks.0@0.001"] - whole["transformer_blocks.0@0.5"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="no module blocks.9"):
        diffusion_encoder(model, scheduler, ["blocks.9"], [0.1])
    with pytest.raises(ValueError, match="lie in \\[0, 1\\]"):
        diffusion_encoder(model, scheduler, blocks, [500])


def test_sit_is_given_its_own_time():
    """It has noise at 0 and data at 1; levels have it the other way round."""
    model = DecayedSiTTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=3, hidden_size=16, num_layers=2, num_attention_heads=2
    )
    given = []
    model.register_forward_pre_hook(lambda module, arguments: given.append(arguments))
    encode = diffusion_encoder(model, FlowMatchEulerDiscreteScheduler(), ["transformer_blocks.1"], [0.25])
    found = encode(torch.ones(64, 3, 8, 8), list(range(64)))
    ((sample, time),) = given
    torch.testing.assert_close(time, torch.full((64,), 0.75))
    assert abs(float(sample.mean()) - 0.75) < 0.02 and abs(float(sample.std()) - 0.25) < 0.02
    assert found["transformer_blocks.1@0.25"].shape == (64, 16)


def test_tokens_that_are_no_patches_are_left_out():
    model = random_weights(DecayedUViT2DModel(sample_size=4, hidden_size=16, num_layers=2, num_attention_heads=2))
    with torch.no_grad():
        found = diffusion_encoder(model, DDPMScheduler(), ["mid_block"], [0.0])(
            images := torch.randn(2, 3, 4, 4), [0, 1]
        )
        hidden = model(images, torch.tensor(0), output_hidden_states=True).hidden_states[1].mean(1)
    torch.testing.assert_close(found["mid_block@0"], hidden, rtol=0.2, atol=0.2)  # at timestep 0 there is little noise
    assert found["mid_block@0"].shape == (2, 16)


def test_a_fingerprint_is_of_weights_and_config(tmp_path):
    model = decayed_model()
    model.save_pretrained(tmp_path)
    loaded = DecayedViTMAEModel.from_pretrained(tmp_path)
    assert model_fingerprint(loaded) == model_fingerprint(model)
    loaded.config.shortcut_decay = 0.7
    assert model_fingerprint(loaded) != model_fingerprint(model)
    with torch.no_grad():
        model.embeddings.cls_token += 1
    assert model_fingerprint(model) != model_fingerprint(DecayedViTMAEModel.from_pretrained(tmp_path))


evaluate = partial(run_script, "evaluate.py")


def test_evaluate_script(tmp_path):
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "num_channels": 1})
    random_weights(DecayedViTMAEModel(config)).save_pretrained(tmp_path / "model")
    few = ["--max_train_samples", 300, "--max_eval_samples", 100, "--features_dir", tmp_path / "features"]
    result = evaluate(tmp_path / "model", *few, "--output", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["rows"]) == {"pixels", "last.mean", "last.cls"}
    assert results["rows"]["pixels"]["knn_accuracy"] > 0.5
    assert f"| pixels | {100 * results['rows']['pixels']['knn_accuracy']:.1f} % |" in result.stdout
    assert results["dataset"]["number"] == {"train": 300, "test": 100}
    assert str(tmp_path) not in json.dumps(results)
    assert {"protocol", "protocol_hash", "versions", "command"} <= results.keys()
    absent = evaluate(tmp_path / "absent", code=2).stderr.strip().splitlines()[-1]
    assert absent.startswith("evaluate.py: ") and "absent" in absent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_extract_what_one_does(tmp_path):
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "num_channels": 1})
    random_weights(DecayedViTMAEModel(config)).save_pretrained(tmp_path / "model")
    few = ["--max_train_samples", 9000, "--max_eval_samples", 1000, "--metrics", "knn,rank", "--pixels", "false"]
    few += ["--cpu_threads", 1]  # rounding depends on their number
    for processes in (1, 2):
        folder = tmp_path / f"features{processes}"
        evaluate(
            tmp_path / "model",
            *few,
            "--features_dir",
            folder,
            "--output",
            tmp_path / f"{processes}.json",
            processes=processes,
        )
    one, two = (json.loads((tmp_path / f"{processes}.json").read_text()) for processes in (1, 2))
    assert one["rows"] == two["rows"] and one["dataset"] == two["dataset"]
    shards = [sorted((tmp_path / f"features{processes}").rglob("*.safetensors")) for processes in (1, 2)]
    assert len(shards[0]) == 3  # two of training images, one of held-out ones
    for left, right in zip(*shards):
        left, right = load_file(left), load_file(right)
        assert all(torch.equal(left[name], right[name]) for name in left)
