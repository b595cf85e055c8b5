"""Converts checkpoints of other code bases into folders of this package, exactly; `formats` reads them."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import StrictDataclassError

from ..command_line import check_fields
from ..errors import explain_loading_errors, format_error
from ..kinds import read_json
from .cards import read_licence
from .formats import ConversionError, Format, format_fields, list_formats
from .formats.vit_mae import to_vit_mae, weight_files
from .stock import stock_processor


__all__ = ["ConversionError", "convert", "to_vit_mae"]

FAMILIES = {
    "transformers": ["library_name: transformers", "tags:", "- masked-autoencoder"],
    "diffusers": ["library_name: diffusers", "pipeline_tag: {task}", "tags:"],
}


def convert(
    kind: str, checkpoint: str | Path, output: str | Path, fields: dict | None = None, revision: str | None = None
) -> str:
    """Converts `checkpoint` into the new folder `output` and returns a summary.

    Args:
        kind (`str`): Name of a format, one of `hf_decayed.hub.formats.list_formats()`.
        checkpoint (`str` or `Path`):
            A file (`.pth`, `.safetensors`) or a folder, as the format has it. If there is none of this name: a repository on
            the Hub, such as `facebook/vit-mae-base`, or a file in one, `user/name/checkpoint.pth`.
        output (`str` or `Path`): Folder to create. It must not exist yet, or be empty.
        fields (`dict`, *optional*): Config fields that shapes cannot tell, such as `shortcut_decay`.
        revision (`str`, *optional*): Of the repository.
    """
    name, output, fields = str(checkpoint), Path(output), dict(fields or {})
    formats = list_formats()
    if kind not in formats:
        raise ConversionError(f"`kind` must be one of {sorted(formats)}, got {kind!r}.")
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise ConversionError(f"The output '{output}' exists already; name a new folder.")
    source = formats[kind]
    origin = []
    if Path(name).exists():
        checkpoint = Path(name)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w./-]+)?", name) and not names_a_file(name):
        checkpoint, origin = download(name, source, revision)
    else:
        raise ConversionError(f"No checkpoint at '{name}'.")
    try:
        check_fields(fields, format_fields(kind))
        model, notes = source.read(checkpoint, fields)
    except ConversionError:
        raise
    except (ValueError, StrictDataclassError) as error:  # of the config or the constructor, which name the field
        raise ConversionError(format_error(error)) from error
    notes += origin
    if fields:
        notes.append("Set by hand: " + ", ".join(f"{name}={value!r}" for name, value in fields.items()) + ".")
    licence = source.licence or read_licence(checkpoint) or "unknown"
    save(model, output, model_card(source, checkpoint, type(model).__name__, licence, notes), checkpoint)
    return "\n".join([f"{type(model).__name__} written to {output}", f"Licence of the weights: {licence}.", *notes])


def names_a_file(name: str) -> bool:
    """Whether `folder/file.pth` is a path, although a repository could be called so."""
    return name.count("/") == 1 and Path(name).suffix in (".pth", ".pt", ".bin", ".ckpt", ".safetensors")


def download(name: str, source: Format, revision: str | None) -> tuple[Path, list[str]]:
    """The folder or file of a repository, in the cache of the Hub, and a note of where it comes from."""
    owner, repository, *file = name.split("/", 2)
    repo_id = f"{owner}/{repository}"
    if not source.is_folder and not file:
        raise ConversionError(f"A checkpoint of this format is one file: name it, as in {repo_id}/checkpoint.pth.")
    if source.is_folder and file:
        raise ConversionError(f"A checkpoint of this format is a whole repository: name {repo_id} alone.")
    with explain_loading_errors(name):
        if file:
            path = Path(hf_hub_download(repo_id, file[0], revision=revision))
        else:
            files = ["*.json", "README.md", "model*.safetensors"]
            path = Path(snapshot_download(repo_id, revision=revision, allow_patterns=files))
            if not any(path.glob("model*.safetensors")):
                path = Path(snapshot_download(repo_id, revision=revision, allow_patterns=[*files, "*.bin"]))
    folder = path if path.is_dir() else Path(str(path).removesuffix(file[0]))
    return path, [f"Downloaded from https://huggingface.co/{repo_id}, commit {folder.name}."]


def save(model, output: Path, card: ModelCard, checkpoint: Path) -> None:
    """Writes beside the target and renames, so that a folder named `output` is always a finished one."""
    processor = checkpoint / "preprocessor_config.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        model.save_pretrained(temporary)
        if processor.is_file():  # the weights were trained on pixels prepared by it
            prepared = stock_processor(read_json(processor))
            (temporary / processor.name).write_text(json.dumps(prepared, indent=2) + "\n")
        card.save(temporary / "README.md")
        temporary.chmod(0o755)
        os.replace(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def model_card(source: Format, checkpoint: Path, class_name: str, licence: str, notes: list[str]) -> ModelCard:
    """A card with the origin of the weights, their licence, and the decisions of the conversion."""
    files = [checkpoint] if checkpoint.is_file() else weight_files(checkpoint)
    sources = [f"- `{file.name}`, SHA-256 `{hashlib.sha256(file.read_bytes()).hexdigest()}`" for file in files]
    metadata = [f"license: {licence}"] if licence != "unknown" else []
    lines = [
        *["---", *metadata, *(line.format(task=source.task) for line in FAMILIES[source.library])],
        *["- hf_decayed", "---", ""],
        *[f"# {class_name}, converted", ""],
        *[f"The weights are those of {source.text}:", "", *sources, ""],
        *[line for note in notes for line in (note, "")],
        f"Licence of the weights: {licence}. It is that of their source; converting them does not change it.",
    ]
    return ModelCard("\n".join(lines) + "\n")
