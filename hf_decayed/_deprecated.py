"""Names and modules that moved, importable from their old place for one version, with a `FutureWarning`.

To remove: delete this file, the line of `hf_decayed/__init__.py` that installs it, and `tests/test_deprecated.py`.
"""

import importlib
import sys
import warnings
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder


# Old module -> new module -> names; `old=new` where the name changed as well.
MOVED = {
    "augmentation": {"data.augmentation": "mixup_cutmix rand_augment random_erasing"},
    "cards": {
        "hub.cards": "render_card write_card",
        "evaluation.tables": "as_text=format_metric protocol_text table=markdown_table",
    },
    "checkpoints": {"run.checkpoints": "any_process damage=find_damage find_checkpoint save_checkpoint"},
    "cli": {"command_line": "check_fields field_and_value=parse_field"},
    "conversion": {"hub.conversion": "ConversionError convert to_vit_mae"},
    "conversion_diffusion": {"hub.formats": "fields_of=format_fields"},
    "data": {
        "data.datasets": "DiffusionImages EpochBatches=EpochBatchSampler StreamedImages TrainingImages "
        "as_it_is=identity_collate",
        "data.decoding": "as_pixels=to_pixels decode=decode_image",
        "data.keyed_random": "sample_generator",
        "data.sources": "find_columns hold_out=split_validation load_path load_splits some=take_subset",
        "data.transforms": "Augmentation MiddleOfImages=CenterCropProcessor crop_and_resize crop_boxes "
        "resized_middle=center_crop",
        "errors": "DataError",
    },
    "evaluation.features": {
        "data.datasets": "ImagesInOrder=EvaluationDataset",
        "provenance": "fingerprint=model_fingerprint",
    },
    "latents": {
        "data.latents": "EncodedLatents KeptLatents=CachedLatents Latents keep_latents=cache_latents latent_images "
        "latent_scaling load_vae sample_shape sample_size_of=latent_size shrinks_by=vae_scale_factor",
    },
    "optimization": {
        "evaluation.linear_probe": "LARS warmup_cosine",
        "run.optimization": "layerwise_groups parameter_groups "
        "scale_is_sought=is_scaler_warmup warmed_average=ema_with_warmup",
    },
    "pictures": {
        "plots": "draw_heat_map reconstructions save_curves save_grid save_heat_maps save_reconstructions save_schedules",
    },
    "publishing": {"hub.publishing": "PublishingError STAYS_HERE=LOCAL_ONLY check_card publish stage"},
    "runs": {
        "command_line": "boolean share_cores=set_cpu_threads",
        "data.arguments": "add_data_arguments",
        "data.sources": "class_names_of=read_class_names",
        "errors": "loading=explain_loading_errors one_sentence=format_error",
        "hub.upload": "make_repository=create_repository upload_run",
        "provenance": "flags_without_paths=sanitized_command hardware=describe_hardware versions",
        "run.arguments": "names_of=list_recipes",
        "run.records": "MetricsFile",
        "run.run": "clear_finished_run=clear_output_dir refuse_another_run=check_signature",
        "run.signals": "StopSignal leave_signals_to_the_parent=ignore_signals",
    },
    "sampling": {
        "evaluation.sampling": "load_pipeline sample",
        "provenance": "fingerprint_of=pipeline_fingerprint public=public_config",
        "run.monitors": "Looks=SampleMonitor",
    },
}
PACKAGE = __name__.rpartition(".")[0]


class DeprecatedFinder(MetaPathFinder, Loader):
    """Finds modules that are gone, and gives modules that still exist the names that left them."""

    def find_spec(self, name, path=None, target=None):
        old_module = name.removeprefix(f"{PACKAGE}.")
        if old_module == name or old_module not in MOVED:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or not spec.has_location:
            return ModuleSpec(name, self)
        run_module = spec.loader.exec_module

        def exec_module(module):
            run_module(module)
            add_moved_names(module, old_module)

        spec.loader.exec_module = exec_module  # of this spec's loader alone
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        add_moved_names(module, module.__name__.removeprefix(f"{PACKAGE}."))


def add_moved_names(module, old_module: str) -> None:
    module.__getattr__ = partial(find_moved, old_module, module.__dict__.get("__getattr__"))


def find_moved(old_module: str, own_getattr, name: str):
    """The `__getattr__` of an old module: warns, and looks the name up where it is now."""
    for new_module, entries in MOVED[old_module].items():
        for entry in entries.split():
            old_name, _, new_name = entry.partition("=")
            if old_name == name:
                new_name = new_name or old_name
                value = getattr(importlib.import_module(f"{PACKAGE}.{new_module}"), new_name, None)
                if value is None:
                    raise AttributeError(f"{PACKAGE}.{old_module}.{name} was removed, as was {new_module}.{new_name}.")
                warnings.warn(
                    f"{PACKAGE}.{old_module}.{name} is now {PACKAGE}.{new_module}.{new_name}; the old name will be "
                    "removed in the next version.",
                    FutureWarning,
                    stacklevel=2,
                )
                return value
    if own_getattr is not None:
        return own_getattr(name)
    raise AttributeError(f"module '{PACKAGE}.{old_module}' has no attribute {name!r}")


def install() -> None:
    if not any(isinstance(finder, DeprecatedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeprecatedFinder())
