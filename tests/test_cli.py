"""The `peagle` command around the library: exit codes, streams and the one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings

import pytest

from peagle_jax import cli
from peagle_jax.commands import COMMANDS
from peagle_jax.errors import InputError


@pytest.fixture
def command(monkeypatch):
    """Makes `peagle generate PROMPT` run a function of the test."""

    def install(run):
        module = types.SimpleNamespace(HELP="", add_arguments=lambda parser: None, run=run)
        monkeypatch.setattr(cli, "COMMANDS", ("fake",))
        monkeypatch.setattr("importlib.import_module", lambda name: module)

    return install


def run_python(code, **kwargs):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, text=True, capture_output=True, check=False, **kwargs)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["generate", "--method", "eagle9", "x"]])
def test_a_wrong_command_line_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert err.endswith(" --help\n")
    assert err.count("\n") == 1


def test_help_imports_nothing_heavy():
    done = run_python(
        "import sys\n"
        "from peagle_jax.cli import build_parser\n"
        "build_parser().format_help()\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'numpy', 'transformers', 'rich', 'torch'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("a.json: key: found 1,\n  expected 2"), "a.json: key: found 1, expected 2"),
        (FileNotFoundError(2, "No such file or directory", "w.gguf"), "w.gguf"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(command, capsys, error, line):
    def run(args):
        raise error

    command(run)
    assert cli.main(["fake"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("peagle: error: ")
    assert captured.err.count("\n") == 1
    assert line in captured.err


def test_an_internal_fault_keeps_its_traceback(command):
    def run(args):
        raise ZeroDivisionError

    command(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_interrupt_exits_130(command, capsys):
    def run(args):
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "peagle: interrupted\n"


@pytest.mark.parametrize("loading", [True, False])
def test_interrupted_program(tmp_path, loading):
    """Also where a module is loading that answers an exception with one of its own."""
    body = (
        "import os, signal, time\n"
        "def wait():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
    )
    swallow = "try:\n    wait()\nexcept BaseException as error:\n    raise ImportError from error\n"
    (tmp_path / "slow.py").write_text(body + (swallow if loading else ""))
    ran = run_python(
        # Also under a test run that a shell started behind a prompt, which ignores interrupts.
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from peagle_jax import cli\n"
        "def main():\n"
        "    try:\n"
        "        import slow\n"
        "        slow.wait()\n"
        "    except KeyboardInterrupt as error:\n"
        "        print('raised')\n"
        "        return cli.exit_code(error)\n"
        "cli.main = main\n"
        "cli.command()\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert ran.returncode == 130
    assert (ran.stdout, ran.stderr) == (
        ("", "peagle: interrupted\n") if loading else ("raised\n", "")
    )


def test_warnings_are_one_line(command, capsys):
    def run(args):
        warnings.simplefilter("always")
        warnings.warn("mind this", UserWarning, stacklevel=1)
        return 0

    command(run)
    assert cli.main(["fake"]) == 0
    assert capsys.readouterr().err == "peagle: warning: mind this\n"


def test_a_reader_that_leaves_is_no_error():
    code = (
        "import sys, types\n"
        "from peagle_jax import cli\n"
        "run = lambda args: [print('x' * 99) for _ in range(10_000)] and 0\n"
        "module = types.SimpleNamespace(HELP='', add_arguments=lambda p: None, run=run)\n"
        "cli.COMMANDS = ('fake',)\n"
        "cli.importlib = types.SimpleNamespace(import_module=lambda name: module)\n"
        "sys.exit(cli.main(['fake']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_version_is_the_packages(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", {"peagle-jax": "0.1.0"}.__getitem__)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == "peagle 0.1.0\n"
