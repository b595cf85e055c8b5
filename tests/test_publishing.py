"""Publishing: what is pushed loads without this package and is what was trained; what should not be seen is not pushed."""

import json
import os
import subprocess
import sys
from functools import partial

import huggingface_hub
import pytest
from conftest import TINY_SIZES, random_weights
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler
from huggingface_hub import HfApi
from loopback_hub import COMMIT, serve

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.cli import main
from hf_decayed.evaluation.sampling import load_pipeline
from hf_decayed.hub import publishing
from hf_decayed.hub.publishing import PublishingError, check_evaluations, prove, publish, stage, validate_staged
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline
from hf_decayed.provenance import versions


CARD = """---
library_name: transformers
tags:
- hf_decayed
---

# A model

| kNN | rank |
|---|---|
| 57.5 % | 0.67 |

```python
model = AutoModel.from_pretrained("path/or/repository", trust_remote_code=True)
other = AutoModel.from_pretrained("somebody/else")
```
"""


def trained(folder, pipeline=False):
    """A folder as the scripts leave it, with all that should stay here."""
    if pipeline:
        unet = DecayedUViT2DModel(sample_size=8, hidden_size=32, num_layers=2, num_attention_heads=2, num_classes=3)
        DecayedUViTPipeline(random_weights(unet), DPMSolverMultistepScheduler()).save_pretrained(folder)
    else:
        random_weights(DecayedViTMAEForPreTraining(DecayedViTMAEConfig(**TINY_SIZES))).save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    (folder / "results.json").write_text(json.dumps({"knn_accuracy": 0.5751, "deep": [{"effective_rank": 0.6712}]}))
    (folder / "arguments.json").write_text(json.dumps({"output_dir": "/home/me/outputs"}))
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "optimizer.bin").write_bytes(b"a pickle")
    return folder


def publish_on(server, cache, *flags):
    variables = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "HF_TOKEN": "hf_secret"}
    command = [sys.executable, "-m", "hf_decayed.cli", "publish", *map(str, flags)]
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    return result, variables


LOADING = {
    "model": "from transformers import AutoModel; AutoModel.from_pretrained('user/mine', trust_remote_code=True, "
    f"revision='{COMMIT}')",
    "pipeline": "from diffusers import DiffusionPipeline; "
    "p = DiffusionPipeline.from_pretrained('user/mine', trust_remote_code=True); p(1, num_inference_steps=2)",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["model", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_published_and_loaded_by_name(kind, tmp_path):
    folder = trained(tmp_path / "out", kind == "pipeline")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "hub").mkdir()
    with serve(tmp_path / "hub") as server:
        result, variables = publish_on(
            server, tmp_path / "cache", folder, "--repo_id", "user/mine", "--revision", "main"
        )
        assert result.returncode == 0, result.stderr
        assert f"pushed to user/mine: pin revision {COMMIT}" in result.stdout
        program = f"import sys; sys.modules['hf_decayed'] = None; {LOADING[kind]}"
        subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, cwd=tmp_path, check=True)
    pushed = {
        path.relative_to(tmp_path / "hub/user/mine").as_posix() for path in (tmp_path / "hub/user/mine").rglob("*")
    }
    assert {"README.md", "LICENSE", "results.json"} <= pushed
    card = (tmp_path / "hub/user/mine/README.md").read_text()
    assert 'from_pretrained("user/mine", trust' in card and 'from_pretrained("somebody/else")' in card
    assert not any("checkpoints" in name or "arguments" in name for name in pushed)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`publish` in this process, to a Hub on loopback; proving takes a process of its own, and is tested above."""
    (tmp_path / "hub").mkdir()
    with serve(tmp_path / "hub") as server:
        client = partial(HfApi, endpoint=server.url, token="hf_secret")
        monkeypatch.setattr(publishing, "HfApi", client)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(publishing, "prove", lambda *_: 0.0)
        yield server


def test_pushed_again_after_a_failure(hub, tmp_path):
    folder = trained(tmp_path / "out")
    hub.failures = 1
    with pytest.raises(
        PublishingError, match="broke off: it has all of the commit or nothing of it, and the same command"
    ):
        publish(folder, "user/mine", keep=tmp_path / "kept")
    assert not list((tmp_path / "hub/user/mine").iterdir()) and not (tmp_path / "kept").exists()
    said = publish(folder, "user/mine", keep=tmp_path / "kept", revision="trial")
    assert said.endswith(f"pushed to user/mine: pin revision {COMMIT}") and hub.branches == hub.commits == ["trial"]
    assert (tmp_path / "kept" / "config.json").exists()
    # What an earlier push left is not removed, and is named.
    (folder / "results.json").rename(folder / "results_of_mine.json")
    said = publish(folder, "user/mine")
    assert "(also there, from before: results.json; `hf repos delete-files` removes them)" in said


def test_who_may_see_it_is_the_owners_choice(hub, tmp_path):
    folder = trained(tmp_path / "out")
    publish(folder, "user/mine")
    assert not {"private", "visibility"} & {name for name, value in hub.created[0].items() if value is not None}
    with pytest.raises(PublishingError, match="no file was changed: it is there already, and public"):
        publish(folder, "user/mine", private=True)
    publish(folder, "user/other", private=True)
    assert hub.private == {"user/mine": False, "user/other": True}


def test_nobody_there(hub, tmp_path):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(PublishingError, match="Not pushed to 'user/mine', where no file was changed: "):
        publish(trained(tmp_path / "out"), "user/mine")


@pytest.mark.parametrize("name, sentence", [("mine", "USER/mine"), ("not a/valid//id!", "Repo id must")])
def test_names_that_the_hub_would_not_take(name, sentence, tmp_path):
    with pytest.raises(PublishingError, match=sentence):
        publish(trained(tmp_path / "out"), name, dry_run=True)


def test_a_card_for_another_repository(tmp_path):
    folder = trained(tmp_path / "out")
    (folder / "README.md").write_text(CARD.replace("path/or/repository", "user/theirs"))
    with pytest.raises(PublishingError, match="shows how to load 'user/theirs', and not 'user/mine'"):
        publish(folder, "user/mine", dry_run=True)


@pytest.mark.slow
def test_what_would_be_pushed_is_listed(tmp_path, capsys):
    folder = trained(tmp_path / "out")
    command = ["publish", str(folder), "--repo_id", "user/mine", "--dry_run", "--keep", str(tmp_path / "kept")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    kept = [
        path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*") if path.is_file()
    ]
    assert kept and sorted(kept) == sorted(line.split()[-1] for line in printed.splitlines()[:-1])
    assert main(command) == 2 and "is there already" in capsys.readouterr().err
    assert "model.safetensors" in printed and "modeling_decayed_vit_mae.py" in printed and " kB  README.md" in printed
    assert "largest difference 0.0e+00" in printed and "nothing was pushed to user/mine" in printed


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("weights.bin", "x", "'weights.bin' is a pickle"),
        (".env", "x", "'.env' looks like a file of keys or tokens"),
        ("id_rsa", "x", "'id_rsa' looks like a file of keys or tokens"),
        ("my_token.txt", "x", "'my_token.txt' looks like a file of keys or tokens"),
        ("notes.md", f"my hf_{'a' * 34}", "'notes.md' holds a Hugging Face token"),
        ("more.json", '{"key": "-----BEGIN RSA PRIVATE KEY-----"}', "'more.json' holds a private key"),
        (
            "more.json",
            '{"data": {"from": "/home/me/images"}}',
            "a path of this machine under 'from': '/home/me/images'",
        ),
        ("more.jsonl", '{"a": "x"}\n{"from": "../images"}', "'more.jsonl' holds a path of this machine under 'from'"),
        ("more.json", '{"command": "mae.py --dataset_path /data/x"}', "a path of this machine under 'command'"),
        ("more.json", '{"command": "mae.py --dataset_path \'/scratch/my images\'"}', "a path of this machine under"),
        ("more.json", '{"from": "images/../../mine"}', "a path of this machine under 'from': 'images/../../mine'"),
        ("notes.md", "I ran\nit in ~/images", "'notes.md' holds a path of this machine in line 2: ~/"),
        ("notes.yaml", "data: file:///home/me", "'notes.yaml' holds a path of this machine in line 1: file:///"),
        ("more.json", '{"from": "/imagenet"}', "a path of this machine under 'from': '/imagenet'"),
        ("more.JSON", '{"from": "images/.."}', "a path of this machine under 'from'"),
        ("more.json", '{"/home/me/x": 1}', "a path of this machine under the top: '/home/me/x'"),
        ("more.json", '{"from": "mae.py --data /gpfs/me/x"}', "a path of this machine under 'from'"),
        ("more.json", '{"from": "\\\\\\\\server\\\\me"}', "a path of this machine under 'from'"),
        ("more.json", '{"command": "mae.py --data=/raid/me/x"}', "a path of this machine under 'command'"),
        ("more.json", '{"from": "//server/share"}', "a path of this machine under 'from'"),
        ("more.json", "{", "'more.json' is not JSON"),
        ("more.jsonl", "{}\n\n{", "'more.jsonl' is not JSON in line 3"),
        ("harmless.txt", "\x80\x04 a pickle", "'harmless.txt' is a pickle"),
        ("tokens/hub.txt", "x", "'tokens/hub.txt' looks like a file of keys or tokens"),
        (".env/prod.json", "{}", "'.env/prod.json' looks like a file of keys or tokens"),
        ("notes.md", f"my hf_oauth_{'a' * 34}", "'notes.md' holds a Hugging Face token"),
        ("video.mp4", "x", "'video.mp4' is nothing that a model repository holds"),
        ("README.md", CARD.replace("57.5", "63.9"), "The card says 63.9, which no results file does"),
        ("README.md", CARD.replace("0.67", "91"), "The card says 91, which no results file does"),
        ("README.md", CARD.replace("0.67", "0.67 +- 3.6e-02"), "The card says 3.6e-02, which no results file does"),
        ("README.md", CARD + "kNN accuracy: 99.9 %", "The card says 99.9, which no results file does"),
        ("README.md", CARD + "\na | b\n---|---\n1 | _99.9_", "The card says 99.9, which no results file does"),
        ("README.md", CARD.replace("0.67", "9.99E1"), "The card says 9.99E1, which no results file does"),
        ("README.md", CARD.replace("0.67 |", "99.1x |"), "The card says 99.1, which no results file does"),
        ("README.md", CARD.replace("0.67 |", ".991 |"), "The card says .991, which no results file does"),
        (
            "README.md",
            CARD.replace("0.67 |", "99.1 |\n| - | 0.67 |"),
            "The card says 99.1, which no results file does",
        ),
        ("README.md", "# A model", "The card has no metadata"),
        (
            "config.json",
            '{"auto_map": {"AutoModel": "somebody/else--modeling.Model"}}',
            "'config.json' takes code from another repository, somebody/else--modeling.Model",
        ),
        ("config.json", '{"auto_map": ["modeling.Model"]}', "`auto_map` in 'config.json' must name code by class"),
    ],
)
def test_refused(name, content, sentence, tmp_path):
    folder = trained(tmp_path / "out")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(PublishingError, match=sentence.replace("(", ".").replace(")", ".")):
        stage(folder, tmp_path / "staged")
        validate_staged(tmp_path / "staged")


def test_evaluations_of_another_model_are_found_out(tmp_path):
    """As they lie there when a folder was trained anew by other means than our scripts."""
    (tmp_path / "results").mkdir()
    record = {"model_fingerprint": "0123", "protocol": {"dtype": "float32"}, "versions": versions()}
    (tmp_path / "results" / "features.json").write_text(json.dumps(record))
    check_evaluations(tmp_path, "0123")
    with pytest.raises(PublishingError, match="'results/features.json' was measured on another model"):
        check_evaluations(tmp_path, "4567")
    (tmp_path / "results" / "features.json").write_text(json.dumps({**record, "versions": {}}))
    check_evaluations(tmp_path, "4567")  # in other words, perhaps


@pytest.mark.slow
def test_every_class_that_the_config_names_first_is_proved(tmp_path):
    folder = trained(tmp_path / "out")
    stage(folder, tmp_path / "staged")
    config = json.loads((tmp_path / "staged" / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "modeling_decayed_vit_mae.NoSuchClass"
    (tmp_path / "staged" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PublishingError, match="does not load without this package.*NoSuchClass"):
        prove(folder, tmp_path / "staged", tmp_path)


def test_what_is_not_there_is_said(tmp_path):
    folder = trained(tmp_path / "out")
    for name, sentence in (
        ("README.md", "has no card"),
        ("preprocessor_config.json", "There is no image processor"),
        ("modeling_decayed_vit_mae.py", "'modeling_decayed_vit_mae.py', which the config names, is missing"),
        ("model.safetensors", "holds no weights"),
        ("config.json", "holds neither a model"),
    ):
        (folder / name).unlink()
        with pytest.raises(PublishingError, match=sentence):
            stage(folder, tmp_path / f"without {name}")


@pytest.mark.slow
def test_code_that_does_something_else_is_found_out(tmp_path):
    folder = trained(tmp_path / "out")
    stage(folder, tmp_path / "staged")
    code = tmp_path / "staged" / "modeling_decayed_vit_mae.py"
    code.write_text(code.read_text().replace("hidden_states, alpha=alpha)", "hidden_states, alpha=0.5 * alpha)"))
    with pytest.raises(PublishingError, match="gives something else than"):
        prove(folder, tmp_path / "staged", tmp_path)


@pytest.mark.parametrize("load", [load_pipeline, partial(DiffusionPipeline.from_pretrained, trust_remote_code=True)])
def test_where_a_part_came_from_stays_here(load, tmp_path):
    folder = trained(tmp_path / "out", pipeline=True)
    load(str(folder)).save_pretrained(tmp_path / "again")
    config = tmp_path / "again" / "unet" / "config.json"
    assert str(tmp_path) in json.loads(config.read_text())["_name_or_path"]  # diffusers'
    (tmp_path / "again" / "README.md").write_text(CARD)
    (tmp_path / "again" / "results.json").write_text((folder / "results.json").read_text())
    stage(tmp_path / "again", tmp_path / "staged")
    validate_staged(tmp_path / "staged")
    assert str(tmp_path) in config.read_text()  # of the source nothing is changed
