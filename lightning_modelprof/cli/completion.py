"""Shell scripts that complete commands, options and files, for bash, zsh and fish.

They contain all names, so that Tab doesn't start Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

_BASH = """_lightning_modelprof() {
    local current=${COMP_WORDS[COMP_CWORD]} words=
    if [[ $COMP_CWORD -eq 1 ]]; then
        words=COMMANDS
    elif [[ $current == -* ]]; then
        case ${COMP_WORDS[1]} in
CASES
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _lightning_modelprof lightning-modelprof
"""

_ZSH = """#compdef lightning-modelprof
_lightning_modelprof() {
    local words_of=
    if (( CURRENT == 2 )); then
        words_of=COMMANDS
    elif [[ $words[CURRENT] == -* ]]; then
        case $words[2] in
CASES
        esac
    else
        _files
        return
    fi
    compadd -- ${=words_of}
}
if [[ $funcstack[1] == _lightning-modelprof ]]; then
    _lightning_modelprof
else
    compdef _lightning_modelprof lightning-modelprof
fi
"""


def completion_script(
    shell: str, parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]
) -> str:
    """Make the completion script for a shell.

    Args:
        shell: bash, zsh or fish.
        parser: of the program.
        commands: name and parser of each command.
    """
    if shell == "fish":
        return _fish(parser, commands)
    template, variable = (_BASH, "words") if shell == "bash" else (_ZSH, "words_of")
    cases = [
        f"            {name}) {variable}={shlex.quote(' '.join(_options(its)))} ;;"
        for name, its in commands.items()
    ]
    first = shlex.quote(" ".join([*commands, *_options(parser)]))
    return template.replace("COMMANDS", first).replace("CASES", "\n".join(cases))


def _fish(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    first = "__fish_use_subcommand"
    places = {first: parser} | {f"__fish_seen_subcommand_from {name}": its for name, its in commands.items()}
    lines = [f"complete -c lightning-modelprof -n {first} -f -a {shlex.quote(' '.join(commands))}"]
    for condition, its in places.items():
        names = " ".join(f"-l {option[2:]}" for option in _options(its))
        lines.append(f"complete -c lightning-modelprof -n {shlex.quote(condition)} {names}")
    return "\n".join([*lines, ""])


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for option in parser._option_string_actions if option.startswith("--")]
