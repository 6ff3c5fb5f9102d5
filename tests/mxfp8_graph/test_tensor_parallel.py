"""Rewritten programs with their weights split among processes compute what one process computes."""

from __future__ import annotations

import pytest
from grids import looped

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

import tensor_parallel_checks as checks  # noqa: E402
from process_pool import ProcessPool  # noqa: E402

pytestmark = pytest.mark.processes

PRESETS = ["mxfp8", "mxfp8-weight-only", "mxint8"]


@looped("unflatten", [False, True])
def test_a_decoder_trains(two: ProcessPool, unflatten: bool) -> None:
    two(checks.decoders_train, unflatten)


def test_gradients_of_a_column_and_a_row_are_those_of_one_process(two: ProcessPool) -> None:
    two(checks.gradients_of_an_mlp_are_those_of_one_process)


@looped("training", [True, False])
def test_columns_give_the_bits_of_one_process(two: ProcessPool, training: bool) -> None:
    two(checks.columns_are_bitwise, training)


@looped("recipe", PRESETS)
def test_a_packed_decoder_runs_with_half_of_the_planned_bytes(two: ProcessPool, recipe: str) -> None:
    two(checks.packed_decoders_run, recipe)


@looped("recipe", PRESETS)
def test_a_packed_row_is_within_its_bound(two: ProcessPool, recipe: str) -> None:
    two(checks.packed_rows_are_within_their_bound, recipe)


def test_a_sequence_that_is_sharded_stays_so(two: ProcessPool) -> None:
    two(checks.sequences_stay_sharded)


def test_packed_weights_pass_gradients_on(two: ProcessPool) -> None:
    two(checks.adapters_train_on_packed_weights)


def test_trained_values_go_back_into_the_program(two: ProcessPool) -> None:
    two(checks.trained_values_go_back_into_the_program)


def test_a_module_without_values_gets_them_from_one_process(two: ProcessPool) -> None:
    two(checks.modules_without_values_get_them_from_one_process)


def test_parameters_may_be_distributed_by_hand(two: ProcessPool) -> None:
    two(checks.parameters_may_be_distributed_by_hand)


def test_the_report_says_what_cannot_be_split_and_why(two: ProcessPool) -> None:
    two(checks.reports_what_cannot_be_split)


def test_wrong_calls_are_errors_that_say_what_to_do(two: ProcessPool) -> None:
    two(checks.refuses)


@pytest.mark.slow
@looped("unflatten", [False, True])
def test_a_decoder_trains_in_four_processes(four: ProcessPool, unflatten: bool) -> None:
    four(checks.decoders_train, unflatten)


@pytest.mark.slow
@looped("recipe", PRESETS)
def test_a_packed_decoder_runs_in_four_processes(four: ProcessPool, recipe: str) -> None:
    four(checks.packed_decoders_run, recipe)


@pytest.mark.slow
def test_data_and_tensors_are_split_at_once(four: ProcessPool) -> None:
    four(checks.data_and_tensors_are_split_at_once)
