"""Results as Markdown."""


def protocol_text(protocol: dict, rows: dict[str, dict[str, float]]) -> str:
    """How it was measured, in words; all of it is in the results file."""
    measured = {metric for row in rows.values() for metric in row}
    parts = [f"features: {protocol['features']}"]
    if "knn" in protocol and "knn_accuracy" in measured:
        votes = protocol["knn"]["temperature"]
        votes = f"temperature {votes:g}" if votes else "a vote each"
        parts.append(f"kNN: k = {protocol['knn']['k']}, {protocol['knn']['similarity']}, {votes}")
    if "linear" in protocol and "linear_accuracy" in measured:
        parts.append(f"linear: {protocol['linear']['name']}")
    if "rank" in protocol and "effective_rank" in measured:
        parts.append(f"rank: {protocol['rank']}")
    if "reference" in protocol:
        parts.append(f"{protocol['samples']} samples against {protocol['reference']}")
    if "sampling" in protocol:
        sampling = protocol["sampling"]
        parts.append(f"{sampling['num_inference_steps']} steps, guidance {sampling['guidance_scale']:g}")
    return "; ".join(parts)


def markdown_table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown, a row for each; figures that have a `_spread` show it."""
    columns = [name for name in next(iter(rows.values())) if not name.endswith("_spread")]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        cells = [format_metric(each, row[each], row.get(f"{each}_spread")) for each in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_metric(metric: str, value: float, spread: float | None = None) -> str:
    if "accuracy" in metric:
        return f"{100 * value:.1f} %"
    if spread is not None:
        return f"{value:.3g} +- {spread:.2g}"
    return f"{value:.2f}"
