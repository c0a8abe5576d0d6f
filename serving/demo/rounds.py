"""Interleaved, paired rounds: every policy meets the same prompts at the same times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from serving.core.clock import Clock
from serving.core.worker import Phase
from serving.demo.accounting import RequestCost, Step, request_costs
from serving.demo.client import Answer, DemoClient, Prompt

# Summary name -> (decode policy of the registry, signatures shuffled).
POLICIES = {
    "jsq": ("jsq", False),
    "p2c": ("p2c", False),
    "eldr": ("eldr_static", False),
    "eldr_shuffled": ("eldr_static", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy in one round.

    Attributes:
        policy: its summary name.
        answers: one per prompt.
        steps: all workers' steps.
        costs: prompt key -> cost, of the prompts that decoded.
    """

    policy: str
    answers: tuple[Answer, ...]
    steps: tuple[Step, ...]
    costs: dict[str, RequestCost]

    @property
    def num_failed(self) -> int:
        """Answers with an error."""
        return sum(bool(answer.error) for answer in self.answers)


def poisson_starts(num: int, rate_per_s: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds from the start of a round at which its prompts are sent, float64 [num]."""
    return np.cumsum(rng.exponential(1 / rate_per_s, num))


async def measure_capacity(
    client: DemoClient, prompts: Sequence[Prompt], *, max_tokens: int, clock: Clock
) -> float:
    """Requests per second that the fleet finishes when all prompts come at once."""
    began_s = clock.monotonic_s()
    starts = [0.0] * len(prompts)
    await client.run(
        prompts, starts, run_id="capacity", max_tokens=max_tokens, progress=lambda done: None
    )
    elapsed_s = clock.monotonic_s() - began_s
    await client.forget()
    await client.new_steps()
    return len(prompts) / elapsed_s


async def play_round(
    client: DemoClient,
    prompts: Sequence[Prompt],
    *,
    number: int,
    rate_per_s: float,
    max_tokens: int,
    seed: int,
    use_policy: Callable[[Phase, str], None],
    use_shuffled: Callable[[bool], None],
    progress: Callable[[str, int], None],
) -> list[Run]:
    """One round of every policy, in an order that rotates from round to round.

    Args:
        client: connected.
        prompts: sent in a fresh order each round, the same for every policy.
        number: of the round, from 0.
        rate_per_s: mean Poisson arrivals.
        max_tokens: output tokens of each request.
        seed: with `number` it fixes order and arrivals.
        use_policy: switches the router's decode policy.
        use_shuffled: switches the signature control.
        progress: told (policy, answers so far).
    """
    rng = np.random.default_rng((seed, number))
    order = [prompts[i] for i in rng.permutation(len(prompts))]
    starts = poisson_starts(len(order), rate_per_s, rng)
    names = list(POLICIES)
    # The control needs every prompt's true signature first, so it never opens round 0.
    turn = number % len(names)
    names = names[turn:] + names[:turn]
    runs = []
    for name in names:
        policy, shuffled = POLICIES[name]
        use_policy(Phase.DECODE, policy)
        use_shuffled(shuffled)
        await client.forget()
        await client.new_steps()
        answers = await client.run(
            order,
            starts.tolist(),
            run_id=f"r{number}/{name}",
            max_tokens=max_tokens,
            progress=lambda done, name=name: progress(name, done),
        )
        steps = tuple(await client.new_steps())
        runs.append(_run(name, answers, steps))
    return runs


def _run(policy: str, answers: Sequence[Answer], steps: tuple[Step, ...]) -> Run:
    times = {a.request_id: (a.ttft_s, a.tpot_s) for a in answers if not a.error}
    costs = request_costs(steps, times)
    by_prompt = {a.prompt_key: costs[a.request_id] for a in answers if a.request_id in costs}
    return Run(policy=policy, answers=tuple(answers), steps=steps, costs=by_prompt)


def differing_outputs(runs: Sequence[Run], alone: dict[str, tuple[int, ...]]) -> list[str]:
    """Prompt keys whose tokens differ between runs or from the model run alone."""
    return sorted(
        {
            answer.prompt_key
            for run in runs
            for answer in run.answers
            if not answer.error and answer.token_ids != alone[answer.prompt_key]
        }
    )
