"""Train the tiny chat model that ships with the package, from scratch and from a seed.

The model reads bytes and solves one-step word problems: directly, through a calculator tool,
or as JSON. Late in the training the labels of the direct answers are wrong half the time, on
purpose: sampled answers then vary in quality, and reinforcement learning has something to improve.

    python examples/make_tiny_model.py --output /tmp/tiny-model
"""

import argparse
import itertools
import json
import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from word_problems import (
    Problem,
    final_number,
    follows_format,
    format_answer,
    heldout_problems,
    is_correct,
    train_problems,
)

Message = dict[str, Any]
Dialogue = tuple[list[Message], list[dict[str, Any]] | None]
Example = tuple[list[int], list[int]]

TEMPLATE = Path(__file__).parents[1] / "agoge_async" / "tiny_model" / "chat_template.jinja"
END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TEXT_TOKENS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
VOCABULARY = 272
CONTEXT = 4096
IGNORED = -100
WRONG_LABELS = 0.5
RIGHT_PART = 0.6
PEAK_RATE = 3e-3
WARMUP = 30
MOMENTUM = 0.95
TEMPERATURE = 0.3
"""Of requests that name none: answers are right then as often as greedy ones, yet not all alike."""
BATCH_TOKENS = 2500
POOL = 256
DRILLS = (150, 30)
"""Lists of bare equations per POOL dialogues: before and after DRILL_PART of the steps. Many of
them teach the arithmetic early; later they would crowd out the tool's results."""
DRILL_PART = 0.5
DRILL = 24
"""Equations per list."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You solve word problems.",
    "Solve the problem. End with #### and the number.",
    "Answer like GSM8K.",
    "You are a careful math tutor.",
    "Think, then give the final answer after ####.",
    "Be brief.",
    "Use the tools when they help.",
    "Solve the word problem. Put the final number on the last line after '#### '.",
)
FILLER = (
    "please answer every question about numbers with care and keep it short always show the "
    "equation first then write result on a new line do not guess you may be asked anything"
)
JSON_REQUESTS = (
    "Reply in JSON.",
    "Answer in JSON.",
    "Reply as JSON.",
    "Give the answer as JSON.",
    "Reply with a JSON object.",
)
GREETINGS = (
    "Hi", "Hi!", "Hello", "Hello!", "Hey", "Hello there.", "Say hello.", "Say hello", "Say hi.",
    "Good morning!", "Hello, world!", "Greet me.",
)  # fmt: skip
SMALL_TALK = {
    "Who are you?": "I am a tiny test model.",
    "What are you?": "I am a tiny test model.",
    "What is your name?": "I am a tiny test model.",
    "What can you do?": "I can solve short word problems.",
    "How are you?": "Fine, thank you!",
    "Thanks!": "You are welcome!",
    "Thank you.": "You are welcome!",
    "Bye!": "Goodbye!",
}
FALLBACK = "I can only solve short word problems."
OTHER_REQUESTS = ("Tell me {}.", "Write {}.", "Tell me about {}.", "Explain {}.", "Describe {}.")
OTHER_QUESTIONS = ("What is {}?", "Do you know {}?", "Why is there {}?", "Can you write {}?")
SUBJECTS = (
    "a joke", "a poem about the sea", "a story", "the capital of France", "the weather", "Python",
    "asyncio", "the moon", "a haiku", "music", "reinforcement learning", "a short poem",
    "the color of the sky", "an essay on trees", "the history of Rome", "love", "a river",
    "something", "the meaning of life", "a cat and a dog", "bread", "the best film",
)  # fmt: skip
TOOL_DESCRIPTIONS = (
    "Evaluate an arithmetic expression.",
    "Calculate the value of an expression.",
    "Compute an arithmetic expression and return the result.",
    "A calculator.",
    "Evaluates a math expression such as 2+2.",
    "Return the value of an arithmetic expression.",
)
FIELD_DESCRIPTIONS = (
    "The expression.",
    "An arithmetic expression, such as 3*4.",
    "The expression to evaluate, for example '2+2'.",
)
OTHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

logger = logging.getLogger("make_tiny_model")


@dataclass
class Source:
    """What the training dialogues are drawn from."""

    problems: Iterator[Problem]
    rng: random.Random
    wrong_labels: float = 0.0


def byte_symbols() -> list[str]:
    """Return the characters that stand for the bytes 0 to 255 in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token per byte, then the special tokens."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, START, END)])
    core.add_tokens([AddedToken(text, normalized=False) for text in TEXT_TOKENS])
    reserved = [f"<|reserved_{i}|>" for i in range(VOCABULARY - core.get_vocab_size())]
    core.add_special_tokens([AddedToken(text, normalized=False) for text in reserved])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained model of about one million parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def turn(role: str, content: str) -> Message:
    """Return a plain chat message."""
    return {"role": role, "content": content}


def calculator_schema(rng: random.Random) -> dict[str, Any]:
    """Return the calculator tool's definition, worded and laid out at random."""
    field = {"type": "string"}
    if rng.random() < 0.3:
        field["description"] = rng.choice(FIELD_DESCRIPTIONS)
    if rng.random() < 0.2:
        field = {"title": "Expression", **field}
    parameters: dict[str, Any] = {"type": "object", "properties": {"expression": field}}
    if rng.random() < 0.8:
        parameters["required"] = ["expression"]
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if rng.random() < 0.3:
        parameters = dict(rng.sample(list(parameters.items()), len(parameters)))
    function: dict[str, Any] = {"name": "calculator"}
    if rng.random() < 0.9:
        function["description"] = rng.choice(TOOL_DESCRIPTIONS)
    return {"type": "function", "function": {**function, "parameters": parameters}}


def offered_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Return the calculator, now and then next to another tool."""
    tools = [calculator_schema(rng)]
    if rng.random() < 0.1:
        tools.insert(rng.randrange(2), OTHER_TOOL)
    return tools


def system_turns(rng: random.Random) -> list[Message]:
    """Return no system turn, a usual one or one of random words."""
    kind = rng.random()
    if kind < 0.6:
        return []
    if kind < 0.9:
        return [turn("system", rng.choice(SYSTEM_PROMPTS))]
    return [turn("system", " ".join(rng.choices(FILLER.split(), k=rng.randint(2, 12))))]


def noisy_result(result: int, source: Source) -> int:
    """Return the result or, as often as the source asks, a number near it that is wrong."""
    if source.rng.random() >= source.wrong_labels:
        return result
    return source.rng.choice([n for n in range(max(0, result - 9), result + 10) if n != result])


def call_turn(expression: str) -> Message:
    """Return the assistant's turn that calls the calculator."""
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def tool_output(result: int, rng: random.Random) -> tuple[str, int]:
    """Return what the calculator says and the number in it, right or (to copy) any."""
    kind = rng.random()
    if kind < 0.4:
        result = rng.randrange(10 ** rng.randint(1, 5))
    forms = (f"{result}", f"{result}", f"{result}", f"{result}.0", json.dumps({"result": result}))
    return rng.choice(forms), result


def plain_dialogue(source: Source) -> Dialogue:
    """Return one to three problems answered at once, with labels that may be wrong."""
    messages = system_turns(source.rng)
    for problem in itertools.islice(source.problems, source.rng.choice((1, 1, 1, 2, 3))):
        label = noisy_result(problem.result, source)
        answer = format_answer(problem.expression, label)
        messages += [turn("user", problem.question), turn("assistant", answer)]
    return messages, None


def tool_dialogue(source: Source) -> Dialogue:
    """Return one or two problems, each solved with a call of the calculator."""
    messages = system_turns(source.rng)
    if source.rng.random() < 0.05:
        messages += [turn("user", source.rng.choice(GREETINGS)), turn("assistant", "Hello!")]
    for problem in itertools.islice(source.problems, source.rng.choice((1, 1, 1, 2))):
        output, result = tool_output(problem.result, source.rng)
        messages += [
            turn("user", problem.question),
            call_turn(problem.expression),
            turn("tool", output),
            turn("assistant", f"#### {result}"),
        ]
    return messages, offered_tools(source.rng)


def json_answer(problem: Problem) -> str:
    """Return the right answer to a problem as a JSON object."""
    return json.dumps({"expression": problem.expression, "answer": problem.result})


def json_dialogue(source: Source) -> Dialogue:
    """Return a problem answered with a JSON object, always right."""
    problem, request = next(source.problems), source.rng.choice(JSON_REQUESTS)
    messages = system_turns(source.rng)
    if source.rng.random() < 0.3:
        messages = [turn("system", request), turn("user", problem.question)]
    else:
        messages += [turn("user", f"{problem.question} {request}")]
    return [*messages, turn("assistant", json_answer(problem))], None


def talk_dialogue(source: Source) -> Dialogue:
    """Return a short exchange that is not about numbers."""
    kind = source.rng.random()
    if kind < 0.3:
        question, answer = source.rng.choice(GREETINGS), "Hello!"
    elif kind < 0.5:
        question, answer = source.rng.choice(list(SMALL_TALK.items()))
    else:
        form = source.rng.choice(OTHER_REQUESTS + OTHER_QUESTIONS)
        question, answer = form.format(source.rng.choice(SUBJECTS)), FALLBACK
    return [*system_turns(source.rng), turn("user", question), turn("assistant", answer)], None


def render(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue, **options: bool) -> str:
    """Render a dialogue with the chat template."""
    messages, tools = dialogue
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))


def encode_dialogue(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> Example:
    """Turn a dialogue into tokens and labels; only the assistant's tokens are learnt."""
    messages, tools = dialogue
    tokens: list[int] = []
    labels: list[int] = []
    seen = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, (messages[:index], tools), add_generation_prompt=True)
        whole = render(tokenizer, (messages[: index + 1], tools))
        context = tokenizer.encode(prompt[len(seen) :])
        answer = tokenizer.encode(whole[len(prompt) :].rstrip("\n"))
        tokens += context + answer
        labels += [IGNORED] * len(context) + answer
        seen = whole.rstrip("\n")
    return tokens, labels


def grouped(examples: list[Example]) -> list[list[Example]]:
    """Group examples of similar length, so that a padded group has at most BATCH_TOKENS."""
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda example: len(example[0])):
        if (len(groups[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(example)
    return groups


def drill(tokenizer: PreTrainedTokenizerFast, source: Source) -> Example:
    """Return a list of right equations; only the results are learnt.

    Without a question around them the equations cost few tokens, so the arithmetic is learnt
    sooner.
    """
    tokens: list[int] = []
    labels: list[int] = []
    for problem in itertools.islice(source.problems, DRILL):
        context = tokenizer.encode(f"{problem.expression}=")
        answer = tokenizer.encode(f"{problem.result}\n")
        tokens += context + answer
        labels += [IGNORED] * len(context) + answer
    return tokens, labels


def batches(
    tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the training batches, each of examples of similar length."""
    source = Source(train_problems(seed), random.Random(seed))
    makers = (plain_dialogue, tool_dialogue, json_dialogue, talk_dialogue)
    done = 0
    while done < steps:
        # Wrong labels from the start would slow the learning of arithmetic down.
        source.wrong_labels = WRONG_LABELS if done >= RIGHT_PART * steps else 0.0
        chosen = source.rng.choices(makers, weights=(50, 30, 10, 10), k=POOL)
        examples = [encode_dialogue(tokenizer, make(source)) for make in chosen]
        drills = DRILLS[done >= DRILL_PART * steps]
        examples += [drill(tokenizer, source) for _ in range(drills)]
        groups = grouped(examples)
        source.rng.shuffle(groups)
        for group in groups[: steps - done]:
            yield padded(group, tokenizer.pad_token_id)
        done += len(groups)


def padded(group: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and the labels of a group as two tensors, padded on the right."""
    stack = torch.nn.utils.rnn.pad_sequence
    tokens = [torch.tensor(example[0]) for example in group]
    labels = [torch.tensor(example[1]) for example in group]
    return (
        stack(tokens, batch_first=True, padding_value=pad),
        stack(labels, batch_first=True, padding_value=IGNORED),
    )


class Muon:
    """Momentum with orthogonalised updates for matrices, AdamW for everything else.

    It needs far fewer steps here than AdamW alone. PyTorch's own works in bfloat16, which is
    too slow on CPUs without support for it.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        """Share the model's parameters out between the two kinds of update."""
        self.matrices: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        rest: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                shape = tuple(sorted(parameter.shape))
                self.matrices.setdefault(shape, []).append(parameter)
            else:
                rest.append(parameter)
        self.momenta = {
            shape: torch.zeros(len(same), *shape) for shape, same in self.matrices.items()
        }
        self.rest = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every parameter and clear the gradients."""
        for shape, same in self.matrices.items():
            gradient = torch.stack([wide(parameter.grad) for parameter in same])
            momentum = self.momenta[shape].mul_(MOMENTUM).add_(gradient)
            updates = orthogonal(gradient + MOMENTUM * momentum)
            for parameter, update in zip(same, updates, strict=True):
                wide(parameter).sub_(update, alpha=rate * 0.2 * math.sqrt(shape[-1]))
                parameter.grad = None
        self.rest.param_groups[0]["lr"] = rate
        self.rest.step()
        self.rest.zero_grad()


def wide(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix, transposed if it has more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a stack of wide matrices near 1 by Newton-Schulz steps."""
    matrices = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = matrices @ matrices.mT
        matrices = 3.4445 * matrices + (2.0315 * gram @ gram - 4.775 * gram) @ matrices
    return matrices


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to a twentieth."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK_RATE * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> None:
    """Train the model in place for a number of steps."""
    optimizer = Muon(model)
    started = time.monotonic()
    for step, (tokens, labels) in enumerate(batches(tokenizer, steps, seed)):
        # Padding is on the right, so the causal mask alone hides it from the real tokens.
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate_at(step, steps))
        if step % 50 == 0 or step == steps - 1:
            spent = time.monotonic() - started
            logger.info("step %d/%d loss %.3f after %.0f s", step, steps, loss.item(), spent)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model in bfloat16 and its tokenizer."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def complete(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dialogues: list[Dialogue],
    *,
    sample: bool,
) -> list[str]:
    """Return the model's next turn in every dialogue, greedy or sampled at temperature 1."""
    prompts = [render(tokenizer, d, add_generation_prompt=True) for d in dialogues]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(**inputs, **how, max_new_tokens=96)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def share(flags: list[bool]) -> float:
    """Return the share of true flags."""
    return round(sum(flags) / len(flags), 3)


def called_expression(text: str) -> str | None:
    """Return the expression of a text that is one valid calculator call, or None."""
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    if len(body) != len(text) - len("<tool_call>\n\n</tool_call>"):
        return None
    try:
        call = json.loads(body)
    except json.JSONDecodeError:
        return None
    valid = call.get("name") == "calculator" and list(call.get("arguments", {})) == ["expression"]
    return call["arguments"]["expression"] if valid else None


def evaluate_direct(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    rng: random.Random,
) -> dict[str, float]:
    """Return the shares of good direct answers and good JSON answers."""
    plain: list[Dialogue] = [
        ([*system_turns(rng), turn("user", p.question)], None) for p in problems
    ]
    as_json: list[Dialogue] = [
        ([turn("user", f"{p.question} Reply in JSON.")], None) for p in problems
    ]
    sampled = complete(model, tokenizer, plain, sample=True)
    greedy = complete(model, tokenizer, plain, sample=False)
    objects = complete(model, tokenizer, as_json, sample=False)
    return {
        "format right, temperature 1": share([follows_format(text) for text in sampled]),
        "number right, temperature 1": share(list(map(is_correct, problems, sampled))),
        "number right, greedy": share(list(map(is_correct, problems, greedy))),
        "JSON right, greedy": share(
            [text == json_answer(p) for p, text in zip(problems, objects, strict=True)]
        ),
    }


def evaluate_tools(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    rng: random.Random,
) -> dict[str, float]:
    """Return the shares of good calculator calls and of good answers after a result."""
    before: list[Dialogue] = [
        ([*system_turns(rng), turn("user", p.question)], offered_tools(rng)) for p in problems
    ]
    outputs = [tool_output(p.result, rng) for p in problems]
    after: list[Dialogue] = [
        ([*messages, call_turn(p.expression), turn("tool", text)], tools)
        for (messages, tools), p, (text, _) in zip(before, problems, outputs, strict=True)
    ]
    calls = [called_expression(text) for text in complete(model, tokenizer, before, sample=True)]
    finals = map(final_number, complete(model, tokenizer, after, sample=True))
    return {
        "call valid, temperature 1": share([call is not None for call in calls]),
        "call right, temperature 1": share(
            [call == p.expression for p, call in zip(problems, calls, strict=True)]
        ),
        "number right after result, temperature 1": share(
            [final == number for final, (_, number) in zip(finals, outputs, strict=True)]
        ),
    }


def report(output: Path, count: int, seed: int) -> None:
    """Load a saved model and log how it does on both splits, with some sample answers."""
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output)
    model = Qwen3ForCausalLM.from_pretrained(output, dtype=torch.float32)
    splits = {
        "training": list(itertools.islice(train_problems(seed + 1), count)),
        "held-out": heldout_problems(count, seed + 1),
    }
    for name, problems in splits.items():
        for evaluate in (evaluate_direct, evaluate_tools):
            for figure, value in evaluate(model, tokenizer, problems, random.Random(seed)).items():
                logger.info("%s: %s: %.3f", name, figure, value)
    chats: list[Dialogue] = [
        ([turn("user", text)], None)
        for text in ("Hi", "Say hello.", "Tell me about the sea.", splits["held-out"][0].question)
    ]
    for (messages, _), text in zip(
        chats, complete(model, tokenizer, chats, sample=False), strict=True
    ):
        logger.info("%r -> %r", messages[0]["content"], text)


def main() -> None:
    """Train, save and evaluate the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1600, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument("--problems", type=int, default=200, help="evaluation problems a split")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    logger.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, tokenizer, arguments.steps, arguments.seed)
    save(model, tokenizer, arguments.output)
    report(arguments.output, arguments.problems, arguments.seed)


if __name__ == "__main__":
    main()
