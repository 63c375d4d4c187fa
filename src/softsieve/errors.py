"""The one error of our own."""


class InputError(ValueError):
    """What the user gave cannot be used: data, a folder, a checkpoint. One line that says what and where.

    The command line prints it without a traceback and exits with 1.
    """
