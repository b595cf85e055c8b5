"""Judges chains of nested diffusion, and single networks to compare: leakage, distances to real images, use of latents.

    python training/nested_report.py outputs/nested
    python training/nested_report.py outputs/sigma_0 outputs/sigma_0.5 outputs/sigma_1 --single outputs/uvit --output report.json

For every chain: how well an image is reconstructed from its own upper latents (held-out images), which says how much they
give away; Frechet and kernel distance of samples to training images; whether samples with one top latent are neighbours; the
cost of a step, and the depth of the single network of the same cost. Prints a table, and writes it as JSON.
"""

import argparse
import json
from pathlib import Path

import torch

from hf_decayed.command_line import OneLineParser, non_negative_float, non_negative_int, positive_int
from hf_decayed.data.arguments import add_data_arguments, data_arguments
from hf_decayed.data.nested_latents import image_batches
from hf_decayed.data.sources import load_image_splits
from hf_decayed.errors import UserError
from hf_decayed.evaluation.generation import image_features, sample_scores
from hf_decayed.evaluation.nested import (
    batches,
    chain_macs,
    equal_mac_depth,
    group_neighbours,
    image_generators,
    oracle_reconstruction,
    sample_groups,
)
from hf_decayed.evaluation.sampling import load_pipeline
from hf_decayed.provenance import pipeline_fingerprint, sanitized_command, versions
from hf_decayed.run import script_main


def parse_arguments(arguments=None):
    parser = OneLineParser(
        prog="nested_report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chains", nargs="+", metavar="FOLDER", help="pipelines of training/nested.py")
    parser.add_argument("--single", nargs="*", default=[], metavar="FOLDER", help="pipelines of training/uvit.py")
    parser.add_argument("--output", type=Path, default=Path("outputs/nested_report.json"))
    parser.add_argument("--num", type=positive_int, default=500, help="samples, and held-out images")
    parser.add_argument("--num_latents", type=positive_int, default=20, help="top latents, with ten samples each")
    parser.add_argument("--sample_steps", type=positive_int, default=20)
    parser.add_argument("--guidance_scale", type=non_negative_float, default=1.0, help="of all levels; 1 is none")
    parser.add_argument("--feature_net", default="pixels", help="pixels, or an encoder that AutoModel loads")
    parser.add_argument("--seed", type=non_negative_int, default=0)
    add_data_arguments(parser)
    return parser.parse_args(arguments)


def draw_samples(pipeline, number: int, seed: int, guidance: dict, steps: int) -> torch.Tensor:
    """Samples in [0, 1]; of the classes in turn, where there are classes."""
    classes = pipeline.unet.config.num_classes
    name = "num_images" if hasattr(pipeline, "networks") else "batch_size"
    images = []
    for indices in batches(number, 64):
        chosen = {"class_labels": [index % classes for index in indices]} if classes else {name: len(indices)}
        settings = {"num_inference_steps": steps, "generator": image_generators(seed, indices), "output_type": "pt"}
        images.append(pipeline(**chosen, **guidance, **settings).images.float().cpu())
    return torch.cat(images)


def judge_chain(pipeline, options, held_out: torch.Tensor, encode) -> dict:
    """What is particular to a chain: leakage, neighbours, cost."""
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
        "sigmas": list(pipeline.level_1.config.condition_sigmas),
        "macs": chain_macs(pipeline),
        "macs_by_level": {str(level): network.count_macs() for level, network in pipeline.networks.items()},
        "equal_mac_depth": depth,
        "equal_macs": macs,
        **oracle_reconstruction(pipeline, held_out, seed=options.seed, **settings),
        **group_neighbours(encode(images, list(range(len(images))))["features"], groups),
    }


def main():
    options = parse_arguments()
    splits = load_image_splits(**data_arguments(options))
    encode, identity = image_features(options.feature_net)
    name = Path(options.feature_net).name
    results = {}
    for folder in (*options.chains, *options.single):
        pipeline = load_pipeline(folder)
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
        real = torch.cat(list(image_batches(splits, size, channels, options.num)))
        key = "guidance_weights" if is_chain else "guidance_scale"
        guided = is_chain or config.num_classes > 0
        guidance = {key: options.guidance_scale} if guided else {}
        samples = draw_samples(pipeline, options.num, options.seed, guidance, options.sample_steps)
        features = [encode(images, list(range(len(images)))) for images in (real, samples)]
        record = {"fingerprint": pipeline_fingerprint(pipeline), **sample_scores(*features, ["frechet", "kid"], name)}
        if is_chain:
            held_out = torch.cat(list(image_batches(splits, size, channels, options.num, "held_out")))
            record |= judge_chain(pipeline, options, held_out, encode)
        results[Path(folder).name] = record
        print(f"{Path(folder).name}: " + ", ".join(f"{k} {v:.4g}" for k, v in record.items() if isinstance(v, float)))
    report = {
        "results": results,
        "features": identity,
        "dataset": {"name": splits.name, "fingerprint": splits.fingerprint(), "held_out": splits.held_out_rule},
        "number": options.num,
        "sample_steps": options.sample_steps,
        "guidance_scale": options.guidance_scale,
        "seed": options.seed,
        "command": " ".join(["python training/nested_report.py", *sanitized_command()]),
        "versions": versions(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: {options.output}")


if __name__ == "__main__":
    script_main(main)
