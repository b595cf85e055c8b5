"""`hf-decayed`: thin commands over the functions of the package."""

import argparse
import sys

from huggingface_hub.errors import StrictDataclassError

from .command_line import OneLineParser, parse_field


ABOUT = """\
Decayed identity shortcuts for Hugging Face models: in every residual block x <- alpha * x + f(x), with alpha falling from 1
to `shortcut_decay` over the depth. These commands are for checkpoints; models are trained and judged by the scripts in
`training/` of the repository, and loaded by AutoModel and DiffusionPipeline."""
EXAMPLES = """\
from nothing to a repository on the Hub:
  accelerate launch training/mae.py
  python training/evaluate.py outputs/mae --output outputs/mae/results/fashion_mnist.json
  hf-decayed card outputs/mae --repo_id user/decayed-mae --license apache-2.0
  hf-decayed publish outputs/mae --repo_id user/decayed-mae --dry_run

`hf-decayed COMMAND --help` explains a command, with an example."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns 0, or 2 after one line on standard error."""
    parser = OneLineParser(
        prog="hf-decayed",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_convert(commands)
    add_evaluate(commands)
    add_sample(commands)
    add_card(commands)
    add_publish(commands)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        print(options.run(options))
    except Exception as error:
        # A config's own sentence is the cause; what wraps it names our validator, which is nobody's business.
        error = error.__cause__ if isinstance(error, StrictDataclassError) else error
        # Sentences of ours stand alone; of what a library found wrong with the files, its kind tells more than its text.
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        print(f"hf-decayed {options.command}: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def add_convert(commands):
    kinds = {
        "released-mae": "the authors' decayed MAE, one file",
        "fb-mae": "facebookresearch/mae, pretraining or fine-tuning, one file",
        "vit-mae": "transformers' ViTMAE, a folder",
        "decayed-mae": "a folder of ours at the plain preset, back to ViTMAE",
        "uvit": "baofff/U-ViT, one file; becomes a pipeline",
        "sit": "willisma/SiT, one file; becomes a pipeline",
        "released-sit": "the authors' decayed SiT, one file; becomes a pipeline",
    }
    parser = commands.add_parser(
        "convert",
        help="turn another checkpoint into ours, exactly",
        description="Turns another checkpoint into a folder that AutoModel or DiffusionPipeline loads. Kinds:\n"
        + "\n".join(f"  {kind:13} {text}" for kind, text in kinds.items()),
        epilog="example:\n  hf-decayed convert --from released-mae --checkpoint checkpoint-799.pth --output decayed-mae-base "
        "--set shortcut_decay=0.6 --set norm_pix_loss=true",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--from", dest="kind", required=True, choices=kinds, help="kind of checkpoint", metavar="KIND")
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="file or folder to read")
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

    return convert(options.kind, options.checkpoint, options.output, dict(options.fields))


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


def add_sample(commands):
    parser = commands.add_parser(
        "sample",
        help="draw many images from a pipeline",
        description="Draws images from a pipeline into a folder: the same ones whatever the number of processes, and a "
        "command that was stopped goes on when it is given again.",
        epilog="examples:\n  hf-decayed sample outputs/uvit --num 36 --output samples\n  accelerate launch --num_processes 8 "
        "-m hf_decayed.cli sample user/model --num 50000 --format npz --output samples",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or repository of a pipeline")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--num", type=int, default=36, help="how many")
    parser.add_argument("--classes", default="all", help="all in turn, none, or names and numbers with commas between")
    parser.add_argument("--num_inference_steps", type=int, default=50)
    parser.add_argument("--guidance_scale", type=float, default=1.0, help="as diffusers counts it: 1 is none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=64, help="images at a time, for each process")
    parser.add_argument("--vae", metavar="PATH", help="autoencoder for a pipeline of latents that has none")
    parser.add_argument("--format", dest="file_format", choices=["png", "npz"], default="png")
    parser.add_argument("--revision", help="of the repository; pin it where its code runs")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run code that comes with a pipeline not ours"
    )
    parser.set_defaults(run=run_sample)


def run_sample(options) -> str:
    from .evaluation.sampling import sample

    return sample(**arguments_of(options))


def add_card(commands):
    parser = commands.add_parser(
        "card",
        help="write the card of a model or pipeline from its results",
        description="Writes README.md of a folder: what it is, how to use it, how it was trained (results.json), what was "
        "measured (results/*.json, from training/evaluate.py), limits, licence, citation, and metadata for the Hub. What "
        "only you can say, write in about.md beside it.",
        epilog="example:\n  python training/evaluate.py outputs/mae --output outputs/mae/results/fashion_mnist.json\n  "
        "hf-decayed card outputs/mae --repo_id user/decayed-mae --license apache-2.0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="MODEL_DIR", help="folder of a model or a pipeline")
    parser.add_argument("--repo_id", metavar="USER/NAME", help="for the lines that show how to use it")
    parser.add_argument("--license", dest="licence", help="of the weights, as the Hub names it, such as apache-2.0")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a card that was written by hand or by convert"
    )
    parser.set_defaults(run=run_card)


def run_card(options) -> str:
    from .hub.cards import write_card

    return f"written: {write_card(options.folder, options.repo_id, options.licence, options.overwrite)}"


def add_publish(commands):
    parser = commands.add_parser(
        "publish",
        help="push a model or pipeline to the Hub, after proving that it loads from there",
        description="Stages what a repository should hold, proves in a process without this package that it loads and gives "
        "what the source gives, and pushes it in one commit. Refuses pickles, keys and tokens, paths of this machine, and "
        "cards whose numbers nobody measured.",
        epilog="examples:\n  hf-decayed publish outputs/mae --repo_id user/decayed-mae --dry_run\n  hf-decayed publish "
        "outputs/uvit --repo_id user/decayed-uvit --private",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="folder of a model or a pipeline")
    parser.add_argument("--repo_id", required=True, metavar="USER/NAME")
    parser.add_argument("--private", action="store_true", help="a new repository is nobody else's to see")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to; made if there is none")
    parser.add_argument("--message", help="of the commit")
    parser.add_argument("--dry_run", action="store_true", help="stage and prove, list every file, push nothing")
    parser.add_argument("--keep", metavar="DIR", help="keep what was staged in this new folder")
    parser.set_defaults(run=run_publish)


def run_publish(options) -> str:
    from .hub.publishing import publish

    return publish(**arguments_of(options))


def arguments_of(options) -> dict:
    """What a command's function takes."""
    return {name: value for name, value in vars(options).items() if name not in ("command", "run")}


if __name__ == "__main__":
    sys.exit(main())
