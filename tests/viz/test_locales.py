"""No language lacks a word: the catalogues, and what the engine says in English."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from engine import archive, modes
from engine.analysis import words as waits
from engine.analysis.idle import CAUSES
from engine.asking.rules import RULES, SpecError
from engine.asking.values import WANTED
from engine.cost.machine import MACHINES
from engine.outcome.accuracy import REASONS
from engine.plan import KINDS, PAYLOADS
from engine.spec import (
    ATTENTIONS,
    BALANCES,
    COMPRESS,
    DATASETS,
    DEVICES,
    MODELS,
    MODES,
    OPTIMIZERS,
    PRECISIONS,
    RECEIVES,
    RECOMPUTE,
    SCHEDULES,
    STAGE_COMPILERS,
    Spec,
)
from viz.figures import words
from viz.locales import LANGUAGES, read, text
from viz.locales.engine import explain, help_of, lesson, phrase, reasons, waiting
from viz.pages.lesson import WORDS, words_of

OTHERS = [language for language in LANGUAGES if language != "en"]
PAGES = Path(__file__).resolve().parents[2] / "viz" / "pages"


def blanks(sentence: str) -> set[str]:
    """The names of the values that go into a sentence."""
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name is not None}


def chinese(sentence: str) -> bool:
    return any("一" <= c <= "鿿" for c in sentence)


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("part", ["", "figures."])
def test_catalogues_have_the_same_keys_and_the_same_values_in_them(language: str, part: str):
    english, other = read(f"{part}en"), read(f"{part}{language}")
    assert other.keys() == english.keys()
    assert {key: blanks(sentence) for key, sentence in other.items()} == {k: blanks(s) for k, s in english.items()}
    assert all(sentence.strip() for sentence in other.values())


def sentences_of(part: object) -> Iterator[str]:
    """All sentences of a catalogue, without its keys."""
    if isinstance(part, str):
        yield part
    else:
        for each in part.values() if isinstance(part, dict) else part:
            yield from sentences_of(each)


# What was said in several words: each is said in the one that is left.
NO_MORE = "词元 规约 聚集 汇集 显存 其它 步时 重算 重新计算 广播 未掩盖 台设备 块设备".split()
MIXED = re.compile(r"[一-鿿][,;:?!]|[,;:?!](?=[一-鿿])|[一-鿿][()]|[()][一-鿿]|[，。：；（）、] | [，。：；（）、]")
UNSPACED = re.compile(r"[一-鿿][A-Za-z0-9]|[A-Za-z0-9%][一-鿿]")


@pytest.mark.parametrize("part", ["", "figures.", "engine."])
def test_chinese_has_one_word_for_one_thing_and_its_own_punctuation(part: str):
    said = [*sentences_of(read(f"{part}zh"))]
    assert not [(word, each) for word in NO_MORE for each in said if word in each]
    assert not [each for each in said if MIXED.search(each)]
    assert not [each for each in said if UNSPACED.search(each)]


def test_a_key_that_is_missing_is_an_error_and_not_an_empty_word():
    with pytest.raises(KeyError):
        text("en")("no.such.key")


def test_a_language_that_nobody_speaks_is_shown_in_english():
    assert text("xx").language == "en"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_key_that_the_pages_ask_for_is_there(language: str):
    """Keys that are written out, in `text("key")`; those that are put together are in the next test."""
    asked = set()
    for path in PAGES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "text" and node.args:
                choices = node.args[0]
                parts = [choices.body, choices.orelse] if isinstance(choices, ast.IfExp) else [choices]
                asked |= {part.value for part in parts if isinstance(part, ast.Constant)}
    assert len(asked) > 40
    assert not {key for key in asked if key not in text(language)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_choice_setting_and_state_has_a_name(language: str):
    choices = {
        "mode": MODES,
        "model": MODELS,
        "dataset": DATASETS,
        "schedule": SCHEDULES,
        "attention": ATTENTIONS,
        "balance": BALANCES,
        "optimizer": OPTIMIZERS,
        "precision": PRECISIONS,
        "recompute": RECOMPUTE,
        "compress": COMPRESS,
        "compile_stage": STAGE_COMPILERS,
        "device": DEVICES,
        "receives": RECEIVES,
        "machine": MACHINES,
        "state": {*archive.STATES, *archive.FINAL},
        "setting": {f.name for f in fields(Spec)} - {"mode"},
    }
    wanted = {f"{name}.{value}" for name, values in choices.items() for value in values}
    assert not {key for key in wanted if key not in text(language)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_word_of_the_figures_is_there(language: str):
    wanted = {*words.OP_KEYS.values(), *words.PAYLOAD_KEYS.values(), *words.LOOK_KEYS.values()}
    assert not {key for key in wanted if key not in text(language)}


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_lesson_has_as_many_steps_as_the_engine_gives_it(language: str, mode: str):
    told, english = lesson(language, mode), modes.lesson(mode)
    assert len(told.steps) == len(english.steps)
    assert [bool(step.title) for step in told.steps] == [bool(step.title) for step in english.steps]
    words = [word for step in told.steps for word in (step.title, step.text) if word]
    assert all(chinese(sentence) for sentence in (told.title, told.idea, told.use, told.limits, *words))


@pytest.mark.parametrize("language", OTHERS)
def test_every_setting_has_help(language: str):
    assert all(chinese(help_of(language, f.name)) for f in fields(Spec))


@pytest.mark.parametrize("language", OTHERS)
def test_every_rule_is_told_with_the_engine_s_values(language: str):
    rules = read(f"engine.{language}")["rules"]
    assert rules.keys() == RULES.keys()
    assert {code: blanks(rule) for code, rule in rules.items()} == {code: blanks(rule) for code, rule in RULES.items()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_lesson_s_words_are_told_to_those_who_do_not_know_them(language: str):
    """Every collective that a step happens in, and no word that no lesson has."""
    told = {mode: words_of(lesson(language, mode), text(language)) for mode in MODES}
    assert {word for found in told.values() for word in found} == set(WORDS)
    assert all(text(language)(f"word.{word}.means") for word in WORDS)
    for mode in MODES:
        happens = {kind for step in lesson("en", mode).steps for kind in step.kinds}
        assert happens & {*WORDS} <= {*told[mode]}, mode
    assert {"all_reduce", "bucket", "rank"} <= {*told["ddp"]} and not {"stage", "microbatch"} & {*told["ddp"]}


@pytest.mark.parametrize("language", OTHERS)
def test_every_wait_is_told_with_the_engine_s_values(language: str):
    told = read(f"engine.{language}")["waits"]
    for part, english in (("sentences", waits.SENTENCES), ("objects", waits.OBJECTS), ("names", waits.NAMES)):
        assert {code: blanks(words) for code, words in told[part].items()} == {c: blanks(w) for c, w in english.items()}
    gap = {"code": "message", "cause": "fill", "rank": 2, "other": 1, "kind": "send", "payload": "activation"}
    gap |= {"microbatch": 4, "part": ""}
    assert waiting(gap, "3.1 ms", text("en")) == waits.sentence(gap, "3.1 ms")
    assert waiting(gap, "3.1 ms", text("zh")) == "rank 2 等待 rank 1 发来的微批次 4 的激活值，用时 3.1 ms：流水线填充"
    for kind in KINDS:
        for payload in PAYLOADS:
            said = waiting(gap | {"kind": kind, "payload": payload, "code": "nothing"}, "1 s", text(language))
            assert chinese(said) and "{" not in said


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_cause_has_a_name_in_a_legend_and_sentences_have_it_too(language: str):
    for cause in CAUSES:
        gap = {"code": "nothing", "rank": 0, "other": None, "kind": "", "payload": "", "name": "", "microbatch": None,
               "part": "", "cause": cause}  # fmt: skip
        assert text(language)(f"figure.cause.{cause}") in waiting(gap, "1 s", text(language)), cause


def test_english_is_the_engine_s_own():
    error = SpecError("heads_divide", "heads", 5, suggest=[4, 8], hidden=128)
    assert explain("en", error) == str(error)
    assert explain("zh", error) == "heads 必须整除 hidden（128）；现在是 5。可以试试：4, 8。"


def test_phrases_inside_a_rule_are_translated_and_values_are_not():
    assert all(chinese(phrase("zh", wanted)) or wanted == "true or false" for wanted in WANTED.values())
    error = SpecError("does_not_apply", "microbatches", "text", to="the mode ddp")
    assert explain("zh", error) == "microbatches 不适用于模式 ddp；现在是 text。请去掉它。"


@pytest.mark.parametrize("language", OTHERS)
def test_every_reason_for_a_wrong_prediction_is_said_with_the_same_values(language: str):
    told = reasons(language)
    assert {code: [blanks(s) for s in both] for code, both in told.items()} == {
        code: [blanks(s) for s in both] for code, both in REASONS.items()
    }
    assert all(chinese(sentence) for both in told.values() for sentence in both)


def test_a_setting_without_a_value_is_said_to_be_not_set():
    wrong = SpecError("resume_differs", "clip", None, run="r", saved=None)
    assert str(wrong).endswith("there clip is not set; here it is not set.")
    assert explain("zh", wrong).count("未设置") == 2
