"""`--auto`: the file that it writes, what it keeps of a user's wishes, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

import train_ds
from common.log import Log
from data.errors import DataError
from models.api import read_spec
from models.errors import CheckpointError
from options import load_config
from options.planner.auto.choices import precision
from options.planner.auto.search import Machine, Search
from options.planner.plan import Plan
from tests.conftest import FAQ, write_records
from tests.launching import DEEPSPEED, error_lines, run, write_config
from tests.options.planner.auto.helpers import UNTRAINED, auto, outline, texts
from training.data_setup import RecordReader
from training.errors import ConfigError
from training.metrics.devices import parse_devices, this_device

BESIDE = "--auto chooses what it depends on; expected beside it "


@pytest.fixture(scope="module")
def model(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


def reason(path: Path, name: str) -> str:
    """The comment beside a value."""
    found = re.search(rf"^ *{name}: .*?  # (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"no {name} in {path.read_text(encoding='utf-8')}"
    return found[1]


def test_it_writes_a_config_with_a_reason_beside_each_value_and_draws_the_plan(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = auto(model, tmp_path / "run")
    config = load_config(path)
    assert (config.model_path, config.data_path, config.save_path) == (str(model), [str(FAQ)], str(tmp_path / "run"))
    assert config.model_topo.processes == 2 and sum(config.model_topo.parts or []) == 5
    assert config.bf16.enabled and config.max_seq_len == 256 and config.scheduler
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    values = [line for line in lines if not line.endswith(":")]
    assert len(values) > 20 and all(re.search(r"\S: .*\S  # \S", line) for line in values)
    assert (tmp_path / "run" / "plan.png").is_file()
    printed = capsys.readouterr().out
    assert all(line in printed for line in lines) and "the whole run: " in printed and "fastest first" in printed


def test_what_the_user_says_stays_and_the_rest_is_chosen_around_it(model: Path, tmp_path: Path) -> None:
    words = ["model_topo.process_topology.dims=[2, 1]", "train_micro_batch_size_per_gpu=2", "use_grad_ckpt=true"]
    words += ["optimizer.type=SGD", "scheduler.type=constant", "max_seq_len=128", "train_batch_size=16"]
    path = auto(model, tmp_path / "run", *words, "schedule=1f1b", devices="8xA100-40G")
    config = load_config(path)
    assert config.model_topo.process_topology.dims == [2, 1] and len(config.model_topo.parts or []) == 2
    assert (config.train_micro_batch_size_per_gpu, config.use_grad_ckpt, config.schedule) == (2, True, "1f1b")
    assert (config.max_seq_len, config.train_batch_size, config.optimizer.type) == (128, 16, "SGD")
    for name in "dims train_micro_batch_size_per_gpu use_grad_ckpt max_seq_len train_batch_size schedule".split():
        assert reason(path, name) == "yours"
    assert reason(path, "parts") != "yours"


def test_a_dry_run_chooses_the_same_without_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So one knows what to rent before a model is downloaded."""
    shutil.copytree(model, tmp_path / "outline", ignore=shutil.ignore_patterns("*.safetensors*"))
    words = ["model_topo.process_topology.dims=[2, 1]", "train_micro_batch_size_per_gpu=1"]
    words += ["schedule=1f1b", "use_grad_ckpt=true"]  # to search little
    written = {}
    for folder in (model, tmp_path / "outline"):
        path = auto(folder, tmp_path / "run", *words, dry_run=True)
        written[folder] = path.read_text(encoding="utf-8").replace(str(folder), "MODEL")
        without = "weights: not needed for --dry-run, but to train: "
        assert (f"{without}{folder}: no weights; expected" in capsys.readouterr().out) == (folder != model)
        shutil.rmtree(tmp_path / "run")
    assert written[model] == written[tmp_path / "outline"]


@pytest.mark.slow
def test_a_home_folder_is_meant_in_every_path(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "faq.json").symlink_to(FAQ)
    for _ in range(2):  # the second one goes on
        path = auto("~/model", Path("~/run"), data="~/faq.json")
        assert path == tmp_path / "run" / "auto.yml" and path.is_file()
    config = load_config(path)
    assert (config.model_path, config.data_path) == (str(tmp_path / "model"), [str(tmp_path / "faq.json")])
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("words", "dims", "parts"),
    [
        (["model_topo.process_topology.dims=[2, 1]", "model_topo.parts=[4, 1]"], [2, 1], [4, 1]),
        (["model_topo.parts=[4, 1]"], [2, 2], [4, 1]),
        (["model_topo.parts=[2, 1, 1, 1]", "schedule=dualpipev"], [2, 2], [2, 1, 1, 1]),
        (["model_topo.process_topology.dims=[1, 4]", "train_micro_batch_size_per_gpu=3"], [1, 4], [5]),
    ],
)
def test_the_users_grid_is_planned_with(
    words: list[str], dims: list[int], parts: list[int], model: Path, tmp_path: Path
) -> None:
    config = load_config(auto(model, tmp_path / "run", *words, devices="4xA100-40G"))
    assert (config.model_topo.process_topology.dims, config.model_topo.parts) == (dims, parts)
    rows = config.micro_batch_size * config.model_topo.replicas
    assert config.train_batch_size % rows == 0


def test_it_is_never_written_anew(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = auto(model, tmp_path / "run")
    mine = path.read_text(encoding="utf-8").replace("n_epoches: 3", "n_epoches: 5")
    path.write_text(mine, encoding="utf-8")
    capsys.readouterr()
    assert auto(model, tmp_path / "run", "train_batch_size=64") == path
    assert path.read_text(encoding="utf-8") == mine
    assert (
        capsys.readouterr().out
        == f"auto: {path} is there, so the run goes on with it as it stands; remove it to choose anew\n"
    )
    with pytest.raises(ConfigError, match=r"^--data: .*other.json, but .*auto.yml has .*faq.json; expected the same"):
        auto(model, tmp_path / "run", data="other.json")
    with pytest.raises(ConfigError, match=r"^--model: other, but .*auto.yml has "):
        auto("other", tmp_path / "run")
    assert auto(f"{model}/", tmp_path / "run") == path
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"^--save: .*moved, but .*auto.yml has .*run; expected the same"):
        auto(model, tmp_path / "moved")


@pytest.mark.slow
def test_a_batch_of_packed_epochs_counts_rows(tmp_path: Path) -> None:
    records = [{"type": "instruct", "instruct": str(number), "output": "b"} for number in range(1000)]
    (tmp_path / "d.json").write_text(json.dumps(records), encoding="utf-8")
    path = auto(outline(tmp_path / "model"), tmp_path / "run", UNTRAINED, "packing=dataset", data=tmp_path / "d.json")
    config = load_config(path)
    assert config.scheduler and config.scheduler.params.warmup_num_steps == 1 and config.train_batch_size == 8
    assert reason(path, "train_batch_size").startswith("some 50 steps an epoch, 8 to 128 packed rows")
    assert reason(path, "warmup_num_steps") == "3% of some 6 steps"  # of 3 epochs


@pytest.mark.slow
def test_adafactor_gets_its_weights_apart(model: Path, tmp_path: Path) -> None:
    path = auto(model, tmp_path / "run", "optimizer.type=Adafactor")
    config = load_config(path)
    assert config.zero_optimization.stage == 0 and not config.bf16.enabled and config.model_topo.tensor == 1
    assert reason(path, "stage") == "Adafactor needs the weights apart"


@pytest.mark.slow
def test_it_goes_on_with_data_of_the_users_own(model: Path, tmp_path: Path) -> None:
    word = f"data_path=[{{path: {FAQ}, repeat: 2}}]"
    path = auto(model, tmp_path / "run", word)
    for again in ((), (word,)):  # as if it were written into the file
        assert auto(model, tmp_path / "run", *again) == path
    with pytest.raises(ConfigError, match=r"^--data: other.json, but .*auto.yml has [^ ]*faq.json; expected the same"):
        auto(model, tmp_path / "run", data="other.json")
    assert auto(model, tmp_path / "run", word, data="other.json") == path


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model_path=m", "command line: model_path: given by --model; remove it here"),
        ("save_path=s", "command line: save_path: given by --save; remove it here"),
        ("model_topo.sequence=2", "command line: model_topo.sequence: 2 does not divide the 1 replicas"),
        ("model_topo.experts=spread", "command line: model_topo.experts: spread is for processes that share layers"),
        (
            "model_topo.process_topology.axes=[pipe, data, model]",
            "command line: model_topo.process_topology.dims: expected one number for each of the axes",
        ),
        ("gradient_accumulation_steps=4", f"gradient_accumulation_steps: {BESIDE}train_batch_size, train_micro_batch_"),
    ],
)
def test_words_that_rest_on_what_is_still_to_be_chosen_are_refused(
    word: str, message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        auto(model, tmp_path / "run", word)
    assert str(caught.value).startswith(message) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("left", ["config.yml", "latest"])
def test_the_folder_of_another_run_is_left_alone(left: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / left).write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^--save: .* holds a run that --auto did not begin \({left}\)"):
        auto(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [left]


def test_a_folder_that_cannot_be_written_is_told_before_the_records_are_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for save in (Path("/proc/x"), tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=f"^--save: {save}: cannot be written: .*; expected a folder"):
            auto(model, save, data="none.json")


def test_a_model_that_fits_nowhere_is_refused_with_what_would_be_enough(tmp_path: Path) -> None:
    folder = outline(tmp_path / "model", "llama-13b")
    with pytest.raises(ConfigError) as caught:
        auto(folder, tmp_path / "run", UNTRAINED, "optimizer.type=AdamW", devices="1xV100-16G")
    message = (
        r"--model: fits nowhere on 1 x V100-16G, as --devices says: with all blocks recomputed and max_seq_len \d+ "
    )
    message += (
        r"in 1 stage a process needs [\d.]+ GB, and has 16.49 GB; expected \d+ such processes, or a smaller model"
    )
    assert re.fullmatch(message, str(caught.value))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_is_given_up_so_that_a_model_fits_is_said(tmp_path: Path) -> None:
    """Weights, gradients and states of a 7B are 16 x 7 GB: too much for two A100s, but for main memory."""
    folder = outline(tmp_path / "model")
    enough = load_config(auto(folder, tmp_path / "eight", UNTRAINED, devices="8xA100-80G"))
    assert not enough.zero_optimization.offloads and enough.max_seq_len == 2048
    assert enough.optimizer.params["lr"] == 2e-5
    assert (enough.train_batch_size, enough.n_epoches, enough.eval_share) == (8, 3, 0.0)  # of 110 samples
    path = auto(folder, tmp_path / "two", UNTRAINED, devices="2xA100-40G")
    config = load_config(path)
    assert config.zero_optimization.offloads and reason(path, "device").startswith("the optimizer's states do not fit")


@pytest.mark.parametrize(
    ("fixed", "lengths", "ways"),
    [((), [1024, 512, 256], 4), (("max_seq_len",), [1024], 4), (("zero_optimization",), [1024, 512, 256], 1)],
)
def test_records_are_cut_last_and_only_a_few_of_them(
    fixed: tuple[str, ...], lengths: list[int], ways: int, model: Path, tmp_path: Path
) -> None:
    """One of the records has more than 256 tokens, and a third of them more than 128."""
    path = write_config(tmp_path / "run.yml", model_path=str(model), data_path=str(FAQ), max_seq_len=1024)
    config, log = load_config(path), Log(quiet=True)
    data = RecordReader(config, model, log).read("data", config.data_path)
    machine = Machine(parse_devices("V100-16G")[1], (1,), math.inf, "one")
    search = Search(machine, read_spec(model), lambda _: data, frozenset(fixed), log)
    tried = [
        (
            changed.max_seq_len,
            changed.zero_optimization.offloads,
            changed.offload_activations,
            changed.offload_gradients,
        )
        for changed in search.ladder(config)
    ]
    given_up = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)][:ways]
    assert tried == [(length, *each) for length in lengths for each in given_up]


@pytest.mark.slow
def test_long_texts_become_pieces_that_are_read_once_and_dialogues_stay_whole(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", max_position_embeddings=8192)
    path = auto(folder, tmp_path / "run", data=texts(tmp_path / "t.json", 2, 6000))
    assert load_config(path).max_seq_len == 2048 and reason(path, "max_seq_len").startswith("texts are split")
    assert load_config(path).n_epoches == 1 and reason(path, "n_epoches").startswith("texts")
    assert load_config(auto(folder, tmp_path / "dialogues")).max_seq_len == 8192


def test_a_precision_that_the_device_has(tmp_path: Path) -> None:
    assert precision(parse_devices("V100-32G")[1])[0] == "fp16"
    assert precision(parse_devices("A100-40G")[1])[0] == "bf16"
    kind, why = precision(this_device())
    assert kind in ("bf16", None) and why


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", "no config.json; expected a HuggingFace or a pipeline-layout folder|config.json"),
        ("model.safetensors", "no weights; expected"),
        ("tokenizer.json", "no usable tokenizer: expected"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    remove: str, message: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint("llama")
    (folder / remove).unlink()
    with pytest.raises((CheckpointError, DataError), match=message) as caught:
        auto(folder, tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["[]", '[{"type": "instruct", "instruct": "a", "output": 3}]', "{"])
def test_data_without_a_record_are_refused(content: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        auto(model, tmp_path / "run", data=tmp_path / "d.json")
    assert "d.json" in str(caught.value) and not (tmp_path / "run").exists()


def test_a_name_of_the_hub_that_cannot_be_fetched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as refused:
        auto("nobody/no-such-model", tmp_path / "run")
    line = str(refused.value)
    assert line.startswith("nobody/no-such-model: not found; expected a model folder, or first: python ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--auto", "--model", "m", "--data", "d"], "--auto, --model, --data and --save: expected all of them, or"),
        (["--config", "c", "--save", "s"], "--auto, --model, --data and --save: expected all of them, or --config"),
        (["--config", "c", "--dry-run"], "--dry-run needs --auto"),
        (["--config", "c", "--inspect", "0"], "--inspect: expected a number of at least 1, found 0"),
        (["--auto", "--model", "m", "--data", "d", "--save", "s", "--plan"], "--inspect, --plan"),
        (["--auto", "--config", "c"], "argument --config: not allowed with argument --auto"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ds.py", *words])
    with pytest.raises(SystemExit) as left:
        train_ds.main()
    assert left.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_only_train_ds_chooses_and_no_launcher_does(model: Path, tmp_path: Path) -> None:
    words = ("--auto", "--model", model, "--data", FAQ, "--save", tmp_path / "run")
    result = run(sys.executable, "train_ds_zero.py", *words)
    assert error_lines(result) == ["error: --auto: configures pipelines; expected train_ds.py"]
    result = run(*DEEPSPEED, "--num_gpus", "1", "train_ds.py", *words)
    assert error_lines(result) == ["error: --auto: starts the processes itself; expected python train_ds.py"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_words_that_follow_the_data_are_overrides_where_there_is_such_a_key(model: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a=b.json"
    write_records(odd, 4)
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=1\nnode2 slots=1\n", encoding="utf-8")
    words: list[str | Path] = ["--auto", "--model", model, "--save", tmp_path / "run"]
    words += ["--dry-run", "--devices", "A100-40G"]
    words += ["--hostfile", hosts, "--include", "node1", "--data"]
    result = run(sys.executable, "train_ds.py", *words, FAQ, odd, "seed=7", "n_epochs=2")
    assert result.returncode == 0, result.stderr
    config = load_config(tmp_path / "run" / "auto.yml")
    assert (config.data_path, config.seed, config.n_epoches) == ([str(FAQ), str(odd)], 7, 2)
    trains = (
        f"train_ds.py --config {tmp_path / 'run' / 'auto.yml'} seed=7 n_epochs=2 --hostfile={hosts} --include=node1"
    )
    assert f"{trains} trains" in result.stdout


def test_a_cpu_runs_the_fewest_processes_of_those_about_as_fast() -> None:
    search = Search(Machine(this_device(), (1, 2, 4), 1e9, "a machine"), Mock(), Mock(), frozenset(), Mock())
    ranking: list[Plan] = []
    for count, seconds in ((2, 1.0), (4, 1.05), (1, 1.08), (1, 1.09), (1, 1.2)):
        plan = Mock(seconds=seconds)
        plan.basis.config.model_topo.processes = count
        ranking.append(plan)
    assert search.choose(ranking) is ranking[2]
    on_gpus = replace(search, machine=Machine(parse_devices("H100")[1], (4,), 1e9, "GPUs"))
    assert on_gpus.choose(ranking) is ranking[0]
