#!/usr/bin/env python3
"""flags.py sglang|vllm DIRECTORY : prints the flags of an engine's release, one per line, for test/engines/flags.

DIRECTORY holds the engine's Python package, such as an unpacked wheel. The program builds the engine's own parser and prints its flags.
Modules that are not installed are replaced by empty ones, so only PyTorch is required. A line has the names of a flag, the number of its
values in argparse notation, and the type or the choices of a value, separated by tabs.

    python3 -m pip download --no-deps sglang==0.5.17 && unzip -q sglang-*.whl -d /tmp/sglang
    flags.py sglang /tmp/sglang > flags/sglang-0.5.17.txt
"""
import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from unittest import mock


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Absent loads an empty module in place of an imported module that is not installed or that is always replaced."""

    def __init__(self, always=()):
        self.always = always

    def find_spec(self, name, path=None, target=None):
        frame, own = sys._getframe(1), sys._getframe().f_code.co_filename
        while frame and (frame.f_code.co_filename == own or "importlib" in frame.f_code.co_filename):
            frame = frame.f_back
        if self.always:
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if (name + ".").startswith(self.always) else None
        asked = frame is not None and frame.f_code.co_filename.startswith(f"{sys.argv[2]}/{sys.argv[1]}/")
        part = isinstance(sys.modules.get(name.rpartition(".")[0]), mock.MagicMock)
        if not asked and not part:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module):
        pass


def parser(engine):
    if engine == "sglang":
        from sglang.srt.server_args import ServerArgs

        built = argparse.ArgumentParser()
        ServerArgs.add_cli_args(built)
        return built
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for directory in ("common", "launchers", "openai"):  # newest release first
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"vllm.entrypoints.{directory}.cli_args").make_arg_parser(FlexibleArgumentParser())
    raise SystemExit(f"{sys.argv[2]} has no command-line parser of a known place")


def line(names, action):
    count = "1" if action.nargs is None else str(action.nargs)
    if action.nargs is None and isinstance(action, argparse._StoreConstAction) or action.nargs == 0:
        count = "0"
    # Functions that parse numbers are treated as texts.
    kind = {int: "int", float: "float"}.get(action.type, "")
    if action.choices:
        kind = "|".join(sorted(str(choice) for choice in action.choices))
    return "\t".join([" ".join(names), count, kind])


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])
    sys.meta_path.insert(0, Absent(("gguf.",)))
    if sys.argv[1] == "sglang":
        sys.meta_path.insert(0, Absent(("transformers.", "sglang.srt.configs.")))
        sys.meta_path.append(Absent())
        sys.modules["sglang"] = types.ModuleType("sglang")  # its own patches the modules that are replaced
        sys.modules["sglang"].__path__ = [f"{sys.argv[2]}/sglang"]
    with contextlib.redirect_stdout(sys.stderr):  # some engines log to it
        options = parser(sys.argv[1])._option_string_actions  # vLLM 0.33.0 hides names that it accepts from an action's own list
    flags = {}
    for name, action in options.items():
        flags.setdefault(action, []).append(name)
    print("\n".join(sorted(line(names, action) for action, names in flags.items() if action.dest != "help")))
