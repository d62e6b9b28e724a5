"""What plain transformers of any release makes of folders: `python older_transformers.py IDS FOLDER...`.

Writes `seen.pt` into each folder: the class of the model, the dtype it has by config.json, the logits, and the token
ids of a text and of a chat. It is run by a Python with another transformers than the tests, so it imports nothing of
the project.
"""

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "Pipetune <extra> trains.\n"
CHAT = [{"role": "user", "content": "Two\nlines"}]


def see(folder: str, ids: torch.Tensor) -> None:
    # The plain attention: what torch's kernel does with a window differs between releases.
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        logits = model.eval()(ids, use_cache=False).logits
    chat = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True))["input_ids"]
    found = {"dtype": model.config.torch_dtype, "logits": logits, "text": tokenizer(TEXT)["input_ids"], "chat": chat}
    found |= {"class": type(model).__name__, "release": transformers.__version__}
    torch.save(found, f"{folder}/seen.pt")


if __name__ == "__main__":
    given = torch.load(sys.argv[1], weights_only=True)
    for each in sys.argv[2:]:
        see(each, given)
