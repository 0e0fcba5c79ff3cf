"""The error that every wrong input of this package raises."""


class DataError(ValueError):
    """Data, a setting of the data, or a saved position cannot be used.

    The message names the file or the setting, its value, the rule that it breaks and what to do.
    """
