"""Features: equal to the model's own forward, in the order of the data, cached in shards, in one process or several."""

import json
import logging
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_SIZES, random_weights
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from diffusers import (
    DDPMScheduler,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTImageProcessorPil,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEModel, cli
from hf_decayed.data.datasets import EvaluationDataset
from hf_decayed.data.shards import encode_dataset, read_shards
from hf_decayed.data.sources import HELD_OUT_RULE, load_image_splits
from hf_decayed.errors import DataError
from hf_decayed.evaluation import knn_accuracy
from hf_decayed.evaluation.features import diffusion_encoder, extract_features, transformer_encoder, with_pixels
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.provenance import model_fingerprint


SIDE = TINY_SIZES["image_size"]
PROCESSOR = ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


def random_images(number=10, bad=()):
    random_pixels = np.random.default_rng(0).integers(0, 256, (number, 20, 24, 3), dtype=np.uint8)
    rows = []
    for index, pixels in enumerate(random_pixels):
        image = Image.fromarray(pixels)
        rows.append({"bytes": b"junk", "path": f"{index}.png"} if index in bad else image)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b"])})
    return Dataset.from_dict({"image": rows, "label": [index % 2 for index in range(number)]}, features=features)


def evaluation_dataset(**options):
    return EvaluationDataset(random_images(bad=options.pop("bad", ())), "image", "label", PROCESSOR, **options)


def decayed_model():
    torch.manual_seed(0)
    return random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).eval()


def test_features_are_the_models_own(tmp_path):
    model = decayed_model()
    names = ["last.mean", "last.cls", "last.patch_mean", "last.pooler", "0.mean", "2.cls"]
    encode = transformer_encoder(model, names)
    features = extract_features(encode, evaluation_dataset(), tmp_path, {}, batch_size=3, shard_size=3)
    pixel_values = PROCESSOR(list(random_images()["image"]), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        outputs = model(pixel_values, output_hidden_states=True)
    last = outputs.last_hidden_state
    expected = [last.mean(1), last[:, 0], last[:, 1:].mean(1), outputs.pooler_output]
    expected += [outputs.hidden_states[0].mean(1), outputs.hidden_states[2][:, 0]]
    for name, tensor in zip(names, expected):
        torch.testing.assert_close(features[name], tensor, msg=name)
    assert features["labels"].tolist() == [0, 1] * 5 and len(features["checksums"].unique()) == 10


def test_only_missing_and_damaged_shards_are_encoded(tmp_path):
    calls = []

    def encode(pixel_values, indices):
        calls.append(indices)
        if indices[0] == stop_at:
            raise KeyboardInterrupt
        return {"x": pixel_values.flatten(1)}

    stop_at = 6
    with pytest.raises(KeyboardInterrupt):
        extract_features(encode, evaluation_dataset(), tmp_path, {"model": 1}, batch_size=3, shard_size=3)
    stop_at = None
    calls.clear()
    features = extract_features(encode, evaluation_dataset(), tmp_path, {"model": 1}, batch_size=3, shard_size=3)
    assert calls == [[6, 7, 8], [9]] and len(features["x"]) == 10
    # A truncated file is encoded again, a valid one is not; another model has another folder.
    damaged = sorted(tmp_path.rglob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-5])
    calls.clear()
    again = extract_features(encode, evaluation_dataset(), tmp_path, {"model": 1}, batch_size=3, shard_size=3)
    assert calls == [[3, 4, 5]] and torch.equal(again["x"], features["x"])
    extract_features(encode, evaluation_dataset(), tmp_path, {"model": 2}, batch_size=3, shard_size=3)
    assert len(calls) == 5 and not list(tmp_path.rglob(".writing*"))


def small_features(folder):
    """Features of two numbers, in four shards."""
    return extract_features(
        lambda pixel_values, indices: {"x": pixel_values.mean(dim=(2, 3))},
        evaluation_dataset(),
        folder,
        {},
        batch_size=3,
        shard_size=3,
    )


def test_a_flipped_bit_is_found_and_the_shard_rebuilt(tmp_path, caplog):
    features = small_features(tmp_path)
    shards = sorted(tmp_path.rglob("*.safetensors"))
    content = shards[1].read_bytes()
    draws = random.Random(0)
    # Every byte of the header and of the tensors, one bit of it at a time.
    for index in range(len(content)):
        flipped = bytearray(content)
        flipped[index] ^= 1 << draws.randrange(8)
        shards[1].write_bytes(flipped)
        try:
            damaged = read_shards(shards)
        except DataError as error:
            assert shards[1].name in str(error)
        else:  # a space of the padding, or a key of the metadata that nobody reads
            assert all(torch.equal(damaged[name], features[name]) for name in features), index
    flipped = bytearray(content)
    flipped[-1] ^= 1
    shards[1].write_bytes(flipped)
    with caplog.at_level(logging.WARNING):
        rebuilt = small_features(tmp_path)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Rebuilding a shard: 'shard-00001-of-00004.safetensors'")
    assert message.endswith("is damaged: its checksum is wrong.") and "\n" not in message
    assert all(torch.equal(rebuilt[name], features[name]) for name in features) and shards[1].read_bytes() == content


def test_a_shard_without_a_checksum_is_rebuilt(tmp_path, caplog):
    features = small_features(tmp_path)
    old = sorted(tmp_path.rglob("*.safetensors"))[0]
    save_file({name: tensor + 1 for name, tensor in load_file(old).items()}, old)  # as earlier versions wrote it
    with pytest.raises(DataError, match="has no checksum"):
        read_shards([old])
    with caplog.at_level(logging.WARNING):
        rebuilt = small_features(tmp_path)
    assert "has no checksum" in caplog.text and torch.equal(rebuilt["x"], features["x"])
    with safe_open(old, "pt") as shard:
        assert shard.metadata()["checksum"].startswith("crc32:")


def test_a_shard_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_decayed.data.shards.save_file", full_disk)
    with pytest.raises(DataError, match="could not be written .* No space left"):
        small_features(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["identity.json"]


def test_bad_images(tmp_path):
    def encode(pixel_values, indices):
        return {"x": torch.tensor(indices, dtype=torch.float32).unsqueeze(1)}

    with pytest.raises(DataError, match="'4.png' .row 4. cannot be decoded"):
        extract_features(encode, evaluation_dataset(bad=(4,)), tmp_path, {}, batch_size=3)
    images = evaluation_dataset(bad=(3, 4, 5), on_bad_image="skip")  # a whole batch among them
    features = extract_features(encode, images, tmp_path, {}, batch_size=3)
    assert features["x"].flatten().tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert features["labels"].tolist() == [0, 1, 0, 0, 1, 0, 1]
    in_memory = encode_dataset(encode, images, batch_size=3)
    assert all(torch.equal(in_memory[name], features[name]) for name in features)
    with pytest.raises(DataError, match="None of the images"):
        encode_dataset(encode, evaluation_dataset(bad=range(10), on_bad_image="skip"))


@pytest.mark.parametrize("batch_size", [3, 64])
def test_features_in_memory_are_those_of_shards(tmp_path, batch_size):
    encode = with_pixels(transformer_encoder(decayed_model(), ["last.mean", "last.cls"]))
    in_shards = extract_features(encode, evaluation_dataset(), tmp_path, {}, batch_size=batch_size, shard_size=5)
    in_memory = encode_dataset(encode, evaluation_dataset(), batch_size=batch_size)
    assert list(in_memory) == ["pixels", "last.mean", "last.cls", "labels", "checksums"]
    assert in_memory.keys() == in_shards.keys()
    for name, tensor in in_memory.items():
        assert tensor.dtype == in_shards[name].dtype and torch.equal(tensor, in_shards[name]), name
    assert in_memory["pixels"].shape == (10, 3 * 32 * 32)
    small = with_pixels(lambda pixel_values, indices: {})(torch.randn(2, 3, 8, 12), [0, 1])
    assert small["pixels"].shape == (2, 3 * 8 * 8)


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
        features = extract_features(encode, evaluation_dataset(), tmp_path, {"model": kind}, batch_size=4)
        assert features[names[0]].shape == (10, 16 if kind == "resnet" else sizes["hidden_size"])
        # Deterministic: ViTMAE does not mask either.
        again = extract_features(encode, evaluation_dataset(), tmp_path, {"model": f"{kind} again"}, batch_size=4)
        torch.testing.assert_close(again[names[0]], features[names[0]], rtol=1e-4, atol=1e-5)
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
        parts = [encode(images[start : start + 2], [start, start + 1]) for start in (0, 2, 4)]
    assert set(whole) == {f"{block}@{level}" for block in blocks for level in levels}
    for name, features in whole.items():
        assert features.shape == (6, 16)
        # The noise depends on the image, not on its batch.
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), features)
    # The inputs of the model agree with the scheduler: little noise leaves the image, much noise hides it.
    inputs_of_model = []
    model.register_forward_pre_hook(lambda module, arguments: inputs_of_model.append(arguments))
    encode(torch.ones(64, 3, 8, 8), list(range(64)))
    for (sample, time), level in zip(inputs_of_model, levels):
        flows = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        scale = 1 - level if flows else float(scheduler.alphas_cumprod[round(1000 * level)].sqrt())
        assert abs(float(sample.mean()) - scale) < 0.03
        assert abs(float(sample.std()) - (level if flows else math.sqrt(1 - scale**2))) < 0.03
        torch.testing.assert_close(time.float(), torch.full((64,), 1000 * level))
    assert (whole["transformer_blocks.0@0.001"] - whole["transformer_blocks.0@0.5"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="no module blocks.9"):
        diffusion_encoder(model, scheduler, ["blocks.9"], [0.1])
    with pytest.raises(ValueError, match="lie in \\[0, 1\\]"):
        diffusion_encoder(model, scheduler, blocks, [500])


def test_sit_gets_its_own_time():
    """SiT has noise at time 0 and data at 1; noise levels run the other way."""
    model = DecayedSiTTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=3, hidden_size=16, num_layers=2, num_attention_heads=2
    )
    inputs_of_model = []
    model.register_forward_pre_hook(lambda module, arguments: inputs_of_model.append(arguments))
    encode = diffusion_encoder(model, FlowMatchEulerDiscreteScheduler(), ["transformer_blocks.1"], [0.25])
    features = encode(torch.ones(64, 3, 8, 8), list(range(64)))
    ((sample, time),) = inputs_of_model
    torch.testing.assert_close(time, torch.full((64,), 0.75))
    assert abs(float(sample.mean()) - 0.75) < 0.02 and abs(float(sample.std()) - 0.25) < 0.02
    assert features["transformer_blocks.1@0.25"].shape == (64, 16)


def test_tokens_of_time_and_class_are_left_out():
    model = random_weights(DecayedUViT2DModel(sample_size=4, hidden_size=16, num_layers=2, num_attention_heads=2))
    with torch.no_grad():
        features = diffusion_encoder(model, DDPMScheduler(), ["mid_block"], [0.0])(
            images := torch.randn(2, 3, 4, 4), [0, 1]
        )
        hidden = model(images, torch.tensor(0), output_hidden_states=True).hidden_states[1].mean(1)
    torch.testing.assert_close(
        features["mid_block@0"], hidden, rtol=0.2, atol=0.2
    )  # at timestep 0 there is little noise
    assert features["mid_block@0"].shape == (2, 16)


def test_a_fingerprint_depends_on_weights_and_config(tmp_path):
    model = decayed_model()
    model.save_pretrained(tmp_path)
    loaded = DecayedViTMAEModel.from_pretrained(tmp_path)
    assert model_fingerprint(loaded) == model_fingerprint(model)
    loaded.config.shortcut_decay = 0.7
    assert model_fingerprint(loaded) != model_fingerprint(model)
    with torch.no_grad():
        model.embeddings.cls_token += 1
    assert model_fingerprint(model) != model_fingerprint(DecayedViTMAEModel.from_pretrained(tmp_path))


def evaluate(*flags, processes=1, code=0):
    """Runs the evaluation in a process of its own, or several; it must end with `code`."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    launcher += ["--master_port", str(random.randint(20000, 40000))]
    result = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), "-m", "hf_decayed.evaluation", *map(str, flags)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, (result.stdout + result.stderr)[-3000:]
    return result


@pytest.fixture
def evaluate_here(monkeypatch):
    """`hf-decayed evaluate` in this process, with one thread; returns the exit code."""
    threads = torch.get_num_threads()

    def run(*flags):
        arguments = ["evaluate", *map(str, flags), "--cpu_threads", "1"]
        monkeypatch.setattr("sys.argv", ["hf-decayed", *arguments])
        return cli.main(arguments)

    yield run
    torch.set_num_threads(threads)


def grey_model(folder):
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "num_channels": 1})
    random_weights(DecayedViTMAEModel(config)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_evaluate_command(tmp_path):
    grey_model(tmp_path / "model")
    few = ["--max_train_samples", 300, "--max_eval_samples", 100, "--features_dir", tmp_path / "features"]
    result = evaluate(tmp_path / "model", *few, "--output", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["rows"]) == {"pixels", "last.mean", "last.cls"}
    assert results["rows"]["pixels"]["knn_accuracy"] > 0.5
    assert f"| pixels | {100 * results['rows']['pixels']['knn_accuracy']:.1f} % |" in result.stdout
    assert results["dataset"]["number"] == {"train": 300, "test": 100}
    assert results["dataset"]["held_out"] == "the evaluation split" and "skipped" not in results["dataset"]
    assert str(tmp_path) not in json.dumps(results)
    assert {"protocol", "protocol_hash", "versions", "command"} <= results.keys()
    assert results["command"].startswith("hf-decayed evaluate model --max_train_samples 300")
    absent = evaluate(tmp_path / "absent", code=2).stderr.strip().splitlines()[-1]
    assert absent.startswith("hf-decayed evaluate: ") and "absent" in absent


def test_the_command_line_forwards_to_evaluate(tmp_path, evaluate_here, capsys):
    grey_model(tmp_path / "model")
    for arguments, code, text in (
        (["--help"], 0, "--probe_protocol"),
        ([tmp_path / "model", "--k", "0"], 2, "hf-decayed evaluate: argument --k: must be at least 1, got 0"),
        (["--k", "0", tmp_path / "model"], 2, "argument --k: must be at least 1, got 0"),
        ([], 2, "the following arguments are required: MODEL"),
    ):
        with pytest.raises(SystemExit) as stopped:
            evaluate_here(*arguments)
        output = capsys.readouterr()
        assert stopped.value.code == code and text in output.out + output.err
    few = ["--max_train_samples", 40, "--max_eval_samples", 30, "--metrics", "rank", "--pixels", "false"]
    few += ["--features_dir", tmp_path / "features", "--output", tmp_path / "results.json"]
    assert evaluate_here(tmp_path / "model", *few) == 0
    assert "| last.mean |" in capsys.readouterr().out
    command = json.loads((tmp_path / "results.json").read_text())["command"]
    assert command.startswith("hf-decayed evaluate model --max_train_samples 40 ")
    assert evaluate_here(tmp_path / "absent", *few) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-decayed evaluate: ") and error.count("\n") == 1


def test_the_command_and_features_in_memory_give_the_same_accuracy(tmp_path, evaluate_here):
    grey_model(tmp_path / "model")
    few = ["--max_train_samples", 300, "--max_eval_samples", 100, "--metrics", "knn"]
    few += ["--features_dir", tmp_path / "features", "--output", tmp_path / "results.json"]
    assert evaluate_here(tmp_path / "model", *few) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    model = AutoModel.from_pretrained(tmp_path / "model")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    splits = load_image_splits().take(300, 100)
    bank, queries = (
        encode_dataset(
            with_pixels(transformer_encoder(model, ["last.mean", "last.cls"])),
            EvaluationDataset(dataset, splits.image_column, splits.label_column, processor, 1),
        )
        for dataset in (splits.train, splits.held_out)
    )
    for name, row in rows.items():
        assert knn_accuracy(bank[name], bank["labels"], queries[name], queries["labels"]) == row["knn_accuracy"]
    assert 0.1 < rows["last.mean"]["knn_accuracy"] < rows["pixels"]["knn_accuracy"] < 1


def test_data_without_an_evaluation_split_and_with_bad_images(tmp_path, evaluate_here, capsys):
    """The held-out rule is recorded, a model trained by another rule is warned about, and skipped images are counted."""
    images = random_images(number=60, bad=(7, 9))
    images.cast_column("image", ImageFeature(decode=False)).to_parquet(tmp_path / "images.parquet")
    model = tmp_path / "model"
    random_weights(DecayedViTMAEModel(DecayedViTMAEConfig(**TINY_SIZES))).save_pretrained(model)
    flags = ["--dataset_path", tmp_path / "images.parquet", "--on_bad_image", "skip", "--metrics", "rank"]
    flags += ["--features_dir", tmp_path / "features", "--output", tmp_path / "results.json"]
    assert evaluate_here(model, *flags) == 0
    output = capsys.readouterr()
    dataset = json.loads((tmp_path / "results.json").read_text())["dataset"]
    assert dataset["held_out"] == HELD_OUT_RULE and sum(dataset["number"].values()) == 58
    assert sum(dataset["skipped"].values()) == 2 and "skipped 2 images that cannot be decoded: " in output.out
    assert "warning" not in output.err

    def trained_with(**dataset):
        (model / "results.json").write_text(json.dumps({"dataset": dataset}))
        assert evaluate_here(model, *flags) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "hf-decayed evaluate: warning" in line]

    assert trained_with(name="images.parquet", held_out=HELD_OUT_RULE) == []
    assert trained_with(name="other.parquet", held_out="the evaluation split") == []
    assert trained_with(name="images.parquet") == []
    (warning,) = trained_with(name="images.parquet", held_out="the evaluation split")
    assert "the evaluation split" in warning and HELD_OUT_RULE in warning


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_extract_what_one_does(tmp_path):
    grey_model(tmp_path / "model")
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch_size", [3, 4])  # an even and an odd number of batches
def test_two_processes_encode_in_memory_what_one_does(tmp_path, batch_size):
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
from accelerate import Accelerator
from test_features import decayed_model, encode_dataset, evaluation_dataset, transformer_encoder
accelerator = Accelerator(cpu=True)
encode, calls = transformer_encoder(decayed_model(), ["last.mean"]), []
def counted(pixel_values, indices):
    calls.append(indices)
    return encode(pixel_values, indices)
images = evaluation_dataset(bad=(4,), on_bad_image="skip")
features = encode_dataset(counted, images, accelerator, {batch_size})
torch.save([features, calls], f"{tmp_path}/{{accelerator.num_processes}}-{{accelerator.process_index}}.pt")
""")
    for processes in (1, 2):
        port = str(random.randint(20000, 40000))
        command = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", port, program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *map(str, command)], env=environment, check=True, capture_output=True)
    (one, _), *two = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert len(two[0][1]) == len(two[1][1]) == 2  # a sharded model runs on both at once
    for features, _ in two:
        assert all(torch.equal(features[name], one[name]) for name in one) and len(one["labels"]) == 9
