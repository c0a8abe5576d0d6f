"""What the client sees of the engines' answers: one continuous answer, counted here.

Engines count a chunk's own tokens and close a stream with the last ones only; after a loss
the answer comes from two engines. So counts and ids are the door's own, everything else of an
engine's message (log-probabilities, fields this code does not know) stays as it came.
Chunk semantics are vLLM's: `completion_tokens` of a chunk counts that chunk.
"""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as pb


class AnswerBook:
    """Rewrites the answers of one request, in order."""

    def __init__(self, *, num_prompt_tokens: int, stream: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._stream = stream
        self._token_ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, pb.OutputLogProbs] = {}
        self._cached_tokens: dict[int, int] = {}

    def take(self, answer: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """The answer to send on, or None when there is nothing to send now."""
        if answer.HasField("chunk"):
            return self._chunk(answer)
        if answer.HasField("complete"):
            return self._complete(answer)
        return answer

    def _chunk(self, answer: pb.GenerateResponse) -> pb.GenerateResponse | None:
        chunk = answer.chunk
        self._token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        # What the first engine call found cached is what the client saved.
        self._cached_tokens.setdefault(chunk.index, chunk.cached_tokens)
        if not self._stream:
            if chunk.HasField("output_logprobs"):
                kept = self._logprobs.setdefault(chunk.index, pb.OutputLogProbs())
                kept.MergeFrom(chunk.output_logprobs)
            return None
        chunk.prompt_tokens = self._num_prompt_tokens
        chunk.completion_tokens = len(chunk.token_ids)
        chunk.cached_tokens = self._cached_tokens[chunk.index]
        return answer

    def _complete(self, answer: pb.GenerateResponse) -> pb.GenerateResponse:
        complete = answer.complete
        token_ids = self._token_ids.get(complete.index)
        if token_ids is None:
            token_ids = list(complete.output_ids)
        del complete.output_ids[:]
        complete.output_ids.extend(token_ids)
        complete.completion_tokens = len(token_ids)
        complete.prompt_tokens = self._num_prompt_tokens
        complete.cached_tokens = self._cached_tokens.get(complete.index, complete.cached_tokens)
        if complete.index in self._logprobs:
            complete.output_logprobs.CopyFrom(self._logprobs[complete.index])
        # Where the KV lies is between the engines.
        complete.ClearField("kv_transfer_params")
        complete.ClearField("kv_transfer_params_json")
        return answer
