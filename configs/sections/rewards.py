"""Who scores completions: verifier processes, the sandbox, the judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import ConfigError, require, require_endpoint, require_variable


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeServerConfig:
    """The vLLM server of `rewards.judge.serve`."""

    tensor_parallel: int = 1
    """GPUs of the server; engines and trainer need others."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: as the model's checkpoint says."""
    max_model_len: int = 0
    """Context in tokens, for the task, the completion and the judgement; 0: the model's own."""
    gpu_memory_utilization: float = 0.85
    """GPU: fraction of its memory for weights, activations and KV cache."""
    kv_cache_gib: float = 0.5
    """CPU: memory of the KV cache, in GiB."""
    threads: int = 1
    """CPU: threads of the server."""
    startup_timeout_s: float = 1800.0
    """Longest wait for the server to load the model and reply, in seconds."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further options of vLLM's server by their names there, such as `quantization: fp8`."""

    def __post_init__(self) -> None:
        knob = "rewards.judge.server"
        for name in ("tensor_parallel", "threads"):
            require(getattr(self, name) >= 1, f"{knob}.{name}", getattr(self, name), "must be >= 1")
        require(
            self.max_model_len >= 0,
            f"{knob}.max_model_len",
            self.max_model_len,
            "must not be negative (0: the model's own)",
        )
        require(
            0 < self.gpu_memory_utilization < 1,
            f"{knob}.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "must be in (0, 1)",
        )
        for name in ("kv_cache_gib", "startup_timeout_s"):
            require(getattr(self, name) > 0, f"{knob}.{name}", getattr(self, name), "must be > 0")
        clash = sorted(_SERVER_TAKEN & {name.replace("-", "_") for name in self.options})
        require(
            not clash,
            f"{knob}.options",
            clash,
            "are set by Keel, or would take GPUs that it does not count; remove them",
        )


_SERVER_TAKEN = frozenset(
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
"""Options of vLLM's server that have a knob of their own, or that the client relies on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """The model that judges rubrics and proofs, behind any OpenAI-compatible endpoint."""

    base_url: str = ""
    """Of the endpoint, `http://localhost:8000/v1`; empty: there is none, or `serve` starts it."""
    model: str = ""
    """As the endpoint calls it; with `serve` a local folder or a hub name. It names the judge in
    the cache, whatever the URL."""
    serve: bool = False
    """Start vLLM's server of `model` with the run, and end it with the run."""
    server: JudgeServerConfig = field(default_factory=JudgeServerConfig)
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: the endpoint wants none."""
    samples: int = 1
    """Judgements per completion; they are averaged, and their spread is recorded as a part of the
    reward. Each sees the criteria in another order."""
    temperature: float = 0.0
    """Of sampling judgements; 0: greedy."""
    max_reply_tokens: int = 2048
    """Longest judgement, in tokens; a longer one is invalid."""
    max_characters: int = 60_000
    """Longer completions score 0 without asking the judge, whose context they might not fit.
    Counted as the judge sees them: some characters are written as escapes of six."""
    max_concurrent: int = 64
    """Most calls in flight at once."""
    timeout_s: float = 60.0
    """Longest wait for one reply, in seconds."""
    retries: int = 4
    """Further attempts after a timeout, a refusal for load (429), a server error or an invalid
    reply, with growing pauses."""
    max_calls: int = 0
    """Most calls between a start of the run and its end, retries included; then it stops. 0: no
    limit."""
    max_failure_fraction: float = 0.2
    """The run stops when more than this fraction of the last 200 completions could not be judged
    (at the start: of 20). 0: stop at the first; 1: never."""
    cache_dir: str = ""
    """Folder of the cache of replies, on a local disk; empty: they are kept in
    memory, as many as 256 MiB hold."""
    chats: str = ""
    """JSONL file to which each valid reply is added with its request, as a chat that `keel sft`
    learns from: how a judge of one's own gets its first skill. Empty: they are not kept."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sent along with each request, for example `chat_template_kwargs`."""

    def __post_init__(self) -> None:
        knob = "rewards.judge"
        if self.base_url:
            require_endpoint(knob, self.base_url, self.api_key_env)
        require(
            not (self.serve and self.base_url),
            f"{knob}.base_url",
            self.base_url,
            f"an endpoint that is there already; remove it, or {knob}.serve",
        )
        require(
            (bool(self.base_url) or self.serve) == bool(self.model),
            f"{knob}.model",
            self.model,
            f"goes together with {knob}.base_url = {self.base_url!r} or {knob}.serve = "
            f"{self.serve}: set both or none",
        )
        require(
            not (self.serve and self.api_key_env),
            f"{knob}.api_key_env",
            self.api_key_env,
            f"a server of the run ({knob}.serve) gets a key of its own; remove it",
        )
        require_variable(f"{knob}.api_key_env", self.api_key_env)
        for name in ("samples", "max_reply_tokens", "max_characters", "max_concurrent"):
            require(getattr(self, name) >= 1, f"{knob}.{name}", getattr(self, name), "must be >= 1")
        require(
            self.max_concurrent <= 1000,
            f"{knob}.max_concurrent",
            self.max_concurrent,
            "must be at most 1000, the connections of one client",
        )
        for name in ("retries", "max_calls"):
            require(
                getattr(self, name) >= 0,
                f"{knob}.{name}",
                getattr(self, name),
                "must not be negative",
            )
        require(
            0 <= self.temperature <= 2, f"{knob}.temperature", self.temperature, "must be in [0, 2]"
        )
        require(self.timeout_s > 0, f"{knob}.timeout_s", self.timeout_s, "must be positive (s)")
        require(
            0 <= self.max_failure_fraction <= 1,
            f"{knob}.max_failure_fraction",
            self.max_failure_fraction,
            "must be in [0, 1]",
        )
        taken = {"model", "messages", "temperature", "max_tokens", "response_format", "stream"}
        clash = sorted(taken & set(self.extra))
        require(not clash, f"{knob}.extra", clash, "are set by Keel; remove them")

    @property
    def gpus(self) -> int:
        """GPUs that the run's own server takes, where there are any."""
        return self.server.tensor_parallel if self.serve else 0

    def check_used(self, *, judged: bool, gpu: bool) -> None:
        """Raise ConfigError where the prompts need a judge and there is none, or the reverse.

        judged: whether any prompt has criteria or is a proof, or rewards name `refusal`; gpu:
        whether the run has any.
        """
        if judged and not self.model:
            raise ConfigError(
                "rewards.judge.base_url: empty, but prompts have criteria or are proofs, or a "
                "source's rewards name `refusal`, be it with 0, and these are for a judge; name "
                "the endpoint of one and its model, or a model with rewards.judge.serve"
            )
        if self.serve and not judged:
            raise ConfigError(
                "rewards.judge.serve = True: no prompt has criteria or is a proof, and no rewards "
                "name `refusal`; remove it"
            )
        require(
            gpu or self.gpus <= 1,
            "rewards.judge.server.tensor_parallel",
            self.server.tensor_parallel,
            "must be 1 on a CPU",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """How programs in completions are run against hidden tests."""

    isolation: Literal["bubblewrap", "none-i-trust-the-answers"] = "bubblewrap"
    """bubblewrap: namespaces without network or files, refused where it does not work. The other
    runs what the policy wrote with your rights: only for completions that you wrote."""
    completion_s: float = 10.0
    """Seconds per completion, all its tests together; tests that do not fit count as failed."""
    time_s: float = 2.0
    """CPU seconds per test (a prompt may set its own); the wall limit is twice that and a
    second."""
    memory_mib: int = 512
    """Memory per test, in MiB (a prompt may set its own)."""
    processes: int = 8
    """Most processes and threads at once."""
    files_mib: int = 64
    """Size of the private folder that a program may write to, in MiB."""
    output_kib: int = 1024
    """Longest output of a test, in KiB."""

    def __post_init__(self) -> None:
        knob = "rewards.code"
        for name in ("completion_s", "time_s"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{knob}.{name}", value, "must be positive (seconds)")
        require(self.memory_mib >= 32, f"{knob}.memory_mib", self.memory_mib, "must be >= 32")
        for name, most in (("time_s", 86_400), ("completion_s", 86_400), ("memory_mib", 1 << 24)):
            value = getattr(self, name)
            require(value <= most, f"{knob}.{name}", value, f"must be at most {most}")
        for name in ("processes", "files_mib", "output_kib"):
            require(getattr(self, name) >= 1, f"{knob}.{name}", getattr(self, name), "must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsConfig:
    """The processes that score completions. What they score by: `data.sources[].rewards`."""

    workers: int = 2
    """Processes for the verifiers; 0: score in the driver, without deadlines."""
    timeout_s: float = 3.0
    """Seconds per completion; after that it counts as wrong, and in `reward/error`."""
    max_failure_fraction: float = 0.2
    """The run stops when a reward function of yours failed on more than this fraction of the last
    200 completions (at the start: of 20). 0: stop at the first; 1: never. Verifiers do not count:
    what they cannot read is wrong."""
    code: CodeConfig = field(default_factory=CodeConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        require(0 <= self.workers <= 4096, "rewards.workers", self.workers, "must be 0 to 4096")
        require(
            0 <= self.max_failure_fraction <= 1,
            "rewards.max_failure_fraction",
            self.max_failure_fraction,
            "must be in [0, 1]",
        )
        require(self.timeout_s > 0, "rewards.timeout_s", self.timeout_s, "must be positive (s)")
