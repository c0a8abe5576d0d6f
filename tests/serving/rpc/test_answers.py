"""The client sees one answer, whatever engines it came from."""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.rpc.answers import AnswerBook


def _chunk(ids: list[int], **fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, **fields))


def _complete(ids: list[int], **fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, **fields))


def test_a_stream_counts_for_itself() -> None:
    book = AnswerBook(num_prompt_tokens=9, stream=True)
    # After a restart the second engine reports the longer prompt and its own cache hits.
    first = book.take(_chunk([1], prompt_tokens=9, completion_tokens=1, cached_tokens=4))
    second = book.take(_chunk([2, 3], prompt_tokens=10, completion_tokens=1, cached_tokens=10))
    assert first is not None
    assert second is not None
    assert [first.chunk.completion_tokens, second.chunk.completion_tokens] == [1, 2]
    assert (second.chunk.prompt_tokens, second.chunk.cached_tokens) == (9, 4)
    last = book.take(
        _complete([3], completion_tokens=1, finish_reason="stop", kv_transfer_params_json="{}")
    )
    assert last is not None
    assert list(last.complete.output_ids) == [1, 2, 3]
    assert last.complete.completion_tokens == 3
    assert last.complete.finish_reason == "stop"
    assert not last.complete.HasField("kv_transfer_params_json")


def test_one_piece_gathers_tokens_and_logprobs() -> None:
    book = AnswerBook(num_prompt_tokens=2, stream=False)
    for token in (5, 6):
        logprobs = pb.OutputLogProbs(token_ids=[token], token_logprobs=[-1.0])
        assert book.take(_chunk([token], output_logprobs=logprobs)) is None
    last = book.take(_complete([6], finish_reason="length"))
    assert last is not None
    assert list(last.complete.output_ids) == [5, 6]
    assert list(last.complete.output_logprobs.token_ids) == [5, 6]


def test_samples_are_kept_apart() -> None:
    book = AnswerBook(num_prompt_tokens=2, stream=True)
    book.take(_chunk([1], index=0))
    book.take(_chunk([2], index=1))
    book.take(_chunk([3], index=0))
    answers = [book.take(_complete([], index=i)) for i in range(2)]
    assert [list(a.complete.output_ids) for a in answers if a] == [[1, 3], [2]]


def test_an_answer_without_chunks_keeps_its_tokens() -> None:
    last = AnswerBook(num_prompt_tokens=2, stream=False).take(_complete([7, 8]))
    assert last is not None
    assert (list(last.complete.output_ids), last.complete.completion_tokens) == ([7, 8], 2)


def test_unknown_fields_survive() -> None:
    # Field 100, varint 1: what a newer engine might add.
    raw = _chunk([1]).chunk.SerializeToString() + b"\xa0\x06\x01"
    answer = pb.GenerateResponse(chunk=pb.GenerateStreamChunk.FromString(raw))
    shown = AnswerBook(num_prompt_tokens=1, stream=True).take(answer)
    assert shown is not None
    assert b"\xa0\x06\x01" in shown.SerializeToString()
