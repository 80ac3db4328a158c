"""What torchmetrics' tests use of the package of this name, where it is not installed: nothing is cached."""


def cachier(**options):
    """Return a decorator that leaves a function as it is."""
    return lambda function: function
