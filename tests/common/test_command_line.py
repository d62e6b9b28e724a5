"""A wrong word of a command line is one line, with the option that was meant."""

from __future__ import annotations

import pytest

from common.command_line import Parser


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max_new_tokens", "5"], "unrecognized arguments: --max_new_tokens 5; did you mean --max-new-tokens?"),
        (["--prompts"], "unrecognized arguments: --prompts; did you mean --prompt?"),
        (["--nothing-like-it"], "unrecognized arguments: --nothing-like-it"),
        (["--prompt"], "argument --prompt: expected one argument"),
        (["--dtype", "x"], "argument --dtype: invalid choice: 'x'"),
        (["--max_length", "5"], "unrecognized arguments: --max_length 5; did you mean max_seq_len=VALUE?"),
    ],
)
def test_an_error_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="demo.py", allow_abbrev=False)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--prompt")
    parser.add_argument("--dtype", choices=["fp32", "bf16"])
    parser.meant = {"--max_length": "max_seq_len=VALUE"}
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith(f"error: {told}") and line.endswith("(demo.py --help lists all options)")


def test_a_command_of_a_command_reports_in_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="convert_model.py")
    parser.add_subparsers(dest="command", required=True).add_parser("check").add_argument("--input-path")
    with pytest.raises(SystemExit):
        parser.parse_args(["check", "--input_path", "x"])
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --input_path x")


def test_a_command_of_another_tool_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="convert_model.py")
    parser.meant = {"merge": "pp_to_hg --merge"}
    parser.add_subparsers(dest="command", required=True).add_parser("pp_to_hg")
    with pytest.raises(SystemExit):
        parser.parse_args(["merge"])
    assert "did you mean pp_to_hg --merge?" in capsys.readouterr().err
