"""ChatGLM3: a sentencepiece model with a dummy prefix, and control tokens that no text can write.

The words `<|user|>`, `</s>` and `sop` in somebody's text are text ("philosophy" holds a `sop`); only the chat prompt's
own are control tokens. The original builds its prompts from ids, but a chat template can only write text. So control
tokens are named with a mark at the end, U+FDD0, a code point that Unicode sets aside for use inside a program: the
template and `eos_token` write it, people do not, and decoding drops it. Their ids are at hand as
`tokenizer.user_token_id` and the like. A template in the folder is passed over, as it cannot write the marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from data.chat.native.pieces import BYTE, NORMAL, bpe, read_model

MARK = "\ufdd0"
COMMANDS = "[MASK] [gMASK] [sMASK] sop eop <|system|> <|user|> <|assistant|> <|observation|>".split()
# The published prompt, marks aside. The original encodes "\n" and the content apart, each with its dummy prefix: the
# first comes from the normaliser, which sees a new text after every control token, the second is the blank here.
TEMPLATE = (
    "[gMASK]\ufdd0sop\ufdd0{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'observation'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>\ufdd0\n {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\ufdd0{% endif %}"
)
PUBLISHED = {
    "unk_token": "<unk>" + MARK,
    "pad_token": "<unk>" + MARK,
    "eos_token": "</s>" + MARK,
    "extra_special_tokens": {f"{name.strip('<|>')}_token": name + MARK for name in COMMANDS[5:]},
    "padding_side": "left",
    "chat_template": TEMPLATE,
}


def build(path: Path, _: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer, its special tokens and its template; `DataError` where the vocabulary is damaged."""
    proto = read_model(path)
    names = [piece.piece if piece.type in (NORMAL, BYTE) else piece.piece + MARK for piece in proto.pieces]
    names += [name + MARK for name in COMMANDS]
    # A control token's mark goes, and the dummy prefix of the text after it (\A: the very beginning).
    tokenizer = bpe(proto, names, dropped=rf"\A |{MARK} ?")
    tokenizer.add_special_tokens([name for name in names if name.endswith(MARK)])
    prefix = ["[gMASK]" + MARK, "sop" + MARK]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A"], special_tokens=[(name, names.index(name)) for name in prefix]
    )
    return tokenizer, dict(PUBLISHED)
