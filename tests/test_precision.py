"""`--mixed_precision auto` and `--dtype auto`: a trial in a child process that may die; what lower precision changes is told."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from test_run import example_parser

from hf_decayed import precision
from hf_decayed.evaluation.lower_precision import cast_weights
from hf_decayed.precision import choose_dtype, choose_precision
from hf_decayed.run import run as run_module
from hf_decayed.run.arguments import RunOptions
from hf_decayed.run.run import Run


SHAPE = {"batch_size": 2, "tokens": 4, "width": 8, "heads": 2, "threads": 1}


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Runs lines of code in place of the trial, on a CPU that claims to have bfloat16."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(precision, "has_instructions", lambda: True)
    monkeypatch.setattr(precision, "__file__", str(tmp_path / "trial.py"))
    return (tmp_path / "trial.py").write_text


def test_bfloat16_is_taken_where_it_is_faster(child):
    child('print(\'{"float32": 0.02, "bfloat16": 0.01}\')')
    assert choose_precision(**SHAPE) == ("bf16", "by trial, a block takes 20 ms in float32, 10 ms in bfloat16")
    child('print(\'{"float32": 0.01, "bfloat16": 0.02}\')')
    assert choose_precision(**SHAPE) == ("no", "by trial, a block takes 10 ms in float32, 20 ms in bfloat16")


def test_a_trial_that_dies_means_float32(child):
    child("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert choose_precision(**SHAPE) == (
        "no",
        f"bfloat16 ends a process with signal {signal.SIGILL.value} on this CPU",
    )
    child("raise RuntimeError('no kernel')")
    assert choose_precision(**SHAPE) == ("no", "the trial of bfloat16 failed")


def test_no_trial_without_instructions(child, monkeypatch):
    child("raise SystemExit('not to be run')")
    monkeypatch.setattr(precision, "has_instructions", lambda: False)
    assert choose_precision(**SHAPE) == ("no", "the CPU has no instructions for bfloat16")


@pytest.mark.parametrize("training", [True, False])
def test_the_trial_measures_both(training):
    """In a child process, as always: the instructions that it tries may end it."""
    command = [sys.executable, precision.__file__, json.dumps({**SHAPE, "training": training})]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert min(json.loads(child.stdout).values()) > 0


def test_dtype_of_a_network_by_a_trial_of_its_width(child):
    """The commonest width counts; a network without linear layers stays in float32."""
    child("import json, sys; print(json.dumps({'float32': 2.0, 'bfloat16': json.loads(sys.argv[1])['width'] / 1000}))")
    network = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 3000), torch.nn.Linear(3000, 96))
    assert choose_dtype(network, 4, 1) == ("bfloat16", "by trial, a block takes 2000 ms in float32, 96 ms in bfloat16")
    assert choose_dtype(torch.nn.Linear(3000, 1), 4, 1)[0] == "float32"
    assert choose_dtype(torch.nn.Conv2d(3, 3, 3), 4, 1)[0] == "float32"


def test_the_difference_of_lower_precision_is_relative():
    network, inputs = torch.nn.Linear(64, 64).double(), torch.randn(8, 64, dtype=torch.float64)
    exact = network(inputs)
    difference = cast_weights(network, "float32", lambda: network(inputs.to(network.weight.dtype)))
    rounded = torch.nn.functional.linear(inputs.float(), network.weight, network.bias)
    assert network.weight.dtype == torch.float32
    assert difference == pytest.approx(((rounded.double() - exact).norm() / exact.norm()).item(), rel=1e-6)
    assert 0 < difference < 1e-6


@pytest.mark.slow
def test_evaluation_and_samples_in_bfloat16_tell_the_difference(tmp_path):
    """In child processes: some CPUs advertise instructions that end a process."""

    def run(*words):
        command = [sys.executable, "-m", "hf_decayed.cli", *map(str, words), "--dtype", "bfloat16"]
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    few = [
        "--max_train_samples",
        40,
        "--max_eval_samples",
        20,
        "--metrics",
        "knn",
        "--features_dir",
        tmp_path / "features",
    ]
    output = tmp_path / "results.json"
    cards = ROOT / "model_cards"
    evaluated = run(
        "evaluate", cards / "decayed-mae-coloured", "--dataset_name", "bundled:coloured", *few, "--output", output
    )
    results = json.loads(output.read_text())
    assert results["protocol"]["dtype"] == results["precision"]["dtype"] == "bfloat16"
    assert 1e-4 < results["precision"]["difference"] < 0.05
    assert "bfloat16 (as asked for): features of 20 images differ from those in float32 by 0." in evaluated.stdout

    drawn = ["sample", cards / "decayed-sit-fashion-mnist", "--num", 2, "--num_inference_steps", 2]
    sampled = run(*drawn, "--output", tmp_path / "samples")
    record = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert record["dtype"] == "bfloat16" and 1e-5 < record["dtype_difference"] < 0.05
    assert "the first 2 samples differ from those in float32 by 0." in sampled.stdout
    again = run(*drawn, "--output", tmp_path / "samples")  # finished: nothing is drawn
    assert again.returncode == 0, again.stderr


def test_the_trial_has_the_shape_of_the_network(tmp_path):
    def shape(**flags):
        return RunOptions(tmp_path, flags, {}, batch_size=64, gradient_accumulation_steps=2).block_shape()

    fields = {"hidden_size": 128, "num_attention_heads": 4, "image_size": (32, 64), "patch_size": 4}
    assert shape(size="small", fields=fields) == {"batch_size": 32, "tokens": 128, "width": 128, "heads": 4}
    assert shape(size="large", fields={}) == {"batch_size": 32, "tokens": 196, "width": 1024, "heads": 16}
    assert shape(image_size=32, fields={"patch_size": 2}) == {
        "batch_size": 32,
        "tokens": 256,
        "width": 768,
        "heads": 12,
    }


def test_a_resumed_run_keeps_the_precision(tmp_path, monkeypatch, capsys):
    """The choice is in the printed line, in the signature in place of `auto`, and in the results."""
    monkeypatch.setattr(run_module, "choose_precision", lambda **shape: ("no", f"tried with {shape['batch_size']}"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    parser = example_parser(tmp_path, mixed_precision="auto")

    def start(*flags):
        options, _ = parser.parse(["--output_dir", str(tmp_path / "out"), "--cpu_threads", "1", *flags])
        run = Run(parser.run_options(options), kind="example")
        run.lock.release()
        return run

    try:
        run = start()
        run.resume()
        assert run.signature["mixed_precision"] == "no" and run.precision_reason == "tried with 8"
        assert "precision no (tried with 8), 1 thread" in capsys.readouterr().out
        folder = tmp_path / "out" / "checkpoints" / "step-00000001"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"precision": "no"}))
        monkeypatch.delattr(run_module, "choose_precision")  # a second trial could choose otherwise
        assert start("--resume_from_checkpoint", "latest").precision_reason == "as before"
    finally:
        for number, handler in handlers.items():  # a run takes signals for itself
            signal.signal(number, handler)
