"""Model folder and prompts that all systems load without a network.

    python -m benchmarks.peers.shape --out FOLDER [--small | --draw SEED | --shape 8b]

The weights are random but sample like a trained model: the spread of the logits is comparable, so
truncation keeps few ids, completions do not repeat a few words, and their length follows the
workload. See `write_model`.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.common import Shape, arguments
from benchmarks.peers.workload import QWEN3, SMALL, Workload, drawn

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = (PAD, START, END, "<unk>")
"""Special tokens with the first ids; never sampled, except `END` if completions may end."""
ROLES = ("system", "user", "assistant")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|> ' + message.role + ' ' + message.content + ' <|im_end|> ' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|> assistant' -}}{%- endif -%}"
)
TEMPLATE_TOKENS = 5
"""Tokens that the template adds to a user message."""
PROMPT_STEPS = 16
"""Steps with distinct prompts; later steps repeat them."""
EMBEDDING = 0.02
"""Standard deviation of the embeddings."""
TENTH = 0.1


def build_tokenizer(entries: int) -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer of `entries` ids, split at spaces."""
    words = [f"w{index}" for index in range(entries - len(MARKS) - len(ROLES))]
    vocabulary = {word: index for index, word in enumerate((*MARKS, *ROLES, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def end_scale(workload: Workload, *, contexts: int = 200, draws: int = 128) -> float:
    """Find the relative length of the end token's embedding at which completions end after
    `workload.ends_after` tokens on average.

    Logits are drawn from N(0, sharpness²), the end token's from N(0, (scale · sharpness)²).
    Bisection brings its mean probability after truncation to 1 / ends_after.
    """
    draw = torch.Generator().manual_seed(0)
    sharpness, top_k = workload.sharpness, workload.top_k
    best_NK = torch.stack(
        [
            torch.randn(workload.shape.tokens, generator=draw).topk(top_k).values
            for _ in range(contexts)
        ]
    )
    end_ND = torch.randn(contexts, draws, generator=draw)

    def probability(scale: float) -> float:
        others = best_NK[:, None, :].expand(-1, draws, -1)
        logits = sharpness * torch.cat([others, scale * end_ND[..., None]], dim=-1)
        p, index = logits.softmax(-1).sort(-1, descending=True)
        p = p * (p.cumsum(-1) - p < workload.top_p)
        return float(((p / p.sum(-1, keepdim=True)) * (index == top_k)).sum(-1).mean())

    low, high = 0.5, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        ends = probability(middle) * workload.ends_after > 1
        low, high = (low, middle) if ends else (middle, high)
    return high


def write_model(
    folder: Path, shape: Shape, *, seed: int, sharpness: float, end: float = TENTH
) -> int:
    """Write random bfloat16 weights and a tokenizer; return the parameter count.

    sharpness: standard deviation of the logits, set by the last norm. At 8, top-p 0.95 keeps about
    12 of 151,669 ids and a token has 1.5 nats of entropy; at 0.64, as in a plain random model,
    nearly all of the top-k stay.

    The attention output is scaled down: at full size the context, nearly equal for consecutive
    tokens, outweighs the token and completions repeat a few words.

    Special tokens have rows of a tenth of the usual length and unused rows are zero, so their
    logits are near the mean of 0 and top-k excludes them. `end` is the relative length of the end
    token's row.
    """
    config = shape.config()
    config.pad_token_id, config.bos_token_id = MARKS.index(PAD), None
    config.eos_token_id = MARKS.index(END)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    with torch.no_grad():
        for rows in {id(weight): weight for weight in weights}.values():
            rows *= EMBEDDING / config.initializer_range
            rows[: len(MARKS)] *= TENTH
            rows[MARKS.index(END)] *= end / TENTH
            rows[shape.tokens :] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= TENTH
            if hasattr(layer.mlp, "experts"):  # narrow, and averaged over a token's experts
                layer.mlp.experts.down_proj *= config.num_experts_per_tok
        model.model.norm.weight.fill_(sharpness / (EMBEDDING * config.hidden_size**0.5))
    model.save_pretrained(folder)
    build_tokenizer(shape.tokens).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def random_words(draw: random.Random, tokens: int, prompt_tokens: int) -> str:
    """Make a user message of random words that renders to `prompt_tokens` tokens."""
    known = tokens - len(MARKS) - len(ROLES)
    return " ".join(f"w{draw.randrange(known)}" for _ in range(prompt_tokens - TEMPLATE_TOKENS))


def write_prompts(path: Path, workload: Workload) -> None:
    """Write user messages of random words that render to `workload.prompt_tokens` tokens."""
    draw = random.Random(workload.seed)
    with path.open("w") as file:
        for index in range(workload.prompts_per_step * PROMPT_STEPS):
            text = random_words(draw, workload.shape.tokens, workload.prompt_tokens)
            messages = [{"role": "user", "content": text}]
            line = {"id": str(index), "messages": messages, "answer": "w0", "match": "exact"}
            file.write(json.dumps(line) + "\n")


def write(folder: Path, workload: Workload) -> Workload:
    """Write model, prompts and `workload.json`; return the workload with their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    workload = replace(
        workload,
        model=str((folder / "model").resolve()),
        prompts=str((folder / "prompts.jsonl").resolve()),
    )
    end = end_scale(workload) if workload.ends_after else TENTH
    write_model(
        Path(workload.model),
        workload.shape,
        seed=workload.seed,
        sharpness=workload.sharpness,
        end=end,
    )
    write_prompts(Path(workload.prompts), workload)
    workload.save(folder / "workload.json")
    return workload


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true")
    which.add_argument("--draw", type=int, metavar="SEED", help="draw a workload at random")
    which.add_argument("--shape", choices=list(QWEN3), default="0.6b")
    options = parser.parse_args()
    workload = SMALL if options.small else QWEN3[options.shape]
    write(options.out, workload if options.draw is None else drawn(options.draw))


if __name__ == "__main__":
    main()
