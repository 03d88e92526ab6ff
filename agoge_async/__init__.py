"""agoge_async: one async call for every model request of a program.

    async with Router.from_config("tiny") as router:
        response = await router.chat(InferenceRequest(model="tiny", messages="What is 3 + 4?"))
        print(response.text)
"""

from agoge_async.backends.base import Backend, BackendStatus, Capabilities
from agoge_async.backends.fake import FakeBackend
from agoge_async.config import RouterConfig, load_config
from agoge_async.errors import *  # noqa: F403
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
from agoge_async.requests import InferenceRequest, ResponseFormat, StructuredOutputs, TokenRequest
from agoge_async.responses import ChatChunk, InferenceResponse, TokenResponse, VersionSpan
from agoge_async.router import ChatStream, Router
