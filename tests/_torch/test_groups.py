"""What torch says of process groups, as the rest of the package reads it."""

import json
from typing import Any
from unittest import mock

import torch

from lightning_megatron._torch.groups import DEVICE_RECORDER, ON_HOST, flight_recorder
from lightning_megatron.fault_tolerance.hangs.flight_recorder import (
    Collective,
    counts,
    first_missing,
    group_names,
    latest,
    open_on_device,
)

C10D: Any = torch._C._distributed_c10d


def dump(backend: str, group: str, number: int, completed: int, state: str) -> str:
    """Records of one recorder, of one group with the number 0."""
    entry = {
        **{"process_group": [group, "mesh_tp"], "pg_id": 0, "collective_seq_id": number},
        **{"profiling_name": f"{backend}:all_reduce", "input_sizes": [[4]], "is_p2p": False},
        **{"state": state, "retired": state == "completed", "time_created_ns": number},
    }
    said = {"last_enqueued_collective": str(number), "last_completed_collective": str(completed)}
    return json.dumps({"entries": [entry], "pg_status": {"0": said}})


def recorded(host: str, device: str) -> dict[str, Any]:
    """What is read where torch has both recorders."""
    with (
        mock.patch.object(C10D, "_dump_fr_trace_json", return_value=host),
        mock.patch.object(C10D, "_dump_nccl_trace_json", return_value=device, create=True),
    ):
        return flight_recorder(entries=True)


def test_collectives_of_both_recorders_are_read() -> None:
    """Each counts its groups from 0; on GPUs it is NCCL's that has those of training."""
    found = recorded(dump("gloo", "1", 8, 8, "completed"), dump("nccl", "7", 3, 2, "started"))
    last = {entry["group"]: entry for entry in latest(found)}
    assert {name: (e["number"], e["completed"]) for name, e in last.items()} == {
        "1": (8, True),
        "7": (3, False),
    }
    assert counts(found["pg_status"], group_names(found)) == {"1": [8, 8], "7": [3, 2]}
    assert open_on_device(found["pg_status"], DEVICE_RECORDER) == {f"{DEVICE_RECORDER}0": (3, 2)}


def test_a_collective_on_gpus_that_a_rank_has_not_begun_is_found() -> None:
    host = dump("gloo", "1", 8, 8, "completed")
    seen = {
        rank: [Collective(**entry) for entry in latest(recorded(host, device))]
        for rank, device in enumerate(
            (dump("nccl", "7", 3, 2, "scheduled"), dump("nccl", "7", 2, 2, "completed"))
        )
    }
    missing = first_missing(seen, {"1": [0, 1], "7": [0, 1]})
    assert missing is not None
    assert (missing.collective.group, missing.ranks) == ("7", (1,))


def test_the_two_halves_of_a_group_are_counted_apart() -> None:
    """A group of "cpu:gloo,cuda:nccl" is in both recorders, under one name."""
    found = recorded(dump("gloo", "0", 9, 9, "completed"), dump("nccl", "0", 5, 5, "completed"))
    numbers = {entry["group"]: entry["number"] for entry in latest(found)}
    assert numbers == {"0": 5, f"0{ON_HOST}": 9}


def test_a_torch_without_nccl_has_one_recorder() -> None:
    host = dump("gloo", "1", 2, 2, "")
    with mock.patch.object(C10D, "_dump_fr_trace_json", return_value=host):
        found = flight_recorder(entries=True)
    assert counts(found["pg_status"], group_names(found)) == {"1": [2, 2]}
