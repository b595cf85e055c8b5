"""Tables of a sweep, from its records: the lines of `results.jsonl`, which sweep.py writes.

A record holds the `evaluation` of an encoder's features, the `samples` and `blocks` of a pipeline, or, in the `results` of a
classifier, its `accuracy`.
"""

from collections import defaultdict

import numpy as np


Groups = dict[str, list[dict]]  # records by the name of the run, one for each seed
PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}  # by accelerate's names
MAX_RUNS_ACROSS = 4  # a table of as few runs has a column for each, and can be read from top to bottom
# Metrics of the mean of the tokens that a grid may ask for, with the titles of their columns.
EXTRA_METRICS = {"knn_whitened_accuracy": "kNN, whitened (%)", "invariance_accuracy": "invariance (%)"}
# Changes that the decay should make at small scale: title, where the metric is (see `measured_value`), metric, unit of the change,
# the goal in words, and the goal. The sizes, 5 points and 1.5 times, are ours (docs/small_scale.md).
ENCODER_GOALS = [
    ("kNN, class token", "last.cls", "knn_accuracy", "points", "+5 or more", lambda change: change >= 5),
    ("kNN, mean", "last.mean", "knn_accuracy", "points", "above 0", lambda change: change > 0),
    ("kNN, whitened", "last.mean", "knn_whitened_accuracy", "points", "above 0", lambda change: change > 0),
    ("linear, class token", "last.cls", "linear_accuracy", "points", "above 0", lambda change: change > 0),
    ("linear, mean", "last.mean", "linear_accuracy", "points", "above 0", lambda change: change > 0),
    ("segmentation", "results", "cluster_miou", "times", "1.5 or more", lambda change: change >= 1.5),
    ("rank, mean", "last.mean", "effective_rank", "times", "below 1", lambda change: change < 1),
    ("position", "results", "position_accuracy", "points", "below 0", lambda change: change < 0),
]
PIPELINE_GOALS = [
    ("Frechet distance", "samples", "frechet", "times", "below 1", lambda change: change < 1),
    ("linear, best cell", "best cell", "linear_accuracy", "points", "above 0", lambda change: change > 0),
    ("linear, all cells", "all cells", "linear_accuracy", "points", "above 0", lambda change: change > 0),
    ("kNN, best cell", "best cell", "knn_accuracy", "points", "above 0", lambda change: change > 0),
    ("kNN, all cells", "all cells", "knn_accuracy", "points", "above 0", lambda change: change > 0),
]


def format_tables(records: list[dict]) -> str:
    """One Markdown table for each kind of record."""
    tables = {
        feature_table: encoders(records),
        diffusion_table: pipelines(records),
        accuracy_table: classifiers(records),
    }
    return "\n".join(table(group_by_name(selected)) for table, selected in tables.items() if selected)


def seed_table(records: list[dict]) -> str:
    """Markdown table of encoders by run and seed: loss of the last steps, kNN of the mean of the tokens and of the class token."""
    seeds = sorted({record["seed"] for record in records})
    rows = []
    for name, group in group_by_name(records).items():
        cells = dict.fromkeys(seeds, "")
        for record in group:
            accuracies = [100 * record["evaluation"][f"last.{token}"]["knn_accuracy"] for token in ("mean", "cls")]
            cells[record["seed"]] = "{:.3f}: {:.1f}, {:.1f}".format(record["results"]["loss"], *accuracies)
        rows.append([name, *cells.values()])
    return "\n".join(
        markdown_table(["loss: kNN, mean and class token (%)", *(f"seed {seed}" for seed in seeds)], rows)
    )


def effect_table(records: list[dict], name: str, baseline: str) -> str:
    """Markdown table of what changes from the run `baseline` to the run `name`, seed by seed, and in how many seeds a goal is met.

    Metrics that were not measured are left out. Empty as long as the two have no seed in common.
    """
    groups = group_by_name(records)
    own, others = ({record["seed"]: record for record in groups.get(run, [])} for run in (name, baseline))
    seeds = sorted(own.keys() & others.keys())
    if not seeds:
        return ""
    rows = []
    for title, place, metric, unit, goal, is_met in PIPELINE_GOALS if pipelines([own[seeds[0]]]) else ENCODER_GOALS:
        pairs = [[measured_value(records[seed], place, metric) for records in (own, others)] for seed in seeds]
        if any(None in pair for pair in pairs):
            continue
        changes = [100 * (value - other) if unit == "points" else value / other for value, other in pairs]
        number = sum(is_met(change) for change in changes)
        style = "+.1f" if unit == "points" else ".2f"
        cells = [f"{change:{style}}" for change in (*changes, np.mean(changes))]
        rows.append([f"{title} ({unit})", *cells, goal, f"{number} of {len(seeds)}"])
    columns = [f"{name}, against {baseline}", *(f"seed {seed}" for seed in seeds), "mean", "goal", "met"]
    return "\n".join(markdown_table(columns, rows)) if rows else ""


def measured_value(record: dict, place: str, metric: str) -> float | None:
    """A metric of a record: of its `results`, of a feature of an encoder, or of a pipeline's `samples` or blocks.

    Blocks have a `best cell`, and the mean of `all cells`, which are pairs of a block and a noise level. Metrics of samples are
    named after their features, so that the beginning of the name is enough.
    """
    if place == "samples":
        samples = next(iter(record["samples"]["rows"].values()))
        names = [name for name in samples if name.startswith(metric) and not name.endswith("_spread")]
        return samples[names[0]] if names else None
    if place == "all cells":
        cells = record["blocks"]["grid"]["cells"].get(metric)
        return cells and float(np.mean(cells))
    if place == "best cell":
        cell = record["blocks"]["best"].get(metric)
        return cell and record["blocks"]["rows"][cell][metric]
    return (record["results"] if place == "results" else record.get("evaluation", {}).get(place, {})).get(metric)


def encoders(records: list[dict]) -> list[dict]:
    return [record for record in records if "evaluation" in record]


def pipelines(records: list[dict]) -> list[dict]:
    return [record for record in records if "samples" in record]


def classifiers(records: list[dict]) -> list[dict]:
    return [record for record in records if "accuracy" in record["results"]]


def group_by_name(records: list[dict]) -> Groups:
    groups = defaultdict(list)
    for record in records:
        groups[record["name"]].append(record)
    return dict(groups)


def has_skip_ablation(record: dict) -> bool:
    """Whether the model has encoder-decoder skips, and their ablation was measured."""
    return bool(record["results"].get("skip_use"))


def markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def transpose(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Columns become rows; those without a value are left out."""
    first, *others = zip(columns, *rows)
    return ["", *first[1:]], [list(cells) for cells in others if any(cells[1:])]


def mean_and_range(values: list[float | None], percent: bool = False) -> str:
    """The mean, with the smallest and the largest value if there are several; empty if one was not measured."""
    if not values or None in values:
        return ""
    scale, digits = (100, 1) if percent else (1, 3)
    text = f"{scale * np.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({scale * min(values):.{digits}f}-{scale * max(values):.{digits}f})"


def feature_table(groups: Groups) -> str:
    """Training, features and skips of encoders."""
    columns = ["run", "seeds", "steps", "loss", "kNN, mean (%)", "kNN, class token (%)", "kNN, best layer (%)"]
    columns += ["linear, mean (%)", "linear, class token (%)", "rank, mean", "rank, class token"]
    first = next(iter(groups.values()))[0]
    has_patches = "position_accuracy" in first["results"]  # records of earlier versions have none
    columns += ["segmentation, mIoU (%)", "position (%)"] if has_patches else []
    extra_metrics = [metric for metric in EXTRA_METRICS if metric in first["evaluation"]["last.mean"]]
    columns += [EXTRA_METRICS[metric] for metric in extra_metrics]
    columns += ["norm", "deepest skip", "TFLOP"]
    rows = [feature_cells(name, records, has_patches, extra_metrics) for name, records in groups.items()]
    pixels = first["evaluation"].get("pixels", {})
    knn, linear, rank = (pixels.get(metric) for metric in ("knn_accuracy", "linear_accuracy", "effective_rank"))
    cells = ["raw pixels", "", "", "", mean_and_range([knn], percent=True), "", ""]
    cells += [mean_and_range([linear], percent=True), "", mean_and_range([rank]), ""]
    cells += patch_cells([first], "_pixels") if has_patches else []
    cells += [mean_and_range([pixels.get(metric)], percent=True) for metric in extra_metrics]
    rows.append(cells + [""] * (len(columns) - len(cells)))
    if len(groups) <= MAX_RUNS_ACROSS:
        columns, rows = transpose(columns, rows)
    lines = [*markdown_table(columns, rows), ""]
    untrained = {
        name: [record["results"]["knn_accuracy_untrained"] for record in records] for name, records in groups.items()
    }
    if not any(None in values for values in untrained.values()):
        texts = [f"{name} {mean_and_range(values, percent=True)} %" for name, values in untrained.items()]
        if len(groups) > MAX_RUNS_ACROSS:
            accuracies = [100 * value for values in untrained.values() for value in values]
            texts = [f"{min(accuracies):.1f} to {max(accuracies):.1f} %, by network and seed"]
        lines.append(f"Untrained, kNN on the images that mae.py evaluates on: {'; '.join(texts)}.")
    protocol, dataset = first["protocol"], first["dataset"]
    lines.append(
        f"{dataset['name']}: {dataset['number']['train']} training and {dataset['number']['test']} held-out images. kNN: "
        f"k = {protocol['knn']['k']}, cosine, temperature {protocol['knn']['temperature']}; linear: {protocol['linear']['name']}. "
        "Features are of the last layer, the mean of all tokens or the class token; norm: of its tokens; deepest skip: rise of "
        "the loss when the decoder gets its mean instead, where it was measured. Means over seeds, with the smallest and largest."
        + (
            " Segmentation: 27 clusters of patches, Hungarian match; position: of a patch, ridge probe."
            if has_patches
            else ""
        )
        + (
            " Whitened kNN and invariance (the nearest of all other views is of the same image): mean of the tokens."
            if extra_metrics
            else ""
        )
        + f" {training_precision(groups)}"
    )
    return "\n".join(lines) + "\n"


def training_precision(groups: Groups) -> str:
    """In which precision the runs were trained: that of most, and those that differ."""
    runs = defaultdict(list)
    for name, records in groups.items():
        for record in records:
            precision = record["results"]["precision"]
            runs[PRECISIONS.get(precision, precision)].append(f"{name} (seed {record['seed']})")
    first, *others = sorted(runs, key=lambda precision: -len(runs[precision]))
    return f"Trained in {first}" + "".join(f"; in {other}: {', '.join(runs[other])}" for other in others) + "."


def feature_cells(name: str, records: list[dict], has_patches: bool, extra_metrics: list[str]) -> list[str]:
    evaluations = [record["evaluation"] for record in records]

    def measured(metric, percent):
        return [
            mean_and_range([evaluation[feature].get(metric) for evaluation in evaluations], percent)
            for feature in ("last.mean", "last.cls")
        ]

    best_layers = []
    for evaluation in evaluations:
        accuracies = [evaluation[layer].get("knn_accuracy") for layer in layer_features(evaluation)]
        best_layers.append(None if None in accuracies else max(accuracies))
    norms = [[point["encoder_norm"] for point in record["curve"] if "encoder_norm" in point] for record in records]
    ablations = [record["results"]["skip_use"] for record in records if has_skip_ablation(record)]
    # Adding zero turns -0.0 into 0.0.
    deepest = [round(next(iter(increases.values())), 3) + 0.0 for increases in ablations]
    return [
        name,
        str(len(records)),
        str(records[0]["steps"]),
        mean_and_range([record["results"]["loss"] for record in records]),
        *measured("knn_accuracy", percent=True),
        mean_and_range(best_layers, percent=True),
        *measured("linear_accuracy", percent=True),
        *measured("effective_rank", percent=False),
        *(patch_cells(records) if has_patches else []),
        *(
            mean_and_range([evaluation["last.mean"].get(metric) for evaluation in evaluations], percent=True)
            for metric in extra_metrics
        ),
        mean_and_range([values[-1] for values in norms]),
        mean_and_range(deepest),
        f"{records[0]['training_flops'] / 1e12:.3g}",
    ]


def patch_cells(records: list[dict], suffix: str = "") -> list[str]:
    """Segmentation and position of patches, as the training script measured them; `_pixels` are those of raw pixels."""
    return [
        mean_and_range([record["results"].get(name + suffix) for record in records], percent=True)
        for name in ("cluster_miou", "position_accuracy")
    ]


def layer_features(evaluation: dict) -> list[str]:
    """Names such as `6.mean`, without those of the last layer."""
    return [name for name in evaluation if name[0].isdigit()]


def accuracy_table(groups: Groups) -> str:
    """Accuracy and rank of classifiers."""
    rows = []
    for records in groups.values():
        results = [record["results"] for record in records]
        cells = [str(results[0]["shortcut_decay"]), str(results[0]["num_blocks"]), str(len(records))]
        cells.append(mean_and_range([result["accuracy"] for result in results], percent=True))
        cells += [mean_and_range([result[name] for result in results]) for name in ("effective_rank", "loss")]
        rows.append(cells)
    first = next(iter(groups.values()))[0]["results"]
    lines = [
        *markdown_table(["shortcut_decay", "blocks", "seeds", "accuracy (%)", "effective rank", "loss"], rows),
        "",
        f"{first['dataset']['name']}: {first['dataset']['number']} training images, {first['steps']} steps, "
        f"{first['images_seen']} images seen. Rank: entropy, of the last stage's features averaged over places, on "
        f"held-out images. Means over seeds, with the smallest and largest. {training_precision(groups)}",
    ]
    return "\n".join(lines) + "\n"


def diffusion_table(groups: Groups) -> str:
    """Metrics of a pipeline's samples, with their range over seeds and their spread, and the best block and noise level."""
    first = next(iter(groups.values()))[0]
    label, *baselines = first["samples"]["rows"]
    metrics = [name for name in first["samples"]["rows"][label] if not name.endswith("_spread")]
    columns = ["run", "seeds", "loss", *(name.replace("_", " ") for name in metrics)]
    columns += ["linear, best cell (%)", "at", "kNN, best cell (%)", "at"]
    rows = []
    for name, records in groups.items():
        cells = [name, str(len(records)), mean_and_range([record["results"]["loss"] for record in records])]
        cells += sample_cells([next(iter(record["samples"]["rows"].values())) for record in records], metrics)
        for metric in ("linear_accuracy", "knn_accuracy"):
            values = [measured_value(record, "best cell", metric) for record in records]
            best = filter(None, (record["blocks"]["best"].get(metric) for record in records))
            cells += [mean_and_range(values, percent=True), ", ".join(dict.fromkeys(best))]
        rows.append(cells)
    lines = markdown_table(columns, rows)
    for baseline in baselines:
        cells = sample_cells([first["samples"]["rows"][baseline]], metrics)
        lines.append(f"| {baseline} | | | {' | '.join(cells)} | | | | |")
    lines += ["", f"{diffusion_protocol(first, label)} {training_precision(groups)}"]
    return "\n".join(lines) + "\n"


def sample_cells(rows: list[dict], metrics: list[str]) -> list[str]:
    """The mean of each metric over seeds, with the smallest and the largest value, and the mean of its spreads."""
    cells = []
    for metric in metrics:
        values = [row[metric] for row in rows]
        text = f"{np.mean(values):#.3g}"
        if len(values) > 1:
            text += f" ({min(values):#.3g} to {max(values):#.3g})"  # "to", because a kernel distance may be negative
        if f"{metric}_spread" in rows[0]:
            text += f" +- {np.mean([row[f'{metric}_spread'] for row in rows]):.2g}"
        cells.append(text)
    return cells


def diffusion_protocol(record: dict, label: str) -> str:
    results, blocks, protocol = record["results"], record["blocks"], record["samples"]["protocol"]
    number, grid, pixels = blocks["dataset"]["number"], blocks["grid"], blocks["rows"].get("pixels", {})
    accuracies = [
        f"{name} {100 * pixels[metric]:.1f} %"
        for name, metric in (("linear", "linear_accuracy"), ("kNN", "knn_accuracy"))
        if metric in pixels
    ]
    return (
        f"{results['dataset']['name']}: {results['steps']} steps, {results['images_seen']} images seen. {label}, against "
        f"{protocol['reference']}; features: {protocol['features']}; +-: {protocol['frechet'].removeprefix('spread: ')}, and "
        f"over subsets for the kernel distance. Blocks: {number['train']} training and {number['test']} held-out images, ridge "
        f"and 20 neighbours, the best cell of {len(grid['blocks'])} blocks by {len(grid['noise_levels'])} noise levels, chosen "
        f"on the held-out images. Raw pixels: {', '.join(accuracies)}."
    )
