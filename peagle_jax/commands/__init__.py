"""The subcommands of `peagle`, a module each.

A module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> int` (the exit code).
Modules import only light things at the top, jax and transformers inside `run`, so that
`peagle --help` is instant. A new command is a new module and its name here.
"""

COMMANDS = ("generate", "batch", "bench", "convert", "inspect", "distill", "eval", "train", "plan")
