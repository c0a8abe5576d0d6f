from __future__ import annotations

import asyncio

from serving.core.worker import Role


def test_one_worker_answers_as_the_model_alone(scenario, alone):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        prompts = [rig.prompt_of(i, n) for i, n in enumerate((1, 3, 4, 5, 17, 40, 64))]
        answers = await asyncio.gather(
            *(worker.complete(rig.generate(f"r{i}", p, 8)) for i, p in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.output_ids) == alone(prompt, 8).tokens
            assert answer.finish_reason == "length"
            assert answer.prompt_tokens == len(prompt)

    scenario(body)
