"""Real runs of pipelines with several stages a rank: ops as planned, numbers as of one device, in every schedule."""

from __future__ import annotations

import pytest

from engine.spec import Spec
from engine.timeline import Timeline
from tests.engine.proof import finished, holds

pytestmark = pytest.mark.real

# pytorch#132644: pipelines once hung on gloo. A rank that waits for 30 s ends its run.
SHORT = {"steps": 3, "device": "cpu", "timeout": 30.0}
SEVERAL_STAGES = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")  # their microbatches go in rounds: three of two


@pytest.mark.parametrize(
    ("schedule", "devices", "microbatches"),
    [(schedule, 4, None) for schedule in SEVERAL_STAGES]
    + [(schedule, 4, 1) for schedule in SEVERAL_STAGES[:-1]]
    + [(schedule, 2, 6) for schedule in ROUNDS],
)
def test_every_schedule_with_several_stages_a_rank(schedule, devices, microbatches, launcher, runs_dir):
    """With twice as many microbatches as ranks (the fewest that dualpipev allows), with one, and with three rounds. Two
    ranks, and one and three: below."""
    sizes = {"model": "mlp", "layers": 7, "hidden": 16, "global_batch": 48}
    spec = Spec(mode="pipeline", schedule=schedule, devices=devices, microbatches=microbatches, **sizes, **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    assert result["spec"]["stages_per_rank"] == 2


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
def test_a_schedule_on_one_rank_and_on_an_odd_number(schedule, devices, launcher, runs_dir):
    """On one rank every stage hands on to the next without a message."""
    spec = Spec(mode="pipeline", schedule=schedule, devices=devices, model="mlp", layers=5, hidden=16, **SHORT)
    holds(finished(spec.with_(global_batch=48), launcher, runs_dir))


@pytest.mark.parametrize("stages_per_rank", [1, 3])
@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"])
def test_a_loop_has_as_many_stages_a_rank_as_asked_for(schedule, stages_per_rank, launcher, runs_dir):
    """One a rank is 1F1B, or with halves ZB-H1."""
    spec = Spec(mode="pipeline", schedule=schedule, stages_per_rank=stages_per_rank, model="mlp", layers=5, hidden=16)
    holds(finished(spec.with_(devices=2, **SHORT), launcher, runs_dir))


@pytest.mark.parametrize("schedule", SEVERAL_STAGES)
def test_messages_are_noted_in_the_order_in_which_they_are_issued(schedule, launcher, runs_dir):
    """The cnn's three cuts have three sizes, so a message taken for another one would show in its bytes."""
    spec = Spec(mode="pipeline", schedule=schedule, devices=2, model="cnn", microbatches=8, optimizer="adamw", **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(2)
    sizes = {span.bytes for span in timeline.spans() if span.kind == "send"}
    cuts = {8 * 4 * 20 * 12 * 12, 8 * 4 * 50 * 4 * 4, 8 * 4 * 500}
    # Where stages lie in a V, the one in the middle is between two stages of the last rank.
    assert sizes == (cuts - {8 * 4 * 50 * 4 * 4} if schedule in ("zbv", "dualpipev") else cuts)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "dualpipev"])
def test_a_transformer_in_halves_of_a_backward(schedule, launcher, runs_dir):
    """The gradients of inputs and of weights, computed apart, are those that are computed at once."""
    sizes = {"model": "gpt", "layers": 2, "hidden": 16, "heads": 2, "context": 8}
    spec = Spec(mode="pipeline", schedule=schedule, devices=2, **sizes, optimizer="adamw", lr=1e-3, **SHORT)
    result = finished(spec, launcher, runs_dir)
    holds(result)
    timeline = Timeline.load(runs_dir / result["run_id"] / "timeline.parquet").step(2)
    assert {"backward_input", "backward_weight"} <= set(timeline["kind"].tolist())


def test_eight_ranks_with_two_stages_each(launcher, runs_dir):
    spec = Spec(mode="pipeline", schedule="zbv", devices=8, microbatches=8, model="mlp", layers=15, hidden=16, **SHORT)
    holds(finished(spec, launcher, runs_dir))
