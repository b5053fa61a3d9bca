"""Messages are short enough to be read at once."""

from tests.support.message_templates import templates

MAX_LETTERS = 160


def test_each_line_of_a_message_is_short() -> None:
    found = list(templates())
    assert len(found) > 300, "the sources give more messages"
    long = {each.place: each.text for each in found if max(map(len, each.text.splitlines())) > MAX_LETTERS}
    assert not long
