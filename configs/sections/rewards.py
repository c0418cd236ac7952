"""`rewards`: verifier processes, the code sandbox and the judge."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import ConfigError, Section, knob, require, require_endpoints

_SERVER_OPTIONS = frozenset(
    {
        "api_key",
        "data_parallel_size",
        "dtype",
        "gpu_memory_utilization",
        "host",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_seqs",
        "model",
        "pipeline_parallel_size",
        "port",
        "served_model_name",
        "structured_outputs_config",
        "tensor_parallel_size",
        "uds",
    }
)
"""Options of vLLM's server that have their own knob or that the client relies on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeServerConfig(Section, path="rewards.judge.server"):
    """Settings for the vLLM servers that `rewards.judge.serve` starts."""

    replicas: int = knob(1, ge=1, le=1000, resumable=True)
    """Number of servers. Each request goes to the one with the fewest requests in flight."""
    tensor_parallel: int = knob(1, ge=1, resumable=True)
    """Number of GPUs for each server, in addition to those for engines and trainer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision. auto: as in the model's checkpoint."""
    max_model_len: int = knob(0, ge=0)
    """Context length in tokens for task, completion and judgement. 0: the model's maximum."""
    gpu_memory_utilization: float = knob(0.85, gt=0, lt=1, resumable=True)
    """GPU: fraction of its memory for weights, activations and KV cache."""
    kv_cache_gib: float = knob(0.5, gt=0, resumable=True)
    """CPU: size of the KV cache in GiB."""
    threads: int = knob(1, ge=1, resumable=True)
    """CPU: number of threads."""
    startup_timeout_s: float = knob(1800.0, gt=0, resumable=True)
    """Timeout in seconds for the server to load the model and reply."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Additional options for vLLM's server, such as `quantization: fp8`."""

    def check(self) -> None:
        reserved = sorted(_SERVER_OPTIONS & {name.replace("-", "_") for name in self.options})
        require(not reserved, f"{self.PATH}.options", reserved, "are set by Keel; remove them")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig(Section, path="rewards.judge"):
    """Settings for the model that judges rubrics and proofs, served by any OpenAI-compatible
    endpoint."""

    base_url: str = knob("", resumable=True)
    """URL of the endpoint, such as `http://localhost:8000/v1`, or several URLs of the same model,
    separated by spaces. Empty: no judge, or `serve`."""
    model: str = ""
    """Name of the model at the endpoint. With `serve`, a local folder or a hub name. Cached replies
    belong to this name, whatever the URL."""
    serve: bool = knob(False, resumable=True)
    """Start vLLM servers of `model` with the run and stop them at the end."""
    server: JudgeServerConfig = field(default_factory=JudgeServerConfig)
    api_key_env: str = knob("", resumable=True)
    """Name of the environment variable with the API key. Empty: no key."""
    samples: int = knob(1, ge=1)
    """Number of judgements per completion, each with the criteria in a different order. Their mean
    is the score, and their spread is recorded as a part of the reward."""
    temperature: float = knob(0.0, ge=0, le=2)
    """Sampling temperature. 0: greedy."""
    max_reply_tokens: int = knob(2048, ge=1)
    """Maximum number of tokens per judgement. Longer ones are invalid."""
    max_characters: int = knob(60_000, ge=1)
    """Maximum length of a completion in characters after escaping. Longer ones score 0 without a
    call, since they may exceed the judge's context."""
    max_concurrent: int = knob(64, ge=1, le=1000, resumable=True)
    """Maximum number of concurrent calls to each server."""
    timeout_s: float = knob(60.0, gt=0, resumable=True)
    """Timeout in seconds per call."""
    retries: int = knob(4, ge=0, resumable=True)
    """Number of retries with backoff after a timeout, a rate limit, a server error or an invalid
    reply."""
    max_calls: int = knob(0, ge=0, resumable=True)
    """Stop the run after this many calls, retries included, since its start. 0: no limit."""
    max_failure_fraction: float = knob(0.2, ge=0, le=1, resumable=True)
    """Stop the run if more than this fraction of the last 200 completions (20 at the start) could
    not be judged. 0: stop at the first failure. 1: never stop."""
    cache_dir: str = knob("", resumable=True)
    """Folder on a local disk for the cache of replies. Empty: keep up to 256 MiB in memory."""
    chats: str = knob("", resumable=True)
    """JSONL file to append each valid call to as a chat, to train a judge with `keel sft`. Empty:
    off."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Additional fields of the request body, such as `chat_template_kwargs`."""

    def check(self) -> None:
        if self.base_url:
            require_endpoints(self.PATH, self.base_url, self.api_key_env)
        rule = "conflicts with rewards.judge.serve; remove one of them"
        self.require(not (self.serve and self.base_url), "base_url", rule)
        self.require(
            (bool(self.base_url) or self.serve) == bool(self.model),
            "model",
            f"set it together with rewards.judge.base_url = {self.base_url!r} or "
            f"rewards.judge.serve = {self.serve}, or set none",
        )
        rule = "must be empty with rewards.judge.serve, whose server gets a generated key"
        self.require(not (self.serve and self.api_key_env), "api_key_env", rule)
        taken = {"model", "messages", "temperature", "max_tokens", "response_format", "stream"}
        reserved = sorted(taken & set(self.extra))
        require(not reserved, f"{self.PATH}.extra", reserved, "are set by Keel; remove them")

    @property
    def gpus(self) -> int:
        return self.server.replicas * self.server.tensor_parallel if self.serve else 0

    def check_used(self, *, judged: bool, gpu: bool) -> None:
        """Raise ConfigError if prompts need a judge but none is set, or if a judge is served but no
        prompt needs it.

        `judged` is True if any prompt has criteria or is a proof, or if any rewards include
        `refusal`. `gpu` is True if the run has GPUs.
        """
        if judged and not self.model:
            raise ConfigError(
                "rewards.judge.base_url: empty, but prompts have criteria or are proofs, or "
                "rewards name `refusal`. Set base_url and model, or serve and model"
            )
        if self.serve and not judged:
            raise ConfigError(
                "rewards.judge.serve = True: no prompt has criteria or is a proof, and no rewards "
                "name `refusal`. Remove it"
            )
        require(
            gpu or not self.serve or self.server.tensor_parallel == 1,
            "rewards.judge.server.tensor_parallel",
            self.server.tensor_parallel,
            "must be 1 on a CPU",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig(Section, path="rewards.code"):
    """Settings for the sandbox that runs code from completions against hidden tests."""

    isolation: Literal["bubblewrap", "none-i-trust-the-answers"] = "bubblewrap"
    """bubblewrap: run in namespaces without network or files, and fail where that is not possible.
    The alternative runs the policy's code with your permissions, so use it only for completions
    that you wrote."""
    completion_s: float = knob(10.0, gt=0, le=86_400)
    """Time limit in seconds per completion for all its tests. Tests that do not fit fail."""
    time_s: float = knob(2.0, gt=0, le=86_400)
    """CPU seconds per test, unless the prompt sets a limit. The wall time limit is twice that plus
    one second."""
    memory_mib: int = knob(512, ge=32, le=1 << 24)
    """Memory limit per test in MiB, unless the prompt sets one."""
    processes: int = knob(8, ge=1)
    """Maximum number of processes and threads per test."""
    files_mib: int = knob(64, ge=1)
    """Size in MiB of the private folder that a program can write to."""
    output_kib: int = knob(1024, ge=1)
    """Maximum output of a test in KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsConfig(Section, path="rewards"):
    """Settings for the processes that score completions. The reward parts themselves are set in
    `data.sources[].rewards`."""

    workers: int = knob(2, ge=0, le=4096, resumable=True)
    """Number of verifier processes where `keel train` runs. Other nodes have one for two free CPU
    cores (`run.cpu_nodes`). 0: score in the driver, without timeouts."""
    timeout_s: float = knob(3.0, gt=0, resumable=True)
    """Timeout in seconds for scoring a completion. After a timeout the completion counts as wrong
    and in `reward/error`."""
    max_failure_fraction: float = knob(0.2, ge=0, le=1, resumable=True)
    """Stop the run if one of your reward functions failed on more than this fraction of the last
    200 completions (20 at the start). 0: stop at the first failure. 1: never stop. Verifiers do not
    count: an answer they cannot parse is wrong."""
    code: CodeConfig = field(default_factory=CodeConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
