"""Pushes to engines that sleep, whole or in part: syncer, local backends, the whole protocol."""

import anyio
import anyio.to_thread
import pytest
import torch
from torch import nn

from agoge_async import ParamSyncer, Router, TokenRequest, WeightSyncError
from agoge_async.engine.messages import Command, CommandKind
from agoge_async.engine.receiver import PushReceiver
from agoge_async.weights.manifest import decode_manifest
from tests.engine_doubles import LocalDouble, ServingDouble, unfrozen

pytestmark = pytest.mark.timeout(60)


class ReceivingDouble(ServingDouble):
    """Receives pushes as an engine with one worker does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}
        self._receiver = PushReceiver(0, torch.device("cpu"))

    async def obey(self, command: Command) -> str:
        answer = await super().obey(command)
        if command.kind is CommandKind.BEGIN:
            self._receiver.begin(decode_manifest(command.body))
        elif command.kind is CommandKind.READY:
            while not self._receiver.is_ready:
                await anyio.sleep(0.001)
        elif command.kind is CommandKind.LOAD:
            await anyio.to_thread.run_sync(self._receiver.load, self._put)
            return '{"load_s": 0, "receive_s": 0, "pause_s": 0}'
        elif command.kind is CommandKind.ABORT:
            self._receiver.abort()
        return answer

    def _put(self, tensors) -> None:
        self.weights = {name: tensor.clone() for name, tensor in tensors}

    def shutdown(self) -> None:
        self._receiver.abort()


class ReceivingBackend(LocalDouble):
    def make_serving(self) -> ServingDouble:
        return ReceivingDouble()


@pytest.fixture
def locals_():
    return [ReceivingBackend(f"m/{number}") for number in range(2)]


@pytest.fixture
async def router(locals_):
    with unfrozen():
        async with Router({"m": locals_}) as router:
            yield router


@pytest.mark.parametrize("transport", ["gloo", "shm"])
async def test_a_trainer_on_the_same_gpu(router, locals_, transport):
    """vllm#29341, NeMo-RL#2631: vLLM's order, step after step; nothing serves without weights."""
    model = nn.Linear(20, 30)
    async with await ParamSyncer.connect(
        model, router, model="m", transport=transport, timeout_s=20
    ) as syncer:
        for version in (1, 2):
            await router.sleep("m", level=2)
            with torch.no_grad():
                model.weight.add_(1)
            await router.wake_up("m", tags=["weights"])
            await syncer.push(version=version)
            assert ["asleep"] * 2 == [local.status.state for local in locals_]
            await router.wake_up("m", tags=["kv_cache"])
            await router.generate(TokenRequest(model="m", prompt_token_ids=[1]))
            for local in locals_:
                assert ("serving", version) == (local.status.state, local.version)
                assert torch.equal(model.weight, local.serving.weights["weight"])


@pytest.mark.parametrize("transport", ["gloo", "shm"])
async def test_a_push_to_weights_that_sleep_is_refused(router, locals_, transport):
    """Before anything is sent, by the engine's name; awake, it takes the same push."""
    async with await ParamSyncer.connect(
        nn.Linear(20, 30), router, model="m", transport=transport, timeout_s=20
    ) as syncer:
        await router.sleep("m")
        await locals_[0].wake_up(["weights"], 1)
        with pytest.raises(
            WeightSyncError, match=r'engine m/1 is asleep, its weights too.*tags=\["weights"\]'
        ) as caught:
            await syncer.push(version=1)
        assert ("m/1", 1) == (caught.value.culprit, caught.value.version)
        assert not any("begin" in " ".join(local.serving.commands) for local in locals_)
        await router.wake_up("m")
        await syncer.push(version=1)
        assert ["serving"] * 2 == [local.status.state for local in locals_]


async def test_requests_wait_for_engines_that_were_condemned(router, locals_):
    """Nothing is sent to an engine that is about to end; the next one answers."""
    for local in locals_:
        local.condemn("a push of weights failed while it was loaded")
        assert "restarting" == local.status.state
    response = await router.generate(TokenRequest(model="m", prompt_token_ids=[1]))
    assert response.choices[0].token_ids
