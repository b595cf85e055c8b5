"""Publishing: what is pushed loads without this package and equals the source; what should stay private is refused."""

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import zlib
from functools import partial
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pytest
from conftest import ROOT, TINY_SIZES, random_weights
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler
from huggingface_hub import HfApi
from loopback_hub import COMMIT, serve
from PIL import Image, PngImagePlugin
from safetensors.torch import load_file, save_file

from hf_decayed import DecayedViTMAEConfig, DecayedViTMAEForPreTraining
from hf_decayed.cli import main
from hf_decayed.errors import UserError
from hf_decayed.evaluation.sampling import load_pipeline
from hf_decayed.hub import publishing, validation
from hf_decayed.hub.proof import check_evaluations, prove
from hf_decayed.hub.publishing import PublishingError, check_code, publish
from hf_decayed.hub.secrets import find_secret, find_with_detect_secrets
from hf_decayed.hub.staging import is_pickle, list_files, stage
from hf_decayed.hub.upload import upload_run
from hf_decayed.hub.validation import check_content, validate_staged
from hf_decayed.models.unet_decayed_uvit import DecayedUViT2DModel
from hf_decayed.pipelines.pipeline_decayed_uvit import DecayedUViTPipeline
from hf_decayed.provenance import versions


SHIPPED = sorted(path.parent for path in (ROOT / "model_cards").glob("*/LICENSE"))
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


def write_run(folder, pipeline=False):
    """A folder as the scripts leave it, with files that must not be published."""
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
    for tracker in ("trackers/mae", "mae/1700000000"):  # of this version, and of older ones
        (folder / tracker).mkdir(parents=True)
        (folder / tracker / "events.out.tfevents.1700000000.host").write_bytes(b"/home/me")
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
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "pipeline"])
def test_published_and_loaded_by_name(kind, tmp_path):
    folder = write_run(tmp_path / "out", kind == "pipeline")
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
    assert not any("checkpoints" in name or "arguments" in name or "events" in name for name in pushed)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`publish` in this process, to a Hub on loopback; proving takes a process of its own, and is tested above."""
    (tmp_path / "hub").mkdir()
    with serve(tmp_path / "hub") as server:
        client = partial(HfApi, endpoint=server.url, token="hf_secret")
        monkeypatch.setattr(publishing, "HfApi", client)
        monkeypatch.setattr("hf_decayed.hub.upload.HfApi", client)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(publishing, "prove", lambda *_: 0.0)
        yield server


def test_pushed_again_after_a_failure(hub, tmp_path):
    folder = write_run(tmp_path / "out")
    hub.failures = 1
    with pytest.raises(PublishingError, match="a commit is complete or absent, so the same command can be repeated"):
        publish(folder, "user/mine", keep=tmp_path / "staged")
    assert not list((tmp_path / "hub/user/mine").iterdir()) and not (tmp_path / "staged").exists()
    report = publish(folder, "user/mine", keep=tmp_path / "staged", revision="trial")
    assert report.endswith(f"pushed to user/mine: pin revision {COMMIT}") and hub.branches == hub.commits == ["trial"]
    assert (tmp_path / "staged" / "config.json").exists()
    # Files of an earlier push are not removed, but listed.
    (folder / "results.json").rename(folder / "results_of_mine.json")
    report = publish(folder, "user/mine")
    assert "(also there, from before: results.json; `hf repos delete-files` removes them)" in report


def test_the_owner_chooses_the_visibility(hub, tmp_path):
    folder = write_run(tmp_path / "out")
    publish(folder, "user/mine")
    assert not {"private", "visibility"} & {name for name, value in hub.created[0].items() if value is not None}
    with pytest.raises(PublishingError, match="no file was changed: it exists already, and is public"):
        publish(folder, "user/mine", private=True)
    publish(folder, "user/other", private=True)
    assert hub.private == {"user/mine": False, "user/other": True}


def test_staged_files_are_kept_outside_of_the_model(hub, tmp_path):
    folder = write_run(tmp_path / "out")
    with pytest.raises(PublishingError, match="staged' lies in the model's own folder: name one outside"):
        publish(folder, "user/mine", dry_run=True, keep=folder / "staged")


def test_an_unreachable_hub(hub, tmp_path):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(PublishingError, match="Not pushed to 'user/mine', where no file was changed: "):
        publish(write_run(tmp_path / "out"), "user/mine")


def test_an_uploaded_run_has_no_tracker_files(hub, tmp_path):
    folder = write_run(tmp_path / "out")
    (folder / ".lock-holder.json").write_text('{"host": "mine"}')
    for name in ("arguments.json", ".lock-holder.json", "checkpoints/step-3/model.safetensors"):  # of a run beside it
        (folder / "runs" / "hinge" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "runs" / "hinge" / name).write_text("{}")
    HfApi(endpoint=hub.url, token="hf_secret").create_repo("user/mine")
    upload_run("user/mine", folder)
    uploaded = {path.name for path in (tmp_path / "hub/user/mine").rglob("*") if path.is_file()}
    assert not (tmp_path / "hub/user/mine/runs").exists()
    assert "model.safetensors" in uploaded and "arguments.json" not in uploaded
    assert not any(word in name for word in ("events", "optimizer", "lock") for name in uploaded)


@pytest.mark.parametrize("name, sentence", [("mine", "USER/mine"), ("not a/valid//id!", "Repo id must")])
def test_names_that_the_hub_would_refuse(name, sentence, tmp_path):
    with pytest.raises(PublishingError, match=sentence):
        publish(write_run(tmp_path / "out"), name, dry_run=True)


def test_a_card_for_another_repository(tmp_path):
    folder = write_run(tmp_path / "out")
    (folder / "README.md").write_text(CARD.replace("path/or/repository", "user/theirs"))
    with pytest.raises(PublishingError, match="shows how to load 'user/theirs', not 'user/mine'"):
        publish(folder, "user/mine", dry_run=True)


@pytest.mark.slow
def test_a_dry_run_lists_the_files(tmp_path, capsys):
    folder = write_run(tmp_path / "out")
    command = ["publish", str(folder), "--repo_id", "user/mine", "--dry_run", "--keep", str(tmp_path / "staged")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    staged = [
        path.relative_to(tmp_path / "staged").as_posix() for path in (tmp_path / "staged").rglob("*") if path.is_file()
    ]
    assert staged and sorted(staged) == sorted(line.split()[-1] for line in printed.splitlines()[:-1])
    assert main(command) == 2 and "exists already" in capsys.readouterr().err
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
        ("more.json", '{"/home/me/x": 1}', "a path of this machine under the top level: '/home/me/x'"),
        ("more.json", '{"from": "mae.py --data /gpfs/me/x"}', "a path of this machine under 'from'"),
        ("more.json", '{"from": "\\\\\\\\server\\\\me"}', "a path of this machine under 'from'"),
        ("more.json", '{"command": "mae.py --data=/raid/me/x"}', "a path of this machine under 'command'"),
        ("more.json", '{"from": "//server/share"}', "a path of this machine under 'from'"),
        ("more.json", "{", "'more.json' is not JSON"),
        ("more.jsonl", "{}\n\n{", "Line 3 of 'more.jsonl' is not JSON"),
        ("more.json", '{"depth": ' + "[" * 100_000, "'more.json' is not JSON"),
        ("more.json", "[" * 300 + "]" * 300, "'more.json' is nested more than 100 levels deep"),
        ("README.md", CARD.replace("0.67", "1e99999"), "The card says 1e99999, which is in no results file"),
        ("helper.py", "CACHE = '/home/me/cache'", "'helper.py' holds a path of this machine in line 1"),
        ("helper.py", "x = 1\nlog = open(r'C:\\Users\\me')", "'helper.py' holds a path of this machine in line 2"),
        ("harmless.txt", "\x80\x04 a pickle", "'harmless.txt' is a pickle"),
        ("harmless.txt", "\x93NUMPY", "'harmless.txt' is a pickle"),
        ("picture.png", "no picture", "'picture.png' is no PNG"),
        ("more.safetensors", "cut", "'more.safetensors' is damaged"),
        ("tokens/hub.txt", "x", "'tokens/hub.txt' looks like a file of keys or tokens"),
        (".env/prod.json", "{}", "'.env/prod.json' looks like a file of keys or tokens"),
        ("notes.md", f"my hf_oauth_{'a' * 34}", "'notes.md' holds a Hugging Face token"),
        ("video.mp4", "x", "A model repository holds no files like 'video.mp4'"),
        ("README.md", CARD.replace("57.5", "63.9"), "The card says 63.9, which is in no results file"),
        ("README.md", CARD.replace("0.67", "91"), "The card says 91, which is in no results file"),
        ("README.md", CARD.replace("0.67", "0.67 +- 3.6e-02"), "The card says 3.6e-02, which is in no results file"),
        ("README.md", CARD + "kNN accuracy: 99.9 %", "The card says 99.9, which is in no results file"),
        ("README.md", CARD + "\na | b\n---|---\n1 | _99.9_", "The card says 99.9, which is in no results file"),
        ("README.md", CARD.replace("0.67", "9.99E1"), "The card says 9.99E1, which is in no results file"),
        ("README.md", CARD.replace("0.67 |", "99.1x |"), "The card says 99.1, which is in no results file"),
        ("README.md", CARD.replace("0.67 |", ".991 |"), "The card says .991, which is in no results file"),
        (
            "README.md",
            CARD.replace("0.67 |", "99.1 |\n| - | 0.67 |"),
            "The card says 99.1, which is in no results file",
        ),
        ("README.md", "# A model", "The card has no metadata"),
        (
            "config.json",
            '{"auto_map": {"AutoModel": "somebody/else--modeling.Model"}}',
            "'config.json' takes code from another repository, somebody/else--modeling.Model",
        ),
        ("config.json", '{"auto_map": ["modeling.Model"]}', "`auto_map` in 'config.json' must name code by class"),
        ("config.json", '{"auto_map": {"AutoModel": 1}}', "`auto_map` in 'config.json' must name code by class"),
        (
            "config.json",
            '{"attn_implementation": "somebody/kernel"}',
            "'config.json' takes code from another repository, the attention kernel 'somebody/kernel'",
        ),
        ("config.json", '{"auto_map": {"AutoModel": "../x.Model"}}', "`auto_map` in 'config.json' must name a module"),
        ("config.json", '{"auto_map": {"AutoModel": "Model"}}', "`auto_map` in 'config.json' must name a module"),
        (
            "preprocessor_config.json",
            '{"auto_map": {"AutoImageProcessor": "a/b--c.D"}}',
            "'preprocessor_config.json' takes code from another repository, a/b--c.D",
        ),
    ],
)
def test_refused(name, content, sentence, tmp_path):
    folder = write_run(tmp_path / "out")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=sentence.replace("(", ".").replace(")", ".")):
        stage(folder, tmp_path / "staged")
        validate_staged(tmp_path / "staged")


# Links and special files.


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda path: path.symlink_to("/etc/hostname"), "'results/extra.json' is a symbolic link"),
        (lambda path: path.symlink_to("features.json"), "'results/extra.json' is a symbolic link"),
        (lambda path: path.symlink_to("/etc", target_is_directory=True), "'results/extra.json' is a symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "'results/extra.json' is a symbolic link"),
        (os.mkfifo, "'results/extra.json' is a pipe, device or socket"),
        (make_socket, "'results/extra.json' is a pipe, device or socket"),
    ],
    ids=["link out", "link within", "link to a folder", "dangling link", "pipe", "socket"],
)
def test_links_and_special_files_are_refused_unopened(make, sentence, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "out")
    (folder / "results").mkdir()
    monkeypatch.chdir(folder / "results")  # paths of sockets are short
    make(type(folder)("extra.json"))
    monkeypatch.setattr("hf_decayed.hub.staging.is_pickle", lambda path: pytest.fail(f"{path} was opened"))
    with pytest.raises(PublishingError, match=sentence):
        stage(folder, tmp_path / "staged")
    assert not (tmp_path / "staged").exists()


def test_links_among_local_files_do_no_harm(tmp_path):
    folder = write_run(tmp_path / "out")
    (folder / "checkpoints" / "latest").symlink_to("step-1")
    names = {path.relative_to(folder).as_posix() for path in list_files(folder)}
    assert "model.safetensors" in names and not any("latest" in name or "events" in name for name in names)


# Code.


def test_foreign_code_is_listed_and_never_run_unasked(hub, tmp_path, capsys):
    folder = write_run(tmp_path / "out")
    (folder / "helper.py").write_text("print()\n")
    code = folder / "modeling_decayed_vit_mae.py"
    code.write_text(code.read_text().replace("import torch\n", "import torch\nimport helper\n", 1))
    line = code.read_text().splitlines().index("import helper") + 1
    own, other = "'modeling_decayed_vit_mae.py' differs from this package's in 1 lines, first in line", "'helper.py'"
    assert main(["publish", str(folder), "--repo_id", "user/mine"]) == 2
    error = capsys.readouterr().err
    assert "nothing of it was run" in error and f"{own} {line}" in error and "--trust_remote_code" in error
    assert f"{other} is not a file of this package" in error and error.count("\n") == 1
    assert not list((tmp_path / "hub").rglob("*.py"))
    report = publish(folder, "user/mine", trust_remote_code=True)
    assert f"code that is not of this package: {other}" in report and own in report


def test_own_code_is_trusted(tmp_path):
    for pipeline in (False, True):
        assert check_code(write_run(tmp_path / str(pipeline), pipeline), trust_remote_code=False) == []


def test_the_proof_is_not_reached_with_foreign_code(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "out")
    (folder / "helper.py").write_text("print()\n")
    monkeypatch.setattr(publishing, "prove", lambda *_: pytest.fail("code was run"))
    with pytest.raises(PublishingError, match="'helper.py' is not a file of this package"):
        publish(folder, "user/mine", dry_run=True)


# Secrets. They are put together here, so that no scanner takes this file for one.

MIXED = "Ab3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3fG5hJ7k"  # 40 letters and digits
HEX = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "Hugging Face": "hf_" + MIXED[:34],
    "OpenAI": "sk-" + "proj-" + MIXED,
    "AWS": "AKIA" + MIXED[:16].upper(),
    "AWS secret": "aws_secret_access_key = " + MIXED,
    "Google": "AIza" + MIXED[:35],
    "GitLab": "glpat-" + MIXED[:20],
    "Slack": "xoxb-" + "123456789012-" + MIXED[:24],
    "GitHub": "ghp_" + MIXED[:36],
    "GitHub fine-grained": "github_pat_" + MIXED,
    "WandB": "WANDB_API_KEY=" + HEX,
    "WandB netrc": f"machine api.wandb.ai\n  login user\n  password {HEX}",
    "JWT": "eyJ" + MIXED[:20] + ".eyJ" + MIXED[:30] + "." + MIXED,
    "database": "postgresql://admin:" + "s3cret" + "@db.example.com:5432/images",
    "registry": '{"auths": {"registry.example.com": {"auth": "' + "YWRtaW46czNjcmV0" + '"}}}',
    "PGP": "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----",
    "SSH": "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "SSH body": "b3BlbnNzaC1rZXktdjE" + "AAAAABG5vbmUAAAAEbm9uZQ",
    "password in code": "password = 'hunter2'",
    "password in YAML": "db_password: hunter22",
    "API key": 'api_key: "' + MIXED[:12] + '"',
    "bearer": "Authorization: Bearer " + MIXED,
}


def save_png(path, chunk):
    picture = Image.new("L", (8, 8))
    if chunk is not None:
        information = PngImagePlugin.PngInfo()
        chunk(information)
        picture.save(path, pnginfo=information)
    else:
        picture.save(path)


def save_metadata(path, secret):
    weights = load_file(path.parent / "model.safetensors")
    save_file(weights, path.parent / "model.safetensors", metadata={"format": "pt", "note": secret})


WRITERS = {
    "text": lambda path, secret: path.with_suffix(".txt").write_text(f"Some words.\n{secret}\n"),
    "code": lambda path, secret: path.with_suffix(".py").write_text(f'"""\n{secret}\n"""\n'),
    "UTF-16": lambda path, secret: path.with_suffix(".txt").write_bytes(f"Words: {secret}".encode("utf-16")),
    "UTF-16 big": lambda path, secret: path.with_suffix(".md").write_bytes(f"Words: {secret}".encode("utf-16-be")),
    "JSON escapes": lambda path, secret: path.with_suffix(".json").write_text(
        '{"note": "' + "".join(f"\\u{ord(letter):04x}" for letter in secret) + '"}'
    ),
    "JSON lines": lambda path, secret: path.with_suffix(".jsonl").write_text("{}\n" + json.dumps({"note": secret})),
    "PNG text": lambda path, secret: save_png(path.with_suffix(".png"), lambda png: png.add_text("note", secret)),
    "PNG zTXt": lambda path, secret: save_png(
        path.with_suffix(".png"), lambda png: png.add_text("note", secret, zip=True)
    ),
    "PNG iTXt": lambda path, secret: save_png(
        path.with_suffix(".png"), lambda png: png.add_itxt("note", secret, "en", "note", zip=True)
    ),
    "safetensors": save_metadata,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_found_everywhere(secret, writer, tmp_path):
    if writer == "safetensors":
        save_file({"weight": pytest.importorskip("torch").zeros(2)}, tmp_path / "model.safetensors")
    WRITERS[writer](tmp_path / "extra", SECRETS[secret])
    (path,) = tmp_path.iterdir()
    assert find_secret(path)


@pytest.mark.parametrize(
    "secret", ["Hugging Face", "OpenAI", "AWS", "Google", "GitLab", "GitHub", "GitHub fine-grained"]
)
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\\\n", '"\n    "', "' + \\\n    '", "\\n", "\n  "])
def test_a_token_split_over_lines_is_found(secret, line_break, tmp_path):
    token = SECRETS[secret]
    path = tmp_path / "notes.md"
    path.write_text(f"My token\n{token[:12]}{line_break}{token[12:]}\nthat is all\n")
    assert find_secret(path).endswith("over several lines")


@pytest.mark.parametrize("write", [bytes, lambda data: data + b"\0" * (1 << 24)], ids=["start", "second block"])
def test_a_token_among_weights_is_found(write, tmp_path):
    path = tmp_path / "model.safetensors"
    header = b"{}      "
    path.write_bytes(struct.pack("<Q", len(header)) + header + write(b"") + SECRETS["Hugging Face"].encode())
    assert find_secret(path) == "a Hugging Face token"


def test_a_token_after_the_end_of_a_picture_is_found(tmp_path):
    save_png(tmp_path / "picture.png", None)
    assert find_secret(tmp_path / "picture.png") is None
    with (tmp_path / "picture.png").open("ab") as file:
        file.write(SECRETS["WandB"].encode())
    assert find_secret(tmp_path / "picture.png")


def test_a_compressed_bomb_in_a_picture_is_not_unpacked(tmp_path):
    content = b"note\0\0" + zlib.compress(b"\0" * (1 << 28))
    save_png(tmp_path / "picture.png", None)
    data = (tmp_path / "picture.png").read_bytes()
    chunk = struct.pack(">I", len(content)) + b"zTXt" + content + b"\0\0\0\0"
    (tmp_path / "picture.png").write_bytes(data[:8] + chunk + data[8:])
    assert "more than 1 MB of text" in find_secret(tmp_path / "picture.png")


@pytest.mark.parametrize(
    "text",
    [
        "from hf_decayed import DecayedViTMAEConfig\n",
        "with `hf_decayed\nrepresentations and more` in two lines",
        "password: required for the Hub",
        "api_key = os.environ['API_KEY']",
        "password = '<your password>'",
        'access_token: "${TOKEN}"',
        "a task-specific, risk-averse mask-based-representation-learning-of-images",
        '{"fingerprint": "' + HEX + '", "sha256": "' + HEX + HEX[:24] + '"}',
        "https://huggingface.co/user/model and http://localhost:8080/@user",
        "self.mask_token = nn.Parameter(torch.zeros(1, 1, 512))",
    ],
)
def test_ordinary_text_holds_no_secret(text, tmp_path):
    (tmp_path / "notes.txt").write_text(text)
    assert find_secret(tmp_path / "notes.txt") is None


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_folders_pass(folder, tmp_path):
    stage(folder, tmp_path / "staged")
    for path in list_files(folder):
        assert find_secret(path) is None and not is_pickle(path)
        check_content(path, path.name)
    validation.check_card(folder)


class Call:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["notes.txt", "config.json", "picture.png", "weights.safetensors"])
def test_a_pickle_under_another_name_is_refused(protocol, name, tmp_path):
    folder = write_run(tmp_path / "out")
    (folder / name).write_bytes(pickle.dumps({"weights": [Call()]}, protocol=protocol))
    with pytest.raises(PublishingError, match=f"'{name}' is a pickle"):
        stage(folder, tmp_path / "staged")


@pytest.mark.parametrize("text", ["cat\ndog\n", "can be used\nwith care\nReally.", "(image\n", "I1\n.", "", "."])
def test_text_is_no_pickle(text, tmp_path):
    (tmp_path / "notes.txt").write_text(text)
    assert not is_pickle(tmp_path / "notes.txt")


def fake_detect_secrets(monkeypatch, *types):
    """Stands in for the optional library, with its interface."""
    library, settings = ModuleType("detect_secrets"), ModuleType("detect_secrets.settings")

    class SecretsCollection(list):
        def scan_file(self, path):
            self.extend((path, SimpleNamespace(type=name, line_number=3)) for name in types)

    library.SecretsCollection = SecretsCollection
    library.__spec__ = SimpleNamespace(name="detect_secrets")
    settings.default_settings = partial(pytest.MonkeyPatch.context)
    monkeypatch.setitem(sys.modules, "detect_secrets", library)
    monkeypatch.setitem(sys.modules, "detect_secrets.settings", settings)


def test_the_rules_of_detect_secrets_are_added(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "out")
    stage(folder, tmp_path / "staged")
    fake_detect_secrets(monkeypatch, "Hex High Entropy String")  # every fingerprint is one
    assert find_with_detect_secrets(folder / "README.md") is None
    validate_staged(tmp_path / "staged")
    fake_detect_secrets(monkeypatch, "Twilio API Key")
    with pytest.raises(PublishingError, match="holds what detect-secrets calls Twilio API Key .line 3.: take it out"):
        validate_staged(tmp_path / "staged")


@pytest.mark.parametrize("writer", WRITERS)
def test_detect_secrets_reads_every_text(writer, tmp_path):
    """With the library itself, and a secret that only its rules know."""
    pytest.importorskip("detect_secrets")
    if writer == "safetensors":
        save_file({"weight": pytest.importorskip("torch").zeros(2)}, tmp_path / "model.safetensors")
    WRITERS[writer](tmp_path / "extra", "A key: " + "SG." + MIXED[:22] + "." + (MIXED + MIXED)[:43])
    (path,) = tmp_path.iterdir()
    assert find_secret(path) is None
    assert "what detect-secrets calls SendGrid API Key" in find_with_detect_secrets(path)


@pytest.mark.slow
@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_folders_pass_with_detect_secrets(folder):
    pytest.importorskip("detect_secrets")
    assert [find_with_detect_secrets(path) for path in list_files(folder)] == [None] * len(list(list_files(folder)))


def test_publish_mentions_missing_rules(hub, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "out")
    monkeypatch.setattr(publishing, "has_detect_secrets", lambda: False)
    assert "`pip install 'hf_decayed[publish]'` adds those of" in publish(folder, "user/mine", dry_run=True)
    monkeypatch.setattr(publishing, "has_detect_secrets", lambda: True)
    assert "pip install" not in publish(folder, "user/mine", dry_run=True)


# Proof.


def test_evaluations_of_another_model_are_refused(tmp_path):
    """As they remain when a folder was trained again by other means than our scripts."""
    (tmp_path / "results").mkdir()
    record = {"model_fingerprint": "0123", "protocol": {"dtype": "float32"}, "versions": versions()}
    (tmp_path / "results" / "features.json").write_text(json.dumps(record))
    check_evaluations(tmp_path, "0123")
    with pytest.raises(PublishingError, match="'results/features.json' was measured on another model"):
        check_evaluations(tmp_path, "4567")
    (tmp_path / "results" / "features.json").write_text(json.dumps({**record, "versions": {}}))
    check_evaluations(tmp_path, "4567")  # other versions may describe the same model by another config
    (tmp_path / "results" / "features.json").write_text(json.dumps({**record, "protocol": []}))
    with pytest.raises(UserError, match="'protocol' in 'results/features.json' must be an object"):
        check_evaluations(tmp_path, "4567")


@pytest.mark.slow
def test_every_class_that_the_config_names_first_is_proved(tmp_path):
    folder = write_run(tmp_path / "out")
    stage(folder, tmp_path / "staged")
    config = json.loads((tmp_path / "staged" / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "modeling_decayed_vit_mae.NoSuchClass"
    (tmp_path / "staged" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PublishingError, match="does not load without this package.*NoSuchClass"):
        prove(folder, tmp_path / "staged", tmp_path)


def test_missing_files_are_named(tmp_path):
    folder = write_run(tmp_path / "out")
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
def test_code_that_computes_something_else_is_refused(tmp_path):
    folder = write_run(tmp_path / "out")
    stage(folder, tmp_path / "staged")
    code = tmp_path / "staged" / "modeling_decayed_vit_mae.py"
    changed = code.read_text().replace("alpha=self.attention_alpha)", "alpha=0.5 * self.attention_alpha)")
    assert changed != code.read_text()
    code.write_text(changed)
    with pytest.raises(PublishingError, match="gives something else than"):
        prove(folder, tmp_path / "staged", tmp_path)


@pytest.mark.parametrize("load", [load_pipeline, partial(DiffusionPipeline.from_pretrained, trust_remote_code=True)])
def test_the_origin_of_a_component_is_removed(load, tmp_path):
    folder = write_run(tmp_path / "out", pipeline=True)
    load(str(folder)).save_pretrained(tmp_path / "again")
    config = tmp_path / "again" / "unet" / "config.json"
    assert str(tmp_path) in json.loads(config.read_text())["_name_or_path"]  # diffusers'
    (tmp_path / "again" / "README.md").write_text(CARD)
    (tmp_path / "again" / "results.json").write_text((folder / "results.json").read_text())
    stage(tmp_path / "again", tmp_path / "staged")
    validate_staged(tmp_path / "staged")
    assert str(tmp_path) in config.read_text()  # nothing in the source is changed


# Damaged folders: one sentence that names the file.

DAMAGE = {
    "config is a list": ("config.json", "[1, 2]", "'config.json' must hold an object with fields, got list"),
    "config is cut": ("config.json", '{"architectures": ["Dec', "'config.json' is not JSON"),
    "config is no text": ("config.json", b"\xff\xfe\x00", "'config.json' is not UTF-8 text"),
    "config is deep": ("config.json", "[" * 100_000, "'config.json' is not JSON"),
    "config has a long number": ("config.json", '{"a": ' + "1" * 5000 + "}", "'config.json' is not JSON"),
    "architectures is text": (
        "config.json",
        {"architectures": "x"},
        "'architectures' in 'config.json' must be a list",
    ),
    "architectures holds a number": ("config.json", {"architectures": [1]}, "no model or pipeline of this package"),
    "no architectures": ("config.json", {"architectures": None}, "no model or pipeline of this package"),
    "decay is text": ("config.json", {"shortcut_decay": "x"}, "`shortcut_decay` in 'config.json' must be a number"),
    "decay is null": ("config.json", {"shortcut_decay": None}, "`shortcut_decay` in 'config.json' must be a number"),
    "size is text": ("config.json", {"hidden_size": "x"}, "hidden_size"),
    "size is a list": ("config.json", {"image_size": {"a": 1}}, "image_size"),
    "size is another": ("config.json", {"hidden_size": 48}, "cannot be loaded"),
    "auto_map is a list": ("config.json", {"auto_map": [1]}, "`auto_map` in 'config.json'"),
    "processor is a list": ("preprocessor_config.json", "[]", "'preprocessor_config.json' must hold an object"),
    "weights are cut": ("model.safetensors", b"\x10\0\0\0\0\0\0\0{", "'model.safetensors' is damaged"),
    "results are a list": ("results.json", "[]", "'results.json' must hold an object"),
    "card is no text": ("README.md", b"\xff\xfe\xff", "'README.md' is not UTF-8 text"),
    "card has broken metadata": ("README.md", "---\na: [\n---\n", "The metadata of README.md cannot be read"),
}
PIPELINE_DAMAGE = {
    "index is a list": ("model_index.json", "[]", "'model_index.json' must hold an object"),
    "index is cut": ("model_index.json", "{", "'model_index.json' is not JSON"),
    "no class": ("model_index.json", {"_class_name": None}, "`_class_name` in 'model_index.json' must name a class"),
    "class is a number": ("model_index.json", {"_class_name": 3}, "`_class_name` in 'model_index.json' must name"),
    "class is an empty list": ("model_index.json", {"_class_name": []}, "`_class_name` in 'model_index.json' must"),
    "component is a number": (
        "model_index.json",
        {"unet": [1, 2]},
        "`unet` in 'model_index.json' must name a library",
    ),
    "component is short": ("model_index.json", {"unet": ["diffusers"]}, "`unet` in 'model_index.json' must name a"),
    "component is text": ("model_index.json", {"unet": "x"}, "'model_index.json'"),
    "component is missing": ("model_index.json", {"unet": [None, None]}, "'model_index.json'"),
    "component is no network": ("model_index.json", {"unet": ["diffusers", "logging"]}, "no network or scheduler"),
    "component is unknown": ("model_index.json", {"scheduler": ["diffusers", "None"]}, "no network or scheduler"),
    "component of another library": ("model_index.json", {"unet": ["os", "DecayedUViT2DModel"]}, "'os.py'"),
    "component of a path": ("model_index.json", {"unet": ["../x", "DecayedUViT2DModel"]}, "must name modules of its"),
    "names are a list": ("model_index.json", {"id2label": [1]}, "model_index.json"),
    "network config is a list": ("unet/config.json", "[]", "config.json"),
    "network config is cut": ("unet/config.json", "{", "config.json"),
    "network size is text": ("unet/config.json", {"hidden_size": "x"}, "'unet' of "),
    "network decay is text": ("unet/config.json", {"shortcut_decay": "x"}, "shortcut_decay"),
    "network has no config": ("unet/config.json", None, "config.json"),
    "scheduler config is a list": ("scheduler/scheduler_config.json", "[]", "scheduler"),
    "weights are cut": ("unet/diffusion_pytorch_model.safetensors", b"cut", "diffusion_pytorch_model.safetensors"),
}
RAW = ("AttributeError", "TypeError", "KeyError", "IndexError", "RecursionError", "Traceback", "has no attribute")


def damage(folder, name, content):
    path = folder / name
    if isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def run_command(command, capsys):
    assert main(list(map(str, command))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not any(word in line for word in RAW) and len(line) < 600, line
    return line


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_model_gets_one_sentence(case, tmp_path, capsys):
    name, content, sentence = DAMAGE[case]
    folder = write_run(tmp_path / "out")
    damage(folder, name, content)
    assert sentence in run_command(["publish", folder, "--repo_id", "user/mine", "--dry_run"], capsys)
    if name == "config.json":
        run_command(["convert", "--from", "decayed-mae", "--checkpoint", folder, "--output", tmp_path / "new"], capsys)
        run_command(["sample", folder, "--output", tmp_path / "samples"], capsys)


@pytest.mark.parametrize("case", PIPELINE_DAMAGE)
def test_a_damaged_pipeline_gets_one_sentence(case, tmp_path, capsys):
    name, content, sentence = PIPELINE_DAMAGE[case]
    folder = write_run(tmp_path / "out", pipeline=True)
    damage(folder, name, content)
    assert sentence in run_command(["publish", folder, "--repo_id", "user/mine", "--dry_run"], capsys)
    if not case.startswith(
        "component of"
    ):  # `sample` takes the classes of this package, whatever the index says of modules
        run_command(["sample", folder, "--output", tmp_path / "samples", "--num_inference_steps", 2], capsys)
