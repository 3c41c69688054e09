"""Secrets are left out of what is written down.

Two signs give one away: the name of a field (``api_key``), and the form of a text, which names it
(``password=...``, ``Authorization: Bearer ...``), carries it in a URL (``https://user:word@host``),
or is of a kind that services hand out (``hf_...``, ``ghp_...``, ``AKIA...``, a JSON web token).
The value goes, the name stays. This is a net under the rule that no environment variable and no
hyper-parameter is ever written; it cannot know a secret that looks like any other word.
"""

import re
from functools import lru_cache
from typing import Any

REDACTED = "[redacted]"

MAX_TEXT = 20_000
"""Characters of a text that are kept."""

_WORDS = (
    r"api[_-]?key|access[_-]?key|private[_-]?key|secret|passw(?:or)?d|passphrase|credentials?"
    r"|authorization|auth|token|cookie"
)
# The plural counts what a language model reads.
_NAME = re.compile(rf"(?<![a-z])(?:{_WORDS})(?![a-z])", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""((?<![a-z])(?:{_WORDS})(?![a-z])[\w-]*["']?\s*[=:]\s*)"""
    r"""((?:bearer|basic)\s+)?("[^"]*"|'[^']*'|[^\s,;&"']+)""",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"(--(?:[\w-]*-)?(?:{_WORDS})\s+)(?!-)\S+", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_IN_URL = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(@)")
_ISSUED = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


@lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret."""
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """Return the text, cut to `MAX_TEXT` characters, without what looks like a secret."""
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + f"... ({len(text)} characters)"
    if len(text) < 4:
        return text
    text = _ASSIGNED.sub(rf"\1{REDACTED}", text)
    text = _OPTION.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _IN_URL.sub(rf"\1{REDACTED}\2", text)
    return _ISSUED.sub(REDACTED, text)


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it: texts redacted, numbers that are none as words."""
    kind = type(value)
    if kind is float:
        return value if value - value == 0 else _word(value)
    if kind is int or kind is bool or value is None:
        return value
    if kind is str:
        return redact(value)
    if isinstance(value, dict):
        return {str(k): _named(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a number of numpy, a tensor of one element
        try:
            return plain(value.item())
        except (RuntimeError, ValueError):
            return redact(str(value))
    return plain(float(value)) if isinstance(value, float) else redact(str(value))


def _named(name: str, value: Any) -> Any:
    return REDACTED if value is not None and is_secret_name(name) else plain(value)


def _word(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
