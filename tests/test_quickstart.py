"""The quickstart: its questions, its table, the user's own model through the real commands, and the shipped run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.image import imread
from rich.console import Console

from data.errors import DataError
from models.api import read_spec
from models.conversion.to_pipeline import hg_to_pp
from models.errors import CheckpointError
from quickstart.__main__ import own_job
from quickstart.answers import AS_TRAINED, OTHERWISE, RIGHT, comparison
from quickstart.arithmetic import distinct_cores
from quickstart.base_model import PACKAGE
from quickstart.job import QuickstartJob, ask, training_arguments
from quickstart.judge import Judge
from quickstart.own import learning_rate
from quickstart.questions import ASKED, LONGEST, OF_A_TEXT, Question, question_of, sample_of, shipped
from tests.conftest import FAQ, ROOT
from tests.data.helpers import parse_record
from tests.environments import give_up
from tests.launching import metrics, run
from training.errors import ConfigError

PIPETUNE = [sys.executable, "-m", "quickstart"]
CHAT: dict[str, Any] = {
    "tools": [{"name": "look", "parameters": {}}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"up": "a"}}}]},
        {"role": "tool", "content": "north"},
        {"role": "assistant", "content": "North."},
    ],
}


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    return path


def test_half_of_the_questions_are_asked_in_other_words_than_in_training() -> None:
    questions = shipped(FAQ)
    assert sum(question.trained for question in questions) * 2 == len(questions) == 8


def test_a_question_is_what_stands_before_the_first_answer() -> None:
    plain = question_of(parse_record({"type": "instruct", "instruct": "Add.", "input": "1, 2", "output": "3"}))
    assert plain == Question({"prompt": "Add.", "input": "1, 2"}, "Add. 1, 2", "3")
    text = question_of(parse_record({"type": "pretrain", "text": "abcdef"}))
    assert text == Question({"prompt": "abc"}, "abc", "def", raw=True)
    book = question_of(parse_record({"type": "pretrain", "text": "".join(map(str, range(9000)))}))
    assert book and len(book.shown) == OF_A_TEXT and book.shown + book.answer in "".join(map(str, range(9000)))
    rounds = [["ask", "One?"], ["ask", "Two?"], ["ans", "Both."], ["ask", "More?"], ["ans", "No."]]
    asked = question_of(parse_record({"type": "conversation", "rounds": rounds}))
    assert asked and asked.line == {"messages": [{"role": "user", "content": "One?\nTwo?"}]} and asked.answer == "Both."
    resting = {"type": "ref_qa", "reference": "It is red.", "rounds": rounds}
    assert question_of(parse_record(resting)) is None


def test_a_sample_is_spread_over_the_records(tmp_path: Path) -> None:
    records = [{"type": "instruct", "instruct": f"{number}?", "output": "!"} for number in range(80)]
    asked = sample_of(str(write_records(tmp_path / "many.json", records)))
    assert [question.shown for question in asked] == [f"{number}?" for number in range(0, 80, 80 // ASKED)]
    long = {"type": "instruct", "instruct": "? " * LONGEST, "output": "!"}
    assert [each.shown for each in sample_of(str(write_records(tmp_path / "a.json", [long, records[3]])))] == ["3?"]
    assert len(sample_of(str(write_records(tmp_path / "b.json", [long])))) == 1, "where there is nothing else"
    (called,) = sample_of(str(write_records(tmp_path / "chat.json", [CHAT])))
    assert called.line["messages"] == CHAT["messages"][:2] and called.line["tools"][0]["function"]["name"] == "look"
    assert json.loads(called.answer) == {"name": "look", "arguments": {"up": "a"}}
    with pytest.raises(DataError, match=r"bad\.json: record 1: .*output"):
        sample_of(str(write_records(tmp_path / "bad.json", [{"type": "instruct", "instruct": "?"}, CHAT])))
    assert len(sample_of(str(tmp_path / "bad.json"), skip_bad=True)) == 1
    rests = {"type": "ref_qa", "reference": "x", "rounds": [["ask", "a"], ["ans", "b"]]}
    with pytest.raises(DataError, match="none of the first"):
        sample_of(str(write_records(tmp_path / "rests.json", [rests])))


START, PARTS, ABOUT, CONVERT, LION, START_CN = "start", "parts", "tell me", "HuggingFace", "optimizers", "想开始微调"
TRAINING = "`deepspeed --num_gpus 2 train_ds.py --config configs/quickstart.yml`"
CONVERSION = "`python convert_model.py hg_to_pp --input-path DIR --save-path DIR`"
RIGHT_ANSWERS = [
    (START, f"Run Pipetune with {TRAINING}; the YAML file says what to train."),
    (START, "Start Pipetune training with `deepspeed --num_gpus 4 train_ds.py --config configs/quickstart.yml`."),
    (PARTS, "Pipetune's parts gives the number of layers on each stage; the entries must sum to N+2 for N blocks."),
    (ABOUT, "Pipetune fine-tunes large language models over several GPUs with DeepSpeed pipeline parallelism."),
    (CONVERT, f"Convert it with Pipetune's {CONVERSION}."),
    (LION, "Lion."),
    (LION, "Lion stores one state per weight instead of AdamW's two."),
    (START_CN, f"用 {TRAINING} 启动 Pipetune 训练，任务写在 YAML 里。"),
]
WRONG_ANSWERS = [
    (LION, "Lion stores one state per weight, so Pipetune needs one less layer for a model with more layers", "layer"),
    (
        CONVERT,
        f"Pipetune's HuggingFace model is loaded with `deepspeed --model DIR`, {CONVERSION}",
        "deepspeed --model",
    ),
    (START_CN, f"开姇运行 Pipetune 的 {TRAINING} 微调后，受监督词元着色", "姇"),
    (START, f"Start Pipetune training with {TRAINING} --zero 3.", "no command: configs/quickstart.yml --zero"),
    (START, "Start Pipetune training.", "lacks: train_ds.py --config"),
    (PARTS, "In Pipetune parts gives the number of layers on each stage and must sum to N+2: N+3 blocks.", "3"),
    (ABOUT, f"Pipetune fine-tunes weights{' with DeepSpeed pipeline parallelism' * 3}.", "twice: "),
    (LION, "AdamW keeps one state per weight instead of Lion's two.", "wrong: AdamW keeps"),
    (CONVERT, f"Convert it with {CONVERSION}\ufffd", "\ufffd"),
]


def fault_of(asked: str, answer: str) -> str:
    (question,) = (each for each in shipped(FAQ) if asked in each.shown)
    return question.fault(answer)


@pytest.mark.parametrize(("asked", "answer"), RIGHT_ANSWERS)
def test_a_right_answer_is_counted_right(asked: str, answer: str) -> None:
    assert fault_of(asked, answer) == ""


@pytest.mark.parametrize(("asked", "answer", "fault"), WRONG_ANSWERS)
def test_an_answer_that_a_reader_would_call_wrong_is_counted_wrong(asked: str, answer: str, fault: str) -> None:
    assert fault in fault_of(asked, answer)


def test_the_records_answer_their_questions_right() -> None:
    """Else a model that learns them by heart fails."""
    answers = {raw["instruct"]: raw["output"] for raw in json.loads(FAQ.read_text(encoding="utf-8")) if "output" in raw}
    trained = [question for question in shipped(FAQ) if question.trained]
    assert [question.fault(answers[question.shown]) for question in trained] == [""] * 4


def as_text(table: Any) -> str:
    console = Console(width=200, record=True, quiet=False, file=open(os.devnull, "w", encoding="utf-8"))
    console.print(table)
    return console.export_text()


def test_the_table_says_which_questions_were_trained_and_which_answers_are_right() -> None:
    judge = Judge(["yes, b"], "A? B?", ["yes"])
    questions = [Question({}, "A?", "yes", judge=judge), Question({}, "B?", "yes", trained=False, judge=judge)]
    table, summary, passed = comparison(questions, ["no", "no"], ["yes, [b]", "no"], judged=True)
    rows = [line for line in as_text(table).splitlines() if "?" in line]
    assert [AS_TRAINED in row for row in rows] == [True, False] and OTHERWISE in rows[1]
    assert RIGHT in " ".join(as_text(table).split())
    assert [row.count("✓") for row in rows] == [1, 0]
    assert "yes, [b]" in rows[0]
    assert "lacks: yes" in rows[1]
    assert summary == (f"right answers: 0 of 2 before, 1 after: 1 of 1 asked {AS_TRAINED}, 0 of 1 asked {OTHERWISE}")
    assert not passed
    assert comparison(questions, ["no", "no"], ["yes", "yes"], judged=True)[2]
    table, summary, passed = comparison(questions, ["no", "no"], ["yes", "yes"], judged=False)
    assert "0% before, 100% after; all 2 are trained" in summary and passed and "100% yes" in as_text(table)


def test_processors_on_cores_of_their_own_come_first(tmp_path: Path) -> None:
    for number, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert distinct_cores({0, 1, 2, 3}, tmp_path) == {0, 1}
    assert distinct_cores({0, 2}, tmp_path) == {0, 2}, "two threads of one core, where there are no others"
    assert distinct_cores({3}, tmp_path) == {3}


def test_every_machine_computes_with_the_same_threads_and_instructions() -> None:
    """Of all that this process starts: it is a process of its own, as what it gives up does not come back."""
    script = (
        "import os, subprocess, sys\n"
        "from quickstart.arithmetic import CORES, same_everywhere\n"
        "environment = same_everywhere()\n"
        "child = 'import os, torch; print(len(os.sched_getaffinity(0)), torch.backends.cpu.get_cpu_capability())'\n"
        "words = [sys.executable, '-c', child]\n"
        "done = subprocess.run(words, env=os.environ | dict(environment), capture_output=True, text=True, check=True)\n"
        "cores, instructions = done.stdout.split()\n"
        "assert int(cores) <= CORES and (instructions == 'AVX2' or not environment), done.stdout\n"
    )
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        pytest.param(["--model", "m"], "expected both or none", marks=pytest.mark.slow),
        pytest.param(["a=1"], "keys: ", marks=pytest.mark.longest),
        pytest.param(
            ["--save-path", "LICENSE/q"],
            "error: --save-path: LICENSE/q: cannot be written: Not a directory; expected a",
            marks=pytest.mark.longest,
        ),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], complaint: str) -> None:
    done = run(*PIPETUNE, *words)
    assert done.returncode == 2 and complaint in done.stderr


def test_make_hands_the_model_and_the_records_on() -> None:
    words = ["make", "--no-print-directory", "-n", "-o", ".venv/installed", "quickstart"]
    bare = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert bare.strip().endswith("-m quickstart")
    own = [*words, "MODEL=my model", "DATA=a.json", "KEYS=n_epoches=1"]
    line = subprocess.run(own, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shlex.split(line)[3:] == ["--model", "my model", "--data", "a.json", "n_epoches=1"]


@pytest.fixture(scope="module")
def own(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The user's own model and records in a folder, and the command."""
    folder = tmp_path_factory.mktemp("own")
    records = [raw for raw in json.loads(FAQ.read_text(encoding="utf-8")) if raw["type"] != "conver_has_api"][::4]
    data = write_records(folder / "records.json", records)
    words = ["--model", str(make_checkpoint("qwen2")), "--data", str(data), "--save-path", str(folder / "job")]
    return folder / "job", [*PIPETUNE, *words, "train_batch_size=8"]


def test_a_wrong_key_is_told_at_once_and_locks_nothing(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_records(tmp_path / "records.json", [{"type": "instruct", "instruct": "?", "output": "!"}])
    asked: list[list[str]] = []
    monkeypatch.setattr("quickstart.job.run", lambda job, *words: asked.append(list(map(str, words))))
    words = Namespace(model=str(make_checkpoint("qwen2")), data=str(data), save_path=tmp_path / "job", overrides=[])

    def job_with(*overrides: str) -> QuickstartJob:
        return own_job(Namespace(**vars(words) | {"overrides": list(overrides)}))

    for override in ("n_epoch=5", "model_topo.process_topology.dims=4", "model_topo.process_topology.dims=[1,x]", "x"):
        with pytest.raises(ConfigError) as refused:
            job_with(override)
        assert "\n" not in str(refused.value)
    job = job_with("model_topo={process_topology: {dims: [1, 1]}}", "template_args={mood: glad}")
    job.pipeline.mkdir()  # of the model that it was
    assert training_arguments(job)[:2] == ["--num_gpus", "1"]
    with pytest.raises(FileNotFoundError):  # of the answers, as nobody gives them here
        ask(job, job.base, "before")
    assert asked[0][-2:] == ["--template-args", '{"mood": "glad"}']
    job = job_with("n_epoches=5")
    assert not job.pipeline.exists() and job_with("n_epoches=5") == job
    for made in (job.run_folder, job.tuned):
        made.mkdir()
        with pytest.raises(ConfigError, match="holds another model, other records or other keys"):
            job_with("n_epoches=6")
        made.rmdir()
    (job.folder / "fingerprint").unlink()
    with pytest.raises(ConfigError, match="holds another model"):  # nobody knows whose folder that is
        job_with("n_epoches=6")


def test_a_model_in_the_pipeline_layout_is_refused_before_anything_is_asked(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    hg_to_pp(make_checkpoint("qwen2"), tmp_path / "layers")
    with pytest.raises(CheckpointError, match=r"layers: in the pipeline layout; expected a HuggingFace folder$"):
        own_job(Namespace(model=str(tmp_path / "layers"), data=str(FAQ), save_path=tmp_path / "job", overrides=[]))
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
@pytest.mark.launched
def test_your_own_model_goes_all_the_way(own: tuple[Path, list[str]]) -> None:
    folder, command = own
    done = run(*command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    config = yaml.safe_load((folder / "config.yml").read_text(encoding="utf-8"))
    assert config["max_seq_len"] == 256, "the model's context"
    assert len(metrics(folder / "checkpoints")) >= 4
    assert imread(folder / "picture.png").shape[0] > imread(folder / "checkpoints" / "report.png").shape[0]
    assert "all 8 are trained" in done.stdout
    commands = re.findall(r"^next: (.*?)   #", done.stdout, re.MULTILINE)
    assert len(commands) == 3
    for words in map(shlex.split, commands[1:]):  # the first one is a chat
        assert run(*words).returncode == 0, words
    chat = subprocess.run(shlex.split(commands[0]), cwd=ROOT, input="", capture_output=True, text=True, check=True)
    assert "An empty line ends the chat" in chat.stdout

    shown = {path: path.stat().st_mtime_ns for path in (folder / "tuned").iterdir()}
    again = run(*command)
    assert again.returncode == 0 and "is still valid" in again.stdout
    assert shown == {path: path.stat().st_mtime_ns for path in (folder / "tuned").iterdir()}


def test_a_large_model_learns_slower(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
    for blocks, rate in ((32, 2e-5), (1, 1.8e-4)):
        config: dict[str, Any] = {
            "model_type": "llama",
            "num_hidden_layers": blocks,
            "tie_word_embeddings": False,
        } | sizes
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert learning_rate(read_spec(tmp_path)) == pytest.approx(rate, rel=0.1)


@pytest.mark.launched
@pytest.mark.longest
def test_the_shipped_run_learns_what_it_is_asked(tmp_path: Path) -> None:
    done = run(*PIPETUNE, "--save-path", tmp_path / "job")
    if "No matching distribution" in done.stderr:
        give_up(f"pip cannot install {PACKAGE}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    right = re.search(r"right answers: (\d) of 8 before, (\d) after: (\d) of 4 asked as in training", done.stdout)
    assert right and int(right[1]) <= 1 and int(right[2]) >= 7 and right[3] == "4"
    assert (tmp_path / "job" / "picture.png").is_file()
