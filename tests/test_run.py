"""`hf_decayed.run`: what all training scripts have in common."""

import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import mae
import numpy as np
import pytest
import sit
import torch
import uvit
from accelerate import Accelerator
from conftest import ROOT, TINY_SIZES, random_weights, run_script
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from diffusers.training_utils import EMAModel
from PIL import Image
from safetensors.torch import load_file
from script_server import kill, start_script
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.command_line import count_loader_workers
from hf_decayed.data.arguments import add_data_arguments
from hf_decayed.data.sources import load_image_splits, load_splits
from hf_decayed.errors import DataError, UserError, format_error
from hf_decayed.models.image_processing_decayed import default_image_processor
from hf_decayed.provenance import sanitized_command
from hf_decayed.run.arguments import ScriptParser, add_run_arguments, add_training_arguments
from hf_decayed.run.checkpoints import (
    find_checkpoint,
    find_damage,
    random_state,
    save_checkpoint,
    saved_setting,
    set_random_state,
)
from hf_decayed.run.monitors import RepresentationMonitor, class_turns
from hf_decayed.run.optimization import ema_with_warmup, is_scaler_warmup
from hf_decayed.run.records import MetricsFile, read_metrics
from hf_decayed.run.run import (
    Run,
    check_signature,
    clear_output_dir,
    is_thread_count,
    lock_output_dir,
    script_main,
)
from hf_decayed.run.state_files import load_state, save_state


# Flags for every script, at a size of a second or two, with all that has state switched on: one file per script.
SMALL_RUNS = {
    path.stem: shlex.split(path.read_text()) for path in sorted((ROOT / "tests" / "small_runs").glob("*.txt"))
}
MAE, SIT = SMALL_RUNS["mae"], SMALL_RUNS["sit"]


def small_run(script, folder, pretrained):
    """Flags of a small run. FOLDER in its file is where caches are, MODEL the pretrained encoder."""
    return [word.replace("FOLDER", str(folder)).replace("MODEL", str(pretrained)) for word in SMALL_RUNS[script]]


def weights(folder):
    """All that a run leaves in safetensors, its checkpoints apart."""
    files = [path for path in sorted(folder.rglob("*.safetensors")) if "checkpoints" not in path.parts]
    assert files
    return {f"{path.relative_to(folder)} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def losses(folder):
    files = sorted(folder.rglob("metrics.jsonl"))
    records = [(path.relative_to(folder), record) for path in files for record in read_metrics(path)]
    return {(path, record["step"]): record["loss"] for path, record in records if "loss" in record}


def assert_same_run(whole, resumed):
    expected, weights_now = weights(whole), weights(resumed)
    assert expected.keys() == weights_now.keys()
    assert [name for name in expected if not torch.equal(expected[name], weights_now[name])] == []
    assert losses(whole) == losses(resumed) and losses(whole)
    assert not list(resumed.rglob(".writing*"))


def last_change(output_dir):
    """When the newest line of metrics was written; 0 before the first."""
    return max((path.stat().st_mtime_ns for path in output_dir.rglob("metrics.jsonl")), default=0)


def test_every_script_that_trains_has_a_small_run():
    scripts = {path.stem for path in (ROOT / "training").glob("*.py") if re.search(r"\bRun\(", path.read_text())}
    assert scripts == set(SMALL_RUNS)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", SMALL_RUNS)
def test_every_script_survives_kills(script, processes, pretrained, tmp_path):
    """SIGKILL at random moments, in training and in writing; the end is bit-equal to that of a run never stopped, which
    is started in the usual way."""
    flags = small_run(script, tmp_path, pretrained)
    run_script(f"{script}.py", *flags, "--output_dir", tmp_path / "whole", processes=processes, fresh=True)
    killed = [*flags, "--output_dir", tmp_path / "killed", "--resume_from_checkpoint", "latest"]
    moments, kills = random.Random(script), 0
    for _ in range(4):
        process, before = start_script(f"{script}.py", *killed, processes=processes), last_change(tmp_path / "killed")
        while process.poll() is None and last_change(tmp_path / "killed") == before:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.5))
        if process.poll() is not None:
            break
        kill(process)
        kills += 1
    assert kills >= 1
    run_script(f"{script}.py", *killed, processes=processes)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


SHARDED = """
import sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hf_decayed.run.checkpoints import gather_state, scatter_state
from hf_decayed.run.state_files import load_state, save_state

folder, resume = Path(sys.argv[1]), sys.argv[2] == "resume"
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(9 if resume else 0)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 6))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
parts = {"model": model, "optimizer": optimizer}

def step(number):
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

if resume:
    for name, part in parts.items():
        scatter_state(part, load_state(folder / f"{name}.safetensors"), [model])
else:
    step(0), step(1)
    for name, part in parts.items():
        state = gather_state(part, [model])
        if rank == 0:
            save_state(folder / f"{name}.safetensors", state)
step(2), step(3)
final = gather_state(model, [model])
if rank == 0:
    save_state(folder / f"end-{sys.argv[2]}.safetensors", final)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_states_come_back(tmp_path):
    """FSDP2 on two CPU processes (accelerate shards on accelerators alone): whole states in files, loaded into shards."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    for how in ("whole", "resume"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command += [
            "--master_port",
            str(random.randint(20000, 40000)),
            str(tmp_path / "sharded.py"),
            str(tmp_path),
            how,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    whole, resumed = (load_state(tmp_path / f"end-{how}.safetensors") for how in ("whole", "resume"))
    assert whole.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"} and whole["0.weight"].shape == (10, 6)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_second_run_on_the_same_folder_is_refused(tmp_path):
    """The lock names its holder, and a kill releases it."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{LOCKING}; lock = lock_output_dir(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on {socket.gethostname()}: .*--output_dir"):
        lock_output_dir(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock_output_dir(tmp_path).release()


LOCKING = "import time; from pathlib import Path; from hf_decayed.run.run import lock_output_dir"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_resuming_refuses(tmp_path):
    """Other images under the same name, another network, a second run: one sentence each, before anything is loaded."""
    images = load_splits()[0]
    images.select(range(200)).to_parquet(tmp_path / "images.parquet")
    flags = [*MAE, "--dataset_path", tmp_path / "images.parquet", "--output_dir", tmp_path / "out"]
    process = start_script("mae.py", *flags, "--max_train_steps", 2000)
    wait_for(lambda: list((tmp_path / "out" / "checkpoints").glob("step-*")), process)
    second = run_script("mae.py", *flags, code=2).stderr.strip().splitlines()[-1]
    assert f"is in use by process {process.pid} on {socket.gethostname()}" in second
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    flags += ["--max_train_steps", 2000, "--resume_from_checkpoint", "latest"]
    refused = run_script("mae.py", *flags, "--set", "hidden_size=64", code=2).stderr.strip().splitlines()[-1]
    assert refused.startswith("mae.py: 'step-") and "belongs to another run (fields" in refused
    images.select(range(200, 400)).to_parquet(tmp_path / "images.parquet")
    refused = run_script("mae.py", *flags, code=2).stderr.strip().splitlines()[-1]
    assert "belongs to another run (fingerprint" in refused and "Traceback" not in refused


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_loop_leaves_cleanly(signal_number, tmp_path):
    process = start_script(
        "mae.py", "--output_dir", tmp_path / "out", "--cpu_threads", 1
    )  # evaluates for seconds first
    wait_for(lambda: (tmp_path / "out" / ".lock").exists(), process)
    process.send_signal(signal_number)
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert f"mae.py: stopped by {signal_number.name} before the first step" in last
    run_script("mae.py", *MAE, "--max_train_steps", 2, "--output_dir", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kilobytes", [1, 20, 60, 200])
def test_a_full_disk_at_the_end_says_what_is_missing(kilobytes, tmp_path):
    """Training goes on without checkpoints; at the end exit code 2 and the names, without a traceback."""
    flags = [*MAE, "--output_dir", tmp_path / "out"]
    done = run_script("mae.py", *flags, file_limit=kilobytes, code=2)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("mae.py: not written: ") and " model (" in last
    assert "No checkpoint at step 3: it could not be written" in done.stderr
    assert "kNN accuracy (%)" in done.stdout
    assert not list((tmp_path / "out").rglob(".writing*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_at_the_end_of_a_chain(tmp_path):
    """Neither the network of the last level nor the pipeline of all levels can be written."""
    flags = [*small_run("nested", tmp_path, None), "--output_dir", tmp_path / "out"]
    run_script("nested.py", *flags, "--level", 2)
    done = run_script("nested.py", *flags, "--level", 1, file_limit=20, code=2)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("nested.py: not written: network (") and "; pipeline (" in last
    assert "Traceback" not in done.stderr and not (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--max_train_steps", "-5"], "--max_train_steps: must be at least 1, got -5"),
        (["--max_train_steps", "0"], "--max_train_steps: must be at least 1, got 0"),
        (["--max_train_samples", "0"], "--max_train_samples: must be at least 1, got 0"),
        (["--cpu_threads", "-1"], "--cpu_threads: must be at least 1, got -1"),
        (["--batch_size", "0"], "--batch_size: must be at least 1, got 0"),
        (["--batch_size", "1.5"], "--batch_size: must be a whole number, got '1.5'"),
        (["--max_grad_norm", "-1"], "--max_grad_norm: must be above 0, got -1"),
        (["--weight_decay", "-1"], "--weight_decay: must be at least 0, got -1"),
        (["--ema_decay", "2"], "--ema_decay: must be at least 0 and at most 1, got 2"),
        (["--seed", "x"], "--seed: must be a whole number, got 'x'"),
        (["--num_workers", "-1"], "--num_workers: must be at least 0, got -1"),
        (["--weight_decay", "nan"], "--weight_decay: must be finite, got nan"),
        (["--crop_scale", "nan", "nan"], "--crop_scale: must be finite, got nan"),
        (["--image_size", "0"], "--image_size: must be at least 1, got 0"),
        (["--class_dropout", "5"], "--class_dropout: must be at least 0 and at most 1, got 5"),
    ],
)
def test_flags_out_of_range_are_one_line(flags, sentence, capsys):
    script = uvit if flags[0] in ("--image_size", "--class_dropout") else mae
    with pytest.raises(SystemExit) as stopped:
        script.parse_arguments(flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and f"argument {sentence}" in lines[0]


def example_parser(tmp_path, **recipe):
    (tmp_path / "recipes" / "example").mkdir(parents=True, exist_ok=True)
    (tmp_path / "recipes" / "example" / "tiny.yaml").write_text(json.dumps(recipe))
    parser = ScriptParser(str(tmp_path / "example.py"), "An example.")
    add_data_arguments(parser)
    add_training_arguments(parser, batch_size=8)
    add_run_arguments(parser, "evaluations", "--sample_every")
    return parser


def test_recipes_are_checked_as_flags_are(tmp_path, capsys):
    parser = example_parser(tmp_path, batch_size=4, sample_every=7, fields={"x": 1})
    options, recipe = parser.parse(["--weight_decay", "0.5"])
    assert (options.batch_size, options.eval_every, options.weight_decay) == (4, 7, 0.5)
    assert recipe["fields"] == {"x": 1}
    for wrong, sentence in (({"batch_size": 0}, "must be at least 1, got 0"), ({"no_flag": 1}, "not a flag: no_flag")):
        with pytest.raises(SystemExit):
            example_parser(tmp_path, **wrong).parse([])
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode, size, line, fields",
    [
        ("RGB", (64, 48), "RGB, 64 x 48 -> 64 x 64, crops; recipe photos_small", (3, 64, 8)),
        ("RGB", (32, 32), "RGB, 32 x 32 -> 32 x 32, crops; recipe photos_small", (3, 32, 4)),
        ("L", (64, 64), "grey, 64 x 64 -> 64 x 64 grey, crops; recipe photos_small", (1, 64, 8)),
        ("L", (28, 28), "grey, 28 x 28 -> 32 x 32 grey, crops; recipe photos_small", (1, 32, 4)),
    ],
)
def test_without_a_recipe_the_data_chooses_it(mode, size, line, fields, tmp_path, capsys):
    colours = np.random.default_rng(0).integers(0, 256, (20, *size[::-1], 3), dtype=np.uint8)
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(colours):
        Image.fromarray(pixels).convert(mode).save(tmp_path / "photos" / f"{number}.png")
    options, _ = mae.parse_arguments(["--dataset_path", str(tmp_path / "photos")])
    assert capsys.readouterr().out.strip() == line
    assert tuple(options.fields[name] for name in ("num_channels", "image_size", "patch_size")) == fields
    options, _ = mae.parse_arguments(["--dataset_path", str(tmp_path / "photos"), "--recipe", "photos_medium"])
    assert capsys.readouterr().out == "" and options.fields["image_size"] == 128  # named: nothing is looked at


def test_a_recipe_compares_with_shipped_checkpoints_of_its_images(tmp_path, monkeypatch):
    options, _ = mae.parse_arguments([])
    assert [Path(source).name for source in options.compare] == ["decayed-mae-coloured", "undecayed-mae-coloured"]
    assert all(Path(source, "config.json").exists() for source in options.compare)
    for others in (["--dataset_name", "bundled"], ["--set", "image_size=56"], ["--compare"], ["--recipe", "grey"]):
        assert mae.parse_arguments(others)[0].compare == []
    assert len(mae.parse_arguments(["--set", "patch_size=7"])[0].compare) == 2  # however they are cut into patches
    assert mae.parse_arguments(["--compare", "a", "b"])[0].compare == ["a", "b"]
    assert mae.parse_arguments(["--init_from", "model"])[0].decay_warmup is None  # it is for a new network
    assert mae.parse_arguments(["--init_from", "model", "--decay_warmup", "0.5"])[0].decay_warmup == 0.5
    assert mae.parse_arguments(["--compile", "true"])[0].decay_warmup == 0.5  # of the recipe; compiled too
    monkeypatch.setattr(mae, "SHIPPED", tmp_path)  # as in a wheel, which has no checkpoints
    assert mae.parse_arguments([])[0].compare == []


def test_recipes_of_diffusion_models_follow_the_data_too(tmp_path, capsys):
    for number in range(20):
        Image.new("RGB", (80, 60), (number, 200, 30)).save(tmp_path / f"{number}.png")
    for script in (uvit, sit):
        options, _ = script.parse_arguments(["--dataset_path", str(tmp_path)])
        assert "RGB, 80 x 60 -> 64 x 64, the middle; recipe photos_small" in capsys.readouterr().out
        assert options.fields["in_channels"] == 3 and options.image_size == 64
    options, _ = uvit.parse_arguments(["--dataset_name", "bundled:coloured"])
    assert (options.image_size, options.fields["patch_size"]) == (32, 4)


def test_pictures_show_every_class():
    assert class_turns([0, 0, 0, 1, 1, 2]) == [0, 3, 5, 1, 4, 2]


def test_what_may_change_on_resume_is_a_group_of_flags(tmp_path):
    parser = example_parser(tmp_path)
    options, _ = parser.parse(["--dataset_path", "a", "--log_every", "3", "--seed", "4"])
    signature = parser.signature(options)
    assert signature["seed"] == 4 and "batch_size" in signature and "cpu_threads" in signature
    assert not signature.keys() & {"output_dir", "recipe", "dataset_path", "num_workers", "log_every", "push_to_hub"}
    check_signature("step-1", signature, signature)
    with pytest.raises(UserError, match="'step-1' belongs to another run .seed 4 -> 5.: resume with its flags"):
        check_signature("step-1", signature, {**signature, "seed": 5})


def test_state_files_hold_all_that_training_has(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "random": random_state(torch.device("cpu"))}
    state |= {"other": [None, True, 1.5, math.inf, "x", (1, {2: torch.zeros(0)})]}
    save_state(tmp_path / "state.safetensors", state)
    loaded = load_state(tmp_path / "state.safetensors")
    torch.testing.assert_close(loaded["optimizer"], state["optimizer"], rtol=0, atol=0)
    assert loaded["optimizer"]["state"].keys() == {0, 1}
    assert loaded["other"][:5] == state["other"][:5] and loaded["other"][5][1][2].shape == (0,)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    set_random_state(loaded["random"], torch.device("cpu"))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    with pytest.raises(TypeError, match="not Accelerator"):
        save_state(tmp_path / "state.safetensors", {"x": Accelerator(cpu=True)})


class Payload:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code(tmp_path):
    """Every file is safetensors or JSON; anything else, and any damage, makes it no checkpoint."""
    accelerator, parts = Accelerator(cpu=True), {"model": {"weight": torch.ones(2)}}
    path = save_checkpoint(accelerator, tmp_path / "checkpoints", 3, {"signature": {}}, parts, limit=2)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"} and find_damage(path) is None
    evil = pickle.dumps(Payload(tmp_path / "code_was_run"))
    for name, content in (("optimizer.bin", evil), ("average.pkl", evil), ("model.safetensors", evil)):
        copy = shutil.copytree(path, tmp_path / "copy" / name)
        (copy / name).write_bytes(content)
        with pytest.raises(UserError, match="is not a complete checkpoint"):
            find_checkpoint(str(copy), tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["model.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(path) == "manifest.json does not list model.safetensors"
    for content in ("[]", "null", "{}", "3", '{"state.json": 3}', '{"state.json": [1, 2], "../x": [0, 0]}', "{"):
        (path / "manifest.json").write_text(content)
        assert find_damage(path), content
        with pytest.warns(UserWarning, match="Skipping the checkpoint 'step-00000003'"):
            assert find_checkpoint("latest", tmp_path / "checkpoints") is None
    assert not (tmp_path / "code_was_run").exists()


def test_the_limit_keeps_the_checkpoint_that_was_just_written(tmp_path):
    """Also after going back to an earlier step, and beside damaged checkpoints of later ones."""
    accelerator, parts = Accelerator(cpu=True), {"model": {"weight": torch.ones(2)}}
    for step in (1000, 2000, 3000):
        save_checkpoint(accelerator, tmp_path, step, {"signature": {}}, parts, limit=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00002000", "step-00003000"]
    (tmp_path / "step-00003000" / "manifest.json").unlink()
    steps = [1500, 2000, 3000]
    for limit, kept in ((None, steps), (3, steps), (2, [1500, 3000]), (1, [1500])):
        written = save_checkpoint(accelerator, tmp_path, 1500, {"signature": {}}, parts, limit)
        assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{step:08d}" for step in kept]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert find_checkpoint("latest", tmp_path) == written


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.warns(UserWarning, match="No checkpoint at step 3: it could not be written .*Not a directory"):
        assert save_checkpoint(Accelerator(cpu=True), tmp_path / "checkpoints", 3, {}, {}, limit=None) is None


def test_what_older_versions_did_not_record_is_no_other_run():
    check_signature(
        "step-1", {"seed": 0, "mixed_precision": None}, {"seed": 0, "mixed_precision": "no", "decoded": "a"}
    )
    with pytest.raises(UserError, match="mixed_precision bf16 -> no, --memory_limit_gb: a -> b"):
        saved = {"decoded": "a", "mixed_precision": "bf16"}
        check_signature("step-1", saved, {"mixed_precision": "no", "decoded": "b"})


def test_a_size_on_the_command_line_replaces_that_of_a_recipe(capsys):
    fields = mae.parse_arguments(["--size", "large", "--set", "decoder_hidden_size=32"])[0].fields
    assert fields == {
        "image_size": 28,
        "patch_size": 4,
        "num_channels": 3,
        "norm_pix_loss": True,
        "decoder_hidden_size": 32,
    }
    assert mae.parse_arguments([])[0].fields["hidden_size"] == 96
    assert (
        "hidden_size" not in mae.parse_arguments(["--size", "small"])[0].fields
    )  # as the recipe's word, not its fields
    with pytest.raises(SystemExit):
        mae.parse_arguments(["--init_from", "model", "--size", "large"])
    assert "--size: --init_from brings its own sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "state, model, sentence",
    [
        ({"skipped_steps": 0, "bad_images": 0}, {"weight": torch.ones(2, 3)}, "it has no 'seconds'"),
        (
            {"skipped_steps": 0, "bad_images": 0, "seconds": 1},
            {"weight": torch.ones(2, 9)},
            "size mismatch for weight",
        ),
        ({"skipped_steps": 0, "bad_images": 0, "seconds": 1}, {"other": torch.ones(2, 3)}, "Missing key"),
        ({"skipped_steps": 0, "bad_images": 0, "seconds": 1}, [1], "list"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence(state, model, sentence, tmp_path):
    """Its checksums are right, but not its parts: of another version, or of somebody who wrote it by hand."""
    parser = example_parser(tmp_path)
    flags = ["--output_dir", str(tmp_path / "out"), "--resume_from_checkpoint", "latest"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    run = Run(parser.run_options(parser.parse(flags)[0]), kind="example")
    try:
        run.prepare(model=torch.nn.Linear(3, 2, bias=False))
        run.resume()
        state = {**state, "signature": run.signature}
        other = {**state, "signature": {**run.signature, "mixed_precision": None}, "precision": "bf16"}
        save_checkpoint(run.accelerator, tmp_path / "out" / "checkpoints", 2, other, {"model": model}, limit=2)
        with pytest.raises(UserError, match="mixed_precision bf16 -> no"):  # an older version recorded what was used
            run.resume()
        assert save_checkpoint(run.accelerator, tmp_path / "out" / "checkpoints", 3, state, {"model": model}, limit=2)
        with pytest.raises(UserError, match="'step-00000003' does not fit this run: ") as raised:
            run.resume()
        assert sentence in str(raised.value) and len(str(raised.value)) < 400
    finally:
        run.lock.release()
        for number, handler in handlers.items():  # a run takes signals for itself
            signal.signal(number, handler)


def test_a_resumed_run_has_the_threads_of_its_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    for step, state in ((1, {"cpu_threads": 3}), (2, {"cpu_threads": 2}), (3, None)):
        (folder / f"step-{step:08d}").mkdir(parents=True)
        text = "damaged" if state is None else json.dumps(state)
        (folder / f"step-{step:08d}" / "state.json").write_text(text)
    assert saved_setting("latest", folder, "cpu_threads", is_thread_count) == 2
    assert saved_setting(str(folder / "step-00000001"), folder, "cpu_threads", is_thread_count) == 3
    assert saved_setting("latest", tmp_path, "cpu_threads", is_thread_count) is None
    assert saved_setting("latest", folder, "cpu_threads", lambda value: value > 9) is None
    parser = example_parser(tmp_path)
    flags = ["--output_dir", str(tmp_path), "--resume_from_checkpoint", "latest"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = torch.get_num_threads()
    try:
        run = Run(parser.run_options(parser.parse(flags)[0]), kind="example")
        run.lock.release()
        assert torch.get_num_threads() == 2 and run.threads == "2 threads (as asked for)"
    finally:
        torch.set_num_threads(before)
        for number, handler in handlers.items():  # a run takes signals for itself
            signal.signal(number, handler)


@pytest.mark.parametrize("name", ["results.json", "model_index.json", "model.safetensors"])
def test_a_finished_model_is_not_overwritten(name, tmp_path):
    parser = example_parser(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    flags = ["--output_dir", str(tmp_path / "out")]
    try:
        with pytest.raises(UserError, match=f"holds a finished model .{name}.: .*--overwrite_output_dir"):
            Run(parser.run_options(parser.parse(flags)[0]), kind="example")
        Run(parser.run_options(parser.parse([*flags, "--overwrite_output_dir"])[0]), kind="example").lock.release()
        flags += ["--resume_from_checkpoint", "latest"]
        if name == "results.json":  # the last file of a run; there is no checkpoint to continue
            with pytest.raises(UserError, match=f"holds a finished model .{name}."):
                Run(parser.run_options(parser.parse(flags)[0]), kind="example")
            (tmp_path / "out" / "checkpoints" / "step-00000003").mkdir(parents=True)
        Run(parser.run_options(parser.parse(flags)[0]), kind="example").lock.release()
    finally:
        for number, handler in handlers.items():  # a run takes signals for itself
            signal.signal(number, handler)
    (tmp_path / "out" / "stock").mkdir()  # a copy of the model that is replaced
    clear_output_dir(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "stock").exists()
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.slow
def test_a_monitor_and_the_command_give_the_same_number(tmp_path):
    """kNN of the pooled feature, on the same images: one decoding, one processor, one extraction."""
    torch.manual_seed(0)
    config = DecayedViTMAEConfig(**{**TINY_SIZES, "num_channels": 1})
    model = random_weights(DecayedViTMAEForPreTraining(config)).eval()
    model.save_pretrained(tmp_path / "model")
    splits = load_image_splits().take(200, 100)
    processor = default_image_processor(config.image_size, 1)
    monitor = RepresentationMonitor(Accelerator(cpu=True), splits, processor, config, 10_000, 5_000)
    measured = monitor.evaluate(model)
    command = [sys.executable, "-m", "hf_decayed.cli", "evaluate", tmp_path / "model", "--max_train_samples", 200]
    command += [
        "--max_eval_samples",
        100,
        "--features_dir",
        tmp_path / "features",
        "--output",
        tmp_path / "found.json",
    ]
    subprocess.run(
        [*map(str, command)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert rows[f"last.{config.pooling}"]["knn_accuracy"] == measured["knn_accuracy"]
    assert rows["pixels"]["knn_accuracy"] == monitor.evaluate_pixels()
    assert rows["last.cls"]["effective_rank"] == pytest.approx(measured["effective_rank"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_and_sampling_draw_the_same_images(tmp_path):
    run_script("sit.py", *SIT, "--output_dir", tmp_path / "sit", "--guidance_scale", 1)
    command = ["sample", tmp_path / "sit", "--num", 4, "--num_inference_steps", 2, "--output", tmp_path / "samples"]
    subprocess.run(
        [sys.executable, "-m", "hf_decayed.cli", *map(str, command)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    trained, sampled = (np.asarray(Image.open(tmp_path / name / "samples.png")) for name in ("sit", "samples"))
    assert trained.shape == sampled.shape and np.abs(trained.astype(int) - sampled).max() <= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_held_out_in_training_is_held_out_in_evaluation(tmp_path):
    """Data without an evaluation split: training and held-out images of script and command add up to all of them."""
    rows = load_splits()[0].select(range(300))
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=[str(number) for number in range(10)])})
    Dataset.from_dict({"image": rows["image"], "label": rows["label"]}, features=features).to_parquet(
        tmp_path / "images.parquet"
    )
    flags = [*MAE, "--max_train_samples", 300, "--max_train_steps", 2]
    flags += ["--dataset_path", tmp_path / "images.parquet", "--output_dir", tmp_path / "mae"]
    run_script("mae.py", *flags)
    dataset = json.loads((tmp_path / "mae" / "results.json").read_text())["dataset"]
    trained = int(dataset["used"].split()[0])
    command = [sys.executable, "-m", "hf_decayed.cli", "evaluate", tmp_path / "mae", "--dataset_path"]
    command += [tmp_path / "images.parquet", "--features_dir", tmp_path / "features", "--output", tmp_path / "x.json"]
    subprocess.run([*map(str, command)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    evaluated = json.loads((tmp_path / "x.json").read_text())["dataset"]
    assert evaluated["number"] == {"train": trained, "test": 300 - trained} and 10 < 300 - trained < 60
    assert evaluated["held_out"] == dataset["held_out"] and "CRC-32" in dataset["held_out"]


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


def test_an_error_has_a_line_of_its_own(capsys):
    """Below a progress bar, which the error has left open, too."""

    def batches():
        yield from tqdm(range(3), leave=False)

    def main():
        for _ in batches():
            raise UserError("Nothing fits.")

    with pytest.raises(SystemExit):
        script_main(main)
    assert capsys.readouterr().err.splitlines()[-1] == f"{Path(sys.argv[0]).name}: Nothing fits."


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


def test_damaged_metrics_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 2}\n[1]\n3\nnull\n{"loss": 1}\n{"step": "1"}\n{"st\xffep": 1}\n{"step": 2}\n\xff\xfe'
    )
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert [record["step"] for record in MetricsFile(path, 1, writing=True).records()] == [1]


def test_metrics_stay_when_there_is_no_room_to_rewrite_them(tmp_path, monkeypatch):
    """Resuming rewrites the file: a kill or a full disk in between must not lose the lines of before."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError):
        MetricsFile(path, 1, writing=True)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n' and list(tmp_path.iterdir()) == [path]


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


def test_an_average_of_buffers_copies_counters():
    model = torch.nn.BatchNorm1d(3)
    average = AveragedModel(model, multi_avg_fn=ema_with_warmup(0.5), use_buffers=True)
    for _ in range(3):
        model(torch.randn(8, 3) + 4)
        average.update_parameters(model)
    assert average.module.num_batches_tracked == 3 and (average.module.running_mean > 0.2).all()


@pytest.mark.parametrize(
    "device, processes, threads, workers",
    [("cpu", 1, 6, 2), ("cpu", 1, 8, 0), ("cpu", 2, 4, 0), ("cuda", 2, 8, 4), ("cuda", 1, 8, 8)],
)
def test_loader_workers_are_the_cores_that_the_model_leaves_free(device, processes, threads, workers, monkeypatch):
    monkeypatch.setattr("hf_decayed.command_line.count_cores", lambda: 8)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    assert count_loader_workers(accelerator) == workers
    monkeypatch.setattr("hf_decayed.command_line.count_cores", lambda: 100)
    assert count_loader_workers(accelerator) == 16
