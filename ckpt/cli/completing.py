"""Shell completion: each shell asks `ckpt` itself what may follow, by the words that were typed."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.cli.commandline import COMMANDS

SCRIPTS = {
    "bash": """\
# Completion of ckpt for bash: eval "$(ckpt completion bash)"
_ckpt() {
  local word="${COMP_WORDS[COMP_CWORD]}"
  COMPREPLY=($(compgen -W "$(ckpt completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}")" -- "$word"))
  if [ ${#COMPREPLY[@]} -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _ckpt ckpt
""",
    "zsh": """\
#compdef ckpt
# Completion of ckpt for zsh: eval "$(ckpt completion zsh)", after compinit
_ckpt() {
  local -a found
  found=(${(f)"$(ckpt completion zsh -- "${words[@]:1:$((CURRENT - 1))}")"})
  compadd -a found || _files
}
compdef _ckpt ckpt
""",
    "fish": """\
# Completion of ckpt for fish: ckpt completion fish | source
complete -c ckpt -a "(ckpt completion fish -- (commandline -opc)[2..] (commandline -ct))"
""",
}


def words_after(typed: Sequence[str]) -> list[str]:
    """What may stand in the place of the last word of `typed`, which comes after `ckpt`; nothing
    where that is a name of the user's.
    """
    *before, word = typed or [""]
    # From the table of commands itself, so that no script has to be kept up with it.
    if not before:
        return [name for name in (*(c.name for c in COMMANDS), "--help") if name.startswith(word)]
    command = next((one for one in COMMANDS if one.name == before[0]), None)
    options = [] if command is None else command.options
    flag = next((one for one in options if before[-1] in one.names), None)
    choices: Sequence[str]
    if flag is not None and not flag.is_switch:
        choices = flag.how.get("choices", ())
    elif word.startswith("-"):
        choices = [name for one in options for name in one.names] + ["-h", "--help"]
    else:
        choices = next((one.how.get("choices", ()) for one in options if not one.names), ())
    return [choice for choice in choices if choice.startswith(word)]


def completion(shell: str, typed: Sequence[str]) -> None:
    """`ckpt completion`: print the script, or what may follow `typed` words."""
    print("\n".join(words_after(typed)) if typed else SCRIPTS[shell].rstrip())
