"""What bash and zsh complete, asked in the shells themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable

import pytest

from trimtab.cli.main import COMMANDS, main
from trimtab.policies import POLICIES

ASK = """
words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _trimtab; echo "${COMPREPLY[*]}"; }
"""


@pytest.fixture(params=["bash", "zsh"])
def complete(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Asks a shell what may complete the last of these words."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"no {request.param}")
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    # As zsh sets it up for functions of bash.
    arrays = "setopt KSH_ARRAYS SH_WORD_SPLIT\n" if request.param == "zsh" else "set -u\n"

    def ask(*words: str) -> list[str]:
        program = f"{script}{arrays}{ASK}words {' '.join(repr(word) for word in words)}"
        result = subprocess.run([shell, "-c", program], capture_output=True, text=True, check=True)
        assert not result.stderr
        # zsh leaves out by itself what does not begin as the word does.
        return [word for word in result.stdout.split() if word.startswith(words[-1])]

    return ask


def test_commands_options_and_choices_are_completed(complete: Callable[..., list[str]]) -> None:
    assert complete("trimtab", "") == [*COMMANDS]
    assert complete("trimtab", "si") == ["simulate"]
    assert complete("trimtab", "--ver") == ["--verbose", "--version"]
    assert complete("trimtab", "plan", "--po") == ["--policy"]
    assert complete("trimtab", "plan", "a.parquet", "--policy", "") == [*POLICIES]
    assert complete("trimtab", "plan", "a.parquet", "--policy", "trim") == ["trimtab"]
    assert complete("trimtab", "trace", "s") == ["synth"]
    assert complete("trimtab", "trace", "export", "--to", "n") == ["numpy"]
    assert complete("trimtab", "trace", "import", "--top") == ["--top-k"]
    # Files are the shell's.
    assert complete("trimtab", "plan", "") == []
    assert complete("trimtab", "trace", "import", "x") == []


def test_every_option_of_the_help_is_completed(
    complete: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = re.findall(r"^  (?:-\w, )?(?:-\w \w+, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
        assert "--verbose" in shown
        assert {*shown} <= {*complete("trimtab", command, "--")}
