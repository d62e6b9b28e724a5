"""A model that is trained in gdGPT's prompts answers in them: in demo.py from the run and from its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import metrics, supervised, topology, write_config
from tests.options.demo.conftest import Make, RunDemo

# What differs is the prompt around the question, so that a model asked in another one answers wrongly.
ROUNDS = [["ask", "Why?"], ["ans", "No."]]
RECORDS: list[dict[str, Any]] = [
    {"type": "instruct", "instruct": "Why?", "output": "Yes."},
    {"type": "conversation", "rounds": [*ROUNDS, ["ask", "Why?"], ["ans", "So."]]},
    {"type": "ref_qa", "reference": "x", "rounds": [["ask", "Why?"], ["ans", "Hm."]]},
]
GREEDY = ("--greedy", "--max-new-tokens", "6")


@pytest.mark.slow
@pytest.mark.launched
def test_a_trained_model_answers_in_the_prompts_of_its_records(
    make_checkpoint: Make, run_demo: RunDemo, tmp_path: Path
) -> None:
    records, reference = tmp_path / "records.json", tmp_path / "x.txt"
    records.write_text(f"[ // by hand\n{', '.join(map(json.dumps, RECORDS))}, ]", encoding="utf-8")
    reference.write_text("x", encoding="utf-8")
    config = write_config(
        tmp_path / "run.yml",
        model_path=str(make_checkpoint("llama")),
        data_path=str(records),
        prompt_format="gdgpt",
        train_batch_size=3,
        n_epoches=60,
        optimizer={"type": "AdamW", "params": {"lr": 5.0e-3}},
        model_topo=topology((1, 1)),
        export_hf=True,
    )
    done = supervised(1, "train_ds.py", "--config", config)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "prompts: gdgpt\n" in done.stdout
    assert "warning: 1 record: have comments, or commas before a closing bracket" in done.stdout
    run = config.with_suffix("")
    assert metrics(run)[-1]["loss"] < 0.05

    answers = {(): "No.", ("--input", ""): "Yes.", ("--reference", reference): "Hm."}
    for folder in (run, run / "hf"):
        for more, expected in answers.items():
            code, out, told = run_demo(folder, "--prompt", "Why?", *more, *GREEDY)
            assert (code, out.strip()) == (0, expected)
            assert "prompts as in training: prompt_format: gdgpt" in told
    code, out, _ = run_demo(run, *GREEDY, typed="Why?\nWhy?\n")
    assert (code, [line.strip() for line in out.split("> ")[1:3]]) == (0, ["No.", "So."])
    assert run_demo(run, "--prompt", "Why?", "--prompt-format", "plain", *GREEDY)[1].strip() != "No."
