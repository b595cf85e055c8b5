"""`training/benchmarks`: every benchmark runs and writes its tables; the shared timing computes what it says."""

import argparse
import json
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from gpu_arithmetic import MODELS, estimates, forward_flops, parameters, render_estimates
from timing import (
    OPERATORS,
    Stopwatch,
    compare,
    compare_part,
    extra_memory,
    profile_shares,
    render,
    run_benchmark,
    summarize,
)


OPTIONS = argparse.Namespace(rounds=3, device="cpu", threads=1)


def test_variants_take_turns_in_every_round():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in ("first", "second")}
    durations = {"first": 2.0, "second": 1.0}

    def seconds(run):
        run()
        return durations[calls[-1]]

    table = compare("title", variants, 8, OPTIONS, seconds)
    assert calls == ["first", "second"] + ["first", "second", "second", "first", "first", "second"]
    assert table["peer"] == "first" and list(table["rows"]) == ["first", "second"]
    assert table["rows"]["second"] == {
        "images per second": 8.0,
        "ratio": 2.0,
        "smallest": 2.0,
        "largest": 2.0,
        "fastest": 2.0,
    }


def test_summary_has_medians_and_the_range_of_ratios():
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 4.0}, {"a": 3.0, "b": 1.0}]
    assert summarize("title", rounds, 6)["rows"] == {
        "a": {"images per second": 2.0, "ratio": 1.0, "smallest": 1.0, "largest": 1.0, "fastest": 1.0},
        "b": {"images per second": 3.0, "ratio": 1.0, "smallest": 0.5, "largest": 3.0, "fastest": 1.0},
    }


def test_stopwatch_measures_a_part_of_the_whole(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def wait(seconds):
        clock[0] += seconds

    def multiply(value, factor):
        wait(1.0)
        return value * factor

    stopwatch = Stopwatch("cpu")
    part = stopwatch.wrap(multiply)

    def run():
        wait(2.0)
        assert part(2, factor=3) == part(3, factor=2) == 6

    table = compare_part("title", "part", "whole", run, stopwatch, 8, OPTIONS)
    assert table["peer"] == "part" and table["rows"]["part"]["images per second"] == 4.0
    assert table["rows"]["whole"] == {
        "images per second": 2.0,
        "ratio": 0.5,
        "smallest": 0.5,
        "largest": 0.5,
        "fastest": 0.5,
    }


def test_profile_and_memory():
    left = torch.randn(300, 300)
    shares = profile_shares(lambda: left @ left)
    assert shares.keys() == {*OPERATORS, "other"} and shares["matrix products"] > 0
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    assert extra_memory(lambda: (torch.ones(2**24), time.sleep(0.1))) >= 32  # of 64 MB


def test_results_are_rendered_and_written(tmp_path, monkeypatch, capsys):
    table = summarize("a title", [{"peer": 1.0, "ours": 0.5}], 4)
    table["rows"]["peer"]["MFU (%)"], table["rows"]["ours"]["MFU (%)"] = 40.0, 80.0
    table |= {"peak (GFLOP/s)": 85, "time goes to (%)": {"ours": {"attention": 99.8, "other": 0.2}}}
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=lambda text: tmp_path / text)
    parser.set_defaults(threads=torch.get_num_threads(), device="cpu")
    monkeypatch.setattr(sys, "argv", ["elsewhere/models.py", "--output", "folder/results.json"])
    run_benchmark(lambda options: [table], parser)
    results = json.loads((tmp_path / "folder" / "results.json").read_text())
    assert results["command"] == "python training/benchmarks/models.py --output folder/results.json"
    assert results["tables"] == [table] and results["dtype"] == "float32" and "torch" in results["versions"]
    printed = capsys.readouterr().out
    assert printed.strip() == render(results)
    assert "| | images/s | times the first | spread | fastest rounds | MFU (%) of 85 GFLOP/s |" in printed
    assert "| ours | 8 | 2.00 | 2.00-2.00 | 2.00 | 80 |" in printed and "| time goes to (%) | attention |\n" in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, flags, titles",
    [
        (
            "models",
            ["--batch_size", 4],
            [
                "tiny: pretraining step, batch 4",
                "tiny: features of whole images, batch 4",
                "tiny: choosing a quarter of the rows",
            ],
        ),
        (
            "decode_ratio",
            ["--batch_size", 4],
            [f"tiny, {preset} preset: pretraining step, batch 4" for preset in ("default", "plain")],
        ),
        ("images", ["--images", 2], ["500 x 375 JPEGs of 61 kB, random crops of 224 pixels"]),
        (
            "data",
            ["--batch_size", 8, "--steps", 1],
            ["tiny, batch 8: bundled images, held in memory"],
        ),
        (
            "first_command",
            ["--batch_size", 4, "--steps", 10],
            [
                f"{network}: 10 steps of 4 images (views, model, optimizer, logging)"
                for network in ("ViTMAE of the recipe tiny", "recipe tiny")
            ],
        ),
        ("training", ["--batch_size", 4], ["tiny: pretraining step, batch 4"]),
        (
            "evaluation",
            ["--bank", 400, "--queries", 100],
            [
                "kNN, 400 x 768 bank, 100 queries (images/s: queries)",
                "effective rank, 400 x 768",
                "effective rank, 400 x 768",
                "features of 512 bundled images, tiny",
            ],
        ),
        (
            "decay",
            ["--batch_size", 4],
            [f"tiny: {model}, {what}, batch 4" for model in ("ViT", "DiT") for what in ("training step", "inference")],
        ),
        (
            "spectral",
            ["--images", 50],
            [
                "14 x 14 patches: clusters of the averaged graph",
                "14 x 14 patches: eigenvectors of the averaged graph",
                "14 x 14 patches, 12 layers of 12 heads: clusters of an image",
                "data set, 50 images of 49 patches, 128 dimensions",
            ],
        ),
        ("structural_gan", ["--batch_size", 32], ["tiny: step of discriminator and generator, batch 32"]),
        (
            "relighting",
            ["--batch_size", 1, "--sides", 96],
            ["tiny, 1.2 M parameters, 64 pixels: training step, 1 pairs", "tiny: relighting of large images"],
        ),
        (
            "diffusion",
            ["--batch_size", 1],
            [
                "U-ViT-S: denoising, batch 1",
                "U-ViT-S: training step, batch 1",
                "SiT-S/2: forward, batch 1",
                "U-ViT-S: training on latents of 256 pixels, batch 2",
            ],
        ),
        (
            "sampling",
            ["--models", "uvit", "--batch_size", 1, "--num", 10, "--reference", 150],
            [
                "U-ViT: sampling, batch 1, guidance 2; Frechet distance of 10 samples",
                "U-ViT: 25 steps, batch 1, from noise to PIL images",
            ],
        ),
        ("startup", [], ["Imports (images/s: in 100 s)", "Commands (images/s: in 100 s)"]),
        (
            "processes",
            ["--batch_size", 8, "--steps", 10],
            ["tiny, batch 8 in all, one thread per process: 10 steps of mae.py"],
        ),
        (
            "scaling",
            [],
            [
                "training step, batch 4 by image size (pixels) (images/s: calls in 1000 s)",
                "training step, 32 pixels by batch size (images/s: calls in 1000 s)",
                "kNN of 500 queries by bank size (images/s: calls in 1000 s)",
                "effective rank by number of features (images/s: calls in 1000 s)",
            ],
        ),
        ("photos", ["--batch_size", 1], ["Recipes for photos: pretraining step, batch 1"]),
        (
            "nested",
            ["--batch_size", 1],
            [
                "U-ViT-S: a step of all levels, batch 1",
                "Caching latents of 16 photographs and mirror images, ViT-Ti/16 on 5 crops of each",
            ],
        ),
    ],
)
def test_benchmark_runs(name, flags, titles, tmp_path):
    output = tmp_path / "results.json"
    command = [sys.executable, f"training/benchmarks/{name}.py", "--sizes", "tiny", "--rounds", 1, *flags]
    command = [*map(str, command), "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads(output.read_text())
    assert [table["title"] for table in results["tables"]] == titles
    assert results["command"].startswith(f"python training/benchmarks/{name}.py --sizes tiny")
    assert all(row["images per second"] > 0 for table in results["tables"] for row in table["rows"].values())
    assert all(f"**{title}**" in result.stdout for title in titles)


def test_arithmetic_of_gpus():
    """Parameters and operations of the published models, and the table of the docs."""
    stacks, _ = MODELS["MAE, ViT-B/16"]
    assert parameters(stacks) == pytest.approx(112e6, rel=0.03)  # 111.9 M with embeddings and norms
    stacks, _ = MODELS["SiT-XL/2, 256 pixels"]
    assert parameters(stacks) == pytest.approx(675e6, rel=0.03)
    assert forward_flops(stacks) == pytest.approx(2 * 118.6e9, rel=0.03)  # the paper counts a product as one
    page = (ROOT / "docs" / "speed.md").read_text()
    results = json.loads((ROOT / "model_cards" / "results" / "gpu_arithmetic.json").read_text())
    assert results == json.loads(json.dumps(estimates()))
    assert f"<!-- gpu_arithmetic -->\n{render_estimates(results)}\n<!-- end -->" in page


@pytest.mark.slow
def test_benchmark_refuses_unknown_sizes():
    command = [sys.executable, "training/benchmarks/training.py", "--sizes", "tiny,huge"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "training.py: argument --sizes: must be some of tiny, base, got huge" in result.stderr
