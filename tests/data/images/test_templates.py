"""Chat templates put images where they do, and what a person types himself is no image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from data.chat.chat_template import IMAGES_FIRST
from data.errors import DataError
from data.inspection.summary import warnings
from data.sample_set import IGNORED, Sample
from data.tokenized.tokenizer import load_tokenizer
from tests.data.images.conftest import LoadSeen
from tests.data.images.dialogues import TWO, A, B, check, talk

# As LLaVA 1.5 has it: all images of a message first, then its words with a blank behind each.
FIRST = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for p in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ p.text + '</s>' }}{% endgeneration %}"
    "{% else %}{{ p.text + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
# As SmolVLM has it: what stands before the words depends on whether an image is first.
LOOKING = (
    "{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
# As Gemma has it: words lose their white space.
TRIMMED = LOOKING.replace("p.text if", "p.text | trim if")
# As Qwen has it: a text alone, or parts.
EITHER = (
    "{% for m in messages %}{{ m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '(<image>)' }}{% endfor %}{% endif %}"
    "{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
# As Qwen's with add_vision_id has it.
COUNTED = "{% set n = namespace(of=0) %}" + EITHER.replace(
    "{{ p.text if p.type == 'text' else '(<image>)' }}",
    "{% if p.type == 'text' %}{{ p.text }}{% else %}{% set n.of = n.of + 1 %}{{ n.of ~ ': <image>' }}{% endif %}",
)
WORDS_ALONE = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"


@pytest.fixture
def template(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "own.jinja").write_text(text, encoding="utf-8")
        return str(tmp_path / "own.jinja")

    return write


def words(sample: Sample, vision: Path, trained: bool = False) -> str:
    """The text of a sample, or its trained tokens, with one word for each image."""
    tokenizer = load_tokenizer(vision / "llava-tiny")
    ids, labels = numpy.asarray(sample["input_ids"]), numpy.asarray(sample["labels"])
    text = str(tokenizer.decode(ids[labels != IGNORED] if trained else ids))
    for image in sample.get("images", []):
        text = text.replace("<image>" * image.tokens, "[IMAGE]", 1)
    return text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (FIRST, "USER: [IMAGE]\nOne? ASSISTANT: First.</s>USER: [IMAGE]\nTwo? ASSISTANT: Second.</s>"),
        (LOOKING, "User:[IMAGE]One?</s>\nAssistant: First.</s>\nUser:[IMAGE]Two?</s>\nAssistant: Second.</s>\n"),
        (TRIMMED, "User:[IMAGE]One?</s>\nAssistant: First.</s>\nUser:[IMAGE]Two?</s>\nAssistant: Second.</s>\n"),
        (EITHER, "user\n([IMAGE])One?</s>\nassistant\nFirst.</s>\nuser\n([IMAGE])Two?</s>\nassistant\nSecond.</s>\n"),
    ],
)
def test_a_template_writes_images_its_own_way(
    text: str, written: str, vision: Path, template: Any, load_seen: LoadSeen
) -> None:
    dataset = load_seen([TWO], "llava-tiny", prompt_format=template(text))
    (sample,) = dataset.samples
    check(sample, token_of(vision))
    assert [Path(image.path).name for image in sample["images"]] == ["a.png", "b.png"]
    assert words(sample, vision) == written
    assert words(sample, vision, trained=True) == "First.</s>Second.</s>"
    assert not [line for line in warnings(dataset, 512) if IMAGES_FIRST in line]


def token_of(vision: Path) -> int:
    return int(json.loads((vision / "llava-tiny" / "config.json").read_text())["image_token_index"])


def test_images_that_a_template_moves_are_told(vision: Path, template: Any, load_seen: LoadSeen) -> None:
    record = talk(("This <image> or\n<image>?", "This."), images=[A, B])
    dataset = load_seen([record], "llava-tiny", prompt_format=template(FIRST))
    (sample,) = dataset.samples
    check(sample, token_of(vision))
    assert words(sample, vision) == "USER: [IMAGE]\n[IMAGE]\nThis  or\n? ASSISTANT: This.</s>"
    assert any(line.startswith(f"1 record: {IMAGES_FIRST}") for line in warnings(dataset, 512))


@pytest.mark.parametrize("text", [LOOKING, TRIMMED, EITHER])
def test_words_with_white_space_around_images(text: str, vision: Path, template: Any, load_seen: LoadSeen) -> None:
    record = talk(("<image>\nWhat is it? \n<image>", "This."), images=[A, B])
    (sample,) = load_seen([record], "llava-tiny", prompt_format=template(text)).samples
    check(sample, token_of(vision))
    assert words(sample, vision, trained=True) == "This.</s>"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (WORDS_ALONE, "the chat template takes no images; expected the model's own"),
        (COUNTED, "the chat template writes 1 image where there are 2"),
        (
            EITHER.replace("(<image>)", "(<img>)"),
            "writes '(<img>)' for an image, where the processor looks for '<image>'",
        ),
    ],
)
def test_a_template_that_takes_no_such_images_is_one_line(
    text: str, line: str, template: Any, load_seen: LoadSeen
) -> None:
    record = talk(("<image> or <image>?", "This."), images=[A, B])
    with pytest.raises(DataError) as caught:
        load_seen([record], "llava-tiny", prompt_format=template(text))
    assert line in str(caught.value) and "records.json: record 1: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["llava-tiny", "qwen2_5_vl-tiny", "gemma3-tiny", "mistral3-tiny"])
@pytest.mark.parametrize("with_image", [True, False])
def test_the_token_of_an_image_that_somebody_typed_is_refused(
    model: str, with_image: bool, vision: Path, load_seen: LoadSeen
) -> None:
    config = json.loads((vision / model / "config.json").read_text())
    number = config.get("image_token_id", config.get("image_token_index"))
    typed = load_tokenizer(vision / model).convert_ids_to_tokens(number)
    part = {"type": "image", "image": A}
    content = [*([part] if with_image else []), {"type": "text", "text": f"What is {typed}?"}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A word."}]}
    with pytest.raises(DataError) as caught:
        load_seen([record], model)
    assert "records.json: record 1: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_mark_that_somebody_typed_is_refused(load_seen: LoadSeen) -> None:
    for record in (talk(("What \ufdd00\ufdd1?", "This.")), {"text": "\ufdd00\ufdd1"}):
        with pytest.raises(DataError, match="record 1: a text has a mark for images"):
            load_seen([record])
    assert not load_seen([talk(("What \ufdd0?", "This.")), {"text": "\ufdd0"}]).has_images
