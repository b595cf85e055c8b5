"""`hf-decayed`: thin commands over the functions of the package."""

import argparse
import inspect
import runpy
import sys
from pathlib import Path

from . import __version__
from .command_line import (
    CommandParser,
    OneLineParser,
    boolean,
    jpeg_quality,
    latent_shape,
    non_negative_int,
    parse_field,
    positive_int,
    shortcut_decay,
)
from .errors import print_error


ABOUT = """\
Decayed identity shortcuts for Hugging Face models: in every residual block x <- alpha * x + f(x), with alpha falling from 1
to `shortcut_decay` over the depth. These commands train models and work on checkpoints; AutoModel and DiffusionPipeline load
them."""
EXAMPLES = """\
from nothing to a repository on the Hub:
  hf-decayed train mae
  hf-decayed evaluate outputs/mae --output outputs/mae/results/fashion_mnist.json
  hf-decayed card outputs/mae --repo_id user/decayed-mae --license apache-2.0
  hf-decayed publish outputs/mae --repo_id user/decayed-mae --dry_run

`hf-decayed COMMAND --help` explains a command, with an example."""


# The flags of `convert` need imports that take seconds, so `hf-decayed --help` only shows this line.
CONVERT_HELP = "turn the checkpoint of another code base into ours, exactly"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 after one line on standard error."""
    parser = OneLineParser(
        prog="hf-decayed",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf_decayed {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    words = sys.argv[1:] if arguments is None else arguments
    named = next((word for word in words if not word.startswith("-")), None)
    for command, add_command in {
        "train": add_train,
        "prepare": add_prepare,
        "convert": add_convert,
        "evaluate": add_evaluate,
        "report": add_report,
        "features": add_features,
        "latents": add_latents,
        "sample": add_sample,
        "segment": add_segment,
        "card": add_card,
        "publish": add_publish,
    }.items():
        if command == "convert" and named != "convert":
            commands.add_parser(command, help=CONVERT_HELP)
        else:
            add_command(commands)
    options = parser.parse_args(arguments)
    options.command_words = arguments
    if options.command is None:
        parser.print_help()
        return 0
    try:
        print(options.run(options))
    except Exception as error:
        print_error(f"hf-decayed {options.command}", error)
        return 2
    return 0


# A command is a pair of functions: one adds its flags, the other imports what it needs and runs it.


def add_train(commands):
    scripts = training_scripts()
    parser = commands.add_parser(
        "train",
        help=f"train a model: {', '.join(scripts)}",
        description="Runs a training script with its flags; `hf-decayed train SCRIPT --help` explains them.",
        epilog="examples:\n  hf-decayed train mae\n  hf-decayed train mae --dataset_path photos --output_dir outputs/photos\n  "
        "accelerate launch --num_processes 8 -m hf_decayed.cli train uvit --recipe imagenet256_large",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", choices=scripts, metavar="SCRIPT", help=f"one of {', '.join(scripts)}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="FLAGS", help="arguments of the script")
    parser.set_defaults(run=run_train)


def run_train(options) -> str:
    script = training_scripts()[options.script]
    sys.argv = [str(script), *options.arguments]
    sys.path.insert(0, str(script.parent))  # as `python script.py` does
    runpy.run_path(str(script), run_name="__main__")
    return ""


def training_scripts() -> dict[str, Path]:
    """The scripts by name: inside the package if it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    folder = next(folder for folder in (package / "training", package.parent / "training") if folder.is_dir())
    scripts = sorted(folder.glob("*.py"))
    return {path.stem: path for path in scripts if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")}


def add_prepare(commands):
    parser = commands.add_parser(
        "prepare",
        help="make the images of a data set small once, for faster training",
        description="Writes a data set with smaller images as parquet files, which --dataset_path then takes. Labels, names and "
        "splits stay; data without an evaluation split gets one, with the images that training would hold out. Images "
        "that are small enough stay as they are. A command that was stopped continues when it is repeated.",
        epilog="examples:\n  hf-decayed prepare photos --size 256 --output photos-256\n  hf-decayed train mae --dataset_path "
        "photos-256",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "data", metavar="DATA", help="folder of images, parquet, arrow or tar files; or a Hub data set"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder to write")
    parser.add_argument("--size", type=positive_int, default=256, help="largest short side in pixels")
    parser.add_argument("--quality", type=jpeg_quality, default=95, help="JPEG quality, 1 to 100")
    parser.add_argument(
        "--uncompressed", action="store_true", help="write PPMs: more disk space, random crops need no decoding"
    )
    parser.add_argument(
        "--on_bad_image",
        choices=["stop", "skip"],
        default="stop",
        help="what to do with an image that cannot be decoded",
    )
    parser.add_argument("--num_workers", type=positive_int, help="threads; by default as many as there are cores")
    parser.set_defaults(run=run_prepare)


def run_prepare(options) -> str:
    from .data.prepare import prepare_images

    return prepare_images(**command_arguments(options))


def add_convert(commands):
    from .hub.formats import list_formats

    formats = {
        name: f"a {'folder' if entry.is_folder else 'file'} of {entry.text}"
        + ("; becomes a pipeline" if entry.library == "diffusers" else "")
        for name, entry in list_formats().items()
    }
    parser = commands.add_parser(
        "convert",
        help=CONVERT_HELP,
        description="Turns a checkpoint into a folder that AutoModel or DiffusionPipeline loads. Kinds:\n"
        + "\n".join(f"  {name:{max(map(len, formats))}} {text}" for name, text in formats.items()),
        epilog="examples:\n  hf-decayed convert --from vit-mae --checkpoint facebook/vit-mae-base --output decayed-vit-mae-base\n  "
        "hf-decayed convert --from released-mae --checkpoint checkpoint-799.pth --output decayed-mae-base "
        "--set shortcut_decay=0.6 --set norm_pix_loss=true",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--from", dest="kind", required=True, choices=formats, help="kind of checkpoint", metavar="KIND"
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="PATH", help="file or folder to read, or a repository, or a file in one"
    )
    parser.add_argument("--revision", help="revision of the repository")
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder to write")
    parser.add_argument(
        "--set",
        dest="fields",
        action="append",
        default=[],
        type=parse_field,
        metavar="FIELD=VALUE",
        help="config field that shapes cannot tell: heads, image_size, shortcut_decay, norm_pix_loss, ...",
    )
    parser.set_defaults(run=run_convert)


def run_convert(options) -> str:
    from .hub.conversion import convert

    return convert(options.kind, options.checkpoint, options.output, dict(options.fields), options.revision)


def add_evaluate(commands):
    # No character marks a flag here: `hf_decayed.evaluation` parses all that follows, `--help` included.
    parser = commands.add_parser(
        "evaluate", help="measure the features or the samples of a model", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_evaluate)


def run_evaluate(options) -> str:
    from .evaluation.__main__ import evaluate

    return evaluate(options.arguments)


def add_report(commands):
    from .data.arguments import add_data_arguments

    parser = commands.add_parser(
        "report",
        help="show what the shortcuts of an encoder do, by depth",
        description="Reports on the shortcuts of any vision encoder that AutoModel loads: alpha and running product, norm of "
        "every branch against its shortcut, effective rank, kNN accuracy, and what (cluster mIoU) and where (position) the "
        "patches hold, by depth. Writes report.json, report.md and report.png.",
        epilog="examples:\n  hf-decayed report facebook/vit-mae-base\n  hf-decayed report facebook/dinov2-base --shortcut_decay "
        "0.6 --keep_function\n  hf-decayed report outputs/mae --dataset_path photos --output reports/mae",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or repository of a vision encoder")
    parser.add_argument("--output", metavar="DIR", help="folder to write; by default outputs/report/NAME")
    parser.add_argument(
        "--shortcut_decay",
        type=shortcut_decay,
        metavar="ALPHA",
        help="decay a stock model first, with the same weights: a number above 0 or auto",
    )
    parser.add_argument(
        "--keep_function",
        action="store_true",
        help="with --shortcut_decay: scale weights so that the outputs stay the same",
    )
    parser.add_argument("--revision", help="revision of the repository; pin it when you trust its code")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    data = add_data_arguments(parser)
    data.add_argument(
        "--max_train_samples", type=positive_int, default=1000, help="size of the kNN bank (default: %(default)s)"
    )
    data.add_argument(
        "--max_eval_samples", type=positive_int, default=500, help="number of queries (default: %(default)s)"
    )
    data.add_argument(
        "--dense_images", type=positive_int, default=100, help="images for norms and patches (default: %(default)s)"
    )
    parser.add_argument(
        "--pooling",
        choices=["mean", "patch_mean", "cls"],
        default="mean",
        help="pooling of tokens for rank and kNN (default: %(default)s, for every model)",
    )
    parser.add_argument(
        "--num_clusters", type=positive_int, default=27, help="clusters of patches (default: %(default)s)"
    )
    parser.add_argument("--batch_size", type=positive_int, default=64)
    parser.add_argument("--seed", type=non_negative_int, default=0)
    parser.add_argument(
        "--cpu_threads", type=positive_int, help="threads; by default OMP_NUM_THREADS, else chosen by a short trial"
    )
    parser.add_argument(
        "--features_dir", default="outputs/features", metavar="DIR", help="cache of features (default: %(default)s)"
    )
    parser.set_defaults(run=run_report)


def run_report(options) -> str:
    from .data.arguments import data_arguments
    from .evaluation.features import Extraction
    from .evaluation.report import write_report

    settings = {name: getattr(options, name) for name in inspect.signature(write_report).parameters if name in options}
    extraction = Extraction(Path(options.features_dir), options.batch_size, options.num_workers, options.on_bad_image)
    return write_report(data=data_arguments(options), extraction=extraction, **settings)


def add_latents(commands):
    from .data.arguments import add_data_arguments

    parser = commands.add_parser(
        "latents",
        help="cache the latents of a nested diffusion model",
        description="Encodes images into the latents of all levels of a nested diffusion model: fits the SVDs, and writes the "
        "cache that training/nested.py with the same flags uses, so that levels can be trained in parallel on several "
        "machines. A command that was stopped continues when it is repeated.",
        epilog="examples:\n  hf-decayed latents facebook/dino-vitb16 --dataset_path photos --image_size 256 --vae "
        "stabilityai/sd-vae-ft-ema\n  accelerate launch --num_processes 8 -m hf_decayed.cli latents facebook/dino-vitb16 "
        "--dataset_path photos --image_size 256",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("encoder", metavar="ENCODER", help="folder or repository of an encoder, or random_projection")
    parser.add_argument(
        "--hierarchy",
        type=latent_shape,
        nargs="+",
        default=[(1, 256, 1), (2, 128, 1), (4, 64, 2), (8, 32, 2)],
        metavar="GRIDxCHANNELS[/PATCH]",
        help="latents above level 1, the highest first (default: the dissertation's, for 256 pixels)",
    )
    parser.add_argument(
        "--min_crop_size",
        type=positive_int,
        default=64,
        help="levels with smaller crops use the encoder's feature map instead",
    )
    parser.add_argument(
        "--svd_images", type=positive_int, default=50_000, help="number of images for fitting the SVDs"
    )
    parser.add_argument("--vae", help="folder or repository of an AutoencoderKL, for latents of level 1")
    data = add_data_arguments(parser)
    data.add_argument("--max_train_samples", type=positive_int)
    data.add_argument("--horizontal_flip", type=boolean, default=True, help="also encode mirror images")
    data.add_argument("--conditional", type=boolean, default=True, help="keep the labels")
    data.add_argument("--image_size", type=positive_int, default=32, help="height and width of the center crop")
    data.add_argument("--num_channels", type=positive_int, default=3, help="channels of the images, without a VAE")
    parser.add_argument(
        "--latents_dir", default="outputs/latents", metavar="DIR", help="cache of latents (default: %(default)s)"
    )
    parser.set_defaults(run=run_latents)


def run_latents(options) -> str:
    from .data.arguments import data_arguments
    from .data.nested_latents import precompute_latents
    from .errors import UserError

    if options.on_bad_image == "skip":
        raise UserError("--on_bad_image skip: the images of level 1 and the latents above must stay in step.")
    names = [name for name in inspect.signature(precompute_latents).parameters if name in options]
    return precompute_latents(source=data_arguments(options), **{name: getattr(options, name) for name in names})


def add_features(commands):
    parser = commands.add_parser(
        "features",
        help="write the features of a folder of images to a file",
        description="Writes one feature of every image, with its name and label, to a safetensors or parquet file.",
        epilog="examples:\n  hf-decayed features photos --model outputs/mae --output features.safetensors\n  hf-decayed features "
        "photos --model facebook/dinov2-base --feature last.cls --output features.parquet",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "images",
        metavar="FOLDER",
        help="folder of images, with or without class subfolders; or parquet, arrow, WebDataset tar files",
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder or repository of a vision encoder")
    parser.add_argument("--output", required=True, metavar="FILE", help="a name that ends in .safetensors or .parquet")
    parser.add_argument(
        "--feature",
        metavar="LAYER.POOLING",
        help="<layer>.<pooling>: a number or last, and cls, mean, patch_mean or pooler; by default last, with the "
        "model's own pooling",
    )
    parser.add_argument("--batch_size", type=positive_int, default=64)
    parser.add_argument(
        "--on_bad_image",
        choices=["stop", "skip"],
        default="stop",
        help="what to do with an image that cannot be decoded",
    )
    parser.add_argument(
        "--cpu_threads", type=positive_int, help="threads; by default OMP_NUM_THREADS, else chosen by a short trial"
    )
    parser.add_argument("--revision", help="revision of the repository; pin it when you trust its code")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.set_defaults(run=run_features)


def run_features(options) -> str:
    from .evaluation.feature_files import write_features

    return write_features(**command_arguments(options))


def add_sample(commands):
    parser = commands.add_parser(
        "sample",
        help="draw many images from a pipeline",
        description="Draws images from a pipeline into a folder: the same images for any number of processes. A command that "
        "was stopped continues when it is repeated.",
        epilog="examples:\n  hf-decayed sample outputs/uvit --num 36 --output samples\n  accelerate launch --num_processes 8 "
        "-m hf_decayed.cli sample user/model --num 50000 --format npz --output samples",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or repository of a pipeline")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--num", type=int, default=36, help="number of images")
    parser.add_argument("--classes", default="all", help="all in turn, none, or names and numbers separated by commas")
    parser.add_argument("--num_inference_steps", type=int, default=50)
    parser.add_argument("--guidance_scale", type=float, default=1.0, help="as in diffusers: 1 is none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=64, help="images at a time, per process")
    parser.add_argument("--vae", metavar="PATH", help="autoencoder for a latent pipeline that has none")
    parser.add_argument("--format", dest="file_format", choices=["png", "npz"], default="png")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", "auto"],
        default="float32",
        help="dtype of the weights; auto: bfloat16 if a short trial is faster with it; the difference from float32 "
        "is reported",
    )
    parser.add_argument("--revision", help="revision of the repository; pin it if its code runs")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the code of a pipeline that is not from this package"
    )
    parser.set_defaults(run=run_sample)


def run_sample(options) -> str:
    from .evaluation.sampling import sample

    return sample(**command_arguments(options))


def add_segment(commands):
    parser = commands.add_parser(
        "segment",
        help="divide images into regions by the attention of a frozen model",
        description="Divides images into regions without labels or training: spectral clustering of the attention of all "
        "layers of a vision encoder. Writes an overlay, a picture of the leading components and a mask of every image, and a "
        "grid over images and models. A command that was stopped continues when it is repeated.",
        epilog="examples:\n  hf-decayed segment photo.jpg --model facebook/dinov2-base --output regions\n  hf-decayed segment "
        "photos --model facebook/vit-mae-base outputs/mae --graph qk --output regions",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "images",
        metavar="IMAGE_OR_FOLDER",
        help="image, or folder of images at any depth; with --evaluate a folder of images and masks, or bundled",
    )
    parser.add_argument(
        "--model", dest="models", nargs="+", required=True, metavar="MODEL", help="folders or repositories of encoders"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--graph",
        choices=["vv", "qk", "features"],
        default="vv",
        help="vv: values (what, default); qk: queries and keys (where); features: those of the last layer",
    )
    parser.add_argument(
        "--n_clusters", type=positive_int, help="regions; by default 2 to 10, whichever has the best silhouette"
    )
    parser.add_argument(
        "--evaluate",
        type=positive_int,
        metavar="NUMBER",
        help="measure all graphs on this many held-out images with masks, instead of drawing pictures",
    )
    parser.add_argument("--n_components", type=positive_int, default=10, help="eigenvectors (default: 10)")
    parser.add_argument("--solver", choices=["eigh", "gradient", "nystrom"], default="eigh")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="layer numbers, negative ones from the last; by default all"
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, help="seed of k-means and of the gradient solver")
    parser.add_argument("--revision", help="revision of the repositories; pin it if their code runs")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with a model")
    parser.set_defaults(run=run_segment)


def run_segment(options) -> str:
    from .spectral.segment import segment

    return segment(**command_arguments(options))


def add_card(commands):
    parser = commands.add_parser(
        "card",
        help="write the card of a model or pipeline from its results",
        description="Writes README.md of a folder: what the model is, how to use it, how it was trained (results.json), what "
        "was measured (results/*.json, from `hf-decayed evaluate`), limits, licence, citation, and metadata for the Hub. "
        "What only you can say, write in about.md beside it.",
        epilog="examples:\n  hf-decayed evaluate outputs/mae --output outputs/mae/results/fashion_mnist.json\n  hf-decayed card "
        "outputs/mae --repo_id user/decayed-mae --license apache-2.0\n  hf-decayed card outputs/mae --stock",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="MODEL_DIR", help="folder of a model or a pipeline")
    parser.add_argument("--repo_id", metavar="USER/NAME", help="repository that the usage lines load from")
    parser.add_argument(
        "--license", dest="licence", help="licence of the weights, as the Hub names it, such as apache-2.0"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a card that was written by hand or by convert"
    )
    parser.add_argument(
        "--stock",
        action="store_true",
        help="first write, or rewrite, the folder `stock`: the same encoder or classifier as a class of "
        "transformers, which loads without trust_remote_code",
    )
    parser.set_defaults(run=run_card)


def run_card(options) -> str:
    from .hub.cards import write_card

    stock = ""
    if options.stock:
        from .hub.stock import renew_stock_folder

        difference = renew_stock_folder(options.folder)
        stock = f", and 'stock', which loads without any code of ours (largest difference {difference:.1e})"
    return f"written: {write_card(options.folder, options.repo_id, options.licence, options.overwrite)}{stock}"


def add_publish(commands):
    parser = commands.add_parser(
        "publish",
        help="push a model or pipeline to the Hub, after proving that it loads from there",
        description="Stages what a repository should hold, proves in a process without this package that it loads and gives "
        "the same outputs as the source, and pushes it in one commit. Refuses links, pickles, keys and tokens, paths "
        "of this machine, code that is not this package's, and cards with numbers that were not measured.",
        epilog="examples:\n  hf-decayed publish outputs/mae --repo_id user/decayed-mae --dry_run\n  hf-decayed publish "
        "outputs/uvit --repo_id user/decayed-uvit --private",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="folder of a model or a pipeline")
    parser.add_argument("--repo_id", required=True, metavar="USER/NAME")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to; created if there is none")
    parser.add_argument("--message", help="commit message")
    parser.add_argument("--dry_run", action="store_true", help="stage and prove, list every file, push nothing")
    parser.add_argument("--keep", metavar="DIR", help="copy the staged files to this new folder")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="prove and publish code that is not this package's: read it first",
    )
    parser.add_argument(
        "--stock",
        action="store_true",
        help="add the folder `stock`: the same encoder or classifier as a class of transformers, which loads without "
        "trust_remote_code",
    )
    parser.set_defaults(run=run_publish)


def run_publish(options) -> str:
    from .hub.publishing import publish

    return publish(**command_arguments(options))


def command_arguments(options) -> dict:
    """The flags of a command, as its function takes them."""
    return {name: value for name, value in vars(options).items() if name not in ("command", "command_words", "run")}


if __name__ == "__main__":
    sys.exit(main())
