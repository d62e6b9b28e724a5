"""transformers' T5, an encoder and a decoder, in two stages: it learns to sort digits.

deepspeed --num_gpus 2 examples/encoder_decoder.py [SAVE_PATH]
python examples/encoder_decoder.py              starts the launcher itself

`cut` makes layers of any T5 or MT5 model. They hold the model's own weights, so what is trained goes back by
`load_trained(cut(model), SAVE_PATH)` and is saved under transformers' names by `model.save_pretrained(FOLDER)`. For a
model that others have trained, write `T5ForConditionalGeneration.from_pretrained(FOLDER)` for `new_model()`.

Tensors of several dtypes flow from layer to layer: what the encoder made of the source, which of it is padding, the
attention's bias for the distances of tokens, and the decoder's ids, which become hidden states on the second stage.
The embedding that both ends of the model share has a copy on either stage. It takes about a minute on two CPU cores.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Pipetune is not installed, it lies one folder up

from options.any_layers import Pipeline, load_trained

LONGEST = 8
PAD, END, WORDS = 10, 11, 12  # beside the ten digits; T5's decoder begins with PAD
IGNORED = -100
SAVE_PATH = "runs/encoder_decoder"
CONFIG: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": PAD,
    "eos_token_id": END,
    "decoder_start_token_id": PAD,
}

Inputs = tuple[Tensor, Tensor, Tensor]  # ids of the source, which of them are no padding, ids before each of the target


def new_model() -> T5ForConditionalGeneration:
    """Make a model with the same random weights in every process."""
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**CONFIG))


def cut(model: T5ForConditionalGeneration) -> list[nn.Module]:
    """Cut a model into layers: source, encoder's blocks, target, decoder's blocks, head.

    Everything of a layer belongs to the model. Its attention becomes transformers' `eager`: the others look at the
    values of a mask, which a trace of shapes has none of.
    """
    model.set_attn_implementation("eager")
    encoder = [EncoderBlock(block) for block in model.encoder.block]
    decoder = [DecoderBlock(block) for block in model.decoder.block]
    return [Source(model), *encoder, Target(model), *decoder, Head(model)]


class Source(nn.Module):
    """Look up the source: ids [B, S] become hidden states [B, S, width]."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.embedding, self.dropout = model.encoder.embed_tokens, model.encoder.dropout

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        source, seen, target = inputs
        return self.dropout(self.embedding(source)), seen, target


class EncoderBlock(nn.Module):
    """A block of the encoder; the first one adds to the stream its bias [1, heads, S, S], which all of them use."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, stream: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        source, seen, target, *bias = stream
        mask = closed(seen[:, None, None], source)
        source, *bias = self.block(source, attention_mask=mask, position_bias=bias[0] if bias else None)[:2]
        return source, seen, target, *bias


class Target(nn.Module):
    """End the encoder, whose bias goes, and look up the target [B, T]."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.norm, self.dropout = model.encoder.final_layer_norm, model.encoder.dropout
        self.embedding, self.after = model.decoder.embed_tokens, model.decoder.dropout

    def forward(self, stream: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        source, seen, target, *_ = stream
        return self.dropout(self.norm(source)), seen, self.after(self.embedding(target))


class DecoderBlock(nn.Module):
    """A block of the decoder, which looks at the source and at what is before; the first one adds its bias."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, stream: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        source, seen, target, *bias = stream
        before = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        target, *bias = self.block(
            target,
            attention_mask=closed(before, target),
            position_bias=bias[0] if bias else None,
            encoder_hidden_states=source,
            encoder_attention_mask=closed(seen[:, None, None], source),
        )[:2]
        return source, seen, target, *bias


class Head(nn.Module):
    """Logits [B, T, words]."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.norm, self.dropout, self.out = model.decoder.final_layer_norm, model.decoder.dropout, model.lm_head
        # T5's first version, whose head is the embedding, makes up for the embedding's size; MT5 has no such switch.
        self.scale = model.config.d_model**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0

    def forward(self, stream: tuple[Tensor, ...]) -> Tensor:
        return self.out(self.dropout(self.norm(stream[2])) * self.scale)


def closed(seen: Tensor, like: Tensor) -> Tensor:
    """Return what is added to scores: 0 where a token is seen, the least number where it is not."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, torch.finfo(like.dtype).min)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over the rows, of the mean over the tokens of each: any number of micro-batches gives the same."""
    tokens = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return (tokens.sum(1) / (labels != IGNORED).sum(1)).mean()


class Sorting(Dataset[tuple[Inputs, Tensor]]):
    """Up to LONGEST digits, and the same in order with an END; each padded to LONGEST + 1."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Inputs, Tensor]:
        generator = torch.Generator().manual_seed(self.first + number)
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        digits = torch.randint(10, (length,), generator=generator)
        source, wanted = (torch.cat([part, torch.tensor([END])]) for part in (digits, digits.sort().values))
        before = torch.cat([torch.tensor([PAD]), wanted[:-1]])
        room = (0, LONGEST - length)
        source, before = (F.pad(part, room, value=PAD) for part in (source, before))
        return (source, source != PAD, before), F.pad(wanted, room, value=IGNORED)


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith(("--local_rank", "--local-rank"))]
    save_path = words[0] if words else SAVE_PATH
    model = new_model()
    layers = cut(model)
    pipeline = Pipeline(
        layers,
        loss=loss,
        parts=[1 + len(model.encoder.block), 2 + len(model.decoder.block)],
        save_path=save_path,
        train_batch_size=64,
        train_micro_batch_size_per_gpu=16,
        n_epoches=5,
        optimizer={"type": "AdamW", "params": {"lr": 3e-3}},
        scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20}},
        steps_per_print=20,
    )
    pipeline.train(Sorting(0, 2048))
    if os.environ["RANK"] == "0":
        model = new_model()
        load_trained(cut(model), save_path)
        model.save_pretrained(Path(save_path) / "t5")
        show(T5ForConditionalGeneration.from_pretrained(Path(save_path) / "t5"))


@torch.no_grad()
def show(model: T5ForConditionalGeneration) -> None:
    """Let transformers sort what the model has not seen."""
    right = 0
    for (source, seen, _), labels in (Sorting(10_000, 40)[number] for number in range(40)):
        asked = {"input_ids": source[None], "attention_mask": seen[None].long()}
        answer = model.generate(**asked, max_new_tokens=LONGEST + 1, do_sample=False)[0, 1:].tolist()
        trained, words = labels != IGNORED, source < PAD
        right += answer == labels[trained].tolist()
    print(f"{source[words].tolist()} -> {[word for word in answer if word < PAD]}")
    print(f"sorted right: {right} of 40")


if __name__ == "__main__":
    main()
