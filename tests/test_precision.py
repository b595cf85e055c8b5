"""`--mixed_precision auto`: a trial in a child process that may die; kept by resumed runs, and part of their signature."""

import json
import signal

import pytest
from test_run import example_parser

from hf_decayed import precision
from hf_decayed.precision import choose_precision, time_block
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


def test_the_trial_measures_both():
    assert all(seconds > 0 for seconds in time_block(**SHAPE).values())


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
