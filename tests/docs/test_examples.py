"""The scripts in examples/ train, and what they trained does what it should; those for clusters fit the entry points.

tests/cluster/test_slurm.py runs slurm.sbatch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from options import RunConfig, load_config
from tests.conftest import ROOT
from tests.docs.pages import blocks, commands
from tests.environments import environment
from tests.launching import deepspeed, run
from training.command_line import parse_arguments

EXAMPLES = {"vit": r"right on 200 other images: (\d+)%", "encoder_decoder": r"sorted right: (\d+) of 40"}
LEAST = {"vit": 60, "encoder_decoder": 20}  # by chance 25 %, and none


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    done = deepspeed(2, f"examples/{name}.py", tmp_path / "run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (right,) = re.findall(EXAMPLES[name], done.stdout)
    assert int(right) >= LEAST[name]


def test_the_job_of_kubernetes_fits_the_launcher_the_door_and_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes.yml").read_text(encoding="utf-8"))
    pods, (container,) = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"]
    name, *words = container["command"]
    assert name == "torchrun"
    launched = get_args_parser().parse_args([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words])
    monkeypatch.setattr(sys, "argv", [launched.training_script, *launched.training_script_args])
    asked = parse_arguments(RunConfig, "")
    ports = load_config(ROOT / "configs/ds_config_pp.yml", asked.overrides).ports
    opened = {ports.meeting or launched.master_port, ports.failure_detector}
    assert opened == {each["port"] for each in service["spec"]["ports"]}
    assert opened == {each["containerPort"] for each in container["ports"]}
    assert (ROOT / launched.training_script).is_file()
    assert int(launched.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(launched.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert launched.master_addr == f"{job['metadata']['name']}-0.{pods['subdomain']}"
    assert pods["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pods["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts[f"/{Path(asked.config).parts[1]}"]]


def test_the_questions_of_the_evaluation_have_one_right_answer_each() -> None:
    lines = (ROOT / "examples/evaluation/faq.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    assert len({each["question"] for each in questions}) == len(questions) == 12
    for each in questions:
        assert len(set(each["answers"])) == 4
        assert each["right"] in range(4)


@pytest.mark.longest
def test_the_evaluation_goes_as_its_page_says(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    install, evaluate = (each for each in blocks("bash", pages=("docs/evaluation.md",)))
    python = environment(tmp_path / "own", *re.findall(r"lm-eval==\S+", install.text))
    model = make_checkpoint("llama")
    (command,) = commands(evaluate.text.replace("../lm-eval/bin", str(python.parent)))
    done = run("bash", "-c", command.replace("runs/quickstart/tuned", str(model)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^\|pipetune_faq\| .*\|acc ", done.stdout, re.MULTILINE)


def test_the_job_of_slurm_is_a_script() -> None:
    script = ROOT / "examples/slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    signal = re.findall(r"^#SBATCH --signal=(\w+)@", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert [f"SIG{each}" for each in signal] == load_config(ROOT / "configs/ds_config_pp.yml").preemption_signals
