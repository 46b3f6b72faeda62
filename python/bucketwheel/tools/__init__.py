"""Commands: `python -m bucketwheel doctor` says what is there and what is missing, `flight` which rank stopped first.

Uses `comm` and below. Start with the command's own file.
"""
