"""Evaluates nested diffusion chains, with single networks for comparison: distances to real images, leakage, latents.

    python training/nested_report.py outputs/nested
    python training/nested_report.py outputs/sigma_0 outputs/sigma_0.5 outputs/sigma_1 --single outputs/uvit --output report.json
    python training/nested_report.py --grid nested

For every model: Frechet and kernel distance between samples and training images, with their spread. For every chain:
how well held-out images are reconstructed from their own upper latents, which measures leakage; whether samples that
share a top latent are neighbours; kNN accuracy of the top latent; the cost of a step, and the depth of a single
network of the same cost. Prints tables, with one entry for each seed of a setting, and writes JSON.

With `--grid`, the runs of a grid in `training/recipes/sweeps` are trained first, as sweep.py does. The same command
continues where it was stopped: runs resume from their checkpoints, and models already in the JSON are not evaluated
again.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
import yaml
from sweep import SCRIPTS, default_output_dir, expand, format_flags, read_grid, train
from sweep_tables import markdown_table

from hf_decayed.command_line import OneLineParser, model_names, non_negative_float, non_negative_int, positive_int
from hf_decayed.data.arguments import add_data_arguments, data_arguments
from hf_decayed.data.nested_latents import hierarchy_images, image_batches
from hf_decayed.data.sources import load_image_splits
from hf_decayed.errors import UserError
from hf_decayed.evaluation import knn_accuracy
from hf_decayed.evaluation.generation import image_features, sample_scores
from hf_decayed.evaluation.nested import (
    batches,
    chain_macs,
    equal_mac_depth,
    group_neighbours,
    image_generators,
    oracle_reconstruction,
    sample_groups,
    single_macs,
)
from hf_decayed.evaluation.sampling import load_pipeline
from hf_decayed.kinds import read_json
from hf_decayed.plots import save_grid
from hf_decayed.provenance import pipeline_fingerprint, sanitized_command, versions
from hf_decayed.run import script_main
from hf_decayed.run.records import replace_text


def parse_arguments(arguments=None):
    parser = OneLineParser(
        prog="nested_report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chains", nargs="*", default=[], metavar="FOLDER", help="pipelines of training/nested.py")
    parser.add_argument("--single", nargs="*", default=[], metavar="FOLDER", help="pipelines of training/uvit.py")
    parser.add_argument(
        "--grid", help="grid of runs to train in outputs/sweep/GRID: nested, nested_encoders, or a YAML file"
    )
    parser.add_argument(
        "--only", default="", help="regular expression: train only runs of the grid whose name matches"
    )
    parser.add_argument("--cpu_threads", type=positive_int, help="threads of a training process")
    parser.add_argument("--output", type=Path, help="by default outputs/nested_report.json, or GRID.json")
    parser.add_argument(
        "--picture", type=Path, help="PNG of the first chain: held-out images, and samples that share their top latent"
    )
    parser.add_argument("--num", type=positive_int, default=500, help="number of samples, and of held-out images")
    parser.add_argument(
        "--num_latents", type=positive_int, default=20, help="number of top latents, with ten samples each"
    )
    parser.add_argument("--sample_steps", type=positive_int, default=20)
    parser.add_argument(
        "--guidance_scale", type=non_negative_float, default=1.0, help="guidance of all levels; 1 is none"
    )
    parser.add_argument(
        "--feature_net",
        dest="feature_nets",
        nargs="+",
        default=["pixels"],
        help="pixels, or encoders that AutoModel loads; the first one is used to find neighbours",
    )
    parser.add_argument("--seed", type=non_negative_int, default=0)
    add_data_arguments(parser)
    options = parser.parse_args(arguments)
    if bool(options.grid) == bool(options.chains or options.single):
        parser.error("name folders, or a --grid whose runs are judged")
    options.output = options.output or Path("outputs") / f"{Path(options.grid or 'nested_report').stem}.json"
    options.runs = []
    if options.grid:
        if options.dataset_name or options.dataset_path:
            parser.error("--grid trains on the data that it names: leave out --dataset_name and --dataset_path")
        options.runs = expand(read_grid(options.grid, parser), {})
        names = {dataset_of(run) for run in options.runs}
        if len(names) > 1:
            parser.error(f"the runs of --grid must have the same data, got {', '.join(map(str, names))}")
        options.dataset_name = names.pop()
    return options


def dataset_of(run: dict) -> str | None:
    """The data set that a run of a grid names itself or by its recipe; `None` are the bundled images."""
    recipe = SCRIPTS / "recipes" / run["script"] / f"{run['settings']['recipe']}.yaml"
    named = yaml.safe_load(recipe.read_text()) if recipe.exists() else {}
    return run["settings"].get("dataset_name", named.get("dataset_name"))


def train_grid(options: argparse.Namespace) -> None:
    """Trains the unfinished runs of the grid, and adds the folders of all finished runs to those to evaluate."""
    folders = default_output_dir(options.grid)
    flags = format_flags({"cpu_threads": options.cpu_threads} if options.cpu_threads else {})
    for number, run in enumerate(options.runs, 1):
        folder = folders / run["folder"]
        if not (folder / "results.json").exists():
            if not re.search(options.only, run["name"]):
                continue
            print(f"run {number} of {len(options.runs)}: {run['name']}, seed {run['seed']}", flush=True)
            train(run, folder, flags)
        (options.chains if run["script"] == "nested" else options.single).append(str(folder))


def draw_samples(pipeline, number: int, seed: int, guidance: dict, steps: int) -> torch.Tensor:
    """Samples in [0, 1], taking the classes in turn if there are any."""
    classes = pipeline.unet.config.num_classes
    name = "num_images" if hasattr(pipeline, "networks") else "batch_size"
    images = []
    for indices in batches(number, 64):
        chosen = {"class_labels": [index % classes for index in indices]} if classes else {name: len(indices)}
        settings = {"num_inference_steps": steps, "generator": image_generators(seed, indices), "output_type": "pt"}
        images.append(pipeline(**chosen, **guidance, **settings).images.float().cpu())
    return torch.cat(images)


def judge_chain(pipeline, options, held_out: torch.Tensor, encode) -> dict:
    """Metrics that only chains have: leakage, neighbours, cost."""
    settings = {"num_inference_steps": options.sample_steps}
    guidance = {"guidance_weights": max(1.0, options.guidance_scale)}
    depth, macs = equal_mac_depth(pipeline)
    images, groups = sample_groups(
        pipeline,
        options.num_latents,
        10,
        pipeline.unet.config.num_classes,
        seed=options.seed,
        **settings,
        **guidance,
    )
    return {
        "macs": chain_macs(pipeline),
        "macs_by_level": {str(level): network.count_macs() for level, network in pipeline.networks.items()},
        "equal_mac_depth": depth,
        "equal_macs": macs,
        **oracle_reconstruction(pipeline, held_out, seed=options.seed, **settings),
        **group_neighbours(encode(images, list(range(len(images))))["features"], groups),
    }


def draw_variations(pipeline, images: torch.Tensor, path: Path, seed: int, steps: int, rows: int = 6) -> None:
    """Saves a picture: every row has an image, followed by samples that share its top latent."""
    titles = ["image", *["variation"] * 6]
    chosen = images[:: max(1, len(images) // rows)][:rows]
    samples = pipeline.vary(
        chosen,
        from_level=pipeline.num_levels,
        num_images=len(titles) - 1,
        num_inference_steps=steps,
        generator=image_generators(seed, range(len(chosen) * (len(titles) - 1))),
        output_type="pt",
    ).images
    grid = torch.cat([chosen.unsqueeze(1), samples.float().cpu().unflatten(0, (len(chosen), -1))], dim=1).flatten(0, 1)
    save_grid(path, grid.permute(0, 2, 3, 1).numpy(), titles)


def latent_knn_accuracy(latent_encoder, splits, number: int) -> float | None:
    """kNN accuracy of the top latents of held-out images, with a bank of four times as many training images."""
    if splits.label_column is None:
        return None
    config, features = latent_encoder.config, []
    for split in ("train", "held_out"):
        images = hierarchy_images(splits.take(4 * number, number), config.image_size, config.num_channels, split)
        parts = [images.__getitems__(list(indices)) for indices in batches(len(images), 64)]
        latents = [next(iter(latent_encoder.encode(part["pixel_values"]).values())).flatten(1) for part in parts]
        features += [torch.cat(latents), torch.cat([part["labels"] for part in parts])]
    return knn_accuracy(*features)


def training_record(folder: str, is_chain: bool) -> dict:
    """Seed, steps and command of the training run; for a chain also its encoder."""
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise UserError(f"'{folder}' has no results.json of its training, which the report reads.")
    results = read_json(path)
    record = {name: results[name] for name in ("seed", "steps", "command")}
    return {**record, "encoder": results["latents"]["encoder"]} if is_chain else record


def format_report(report: dict) -> dict[str, str]:
    """Markdown tables by name: `distances` of all models, and `latents` of the chains.

    A cell has one entry for each model of a setting; these models differ only in their seed.
    """
    groups = defaultdict(list)
    for record in report["results"].values():
        groups[setting_name(record), record.get("macs")].append(record)
    first = next(iter(report["results"].values()))
    metrics = [name for name in first if f"{name}_spread" in first]
    columns = ["", "million MACs of a step", *(name.replace("_", " ") for name in metrics)]
    rows = []
    for (name, number), records in groups.items():
        macs = "" if number is None else f"{number / 1e6:.2f}"
        cells = [[f"{record[key]:.3g} \u00b1 {record[f'{key}_spread']:.2g}" for record in records] for key in metrics]
        rows.append([name, macs, *map(", ".join, cells)])
    tables = {"distances": "\n".join(markdown_table(columns, rows))}
    columns = {
        "kNN accuracy of the top latent": "latent_knn_accuracy",
        "RMSE, own latent": "oracle_rmse",
        "RMSE, another's": "other_rmse",
        "nearest has the same latent": "same_latent_knn",
        "by chance": "same_latent_chance",
        "distance within": "within_distance",
        "between": "between_distance",
    }
    rows = [
        [name, *(", ".join(format_number(record[key]) for record in records) for key in columns.values())]
        for (name, _), records in groups.items()
        if "sigmas" in records[0]
    ]
    return {**tables, "latents": "\n".join(markdown_table(["", *columns], rows))}


def format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"  # no kNN accuracy without labels


def setting_name(record: dict) -> str:
    """Name of a model's setting: models with the same name differ only in their seed."""
    if "sigmas" in record:
        return f"chain, {record['encoder']}, sigma {', '.join(f'{sigma:g}' for sigma in record['sigmas'])}"
    return "one network" if "steps" in record else "held-out images"


def read_finished(path: Path, header: dict) -> dict:
    """Results of an earlier call with the same settings, by name; empty if there are none."""
    report = read_json(path) if path.exists() else {}
    same = all(report.get(name) == value for name, value in header.items() if name != "command")
    return report["results"] if report and same else {}


def write_report(path: Path, results: dict, header: dict) -> dict:
    report = {"results": results, **header}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(report, indent=2) + "\n")
    return report


def main():
    options = parse_arguments()
    splits = load_image_splits(**data_arguments(options)).with_fixed_views()
    feature_nets = {Path(name).name: image_features(name) for name in options.feature_nets}
    header = {
        "features": {name: identity for name, (_, identity) in feature_nets.items()},
        "dataset": {"name": splits.name, "fingerprint": splits.fingerprint(), "held_out": splits.held_out_rule},
        "number": options.num,
        "num_latents": options.num_latents,
        "sample_steps": options.sample_steps,
        "guidance_scale": options.guidance_scale,
        "seed": options.seed,
        "command": " ".join(["python training/nested_report.py", *sanitized_command()]),
        "versions": versions(),
    }
    if options.grid:
        train_grid(options)
    folders = [*options.chains, *options.single]
    if not folders:
        raise UserError("No run of the grid is finished, and --only selects none: there is nothing to judge.")
    names = model_names(folders)
    finished, accuracies = read_finished(options.output, header), {}
    results = {name: finished[name] for name in names.values() if name in finished}  # models that are done stay

    def score(images: torch.Tensor, real: torch.Tensor) -> dict:
        scores = {}
        for name, (encode, _) in feature_nets.items():
            features = [encode(rows, list(range(len(rows)))) for rows in (real, images)]
            scores |= sample_scores(*features, ["frechet", "kid"], name)
        return scores

    for folder in folders:
        name, pipeline = names[folder], load_pipeline(folder)
        pipeline.set_progress_bar_config(disable=True)
        is_chain = folder in options.chains
        if is_chain != hasattr(pipeline, "networks"):
            raise UserError(f"'{folder}' holds a {type(pipeline).__name__}: chains come first, others after --single.")
        config = pipeline.unet.config
        size, channels = config.sample_size, config.in_channels
        if pipeline.vae is not None:
            size, channels = (
                size * 2 ** (len(pipeline.vae.config.block_out_channels) - 1),
                pipeline.vae.config.in_channels,
            )
        real, held_out = (
            torch.cat(list(image_batches(splits, size, channels, options.num, split)))
            for split in ("train", "held_out")
        )
        if options.picture and folder in options.chains[:1]:
            draw_variations(pipeline, held_out, options.picture, options.seed, options.sample_steps)
        fingerprint = pipeline_fingerprint(pipeline)
        if results.get(name, {}).get("fingerprint") == fingerprint:
            continue
        origin = training_record(folder, is_chain)
        key = "guidance_weights" if is_chain else "guidance_scale"
        guided = is_chain or config.num_classes > 0
        guidance = {key: options.guidance_scale} if guided else {}
        samples = draw_samples(pipeline, options.num, options.seed, guidance, options.sample_steps)
        record = {"fingerprint": fingerprint, **origin}
        record |= score(samples, real)
        if is_chain:
            record["sigmas"] = list(pipeline.level_1.config.condition_sigmas)
            record |= judge_chain(pipeline, options, held_out, next(iter(feature_nets.values()))[0])
            latents = pipeline.latent_encoder.config.fingerprint
            if latents not in accuracies:  # chains share encoders
                accuracies[latents] = latent_knn_accuracy(pipeline.latent_encoder, splits, options.num)
            record["latent_knn_accuracy"] = accuracies[latents]
        else:
            record["macs"] = single_macs(pipeline.unet)
        results[name] = record
        write_report(options.output, results, header)
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in record.items() if isinstance(v, float)), flush=True)
    results = {name: results[name] for name in names.values()}  # in the order of the command
    results["held_out_images"] = score(held_out, real)
    report = write_report(options.output, results, header)
    print("\n\n".join(["", *format_report(report).values(), f"written: {options.output}"]))


if __name__ == "__main__":
    script_main(main)
