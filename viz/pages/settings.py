"""What was asked for -> the sidebar: a control for each setting that applies, and what is wrong, where it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import streamlit as st

from engine import modes
from engine.asking.rules import SpecError
from engine.asking.settings import CONTEXT_SETTINGS, MODE_MODELS, MODEL_AXES, MODEL_DATASETS, PIPELINE_SETTINGS
from engine.asking.values import parse_text, type_of
from engine.cost.machine import MACHINES
from engine.job import Job
from engine.plan import AXES
from engine.scale_model.paced import NEVER_PACED
from engine.spec import MODELS, MODES
from viz import locales
from viz.locales import LANGUAGES, Catalogue
from viz.locales.engine import explain, help_of, lesson
from viz.pages.state import FIELDS, Asked, act, param, write

# In the order in which they are shown; a row has one or two controls, and one where a value or a toggle's name is long.
ROWS = (
    ("devices", "global_batch"),
    ("dp", "fsdp"),
    ("tp", "cp"),
    ("pp", "ep"),
    ("microbatches", "stages_per_rank"),
    ("schedule",),
    ("schedule_file",),
    ("split",),
    ("receives",),
    ("accumulate", "sync_every"),
    ("sync_every_microstep",),
    ("sequence_parallel",),
    ("expert_tp",),
    ("attention", "balance"),
    ("bucket_mb",),
    ("compress", "compress_rank"),
    ("leave_out",),
    ("freeze",),
    ("find_unused",),
    ("model", "dataset"),
    ("masked",),
    ("layers", "hidden"),
    ("heads", "context"),
    ("experts", "top_k"),
    ("steps", "lr"),
    ("machine",),
    ("paced", "dilation"),
)
MORE = (
    ("kv_heads", "head_dim"),
    ("ffn", "vocabulary"),
    ("activation", "positions"),
    ("tied",),
    ("flash",),
    ("early_stop",),
    ("every_other",),
    ("keep_qkv",),
    ("overlap",),
    ("backward_prefetch",),
    ("reduce_fp32",),
    ("scatter_gather",),
    ("tp_overlap",),
    ("master_weights",),
    ("share_optimizer",),
    ("share_gradients",),
    ("dropout", "fused_loss"),
    ("torch_loss",),
    ("mtp",),
    ("shared_experts", "dense_layers"),
    ("dense_ffn",),
    ("optimizer", "clip"),
    ("precision",),
    ("recompute",),
    ("compile_stage",),
    ("epochs", "seed"),
    ("evaluate_every", "save_every"),
    ("resume",),
    ("parity_steps", "timeout"),
    ("record",),
    ("measure_memory",),
    ("slow_rank", "slow_link"),
    ("device", "fault"),
    ("data_dir",),
)
LARGEST = 2**53 - 1  # the largest whole number that a browser keeps exact
MAX_FIXES = 4
STEPS = {"lr": 0.01, "masked": 0.1}  # that a click adds to a number that is no whole one


def show_language(asked: Asked) -> None:
    """The language switch; a language that the URL names and nobody speaks leaves nothing chosen."""
    key = "language"
    st.session_state[key] = asked.language if asked.language in LANGUAGES else None
    st.segmented_control(
        locales.text(asked.language)("settings.language"),
        list(LANGUAGES),
        format_func=LANGUAGES.get,
        key=key,
        required=True,
        label_visibility="collapsed",
        width="stretch",
        on_change=act(lambda a: setattr(a, "language", st.session_state[key] or a.language)),
    )


def show_head(asked: Asked, title: str) -> None:
    """The head of a page that has no settings: its title, and the language switch beside it."""
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.markdown(f"## {title}")
    with right:
        show_language(asked)


def show_settings(asked: Asked, job: Job, error: SpecError | None, text: Catalogue) -> None:
    """`job` is what is drawn, and gives what is not set its default; `error` is why it is not what was asked for."""
    wrong_here = error.setting if error is not None else None
    shown = {"mode"} | {
        name
        for name in _names(ROWS + MORE)
        if asked.applies(name) and (name == wrong_here or asked.value(name) is not None or not _idle(name, asked, job))
    }
    if asked.mode == "single":
        shown.discard("devices")
    if error is not None and error.setting not in shown:
        _explain(error, text)
    _show_mode(asked, text)
    _error_at("mode", error, text)
    _show_rows(ROWS, shown, asked, job, error, text)
    more = [name for name in _names(MORE) if name in shown]
    wrong = error is not None and error.setting in more
    with st.expander(text("settings.more"), expanded=wrong, key=f"more-{wrong}"):
        _show_rows(MORE, shown, asked, job, error, text)


def _idle(name: str, asked: Asked, job: Job) -> bool:
    """Whether a setting would change nothing beside the others, as they are drawn."""
    if name == "paced":
        return asked.mode in NEVER_PACED
    if name in ("machine", "dilation"):
        return (name == "dilation") == (job.spec.paced is None)
    if job.spec.mode != asked.mode:
        return False  # these settings do not work yet
    if name == "compress_rank":
        return job.spec.compress != "powersgd"
    if name == "sync_every_microstep":
        return job.microsteps == 1
    if asked.mode == "hybrid" and name in AXES:
        return name not in MODEL_AXES.get(asked.model, MODEL_AXES[""])
    if asked.mode == "hybrid" and name == "sequence_parallel":
        return job.degree("tp") == 1 or job.spec.model not in MODE_MODELS["sequence"]
    if asked.mode == "hybrid" and name == "expert_tp":
        return job.degree("tp") == 1 or job.spec.model not in MODE_MODELS["expert"]
    if asked.mode == "hybrid" and name in PIPELINE_SETTINGS:
        return job.degree("pp") == 1
    return asked.mode == "hybrid" and name in CONTEXT_SETTINGS and job.degree("cp") == 1


def _names(rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [name for row in rows for name in row]


def _show_mode(asked: Asked, text: Catalogue) -> None:
    key = _key("mode")
    wanted = asked.value("mode") or FIELDS["mode"].default
    st.session_state[key] = wanted if wanted in MODES else None
    st.radio(
        text("settings.mode"),
        MODES,
        format_func=lambda mode: text(f"mode.{mode}"),
        key=key,
        help="\n".join(f"- **{text(f'mode.{m}')}**: {lesson(text.language, m).idea}" for m in modes.MODES),
        on_change=act(_take, "mode"),
    )


def _show_rows(
    rows: tuple[tuple[str, ...], ...],
    shown: set[str],
    asked: Asked,
    job: Job,
    error: SpecError | None,
    text: Catalogue,
) -> None:
    for row in rows:
        names = [name for name in row if name in shown]
        for name, place in zip(
            names, st.columns(len(names), vertical_alignment="bottom") if names else (), strict=True
        ):
            with place:
                _control(name)(name, asked, job, text)
        for name in names:
            _error_at(name, error, text)


def _control(name: str) -> Callable[[str, Asked, Job, Catalogue], None]:
    kind, _ = type_of(FIELDS[name])
    if name == "schedule_file":
        return _show_lines
    if options(name, "gpt"):
        return _show_choice
    if kind is bool:
        return _show_flag
    return _show_number if kind in (int, float) else _show_words


def options(name: str, model: str) -> tuple[str, ...]:
    """The values among which a setting is chosen; none when it is a number or a text."""
    if name == "dataset":
        return MODEL_DATASETS[model]
    if name == "machine":
        return tuple(MACHINES)
    if name == "paced":
        return ("", *(machine.name for machine in MACHINES.values() if not machine.cores))
    return MODELS if name == "model" else FIELDS[name].metadata["choices"]


def _show_choice(name: str, asked: Asked, job: Job, text: Catalogue) -> None:
    key, choices = _key(name), options(name, asked.model)
    given = asked.model if name == "model" and job.spec.mode != asked.mode else getattr(job.spec, name)
    wanted = asked.value(name) or given or FIELDS[name].default or ""
    st.session_state[key] = wanted if wanted in choices else None
    st.selectbox(
        text(f"setting.{name}"),
        choices,
        format_func=lambda value: text.name("machine" if name == "paced" else name, value) or text("settings.none"),
        key=key,
        help=help_of(text.language, name),
        placeholder=text.name(name, str(wanted)) or text("settings.none"),
        filter_mode=None,
        on_change=act(_take, name),
    )


def _show_number(name: str, asked: Asked, job: Job, text: Catalogue) -> None:
    """The number that was written, or that follows from the other settings; what is no number is shown in grey."""
    key, written = _key(name), asked.value(name)
    kind, _ = type_of(FIELDS[name])
    follows = job.first_step + job.steps if name == "steps" else getattr(job.spec, name)
    by_epochs = name == "steps" and written is None and asked.value("epochs") is not None
    value = follows if written is None and not by_epochs else _number(name, written)
    st.session_state[key] = value
    st.number_input(
        text(f"setting.{name}"),
        # With "min", unlike None, the field cannot be cleared; the session's value is shown in either case.
        value=None if value is None or name == "epochs" else "min",
        min_value=None if kind is int else -1e300,
        max_value=None if kind is int else 1e300,
        step=1 if kind is int else STEPS.get(name, 1.0),
        format=None if kind is int else "%g",
        placeholder=written if written is not None else write(follows) or text("settings.none"),
        disabled=by_epochs,
        key=key,
        help=help_of(text.language, name),
        on_change=act(_take, name),
    )


def _number(name: str, written: str | None) -> int | float | None:
    """The number that was written, if the control can show it."""
    if written is None:
        return None
    try:
        value = parse_text(FIELDS[name], written)
    except SpecError:
        return None
    return value if value is not None and abs(value) <= LARGEST else None  # NaN is not <= either


def _show_words(name: str, asked: Asked, job: Job, text: Catalogue) -> None:
    key = _key(name)
    st.session_state[key] = asked.value(name) or ""
    st.text_input(
        text(f"setting.{name}"),
        placeholder=write(getattr(job.spec, name)) or text("settings.none"),
        key=key,
        help=help_of(text.language, name),
        on_change=act(_take, name),
    )


def _show_lines(name: str, asked: Asked, job: Job, text: Catalogue) -> None:
    """A text of several lines, put away until it is wanted."""
    key = _key(name)
    st.session_state[key] = asked.value(name) or ""
    with st.expander(text(f"setting.{name}"), expanded=bool(asked.value(name)), key=f"lines-{name}"):
        st.text_area(
            text(f"setting.{name}"),
            placeholder="0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
            key=key,
            help=help_of(text.language, name),
            label_visibility="collapsed",
            on_change=act(_take, name),
        )


def _show_flag(name: str, asked: Asked, job: Job, text: Catalogue) -> None:
    key = _key(name)
    st.session_state[key] = bool(getattr(job.spec, name))
    st.toggle(text(f"setting.{name}"), key=key, help=help_of(text.language, name), on_change=act(_take, name))


def _key(name: str) -> str:
    return f"set-{param(name)}"


def _take(asked: Asked, name: str) -> None:
    value = st.session_state[_key(name)]
    asked.set(name, None if value == "" else write(value))
    asked.shorten(param(name))


def _error_at(name: str, error: SpecError | None, text: Catalogue) -> None:
    if error is not None and error.setting == name:
        _explain(error, text)


def _explain(error: SpecError, text: Catalogue) -> None:
    """The sentence, and a button for each value that would work."""
    with st.container(key="settings-error"):
        st.error(escape(explain(text.language, error)), icon=":material/error:")
        if error.picture:
            st.code(error.picture, language=None)
        fixes = list(_fixes(error))[:MAX_FIXES]
        if fixes:
            with st.container(horizontal=True, gap="xsmall"):
                for i, (label, change) in enumerate(fixes):
                    name = label or text("settings.leave_out", setting=param(error.setting))
                    st.button(escape(name), key=f"fix-{i}", on_click=act(change))


def _fixes(error: SpecError) -> Iterable[tuple[str | None, Callable[[Asked], None]]]:
    """(label, change) of each repair that the error itself suggests; no label: leave the setting out."""
    name, key = error.setting, param(error.setting)
    if error.code == "unknown_setting":
        for other in error.suggest:
            yield param(other), lambda a, other=other: a.set(other, a.settings.pop(key, None))
    elif key == "lang":
        for language in error.suggest:
            yield LANGUAGES[language], lambda a, language=language: setattr(a, "language", language)
        return
    elif name in FIELDS:
        for value in error.suggest:
            yield f"{key} = {write(value)}", lambda a, value=value: a.set(name, write(value))
    if not error.suggest or error.code == "unknown_setting":
        yield None, lambda a: a.settings.pop(key, None)


def escape(sentence: str) -> str:
    """Text that a visitor or a URL wrote, made harmless as Markdown."""
    return "".join("\\" + c if c in r"\`*_{}[]()<>#+!|$~:" else c for c in sentence)
