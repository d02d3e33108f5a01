"""A run that has ended -> what it proved: parity, conformance, predicted against measured, accuracy; or its failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from engine import archive, checkpoints
from engine.asking.settings import ONE_PROCESS_MODES
from engine.outcome.accuracy import shared_with
from engine.scale_model.paced import ratio, short
from engine.spec import Spec
from viz.figures.words import show_error
from viz.locales import Catalogue
from viz.locales.engine import phrase
from viz.pages.numbers import NOTHING, duration, percent
from viz.pages.settings import escape

LOG_TAIL = 40  # lines
NEAR = 0.25  # a prediction of the step time that is further off is marked


def show_verdict(result: Mapping[str, Any], text: Catalogue, elsewhere: bool = False) -> None:
    """The cards, side by side. What failed is red, and says where. `elsewhere`: it ran on another machine."""
    with st.container(key="verdict"):
        cards = (_parity, _conformance, _step_time, _learning)
        for place, card in zip(st.columns(len(cards), gap="small"), cards, strict=True):
            with place.container(border=True, height="stretch", gap="xxsmall"):
                card(result, text, elsewhere) if card is _step_time else card(result, text)


def _card(title: str, verdict: str, headline: str, detail: str, more: str = "") -> None:
    """`more` is told on demand."""
    st.markdown(f":small[:gray[{title}]]&ensp;{verdict}")
    st.markdown(f"**{headline}**", help=more or None)
    st.caption(detail)


def _badge(ok: bool | None, text: Catalogue, prefix: str) -> str:
    """None where nothing was compared: then the headline says so."""
    if ok is None:
        return ""
    word = text(f"{prefix}.{'ok' if ok else 'bad'}")
    return f":green-badge[:material/check: {word}]" if ok else f":red-badge[:material/close: {word}]"


def _parity(result: Mapping[str, Any], text: Catalogue) -> None:
    parity = result["parity"]
    exact = parity.get("exact")
    if exact is not None:
        _parity_by_design(parity, exact, text)
        return
    if parity["ok"] is None:
        headline = text("parity.none")
        detail = escape(phrase(text.language, parity["reason"] or ""))
    else:
        headline = text("parity.headline", loss=_small(parity["loss_max_abs_diff"]))
        detail, more = _compared(parity, text("parity.one_device"), text)
        if not parity["ok"]:
            reason = escape(phrase(text.language, parity["reason"] or ""))
            first, *others = _beyond(parity, text) or [reason]
            headline, more = first, f"{more} {reason}"
            detail = f":red[{' '.join(others)}]  \n{detail}" if others else detail
    _card(text("parity.title"), _badge(parity["ok"], text, "parity"), headline, detail, more)


def _beyond(parity: Mapping[str, Any], text: Catalogue) -> list[str]:
    """What differs by more than it may."""
    return [
        text("parity.beyond", what=text(f"parity.beyond.{name}"), value=_small(parity[name]), allowed=_small(allowed))
        for name, allowed in parity["tolerance"].items()
        if parity[name] is None or parity[name] > allowed
    ]


def _parity_by_design(parity: Mapping[str, Any], exact: Mapping[str, Any], text: Catalogue) -> None:
    """Neither green nor red for its distance from one device: that is told, and the design is what is held."""
    headline = text("parity.by_design", loss=_small(parity["loss_max_abs_diff"]))
    reason = escape(phrase(text.language, parity["reason"] or ""))
    detail = f"{reason if parity['ok'] is None else f':red[{reason}]'}  \n"
    compared, more = _compared(exact, text("parity.simulation"), text)
    detail += f"{_badge(exact['ok'], text, 'parity')} {compared}"
    _card(text("parity.title"), _badge(parity["ok"], text, "parity"), headline, detail, more)


def _compared(parity: Mapping[str, Any], against: str, text: Catalogue) -> tuple[str, str]:
    """What was compared with what, and how far apart they were."""
    more = text(
        "parity.more",
        loss=_small(parity["loss_max_abs_diff"]),
        grad=_small(parity["grad_max_rel_diff"]),
        param=_small(parity["param_max_abs_diff"]),
        loss_tolerance=_small(parity["tolerance"]["loss_max_abs_diff"]),
        grad_tolerance=_small(parity["tolerance"]["grad_max_rel_diff"]),
        param_tolerance=_small(parity["tolerance"]["param_max_abs_diff"]),
    )
    if "norm_max_rel_diff" in parity["tolerance"]:
        norm, allowed = parity["norm_max_rel_diff"], parity["tolerance"]["norm_max_rel_diff"]
        more += text("parity.norm", norm=_small(norm), tolerance=_small(allowed))
    return text("parity.detail", steps=parity["steps"], against=against), more


def _conformance(result: Mapping[str, Any], text: Catalogue) -> None:
    found = result["conformance"]
    headline = text("conformance.headline", matched=f"{found['matched']:,}", planned=f"{found['planned']:,}")
    detail, more = text("conformance.detail"), text("conformance.more", measured=f"{found['measured']:,}")
    if found.get("routed"):
        more += " " + text("conformance.routed")
    if found["ok"] is None or not found["planned"]:
        headline = text("conformance.none")
        detail = escape(phrase(text.language, found.get("reason") or "")) or detail
    difference = found["first_difference"]
    if difference:
        detail = f":red[{escape(describe_difference(difference, text))}]"
    _card(text("conformance.title"), _badge(found["ok"], text, "conformance"), headline, detail, more)


def describe_difference(difference: Mapping[str, Any], text: Catalogue) -> str:
    """Where plan and run differ first, in one sentence."""
    nothing = text("conformance.nothing")
    return text(
        "conformance.difference",
        rank=difference["rank"],
        step=difference["step"],
        lane=difference["lane"],
        index=difference["index"],
        planned=difference["planned"] or nothing,
        measured=difference["measured"] or nothing,
    )


def _step_time(result: Mapping[str, Any], text: Catalogue, elsewhere: bool) -> None:
    measured, predicted = result["step_time"], result["predicted_step_time"]
    if elsewhere:  # what was predicted was that machine's time, and what would be predicted now is this one's
        _card(text("steptime.title"), "", duration(measured), text("steptime.elsewhere"))
        return
    machine = result["spec"]["machine"]
    words, verdict, shown = {"predicted": duration(predicted)}, "", result.get("scale_model")
    if shown is None:
        detail = text("steptime.detail", machine=text.name("machine", machine), **words)
    else:
        there = {"seconds": duration(shown["pictured_step_time"]), "machine": text.name("machine", shown["machine"])}
        detail = text("steptime.pictured", ratio=shown["ratio"], **there, **words)
    # Another machine's step time says nothing about this one's.
    if measured and (machine == "local" or shown is not None):
        error = predicted / measured - 1
        colour = "gray" if abs(error) <= NEAR else "orange"
        verdict = f":{colour}-badge[{text('steptime.error', error=show_error(error))}]"
        if error < -NEAR and (other := shared_with(result.get("accuracy") or {})):
            detail += " " + text("steptime.others", **other)
    elif machine != "local":
        detail += " " + text("steptime.other_machine")
    if oversubscribed(result["spec"]):
        detail += " " + text("notice.oversubscribed_short")
    _card(text("steptime.title"), verdict, duration(measured), detail, text("steptime.more"))


def _learning(result: Mapping[str, Any], text: Catalogue) -> None:
    losses = [loss for loss in result["losses"] if loss is not None]
    accuracy = result["validation_accuracy"]
    rate = result["samples_per_second"]
    headline = text("learning.rate", rate=f"{rate:,.0f}") if rate else NOTHING
    words = []
    if accuracy is not None:
        words.append(text("learning.accuracy", accuracy=percent(accuracy)))
    if losses:
        words.append(text("learning.loss", first=f"{losses[0]:.3g}", last=f"{losses[-1]:.3g}"))
    last = [rows[-1] for rows in result.get("local_losses", []) if rows and rows[-1] is not None]
    low, high = (f"{of(last, default=0):.3g}" for of in (min, max))
    more = text("learning.local", low=low, high=high) if low != high else ""
    words.append(text("learning.steps", steps=len(result["losses"])))
    detail = " · ".join(words)
    if repeated := result.get("repeated_orders"):
        detail += f"  \n:red[{text('learning.repeated', **repeated[0])}]"
    _card(text("learning.title"), "", headline, detail, more)


def _small(value: float | None) -> str:
    return "∞" if value is None else "0" if value == 0 else f"{value:.1e}".replace(".0e", "e")


def show_failure(status: Mapping[str, Any], run_dir: Path, text: Catalogue) -> None:
    """Which rank failed, at which step, in which operation, and what it said; with the end of its log."""
    error = status["error"] or archive.no_place(text("failure.unknown"))
    rank = error.get("rank")
    where = text("failure.nowhere") if rank is None else text("failure.rank", rank=rank)
    if error.get("step") is not None:
        where += " · " + text("failure.step", step=error["step"])
    if error.get("op"):
        where += " · " + escape(str(error["op"]))
    message = escape(phrase(text.language, str(error.get("message") or text("failure.unknown"))))
    st.error(f"**{text('failure.title')}**&ensp;{where}\n\n{message}", icon=":material/error:")
    said = "" if rank is None else _last_words(run_dir, rank)
    if said:
        with st.expander(text("failure.log", rank=rank), key="failure-log"):
            st.code(said, language=None, wrap_lines=True)


def _last_words(run_dir: Path, rank: int) -> str:
    """The end of the rank's log, or the traceback that it left."""
    with contextlib.suppress(OSError):
        log = archive.read_log(run_dir, rank, LOG_TAIL).strip()
        if log:
            return log
    return str((archive.read_error(run_dir, rank) or {}).get("traceback") or "")


def oversubscribed(spec: Mapping[str, Any]) -> bool:
    """Whether a run on CPU processes has more ranks than this machine has cores; in a scale model they sleep."""
    return spec["device"] != "cuda" and spec["devices"] > (os.cpu_count() or 1) and spec.get("paced") is None


def takes_all_cores(spec: Spec) -> bool:
    """Whether a run on CPU processes leaves no core to anything else, such as a browser beside it."""
    return spec.device != "cuda" and spec.devices >= (os.cpu_count() or 1) and spec.paced is None


def notices(spec: Spec, text: Catalogue, elsewhere: bool = False) -> list[str]:
    """What a reader of a real run's numbers must know. `elsewhere`: it ran on another machine."""
    found = [text("notice.elsewhere")] if elsewhere else []
    if spec.fault is not None:
        found.append(text("notice.fault", fault=f"`{spec.fault}`"))
    if spec.paced is not None:
        found.append(scale_model(spec, text))
    if spec.device != "cuda" and spec.mode == "data_parallel":
        found.append(text("notice.data_parallel_cpu"))
    if not elsewhere and oversubscribed(spec.to_dict()):
        words = "notice.oversubscribed_threads" if spec.mode in ONE_PROCESS_MODES else "notice.oversubscribed"
        found.append(text(words, devices=spec.devices, cores=os.cpu_count() or 1))
    if spec.resume is not None:
        found.append(resumed(spec, text))
    return found


def scale_model(spec: Spec, text: Catalogue) -> str:
    """`spec` has its dilation filled in."""
    factor = spec.dilation
    return text(
        "notice.scale_model", ratio=ratio(factor), machine=text.name("machine", spec.paced), factor=short(factor)
    )


def resumed(spec: Spec, text: Catalogue) -> str:
    run_id, step = checkpoints.parse(spec.resume)
    return text("notice.resumed", run=run_id, step=step)
