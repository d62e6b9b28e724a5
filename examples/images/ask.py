"""Ask a model of images and text about pictures that it has not seen, and count the right answers.

python examples/images/ask.py MODEL [FOLDER]

MODEL is a HuggingFace folder, such as what `pp_to_hg` writes; it is run by transformers alone, so that what is asked is
what anybody would get. An answer is right if it is the record's, word for word.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

FOLDER = "runs/shapes"
MOST_TOKENS = 12
SHOWN = 5  # answers


def main() -> None:
    model_folder = Path(sys.argv[1])
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else FOLDER)
    records = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))
    processor = AutoProcessor.from_pretrained(model_folder, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    right = {False: 0, True: 0}
    asked = {False: 0, True: 0}
    for number, record in enumerate(records):
        said = answer(processor, model, folder, record)
        wanted = record["conversations"][1]["value"]
        seeing = "images" in record
        asked[seeing] += 1
        right[seeing] += said == wanted
        if number < SHOWN:
            print(f"{record['conversations'][0]['value'].strip()!r}: {said!r} ({wanted!r} is right)")
    print(f"right: {right[True]} of {asked[True]} with a picture, {right[False]} of {asked[False]} without")


def answer(processor: Any, model: Any, folder: Path, record: dict[str, Any]) -> str:
    """Have the model answer the question of a record."""
    question = record["conversations"][0]["value"]
    pictures = [Image.open(folder / path) for path in record.get("images", [])]
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question.replace("<image>", "")}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(images=pictures or None, text=text, add_special_tokens=False, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        made = model.generate(**inputs, do_sample=False, max_new_tokens=MOST_TOKENS)
    said: str = processor.tokenizer.decode(made[0, length:], skip_special_tokens=True)
    return said.strip()


if __name__ == "__main__":
    main()
