"""Conversations as tokens, with a mask of those that are answers.

A model learns to answer from conversations by predicting the assistant's turns, and nothing else: a
token of the question, or of what the template writes around it, has no loss. So a conversation
becomes two rows of equal length: ``ids``, and ``answers``, 1 where the token is one that the
assistant says, the token that ends the turn included.

Where an answer begins and ends is asked of the chat template itself, in one of two ways:

* A template that marks answers (``{% generation %}``) says it.
* For others, the text of a conversation up to an answer is rendered with the generation prompt, as
  a server does when it asks for the answer, and again with the answer. What the second has more is
  the answer. This holds only if the shorter text is the beginning of the longer one, and both are
  the beginning of the whole. Templates that rewrite earlier turns (those that drop the reasoning
  of all answers but the last) break it: they are refused, as the model would be taught texts that
  no server ever shows it. For these, ``answers="last"`` learns the last answer alone.

Without a template, `ChatFormat.markers` name the text that stands before each role's message.

Mask and tokens are brought together by the characters that each token stands for. A token that
would reach over the beginning of an answer (a template ends its prompt with a line break, and an
answer begins with one) is avoided by encoding the two sides apart, as they are when a server
generates the answer. A tokenizer that writes another token for a word at the beginning of a text
(SentencePiece's prefix) cannot do that: such a conversation is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import ConfigError, raise_if_any

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of other data formats, by what templates call them."""

_ANSWER = "assistant"

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How conversations become text, and which of it is learned.

    Raises:
        ConfigError: options contradict each other.
    """

    template: str | None = None
    """Chat template (Jinja); None: that of the tokenizer's directory."""
    markers: Mapping[str, str] | None = None
    """Text before a message, by role, in place of a template: ``{"user": "Q: ", ...}``."""
    end: str | None = None
    """Text behind each message, with ``markers``; None: the tokenizer's end-of-text token."""
    answers: Literal["all", "last"] = "all"
    """Which answers of a conversation have loss."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, such as ``{"enable_thinking": False}``."""
    date: str | None = None
    """What a template is told that asks for today's date: with the true one, two runs would write
    different tokens."""

    def __post_init__(self) -> None:
        problems = []
        if self.answers not in ("all", "last"):
            problems.append(
                f"answers={self.answers!r}: must be 'all' or 'last'; nearest valid: answers='all'"
            )
        if self.markers is not None:
            wrong = [role for role in ("user", _ANSWER) if not self.markers.get(role)]
            if wrong:
                problems.append(
                    f"markers={dict(self.markers)!r}: no text before messages of "
                    f"{' and '.join(wrong)}; nearest valid: "
                    f"{ {'user': '<|user|>', _ANSWER: '<|assistant|>', **self.markers} }"
                )
            for name in ("template", "template_options", "date"):
                if getattr(self, name):
                    problems.append(
                        f"{name} with markers: markers take the place of a template; "
                        f"nearest valid: leave out {name} or markers"
                    )
        elif self.end is not None:
            problems.append(
                f"end={self.end!r} without markers: a template ends messages itself; "
                "nearest valid: leave it out"
            )
        raise_if_any(problems)


@dataclass(frozen=True)
class Chat:
    """Tokens of a conversation."""

    ids: npt.NDArray[np.int32]
    """``[n]``."""
    answers: npt.NDArray[np.uint8]
    """``[n]``: 1 where the token belongs to an answer, and has a loss as the one to predict."""


class RecordError(ConfigError):
    """A record cannot be read as a conversation.

    Args:
        index: of the record in what was given to `ChatEncoder.encode`.
        why: what is wrong with it, and what to do.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"record {index}: {why}")
        self.index, self.why = index, why

    def __reduce__(self) -> tuple[type["RecordError"], tuple[int, str]]:  # type: ignore[override]
        """Rebuild from both, so that the error crosses process boundaries."""
        return type(self), (self.index, self.why)


class _RecordProblem(ValueError):
    """What is wrong with the record at hand."""


def is_chat(record: Mapping[str, Any]) -> bool:
    """Whether a record has the keys of a conversation or of an instruction with its answer.

    >>> is_chat({"instruction": "Add 1 and 1.", "output": "2"}), is_chat({"text": "1 + 1 = 2"})
    (True, False)
    """
    several = ({"prompt", "completion"}, {"instruction", "output"})
    return bool(
        {"messages", "conversations"} & record.keys()
        or any(keys <= record.keys() for keys in several)
    )


def messages_of(record: Mapping[str, Any]) -> list[Message]:
    """Messages of a record, with ``role`` and ``content``.

    Records have ``messages`` (``role``, ``content``), ``conversations`` (``from``, ``value``),
    ``prompt`` and ``completion``, or ``instruction``, ``input`` and ``output``.

    >>> messages_of({"prompt": "1 + 1", "completion": "2"})
    [{'role': 'user', 'content': '1 + 1'}, {'role': 'assistant', 'content': '2'}]
    """
    if "messages" in record:
        return [_message(given) for given in _list(record["messages"])]
    if "conversations" in record:
        return [_message(given) for given in _list(record["conversations"])]
    if "prompt" in record and "completion" in record:
        sides = (("user", record["prompt"]), (_ANSWER, record["completion"]))
        return [
            message
            for role, side in sides
            for message in (
                [{"role": role, "content": side}]
                if isinstance(side, str)
                else [_message(given) for given in _list(side)]
            )
        ]
    if "instruction" in record and "output" in record:
        asked = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        return [
            {"role": "user", "content": asked},
            {"role": _ANSWER, "content": record["output"]},
        ]
    raise _RecordProblem(
        f"keys {sorted(record)}: not a conversation; nearest valid: a record with 'messages', a "
        "list of {'role': ..., 'content': ...}"
    )


def _refuse_silence(messages: Sequence[Message]) -> None:
    """Refuse messages that say nothing: a template would write the word None for them."""
    for number, message in enumerate(messages):
        if message.get("content") is None and not message.keys() - {"role", "content", "weight"}:
            raise _RecordProblem(
                f"message {number} ({message['role']}) has no content, and would be written as the "
                "word None; nearest valid: content '', or leave the record out"
            )


def _list(given: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(given, np.ndarray):  # parquet's lists
        given = list(given)
    if not isinstance(given, list | tuple) or not all(isinstance(m, Mapping) for m in given):
        raise _RecordProblem(f"{_short(given)}: must be a list of messages")
    return given


def _message(given: Mapping[str, Any]) -> Message:
    if "role" not in given and "from" in given:
        rest = {key: value for key, value in given.items() if key not in ("from", "value")}
        given = {"role": given["from"], "content": given.get("value"), **rest}
    if "role" not in given:
        raise _RecordProblem(
            f"{_short(dict(given))}: a message without a role; nearest valid: {{'role': 'user', "
            "'content': ...}"
        )
    # Tables have a column for every key of any message: what is None is not there.
    said = {key: value for key, value in given.items() if value is not None or key == "content"}
    return {**said, "role": _ROLES.get(given["role"], given["role"])}


class ChatEncoder:
    """Conversations as tokens, by the chat template of a tokenizer or by given markers.

    Args:
        directory: of the tokenizer, with ``tokenizer.json`` and, for a template, what
            ``save_pretrained`` writes.
        given: options.
        tokenizer: that of the directory (`tokenizers.Tokenizer`), if it is loaded already.

    Raises:
        ConfigError: there is no template, or one that cannot be learned from.
    """

    def __init__(
        self, directory: str | Path, given: ChatFormat | None = None, tokenizer: Any = None
    ) -> None:
        tokenizers = _import("tokenizers")
        self.directory, self.format = Path(directory), given or ChatFormat()
        if tokenizer is None:
            tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        # It would add tokens that the template has written, and cut spaces off the characters
        # that a token stands for.
        self._tokenizer.post_processor = None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = np.array([id for id, token in added.items() if token.special], np.int32)
        self._text = (
            self._markers() if self.format.markers else _Template(self.directory, self.format)
        )

    def identity(self) -> dict[str, Any]:
        """What tokens and masks depend on, the tokenizer's own file apart; plain JSON."""
        made_of = json.dumps(self._text.made_of(), sort_keys=True, default=str)
        return {"chat": sha256(made_of.encode()).hexdigest(), "answers": self.format.answers}

    def encode(self, records: Sequence[Mapping[str, Any]]) -> list[Chat]:
        """Tokens of records, which `messages_of` can read; nothing is appended to them.

        Raises:
            RecordError: a record is no conversation, has no answer, or is one in which the template
                does not tell where answers are.
        """
        read = []
        for index, record in enumerate(records):
            try:
                messages = messages_of(record)
                _refuse_silence(messages)
                text, spans = self._text.render(messages, record)
                if not any(start < stop for start, stop in spans):
                    raise _RecordProblem("has no answer: nothing is to be learned from it")
            except _RecordProblem as wrong:
                raise RecordError(index, str(wrong)) from None
            read.append((text, spans))
        encodings = self._encode([text for text, _ in read])
        chats = []
        for index, ((text, spans), encoding) in enumerate(zip(read, encodings, strict=True)):
            try:
                chats.append(self._chat(text, spans, encoding))
            except _RecordProblem as wrong:
                raise RecordError(index, str(wrong)) from None
        return chats

    def _encode(self, texts: Sequence[str]) -> Any:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _markers(self) -> "_Markers":
        end = self.format.end
        if end is None:
            end = _end_of_text(self.directory)
        if not end:
            raise ConfigError(
                f"markers with end={end!r}: nothing would end an answer, and a model that has "
                "learned it never stops; nearest valid: end='</s>', or the token of this "
                f"tokenizer ({self.directory}) that ends a text"
            )
        return _Markers(self.format, end)

    def _chat(self, text: str, spans: Sequence[Span], encoding: Any) -> Chat:
        ids, ends = _tokens(encoding)
        cuts = np.array(sorted({edge for span in spans for edge in span}), np.int64)
        if not np.isin(cuts, np.concatenate([[0, len(text)], ends])).all():
            ids, ends = self._apart(text, cuts)
        answers = np.zeros(len(ids), np.uint8)
        for start, stop in spans:
            first, behind = np.searchsorted(ends, [start, stop], "right").tolist()
            answers[first:behind] = 1
            self._end_with_the_turn(text[:stop], ids, ends, answers[first:behind], first)
        return Chat(ids, answers)

    def _end_with_the_turn(
        self, text: str, ids: Any, ends: Any, answers: npt.NDArray[np.uint8], first: int
    ) -> None:
        """Take white space behind the last special token out of an answer."""
        special = np.flatnonzero(np.isin(ids[first : first + len(answers)], self._special))
        if len(special) and not text[ends[first + special[-1]] :].strip():
            answers[special[-1] + 1 :] = 0

    def _apart(self, text: str, cuts: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Tokens of a text none of which reaches over a cut."""
        if not self._pieces_are_alike():
            raise _RecordProblem(
                f"a token of {self.directory} reaches over the beginning or end of an answer, and "
                "this tokenizer writes a beginning of its own to each piece of text; nearest "
                "valid: a template that puts a special token, or a space, before the answer"
            )
        edges = [0, *cuts.tolist(), len(text)]
        pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        read = [_tokens(encoding) for encoding in self._encode(pieces)]
        starts = edges[:-1]
        return (
            np.concatenate([ids for ids, _ in read]),
            np.concatenate([ends + start for (_, ends), start in zip(read, starts, strict=True)]),
        )

    def _pieces_are_alike(self) -> bool:
        """Whether a word has the same tokens at the beginning of a text as behind a line."""
        whole, line, word = self._encode(["\nword", "\n", "word"])
        return bool(whole.ids == [*line.ids, *word.ids])


def _tokens(encoding: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Tokens, and for each the number of characters of the text up to its end.

    Several tokens of one character all end with it; what a tokenizer drops belongs to the token
    behind it.
    """
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    return np.array(encoding.ids, np.int32), np.maximum.accumulate(ends) if len(ends) else ends


class _Markers:
    """Text before each message by its role, and one text behind each."""

    def __init__(self, given: ChatFormat, end: str) -> None:
        assert given.markers is not None
        self.before, self.end, self.answers = dict(given.markers), end, given.answers

    def made_of(self) -> Any:
        return self.before, self.end

    def render(
        self, messages: Sequence[Message], record: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        text, spans = "", []
        for message in messages:
            role, content = message["role"], message.get("content")
            if role not in self.before:
                raise _RecordProblem(
                    f"role {role!r} has no marker: markers={self.before!r}; nearest valid: one "
                    f"for {role!r} as well"
                )
            if not isinstance(content, str):
                raise _RecordProblem(f"content {_short(content)}: must be text under markers")
            text += self.before[role]
            start = len(text)
            text += content + self.end
            if role == _ANSWER and _is_learned(message):
                spans.append((start, len(text)))
        last = messages[-1]["role"] if messages else None
        if self.answers == "last":
            spans = spans[-1:] if last == _ANSWER else []
        return text, spans


class _Template:
    """Text of a chat template."""

    def __init__(self, directory: Path, given: ChatFormat) -> None:
        tokenizer = _import("transformers").AutoTokenizer.from_pretrained(str(directory))
        self.name = f"the template of {directory}" if given.template is None else "template"
        text = tokenizer.chat_template if given.template is None else given.template
        if isinstance(text, dict):
            text = text.get("default")
        if not text:
            raise ConfigError(
                f"{directory} has no chat template, which says how a conversation is written; "
                "nearest valid: the tokenizer of the model that was trained on conversations, "
                "template=..., or markers={'user': '<|user|>', 'assistant': '<|assistant|>'}"
            )
        if "strftime_now" in text:
            text = self._dated(text, given.date)
        self.text: str = text
        self.options = {**tokenizer.special_tokens_map, **given.template_options}
        self.answers = given.answers
        self.marks_answers = _marks_answers(text)
        self._look_at_it()

    def made_of(self) -> Any:
        return self.text, self.options

    def render(
        self, messages: Sequence[Message], record: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        tools = record.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if self.marks_answers:
            text, spans = self._render(messages, tools, return_assistant_tokens_mask=True)
            return text, self._learned(messages, [(a, b) for a, b in spans])
        whole = self._render(messages, tools)
        places = [i for i, message in enumerate(messages) if message["role"] == _ANSWER]
        if self.answers == "last":
            places = [i for i in places if i == len(messages) - 1]
        spans = []
        for i in places:
            asked = self._render(messages[:i], tools, add_generation_prompt=True)
            told = whole if i == len(messages) - 1 else self._render(messages[: i + 1], tools)
            if not (told.startswith(asked) and whole.startswith(told)):
                raise _RecordProblem(self._does_not_nest(i, asked, told, whole))
            if _is_learned(messages[i]):
                spans.append((len(asked), len(told)))
        return whole, spans

    def _learned(self, messages: Sequence[Message], spans: list[Span]) -> list[Span]:
        """Those of the marked answers that have loss."""
        said = [message for message in messages if message["role"] == _ANSWER]
        if not all(_is_learned(message) for message in said):
            if len(said) != len(spans):
                raise _RecordProblem(
                    f"{self.name} marks {len(spans)} answers for {len(said)} messages: it does not "
                    "say which of them has 'weight' 0; nearest valid: no 'weight'"
                )
            spans = [
                span for message, span in zip(said, spans, strict=True) if _is_learned(message)
            ]
        return spans[-1:] if self.answers == "last" else spans

    def _render(self, messages: Sequence[Message], tools: Any, **how: Any) -> Any:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self.options, **how}
        conversations: Any = [list(messages)]
        try:
            made: Any = render_jinja_template(
                conversations, tools, chat_template=self.text, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise _RecordProblem(f"{self.name} refuses it: {error}") from None
        texts, spans = made
        return (texts[0], spans[0]) if "return_assistant_tokens_mask" in how else texts[0]

    def _dated(self, text: str, date: str | None) -> str:
        if date is None:
            raise ConfigError(
                f"{self.name} asks for today's date, so tokens written tomorrow would be others; "
                "nearest valid: date='26 Jul 2024', which every conversation is then told"
            )
        # A macro hides the function of the same name that templates are given.
        return f"{{%- macro strftime_now(format) -%}}{date}{{%- endmacro -%}}{text}"

    def _look_at_it(self) -> None:
        """Refuse a template before any record is read, where two questions show what it does."""
        turns = [{"role": "user", "content": "a"}, {"role": _ANSWER, "content": "b"}] * 2
        try:
            self._render(turns, None)
        except _RecordProblem:
            return  # it wants something else; the records will show
        try:
            self.render(turns, {})
        except _RecordProblem as wrong:
            raise ConfigError(str(wrong)) from None

    def _does_not_nest(self, i: int, asked: str, told: str, whole: str) -> str:
        shorter, longer = (asked, told) if not told.startswith(asked) else (told, whole)
        same = next(
            (k for k, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b),
            min(len(shorter), len(longer)),
        )
        begin = max(0, same - 20)
        return (
            f"{self.name} writes the messages up to message {i} in another way when more of them "
            f"follow ({shorter[begin : same + 20]!r}, then {longer[begin : same + 20]!r}), so the "
            "model would learn texts that it is never shown; nearest valid: answers='last', "
            "template=... with {% generation %} around answers, or markers=..."
        )


def _marks_answers(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _is_learned(message: Message) -> bool:
    """Whether an answer has loss: ``weight`` 0 says that it has none."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise _RecordProblem(
            f"weight={weight!r}: an answer is learned or is not; nearest valid: weight=1"
        )
    return weight != 0


def _end_of_text(directory: Path) -> str | None:
    """The token that ends a text, as files beside a tokenizer tell it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.exists():
            token = json.loads(path.read_text()).get("eos_token")
            if token:
                return str(token["content"] if isinstance(token, dict) else token)
    return None


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"conversations need the package {name} ({error}); nearest valid: "
            "pip install 'lightning-megatron[data]'"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
