"""agoge_async: one async call for every model request of a program.

async with Router.from_config("tiny") as router:
    response = await router.chat(InferenceRequest(model="tiny", messages="What is 3 + 4?"))
    print(response.text)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agoge_async.backends.base import Backend, BackendStatus, Capabilities
    from agoge_async.backends.fake import FakeBackend
    from agoge_async.dispatch import ChatStream
    from agoge_async.errors import (
        AgogeError,
        BackendError,
        ConfigError,
        ContextLengthError,
        EngineBusyError,
        EngineDiedError,
        EngineError,
        EngineStartError,
        ForkedProcessError,
        GenerationError,
        InvalidRequestError,
        NoReplicaError,
        QueueFullError,
        RequestError,
        RequestTimeoutError,
        RouterClosedError,
        RouterStateError,
        UnknownModelError,
        UnsupportedError,
        WrongLoopError,
    )
    from agoge_async.messages import (
        AssistantMessage,
        Chat,
        FunctionCall,
        FunctionDefinition,
        ImagePart,
        ImageURL,
        SystemMessage,
        TextPart,
        Tool,
        ToolCall,
        ToolMessage,
        UserMessage,
    )
    from agoge_async.metrics import Outcome, RequestRecord, RouterStatistics
    from agoge_async.pool import Pool
    from agoge_async.requests import (
        InferenceRequest,
        ResponseFormat,
        StructuredOutputs,
        TokenRequest,
    )
    from agoge_async.responses import ChatChunk, InferenceResponse, TokenResponse, VersionSpan
    from agoge_async.router import Router

__all__ = [
    "AgogeError",
    "AssistantMessage",
    "Backend",
    "BackendError",
    "BackendStatus",
    "Capabilities",
    "Chat",
    "ChatChunk",
    "ChatStream",
    "ConfigError",
    "ContextLengthError",
    "EngineBusyError",
    "EngineDiedError",
    "EngineError",
    "EngineStartError",
    "FakeBackend",
    "ForkedProcessError",
    "FunctionCall",
    "FunctionDefinition",
    "GenerationError",
    "ImagePart",
    "ImageURL",
    "InferenceRequest",
    "InferenceResponse",
    "InvalidRequestError",
    "NoReplicaError",
    "Outcome",
    "ParamSyncer",
    "Pool",
    "PushRecord",
    "QueueFullError",
    "RequestError",
    "RequestRecord",
    "RequestTimeoutError",
    "ResponseFormat",
    "Router",
    "RouterClosedError",
    "RouterStateError",
    "RouterStatistics",
    "StructuredOutputs",
    "SystemMessage",
    "TextPart",
    "TokenRequest",
    "TokenResponse",
    "Tool",
    "ToolCall",
    "ToolMessage",
    "UnknownModelError",
    "UnsupportedError",
    "UserMessage",
    "VerifyRecord",
    "VersionSpan",
    "WeightSyncError",
    "WrongLoopError",
]

_MODULES = (
    "errors",
    "messages",
    "requests",
    "responses",
    "metrics",
    "backends.base",
    "backends.fake",
    "pool",
    "dispatch",
    "router",
    "weights.syncer",
)
"""Where the public names are, lowest layer first: no name loads more than it needs."""


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that the import itself takes no time."""
    if name in __all__:
        for module in _MODULES:
            home = importlib.import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                globals()[name] = getattr(home, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
