"""Answers are those of transformers for every family, and end where a model's answers end."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common.log import Log
from data.chat.messages import Said
from data.chat.native.kinds import export_tokenizer
from data.tokenized.tokenizer import load_tokenizer
from models.api import read_spec
from models.conversion.to_huggingface import ExportOptions, pp_to_hg
from models.conversion.to_pipeline import hg_to_pp
from options import load_config
from options.demo.chat import ChatSession
from options.demo.chat_model import INCOMPLETE, AnswerOptions, ChatModel
from options.demo.command_line import HELP
from options.demo.generation import GREEDY, generate_many
from tests.cases import tiered
from tests.conftest import FAQ, ORIGINALS, VOCABULARY, save_original
from tests.data.template_styles import HARMONY, STYLES
from tests.launching import run, write_config
from tests.models.cases import CASES
from tests.models.helpers import change_weights, oracle
from tests.models.originals import answer_of_original
from tests.options.demo.conftest import END, Make, RunDemo, make_recite
from training.distributed.disk import Disk
from training.engine.pipeline import PipelineTrainer
from training.language_model import LanguageModel

QUESTIONS = ["What is Pipetune?", "怎样开始训练？"]
SHORT = ("--greedy", "--max-new-tokens", "5")
TIED, NOT_IN_TRANSFORMERS = "qwen3-tied", ("baichuan-13b", "baichuan2-13b")
NAMES = [*(name for name in CASES if not name.endswith("tied")), TIED]
USUAL = ("bloom", "mistral-window")


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama")


def expected_answers(folder: Path) -> list[str]:
    """What transformers generates greedily, turn after turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        ids = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
        content = tokenizer.decode(ids, skip_special_tokens=True).lstrip().rstrip("\ufffd")  # a character that was cut
        messages.append({"role": "assistant", "content": content})
    return [message["content"] for message in messages[1::2]]


def test_a_prompt_is_answered_as_transformers_does_in_both_layouts(
    checkpoint: Path, tmp_path: Path, run_demo: RunDemo
) -> None:
    done = run(sys.executable, "demo.py", "--model", checkpoint, "--prompt", QUESTIONS[0], *SHORT)
    assert (done.returncode, done.stdout) == (0, expected_answers(checkpoint)[0] + "\n")
    assert len(done.stdout) > 1
    hg_to_pp(checkpoint, tmp_path / "layers")
    assert run_demo(tmp_path / "layers", "--prompt", QUESTIONS[0], *SHORT)[:2] == (0, done.stdout)


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_chat_remembers_its_turns_and_ends_with_an_empty_line_or_the_input(
    checkpoint: Path, ending: str, run_demo: RunDemo
) -> None:
    code, out, _ = run_demo(checkpoint, *SHORT, typed="\n".join(QUESTIONS) + "\n" + ending)
    first, second = expected_answers(checkpoint)
    assert (code, out) == (0, f"{HELP}\n> {first}\n> {second}\n> " + ("" if ending else "\n"))


# Random weights answer one or the other of them with a few words again and again.
ASKED = ("What is Pipetune?", "How many layers does it have?", "Name a colour.", "Who wrote this, and why?")


@pytest.mark.parametrize("name", tiered(NAMES, USUAL, slow=()))
def test_every_family_answers_what_transformers_generates(name: str, make_checkpoint: Make, tmp_path: Path) -> None:
    new, (model_type, changes) = 64, CASES[name]
    folder = make_checkpoint(model_type, **changes | {"initializer_range": 0.3, "tie_word_embeddings": name == TIED})
    if model_type == "baichuan":
        change_weights(folder, say_known_words)
    hg_to_pp(folder, tmp_path / "layers")
    native = model_type in ORIGINALS and name not in NOT_IN_TRANSFORMERS
    options = ExportOptions(layout="native", add_tokenizer=export_tokenizer) if native else ExportOptions()
    pp_to_hg(tmp_path / "layers", tmp_path / "export", options=options)
    model = ChatModel(tmp_path / "layers")
    model.context = None  # which for some of these models is shorter than the answer
    model._stop = set()  # so that every answer has all its tokens
    for question in ASKED:
        prompt = model.encode([Said("user", question)])
        if name in NOT_IN_TRANSFORMERS:
            expected = answer_of_original(tmp_path / "export", prompt, new)
        else:
            theirs = oracle(tmp_path / "export")
            theirs.generation_config.eos_token_id = None
            text = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new, pad_token_id=0)
            expected = text[0, len(prompt) :].tolist()
        if len(set(expected)) > new // 8:
            break
    assert len(expected) == new
    assert len(set(expected)) > new // 8, "too monotonous to show anything"
    request = model.request(prompt, AnswerOptions(new, GREEDY))
    assert [token for _, token in generate_many(model.model, [request])] == expected
    shown = "".join(ChatSession(model, AnswerOptions(new, GREEDY), print).ask(question))
    text = model.tokenizer.decode(expected).lstrip()
    assert shown and shown == text.rstrip(INCOMPLETE), "half a character at the end is held back"


def say_known_words(weights: dict[str, Tensor]) -> None:
    """The first Baichuan has 64,000 words, of which the tokenizer here knows few: make the others less likely."""
    if (head := weights.get("lm_head.weight")) is not None:
        head[VOCABULARY:] = 0


ASSISTANT, STOPS = 64796, {"</s>": 2, "<|user|>": 64795, "<|observation|>": 64797}
ANSWER = "Three layers, 三层"


def make_chatglm3(shared: Path, folder: Path, stop: int) -> Path:
    """Write a ChatGLM3 that answers anything with a new line, ANSWER, a stop token and more.

    Its one block adds nothing, so every token determines the next: each has a direction of its own.
    """
    folder.mkdir()
    shutil.copy(shared / "golden" / "tokenizers" / "chatglm3" / "tokenizer.model", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ChatGLMTokenizer"}))
    sizes: dict[str, Any] = {"hidden_size": 32, "kv_channels": 8, "num_attention_heads": 2, "multi_query_group_num": 1}
    sizes |= {"ffn_hidden_size": 8, "num_layers": 1, "padded_vocab_size": 65_024}
    save_original(folder, "chatglm", {}, initializer_range=0.0, **sizes)
    tokenizer = load_tokenizer(folder)
    first, answer, more = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\n", ANSWER, "and more")
    )
    ids = [ASSISTANT, *first, *answer, stop, *more]
    make_recite(folder, ids, "transformer.embedding.word_embeddings", "transformer.output_layer")
    return folder


@pytest.mark.parametrize("stop", tiered(STOPS, quick=["<|user|>"]))
def test_chatglm3_drops_its_first_new_line_and_stops_where_it_hands_over(
    stop: str, shared: Path, tmp_path: Path
) -> None:
    folders = [make_chatglm3(shared, tmp_path / "model", STOPS[stop])]
    if stop == "<|user|>":
        hg_to_pp(folders[0], tmp_path / "layers")
        native = ExportOptions(layout="native", add_tokenizer=export_tokenizer)
        pp_to_hg(tmp_path / "layers", tmp_path / "native", options=native)
        folders.append(tmp_path / "native")
    for folder in folders:
        chat = ChatSession(ChatModel(folder), AnswerOptions(32, GREEDY), print)
        for question in QUESTIONS:
            assert "".join(chat.ask(question)) == ANSWER
        assert [each.text for each in chat.said[1::2]] == [ANSWER] * 2


def lima_answers(folder: Path) -> list[str]:
    chat = ChatSession(ChatModel(folder), AnswerOptions(12, GREEDY), pytest.fail)
    return ["".join(chat.ask(question)) for question in ("One?", "Two?")]


def trained(folder: Path, made: Path, **keys: Any) -> Path:
    """A checkpoint of a run on this model, with the model's own weights."""
    config = load_config(write_config(made / "run.yml", model_path=str(folder), data_path=str(FAQ), **keys))
    hg_to_pp(folder, made / "step-1")
    for name in ("generation_config.json", "pipetune.json"):
        (made / "step-1" / name).unlink(missing_ok=True)
    task = LanguageModel(PipelineTrainer, read_spec)
    task.read(config, Disk("", [0], 0), Log())
    for name, content in task.side_files.items():
        (made / "step-1" / name).write_bytes(content)
    return made / "step-1"


@pytest.mark.parametrize("settings", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("style", [None, STYLES["llama3.1"]])
def test_a_base_model_that_was_trained_with_a_template_stops_everywhere(
    style: Any, settings: str, recite: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = "<|eot_id|>" if style else "<|im_end|>"
    folder = recite(f"Lima.{end}user", style)
    if settings == "config.json":
        (folder / "generation_config.json").unlink()
    assert lima_answers(folder) == ["Lima."] * 2
    checkpoint = trained(folder, tmp_path)
    assert f"end of answers: {end}; the checkpoints' generation_config.json" in capsys.readouterr().out
    pp_to_hg(checkpoint, tmp_path / "hf")
    assert lima_answers(checkpoint) == lima_answers(tmp_path / "hf") == ["Lima."] * 2
    tokenizer, model = load_tokenizer(tmp_path / "hf"), AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    stops = tokenizer.convert_tokens_to_ids([end, END])
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == sorted(stops)
    question = [{"role": "user", "content": "?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    written = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(written) == f"Lima.{end}"


@pytest.mark.parametrize(("end", "keys"), [("<|im_end|>", {}), (END, {"prompt_format": "plain"})])
def test_a_model_that_already_stops_keeps_its_files(
    end: str, keys: dict[str, Any], recite: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recite(f"Lima.{end}user", end=end)
    checkpoint, name = trained(folder, tmp_path, **keys), "generation_config.json"
    assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()
    assert "answers end" not in capsys.readouterr().out


def test_no_stop_is_guessed_that_may_be_within_an_answer(recite: Make) -> None:
    folder = recite("<|channel|>final<|message|>Lima.<|end|>and<|return|>", HARMONY, "<|return|>")
    assert lima_answers(folder)[0] == "<|channel|>final<|message|>Lima.<|end|>and"


def make_nan(folder: Path) -> None:
    change_weights(folder, lambda weights: weights["model.norm.weight"].fill_(torch.nan))


def damage(name: str, content: bytes | None) -> Any:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:1000] if content is None else content)

    return change


GENERATION = ["{", "[2]", '{"eos_token_id": "2"}', '{"eos_token_id": [2, {}]}', "\0", "[" * 10**5]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (make_nan, "not finite"),
        (lambda folder: (folder / "model.safetensors").unlink(), "{folder}"),
        (damage("model.safetensors", None), "{folder}"),
        (damage("model.safetensors", b""), "{folder}"),
        (shutil.rmtree, "error: {folder}: "),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "error: {folder}: no usable tokenizer"),
        *((damage("generation_config.json", text.encode()), "generation_config.json: ") for text in GENERATION),
    ],
)
def test_a_model_that_cannot_answer_is_reported_in_one_line(
    change: Any, line: str, checkpoint: Path, tmp_path: Path, run_demo: RunDemo
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    change(folder)
    code, out, error = run_demo(folder, "--prompt", "?", *SHORT)
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert line.format(folder=folder) in error


def test_a_tokenizer_of_another_model_is_refused(make_checkpoint: Make, run_demo: RunDemo) -> None:
    code, _, error = run_demo(make_checkpoint("llama", vocab_size=40), "--prompt", "?", *SHORT)
    assert code == 2 and error.startswith("error: vocab_size") and error.count("\n") == 1


def test_an_answer_cannot_act_on_the_terminal(checkpoint: Path, tmp_path: Path, run_demo: RunDemo) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    escape = vocabulary["\u011b"]  # as a byte-level vocabulary writes the escape character
    vocabulary["<unk>"], vocabulary["\u011b"] = escape, 0
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] != 0]
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(0)  # all tokens are equally likely: the first is taken
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert run_demo(folder, "--prompt", "?", "--prompt-format", "plain", *SHORT)[:2] == (0, "\\x1b" * 5 + "\n")
