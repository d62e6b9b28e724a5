"""A newcomer's first hour: all that a README tells to type and to write, in its order, in a fresh clone.

The environment is that of the tests, and tiny models lie where downloads would have put them. What is left out needs a
network or a server, is these tests themselves, measures for hours, or names things for the reader to replace.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.pages import FENCE, READMES, commands, text_of
from tests.launching import Launch, metrics

LEFT_OUT = re.compile(r"\bpip |\bdownload |^vllm |^make (test|lint|format|clean)|-m benchmarks\.|\b(FILE|DIR|NAME)\b")
TYPED = re.compile(r"`((?:\.venv/bin/python|python|deepspeed|torchrun|make) [^`]+)`")
STEPS = (
    "hg_to_pp",
    "--inspect",
    "--plan",
    "config.yml",
    "reports.report",
    "n_epoches=6",
    "pp_to_hg",
    "demo.py",
)


def script_of(page: str) -> list[str]:
    """The commands and files of a README as lines of a shell script."""
    text, lines, end = text_of(page), list[str](), 0
    for fence in [*FENCE.finditer(text), None]:
        between = text[end : fence.start() if fence else None]
        lines += TYPED.findall(between)
        if fence:
            end = fence.end()
            if fence["info"].startswith("bash"):
                lines += [re.sub(r"\s+#.*", "", command) for command in commands(fence["text"])]
            else:
                file = re.findall(r"`([\w./]+\.(?:json|yml|py))`", between.rstrip().rpartition("\n")[2])[0]
                lines.append(f"cat > {file} <<'END'\n{fence['text']}END")
    return [line for line in dict.fromkeys(lines) if line.startswith("cat ") or not LEFT_OUT.search(line)]


def test_both_languages_type_the_same() -> None:
    english, chinese = (
        [re.sub(r"#.*", "", line) if line.startswith("cat ") else line for line in script_of(page)] for page in READMES
    )
    assert english == chinese
    eight = [line for line in english if "../llm/smollm2" in line and not line.startswith("cat ")]
    assert [step in line for step, line in zip(STEPS, eight, strict=True)] == [True] * 8
    for page in READMES:
        assert re.findall(r"^\*\*(\d)\. ", text_of(page), re.MULTILINE) == list("12345678")


@pytest.fixture
def clone(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Path:
    """What a newcomer has after `git clone`, the installation and the downloads."""
    home = tmp_path / "pipetune"
    if not (ROOT / ".git").exists():
        pytest.skip("a clone needs the project's git repository")
    subprocess.run(["git", "clone", "--quiet", ROOT, home], check=True)
    (home / ".venv").symlink_to(sys.prefix)
    shutil.copytree(make_checkpoint("llama"), tmp_path / "llm" / "smollm2" / "base")
    shutil.copytree(make_checkpoint("llama", num_hidden_layers=30), home / "runs" / "quickstart" / "base")
    return home


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("page", READMES)
def test_every_command_in_order(page: str, clone: Path) -> None:
    lines = [line.replace("make ", "make -o .venv/installed ") for line in script_of(page)]
    # A model without sense answers nothing right, which `make quickstart` ends with.
    lines = [line if "quickstart" not in line or line[:4] != "make" else f"{line} || test $? = 2" for line in lines]
    script = "\n".join(["set -ex", *lines])
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ""}
    done = Launch("bash", "-c", script, environment=environment, folder=clone).end()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "right answers: 0 of 8 before" in done.stdout
    models, runs = clone.parent / "llm" / "smollm2", clone / "runs"
    steps = [line["step"] for line in metrics(models / "run") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    made = [models / name for name in ("run/plan.png", "run/report.png", "hf/config.json", "hf/README.md")]
    made += [runs / "quickstart" / name for name in ("picture.png", "tuned/config.json")]
    made += [models / "hf" / "training.png", runs / "pictures" / "timeline.png", runs / "classifier" / "latest"]
    assert [path for path in made if not path.is_file()] == []
