"""Speed against named peers, in one run.

    python training/benchmark.py models      MAE step and features against transformers' ViTMAE
    python training/benchmark.py data        real images against synthetic ones; mae.py against transformers' `Trainer`
    python training/benchmark.py training    images a second and share of the machine's peak
    python training/benchmark.py eval        kNN, effective rank and feature extraction against scikit-learn, faiss, torch
    python training/benchmark.py diffusion   U-ViT and SiT against the official arithmetic and diffusers' DiT; latents; sampling
    python training/benchmark.py models --sizes tiny --rounds 9 --output model_cards/results/benchmark_models.json

Variants take turns inside each round, so that a busy machine slows them alike; what counts is the ratio to the peer
within a round. Printed: images a second (median), ratio (median, smallest and largest), and where the time goes.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import math
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import datasets
import mae
import numpy as np
import psutil
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from diffusers import AutoencoderKL, DiTTransformer2DModel, DPMSolverMultistepScheduler
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining, DecayedViTMAEModel
from hf_decayed.data.datasets import EpochBatchSampler, EvaluationDataset, TrainingImages
from hf_decayed.data.latents import latent_images
from hf_decayed.data.sources import load_splits
from hf_decayed.data.transforms import Augmentation, crop_boxes
from hf_decayed.evaluation import effective_rank, knn_accuracy
from hf_decayed.evaluation.features import extract_features, transformer_encoder
from hf_decayed.models.configuration_decayed_vit_mae import as_pair
from hf_decayed.models.modeling_decayed_vit_mae import image_processor, select_rows
from hf_decayed.models.transformer_decayed_sit import DecayedSiTTransformer2DModel
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline
from hf_decayed.provenance import sanitized_command, versions


try:
    import faiss
except ImportError:  # a peer that few have installed
    faiss = None

PEER = "transformers ViTMAE"

# `tiny` is the size of the bundled run and of the published checkpoints.
SIZES = {
    "base": {"batch_size": 8, "fields": {}},
    "tiny": {
        "batch_size": 256,
        "fields": {
            "image_size": 32,
            "patch_size": 4,
            "hidden_size": 128,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "decoder_hidden_size": 64,
            "decoder_num_hidden_layers": 6,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 256,
        },
    },
}

# Operators of the profiler -> what a reader thinks of them as. First match wins.
KINDS_OF_WORK = {
    "attention": ("scaled_dot_product", "_softmax", "bmm"),
    "matrix products": ("mm", "linear", "mkldnn"),
    "convolution": ("convolution",),
    "GELU and SiLU": ("gelu", "silu"),
    "layer norm": ("layer_norm",),
    "optimizer": ("adamw", "adam"),
    "shortcut and other sums": ("add", "sum", "mul", "sub", "div", "mse", "mean"),
    "moving data": (
        "copy",
        "cat",
        "index",
        "gather",
        "clone",
        "fill",
        "zero",
        "slice",
        "empty",
        "contiguous",
        "im2col",
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["models", "data", "training", "eval", "diffusion"])
    parser.add_argument(
        "--sizes",
        default="tiny,base",
        help="comma-separated; models: tiny, base (ViT-B/16, 224 px); diffusion: tiny (U-ViT-S, SiT-S/2), base (U-ViT-M, "
        "SiT-XL/2)",
    )
    parser.add_argument("--batch_size", type=int, help="instead of each size's own")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; each runs every variant once")
    parser.add_argument("--steps", type=int, default=4, help="data: training steps in a round")
    parser.add_argument("--threads", type=int, default=1, help="on CPU; 1 is timed in CPU seconds, the steadiest")
    parser.add_argument("--large_bank", action="store_true", help="eval: 1.28 million features too; needs 5 GB")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="ours: autocast in training, weights for features; the peer keeps float32",
    )
    parser.add_argument("--compile", action="store_true", help="compile our variants")
    parser.add_argument("--attention", default="sdpa", help="kernel of our variants; the peer keeps its default")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    unknown = set(arguments.sizes.split(",")) - SIZES.keys()
    if unknown:
        parser.error(f"--sizes knows {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    benchmarks = {"models": benchmark_models, "data": benchmark_data, "training": benchmark_training}
    benchmark = {**benchmarks, "eval": benchmark_eval, "diffusion": benchmark_diffusion}[arguments.command]
    results = {
        "command": " ".join(["python", "training/benchmark.py", *sanitized_command()]),
        "machine": f"{platform.machine()} {arguments.device}, {arguments.threads} thread(s)",
        "dtype": arguments.dtype,
        "versions": versions(),
        "seed": 0,
        "tables": benchmark(arguments),
    }
    print(render(results))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def benchmark_models(arguments) -> list[dict]:
    tables = []
    for name in arguments.sizes.split(","):
        size = SIZES[name]
        batch_size = arguments.batch_size or size["batch_size"]
        models = build_models(size["fields"], arguments)
        side = size["fields"].get("image_size", 224)
        images = torch.randn(batch_size, 3, side, side, device=arguments.device)

        steps = {label: pretraining_step(label, model, images, arguments) for label, model in models.items()}
        # What each exact shortcut gives, by taking it away from the default preset.
        slower, loss_only = (build_models(size["fields"], arguments)["default, 0.6"] for _ in range(2))
        slower.vit.embeddings.patch_embeddings.projection.register_forward_hook(
            lambda *_: None
        )  # forces the module call
        steps["default, 0.6, all patches embedded"] = pretraining_step(
            "all patches embedded", slower, images, arguments
        )
        steps["default, 0.6, loss alone"] = pretraining_step(
            "loss alone", loss_only, images, arguments, return_logits=False
        )
        title = f"{name}: pretraining step, batch {batch_size}"
        tables.append(take_turns(title, steps, batch_size, arguments))
        tables[-1]["time goes to (%)"] = {label: where_time_goes(steps[label]) for label in models}

        encoders = {label: features(label, model, images, arguments) for label, model in models.items()}
        title = f"{name}: features of whole images, batch {batch_size}"
        tables.append(take_turns(title, encoders, batch_size, arguments))

        tokens = torch.randn(
            batch_size, (side // models[PEER].config.patch_size) ** 2, 128, device=arguments.device, requires_grad=True
        )
        tables.append(take_turns(f"{name}: choosing a quarter of the rows", rows(tokens), len(tokens), arguments))
    return tables


def benchmark_data(arguments) -> list[dict]:
    """What real images cost beside one batch over and over, and the whole of mae.py against `Trainer`."""
    tables = []
    train, _, _ = load_splits()
    tables.append(real_against_synthetic("tiny", train, "image", "bundled images, held in memory", arguments))
    if "base" in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            photographs = Dataset.from_list([{"image": path} for path in save_photographs(Path(folder), 64)])
            photographs = photographs.cast_column("image", datasets.Image())
            title = "500 x 375 JPEGs, decoded and cropped in the same process"
            tables.append(real_against_synthetic("base", photographs, "image", title, arguments, memory_limit=0))
    tables.append(mae_against_trainer(train, arguments))
    return tables


def real_against_synthetic(size, dataset, column, title, arguments, **options) -> dict:
    """One process, no workers to hide in: what loading costs at most."""
    channels = 1 if size == "tiny" else 3
    fields = {**SIZES[size]["fields"], "num_channels": channels}
    batch_size = arguments.batch_size or SIZES[size]["batch_size"]
    model = DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**fields)).to(arguments.device)
    step = pretraining_step("ours", model, None, arguments, return_logits=False)
    augmentation = Augmentation(
        as_pair(model.config.image_size),
        channels,
        math.prod(model.config.grid_size),
        mean=[0.45] * channels,
        std=[0.22] * channels,
        seed=0,
    )
    images = TrainingImages(dataset, column, augmentation, **options)
    batches = EpochBatchSampler(len(images), batch_size, 0, 0, 10**9)
    loader = iter(torch.utils.data.DataLoader(images, batch_sampler=batches, collate_fn=lambda batch: batch))
    synthetic = next(loader)

    def run(next_batch):
        for _ in range(arguments.steps):
            step(**{name: each.to(arguments.device) for name, each in next_batch().items()})

    runs = {"real images": lambda: run(lambda: next(loader)), "synthetic images": lambda: run(lambda: synthetic)}
    return take_turns(f"{size}, batch {batch_size}: {title}", runs, arguments.steps * batch_size, arguments)


def save_photographs(folder: Path, number: int) -> list[str]:
    """JPEGs of the usual size and of about the usual bytes: blurred noise."""
    random = np.random.default_rng(0)
    paths = []
    for index in range(number):
        image = Image.fromarray(random.integers(0, 256, (94, 125, 3), dtype=np.uint8)).resize((500, 375))
        paths.append(str(folder / f"{index}.jpg"))
        image.save(paths[-1], quality=90)
    return paths


def mae_against_trainer(train, arguments) -> dict:
    """Wall-clock time of the same steps in mae.py's own `main` and in transformers' `Trainer`; the first few not counted."""
    batch_size = arguments.batch_size or 128
    warm, steps = 4, 4 + 2 * arguments.steps
    fields = {**SIZES["tiny"]["fields"], "num_channels": 1, "norm_pix_loss": True}

    def pillow_transform(rows):
        pixels = []
        for image in rows["image"]:
            draws = np.random.random((1, 24))
            top, left, height, width = crop_boxes(draws, image.height, image.width, (0.2, 1.0))[0]
            image = image.resize((32, 32), Image.Resampling.BICUBIC, (left, top, left + width, top + height))
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[0, 22] < 0.5 else image
            pixels.append((torch.from_numpy(np.array(image, dtype=np.float32))[None] / 255 - 0.45) / 0.22)
        return {"pixel_values": pixels}

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, training_arguments, state, control, **_):
            if state.global_step in (warm, steps):
                self.times = [*getattr(self, "times", []), time.perf_counter()]

    def trainer(folder):
        clock = Clock()
        training_arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            remove_unused_columns=False,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=arguments.device == "cpu",
        )
        transformers.Trainer(
            ViTMAEForPreTraining(ViTMAEConfig(**fields)),
            training_arguments,
            train_dataset=train.with_transform(pillow_transform),
            callbacks=[clock],
        ).train()
        return Seconds(clock.times[1] - clock.times[0])

    def script(folder, preset):
        flags = ["--output_dir", folder, "--recipe", "tiny", "--preset", preset, "--batch_size", batch_size]
        flags += ["--max_train_steps", steps, "--log_every", warm, "--cpu_threads", arguments.threads]
        flags += ["--eval_train_samples", 20, "--eval_test_samples", 20, "--attn_implementation", arguments.attention]
        flags += ["--set", "norm_pix_loss=true"]
        with mock.patch.object(sys, "argv", ["mae.py", *map(str, flags)]):
            mae.main()
        records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        windows = [(each["step"], each["images_per_second"]) for each in records if "images_per_second" in each]
        times = [(step - before) * batch_size / rate for (before, _), (step, rate) in itertools.pairwise(windows)]
        return Seconds(sum(times))

    def run(training, *options):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            return training(folder, *options)

    return take_turns(
        f"tiny, batch {batch_size}: {steps - warm} whole steps (images, model, optimizer, logging)",
        {
            "transformers ViTMAE in Trainer": lambda: run(trainer),
            "mae.py --preset plain": lambda: run(script, "plain"),
            "mae.py": lambda: run(script, "default"),
        },
        (steps - warm) * batch_size,
        arguments,
    )


def benchmark_training(arguments) -> list[dict]:
    """Images a second of whole training steps, and what part of the machine's matrix-product peak they reach."""
    tables = []
    dtype = getattr(torch, arguments.dtype)
    left, right = (torch.randn(2048, 2048, device=arguments.device, dtype=dtype) for _ in range(2))
    for name in arguments.sizes.split(","):
        fields, batch_size = SIZES[name]["fields"], arguments.batch_size or SIZES[name]["batch_size"]
        side = fields.get("image_size", 224)
        images = torch.randn(batch_size, 3, side, side, device=arguments.device)
        models = build_models(fields, arguments)
        steps = {label: pretraining_step(label, model, images, arguments) for label, model in models.items()}
        table = take_turns(f"{name}: pretraining step, batch {batch_size}", steps, batch_size, arguments)
        peak = take_turns("peak", {"matrix product": lambda: left @ right}, 2 * 2048**3, arguments)
        peak = peak["rows"]["matrix product"]["images per second"]
        for label, step in steps.items():
            models[label].set_attn_implementation("eager")  # torch does not count its CPU attention kernel
            with FlopCounterMode(display=False) as counter:
                step()
            operations = counter.get_total_flops() / batch_size
            row = table["rows"][label]
            row["MFU (%)"] = round(100 * row["images per second"] * operations / peak, 1)
        table["peak (GFLOP/s)"] = round(peak / 1e9)
        tables.append(table)
    return tables


def benchmark_eval(arguments) -> list[dict]:
    """Judging, at the size of a small data set: 50,000 features of a ViT-B, 10,000 queries."""
    generator = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(number, 768, generator=generator) for number in (50_000, 10_000))
    labels, query_labels = (torch.randint(100, (len(each),), generator=generator) for each in (bank, queries))

    def scikit_learn():
        # Weights as ours: brute force on cosine distances, votes of exp(similarity / temperature).
        nearest = KNeighborsClassifier(
            20, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)
        )
        nearest.fit(bank.numpy(), labels.numpy()).score(queries.numpy(), query_labels.numpy())

    def faiss_flat():
        faiss.omp_set_num_threads(arguments.threads)
        index = faiss.IndexFlatIP(768)
        index.add(torch.nn.functional.normalize(bank).numpy())
        index.search(torch.nn.functional.normalize(queries).numpy(), 20)

    runs = {"scikit-learn, brute force": scikit_learn}
    if faiss is not None:
        runs["faiss, flat index (search alone)"] = faiss_flat
    runs["knn_accuracy"] = knn = lambda: knn_accuracy(bank, labels, queries, query_labels)
    tables = [take_turns("kNN, 50,000 x 768 bank, 10,000 queries (images/s: queries)", runs, len(queries), arguments)]
    for label, run in runs.items():
        tables[-1]["rows"][label]["extra memory (MB)"] = extra_memory(run)

    def sample_by_sample(features):
        centred = features - features.mean(dim=0)
        shares = torch.linalg.svdvals(centred @ centred.T)
        return torch.special.entr(shares / shares.sum()).sum()

    def singular_values(features):
        shares = torch.linalg.svdvals(features - features.mean(dim=0)).square()
        return torch.special.entr(shares / shares.sum()).sum()

    runs = {"svdvals": lambda: singular_values(bank), "effective_rank": lambda: effective_rank(bank)}
    tables.append(take_turns("effective rank, 50,000 x 768", runs, len(bank), arguments))
    few = bank[:4000]
    runs = {"4,000 x 4,000 covariance": lambda: sample_by_sample(few), "effective_rank": lambda: effective_rank(few)}
    tables.append(take_turns("effective rank, 4,000 x 768", runs, len(few), arguments))

    if arguments.large_bank:  # ImageNet-1K's training images as features of a ViT-B: 3.7 GB that nothing may copy
        bank, queries = torch.randn(1_281_167, 768, generator=generator), queries[:500]
        labels, query_labels = torch.randint(1000, (len(bank),), generator=generator), query_labels[:500]
        for title, number, run in (
            ("kNN, 1,281,167 x 768 bank, 500 queries (images/s: queries)", 500, knn),
            ("effective rank, 1,281,167 x 768", len(bank), lambda: effective_rank(bank)),
        ):
            label = title.partition(",")[0]
            tables.append(take_turns(title, {label: run}, number, arguments))
            tables[-1]["rows"][label]["extra memory (MB)"] = extra_memory(run)

    with tempfile.TemporaryDirectory() as folder:
        photographs = Dataset.from_dict({"image": save_photographs(Path(folder), 16)})
        tables.append(extraction("tiny", load_splits()[1].select(range(512)), 1, "bundled images", arguments))
        tables.append(
            extraction("base", photographs.cast_column("image", datasets.Image()), 3, "photographs", arguments)
        )
    return tables


def extraction(size: str, dataset: Dataset, num_channels: int, what: str, arguments) -> dict:
    """Features with everything round them (reading, decoding, processor, shards) against the forward passes in it."""
    config = DecayedViTMAEConfig(**SIZES[size]["fields"], num_channels=num_channels)
    model = DecayedViTMAEModel(config).to(arguments.device)
    images = EvaluationDataset(dataset, "image", None, image_processor(config), num_channels=num_channels)
    encode = transformer_encoder(model, ["last.mean"])
    seconds = []

    def timed(*inputs):
        start = time.perf_counter()
        found = encode(*inputs)
        if arguments.device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
        return found

    def run():
        seconds.clear()
        with tempfile.TemporaryDirectory() as folder:
            extract_features(timed, images, folder, {}, batch_size=min(64, SIZES[size]["batch_size"]))
        return sum(seconds)

    runs = part_and_whole("its forward passes", "extract_features", run)
    return take_turns(f"features of {len(images)} {what}, {size}", runs, len(images), arguments)


OFFICIAL = "the official arithmetic"


class OfficialAttention:
    """U-ViT's and SiT's own: queries, keys and values by one product; in float32, whatever the rest is in."""

    def __call__(self, attn, hidden_states):
        query, key, value = (
            attn.to_qkv(hidden_states).unflatten(-1, (3, attn.heads, -1)).permute(2, 0, 3, 1, 4).float()
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return attn.to_out[0](attended.to(hidden_states.dtype))


def benchmark_diffusion(arguments) -> list[dict]:
    """Networks, then what surrounds them: latents that are kept, and sampling. Official: float32, fused projections."""
    tables = []
    dtype = getattr(torch, arguments.dtype)

    def ours(model_class, size, **fields):
        model = model_class.from_size(size, **fields).to(arguments.device)
        return torch.compile(model) if arguments.compile else model

    def official(model_class, size, **fields):
        model = model_class.from_size(size, shortcut_decay=1.0, **fields).to(arguments.device)
        model.fuse_qkv_projections()
        model.set_attn_processor(OfficialAttention())
        return model

    def forward(label, model, inputs):
        model.eval()
        if label not in (OFFICIAL, "diffusers DiT") and dtype != torch.float32:
            model, inputs = model.to(dtype), {**inputs, "sample": inputs["sample"].to(dtype)}
        inputs = {"hidden_states" if label == "diffusers DiT" and k == "sample" else k: v for k, v in inputs.items()}
        return torch.no_grad()(lambda: model(**inputs))

    def training_step(label, model, inputs):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        autocast = label != OFFICIAL and dtype != torch.float32

        def step():
            with torch.autocast(arguments.device, dtype, enabled=autocast):
                predicted = model(**inputs).sample
            F.mse_loss(predicted.float(), inputs["sample"]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    for name in arguments.sizes.split(","):
        size, batch_size = {"tiny": ("S", 8), "base": ("M", 2)}[name]
        batch_size = arguments.batch_size or batch_size
        fields = {} if name == "tiny" else {"in_channels": 4, "num_classes": 1000}
        sample = torch.randn(batch_size, fields.get("in_channels", 3), 32, 32, device=arguments.device)
        inputs = {"sample": sample, "timestep": torch.arange(batch_size, device=arguments.device)}
        models = {OFFICIAL: official(DecayedUViT2DModel, size, **fields)}
        for decay in (1.0, 0.7):
            models[f"shortcut_decay {decay}"] = ours(DecayedUViT2DModel, size, shortcut_decay=decay, **fields)
        runs = {label: forward(label, model, inputs) for label, model in models.items()}
        tables.append(take_turns(f"U-ViT-{size}: denoising, batch {batch_size}", runs, batch_size, arguments))
        tables[-1]["time goes to (%)"] = {label: where_time_goes(run) for label, run in runs.items()}
        if name == "tiny":
            half = {key: each[: max(1, batch_size // 2)] for key, each in inputs.items()}
            runs = {label: training_step(label, model.float(), half) for label, model in models.items()}
            title = f"U-ViT-{size}: training step, batch {batch_size // 2}"
            tables.append(take_turns(title, runs, batch_size // 2, arguments))
            tables[-1]["time goes to (%)"] = {label: where_time_goes(run) for label, run in runs.items()}

        size, batch_size = {"tiny": ("S/2", 4), "base": ("XL/2", 1)}[name]
        batch_size = arguments.batch_size or batch_size
        plain = {"num_classes": 1000, "encoder_decoder_skips": False}
        models = {OFFICIAL: official(DecayedSiTTransformer2DModel, size, **plain)}
        config = models[OFFICIAL].config
        models["diffusers DiT"] = DiTTransformer2DModel(
            num_attention_heads=config.num_attention_heads,
            attention_head_dim=config.hidden_size // config.num_attention_heads,
            num_layers=config.num_layers,
            patch_size=2,
            sample_size=32,
            in_channels=4,
            out_channels=4,
        ).to(arguments.device)
        models["1.0, no skips"] = ours(DecayedSiTTransformer2DModel, size, **plain, shortcut_decay=1.0)
        models["0.8, no skips"] = ours(DecayedSiTTransformer2DModel, size, **plain, shortcut_decay=0.8)
        models["0.8, skips (more work)"] = ours(
            DecayedSiTTransformer2DModel, size, num_classes=1000, shortcut_decay=0.8
        )
        inputs = {
            "sample": torch.randn(batch_size, 4, 32, 32, device=arguments.device),
            "timestep": torch.rand(batch_size, device=arguments.device),
            "class_labels": torch.arange(batch_size, device=arguments.device),
        }
        runs = {label: forward(label, model, inputs) for label, model in models.items()}
        tables.append(take_turns(f"SiT-{size}: forward, batch {batch_size}", runs, batch_size, arguments))
        tables[-1]["time goes to (%)"] = {label: where_time_goes(run) for label, run in runs.items()}
        del models, runs
        gc.collect()
    return tables + [kept_latents(arguments), sampling_steps(arguments)]


def kept_latents(arguments) -> dict:
    """A training step of U-ViT-S on the latents of images of 256 pixels, by an autoencoder of Stable Diffusion's size."""
    side, batch_size = 256, 2
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
    )
    vae.requires_grad_(False).to(arguments.device).eval()
    model = DecayedUViT2DModel.from_size("S", in_channels=4).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = argparse.Namespace(
        image_size=side, seed=0, horizontal_flip=True, memory_limit_gb=1.0, num_workers=0, on_bad_image="stop"
    )
    with tempfile.TemporaryDirectory() as folder:
        photographs = Dataset.from_dict({"image": save_photographs(Path(folder), 2 * batch_size)})
        photographs = photographs.cast_column("image", datasets.Image())
        options.latents_dir = Path(folder) / "latents"
        kept, encoded = (
            latent_images(
                vae,
                photographs,
                "image",
                None,
                argparse.Namespace(**vars(options), keep_latents=keep),
                Accelerator(cpu=arguments.device == "cpu"),
            )
            for keep in (True, False)
        )
        epoch = itertools.count()

        def step(images):
            keys = [(next(epoch), place) for place in range(batch_size)]
            batch = {name: each.to(arguments.device) for name, each in images.__getitems__(keys).items()}
            times = (1000 * batch["uniform"][:, 0]).long()
            F.mse_loss(model(batch["pixel_values"] + batch["noise"], times).sample, batch["noise"]).backward()
            optimizer.step()
            optimizer.zero_grad()

        runs = {"the autoencoder in the loop": lambda: step(encoded), "latents kept": lambda: step(kept)}
        return take_turns(
            f"U-ViT-S: training on latents of {side} pixels, batch {batch_size}", runs, batch_size, arguments
        )


def sampling_steps(arguments) -> dict:
    """Fifty steps of the pipeline against what its network takes of them, in the same run of it; a small network."""
    steps, batch_size = 50, arguments.batch_size or 16
    model = DecayedUViT2DModel(patch_size=4, hidden_size=128, num_layers=8, num_attention_heads=4).to(arguments.device)
    pipeline = DecayedUViTPipeline(model.eval(), DPMSolverMultistepScheduler())
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(batch_size, 3, 32, 32, device=arguments.device)
    moments = []

    def note_the_time(*_):
        if arguments.device != "cpu":
            torch.accelerator.synchronize()
        moments.append(time.perf_counter())

    model.register_forward_pre_hook(note_the_time)
    model.register_forward_hook(note_the_time)

    def run():
        moments.clear()
        pipeline(latents=noise, batch_size=batch_size, num_inference_steps=steps)
        assert len(moments) == 2 * steps, "the network was not called once a step"
        return sum(end - start for start, end in zip(moments[::2], moments[1::2]))

    runs = part_and_whole(f"its {steps} calls of the network", f"pipeline, {steps} steps", run)
    return take_turns(f"Sampling: {steps} steps, batch {batch_size}, small network", runs, batch_size, arguments)


def part_and_whole(part_label: str, whole_label: str, run) -> dict:
    """Two runs that are one: `run` returns the seconds of a part of it, which is compared with the whole of the same run."""
    found = {}

    def measured(label):
        if label not in found:
            start = time.perf_counter()
            found[part_label] = run()
            found[whole_label] = time.perf_counter() - start
        return Seconds(found.pop(label))

    return {label: lambda label=label: measured(label) for label in (part_label, whole_label)}


def extra_memory(run) -> int:
    """Largest growth of the process while it runs, in MB."""
    process, largest, running = psutil.Process(), 0, True
    gc.collect()
    if sys.platform == "linux":  # memory that earlier runs freed would be used again, and not be seen
        ctypes.CDLL(None).malloc_trim(0)
    start = process.memory_info().rss

    def watch():
        nonlocal largest
        while running:
            largest = max(largest, process.memory_info().rss - start)
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    running = False
    watcher.join()
    return round(largest / 2**20)


def build_models(fields: dict, arguments) -> dict[str, torch.nn.Module]:
    """The peer first, then our variants, all at the same sizes."""
    models = {PEER: ViTMAEForPreTraining(ViTMAEConfig(**fields))}
    ours = {
        "plain preset": DecayedViTMAEConfig.plain(**fields),
        "default, 1.0": DecayedViTMAEConfig(**fields, shortcut_decay=1.0),
        "default, 0.6": DecayedViTMAEConfig(**fields),
    }
    for label, config in ours.items():
        config._attn_implementation = arguments.attention
        models[label] = DecayedViTMAEForPreTraining(config)
    return {label: model.to(arguments.device) for label, model in models.items()}


def pretraining_step(label, model, images, arguments, **forward_arguments):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ours = label != PEER
    forward = torch.compile(model) if arguments.compile and ours else model
    dtype = getattr(torch, arguments.dtype)

    def step(**batch):
        batch = batch or {"pixel_values": images}
        with torch.autocast(arguments.device, dtype, enabled=ours and dtype != torch.float32):
            loss = forward(**batch, **forward_arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def features(label, model, images, arguments):
    encoder = model.vit.eval()
    # The peer masks in evaluation too; its way to a whole image is a ratio of zero.
    encoder.config.mask_ratio = 0.0
    if label != PEER:
        encoder = encoder.to(getattr(torch, arguments.dtype))
        encoder = torch.compile(encoder) if arguments.compile else encoder
    return torch.no_grad()(lambda: encoder(images))


def rows(tokens):
    keep = torch.rand(tokens.shape[:2], device=tokens.device).argsort(1)[:, : tokens.shape[1] // 4]

    def gather():
        torch.gather(tokens, 1, keep.unsqueeze(-1).repeat(1, 1, tokens.shape[2])).sum().backward()

    def select():
        select_rows(tokens, keep).sum().backward()

    return {"gather, as ViTMAE": gather, "row selection": select}


class Seconds(float):
    """What a run returns that knows itself which part of it counts."""


def take_turns(title: str, runs: dict, batch_size: int, arguments) -> dict:
    """Times every run once per round; the first run is what the others are compared with."""

    def seconds(run):
        clock = time.process_time if arguments.device == "cpu" and arguments.threads == 1 else time.perf_counter
        start = clock()
        measured = run()
        if arguments.device != "cpu":
            torch.accelerator.synchronize()
        return measured if isinstance(measured, Seconds) else clock() - start

    for run in runs.values():
        run()
    rounds = []
    for index in tqdm(range(arguments.rounds), desc=title, leave=False):
        order = list(runs)[:: 1 if index % 2 == 0 else -1]
        times = {label: seconds(runs[label]) for label in order}
        rounds.append({label: times[label] for label in runs})
    peer = next(iter(runs))
    table = {"title": title, "peer": peer, "rows": {}}
    for label in runs:
        ratios = sorted(times[peer] / times[label] for times in rounds)
        table["rows"][label] = {
            "images per second": round(batch_size / statistics.median(times[label] for times in rounds), 2),
            "ratio": round(statistics.median(ratios), 3),
            "smallest": round(ratios[0], 3),
            "largest": round(ratios[-1], 3),
        }
    return table


def where_time_goes(step) -> dict[str, float]:
    """Share of the operators' own time by kind of work, in per cent."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        step()
    shares = dict.fromkeys([*KINDS_OF_WORK, "other"], 0.0)
    for event in profiler.key_averages():
        if not event.key.startswith(("aten::", "mkldnn")) and "dam" not in event.key:
            continue
        kind = next(
            (kind for kind, words in KINDS_OF_WORK.items() if any(word in event.key.lower() for word in words)),
            "other",
        )
        shares[kind] += event.self_device_time_total or event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: round(100 * share / total, 1) for kind, share in shares.items()}


def render(results: dict) -> str:
    """The tables in Markdown."""
    lines = [f"`{results['command']}`", ""]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines += [f"{results['machine']}, {results['dtype']}; {versions}", ""]
    for table in results["tables"]:
        columns = ["images/s", "times the first", "spread"]
        more = [name for name in next(iter(table["rows"].values())) if "(" in name]
        columns += [f"{name} of {table['peak (GFLOP/s)']} GFLOP/s" if "MFU" in name else name for name in more]
        lines += [f"**{table['title']}**", "", "| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
        for label, row in table["rows"].items():
            cells = [
                f"{row['images per second']:g}",
                f"{row['ratio']:.2f}",
                f"{row['smallest']:.2f}-{row['largest']:.2f}",
            ]
            cells += [f"{row[name]:.0f}" for name in more]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
        if shares := table.get("time goes to (%)"):
            kinds = [kind for kind in next(iter(shares.values())) if any(row[kind] >= 0.5 for row in shares.values())]
            lines += ["| time goes to (%) | " + " | ".join(kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
            lines += [
                f"| {label} | " + " | ".join(f"{row[kind]:.0f}" for kind in kinds) + " |"
                for label, row in shares.items()
            ]
            lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main()
