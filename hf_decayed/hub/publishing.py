"""From a folder that a script or `save_pretrained` made to a repository on the Hub: staged, proved, pushed.

    hf-decayed publish outputs/mae --repo_id user/decayed-mae --dry_run
    hf-decayed publish outputs/mae --repo_id user/decayed-mae

Staged is what a repository should hold and nothing of this machine. Proved is that the staged folder loads in a process that
cannot import this package and gives what the source gives. Pushed is all of it, in one commit.
"""

import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file

from ..provenance import model_fingerprint, versions
from .cards import PLACEHOLDER, read_json


# What runs leave beside the model: it stays here.
LOCAL_ONLY = {"checkpoints", "arguments.json", "identity.json", "reconstructions", "samples", "evaluated", "runs"}


LOCAL_ONLY |= {"mae", "uvit", "sit", "finetune"}  # of trackers, named after the scripts


PUBLISHED = {".safetensors", ".json", ".jsonl", ".py", ".md", ".png", ".txt", ".yaml"}


PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy"}


PICKLED = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")  # how pickles begin, and the archives that torch.save writes


KEY_FILES = re.compile(
    r"^(\.env.*|\.netrc|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|key|p12|pfx)|.*(token|secret|credential).*)$",
    re.IGNORECASE,
)


# A tokenizer's files are no secrets.
NO_KEY_FILES = re.compile(r"^(tokenizer.*|special_tokens_map|added_tokens)\.json$")


SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_(oauth_)?[A-Za-z0-9]{20,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "an access key of AWS": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{30,}"),
    "a key of an API": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
}


# At the start of a value, or after what may stand before a path; addresses on the web (`//`) are none.
LOCAL_PATH = re.compile(
    r"""(^|[\s'",:=(\[/\\])\.\.([\\/]|$)|(^|[\s'",:=(\[])(file:///|~/|[A-Za-z]:[\\/]|\\\\\w"""
    r"""|/(home|root|Users|tmp|mnt|media|work|data|scratch|var|opt|srv|private|workspace|content|kaggle|gpfs|lustre|nfs)/)"""
)


NUMBER = re.compile(r"(?<![A-Za-z\d.])-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")  # in a cell, whatever follows it


TABLE_RULE = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?")


PERCENTAGE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?%")


ABSOLUTE = re.compile(r"""(^|[\s'"=(\[,:])/[\w.]|(^|[\s'"=(\[,])//\w""")  # in JSON, which has no sentences


class PublishingError(ValueError):
    """What stands in the way, in one sentence."""


def publish(
    model_dir: str | os.PathLike,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    keep: str | os.PathLike | None = None,
) -> str:
    """Stages, proves and pushes; returns what was done, or with `dry_run` what would be pushed.

    Nothing in `model_dir` is changed; what was staged is kept in the new folder `keep`, if one is given. A push that fails
    leaves nothing half done: the files come in one commit, and the same command can be given again. `private` is for a new
    repository (without it the owner's default holds); one that others can see already is not pushed to.
    """
    source = Path(model_dir)
    check_name(repo_id)
    if keep and Path(keep).exists():
        raise PublishingError(f"'{keep}' is there already: name a new folder to keep what is staged.")
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / "repository"
        stage(source, staged)
        set_repo_id(staged / "README.md", source, repo_id)
        validate_staged(staged)
        difference = prove(source, staged, Path(folder))
        files = sorted(path for path in staged.rglob("*") if path.is_file())
        listing = "\n".join(f"{format_size(path):>10}  {path.relative_to(staged).as_posix()}" for path in files)
        proof = f"loads without hf_decayed and gives what the source gives (largest difference {difference:.1e})"
        if keep:
            # Before the push: what cannot be kept should not cost the name of the commit.
            shutil.copytree(staged, keep)
        try:
            done = f"nothing was pushed to {repo_id}" if dry_run else push(staged, repo_id, private, revision, message)
        except PublishingError:
            if keep:
                shutil.rmtree(keep)
            raise
    return f"{listing}\n{len(files)} files, {proof}; {done}"


def check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise PublishingError(str(error)) from error
    if "/" not in repo_id:
        raise PublishingError(
            f"The card says where to load the model from, so it needs the owner too: USER/{repo_id}."
        )


def push(staged: Path, repo_id: str, private: bool, revision: str | None, message: str | None) -> str:
    """All files in one commit; what was there before under other names stays, and is named."""
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise PublishingError(
                "it is there already, and public: make it private (`hf repos settings`), or take another"
            )
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = set(api.list_repo_files(repo_id, revision=revision)) - {".gitattributes"}
    except Exception as error:  # the client raises whatever its HTTP library does
        raise PublishingError(f"Not pushed to '{repo_id}', where no file was changed: {error}") from error
    try:
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=staged,
            revision=revision,
            commit_message=message or f"Publish {repo_id.split('/')[-1]}",
        )
    except Exception as error:
        raise PublishingError(
            f"The push to '{repo_id}' broke off: it has all of the commit or nothing of it, and the same command can be "
            f"given again: {error}"
        ) from error
    left = sorted(there - {path.relative_to(staged).as_posix() for path in staged.rglob("*")})
    before = f" (also there, from before: {', '.join(left)}; `hf repos delete-files` removes them)" if left else ""
    return f"pushed to {repo_id}{before}: pin revision {commit.oid}"


def stage(source: Path, staged: Path) -> None:
    """Copies what a repository should hold; what it should not is refused by name, or stays here if runs leave it."""
    if not (source / "config.json").exists() and not (source / "model_index.json").exists():
        raise PublishingError(f"'{source}' holds neither a model (config.json) nor a pipeline (model_index.json).")
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        keys = any(KEY_FILES.match(part) and not NO_KEY_FILES.match(part) for part in name.parts)
        hidden = any(part.startswith(".") for part in name.parts) and not keys
        if path.is_dir() or name.parts[0] in LOCAL_ONLY or hidden or "__pycache__" in name.parts:
            continue
        if keys:
            raise PublishingError(f"'{name}' looks like a file of keys or tokens: move it out of '{source}'.")
        with path.open("rb") as file:
            beginning = file.read(4)
        if path.suffix.lower() in PICKLES or PICKLED.match(beginning):
            raise PublishingError(
                f"'{name}' is a pickle, or may be one, and runs code when it is loaded: save weights as safetensors, and "
                "move it out."
            )
        if path.suffix.lower() not in PUBLISHED and path.name not in ("LICENSE", "NOTICE"):
            raise PublishingError(f"'{name}' is nothing that a model repository holds: move it out of '{source}'.")
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, staged / name)
    # Where a part was loaded from, which diffusers writes down, nobody needs.
    for config in [*staged.rglob("*config.json"), *staged.glob("model_index.json")]:
        content = read_json(config)
        if content.pop("_name_or_path", None) is not None:
            config.write_text(json.dumps(content, indent=2) + "\n")
    if not list(staged.rglob("*.safetensors")):
        raise PublishingError(f"'{source}' holds no weights (.safetensors).")
    for module in code_modules(staged):
        if not list(staged.rglob(f"{module}.py")):  # a component's lies in the component's folder
            raise PublishingError(f"'{module}.py', which the config names, is missing: save the model again.")
    check_processor(staged)
    if not (staged / "LICENSE").exists():  # the code's; the card says the weights'
        (staged / "LICENSE").write_text(package_licence())
    if not (staged / "README.md").exists():
        raise PublishingError(f"'{source}' has no card: write a README.md, or train with a script, which writes one.")


def check_processor(staged: Path) -> None:
    """The card's first line loads it."""
    if not (staged / "model_index.json").exists() and not (staged / "preprocessor_config.json").exists():
        raise PublishingError("There is no image processor (preprocessor_config.json): save one beside the model.")


def package_licence() -> str:
    """Of a clone, or of an installed package, whose metadata hold it."""
    here = Path(__file__).parents[1]
    if (here / "pyproject.toml").exists():
        return (here / "LICENSE").read_text()
    return importlib.metadata.distribution("hf_decayed").read_text("licenses/LICENSE")


def set_repo_id(card: Path, source: Path, repo_id: str) -> None:
    """Lines of the card that load the model from no name yet, or from the folder it lies in, name where it goes."""
    names = [PLACEHOLDER, str(source), "/".join(source.absolute().parts[-2:])]
    text = card.read_text()
    for name in names:
        text = text.replace(f'from_pretrained("{name}"', f'from_pretrained("{repo_id}"')
    loaded = re.findall(r'from_pretrained\("([^"]+)"', text)
    if loaded and repo_id not in loaded:
        raise PublishingError(
            f"The card shows how to load '{loaded[0]}', and not '{repo_id}': write it anew for that."
        )
    card.write_text(text)


def code_modules(staged: Path) -> set[str]:
    """Code files that the repository's own config names."""
    config = next(staged / name for name in ("model_index.json", "config.json") if (staged / name).exists())
    content = read_json(config)
    entries = content.get("auto_map") or {}
    if not isinstance(entries, dict):
        raise PublishingError(f"`auto_map` in '{config.name}' must name code by class, got {entries!r}.")
    if foreign := [value for value in entries.values() if value and "--" in value]:
        raise PublishingError(
            f"'{config.name}' takes code from another repository, {foreign[0]}: save the model again."
        )
    found = {value.rpartition(".")[0] for value in entries.values() if value}
    if isinstance(content.get("_class_name"), list):
        found.add(content["_class_name"][0])
    if not found:
        raise PublishingError(
            f"'{config.name}' names no code, so nobody could load it without this package: save the model with "
            "`save_pretrained` of hf_decayed."
        )
    return found


def validate_staged(staged: Path) -> None:
    """Secrets, paths of this machine, and numbers that nobody measured."""
    for path in sorted(staged.rglob("*")):
        if path.is_dir() or path.suffix.lower() in (".safetensors", ".png"):
            continue
        text, name = path.read_text(errors="replace"), path.relative_to(staged)
        for kind, pattern in SECRETS.items():
            if pattern.search(text):
                raise PublishingError(f"'{name}' holds {kind}: take it out, and withdraw it if others have seen it.")
        if path.suffix.lower() in (".json", ".jsonl"):
            whole = path.suffix.lower() == ".json"
            for number, line in enumerate([text] if whole else text.splitlines(), 1):
                try:
                    content = json.loads(line) if line.strip() else None
                except json.JSONDecodeError as error:
                    where = "" if whole else f" in line {number}"
                    raise PublishingError(f"'{name}' is not JSON{where}: {error}.") from error
                for key, value in iterate_strings(content):
                    if LOCAL_PATH.search(value) or ABSOLUTE.search(value):
                        raise PublishingError(f"'{name}' holds a path of this machine under {key}: {value!r}.")
        elif path.suffix.lower() != ".py" and path.name not in ("LICENSE", "NOTICE"):
            for number, line in enumerate(text.splitlines(), 1):
                if found := LOCAL_PATH.search(line):
                    raise PublishingError(
                        f"'{name}' holds a path of this machine in line {number}: {found[0].strip()}..."
                    )
    check_card(staged)


def iterate_strings(value, key: str = "the top") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield key, name
            yield from iterate_strings(each, f"'{name}'")
    elif isinstance(value, list):
        for each in value:
            yield from iterate_strings(each, key)


def iterate_numbers(value) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from iterate_numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from iterate_numbers(each)


def check_card(staged: Path) -> None:
    """Every number in a table, every percentage, and the metadata's results are in a results file, as they are or in per cent.

    The first row of a table is its heading, and whole numbers in the first cell of another belong to its name. Other numbers
    in sentences are years, sizes and settings, which nobody measured.
    """
    try:
        card = ModelCard.load(staged / "README.md")
    except Exception as error:  # YAML's own, and the client's
        raise PublishingError(f"The card's metadata cannot be read: {error}") from error
    if not card.data.to_dict():
        raise PublishingError("The card has no metadata: begin README.md with a block between lines of '---'.")
    files = [*staged.glob("results*.json"), *staged.glob("results/*.json"), *staged.glob("evaluation*.json")]
    measured = [number for file in files for number in iterate_numbers(read_json(file))]
    lines = [line.strip() for line in card.text.splitlines()]
    claimed = [str(result.metric_value) for result in card.data.eval_results or []]
    for line, following in zip(lines, [*lines[1:], ""]):
        if "|" in line and not ("-" in following and TABLE_RULE.fullmatch(following)):
            first, *others = line.strip("|").replace("_", " ").split("|")
            claimed += [number for number in NUMBER.findall(first) if "." in number]
            claimed += [number for cell in others for number in NUMBER.findall(cell)]
        claimed += PERCENTAGE.findall(line)
    for number in claimed:
        if not NUMBER.fullmatch(number):
            raise PublishingError(f"The card's metadata say {number!r} where a number should be.")
        mantissa, _, exponent = number.lower().partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))  # of the last digit shown
        if not any(abs(scale * value - float(number)) <= 0.5000001 * unit for value in measured for scale in (1, 100)):
            raise PublishingError(
                f"The card says {number}, which no results file does: README.md shows what was measured."
            )


def reference_output(loaded):
    """What a model or pipeline gives for the same noise; imports all it needs, since it goes to another process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if hasattr(loaded, "scheduler"):
        loaded.set_progress_bar_config(disable=True)
        # A pipeline of latents without an autoencoder, as conversion makes it, has nothing else to show.
        kind = "latent" if getattr(loaded, "vae", None) is None else "pt"
        network = loaded.unet if hasattr(loaded, "unet") else loaded.transformer
        wanted = {"class_labels": [*list(loaded.label2id)[:1], 0]} if network.config.num_classes else {"batch_size": 2}
        return loaded(**wanted, num_inference_steps=3, generator=generator, output_type=kind).images.float()
    size = getattr(loaded.config, "image_size", 224)
    size = size if isinstance(size, (list, tuple)) else (size, size)
    images = torch.randn(2, loaded.config.num_channels, *size, generator=generator)
    with torch.no_grad():
        if hasattr(loaded, "reconstruct"):  # it masks, by this noise
            height, width = loaded.vit.embeddings.patch_grid(images, interpolate_pos_encoding=False)
            noise = torch.rand(2, height * width, generator=generator)
            return loaded.eval().reconstruct(images, noise=noise)[0].float()
        outputs = loaded.eval()(images)
    return (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state).float()


LOADING_SCRIPT = """
import sys
sys.modules["hf_decayed"] = None  # whoever loads this has no such package
from safetensors.torch import save_file
folder, output, library, *loaders = sys.argv[1:]
answers = {}
for loader in loaders:
    loaded = getattr(__import__(library), loader).from_pretrained(folder, trust_remote_code=True)
    answers[loader] = answer_of(loaded).contiguous()
save_file(answers, output)
"""


def prove(source: Path, staged: Path, folder: Path) -> float:
    """Loads the staged folder where this package cannot be imported; the largest difference to what the source gives."""
    if (staged / "model_index.json").exists():
        from .sampling import fingerprint_of, load_pipeline

        pipeline = load_pipeline(str(source))
        library, expected, mark = (
            "diffusers",
            {"DiffusionPipeline": reference_output(pipeline)},
            fingerprint_of(pipeline),
        )
    else:
        architecture = (json.loads((staged / "config.json").read_text()).get("architectures") or [""])[0]
        head = next((head for head in ("ForPreTraining", "ForImageClassification") if architecture.endswith(head)), "")
        library, expected = "transformers", {}
        for loader in dict.fromkeys([f"AutoModel{head}", "AutoModel"]):  # the second is what cards show
            loaded = getattr(transformers, loader).from_pretrained(source)
            expected[loader] = reference_output(loaded)
        mark = model_fingerprint(loaded)
    output = folder / "answers.safetensors"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_TOKEN")}
    environment |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            inspect.getsource(reference_output) + LOADING_SCRIPT,
            str(staged),
            str(output),
            library,
            *expected,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PublishingError(f"The staged folder does not load without this package: {last}")
    found, differences = load_file(output), []
    for loader, answer in expected.items():
        same_shape = found[loader].shape == answer.shape
        differences.append(float((found[loader] - answer).abs().max()) if same_shape else float("nan"))
        if not differences[-1] <= 1e-5 * max(1.0, float(answer.abs().max())):
            raise PublishingError(
                f"The staged folder gives something else than '{source}' (largest difference {differences[-1]:.1e}): its "
                "code or its weights are not those of this package; save the model again."
            )
    check_evaluations(staged, mark)
    return max(differences)


def check_evaluations(staged: Path, mark: str) -> None:
    """Evaluations that lie beside a model were of it, and not of one that lay there before."""
    for file in sorted(staged.glob("results/*.json")):
        evaluation = read_json(file)
        measured, dtype = evaluation.get("model_fingerprint"), evaluation.get("protocol", {}).get("dtype", "float32")
        # Other versions may describe the same model in other words.
        if measured in (None, mark) or evaluation.get("versions") != versions() or dtype != "float32":
            continue
        raise PublishingError(f"'results/{file.name}' was measured on another model: run training/evaluate.py again.")


def format_size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
