"""What was asked for -> the prediction to draw, and what is wrong with what was asked for. Predictions are cached."""

from __future__ import annotations

from typing import Any, NamedTuple

import streamlit as st

from engine.asking.rules import SpecError, closest
from engine.predict import Prediction, predict
from engine.search.fits import fits
from engine.spec import Spec
from viz.locales import LANGUAGES
from viz.pages.state import FIELDS, Asked, param, write


class Shown(NamedTuple):
    """`error` is None when `prediction` is that of what was asked for; else it is of the last settings that worked."""

    prediction: Prediction
    summary: dict[str, Any]
    error: SpecError | None


@st.cache_resource(max_entries=8, show_spinner=False)
def predicted(settings: tuple[tuple[str, str], ...]) -> Shown:
    """Of settings as the URL has them. Raises SpecError."""
    prediction = predict(Spec.from_params(dict(settings)))
    summary = prediction.summary() | {"fits": fits(prediction)}
    return Shown(prediction, summary, None)


def predict_asked(asked: Asked) -> Shown:
    try:
        shown = predicted(_key(asked.settings))
        st.session_state.last_good = dict(asked.settings)
    except SpecError as wrong:
        return _last_good(asked, wrong)._replace(error=wrong)
    if asked.language not in LANGUAGES:
        near = closest(asked.language, LANGUAGES)
        return shown._replace(error=SpecError("unknown_name", "lang", asked.language, suggest=near))
    return shown


def _last_good(asked: Asked, wrong: SpecError) -> Shown:
    """The last settings that worked in this session; else those of the link, of wrong ones the first that is suggested
    instead; else without these."""
    settings = st.session_state.get("last_good")
    if settings is not None:
        return predicted(_key(settings))
    settings, mended = dict(asked.settings), set()
    while True:
        name = param(wrong.setting)
        works = write(wrong.suggest[0]) if wrong.setting in FIELDS and wrong.suggest else None
        if works is not None and (name, works) not in mended:
            settings[name] = works
            mended.add((name, works))
        elif settings.pop(name, None) is None:
            settings.clear()
        try:
            return predicted(_key(settings))
        except SpecError as another:
            wrong = another


def _key(settings: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(settings.items()))
