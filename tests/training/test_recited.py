"""Models that recite one answer, token by token: where they stop, and what a dialogue remembers of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoModelForCausalLM, GenerationConfig

from common.log import Log
from data.tokenized.tokenize import encode, load_tokenizer
from models.api import read_spec
from models.conversion.to_huggingface import pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from models.generation import GREEDY
from tests.conftest import FAQ
from tests.data.template_styles import HARMONY, STYLES, Style
from tests.launching import write_config
from tests.training.reciting import make_recite
from training.config.yaml_file import load_config
from training.demo.chat import Chat
from training.demo.speaker import Speaker, Wishes
from training.distributed.disk import Disk
from training.engine.pipeline import PipelineTrainer
from training.language_model import LanguageModel

END = "<|endoftext|>"  # of a base model's tokenizer, whose template ends with <|im_end|>
ONE_DISK = Disk("", [0], 0)

Recite = Callable[..., Path]


@pytest.fixture
def recite(make_checkpoint: Callable[..., Path]) -> Recite:
    """A function that writes a model whose answers are this text: each of its tokens, all different, says the next."""

    def write(text: str, style: Style | None = None, end: str = END) -> Path:
        folder = make_checkpoint("llama", initializer_range=0.0, tie_word_embeddings=False, vocab_size=560)
        tokenizer = load_tokenizer(folder)
        tokenizer.add_tokens([AddedToken(END, special=True, normalized=False)])
        if style:
            style.put_on(tokenizer)
        tokenizer.eos_token = end
        tokenizer.save_pretrained(folder)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True)
        ids = [prompt["input_ids"][-1], *tokenizer(text, add_special_tokens=False)["input_ids"]]
        make_recite(folder, ids, "model.embed_tokens", "lm_head")
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
            settings["eos_token_id"] = tokenizer.convert_tokens_to_ids(end)
            (folder / name).write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return write


def answers(folder: Path, *prompts: Any) -> list[str]:
    chat = Chat(Speaker(folder, *prompts), Wishes(12, GREEDY), pytest.fail)
    return ["".join(chat.ask(question)) for question in ("One?", "Two?")]


def trained(folder: Path, made: Path, log: Log, **keys: Any) -> Path:
    """A checkpoint of a run on this model, with the weights that it has."""
    config = load_config(write_config(made / "run.yml", model_path=str(folder), data_path=str(FAQ), **keys))
    hg_to_pp(folder, made / "step-1")
    for name in ("generation_config.json", "pipetune.json"):
        (made / "step-1" / name).unlink(missing_ok=True)
    task = LanguageModel(PipelineTrainer, read_spec)
    task.read(config, ONE_DISK, log)
    for name, content in task.side_files.items():
        (made / "step-1" / name).write_bytes(content)
    return made / "step-1"


@pytest.mark.parametrize("settings", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("style", [None, STYLES["llama3.1"]])
def test_a_base_model_that_was_trained_with_a_template_stops_everywhere(
    style: Style | None, settings: str, recite: Recite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = "<|eot_id|>" if style else "<|im_end|>"
    folder = recite(f"Lima.{end}user", style)
    if settings == "config.json":
        (folder / "generation_config.json").unlink()
    assert answers(folder) == ["Lima."] * 2
    checkpoint = trained(folder, tmp_path, Log())
    assert f"end of answers: {end}; the checkpoints' generation_config.json" in capsys.readouterr().out
    pp_to_hg(checkpoint, tmp_path / "hf")
    assert answers(checkpoint) == answers(tmp_path / "hf") == ["Lima."] * 2
    tokenizer, model = load_tokenizer(tmp_path / "hf"), AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    stops = tokenizer.convert_tokens_to_ids([end, END])
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == sorted(stops)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    written = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(written) == f"Lima.{end}"


@pytest.mark.parametrize(("end", "keys"), [("<|im_end|>", {}), (END, {"prompt_format": "plain"})])
def test_what_stops_already_keeps_its_files(
    end: str, keys: dict[str, Any], recite: Recite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recite(f"Lima.{end}user", end=end)
    checkpoint = trained(folder, tmp_path, Log(), **keys)
    name = "generation_config.json"
    assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()
    assert "answers end" not in capsys.readouterr().out


def test_a_dialogue_goes_on_where_the_template_refuses_its_own_tags(recite: Recite, tmp_path: Path) -> None:
    folder = recite("<|channel|>final<|message|>Lima.<|return|>", HARMONY, "<|return|>")
    chat = Chat(Speaker(folder), Wishes(12, GREEDY), pytest.fail)
    for question in ("One?", "Two?", "Three?"):
        assert "".join(chat.ask(question)) == "<|channel|>final<|message|>Lima."
    assert [each.text for each in chat.said[1::2]] == ["Lima."] * 3


def test_thoughts_are_saved_apart_and_trained_as_they_were_written(recite: Recite, tmp_path: Path) -> None:
    folder = recite("<think>Hm.</think>Lima<|im_end|>", STYLES["qwen3"])
    chat = Chat(Speaker(folder), Wishes(12, GREEDY), pytest.fail)
    for question in ("One?", "Two?"):
        assert "".join(chat.ask(question)) == "<think>Hm.</think>Lima"
    assert [(each.reasoning, each.text) for each in chat.said[1::2]] == [("Hm.", "Lima")] * 2
    chat.save(tmp_path / "saved")
    record, tokenizer = json.loads((tmp_path / "saved").read_text(encoding="utf-8")), load_tokenizer(folder)
    sample = encode(record, tokenizer, 1000)
    assert tokenizer.decode(sample["input_ids"]).rstrip().endswith("<think>\nHm.\n</think>\n\nLima<|im_end|>")


def test_no_stop_is_guessed_where_one_is_within_an_answer(recite: Recite) -> None:
    folder = recite("<|channel|>final<|message|>Lima.<|end|>and<|return|>", HARMONY, "<|return|>")
    assert answers(folder)[0] == "<|channel|>final<|message|>Lima.<|end|>and"
