"""Plots and picture grids: reconstructions, samples, curves over training, heat maps, decay schedules."""

import math
import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .errors import UserError
from .models.shortcut_decay import branch_depths, effective_decay, shortcut_factors, suggest_shortcut_decay


SMOOTHING = 20  # points that are averaged into one point of a smoothed curve
TITLE_WIDTH, TITLE_HEIGHT, TITLE_SIZE = 76, 18, 12  # of the columns of a grid, in pixels


def require_matplotlib():
    """`pyplot`, drawing to files. Only the extra `training` has it, so it is imported when something is drawn."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("Plots need matplotlib: pip install 'hf_decayed[training]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def reconstructions(model, pixel_values: torch.Tensor, noise: torch.Tensor, mean: list[float], std: list[float]):
    """Original, masked and reconstructed images in [0, 1], `(number, height, width, channels)` each.

    Masked patches have a colour that is far from those of the images, so the masked images of a grey model have three channels.
    """
    reconstructed, removed = model.reconstruct(pixel_values, noise=noise)
    mean_value, scale = (torch.tensor(values, device=pixel_values.device).view(1, -1, 1, 1) for values in (mean, std))
    images = [(image * scale + mean_value).clamp(0, 1) for image in (pixel_values, reconstructed)]
    original, reconstructed = (image.permute(0, 2, 3, 1).float().cpu().numpy() for image in images)
    hidden = removed.permute(0, 2, 3, 1).cpu().numpy()
    if original.shape[-1] not in (1, 3):
        return original, np.where(hidden, 0.5, original), reconstructed
    masked = np.where(hidden, distant_colour(original), np.broadcast_to(original, (*original.shape[:3], 3)))
    return original, masked, reconstructed


def distant_colour(images: np.ndarray) -> np.ndarray:
    """Of a few muted colours, the one whose nearest pixel in the images `(..., 1 or 3)` is the farthest."""
    colours = np.array([[0.25, 0.4, 0.75], [0.8, 0.45, 0.3], [0.5, 0.5, 0.5], [0.75, 0.35, 0.7], [0.3, 0.65, 0.5]])
    pixels = np.broadcast_to(images, (*images.shape[:-1], 3)).reshape(-1, 3)[::7]
    distances = [np.linalg.norm(pixels - colour, axis=1).min() for colour in colours]
    return colours[int(np.argmax(distances))]


def save_reconstructions(path: Path, original, masked, reconstructed, normalised: bool) -> None:
    """One column per image: original, what the encoder saw, reconstruction."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(3, len(original), figsize=(1.1 * len(original), 3.9), squeeze=False)
    for row, images in zip(axes, (original, masked, reconstructed)):
        for axis, image in zip(row, images):
            axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    for row, label in zip(axes, ("original", "visible", "reconstruction")):
        row[0].set_ylabel(label)
    note = "masked patches are predicted up to the mean and deviation of the true patch" if normalised else ""
    figure.supxlabel(note, fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def denormalize(pixel_values: torch.Tensor, processor) -> torch.Tensor:
    """Images `(number, height, width, channels)` in [0, 1] from the output of an image processor."""
    mean, std = (
        torch.tensor(list(values)).view(1, -1, 1, 1) for values in (processor.image_mean, processor.image_std)
    )
    return (pixel_values.float().cpu() * std + mean).clamp(0, 1).permute(0, 2, 3, 1)


def save_patch_colours(path: Path, images: np.ndarray, rows: dict[str, np.ndarray]) -> None:
    """One column per image: the image, and below it patches as colours, one row per label.

    Args:
        images (`np.ndarray` of shape `(number, height, width, channels)`): In [0, 1].
        rows (`dict[str, np.ndarray]`): Colours `(number, height, width, 3)` in [0, 1] of every patch.
    """
    pyplot = require_matplotlib()
    rows = {"image": images, **rows}
    figure, axes = pyplot.subplots(
        len(rows), len(images), figsize=(1.1 * len(images), 1.25 * len(rows)), squeeze=False
    )
    for axis_row, (label, pictures) in zip(axes, rows.items()):
        for axis, picture in zip(axis_row, pictures):
            axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        axis_row[0].set_ylabel(textwrap.fill(label, 14), fontsize=8)  # the height of a row
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def save_grid(path: Path, images, titles: list[str] | None = None) -> None:
    """Images `(number, height, width, channels)` in [0, 1] as a grid.

    Args:
        titles (`list[str]`, *optional*): Titles of the columns, such as class names. Without them the grid is about
            square.
    """
    columns = len(titles) if titles else math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    number, height, width, channels = images.shape
    grid = np.ones((rows * (height + 2), columns * (width + 2), channels), dtype=np.float32)
    for index, image in enumerate(images):
        top, left = index // columns * (height + 2) + 1, index % columns * (width + 2) + 1
        grid[top : top + height, left : left + width] = image
    pixels = Image.fromarray((255 * grid.clip(0, 1)).round().astype(np.uint8).squeeze())
    # Small images are enlarged without smoothing; a title needs some width.
    enlarged = max(1, 640 // pixels.width, math.ceil(TITLE_WIDTH / (width + 2)) if titles else 1)
    pixels = pixels.resize((pixels.width * enlarged, pixels.height * enlarged), Image.Resampling.NEAREST)
    if titles:
        pixels = add_titles(pixels, titles)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels.save(path)


def add_titles(grid: Image.Image, titles: list[str]) -> Image.Image:
    """The grid with a title above each of its columns."""
    titled = Image.new(grid.mode, (grid.width, grid.height + TITLE_HEIGHT), "white")
    titled.paste(grid, (0, TITLE_HEIGHT))
    draw, font, width = ImageDraw.Draw(titled), ImageFont.load_default(TITLE_SIZE), grid.width / len(titles)
    for column, title in enumerate(titles):
        while draw.textlength(title, font) > width - 4 and len(title) > 1:
            title = title.removesuffix("...")[:-1] + "..." if len(title) > 4 else title[:-1]
        draw.text(((column + 0.5) * width, TITLE_HEIGHT / 2), title, fill="black", font=font, anchor="mm")
    return titled


def save_curves(path: Path, records: list[dict]) -> None:
    """Loss, rank, norm, accuracy and skip ablation over training; metrics that were not measured are left out."""
    pyplot = require_matplotlib()
    from matplotlib.ticker import EngFormatter, MaxNLocator

    names = {
        "loss": "training loss",
        "encoder_norm": "norm of the encoder's tokens",
        "effective_rank": "effective rank (entropy)",
        "knn_accuracy": "kNN accuracy (%)",
        "accuracy": "accuracy on held-out images (%)",
    }
    names |= {name: distance_title(name) for record in records for name in record if name.startswith("frechet_")}
    series = {
        name: [(record["step"], record[name]) for record in records if record.get(name) is not None] for name in names
    }
    shown = [name for name in names if series[name]]
    skips = dict.fromkeys(name for record in records for name in record if name.startswith("skip_use_"))
    panels = len(shown) + bool(skips)
    columns = min(3, panels)
    rows = math.ceil(panels / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis, name in zip(axes.flat, shown):
        steps, values = zip(*series[name])
        values = np.asarray(values) * (100 if "%" in names[name] else 1)
        many = len(steps) >= 4 * SMOOTHING
        axis.plot(steps, values, marker=None if len(steps) >= 20 else "o", markersize=3, alpha=0.3 if many else 1)
        if many:
            smooth = np.convolve(values, np.full(SMOOTHING, 1 / SMOOTHING), "valid")
            axis.plot(steps[SMOOTHING // 2 :][: len(smooth)], smooth, color="C0")
        if name == "loss" and many:  # the first steps would hide all that follows
            settled = values[len(values) // 20 :]
            margin = 0.05 * (settled.max() - settled.min())
            axis.set_ylim(settled.min() - margin, settled.max() + margin)
        axis.set_title(names[name])
    if skips:
        axis = axes.flat[len(shown)]
        for number, name in enumerate(skips):
            points = [(record["step"], record[name]) for record in records if name in record]
            shade = pyplot.get_cmap("viridis")(number / max(1, len(skips) - 1))
            axis.plot(*zip(*points), marker="o", markersize=3, color=shade, label=name.split("_")[-1])
        axis.set_title("rise of the loss without a skip")
        axis.legend(title="from layer", fontsize=7, title_fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for axis in axes.flat[:panels]:
        axis.set_xlabel("step")
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def distance_title(name: str) -> str:
    """`frechet_pixels_1000_guidance_2` in words."""
    words = name.split("_")
    title = f"Frechet distance, {words[1]}, {words[2]} samples" if len(words) > 2 else name.replace("_", " ")
    return title + (f",\n{' '.join(words[3:])}" if len(words) > 3 else "")


def save_heat_maps(
    path: Path, blocks: list[str], noise_levels: list[float], cells: dict[str, list], label: str = "noise level"
) -> None:
    """One heat map of blocks by noise levels for each metric; the best accuracy has a frame."""
    pyplot = require_matplotlib()
    size = (max(4.5, 1.6 + 0.62 * len(noise_levels)), 1.2 + 0.3 * len(blocks))
    figure, axes = pyplot.subplots(1, len(cells), figsize=(size[0] * len(cells), size[1]), squeeze=False)
    for axis, (name, rows) in zip(axes[0], cells.items()):
        is_share = name.endswith("accuracy") or "miou" in name
        values = np.asarray(rows) * (100 if is_share else 1)
        draw_heat_map(axis, values, noise_levels, values.min(), values.max())
        if is_share and not name.startswith("position"):
            row, column = np.unravel_index(values.argmax(), values.shape)
            axis.add_patch(pyplot.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
        unit = " (%)" if is_share else ""
        axis.set(title=name.replace("_", " ") + unit, xlabel=label)
        axis.set_yticks(range(len(blocks)), blocks, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def save_what_and_where(path: Path, models: dict[str, dict[str, dict[str, float]]]) -> None:
    """How much of "what" and of "where" the patches of every layer hold, one curve per model.

    Args:
        models (`dict`): Rows of metrics by name of the feature, by name of the model; rows of `<layer>.patches` are drawn.
    """
    pyplot = require_matplotlib()
    panels = {
        "cluster_miou": "what: cluster mIoU, Hungarian (%)",
        "patch_accuracy": "what: class of a patch, linear probe (%)",
        "position_accuracy": "where: position of a patch, linear probe (%)",
    }
    layers = {
        label: {int(name.removesuffix(".patches")): row for name, row in rows.items() if is_patch_layer(name)}
        for label, rows in models.items()
    }
    shown = [metric for metric in panels if any(metric in row for rows in layers.values() for row in rows.values())]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.9 * len(shown), 3.2), squeeze=False)
    for axis, metric in zip(axes[0], shown):
        for label, rows in layers.items():
            depths = [depth for depth in sorted(rows) if metric in rows[depth]]
            values = np.array([100 * rows[depth][metric] for depth in depths])
            (line,) = axis.plot(depths, values, marker=".", label=label)
            spread = np.array([100 * rows[depth].get(f"{metric}_spread", 0.0) for depth in depths])
            axis.fill_between(depths, values - spread, values + spread, color=line.get_color(), alpha=0.2)
        axis.set(title=panels[metric], xlabel="layer (0: embedding)")
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    if len(models) > 1:
        axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def save_shortcut_report(path: Path, report: dict) -> None:
    """Alphas, norms, rank, kNN, what and where over depth, a panel each; what was not measured is left out.

    Args:
        report (`dict`): From `evaluation.report.report_encoder`, with the name of the `model`.
    """
    pyplot = require_matplotlib()
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    additions, pixels = report["additions"], report["rows"].get("pixels", {})
    layers = {int(name): row for name, row in report["rows"].items() if name.isdecimal()}
    last_layer, pooled = max(layers), {"cls": "class token"}.get(report["pooling"], "mean over tokens")

    unit = report.get("depth_unit", "layer")

    def label_log_scale(axis):
        low, high = axis.get_ylim()
        subdivisions = (
            (1, 2, 5) if high < 1e4 * low else (1,)
        )  # more would overlap, and matplotlib would leave all out
        axis.yaxis.set_major_locator(LogLocator(subs=subdivisions, numticks=8))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())

    def draw_weights(axis):
        per_layer = len(additions) / additions[-1]["layer"]
        depths = [(number + 1) / per_layer for number in range(len(additions))]
        for name, label in (("alpha", "alpha of each addition"), ("running_product", "running product")):
            axis.plot(depths, [row[name] for row in additions], marker=".", label=label)
        products = [row["running_product"] for row in additions]
        if 0 < min(products) < 0.5:
            axis.set_yscale("log")
        else:
            axis.set_ylim(min(0, *products), 1.1 * max(1, *products))
        axis.set(title="weight of the shortcut", xlabel="layer")

    def draw_by_kind(axis, name, title):
        for kind in dict.fromkeys(row["branch"] for row in additions):
            points = [(row["layer"], row[name]) for row in additions if row["branch"] == kind and row[name]]
            if points:  # a branch of zeros has no logarithm
                axis.plot(*zip(*points), marker=".", label="MLP" if kind == "mlp" else kind)
        axis.set(title=title, xlabel="layer", yscale="log")

    def draw_ratios(axis):
        draw_by_kind(axis, "ratio", "branch / (alpha x shortcut), by norm")
        axis.axhline(1, color="grey", linewidth=0.8)

    def draw_norms(axis):
        draw_by_kind(axis, "branch_norm", "norm of a token")
        before = {row["layer"]: row["stream_norm"] for row in reversed(additions)}
        axis.plot(list(before), list(before.values()), marker=".", color="black", label="shortcut, before the layer")

    def draw_depths(axis, title, names):
        factor = 100 if "%" in title else 1
        for name, label in names.items():
            depths = [depth for depth, row in layers.items() if name in row]
            if not depths:
                continue
            values = np.array([factor * layers[depth][name] for depth in depths])
            (line,) = axis.plot(depths, values, marker=".", label=label)
            spread = np.array([factor * layers[depth].get(f"{name}_spread", 0.0) for depth in depths])
            axis.fill_between(depths, values - spread, values + spread, color=line.get_color(), alpha=0.2)
            if name in pixels:
                axis.axhline(factor * pixels[name], color=line.get_color(), linestyle=":", linewidth=1)
        if pixels:
            axis.plot([], [], color="grey", linestyle=":", label="raw pixels")
        axis.set(title=title, xlabel=f"{unit} (0: embedding)", ylim=(0, 1.05 * axis.get_ylim()[1]))

    depth_panels = {
        "effective rank (entropy)": {"effective_rank": pooled},
        "kNN accuracy (%)": {"knn_accuracy": pooled, "knn_whitened_accuracy": "the same, whitened"},
        "what and where, of patches (%)": {
            "cluster_miou": "what: cluster mIoU",
            "patch_accuracy": "what: class, probe",
            "position_accuracy": "where: position, probe",
        },
    }
    panels: list = [(draw,) for draw in ((draw_weights, draw_ratios, draw_norms) if additions else ())]
    panels += [(draw_depths, *panel) for panel in depth_panels.items() if set(panel[1]) & set(layers[0])]
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.7 * rows), squeeze=False)
    for axis, (draw, *arguments) in zip(axes.flat, panels):
        draw(axis, *arguments)
        if axis.get_yscale() == "log":
            label_log_scale(axis)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlim(-0.03 * last_layer, None)  # the same depths below one another
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, ncols=2, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(report["model"])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def is_patch_layer(name: str) -> bool:
    """Whether a feature is `<number>.patches`, the dense feature of a layer."""
    return name.endswith(".patches") and name.removesuffix(".patches").isdecimal()


def draw_heat_map(axis, values: np.ndarray, columns: list[float], low: float, high: float) -> None:
    """A heat map with its numbers, on a scale from low to high; NaN stays white."""
    axis.imshow(values, aspect="auto", vmin=low, vmax=high)
    for row, column in zip(*np.nonzero(~np.isnan(values))):
        colour = "white" if values[row, column] < (low + high) / 2 else "black"
        axis.text(column, row, f"{values[row, column]:.1f}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])


def save_schedules(path: Path) -> None:
    """Weight of the shortcut at each branch, and the effective decay against `shortcut_decay` for several depths."""
    pyplot = require_matplotlib()
    figure, (weights, product) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    depths = branch_depths(12)
    for schedule in ("linear", "cosine", "constant"):
        weights.plot(shortcut_factors(depths, 0.6, schedule), marker=".", label=schedule)
    weights.set(title="weight of the shortcut, 12 layers, shortcut_decay 0.6", xlabel="branch (attention, MLP, ...)")
    weights.set_ylim(0.5, 1.03)
    decays = np.linspace(0.3, 1.0, 71)
    for number, layers in enumerate((8, 12, 18, 24, 32)):
        product.plot(decays, [effective_decay(layers, decay) for decay in decays], label=f"{layers} layers")
        chosen = suggest_shortcut_decay(layers)
        product.plot(chosen, effective_decay(layers, chosen), "o", color=f"C{number}", markersize=4)
    product.axhspan(1e-3, 1e-2, color="grey", alpha=0.15)
    product.set(title="effective decay; dots: auto; grey: advised", xlabel="shortcut_decay", yscale="log")
    product.set_ylim(1e-5, 1.2)
    for axis in (weights, product):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
