"""Who made others wait in a collective is found by the order in which ranks came, never by how long they stayed."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from engine import __main__ as command_line
from engine.analysis.stragglers import Calls, Inside, Straggler, inside, late, named, stragglers, waiting_share
from engine.analysis.traces import communications

# When each of 8 ranks came to its k-th NCCL kernel, and when that ended: microseconds, from PyTorch profiler traces of
# one step of DLRM on 8 GPUs (github.com/facebookresearch/param), read off the events of the category "kernel".
DLRM = {
    0: (
        (5489, 7635),
        (0, 7635),
        (7116, 7634),
        (1502, 7634),
        (2752, 7634),
        (2955, 7634),
        (7119, 7633),
        (7624, 7634),
    ),
    5: (
        (13483, 13997),
        (13452, 13997),
        (13528, 13996),
        (13453, 13995),
        (13934, 13995),
        (13986, 13996),
        (13511, 13994),
        (13638, 13995),
    ),
    6: (
        (13999, 14600),
        (13998, 14599),
        (14027, 14599),
        (13997, 14599),
        (14532, 14602),
        (14581, 14601),
        (14002, 14604),
        (14133, 14601),
    ),
    7: (
        (15078, 16030),
        (15105, 16027),
        (15117, 16032),
        (15146, 16025),
        (15963, 16032),
        (15949, 16028),
        (15112, 16032),
        (15225, 16028),
    ),
}


def calls_of(table: dict[int, tuple]) -> Calls:
    rows = [(call, rank, *times) for call, each in table.items() for rank, times in enumerate(each)]
    return Calls(*(np.array(column) for column in zip(*rows, strict=True)))


def test_the_culprit_has_the_shortest_collective():
    """Collective 0: rank 7 is in it for 10 us, rank 1 for 7,635, of which it waits for all but 11."""
    calls = calls_of({0: DLRM[0]})
    found, inside = late(calls), calls.ended - calls.came
    assert found.last.tolist() == [7]
    assert (inside[7], inside[1]) == (10, 7635) and inside.argmin() == 7
    assert found.longest[0] == 7624 and found.ends_apart[0] == 2
    assert waiting_share(calls)[1] == pytest.approx(0.999, abs=5e-4)
    assert waiting_share(calls)[7] == 0.0
    assert found.waited[0] == pytest.approx(np.mean([7624 - came for came, _ in DLRM[0][:7]]))


def test_whoever_comes_last_to_several_is_a_straggler():
    found = late(calls_of(DLRM))
    assert dict(zip(found.call.tolist(), found.last.tolist(), strict=True)) == {0: 7, 5: 5, 6: 5, 7: 4}
    blamed = {one.rank: (one.last, one.calls) for one in stragglers(calls_of(DLRM))}
    assert blamed == {7: (1, 4), 5: (2, 4), 4: (1, 4)}
    # Of all waiting in these four, rank 7 caused the most.
    assert [one.rank for one in named(stragglers(calls_of(DLRM)), seconds=16032)] == [7]


def test_ranks_that_come_together_blame_nobody():
    even = calls_of({0: ((3.0, 5.0), (3.0, 5.0)), 1: ((6.0, 9.0), (6.0, 9.0))})
    assert late(even).last.tolist() == [-1, -1]
    assert stragglers(even) == [] and waiting_share(even).tolist() == [0.0] * 4


def test_a_little_late_in_turn_is_no_straggler():
    """Each of two ranks is last once, by as much; and one that is last by very little is not worth a name."""
    turns = calls_of({0: ((0.0, 2.0), (1.0, 2.0)), 1: ((4.0, 5.0), (3.0, 5.0))})
    assert [one.rank for one in stragglers(turns)] == [0, 1]
    assert named(stragglers(turns), seconds=5.0) == []
    barely = [Straggler(1, 1, 1, 0.01)]
    assert named(barely, seconds=5.0) == [] and named(barely, seconds=0.1) == barely


def test_nobody_leaves_before_coming():
    with pytest.raises(ValueError, match="leaves a collective no earlier"):
        late(calls_of({0: ((1.0, 0.5),)}))
    assert late(Calls(*(np.array([]) for _ in range(4)))).last.tolist() == []


def write_traces(folder, table, *, base: int = 1_694_128_201_000_000) -> list:
    """Of each rank a file like the profiler's, with events beside the collectives."""
    paths = []
    for rank in range(8):
        events = [
            {"ph": "M", "name": "process_name", "args": {}},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1},
        ]
        for call in sorted(table, reverse=True):  # in no order
            came, ended = table[call][rank]
            name = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)"
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": base + came, "dur": ended - came})
            events.append({"ph": "X", "cat": "user_annotation", "name": "nccl:all_to_all", "ts": base, "dur": 9})
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        paths.append(folder / f"worker{rank}.json.gz")
        with gzip.open(paths[-1], "wt") as file:
            json.dump({"distributedInfo": info, "traceEvents": events}, file)
    return paths


def test_profiler_traces_are_read_one_file_a_rank(tmp_path):
    seen = communications(write_traces(tmp_path, DLRM)[::-1])
    assert seen.names == ["ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"] * 4
    assert (seen.ends, seen.unmatched) == ([None] * 4, 0)
    found = late(seen.calls)
    assert found.last.tolist() == [7, 5, 5, 4]
    np.testing.assert_allclose(found.longest, [7624e-6, 534e-6, 584e-6, 885e-6], rtol=1e-9)


def test_traces_that_cannot_be_matched_are_refused_in_a_sentence(tmp_path):
    paths = write_traces(tmp_path, DLRM)
    with pytest.raises(ValueError, match="second file of rank 3"):
        communications([*paths, paths[3]])
    (tmp_path / "short").mkdir()
    other = write_traces(tmp_path / "short", {0: DLRM[0]})[0]
    with pytest.raises(ValueError, match="must have taken part in the same"):
        communications([*paths[1:], other])
    for text, reason in (
        ("{", "cannot be read"),
        ("[]", "has a list traceEvents"),
        ('{"traceEvents": []}', "must say of which rank"),
        ('{"traceEvents": [], "distributedInfo": {"rank": 0}}', "There are no collectives"),
    ):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            communications([tmp_path / "odd.json"])
    with pytest.raises(ValueError, match="cannot be read"):
        communications([tmp_path / "missing.json"])


PIPELINE = {
    # Two stages on ranks 0 and 1, then two on 2 and 3: kernels as (start, end, sender, receiver) in us.
    0: [(0, 900, 0, 1), (1000, 1100, 0, 1), (1200, 5000, 1, 0)],
    1: [(700, 900, 0, 1), (1080, 1100, 0, 1), (4900, 5000, 1, 0)],
    2: [(0, 950, 2, 3), (2000, 6000, 3, 2)],
    3: [(750, 950, 2, 3), (5900, 6000, 3, 2)],
}


def write_pipeline(folder, ranks=(0, 1, 2, 3), *, more=()) -> list:
    """With what PyTorch notes at a kernel (torch/csrc/profiler/util.h), and an all-reduce of each pair of stages."""
    paths = []
    for rank in ranks:
        events = [
            (start, end, "ncclDevKernel_SendRecv(x)", {"Collective name": "send", "Src Rank": a, "Dst Rank": b})
            for start, end, a, b in PIPELINE[rank]
        ]
        pair = rank % 2, rank % 2 + 2
        group = {"Process Group Ranks": str([*pair]), "Process Group Name": str(pair[0])}
        events += [(7000 + 100 * rank, 8000 + pair[0], "ncclDevKernel_AllReduce(x)", group), *more]
        told = [
            {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}
            for start, end, name, args in events
        ]
        paths.append(folder / f"rank{rank}.json")
        info = {"backend": "nccl", "rank": rank, "world_size": 4}
        paths[-1].write_text(json.dumps({"distributedInfo": info, "traceEvents": told}))
    return paths


def test_a_message_is_parted_into_waiting_and_transfer_by_when_its_other_end_came(tmp_path):
    """sail-sg/zero-bubble#73: a pipeline's bubble is inside of SendRecv kernels, which are as long as the wait for the
    peer. Stages send different numbers of messages, and groups of ranks call their own collectives."""
    seen = communications(write_pipeline(tmp_path))
    assert seen.ends == [(0, 1), (2, 3), (0, 1), (1, 0), (3, 2), None, None]
    assert late(seen.calls).last.tolist() == [1, 3, 1, 1, 3, 2, 3]
    assert seen.unmatched == 0
    by_rank = {one.rank: one for one in inside(seen.calls)}
    assert by_rank[0] == Inside(
        0, pytest.approx((700 + 80 + 3700 + 200) * 1e-6), pytest.approx((200 + 20 + 100 + 800) * 1e-6)
    )
    assert by_rank[1].waiting == pytest.approx(200e-6)
    assert by_rank[2] == Inside(2, pytest.approx((750 + 3900) * 1e-6), pytest.approx((200 + 100 + 800) * 1e-6))


def test_what_no_other_file_has_is_left_out_and_counted(tmp_path):
    """Rank 3 is not there; and a kernel of several messages does not say whose it is (`coalesced`, or nothing)."""
    several = [(9000, 9100, "ncclDevKernel_SendRecv(x)", args) for args in ({"Collective name": "coalesced"}, {})]
    seen = communications(write_pipeline(tmp_path, (0, 1, 2), more=several))
    assert seen.ends == [(0, 1), (0, 1), (1, 0), None]
    assert seen.unmatched == 2 + 1 + 3 * 2  # rank 2's messages, rank 1's all-reduce with 3, those of all three ranks
    with pytest.raises(ValueError, match="of no communication in these files are two ranks there"):
        communications(write_pipeline(tmp_path, (0, 3)))


def test_ends_of_messages_that_were_not_sent_as_often_as_received_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(PIPELINE, 1, PIPELINE[1][1:])
    with pytest.raises(ValueError, match=r'ranks 0 → 1 .*\{"0": 2, "1": 1\}'):
        communications(write_pipeline(tmp_path))


def test_the_command_line_tells_how_a_rank_spent_its_time_in_messages(tmp_path, capsys):
    assert command_line.main(["stragglers", *map(str, write_pipeline(tmp_path, (0, 1, 2)))]) == 0
    out = capsys.readouterr().out
    assert "ncclDevKernel_SendRecv, 1 to 0" in out
    assert "for others to come" in out and "3 left out" in out


def test_the_command_line_names_who_came_last(tmp_path, capsys):
    paths = [str(path) for path in write_traces(tmp_path, DLRM)]
    assert command_line.main(["stragglers", *paths, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["last"] for one in report["collectives"]] == [7, 5, 5, 4]
    assert report["ranks"][0]["rank"] == 7
    assert command_line.main(["stragglers", *paths]) == 0
    assert "rank 7 last; the first waits 7.62 ms" in capsys.readouterr().out
    assert command_line.main(["stragglers", paths[0], paths[0]]) == 2
    assert "second file of rank 0" in capsys.readouterr().err
