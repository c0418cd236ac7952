"""`keel judge`: try out a rubric before a run."""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, JudgeConfig, RunConfig
from keel.model.hub import download
from keel.rewards.judge.file import judge_answers, read_answers
from keel.rollout.judge.server import JudgeServer
from keel.trainer.placement.nodes import start_ray, stop_ray
from keel.trainer.placement.watchdog import start_watchdog
from keel.trainer.run.progress import waiting


def judge(options: argparse.Namespace) -> None:
    """Score the answers in a file with the judge and print the results."""
    recipe = load_config(options.recipe) if options.recipe else None
    settings = recipe.rewards.judge if recipe else JudgeConfig()
    hang_timeout_s = (recipe.run if recipe else RunConfig()).hang_timeout_s
    names = ("base_url", "model", "api_key_env", "samples", "serve")
    changes = {name: getattr(options, name) for name in names}
    settings = replace(settings, **{k: v for k, v in changes.items() if v is not None})
    if not settings.model:
        raise ConfigError(
            "no judge: give --base-url or --serve, and --model, or a --recipe that has "
            "rewards.judge"
        )
    path = Path(options.file)
    out = Path(options.out) if options.out else path.with_name(f"{path.name}.judged.jsonl")
    try:
        items = read_answers(path, Path(options.rubric) if options.rubric else None)
        if out.resolve() == path.resolve():
            raise ValueError(f"--out {out}: would overwrite the answers")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with ExitStack() as stack:
        servers: list[JudgeServer] = []
        if settings.serve:
            gpu = torch.cuda.is_available()
            settings.check_used(judged=True, gpu=gpu)
            download(settings.model)
            start_ray()
            stack.callback(stop_ray)
            stack.enter_context(start_watchdog(print, hang_timeout_s))
            for _ in range(settings.server.replicas):
                servers.append(JudgeServer(settings, gpu=gpu))
                stack.callback(servers[-1].stop)
        show = partial(waiting, unit="answers")
        failed = judge_answers(items, settings, out, Console(), servers=servers, show=show)
    if failed:
        raise RuntimeError(f"{failed} of {len(items)} answers could not be judged")
