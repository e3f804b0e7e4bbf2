"""GRPO on sums by TRL or by a plain loop, for bench_math.py; it needs neither rlinf nor its interpreter.

    python benchmarks/baselines/math_baselines.py trl|plain|score SETTINGS

SETTINGS is a file with a JSON object: `model` (a folder), `problems` (a list of [prompt, answer], taken in turn),
`steps`, `prompts` (a step), `group_size`, `max_new_tokens`, `lr`, `lora_rank` (0: all weights), `threads`, `stop` (a
text that ends an answer, or ""). Prints one JSON object: `cpu_seconds` of this process and all it started, from the
first step on, without imports and start-up; `samples`; `rewards`, the mean of each step. A reward is 1 for the right
answer that ended, else 0; ratios are clipped to 0.8 and 1.28, and there is no reference model.

`score` trains nothing: it prints the `score` of greedy answers to problems, which end with their line, by transformers'
`generate`, in padded batches; SETTINGS has `model`, `problems` and `longest` (the most tokens of an answer).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it started and waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _loaded(settings: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32), tokenizer


def _adapted(model: Any, settings: dict[str, Any]) -> Any:
    if not settings["lora_rank"]:
        return model
    from peft import get_peft_model

    return get_peft_model(model, _lora(settings))


def _lora(settings: dict[str, Any]) -> Any:
    from peft import LoraConfig

    rank = settings["lora_rank"]
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _stop_ids(tokenizer: Any, settings: dict[str, Any]) -> list[int]:
    stop = settings["stop"]
    return [tokenizer.eos_token_id, *(tokenizer.encode(stop, add_special_tokens=False) if stop else [])]


def trl(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train by TRL's GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = _loaded(settings)
    stops = _stop_ids(tokenizer, settings)
    model.generation_config.eos_token_id = stops
    steps, prompts, group = settings["steps"], settings["prompts"], settings["group_size"]
    problems = [settings["problems"][index % len(settings["problems"])] for index in range(steps * prompts)]
    rewards: list[float] = []

    def score(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        scores = []
        for ids, right in zip(completion_ids, answer, strict=True):
            ended = bool(ids) and ids[-1] in stops
            text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True)
            scores.append(float(ended and text.strip() == right))
        rewards.append(sum(scores) / len(scores))
        return scores

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(cpu_seconds())

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=steps,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=settings["max_new_tokens"],
            # Without it the generation ends at the tokenizer's end of sequence alone.
            generation_kwargs={"eos_token_id": stops},
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": asked, "answer": right} for asked, right in problems]),
        processing_class=tokenizer,
        peft_config=_lora(settings) if settings["lora_rank"] else None,
        callbacks=[Clock()],
    )
    torch.set_num_threads(settings["threads"])
    trainer.train()
    return {"cpu_seconds": cpu_seconds() - marks[0], "samples": steps * prompts * group, "rewards": rewards}


def plain(settings: dict[str, Any], _: str) -> dict[str, Any]:
    """Train by a loop as one writes it in an afternoon: one padded batch, a key-value cache, one update."""
    import torch

    model, tokenizer = _loaded(settings)
    model = _adapted(model, settings)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    stops = _stop_ids(tokenizer, settings)
    stopping = torch.tensor(stops)
    prompts, group, longest = settings["prompts"], settings["group_size"], settings["max_new_tokens"]
    rewards: list[float] = []
    begun = cpu_seconds()
    for step in range(settings["steps"]):
        first = step * prompts
        problems = [settings["problems"][(first + index) % len(settings["problems"])] for index in range(prompts)]
        asked = tokenizer([problem[0] for problem in problems], return_tensors="pt", padding=True)
        ids = asked["input_ids"].repeat_interleave(group, 0)
        mask = asked["attention_mask"].repeat_interleave(group, 0)
        width = ids.shape[1]
        drawn, mask = _generate(model, ids, mask, longest, stopping, tokenizer.pad_token_id)
        inside = mask[:, width:].bool()
        scores = []
        for row, kept, index in zip(drawn.tolist(), inside.tolist(), range(len(drawn)), strict=True):
            answer = [token for token, is_kept in zip(row, kept, strict=True) if is_kept]
            ended = answer[-1] in stops
            text = tokenizer.decode(answer[:-1] if ended else answer, skip_special_tokens=True)
            scores.append(float(ended and text.strip() == problems[index // group][1]))
        reward = torch.tensor(scores)
        rewards.append(float(reward.mean()))
        groups = reward.view(-1, group)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(torch.cat((ids, drawn), 1), attention_mask=mask, position_ids=places)
        logits = output.logits[:, width - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(2, drawn[..., None])[..., 0]
        # One update a batch: the old log-probabilities are those of this pass.
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        ((loss * inside).sum() / inside.sum()).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    spent = cpu_seconds() - begun
    return {"cpu_seconds": spent, "samples": settings["steps"] * prompts * group, "rewards": rewards}


def _generate(model: Any, ids: Any, mask: Any, longest: int, stopping: Any, pad: int) -> tuple[Any, Any]:
    """Return the answers, padded, and the mask of prompts and answers; ends when every row has."""
    import torch

    cache, fed, drawn = None, ids, []
    done = torch.zeros(len(ids), dtype=torch.bool)
    with torch.inference_mode():
        for _ in range(longest):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -fed.shape[1] :]
            output = model(
                fed,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            token = torch.multinomial(output.logits[:, -1].softmax(-1), 1)[:, 0]
            token = torch.where(done, pad, token)
            mask = torch.cat((mask, (~done)[:, None].to(mask)), 1)
            drawn.append(token)
            done |= torch.isin(token, stopping)
            if done.all():
                break
            fed = token[:, None]
    return torch.stack(drawn, 1).clone(), mask.clone()


def score(settings: dict[str, Any], _: str) -> dict[str, Any]:
    """Score greedy answers of a model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    right, problems = 0, settings["problems"]
    for first in range(0, len(problems), 20):
        part = problems[first : first + 20]
        tokens = tokenizer([asked for asked, _answer in part], return_tensors="pt", padding=True)
        drawn = model.generate(**tokens, max_new_tokens=settings["longest"], do_sample=False)
        for row, (_asked, answer) in zip(drawn[:, tokens["input_ids"].shape[1] :], part, strict=True):
            line, ended, _rest = tokenizer.decode(row, skip_special_tokens=True).partition("\n")
            right += bool(ended) and line.strip() == answer
    return {"score": right / len(problems)}


def main() -> int:
    import tempfile

    kind, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        record = {"trl": trl, "plain": plain, "score": score}[kind](settings, folder)
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
