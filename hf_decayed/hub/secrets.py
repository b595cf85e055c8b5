"""Finds secrets in files that are about to be uploaded.

Our own patterns are the floor. They are searched in all bytes of a file, weights included, and in the texts that binary
formats carry: PNG text chunks and the metadata of safetensors. The extra `publish` adds the rules of `detect-secrets`.
"""

import importlib.util
import json
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path


# Tokens that their beginning gives away: what they are, beginnings, what follows. They are searched in every byte.
TOKENS = [
    ("a Hugging Face token", "hf_", rb"(?:oauth_)?[A-Za-z0-9]{20,}"),
    ("a Hugging Face token", "api_org_", rb"[A-Za-z0-9]{30,}"),
    ("a key of an API", "sk-", rb"[A-Za-z0-9_-]{20,}"),
    ("an access key of AWS", "AKIA ASIA ABIA ACCA", rb"[0-9A-Z]{16}"),
    ("a key of Google", "AIza", rb"[0-9A-Za-z_-]{35}"),
    ("a key of Google", "GOCSPX- ya29.", rb"[0-9A-Za-z_-]{20,}"),
    ("a token of GitLab", "glpat- glptt- gldt- glrt- glcbt- glagent- gloas- glft-", rb"[0-9A-Za-z_-]{20,}"),
    ("a token of GitHub", "ghp_ gho_ ghu_ ghs_ ghr_", rb"[A-Za-z0-9]{30,}"),
    ("a token of GitHub", "github_pat_", rb"[A-Za-z0-9_]{22,}"),
    ("a token of Slack", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-", rb"[0-9A-Za-z-]{10,}"),
    ("an address of Slack", "hooks.slack.com/", rb"[a-z]+/[\w/]{20,}"),
    ("a token of npm", "npm_", rb"[A-Za-z0-9]{36}"),
    ("a token of PyPI", "pypi-AgEI", rb"[A-Za-z0-9_-]{30,}"),
    ("a key of Stripe", "sk_live_ rk_live_", rb"[0-9A-Za-z]{20,}"),
    ("a JSON web token", "eyJ", rb"[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    ("a private key", "-----BEGIN", rb" [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"),
    ("a private key", "b3BlbnNzaC1rZXktdjE PuTTY-User-Key-File- AGE-SECRET-KEY-1", rb"[0-9A-Za-z+/]"),
]
TOKEN_PATTERNS = [
    (name, beginning.encode(), re.compile(rb"(?<![A-Za-z0-9_])" + re.escape(beginning.encode()) + rest))
    for name, beginnings, rest in TOKENS
    for beginning in beginnings.split()
]
# Secrets known by the words around them, searched in text only.
NAMED = {
    "a key of Weights & Biases": rb"(?i)wandb[\s\S]{0,80}?\b[0-9a-f]{40}\b",
    "a secret key of AWS": rb"(?i)aws.{0,20}secret.{0,30}?[\"'\s=:][A-Za-z0-9/+]{40}\b",
    "a key of Azure storage": rb"AccountKey=[A-Za-z0-9+/=]{40,}",
    "a key of Kaggle": rb"\"username\"\s*:\s*\"[^\"]+\"\s*,\s*\"key\"\s*:\s*\"[0-9a-f]{32}\"",
    "an address with a password": rb"(?i)\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@\"'<>]{0,64}:[^\s/@\"'<>{}$]{3,}@[\w.-]+",
    "a login of a container registry": rb"\"auth\"\s*:\s*\"[A-Za-z0-9+/]{8,}={0,2}\"",
    "an authorization header": rb"(?i)\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+[\w.~+/=-]{12,}",
    "a login": rb"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S+",
    # Quoted, or bare with a digit in it; a placeholder or a variable is no password.
    "a password": rb"(?i)(?:password|passwd|passphrase|api[_-]?key|secret[_-]?(?:access[_-]?)?key|client[_-]?secret"
    rb"|access[_-]?token|auth[_-]?token)[\"']?\s{0,3}[:=]\s{0,3}"
    rb"(?:(?P<quote>[\"'])(?![<${*%]|your|example|xxx|\.\.\.)(?:(?!(?P=quote))[^\s]){4,}(?P=quote)"
    rb"|(?![<${*%\"'])(?=[^\s,;)]*\d)[^\s,;()\[\]]{6,}(?=[\s,;]|$))",
}
NAMED_PATTERNS = {name: re.compile(pattern) for name, pattern in NAMED.items()}

# How a string is continued on the next line: bare, with a backslash, quoted anew, or with an escaped newline. A newline
# before the beginning of a token stays, so that the token is still a word of its own.
LINE_BREAK = re.compile(
    rb"""["']?[ \t+\\]*(?:\r?\n|\\n)[ \t+]*["']?(?!"""
    + b"|".join(re.escape(beginning) for _, beginning, _ in TOKEN_PATTERNS)
    + rb")"
)

BLOCK, OVERLAP = 1 << 24, 1 << 12
MAX_TEXT = 1 << 20  # of a compressed PNG chunk; captions and colour profiles are shorter
PNG = b"\x89PNG\r\n\x1a\n"

# Of detect-secrets: fingerprints and hashes, of which results files are full, look like these.
IGNORED_TYPES = {"Hex High Entropy String", "Base64 High Entropy String", "Public IP (ipv4)"}


def find_secret(path: Path) -> str | None:
    """Describes the first secret in a file; `None` if there is none."""
    with path.open("rb") as file:
        tail = b""
        while block := file.read(BLOCK):
            data = tail + block
            if secret := find_token(data) or find_token(data.replace(b"\0", b"")):  # UTF-16 without its zeros is ASCII
                return secret
            tail = data[-OVERLAP:]
    for text in read_texts(path):
        if len(text) > MAX_TEXT and path.suffix.lower() == ".png":
            return "more than 1 MB of text, too much to look for secrets in it"
        for plain in (text, text.replace(b"\0", b"")):
            if secret := find_token(plain) or find_named(plain):
                return secret
            if secret := find_token(LINE_BREAK.sub(b"", plain), with_digit=True):
                return f"{secret} over several lines"
    return None


def find_token(data: bytes, with_digit: bool = False) -> str | None:
    """The first of `TOKENS` in some bytes; words that a join has glued together hold no digit, while tokens do."""
    for name, beginning, pattern in TOKEN_PATTERNS:
        position = data.find(beginning)
        while position >= 0:
            match = pattern.match(data, position)
            if match and (not with_digit or re.search(rb"\d", match[0])):
                return name
            position = data.find(beginning, position + 1)
    return None


def find_named(text: bytes) -> str | None:
    return next((name for name, pattern in NAMED_PATTERNS.items() if pattern.search(text)), None)


def read_texts(path: Path) -> Iterator[bytes]:
    """The texts in a file: all of a text file, strings of JSON without escapes, metadata of pictures and weights."""
    suffix = path.suffix.lower()
    if suffix == ".png":
        yield from read_png_texts(path)
    elif suffix == ".safetensors":
        header = read_safetensors_header(path)
        yield from (header, json_strings(header))
    else:
        data = path.read_bytes()
        yield data
        if suffix == ".json":
            yield json_strings(data)
        elif suffix == ".jsonl":
            yield b"\n".join(map(json_strings, data.splitlines()))


def read_png_texts(path: Path) -> Iterator[bytes]:
    """Text, EXIF data and colour profile of a PNG, decompressed, and whatever follows its end."""
    data = path.read_bytes()
    position = len(PNG) if data.startswith(PNG) else len(data)
    while position + 12 <= len(data):
        length, name = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        content = data[position + 8 : position + 8 + length]
        position += 12 + length
        if name in (b"tEXt", b"eXIf", b"iTXt"):
            yield content
        if name in (b"zTXt", b"iCCP", b"iTXt"):
            # Keyword, zero, method; in iTXt a flag, a method, a language and a translated keyword stand before the text.
            keyword, _, rest = content.partition(b"\0")
            yield keyword + b"\n" + inflate(rest[1:] if name != b"iTXt" else rest[2:].split(b"\0", 2)[-1])
        if name == b"IEND":
            break
    yield data[position:]


def inflate(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, MAX_TEXT + 1)
    except zlib.error:
        return b""


def read_safetensors_header(path: Path) -> bytes:
    """The JSON at the start of a safetensors file: names, shapes and metadata."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, path.stat().st_size))


def json_strings(data: bytes) -> bytes:
    """Keys and strings of JSON, a line each, so that escapes hide nothing; nothing if it is not JSON."""
    try:
        return "\n".join(string for _, string in iterate_strings(json.loads(data))).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return b""


def iterate_strings(value, key: str = "the top level") -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, keys included, with the key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield key, name
            yield from iterate_strings(item, f"'{name}'")
    elif isinstance(value, list):
        for item in value:
            yield from iterate_strings(item, key)


def has_detect_secrets() -> bool:
    return importlib.util.find_spec("detect_secrets") is not None


def find_with_detect_secrets(path: Path) -> str | None:
    """Describes the first secret that the rules of detect-secrets find in the texts of a file, pictures and weights too."""
    from detect_secrets import SecretsCollection
    from detect_secrets.settings import default_settings

    # Its rules depend on the ending of a file name, and it skips files that are not UTF-8: it gets copies of the texts.
    suffix = ".txt" if path.suffix.lower() in (".png", ".safetensors") else path.suffix
    with tempfile.TemporaryDirectory() as folder, default_settings():
        for number, text in enumerate(read_texts(path)):
            copy = Path(folder) / f"text{number}{'.txt' if number else suffix}"
            copy.write_text(text.replace(b"\0", b"").decode("utf-8", "replace"), encoding="utf-8")
            collection = SecretsCollection()
            collection.scan_file(str(copy))
            for _, secret in collection:
                if secret.type not in IGNORED_TYPES:
                    return f"what detect-secrets calls {secret.type} (line {secret.line_number})"
    return None
