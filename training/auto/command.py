"""`train_ds.py --auto --model DIR --data FILE --save DIR`: a config for them, written with its reasons, and its plan.

The file is `auto.yml` in the run's folder. It is never written anew: a second start goes on with it as it stands, its
user's own changes included. Cost: the records are tokenized, which the run then need not do; on a CPU layers are timed,
for some ten seconds or, of a large model, minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from common.log import Log
from common.whole_files import replace_text
from data.paths import with_home
from data.records.sources import as_sources
from models.api import download
from models.checkpoint.layout import HUB
from models.errors import CheckpointError
from training.auto.choices import Choices
from training.auto.choose import choose
from training.auto.machine import Machine
from training.config.yaml_file import load_config
from training.errors import ConfigError
from training.launch.start import Hosts
from training.plan.command import WIDTH, show
from training.plan.rendering import facts
from training.preflight import check_writable

FILE = "auto.yml"
OF_A_RUN = ("config.yml", "latest")  # what a run leaves in its folder
BASE = "base"  # where a model of the hub is put, in the run's folder


def configure(arguments: argparse.Namespace, hosts: Hosts | None) -> Path:
    """The config file of a run: that of an earlier start, or a new one.

    Raises:
        ConfigError, CheckpointError, DataError: there is no model, no record, or no room for the run.
    """
    # A shell leaves ~ as it is behind = and in quotes.
    arguments.save, arguments.model, *arguments.data = map(
        with_home, (arguments.save, arguments.model, *arguments.data)
    )
    choices = Choices(arguments.overrides)
    for key, option in (("model_path", "--model"), ("save_path", "--save")):
        if key in choices.own:
            raise ConfigError(f"command line: {key}: with --auto {option} says it; expected no such word")
    log = Log(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    save, model = Path(arguments.save), arguments.model
    path = save / FILE
    is_name = HUB.fullmatch(model) and not Path(model).exists()
    folder = str(save / BASE) if is_name else model
    if path.exists():
        _check_same(path, folder, arguments, "data_path" in choices.own)
        log.print(f"auto: {path} is there, so the run goes on with it as it stands; remove it to choose anew")
        return path
    check_writable("--save", save)
    if found := [name for name in OF_A_RUN if (save / name).exists()]:
        raise ConfigError(f"--save: {save} holds a run that --auto did not begin ({found[0]}); expected another folder")
    if is_name:
        log.print(f"auto: {model} is no folder here; fetching it from the HuggingFace hub into {folder}")
        try:
            download(model, Path(folder))
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{model}: ")
            raise CheckpointError(f"--model: {model}: no such folder, nor on the HuggingFace hub: {reason}") from None
    choices.add("model_path", folder, "--model")
    choices.add("data_path", arguments.data, "--data")
    choices.add("save_path", str(save), "--save")
    lines, plan = choose(choices, Machine.find(hosts, arguments.devices), log)
    text = choices.as_yaml(["Chosen by train_ds.py --auto; beside each value why.", *lines, *facts(plan)])
    show(plan, log)
    replace_text(path, text)
    log.print(f"{path}:\n{text}")
    return path


def _check_same(path: Path, model: str, arguments: argparse.Namespace, own_data: bool) -> None:
    """See that an earlier start's config is one for this model, these data and this folder.

    Args:
        own_data: whether a word says which data, which then overrides the file.
    """
    config = load_config(path)
    paths = [source.path for source in as_sources(config.data_path)]
    data = [with_home(each) for path in paths for each in ([path] if isinstance(path, str) else path)]
    for name, given, known in (
        ("model", [model], [config.model_path]),
        ("data", arguments.data, arguments.data if own_data else data),
        ("save", [arguments.save], [config.save_path]),
    ):
        if list(map(os.path.normpath, given)) != list(map(os.path.normpath, known)):
            told = f"{', '.join(given)}, but {path} has {', '.join(known)}"
            raise ConfigError(f"--{name}: {told}; expected the same, or another --save")
