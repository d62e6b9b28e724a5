"""The planner's flags: `--plan` and what goes with it; `--auto`, which writes the config that is then trained."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace

from options.planner.keys import PlannerKeys
from options.planner.shapes import shape_of
from training.command_line import refuse_launcher
from training.errors import ConfigError, keep_tracebacks_in
from training.launch.start import name_accelerator
from training.metrics.devices import KNOWN, OWN, parse_devices
from training.option import Action, CommandLine, EntryPoint, Flags, IsOverride

NEEDS = {
    "dry_run": ("auto",),
    "devices": ("plan", "dry_run"),
    "host_memory": ("devices",),
    "search": ("plan",),
    "calibrate": ("plan",),
    "links": ("plan",),
    "per_host": ("links",),
}


def _add(line: CommandLine) -> None:
    """Add them; `--auto` stands in the place of `--config`."""
    staged, add = line.staged, line.parser.add_argument
    line.source.add_argument(
        "--auto", action="store_true", help=staged("choose a config for --model and --data, and train")
    )
    add("--model", metavar="DIR", help=staged("with --auto: the model's folder or hub name"))
    add("--data", metavar="FILE", nargs="+", help=staged("with --auto: files or folders of records"))
    add("--save", metavar="DIR", help=staged("with --auto: the run's folder; resumes a run in it"))
    add("--dry-run", action="store_true", help=staged("with --auto: write and show the config alone"))

    add("--plan", action="store_true", help="predict the run's time and memory, and exit")
    known = f"with --plan or --dry-run: plan for these devices instead of this machine's; known: {', '.join(KNOWN)}"
    add("--devices", metavar="8xA100-40G", help=f"{known}; by its numbers: '{OWN}'; mixed: 4xRTX4090,4xRTX3090")
    memory = "with --devices: gigabytes of a host's memory, into which weight streaming has to fit"
    add("--host-memory", type=float, metavar="GB", help=memory)
    links = "with --plan: the link inside a host and the link between hosts"
    add("--links", metavar="nvlink4,ib400", help=links)
    add("--per-host", type=int, metavar="N", help="with --links: GPUs of a host; 8 otherwise")
    add("--search", action="store_true", help=staged("with --plan: propose dims, micro-batch, ..."))
    add("--calibrate", action="store_true", help="with --plan: measure the layers here first")


def _check(parser: ArgumentParser, arguments: Namespace, is_override: IsOverride) -> None:
    """Give back the overrides that `--data` has swallowed, and check that `--auto` has what it needs."""
    if arguments.data:
        arguments.overrides += filter(is_override, arguments.data)
        arguments.data = [word for word in arguments.data if not is_override(word)]
    if {bool(arguments.model), bool(arguments.data), bool(arguments.save)} != {arguments.auto}:
        parser.error("--auto, --model, --data and --save: expected all of them, or --config")


def _prepare(arguments: Namespace, entry: EntryPoint) -> None:
    """Check the device names; for `--auto` choose a config, then continue as if `--config` had named its file.

    Raises:
        ConfigError: a device is unknown, or nothing can be proposed or chosen here.
    """
    if arguments.devices:
        arguments.processes, _ = parse_devices(arguments.devices)
    if arguments.host_memory is not None and not arguments.host_memory > 0:
        raise ConfigError(f"--host-memory: expected gigabytes above 0, found {arguments.host_memory:g}")
    if arguments.search and not entry.in_stages:
        raise ConfigError("--search: proposes pipelines; expected train_ds.py")
    if not arguments.auto:
        return
    if not entry.in_stages:
        raise ConfigError("--auto: configures pipelines; expected train_ds.py")
    refuse_launcher("--auto", entry.process)
    keep_tracebacks_in(arguments.save)

    name_accelerator()
    from options.planner.auto.command import configure  # takes seconds

    arguments.config = str(configure(entry.kind, arguments, entry.hosts.devices if entry.hosts else None))
    sys.argv[1:] = ["--config", arguments.config, *arguments.overrides]  # the run's processes get these too
    if arguments.dry_run:
        words = ["python", *sys.argv, *(entry.hosts.words if entry.hosts else ())]
        print(f"dry run: nothing is trained; {shlex.join(words)} trains")
        sys.exit()


def _plan(config: PlannerKeys, arguments: Namespace, entry: EntryPoint) -> None:
    """Predict the time and memory of the run, on one rank where a launcher started several."""
    if entry.process is not None and entry.process.rank > 0:
        return
    from options.planner.command import plan_run

    plan_run(config, arguments, entry.in_stages)


FLAGS = Flags(
    add=_add,
    needs=NEEDS,
    check=_check,
    prepare=_prepare,
    acts={"plan": Action(_plan, reads_model=lambda config: not shape_of(config.model_path))},
)
