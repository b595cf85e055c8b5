"""The folder `stock/` of a repository: a class of transformers with folded weights, which loads without any code of ours."""

import importlib
import shutil
from pathlib import Path

from ..decay.stock import stock_model
from ..errors import UserError
from ..kinds import ModelFolder, read_json, read_model_folder, read_text
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
    content = read_model_folder(source)
    model = load_own_model(source, content)
    try:
        stock = stock_model(model)
    except UserError as error:
        raise PublishingError(str(error)) from error
    target = staged / STOCK_FOLDER
    if target.exists():  # of an earlier publication, perhaps of other weights
        shutil.rmtree(target)
    stock.save_pretrained(target)
    shutil.copyfile(staged / "preprocessor_config.json", target / "preprocessor_config.json")
    add_to_card(staged, repo_id)
    loader = stock_loader(read_json(target / "config.json"))
    outputs = run_without_package(stock_output, LOADING_SCRIPT, target, folder, [loader])
    expected = getattr(model, "vit", model) if loader == "AutoModel" else model
    # The eps of the norms is the only approximation, and rounding is that of a network with other weights.
    return compare_outputs({loader: stock_output(expected)}, outputs, source, tolerance=1e-4)


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
    """Tokens of an encoder, logits of the others, for fixed images and noise; its source text is sent to another process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = loaded.config.image_size
    size = size if isinstance(size, (list, tuple)) else (size, size)
    images = torch.randn(2, loaded.config.num_channels, *size, generator=generator)
    arguments = {}
    if hasattr(loaded, "decoder"):
        arguments["noise"] = torch.rand(2, loaded.decoder.decoder_pos_embed.shape[1] - 1, generator=generator)
    with torch.no_grad():
        outputs = loaded.eval()(images, **arguments)
    return (outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state).float()
