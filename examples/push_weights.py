"""Train a model under DeepSpeed ZeRO-3, and push its weights into a live engine as they change.

    torchrun --standalone --nproc-per-node 2 examples/push_weights.py

Each rank learns one lesson by heart; a single rank learns both. Rank 0 also has a router, whose
engine runs the same model, and asks it both questions after every push: the answers follow the
training, and say which version of the weights sampled them. It takes a minute on a CPU; where there
are GPUs, each rank takes one.
"""

import asyncio
import contextlib
import os
import warnings
from importlib.resources import files

try:
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding
except ImportError as error:
    raise SystemExit(f"{error}: install the train extra, pip install '.[train]'") from None

from agoge_async import InferenceRequest, ParamSyncer, Router

MODEL = str(files("agoge_async") / "tiny_model")  # which the preset "tiny" serves
LESSONS = {
    "Who are you?": "I am what you train.",
    "What can you do?": "I can learn while I answer.",
}
NUM_STEPS, STEPS_PER_PUSH = 15, 3
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 7e-4, "torch_adam": True}},
    # By default, DeepSpeed would keep tensors as small as these whole on every rank.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def make_trainer() -> deepspeed.DeepSpeedEngine:
    """Load the model and cut its weights up among the ranks."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    parameters = model.parameters()
    return deepspeed.initialize(model=model, model_parameters=parameters, config=DEEPSPEED)[0]


def make_batch(trainer: deepspeed.DeepSpeedEngine) -> BatchEncoding:
    """Give this rank its share of the lessons, as a batch."""
    share = list(LESSONS.items())[trainer.global_rank % len(LESSONS) :: trainer.world_size]
    dialogues = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in share
    ]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    batch = tokenizer.apply_chat_template(
        dialogues, padding=True, return_dict=True, return_tensors="pt"
    )
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch.to(trainer.device)


def train(trainer: deepspeed.DeepSpeedEngine, batch: BatchEncoding) -> float:
    """Make a step, with all other ranks; gives this rank's loss."""
    loss = trainer(**batch).loss
    trainer.backward(loss)
    trainer.step()
    return loss.item()


async def ask(router: Router) -> None:
    """Print the engine's answers, and the versions of the weights that sampled them."""
    for question in LESSONS:
        request = InferenceRequest(model="tiny", messages=question, temperature=0, max_tokens=40)
        choice = (await router.chat(request)).choices[0]
        versions = ", ".join(
            f"{span.end - span.start} tokens by version {span.version}"
            for span in choice.policy_versions
        )
        print(f"  {question:16}  {choice.message.content!r:42}  {versions}", flush=True)


async def main() -> None:
    """Train and push, on every rank; ask, on rank 0."""
    trainer = make_trainer()
    batch = make_batch(trainer)
    has_router = trainer.global_rank == 0
    async with (
        Router.from_config("tiny") if has_router else contextlib.nullcontext() as router,
        await ParamSyncer.connect(trainer, router, model="tiny") as syncer,
    ):
        if router:
            await ask(router)
        for step in range(1, NUM_STEPS + 1):
            loss = train(trainer, batch)
            if step % STEPS_PER_PUSH:
                continue
            record = await syncer.push(version=step)
            if router:
                print(
                    f"step {step}: loss {loss:.2f}, {record.num_bytes / 1e6:.1f} MB pushed in "
                    f"{record.total_s:.3f} s, generation stood still for {record.stall_s:.3f} s"
                )
                await ask(router)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"torchrun must start this script:\n\n{__doc__}")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of calls by DeepSpeed
    has_gpu = torch.cuda.is_available()
    if not has_gpu:  # else DeepSpeed compiles, for a minute, what training doesn't use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if has_gpu else "gloo")
    asyncio.run(main())
    deepspeed.comm.destroy_process_group()
