import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from thunder_xform.testing import RankPool, RanksFailed, run_ranks


class Box:
    def __init__(self, value):
        self.value = value


def add_ranks(box, *, factor=1):
    assert torch.get_num_threads() == 1
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return Box(total.item() * factor + box.value), os.getpid()


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("the second rank is unhappy")
    dist.barrier()


def fail_on_all():
    raise ValueError(f"unhappy {dist.get_rank()}")


def hang_on_one():
    if dist.get_rank() == 0:
        time.sleep(1000)


def die():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def return_lambda():
    return lambda: None


def in_subgroups():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value, group=groups[dist.get_rank() // 2])
    return value.item()


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=60, preload=()) as pool:
        yield pool


def test_values_come_back_by_rank_and_processes_are_reused(pool):
    first = pool.run(add_ranks, Box(0.5), factor=2)
    second = pool.run(add_ranks, Box(0.0))
    assert [box.value for box, _ in first] == [6.5, 6.5]
    assert [box.value for box, _ in second] == [3.0, 3.0]
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert first[0][1] != first[1][1]


def test_a_failure_on_one_rank_reports_all_of_them_and_the_pool_recovers(pool):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="fail_on_one failed on rank 1 of 2") as caught:
        pool.run(fail_on_one)
    assert time.monotonic() - start < 40
    assert "ValueError: the second rank is unhappy" in caught.value.reports[1]
    assert "in fail_on_one" in caught.value.reports[1]
    assert "still running" in caught.value.reports[0]
    assert "in barrier" in caught.value.reports[0]
    with pytest.raises(RanksFailed, match="on rank 0, 1 of 2") as caught:
        pool.run(fail_on_all)
    assert "unhappy 0" in str(caught.value)
    assert "unhappy 1" in str(caught.value)


def test_a_death_is_reported_with_its_stack(pool):
    with pytest.raises(RanksFailed) as caught:
        pool.run(die)
    assert "SIGSEGV" in caught.value.reports[1]
    assert "in die" in caught.value.reports[1]


def test_a_result_that_cannot_be_pickled_is_a_failure(pool):
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(return_lambda)


def test_a_hang_is_killed_with_stacks_of_the_hanging_rank():
    with RankPool(2, timeout=60, preload=()) as pool:
        pool.run(add_ranks, Box(0.0))  # so that loading this file does not count
        pool.timeout = 1
        with pytest.raises(RanksFailed, match="not done after 1 s on rank 0") as caught:
            pool.run(hang_on_one)
        assert "in hang_on_one" in caught.value.reports[0]
        assert caught.value.reports[1] == "returned"


def test_subgroups_of_four():
    with RankPool(4, preload=()) as pool:
        assert pool.run(in_subgroups) == [1.0, 1.0, 5.0, 5.0]


def thunder_is_imported():
    return "thunder" in sys.modules


def test_one_rank_with_thunder():
    assert run_ranks(thunder_is_imported, 1) == [True]


def test_what_cannot_be_sent_is_refused_before_anything_runs(pool):
    before = pool.run(os.getpid)
    with pytest.raises((AttributeError, TypeError), match=r"lambda|pickle"):
        pool.run(lambda: None)
    assert pool.run(os.getpid) == before


@pytest.mark.parametrize(("size", "timeout"), [(0, 1), (2, 0)])
def test_nonsense_sizes(size, timeout):
    with pytest.raises(ValueError, match="Make both positive"):
        RankPool(size, timeout)
