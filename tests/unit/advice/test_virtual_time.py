"""Virtual time: who waits for whom, and when things are over."""

from __future__ import annotations

from rlinf_core.job.flow import Process, Receive, Use, VirtualTime


def test_a_device_serves_those_that_ask_one_after_the_other() -> None:
    clock, ends = VirtualTime(), list[tuple[str, float]]()

    def worker(name: str, device: str | None) -> Process:
        yield Use(device, 2.0)
        ends.append((name, clock.now))

    for name, device in (("first", "gpu"), ("second", "gpu"), ("alone", None), ("elsewhere", "other")):
        clock.start(worker(name, device))
    clock.run()
    assert ends == [("first", 2.0), ("alone", 2.0), ("elsewhere", 2.0), ("second", 4.0)]
    assert clock.busy == {"gpu": 4.0, "other": 2.0}


def test_a_wait_ends_with_the_last_of_its_messages() -> None:
    clock, ends = VirtualTime(), list[tuple[str, float]]()

    def waiter(name: str, number: int) -> Process:
        yield Receive("box", number)
        ends.append((name, clock.now))

    clock.start(waiter("three", 3))
    clock.start(waiter("one", 1))
    for moment in (1.0, 2.0, 3.0, 4.0):
        clock.put("box", moment)
    clock.run()
    assert ends == [("three", 3.0), ("one", 4.0)]


def test_it_stops_when_told_to() -> None:
    clock = VirtualTime()

    def endless() -> Process:
        while True:
            yield Use(None, 1.0)
            if clock.now >= 3:
                clock.stop()
                return

    clock.start(endless())
    clock.run()
    assert clock.now == 3.0
