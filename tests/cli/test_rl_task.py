"""The digit tasks: their questions, their answers, their marks, and the tokenizers and scenarios that they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from weightsync.cli.model.config import CheckpointError
from weightsync.cli.rl.task import SHOTS, SYMBOLS, DigitTask, PlainCodec, TokenizerCodec, codec
from weightsync.cli.scenario_tables import Rl

PLAIN = PlainCodec()


def tasks() -> st.SearchStrategy[DigitTask]:
    settings = st.builds(
        Rl,
        task=st.sampled_from(["reverse", "add"]),
        digits=st.integers(1, 8),
        base=st.integers(2, 10),
        prompts=st.integers(1, 9),
    )
    return st.builds(DigitTask, settings, st.just(PLAIN), st.integers(0, 9))


def text(tokens: list[int]) -> str:
    return "".join(PLAIN.symbol(token) for token in tokens)


@given(tasks(), st.integers(1, 99))
def test_every_answer_is_right_and_every_prompt_equally_long(task: DigitTask, step: int) -> None:
    questions, base = task.questions(step), task.settings.base
    assert questions.tokens.shape[0] == len(questions.answers) == task.settings.prompts
    for row, answer in zip(questions.tokens.tolist(), questions.answers, strict=True):
        asked = text(row)
        assert asked[-1] == "="
        assert set(asked) <= set("0123456789"[:base] + "+=")
        numbers = asked[:-1].split("+")
        assert {len(number) for number in numbers} == {task.settings.digits}
        assert len(answer) == task.answer_tokens
        if task.settings.task == "reverse":
            assert [answer] == [numbers[0][::-1]]
        else:
            assert int(answer, base) == sum(int(number, base) for number in numbers)


@given(tasks(), st.integers(1, 99))
def test_questions_depend_on_seed_and_step_only(task: DigitTask, step: int) -> None:
    again = DigitTask(task.settings, PLAIN, task.seed)
    again.questions(step + 1)
    found, expected = again.questions(step), task.questions(step)
    assert (found.tokens.tolist(), found.answers) == (expected.tokens.tolist(), expected.answers)
    large = DigitTask(Rl(digits=8), PLAIN, task.seed)
    assert large.questions(step).answers != large.questions(step + 1).answers
    assert (
        large.questions(step).answers != DigitTask(Rl(digits=8), PLAIN, task.seed + 1).questions(step).answers
    )


@given(st.text("0123456789", min_size=1, max_size=8), st.data())
def test_the_reward_is_the_share_of_right_digits(answer: str, data: st.DataObject) -> None:
    task = DigitTask(Rl(digits=len(answer)), PLAIN, 0)
    wrong = data.draw(st.sets(st.integers(0, len(answer) - 1)))
    # A wrong digit, the sign behind a digit, or a token that stands for nothing.
    said = [int(digit) for digit in answer]
    for place in wrong:
        said[place] = data.draw(st.sampled_from([(said[place] + 1) % 10, SYMBOLS.index("="), 99]))
    assert task.reward(answer, said) == (len(answer) - len(wrong)) / len(answer)


def test_plain_symbols_go_to_tokens_and_back() -> None:
    assert text(PLAIN.encode(SYMBOLS)) == SYMBOLS
    assert PLAIN.symbol(len(SYMBOLS)) == " "


def test_a_vocabulary_too_small_for_the_symbols_is_refused(tmp_path: Path) -> None:
    assert isinstance(codec(tmp_path, 12), PlainCodec)
    with pytest.raises(CheckpointError, match=r"'vocab_size' is 11; expected at least 12"):
        codec(tmp_path, 11)


# ---- tokenizers of checkpoints -----------------------------------------------------------------------------------


def tokenizer(folder: Path, *words: str, split: bool = True) -> Path:
    """A tokenizer of single symbols and ``words``; without ``split`` it takes the longest words that it knows."""
    tokens = dict.fromkeys([*"0123456789", "+", "=", "\n", "[UNK]", *words])
    made = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="[UNK]"))
    known = "|".join(sorted(map(str, words), key=len, reverse=True))
    pattern = "." if split or not known else rf"(?:{known})|."
    made.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\n|{pattern}"), "isolated")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["reverse", "add"])
def test_a_pretrained_model_sees_solved_examples_before_each_question(kind: str, tmp_path: Path) -> None:
    own = codec(tokenizer(tmp_path), 14)
    assert isinstance(own, TokenizerCodec)
    task = DigitTask(Rl.model_validate({"task": kind, "digits": 2, "prompts": 5}), own, 1)
    questions = task.questions(1)
    for row, answer in zip(questions.tokens.tolist(), questions.answers, strict=True):
        *solved, asked = "".join(own.symbol(token) for token in row).split("\n")
        assert len(solved) == SHOTS
        for line in [*solved, asked + answer]:
            numbers, _, said = line.partition("=")
            if kind == "reverse":
                assert said == numbers[::-1]
            else:
                assert int(said) == sum(map(int, numbers.split("+")))
        assert task.reward(answer, own.encode(answer)) == 1.0
        assert task.reward(answer, [own.encode("=")[0]] * len(answer)) == 0.0


def test_a_tokenizer_that_joins_some_digits_is_refused(tmp_path: Path) -> None:
    own = codec(tokenizer(tmp_path, "11", "12", "13", "14", split=False), 18)
    assert len(own.encode("112")) == 2
    with pytest.raises(
        CheckpointError, match=r"the tokenizer makes \d+ to \d+ tokens of prompts with equally"
    ):
        DigitTask(Rl(digits=4, prompts=32), own, 0).questions(1)


def test_a_tokenizer_of_equally_long_prompts_that_joins_all_digits_is_refused(tmp_path: Path) -> None:
    pairs = [f"{a}{b}" for a in range(10) for b in range(10)]
    own = codec(tokenizer(tmp_path, *pairs, split=False), 200)
    with pytest.raises(
        CheckpointError, match=r"makes 1 tokens of the answer '\d\d'; expected one token per digit"
    ):
        DigitTask(Rl(digits=2, prompts=8), own, 0).questions(1)


def test_a_token_outside_of_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    own = codec(tokenizer(tmp_path), 12)
    with pytest.raises(CheckpointError, match=r"gives token 12, outside of key 'vocab_size' 12"):
        DigitTask(Rl(digits=2), own, 0).questions(1)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        codec(tmp_path, 12)
