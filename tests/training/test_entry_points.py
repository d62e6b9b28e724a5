"""Entry points: what they import before they have work, and how they end on an error."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from data.errors import DataError
from data.paths import default_folder
from models.errors import CheckpointError
from tests.conftest import FAQ
from tests.launching import run, topology, write_config
from training import errors
from training.errors import ConfigError, RunRefused, describe_and_save, exit_with_one_line, keep_tracebacks_in

ENTRY_POINTS = ("train_ds.py", "train_ds_zero.py", "convert_model.py", "demo.py")
HEAVY = ("torch", "transformers", "deepspeed", "pyarrow")
# Runs an entry point as a user does, and then says what it has imported.
ASK = (
    "import runpy, sys\n"
    "sys.argv = sys.argv[1:]\n"
    "try:\n"
    "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "finally:\n"
    f"    print('imported:', *[name for name in {HEAVY} if name in sys.modules])\n"
)
# Runs an entry point where nothing heavy can be imported.
WITHOUT = (
    "import runpy, sys\n"
    f"sys.modules.update(dict.fromkeys({HEAVY}))\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)
# Runs an entry point and sends it Ctrl-C when it first imports torch.
INTERRUPT = (
    "import runpy, signal, sys\n"
    "class Finder:\n"
    "    def find_spec(self, name, *_):\n"
    "        if name == 'torch':\n"
    "            sys.meta_path.remove(finder)\n"
    "            signal.raise_signal(signal.SIGINT)\n"
    "finder = Finder()\n"
    "sys.meta_path.insert(0, finder)\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_help_imports_nothing_slow(entry_point: str) -> None:
    result = run(sys.executable, "-c", ASK, entry_point, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ") and result.stdout.endswith("imported:\n")


@pytest.mark.parametrize(
    ("entry_point", "mistake"),
    [
        ("train_ds.py", "modl_path: x"),
        ("train_ds_zero.py", "modl_path: x"),
        ("train_ds.py", "optimizer: {typ: SGD}"),
        ("train_ds.py", "prompt_format: x"),
    ],
)
def test_a_mistake_in_the_config_is_reported_before_slow_imports(
    entry_point: str, mistake: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path / "run.yml", model_path="m", data_path="d")
    path.write_text(path.read_text(encoding="utf-8") + mistake + "\n", encoding="utf-8")
    result = run(sys.executable, "-c", ASK, entry_point, "--config", path)
    assert (result.returncode, result.stdout) == (2, "imported:\n")
    assert re.fullmatch(rf"error: {re.escape(str(path))}: .* \(see docs/configuration\.md\)\n", result.stderr)


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        | {"SLURM_NODEID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "here"},
    ],
    ids=["deepspeed", "srun"],
)
def test_another_number_of_processes_is_reported_before_slow_imports(
    launcher: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    path = write_config(tmp_path / "run.yml", model_path="m", data_path="d", model_topo=topology([2, 1]))
    result = run(sys.executable, "-c", WITHOUT, "train_ds.py", "--config", path)
    assert (result.returncode, result.stdout) == (2, "")
    expected = "expected --num_gpus 2, 2 slots of a hostfile, or srun --ntasks 2 (see docs/configuration.md)"
    assert result.stderr == (
        "error: model_topo.process_topology.dims: [2, 1] ask for 2 processes, but 4 were started; " + expected + "\n"
    )


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_ctrl_c_ends_in_one_line(entry_point: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_checkpoint("llama")
    config = write_config(tmp_path / "run.yml", model_path=str(model), data_path=str(FAQ))
    words: dict[str, tuple[str | Path, ...]] = {
        "convert_model.py": ("hg_to_pp", "--input-path", model, "--save-path", tmp_path / "layers"),
        "demo.py": ("--model", model, "--prompt", "?"),
    }
    result = run(
        sys.executable, "-c", INTERRUPT, entry_point, *words.get(entry_point, ("--config", config, "--inspect", "1"))
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "error: interrupted\n")


@pytest.fixture
def before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The system's temporary folder, where tracebacks go before a config is read."""
    monkeypatch.setattr(errors, "_traceback_folder", None)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def unforeseen() -> RuntimeError:
    try:
        raise RuntimeError("first \x1b[2Jline\nerror: second line")
    except RuntimeError as error:
        return error


def test_an_unforeseen_error_is_one_line_and_leaves_its_traceback_in_the_runs_folder(
    before_a_run: Path, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    for expected in (before_a_run, run_folder):
        code, line = describe_and_save(unforeseen())
        found = re.fullmatch(r"RuntimeError: first \\x1b\[2Jline; the full traceback is in (.+)", line)
        assert found and code == 1
        path = Path(found[1])
        assert path.parent == expected
        report = path.read_text(encoding="utf-8")
        assert report.startswith("Traceback") and "in unforeseen" in report and "error: second line" in report
        keep_tracebacks_in(str(run_folder))
        if expected == before_a_run:  # a folder that is not there is not made for it
            assert str(before_a_run) in describe_and_save(unforeseen())[1]
            run_folder.mkdir()


def test_an_unforeseen_error_ends_with_code_1(before_a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, exit_with_one_line():
        raise unforeseen()
    printed = capsys.readouterr()
    assert (left.value.code, printed.out, printed.err.count("\n")) == (1, "", 1)
    assert printed.err.startswith("error: RuntimeError: first ")


@pytest.mark.parametrize(
    ("entry_point", "error", "page"),
    [
        ("configuration", CheckpointError("m/config.json: model_type 'x' is not supported"), "models"),
        ("configuration", CheckpointError("r: cannot be written"), "troubleshooting"),
        ("demo", CheckpointError("m: no weights"), "troubleshooting"),
        ("conversion", CheckpointError("m: exists and is not empty"), "conversion"),
        ("conversion", CheckpointError("m/config.json: model_type 'x' is not supported"), "models"),
        ("demo", ConfigError("--raw: expected"), "demo"),
    ],
)
def test_an_error_names_the_page_that_explains_it(
    entry_point: str, error: Exception, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), exit_with_one_line(page=f"docs/{entry_point}.md"):
        raise error
    assert capsys.readouterr().err == f"error: {error} (see docs/{page}.md)\n"


def test_too_few_file_handles_is_a_user_error(before_a_run: Path) -> None:
    code, line = describe_and_save(OSError(24, os.strerror(24), "weights"))
    assert code == 2 and "ulimit -n" in line
    assert not list(before_a_run.iterdir())


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError, RunRefused])
def test_error_texts_are_escaped(kind: type[Exception]) -> None:
    assert describe_and_save(kind("a\nerror: forged \x1b]0;title\x07 \u202efdp.exe")) == (
        2,
        r"a\nerror: forged \x1b]0;title\x07 \u202efdp.exe",
    )
    assert describe_and_save(kind("record 1: \x9b", "record 2: \r")) == (2, "record 1: \\x9b\nrecord 2: \\r")


@pytest.mark.slow
def test_texts_of_a_model_folder_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x\\u001b[31m\\nerror: all is well"}', encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    words = ("convert_model.py", "hg_to_pp", "--input-path", tmp_path, "--save-path", tmp_path / "out")
    result = run(sys.executable, *words)
    assert result.returncode == 2
    assert "\x1b" not in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that no password file knows."""
    monkeypatch.delenv("PIPETUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nosuchuser/cache")
    with pytest.raises(DataError, match=r"^cache_dir: this user has no home folder to cache in; expected a folder$"):
        default_folder()
    monkeypatch.setenv("PIPETUNE_CACHE", "~nosuchuser/cache")
    with pytest.raises(DataError, match=r"^~nosuchuser/cache: no such user, or no home folder"):
        default_folder()
