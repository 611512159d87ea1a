"""Updates from other threads to the queues of an event loop, and how often these wake it."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
from everycast.engine.async_streams import Updates, _to_event_loop
from everycast.engine.text_sink import RequestUpdate
from everycast.engine.token_sink import Usage


def update(number: int) -> RequestUpdate:
    return RequestUpdate(number, (), (), Usage(0, 0, 0), is_finished=False)


def in_thread(work: Callable[[], None]) -> None:
    """Does the work in another thread while this one, and its event loop, waits."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_step_wakes_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        event_loop = asyncio.get_running_loop()
        wakeups = []
        wake = event_loop.call_soon_threadsafe

        def count(*args: object) -> None:
            wakeups.append(args)
            wake(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(event_loop, "call_soon_threadsafe", count)
        queues = [Updates() for _ in range(3)]
        emits = [_to_event_loop(queue) for queue in queues]
        for step in range(2):
            in_thread(lambda: [emit(update(i)) for emit in emits for i in range(4)])
            assert len(wakeups) == step + 1
            for queue in queues:
                received = [(await queue.get()).prompt_index for _ in range(4)]
                assert received == [0, 1, 2, 3] and queue.empty()

    asyncio.run(main())


def test_updates_arrive_in_order_while_others_are_taken() -> None:
    async def main() -> None:
        queues = [Updates() for _ in range(4)]
        emits = [_to_event_loop(queue) for queue in queues]
        thread = threading.Thread(
            target=lambda: [emit(update(i)) for i in range(2000) for emit in emits]
        )
        thread.start()
        for i in range(2000):
            for queue in queues:
                assert (await asyncio.wait_for(queue.get(), 20)).prompt_index == i
        thread.join()

    asyncio.run(main())


def test_a_closed_event_loop_is_refused_each_time_and_freed() -> None:
    async def main() -> tuple[Callable[[RequestUpdate], None], weakref.ref[object]]:
        return _to_event_loop(Updates()), weakref.ref(asyncio.get_running_loop())

    emit, event_loop = asyncio.run(main())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            emit(update(0))
    del emit
    gc.collect()
    assert event_loop() is None
