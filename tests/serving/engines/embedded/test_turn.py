from __future__ import annotations

import threading
import time

import pytest

from serving.engines.embedded.turn import StepTurn


def test_turns_are_taken_in_order_of_asking():
    turn, order = StepTurn(), []
    threads: list[threading.Thread] = []

    def take(name: int) -> None:
        with turn:
            order.append(name)

    with turn:
        for name in range(6):
            thread = threading.Thread(target=take, args=(name,))
            thread.start()
            threads.append(thread)
            while turn.num_waiting <= name:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(6))


def test_one_holder_at_a_time_and_everybody_gets_a_turn():
    turn, inside, taken = StepTurn(), [0], [0] * 4

    def work(name: int) -> None:
        for _ in range(300):
            with turn:
                inside[0] += 1
                assert inside[0] == 1
                inside[0] -= 1
                taken[name] += 1

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [300] * 4


def test_an_exception_passes_the_turn_on():
    turn = StepTurn()
    with pytest.raises(ValueError, match="x"), turn:
        raise ValueError("x")
    with turn:
        pass
