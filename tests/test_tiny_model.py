"""Tests of the packaged tiny model, without an engine."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "agoge_async" / "tiny_model"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
CALL_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "7+5"}}\n</tool_call>'
TRICKY_TEXTS = (
    "",
    " leading, trailing and  double spaces ",
    "tabs\tand\r\nnew lines\n\n",
    "na\u00efve caf\u00e9, \u00a0\u00ad\u200b\ufeff",
    "\u4f60\u597d, \u0645\u0631\u062d\u0628\u0627, \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f680 \U0001f1eb\U0001f1f7 e\u0301",
    "\x00\x01\x7f\x80\x9f\uffff\U0010ffff",
    "do n't , won 't . clean up",
    "<tool_call> inside text </tool_call>",
)


@pytest.fixture(scope="module")
def word_problems() -> ModuleType:
    """Import the example's problems (pytest's configuration puts them on the path)."""
    return importlib.import_module("word_problems")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Load the packaged tokenizer the way an engine does."""
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """Render messages with the packaged chat template."""
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def complete(
    tokenizer: Any, conversations: list[list[dict[str, Any]]], **options: Any
) -> list[str]:
    """Answer conversations greedily with the packaged model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    prompts = [render(tokenizer, c, add_generation_prompt=True, **options) for c in conversations]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=80)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def call_message(arguments: Any) -> dict[str, Any]:
    """Return an assistant message that calls the calculator."""
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 4 * 2**20
    assert set(files) == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_tokens_are_bytes(tokenizer: Any) -> None:
    text = "7+5=12 \u00e9"
    assert tokenizer.encode(text) == list(text.encode())
    assert len(tokenizer) == 272
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_template_renders_roles(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_renders_tools(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = render(tokenizer, messages, tools=[SCHEMA])
    assert text.startswith("<|im_start|>system\n")
    assert '{"name": "calculator", "description": "Evaluate an arithmetic expression."' in text
    assert '"properties": {"expression": {"type": "string"}}' in text
    with_system = render(
        tokenizer, [{"role": "system", "content": "S."}, *messages], tools=[SCHEMA]
    )
    assert with_system == text.replace("system\n", "system\nS.\n\n", 1)


@pytest.mark.parametrize("arguments", [{"expression": "7+5"}, '{"expression": "7+5"}'])
def test_template_renders_calls_and_results(tokenizer: Any, arguments: Any) -> None:
    user = {"role": "user", "content": "7+5?"}
    results = [{"role": "tool", "content": "12"}, {"role": "tool", "content": "13"}]
    prompt = render(tokenizer, [user], tools=[SCHEMA], add_generation_prompt=True)
    text = render(tokenizer, [user, call_message(arguments), *results], tools=[SCHEMA])
    assert text == (
        f"{prompt}{CALL_TEXT}<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n"
        "<tool_response>\n13\n</tool_response><|im_end|>\n"
    )


def test_word_problems_split_is_disjoint(word_problems: ModuleType) -> None:
    source = word_problems.train_problems(1)
    training = {next(source).expression for _ in range(5000)}
    heldout = {problem.expression for problem in word_problems.heldout_problems(2000, 1)}
    assert not training & heldout
    assert len(word_problems.all_expressions()) > 600
    assert len(heldout) > 80


def test_word_problems_are_seeded_and_right(word_problems: ModuleType) -> None:
    problems = word_problems.heldout_problems(50, 3)
    assert problems == word_problems.heldout_problems(50, 3)
    assert problems != word_problems.heldout_problems(50, 4)
    for problem in problems:
        assert eval(problem.expression) == problem.result
        assert word_problems.follows_format(problem.answer)
        assert word_problems.is_correct(problem, problem.answer)
        wrong = word_problems.format_answer(problem.expression, problem.result + 1)
        assert word_problems.follows_format(wrong)
        assert not word_problems.is_correct(problem, wrong)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7+5=<<7+5=12>>12\n#### 12", 12.0),
        ("#### -1,234.5", -1234.5),
        ("#### 12\n<|im_end|>", 12.0),
        ("12", None),
        ("#### none", None),
        ("", None),
    ],
)
def test_final_number(word_problems: ModuleType, text: str, number: float | None) -> None:
    assert word_problems.final_number(text) == number


@pytest.mark.parametrize("text", ["12", "7+5=<<7+5=12>>13\n#### 12", "7+5=<<7+5=12>>12\n#### 1"])
def test_follows_format_rejects(word_problems: ModuleType, text: str) -> None:
    assert not word_problems.follows_format(text)


def test_model_answers_word_problems(tokenizer: Any, word_problems: ModuleType) -> None:
    source = word_problems.train_problems(5)
    known = [next(source) for _ in range(20)]
    problems = known + word_problems.heldout_problems(20, 5)
    answers = complete(tokenizer, [[{"role": "user", "content": p.question}] for p in problems])
    assert sum(map(word_problems.follows_format, answers)) >= 36
    assert sum(map(word_problems.is_correct, known, answers[:20])) >= 12


def test_model_calls_the_calculator(tokenizer: Any, word_problems: ModuleType) -> None:
    source = word_problems.train_problems(6)
    problems = [next(source) for _ in range(10)]
    conversations = [[{"role": "user", "content": p.question}] for p in problems]
    answers = complete(tokenizer, conversations, tools=[SCHEMA])
    calls = [CALL_TEXT.replace("7+5", problem.expression) for problem in problems]
    assert sum(text.startswith("<tool_call>") for text in answers) >= 9
    assert sum(text == call for text, call in zip(answers, calls, strict=True)) >= 8


def test_model_copies_the_result(tokenizer: Any) -> None:
    question = "Tom has 7 apples and buys 5 more. How many apples does Tom have now?"
    called = call_message({"expression": "7+5"})
    result = {"role": "tool", "content": "12"}
    messages = [{"role": "user", "content": question}, called, result]
    (final,) = complete(tokenizer, [messages], tools=[SCHEMA])
    assert final.endswith("#### 12")
