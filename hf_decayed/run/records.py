"""Metrics of a run."""

import json
import math
from pathlib import Path


class MetricsFile:
    """`metrics.jsonl`; a resumed run drops what an earlier one wrote after the step it resumes from."""

    def __init__(self, path: Path, step: int, writing: bool):
        self.path, self.writing = path, writing
        if writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [record for record in self.records() if record["step"] <= step] if step and path.exists() else []
            path.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def write(self, record: dict) -> None:
        if self.writing:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        lines = self.path.read_text().splitlines()
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # the line that a killed process was writing
                continue
        return records

    def recent(self, name: str, number: int = 10) -> float | None:
        """Mean of the last few finite values: one step's loss says little."""
        values = [record[name] for record in self.records() if math.isfinite(record.get(name, math.nan))][-number:]
        return sum(values) / len(values) if values else None
