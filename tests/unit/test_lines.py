"""What tests/lines.py counts as code."""

from tests.lines import native_code, python_code


def test_comments_are_no_code_and_strings_are_no_comments() -> None:
    text = (
        '/* a\n b */ int x; // c\n\nauto url = "http://x/*"; /* d */\nauto raw = R"(// e\n)";\nint n = 1\'000; // f\n'
    )
    code = native_code(text)
    assert [line.strip() for line in code] == [
        "int x;",
        'auto url = "http://x/*";',
        'auto raw = R"(// e',
        ')";',
        "int n = 1000;",
    ]


def test_docstrings_and_comments_of_python_are_no_code() -> None:
    text = '"""Doc.\n\nmore"""\nX = """\na string\n"""  # why\n\n\ndef f():\n    """Doc."""\n    # only this\n    return "#"\n'
    assert python_code(text) == ['X = """', "a string", '"""', "def f():", '    return "#"']
