"""A mode -> its lesson: the steps in order, when to use it, where it ends, and what its words mean."""

from __future__ import annotations

import re

import streamlit as st

from engine.lessons import Lesson
from viz.locales import Catalogue
from viz.locales.engine import lesson

# What a newcomer may not know: each has its name in the catalogue, as `word.rank`, and what it means.
WORDS = (
    *("rank", "replica", "batch", "microbatch", "weights", "forward", "activation", "backward", "gradient"),
    *("optimizer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shard", "bucket"),
    *("stage", "bubble", "block", "attention", "token", "expert", "router", "mesh"),
)


def show_lesson(mode: str, text: Catalogue) -> None:
    told = lesson(text.language, mode)
    with st.container(key="lesson"):
        steps, judgement = st.columns([3, 2], gap="large")
        with steps:
            st.markdown(f"##### {text('lesson.steps')}")
            lines = (
                text("lesson.step", title=step.title, text=step.text) if step.title else step.text
                for step in told.steps
            )
            st.markdown("\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1)))
        with judgement:
            st.markdown(f"##### {text('lesson.use')}")
            st.markdown(told.use)
            st.markdown(f"##### {text('lesson.limits')}")
            st.markdown(told.limits)
        with st.expander(text("lesson.words"), icon=":material/dictionary:", key="words"):
            found = [
                text("lesson.word", word=text(f"word.{word}"), means=text(f"word.{word}.means"))
                for word in words_of(told, text)
            ]
            half = -(-len(found) // 2)
            for place, part in zip(st.columns(2, gap="large"), (found[:half], found[half:]), strict=True):
                place.markdown("\n".join(f"- {line}" for line in part))


def words_of(told: Lesson, text: Catalogue) -> list[str]:
    """Those of WORDS that a lesson has, or that its ops are called, in the order in which they build on each other."""
    kinds = {kind for step in told.steps for kind in step.kinds}
    said = " ".join([told.idea, *(f"{step.title} {step.text}" for step in told.steps), told.use, told.limits]).lower()
    return [word for word in WORDS if word in kinds or _has(said, text(f"word.{word}"))]


def _has(said: str, word: str) -> bool:
    """A word that begins so: no batch is in a microbatch, but an all-gather is where something is all-gathered."""
    return re.search(rf"(?<![a-z]){re.escape(word.lower())}", said) is not None
