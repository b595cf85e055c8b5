"""The folder `stock/` of a repository: a class of transformers with folded weights, which loads without any code of ours."""

import importlib
import json
import shutil
import tempfile
from pathlib import Path

from ..decay.stock import stock_model
from ..errors import UserError
from ..kinds import ModelFolder, read_json, read_model_folder, read_text
from ..models.image_processing_decayed import GreyImageProcessor
from .cards import MARKER, STOCK_FOLDER, stock_loader, stock_usage, write_card
from .proof import compare_outputs, run_without_package
from .staging import PublishingError


LOADING_SCRIPT = """
import sys
sys.modules["hf_decayed"] = None  # those who download the folder have no such package
import transformers
from safetensors.torch import save_file
folder, output, loader = sys.argv[1:]
loaded, info = getattr(transformers, loader).from_pretrained(folder, trust_remote_code=False, output_loading_info=True)
if any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
    raise ValueError(f"weights and class do not fit: {info}")
save_file({loader: reference_output(loaded).contiguous()}, output)
"""


def add_stock_model(source: Path, staged: Path, folder: Path, repo_id: str) -> float:
    """Writes `stock/` into a staged folder and proves it in another process; returns the largest difference to the source.

    The card gets lines that load it. `folder` is for temporary files.
    """
    difference = write_stock_folder(source, staged / STOCK_FOLDER, folder)
    add_to_card(staged, repo_id)
    return difference


def renew_stock_folder(model_dir: str | Path) -> float:
    """Writes `stock/` beside the weights of a model; returns the largest difference to the model's own output.

    A folder that is there already is replaced, once the new one is proved.
    """
    source = Path(model_dir)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / STOCK_FOLDER
        difference = write_stock_folder(source, target, Path(folder))
        if (source / STOCK_FOLDER).exists():
            shutil.rmtree(source / STOCK_FOLDER)
        shutil.copytree(target, source / STOCK_FOLDER)
    return difference


def write_stock_folder(source: Path, target: Path, folder: Path) -> float:
    """Writes the stock form of a model and its image processor, and loads it in a process that has only transformers.

    Of an autoencoder the encoder is written, because `AutoModel` gives features with it: transformers' ViTMAE would
    mask three of four patches.
    """
    content = read_model_folder(source)
    model = load_own_model(source, content)
    model = getattr(model, "vit", model) if content.class_name.endswith("ForPreTraining") else model
    try:
        stock = stock_model(model)
    except UserError as error:
        raise PublishingError(str(error)) from error
    if target.exists():  # of an earlier publication, perhaps of other weights
        shutil.rmtree(target)
    stock.save_pretrained(target)
    path = source / "preprocessor_config.json"
    if not path.exists():
        raise PublishingError(f"'{path}' is missing, which says how images are prepared: save the model again.")
    (target / path.name).write_text(json.dumps(stock_processor(read_json(path)), indent=2) + "\n")
    loader = stock_loader(read_json(target / "config.json"))
    outputs = run_without_package(stock_output, LOADING_SCRIPT, target, folder, [loader])
    # The eps of the norms is the only approximation, and rounding is that of a network with other weights.
    return compare_outputs({loader: stock_output(model)}, outputs, source, tolerance=1e-4)


def stock_processor(processor: dict) -> dict:
    """The JSON of an image processor as transformers has it: its own needs grey images where ours makes them grey."""
    if processor.get("image_processor_type") != GreyImageProcessor.__name__:
        return processor
    processor = {**processor, "image_processor_type": "ViTImageProcessor"}
    processor.pop("auto_map", None)
    return processor


def add_to_card(staged: Path, repo_id: str) -> None:
    """Writes a card of `hf-decayed card` anew; one by hand gets a section at its end, if it does not know the folder yet."""
    card = staged / "README.md"
    text = read_text(card)
    if MARKER in text:
        write_card(staged, repo_id)
    elif f'subfolder="{STOCK_FOLDER}"' not in text:
        card.write_text(f"{text.rstrip()}\n\n## Without code of ours\n\n{stock_usage(staged, repo_id)}\n")


def load_own_model(source: Path, content: ModelFolder):
    if content.kind.library != "transformers":
        raise PublishingError(f"{content.class_name} has no stock form: only encoders and classifiers have.")
    model_class = getattr(importlib.import_module(content.kind.modules[content.class_name]), content.class_name)
    return model_class.from_pretrained(source)


def stock_output(loaded):
    """Tokens of an encoder, logits of a classifier, for fixed images; its source text is sent to another process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = loaded.config.image_size
    size = size if isinstance(size, (list, tuple)) else (size, size)
    images = torch.randn(2, loaded.config.num_channels, *size, generator=generator)
    with torch.no_grad():
        outputs = loaded.eval()(images)
    return (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state).float()
