"""Conversations as tokens: which of them are answers, and which templates cannot tell."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data.preprocessing.chat import (
    ChatEncoder,
    ChatFormat,
    RecordError,
    is_chat,
    messages_of,
)
from lightning_megatron.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKS_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<s>{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}<s>{{ m.content }}</s>{% endif %}{% endfor %}"
)
FORGETS = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>"
    "{% endif %}{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Reasons in the last answer only, as many templates of models that reason do."""

TWO_TURNS = {
    "messages": [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "ef"},
        {"role": "assistant", "content": "gh"},
    ]
}


def tokenizer(*, prefix: bool = False) -> Any:
    """Bytes as tokens, two line breaks as one; with ``prefix`` as SentencePiece begins a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*alphabet, "ĊĊ"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("Ċ", "Ċ")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=prefix, use_regex=False
    )
    # What the encoder must do without: tokens around a text, and spaces that belong to no token.
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="</s>")
    made.chat_template = CHATML
    made.save_pretrained(tmp_path)
    return tmp_path


def learned(encoder: ChatEncoder, record: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of a record, and its parts with loss."""
    [chat] = encoder.encode([record])
    assert len(chat.ids) == len(chat.answers)
    parts, last = [], 0
    for id, answer in zip(chat.ids.tolist(), chat.answers.tolist(), strict=True):
        if answer:
            parts += [] if last else [[]]
            parts[-1].append(id)
        last = answer
    decode = encoder._tokenizer.decode
    whole = decode(chat.ids.tolist(), skip_special_tokens=False)
    return whole, [decode(part, skip_special_tokens=False) for part in parts]


def test_answers_and_the_tokens_that_end_them_have_loss(directory: Path) -> None:
    text, parts = learned(ChatEncoder(directory), TWO_TURNS)
    assert text == "<s>user\nab</s>\n<s>assistant\ncd</s>\n<s>user\nef</s>\n<s>assistant\ngh</s>\n"
    assert parts == ["cd</s>", "gh</s>"]


def test_only_the_last_answer(directory: Path) -> None:
    last = ChatFormat(answers="last")
    assert learned(ChatEncoder(directory, last), TWO_TURNS)[1] == ["gh</s>"]
    asked = {"messages": TWO_TURNS["messages"][:3]}
    with pytest.raises(RecordError, match="has no answer"):
        ChatEncoder(directory, last).encode([asked])


def test_an_answer_of_weight_0_is_read_and_not_learned(directory: Path) -> None:
    first, second, *rest = TWO_TURNS["messages"]
    record = {"messages": [first, {**second, "weight": 0}, *rest]}
    text, parts = learned(ChatEncoder(directory), record)
    assert "cd" in text
    assert parts == ["gh</s>"]
    marking = ChatEncoder(directory, ChatFormat(template=MARKS_ANSWERS))
    assert learned(marking, record)[1] == ["gh</s>"]
    with pytest.raises(RecordError, match=r"weight=0\.5"):
        ChatEncoder(directory).encode([{"messages": [first, {**second, "weight": 0.5}]}])


def test_no_token_reaches_from_the_prompt_into_an_answer(directory: Path) -> None:
    record = {"prompt": "ab", "completion": "\ncd"}
    encoder = ChatEncoder(directory)
    assert learned(encoder, record)[1] == ["\ncd</s>"]
    alone = encoder.encode([{"prompt": "ab", "completion": "cd"}])[0]
    [chat] = encoder.encode([record])
    asked = int(alone.answers.argmax())
    assert chat.ids[:asked].tolist() == alone.ids[:asked].tolist()  # as a server asks


def test_a_tokenizer_that_begins_texts_in_its_own_way_is_not_cut(directory: Path) -> None:
    encoder = ChatEncoder(directory, tokenizer=tokenizer(prefix=True))
    assert learned(encoder, {"prompt": "ab", "completion": "cd"})[1] == ["cd</s>"]
    with pytest.raises(RecordError, match="record 1.*reaches over the beginning"):
        encoder.encode([TWO_TURNS, {"prompt": "ab", "completion": "\ncd"}])


def test_characters_of_several_tokens_and_spaces_stay_in_their_answer(directory: Path) -> None:
    record = {"prompt": " é ", "completion": " 漢字 "}
    assert learned(ChatEncoder(directory), record)[1] == [" 漢字 </s>"]


def test_templates_that_mark_answers_are_believed(directory: Path) -> None:
    given = ChatFormat(template=MARKS_ANSWERS)
    text, parts = learned(ChatEncoder(directory, given), TWO_TURNS)
    assert text == "<s>ab</s><s>cd</s><s>ef</s><s>gh</s>"
    assert parts == ["cd</s>", "gh</s>"]
    last = ChatFormat(template=MARKS_ANSWERS, answers="last")
    assert learned(ChatEncoder(directory, last), TWO_TURNS)[1] == ["gh</s>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(directory: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(directory)
    (directory / "chat_template.jinja").write_text(FORGETS)
    with pytest.raises(ConfigError) as refused:
        ChatEncoder(directory)
    assert str(directory) in str(refused.value)
    assert "<think>" in str(refused.value)
    assert "answers='last'" in str(refused.value)
    last = ChatEncoder(directory, ChatFormat(answers="last"))
    assert learned(last, TWO_TURNS)[1] == ["<think>gh</s>"]


def test_a_record_that_a_template_refuses_is_named(directory: Path) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}"
    )
    encoder = ChatEncoder(directory, ChatFormat(template=template + CHATML))
    with pytest.raises(RecordError, match="record 1.*begin with a user") as refused:
        encoder.encode([TWO_TURNS, {"messages": TWO_TURNS["messages"][1:]}])
    assert refused.value.index == 1
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.index, str(again)) == (1, str(refused.value))


def test_a_template_that_asks_for_the_date_is_told_one(directory: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    with pytest.raises(ConfigError, match="date="):
        ChatEncoder(directory, ChatFormat(template=template))
    told = ChatEncoder(directory, ChatFormat(template=template, date="26 Jul 2024"))
    assert learned(told, TWO_TURNS)[0].startswith("26 Jul 2024\n<s>user")


def test_options_reach_the_template_and_the_identity(directory: Path) -> None:
    template = "{{ greeting }}" + CHATML
    encoders = [
        ChatEncoder(directory, ChatFormat(template=template, template_options={"greeting": word}))
        for word in ("hi", "hi", "ho")
    ]
    assert learned(encoders[0], TWO_TURNS)[0].startswith("hi<s>")
    one, same, other = (json.dumps(encoder.identity()) for encoder in encoders)
    assert one == same != other


def test_markers_take_the_place_of_a_template(directory: Path) -> None:
    given = ChatFormat(markers={"user": "Q: ", "assistant": "A: "}, end="</s>\n")
    text, parts = learned(ChatEncoder(directory, given), TWO_TURNS)
    assert text == "Q: ab</s>\nA: cd</s>\nQ: ef</s>\nA: gh</s>\n"
    assert parts == ["cd</s>", "gh</s>"]
    by_default = ChatFormat(markers={"user": "Q: ", "assistant": "A: "})
    assert learned(ChatEncoder(directory, by_default), TWO_TURNS)[0].startswith("Q: ab</s>A: cd")
    with pytest.raises(RecordError, match="role 'system' has no marker"):
        ChatEncoder(directory, given).encode([{"messages": [{"role": "system", "content": ""}]}])


def test_without_a_template_markers_are_named(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template.*markers="):
        ChatEncoder(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="end=None"):
        ChatEncoder(directory, ChatFormat(markers={"user": "Q", "assistant": "A"}))


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {
            "messages": [
                {"role": "user", "content": "a", "tool_calls": None},
                {"role": "model", "content": "b", "name": None},
            ]
        },
        {"prompt": "a", "completion": "b"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
    ],
)
def test_formats_of_records(record: dict[str, Any]) -> None:
    assert is_chat(record)
    assert messages_of(record) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"text": "a"}, "nearest valid: a record with 'messages'"),
        ({"messages": "a"}, "must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "a message without a role"),
        ({"messages": []}, "has no answer"),
        ({"instruction": "a", "output": None}, r"message 1 \(assistant\) has no content"),
    ],
)
def test_what_is_no_conversation_is_named(directory: Path, record: Any, why: str) -> None:
    with pytest.raises(RecordError, match=f"record 0.*{why}"):
        ChatEncoder(directory).encode([record])


def test_contradictions_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="3 options are wrong"):
        ChatFormat(markers={"user": "Q"}, template="x", answers="first")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without markers"):
        ChatFormat(end="</s>")
