"""What every run has: command lines without local paths, errors in one sentence, metrics, and what makes a run that run."""

import argparse
import json
import math

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch.optim.swa_utils import AveragedModel

from hf_decayed.errors import DataError, format_error
from hf_decayed.provenance import sanitized_command
from hf_decayed.run.optimization import ema_with_warmup, is_scaler_warmup
from hf_decayed.run.records import MetricsFile
from hf_decayed.run.run import check_signature, run_signature


def test_commands_keep_repositories_and_lose_paths(monkeypatch, tmp_path):
    words = [
        "mae.py",
        "--dataset_name",
        "uoft-cs/cifar100",
        f"--dataset_path={tmp_path}/data",
        "--init_from",
        "../mine/model",
    ]
    words += ["--output_dir", "outputs/mae", "--vae", "~/models/vae", "--set", "decoder_input=latent"]
    monkeypatch.setattr("sys.argv", words)
    assert sanitized_command() == [
        *("--dataset_name", "uoft-cs/cifar100", "--dataset_path=data", "--init_from", "model"),
        *("--output_dir", "outputs/mae", "--vae", "vae", "--set", "decoder_input=latent"),
    ]


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise DataError("The image 'cat.png' cannot be decoded.")


def test_an_error_in_a_worker_is_one_sentence_too():
    with pytest.raises(DataError) as raised:
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    assert format_error(raised.value) == "The image 'cat.png' cannot be decoded."
    assert format_error(ValueError("two\n lines")) == "two lines"


def test_another_run_is_refused():
    options = argparse.Namespace(seed=0, fields={"shortcut_decay": 0.6}, crop_scale=(0.2, 1.0), output_dir="a")
    state = {"identity": run_signature(options, dataset="x")}
    options.output_dir = "b"
    check_signature("step-1", state, run_signature(options, dataset="x"))
    options.fields = {"shortcut_decay": 0.8}
    with pytest.raises(DataError, match="'step-1' belongs to another run .fields .*0.6.* -> .*0.8.*: resume with"):
        check_signature("step-1", state, run_signature(options, dataset="x"))


def test_metrics_survive_a_kill_and_skipped_steps(tmp_path):
    log = MetricsFile(tmp_path / "metrics.jsonl", 0, writing=True)
    assert log.recent("loss") is None
    for step, loss in enumerate([4.0, 1.0, math.nan, 3.0]):
        log.write({"step": step, "loss": loss})
    assert log.recent("loss", number=2) == 2.0
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')  # the line that a killed process was writing
    resumed = MetricsFile(log.path, 2, writing=True)
    assert [record["step"] for record in resumed.records()] == [0, 1, 2]
    assert len([json.loads(line) for line in log.path.read_text().splitlines()]) == 3


def test_a_scaler_that_seeks_its_scale_loses_no_steps():
    """fp16: the scale grows until gradients overflow, again and again; that is no step without a finite loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))  # it makes its scale when it is first used
    assert is_scaler_warmup(scaler, 0.5) and not is_scaler_warmup(scaler, math.nan) and not is_scaler_warmup(None, 0.5)
    scaler.update(new_scale=0.5)
    assert not is_scaler_warmup(scaler, 0.5)


def test_an_average_forgets_its_first_weights():
    """By the rule of diffusers' EMAModel; with one rate from the first step on, a short run's average would be untrained."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0)
    average, theirs = (
        AveragedModel(model, multi_avg_fn=ema_with_warmup(0.999)),
        EMAModel(model.parameters(), decay=0.999),
    )
    for step in range(200):
        torch.nn.init.constant_(model.weight, float(step > 0))
        average.update_parameters(model)
        theirs.step(model.parameters())
    ours = average.module.weight.item()
    assert ours > 0.99 and ours == pytest.approx(theirs.shadow_params[0].item(), abs=1e-3)
