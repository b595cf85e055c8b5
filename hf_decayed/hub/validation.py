"""Checks staged files before they are uploaded: secrets, paths of this machine, damage, numbers that nobody measured."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ..kinds import parse_json, read_json, read_text
from .cards import METHOD
from .secrets import (
    PNG,
    find_secret,
    find_with_detect_secrets,
    has_detect_secrets,
    iterate_strings,
    read_png_texts,
    read_safetensors_header,
)
from .staging import PUBLISHED_NAMES, PublishingError


FOLDERS = (
    "home|root|Users|tmp|mnt|media|work|data|scratch|var|opt|srv|private|workspace|content|kaggle|gpfs|lustre|nfs"
)
# At the start of a value, or after what may precede a path; addresses on the web (`//`) are none.
LOCAL_PATH = re.compile(
    r"""(^|[\s'",:=(\[/\\])\.\.([\\/]|$)|(^|[\s'",:=(\[])(file:///|~/|[A-Za-z]:[\\/]|\\\\\w|/(""" + FOLDERS + r")/)"
)
CODE_PATH = re.compile(r"""(^|[\s'",:=(\[])(file:///|~/|[A-Za-z]:\\+\w|/(""" + FOLDERS + r")/)")
ABSOLUTE_PATH = re.compile(r"""(^|[\s'"=(\[,:])/[\w.]|(^|[\s'"=(\[,])//\w""")  # in JSON, which has no sentences

NUMBER = re.compile(r"(?<![A-Za-z\d.])-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")  # in a cell, whatever follows it
PERCENTAGE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?(?:%|per ?cent\b)")
TABLE_RULE = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?")

# Numbers in sentences. What stands before or after tells claims from versions, sizes and settings.
NOT_PROSE = re.compile(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)
DECIMAL = re.compile(r"(?<![\w.])(?<![A-Za-z]-)-?(?:\d+\.\d+|\.\d+)(?:[eE][+-]?\d+)?(?!\.?\d)")
WHOLE_NUMBER = re.compile(r"(?<![\w.,-])\d+(?![\w.,-]*\d)")
METRIC = (
    r"\b(?:accuracy|precision|recall|coverage|density|distance|loss|rank|error|score|kNN|FID|KID|PSNR|SSIM|m?IoU|AUC|F1|"
    r"top-[15]|perplexity)\b"
)
NEAR_METRIC = re.compile(METRIC + r"[^.;|]{0,40}$", re.IGNORECASE)
METRIC_IS = re.compile(
    METRIC
    + r"\W{1,3}(?:(?:an?|the|of|is|was|are|were|at|to|from|by|about|around|nearly|almost|only|up|over|under|below|above|"
    r"reach|reaches|falls|fell|drops|rises|rose|grows|improves|equals)\s+)*$",
    re.IGNORECASE,
)
VERSION = re.compile(
    r"(?:[<>=~!]=|\bversions?|\bv|\bpython|torch|\btransformers|\bdiffusers|\bcuda|\brelease|\bCC[ -]BY[\w -]*|GPL|Apache)"
    r"\s*$",
    re.IGNORECASE,
)
SIZE = re.compile(
    r"\s?(?:million|billion|thousand|[kMBGT]i?B?\b|bytes|parameters|pixels|px\b|images|samples|steps|epochs|layers|blocks|"
    r"heads|classes|channels|x \d)"
)


def validate_staged(staged: Path) -> None:
    """Refuses secrets, paths of this machine, damaged files, and numbers that nobody measured."""
    with_library = has_detect_secrets()
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        name = path.relative_to(staged).as_posix()
        secret = find_secret(path)
        if secret is None and with_library:
            secret = find_with_detect_secrets(path)
        if secret:
            raise PublishingError(f"'{name}' holds {secret}: take it out, and revoke it if others have seen it.")
        check_content(path, name)
    check_card(staged)


def check_content(path: Path, name: str) -> None:
    """Refuses a file that is not what its name says, or that names paths of this machine."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as weights:
                metadata = weights.metadata() or {}
        except SafetensorError as error:
            raise PublishingError(f"'{name}' is damaged: {error}.") from error
        check_strings({"__metadata__": metadata}, name)
        check_strings(list(json.loads(read_safetensors_header(path))), name)  # names of tensors
    elif suffix == ".png":
        with path.open("rb") as file:
            if file.read(len(PNG)) != PNG:
                raise PublishingError(f"'{name}' is no PNG.")
        check_lines("\n".join(text.decode("latin-1") for text in read_png_texts(path)), name, LOCAL_PATH)
    elif suffix in (".json", ".jsonl"):
        text = read_text(path)
        for number, line in enumerate([text] if suffix == ".json" else text.split("\n"), 1):
            if line.strip():
                check_strings(
                    parse_json(line, f"'{name}'" if suffix == ".json" else f"Line {number} of '{name}'"), name
                )
    elif path.name not in PUBLISHED_NAMES:
        check_lines(read_text(path), name, CODE_PATH if suffix == ".py" else LOCAL_PATH)


def check_strings(content, name: str) -> None:
    for key, value in iterate_strings(content):
        if LOCAL_PATH.search(value) or ABSOLUTE_PATH.search(value):
            raise PublishingError(f"'{name}' holds a path of this machine under {key}: {value!r}.")


def check_lines(text: str, name: str, pattern: re.Pattern) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if match := pattern.search(line):
            raise PublishingError(f"'{name}' holds a path of this machine in line {number}: {match[0].strip()}...")


def check_card(staged: Path) -> None:
    """Every claim of the card must be in a results file, as it is or in per cent.

    Claims are the results in the metadata, numbers in tables, percentages, and in sentences numbers with a decimal point and
    whole numbers that follow the name of a metric. The first row of a table is its heading, and whole numbers in the first
    cell of another row belong to the row's name. In sentences, versions, sizes and values of the configs are no claims.
    """
    try:
        card = ModelCard.load(staged / "README.md")
    except Exception as error:  # YAML's own, and the client's
        raise PublishingError(f"The metadata of README.md cannot be read: {error}") from error
    if not card.data.to_dict():
        raise PublishingError("The card has no metadata: begin README.md with a block between lines of '---'.")
    files = [*staged.glob("results*.json"), *staged.glob("results/*.json"), *staged.glob("evaluation*.json")]
    results = [read_json(file) for file in files]
    measured = [scale * number for result in results for number in iterate_numbers(result) for scale in (1, 100)]
    # The protocol, which the card repeats, says in words what was done.
    protocols = [text for result in results for _, text in iterate_strings(result.get("protocol") or {})]
    measured += [float(number) for text in protocols for number in NUMBER.findall(text)]
    settings = [
        number
        for file in [*staged.rglob("*config.json"), *staged.glob("model_index.json")]
        for number in iterate_numbers(read_json(file))
    ]
    # A command that is recorded in the results was run with the numbers in it.
    commands = [result["command"] for result in results if isinstance(result.get("command"), str)]
    settings += [float(number) for command in commands for number in NUMBER.findall(command)]
    claims = [str(result.metric_value) for result in card.data.eval_results or []]
    for claim in [*claims, *table_numbers(card.text)]:
        check_claim(claim, measured)
    for claim, of_metric in sentence_numbers(card.text):
        check_claim(claim, measured if of_metric else measured + settings)


def check_claim(claim: str, numbers: list[float]) -> None:
    """Refuses a number that rounds none of `numbers`."""
    if not NUMBER.fullmatch(claim):
        raise PublishingError(f"The metadata of README.md give {claim!r} where a number should be.")
    mantissa, _, exponent = claim.lower().partition("e")
    unit = float(f"1e{int(exponent or 0) - len(mantissa.partition('.')[2])}")  # of the last digit shown
    value = float(claim)
    if math.isinf(value) or not any(abs(number - value) <= 0.5000001 * unit for number in numbers):
        raise PublishingError(
            f"The card says {claim}, which is in no results file: README.md may show only what was measured."
        )


def table_numbers(text: str) -> Iterator[str]:
    """Numbers in the tables of a card, and percentages anywhere in it."""
    lines = [line.strip() for line in text.splitlines()]
    for line, following in zip(lines, [*lines[1:], ""]):
        if "|" in line and not ("-" in following and TABLE_RULE.fullmatch(following)):
            first, *others = line.strip("|").replace("_", " ").split("|")
            yield from (number for number in NUMBER.findall(first) if "." in number)
            yield from (number for cell in others for number in NUMBER.findall(cell))
        yield from PERCENTAGE.findall(line)


def sentence_numbers(text: str) -> Iterator[tuple[str, bool]]:
    """Numbers in the sentences of a card, each with whether a metric is named just before it."""
    text = re.sub(r"```.*?```", "", text.replace(METHOD, ""), flags=re.DOTALL)  # the paper's number, not the model's
    lines = [line for line in text.splitlines() if "|" not in line and not line.startswith("    ")]
    prose = NOT_PROSE.sub(" ", " ".join(lines))
    for match in DECIMAL.finditer(prose):
        before = prose[: match.start()]
        if not VERSION.search(before[-40:]) and not SIZE.match(prose, match.end()):
            yield match[0], bool(NEAR_METRIC.search(before[-80:]))
    for match in WHOLE_NUMBER.finditer(prose):
        if METRIC_IS.search(prose[max(0, match.start() - 80) : match.start()]) and not SIZE.match(prose, match.end()):
            yield match[0], True


def iterate_numbers(value) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) < 1e300:  # larger whole numbers are no floats
            yield float(value)
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_numbers(item)
