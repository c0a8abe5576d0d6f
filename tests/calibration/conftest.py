from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.capture_checks import Geometry
from calibration.captures import Capture, CaptureWriter, PromptCapture, read_capture

TOPIC_GEOMETRY = Geometry(num_layers=4, num_experts=16, top_k=2)


def topic_prompt(
    index: int, num_topics: int, noisy_layer: int, rng: np.random.Generator
) -> PromptCapture:
    """A prompt whose experts come from its topic's quarter, one layer from anywhere."""
    geometry = TOPIC_GEOMETRY
    topic = index % num_topics
    width = geometry.num_experts // num_topics

    def experts(num_tokens: int) -> np.ndarray:
        shape = (num_tokens, geometry.num_layers, geometry.num_experts)
        scores = rng.random(shape)
        scores[:, :, topic * width : (topic + 1) * width] += 0.7
        scores[:, noisy_layer] = rng.random(scores[:, noisy_layer].shape)
        return (-scores).argsort(axis=2)[..., : geometry.top_k]

    def counts(ids: np.ndarray) -> np.ndarray:
        hot = np.zeros((len(ids), geometry.num_layers, geometry.num_experts), np.uint32)
        np.put_along_axis(hot, ids, 1, axis=2)
        return hot.sum(axis=0)

    prefill, decode = experts(int(rng.integers(10, 30))), experts(12)
    names = ("code", "math", "lang/de", "lang/ja")
    return PromptCapture(
        prompt_id=f"p{index}",
        domain=names[topic],
        token_ids=(rng.integers(0, 6, len(prefill)) + 6 * topic).astype(np.int32),
        prefill=counts(prefill),
        decode=counts(decode),
        decode_experts=decode,
        prefill_experts=prefill,
    )


def write_topic_capture(path: Path, num_prompts: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    writer = CaptureWriter(
        path, geometry=TOPIC_GEOMETRY, model_name="topics", provenance={"prompts": "drawn"}
    )
    for index in range(num_prompts):
        writer.add(topic_prompt(index, 4, 1, rng))
    writer.close()
    return path


@pytest.fixture(scope="session")
def topic_capture_dir(tmp_path_factory) -> Path:
    """48 prompts of four topics; layer 1 tells nothing."""
    return write_topic_capture(tmp_path_factory.mktemp("capture") / "train", 48, 0)


@pytest.fixture(scope="session")
def held_out_capture_dir(tmp_path_factory) -> Path:
    """48 more prompts of the same topics."""
    return write_topic_capture(tmp_path_factory.mktemp("capture") / "heldout", 48, 1)


@pytest.fixture(scope="session")
def topic_capture(topic_capture_dir) -> Capture:
    return read_capture(topic_capture_dir)
