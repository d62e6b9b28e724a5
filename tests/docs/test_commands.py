"""Every command of the documentation is one that its program takes: options, files, keys and overrides.

Those of our entry points go through their own parsers, behind those of the launchers, and their overrides into a
config. Other programs are known here by name, and their block says what it needs (tests/docs/pages.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser

import convert_model
from options import RunConfig, load_config
from options.demo import command_line as demo
from tests.conftest import ROOT
from tests.docs.pages import PAGES, Block, blocks, commands, without_blocks
from training.command_line import parse_arguments
from training.metrics.devices import parse_devices

MINIMAL = {
    "model_path": "model",
    "data_path": "records.json",
    "save_path": "run",
    "train_batch_size": 64,
    "optimizer": {"params": {"lr": 1e-5}},
}
PIPELINE, ZERO = "train_ds.py", "train_ds_zero.py"
ENTRY_POINTS = (PIPELINE, ZERO, "convert_model.py", "demo.py")
HERE = {"source", "export", "tensorboard", "grep"}
ELSEWHERE = {
    "network": {"pip", "hf", "lm_eval", "modelscope"},
    "server": {"pip", "vllm", "curl", "docker", "transformers", "llama-server"},
    "hosts": {"docker", "ssh", "ssh-copy-id", "ssh-keygen", "rsync", "sbatch"},
}
TARGETS = re.findall(r"^([^\s:#=]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
MODULES_ELSEWHERE = {"sglang.launch_server", "vllm.entrypoints.openai.api_server"}


def parsed(monkeypatch: pytest.MonkeyPatch, entry_point: str, words: list[str]) -> Callable[[], argparse.Namespace]:
    monkeypatch.setattr(sys, "argv", [entry_point, *words])
    monkeypatch.setattr(argparse.ArgumentParser, "_get_option_tuples", lambda *_: [])  # no beginnings of options
    if entry_point in (PIPELINE, ZERO):
        return lambda: parse_arguments(RunConfig, "")
    return convert_model.parse_arguments if entry_point == "convert_model.py" else demo.parse_arguments


class Checker:
    """One command line, word for word."""

    def __init__(self, block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.block, self.folder, self.monkeypatch = block, folder, monkeypatch

    def command(self, line: str) -> None:
        for part in re.split(r"&&|\|(?=\s)", line):
            words = shlex.split(part.partition(" > ")[0], comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                self.program(Path(words[0]).name, words[1:])

    def program(self, name: str, words: list[str]) -> None:
        if name in ("python", "python3"):
            self.python(words)
        elif name == "deepspeed":
            launched = runner.parse_args(words)
            self.script(launched.user_script, launched.user_args)
        elif name == "torchrun":
            launched = get_args_parser().parse_args(words)
            self.script(launched.training_script, launched.training_script_args)
        elif name == "make":
            assert words[0].replace(".venv/", "$(VENV)/") in TARGETS, words[0]
        elif name not in HERE:
            assert name in ELSEWHERE.get(self.block.needs, ()), f"{name}: expected {self.block.place} to say needs=..."
        ours = [word for word in words if re.search(r"^requirements.*txt$|^examples/", word)]
        assert [word for word in ours if not (ROOT / word).exists()] == []

    def python(self, words: list[str]) -> None:
        if words[0] != "-m":
            self.script(words[0], words[1:])
        elif words[1] == "pytest":
            assert (ROOT / words[2]).is_file()
        elif words[1] in MODULES_ELSEWHERE:
            assert self.block.needs == "server"
        elif words[1] != "venv":
            found = importlib.util.find_spec(words[1])
            assert found and found.origin, words[1]
            source = Path(found.origin).read_text(encoding="utf-8")
            if (main := Path(found.origin).with_name("__main__.py")).is_file():
                source += main.read_text(encoding="utf-8")
            for shared in ("report.py", "unattended.py"):  # which have the options of several benchmarks
                source += (ROOT / "benchmarks" / shared).read_text(encoding="utf-8")
            assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source] == []

    def script(self, script: str, words: list[str]) -> None:
        if script not in ENTRY_POINTS:
            assert not script.startswith("examples/") or (ROOT / script).is_file(), script
            return
        if not (self.block.language or words):  # the name of the command alone
            return
        arguments = parsed(self.monkeypatch, script, words)()
        if script == "demo.py":
            demo.check(arguments)
        elif script in (PIPELINE, ZERO) and not arguments.auto:
            path = ROOT / arguments.config
            if not (arguments.config.startswith("configs/") and path.is_file()):
                assert not arguments.config.startswith("configs/"), arguments.config
                path = self.folder / "config.yml"
                path.write_text(yaml.safe_dump(MINIMAL))
            load_config(path, arguments.overrides).check_entry_point(in_stages=script == PIPELINE)
            if arguments.devices:
                parse_devices(arguments.devices)


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.place)
def test_the_commands_of_a_block(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Checker(block, tmp_path, monkeypatch)
    for command in commands(block.text):
        try:
            checker.command(command)
        except SystemExit:  # a parser's
            pytest.fail(f"{block.place}: {command}")


def inline() -> Iterator[Block]:
    """The commands in the text."""
    for page in PAGES:
        for found in re.finditer(
            r"`((?:deepspeed|(?:\.venv/bin/)?python|torchrun|make)\s[^`]+)`", without_blocks(page)
        ):
            yield Block(page, 0, "", "", " ".join(found[1].split()), "")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_the_text(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (each for each in inline() if each.page == page):
        try:
            Checker(block, tmp_path, monkeypatch).command(block.text)
        except SystemExit:
            pytest.fail(f"{page}: {block.text}")


def test_the_synopsis_of_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    (synopsis,) = (each for each in blocks("text", pages=("docs/conversion.md",)) if "--verify" in each.text)
    for command in commands(synopsis.text):
        optional = re.findall(r"\[([^\]]+)\]", command)
        words = shlex.split(re.sub(r"\[[^\]]+\]", "", command))[2:]
        for option in optional:
            words += [word.partition("|")[0] for word in option.split()]
        try:
            parsed(monkeypatch, "convert_model.py", words)()
        except SystemExit:
            pytest.fail(command)
