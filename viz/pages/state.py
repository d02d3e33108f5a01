"""The URL <-> what this visitor asked for: every setting as the text in the URL, the run shown, the language.

The URL is the state, so that a link, a reload and a second tab show the same. It is kept as text, however wrong: a
wrong value is explained where it is set, not dropped. The names are those of the command line, with dashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from engine import schedules
from engine.asking.rules import SpecError
from engine.asking.settings import MODE_MODELS, MODE_SETTINGS, MODEL_DATASETS, applies, default_model
from engine.job import prepare, prepare_real
from engine.spec import MODELS, MODES, Spec
from viz import locales

FIELDS = {f.name: f for f in dataclasses.fields(Spec)}
DEFAULT_SCHEDULE = MODE_SETTINGS["pipeline"]["schedule"]
# Of modes that are nothing on some numbers of devices. On fewer than four one of two axes would have one coordinate.
OWN_DEVICES = {"single": "1", "hsdp": "4", "hybrid": "4"}
TOO_FEW = ("1", "2", "3")
FIXED_STAGES = {name for name, shape in schedules.TABLE.items() if shape.stages_per_rank}  # the schedule says how many


@dataclass(slots=True)
class Asked:
    """What one visitor asked for."""

    settings: dict[str, str] = field(default_factory=dict)  # by URL name; what is not here has its default
    aside: dict[str, str] = field(default_factory=dict)  # set once, and not meaningful now: for when it is again
    run: str | None = None
    bare: bool = False  # a link named the run and no setting: they are the run's
    language: str = locales.DEFAULT
    url: dict[str, str] = field(default_factory=dict)  # the query as it was written last
    acted: bool = False  # a widget's callback changed something: the URL is behind, not ahead
    page: str = ""  # the one that was shown last

    def value(self, name: str) -> str | None:
        """The text that a setting was given; None when it was not."""
        return self.settings.get(param(name))

    def set(self, name: str, text: str | None) -> None:
        """Give a setting a text; None or its default's text takes it back."""
        if text is None or text == write(FIELDS[name].default):
            self.settings.pop(param(name), None)
        else:
            self.settings[param(name)] = text
        self._sort_out(name)

    def set_all(self, spec: Spec) -> None:
        """Give every setting as `spec` has it, where it would not be so by itself."""
        with contextlib.suppress(SpecError):
            if prepare_real(spec.with_(device="auto")).spec.device == spec.device:
                spec = spec.with_(device="auto")
        self.settings, self.aside = spec.to_params(), {}
        self.shorten(*self.settings)

    def shorten(self, *keys: str) -> None:
        """Leave out those settings that follow from the others anyway."""
        for key in keys:
            rest = {k: v for k, v in self.settings.items() if k != key}
            with contextlib.suppress(SpecError):  # what does not work is kept and explained
                wanted = prepare(Spec.from_params(self.settings)).spec
                if prepare(Spec.from_params(rest)).spec == wanted:
                    self.settings = rest

    @property
    def mode(self) -> str:
        text = self.value("mode")
        return text if text in MODES else FIELDS["mode"].default

    @property
    def model(self) -> str:
        text = self.value("model")
        return text if text in MODELS else default_model(self.mode)

    def _sort_out(self, changed: str) -> None:
        """After another mode, model or schedule was chosen: put what does not apply aside, take back what does."""
        if changed not in ("mode", "model", "schedule", "schedule_file"):
            return
        if changed == "model":
            self.aside.pop("model", None)
        elif changed == "mode":
            self._sort_out_model()
        if changed == "mode":
            self._sort_out_devices()
        for name in FIELDS:
            key = param(name)
            if key in self.settings and not self._fits(name, self.settings[key]):
                self.aside[key] = self.settings.pop(key)
            elif key in self.aside and name not in ("devices", "model") and self._fits(name, self.aside[key]):
                self.settings[key] = self.aside.pop(key)

    def _sort_out_devices(self) -> None:
        """Where a mode is nothing on as many devices as were chosen, it has its own number; those come back later."""
        default = write(FIELDS["devices"].default)
        now, own = self.settings.get("devices", default), OWN_DEVICES.get(self.mode)
        chosen = self.aside.pop("devices", now) if now in OWN_DEVICES.values() else now
        if own is not None and (self.mode == "single" or chosen in TOO_FEW):
            if chosen != own:
                self.aside["devices"] = chosen
            chosen = own
        self.set("devices", chosen)

    def _sort_out_model(self) -> None:
        """Where a mode does not take the model that was chosen, its own is meant; the chosen one comes back later."""
        models = MODE_MODELS.get(self.mode, MODELS)
        if self.model not in models:
            self.aside["model"] = self.settings.pop("model")
        elif self.aside.get("model") in models:
            self.settings["model"] = self.aside.pop("model")

    def _fits(self, name: str, text: str) -> bool:
        if name == "dataset":
            return text in MODEL_DATASETS[self.model]
        return self.applies(name)

    def applies(self, name: str) -> bool:
        """Whether a setting means anything beside the others."""
        if name == "schedule" and self.value("schedule_file") is not None:
            return False  # the order is in the file
        if name == "stages_per_rank" and (self.value("schedule") or DEFAULT_SCHEDULE) in FIXED_STAGES:
            return False
        return applies(name, self.mode, self.model)


def filled(spec: Spec) -> Spec:
    """The spec of a run, with its defaults for those settings that Lockstep has got since; as it is if it cannot be."""
    with contextlib.suppress(SpecError):
        return prepare(spec).spec
    return spec


def param(name: str) -> str:
    """A setting's name in the URL."""
    return name.replace("_", "-")


def write(value: Any) -> str | None:
    """A setting's value as the URL has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return None if value is None else str(value)


def read_language() -> str:
    """The URL's language, else the one that was chosen before: a change of page clears the query."""
    if "asked" not in st.session_state:
        st.session_state.asked = Asked()
    asked: Asked = st.session_state.asked
    if not asked.acted:
        asked.language = st.query_params.get("lang", asked.language)
    return asked.language


def read_url(page: str) -> Asked:
    """This session's state, brought up to date with the URL: a link, or back and forward, may have changed it."""
    read_language()
    asked: Asked = st.session_state.asked
    query = st.query_params.to_dict()
    # What was asked for comes back into the query that a change of page has cleared.
    returned = asked.page not in ("", page) and not query.keys() - {"lang"}
    if page == "lab" and not asked.acted and query != asked.url and not returned:
        query.pop("lang", None)
        asked.run = query.pop("run", None)
        asked.settings, asked.aside = query, {}
        asked.bare = asked.run is not None and not query
    asked.acted, asked.page = False, page
    return asked


def write_url(asked: Asked) -> None:
    """Only what differs from the defaults, so that links stay short."""
    query = dict(asked.settings) if asked.page == "lab" else {}
    if asked.page == "lab" and asked.run is not None:
        query["run"] = asked.run
    if asked.language != locales.DEFAULT:
        query["lang"] = asked.language
    if st.query_params.to_dict() != query:
        st.query_params.from_dict(query)
    asked.url = query


def act(change: Callable[..., None], *args: Any) -> Callable[[], None]:
    """A widget's callback: `change(asked, *args)`."""

    def callback() -> None:
        asked: Asked = st.session_state.asked
        change(asked, *args)
        asked.acted = True

    return callback
