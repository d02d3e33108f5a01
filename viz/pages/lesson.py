"""A mode -> its lesson: the steps in order, when to use it, where it ends."""

from __future__ import annotations

import streamlit as st

from viz.locales import Catalogue
from viz.locales.engine import lesson


def show_lesson(mode: str, text: Catalogue) -> None:
    told = lesson(text.language, mode)
    with st.container(key="lesson"):
        steps, judgement = st.columns([3, 2], gap="large")
        with steps:
            st.markdown(f"##### {text('lesson.steps')}")
            lines = (f"**{step.title}.** {step.text}" if step.title else step.text for step in told.steps)
            st.markdown("\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1)))
        with judgement:
            st.markdown(f"##### {text('lesson.use')}")
            st.markdown(told.use)
            st.markdown(f"##### {text('lesson.limits')}")
            st.markdown(told.limits)
