"""Random attacks, seeded: configs, image files, SIGKILLs, damaged checkpoints, full disks, folders to publish.

    OMP_NUM_THREADS=1 python -m pytest -m slow tests/test_fuzz.py

It takes about an hour on two busy cores, the 200 SIGKILLs a third of it. `FUZZ_KILLS=24` in the environment sets another
number of kills. No part needs more than 3 GB of memory. The draws of every case are seeded by
its name, so that a failure repeats; only the exact moment of a kill does not.

Expected everywhere: the input is used as it is, passed over with a warning, or refused with one sentence. Never a traceback,
code that is run, a run that is lost, or another result without a word.
"""

import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
import torch
from conftest import TINY_SIZES, run_script
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from script_server import kill, start_script
from test_publishing import MIXED, SECRETS, WRITERS, run_command, write_run
from test_run import MAE, SMALL_RUNS, assert_same_run, last_change, small_run, weights

from hf_decayed import (
    DecayedResNetConfig,
    DecayedResNetForImageClassification,
    DecayedSiTTransformer2DModel,
    DecayedUViT2DModel,
    DecayedViTMAEConfig,
    DecayedViTMAEForPreTraining,
    LatentIntrinsicsModel,
    NestedUViT2DModel,
    StructuralDiscriminatorConfig,
    StructuralDiscriminatorModel,
    StructuralGenerator,
)
from hf_decayed.data.decoding import decode_image
from hf_decayed.errors import DataError, UserError, format_error
from hf_decayed.hub.staging import PublishingError, stage
from hf_decayed.hub.validation import validate_staged
from hf_decayed.models.modeling_hierarchical_latents import HierarchicalLatentConfig, HierarchicalLatentEncoder
from hf_decayed.run.checkpoints import find_checkpoint, find_damage


pytestmark = pytest.mark.slow

# Configs. A field has a rule that its value must obey by itself, and good values, small enough to build a network.

ODD_VALUES = [-8, -1, 0, 1, 3, 7, 2**31, 2**63, 10**400, 0.5, 1.0, 1.5, -0.25, 1e-300, 1e300, math.nan, math.inf]
ODD_VALUES += [
    -math.inf,
    None,
    True,
    False,
    "8",
    "0.6",
    "auto",
    "abc",
    "false",
    "",
    "\0",
    "x" * 500,
    b"x",
    [],
    [8],
    [8, 8],
]
ODD_VALUES += [(8, 4), [8, 8, 8], [None], ["a", "b"], [True], [0, -1], {}, {"a": 1}, {8}, 1j, [[8, 8]], int, object()]


def is_integer(low, high=2**20):
    return lambda value: type(value) is int and low <= value <= high


def is_number(low, high):
    return lambda value: type(value) in (int, float) and low <= value <= high


def is_one_of(*choices):
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def is_size(value):
    sides = value if isinstance(value, (list, tuple)) else [value]
    return len(sides) in ([2] if isinstance(value, (list, tuple)) else [1]) and all(map(is_integer(1), sides))


def is_list(rule, low=0):
    return lambda value: isinstance(value, (list, tuple)) and len(value) >= low and all(map(rule, value))


def is_decay(value):
    return is_number(0, 1)(value) or is_one_of("auto")(value)


POSITIVE, BOOLEAN = is_integer(1), is_one_of(True, False)
SCOPES, SCHEDULES = ("both", "attention", "mlp"), ("linear", "cosine", "constant", "learned")
SHORTCUTS = {
    "shortcut_decay": (is_decay, [0, 0.0, 0.3, 0.6, 1, 1.0, "auto"]),
    "shortcut_schedule": (is_one_of(*SCHEDULES), SCHEDULES),
    "shortcut_granularity": (is_one_of("sublayer", "layer"), ["sublayer", "layer"]),
    "shortcut_scope": (is_one_of(*SCOPES), SCOPES),
}
LABELS = (is_integer(0), [0, 1, 2, 5])
DIFFUSION = {
    "sample_size": (is_size, [4, 8, 12, (8, 4), [4, 8]]),
    "patch_size": (POSITIVE, [1, 2, 4, 8]),
    "in_channels": (POSITIVE, [1, 3, 4]),
    "hidden_size": (POSITIVE, [8, 16, 24, 30, 32]),
    "num_layers": (is_integer(1, 10_000), [1, 2, 3, 4]),
    "num_attention_heads": (POSITIVE, [1, 2, 3, 4]),
    "mlp_ratio": (is_number(1e-3, 1024), [0.01, 0.5, 1, 2.0, 4]),
    "qkv_bias": (BOOLEAN, [True, False]),
    "num_classes": (is_integer(0), [0, 1, 10]),
    **SHORTCUTS,
}
TINY_DIFFUSION = {"sample_size": 8, "patch_size": 2, "in_channels": 3, "hidden_size": 16, "num_layers": 4}
TINY_DIFFUSION |= {"num_attention_heads": 2, "num_classes": 3}


def switches(*names):
    return {name: (BOOLEAN, [True, False]) for name in names}


UVIT = {
    **DIFFUSION,
    "time_input": (is_one_of("timestep", "timestep_plus_one", "continuous"), ["timestep", "continuous"]),
    **switches("time_embedding_mlp", "final_conv", "zero_init_branches", "sincos_init_positions"),
}
TINY_VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY_VIT |= {"intermediate_size": 8, "image_size": 8, "patch_size": 4}


def build_mae(**fields):
    config = DecayedViTMAEConfig(**fields)
    if max(config.num_hidden_layers, config.decoder_num_hidden_layers) <= 8:
        DecayedViTMAEForPreTraining(config)
    return config


def build_latents(**fields):
    config = HierarchicalLatentConfig(encoder_config=TINY_VIT, **fields)
    HierarchicalLatentEncoder(config)
    return config


def build_discriminator(**fields):
    config = StructuralDiscriminatorConfig(**fields)
    if sum(config.depths) <= 20:
        StructuralDiscriminatorModel(config)
    return config


def build_resnet(**fields):
    config = DecayedResNetConfig(**fields)
    if sum(config.depths) <= 20:
        DecayedResNetForImageClassification(config)
    return config


# Family: how a network is built, the fields that are not drawn, rules and good values of the fields.
FAMILIES = {
    "mae": (
        build_mae,
        TINY_SIZES,
        {
            "hidden_size": (POSITIVE, [8, 16, 30, 32, 48]),
            "decoder_hidden_size": (POSITIVE, [8, 16, 24, 30]),
            "num_hidden_layers": (is_integer(1, 10_000), [1, 2, 4, 5, 6]),
            "decoder_num_hidden_layers": (is_integer(1, 10_000), [1, 2, 3]),
            "num_attention_heads": (POSITIVE, [1, 2, 4, 5]),
            "decoder_num_attention_heads": (POSITIVE, [1, 2, 4, 7]),
            "intermediate_size": (POSITIVE, [1, 8, 64]),
            "image_size": (is_size, [8, 16, 32, 33, [32, 16], (16, 32)]),
            "patch_size": (is_size, [1, 4, 8, [8, 4]]),
            "num_channels": (POSITIVE, [1, 3, 4]),
            "qkv_bias": (BOOLEAN, [True, False]),
            "norm_pix_loss": (BOOLEAN, [True, False]),
            "mask_ratio": (is_number(0, 1 - 1e-9), [0.0, 0.5, 0.75]),
            "hidden_dropout_prob": (is_number(0, 1 - 1e-9), [0.0, 0.1]),
            "attention_probs_dropout_prob": (is_number(0, 1 - 1e-9), [0.0, 0.1]),
            "layer_norm_eps": (is_number(1e-320, 1e308), [1e-6, 1e-12]),
            "initializer_range": (is_number(0, 1e308), [0.0, 0.02]),
            "residual_form": (
                is_one_of("decay", "scale_both", "scale_branch"),
                ["decay", "scale_both", "scale_branch"],
            ),
            "encoder_decoder_skips": (lambda value: type(value) in (bool, int), [True, False, 0, 1, 2]),
            "decoder_input": (is_one_of("positions", "latent"), ["positions", "latent"]),
            "decode_ratio": (is_number(1e-320, 1), [0.1, 0.5, 1.0]),
            "pooling": (is_one_of("cls", "mean", "patch_mean"), ["cls", "mean", "patch_mean"]),
            "num_labels": LABELS,
            **switches("zero_init_branches", "final_norm"),
            **SHORTCUTS,
        },
    ),
    "uvit": (DecayedUViT2DModel, TINY_DIFFUSION, UVIT),
    "nested": (
        NestedUViT2DModel,
        TINY_DIFFUSION,
        {
            **UVIT,
            "level": (POSITIVE, [1, 2]),
            "condition_levels": (is_list(is_list(POSITIVE, low=3)), [(), [], [(2, 4, 1)], [[4, 4, 2], [1, 8, 1]]]),
            "condition_sigmas": (
                lambda value: value is None or is_list(is_number(0, 1e308))(value),
                [None, [], [0.5], [0.0, 1]],
            ),
            "latent_fingerprint": (lambda value: value is None or type(value) is str, [None, "abc"]),
        },
    ),
    "latents": (
        build_latents,
        {"image_size": 16, "encoder_size": 8, "levels": [(1, 4), (2, 4)], "min_crop_size": 8},
        {
            "image_size": (POSITIVE, [16, 32]),
            "encoder_size": (POSITIVE, [8, 16]),
            "min_crop_size": (POSITIVE, [1, 4, 16]),
            "num_channels": (POSITIVE, [3]),
            "num_prefix_tokens": (is_integer(0), [0, 1]),
            "levels": (is_list(is_list(POSITIVE, low=2), low=1), [[(1, 4)], ((1, 4), (2, 2)), [[1, 8], [4, 2]]]),
            "image_mean": (is_list(is_number(-1e308, 1e308), low=3), [[0.5, 0.5, 0.5], (0, 0.5, 1)]),
            "image_std": (is_list(is_number(1e-320, 1e308), low=3), [[0.5, 0.5, 0.5], (1, 0.5, 1)]),
            "pooling": (
                is_one_of("cls", "mean", "patch_mean", "pooler_output"),
                ["cls", "mean", "patch_mean", "pooler_output"],
            ),
            "fingerprint": (lambda value: value is None or type(value) is str, [None, "abc"]),
        },
    ),
    "relighting": (
        LatentIntrinsicsModel,
        {"sample_size": 16, "block_out_channels": (8, 8, 16), "layers_per_block": (1, 1, 1), "light_dim": 4},
        {
            "sample_size": (POSITIVE, [8, 16, 32]),
            "in_channels": (POSITIVE, [1, 3]),
            "block_out_channels": (is_list(is_integer(4), low=2), [(8, 8, 16), [8, 16, 16], (4, 8)]),
            "layers_per_block": (is_list(is_integer(1, 10_000), low=2), [(1, 1, 1), [1, 2, 1], (1, 1)]),
            "light_dim": (POSITIVE, [1, 4, 16]),
            "light_hidden_dim": (POSITIVE, [1, 16]),
            "alpha": (is_number(0, 1), [0, 0.005, 1]),
            "dropout": (is_number(0, 1), [0, 0.1]),
            **switches("bounded_modulation"),
        },
    ),
    "sit": (
        DecayedSiTTransformer2DModel,
        TINY_DIFFUSION,
        {**DIFFUSION, **switches("learned_sigma", "encoder_decoder_skips")},
    ),
    "resnet": (
        build_resnet,
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16], "depths": [1, 2, 1], "num_labels": 3},
        {
            "num_channels": (POSITIVE, [1, 3]),
            "embedding_size": (POSITIVE, [1, 8, 16]),
            "hidden_sizes": (is_list(POSITIVE, low=1), [[8, 8, 16], (8, 16), [4]]),
            "depths": (is_list(POSITIVE, low=1), [[1, 2, 1], (1, 1), [3]]),
            "layer_type": (is_one_of("basic", "bottleneck"), ["basic", "bottleneck"]),
            "hidden_act": (is_one_of("relu", "gelu"), ["relu", "gelu"]),
            "num_labels": LABELS,
            "shortcut_decay": (is_number(0, 1), [0, 0.3, 0.7, 1.0]),
            "shortcut_schedule": (is_one_of(*SCHEDULES[:3]), SCHEDULES[:3]),
            "stem": (is_one_of("imagenet", "small"), ["imagenet", "small"]),
            **switches("downsample_in_first_stage", "downsample_in_bottleneck"),
        },
    ),
    "discriminator": (
        build_discriminator,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "group_size": 4, "projection_size": 6},
        {
            "num_channels": (POSITIVE, [1, 3]),
            "hidden_sizes": (is_list(POSITIVE, low=1), [[8, 16], (8, 8), [4]]),
            "depths": (is_list(POSITIVE, low=1), [[1, 1], (1, 2), [3]]),
            "group_size": (POSITIVE, [1, 4, 8]),
            "projection_size": (POSITIVE, [1, 6]),
            "shortcut_decay": (is_number(0, 1), [0, 0.3, 0.7, 1.0]),
            "shortcut_schedule": (is_one_of(*SCHEDULES[:3]), SCHEDULES[:3]),
            **switches("downsample_in_first_stage"),
        },
    ),
    "generator": (
        StructuralGenerator,
        {"sample_size": 8, "latent_dim": 6, "block_out_channels": (16, 8)},
        {
            "sample_size": (POSITIVE, [4, 8, 16]),
            "out_channels": (POSITIVE, [1, 3]),
            "latent_dim": (POSITIVE, [1, 6]),
            "block_out_channels": (is_list(is_integer(8), low=1), [(16, 8), [8, 8], (8,)]),
            "layers_per_block": (POSITIVE, [1, 2]),
            "attention_sizes": (is_list(POSITIVE), [(), [], (8,), [4, 8]]),
        },
    ),
}
CONFIGS = 300  # in each of the four parts of each of the nine families: 10,800


def draw_fields(rules, rng):
    """One to four fields, each with a good or an odd value; sometimes one with a misspelled name."""
    fields = {}
    for name in rng.sample(sorted(rules), rng.randint(1, 4)):
        fields[name] = rng.choice(rules[name][1] if rng.random() < 0.5 else ODD_VALUES)
    if rng.random() < 0.05:
        name = rng.choice(sorted(rules))
        position = rng.randrange(1, len(name))
        fields[name[:position] + rng.choice("aeiou") + name[position:]] = rules[name][1][0]
    return fields


def config_problem(build, base, rules, fields):
    """What is wrong with the way a family takes some fields; `None` if they are taken or refused as they should be."""
    wrong = [name for name, value in fields.items() if name not in rules or not rules[name][0](value)]
    try:
        with warnings.catch_warnings(), torch.device("meta"):  # nothing is allocated, whatever size is accepted
            warnings.simplefilter("ignore")
            built = build(**{**base, **fields})
    except (ValueError, StrictDataclassError) as error:
        sentence = format_error(error)
        if not any(name in sentence for name in {**base, **fields}):
            return f"the error names no field: {sentence[:200]}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if wrong:
        return f"accepted in spite of {', '.join(wrong)}"
    config = built if hasattr(built, "to_dict") else built.config
    json.dumps(config.to_dict() if hasattr(config, "to_dict") else dict(config), default=str)
    return None


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_taken_or_refused(family, part):
    """10,800 in all: a value against a field's rule is refused with its name, whatever else is given."""
    build, base, rules = FAMILIES[family]
    rng, problems = random.Random(f"{family} {part}"), []
    for number in range(CONFIGS):
        fields = draw_fields(rules, rng)
        if problem := config_problem(build, base, rules, fields):
            problems.append(f"{number}: {str(fields)[:300]}: {problem}")
    assert problems == [], "\n".join([f"{len(problems)} of {CONFIGS}", *problems[:20]])


# Image files.

MODES = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"], "JPEG": ["L", "RGB", "CMYK"], "GIF": ["P", "L"]}
MODES |= {"BMP": ["1", "L", "RGB"], "TIFF": ["L", "RGB", "F", "I;16", "CMYK"], "WEBP": ["RGB", "RGBA"]}


def whole_image(file_format, mode, rng):
    """The bytes of an image of random size and content."""
    width, height = rng.randint(1, 40), rng.randint(1, 40)
    deep = mode in ("F", "I;16")
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 60_000 if deep else 256, (height, width, 3))
    kind = np.float32 if mode == "F" else np.uint16
    image = Image.fromarray(values[..., 0].astype(kind) if deep else values.astype(np.uint8))
    buffer = io.BytesIO()
    (image if deep else image.convert(mode)).save(buffer, file_format)
    return buffer.getvalue()


def damaged(content, rng):
    """Some bytes, cut, flipped, mixed up or added to."""
    damage, position = rng.randrange(6), rng.randrange(len(content))
    if damage == 0:
        return content[:position]
    if damage == 1:
        return bytes([*content[:position], content[position] ^ (1 << rng.randrange(8)), *content[position + 1 :]])
    if damage == 2:
        return content[:position] + rng.randbytes(rng.randint(1, 64)) + content[position:]
    if damage == 3:
        return content[:position] + bytes(len(content) - position)
    if damage == 4:
        return content[:8] + rng.randbytes(len(content) - 8)
    return b"".join(rng.sample([content[:position], content[position:]], 2))


def png_header(width, height):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def image_files():
    """Every format and mode, whole and damaged in six ways, and what is no image at all."""
    rng = random.Random("images")
    combinations = [(file_format, mode) for file_format, modes in MODES.items() for mode in modes]
    whole = [whole_image(*combination, rng) for combination in combinations]
    damages = [damaged(content, rng) for content in whole for _ in range(6)]
    others = [
        b"",
        b"\0",
        b"GIF89a",
        b"\xff\xd8\xff",
        b"text",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"<svg/>",
        b"P6 9 9 255\n",
    ]
    others += [png_header(2**31 - 1, 2**31 - 1), png_header(0, 5), png_header(30_000, 30_000), rng.randbytes(5000)]
    others += [pickle.dumps({"image": 1}), b"PK\x03\x04" + rng.randbytes(100)]
    return [{"bytes": content, "path": f"{number}.png"} for number, content in enumerate([*whole, *damages, *others])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_channels", [1, 3])
def test_image_files_are_decoded_or_named(num_channels):
    files, decoded = image_files(), 0
    assert len(files) >= 100
    for index, record in enumerate(files):
        skipped = decode_image(record, num_channels, index, on_bad_image="skip")
        try:
            pixels = decode_image(record, num_channels, index)
        except DataError as error:
            assert skipped is None
            assert f"'{index}.png' (row {index}) cannot be decoded" in str(error) and "\n" not in format_error(error)
        else:
            assert pixels.dtype == np.uint8 and pixels.shape[2] == num_channels and np.array_equal(pixels, skipped)
            decoded += 1
    assert sum(map(len, MODES.values())) <= decoded < len(files)


@pytest.mark.timeout(600)
def test_training_on_damaged_files_skips_or_stops(tmp_path):
    """What is skipped is counted, and stopping is one sentence."""
    rows = [{"image": record, "label": index % 3} for index, record in enumerate(image_files())]
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["a", "b", "c"])})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "images.parquet")
    flags = [*MAE, "--max_train_samples", len(rows), "--max_train_steps", 2, "--set", "num_channels=3"]
    flags += ["--dataset_path", tmp_path / "images.parquet", "--output_dir", tmp_path / "out"]
    stopped = run_script("mae.py", *flags, code=2).stderr
    assert "cannot be decoded" in stopped.strip().splitlines()[-1] and "Traceback" not in stopped
    run_script("mae.py", *flags, "--on_bad_image", "skip")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["bad_images"] > 0


# SIGKILLs.

# For each script, with one process and with two.
KILLS = math.ceil(int(os.environ.get("FUZZ_KILLS", 200)) / len(SMALL_RUNS) / 2)
LONGER = {"linear_probe": ["--epochs", 6]}  # so that there is something to kill; for other scripts more steps


def kill_at(moment, process, output_dir, rng):
    """Kills a run while it starts, trains or writes a checkpoint; whether it was still running."""
    before = last_change(output_dir)
    if moment == "starting":
        time.sleep(rng.uniform(0, 1))
    while moment != "starting" and process.poll() is None:
        if moment == "training" and last_change(output_dir) != before:
            time.sleep(rng.uniform(0, 0.5))
            break
        if moment == "writing" and any(output_dir.rglob("checkpoints/.writing-*")):
            time.sleep(rng.uniform(0, 0.03))
            break
        time.sleep(0.001)
    running = process.poll() is None
    _, errors = kill(process) if running else process.communicate()
    # A run that ended by itself ended well; one that was killed had not failed before.
    assert "Traceback" not in errors and (running or process.returncode == 0), errors[-3000:]
    return running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", SMALL_RUNS)
def test_killed_again_and_again(script, processes, pretrained, tmp_path):
    """Killed and resumed until it has ended, and anew until there were enough kills: every end is the same, bit by bit."""
    flags = [*small_run(script, tmp_path, pretrained), *LONGER.get(script, ["--max_train_steps", 30])]
    run_script(f"{script}.py", *flags, "--output_dir", tmp_path / "whole", processes=processes)
    rng, kills, output_dir = random.Random(f"{script} {processes}"), 0, tmp_path / "killed"
    resumed = [*flags, "--output_dir", output_dir, "--resume_from_checkpoint", "latest"]
    while kills < KILLS:
        process = start_script(f"{script}.py", *resumed, processes=processes)
        if kill_at(rng.choice(["starting", "training", "training", "writing", "writing"]), process, output_dir, rng):
            kills += 1
        else:
            assert_same_run(tmp_path / "whole", output_dir)
            shutil.rmtree(output_dir)
    run_script(f"{script}.py", *resumed, processes=processes)
    assert_same_run(tmp_path / "whole", output_dir)


# Damaged checkpoints.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has ended, with all its checkpoints, and the flags of the run."""
    folder = tmp_path_factory.mktemp("finished")
    flags = [*MAE, "--checkpoints_total_limit", 9]
    run_script("mae.py", *flags, "--output_dir", folder)
    return folder, flags


CHECKPOINT_FILES = ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
CHECKPOINT_FILES += ["average.safetensors", "random-0.safetensors"]


def damage_file(path, damage, rng):
    if damage == "deleted":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    path.write_bytes(content)


def test_all_files_of_a_checkpoint_are_attacked(finished):
    assert {path.name for path in (finished[0] / "checkpoints" / "step-00000012").iterdir()} == set(CHECKPOINT_FILES)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_damaged_checkpoint_is_passed_over(name, damage, finished, tmp_path):
    """`latest` takes the one before, says so, and ends as the run never stopped; asked for by name, it is refused."""
    folder, flags = finished
    shutil.copytree(folder / "checkpoints", tmp_path / "out" / "checkpoints")
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    while newest.name > "step-00000012":
        shutil.rmtree(newest)
        newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    damage_file(newest / name, damage, random.Random(f"{name} {damage}"))
    flags = [*flags, "--output_dir", tmp_path / "out", "--resume_from_checkpoint"]
    with pytest.raises(UserError, match="is not a complete checkpoint: "):
        find_checkpoint(str(newest), tmp_path)
    resumed = run_script("mae.py", *flags, "latest")
    assert "Skipping the checkpoint 'step-00000012'" in resumed.stderr and "resumed at step 9" in resumed.stdout
    expected, weights_now = weights(folder), weights(tmp_path / "out")
    assert [name for name in expected if not torch.equal(expected[name], weights_now[name])] == []


def test_every_damage_of_a_checkpoint_is_noticed(finished, tmp_path):
    """1,000 bits and cuts, spread over all files."""
    source, rng = finished[0] / "checkpoints" / "step-00000012", random.Random("damage")
    assert find_damage(source) is None
    flags = [*finished[1], "--output_dir", tmp_path / "out", "--resume_from_checkpoint"]
    copy = shutil.copytree(source, tmp_path / "step-00000012")
    for number in range(1000):
        name, damage = rng.choice(CHECKPOINT_FILES), rng.choice(["flipped", "flipped", "truncated", "deleted"])
        damage_file(copy / name, damage, rng)
        problem = find_damage(copy)
        assert problem and "\n" not in problem, (number, name, damage)
        with pytest.raises(UserError, match="is not a complete checkpoint"):
            find_checkpoint(str(copy), tmp_path)
        if number == 0:
            refused = run_script("mae.py", *flags, copy, code=2).stderr
            assert "is not a complete checkpoint: " in refused.strip().splitlines()[-1]
            assert "Traceback" not in refused
        shutil.copyfile(source / name, copy / name)
    assert find_damage(copy) is None


def forge(path, file, content):
    """Puts other content into a file of a checkpoint, with the checksum that belongs to it."""
    (path / file).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[file] = [len(content), zlib.crc32(content)]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "file, other", [("model", "optimizer"), ("optimizer", "model"), ("random-0", "model"), ("state", None)]
)
def test_a_forged_checkpoint_is_refused_in_one_line(file, other, finished, tmp_path):
    path = shutil.copytree(finished[0] / "checkpoints" / "step-00000012", tmp_path / "step-00000012")
    if other:
        forge(path, f"{file}.safetensors", (path / f"{other}.safetensors").read_bytes())
    else:
        state = json.loads((path / "state.json").read_text())
        forge(path, "state.json", json.dumps({key: state[key] for key in ("step", "signature")}).encode())
    flags = [*finished[1], "--output_dir", tmp_path / "out", "--resume_from_checkpoint", path]
    errors = run_script("mae.py", *flags, code=2).stderr
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("mae.py: 'step-00000012' does not fit this run: ")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["metrics.jsonl", "arguments.json", ".lock-holder.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_damage_beside_the_checkpoints_stops_nothing(name, damage, finished, tmp_path):
    folder, flags = finished
    shutil.copytree(folder, tmp_path / "out")
    damage_file(tmp_path / "out" / name, damage, random.Random(f"{name} {damage}"))
    flags = [*flags, "--output_dir", tmp_path / "out", "--resume_from_checkpoint", "latest"]
    assert "Traceback" not in run_script("mae.py", *flags).stderr
    expected, weights_now = weights(folder), weights(tmp_path / "out")
    assert [name for name in expected if not torch.equal(expected[name], weights_now[name])] == []


# Full disks.


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number, kilobytes", list(enumerate([1, 2, 5, 10, 20, 40, 80, 160, 320, 640])))
def test_a_full_disk_loses_nothing(number, kilobytes, pretrained, tmp_path):
    """No file may grow past a size. Then there is room again, and the run ends as if there had always been."""
    script = list(SMALL_RUNS)[number % len(SMALL_RUNS)]
    flags = small_run(script, tmp_path, pretrained)
    resumed = [*flags, "--output_dir", tmp_path / "out", "--resume_from_checkpoint", "latest"]
    limited = start_script(f"{script}.py", *resumed, file_limit=kilobytes)
    _, errors = limited.communicate()
    assert limited.returncode in (0, 2) and "Traceback" not in errors, errors[-3000:]
    if limited.returncode == 2:
        assert errors.strip().splitlines()[-1].startswith(f"{script}.py: "), errors[-2000:]
    assert not list((tmp_path / "out").rglob(".writing*"))
    run_script(f"{script}.py", *resumed)
    run_script(f"{script}.py", *flags, "--output_dir", tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "out")


# Folders to publish.


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("publish") / "out")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_is_staged(secret, writer, run_folder, tmp_path):
    """Every kind of secret in every form, among other text at a random position; the error does not repeat it."""
    folder = shutil.copytree(run_folder, tmp_path / "out")
    rng = random.Random(f"{secret} {writer}")
    words = [rng.choice(["image", "loss", "of", "the", "model", "0.5"]) for _ in range(rng.randint(0, 200))]
    position = rng.randint(0, len(words))
    text = "\n".join([" ".join(words[:position]), SECRETS[secret], " ".join(words[position:])])
    WRITERS[writer](folder / "extra", text)
    with pytest.raises(PublishingError) as raised:
        stage(folder, tmp_path / "staged")
        validate_staged(tmp_path / "staged")
    assert ": take it out, and revoke it" in str(raised.value) and "\n" not in str(raised.value)
    assert SECRETS[secret] not in str(raised.value) and MIXED[:10] not in str(raised.value)


@pytest.mark.parametrize("number", range(40))
def test_no_token_in_weights_is_staged(number, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "out")
    rng = random.Random(number)
    token = SECRETS[rng.choice(["Hugging Face", "AWS", "Google", "GitLab", "GitHub", "JWT", "SSH"])].encode()
    token = token.decode().encode("utf-16-le") if rng.random() < 0.3 else token
    content = bytearray((folder / "model.safetensors").read_bytes())
    start_of_tensors = 8 + int.from_bytes(content[:8], "little")
    position = rng.randint(start_of_tensors, len(content) - len(token) - 1)
    content[position - 1 : position + len(token) + 1] = b"\n" + token + b"\n"
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(PublishingError, match="'model.safetensors' holds "):
        stage(folder, tmp_path / "staged")
        validate_staged(tmp_path / "staged")


# Whoever runs it leaves a file behind, whose name is not a path in the source.
CODE = 'import os\nopen(os.environ["FUZZ_MARKER"], "w").close()\n'


def add_to(name):
    def write(folder, rng):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        top_level = [
            number for number, line in enumerate(lines) if line.startswith(("def ", "class ", "import torch"))
        ]
        lines.insert(rng.choice(top_level) if top_level else 0, CODE)
        path.write_text("".join(lines))

    return write


def call_from_config(folder, rng):
    (folder / "foreign.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "foreign.Model"
    (folder / "config.json").write_text(json.dumps(config))


def link(target):
    return lambda folder, rng: (folder / rng.choice(["notes.md", "extra.json", "picture.png"])).symlink_to(target)


def pipe(folder, rng):
    os.mkfifo(folder / rng.choice(["notes.md", "extra.json", "picture.png", "extra.safetensors"]))


FOREIGN = "The folder holds code that is not this package's, and nothing of it was run: "
ATTACKS = {
    "code added": (add_to("modeling_decayed_vit_mae.py"), FOREIGN),
    "code in the config's file": (add_to("configuration_decayed_vit_mae.py"), FOREIGN),
    "a new file of code": (add_to("helper.py"), FOREIGN),
    "a package": (add_to("__init__.py"), FOREIGN),
    "code in a folder": (add_to("tools/run.py"), FOREIGN),
    "a hook of Python": (add_to("sitecustomize.py"), FOREIGN),
    "a module that hides a library": (add_to("torch.py"), FOREIGN),
    "a config that names code": (call_from_config, FOREIGN),
    "a link out": (link("/etc/passwd"), "is a symbolic link"),
    "a link to a folder": (link("/etc"), "is a symbolic link"),
    "a link to nowhere": (link("nowhere"), "is a symbolic link"),
    "a link to its own folder": (link("."), "is a symbolic link"),
    "a pipe": (pipe, "is a pipe, device or socket"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_in_one_line(attack, seed, run_folder, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(run_folder, tmp_path / "out")
    make, sentence = ATTACKS[attack]
    make(folder, random.Random(f"{attack} {seed}"))
    monkeypatch.setenv("FUZZ_MARKER", str(tmp_path / "code_was_run"))
    assert sentence in run_command(["publish", folder, "--repo_id", "user/mine", "--dry_run"], capsys)
    assert not (tmp_path / "code_was_run").exists()
