"""Make pictures of coloured shapes, their records, and a tiny LLaVA with random weights that shall learn to name them.

python examples/images/make.py [FOLDER]

The records are in LLaVA's shape, beside a few of text alone. The model has a CLIP tower of four blocks for pictures of
32 x 32 pixels, a language model of three, and a processor as published ones have it. It knows nothing, neither words
nor shapes, so all that it says afterwards is what it learnt. Making it takes some seconds, and eleven megabytes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

FOLDER = "runs/shapes"
TRAINED, HELD_OUT = 1500, 150  # pictures; no two are the same
SIDE, PATCH = 32, 8  # pixels
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 200),
    "yellow": (240, 200, 40),
    "purple": (130, 50, 160),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = {
    "What is in the picture?": "A {colour} {shape}.",
    "What colour is it?": "It is {colour}.",
    "What shape is it?": "It is a {shape}.",
}
BLIND = ("What can you see?", "Nothing yet. Send me a picture.")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
VOCABULARY = 400
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
    chance = random.Random(0)
    for name, count in (("trained", TRAINED), ("held_out", HELD_OUT)):
        records = make_records(folder, name, count, chance)
        (folder / f"{name}.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    make_model(folder / "model")
    print(f"{folder}: {TRAINED} pictures to learn from, {HELD_OUT} others to ask about, and a model that knows nothing")


def make_records(folder: Path, name: str, count: int, chance: random.Random) -> list[dict[str, Any]]:
    """Draw pictures, and ask of each one of the questions; every twentieth record has none."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    records = []
    for number in range(count):
        colour, shape = chance.choice(list(COLOURS)), chance.choice(SHAPES)
        path = folder / name / f"{number:04d}.png"
        draw(COLOURS[colour], shape, chance).save(path)
        question, answer = chance.choice(list(QUESTIONS.items()))
        words = answer.format(colour=colour, shape=shape)
        records.append({"images": [f"{name}/{path.name}"], "conversations": talk(f"<image>\n{question}", words)})
        if number % 20 == 19:
            records.append({"conversations": talk(*BLIND)})
    return records


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def draw(colour: tuple[int, ...], shape: str, chance: random.Random) -> Image.Image:
    """Draw one shape somewhere on paper of some light colour."""
    image = Image.new("RGB", (2 * SIDE, 2 * SIDE), tuple(chance.randint(215, 255) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    size = chance.randint(22, 40)
    left, top = chance.randint(2, 2 * SIDE - size - 2), chance.randint(2, 2 * SIDE - size - 2)
    right, bottom, middle = left + size, top + size, left + size // 2
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=colour)
    elif shape == "triangle":
        pen.polygon(((middle, top), (right, bottom), (left, bottom)), fill=colour)
    else:
        third = size // 3
        pen.rectangle((left + third, top, right - third, bottom), fill=colour)
        pen.rectangle((left, top + third, right, bottom - third), fill=colour)
    return image


def make_model(folder: Path, **text: int) -> None:
    """Write a tokenizer of the records' words, a processor, and random weights.

    Args:
        text: other sizes of the language model.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    words = [*BLIND, "user\nassistant\n", *QUESTIONS]
    for colour in COLOURS:
        words += [answer.format(colour=colour, shape=shape) for answer in QUESTIONS.values() for shape in SHAPES]
    tokenizer.train_from_iterator(words, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<image>"},
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)

    # What LlavaProcessor and CLIPImageProcessor write.
    mean_and_deviation = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    crop = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "do_convert_rgb": True}
    kinds = {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}
    whole = {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    for name, settings in (
        ("preprocessor_config.json", kinds | crop | mean_and_deviation),
        ("processor_config.json", whole | {"processor_class": "LlavaProcessor", "image_token": "<image>"}),
    ):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    torch.manual_seed(0)
    tower = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=96,
    )
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4} | text
    language = LlamaConfig(
        **sizes,
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    image_token = fast.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=tower, text_config=language, image_token_id=image_token, image_seq_length=(SIDE // PATCH) ** 2
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
