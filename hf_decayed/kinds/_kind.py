"""The fields of a kind, and of a folder that holds a model of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SavedClass:
    """A class that a saved folder may name.

    Args:
        noun (`str`): What the model is, in the card's first sentence: "masked autoencoder".
        task (`str`): The Hub's `pipeline_tag`.
        limits (`str`): What it is not for, in the card.
        loaders (`tuple[str, ...]`): Classes of the library that load such a folder; each of them is proved.
    """

    noun: str
    task: str
    limits: str
    loaders: tuple[str, ...]


DECAY_CITATION = """\
@inproceedings{zhang2026residual,
  title     = {Residual Connections Harm Generative Representation Learning},
  author    = {Zhang, Xiao and Jiang, Ruoxi and Gao, William and Willett, Rebecca and Maire, Michael},
  booktitle = {Conference on Computer Vision and Pattern Recognition (CVPR)},
  year      = {2026}
}"""


@dataclass(frozen=True)
class Kind:
    """What the rest of the package has to know about a kind of model.

    Args:
        script (`str`): Its training script, `training/<script>.py`.
        library (`str`): Library whose classes load it, and the card's `library_name`.
        classes (`Mapping[str, SavedClass]`): Classes that `config.json` or `model_index.json` may name.
        modules (`Mapping[str, str]`): Module of every class that a folder is loaded with.
        usage (`Callable`):
            `usage(folder, name, results)` gives the card's lines of Python for the repository `name`; `folder` is a
            `ModelFolder` and `results` the content of `results.json`.
        reference_output (`Callable`):
            `reference_output(loaded)` gives a tensor that depends on all weights, the same in every process. Its source
            text is sent to a process that cannot import this package, so it imports what it needs itself.
        network (`str`, *optional*): Component of a pipeline that was trained: `unet`, `transformer`.
        has_shortcuts (`bool`, defaults to `True`): Whether the config has `shortcut_decay`.
        pictures (`Mapping[str, str]`): Pictures that the script writes beside the model, with their captions.
        paper (`str`): Of the method, as its number on arXiv.
        citation (`str`): The same in BibTeX.
        metrics (`Mapping[str, str]`): Metrics in `results.json` that only this kind has, with their names in the card.
        pipelines (`tuple[str, ...]`):
            Modules of transformers pipelines that are published with its models; each defines `CUSTOM_PIPELINES`.
    """

    script: str
    library: Literal["transformers", "diffusers"]
    classes: Mapping[str, SavedClass]
    modules: Mapping[str, str]
    usage: Callable[..., str]
    reference_output: Callable
    network: str | None = None
    has_shortcuts: bool = True
    paper: str = "2404.10947"
    citation: str = DECAY_CITATION
    pictures: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    pipelines: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFolder:
    """What a folder says of its model: `config` is the network's, `index` a pipeline's (empty for a model)."""

    kind: Kind
    class_name: str
    config: dict
    index: dict
