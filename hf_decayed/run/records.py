"""Metrics of a run, one JSON object per line."""

import json
import math
import os
import warnings
from pathlib import Path


class MetricsFile:
    """`metrics.jsonl`; a resumed run drops the lines that were written after the step it resumes from.

    A full disk does not stop training: lines that could not be written are kept and written later.
    """

    def __init__(self, path: Path, step: int, writing: bool, before: Path | None = None):
        """`before` is the file of the folder that the run was resumed from, if that is another one."""
        self.path, self.writing = path, writing
        self.lines: list[dict] = []
        self.pending = ""
        if writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = before or path
            if step and before.exists():
                self.lines = [record for record in read_metrics(before) if record["step"] <= step]
            replace_text(path, "".join(json.dumps(record) + "\n" for record in self.lines))

    def write(self, record: dict) -> None:
        if not self.writing:
            return
        self.lines.append(record)
        self.pending += json.dumps(record) + "\n"
        self.flush()

    def flush(self) -> bool:
        """Writes pending lines; returns whether all of them are on disk."""
        if self.pending:
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a") as file:
                    file.write(self.pending)
            except OSError as error:
                warnings.warn(
                    f"{self.path.name} could not be written ({error}); it will be tried again.", stacklevel=3
                )
                truncate(self.path, size)
                return False
            self.pending = ""
        return True

    def records(self) -> list[dict]:
        return self.lines

    def recent(self, name: str, number: int = 10) -> float | None:
        """Mean of the last few finite values: the loss of one step is noisy."""
        values = [record[name] for record in self.lines if math.isfinite(record.get(name, math.nan))][-number:]
        return sum(values) / len(values) if values else None


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file; a line that a killed process left half written, or that is damaged, is skipped."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def format_loss(results: dict) -> str:
    """The loss of a run's results in words; a run that was resumed without its metrics may not know it."""
    return "loss not recorded" if results["loss"] is None else f"loss {results['loss']:.4f}"


def replace_text(path: Path, text: str) -> None:
    """Writes a text file atomically: if the process is killed, or the disk is full, the old file stays."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def truncate(path: Path, size: int) -> None:
    """Removes a partial line that a full disk left behind."""
    try:
        with path.open("r+") as file:
            file.truncate(size)
    except OSError:
        pass
