from everycast.engine.stop_checker import StopChecker
from hypothesis import given
from hypothesis import strategies as st

SMALL = st.text("ab\n", max_size=12)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    checker = StopChecker(stops)
    shown = []
    for piece in pieces:
        result = checker.push(piece)
        shown.append(result.text)
        if result.stop is not None:
            return shown, result.stop
    return [*shown, checker.finish()], None


def test_stop_over_several_tokens_shows_nothing() -> None:
    shown, stop = run(["DEFGHIJ"], ["D", "EF", "G", "HI", "J", "K"])
    assert ("".join(shown), stop) == ("", "DEFGHIJ")


def test_false_start_is_released_at_once() -> None:
    assert run(["\n", "Alice:"], [" Alice", "!"]) == ([" ", "Alice!", ""], None)


def test_false_start_is_released_at_the_end() -> None:
    assert run(["Alice:"], [" Alice"]) == ([" ", "Alice"], None)


def test_the_restart_inside_a_false_start_is_seen() -> None:
    assert run(["aab"], ["aa", "a", "b"]) == (["", "a", ""], "aab")


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(["abcde", "cd"], ["abcdef"]) == (["ab"], "cd")
    assert run(["d", "abcd"], ["xabcdef"]) == (["x"], "abcd")


def test_no_stops() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.lists(SMALL, max_size=8),
)
def test_equals_a_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    shown, stop = run(stops, pieces)
    if ends:
        end, length, expected = min(ends)
        assert (stop, "".join(shown)) == (expected, text[: end + length])
    else:
        assert (stop, "".join(shown)) == (None, text)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), pieces=st.lists(SMALL))
def test_nothing_is_held_back_longer_than_needed(stops: list[str], pieces: list[str]) -> None:
    checker = StopChecker(stops)
    text = shown = ""
    for piece in pieces:
        result = checker.push(piece)
        text += piece
        shown += result.text
        if result.stop is not None:
            return
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
