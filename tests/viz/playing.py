"""A mode and its settings -> what the player gets; and what a page with a player is asked."""

from engine import modes
from engine.cost.machine import machine
from engine.job import prepare
from engine.simulation import simulate
from engine.spec import Spec
from viz.figures.moving import moving_picture
from viz.figures.picture import picture_info
from viz.locales import text
from viz.locales.engine import lesson

ROOT = ".lockstep-player"


def payload_of(mode="pipeline", devices=4, machine_name="unit", language="en", taught=False, **settings):
    job = prepare(Spec(mode=mode, devices=devices, **settings))
    simulation = simulate(modes.plan(job), machine(machine_name))
    steps = lesson(language, mode).steps if taught else ()
    return moving_picture(picture_info(simulation.plan, job.layers, simulation.timeline, steps=steps), text(language))


def state(page):
    return page.evaluate(
        f"(({{playing, time, end}}) => [playing === 'true', +time, +end])(document.querySelector('{ROOT}').dataset)"
    )


def ask(page, function):
    """The value of a JavaScript function of the player."""
    return page.evaluate(f"({function})(document.querySelector('{ROOT}').player)")


def seek(page, share):
    ask(page, f"(player) => player.seek(player.payload.end * {share})")
