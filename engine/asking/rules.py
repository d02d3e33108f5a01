"""A rule and the value that breaks it -> a SpecError: one sentence, and the nearest values that work."""

from __future__ import annotations

import difflib
import json
import typing
from typing import Any

from engine.schedules.rules import SENTENCES

UNSET = "not set"


class SpecError(ValueError):
    """A wrong setting: the rule, the value, and the nearest values that work.

    `code` and `values` let a page say the same in another language; `str(error)` is the English sentence. `picture` are
    lines that show where it is wrong, if there are any.
    """

    def __init__(
        self,
        code: str,
        setting: str,
        value: Any = None,
        *,
        suggest: typing.Iterable = (),
        picture: str = "",
        **values: Any,
    ):
        self.code, self.setting, self.value, self.picture = code, setting, value, picture
        self.suggest = tuple(suggest)
        self.values = {
            "setting": setting.replace("_", "-"),
            "value": _show(value),
            **{k: _show(v) for k, v in values.items()},
        }
        self.values["suggest"] = ", ".join(_show(s) for s in self.suggest)
        sentence = RULES[code].format_map(self.values)
        super().__init__(sentence + (f" Try: {self.values['suggest']}." if self.suggest else ""))

    def suggesting(self, suggest: typing.Iterable) -> SpecError:
        """The same with other values that work."""
        own = ("setting", "value", "suggest")
        values = {name: value for name, value in self.values.items() if name not in own}
        return SpecError(self.code, self.setting, self.value, suggest=suggest, **values)


def _show(value: Any) -> str:
    if value is None:
        return UNSET
    """What a terminal would obey and not print is escaped."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return text if len(text) <= 120 else text[:117] + "..."


# The rules that a setting can break. One sentence each: the rule, then the value.
RULES = {
    "unknown_setting": "There is no setting called {setting}.",
    "unknown_name": "{setting} must be one of the known names; {value} is not.",
    "wrong_type": "{setting} must be {wanted}; {value} is not.",
    "not_finite": "{setting} must be a finite number; it is {value}.",
    "out_of_range": "{setting} must be between {low} and {high}; it is {value}.",
    "exclusive": "Give {setting} or {other}, not both; {setting} is {value}.",
    "does_not_apply": "{setting} does not apply to {to}; it is {value}. Leave it out.",
    "devices_of_mode": "The mode {mode} runs on {wanted}; devices is {value}.",
    "model_of_mode": "The mode {mode} cannot cut the model {value}.",
    "devices_divide": "Each device gets an equal part of what is cut of the model {model} ({sizes}), so {setting} must "
    "divide it; {setting} is {value}.",
    "context_divides": "A sequence is dealt out in {chunks} equal chunks a device, so {setting} times {chunks} must "
    "divide the context ({context}); {setting} is {value}.",
    "expert_tp_of_tp": "Tensor ranks cut each expert as they cut the rest, or not at all: {setting} is tp ({tp}) or 1; "
    "it is {value}.",
    "whole_experts": "Experts that are whole beside tensor ranks (expert-tp 1) are dealt out to ep x tp = {ranks} "
    "devices, which must divide the number of experts ({experts}); {setting} is {value}.",
    "heads_of_ulysses": "With attention ulysses each device gets an equal part of the heads ({heads}) and of the "
    "context ({context}), so {setting} must divide both; {setting} is {value}.",
    "ring_too_long": "A ring takes as many turns as it has ranks, so its plan grows with their square: with attention "
    "ring {setting} is at most {high}; it is {value}.",
    "batch_by_devices": "global-batch must be divisible by the number of devices ({devices}); it is {value}.",
    "batch_by_replicas": "global-batch must be divisible by the number of replicas ({replicas}); it is {value}.",
    "batch_by_microbatches": "microbatches must divide the {batch} samples of a replica at a time; it is {value}.",
    "batch_of_schedule": "global-batch must be cut into equal microbatches, as many as the schedule {schedule} can run "
    "on {devices} devices; it is {value}, and no number of them will do.",
    "batch_by_microsteps": "accumulate must divide the {batch} samples of a device in a step; it is {value}.",
    "compress_of_bf16": "Gradients in bf16 are two bytes a number as they are, and PyTorch cannot factor them; with "
    "precision bf16 compress must be none, and is {value}.",
    "one_bucket": "PowerSGD sends its factors bucket by bucket in no fixed order, so all gradients are in one bucket; "
    "leave {setting} out, which is {value}.",
    "nothing_to_recompute": "Beside its matrix products the model {model} keeps nothing that is worth computing again; "
    "recompute is {value}.",
    "bad_leave_out": "leave-out reads RANK:LAYER, several with commas between them: one of the {devices} ranks, and a "
    "layer without which the model goes on ({layers}); it is {value}.",
    "bad_freeze": "freeze names layers that are not trained, with commas between them, some of the model's and not all "
    "({layers}); it is {value}.",
    "schedule_of_frozen": "Frozen layers are planned in pipelines of one stage a device whose backwards are whole; "
    "schedule is {value}.",
    "left_out_by_all": "Some rank must have each layer in its loss, or it would never learn; {setting} is {value}, and "
    "nobody has {layer}.",
    "unused_parameters": "These parameters take no part in the loss ({unused}), and the other ranks would wait for "
    "their gradients for ever, unless DDP looks for them; {setting} is {value}.",
    "unused_of_powersgd": "PowerSGD calls an all-reduce when the one before it ends, when that is on each rank, and "
    "the sum of used parameters would come between them, in another order on each rank; with compress powersgd "
    "{setting} is {value}.",
    "option_of_model": "With the model {model} {setting} cannot be {value}: {reason}.",
    "option_of_mode": "{setting} does not apply to the mode {mode}: {reason}. It is {value}; leave it out.",
    "too_many_stages": "Each of the {stages} stages needs at least one layer, and {model} has {layers}; "
    "{setting} is {value}.",
    "old_torch": "A real run needs torch {floor} or newer; this is {value}. It can still be simulated.",
    "old_torch_gloo": "The mode {mode} needs torch {floor} or newer: older ones have no reduce_scatter on gloo, or no "
    "average in it; this is {value}. It can still be simulated.",
    "planned_only": "PyTorch has no schedule {value}, so it is planned and simulated, and cannot run.",
    "bad_schedule_file": "The order in {setting} cannot be run: {value}.",
    "of_schedule_file": "The order in schedule-file is for {setting} {wanted}; {setting} is {value}.",
    "batch_of_schedule_file": "The order in schedule-file has {microbatches} microbatches, which must divide what a "
    "replica gets of global-batch at a time; it is {value}.",
    "stages_of_schedule_file": "The order in {setting} has {value} stages, each of them with a layer; "
    "{model} has {layers}.",
    "compile_halves": "torch.compile makes one piece of a stage's backward, and this order ({order}) runs it in two "
    "halves; {setting} is {value}.",
    "compile_recomputes": "A stage that is compiled is not computed again (recompute): {reason}; {setting} is {value}.",
    "no_compiler": "{setting} {value} needs {missing}, which this machine lacks.",
    "blocked_on_gpus": "The order in {setting} cannot be run on GPUs, where a send waits for its receive: {value}. "
    "Use device cpu.",
    "split_sum": "split must give each of the {stages} stages at least one layer and add up to the model's {layers} "
    "layers; it is {value}.",
    "degree_divides": "{setting} must divide the number of devices ({devices}); it is {value}.",
    "degrees_of_devices": "{setting} times {other} ({degree}) must be the number of devices ({devices}); "
    "{setting} is {value}.",
    "degrees_product": "The degrees of a mesh ({degrees}) multiply to its number of devices; devices is {value}.",
    "degrees_splits": "The degrees of a mesh ({degrees}) multiply to its number of devices; devices is {value}, which "
    "could be {splits}.",
    "degrees_left": "The degrees given ({degrees}) leave a factor of {rest} of the {devices} devices to an axis, so "
    "one more is needed; {setting} is {value}.",
    "needs_axis": "{setting} is for a mesh whose degree {axis} is above 1; it is {value}. Leave it out.",
    "axis_of_model": "Keys and values that are made of a latent are not dealt out: a mesh for the model {model} can "
    "have {works}, and no {setting}; {setting} is {value}.",
    "schedule_of_mode": "The mode {mode} does not run the schedule {value}.",
    "not_countable": "FLOPs of a pass and bytes of a device are counted in 64 bits, up to 9.2e18; {setting} is "
    "{value}, with which there are {number}.",
    "norm_of_one": "The model {model} norms each token before its last matrix, and a norm over one number leaves its "
    "sign: what comes before would learn from rounding alone, so hidden must be 2 or more; it is {value}.",
    "heads_divide": "heads must divide hidden ({hidden}); it is {value}.",
    "top_k_of_experts": "top-k must not exceed the number of experts ({experts}); it is {value}.",
    "dataset_of_model": "The model {model} cannot learn from the dataset {value}.",
    "batch_too_large": "global-batch must not exceed the {samples} training samples of {dataset}; it is {value}.",
    "not_json": "A spec file holds one JSON object; {setting} does not: {value}.",
    "no_measurements": "A file of measurements is one JSON object with a list of entries; {setting} is not: {value}.",
    "no_file": "The file given as {setting} cannot be read: {value}.",
    "no_data": "The dataset cannot be used: {value}.",
    "no_gpu": "device cuda needs GPUs that torch can use; found {found}.",
    "more_ranks_than_gpus": "NCCL runs one rank a GPU, and there are {gpus}; devices is {value}. "
    "Use device cpu (gloo processes), or fewer devices.",
    "cannot_run_here": "A real run uses at most {high} processes on one machine; devices is {value}. "
    "It can still be simulated.",
    "planned_model": "With {setting} {value} a model can be planned and simulated; it is not built to run.",
    "kv_heads_divide": "kv-heads must divide heads ({heads}); it is {value}.",
    "impossible_machine": "A machine's {setting} must be {wanted}; it is {value}.",
    "dilation_of_paced": "dilation is the factor of a scale model (paced); it is {value}. Give paced too, or leave it "
    "out.",
    "paced_machine": "A scale model shows a machine that ranks do not share; {value} is this one, on which a run is "
    "paced by itself.",
    "paced_mode": "The mode {value} cannot be paced: its devices are threads of one process.",
    "paced_records": "A scale model keeps time where ops are recorded; record is {value}.",
    "paced_device": "The processes of a scale model compute on the CPU; device is {value}.",
    "paced_buckets": "The small gradients of a scale model fill no buckets at the same places as those that it shows; "
    "bucket-mb is {value}.",
    "paced_differs": "A scale model trains small tensors with the same ops, and here they would not be the same: rank "
    "{rank} would do {miniature} where it should do {pictured}. paced is {value}.",
    "paced_too_slow": "A step of the scale model would take {seconds} s, longer than a rank waits for another "
    "(timeout {timeout} s); dilation is {value}.",
    "cannot_be_run": "Ranks must not wait for each other for ever, as they would with {setting}: {value}.",
    "simulation_only": "The machine {value} is for simulation only.",
    "bad_fault": "A fault reads KIND@RANK:STEP or slow@RANK:STEP:SECONDS, with a rank and a step that the run has "
    "(step 0 where it is wrong from the start) and KIND one of {kinds}; it is {value}.",
    "bad_slow_rank": "slow-rank reads RANK:FACTOR, several with commas between them, {most} at most: ranks that "
    "there are, each once, and numbers from {low} to {high}; it is {value}.",
    "bad_slow_link": "slow-link reads RANK-RANK:FACTOR, several with commas between them, {most} at most: "
    "two ranks that there are, each pair once, and numbers from {low} to {high}; it is {value}.",
    "slow_is_simulated": "Devices and links of a real run are as fast as they are, so {setting} is for simulation "
    "and for scale models (paced); it is {value}. Leave it out; the fault slow makes a rank of a real run wait in "
    "each step.",
    "fault_with_peers": "The fault {value} is one among several processes, and here there is one.",
    "fault_of_targets": "The fault {value} is one among ranks with targets of their own (dp, fsdp, cp, ep), of which "
    "some are masked (masked).",
    "no_run": "There is no run with the id {value}.",
    "not_recorded": "The run {value} has no timeline: it has not ended, or nothing was recorded.",
    "no_trace": "A trace has a list traceEvents; {value} has none.",
    "trace_unreadable": "{value} cannot be read: {error}.",
    "trace_too_large": "A trace must not be larger than {most}; {value} is.",
    "trace_of_no_rank": "A trace must say of which rank it is (distributedInfo); {value} does not.",
    "trace_twice": "There must be one trace a rank; {value} is a second file of rank {rank}.",
    "trace_silent": "There are no collectives or messages in these traces.",
    "trace_alone": "Traces must be of all ranks: of no communication in these files are two ranks there.",
    "trace_counts": "Ranks must have taken part in the same collectives or messages, or they cannot be matched; among "
    "ranks {among} there are, by rank, {value}.",
    "trace_times": "What is in a trace must end no earlier than it begins, at a finite time; of rank {value} something "
    "does not.",
    "cannot_write": "The file given as {setting} cannot be written: {value}.",
    "no_place_for_runs": "The folder of runs ({setting}) must be one that can be written; {value}.",
    "bad_result": "The result of the run {value} cannot be read: it is missing, damaged, or of another version.",
    "bad_timeline": "The timeline of the run {value} cannot be read: it is damaged, or of another version.",
    "given_twice": "A setting has one value; {setting} is given twice, the second time as {value}.",
    "precision_here": "Predictions on the machine {machine} are made of what was measured there, in {measured}; "
    "{setting} is {value}. Another machine can be predicted with it.",
    "command_line": "The command line is not right: {value}. See --help.",
    "bad_resume": "resume is a run's id (letters, digits, dashes and underscores), or RUN_ID:STEP; {value} is not.",
    "no_checkpoint": "A run can be resumed from what it has saved (save-every); there is nothing saved as {value}.",
    "resume_differs": "A training that resumes {run} goes on with what it was begun with: there {setting} is {saved}; "
    "here it is {value}.",
    "resume_parameters": "The checkpoint {value} is of another model: these parameters differ: {parameters}.",
    "damaged_checkpoint": "A run is resumed from files that are as they were written; of the checkpoint {value} {file} "
    "is damaged or gone.",
    "resume_ends": "{setting} counts from the beginning of the training, and {run} has done {done} steps already; "
    "{setting} is {value}.",
    "bad_calibration": "The calibration in {setting} cannot be read: {value}.",
    "foreign_calibration": "A calibration holds for the machine that it was measured on; this one is of another "
    "({setting} {value}, here {here}).",
    "stale_calibration": "A calibration holds as long as the machine and torch are as they were; {setting} was "
    "{value}, and is {here}.",
    "old_calibration": "A calibration holds for {high} days; this one is {value} days old.",
    "bad_run_id": "A run id is letters, digits, dashes and underscores; {value} is not.",
    **SENTENCES,
}


def closest(name: str, known: typing.Iterable[str]) -> list[str]:
    """The known names most like `name`, best first; all of them when few and none is alike."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return near or (known if len(known) <= 16 else [])


def nearest(good: list[int], value: int, count: int = 3) -> list[int]:
    """The values of `good` nearest to `value`, in rising order."""
    return sorted(sorted(good, key=lambda g: (abs(g - value), g))[:count])
