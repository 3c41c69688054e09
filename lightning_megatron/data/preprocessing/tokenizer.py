"""Tokenizer of a Hugging Face model directory, without the transformers library where possible.

`tokenizer.json` is the whole tokenizer. A directory that has none, but files that transformers can
make one of, is converted. Truncation and padding that the file asks for are switched off: they are
meant for batches of a model, and would cut documents.
"""

import hashlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.data.tokens.manifest import TokenizerIdentity
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"
_NEEDED = ("tokenizer*", "special_tokens*", "*.model", "vocab*", "merges*", "chat_template*")


def find_tokenizer(name: str) -> Path:
    """Return the directory or file of a tokenizer; one of the Hub is downloaded.

    Args:
        name: model directory, a `tokenizer.json`, or the name of a model on the Hub.

    Raises:
        ConfigError: there is none of this name.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ConfigError(f"--tokenizer={name}: does not exist")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[*_NEEDED, "config.json"]))
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    except Exception as error:  # the library raises errors of many kinds
        raise ConfigError(
            f"--tokenizer={name}: is no directory, and the Hub did not give a model of this name "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error


def folder(path: Path) -> Path:
    """Return the directory of a tokenizer, in which its other files are."""
    return path if path.is_dir() else path.parent


def load_tokenizer(path: Path) -> "Tokenizer":
    """Return the tokenizer of a directory or of a `tokenizer.json`, which cuts and pads nothing.

    Raises:
        ConfigError: there is no fast tokenizer, or it is damaged.
    """
    tokenizer = _from_text(path, _text(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def identify(path: Path, name: str, eos: str | None) -> TokenizerIdentity:
    """Return what a corpus says of its tokenizer.

    Args:
        path: its directory or file.
        name: as the user gave it.
        eos: token that ends documents; None: the one that the directory names, if any.

    Raises:
        ConfigError: the tokenizer has no token `eos`.
    """
    text = _text(path)
    tokenizer = _from_text(path, text)
    vocabulary = tokenizer.get_vocab()
    return TokenizerIdentity(
        name=name,
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        eos_id=_eos_id(path, vocabulary, eos),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def special_tokens(path: Path) -> list[str]:
    """Return the tokens that stand for no text."""
    tokens: Mapping[int, Any] = load_tokenizer(path).get_added_tokens_decoder()
    return [str(token.content) for token in tokens.values() if token.special]


def _text(path: Path) -> str:
    file = path / _FILE if path.is_dir() else path
    if file.exists():
        try:
            return file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read ({error})") from error
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    try:
        known: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return str(known.backend_tokenizer.to_str())
    except Exception as error:  # the library raises errors of many kinds
        raise ConfigError(
            f"{path}: no {_FILE} is in it, and transformers makes no fast tokenizer of its files "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error


def _from_text(path: Path, text: str) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path}: is no tokenizer of the tokenizers library ({error})") from error


def _eos_id(path: Path, vocabulary: Mapping[str, int], eos: str | None) -> int | None:
    if eos is not None:
        if eos not in vocabulary:
            near = get_close_matches(eos, vocabulary, n=3)
            raise ConfigError(
                f"--eos={eos}: no token of the tokenizer"
                + (f"; nearest: {', '.join(near)}" if near else "")
            )
        return vocabulary[eos]
    directory = folder(path)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(directory / file).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in vocabulary:
            return vocabulary[token]
    number = _json(directory / "config.json").get("eos_token_id")
    return number if isinstance(number, int) and number in vocabulary.values() else None


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _not_installed(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed; install lightning-megatron[data]")
