"""What newcomers type, with another tool in mind: each mistake is told in one line that leads on, and ends with code 2.

The words run in this process, in a folder with the files that they name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import convert_model
import demo
import train_ds
from common.terminal import TYPED
from pipetune import __main__ as pipetune
from tests.launching import write_config

MAIN = {"train": train_ds.main, "convert": convert_model.main, "demo": demo.main, "pipetune": pipetune.main}
CONFIG = "train --config run.yml "
PAIR = {"prompt": "What is it?", "chosen": "A toolkit.", "rejected": "A tool, or so."}
RECORDS: dict[str, Any] = {
    "records": {"instruction": "What is it?", "input": "", "output": "A toolkit."},
    "pairs": PAIR,
    "equal": PAIR | {"rejected": "A toolkit."},
    "marked": {"prompt": "What is it?", "completion": "A toolkit.", "label": True},
    "asks": {"messages": [{"role": "user", "content": "What is it?"}]},
    "lists": {"instruction": "What is it?", "output": ["A toolkit."]},
    "others": {"Frage": "Was ist es?", "Antwort": "Ein Werkzeug."},
    "info": {"own": {"file_name": "own.json", "columns": {"prompt": "ask"}}},
}
LLAMA_FACTORY = (
    "model_name_or_path: m\nstage: sft\ncutoff_len: 9\nfinetuning_type: lora\nlora_rank: 8\ntemplate: qwen3\n"
)

MISTAKES = {  # typed, and the words of the line
    # Keys of TRL.
    f"{CONFIG}beta=0.1": "unknown key beta; did you mean preference.beta?",
    f"{CONFIG}loss_type=sigmoid": "unknown key loss_type; did you mean preference.loss? (dpo, cdpo, ipo, ",
    f"{CONFIG}max_prompt_length=512": "unknown key max_prompt_length; max_seq_len counts prompt and answer together",
    f"{CONFIG}precompute_ref_log_probs=true": "; the reference's numbers are always computed before the first step",
    f"{CONFIG}use_peft=true": "unknown key use_peft; a lora section trains adapters",
    f"{CONFIG}ref_model=m": "unknown key ref_model; the reference is the model that training begins with",
    # Keys of LLaMA-Factory.
    f"{CONFIG}stage=sft": "unknown key stage; the keys say it: `preference` trains on pairs, `mask: all` on",
    f"{CONFIG}cutoff_len=2048": "unknown key cutoff_len; did you mean max_seq_len?",
    f"{CONFIG}lora_target=all": "unknown key lora_target; did you mean lora.targets?",
    f"{CONFIG}lora.rank=8": "unknown key lora.rank; did you mean lora.r?",
    f"{CONFIG}max_samples=1000": "unknown key max_samples; `repeat` in an entry of data_path takes a share of its ",
    f"{CONFIG}quantization_bit=4": "unknown key quantization_bit; lora: {base: nf4} holds the base in 4 bits",
    f"{CONFIG}overwrite_output_dir=true": "; a run never writes over another; save_path names a new folder",
    "train --config lf.yml": "lf.yml: 6 unknown keys\n  model_name_or_path; did you mean model_path?\n  stage; ",
    # Keys of axolotl.
    f"{CONFIG}base_model=m": "unknown key base_model; did you mean model_path?",
    f"{CONFIG}sample_packing=true": "unknown key sample_packing; did you mean packing? (batch, dataset or false)",
    f"{CONFIG}model_type=LlamaForCausalLM": "unknown key model_type; config.json in model_path says it",
    f"{CONFIG}load_in_8bit=true": "; lora: {base: nf4} holds the base in 4 bits; 8 are not there",
    f"{CONFIG}special_tokens.pad_token=x": "unknown key special_tokens; the tokenizer in model_path is taken as it is",
    # Values.
    f"{CONFIG}preference.loss=sigmoid": "found 'sigmoid'; did you mean dpo?",
    f"{CONFIG}optimizer.type=adamw_torch": "found 'adamw_torch'; did you mean AdamW?",
    f"{CONFIG}scheduler.type=cosine scheduler.params.warmup_ratio=0.1": "did you mean WarmupCosineLR?",
    f"{CONFIG}packing=true": "packing: expected 'batch', 'dataset' or False, found True; did you mean batch?",
    f"{CONFIG}prompt_format=alpaca": "or the path of a Jinja file, found 'alpaca'; did you mean plain?",
    f"{CONFIG}prompt_format=qwen3": "expected 'chat_template', 'plain', 'gdgpt', or the path of a Jinja file, found ",
    f"{CONFIG}trackers=comet": "trackers.0: expected 'tensorboard', 'wandb', 'swanlab' or 'mlflow', found 'comet'",
    f"{CONFIG}bf16=auto": "expected true, false or {enabled: true}, found 'auto', which HF Trainer would fill in",
    f"{CONFIG}scheduler.params.warmup_num_steps=0.1": "warmup_num_steps: expected a whole number, found 0.1",
    f"{CONFIG}lora.base=int8": "lora.base: expected 'nf4' or 'fp8', found 'int8'",
    f"{CONFIG}preference.loss=simpo preference.label_smoothing=0.1": "expected only with loss: cdpo, as simpo does not",
    # Types.
    f"{CONFIG}max_seq_len=many": "max_seq_len: expected a whole number, found 'many'",
    f"{CONFIG}max_seq_len=0": "max_seq_len: expected at least 2, found 0",
    f"{CONFIG}seed=null": "seed: expected a whole number, found nothing",
    f"{CONFIG}lora=8": "lora: expected a section of keys, found 8",
    f"{CONFIG}optimizer.params.lr=fast": "optimizer.params.lr: expected a number, found 'fast'",
    f"{CONFIG}eval_share=100": "eval_share: expected less than 1, found 100",
    f"{CONFIG}train_micro_batch_size_per_gpu=3": "train_batch_size: 8 is not a multiple of 3 ",
    # Options.
    f"{CONFIG}seed": "command line: 'seed': expected key.sub=value",
    f"{CONFIG}--inspect": "argument --inspect: expected one argument",
    f"{CONFIG}--model_name_or_path m": "arguments: --model_name_or_path; did you mean model_path=VALUE?",
    f"{CONFIG}--max_seq_len 512": "arguments: --max_seq_len; did you mean max_seq_len=VALUE?",
    f"{CONFIG}--search": "--search needs --plan",
    f"{CONFIG}--plan --devices 4090x8": "--devices: '4090x8': expected ",
    f"{CONFIG}--hostfile none": "--hostfile none: No such file or directory; expected lines such as: node1 slots=8",
    "train --auto --model m --data records.json": "--auto, --model, --data and --save: expected all of them",
    "demo --model model --max_new_tokens 5": "arguments: --max_new_tokens 5; did you mean --max-new-tokens?",
    "convert merge --input-path run": "invalid choice: 'merge'",
    "pipetune trian": "trian: no such command; did you mean train?",
    # Files.
    "train --config none.yml": "none.yml: not found; expected a YAML file",
    f"{CONFIG}model_path=none": "none: not found; expected a model folder",
    "pipetune init --from none.yml": "none.yml: not found; expected a config of another tool",
    "pipetune init --from ppo.yml new.yml": "ppo.yml: LLaMA-Factory: ppo: is not trained here; expected sft, pt, dpo, ",
    "pipetune init --from records.json new.yml": "records.json: neither keys and values nor a command line",
    "pipetune init run.yml": "run.yml: File exists; expected the name of a new file",
    # Records.
    f"{CONFIG}data_path=none.json --inspect 1": "none.json: not found",
    f"{CONFIG}data_path=pairs.json --inspect 1": "(fields chosen, rejected): expected the key preference, or good answ",
    f"{CONFIG}data_path=marked.json --inspect 1": "; preference: kto learns from marked answers",
    f"{CONFIG}preference=dpo data_path=marked.json --inspect 1": "(preference: kto is for answers marked one by one)",
    f"{CONFIG}preference=dpo data_path=records.json --inspect 1": "rejected: expected chosen and rejected answers",
    f"{CONFIG}preference=dpo data_path=equal.json --inspect 1": "both answers are equal within max_seq_len 256 (24)",
    f"{CONFIG}data_path=asks.json --inspect 1": "field messages: expected at least one of the assistant",
    f"{CONFIG}data_path=lists.json --inspect 1": "records 1 to 20: field output: expected a string, found a list",
    f"{CONFIG}data_path=others.json --inspect 1": "records 1 to 20: no known format has the fields 'Frage', ",
    f"{CONFIG}data_path=gbk.json --inspect 1": "iconv -f GB18030 -t UTF-8",
    f"{CONFIG}data_path=info.json --inspect 1": "a list of data sets, as in dataset_info.json; expected the ",
    # Models.
    f"{CONFIG}model_path=adapter --inspect 1": "adapter",
    f"{CONFIG}model_path=empty --inspect 1": "empty/config.json: not found; expected a model folder with a config.json",
    f"{CONFIG}model_topo.process_topology.dims=[4096,1]": "[4096, 1] ask for 4096 processes, but this machine has",
    f"{CONFIG}--plan model_topo.process_topology.dims=[9,1]": "9 stages",
    "convert pp_to_hg --input-path adapter --save-path hf --merge": "to merge it, expected merge_and_unload of peft",
    "convert pp_to_hg --input-path none --save-path hf": "none: not found",
    "demo --model none --prompt x": "none: not found; expected a model folder",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    """A folder with a model, records of several kinds and configs."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(make_checkpoint("llama"), folder / "model")
    write_config(folder / "run.yml", model_path="model", data_path="records.json", save_path="run")
    (folder / "lf.yml").write_text(LLAMA_FACTORY, encoding="utf-8")
    (folder / "ppo.yml").write_text(LLAMA_FACTORY.replace("sft", "ppo"), encoding="utf-8")
    for name, record in RECORDS.items():
        records = record if name == "info" else 24 * [record]
        (folder / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    text = json.dumps(24 * [{"instruction": "满多少钱免运费？", "output": "满九十九元免运费。"}], ensure_ascii=False)
    (folder / "gbk.json").write_text(text, encoding="gb18030")
    (folder / "empty").mkdir()
    (folder / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "model"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shutil.copy(folder / "model" / "model.safetensors", folder / "adapter" / "adapter_model.safetensors")
    return folder


def told(typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line says as it is refused."""
    command, *words = typed.split()

    def start(*_: object) -> None:
        raise AssertionError(f"{typed}: started")

    monkeypatch.setattr(os, "execv", start)
    monkeypatch.setenv(TYPED, "")  # so that what `pipetune` sets goes with the test
    monkeypatch.setattr(sys, "argv", [f"{command}.py", *words])
    with pytest.raises(SystemExit) as caught:
        MAIN[command]()
    printed = capsys.readouterr()
    assert caught.value.code == 2, printed
    assert printed.err.startswith("error: ") and "Traceback" not in printed.err + printed.out
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert line == printed.err.splitlines()[0]
    return printed.err


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_told_in_a_line_that_leads_on(
    typed: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert MISTAKES[typed] in told(typed, monkeypatch, capsys)


def test_there_are_sixty() -> None:
    assert len(MISTAKES) >= 60
