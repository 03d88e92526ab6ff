"""vLLM in the child: builds the engine and answers calls with vLLM's own serving classes.

The only module that imports vLLM's entry points. `_TappedEngine` stands between the serving classes
and the engine to note what their responses leave out: which weights sampled which token, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import vllm
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from agoge_async.engine.adapters import Adapter, Adapters
from agoge_async.engine.messages import (
    Call,
    CallKind,
    Command,
    CommandKind,
    EngineInfo,
    EngineSpec,
    Fault,
    FaultKind,
    ReplyKind,
    encode_json,
)
from agoge_async.weights.manifest import decode_manifest

WORKER_EXTENSION = "agoge_async.engine.worker.WorkerExtension"
CORE_EXIT_S = 1.0
"""EngineCore frees what it holds within milliseconds, then takes seconds to take its modules down.
"""
READY_POLL_S = 0.01
"""How often workers are asked whether a push is there: a call that waited would hold generation."""
_CONTEXT_PARAMETERS = ("input_tokens", "input_text")
"""How vLLM's tokenizer step names a prompt that is too long."""


def build_engine(spec: EngineSpec) -> AsyncLLM:
    """Start vLLM; blocks until the model is loaded."""
    arguments = {"worker_extension_cls": WORKER_EXTENSION, "disable_log_stats": True}
    if spec.reasoning_parser is not None:
        arguments["reasoning_parser"] = spec.reasoning_parser  # grammars begin after the thinking
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**(arguments | spec.engine_args)))


@dataclasses.dataclass(slots=True)
class _Tap:
    """What the engine said of one request beside its text."""

    policy_versions: dict[int, list[dict[str, int]]] = dataclasses.field(default_factory=dict)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    first_token: float | None = None

    def note(self, output: RequestOutput, adapter: Adapter | None) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        for completion in output.outputs:
            if completion.weight_versions:  # on the last output of each choice
                spans = _spans(completion)
                if adapter is not None:
                    spans = [{"version": adapter.version, "start": 0, "end": spans[-1]["end"]}]
                self.policy_versions[completion.index] = spans

    def time_to_first_token_s(self) -> float | None:
        """Give it for an answer in pieces; of one that comes at once, vLLM tells only the end."""
        return None if self.first_token is None else self.first_token - self.arrived


class _TappedEngine:
    """The engine as the serving classes see it; notes what they don't pass on.

    Has each request that begins use the current adapter.
    """

    def __init__(self, engine: AsyncLLM, adapters: Adapters) -> None:
        self._engine = engine
        self._adapters = adapters
        self._taps: dict[str, _Tap] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open_tap(self, request_id: str) -> _Tap:
        tap = self._taps[request_id] = _Tap()
        return tap

    def close_tap(self, request_id: str) -> None:
        self._taps.pop(request_id, None)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        tap = self._taps.get(request_id)
        with self._adapters.use() as adapter:
            if adapter is not None:
                options["lora_request"] = adapter.request
            generator = self._engine.generate(prompt, sampling_params, request_id, **options)
            # Else the abort would wait for garbage collection.
            async with contextlib.aclosing(generator):
                async for output in generator:
                    if tap is not None:
                        tap.note(output, adapter)
                    yield output


def _spans(completion: CompletionOutput) -> list[dict[str, int]]:
    return [
        {"version": _as_version(span.version), "start": span.start, "end": span.end}
        for span in completion.weight_versions or ()
    ]


def _union(names: Iterable[list[str]]) -> list[str]:
    return sorted(set().union(*names))


def _as_version(label: str) -> int:
    """Read vLLM's label of the weights; "default" is what the engine was started with."""
    return int(label) if label.isdecimal() else 0


class Serving:
    """Answers calls.

    Args:
        engine: A started engine.
        spec: What it was started from.
    """

    death_errors = (EngineDeadError,)

    def __init__(self, engine: AsyncLLM, spec: EngineSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._adapters = Adapters(engine, spec.served_model, Path(spec.work_dir, "adapters"))
        self._tapped = _TappedEngine(engine, self._adapters)
        template = load_chat_template(spec.chat_template)
        parsing: dict[str, Any] = {
            "request_logger": None,
            "chat_template": template,
            "chat_template_content_format": "auto",
            "enable_auto_tools": spec.tool_call_parser is not None,
            "tool_parser": spec.tool_call_parser,
            "reasoning_parser": spec.reasoning_parser or "",
        }
        self._renderer = OnlineRenderer(engine.model_config, engine.renderer, **parsing)
        models = OpenAIServingModels(
            self._tapped,
            [BaseModelPath(name=spec.served_model, model_path=engine.model_config.model)],
        )
        self._chat = OpenAIServingChat(
            self._tapped,
            models,
            "assistant",
            online_renderer=self._renderer,
            enable_prompt_tokens_details=True,
            **parsing,
        )
        self._id_prefix = uuid.uuid4().hex[:12]  # ids of other engines, and of restarts, differ
        self._version = 0
        self._holds = 0
        """How often generation was held for other weights."""
        self._is_held = False
        self._is_awake = True
        self._default_sampling = engine.model_config.get_diff_sampling_param()

    async def info(self) -> EngineInfo:
        """Say what this engine is."""
        devices = await self._engine.collective_rpc("agoge_device")
        config = self._engine.model_config
        lora = self._engine.vllm_config.lora_config
        return EngineInfo(
            max_model_len=config.max_model_len,
            vllm_version=vllm.__version__,
            is_multimodal=config.is_multimodal_model,
            has_tool_parser=self._spec.tool_call_parser is not None,
            devices=tuple(devices),
            dtype=str(config.dtype).removeprefix("torch."),
            no_sleep=self._why_no_sleep(),
            max_lora_rank=0 if lora is None else lora.max_lora_rank,
        )

    def _why_no_sleep(self) -> str | None:
        if not current_platform.is_sleep_mode_available():  # vLLM would do as if it slept
            platform = current_platform.device_type.upper()
            return f"sleep is not supported on the {platform}, where vLLM frees no memory"
        if not self._engine.model_config.enable_sleep_mode:
            return "it was started without sleep mode; set engine_args: {enable_sleep_mode: true}"
        return None

    async def warm_up(self) -> None:
        """Generate one token, so that the first caller doesn't pay for what vLLM does lazily."""
        parameters = SamplingParams(max_tokens=1, detokenize=False, logprobs=0)
        async for _ in self._engine.generate(tokens_input([0]), parameters, "warm-up"):
            pass

    @property
    def is_dead(self) -> bool:
        """Whether EngineCore or a worker is gone."""
        return bool(self._engine.errored)

    @property
    def num_unfinished(self) -> int:
        """Requests that vLLM has not finished."""
        return int(self._engine.get_num_unfinished_requests())

    @property
    def adapter_versions(self) -> tuple[int, ...]:
        """Versions of the LoRA adapters that vLLM has."""
        return self._adapters.versions

    def death_cause(self) -> str:
        """Say in one line why the engine is dead."""
        return "vLLM's EngineCore or one of its workers ended"

    def shutdown(self) -> None:
        """End EngineCore and the workers."""
        self._engine.shutdown(timeout=CORE_EXIT_S)

    async def obey(self, command: Command) -> str:
        """Carry out a command; gives what it has to tell, as JSON."""
        steps: dict[CommandKind, Callable[[str], Awaitable[object]]] = {
            CommandKind.BEGIN: self._begin_push,
            CommandKind.READY: self._wait_for_push,
            CommandKind.HOLD: self._hold,
            CommandKind.LOAD: self._load_push,
            CommandKind.COMPARE: self._compare_push,
            CommandKind.COMMIT: self._commit_push,
            CommandKind.ABORT: self._abort_push,
            CommandKind.END_REQUESTS: self._end_requests,
            CommandKind.SLEEP: self._sleep,
            CommandKind.WAKE_UP: self._wake_up,
        }
        return json.dumps(await steps[command.kind](command.body))

    async def _begin_push(self, manifest: str) -> None:
        await self._adapters.begin(decode_manifest(manifest))
        answers = await self._engine.collective_rpc("agoge_begin_push", args=(manifest,))
        nowhere = set.intersection(*map(set, answers))  # each worker may hold a part only
        if nowhere:
            raise ValueError(
                f"its model has no place for {', '.join(sorted(nowhere))} of the trainer's model"
            )

    async def _wait_for_push(self, _: str) -> None:
        while True:  # a worker has no way to call
            if all(await self._engine.collective_rpc("agoge_push_is_ready")):
                break
            await asyncio.sleep(READY_POLL_S)
        if self._adapters.is_coming:
            await self._adapters.load()

    async def _hold(self, mode: str) -> None:
        """Hold generation.

        Requests that come from now on don't share cached prefixes with older ones: they may be
        answered by other weights. vLLM finds no prefix that was cached under another salt.
        """
        if self._adapters.is_coming:
            return
        self._holds += 1
        self._is_held = True
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def _load_push(self, version: str) -> dict[str, float]:
        if self._adapters.is_coming:
            return self._adapters.seconds
        self._version = int(version)
        loads = await self._engine.collective_rpc("agoge_load_push")
        return {name: max(load[name] for load in loads) for name in loads[0]}

    async def _compare_push(self, _: str) -> dict[str, list[str]]:
        found = await self._engine.collective_rpc("agoge_compare_push")
        return {key: _union(worker[key] for worker in found) for key in found[0]}

    async def _commit_push(self, _: str) -> None:
        if self._adapters.is_coming:
            self._adapters.adopt()
            return
        await self._engine.update_weight_version(str(self._version))
        await self._let_go()

    async def _abort_push(self, _: str) -> str | None:
        faults = await self._engine.collective_rpc("agoge_abort_push")
        await self._adapters.give_up()
        await self._let_go()
        return next((fault for fault in faults if fault is not None), None)

    async def _let_go(self) -> None:
        """Generate again; an engine that is asleep has no KV cache to do it with."""
        if self._is_held and self._is_awake:
            await self._engine.resume_generation()
        self._is_held = False

    async def _end_requests(self, _: str) -> None:
        await self._engine.pause_generation(mode="abort", clear_cache=False)
        await self._engine.resume_generation()

    async def _sleep(self, level: str) -> None:
        self._is_awake = False
        await self._engine.sleep(int(level), mode="wait")

    async def _wake_up(self, tags: str) -> None:
        """Take memory again; with the last of it, vLLM generates again.

        One tag a call: vLLM ignores all tags of a call when one of them is awake (0.32).
        """
        for tag in json.loads(tags):
            self._is_awake = await self._engine.wake_up([tag])

    @property
    def _cache_salt(self) -> str | None:
        """Part of the key of each cached prefix: one that other weights made is not found."""
        return f"weights-{self._holds}" if self._holds else None

    def answer(self, call: Call) -> AsyncGenerator[tuple[ReplyKind, bytes], None]:
        """Answer a call with pieces, the last of which is a RESULT; faults are raised."""
        if call.kind is CallKind.GENERATE:
            return self._generate(call)
        return self._complete_chat(call)

    async def _complete_chat(self, call: Call) -> AsyncGenerator[tuple[ReplyKind, bytes], None]:
        streams = call.kind is CallKind.CHAT_STREAM
        fields = json.loads(call.body)
        fields |= {
            "model": self._spec.served_model,
            "request_id": f"{self._id_prefix}-{call.id}",
            "return_token_ids": True,
            "stream": streams,
        }
        if self._holds:
            fields["cache_salt"] = "/".join(
                filter(None, [self._cache_salt, fields.get("cache_salt")])
            )
        if streams:
            fields["stream_options"] = {"include_usage": True}
        request = ChatCompletionRequest.model_validate(fields)
        engine_request_id = f"chatcmpl-{request.request_id}"
        tap = self._tapped.open_tap(engine_request_id)
        try:
            answer = await self._chat.create_chat_completion(request)
            if isinstance(answer, ErrorResponse):
                raise _ReturnedError(answer)
            if isinstance(answer, ChatCompletionResponse):
                yield ReplyKind.RESULT, _chat_body(answer, tap)
                return
            async with contextlib.aclosing(answer) as events:
                async for event in events:
                    body = event[len("data: ") :].rstrip().encode()
                    if body.startswith(b'{"error"'):
                        raise _ReturnedError(ErrorResponse.model_validate_json(body))
                    if body != b"[DONE]":
                        yield ReplyKind.CHUNK, body
            summary = {
                "policy_versions": tap.policy_versions,
                "time_to_first_token_s": tap.time_to_first_token_s(),
            }
            yield ReplyKind.RESULT, encode_json(summary)
        except VLLMValidationError as error:
            if error.parameter in _CONTEXT_PARAMETERS:
                raise _PromptTooLongError(await self._prompt_length(request)) from error
            raise
        finally:
            self._tapped.close_tap(engine_request_id)

    async def _prompt_length(self, request: ChatCompletionRequest) -> int:
        """Count a prompt that doesn't fit: vLLM stops tokenizing one token past the limit."""
        parameters = request.build_tok_params(self._engine.model_config)
        unlimited = dataclasses.replace(parameters, max_total_tokens=None)
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        chat_parameters = request.build_chat_params(self._chat.chat_template, "auto").with_defaults(
            {"tools": tools}
        )
        _, inputs = await self._engine.renderer.render_chat_async(
            [request.messages], chat_parameters, unlimited
        )
        return len(inputs[0]["prompt_token_ids"])

    async def _generate(self, call: Call) -> AsyncGenerator[tuple[ReplyKind, bytes], None]:
        fields = json.loads(call.body)
        prompt_token_ids: list[int] = fields.pop("prompt_token_ids")
        limit = self._engine.model_config.max_model_len
        if len(prompt_token_ids) >= limit:
            raise _PromptTooLongError(len(prompt_token_ids))
        vocabulary = self._engine.model_config.get_vocab_size()
        if max(prompt_token_ids) >= vocabulary:
            raise VLLMValidationError(
                f"prompt_token_ids holds {max(prompt_token_ids)}; the vocabulary has "
                f"{vocabulary} tokens",
                parameter="prompt_token_ids",
            )
        priority = fields.pop("priority", 0)
        parameters = self._sampling_params(fields, limit - len(prompt_token_ids))
        request_id = f"tokens-{self._id_prefix}-{call.id}"
        tap = self._tapped.open_tap(request_id)
        try:
            final: RequestOutput | None = None
            async for output in self._tapped.generate(
                tokens_input(prompt_token_ids, cache_salt=self._cache_salt),
                parameters,
                request_id,
                priority=priority,
            ):
                final = output
        finally:
            self._tapped.close_tap(request_id)
        if final is None or any(output.finish_reason == "error" for output in final.outputs):
            raise EngineGenerateError
        yield ReplyKind.RESULT, self._token_body(final, tap, parameters)

    def _sampling_params(self, fields: dict[str, Any], room: int) -> SamplingParams:
        structured = fields.pop("structured_outputs", None)
        if structured is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**structured)
        fields["max_tokens"] = min(fields.get("max_tokens", room), room)
        fields.setdefault("detokenize", "stop" in fields)
        known = {k: v for k, v in self._default_sampling.items() if k != "max_tokens"}
        return SamplingParams(
            **(known | fields), output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
        )

    def _token_body(self, final: RequestOutput, tap: _Tap, parameters: SamplingParams) -> bytes:
        choices = []
        for output in sorted(final.outputs, key=lambda output: output.index):
            choices.append(_token_choice(output, parameters))
            choices[-1]["policy_versions"] = tap.policy_versions.get(output.index)
        prompt_tokens = len(final.prompt_token_ids or ())
        completion_tokens = sum(len(choice["token_ids"]) for choice in choices)
        body = {
            "id": final.request_id,
            "model": self._spec.served_model,
            "prompt_token_ids": final.prompt_token_ids,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": final.num_cached_tokens},
            },
        }
        if final.prompt_logprobs is not None:
            body["prompt_logprobs"] = [
                position and {token: entry.logprob for token, entry in position.items()}
                for position in final.prompt_logprobs
            ]
        return encode_json(body)

    def describe_fault(self, error: Exception) -> Fault:
        """Say whose fault an exception of `answer` is."""
        if isinstance(error, _PromptTooLongError):
            limit = self._engine.model_config.max_model_len
            return Fault(
                FaultKind.CONTEXT,
                f"the prompt has {error.prompt_tokens} tokens; with at least one token of answer "
                f"that exceeds the model's context of {limit} (max_model_len)",
                prompt_tokens=error.prompt_tokens,
                max_model_len=limit,
            )
        if isinstance(error, _ReturnedError):
            info = error.response.error
            kind = FaultKind.INVALID if info.code < 500 else FaultKind.INTERNAL
            return Fault(kind, info.message, parameter=info.param)
        if isinstance(error, VLLMValidationError):
            return Fault(FaultKind.INVALID, str(error.args[0]), parameter=error.parameter)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            return Fault(FaultKind.INVALID, f"{where}: {first['msg']}", parameter=where or None)
        # vLLM reports bad requests with these too (0.32, error_response.py).
        if isinstance(error, VLLMClientError | ValueError | TypeError | OverflowError):
            return Fault(FaultKind.INVALID, str(error))
        if type(error).__module__.startswith("jinja2"):
            return Fault(FaultKind.INVALID, f"the chat template refuses: {error}", "messages")
        cause = error.__cause__ or error
        if isinstance(cause, VLLMClientError | ValueError):
            return Fault(FaultKind.INVALID, str(cause))
        return Fault(FaultKind.INTERNAL, f"{type(cause).__name__}: {cause}")


class _PromptTooLongError(Exception):
    def __init__(self, prompt_tokens: int) -> None:
        super().__init__(prompt_tokens)
        self.prompt_tokens = prompt_tokens


class _ReturnedError(Exception):
    """vLLM's serving classes return some errors instead of raising them."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.error.message)
        self.response = response


def _chat_body(answer: ChatCompletionResponse, tap: _Tap) -> bytes:
    for choice in answer.choices:
        # vLLM's response models keep extra fields.
        choice.policy_versions = tap.policy_versions.get(choice.index)
    body: str = answer.model_dump_json(exclude_none=True)
    return body.encode()


def _token_choice(output: CompletionOutput, parameters: SamplingParams) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if parameters.detokenize:
        choice["text"] = output.text
    if output.logprobs is not None:
        positions = list(zip(output.token_ids, output.logprobs, strict=True))
        choice["logprobs"] = [position[token].logprob for token, position in positions]
        if parameters.logprobs:
            choice["top_logprobs"] = [
                {token: entry.logprob for token, entry in position.items()}
                for _, position in positions
            ]
    return choice
