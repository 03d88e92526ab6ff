"""Joins the chunks of a stream into the response that the same request would have got at once."""

from __future__ import annotations

from collections.abc import Sequence

from agoge_async.messages import AssistantMessage, FunctionCall, ToolCall
from agoge_async.responses import (
    ChatChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    InferenceResponse,
    StreamSummary,
    ToolCallDelta,
)


def join_chunks(chunks: Sequence[ChatChunk], summary: StreamSummary) -> InferenceResponse:
    """Join all chunks of a stream, in order.

    Raises:
        ValueError: There is no chunk.
    """
    if not chunks:
        raise ValueError("a stream without chunks has no response")
    by_choice: dict[int, list[ChunkChoice]] = {}
    for chunk in chunks:
        for piece in chunk.choices:
            by_choice.setdefault(piece.index, []).append(piece)
    first = chunks[0]
    response = InferenceResponse(
        id=first.id,
        created=first.created,
        model=first.model,
        choices=[_join_choice(index, by_choice[index]) for index in sorted(by_choice)],
        usage=summary.usage or next((c.usage for c in reversed(chunks) if c.usage), None),
        system_fingerprint=next(
            (c.system_fingerprint for c in chunks if c.system_fingerprint), None
        ),
        prompt_token_ids=next((c.prompt_token_ids for c in chunks if c.prompt_token_ids), None),
        time_to_first_token_s=summary.time_to_first_token_s,
    )
    for choice in response.choices:
        choice.policy_versions = summary.policy_versions.get(choice.index)
    return response


def _join_choice(index: int, pieces: Sequence[ChunkChoice]) -> Choice:
    deltas = [piece.delta for piece in pieces]
    token_ids = [token for piece in pieces for token in piece.token_ids or ()]
    logprobs = [entry for p in pieces if p.logprobs for entry in p.logprobs.content or ()]
    has_logprobs = any(piece.logprobs is not None for piece in pieces)
    calls = _join_calls([call for delta in deltas for call in delta.tool_calls or ()])
    text = "".join(delta.content or "" for delta in deltas)
    return Choice(
        index=index,
        message=AssistantMessage(
            content=text if text or not calls else None,
            reasoning="".join(delta.reasoning or "" for delta in deltas) or None,
            refusal="".join(delta.refusal or "" for delta in deltas) or None,
            tool_calls=calls or None,
        ),
        finish_reason=next((p.finish_reason for p in pieces if p.finish_reason), ""),
        stop_reason=next((p.stop_reason for p in pieces if p.stop_reason is not None), None),
        logprobs=ChoiceLogprobs(content=logprobs) if has_logprobs else None,
        token_ids=token_ids or None,
    )


def _join_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    """Join pieces of calls by their index; the first id and name of each count."""
    joined: dict[int, ToolCall] = {}
    for delta in deltas:
        call = joined.setdefault(
            delta.index, ToolCall(id="", function=FunctionCall(name="", arguments=""))
        )
        call.id = call.id or delta.id or ""
        if delta.function is not None:
            call.function.name = call.function.name or delta.function.name or ""
            call.function.arguments += delta.function.arguments or ""
    return [joined[index] for index in sorted(joined)]
