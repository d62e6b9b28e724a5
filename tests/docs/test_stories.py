"""The stories in examples/: what their READMEs say to type is typed, and what they promise is seen.

Commands with published models, `../llm/`, are only read by the entry points' own parsers.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from options import load_config
from tests.conftest import ROOT
from tests.docs.program import understood
from tests.launching import Launch

EXAMPLES = ROOT / "examples"
STORIES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
LANGUAGES = ["README.md", "README_CN.md"]
NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?%?")


def blocks(story: str, language: str, kind: str) -> list[str]:
    """The lines of a README's blocks of one kind."""
    text = (EXAMPLES / story / language).read_text(encoding="utf-8")
    found = re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


def published(command: str) -> bool:
    return "../llm/" in command


def test_there_are_six_stories_with_all_that_they_need() -> None:
    assert STORIES == ["chinese_instructions", "continued_pretraining", "images", "lora", "preferences", "tool_calls"]
    for story in STORIES:
        config = load_config(EXAMPLES / story / "config.yml")
        for path in [*config.data_path, *config.eval_data_path]:
            assert (ROOT / str(path)).exists() or str(path).startswith("runs/")  # which the story makes


@pytest.mark.parametrize("story", STORIES)
def test_both_languages_tell_the_same(story: str) -> None:
    english, chinese = ([blocks(story, language, kind) for kind in ("bash", "text")] for language in LANGUAGES)
    assert english == chinese
    headings = [re.findall(r"^#+", (EXAMPLES / story / each).read_text(), re.MULTILINE) for each in LANGUAGES]
    assert headings[0] == headings[1]


@pytest.mark.parametrize("story", STORIES)
def test_commands_with_published_models_are_ones_that_the_entry_points_take(story: str) -> None:
    commands = [line for line in blocks(story, LANGUAGES[0], "bash") if published(line)]
    assert commands
    for command in commands:
        words = shlex.split(command)
        assert understood(words), command
        overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
        if "train_ds.py" in words:
            load_config(words[words.index("--config") + 1], overrides)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository's root, whose runs/ is the tests' own."""
    folder = tmp_path_factory.mktemp("stories")
    for path in ROOT.iterdir():
        if path.name != "runs" and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.launched
@pytest.mark.longest
@pytest.mark.parametrize("story", STORIES)
def test_a_story_goes_as_its_readme_says(story: str, place: Path) -> None:
    printed = ""
    for line in blocks(story, LANGUAGES[0], "bash"):
        if published(line):
            continue
        words = shlex.split(line)
        assert words[0] == "python"
        done = Launch(sys.executable, *words[1:], environment={"PYTHONPATH": str(ROOT)}, folder=place).end()
        assert done.returncode == 0, line + done.stdout[-3000:] + done.stderr[-3000:]
        printed += done.stdout + done.stderr
    seen = {masked(line) for line in printed.splitlines()}
    promised = blocks(story, LANGUAGES[0], "text")
    assert promised
    assert [line for line in promised if masked(line) not in seen] == []


def masked(line: str) -> str:
    """A line without its numbers."""
    return NUMBER.sub("0", line.strip())
