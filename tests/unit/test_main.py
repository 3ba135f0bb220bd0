"""The `hivlp` command: finding subcommands, exit codes, one-line errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hivlp.models.errors import TextError
from hivlp.service import main as main_module


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in main_module.ORDER)


def test_no_command_and_an_unknown_one_are_usage_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main_module.main([]) == 2
    assert main_module.main(["serch"]) == 2
    assert "no command 'serch'" in capsys.readouterr().err


def test_an_error_made_on_purpose_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(arguments: object) -> int:
        raise TextError("empty_text", "query: is empty", param="query")

    assert main_module.run(fails, "search", []) == 1
    assert capsys.readouterr().err == "hivlp search: query: is empty\n"


def test_an_error_of_the_system_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(arguments: object) -> int:
        raise FileExistsError(17, "File exists", "report.json")

    assert main_module.run(fails, "evaluate", []) == 1
    shown = capsys.readouterr().err
    assert shown == "hivlp evaluate: [Errno 17] File exists: 'report.json'\n"


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    assert main_module.run(interrupted, "build", []) == 130
    assert "run it again to go on" in capsys.readouterr().err


@pytest.mark.parametrize("name", main_module.ORDER)
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main_module.main([name, "--help"])
    except SystemExit as ended:  # argparse's own way out
        code = ended.code
    assert code == 0
    assert "example" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("name", ["serve", "search", "snapshots", "build", "demo"])
def test_commands_that_serve_or_search_never_import_torch(name: str) -> None:
    program = (
        "import sys\n"
        "from hivlp.service.main import _commands\n"
        f"_commands()[{name!r}].load()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"
