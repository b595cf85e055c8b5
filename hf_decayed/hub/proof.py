"""Proves that a staged folder loads in a process without this package, and gives what the source gives."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from ..errors import UserError, format_error
from ..kinds import Kind, SavedClass, read_field, read_json, read_model_folder
from ..provenance import model_fingerprint, pipeline_fingerprint, versions
from .staging import PublishingError


SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)  # in names of environment variables


LOADING_SCRIPT = """
import sys
sys.modules["hf_decayed"] = None  # those who download the folder have no such package
from safetensors.torch import save_file
folder, output, library, *loaders = sys.argv[1:]
outputs = {}
for loader in loaders:
    loaded = getattr(__import__(library), loader).from_pretrained(folder, trust_remote_code=True)
    outputs[loader] = reference_output(loaded).contiguous()
save_file(outputs, output)
"""


def prove(source: Path, staged: Path, folder: Path) -> float:
    """Runs the code of the staged folder in another process; returns the largest difference to the source's output."""
    folder_content = read_model_folder(staged)
    kind, class_name = folder_content.kind, folder_content.class_name
    saved_class = kind.classes[class_name]
    expected, fingerprint = source_outputs(source, kind, saved_class)
    arguments = [kind.library, *saved_class.loaders]
    outputs = run_without_package(kind.reference_output, LOADING_SCRIPT, staged, folder, arguments)
    difference = compare_outputs(expected, outputs, source, tolerance=1e-5)
    check_evaluations(staged, fingerprint)
    return difference


def compare_outputs(
    expected: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], source: Path, tolerance: float
) -> float:
    """Refuses outputs that differ by more than `tolerance` of their largest value; returns the largest difference."""
    differences = []
    for loader, output in expected.items():
        same_shape = outputs[loader].shape == output.shape
        differences.append(float((outputs[loader] - output).abs().max()) if same_shape else float("nan"))
        if not differences[-1] <= tolerance * max(1.0, float(output.abs().max())):
            raise PublishingError(
                f"The staged folder gives something else than '{source}' (largest difference {differences[-1]:.1e}): its "
                "code or its weights are not those of this package; save the model again."
            )
    return max(differences)


def source_outputs(source: Path, kind: Kind, saved_class: SavedClass) -> tuple[dict[str, torch.Tensor], str]:
    """Output of the source for every loader, by the classes of this package; and the fingerprint that evaluations record."""
    try:
        if kind.library == "diffusers":
            from ..evaluation.sampling import load_pipeline  # imports diffusers

            pipeline = load_pipeline(str(source))
            outputs = {loader: kind.reference_output(pipeline) for loader in saved_class.loaders}
            return outputs, pipeline_fingerprint(pipeline)
        outputs = {}
        for loader in saved_class.loaders:
            loaded = getattr(transformers, loader).from_pretrained(source, trust_remote_code=False)
            outputs[loader] = kind.reference_output(loaded)
        return outputs, model_fingerprint(loaded)  # of the last loader, the one that evaluations use
    except UserError as error:
        raise PublishingError(str(error)) from error
    except Exception as error:  # of damaged configs and weights the libraries raise whatever they meet first
        raise PublishingError(
            f"'{source}' cannot be loaded by the classes of this package: {format_error(error)}"
        ) from error


def run_without_package(
    reference_output: Callable, script: str, staged: Path, folder: Path, arguments: list[str]
) -> dict[str, torch.Tensor]:
    """Outputs that a script saves in a process without this package, without the Hub, and without tokens and keys in variables.

    The script finds the function `reference_output` under its own name, and in `sys.argv` the staged folder, the file to
    write, and `arguments`.
    """
    function = inspect.getsource(reference_output)
    script = f"{function}\nreference_output = {reference_output.__name__}\n{script}"
    output = folder / "outputs.safetensors"
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not SECRET.search(name)
    }
    environment |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", script, str(staged), str(output), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        last_line = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise PublishingError(f"The staged folder does not load without this package: {last_line}")
    return load_file(output)


def check_evaluations(staged: Path, fingerprint: str) -> None:
    """Refuses evaluations of another model than the one they lie beside."""
    for file in sorted(staged.glob("results/*.json")):
        evaluation, name = read_json(file), f"results/{file.name}"
        dtype = read_field(evaluation, "protocol", dict, name, {}).get("dtype", "float32")
        # Other versions may describe the same model by another config.
        comparable = evaluation.get("versions") == versions() and dtype == "float32"
        if comparable and evaluation.get("model_fingerprint") not in (None, fingerprint):
            raise PublishingError(f"'{name}' was measured on another model: run `hf-decayed evaluate` again.")
