"""Results as Markdown."""


def results_tables(results: dict) -> str:
    """The rows as a table; for a diffusion model's blocks, one table per metric."""
    if "grid" not in results:
        return rows_tables(results["rows"])
    grid, lines = results["grid"], []
    for metric, cells in grid["cells"].items():
        lines += [f"{metric}, by block and noise level", ""]
        lines += ["| block | " + " | ".join(f"{level:g}" for level in grid["noise_levels"]) + " |"]
        lines += ["|---" * (1 + len(grid["noise_levels"])) + "|"]
        lines += [
            f"| {block} | " + " | ".join(format_metric(metric, value) for value in values) + " |"
            for block, values in zip(grid["blocks"], cells)
        ]
        lines += [""]
        best = results["best"].get(metric)
        if best:
            lines += [f"best: {best}, {format_metric(metric, results['rows'][best][metric])}"]
        if metric in results["rows"].get("pixels", {}):
            lines += [f"raw pixels: {format_metric(metric, results['rows']['pixels'][metric])}", ""]
    return "\n".join(lines)


def protocol_text(protocol: dict, rows: dict[str, dict[str, float]]) -> str:
    """The settings of the metrics in `rows`, in one sentence; the results file has all of them."""
    metrics = {metric for row in rows.values() for metric in row}
    parts = [f"features: {protocol['features']}"]
    if "knn" in protocol and "knn_accuracy" in metrics:
        temperature = protocol["knn"]["temperature"]
        votes = f"temperature {temperature:g}" if temperature else "a vote each"
        parts.append(f"kNN: k = {protocol['knn']['k']}, {protocol['knn']['similarity']}, {votes}")
    if "linear" in protocol and "linear_accuracy" in metrics:
        parts.append(f"linear: {protocol['linear']['name']}")
    if "rank" in protocol and "effective_rank" in metrics:
        parts.append(f"rank: {protocol['rank']}")
    for name in ("kmeans", "svm"):
        if name in protocol and f"{name}_accuracy" in metrics:
            parts.append(f"{name}: {protocol[name]}")
    if "segmentation" in protocol and "cluster_miou" in metrics:
        settings = protocol["segmentation"]
        parts.append(
            f"segmentation: k-means, {settings['clusters']} clusters, {settings['k_means_seeds']} seeds, Hungarian and greedy "
            f"match, at most {protocol['max_images']} images"
        )
    if "where" in protocol and "position_accuracy" in metrics:
        parts.append(f"where: {protocol['where']}")
    if "reference" in protocol:
        parts.append(f"{protocol['samples']} samples against {protocol['reference']}")
    if "sampling" in protocol:
        sampling = protocol["sampling"]
        parts.append(f"{sampling['num_inference_steps']} steps, guidance {sampling['guidance_scale']:g}")
    return "; ".join(parts)


def rows_tables(rows: dict[str, dict[str, float]]) -> str:
    """One table for all rows with the same metrics: pooled and dense features have different ones."""
    if not rows:
        raise ValueError("There are no rows of metrics.")
    groups: dict[tuple, dict] = {}
    for name, row in rows.items():
        groups.setdefault(tuple(row), {})[name] = row
    return "\n\n".join(markdown_table(group) for group in groups.values())


def markdown_table(rows: dict[str, dict[str, float]]) -> str:
    """A Markdown table with a line per row; metrics that have a `_spread` show it."""
    columns = [name for name in next(iter(rows.values())) if not name.endswith("_spread")]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = [format_metric(metric, row[metric], row.get(f"{metric}_spread")) for metric in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_metric(metric: str, value: float, spread: float | None = None) -> str:
    if "accuracy" in metric or "miou" in metric:
        return f"{100 * value:.1f} %" if spread is None else f"{100 * value:.1f} +- {100 * spread:.1f} %"
    if spread is not None:
        return f"{value:.3g} +- {spread:.2g}"
    return f"{value:.2f}"
