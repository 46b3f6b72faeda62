"""Commands: `bucketwheel doctor` says what is there and what is missing, `flight` which rank stopped first,
`checkpoint` what a checkpoint holds and whether it is whole, `plan` how much memory a recorded step needs, `cache` which
native modules were built.

Uses `comm` and below, and `checkpoint`. Start with the command's own file.
"""
