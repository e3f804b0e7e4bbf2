"""`rlinf serve`: four tenants at once, one who sends garbage, and the curve and cost of recipe math's training.

    python -m benchmarks.language.bench_serve [--only PART ...] [--seconds S] [--steps N] [--seeds 0 1 2]
        [--curve-steps N] [--model NAME] [--smollm2 FOLDER]

* tenants: rounds of the same work by one tenant after another, by all at once, and by all beside a fifth who sends bad
  inputs and requests with mistakes. In each, every tenant trains an adapter with its own data: passes, optimizer
  steps, and answers from a snapshot at every fifth. Losses must be the same to the bit in all of them.
* curve: GRPO on sums by a client of the service and by recipe math, with the same problems, batches and settings: the
  rewards of the last steps by seed, and tokens per CPU second of all processes, the client's included. `--model` is
  tiny, what recipe math builds and warms up, or smollm2, whose folder the head of configs/math/smollm2-laptop.yaml
  makes.

Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.baselines.serve_client import Client, pass_body, serving
from benchmarks.language.bench_math import AS_BASELINES, BARE, run, settings_of, shipped, warm_model
from benchmarks.meter import Meter
from benchmarks.table import Result, run_parts

TENANTS = ("ann", "ben", "cleo", "dan")
LENGTH, ROWS, SHARE = 64, 8, 0.9
MISTAKES = 1000
LAST = 5
CURVES = {"tiny": "math/sums-laptop", "smollm2": "math/smollm2-laptop"}


def train(client: Client, seed: int, steps: int) -> list[float]:
    """Train a new adapter on random rows, and return its losses."""
    draw = random.Random(seed)
    client.begin(8, seed)
    losses: list[float] = []
    for step in range(steps):
        rows = [[draw.randrange(3, 15) for _ in range(LENGTH)] for _ in range(ROWS)]
        data = [(row[:-1], {"target_tokens": row[1:], "weights": [1.0] * (LENGTH - 1)}) for row in rows]
        learned = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(1e-3)
        losses.append(client.loss(learned))
        client.result(stepped)
        if step % 5 == 4:
            sampler = client.snapshot()
            client.answers(client.sample(sampler, 0, rows[0][:8], 4, max_tokens=16, stop=[], seed=step))
    client.end()
    return losses


# Garbage


def bad_inputs(client: Client, strangers: str) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of the kinds that must be refused, but for passes.

    Args:
        client: the client of a session.
        strangers: id of a model of another tenant.
    """
    mine, chunks = {"model_id": client.model}, [{"type": "encoded_text", "tokens": [3, 4]}]
    asked = {"sampling_session_id": f"{client.session}:sample:0", "seq_id": 0, "num_samples": 1}
    ask = {**asked, "prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 4}}
    create = {"session_id": client.session, "model_seq_id": 5, "base_model": "benchmark/model"}
    far = {**mine, "seq_id": 2**31, "adam_params": {"learning_rate": 1e-3}}
    return [
        ("asample", {**ask, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**7, -1]}]}}),
        ("asample", {**ask, "prompt": {"chunks": []}}),
        ("asample", {**ask, "num_samples": 10**6}),
        ("asample", {**ask, "sampling_params": {"max_tokens": 10**9}}),
        ("asample", {**ask, "prompt": {"chunks": [{"type": "image", "data": "AA"}]}}),
        ("optim_step", {**far, "seq_id": 1, "adam_params": {"learning_rate": 1e400}}),
        ("optim_step", far),
        ("save_weights", {**mine, "seq_id": 2, "path": "../../etc/x"}),
        ("optim_step", {**far, "model_id": strangers, "seq_id": 1}),
        ("load_weights", {**mine, "seq_id": 3, "path": f"tinker://{strangers}/weights/one", "optimizer": True}),
        ("create_model", {**create, "lora_config": {"rank": 0}}),
        ("create_model", {**create, "lora_config": {"rank": 10**5}}),
        ("create_model", {**create, "base_model": "trust/remote", "lora_config": {"rank": 4}}),
    ]


def bad_passes(model: str) -> Iterator[bytes]:
    """Return passes of the kinds that must be refused."""
    good = {"target_tokens": [4, 5], "weights": [1.0, 1.0]}
    yield pass_body(model, 4, [([3, 10**7], good)], "cross_entropy")
    yield pass_body(model, 5, [([3, 4], {**good, "weights": [1.0]})], "cross_entropy")
    yield pass_body(model, 6, [([3, 4], {**good, "weights": [float("nan"), 1.0]})], "cross_entropy")
    yield pass_body(model, 7, [([3, 4], good)], "stable_reinforce")


def send_garbage(client: Client, strangers: str, count: int, seed: int, outcomes: Counter[str]) -> None:
    """Send every bad input, and that many requests with mistakes; count how they end."""
    from tests.mistakes import HOSTILE, garbled, mutated

    draw = random.Random(seed)
    client.begin(4, seed)
    client.snapshot()
    protobuf, plain = ({"Content-Type": f"application/{kind}"} for kind in ("x-protobuf", "json"))

    def ended(response: httpx.Response) -> None:
        if response.status_code >= 500:
            outcomes["server error"] += 1
        elif response.is_error:
            outcomes["refused"] += 1
        else:
            try:
                name = response.json().get("request_id")
                # One behind a number that never comes stays open.
                if name is not None and client.http.post("retrieve_future", json={"request_id": name}, timeout=2):
                    outcomes["answered"] += 1
            except httpx.TimeoutException:
                outcomes["open"] += 1

    inputs = bad_inputs(client, strangers)
    right = [(route, fields) for route, fields in inputs if route != "create_model"]
    for route, fields in inputs:
        ended(client.http.post(route, content=_json(fields), headers=plain))
    for body in bad_passes(client.model):
        ended(client.http.post("forward_backward", content=body, headers=protobuf))
    bomb = {**protobuf, "Content-Encoding": "zstd"}
    ended(client.http.post("forward_backward", content=b"(\xb5/\xfd" * 100, headers=bomb))
    for number in range(count):
        kind = draw.choice(["object", "object", "object", "bytes", "pass"])
        if kind == "pass":
            body = garbled(draw, pass_body(client.model, number + 8, [([3, 4], {"target_tokens": [4, 5]})], "ppo"))
            client.http.post("forward_backward", content=body, headers=protobuf)
            outcomes["mistakes"] += 1
            continue
        route, fields = draw.choice(right)
        content = _json(mutated(draw, fields)) if kind == "object" else draw.choice(HOSTILE)
        outcomes["server error"] += client.http.post(route, content=content, headers=plain).status_code >= 500
        outcomes["mistakes"] += 1
    client.end()


def _json(fields: Any) -> bytes:
    return json.dumps(fields).encode()


class Round(NamedTuple):
    """Seconds and CPU seconds of the same work, and the losses of each tenant."""

    seconds: float
    cpu: float
    losses: list[list[float]]


def tenants(seconds: float, steps: int) -> Iterator[Result]:
    """Compare one tenant after another, all at once, and all beside garbage, in turns."""
    rounds: dict[str, list[Round]] = {"alone": [], "at once": [], "beside garbage": []}
    outcomes: Counter[str] = Counter()
    with serving((*TENANTS, "eve"), "serve/sums-laptop") as service:
        clients = [service.client(tenant) for tenant in TENANTS]
        eve, stranger = service.client("eve"), service.client("ann")
        strangers = stranger.begin(4, 1)
        train(clients[0], 9, 2)  # what is done once

        def alone() -> list[list[float]]:
            return [train(client, seed, steps) for seed, client in enumerate(clients)]

        def together() -> list[list[float]]:
            with ThreadPoolExecutor(len(clients)) as pool:
                return list(pool.map(lambda pair: train(pair[1], pair[0], steps), enumerate(clients)))

        def beside() -> list[list[float]]:
            sender = threading.Thread(
                target=send_garbage, args=(eve, strangers, MISTAKES // 3, len(rounds["alone"]), outcomes)
            )
            sender.start()
            losses = together()
            sender.join()
            return losses

        ways: list[tuple[str, Callable[[], list[list[float]]]]] = [
            ("alone", alone),
            ("at once", together),
            ("beside garbage", beside),
        ]
        began = time.monotonic()
        while time.monotonic() < began + seconds or len(rounds["alone"]) < 3:
            for name, way in ways:
                start, cpu = time.perf_counter(), service.cpu_seconds()
                losses = way()
                rounds[name].append(Round(time.perf_counter() - start, service.cpu_seconds() - cpu, losses))
            ways.reverse()
    right = rounds["alone"][0].losses
    for name, those in rounds.items():
        equal = sum(one == other for made in those for one, other in zip(made.losses, right, strict=True))
        of = len(those) * len(TENANTS)
        what = f"losses {name}, those of the first run alone"
        yield Result(what, f"{len(those)} rounds, {steps} steps each", f"{equal}", f"{of}", equal == of)
    yield _ratio("throughput of four tenants at once", rounds["alone"], rounds["at once"])
    yield _ratio("the same beside garbage", rounds["at once"], rounds["beside garbage"])
    errors = outcomes.pop("server error", 0)
    yield Result("server errors by garbage", str(dict(outcomes)), str(errors), "0", not errors)


def _ratio(what: str, before: Sequence[Round], after: Sequence[Round]) -> Result:
    ratios = [one.seconds / other.seconds for one, other in zip(before, after, strict=True)]
    cpu = statistics.median(one.cpu / other.cpu for one, other in zip(before, after, strict=True))
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, by CPU seconds {cpu:.2f}"
    times = f"{statistics.median(one.seconds for one in after):.1f} s a round; load {os.getloadavg()[0]:.0f}"
    return Result(what, f"{spread}; {times}", f"{ratio:.2f}x", f">= {SHARE}x", ratio >= SHARE)


# The curve


class Course(NamedTuple):
    """A training: the mean reward of each step, its tokens, and CPU seconds of all processes."""

    rewards: list[float]
    tokens: float
    cpu: float


def by_recipe(name: str, overrides: Sequence[str], steps: int) -> Course:
    """Train by recipe math."""
    meter = Meter([steps])
    run(name, meter, *overrides)
    config = shipped(name, *overrides)[1]
    tokens = sum(row["rollout/response_length"] + row["rollout/prompt_length"] for row in meter.times)
    rewards = [row["rollout/reward"] for row in meter.times]
    return Course(rewards, tokens * config.answers_per_step, meter.cpu(0, steps))


def by_service(name: str, overrides: Sequence[str], model: str, steps: int, seed: int) -> Course:
    """Train by a client of the service, as the recipe is configured."""
    from transformers import AutoTokenizer

    config = shipped(name, *overrides)[1]
    settings, lora = settings_of(config, model, steps), config.actor.model.adapter()
    if lora is None:
        raise SystemExit("the service trains adapters: configure `actor.model.lora`")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    stop, ends = settings["stop"], {tokenizer.eos_token_id}
    if stop:
        ends |= set(tokenizer.encode(stop, add_special_tokens=False))
    optim, bounds = config.actor.optim, config.algorithm
    adam = {"beta1": optim.adam_beta1, "beta2": optim.adam_beta2, "eps": optim.adam_eps}
    adam |= {"weight_decay": optim.weight_decay, "grad_clip_norm": optim.clip_grad}
    params: dict[str, Any] = {"max_tokens": settings["max_new_tokens"], "stop": [stop] if stop else None}
    clips = {"clip_low_threshold": 1 - bounds.clip_ratio_low, "clip_high_threshold": 1 + bounds.clip_ratio_high}
    served = (f"actor.model.model_path={model}", f"actor.lora_alpha={lora.alpha}", "server.max_pending=1000")
    rewards: list[float] = []
    count = 0
    with serving(["ann"], "serve/sums-laptop", *served) as service:
        client = service.client("ann")
        client.begin(lora.rank, seed, train_unembed=False)
        start, own = service.cpu_seconds(), time.process_time()
        for step in range(steps):
            asked = settings["problems"][step * settings["prompts"] :][: settings["prompts"]]
            sampler = client.snapshot()
            sent: list[tuple[list[int], str, str]] = []
            for number, (text, right) in enumerate(asked):
                prompt = tokenizer.encode(text, add_special_tokens=False)
                draw = {**params, "seed": 10_000 * seed + 100 * step + number}
                sent.append((prompt, right, client.sample(sampler, number, prompt, settings["group_size"], **draw)))
            groups = [(prompt, right, client.answers(request_id)) for prompt, right, request_id in sent]
            data: list[tuple[list[int], dict[str, Any]]] = []
            total = sum(len(tokens) for _, _, answers in groups for tokens, _ in answers)
            scores: list[float] = []
            for prompt, right, answers in groups:
                mine = [_reward(tokenizer, tokens, right, ends) for tokens, _ in answers]
                scores += mine
                spread = np.std(mine, ddof=1)
                for (tokens, logprobs), reward in zip(answers, mine, strict=True):
                    advantage = (reward - np.mean(mine)) / (spread + 1e-6) / total if spread else 0.0
                    row, before = prompt + tokens, len(prompt) - 1
                    inputs = {
                        "target_tokens": row[1:],
                        "logprobs": [0.0] * before + logprobs,
                        "advantages": [0.0] * before + [advantage] * len(tokens),
                    }
                    data.append((row[:-1], inputs))
                    count += len(row)
            learned = client.forward_backward(data, "ppo", **clips)
            stepped = client.optim_step(settings["lr"], **adam)
            client.result(learned)
            client.result(stepped)
            rewards.append(statistics.fmean(scores))
        spent = service.cpu_seconds() - start + time.process_time() - own
    return Course(rewards, count, spent)


def _reward(tokenizer: Any, tokens: list[int], right: str, ends: set[int]) -> float:
    ended = bool(tokens) and tokens[-1] in ends
    text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
    return float(ended and text.strip() == right)


def curve(kind: str, folder: str, steps: int, seeds: Sequence[int]) -> Iterator[Result]:
    """Compare training by the service with that by recipe math, in turns."""
    name, first, last = CURVES[kind], list[float](), list[float]()
    ends: dict[str, list[float]] = {"recipe": [], "service": []}
    speeds: dict[str, list[float]] = {"recipe": [], "service": []}
    adapter = () if kind == "smollm2" else ("actor.model.lora={rank: 16, alpha: 32}", "actor.optim.lr=2.0e-3")
    for seed in seeds:
        overrides = (*BARE, *AS_BASELINES, *adapter, f"runner.max_steps={steps}", f"actor.model.model_path={folder}")
        overrides = (*overrides, "actor.threads=1", "rollout.threads=1", f"actor.seed={seed}", f"data.seed={seed}")
        ways: list[tuple[str, Callable[[], Course]]] = [
            ("recipe", lambda overrides=overrides: by_recipe(name, overrides, steps)),
            ("service", lambda overrides=overrides, seed=seed: by_service(name, overrides, folder, steps, seed)),
        ]
        for way, train_by in ways if seed % 2 == 0 else reversed(ways):
            course = train_by()
            ends[way].append(statistics.fmean(course.rewards[-LAST:]))
            speeds[way].append(course.tokens / course.cpu)
            (first if way == "recipe" else last).append(course.rewards[0])
            shown = " ".join(f"{reward:.2f}" for reward in course.rewards[:: max(1, steps // 10)])
            print(
                f"{kind}, seed {seed}, {way}: {shown}; {course.tokens:.0f} tokens, {course.cpu:.1f} cpu-s", flush=True
            )
    if len(seeds) > 1:
        gap = statistics.fmean(ends["service"]) - statistics.fmean(ends["recipe"])
        noise = 2 * sum(statistics.variance(values) / len(values) for values in ends.values()) ** 0.5
        shown = "; ".join(f"{way} {', '.join(f'{end:.3f}' for end in values)}" for way, values in ends.items())
        starts = f"from {statistics.fmean(first):.2f} and {statistics.fmean(last):.2f}"
        what = f"{kind}: reward of the last {LAST} of {steps} steps, less the recipe's"
        # Two standard errors of the difference between means of that many seeds.
        yield Result(what, f"{shown}; {starts}", f"{gap:+.3f}", f"+-{noise:.3f}", abs(gap) <= noise)
    ratios = [ours / theirs for ours, theirs in zip(speeds["service"], speeds["recipe"], strict=True)]
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}; {speeds['service'][0]:.0f} against {speeds['recipe'][0]:.0f}"
    yield Result(f"{kind}: tokens per CPU second, by recipe math's", spread, f"{ratio:.2f}x", ">= 0.8x", ratio >= 0.8)


def curves(models: Sequence[str], smollm2: str, steps: int, seeds: Sequence[int]) -> Iterator[Result]:
    """Return the results of `curve` for each model that is there."""
    for model in models:
        if model == "tiny":
            with tempfile.TemporaryDirectory() as folder:
                warm_model(Path(folder, "model"))
                yield from curve(model, f"{folder}/model", steps, seeds)
        elif Path(smollm2).is_dir():
            yield from curve(model, str(Path(smollm2).resolve()), steps, seeds)
        else:
            print(f"SmolLM2 is left out: there is no `{smollm2}`; configs/math/smollm2-laptop.yaml says how to make it")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tenants", "curve"])
    parser.add_argument("--seconds", type=float, default=120, help="of the rounds of tenants")
    parser.add_argument("--steps", type=int, default=10, help="of each tenant in a round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--curve-steps", type=int, default=30)
    parser.add_argument("--model", choices=list(CURVES), nargs="+", default=["tiny"])
    parser.add_argument("--smollm2", default=os.environ.get("SMOLLM2", "models/smollm2"), metavar="FOLDER")
    args = parser.parse_args()
    parts = {
        "tenants": lambda: tenants(args.seconds, args.steps),
        "curve": lambda: curves(args.model, args.smollm2, args.curve_steps, args.seeds),
    }
    return run_parts(parts, args.only)


if __name__ == "__main__":
    sys.exit(main())
